/* ranks.h - runs a function as N ranks, threads of this process or processes of their own. */
#ifndef TIDE_CLI_RANKS_H
#define TIDE_CLI_RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tide/tide.h"

typedef struct rank_start {
    uint32_t rank, n_ranks;
    tide_allgather_fn allgather; /* fails on all ranks once a rank's function has returned nonzero */
    void *allgather_context;
    void *job;
} rank_start;

/* Memory that ranks of either kind share with their starter; zeroed; NULL when there is none. */
void *ranks_alloc(size_t bytes);
void ranks_free(void *memory, size_t bytes);

/* Runs fn on every rank and returns when all have ended: 0 if all returned 0. Otherwise the first nonzero result, or -1
 * for a rank that could not be started or was killed, with the reason in `text`. Everything that a process changes
 * outside of ranks_alloc memory is lost. */
int ranks_run(uint32_t n_ranks, bool procs, int (*fn)(const rank_start *start), void *job, char *text,
              size_t text_bytes);

#endif
