/*
 * The reduce-scatter's op list, executed by the interpreter on all ranks and compared with the naive oracle, bit for
 * bit. Every call has its own gradients; they are spoilt as soon as READ_DONE says so and the outputs as soon as they
 * have been compared, so that whatever a call reads too late or leaves behind shows. The oracle knows nothing of
 * chunks, passes, rounds, outbox or mode: equal bits for all of them follow.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/dice.h"
#include "../harness/interp.h"
#include "../harness/sanitized.h"
#include "../harness/spent.h"
#include "../oracle/reduce.h"

enum { MAX_GROUPS = 3, MAX_PARAMS = 6, MAX_RANKS = 64, MAX_CALLS = 8 };

/* ---- chance ------------------------------------------------------------------------------------- */

static float standard_normal(void)
{
    double u = (dice(1u << 30) + 1.0) / (1u << 30), v = dice(1u << 30) / (double)(1u << 30);
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

/* ---- a world: groups that share a lane, and the calls made on it -------------------------------- */

enum values { NORMAL, INTEGERS, SPECIALS };

typedef struct world world;
typedef struct call {
    world *w;
    uint32_t group, number;
    int format, mode, accumulate, two_phase;
    int stash_wait; /* Slot-Reuse: the gradients go as soon as they are copied; else after the reads */
    float alpha;
    uint8_t present[MAX_PARAMS];
    schedule schedules[MAX_RANKS], stashes[MAX_RANKS];
    reduce_case oracle;
    reduce_param params[MAX_PARAMS];
    void *source[MAX_RANKS * MAX_PARAMS]; /* what the oracle reads */
    void *live[MAX_RANKS * MAX_PARAMS];   /* what the schedules read */
    float *before[MAX_RANKS], *out[MAX_RANKS];
} call;

struct world {
    tide_topology topology;
    tide_options options;
    uint32_t n_groups, n_ranks, n_calls, lag;
    tide_group_desc groups[MAX_GROUPS];
    tide_param params[MAX_GROUPS][MAX_PARAMS];
    schedule gathers[MAX_GROUPS][MAX_RANKS];
    call calls[MAX_CALLS];
    int values;
    uint64_t seed;
    tide_plan *plan;
    interp *t;
};

static size_t item_of(int format)
{
    return format == REDUCE_F32 ? 4 : 2;
}

static int64_t whole_elements(const reduce_param *p)
{
    int64_t n = 1;
    for (int d = 0; d < p->ndim; d++)
        n *= p->dims[d];
    return n;
}

static float draw(const world *w)
{
    static const float special[] = {INFINITY, -INFINITY, NAN, -0.0f, 0.0f, 1.0f};
    if (w->values == INTEGERS)
        return (float)((int)dice(17) - 8);
    if (w->values == SPECIALS && dice(3) == 0)
        return special[dice(6)];
    return standard_normal();
}

static void store(void *base, int format, int64_t i, float f)
{
    uint16_t h = format == REDUCE_F16 ? tide_f32_to_f16(f) : tide_f32_to_bf16(f);
    if (format == REDUCE_F32)
        memcpy((char *)base + 4 * i, &f, 4);
    else
        memcpy((char *)base + 2 * i, &h, 2);
}

static int build_call(call *c, uint32_t rank)
{
    schedule_rs_options o = {c->present, c->format, c->mode};
    int status = schedule_build_rs(c->w->plan, c->group, rank, &o, &c->schedules[rank]);
    if (status == TIDE_OK && c->mode == 1)
        status = schedule_build_stash(c->w->plan, c->group, rank, &o, &c->stashes[rank]);
    return status;
}

static void open_call(world *w, call *c)
{
    const tide_group_desc *g = &w->groups[c->group];
    uint32_t n = 0;
    c->w = w;
    for (uint32_t p = 0; p < g->n_params; p++) {
        const tide_param *q = &w->params[c->group][p];
        if (!c->present[p])
            continue;
        c->params[n].ndim = q->ndim;
        c->params[n].shard_dim = q->shard_dim;
        memcpy(c->params[n++].dims, q->dims, sizeof q->dims);
    }
    c->oracle = (reduce_case){w->topology.nodes, w->topology.local, w->plan->rs.w_wave, n, c->params, c->format,
                              (const void *const *)c->source, c->alpha, c->accumulate};
    uint64_t elements = reduce_elements(&c->oracle);
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        for (uint32_t p = 0; p < n; p++) {
            int64_t count = whole_elements(&c->params[p]);
            c->source[r * n + p] = malloc((size_t)count * 4 + 1);
            c->live[r * n + p] = malloc((size_t)count * item_of(c->format) + 1);
            for (int64_t i = 0; i < count; i++)
                store(c->source[r * n + p], c->format, i, draw(w));
        }
        c->before[r] = malloc(elements * 4 + 1);
        c->out[r] = malloc(elements * 4 + 1);
        for (uint64_t e = 0; e < elements; e++)
            c->before[r][e] = w->values == INTEGERS ? (float)((int)dice(17) - 8) : standard_normal();
        if (build_call(c, r) != TIDE_OK)
            fail_msg("seed %llu: %s", (unsigned long long)w->seed, tide_last_error());
    }
}

static void close_call(call *c)
{
    for (uint32_t r = 0; r < c->w->n_ranks; r++) {
        for (uint32_t p = 0; p < c->oracle.n_params; p++) {
            free(c->source[r * c->oracle.n_params + p]);
            free(c->live[r * c->oracle.n_params + p]);
        }
        free(c->before[r]);
        free(c->out[r]);
        schedule_clear(&c->schedules[r]);
        schedule_clear(&c->stashes[r]);
    }
}

static void world_open(world *w)
{
    w->n_ranks = w->topology.nodes * w->topology.local;
    assert_true(w->n_ranks <= MAX_RANKS && w->n_calls <= MAX_CALLS);
    for (uint32_t g = 0; g < w->n_groups; g++)
        w->groups[g].params = w->params[g];
    if (tide_plan_create(&w->topology, w->groups, w->n_groups, &w->options, &w->plan) != TIDE_OK)
        fail_msg("seed %llu: %s", (unsigned long long)w->seed, tide_last_error());
    for (uint32_t i = 0; i < w->n_calls; i++) {
        w->calls[i].number = i;
        open_call(w, &w->calls[i]);
    }
    for (uint32_t g = 0; g < w->n_groups; g++)
        for (uint32_t r = 0; r < w->n_ranks; r++)
            assert_int_equal(schedule_build_ag(w->plan, g, r, &w->gathers[g][r]), TIDE_OK);
    w->t = interp_create(w->plan, w->seed);
}

static void world_close(world *w)
{
    for (uint32_t i = 0; i < w->n_calls; i++)
        close_call(&w->calls[i]);
    for (uint32_t g = 0; g < w->n_groups; g++)
        for (uint32_t r = 0; r < w->n_ranks; r++)
            schedule_clear(&w->gathers[g][r]);
    interp_destroy(w->t);
    tide_plan_destroy(w->plan);
}

/* ---- what the caller does ----------------------------------------------------------------------- */

static int give(void *context, uint32_t rank)
{
    call *c = context;
    for (uint32_t i = rank * c->oracle.n_params, p = 0; p < c->oracle.n_params; p++, i++)
        memcpy(c->live[i], c->source[i], (size_t)whole_elements(&c->params[p]) * item_of(c->format));
    memcpy(c->out[rank], c->before[rank], reduce_elements(&c->oracle) * 4);
    return 0;
}

static int spoil_gradients(void *context, uint32_t rank)
{
    call *c = context;
    for (uint32_t i = rank * c->oracle.n_params, p = 0; p < c->oracle.n_params; p++, i++)
        memset(c->live[i], 0xff, (size_t)whole_elements(&c->params[p]) * item_of(c->format));
    return 0;
}

static int check_output(void *context, uint32_t rank)
{
    call *c = context;
    world *w = c->w;
    uint64_t elements = reduce_elements(&c->oracle);
    float *exact = malloc(elements * 4 + 1);
    double *truth = malloc(elements * 8 + 1), most = 1;
    int status = 0;

    memcpy(exact, c->before[rank], elements * 4);
    reduce_exact(&c->oracle, rank, exact);
    for (uint64_t e = 0; e < elements; e++)
        truth[e] = c->before[rank][e];
    reduce_f64(&c->oracle, rank, truth);
    for (uint64_t e = 0; e < elements; e++)
        most = isfinite(truth[e]) && fabs(truth[e]) > most ? fabs(truth[e]) : most;
    for (uint64_t e = 0; e < elements && status == 0; e++) {
        float y = c->out[rank][e];
        bool same = memcmp(&y, &exact[e], 4) == 0 || (isnan(y) && isnan(exact[e]));
        bool close = isfinite(truth[e]) ? fabs(y - truth[e]) <= (w->values == INTEGERS ? 0 : 1e-5 * most)
                                        : isnan(truth[e]) ? isnan(y) : (double)y == truth[e];
        if (!same || !close)
            status = interp_fail(w->t,
                                 "rank %u group %u call %u: element %llu of %llu is %.9g, expected %.9g, in fp64 %g",
                                 rank, c->group, c->number, (unsigned long long)e, (unsigned long long)elements,
                                 (double)y, (double)exact[e], truth[e]);
    }
    memset(c->out[rank], 0xff, elements * 4);
    free(exact);
    free(truth);
    return status;
}

static int begin_call(call *c, uint32_t rank, int part)
{
    world *w = c->w;
    uint32_t n = c->oracle.n_params;
    void *args[MAX_PARAMS + 1];
    interp_args a = {args, c->alpha, c->accumulate};

    for (uint32_t p = 0; p < n; p++)
        args[p] = c->live[rank * n + p];
    args[n] = c->out[rank];
    if (c->mode == 1) { /* the slot: gathered into once its last reader is done, then the gradients' place */
        if (interp_enqueue(w->t, &w->gathers[c->group][rank], INTERP_ALL, NULL) != 0 ||
            interp_consume(w->t, rank, EVENT_READY, c->group, NULL, NULL) != 0)
            return -1;
    }
    if (interp_consume(w->t, rank, -1, 0, give, c) != 0)
        return -1;
    if (c->mode == 1 && interp_enqueue(w->t, &c->stashes[rank], INTERP_STASH, &a) != 0)
        return -1;
    if (c->mode == 1 && c->stash_wait &&
        interp_consume(w->t, rank, EVENT_READ_DONE, c->group, spoil_gradients, c) != 0)
        return -1;
    if (c->mode == 1)
        memset(args, 0, n * sizeof *args); /* the reads name no gradient */
    return interp_enqueue(w->t, &c->schedules[rank], part, &a);
}

static int spoil_after_reads(call *c, uint32_t rank)
{
    return c->mode && c->stash_wait ? 0 : interp_consume(c->w->t, rank, EVENT_READ_DONE, c->group, spoil_gradients, c);
}

static int drift(world *w)
{
    return interp_steps(w->t, interp_random(w->t) % 40);
}

/* The caller looks at the outputs of call `*next` and those up to `end` once their groups' latest DONE has come. */
static int look_until(world *w, uint32_t rank, uint32_t *next, uint32_t end)
{
    for (; *next < end; ++*next)
        if (interp_consume(w->t, rank, EVENT_DONE, w->calls[*next].group, check_output, &w->calls[*next]) != 0)
            return -1;
    return 0;
}

/* Calls in order; their outputs are looked at `lag` calls later, so that up to lag + 1 are under way. Two-phase calls
 * are pairs: both reads, then both network phases. */
static int world_run(world *w)
{
    uint32_t looked[MAX_RANKS] = {0};
    for (uint32_t i = 0; i < w->n_calls; i++) {
        call *c = &w->calls[i], *second = c->two_phase && i + 1 < w->n_calls ? &w->calls[++i] : NULL;
        for (uint32_t r = 0; r < w->n_ranks; r++) {
            int part = second ? INTERP_READ : INTERP_ALL;
            if (begin_call(c, r, part) != 0 || spoil_after_reads(c, r) != 0 || drift(w) != 0)
                return -1;
            if (second && (begin_call(second, r, part) != 0 || spoil_after_reads(second, r) != 0 || drift(w) != 0 ||
                           interp_enqueue(w->t, &c->schedules[r], INTERP_NET, NULL) != 0 || drift(w) != 0 ||
                           interp_enqueue(w->t, &second->schedules[r], INTERP_NET, NULL) != 0))
                return -1;
            if (i >= w->lag && look_until(w, r, &looked[r], i + 1 - w->lag) != 0)
                return -1;
            if (drift(w) != 0)
                return -1;
        }
    }
    for (uint32_t r = 0; r < w->n_ranks; r++)
        if (look_until(w, r, &looked[r], w->n_calls) != 0)
            return -1;
    return interp_run(w->t);
}

static void world_check(world *w)
{
    world_open(w);
    if (world_run(w) != 0)
        fail_msg("M=%u L=%u w_wave=%u k=%u n_par=%u n_part=%u n_out=%u n_stg=%d chunk=%d seed %llu: %s",
                 w->topology.nodes, w->topology.local, w->plan->rs.w_wave, w->plan->rs.k, w->plan->rs.n_par,
                 w->plan->rs.n_part, w->plan->rs.n_out, (int)w->plan->options.n_stg, (int)w->plan->options.chunk,
                 (unsigned long long)w->seed, interp_error(w->t));
    world_close(w);
}

/* ---- descriptions ------------------------------------------------------------------------------- */

static void random_param(tide_param *p, uint32_t n_ranks, uint32_t rows)
{
    *p = (tide_param){0};
    switch (dice(8)) {
    case 0: /* 0-d */
        break;
    case 1: /* few rows: most ranks own none */
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
    case 4: /* even */
        p->ndim = 1;
        p->dims[0] = n_ranks * (1 + dice(rows));
        break;
    default: /* uneven */
        p->ndim = 2;
        p->dims[0] = 1 + dice(rows * n_ranks);
        p->dims[1] = 1 + dice(7);
    }
}

static void random_call(const world *w, call *c)
{
    static const float alphas[] = {1, 0.5f, 1.0f / 3, -2};
    const tide_group_desc *g;
    c->group = dice(w->n_groups);
    g = &w->groups[c->group];
    c->format = (int)dice(3); /* whatever the plan was made for */
    c->mode = (w->options.multicast == 0 || w->options.target) && item_of(c->format) <= (g->dtype == TIDE_F32 ? 4 : 2) && dice(2);
    c->stash_wait = (int)dice(2);
    c->accumulate = (int)dice(2);
    c->alpha = w->values == INTEGERS ? (float)(1 << dice(3)) : alphas[dice(4)];
    for (uint32_t p = 0; p < g->n_params; p++)
        c->present[p] = (uint8_t)(dice(3) > 0);
    if (dice(2))
        memset(c->present, 1, sizeof c->present);
    else if (dice(6) == 0)
        memset(c->present, 0, sizeof c->present);
}

/* Knobs that a plan may have; the width is a divisor of L or one that the planner takes. */
static void random_options(world *w)
{
    static const int64_t chunks[] = {16, 20, 64, TIDE_AUTO};
    tide_options *o = &w->options;
    uint32_t nodes = w->topology.nodes, local = w->topology.local;
    plan_rs rs;

    o->multicast = dice(3) == 0;
    o->target = dice(2);
    o->n_ctx = 1 + dice(3);
    o->ring_slots = 1 + dice(2);
    o->n_stg = 1 + dice(3);
    o->chunk = chunks[dice(4)];
    o->n_part = 1 + dice(3);
    o->mode = dice(2);
    o->k = 1 + dice(4);
    for (;;) {
        o->w_wave = 1 + dice(local > 1 ? local : 5);
        if (plan_rs_init(&rs, nodes, local, (uint32_t)o->w_wave, (uint32_t)o->k, 2, (uint32_t)o->n_part, 0) == TIDE_OK)
            break;
    }
    if (nodes > 1 && dice(2)) {
        uint32_t least = plan_rs_partial_outbox(&rs);
        o->n_out = least + dice(rs.n_blocks - least + 1);
    }
    plan_rs_clear(&rs);
}

static void random_world(world *w, uint32_t nodes, uint32_t local, uint64_t seed)
{
    static const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16};
    const tide_topology topology = TIDE_TOPOLOGY_INIT;
    const tide_options options = TIDE_OPTIONS_INIT;
    const tide_group_desc desc = TIDE_GROUP_DESC_INIT;

    memset(w, 0, sizeof *w);
    dice_seed(seed * 7919 + nodes * 131 + local);
    w->seed = seed;
    w->topology = topology;
    w->topology.nodes = nodes;
    w->topology.local = local;
    w->options = options;
    random_options(w);
    w->values = dice(3) ? NORMAL : INTEGERS;
    w->n_groups = 1 + dice(3);
    for (uint32_t g = 0; g < w->n_groups; g++) {
        uint32_t rows = g == 0 ? 6 : 2; /* of different sizes */
        w->groups[g] = desc;
        w->groups[g].n_params = 1 + dice(MAX_PARAMS);
        for (uint32_t p = 0; p < w->groups[g].n_params; p++)
            random_param(&w->params[g][p], nodes * local, rows);
        w->groups[g].dtype = w->groups[g].shard_dtype = dtypes[dice(3)];
        w->groups[g].grad_dtype = dtypes[dice(3)];
    }
    w->n_calls = 3 + dice(2);
    w->lag = dice(4);
    for (uint32_t i = 0; i < w->n_calls; i++)
        random_call(w, &w->calls[i]);
}

/* With a full outbox reads may run ahead by one call. */
static void random_phases(world *w)
{
    uint32_t nodes = w->topology.nodes, blocks = (uint32_t)w->options.n_part * (nodes - 1);
    bool full = nodes == 1 || (w->options.n_out == TIDE_AUTO ? w->options.mode == 0 : w->options.n_out >= blocks);
    for (uint32_t i = 0; i < w->n_calls; i++)
        w->calls[i].two_phase = full && dice(2);
}

/* ---- tests -------------------------------------------------------------------------------------- */

static void every_topology_sums_every_element(void **state)
{
    static world w;
    (void)state;
    for (uint32_t nodes = 1; nodes <= 6; nodes++)
        for (uint32_t local = 1; local <= 4; local++)
            for (uint64_t seed = 1; seed <= (nodes == 1 ? 40 : 16) / (SANITIZED ? 4 : 1); seed++) {
                random_world(&w, nodes, local, seed);
                random_phases(&w);
                world_check(&w);
            }
}

static void named_shapes(void **state)
{
    static const struct { uint32_t nodes, local; int64_t w_wave, k, n_par, n_part, n_out; } shapes[] = {
        {8, 8, 2, 2, 2, 1, 4},                          /* four waves, stale blocks, a partial outbox */
        {8, 8, 2, 2, 2, 3, 4},                          /* the same over three passes */
        {8, 8, 8, 4, 1, 1, TIDE_AUTO},                  /* one wave, one generation */
        {6, 4, 2, 2, 2, 1, 4},                          /* three waves: generations swap their ending */
        {5, 3, 1, 1, 2, 1, 2},                          /* five */
        {5, 3, 3, 4, 2, 3, TIDE_AUTO},
        {2, 1, 1, 1, 2, 1, TIDE_AUTO},
        {2, 1, 1, 1, 2, 3, 2},
        {7, 1, 1, 1, 2, 1, 2},                          /* no neighbours */
        {7, 1, 3, 2, 2, 1, 3},                          /* ... several of them a landing, the own one alone in the last */
        {7, 1, 4, 2, 2, 2, 4},                          /* ... the own one beside others */
        {9, 1, 64, 4, 1, 1, TIDE_AUTO},
        {9, 2, 2, 2, 2, 2, 4},
        {10, 4, 4, 3, 2, 1, TIDE_AUTO},
        {3, 8, 3, 2, 2, 1, TIDE_AUTO},                  /* more sub-slices than contributors: zeros are added */
    };
    static world w;
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (uint64_t seed = 1; seed <= 4; seed++) {
            random_world(&w, shapes[i].nodes, shapes[i].local, seed + 100 * i);
            w.options.w_wave = shapes[i].w_wave;
            w.options.k = shapes[i].k;
            w.options.n_par = shapes[i].n_par;
            w.options.n_part = shapes[i].n_part;
            w.options.n_out = shapes[i].n_out;
            w.n_groups = 2;
            w.groups[1].dtype = w.groups[1].shard_dtype = TIDE_F32;
            w.groups[1].grad_dtype = TIDE_BF16;
            w.groups[1].size = sizeof w.groups[1];
            w.groups[1].n_params = 1;
            w.params[1][0] = (tide_param){"small", 2, 0, {3, 5}};
            w.n_calls = 4;
            for (uint32_t c = 0; c < w.n_calls; c++) { /* large and small in turn */
                random_call(&w, &w.calls[c]);
                w.calls[c].group = (c + (uint32_t)seed) % 2;
                w.calls[c].mode = 0;
            }
            random_phases(&w);
            world_check(&w);
        }
}

/* Blocks large enough for several contexts and several chunks. */
static void large_blocks(void **state)
{
    static world w;
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        random_world(&w, 3, 2, seed);
        w.options.n_part = 1;
        w.options.n_out = TIDE_AUTO;
        w.options.n_ctx = 3;
        w.options.chunk = seed % 2 ? 5000 : TIDE_AUTO;
        w.n_groups = 1;
        w.groups[0].n_params = 2;
        w.params[0][0] = (tide_param){"big", 2, 0, {6 * 201 - 5, 211}};
        w.params[0][1] = (tide_param){"columns", 3, 1, {3, 6 * 100, 10}};
        w.n_calls = 2;
        for (uint32_t c = 0; c < w.n_calls; c++)
            random_call(&w, &w.calls[c]);
        memset(w.calls[0].present, 1, MAX_PARAMS);
        world_open(&w);
        uint32_t contexts = 0;
        for (uint32_t i = 0; i < w.calls[0].schedules[0].n_puts; i++)
            contexts |= 1u << w.calls[0].schedules[0].puts[i].ctx;
        assert_true(contexts & 2);
        if (world_run(&w) != 0)
            fail_msg("%s", interp_error(w.t));
        world_close(&w);
    }
}

static void infinities_and_nans_keep_their_class(void **state)
{
    static world w;
    (void)state;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        random_world(&w, 1 + seed % 4, 1 + seed % 3, seed);
        w.values = SPECIALS;
        world_check(&w);
    }
}

/* ---- guards: what each of them prevents is seen when it is missing ------------------------------ */

typedef bool (*op_filter)(const schedule *s, const op *o);
static bool is_event(const op *o, int kind, int scope, int event)
{
    return o->kind == kind && o->scope == scope && o->event == event;
}
static bool is_word(const op *o, int kind, int resource, int which)
{
    return o->kind == kind && o->scope == SCOPE_LOCAL && o->resource == resource && o->which == which;
}
#define FILTER(name, condition)                             \
    static bool name(const schedule *s, const op *o)        \
    {                                                       \
        (void)s;                                            \
        return condition;                                   \
    }
FILTER(wait_filled, is_word(o, OP_WAIT, RESOURCE_STAGING, WORD_A))
FILTER(wait_freed, is_word(o, OP_WAIT, RESOURCE_STAGING, WORD_B))
FILTER(wait_armed, is_word(o, OP_WAIT, RESOURCE_INBOX, WORD_A))
FILTER(wait_landed, is_word(o, OP_WAIT, RESOURCE_INBOX, WORD_B))
FILTER(signal_freed, is_word(o, OP_SIGNAL, RESOURCE_STAGING, WORD_B))
FILTER(join_sent, is_event(o, OP_JOIN, SCOPE_RESOURCE, EVENT_SENT))
FILTER(join_spared, is_event(o, OP_JOIN, SCOPE_RESOURCE, EVENT_SPARED))
FILTER(join_landed, is_event(o, OP_JOIN, SCOPE_RESOURCE, EVENT_LANDED))
FILTER(join_in, is_event(o, OP_JOIN, SCOPE_EXTERN, EVENT_IN))
FILTER(record_free, is_event(o, OP_RECORD, SCOPE_EXTERN, EVENT_FREE))
FILTER(join_pushed, o->kind == OP_JOIN && o->scope == SCOPE_CALL && o->event < s->local && o->stream == STREAM_RS_SUM)
FILTER(join_stashed, is_event(o, OP_JOIN, SCOPE_CALL, (int)s->local))
FILTER(join_summed, o->kind == OP_JOIN && o->scope == SCOPE_CALL && o->stream == STREAM_RS_NET)
FILTER(join_on_land, o->kind == OP_JOIN && o->scope == SCOPE_CALL && o->stream == STREAM_RS_LAND)
FILTER(arrivals, o->kind == OP_WAIT && o->scope == SCOPE_RAIL && o->phase == PHASE_RS_ARRIVE)
FILTER(credits, (o->kind == OP_WAIT || o->kind == OP_SIGNAL) && o->scope == SCOPE_RAIL && o->phase == PHASE_RS_CREDIT)
FILTER(zeros, o->kind == OP_COPY && o->stream == STREAM_RS_LAND && s->runs[o->first].src.space == SPACE_ZERO)
FILTER(own_block, o->kind == OP_COPY && o->stream == STREAM_RS_LAND && s->runs[o->first].src.space != SPACE_ZERO)

static void remove_ops(schedule *s, op_filter is)
{
    uint32_t n = 0, n_read = 0;
    for (uint32_t i = 0; i < s->n_ops; i++) {
        op o = s->ops[i];
        if (is(s, &o))
            continue;
        n_read += i < s->n_read;
        s->ops[n++] = o;
    }
    assert_true(n < s->n_ops);
    s->n_ops = n;
    s->n_read = n_read;
}

static void missing_guards_are_noticed(void **state)
{
    static const struct { const char *name; op_filter is; uint32_t nodes; int mode; } guards[] = {
        {"filled", wait_filled, 1, 0},   {"freed", wait_freed, 1, 0},     {"freed's signal", signal_freed, 1, 0},
        {"in", join_in, 1, 0},           {"pushed", join_pushed, 1, 0},   {"stashed", join_stashed, 1, 1},
        {"free", record_free, 1, 1},     {"filled", wait_filled, 6, 0},   {"freed", wait_freed, 6, 0},
        {"armed", wait_armed, 6, 0},     {"landed", wait_landed, 6, 0},   {"sent", join_sent, 6, 0},
        {"spared", join_spared, 6, 0},   {"in", join_in, 6, 0},           {"landed event", join_landed, 6, 0},
        {"pushed", join_pushed, 6, 0},   {"summed", join_summed, 6, 0},   {"arrived, spared", join_on_land, 6, 0},
        {"zeros", zeros, 5, 0},          {"credits", credits, 6, 0},      {"arrivals", arrivals, 6, 0},
        {"own block", own_block, 6, 0},  {"stashed", join_stashed, 6, 1}, {"free", record_free, 6, 1},
    };
    static world w;
    (void)state;
    for (size_t i = 0; i < sizeof guards / sizeof guards[0]; i++) {
        bool noticed = false;
        for (uint64_t seed = 1; seed < 150 && !noticed; seed++) {
            random_world(&w, guards[i].nodes, 2, seed);
            w.options.multicast = 0;
            w.options.n_part = 1;
            w.options.w_wave = 1;
            w.options.k = 1;
            w.options.n_out = seed % 2 ? 2 : TIDE_AUTO;
            w.options.mode = 0;
            w.options.chunk = 16;
            w.values = NORMAL;
            w.n_groups = 1;
            w.groups[0].n_params = 1;
            w.params[0][0] = (tide_param){"w", 2, 0, {guards[i].nodes * 2 * 5 - 3, 7}};
            w.n_calls = 6;
            w.lag = dice(5);
            for (uint32_t c = 0; c < w.n_calls; c++) {
                memset(w.calls[c].present, 1, MAX_PARAMS);
                w.calls[c].group = 0;
                w.calls[c].format = REDUCE_BF16;
                w.calls[c].mode = guards[i].mode;
                w.calls[c].alpha = 1;
            }
            random_phases(&w);
            world_open(&w);
            for (uint32_t c = 0; c < w.n_calls; c++)
                for (uint32_t r = 0; r < w.n_ranks; r++)
                    remove_ops(&w.calls[c].schedules[r], guards[i].is);
            noticed = world_run(&w) != 0;
            world_close(&w);
        }
        if (!noticed)
            fail_msg("%u nodes: removing '%s' was not noticed", guards[i].nodes, guards[i].name);
    }
}

static void different_subsets_are_a_tag_mismatch(void **state)
{
    static world w;
    (void)state;
    for (uint32_t nodes = 1; nodes <= 2; nodes++) {
        random_world(&w, nodes, 2, 3);
        w.n_groups = 1;
        w.n_calls = 2;
        w.groups[0].n_params = 2;
        for (uint32_t c = 0; c < 2; c++) {
            memset(&w.calls[c], 0, sizeof w.calls[c]);
            w.calls[c].present[0] = 1;
            w.calls[c].present[1] = (uint8_t)c;
        }
        world_open(&w);
        for (uint32_t r = 0; r < w.n_ranks; r++)
            assert_int_equal(begin_call(&w.calls[r % 2], r, INTERP_ALL), 0); /* odd ranks have a gradient more */
        assert_int_not_equal(interp_run(w.t), 0);
        assert_non_null(strstr(interp_error(w.t), "the poster is in another call"));
        world_close(&w);
    }
}

/* ---- shape of the list -------------------------------------------------------------------------- */

static void build(uint32_t nodes, uint32_t local, uint32_t n_params, const tide_options *o, uint32_t rank, schedule *s,
                  tide_plan **plan)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    schedule_rs_options rs = {NULL, TIDE_BF16, 0};
    static tide_param params[64];
    for (uint32_t p = 0; p < n_params; p++) /* no size divides: every parameter has a padded row */
        params[p] = (tide_param){"w", 2, 0, {nodes * local * 3 - 5, 64 + p}};
    d.n_params = n_params;
    d.params = params;
    t.nodes = nodes;
    t.local = local;
    assert_int_equal(tide_plan_create(&t, &d, 1, o, plan), TIDE_OK);
    assert_int_equal(schedule_build_rs(*plan, 0, rank, &rs, s), TIDE_OK);
}

/* (L - 1) P M L flat copies become one strided copy for each owner, parameter and node that meet, and a few tails. */
static void descriptors_are_coalesced(void **state)
{
    tide_options o = TIDE_OPTIONS_INIT;
    tide_plan *plan;
    schedule s;
    uint32_t copies = 0;
    (void)state;
    build(64, 8, 30, &o, 8 * 13 + 3, &s, &plan);
    assert_int_equal(plan->groups[0].cut.n_chunks, 1);
    for (uint32_t i = 0; i < s.n_ops; i++)
        if (s.ops[i].kind == OP_COPY && s.ops[i].stream >= STREAM_RS_PUSH0)
            copies += s.ops[i].count;
    print_message("(L, M, P) = (8, 64, 30): %u level-1 copies a rank; flat %u, coalesced bound %u\n", copies,
                  7 * 30 * 64 * 8, 7 * 30 * 64);
    assert_true(copies <= 13440);
    assert_true(copies >= 30 * 63); /* every parameter goes to somebody else on every node */
    schedule_clear(&s);
    tide_plan_destroy(plan);
}

/* A JOIN binds to the latest RECORD in the list: the one for the block's occupant of this call, once there is one. */
static void outbox_joins_bind_to_the_occupant(void **state)
{
    tide_options o = TIDE_OPTIONS_INIT;
    tide_plan *plan;
    schedule s;
    uint32_t joins = 0, records = 0;
    (void)state;
    o.w_wave = 2;
    o.k = 2;
    o.n_part = 2;
    o.n_out = 5;
    build(8, 4, 3, &o, 9, &s, &plan);
    for (uint32_t i = 0; i < s.n_ops; i++) {
        const op *q = &s.ops[i];
        if (q->scope != SCOPE_RESOURCE || q->event != EVENT_SENT)
            continue;
        if (q->kind == OP_RECORD) { /* block number `records` has been sent */
            assert_int_equal(q->index, records % 5);
            records++;
        } else { /* before block number `joins` is written */
            assert_int_equal(q->index, joins % 5);
            assert_true(joins < 5 || records >= joins - 5 + 1);
            joins++;
        }
        assert_int_equal(q->bank, BANK_CALL);
    }
    assert_int_equal(joins, 14);
    assert_int_equal(records, 14);
    for (uint32_t i = 0; i < s.n_ops; i++)
        if (is_event(&s.ops[i], OP_RECORD, SCOPE_EXTERN, EVENT_READ_DONE))
            assert_true(i >= s.n_read);
    schedule_clear(&s);
    tide_plan_destroy(plan);
    o.n_out = TIDE_AUTO;
    build(8, 4, 3, &o, 9, &s, &plan);
    for (uint32_t i = 0; i < s.n_ops; i++)
        if (is_event(&s.ops[i], OP_RECORD, SCOPE_EXTERN, EVENT_READ_DONE))
            assert_true(i < s.n_read);
    schedule_clear(&s);
    tide_plan_destroy(plan);
}

static void wrong_calls_are_named(void **state)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    tide_param param = {"w", 1, 0, {8}};
    tide_group_desc d[2] = {TIDE_GROUP_DESC_INIT, TIDE_GROUP_DESC_INIT};
    schedule_rs_options rs = {NULL, TIDE_BF16, 0};
    tide_plan *plan;
    schedule s;
    (void)state;
    t.local = 2;
    d[0].n_params = d[1].n_params = 1;
    d[0].params = d[1].params = &param;
    d[1].grad_dtype = TIDE_NONE;
    assert_int_equal(tide_plan_create(&t, d, 2, &o, &plan), TIDE_OK);
    assert_int_equal(schedule_build_rs(plan, 2, 0, &rs, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "group: 2 is not in 0..1");
    assert_int_equal(schedule_build_rs(plan, 0, 2, &rs, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "rank: 2 is not in 0..1");
    assert_int_equal(schedule_build_rs(plan, 1, 0, &rs, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "group: 1 was planned without gradients (grad_dtype TIDE_NONE)");
    rs.grad_dtype = TIDE_OPAQUE;
    assert_int_equal(schedule_build_rs(plan, 0, 0, &rs, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "grad_dtype: 3 is not fp32, bf16 or fp16");
    rs.grad_dtype = TIDE_F32;
    rs.mode = 2;
    assert_int_equal(schedule_build_rs(plan, 0, 0, &rs, &s), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "mode: 2 is not 0 (In-Place) or 1 (Slot-Reuse)");
    rs.mode = 1;
    assert_int_equal(schedule_build_rs(plan, 0, 0, &rs, &s), TIDE_ERR_UNSUPPORTED);
    assert_int_equal(schedule_build_stash(plan, 0, 0, &rs, &s), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(),
                        "mode: 1, but fp32 gradients do not fit the landing of 2-byte parameters: use mode 0 "
                        "(In-Place)");
    assert_null(s.ops);
    tide_plan_destroy(plan);
    o.multicast = 1;
    rs.grad_dtype = TIDE_BF16;
    assert_int_equal(tide_plan_create(&t, d, 1, &o, &plan), TIDE_OK);
    assert_int_equal(schedule_build_rs(plan, 0, 0, &rs, &s), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(),
                        "mode: 1, but the local ranks share one landing (multicast): use mode 0 (In-Place)");
    tide_plan_destroy(plan);
    o.multicast = 0;
    o.n_part = 64;
    o.w_wave = 1;
    o.k = 1;
    t.nodes = 1024;
    assert_int_equal(tide_plan_create(&t, d, 1, &o, &plan), TIDE_OK);
    rs.mode = 0;
    assert_int_equal(schedule_build_rs(plan, 0, 0, &rs, &s), TIDE_ERR_UNSUPPORTED);
    assert_non_null(strstr(tide_last_error(), "n_part: 64 passes of 1023 rounds and 1024 waves"));
    tide_plan_destroy(plan);
}

static void memory_failures_leave_nothing(void **state)
{
    tide_options o = TIDE_OPTIONS_INIT;
    schedule_rs_options rs = {NULL, TIDE_BF16, 1};
    tide_plan *plan;
    schedule s;
    uint64_t live;
    (void)state;
    build(3, 2, 2, &o, 1, &s, &plan);
    schedule_clear(&s);
    live = tide_alloc_live();
    for (int stash = 0; stash < 2; stash++) {
        for (uint64_t n = 1;; n++) {
            tide_alloc_fail_at(n);
            int status = stash ? schedule_build_stash(plan, 0, 1, &rs, &s) : schedule_build_rs(plan, 0, 1, &rs, &s);
            tide_alloc_fail_at(0);
            if (status == TIDE_OK)
                break;
            assert_int_equal(status, TIDE_ERR_MEMORY);
            assert_null(s.ops);
            assert_int_equal(tide_alloc_live(), live);
        }
        schedule_clear(&s);
    }
    tide_plan_destroy(plan);
}

static void equal_calls_have_equal_tags(void **state)
{
    tide_options o = TIDE_OPTIONS_INIT;
    uint8_t all[3] = {1, 1, 1}, two[3] = {1, 0, 1};
    schedule_rs_options rs = {NULL, TIDE_BF16, 0};
    tide_plan *plan;
    schedule s, t;
    (void)state;
    build(3, 2, 3, &o, 1, &s, &plan);
    for (uint32_t rank = 0; rank < 6; rank++) {
        rs = (schedule_rs_options){all, TIDE_BF16, (int)(rank % 2)};
        assert_int_equal(schedule_build_rs(plan, 0, rank, &rs, &t), TIDE_OK);
        assert_true(t.tag == s.tag);
        assert_int_equal(t.n_args, 4);
        assert_true((schedule_digest(&t) == schedule_digest(&s)) == (rank == 1 && rs.mode == 0));
        schedule_clear(&t);
        rs.present = two;
        assert_int_equal(schedule_build_rs(plan, 0, rank, &rs, &t), TIDE_OK);
        assert_true(t.tag != s.tag);
        assert_int_equal(t.n_args, 3);
        schedule_clear(&t);
        rs = (schedule_rs_options){NULL, TIDE_F32, 0};
        assert_int_equal(schedule_build_rs(plan, 0, rank, &rs, &t), TIDE_OK);
        assert_true(t.tag != s.tag);
        schedule_clear(&t);
    }
    schedule_clear(&s);
    tide_plan_destroy(plan);
}

static void build_times(void **state)
{
    static const struct { uint32_t nodes; int mode, limit_ms; } cases[] = {
        {64, 0, 5}, {64, 1, 5}, {1024, 0, 200}, {1024, 1, 200}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tide_options o = TIDE_OPTIONS_INIT;
        schedule_rs_options rs = {NULL, TIDE_BF16, 0};
        tide_plan *plan;
        schedule s;
        int64_t start, best = INT64_MAX;
        o.mode = cases[i].mode;
        build(cases[i].nodes, 8, 30, &o, 3, &s, &plan);
        for (int n = 0; n < 3; n++) {
            schedule_clear(&s);
            start = spent_ns();
            assert_int_equal(schedule_build_rs(plan, 0, 3, &rs, &s), TIDE_OK);
            best = spent_ns() - start < best ? spent_ns() - start : best;
        }
        print_message("M=%u %s: reduce-scatter in %.2f ms, %u ops, %u runs, %u segments, %u puts\n", cases[i].nodes,
                      cases[i].mode ? "partial outbox" : "full outbox", (double)best / 1e6, s.n_ops, s.n_runs,
                      s.n_segments, s.n_puts);
        assert_true(best < cases[i].limit_ms * INT64_C(1000000));
        schedule_clear(&s);
        tide_plan_destroy(plan);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_topology_sums_every_element), cmocka_unit_test(named_shapes),
        cmocka_unit_test(large_blocks),                      cmocka_unit_test(infinities_and_nans_keep_their_class),
        cmocka_unit_test(missing_guards_are_noticed),        cmocka_unit_test(different_subsets_are_a_tag_mismatch),
        cmocka_unit_test(descriptors_are_coalesced),         cmocka_unit_test(outbox_joins_bind_to_the_occupant),
        cmocka_unit_test(wrong_calls_are_named),             cmocka_unit_test(memory_failures_leave_nothing),
        cmocka_unit_test(equal_calls_have_equal_tags),       cmocka_unit_test(build_times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
