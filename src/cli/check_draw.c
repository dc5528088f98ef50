/* check_draw.c - a configuration of `tide check` from its seed: topology, knobs, groups, and what the ranks do. */
#include <stdlib.h>
#include <string.h>

#include "cli/check.h"
#include "plan/plan.h"

enum { MAX_RANKS = 24, CONFIG_CALLS = 24, DEADLINE_MS = 60000, TRIES = 40 };

typedef struct dice { uint64_t state; } dice;

static uint64_t roll(dice *d, uint64_t n) /* 0..n-1 */
{
    d->state = oracle_mix(d->state, 5, 5, 5, 5);
    return (d->state >> 11) % n;
}

static bool chance(dice *d, uint64_t one_in)
{
    return roll(d, one_in) == 0;
}

/* ---- a random configuration -------------------------------------------------------------- */

const uint8_t check_nodes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, CHECK_END};
const uint8_t check_local[] = {1, 2, 3, 4, 5, 6, 8, CHECK_END};

/* An entry that is at most `most`. */
static uint32_t roll_entry(dice *d, const uint8_t *table, uint32_t most)
{
    uint32_t n = 0;

    while (table[n] != CHECK_END && table[n] <= most)
        n++;
    return n ? table[roll(d, n)] : 1;
}

static void roll_topology(const cli *c, dice *d, tide_topology *t)
{
    uint32_t most = chance(d, 4) ? MAX_RANKS : MAX_RANKS / 2;

    t->nodes = (uint32_t)c->nodes;
    t->local = (uint32_t)c->local;
    if (!t->nodes && !t->local && chance(d, 2)) /* else many local ranks would be rare */
        t->local = roll_entry(d, check_local, most);
    if (!t->nodes)
        t->nodes = roll_entry(d, check_nodes, t->local ? most / t->local : most);
    if (!t->local)
        t->local = roll_entry(d, check_local, most / t->nodes);
}

static void set_knob(const cli *c, tide_options *o, const char *name, int64_t value)
{
    tide_knob_info knob;

    for (size_t i = 0; tide_knob_describe(i, &knob) == TIDE_OK; i++)
        if (strcmp(knob.name, name) == 0 && !c->knob_given[i])
            tide_options_set(o, name, value);
}

/* Knobs that may not show in the bytes. */
static void roll_free_knobs(const cli *c, dice *d, const tide_topology *t, tide_options *o)
{
    if (chance(d, 2))
        set_knob(c, o, "k", 1 + (int64_t)roll(d, t->nodes));
    if (chance(d, 2))
        set_knob(c, o, "n_part", 1 + (int64_t)roll(d, 4));
    if (chance(d, 4))
        set_knob(c, o, "n_par", 1 + (int64_t)roll(d, 2));
    if (chance(d, 2))
        set_knob(c, o, "n_out", 1 + (int64_t)roll(d, 2 * t->nodes));
    if (chance(d, 2))
        set_knob(c, o, "n_stg", 1 + (int64_t)roll(d, 4));
    if (chance(d, 2))
        set_knob(c, o, "chunk", 16 + (int64_t)roll(d, 200));
    if (chance(d, 2))
        set_knob(c, o, "n_ctx", 1 + (int64_t)roll(d, 5));
    if (chance(d, 2))
        set_knob(c, o, "head_bytes", 16 + (int64_t)roll(d, 2000));
    if (chance(d, 2))
        set_knob(c, o, "target", 1);
    if (chance(d, 4)) {
        set_knob(c, o, "c_sum", 1 + (int64_t)roll(d, 8));
        set_knob(c, o, "c_land", 1 + (int64_t)roll(d, 4));
    }
}

/* Knobs that the command line leaves open. Not every draw is a plan; the caller asks the planner and draws again. */
static void roll_knobs(const cli *c, dice *d, const tide_topology *t, tide_options *o)
{
    *o = c->options;
    set_knob(c, o, "deadline_ms", DEADLINE_MS);
    set_knob(c, o, "mode", (int64_t)roll(d, 2));
    if (roll(d, 3))
        set_knob(c, o, "w_wave", 1 + (int64_t)roll(d, t->local > 1 ? t->local : 8));
    roll_free_knobs(c, d, t, o);
    if (chance(d, 2))
        set_knob(c, o, "ring_slots", 1 + (int64_t)roll(d, 3));
    if (chance(d, 6) && (o->target || o->multicast != 1))
        set_knob(c, o, "poison", 1);
    if (chance(d, 3))
        set_knob(c, o, "multicast", !o->target && (o->mode || o->poison) ? 0 : (int64_t)roll(d, 2));
}

static bool roll_param(dice *d, uint32_t index, uint32_t n_ranks, uint64_t most, cli_shapes *s)
{
    int64_t dims[TIDE_MAX_DIMS];
    int ndim = (int)roll(d, 5), shard_dim = 0;
    uint64_t left = most;
    char name[32];

    for (int i = 0; i < ndim; i++) {
        uint64_t limit = left < 1 ? 1 : left < 40 || i ? (left < 12 ? left : 12) : left / (ndim > 1 ? 4 : 1);
        dims[i] = 1 + (int64_t)roll(d, limit);
        left /= (uint64_t)dims[i];
    }
    if (ndim && chance(d, 40))
        dims[roll(d, (uint64_t)ndim)] = 0;
    if (ndim > 1 && chance(d, 4)) {
        shard_dim = 1 + (int)roll(d, (uint64_t)ndim - 1);
        dims[shard_dim] = (int64_t)(n_ranks * (1 + roll(d, 3)));
    }
    snprintf(name, sizeof name, "p%u", index);
    return cli_shapes_add(s, name, ndim, dims, shard_dim);
}

static bool roll_group(dice *d, uint32_t n_ranks, check_group *g)
{
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    uint32_t n_params = chance(d, 10) ? 1 + (uint32_t)roll(d, 40) : 1 + (uint32_t)roll(d, 6);
    uint64_t most = chance(d, 5) && n_ranks <= 8 ? 5000 : 300;

    g->desc = init;
    g->desc.dtype = chance(d, 8) ? TIDE_OPAQUE : (int)roll(d, 3);
    g->desc.item_size = g->desc.dtype == TIDE_OPAQUE ? 1 + (uint32_t)roll(d, 9) : 0;
    g->desc.shard_dtype = g->desc.dtype != TIDE_OPAQUE && chance(d, 3) ? (int)roll(d, 3) : g->desc.dtype;
    g->cast = g->desc.shard_dtype != g->desc.dtype;
    g->desc.input = g->cast || chance(d, 3) ? TIDE_INPUT_ARGUMENT : TIDE_INPUT_ADOPTED;
    g->desc.grad_dtype = g->desc.dtype == TIDE_OPAQUE || chance(d, 8) ? TIDE_NONE : (int)roll(d, 3);
    g->desc.landing = chance(d, 3) ? TIDE_LANDING_PRIVATE : TIDE_LANDING_RING;
    g->shapes.dtype = g->desc.dtype;
    g->shapes.item_size = g->desc.item_size;
    for (uint32_t p = 0; p < n_params; p++)
        if (!roll_param(d, p, n_ranks, most, &g->shapes))
            return false;
    g->desc.n_params = g->shapes.n_params;
    g->desc.params = g->shapes.params;
    return true;
}

/* The user's group, `--groups` times. */
static int given_groups(const cli *c, check_config *config)
{
    for (uint32_t i = 0; i < config->n_groups; i++) {
        check_group *g = &config->groups[i];
        int code = cli_shapes_load(c, &g->shapes);
        if (code == CLI_OK)
            code = cli_shapes_desc(c, &g->shapes, &g->desc);
        if (code != CLI_OK)
            return code;
        g->cast = g->desc.shard_dtype != g->desc.dtype;
    }
    return CLI_OK;
}

static int plan_config(const check_config *config, const tide_options *options, tide_plan **plan)
{
    tide_group_desc *descs = calloc(config->n_groups, sizeof *descs);
    int status = descs ? TIDE_OK : TIDE_ERR_MEMORY;

    for (uint32_t i = 0; descs && i < config->n_groups; i++)
        descs[i] = config->groups[i].desc;
    if (status == TIDE_OK)
        status = tide_plan_create(&config->topology, descs, config->n_groups, options, plan);
    free(descs);
    return status;
}

/* What the actions must respect, and what the histogram counts. */
static void note_plan(check_config *config, const tide_plan *plan)
{
    const tide_options *o = &config->runs[0].options;
    uint32_t ring = 0;

    config->w_wave = (uint32_t)plan->options.w_wave;
    config->n_part = plan->rs.n_part;
    config->n_waves = plan->rs.n_waves ? plan->rs.n_waves : 1;
    config->partial = plan->rs.n_out < plan->rs.n_blocks;
    for (uint32_t g = 0; g < plan->rs.n_waves * plan->rs.n_part; g++)
        for (uint32_t j = 0; j < plan->rs.local; j++)
            config->stale |= plan_rs_stale_mask(&plan->rs, g, j) != 0;
    config->node_landing = !o->target && (o->multicast == 1 || (o->multicast == TIDE_AUTO && !o->mode && !o->poison));
    config->n_slots = 0;
    for (uint32_t i = 0; i < config->n_groups; i++) {
        if (config->groups[i].desc.landing == TIDE_LANDING_RING)
            config->groups[i].slot = ring++ % (uint32_t)o->ring_slots;
        if (config->groups[i].desc.landing == TIDE_LANDING_RING && config->groups[i].slot >= config->n_slots)
            config->n_slots = config->groups[i].slot + 1;
    }
    for (uint32_t i = 0; i < config->n_groups; i++)
        if (config->groups[i].desc.landing == TIDE_LANDING_PRIVATE)
            config->groups[i].slot = config->n_slots++;
}

/* ---- a random sequence of actions -------------------------------------------------------- */

enum gather_state { IDLE, GATHERED, SEEN };
typedef struct script {
    check_config *config;
    dice *d;
    uint8_t *state;          /* by group */
    uint32_t *gather;        /* by group: call of its gather */
    bool *taken;             /* by slot */
    int64_t unsent;          /* call whose NET has not been enqueued, or -1 */
    uint32_t *open, n_open;  /* reduce-scatters whose output has not been compared */
    bool *gone;              /* by call: its gradients are overwritten */
    bool failed;
} script;

static void emit(script *s, int kind, uint32_t group, uint32_t call)
{
    check_config *config = s->config;

    if (config->n_actions == config->cap_actions) {
        uint32_t cap = config->cap_actions ? 2 * config->cap_actions : 64;
        check_action *grown = realloc(config->actions, cap * sizeof *grown);
        if (!grown) {
            s->failed = true;
            return;
        }
        config->actions = grown;
        config->cap_actions = cap;
    }
    config->actions[config->n_actions++] =
        (check_action){(uint8_t)kind, group, call, oracle_mix(config->seed, 6, config->n_actions, 0, 0)};
}

static uint32_t new_call(script *s, bool reduce, uint32_t group)
{
    check_config *config = s->config;
    check_call *call = &config->calls[config->n_calls];

    call->reduce = reduce;
    call->group = group;
    call->key = oracle_mix(config->seed, 8, config->n_calls, 0, 0);
    return config->n_calls++;
}

static void emit_gather(script *s, uint32_t group)
{
    check_group *g = &s->config->groups[group];
    uint32_t call = new_call(s, false, group);

    if (g->desc.input == TIDE_INPUT_ADOPTED && chance(s->d, 6))
        emit(s, ACT_ADOPT, group, call);
    emit(s, ACT_GATHER, group, call);
    s->state[group] = GATHERED;
    s->gather[group] = call;
    s->taken[g->slot] = true;
}

static void leave_slot(script *s, uint32_t group)
{
    s->state[group] = IDLE;
    s->taken[s->config->groups[group].slot] = false;
}

/* A reduce-scatter of random inputs; mode 1 goes through the slot that the group still holds. */
static void emit_reduce(script *s, uint32_t group, int mode)
{
    check_config *config = s->config;
    const check_group *g = &config->groups[group];
    static const float alphas[] = {1.0f, 0.5f, 0.25f, 1.0f / 3.0f, -1.0f};
    uint32_t index = new_call(s, true, group);
    check_call *call = &config->calls[index];

    call->mode = mode;
    call->grad_dtype = chance(s->d, 4) ? (int)roll(s->d, 3) : g->desc.grad_dtype;
    if (mode == 1 && oracle_item(call->grad_dtype, 0) > oracle_item(g->desc.dtype, g->desc.item_size))
        call->grad_dtype = g->desc.dtype;
    call->kind = (int)roll(s->d, VALUES_KINDS);
    call->alpha = alphas[roll(s->d, sizeof alphas / sizeof alphas[0])];
    call->accumulate = chance(s->d, 2);
    call->present = malloc(g->shapes.n_params);
    if (!call->present) {
        s->failed = true;
        return;
    }
    memset(call->present, 1, g->shapes.n_params);
    for (uint32_t p = 0; g->shapes.n_params > 1 && call->key % 3 == 0 && p < g->shapes.n_params; p++)
        if (chance(s->d, 3) && p != call->key / 3 % g->shapes.n_params) {
            call->present[p] = 0;
            call->subset = true;
        }
    if (mode == 1)
        emit(s, ACT_STASH, group, index);
    else if (chance(s->d, 2)) {
        emit(s, ACT_BOTH, group, index);
        s->open[s->n_open++] = index;
        return;
    }
    emit(s, ACT_READ, group, index);
    s->unsent = index;
    s->open[s->n_open++] = index;
    if (mode == 1 && !config->partial)
        leave_slot(s, group);
}

static void emit_net(script *s)
{
    uint32_t index = (uint32_t)s->unsent;
    const check_call *call = &s->config->calls[index];

    emit(s, ACT_NET, call->group, index);
    if (call->mode == 1 && s->config->partial) /* the slot's reads end in the network phase */
        leave_slot(s, call->group);
    s->unsent = -1;
}

static void emit_sums(script *s, uint32_t which)
{
    uint32_t index = s->open[which];

    emit(s, ACT_SUMS, s->config->calls[index].group, index);
    s->open[which] = s->open[--s->n_open];
}

static void emit_gone(script *s, uint32_t index)
{
    if (s->gone[index] || s->config->calls[index].mode == 1)
        return;
    emit(s, ACT_GONE, s->config->calls[index].group, index);
    s->gone[index] = true;
}

static bool can_stash(const script *s, uint32_t group)
{
    const check_group *g = &s->config->groups[group];
    return s->unsent < 0 && !s->config->node_landing && g->desc.grad_dtype != TIDE_NONE &&
           oracle_item(g->desc.grad_dtype, 0) <= oracle_item(g->desc.dtype, g->desc.item_size);
}

static bool held_by_unsent(const script *s, uint32_t group)
{
    return s->unsent >= 0 && s->config->partial && s->config->calls[s->unsent].mode == 1 &&
           s->config->calls[s->unsent].group == group;
}

static void step(script *s)
{
    check_config *config = s->config;
    uint32_t group = (uint32_t)roll(s->d, config->n_groups), which;
    const check_group *g = &config->groups[group];
    bool unsent;

    switch (roll(s->d, 6)) {
    case 0:
    case 1:
        if (s->state[group] == IDLE && !s->taken[g->slot]) {
            emit_gather(s, group);
        } else if (s->state[group] == GATHERED) {
            emit(s, ACT_LOOK, group, s->gather[group]);
            s->state[group] = SEEN;
        }
        break;
    case 2:
        if (s->state[group] != SEEN || held_by_unsent(s, group))
            break;
        if (can_stash(s, group) && roll(s->d, 3)) {
            emit_reduce(s, group, 1);
        } else {
            emit(s, ACT_RELEASE, group, s->gather[group]);
            leave_slot(s, group);
        }
        break;
    case 3:
        if (s->unsent < 0 && g->desc.grad_dtype != TIDE_NONE)
            emit_reduce(s, group, 0);
        break;
    case 4:
        if (s->unsent >= 0)
            emit_net(s);
        break;
    default:
        if (!s->n_open)
            break;
        which = (uint32_t)roll(s->d, s->n_open);
        unsent = s->unsent >= 0 && config->calls[s->unsent].group == config->calls[s->open[which]].group;
        if (chance(s->d, 2)) {
            if (!unsent || !config->partial)
                emit_gone(s, s->open[which]);
        } else if (!unsent) { /* a wait is for the group's latest call */
            emit_sums(s, which);
        }
    }
}

static bool write_script(check_config *config, dice *d, uint32_t want)
{
    script s = {.config = config, .d = d, .unsent = -1};
    bool ok = false;

    config->calls = calloc(want + 1, sizeof *config->calls);
    s.state = calloc(config->n_groups, sizeof *s.state);
    s.gather = calloc(config->n_groups, sizeof *s.gather);
    s.taken = calloc(config->n_slots, sizeof *s.taken);
    s.open = calloc(want + 1, sizeof *s.open);
    s.gone = calloc(want + 1, sizeof *s.gone);
    if (!config->calls || !s.state || !s.gather || !s.taken || !s.open || !s.gone)
        goto out;
    for (uint32_t g = 0; g < config->n_groups; g++)
        if (config->groups[g].desc.input == TIDE_INPUT_ADOPTED)
            emit(&s, ACT_ADOPT, g, 0);
    while (config->n_calls < want && !s.failed)
        step(&s);
    if (s.unsent >= 0)
        emit_net(&s);
    while (s.n_open)
        emit_sums(&s, 0);
    for (uint32_t g = 0; g < config->n_groups; g++) {
        if (s.state[g] == GATHERED)
            emit(&s, ACT_LOOK, g, s.gather[g]);
        if (s.state[g] != IDLE)
            emit(&s, ACT_RELEASE, g, s.gather[g]);
    }
    ok = !s.failed;
out:
    free(s.gone);
    free(s.open);
    free(s.taken);
    free(s.gather);
    free(s.state);
    return ok;
}

void check_clear(check_config *config)
{
    for (uint32_t i = 0; i < config->n_calls; i++)
        free(config->calls[i].present);
    for (uint32_t i = 0; config->groups && i < config->n_groups; i++)
        cli_shapes_clear(&config->groups[i].shapes);
    free(config->calls);
    free(config->actions);
    free(config->groups);
    memset(config, 0, sizeof *config);
}

/* ---- runs -------------------------------------------------------------------------------- */

static void roll_trouble(dice *d, uint32_t n_ranks, check_run *run)
{
    run->pauses = chance(d, 2);
    run->slow = chance(d, 4) ? (int64_t)roll(d, n_ranks) : -1;
    run->trouble.seed = roll(d, UINT32_MAX) + 1;
    run->trouble.shuffle_streams = chance(d, 2);
    run->trouble.rail_delay_us = chance(d, 3) ? 1 + (uint32_t)roll(d, 400) : 0;
}

/* A second run of the same calls: other knobs among those that keep the bytes, Slot-Reuse calls perhaps In-Place. The
 * order of actions was made for the first run's outbox: a partial one where the first's was full would end reads too
 * late. */
static void roll_again(const cli *c, dice *d, check_config *config)
{
    check_run *again = &config->runs[1];
    bool found = false;

    again->in_place = chance(d, 2);
    for (int tries = 0; tries < TRIES && !found; tries++) {
        tide_plan *plan;
        again->options = config->runs[0].options;
        roll_free_knobs(c, d, &config->topology, &again->options);
        if (plan_config(config, &again->options, &plan) != TIDE_OK)
            continue;
        found = config->partial || plan->rs.n_out >= plan->rs.n_blocks;
        tide_plan_destroy(plan);
    }
    if (!found)
        again->options = config->runs[0].options;
}

/* ---- lifetime ------------------------------------------------------------------------------ */

/* Two groups of unequal size in one landing slot and the same staging, whose chunks they fill many times over: whatever is
 * written or read too late or too early shows in a later call. */
static bool lifetime_groups(check_config *config)
{
    static const struct { uint32_t group; int ndim; int64_t dims[2]; } params[] = {
        {0, 2, {37, 31}}, {0, 1, {31}}, {1, 2, {130, 61}}, {1, 1, {61}}, {1, 2, {9, 16}}, {1, 1, {3}}};
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    char name[32];

    for (uint32_t g = 0; g < config->n_groups; g++) {
        config->groups[g].desc = init;
        config->groups[g].shapes.dtype = init.dtype;
    }
    for (size_t p = 0; p < sizeof params / sizeof params[0]; p++) {
        snprintf(name, sizeof name, "p%zu", p);
        if (!cli_shapes_add(&config->groups[params[p].group].shapes, name, params[p].ndim, params[p].dims, 0))
            return false;
    }
    config->groups[1].desc.shard_dtype = TIDE_F32; /* arguments, cast */
    config->groups[1].desc.input = TIDE_INPUT_ARGUMENT;
    config->groups[1].cast = true;
    for (uint32_t g = 0; g < config->n_groups; g++) {
        config->groups[g].desc.n_params = config->groups[g].shapes.n_params;
        config->groups[g].desc.params = config->groups[g].shapes.params;
    }
    return true;
}

static int draw_lifetime(const cli *c, const cli_fabric *fabric, uint64_t seed, uint32_t calls, check_config *config)
{
    check_run *run = &config->runs[0];
    dice d = {oracle_mix(seed, 9, 1, 0, 0)};
    tide_plan *plan;

    memset(config, 0, sizeof *config);
    config->seed = seed;
    config->topology = (tide_topology)TIDE_TOPOLOGY_INIT;
    config->topology.nodes = c->nodes ? (uint32_t)c->nodes : 1;
    config->topology.local = c->local ? (uint32_t)c->local : 2;
    config->n_groups = 2;
    config->groups = calloc(config->n_groups, sizeof *config->groups);
    if (!config->groups || !lifetime_groups(config))
        return cli_fail(c, "out of memory");
    run->fabric = fabric;
    run->gpus = (int)c->gpus;
    run->procs = c->procs;
    run->options = c->options;
    set_knob(c, &run->options, "deadline_ms", DEADLINE_MS);
    set_knob(c, &run->options, "mode", 1);
    set_knob(c, &run->options, "ring_slots", 1);
    set_knob(c, &run->options, "chunk", 256);
    set_knob(c, &run->options, "head_bytes", 1024);
    if (plan_config(config, &run->options, &plan) != TIDE_OK)
        return cli_fail_library(c);
    note_plan(config, plan);
    tide_plan_destroy(plan);
    roll_trouble(&d, config->topology.nodes * config->topology.local, run);
    run->pauses = true;
    config->n_runs = 1;
    return write_script(config, &d, calls) ? CLI_OK : cli_fail(c, "out of memory");
}

int check_draw(const cli *c, const cli_fabric *fabric, uint64_t seed, uint32_t most_calls, check_config *config)
{
    bool given = c->model || c->shapes, other = fabric != &cli_fabrics[0];
    dice d = {oracle_mix(seed, 9, 0, 0, 0)};
    check_run *first = &config->runs[0];
    tide_plan *plan = NULL;
    uint32_t calls = 6 + (uint32_t)roll(&d, CONFIG_CALLS - 5), n_ranks;
    int status = TIDE_ERR_ARGUMENT, code;

    if (c->lifetime)
        return draw_lifetime(c, fabric, seed, most_calls, config);
    memset(config, 0, sizeof *config);
    config->seed = seed;
    config->topology = (tide_topology)TIDE_TOPOLOGY_INIT;
    first->fabric = &cli_fabrics[0];
    first->procs = chance(&d, 8); /* drawn in any case: the flags change nothing else */
    if (given || c->threads || c->procs)
        first->procs = c->procs;
    if (given) {
        config->topology.nodes = c->nodes ? (uint32_t)c->nodes : 1;
        config->topology.local = c->local ? (uint32_t)c->local : 4;
        config->n_groups = c->groups ? (uint32_t)c->groups : 1;
        calls = most_calls;
    } else {
        roll_topology(c, &d, &config->topology);
        config->n_groups = 1 + (uint32_t)roll(&d, 4);
    }
    n_ranks = config->topology.nodes * config->topology.local;
    config->groups = calloc(config->n_groups, sizeof *config->groups);
    if (!config->groups)
        return cli_fail(c, "out of memory");
    if (given) {
        code = given_groups(c, config);
        if (code != CLI_OK)
            return code;
        first->options = c->options;
        set_knob(c, &first->options, "deadline_ms", DEADLINE_MS);
        status = plan_config(config, &first->options, &plan);
    } else {
        for (uint32_t g = 0; g < config->n_groups; g++)
            if (!roll_group(&d, n_ranks, &config->groups[g]))
                return cli_fail(c, "out of memory");
        for (int tries = 0; tries < TRIES && (status == TIDE_ERR_ARGUMENT || status == TIDE_ERR_UNSUPPORTED); tries++) {
            roll_knobs(c, &d, &config->topology, &first->options);
            status = plan_config(config, &first->options, &plan);
        }
    }
    if (status != TIDE_OK)
        return cli_fail_library(c);
    note_plan(config, plan);
    tide_plan_destroy(plan);
    roll_trouble(&d, n_ranks, first);
    config->runs[1] = *first;
    config->runs[1].fabric = fabric;
    config->runs[1].gpus = (int)c->gpus;
    if (other) /* a GPU's driver does not survive a fork: threads, or processes that never were anything else */
        config->runs[1].procs = c->procs;
    config->n_runs = other ? 2 : 1;
    if (!given && (chance(&d, 3) || other)) {
        config->n_runs = 2;
        roll_again(c, &d, config);
        roll_trouble(&d, n_ranks, &config->runs[1]);
    }
    if (!fabric->shared_landing && !cli_knob_given(c, "multicast")) /* nobody's GPUs are drawn into it */
        config->runs[1].options.multicast = 0;
    return write_script(config, &d, calls < most_calls ? calls : most_calls) ? CLI_OK : cli_fail(c, "out of memory");
}
