/*
 * plan.c - what planning costs, and what a replayed call costs the host: the time of tide_plan_create and of building
 * both op lists of a rank, and the processor time of the enqueueing calls divided by their ops (2 nodes x 2 ranks,
 * threads).
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "schedule/schedule.h"

enum { REPEATS = 21, CALLS = 200, RANKS = 4 };

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double middle(double *samples, int n)
{
    qsort(samples, (size_t)n, sizeof *samples, by_value);
    return samples[n / 2];
}

static int fail(const char *what)
{
    fprintf(stderr, "plan.c: %s: %s\n", what, tide_last_error());
    return 1;
}

/* ---- planning ---------------------------------------------------------------------------- */

static int row(uint32_t nodes, uint32_t local, uint32_t n_params)
{
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc group = TIDE_GROUP_DESC_INIT;
    tide_param params[64];
    double plan_time[REPEATS], ag_time[REPEATS], rs_time[REPEATS], total[REPEATS];
    uint32_t ag_ops = 0, rs_ops = 0;

    memset(params, 0, sizeof params);
    for (uint32_t i = 0; i < n_params; i++)
        params[i] = (tide_param){.ndim = 2, .dims = {4096 + 64 * (int64_t)i, 1024}};
    topology.nodes = nodes;
    topology.local = local;
    group.n_params = n_params;
    group.params = params;
    for (int i = 0; i < REPEATS; i++) {
        const schedule_rs_options options = {NULL, TIDE_BF16, 0};
        tide_plan *plan;
        schedule ag, rs;
        double t0 = seconds(CLOCK_MONOTONIC), t1, t2, t3;

        if (tide_plan_create(&topology, &group, 1, NULL, &plan) != TIDE_OK)
            return fail("tide_plan_create");
        t1 = seconds(CLOCK_MONOTONIC);
        if (schedule_build_ag(plan, 0, 0, &ag) != TIDE_OK)
            return fail("schedule_build_ag");
        t2 = seconds(CLOCK_MONOTONIC);
        if (schedule_build_rs(plan, 0, 0, &options, &rs) != TIDE_OK)
            return fail("schedule_build_rs");
        t3 = seconds(CLOCK_MONOTONIC);
        plan_time[i] = t1 - t0;
        ag_time[i] = t2 - t1;
        rs_time[i] = t3 - t2;
        total[i] = t3 - t0;
        ag_ops = ag.n_ops;
        rs_ops = rs.n_ops;
        schedule_clear(&ag);
        schedule_clear(&rs);
        tide_plan_destroy(plan);
    }
    printf("| %u x %u, P = %u | %.3f | %.3f (%u ops) | %.3f (%u ops) | %.3f |\n", nodes, local, n_params,
           middle(plan_time, REPEATS) * 1e3, middle(ag_time, REPEATS) * 1e3, ag_ops, middle(rs_time, REPEATS) * 1e3,
           rs_ops, middle(total, REPEATS) * 1e3);
    return 0;
}

/* ---- enqueueing -------------------------------------------------------------------------- */

/* The all-gather callback of threads: everybody leaves a pointer, meets, copies, meets. */
typedef struct shared {
    pthread_barrier_t barrier;
    const void *input[RANKS];
} shared;
typedef struct rank {
    shared *all;
    uint32_t rank;
    double ag, rs; /* processor seconds a call */
    int status;
} rank;

static int gather(void *context, const void *in, void *out, size_t bytes)
{
    rank *r = context;

    r->all->input[r->rank] = in;
    pthread_barrier_wait(&r->all->barrier);
    for (int i = 0; i < RANKS; i++)
        memcpy((char *)out + (size_t)i * bytes, r->all->input[i], bytes);
    pthread_barrier_wait(&r->all->barrier);
    return 0;
}

static void describe(tide_group_desc *group, tide_param *params, uint32_t n_params)
{
    for (uint32_t i = 0; i < n_params; i++)
        params[i] = (tide_param){.ndim = 1, .dims = {4096}};
    *group = (tide_group_desc)TIDE_GROUP_DESC_INIT;
    group->n_params = n_params;
    group->params = params;
}

static void *rank_main(void *context)
{
    rank *r = context;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_group_desc group;
    tide_param params[30];
    tide_comm *comm = NULL;
    tide_group *g = NULL;
    static uint16_t zeros[4096];
    const void *grads[30];
    float *out = calloc(30 * 4096 / RANKS, sizeof *out);
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    double ag[CALLS], rs[CALLS];

    r->status = 1;
    memset(params, 0, sizeof params);
    describe(&group, params, 30);
    for (int i = 0; i < 30; i++)
        grads[i] = zeros;
    desc.rank = r->rank;
    desc.n_ranks = RANKS;
    desc.node_size = 2;
    desc.allgather = gather;
    desc.allgather_context = r;
    if (!out || tide_comm_create(&desc, &comm) != TIDE_OK || tide_groups_create(comm, &group, 1, &g) != TIDE_OK)
        goto out;
    args.grads = grads;
    args.out = out;
    for (int i = 0; i < CALLS; i++) {
        double t0 = seconds(CLOCK_THREAD_CPUTIME_ID), t1;
        if (tide_all_gather(g, NULL, NULL) != TIDE_OK)
            goto out;
        ag[i] = seconds(CLOCK_THREAD_CPUTIME_ID) - t0;
        if (tide_wait(g, TIDE_READY, NULL) != TIDE_OK || tide_slot_release(g, NULL) != TIDE_OK)
            goto out;
        t1 = seconds(CLOCK_THREAD_CPUTIME_ID);
        if (tide_reduce_scatter(g, &args, NULL) != TIDE_OK)
            goto out;
        rs[i] = seconds(CLOCK_THREAD_CPUTIME_ID) - t1;
        if (tide_wait(g, TIDE_DONE, NULL) != TIDE_OK)
            goto out;
    }
    r->ag = middle(ag, CALLS);
    r->rs = middle(rs, CALLS);
    r->status = 0;
out:
    if (r->status)
        fail("enqueue");
    tide_comm_destroy(comm);
    free(out);
    return NULL;
}

static int enqueue(void)
{
    shared all;
    rank ranks[RANKS];
    pthread_t threads[RANKS];
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_options options = TIDE_OPTIONS_INIT;
    const schedule_rs_options rs_options = {NULL, TIDE_BF16, 0};
    tide_group_desc group;
    tide_param params[30];
    tide_plan *plan;
    schedule ag, rs;

    pthread_barrier_init(&all.barrier, NULL, RANKS);
    for (uint32_t i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.all = &all, .rank = i};
        if (pthread_create(&threads[i], NULL, rank_main, &ranks[i]) != 0)
            exit(fail("pthread_create")); /* the threads that run would wait for it */
    }
    for (uint32_t i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&all.barrier);
    memset(params, 0, sizeof params);
    describe(&group, params, 30);
    topology.nodes = topology.local = 2;
    options.multicast = 1; /* as the host fabric resolves it */
    if (ranks[0].status || tide_plan_create(&topology, &group, 1, &options, &plan) != TIDE_OK ||
        schedule_build_ag(plan, 0, 0, &ag) != TIDE_OK || schedule_build_rs(plan, 0, 0, &rs_options, &rs) != TIDE_OK)
        return fail("enqueue");
    printf("\n| enqueueing, 2 x 2, P = 30 | us a call | ops | us an op |\n|---|---|---|---|\n");
    printf("| all_gather | %.2f | %u | %.3f |\n", ranks[0].ag * 1e6, ag.n_ops, ranks[0].ag * 1e6 / ag.n_ops);
    printf("| reduce_scatter | %.2f | %u | %.3f |\n", ranks[0].rs * 1e6, rs.n_ops, ranks[0].rs * 1e6 / rs.n_ops);
    schedule_clear(&ag);
    schedule_clear(&rs);
    tide_plan_destroy(plan);
    return 0;
}

int main(void)
{
    printf("| planning, ms | tide_plan_create | all_gather op list | reduce_scatter op list | together |\n"
           "|---|---|---|---|---|\n");
    return row(1, 8, 30) || row(8, 8, 30) || row(64, 8, 30) || row(1024, 8, 30) || enqueue();
}
