/* plan.c - tide_plan_create: checks everything, resolves the knobs, assigns landings. */
#include "plan/plan.h"

enum { DEFAULT_CHUNK = 65536, MIN_CHUNK = 16, MAX_AUTO_CHUNKS = 1 << 20 };
enum { GPU_MIN_SLOT = 4 << 20, GPU_MAX_SLOT = 16 << 20 }; /* elements: 8 and 32 MiB of bf16 */

static int check_arguments(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                           const tide_options *options)
{
    if (!topology)
        return tide_fail(TIDE_ERR_ARGUMENT, "topology: NULL, expected a tide_topology");
    if (topology->size != sizeof *topology)
        return tide_fail(TIDE_ERR_ARGUMENT, "topology.size: %zu, expected %zu (TIDE_TOPOLOGY_INIT)", topology->size,
                         sizeof *topology);
    if (topology->nodes < 1 || topology->nodes > TIDE_MAX_NODES)
        return tide_fail(TIDE_ERR_ARGUMENT, "nodes: %u is not in 1..%d", topology->nodes, TIDE_MAX_NODES);
    if (topology->local < 1 || topology->local > TIDE_MAX_LOCAL)
        return tide_fail(TIDE_ERR_ARGUMENT, "local: %u is not in 1..%d", topology->local, TIDE_MAX_LOCAL);
    if (n_groups < 1 || n_groups > TIDE_MAX_GROUPS)
        return tide_fail(TIDE_ERR_ARGUMENT, "n_groups: %u is not in 1..%d", n_groups, TIDE_MAX_GROUPS);
    if (!groups)
        return tide_fail(TIDE_ERR_ARGUMENT, "groups: NULL, expected %u descriptions", n_groups);
    return tide_options_check(options);
}

/* Replaces TIDE_AUTO by the default of every knob whose default does not depend on the plan. */
static void fill_defaults(tide_options *o)
{
#define TIDE_X(name, dflt, lo, hi, help)                                                                               \
    if (o->name == TIDE_AUTO)                                                                                          \
        o->name = (dflt);
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
}

/* Ring slots first, in array order, then the private landings (paper App. F). */
static void assign_slots(tide_plan *plan)
{
    uint32_t n_ring = 0, ring = 0, next;
    for (uint32_t i = 0; i < plan->n_groups; i++)
        n_ring += plan->groups[i].geo.landing_kind == TIDE_LANDING_RING;
    next = n_ring < plan->options.ring_slots ? n_ring : (uint32_t)plan->options.ring_slots;
    for (uint32_t i = 0; i < plan->n_groups; i++) {
        plan_group *g = &plan->groups[i];
        g->slot = g->geo.landing_kind == TIDE_LANDING_RING ? ring++ % (uint32_t)plan->options.ring_slots : next++;
    }
    plan->n_slots = next;
}

/* The largest group in bytes of fp32 output sizes the solver's problem. */
static void solve(const tide_plan *plan, const plan_rates *rates, const plan_node_rates *node_rates,
                  plan_choice *out)
{
    uint64_t s32 = 0;
    uint32_t item = 2;
    for (uint32_t i = 0; i < plan->n_groups; i++) {
        const geo_group *g = &plan->groups[i].geo;
        if (g->grad_dtype != TIDE_NONE && g->elements * sizeof(float) >= s32) {
            s32 = g->elements * sizeof(float);
            item = tide_dtype_bytes(g->grad_dtype);
        }
    }
    if (plan->topology.nodes == 1 && plan->options.target == 1) {
        *out = (plan_choice){1, plan_solve_node(node_rates, plan->topology.local, item), 1};
        return;
    }
    plan_solve(rates, plan->topology.nodes, plan->topology.local, (uint32_t)plan->options.w_wave,
               (uint32_t)plan->options.n_part, s32, item, out);
}

static int resolve_waves(tide_plan *plan, const plan_rates *rates, const plan_node_rates *node_rates)
{
    tide_options *o = &plan->options;
    uint32_t nodes = plan->topology.nodes, local = plan->topology.local, partial;
    plan_choice choice;
    int64_t waves, blocks;
    int status;

    if (o->w_wave == TIDE_AUTO)
        o->w_wave = local > 1 ? local : PLAN_SINGLE_WAVE;
    if (o->n_part == TIDE_AUTO || nodes == 1)
        o->n_part = 1;
    waves = nodes == 1 ? 1 : (nodes + o->w_wave - 1) / o->w_wave * o->n_part;
    if (o->n_par == TIDE_AUTO)
        o->n_par = waves == 1 ? 1 : 2;
    if (o->n_par == 1 && waves > 1)
        return tide_fail(TIDE_ERR_ARGUMENT, "n_par: 1, expected 2 for a plan of %lld waves (w_wave %lld, n_part %lld)",
                         (long long)waves, (long long)o->w_wave, (long long)o->n_part);
    solve(plan, rates, node_rates, &choice);
    if (o->k == TIDE_AUTO)
        o->k = choice.k;
    if (o->c_sum == TIDE_AUTO)
        o->c_sum = choice.c_sum;
    if (o->c_land == TIDE_AUTO)
        o->c_land = choice.c_land;
    status = plan_rs_init(&plan->rs, nodes, local, (uint32_t)o->w_wave, (uint32_t)o->k, (uint32_t)o->n_par,
                          (uint32_t)o->n_part, 0);
    if (status != TIDE_OK)
        return status;
    o->k = plan->rs.k;
    blocks = plan->rs.n_blocks;
    partial = plan_rs_partial_outbox(&plan->rs);
    if (o->n_out == TIDE_AUTO)
        o->n_out = o->mode == 1 ? partial : blocks;
    if (o->n_out > blocks)
        o->n_out = blocks;
    if (o->n_out < partial)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "n_out: %lld, expected at least %u: two consecutive rounds send that many blocks (k %lld)",
                         (long long)o->n_out, partial, (long long)o->k);
    plan->rs.n_out = (uint32_t)o->n_out;
    if (nodes == 1)
        o->n_out = 1; /* no outbox; the knob keeps within its bounds */
    return TIDE_OK;
}

/* Elements of a chunk when the knob is left to the plan; `most`: of the largest block. On CPUs a chunk fits the second-level
 * cache. On GPUs a chunk costs its stream some 13 us beside its bytes (two H200s: a reduce-scatter of 512 MiB takes 1.49, 1.14,
 * 0.94 ms with staging slots of 4, 8, 16 MiB; data that is still in the second-level cache is not added faster), and the last
 * one is added when nothing is pushed any more: a quarter of the block, within bounds. No block is cut into more than
 * MAX_AUTO_CHUNKS. */
static uint64_t auto_chunk(const tide_plan *plan, uint64_t most)
{
    uint64_t local = plan->topology.local, chunk = DEFAULT_CHUNK;
    if (plan->options.target == 1 && local > 1) {
        uint64_t senders = (plan->topology.nodes > 1 ? local : 1) * (local - 1); /* rows that share a slot */
        uint64_t slot = tide_min_u64(tide_max_u64(most / 4, GPU_MIN_SLOT / senders), GPU_MAX_SLOT / senders);
        chunk = tide_max_u64(chunk, tide_align_up(slot, PLAN_VECTOR));
    }
    return tide_max_u64(chunk, tide_align_up(tide_ceil_div(most, MAX_AUTO_CHUNKS), PLAN_VECTOR));
}

static int cut_groups(tide_plan *plan)
{
    tide_options *o = &plan->options;
    uint64_t most = 0;

    for (uint32_t i = 0; i < plan->n_groups; i++) {
        plan_cut_init(&plan->groups[i].cut, plan->topology.nodes, plan->topology.local, plan->rs.n_part,
                      plan->groups[i].geo.elements, 1);
        most = tide_max_u64(most, plan->groups[i].cut.part);
    }
    if (o->chunk == TIDE_AUTO)
        o->chunk = (int64_t)auto_chunk(plan, most);
    o->chunk = (int64_t)tide_min_u64((uint64_t)o->chunk, tide_max_u64(most, MIN_CHUNK));
    for (uint32_t i = 0; i < plan->n_groups; i++) {
        plan_group *g = &plan->groups[i];
        if (g->cut.part / (uint64_t)o->chunk >= UINT32_MAX)
            return tide_fail(TIDE_ERR_ARGUMENT,
                             "chunk: %lld cuts the %llu elements of group %u into more than 2^32 chunks",
                             (long long)o->chunk, (unsigned long long)g->cut.part, i);
        plan_cut_init(&g->cut, plan->topology.nodes, plan->topology.local, plan->rs.n_part, g->geo.elements,
                      (uint64_t)o->chunk);
    }
    return TIDE_OK;
}

static void choose_gather(tide_plan *plan, plan_group *g)
{
    const tide_options *o = &plan->options;
    uint64_t puts = 0, most = o->rail_ring ? (uint64_t)o->rail_ring : PLAN_RAIL_RING;

    if (plan->topology.nodes > 1 && plan->topology.local == 1 && !plan_shared_landing(plan)) {
        for (uint32_t i = 0; i < g->geo.n_params; i++)
            puts += g->geo.params[i].shard > 0 ? g->geo.params[i].outer : 0;
        puts *= plan->topology.nodes > 3 ? 2 : 1; /* rounds of one slot do not wrap */
        g->direct_puts = (uint32_t)tide_min_u64(puts + PLAN_ROUND_EXTRA, UINT32_MAX);
        g->direct = g->direct_puts <= most;
    }
    g->stage_cast = g->geo.input == TIDE_INPUT_ARGUMENT && plan->topology.nodes > 1 && !g->direct;
}

static uint64_t digest_geometry(uint64_t h, const plan_group *g)
{
    h = tide_fnv_u64(h, g->geo.n_params);
    h = tide_fnv_u64(h, (uint64_t)g->geo.dtype);
    h = tide_fnv_u64(h, g->geo.item);
    h = tide_fnv_u64(h, (uint64_t)g->geo.shard_dtype);
    h = tide_fnv_u64(h, (uint64_t)g->geo.grad_dtype);
    h = tide_fnv_u64(h, (uint64_t)g->geo.input);
    h = tide_fnv_u64(h, (uint64_t)g->geo.landing_kind);
    h = tide_fnv_u64(h, g->slot);
    h = tide_fnv_u64(h, g->resident);
    for (uint32_t i = 0; i < g->geo.n_params; i++) {
        const geo_param *p = &g->geo.params[i];
        h = tide_fnv_u64(h, p->outer);
        h = tide_fnv_u64(h, p->strip);
        h = tide_fnv_u64(h, p->whole);
        h = tide_fnv_u64(h, p->landing);
    }
    return h;
}

static uint64_t digest(const tide_plan *plan)
{
    uint64_t h = tide_fnv_u64(TIDE_FNV_BASIS, plan->topology.nodes);
    h = tide_fnv_u64(h, plan->topology.local);
#define TIDE_X(name, dflt, lo, hi, help) h = tide_fnv_u64(h, (uint64_t)plan->options.name);
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
    h = tide_fnv_u64(h, plan->n_groups);
    for (uint32_t i = 0; i < plan->n_groups; i++)
        h = digest_geometry(h, &plan->groups[i]);
    h = tide_fnv_u64(h, plan->map.block_stride);
    for (int i = 0; i < REGION_COUNT; i++) {
        h = tide_fnv_u64(h, plan->map.region[i].n_banks);
        for (uint32_t b = 0; b < plan->map.region[i].n_banks; b++)
            h = tide_fnv_u64(h, plan->map.region[i].banks[b].bytes);
    }
    return h;
}

int plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                const tide_options *options, const plan_rates *rates, const plan_node_rates *node_rates, tide_plan **out)
{
    static const tide_options defaults = TIDE_OPTIONS_INIT;
    tide_plan *plan;
    int status;

    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected where to put the plan");
    status = check_arguments(topology, groups, n_groups, options);
    if (status != TIDE_OK)
        return status;
    plan = tide_calloc(1, sizeof *plan);
    if (!plan)
        return TIDE_ERR_MEMORY;
    plan->topology = *topology;
    plan->options = options ? *options : defaults;
    fill_defaults(&plan->options);
    if (plan->options.multicast == TIDE_AUTO)
        plan->options.multicast = 0;
    plan->groups = tide_calloc(n_groups, sizeof *plan->groups);
    if (!plan->groups) {
        status = TIDE_ERR_MEMORY;
        goto fail;
    }
    for (uint32_t i = 0; i < n_groups; i++) {
        status = geo_group_init(&plan->groups[i].geo, topology, &groups[i], i);
        if (status != TIDE_OK)
            goto fail;
        choose_gather(plan, &plan->groups[i]);
        plan->n_groups = i + 1;
    }
    assign_slots(plan);
    status = resolve_waves(plan, rates, node_rates);
    if (status == TIDE_OK)
        status = cut_groups(plan);
    if (status == TIDE_OK)
        status = plan_map_init(plan);
    if (status != TIDE_OK)
        goto fail;
    plan->digest = digest(plan);
    *out = plan;
    return TIDE_OK;
fail:
    tide_plan_destroy(plan);
    return status;
}

int tide_plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                     const tide_options *options, tide_plan **out)
{
    return plan_create(topology, groups, n_groups, options, &plan_rates_paper, &plan_node_rates_h200, out);
}

int tide_plan_options(const tide_plan *plan, tide_options *out)
{
    if (!plan)
        return tide_fail(TIDE_ERR_ARGUMENT, "plan: NULL, expected a plan");
    if (!out || out->size != sizeof *out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: %s, expected a tide_options from TIDE_OPTIONS_INIT",
                         out ? "wrong size" : "NULL");
    *out = plan->options;
    return TIDE_OK;
}

uint64_t tide_plan_digest(const tide_plan *plan)
{
    return plan ? plan->digest : 0;
}

void tide_plan_destroy(tide_plan *plan)
{
    if (!plan)
        return;
    plan_map_clear(&plan->map);
    plan_rs_clear(&plan->rs);
    for (uint32_t i = 0; i < plan->n_groups; i++)
        geo_group_clear(&plan->groups[i].geo);
    tide_free(plan->groups);
    tide_free(plan);
}
