/*
 * test_calls_walk.c - random walks over the public calls: groups that share landings, stage, staging, outbox and inbox,
 * in every order that is legal, on all ranks the same, each rank at its own pace. Every result is compared with its
 * definition.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../harness/sanitized.h"
#include "../harness/small.h"
#include "comm/comm.h"

enum { GROUPS = 5, STEPS = 120, BANKS = 2 };

typedef struct walk {
    uint32_t n_ranks, node_size;
    tide_options options;
    uint64_t seed;
    fab_inject inject;
    bool partial; /* the outbox is: one read may be ahead */
} walk;

typedef struct reduction {
    bool open, netted, frees; /* frees: its network phase gives the landing back */
    int call, dtype, accumulate, seed;
    unsigned present;
    float *out;
    void *grads[SMALL_PARAMS];
} reduction;

typedef struct walker {
    const walk *w;
    const threads_rank *rank;
    tide_comm *comm;
    small_layer s[GROUPS];
    tide_group *g[GROUPS];
    enum { FREE, HELD, READING } held[GROUPS];
    void *shards[GROUPS][SMALL_PARAMS]; /* of a gather under way */
    reduction r[GROUPS];
    int queue[BANKS], n_queue; /* groups whose network phase is due */
    int calls;
    uint64_t common, own; /* random numbers: the same on all ranks; this rank's */
} walker;

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static bool ring(int i) { return i != 2 && i != 4; }

/* The group that holds the landing which group i would use; -1: none. */
static int owner(const walker *k, int i)
{
    static const int slot[GROUPS] = {0, 1, 2, 0, 3};
    for (int o = 0; o < GROUPS; o++) {
        if (k->held[o] && slot[o] == slot[i])
            return o;
    }
    return -1;
}

static int gather(walker *k, int i)
{
    void *shards[SMALL_PARAMS] = {0};
    bool cast = k->s[i].desc.input == TIDE_INPUT_ARGUMENT;
    int holder = owner(k, i), seed = k->s[i].seed;

    if (holder < 0)
        k->s[i].seed = seed = (int)(next(&k->common) % 100); /* new values each time */
    if (cast)
        small_shards(&k->s[i], shards);
    if (holder >= 0) {
        CHECK_FAILS(tide_all_gather(k->g[i], cast ? (const void *const *)shards : NULL, NULL), TIDE_ERR_STATE,
                    k->held[holder] == READING ? "still reads gradients"
                    : holder == i              ? "already gathered"
                                               : "still belongs to");
        small_free(shards);
        return 0;
    }
    if (!cast)
        CHECK(small_adopt(&k->s[i], k->g[i]) == TIDE_OK);
    memcpy(k->shards[i], shards, sizeof shards);
    CHECK(tide_all_gather(k->g[i], cast ? (const void *const *)shards : NULL, NULL) == TIDE_OK);
    k->held[i] = HELD;
    return 0;
}

/* Before a landing is given up it must have been read; sometimes it is read earlier, too. */
static int look(walker *k, int i)
{
    CHECK(tide_wait(k->g[i], TIDE_READY, NULL) == TIDE_OK);
    CHECK(small_wrong_params(&k->s[i], k->g[i]) == 0);
    small_free(k->shards[i]);
    memset(k->shards[i], 0, sizeof k->shards[i]);
    return 0;
}

static int release(walker *k, int i)
{
    if (k->held[i] != HELD) {
        CHECK_FAILS(tide_slot_release(k->g[i], NULL), TIDE_ERR_STATE,
                    k->held[i] == READING ? "has stashed gradients" : "is not gathered");
        return 0;
    }
    if (look(k, i))
        return 1;
    CHECK(tide_slot_release(k->g[i], NULL) == TIDE_OK);
    k->held[i] = FREE;
    return 0;
}

static int finish(walker *k, int i)
{
    reduction *r = &k->r[i];
    int seed = k->s[i].seed;
    CHECK(tide_wait(k->g[i], TIDE_READ_DONE, NULL) == TIDE_OK);
    small_free(r->grads);
    CHECK(tide_wait(k->g[i], TIDE_DONE, NULL) == TIDE_OK);
    k->s[i].seed = r->seed; /* a gather since then has changed it */
    CHECK(small_wrong_output(&k->s[i], r->call, r->present, 0.5f, r->accumulate ? 1000.0f : 0.0f, r->out) == 0);
    k->s[i].seed = seed;
    free(r->out);
    r->open = false;
    return 0;
}

static int read_phase(walker *k, int i)
{
    reduction *r = &k->r[i];
    tide_reduce_scatter_args a = TIDE_REDUCE_SCATTER_ARGS_INIT;
    uint64_t n, dice = next(&k->common);
    bool stash = k->w->options.mode == 1 && k->held[i] == HELD && dice % 4;
    if (r->open || k->n_queue == (k->w->partial ? 1 : BANKS) || k->s[i].desc.grad_dtype == TIDE_NONE)
        return 0;
    *r = (reduction){.open = true,
                     .call = k->calls++,
                     .accumulate = dice >> 8 & 1,
                     .present = dice >> 9 & 15,
                     .seed = k->s[i].seed};
    r->dtype = dice >> 13 & 1 || stash ? TIDE_BF16 : TIDE_F32;
    CHECK(tide_group_output_elements(k->g[i], NULL, &n) == TIDE_OK);
    r->out = malloc(n * sizeof(float));
    for (uint64_t e = 0; e < n; e++)
        r->out[e] = 1000.0f;
    if (stash && look(k, i))
        return 1;
    small_grads(&k->s[i], r->call, r->dtype, r->present, r->grads);
    a.grads = (const void *const *)r->grads;
    a.out = r->out;
    a.grad_dtype = r->dtype;
    a.accumulate = r->accumulate;
    a.alpha = 0.5f;
    if (stash) {
        CHECK(tide_grads_stash(k->g[i], &a, NULL) == TIDE_OK);
        small_free(r->grads);
        memset(r->grads, 0, sizeof r->grads);
        a.mode = 1;
    }
    CHECK(tide_reduce_scatter_read(k->g[i], &a, NULL) == TIDE_OK);
    k->queue[k->n_queue++] = i;
    if (stash) {
        r->frees = k->w->partial && r->present != 0;
        k->held[i] = r->frees ? READING : FREE;
    }
    return 0;
}

static int net_phase(walker *k)
{
    int i = k->queue[0];
    if (k->n_queue == 0)
        return 0;
    CHECK(tide_reduce_scatter_net(k->g[i], NULL) == TIDE_OK);
    k->r[i].netted = true;
    if (k->r[i].frees)
        k->held[i] = FREE;
    k->n_queue--;
    memmove(k->queue, k->queue + 1, sizeof k->queue[0] * (size_t)k->n_queue);
    return 0;
}

static int step(walker *k)
{
    uint64_t dice = next(&k->common);
    int i = (int)(dice >> 32) % GROUPS;
    if (i < 0)
        i += GROUPS;
    if (next(&k->own) % 8 == 0)
        usleep((useconds_t)(next(&k->own) % 300));
    switch (dice % 8) {
    case 0:
    case 1:
        return gather(k, i);
    case 2:
        return k->held[i] == HELD ? look(k, i) : 0;
    case 3:
        return release(k, i);
    case 4:
    case 5:
        return read_phase(k, i);
    case 6:
        return net_phase(k);
    default:
        return k->r[i].open && k->r[i].netted ? finish(k, i) : 0;
    }
}

static int walk_body(threads_rank *rank)
{
    const walk *w = rank->context;
    tide_group_desc descs[GROUPS];
    walker *k = calloc(1, sizeof *k);
    *k = (walker){.w = w, .rank = rank, .common = w->seed, .own = w->seed + rank->rank + 1};
    CHECK(small_comm(rank, w->node_size, &w->options, &k->comm) == TIDE_OK);
    fab_host_set_seed(k->comm->device, w->seed + 100 * rank->rank + 1);
    if (w->inject.seed)
        fab_host_inject(k->comm->device, &w->inject);
    for (int i = 0; i < GROUPS; i++) {
        static const int types[GROUPS][3] = {{TIDE_BF16, TIDE_BF16, TIDE_BF16},
                                             {TIDE_BF16, TIDE_F32, TIDE_BF16},
                                             {TIDE_F32, TIDE_F32, TIDE_F32},
                                             {TIDE_BF16, TIDE_BF16, TIDE_F32},
                                             {TIDE_F16, TIDE_F16, TIDE_NONE}};
        small_init(&k->s[i], rank, "g", types[i][0], types[i][1], types[i][2], i);
        k->s[i].desc.landing = ring(i) ? TIDE_LANDING_RING : TIDE_LANDING_PRIVATE;
        descs[i] = k->s[i].desc;
    }
    CHECK(tide_groups_create(k->comm, descs, GROUPS, k->g) == TIDE_OK);
    for (int n = 0; n < STEPS; n++) {
        if (step(k))
            return 1;
    }
    while (k->n_queue > 0) {
        if (net_phase(k))
            return 1;
    }
    for (int i = 0; i < GROUPS; i++) {
        if ((k->r[i].open && finish(k, i)) || (k->held[i] == HELD && look(k, i)))
            return 1;
    }
    CHECK(tide_comm_destroy(k->comm) == TIDE_OK);
    free(k);
    return 0;
}

static void go(const walk *w)
{
    walk copy = *w;
    int failed = threads_run(w->n_ranks, walk_body, &copy);
    if (failed != 0)
        fprintf(stderr, "walk: ranks %u node_size %u mode %lld multicast %lld seed %llu\n", w->n_ranks, w->node_size,
                (long long)w->options.mode, (long long)w->options.multicast, (unsigned long long)w->seed);
    assert_int_equal(failed, 0);
}

static const uint32_t shapes[][2] = {{1, 1}, {4, 4}, {4, 2}, {3, 1}, {6, 2}, {6, 3}, {8, 2}};

static void walks(int mode, int64_t multicast, int64_t k, const fab_inject *inject)
{
    for (size_t t = 0; t < sizeof shapes / sizeof shapes[0]; t++) {
        for (uint64_t seed = 1; seed <= (SANITIZED ? 1 : 3); seed++) {
            walk w = {shapes[t][0], shapes[t][1], TIDE_OPTIONS_INIT, seed * 1000 + t, {0}, false};
            uint32_t nodes = shapes[t][0] / shapes[t][1];
            w.options.mode = mode;
            w.options.multicast = multicast;
            w.options.k = k;
            w.options.chunk = 16;
            w.options.head_bytes = 64;
            if (inject)
                w.inject = *inject;
            w.partial = mode == 1 && k == 1 && nodes > 3; /* two consecutive rounds of one, of more remote nodes */
            go(&w);
        }
    }
}

static void test_in_place(void **state)
{
    (void)state;
    walks(0, TIDE_AUTO, TIDE_AUTO, NULL);
    walks(0, 0, 1, NULL);
}

static void test_slot_reuse(void **state)
{
    (void)state;
    walks(1, TIDE_AUTO, 1, NULL);
}

static void test_slow_rail(void **state)
{
    const fab_inject inject = {.seed = 7, .delay_us = 300};
    (void)state;
    walks(0, TIDE_AUTO, TIDE_AUTO, &inject);
    walks(1, TIDE_AUTO, 1, &inject);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_slot_reuse),
        cmocka_unit_test(test_slow_rail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
