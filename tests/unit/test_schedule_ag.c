/*
 * The all-gather's op list, executed by the interpreter on all ranks and compared with an oracle that places elements
 * by their coordinates. The values of every call differ, so that whatever a call leaves behind or takes too early
 * shows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/dice.h"
#include "../harness/interp.h"
#include "../harness/sanitized.h"
#include "../harness/spent.h"

enum { MAX_GROUPS = 5, MAX_PARAMS = 8, MAX_RANKS = 36 };

/* ---- a world: groups, their plan, schedules of all ranks, values ---------------------------- */

typedef struct group_world {
    tide_group_desc desc;
    tide_param params[MAX_PARAMS];
    schedule schedules[MAX_RANKS];
    void *args[MAX_RANKS][MAX_PARAMS]; /* shards that are passed to the calls */
} group_world;

typedef struct world {
    tide_topology topology;
    tide_options options;
    uint32_t n_groups, n_ranks;
    group_world groups[MAX_GROUPS];
    tide_plan *plan;
    interp *t;
    uint64_t seed;
} world;

typedef struct visit {
    world *w;
    uint32_t group, call;
} visit; /* context of the caller's callbacks */

static uint32_t item_of(const tide_group_desc *d, int dtype)
{
    return dtype == TIDE_OPAQUE ? d->item_size : dtype == TIDE_F32 ? 4 : 2;
}

static int64_t shard_rows(const world *w, const tide_param *p)
{
    int64_t n = w->n_ranks, rows = p->ndim ? p->dims[p->shard_dim] : 1;
    return (rows + n - 1) / n;
}

/* Elements of a shard, and the element of the full (padded) parameter that element e of rank r's shard is. */
static int64_t shard_elements(const world *w, const tide_param *p)
{
    int64_t n = shard_rows(w, p);
    for (int d = 0; d < p->ndim; d++)
        n *= d == p->shard_dim ? 1 : p->dims[d];
    return n;
}

static int64_t place(const world *w, const tide_param *p, uint32_t r, int64_t e)
{
    int64_t coordinate[TIDE_MAX_DIMS], rows = shard_rows(w, p), full = 0;
    for (int d = p->ndim - 1; d >= 0; d--) {
        int64_t extent = d == p->shard_dim ? rows : p->dims[d];
        coordinate[d] = e % extent;
        e /= extent;
    }
    for (int d = 0; d < p->ndim; d++) {
        int64_t extent = d == p->shard_dim ? rows * w->n_ranks : p->dims[d];
        full = full * extent + coordinate[d] + (d == p->shard_dim ? r * rows : 0);
    }
    return p->ndim ? full : r;
}

/* Item x of a shard in a call, as `dtype`. Formats that are cast hold multiples of 1/4 below 64, exact in all. */
static void value(const visit *v, uint32_t r, uint32_t p, int64_t e, int dtype, uint32_t item, uint8_t *out)
{
    uint32_t h = v->call * 2654435761u ^ (v->group * 97 + r * 31 + p * 7 + 1) * 40503u ^ (uint32_t)e * 2246822519u;
    float f;
    uint16_t half;
    h ^= h >> 15;
    h *= 2654435761u;
    h ^= h >> 13;
    if (dtype == TIDE_OPAQUE) {
        for (uint32_t i = 0; i < item; i++)
            out[i] = (uint8_t)(h >> i % 4 * 8);
        return;
    }
    f = (float)((int)(h % 512) - 256) / 4;
    if (dtype == TIDE_F32) {
        memcpy(out, &f, 4);
        return;
    }
    half = dtype == TIDE_F16 ? tide_f32_to_f16(f) : tide_f32_to_bf16(f);
    memcpy(out, &half, 2);
}

/* Writes the shards of a call where the all-gather will read them. */
static int give_shards(void *context, uint32_t rank)
{
    const visit *v = context;
    group_world *g = &v->w->groups[v->group];
    uint32_t item = item_of(&g->desc, g->desc.shard_dtype);
    uint8_t *resident = interp_memory(v->w->t, REGION_RESIDENT, 0, rank) + v->w->plan->groups[v->group].resident;
    for (uint32_t p = 0; p < g->desc.n_params; p++) {
        int64_t n = shard_elements(v->w, &g->params[p]);
        uint8_t *to = g->desc.input == TIDE_INPUT_ADOPTED ? resident : g->args[rank][p];
        for (int64_t e = 0; e < n; e++)
            value(v, rank, p, e, g->desc.shard_dtype, item, to + e * item);
        resident += n * item;
    }
    return 0;
}

/* Every byte of every parameter, then the landing is spoilt unless others still read it. */
static int check_landing(void *context, uint32_t rank)
{
    const visit *v = context;
    world *w = v->w;
    group_world *g = &w->groups[v->group];
    uint32_t item = item_of(&g->desc, g->desc.dtype);
    const plan_bank *bank = &w->plan->map.region[REGION_LANDING].banks[w->plan->groups[v->group].slot];
    uint8_t *landing = interp_memory(w->t, REGION_LANDING, w->plan->groups[v->group].slot, rank), expected[64];
    for (uint32_t p = 0; p < g->desc.n_params; p++) {
        const uint8_t *base = landing + w->plan->groups[v->group].geo.params[p].landing;
        int64_t n = shard_elements(w, &g->params[p]);
        for (uint32_t r = 0; r < w->n_ranks; r++)
            for (int64_t e = 0; e < n; e++) {
                value(v, r, p, e, g->desc.dtype, item, expected);
                if (memcmp(base + place(w, &g->params[p], r, e) * item, expected, item) != 0)
                    return interp_fail(
                        w->t, "seed %llu: rank %u group %u call %u: param %u, element %lld of rank %u's shard is wrong",
                        (unsigned long long)w->seed, rank, v->group, v->call, p, (long long)e, r);
            }
    }
    if (!w->options.multicast || w->options.target)
        memset(landing, 0xee, bank->bytes);
    return 0;
}

static void world_open(world *w)
{
    tide_group_desc descs[MAX_GROUPS];
    w->n_ranks = w->topology.nodes * w->topology.local;
    for (uint32_t g = 0; g < w->n_groups; g++) {
        w->groups[g].desc.params = w->groups[g].params;
        descs[g] = w->groups[g].desc;
    }
    if (tide_plan_create(&w->topology, descs, w->n_groups, &w->options, &w->plan) != TIDE_OK)
        fail_msg("%s", tide_last_error());
    for (uint32_t g = 0; g < w->n_groups; g++)
        for (uint32_t r = 0; r < w->n_ranks; r++) {
            group_world *gw = &w->groups[g];
            assert_int_equal(schedule_build_ag(w->plan, g, r, &gw->schedules[r]), TIDE_OK);
            for (uint32_t p = 0; p < gw->desc.n_params; p++)
                gw->args[r][p] =
                    malloc((size_t)shard_elements(w, &gw->params[p]) * item_of(&gw->desc, gw->desc.shard_dtype) + 1);
        }
    w->t = interp_create(w->plan, w->seed);
}

static void world_close(world *w)
{
    for (uint32_t g = 0; g < w->n_groups; g++)
        for (uint32_t r = 0; r < w->n_ranks; r++) {
            for (uint32_t p = 0; p < w->groups[g].desc.n_params; p++)
                free(w->groups[g].args[r][p]);
            schedule_clear(&w->groups[g].schedules[r]);
        }
    interp_destroy(w->t);
    tide_plan_destroy(w->plan);
}

/* Calls of all groups in turn, one gathered ahead where the slot allows it. Returns interp_run's verdict. */
static int world_run(world *w, uint32_t calls)
{
    visit visits[64];
    uint32_t n = 0, total = calls * w->n_groups,
             held = UINT32_MAX; /* the visit that is gathered and not yet consumed */

    assert_true(total <= 64);
    for (; n < total; n++) {
        uint32_t g = n % w->n_groups;
        visits[n] = (visit){w, g, n / w->n_groups};
        for (uint32_t r = 0; r < w->n_ranks; r++) {
            interp_args args = {w->groups[g].desc.input == TIDE_INPUT_ARGUMENT ? w->groups[g].args[r] : NULL, 1, 0};
            bool same_slot = held != UINT32_MAX && w->plan->groups[visits[held].group].slot == w->plan->groups[g].slot;
            for (int early = 1; early >= 0; early--) {
                if (held != UINT32_MAX && same_slot == early) {
                    if (interp_consume(w->t, r, EVENT_READY, visits[held].group, check_landing, &visits[held]) != 0 ||
                        interp_free_slot(w->t, r, w->plan->groups[visits[held].group].slot) != 0)
                        return -1;
                }
                if (early && (interp_consume(w->t, r, -1, 0, give_shards, &visits[n]) != 0 ||
                              interp_enqueue(w->t, &w->groups[g].schedules[r], INTERP_ALL, &args) != 0))
                    return -1;
            }
            if (interp_steps(w->t, interp_random(w->t) % 40) != 0)
                return -1;
        }
        held = n;
    }
    for (uint32_t r = 0; r < w->n_ranks; r++)
        interp_consume(w->t, r, EVENT_READY, visits[held].group, check_landing, &visits[held]);
    return interp_run(w->t);
}

static void world_check(world *w, uint32_t calls)
{
    world_open(w);
    if (world_run(w, calls) != 0)
        fail_msg("M=%u L=%u seed %llu: %s", w->topology.nodes, w->topology.local, (unsigned long long)w->seed,
                 interp_error(w->t));
    world_close(w);
}

/* ---- descriptions --------------------------------------------------------------------------- */

static void random_param(tide_param *p, uint32_t n_ranks)
{
    *p = (tide_param){0};
    switch (dice(7)) {
    case 0: /* 0-d */
        break;
    case 1: /* few rows: some ranks own none */
        p->ndim = 2;
        p->dims[0] = 1 + dice(3);
        p->dims[1] = 1 + dice(5);
        break;
    case 2: /* nothing */
        p->ndim = 2;
        p->dims[0] = dice(2) * 4;
        break;
    case 3: /* Shard(1), several strips */
        p->ndim = 3;
        p->shard_dim = 1;
        p->dims[0] = 1 + dice(6);
        p->dims[1] = n_ranks * (1 + dice(2));
        p->dims[2] = 1 + dice(3);
        break;
    case 4: /* equal neighbours come from here */
        p->ndim = 1;
        p->dims[0] = n_ranks * 3;
        break;
    default: /* uneven */
        p->ndim = 2;
        p->dims[0] = 1 + dice(4 * n_ranks);
        p->dims[1] = 1 + dice(4);
    }
}

static void random_group(group_world *g, uint32_t n_ranks)
{
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    static const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16};
    g->desc = init;
    g->desc.n_params = 1 + dice(MAX_PARAMS);
    for (uint32_t p = 0; p < g->desc.n_params; p++)
        random_param(&g->params[p], n_ranks);
    g->desc.dtype = g->desc.shard_dtype = dtypes[dice(3)];
    g->desc.landing = dice(4) == 0 ? TIDE_LANDING_PRIVATE : TIDE_LANDING_RING;
    switch (dice(4)) {
    case 0:
        g->desc.input = TIDE_INPUT_ARGUMENT;
        g->desc.shard_dtype = dtypes[dice(3)]; /* often a cast */
        break;
    case 1:
        g->desc.input = (int)dice(2);
        g->desc.dtype = g->desc.shard_dtype = TIDE_OPAQUE;
        g->desc.grad_dtype = TIDE_NONE;
        g->desc.item_size = 1 + dice(17);
        break;
    default:
        break;
    }
}

static void random_world(world *w, uint32_t nodes, uint32_t local, uint64_t seed)
{
    static const int64_t heads[] = {16, 100, 1000, INT64_C(8) << 20};
    const tide_topology topology = TIDE_TOPOLOGY_INIT;
    const tide_options options = TIDE_OPTIONS_INIT;
    memset(w, 0, sizeof *w);
    dice_seed(seed * 7919 + nodes * 131 + local);
    w->seed = seed;
    w->topology = topology;
    w->topology.nodes = nodes;
    w->topology.local = local;
    w->options = options;
    w->options.multicast = dice(2);
    w->options.target = dice(2);
    w->options.head_bytes = heads[dice(4)];
    w->options.n_ctx = 1 + dice(4);
    w->options.ring_slots = 1 + dice(3);
    w->n_groups = 1 + dice(4);
    for (uint32_t g = 0; g < MAX_GROUPS; g++)
        random_group(&w->groups[g], nodes * local);
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void every_topology_gathers_every_byte(void **state)
{
    static world w;
    (void)state;
    for (uint32_t nodes = 1; nodes <= 9; nodes++)
        for (uint32_t local = 1; local <= 4; local++)
            for (uint64_t seed = 1; seed <= (nodes == 1 ? 24 : 8) / (SANITIZED ? 4 : 1); seed++) {
                random_world(&w, nodes, local, seed);
                world_check(&w, 3);
            }
}

/* A group without elements still fences, credits and paces, so that its neighbours' counts stay right. */
static void empty_groups_take_part(void **state)
{
    static world w;
    (void)state;
    for (uint32_t nodes = 1; nodes <= 5; nodes++)
        for (uint64_t seed = 1; seed <= 6; seed++) {
            random_world(&w, nodes, 2, seed);
            w.n_groups = 3;
            w.groups[1].desc.n_params = 2;
            w.groups[1].params[0] = (tide_param){"none", 1, 0, {0}};
            w.groups[1].params[1] = (tide_param){"nothing", 3, 1, {3, 0, 2}};
            world_check(&w, 3);
        }
}

/* Puts and signals of all ranks to one peer and context, the most that there are. */
static uint32_t most_messages(const world *w, uint32_t group)
{
    uint32_t nodes = w->topology.nodes, most = 0;
    for (uint32_t rank = 0; rank < nodes; rank++) {
        const schedule *s = &w->groups[group].schedules[rank];
        for (uint32_t peer = 0; peer < nodes; peer++)
            for (uint32_t ctx = 0; ctx < 16; ctx++) {
                uint32_t n = 0;
                for (uint32_t i = 0; i < s->n_puts; i++)
                    n += (uint32_t)s->puts[i].peer == peer && s->puts[i].ctx == ctx;
                for (uint32_t i = 0; i < s->n_ops; i++)
                    for (uint32_t k = 0; s->ops[i].kind == OP_SIGNAL && k < s->ops[i].count; k++) {
                        const op_post *post = &s->posts[s->ops[i].first + k];
                        n += s->ops[i].scope == SCOPE_RAIL && (uint32_t)post->rank == peer && post->ctx == ctx;
                    }
                most = n > most ? n : most;
            }
    }
    return most;
}

/* One rank a node: no stage where a peer's ring holds a round's puts, the stage where it holds one fewer. */
static void landing_to_landing_as_far_as_the_ring_holds(void **state)
{
    static world w;
    uint32_t tight = 0;
    (void)state;
    for (uint32_t nodes = 2; nodes <= 9; nodes++)
        for (uint64_t seed = 1; seed <= 6; seed++) {
            for (int fewer = 0; fewer < 2; fewer++) {
                random_world(&w, nodes, 1, seed);
                w.n_groups = 1;
                w.options.multicast = 0;
                w.groups[0].desc.n_params = 3;
                w.groups[0].params[0] = (tide_param){"rows", 2, 0, {nodes * 3 - 1, 5}};
                w.groups[0].params[1] = (tide_param){"none", 1, 0, {0}};
                w.groups[0].params[2] = (tide_param){"columns", 2, 1, {2, nodes * 4}}; /* two strips */
                w.options.rail_ring = 3 * (nodes > 3 ? 2 : 1) + 3 - fewer;
                world_open(&w);
                assert_int_equal(w.plan->groups[0].direct, !fewer);
                assert_int_equal(w.plan->map.region[REGION_STAGE].bytes == 0, !fewer);
                if (!fewer) {
                    assert_in_range(most_messages(&w, 0), 1, w.options.rail_ring);
                    tight += most_messages(&w, 0) == w.options.rail_ring;
                }
                if (world_run(&w, 3) != 0)
                    fail_msg("%s", interp_error(w.t));
                world_close(&w);
            }
        }
    assert_true(tight > 0);
}

/* Transfers large enough for several contexts, and a last round that arrives in four groups. */
static void striped_and_split_transfers(void **state)
{
    static world w;
    uint32_t split = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        random_world(&w, seed % 2 ? 32 : 31, 1, seed);
        w.n_groups = 2;
        w.options.rail_ring = 1; /* through the stage */
        w.options.head_bytes = 16 << seed;
        w.options.n_ctx = 3;
        world_open(&w);
        for (uint32_t g = 0; g < 2; g++) { /* the last of five rounds has 16 or 15 slots */
            uint64_t heads = (seed % 2 ? 16 : 15) * w.plan->groups[g].geo.shard_bytes / (uint64_t)w.options.head_bytes;
            uint32_t arrivals = heads > 4 ? 4 : heads < 1 ? 1 : (uint32_t)heads;
            assert_int_equal(w.groups[g].schedules[7].n_call_events, 1 + 4 + arrivals);
            split += arrivals > 1;
        }
        if (world_run(&w, 2) != 0)
            fail_msg("%s", interp_error(w.t));
        world_close(&w);

        random_world(&w, 3, 2, seed);
        w.n_groups = 1;
        w.groups[0].desc.n_params = 1;
        w.groups[0].params[0] = (tide_param){"big", 2, 0, {6 * 61 - 5, 2203}};
        w.options.head_bytes = seed % 2 ? 16 : 150000;
        w.options.n_ctx = 4;
        world_open(&w);
        uint32_t contexts = 0;
        for (uint32_t i = 0; i < w.groups[0].schedules[0].n_puts; i++)
            contexts |= 1u << w.groups[0].schedules[0].puts[i].ctx;
        assert_true(contexts & 2);
        if (world_run(&w, 2) != 0)
            fail_msg("%s", interp_error(w.t));
        world_close(&w);
    }
    assert_true(split > 3);
}

/* ---- the interpreter itself: what a guard prevents is seen when the guard is missing -------- */

static void remove_ops(schedule *s, int kind, int scope, int event_or_which)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_ops; i++) {
        const op *o = &s->ops[i];
        bool is_event = kind == OP_JOIN || kind == OP_RECORD;
        if (o->kind == kind && o->scope == scope && (is_event ? o->event : o->which) == event_or_which)
            continue;
        s->ops[n++] = *o;
    }
    assert_true(n < s->n_ops);
    s->n_ops = s->n_read = n;
}

static void missing_guards_are_noticed(void **state)
{
    static const struct {
        uint32_t nodes;
        int kind, scope, what;
    } cuts[] = {
        {1, OP_WAIT, SCOPE_LOCAL, WORD_A},
        {1, OP_WAIT, SCOPE_LOCAL, WORD_B},
        {1, OP_JOIN, SCOPE_EXTERN, EVENT_FREE},
        {1, OP_JOIN, SCOPE_EXTERN, EVENT_IN},
        {3, OP_WAIT, SCOPE_LOCAL, WORD_A},
        {3, OP_WAIT, SCOPE_LOCAL, WORD_B},
        {3, OP_JOIN, SCOPE_RESOURCE, EVENT_SCATTERED},
        {3, OP_JOIN, SCOPE_CALL, 1},   /* the first round's arrival */
        {3, OP_SIGNAL, SCOPE_RAIL, 0}, /* no credit, no go: deadlock */
        {3, OP_WAIT, SCOPE_RAIL, 0},   /* nobody waits for anything */
    };
    static world w;
    (void)state;
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        bool noticed = false;
        for (uint64_t seed = 1; seed < 100 && !noticed; seed++) {
            random_world(&w, cuts[i].nodes, 2, seed);
            w.options.multicast = 0;
            w.options.ring_slots = 2;
            w.n_groups = 3; /* two groups share slot 0 and the stage */
            for (uint32_t g = 0; g < 3; g++) {
                w.groups[g].desc.landing = TIDE_LANDING_RING;
                w.groups[g].params[0] = (tide_param){"w", 2, 0, {17, 3}};
            }
            world_open(&w);
            for (uint32_t g = 0; g < 3; g++)
                for (uint32_t r = 0; r < w.n_ranks; r++)
                    remove_ops(&w.groups[g].schedules[r], cuts[i].kind, cuts[i].scope, cuts[i].what);
            noticed = world_run(&w, 4) != 0;
            assert_true(!noticed || interp_error(w.t)[0] != 0);
            world_close(&w);
        }
        if (!noticed)
            fail_msg("removing guard %zu was not noticed", i);
    }
}

static void different_order_is_a_tag_mismatch(void **state)
{
    static world w;
    (void)state;
    random_world(&w, 1, 2, 5);
    w.n_groups = 2;
    w.groups[1] = w.groups[0];
    w.options.ring_slots = 1;
    w.groups[0].desc.landing = w.groups[1].desc.landing = TIDE_LANDING_RING;
    world_open(&w);
    for (uint32_t r = 0; r < 2; r++) {
        interp_args args = {w.groups[r].desc.input == TIDE_INPUT_ARGUMENT ? w.groups[r].args[r] : NULL, 1, 0};
        interp_enqueue(w.t, &w.groups[r].schedules[r], INTERP_ALL, &args); /* rank 1 gathers the other group */
    }
    assert_int_not_equal(interp_run(w.t), 0);
    assert_non_null(strstr(interp_error(w.t), "the poster is in another call"));
    world_close(&w);
}

/* ---- shape of the list ---------------------------------------------------------------------- */

static void build(uint32_t nodes, uint32_t local, uint32_t n_params, int64_t rows, bool same, int multicast,
                  uint32_t rank, schedule *s, tide_plan **plan)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    static tide_param params[64];
    for (uint32_t p = 0; p < n_params; p++)
        params[p] = (tide_param){"w", 2, 0, {rows * nodes * local, same ? 64 : 64 + p}};
    d.n_params = n_params;
    d.params = params;
    t.nodes = nodes;
    t.local = local;
    o.multicast = multicast;
    assert_int_equal(tide_plan_create(&t, &d, 1, &o, plan), TIDE_OK);
    assert_int_equal(schedule_build_ag(*plan, 0, rank, s), TIDE_OK);
}

static void descriptors_grow_with_log_m(void **state)
{
    (void)state;
    for (uint32_t nodes = 2; nodes <= 1024; nodes *= 2) {
        plan_ag_round rounds[11];
        uint32_t n = plan_ag_rounds(nodes, rounds);
        tide_plan *plan;
        schedule s;
        build(nodes, 8, 30, 4, false, 1, 8 * (nodes / 3) + 5, &s, &plan);
        /* own shard, a run a parameter and round, one more where a round wraps, the last in at most four groups */
        assert_true(s.n_runs <= 30 * (1 + n + 3 + 1));
        assert_in_range(s.n_runs, 30 * (1 + n), 30 * (1 + n + 4));
        schedule_clear(&s);
        tide_plan_destroy(plan);
    }
}

static void equal_neighbours_merge(void **state)
{
    tide_plan *plan;
    schedule s;
    (void)state;
    build(1, 4, 30, 2, true, 0, 2, &s, &plan);
    assert_int_equal(s.n_runs, 4); /* one a local rank for all 30 parameters */
    assert_int_equal(s.runs[0].rows, 30);
    schedule_clear(&s);
    tide_plan_destroy(plan);
    build(1, 4, 30, 2, false, 1, 2, &s, &plan);
    assert_int_equal(s.n_runs, 30);
    schedule_clear(&s);
    tide_plan_destroy(plan);
}

static void digests_tell_schedules_apart(void **state)
{
    uint64_t seen[64];
    uint32_t n = 0;
    (void)state;
    for (uint32_t multicast = 0; multicast < 2; multicast++)
        for (uint32_t nodes = 1; nodes <= 3; nodes++)
            for (uint32_t rank = 0; rank < nodes * 2; rank++) {
                tide_plan *plan, *other;
                schedule s, again;
                build(nodes, 2, 3, 4, false, (int)multicast, rank, &s, &plan);
                build(nodes, 2, 3, 4, false, (int)multicast, rank, &again, &other);
                seen[n] = schedule_digest(&s);
                assert_true(seen[n] == schedule_digest(&again));
                for (uint32_t i = 0; i < n; i++)
                    assert_true(seen[i] != seen[n]);
                n++;
                s.runs[0].width++;
                assert_true(schedule_digest(&s) != seen[n - 1]);
                schedule_clear(&s);
                schedule_clear(&again);
                tide_plan_destroy(plan);
                tide_plan_destroy(other);
            }
}

static void bad_group_or_rank(void **state)
{
    tide_plan *plan;
    schedule s;
    (void)state;
    build(2, 2, 1, 4, false, 0, 0, &s, &plan);
    schedule_clear(&s);
    assert_int_equal(schedule_build_ag(plan, 1, 0, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "group: 1 is not in 0..0");
    assert_int_equal(schedule_build_ag(plan, 0, 4, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "rank: 4 is not in 0..3");
    for (uint64_t n = 1;; n++) {
        tide_alloc_fail_at(n);
        int status = schedule_build_ag(plan, 0, 0, &s);
        tide_alloc_fail_at(0);
        if (status == TIDE_OK)
            break;
        assert_int_equal(status, TIDE_ERR_MEMORY);
        assert_null(s.ops);
    }
    schedule_clear(&s);
    tide_plan_destroy(plan);
}

static void building_is_fast(void **state)
{
    static const struct {
        uint32_t nodes;
        double limit_ms;
    } cases[] = {{64, 5}, {1024, 200}};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        int64_t start = spent_ns(), spent;
        tide_plan *plan;
        schedule s;
        build(cases[i].nodes, 8, 30, 8, false, 0, 3, &s, &plan);
        spent = spent_ns() - start;
        print_message("M=%u: plan and all-gather in %.2f ms, %u ops, %u runs\n", cases[i].nodes, (double)spent / 1e6,
                      s.n_ops, s.n_runs);
        assert_true((double)spent / 1e6 < cases[i].limit_ms);
        schedule_clear(&s);
        tide_plan_destroy(plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_topology_gathers_every_byte),
        cmocka_unit_test(empty_groups_take_part),
        cmocka_unit_test(landing_to_landing_as_far_as_the_ring_holds),
        cmocka_unit_test(striped_and_split_transfers),
        cmocka_unit_test(missing_guards_are_noticed),
        cmocka_unit_test(different_order_is_a_tag_mismatch),
        cmocka_unit_test(descriptors_grow_with_log_m),
        cmocka_unit_test(equal_neighbours_merge),
        cmocka_unit_test(digests_tell_schedules_apart),
        cmocka_unit_test(bad_group_or_rank),
        cmocka_unit_test(building_is_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
