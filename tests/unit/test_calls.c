/* test_calls.c - the public calls end to end on thread ranks: data, slots, phases, subsets, modes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../harness/small.h"
#include "base/base.h"

enum { ALL = 15, GROUPS = 3 };

typedef struct setting {
    uint32_t n_ranks, node_size;
    int dtype, shard_dtype, grad_dtype;
    tide_options options;
} setting;

static tide_reduce_scatter_args rs_args(void **grads, float *out, int grad_dtype)
{
    tide_reduce_scatter_args a = TIDE_REDUCE_SCATTER_ARGS_INIT;
    a.grads = (const void *const *)grads;
    a.out = out;
    a.grad_dtype = grad_dtype;
    return a;
}

static float *output(const tide_group *group, uint64_t *elements)
{
    uint64_t n;
    float *out;
    if (tide_group_output_elements(group, NULL, &n) != TIDE_OK)
        return NULL;
    out = malloc((n + 1) * sizeof *out);
    for (uint64_t i = 0; i <= n; i++)
        out[i] = 1000.0f; /* the last one guards the end */
    if (elements)
        *elements = n;
    return out;
}

/* ---- data over topologies and knobs ------------------------------------------------------------- */

static int gather(const small_layer *s, tide_group *g)
{
    void *shards[SMALL_PARAMS] = {0};
    bool cast = s->desc.input == TIDE_INPUT_ARGUMENT;
    if (cast)
        small_shards(s, shards);
    CHECK(tide_all_gather(g, cast ? (const void *const *)shards : NULL, NULL) == TIDE_OK);
    CHECK(tide_wait(g, TIDE_READY, NULL) == TIDE_OK);
    CHECK(small_wrong_params(s, g) == 0);
    small_free(shards);
    return 0;
}

static int reduce(const small_layer *s, tide_group *g, int call, int grad_dtype, unsigned present, bool accumulate,
                  int mode)
{
    void *grads[SMALL_PARAMS];
    uint64_t n = 0;
    float *out = output(g, &n);
    tide_reduce_scatter_args a;
    small_grads(s, call, grad_dtype, present, grads);
    a = rs_args(grads, out, grad_dtype);
    a.accumulate = accumulate;
    a.alpha = 0.25f;
    a.mode = mode;
    if (mode == 1) {
        CHECK(tide_grads_stash(g, &a, NULL) == TIDE_OK);
        small_free(grads); /* the host may free them now; what the read sees lies in the slot */
        memset(grads, 0, sizeof grads);
    }
    CHECK(tide_reduce_scatter(g, &a, NULL) == TIDE_OK);
    if (mode == 0) {
        CHECK(tide_wait(g, TIDE_READ_DONE, NULL) == TIDE_OK);
        small_free(grads);
    }
    CHECK(tide_wait(g, TIDE_DONE, NULL) == TIDE_OK);
    CHECK(small_wrong_output(s, call, present, 0.25f, accumulate ? 1000.0f : 0.0f, out) == 0);
    CHECK(out[n] == 1000.0f);
    free(out);
    return 0;
}

/* A few steps: forward gathers in order, backward gathers and reduces in reverse, as FSDP2 does. */
static int train(threads_rank *rank)
{
    const setting *set = rank->context;
    small_layer s[GROUPS];
    tide_group_desc descs[GROUPS];
    tide_group *g[GROUPS];
    tide_group_path path = {.size = sizeof path};
    tide_comm_info info = {.size = sizeof info};
    tide_comm *comm;
    int call = 0;
    int mode = set->options.mode == 1 && set->grad_dtype != TIDE_F32;

    CHECK(small_comm(rank, set->node_size, &set->options, &comm) == TIDE_OK);
    for (int i = 0; i < GROUPS; i++) {
        small_init(&s[i], rank, i == 0 ? "first" : NULL, set->dtype, set->shard_dtype, set->grad_dtype, i);
        s[i].desc.landing = i == 1 ? TIDE_LANDING_PRIVATE : TIDE_LANDING_RING;
        descs[i] = s[i].desc;
    }
    CHECK(tide_groups_create(comm, descs, GROUPS, g) == TIDE_OK);
    for (int i = 0; i < GROUPS && set->dtype == set->shard_dtype; i++)
        CHECK(small_adopt(&s[i], g[i]) == TIDE_OK);
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < GROUPS; i++) {
            if (gather(&s[i], g[i]))
                return 1;
            CHECK(tide_slot_release(g[i], NULL) == TIDE_OK);
        }
        for (int i = GROUPS - 1; i >= 0; i--, call++) {
            if (gather(&s[i], g[i]))
                return 1;
            if (mode == 0)
                CHECK(tide_slot_release(g[i], NULL) == TIDE_OK);
            if (reduce(&s[i], g[i], call, set->grad_dtype, ALL, step == 1, mode))
                return 1;
        }
    }
    CHECK(tide_comm_sync(comm) == TIDE_OK);
    CHECK(tide_group_get_path(g[0], &path) == TIDE_OK);
    CHECK(path.all_gathers == 6 && path.reduce_scatters == 3);
    CHECK(rank->n_ranks == 1 || path.all_gather_bytes > 0);
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK);
    CHECK(info.calls == 27 && info.live_views == 0 && info.arena_bytes > 0);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void run_setting(const setting *set)
{
    setting copy = *set;
    uint64_t live = tide_alloc_live();
    int failed = threads_run(set->n_ranks, train, &copy);
    if (failed != 0)
        fprintf(stderr,
                "ranks %u node_size %u dtypes %d %d %d mode %lld multicast %lld k %lld n_part %lld n_out %lld w_wave "
                "%lld\n",
                set->n_ranks, set->node_size, set->dtype, set->shard_dtype, set->grad_dtype,
                (long long)set->options.mode, (long long)set->options.multicast, (long long)set->options.k,
                (long long)set->options.n_part, (long long)set->options.n_out, (long long)set->options.w_wave);
    assert_int_equal(failed, 0);
    assert_int_equal(tide_alloc_live(), live);
}

static const uint32_t shapes[][2] = {{1, 1}, {2, 2}, {4, 4}, {2, 1}, {4, 2},
                                     {3, 1}, {6, 2}, {5, 1}, {8, 2}, {6, 3}}; /* ranks, node */

static void test_topologies(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof shapes / sizeof shapes[0]; t++) {
        setting set = {shapes[t][0], shapes[t][1], TIDE_BF16, TIDE_BF16, TIDE_BF16, TIDE_OPTIONS_INIT};
        run_setting(&set);
        set.options.multicast = 0;
        run_setting(&set);
    }
}

static void test_dtypes(void **state)
{
    static const int dtypes[][3] = {{TIDE_F32, TIDE_F32, TIDE_F32},
                                    {TIDE_F16, TIDE_F16, TIDE_F16},
                                    {TIDE_BF16, TIDE_F32, TIDE_BF16},
                                    {TIDE_BF16, TIDE_F32, TIDE_F32},
                                    {TIDE_F16, TIDE_F32, TIDE_F16}};
    (void)state;
    for (size_t t = 2; t < 8; t += 2) {
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            setting set = {shapes[t][0], shapes[t][1], dtypes[d][0], dtypes[d][1], dtypes[d][2], TIDE_OPTIONS_INIT};
            run_setting(&set);
        }
    }
}

static void test_knobs(void **state)
{
    static const struct {
        const char *name;
        int64_t value;
    } knobs[] = {{"w_wave", 1}, {"k", 1},           {"n_part", 3}, {"n_stg", 1}, {"n_stg", 4},
                 {"chunk", 16}, {"head_bytes", 64}, {"n_ctx", 1},  {"poison", 1}};
    (void)state;
    for (size_t i = 0; i < sizeof knobs / sizeof knobs[0]; i++) {
        for (size_t t = 2; t < 9; t += 2) {
            setting set = {shapes[t][0], shapes[t][1], TIDE_BF16, TIDE_BF16, TIDE_BF16, TIDE_OPTIONS_INIT};
            assert_int_equal(tide_options_set(&set.options, knobs[i].name, knobs[i].value), TIDE_OK);
            if (strcmp(knobs[i].name, "n_part") == 0)
                set.options.n_par = 2;
            run_setting(&set);
        }
    }
}

static void test_slot_reuse(void **state)
{
    (void)state;
    for (size_t t = 0; t < sizeof shapes / sizeof shapes[0]; t++) {
        setting set = {shapes[t][0], shapes[t][1], TIDE_BF16, TIDE_BF16, TIDE_BF16, TIDE_OPTIONS_INIT};
        set.options.mode = 1;
        run_setting(&set);
        set.options.k = 1; /* a partial outbox: reads end in the network phase */
        run_setting(&set);
    }
}

/* ---- one group on 2 x 2 ranks: who may call what when ------------------------------------------- */

typedef struct one {
    tide_comm *comm;
    small_layer s[2];
    tide_group *g[2];
} one;

static int one_open(one *o, const threads_rank *rank, const tide_options *options)
{
    tide_group_desc descs[2];
    CHECK(small_comm(rank, rank->n_ranks > 1 ? 2 : 1, options, &o->comm) == TIDE_OK);
    small_init(&o->s[0], rank, "a", TIDE_BF16, TIDE_BF16, TIDE_BF16, 1);
    small_init(&o->s[1], rank, "b", TIDE_BF16, TIDE_BF16, TIDE_BF16, 2);
    descs[0] = o->s[0].desc;
    descs[1] = o->s[1].desc;
    CHECK(tide_groups_create(o->comm, descs, 2, o->g) == TIDE_OK);
    CHECK(small_adopt(&o->s[0], o->g[0]) == TIDE_OK && small_adopt(&o->s[1], o->g[1]) == TIDE_OK);
    return 0;
}

static int one_close(one *o)
{
    CHECK(tide_comm_destroy(o->comm) == TIDE_OK);
    return 0;
}

static int slots_body(threads_rank *rank)
{
    tide_options options = TIDE_OPTIONS_INIT;
    one o;
    options.ring_slots = 1; /* both groups in one slot */
    if (one_open(&o, rank, &options))
        return 1;
    CHECK_FAILS(tide_slot_release(o.g[0], NULL), TIDE_ERR_STATE, "group 0 'a' is not gathered: landing slot 0 is free");
    if (gather(&o.s[0], o.g[0]))
        return 1;
    CHECK_FAILS(tide_all_gather(o.g[0], NULL, NULL), TIDE_ERR_STATE,
                "group 0 'a' is already gathered and not released");
    CHECK_FAILS(tide_all_gather(o.g[1], NULL, NULL), TIDE_ERR_STATE,
                "group 1 'b' needs landing slot 0, which still belongs to group 0 'a'");
    CHECK_FAILS(tide_slot_release(o.g[1], NULL), TIDE_ERR_STATE,
                "group 1 'b' is not gathered: landing slot 0 belongs to group 0 'a'");
    CHECK(small_wrong_params(&o.s[0], o.g[0]) == 0);
    CHECK(tide_slot_release(o.g[0], NULL) == TIDE_OK);
    CHECK_FAILS(tide_slot_release(o.g[0], NULL), TIDE_ERR_STATE, "is free");
    if (gather(&o.s[1], o.g[1]))
        return 1;
    return one_close(&o);
}

static void test_slots(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, slots_body, NULL), 0);
}

static int phases_body(threads_rank *rank)
{
    tide_options options = TIDE_OPTIONS_INIT;
    void *grads[3][SMALL_PARAMS];
    float *out[3];
    tide_reduce_scatter_args a[3];
    one o;
    if (one_open(&o, rank, &options))
        return 1;
    for (int i = 0; i < 3; i++) {
        out[i] = output(o.g[0], NULL);
        small_grads(&o.s[i & 1], i, TIDE_BF16, ALL, grads[i]);
        a[i] = rs_args(grads[i], out[i], TIDE_BF16);
    }
    CHECK_FAILS(tide_reduce_scatter_net(o.g[0], NULL), TIDE_ERR_STATE, "group 0 'a' has no read phase");
    CHECK(tide_reduce_scatter_read(o.g[0], &a[0], NULL) == TIDE_OK);
    CHECK_FAILS(tide_wait(o.g[0], TIDE_DONE, NULL), TIDE_ERR_STATE,
                "TIDE_DONE of group 0 'a' comes with its network phase");
    CHECK(tide_wait(o.g[0], TIDE_READ_DONE, NULL) == TIDE_OK); /* a full outbox: reads wait for no network phase */
    CHECK(tide_reduce_scatter_read(o.g[1], &a[1], NULL) == TIDE_OK);
    CHECK_FAILS(tide_reduce_scatter_read(o.g[0], &a[2], NULL), TIDE_ERR_STATE,
                "2 read phases wait for their network phase, the first of group 0 'a'");
    CHECK_FAILS(tide_reduce_scatter_net(o.g[1], NULL), TIDE_ERR_STATE, "the next network phase is that of group 0 'a'");
    CHECK_FAILS(tide_reduce_scatter(o.g[1], &a[1], NULL), TIDE_ERR_STATE,
                "the next network phase is that of group 0 'a'");
    CHECK(tide_reduce_scatter_net(o.g[0], NULL) == TIDE_OK);
    CHECK(tide_wait(o.g[0], TIDE_DONE, NULL) == TIDE_OK);
    CHECK(small_wrong_output(&o.s[0], 0, ALL, 1.0f, 0.0f, out[0]) == 0);
    CHECK(tide_reduce_scatter_read(o.g[0], &a[2], NULL) == TIDE_OK);
    CHECK(tide_reduce_scatter_net(o.g[1], NULL) == TIDE_OK);
    CHECK(tide_reduce_scatter_net(o.g[0], NULL) == TIDE_OK);
    CHECK(tide_wait(o.g[0], TIDE_DONE, NULL) == TIDE_OK && tide_wait(o.g[1], TIDE_DONE, NULL) == TIDE_OK);
    CHECK(small_wrong_output(&o.s[1], 1, ALL, 1.0f, 0.0f, out[1]) == 0);
    CHECK(small_wrong_output(&o.s[0], 2, ALL, 1.0f, 0.0f, out[2]) == 0);
    for (int i = 0; i < 3; i++) {
        small_free(grads[i]);
        free(out[i]);
    }
    return one_close(&o);
}

static int partial_body(threads_rank *rank) /* 4 nodes of 1: three remote blocks, an outbox of two */
{
    tide_options options = TIDE_OPTIONS_INIT;
    void *grads[SMALL_PARAMS];
    tide_reduce_scatter_args a;
    tide_comm *comm;
    tide_group *g;
    small_layer s;
    float *out;
    options.k = 1;
    options.n_out = 2;
    CHECK(small_comm(rank, 1, &options, &comm) == TIDE_OK);
    small_init(&s, rank, "p", TIDE_BF16, TIDE_BF16, TIDE_BF16, 1);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK);
    out = output(g, NULL);
    small_grads(&s, 0, TIDE_BF16, ALL, grads);
    a = rs_args(grads, out, TIDE_BF16);
    CHECK(tide_reduce_scatter_read(g, &a, NULL) == TIDE_OK);
    CHECK_FAILS(tide_wait(g, TIDE_READ_DONE, NULL), TIDE_ERR_STATE,
                "TIDE_READ_DONE of group 0 'p' comes with its network phase");
    CHECK_FAILS(tide_reduce_scatter_read(g, &a, NULL), TIDE_ERR_STATE, "its network phase holds the rest of its reads");
    CHECK(tide_reduce_scatter_net(g, NULL) == TIDE_OK);
    CHECK(tide_wait(g, TIDE_READ_DONE, NULL) == TIDE_OK);
    CHECK(tide_wait(g, TIDE_DONE, NULL) == TIDE_OK);
    CHECK(small_wrong_output(&s, 0, ALL, 1.0f, 0.0f, out) == 0);
    small_free(grads);
    free(out);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_phases(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, phases_body, NULL), 0);
    assert_int_equal(threads_run(2, phases_body, NULL), 0); /* one node */
    assert_int_equal(threads_run(4, partial_body, NULL), 0);
}

static int subsets_body(threads_rank *rank)
{
    one o;
    void *none[SMALL_PARAMS] = {0};
    tide_reduce_scatter_args a = rs_args(none, NULL, TIDE_BF16);
    tide_group_path before = {.size = sizeof before}, after = {.size = sizeof after};
    uint8_t flags[SMALL_PARAMS];
    uint64_t n;
    if (one_open(&o, rank, NULL))
        return 1;
    for (int call = 0; call < 2; call++) { /* compiled, then from the cache */
        for (unsigned present = 1; present <= ALL; present++) {
            uint64_t expected = 0;
            for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
                flags[p] = present >> p & 1;
                expected += flags[p] ? small_shard(&o.s[0], p) : 0;
            }
            CHECK(tide_group_output_elements(o.g[0], flags, &n) == TIDE_OK && n == expected);
            if (reduce(&o.s[0], o.g[0], call, present % 2 ? TIDE_F32 : TIDE_BF16, present, call == 1, 0))
                return 1;
        }
    }
    CHECK(tide_group_get_path(o.g[0], &before) == TIDE_OK);
    CHECK(tide_reduce_scatter(o.g[0], &a, NULL) == TIDE_OK); /* no gradient at all, no output needed */
    CHECK(tide_wait(o.g[0], TIDE_DONE, NULL) == TIDE_OK);
    CHECK(tide_group_get_path(o.g[0], &after) == TIDE_OK && after.reduce_scatters == before.reduce_scatters);
    return one_close(&o);
}

static void test_subsets(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, subsets_body, NULL), 0);
    assert_int_equal(threads_run(2, subsets_body, NULL), 0);
    assert_int_equal(threads_run(1, subsets_body, NULL), 0);
}

static int stash_body(threads_rank *rank)
{
    tide_options options = TIDE_OPTIONS_INIT;
    void *grads[SMALL_PARAMS], *none[SMALL_PARAMS] = {0};
    tide_reduce_scatter_args a;
    float *out;
    one o;
    options.ring_slots = 1;
    options.mode = 1;
    if (one_open(&o, rank, &options))
        return 1;
    out = output(o.g[0], NULL);
    small_grads(&o.s[0], 5, TIDE_BF16, ALL, grads);
    a = rs_args(grads, out, TIDE_BF16);
    CHECK_FAILS(tide_grads_stash(o.g[0], &a, NULL), TIDE_ERR_STATE, "group 0 'a' is not gathered");
    a.mode = 1;
    CHECK_FAILS(tide_reduce_scatter(o.g[0], &a, NULL), TIDE_ERR_STATE, "has no stashed gradients");
    if (gather(&o.s[0], o.g[0]))
        return 1;
    CHECK_FAILS(tide_reduce_scatter(o.g[0], &a, NULL), TIDE_ERR_STATE, "has no stashed gradients");
    a.grad_dtype = TIDE_F32;
    CHECK_FAILS(tide_grads_stash(o.g[0], &a, NULL), TIDE_ERR_UNSUPPORTED, "fp32 items are larger");
    a.grad_dtype = TIDE_BF16;
    CHECK(tide_grads_stash(o.g[0], &a, NULL) == TIDE_OK);
    CHECK_FAILS(tide_slot_release(o.g[0], NULL), TIDE_ERR_STATE, "has stashed gradients in its landing");
    CHECK_FAILS(tide_all_gather(o.g[1], NULL, NULL), TIDE_ERR_STATE, "where group 0 'a' has stashed gradients");
    a.grad_dtype = TIDE_F16;
    CHECK_FAILS(tide_reduce_scatter(o.g[0], &a, NULL), TIDE_ERR_ARGUMENT, "has stashed gradients of bf16");
    a.grad_dtype = TIDE_BF16;
    for (int p = 0; p < SMALL_PARAMS; p++)
        memset(grads[p], 0xff, 2);
    CHECK(tide_reduce_scatter(o.g[0], &a, NULL) == TIDE_OK);
    if (gather(&o.s[1], o.g[1])) /* waits for the reads of the stash by itself */
        return 1;
    CHECK(tide_wait(o.g[0], TIDE_DONE, NULL) == TIDE_OK);
    CHECK(small_wrong_output(&o.s[0], 5, ALL, 1.0f, 0.0f, out) == 0);
    a.grads = (const void *const *)none; /* nothing to stash: the slot comes back all the same */
    a.out = NULL;
    CHECK(tide_grads_stash(o.g[1], &a, NULL) == TIDE_OK);
    CHECK(tide_reduce_scatter(o.g[1], &a, NULL) == TIDE_OK);
    if (gather(&o.s[0], o.g[0]))
        return 1;
    small_free(grads);
    free(out);
    return one_close(&o);
}

static int stash_multicast_body(threads_rank *rank)
{
    void *grads[SMALL_PARAMS];
    tide_reduce_scatter_args a;
    one o;
    if (one_open(&o, rank, NULL) || gather(&o.s[0], o.g[0]))
        return 1;
    small_grads(&o.s[0], 0, TIDE_BF16, ALL, grads);
    a = rs_args(grads, NULL, TIDE_BF16);
    CHECK_FAILS(tide_grads_stash(o.g[0], &a, NULL), TIDE_ERR_UNSUPPORTED, "one landing serves the node");
    small_free(grads);
    return one_close(&o);
}

static void test_stash(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, stash_body, NULL), 0);
    assert_int_equal(threads_run(2, stash_body, NULL), 0);
    assert_int_equal(threads_run(2, stash_multicast_body, NULL), 0);
}

static int poison_body(threads_rank *rank)
{
    tide_options options = TIDE_OPTIONS_INIT;
    tide_comm_info info = {.size = sizeof info};
    one o;
    options.poison = 1;
    if (one_open(&o, rank, &options))
        return 1;
    CHECK(tide_comm_get_info(o.comm, &info) == TIDE_OK && info.multicast == 0);
    for (int round = 0; round < 3; round++) {
        if (gather(&o.s[0], o.g[0]))
            return 1;
        CHECK(tide_slot_release(o.g[0], NULL) == TIDE_OK);
        if (round == 2)
            break; /* later rounds: a peer may be gathering into it already */
        for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
            tide_tensor t = {.size = sizeof t};
            CHECK(tide_group_tensor(o.g[0], TIDE_TENSOR_PARAM, p, &t) == TIDE_OK);
            for (uint64_t i = 0; i < small_whole(&o.s[0], p); i++)
                CHECK(isnan(tide_bf16_to_f32(((uint16_t *)t.data)[i])));
        }
    }
    return one_close(&o);
}

static void test_poison(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, poison_body, NULL), 0);
    assert_int_equal(threads_run(2, poison_body, NULL), 0);
}

static int allocation_body(threads_rank *rank)
{
    void *grads[SMALL_PARAMS];
    tide_reduce_scatter_args a;
    uint64_t made;
    float *out;
    one o;
    if (one_open(&o, rank, NULL))
        return 1;
    out = output(o.g[0], NULL);
    small_grads(&o.s[0], 0, TIDE_BF16, ALL, grads);
    a = rs_args(grads, out, TIDE_BF16);
    made = tide_alloc_count();
    for (int i = 0; i < 50; i++) {
        CHECK(tide_all_gather(o.g[0], NULL, NULL) == TIDE_OK && tide_wait(o.g[0], TIDE_READY, NULL) == TIDE_OK);
        CHECK(tide_slot_release(o.g[0], NULL) == TIDE_OK && tide_reduce_scatter(o.g[0], &a, NULL) == TIDE_OK);
        CHECK(tide_wait(o.g[0], TIDE_DONE, NULL) == TIDE_OK);
    }
    CHECK(tide_alloc_count() == made);
    small_free(grads);
    free(out);
    return one_close(&o);
}

static void test_calls_allocate_nothing(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 4; n *= 2)
        assert_int_equal(threads_run(n, allocation_body, NULL), 0);
}

static int empty_body(threads_rank *rank) /* a group without elements */
{
    tide_param params[2] = {{"none", 2, 0, {0, 4}}, {"nil", 1, 0, {0}}};
    tide_group_desc desc = TIDE_GROUP_DESC_INIT;
    void *grads[2] = {params, NULL};
    tide_reduce_scatter_args a = rs_args(grads, NULL, TIDE_BF16);
    tide_tensor t = {.size = sizeof t};
    tide_comm *comm;
    tide_group *g;
    uint64_t n;
    CHECK(small_comm(rank, 2, NULL, &comm) == TIDE_OK);
    desc.n_params = 2;
    desc.params = params;
    CHECK(tide_groups_create(comm, &desc, 1, &g) == TIDE_OK);
    for (int i = 0; i < 3; i++) {
        CHECK(tide_shard_adopt(g, 0, NULL, 0, NULL) == TIDE_OK);
        CHECK(tide_all_gather(g, NULL, NULL) == TIDE_OK && tide_wait(g, TIDE_READY, NULL) == TIDE_OK);
        CHECK(tide_group_tensor(g, TIDE_TENSOR_PARAM, 0, &t) == TIDE_OK && t.bytes == 0);
        CHECK(tide_group_output_elements(g, NULL, &n) == TIDE_OK && n == 0);
        CHECK(tide_slot_release(g, NULL) == TIDE_OK);
        CHECK(tide_reduce_scatter(g, &a, NULL) == TIDE_OK && tide_wait(g, TIDE_DONE, NULL) == TIDE_OK);
    }
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_no_elements(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, empty_body, NULL), 0);
    assert_int_equal(threads_run(2, empty_body, NULL), 0);
}

/* ---- two sets on one communicator ---------------------------------------------------------------- */

static int sets_body(threads_rank *rank)
{
    tide_comm_info info = {.size = sizeof info};
    tide_group *g[2];
    small_layer s[2];
    tide_comm *comm;
    uint64_t bytes = 0;
    CHECK(small_comm(rank, 2, NULL, &comm) == TIDE_OK);
    for (int i = 0; i < 2; i++) {
        small_init(&s[i], rank, "s", TIDE_BF16, TIDE_BF16, TIDE_BF16, i);
        CHECK(tide_groups_create(comm, &s[i].desc, 1, &g[i]) == TIDE_OK && small_adopt(&s[i], g[i]) == TIDE_OK);
        CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.arena_bytes > bytes);
        bytes = info.arena_bytes;
    }
    for (int call = 0; call < 4; call++) {
        for (int i = 0; i < 2; i++) {
            if (gather(&s[i], g[i])) /* each set has its own landing */
                return 1;
        }
        for (int i = 0; i < 2; i++) {
            if (reduce(&s[i], g[i], call, TIDE_BF16, ALL, false, 0))
                return 1;
            CHECK(tide_slot_release(g[i], NULL) == TIDE_OK);
        }
    }
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.calls == 16);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_two_sets(void **state)
{
    (void)state;
    assert_int_equal(threads_run(4, sets_body, NULL), 0);
}

/* ---- bytes a call, from the definitions --------------------------------------------------------------- */

typedef struct byte_count {
    uint32_t node_size;
    int64_t multicast;
    int shard_dtype;
} byte_count;

static int bytes_body(threads_rank *rank)
{
    const byte_count *c = rank->context;
    tide_options options = TIDE_OPTIONS_INIT;
    tide_group_path path = {.size = sizeof path};
    uint64_t nodes = rank->n_ranks / c->node_size, local = c->node_size, size = 0, theirs = 0, expected;
    small_layer s;
    tide_group *g;
    tide_comm *comm;
    options.multicast = c->multicast;
    CHECK(small_comm(rank, c->node_size, &options, &comm) == TIDE_OK);
    small_init(&s, rank, "b", TIDE_BF16, c->shard_dtype, TIDE_BF16, 0);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK);
    CHECK(tide_group_get_path(g, &path) == TIDE_OK);
    for (uint32_t p = 0; p < SMALL_PARAMS; p++)
        size += small_shard(&s, p) * 2;
    /* each of the node's M shards once a landing; M - 1 of them over the rail; a cast's own copy of M > 1 */
    expected = nodes * size * (c->multicast == 1 ? 1 : local) + (nodes - 1) * size;
    if (c->shard_dtype != TIDE_BF16 && nodes > 1)
        expected += size;
    if (local == 1) /* the own one once, the others straight over the rail */
        expected = nodes * size;
    CHECK(path.all_gather_bytes == expected);
    if (nodes == 1) { /* my gradients' real rows of every other rank, pushed once */
        for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
            uint64_t mine = small_shard(&s, p), first = rank->rank * mine;
            if (p != 3) /* padded at the end; columns never are */
                mine = first >= small_whole(&s, p)         ? 0
                       : small_whole(&s, p) - first < mine ? small_whole(&s, p) - first
                                                           : mine;
            theirs += (small_whole(&s, p) - mine) * 2;
        }
        CHECK(path.reduce_scatter_bytes == theirs);
    } else {
        /* over the rail fp32, or bf16 as it is, and more */
        CHECK(path.reduce_scatter_bytes > (nodes - 1) * size * (local > 1 ? 2 : 1));
    }
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_bytes_a_call(void **state)
{
    static const byte_count cases[] = {{4, 0, TIDE_BF16}, {4, 1, TIDE_BF16}, {2, 0, TIDE_BF16}, {2, 1, TIDE_BF16},
                                       {1, 0, TIDE_BF16}, {4, 0, TIDE_F32},  {4, 1, TIDE_F32},  {2, 0, TIDE_F32},
                                       {1, 0, TIDE_F32}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        byte_count c = cases[i];
        assert_int_equal(threads_run(4, bytes_body, &c), 0);
    }
}

/* ---- a subset that cannot be compiled for want of memory -------------------------------------------------- */

static void test_compile_out_of_memory(void **state)
{
    threads_rank rank = {NULL, 0, 1, NULL};
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_reduce_scatter_args a;
    void *grads[SMALL_PARAMS];
    uint64_t live, n = 1;
    float out[1024];
    small_layer s;
    tide_group *g;
    tide_comm *comm;
    int status;
    (void)state;
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_OK);
    small_init(&s, &rank, "m", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    assert_int_equal(tide_groups_create(comm, &s.desc, 1, &g), TIDE_OK);
    small_grads(&s, 0, TIDE_F32, 5, grads);
    a = rs_args(grads, out, TIDE_F32);
    live = tide_alloc_live();
    for (;; n++) {
        tide_alloc_fail_at(n);
        status = tide_reduce_scatter(g, &a, NULL);
        tide_alloc_fail_at(0);
        if (status == TIDE_OK)
            break;
        assert_int_equal(status, TIDE_ERR_MEMORY);
        assert_int_equal(tide_comm_check(comm, NULL), TIDE_OK);
        assert_int_equal(tide_comm_sync(comm), TIDE_OK); /* where bound programs are dropped */
        assert_int_equal(tide_alloc_live(), live);
    }
    assert_true(n > 5);
    assert_int_equal(tide_wait(g, TIDE_DONE, NULL), TIDE_OK);
    assert_int_equal(small_wrong_output(&s, 0, 5, 1.0f, 0.0f, out), 0);
    small_free(grads);
    assert_int_equal(tide_comm_destroy(comm), TIDE_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topologies),   cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_knobs),        cmocka_unit_test(test_slot_reuse),
        cmocka_unit_test(test_slots),        cmocka_unit_test(test_phases),
        cmocka_unit_test(test_subsets),      cmocka_unit_test(test_stash),
        cmocka_unit_test(test_poison),       cmocka_unit_test(test_calls_allocate_nothing),
        cmocka_unit_test(test_no_elements),  cmocka_unit_test(test_two_sets),
        cmocka_unit_test(test_bytes_a_call), cmocka_unit_test(test_compile_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
