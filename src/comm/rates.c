/*
 * rates.c - what the planner is fed with at run time: the file that TIDE_MACHINE names, agreed between ranks.
 *
 * Ranks may have measured different rates. All plan with the worst value of each key, so that they plan alike and no rank
 * is expected to be faster than it is (paper App. G).
 */
#include <errno.h>
#include <stdlib.h>

#include "comm/comm.h"

enum { N_KEYS = (sizeof(plan_machine) - PLAN_MACHINE_NAME) / sizeof(double) };
_Static_assert((int)N_KEYS <= (int)COMM_FIELDS, "one exchange holds all keys");

int comm_rates_read(plan_machine *out, bool *given)
{
    const char *name = getenv("TIDE_MACHINE");
    char *text = NULL;
    size_t bytes;
    FILE *file;
    int status;

    *given = name && name[0];
    if (!*given)
        return TIDE_OK;
    file = fopen(name, "r");
    if (!file)
        return tide_fail(TIDE_ERR_ARGUMENT, "TIDE_MACHINE: %s: %s, expected a machine file", name, strerror(errno));
    status = tide_read_text(file, "TIDE_MACHINE", name, PLAN_MACHINE_BYTES, &text, &bytes);
    if (status == TIDE_OK)
        status = plan_machine_parse(name, text, bytes, out);
    tide_free(text);
    fclose(file);
    return status;
}

int comm_rates_agree(const fab_open *open, int64_t *scratch, plan_machine *m)
{
    double own[N_KEYS], *all = (double *)scratch;
    int status;

    for (uint32_t i = 0; i < N_KEYS; i++)
        own[i] = plan_machine_get(m, i);
    status = fab_allgather(open, own, all, sizeof own);
    for (uint32_t r = 0; status == TIDE_OK && r < open->n_ranks; r++) {
        for (uint32_t i = 0; i < N_KEYS; i++) {
            double *key = (double *)((char *)m + plan_machine_keys[i].offset), theirs = all[r * N_KEYS + i];
            bool worse = plan_machine_keys[i].unit == UNIT_TIME ? theirs > *key : theirs < *key;
            if (worse)
                *key = theirs;
        }
    }
    return status;
}
