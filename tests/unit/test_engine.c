/*
 * The engine over the host fabric: real calls with ranks as threads, compared element by element with values that every rank can
 * compute for every other.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

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
        put_item(at, i, v->plan->groups[g].geo.shard_dtype, value(call, g, p, full_index(geo, v->open.n_ranks, v->open.rank, i)));
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
                    fill_shard(v, g, p, call, engine_address(v->e, REGION_RESIDENT, 0, pg->resident + geo->offset * pg->geo.item));
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

static job base_job(uint32_t nodes, uint32_t local)
{
    job j = {.nodes = nodes, .local = local, .calls = 3, .dtype = TIDE_BF16, .shard_dtype = TIDE_BF16, .grad_dtype = TIDE_BF16,
             .input = TIDE_INPUT_ADOPTED, .dims = {{5, 16, 33, 1}, {64, 7}, {200, 3, 11}}, .options = TIDE_OPTIONS_INIT};
    j.options.multicast = 0;
    j.options.deadline_ms = 20000;
    return j;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather_one_node),
        cmocka_unit_test(test_gather_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
