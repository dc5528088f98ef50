/*
 * The engine over the host fabric: real calls with ranks as threads and as processes, compared element by element with
 * values that every rank can compute for every other; an abort, and a fork. Other faults are in tests/fault.
 *
 * Processes are this program again with arguments, so that each is a fresh user of the library.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "../harness/belongings.h"
#include "../harness/sanitized.h"
#include "../harness/threads.h"
#include "engine/engine.h"

enum { MAX_GROUPS = 4, MAX_PARAMS = 6 };

typedef struct job {
    uint32_t nodes, local, calls;
    int multicast;
    int dtype, shard_dtype, grad_dtype, input;
    uint64_t seed; /* of the choice among streams; 0: in turn */
    uint32_t delay_us;
    int64_t dims[MAX_GROUPS][MAX_PARAMS]; /* rows; each row has 3 + p elements; 0 ends the list */
    tide_options options;
} job;

typedef struct rank_env {
    const job *j;
    fab_open open;
    fab_device *device;
    tide_plan *plan;
    engine *e;
    engine_program *ag[MAX_GROUPS], *rs[MAX_GROUPS];
    uint32_t n_groups;
} rank_env;

#define CHECK(what)                                                                       \
    do {                                                                                  \
        if (!(what)) {                                                                    \
            fprintf(stderr, "%s:%d: rank %u: %s (%s)\n", __FILE__, __LINE__, v->open.rank, #what, tide_last_error()); \
            return 1;                                                                     \
        }                                                                                 \
    } while (0)

static uint64_t mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    uint64_t h = a * 0x9e3779b97f4a7c15u ^ b * 0xc2b2ae3d27d4eb4fu ^ c * 0x165667b19e3779f9u ^ d * 0x27d4eb2f165667c5u;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9u;
    return h ^ h >> 32;
}

/* Small integers: exact in every format, and so are their sums. */
static float value(uint64_t call, uint32_t group, uint32_t p, uint64_t e)
{
    return (float)(int)(mix(call, group, p, e) % 31) - 15.0f;
}

static void put_item(void *at, uint64_t i, int dtype, float f)
{
    uint16_t h = dtype == TIDE_BF16 ? tide_f32_to_bf16(f) : tide_f32_to_f16(f);
    if (dtype == TIDE_F32)
        memcpy((char *)at + 4 * i, &f, 4);
    else
        memcpy((char *)at + 2 * i, &h, 2);
}

static float get_item(const void *at, uint64_t i, int dtype)
{
    float f;
    uint16_t h;
    if (dtype == TIDE_F32) {
        memcpy(&f, (const char *)at + 4 * i, 4);
        return f;
    }
    memcpy(&h, (const char *)at + 2 * i, 2);
    return dtype == TIDE_BF16 ? tide_bf16_to_f32(h) : tide_f16_to_f32(h);
}

static job base_job(uint32_t nodes, uint32_t local)
{
    job j = {.nodes = nodes,
             .local = local,
             .calls = 3,
             .dtype = TIDE_BF16,
             .shard_dtype = TIDE_BF16,
             .grad_dtype = TIDE_BF16,
             .input = TIDE_INPUT_ADOPTED,
             .dims = {{5, 16, 33, 1}, {64, 7}, {200, 3, 11}},
             .options = TIDE_OPTIONS_INIT};
    j.options.multicast = 0;
    j.options.deadline_ms = 20000;
    return j;
}

static int make_plan(rank_env *v)
{
    const job *j = v->j;
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc groups[MAX_GROUPS];
    tide_param params[MAX_GROUPS][MAX_PARAMS];

    topology.nodes = j->nodes;
    topology.local = j->local;
    memset(params, 0, sizeof params);
    for (v->n_groups = 0; v->n_groups < MAX_GROUPS && j->dims[v->n_groups][0]; v->n_groups++) {
        tide_group_desc *g = &groups[v->n_groups];
        *g = (tide_group_desc)TIDE_GROUP_DESC_INIT;
        g->params = params[v->n_groups];
        g->dtype = j->dtype;
        g->shard_dtype = j->shard_dtype;
        g->grad_dtype = j->grad_dtype;
        g->input = j->input;
        for (; g->n_params < MAX_PARAMS && j->dims[v->n_groups][g->n_params]; g->n_params++) {
            tide_param *p = &params[v->n_groups][g->n_params];
            p->ndim = 2;
            p->dims[0] = j->dims[v->n_groups][g->n_params];
            p->dims[1] = 3 + g->n_params;
        }
    }
    return tide_plan_create(&topology, groups, v->n_groups, &j->options, &v->plan);
}

static int env_open(rank_env *v, const job *j, uint32_t rank, tide_allgather_fn allgather, void *context)
{
    memset(v, 0, sizeof *v);
    v->j = j;
    v->open = (fab_open){.rank = rank, .n_ranks = j->nodes * j->local, .node_size = j->local, .allgather = allgather,
                         .allgather_context = context, .options = &j->options};
    CHECK(make_plan(v) == TIDE_OK);
    CHECK(fab_host_open(&v->open, &v->device) == TIDE_OK);
    fab_host_set_seed(v->device, j->seed ? j->seed + rank : 0);
    if (j->delay_us) {
        fab_inject inject = {.seed = j->seed + 1, .delay_us = j->delay_us};
        fab_host_inject(v->device, &inject);
    }
    CHECK(engine_create(v->device, v->plan, &v->e) == TIDE_OK);
    return 0;
}

static void env_close(rank_env *v)
{
    engine_destroy(v->e);
    if (v->device)
        v->device->verbs->close(v->device);
    tide_plan_destroy(v->plan);
}

static int bind_ag(rank_env *v)
{
    for (uint32_t g = 0; g < v->n_groups; g++) {
        schedule s;
        CHECK(schedule_build_ag(v->plan, g, v->open.rank, &s) == TIDE_OK);
        CHECK(engine_bind(v->e, &s, &v->ag[g]) == TIDE_OK);
        CHECK(engine_program_digest(v->ag[g]) == schedule_digest(&s));
        schedule_clear(&s);
    }
    return 0;
}

/* Element of the padded full parameter that element i of rank r's shard is. */
static uint64_t full_index(const geo_param *p, uint32_t n_ranks, uint32_t r, uint64_t i)
{
    return i / p->strip * p->strip * n_ranks + r * p->strip + i % p->strip;
}

static void fill_shard(rank_env *v, uint32_t g, uint32_t p, uint64_t call, void *at)
{
    const geo_param *geo = &v->plan->groups[g].geo.params[p];
    for (uint64_t i = 0; i < geo->shard; i++)
        put_item(at, i, v->plan->groups[g].geo.shard_dtype,
                 value(call, g, p, full_index(geo, v->open.n_ranks, v->open.rank, i)));
}

static int check_landing(rank_env *v, uint32_t g, uint64_t call)
{
    const plan_group *pg = &v->plan->groups[g];
    for (uint32_t p = 0; p < pg->geo.n_params; p++) {
        const geo_param *geo = &pg->geo.params[p];
        const void *at = engine_address(v->e, REGION_LANDING, pg->slot, geo->landing);
        for (uint64_t e = 0; e < geo->shard * v->open.n_ranks; e++)
            CHECK(get_item(at, e, pg->geo.dtype) == value(call, g, p, e));
    }
    return 0;
}

/* `calls` gathers of every group in turn. */
static int gather_all(rank_env *v, uint64_t first_call)
{
    void *shards[MAX_PARAMS];
    for (uint32_t c = 0; c < v->j->calls; c++) {
        for (uint32_t g = 0; g < v->n_groups; g++) {
            const plan_group *pg = &v->plan->groups[g];
            uint64_t call = first_call + c * v->n_groups + g;
            engine_args args = {.n_args = 0, .call = call};
            uint32_t item = tide_dtype_bytes(pg->geo.shard_dtype);
            for (uint32_t p = 0; p < pg->geo.n_params; p++) {
                const geo_param *geo = &pg->geo.params[p];
                if (v->j->input == TIDE_INPUT_ADOPTED) {
                    fill_shard(v, g, p, call,
                               engine_address(v->e, REGION_RESIDENT, 0, pg->resident + geo->offset * pg->geo.item));
                } else {
                    shards[p] = malloc(geo->shard * item + 1);
                    fill_shard(v, g, p, call, shards[p]);
                }
            }
            if (v->j->input == TIDE_INPUT_ARGUMENT) {
                args.args = (const void *const *)shards;
                args.n_args = pg->geo.n_params;
            }
            CHECK(engine_run(v->e, v->ag[g], ENGINE_ALL, &args, NULL) == TIDE_OK);
            CHECK(engine_wait(v->e, g, EVENT_READY, NULL) == TIDE_OK);
            CHECK(check_landing(v, g, call) == 0);
            for (uint32_t p = 0; v->j->input == TIDE_INPUT_ARGUMENT && p < pg->geo.n_params; p++)
                free(shards[p]);
            CHECK(engine_free_slot(v->e, pg->slot, NULL) == TIDE_OK);
        }
    }
    return 0;
}

static int ag_rank(threads_rank *rank)
{
    rank_env env, *v = &env;
    int failed = env_open(v, rank->context, rank->rank, threads_allgather, rank);
    if (!failed)
        failed = bind_ag(v);
    if (!failed)
        failed = gather_all(v, 1);
    if (!failed && engine_sync(v->e) != TIDE_OK)
        failed = 1;
    env_close(v);
    return failed;
}

static void test_gather_one_node(void **state)
{
    (void)state;
    for (uint32_t local = 1; local <= 5; local++) {
        for (int multicast = 0; multicast < 2; multicast++) {
            for (int input = 0; input < 2; input++) {
                job j = base_job(1, local);
                j.options.multicast = multicast;
                j.input = input;
                if (input)
                    j.shard_dtype = TIDE_F32;
                assert_int_equal(threads_run(local, ag_rank, &j), 0);
            }
        }
    }
}

static void test_gather_nodes(void **state)
{
    (void)state;
    for (uint32_t nodes = 2; nodes <= 6; nodes++) {
        for (uint32_t local = 1; local <= 2; local++) {
            for (int kind = 0; kind < 4; kind++) {
                job j = base_job(nodes, local);
                j.options.multicast = kind & 1;
                j.options.head_bytes = 64;
                j.input = kind >> 1;
                if (j.input)
                    j.shard_dtype = TIDE_F32;
                assert_int_equal(threads_run(nodes * local, ag_rank, &j), 0);
            }
        }
    }
}


/* ---- reduce-scatter -------------------------------------------------------------------------- */

typedef struct scatter {
    void *grads[MAX_PARAMS];
    float *out, *before;
    uint64_t call;
    int accumulate;
    float alpha;
} scatter;

static int bind_rs(rank_env *v)
{
    for (uint32_t g = 0; g < v->n_groups; g++) {
        schedule_rs_options how = {NULL, v->j->grad_dtype, 0};
        schedule s;
        CHECK(schedule_build_rs(v->plan, g, v->open.rank, &how, &s) == TIDE_OK);
        CHECK(engine_bind(v->e, &s, &v->rs[g]) == TIDE_OK);
        schedule_clear(&s);
    }
    return 0;
}

/* Values of rank u's gradient: those of a call of its own. */
static float gradient(uint32_t u, uint64_t call, uint32_t g, uint32_t p, uint64_t e)
{
    return value(call * 1000 + u, g, p, e);
}

static int begin_scatter(rank_env *v, uint32_t g, uint64_t call, int part, scatter *c)
{
    const geo_group *geo = &v->plan->groups[g].geo;
    const void *pointers[MAX_PARAMS + 1];
    engine_args args = {pointers, geo->n_params + 1, 0.5f, (int)(call & 1), call};
    size_t item = tide_dtype_bytes(v->j->grad_dtype);

    c->call = call;
    c->accumulate = args.accumulate;
    c->alpha = args.alpha;
    for (uint32_t p = 0; p < geo->n_params; p++) {
        c->grads[p] = malloc(geo->params[p].whole * item + 1);
        for (uint64_t e = 0; e < geo->params[p].whole; e++)
            put_item(c->grads[p], e, v->j->grad_dtype, gradient(v->open.rank, call, g, p, e));
        pointers[p] = c->grads[p];
    }
    c->out = malloc(geo->elements * sizeof(float) + 1);
    c->before = malloc(geo->elements * sizeof(float) + 1);
    for (uint64_t i = 0; i < geo->elements; i++)
        c->out[i] = c->before[i] = (float)(i % 7);
    pointers[geo->n_params] = c->out;
    CHECK(engine_run(v->e, v->rs[g], part, &args, NULL) == TIDE_OK);
    return 0;
}

static int end_scatter(rank_env *v, uint32_t g, scatter *c)
{
    const geo_group *geo = &v->plan->groups[g].geo;
    CHECK(engine_wait(v->e, g, EVENT_READ_DONE, NULL) == TIDE_OK);
    for (uint32_t p = 0; p < geo->n_params; p++)
        free(c->grads[p]);
    CHECK(engine_wait(v->e, g, EVENT_DONE, NULL) == TIDE_OK);
    for (uint32_t p = 0; p < geo->n_params; p++) {
        const geo_param *q = &geo->params[p];
        for (uint64_t i = 0; i < q->shard; i++) {
            uint64_t e = full_index(q, v->open.n_ranks, v->open.rank, i);
            float sum = 0.0f;
            for (uint32_t u = 0; u < v->open.n_ranks && e < q->whole; u++)
                sum += gradient(u, c->call, g, p, e);
            CHECK(c->out[q->offset + i] == (c->accumulate ? c->before[q->offset + i] : 0.0f) + c->alpha * sum);
        }
    }
    free(c->out);
    free(c->before);
    return 0;
}

/* As many READs ahead of their NETs as there are banks, gathers in between. */
static int split_scatters(rank_env *v, uint64_t *call, scatter *c)
{
    uint32_t ahead = v->j->nodes == 1 ? 3 : v->plan->options.n_out < v->plan->rs.n_blocks ? 1 : 2;

    for (uint32_t g = 0; g < ahead; g++)
        CHECK(begin_scatter(v, g, (*call)++, ENGINE_READ, &c[g]) == 0);
    CHECK(engine_run(v->e, v->rs[1], ENGINE_NET, NULL, NULL) == TIDE_ERR_STATE); /* not its turn */
    if (v->j->nodes > 1) {
        const void *none[MAX_PARAMS + 1] = {&none, &none, &none, &none, &none, &none, &none};
        engine_args args = {none, v->plan->groups[ahead].geo.n_params + 1, 1.0f, 0, *call};
        CHECK(engine_run(v->e, v->rs[ahead], ENGINE_READ, &args, NULL) == TIDE_ERR_STATE); /* no bank is left */
        CHECK(engine_run(v->e, v->rs[ahead], ENGINE_ALL, &args, NULL) == TIDE_ERR_STATE);
    }
    CHECK(gather_all(v, *call) == 0);
    *call += v->j->calls * v->n_groups;
    for (uint32_t g = 0; g < ahead; g++)
        CHECK(engine_run(v->e, v->rs[g], ENGINE_NET, NULL, NULL) == TIDE_OK);
    for (uint32_t g = 0; g < ahead; g++)
        CHECK(end_scatter(v, g, &c[g]) == 0);
    CHECK(engine_run(v->e, v->rs[0], ENGINE_NET, NULL, NULL) == TIDE_ERR_STATE); /* none is pending */
    return 0;
}

/* Reduce-scatters of all groups: whole, one by one and together; and as READs, then NETs. */
static int scatter_all(rank_env *v)
{
    scatter c[MAX_GROUPS];
    uint64_t call = 1;
    int failed = 0;
    for (uint32_t i = 0; i < v->j->calls && !failed; i++) {
        for (uint32_t g = 0; g < v->n_groups && !failed; g++, call++)
            failed = begin_scatter(v, g, call, ENGINE_ALL, &c[g]) || end_scatter(v, g, &c[g]);
        for (uint32_t g = 0; g < v->n_groups && !failed; g++, call++)
            failed = begin_scatter(v, g, call, ENGINE_ALL, &c[g]);
        for (uint32_t g = 0; g < v->n_groups && !failed; g++)
            failed = end_scatter(v, g, &c[g]);
        if (!failed)
            failed = split_scatters(v, &call, c);
    }
    return failed;
}

static int rs_rank(threads_rank *rank)
{
    rank_env env, *v = &env;
    int failed = env_open(v, rank->context, rank->rank, threads_allgather, rank);
    if (!failed)
        failed = bind_ag(v) || bind_rs(v) || scatter_all(v);
    if (!failed && engine_sync(v->e) != TIDE_OK)
        failed = 1;
    env_close(v);
    return failed;
}

static void test_scatter_one_node(void **state)
{
    const int dtypes[] = {TIDE_BF16, TIDE_F32, TIDE_F16};
    (void)state;
    for (uint32_t local = 1; local <= 5; local++) {
        for (int d = 0; d < 3; d++) {
            job j = base_job(1, local);
            j.grad_dtype = dtypes[d];
            j.options.chunk = d == 2 ? 64 : 16;
            j.options.n_stg = 1 + d;
            j.options.multicast = d & 1;
            assert_int_equal(threads_run(local, rs_rank, &j), 0);
        }
    }
}

static void test_scatter_nodes(void **state)
{
    (void)state;
    for (uint32_t nodes = 2; nodes <= (SANITIZED ? 4 : 5); nodes++) {
        for (uint32_t local = 1; local <= (SANITIZED ? 2 : 3); local++) {
            for (int kind = 0; kind < 4; kind++) {
                job j = base_job(nodes, local);
                j.grad_dtype = kind == 3 ? TIDE_F32 : TIDE_BF16;
                j.options.multicast = kind & 1;
                j.options.target = kind >> 1;
                j.options.chunk = 16;
                j.options.n_part = 1 + (kind >> 1);
                j.options.k = 1 + kind;
                j.seed = (uint64_t)kind * 77;
                j.delay_us = kind == 2 ? 200 : 0;
                if (kind == 3)
                    j.options.mode = 1;
                assert_int_equal(threads_run(nodes * local, rs_rank, &j), 0);
            }
        }
    }
}

static int nothing_left(const belongings *before)
{
    char text[128];
    belongings_left(before, text);
    if (text[0])
        fprintf(stderr, "left behind: %s\n", text);
    return !text[0];
}

/* ---- what each rank does, as a thread or as a process ----------------------------------------- */

enum role {
    ROLE_GATHER,
    ROLE_ABORT,
    ROLE_FORK,
    ROLE_SCATTER
};
enum { VICTIM = 1 };

static int one_gather(rank_env *v, uint32_t g, uint64_t call)
{
    engine_args args = {.call = call};
    int status = engine_run(v->e, v->ag[g], ENGINE_ALL, &args, NULL);
    if (status == TIDE_OK)
        status = engine_wait(v->e, g, EVENT_READY, NULL);
    if (status == TIDE_OK)
        status = engine_free_slot(v->e, v->plan->groups[g].slot, NULL);
    return status;
}

/* After a failure everything says the same. */
static int check_failed(rank_env *v, int code, uint64_t call)
{
    tide_failure f = TIDE_FAILURE_INIT;
    char text[sizeof f.text];
    CHECK(engine_failure(v->device, &f) == code);
    CHECK(f.code == code && f.rank < v->open.n_ranks && f.text[0] && f.phase[0]);
    memcpy(text, f.text, sizeof text);
    CHECK(one_gather(v, 0, call + 1) == code);
    CHECK(strcmp(tide_last_error(), text) == 0);
    CHECK(engine_wait(v->e, 0, EVENT_READY, NULL) == code);
    CHECK(engine_sync(v->e) == code);
    CHECK(engine_free_slot(v->e, 0, NULL) == code);
    CHECK(engine_failure(v->device, &f) == code && strcmp(f.text, text) == 0);
    return 0;
}

static int play(rank_env *v, enum role role)
{
    tide_failure f = TIDE_FAILURE_INIT;
    uint64_t call = 1;

    for (; call <= 5; call++)
        CHECK(one_gather(v, (uint32_t)call % v->n_groups, call) == TIDE_OK);
    /* a failure ends earlier calls of others as well: these are done */
    CHECK(fab_agree(&v->open, TIDE_OK) == TIDE_OK);
    switch (role) {
    case ROLE_ABORT:
        if (v->open.rank == VICTIM) {
            usleep(20000);
            CHECK(engine_abort(v->device) == TIDE_OK);
        }
        CHECK(one_gather(v, 0, call) == TIDE_ERR_ABORTED);
        CHECK(engine_failure(v->device, &f) == TIDE_ERR_ABORTED && f.rank == VICTIM);
        return check_failed(v, TIDE_ERR_ABORTED, call);
    case ROLE_FORK: {
        pid_t child = fork();
        int how;
        if (child == 0) {
            engine_program *p;
            schedule s = {0};
            engine_args args = {.call = call};
            int wrong = engine_run(v->e, v->ag[0], ENGINE_ALL, &args, NULL) != TIDE_ERR_FORKED;
            wrong |= engine_wait(v->e, 0, EVENT_READY, NULL) != TIDE_ERR_FORKED;
            wrong |= engine_bind(v->e, &s, &p) != TIDE_ERR_FORKED;
            wrong |= engine_sync(v->e) != TIDE_ERR_FORKED;
            wrong |= engine_abort(v->device) != TIDE_ERR_FORKED;
            engine_destroy(v->e);
            v->device->verbs->close(v->device);
#if defined(__SANITIZE_ADDRESS__)
            _exit(wrong); /* its leak check wants the parent's threads */
#else
            exit(wrong);
#endif
        }
        CHECK(child > 0 && waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0);
        for (; call <= 10; call++)
            CHECK(one_gather(v, (uint32_t)call % v->n_groups, call) == TIDE_OK);
        return 0;
    }
    case ROLE_SCATTER:
        return scatter_all(v);
    default:
        return gather_all(v, call);
    }
}

typedef struct thread_job { job j; enum role role; } thread_job;

static int play_thread(threads_rank *rank)
{
    thread_job *t = rank->context;
    rank_env env, *v = &env;
    int failed = env_open(v, &t->j, rank->rank, threads_allgather, rank);
    if (!failed)
        failed = bind_ag(v) || bind_rs(v);
    if (!failed)
        failed = play(v, t->role);
    env_close(v);
    return failed;
}

static void test_abort_threads(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 2; nodes++) {
        thread_job t = {base_job(nodes, 2), ROLE_ABORT};
        belongings before = belongings_now();
        assert_int_equal(threads_run(nodes * 2, play_thread, &t), 0);
        assert_true(nothing_left(&before));
    }
}

/* ---- processes ------------------------------------------------------------------------------- */

static void *no_work(void *argument)
{
    return argument;
}

static int process_main(char **argument)
{
    uint32_t rank = (uint32_t)atoi(argument[2]), nodes = (uint32_t)atoi(argument[3]),
             local = (uint32_t)atoi(argument[4]);
    enum role role = (enum role)atoi(argument[5]);
    job j = base_job(nodes, local);
    rank_env env, *v = &env;
    tide_bootstrap *b;
    belongings before;
    pthread_t first;
    int failed;

    j.options.multicast = atoi(argument[6]);
    if (tide_bootstrap_local(argument[7], rank, nodes * local, 20000, &b) != TIDE_OK) {
        fprintf(stderr, "rank %u: %s\n", rank, tide_last_error());
        return 1;
    }
    if (pthread_create(&first, NULL, no_work, NULL) == 0) /* a sanitizer starts threads of its own with the first one */
        pthread_join(first, NULL);
    before = belongings_now();
    failed = env_open(v, &j, rank, tide_bootstrap_allgather, b) || bind_ag(v) || bind_rs(v) || play(v, role);
    env_close(v);
    if (!failed && !nothing_left(&before)) {
        fprintf(stderr, "by rank %u\n", rank);
        failed = 1;
    }
    tide_bootstrap_destroy(b);
    return failed;
}

static void run_processes(uint32_t nodes, uint32_t local, enum role role, int multicast)
{
    static int number;
    uint32_t n = nodes * local;
    pid_t pids[16];
    char text[5][16], path[64];
    int wrong = 0;

    snprintf(path, sizeof path, "tide-test-engine-%d-%d", (int)getpid(), number++);
    for (uint32_t r = 0; r < n; r++) {
        const uint32_t values[] = {r, nodes, local, (uint32_t)role, (uint32_t)multicast};
        for (int i = 0; i < 5; i++)
            snprintf(text[i], sizeof text[i], "%u", values[i]);
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0) {
            execl("/proc/self/exe", "test_engine", "--rank", text[0], text[1], text[2], text[3], text[4], path,
                  (char *)NULL);
            _exit(127);
        }
    }
    for (uint32_t r = 0; r < n; r++) {
        int how;
        assert_int_equal(waitpid(pids[r], &how, 0), pids[r]);
        wrong += !WIFEXITED(how) || WEXITSTATUS(how) != 0;
    }
    assert_int_equal(wrong, 0);
}

static void test_processes(void **state)
{
    (void)state;
    run_processes(1, 3, ROLE_GATHER, 0);
    run_processes(1, 3, ROLE_GATHER, 1);
    run_processes(2, 2, ROLE_GATHER, 0);
    run_processes(3, 1, ROLE_GATHER, 0);
    run_processes(2, 2, ROLE_FORK, 1);
    run_processes(1, 3, ROLE_SCATTER, 1);
    run_processes(2, 2, ROLE_SCATTER, 0);
    run_processes(3, 1, ROLE_SCATTER, 0);
    run_processes(1, 4, ROLE_ABORT, 1);
    run_processes(2, 2, ROLE_ABORT, 0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* What is mapped is what the plan promises, a replay allocates nothing, a view outlives the engine. */
static int memory_rank(threads_rank *rank)
{
    rank_env env, *v = &env;
    tide_bytes promise = TIDE_BYTES_INIT;
    engine_view *view;
    uint64_t before, page;
    char *data;
    int failed = env_open(v, rank->context, rank->rank, threads_allgather, rank);

    if (!failed)
        failed = bind_ag(v);
    if (failed) {
        env_close(v);
        return failed;
    }
    CHECK(tide_plan_bytes(v->plan, rank->rank, &promise) == TIDE_OK);
    page = v->device->granularity;
    CHECK(engine_allocated(v->e) == (promise.total + page - 1) / page * page);
    CHECK(one_gather(v, 0, 1) == TIDE_OK && one_gather(v, 1, 2) == TIDE_OK);
    CHECK(fab_agree(&v->open, TIDE_OK) == TIDE_OK);
    before = tide_alloc_count();
    for (uint64_t call = 3; call < 40; call++)
        CHECK(one_gather(v, (uint32_t)call % v->n_groups, call) == TIDE_OK);
    CHECK(tide_alloc_count() == before);
    CHECK(fab_agree(&v->open, TIDE_OK) ==
          TIDE_OK); /* the count is the process': nobody allocates before all have read it */
    view = engine_view_take(v->e);
    CHECK(view && engine_views(v->e) == 1);
    data = engine_address(v->e, REGION_LANDING, 0, 0);
    CHECK(engine_sync(v->e) == TIDE_OK);
    CHECK(fab_agree(&v->open, TIDE_OK) == TIDE_OK);
    env_close(v);
    data[rank->rank] = 1; /* a byte of its own: the landing may be the node's */
    engine_view_drop(view);
    return 0;
}

static void test_memory(void **state)
{
    (void)state;
    for (int multicast = 0; multicast < 2; multicast++) {
        job j = base_job(2, 2);
        belongings before = belongings_now();
        j.options.multicast = multicast;
        assert_int_equal(threads_run(4, memory_rank, &j), 0);
        assert_true(nothing_left(&before));
    }
}

/* Any choice among runnable streams, any delay on the rail: the same bytes. */
static void test_seeds(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        job j = base_job(1 + (uint32_t)(seed % 4), 2);
        j.seed = seed;
        j.delay_us = 300;
        j.options.head_bytes = 64;
        j.options.multicast = (int)(seed & 1);
        assert_int_equal(threads_run(j.nodes * j.local, ag_rank, &j), 0);
    }
}

/* More workers a rank, and many ranks. */
static void test_workers(void **state)
{
    (void)state;
    for (int workers = 2; workers <= 3; workers++) {
        char text[16];
        snprintf(text, sizeof text, "%d", workers);
        setenv("TIDE_HOST_WORKERS", text, 1);
        for (uint32_t nodes = 1; nodes <= 3; nodes += 2) {
            job j = base_job(nodes, 2);
            j.options.multicast = workers & 1;
            j.options.chunk = 16;
            j.seed = (uint64_t)workers;
            assert_int_equal(threads_run(nodes * 2, ag_rank, &j), 0);
            assert_int_equal(threads_run(nodes * 2, rs_rank, &j), 0);
        }
    }
    unsetenv("TIDE_HOST_WORKERS");
}

static void test_many_ranks(void **state)
{
    const uint32_t shapes[][2] = {{1, 24}, {24, 1}, {8, 4}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        job j = base_job(shapes[i][0], shapes[i][1]);
        j.calls = 1;
        j.options.multicast = i == 2;
        assert_int_equal(threads_run(j.nodes * j.local, rs_rank, &j), 0);
    }
}

/* A call after the other without a wait: the enqueuer sleeps when the ring of calls is full, and all come out right. */
static int backlog_rank(threads_rank *rank)
{
    enum { CALLS = 40 };
    rank_env env, *v = &env;
    static scatter all[8][CALLS];
    scatter *c = all[rank->rank];
    int failed = env_open(v, rank->context, rank->rank, threads_allgather, rank);

    if (!failed)
        failed = bind_rs(v);
    for (uint64_t i = 0; i < CALLS && !failed; i++)
        failed = begin_scatter(v, (uint32_t)i % 2, i + 1, ENGINE_ALL, &c[i]);
    for (uint64_t i = 0; i < CALLS && !failed; i++)
        failed = end_scatter(v, (uint32_t)i % 2, &c[i]);
    env_close(v);
    return failed;
}

static void test_backlog(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 2; nodes++) {
        job j = base_job(nodes, 2);
        assert_int_equal(threads_run(nodes * 2, backlog_rank, &j), 0);
    }
}

int main(int n_arguments, char **arguments)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather_one_node),
        cmocka_unit_test(test_gather_nodes),
        cmocka_unit_test(test_scatter_one_node),
        cmocka_unit_test(test_scatter_nodes),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_workers),
        cmocka_unit_test(test_many_ranks),
        cmocka_unit_test(test_backlog),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_abort_threads),
        cmocka_unit_test(test_memory),
    };
    if (n_arguments == 8 && strcmp(arguments[1], "--rank") == 0)
        return process_main(arguments);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
