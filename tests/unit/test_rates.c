/* test_rates.c - TIDE_MACHINE: ranks as processes, each with a machine file of its own; all plan with the worst rates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../harness/processes.h"
#include "comm/comm.h"

enum { RANKS = 4, LOCAL = 2, PATH = 96, ROWS = 4096 };

typedef struct report { int status; char text[512]; uint64_t digest; tide_options options; } report;
typedef struct job {
    const char *files[RANKS]; /* of each rank; NULL: none */
    report *reports;
} job;

static plan_machine machine(double nic, double sum, double wait)
{
    plan_machine m = {.name = "test"};
    for (uint32_t i = 0; i < plan_machine_n_keys; i++)
        *(double *)((char *)&m + plan_machine_keys[i].offset) =
            plan_machine_keys[i].unit == UNIT_TIME ? 1e-6 : plan_machine_keys[i].unit == UNIT_FLAG ? 0 : 64e9;
    m.nic_rate = nic;
    m.sum_cta_rate = sum;
    m.round_wait = wait;
    return m;
}

static int to_file(void *file, const char *text, size_t bytes)
{
    return fwrite(text, 1, bytes, file) != bytes;
}

static void write_machine(const char *path, const plan_machine *m)
{
    FILE *f = fopen(path, "w");
    tide_text t = {to_file, f, TIDE_OK};
    assert_non_null(f);
    plan_machine_print(m, &t);
    assert_int_equal(t.status, TIDE_OK);
    assert_int_equal(fclose(f), 0);
}

static const tide_param param = {"p", 2, 0, {ROWS, 512}};

static tide_group_desc description(void)
{
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    d.n_params = 1;
    d.params = &param;
    return d;
}

static int plan_on_rank(const processes_rank *rank, report *r)
{
    tide_group_desc group = description();
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_bootstrap *bootstrap = NULL;
    tide_comm *comm = NULL;
    tide_group *g;
    int status = tide_bootstrap_local(rank->path, rank->rank, RANKS, 20000, &bootstrap);

    desc.rank = rank->rank;
    desc.n_ranks = RANKS;
    desc.node_size = LOCAL;
    desc.allgather = tide_bootstrap_allgather;
    desc.allgather_context = bootstrap;
    if (status == TIDE_OK)
        status = tide_comm_create(&desc, &comm);
    if (status == TIDE_OK)
        status = tide_groups_create(comm, &group, 1, &g);
    if (status == TIDE_OK) {
        r->digest = tide_plan_digest(g->set->plan);
        r->options = g->set->plan->options;
    } else {
        snprintf(r->text, sizeof r->text, "%s", tide_last_error());
    }
    tide_comm_destroy(comm);
    tide_bootstrap_destroy(bootstrap);
    return status;
}

static void rank_main(const processes_rank *rank)
{
    const job *j = rank->context;
    report *r = &j->reports[rank->rank];
    if (j->files[rank->rank])
        setenv("TIDE_MACHINE", j->files[rank->rank], 1);
    r->status = plan_on_rank(rank, r);
}

static void run(const char *const files[RANKS], report *reports)
{
    job j = {.reports = reports};
    int how[RANKS];

    memcpy(j.files, files, sizeof j.files);
    memset(reports, 0, RANKS * sizeof *reports);
    assert_true(processes_run(RANKS, rank_main, &j, 0, 30, how) >= 0);
    for (int r = 0; r < RANKS; r++)
        assert_int_equal(how[r], 0);
}

static void planned(const plan_machine *m, int64_t multicast, tide_plan **plan)
{
    tide_topology topology = {sizeof topology, RANKS / LOCAL, LOCAL};
    tide_group_desc group = description();
    tide_options options = TIDE_OPTIONS_INIT;
    options.multicast = multicast;
    assert_int_equal(m ? plan_machine_create(m, &topology, &group, 1, &options, plan)
                       : tide_plan_create(&topology, &group, 1, &options, plan), TIDE_OK);
}

static void the_worst_of_all_ranks(void **state)
{
    report *r = processes_shared(RANKS * sizeof *r);
    const plan_machine given[3] = {machine(40e9, 100e9, 1e-3), machine(80e9, 50e9, 2e-6), machine(60e9, 70e9, 2e-6)};
    const plan_machine worst = machine(40e9, 50e9, 1e-3);
    char path[3][PATH];
    const char *const same[RANKS] = {path[1], path[1], path[1], path[1]}, *const none[RANKS] = {NULL};
    const char *const mixed[RANKS] = {path[0], path[1], path[2], path[2]};
    tide_plan *expected[3];
    (void)state;

    assert_non_null(r);
    for (int i = 0; i < 3; i++) {
        snprintf(path[i], PATH, "/tmp/tide-rates-%d-%d", (int)getpid(), i);
        write_machine(path[i], &given[i]);
    }
    run(mixed, r);
    planned(&worst, r[0].options.multicast, &expected[0]);
    planned(&given[1], r[0].options.multicast, &expected[1]);
    planned(NULL, r[0].options.multicast, &expected[2]);
    assert_true(tide_plan_digest(expected[0]) != tide_plan_digest(expected[1]));
    assert_true(tide_plan_digest(expected[0]) != tide_plan_digest(expected[2]));
    for (int i = 0; i < RANKS; i++) {
        assert_string_equal(r[i].text, "");
        assert_true(r[i].digest == tide_plan_digest(expected[0]));
        assert_int_equal(r[i].options.c_sum, 3); /* 1.5 x (2 x 2 / 4 + 1) x 40 / 50, rounded up */
    }
    run(same, r);
    for (int i = 0; i < RANKS; i++)
        assert_true(r[i].digest == tide_plan_digest(expected[1]));
    run(none, r); /* the library's own rates */
    for (int i = 0; i < RANKS; i++)
        assert_true(r[i].digest == tide_plan_digest(expected[2]));
    for (int i = 0; i < 3; i++) {
        tide_plan_destroy(expected[i]);
        unlink(path[i]);
    }
    processes_unshare(r, RANKS * sizeof *r);
}

/* The same error on every rank: of a rank without a machine, and of one whose file is bad or missing. */
static void all_ranks_or_none(void **state)
{
    report *r = processes_shared(RANKS * sizeof *r);
    const plan_machine m = machine(40e9, 50e9, 1e-3);
    char good[PATH], bad[PATH], expected[512];
    const char *const partly[RANKS] = {good, good, NULL, good}, *const wrong[RANKS] = {good, bad, good, good},
                      *const missing[RANKS] = {good, "/nowhere/m.txt", good, good};
    FILE *f;
    (void)state;

    assert_non_null(r);
    snprintf(good, PATH, "/tmp/tide-rates-%d-good", (int)getpid());
    snprintf(bad, PATH, "/tmp/tide-rates-%d-bad", (int)getpid());
    write_machine(good, &m);
    f = fopen(bad, "w");
    assert_non_null(f);
    fputs("sms = 4\nnic_rate = 3 Gb/s\n", f);
    assert_int_equal(fclose(f), 0);

    run(partly, r);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_MISMATCH);
        assert_string_equal(r[i].text, "TIDE_MACHINE (1: given): 1 on ranks 0-1, 3, 0 on rank 2");
    }
    run(wrong, r);
    snprintf(expected, sizeof expected, "%s:2: nic_rate: unit 'Gb/s', expected B/s, KB/s, MB/s, GB/s or TB/s", bad);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_ARGUMENT);
        assert_string_equal(r[i].text + (i == 1 ? 0 : strlen("rank 1: ")), expected);
    }
    run(missing, r);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_ARGUMENT);
        assert_non_null(strstr(r[i].text, "TIDE_MACHINE: /nowhere/m.txt: No such file or directory, expected a machine file"));
    }
    unlink(good);
    unlink(bad);
    processes_unshare(r, RANKS * sizeof *r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_worst_of_all_ranks),
        cmocka_unit_test(all_ranks_or_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
