/* memory.c - the memory map and what one rank allocates for it (paper 5.4). The map is the same on every rank. */
#include "plan/plan.h"

const char *plan_region_name(int region)
{
    static const char *const names[REGION_COUNT] = {"landing", "resident", "stage", "staging",
                                                    "outbox",  "spare",    "inbox"};
    return region >= 0 && region < REGION_COUNT ? names[region] : "invalid";
}

uint64_t plan_control_bytes(uint32_t nodes, uint32_t local, uint32_t n_slots)
{
    uint64_t words = (uint64_t)(RESOURCE_SLOT0 + n_slots) * 2 * local;
    uint64_t rail = (uint64_t)PLAN_RAIL_LANES * nodes * PLAN_RAIL_CONTEXTS * PLAN_RAIL_SIGNALS;
    return tide_align_up(words * PLAN_WORD_LINE + rail * PLAN_RAIL_WORD, TIDE_ALIGN);
}

uint64_t plan_area_bound(uint32_t n_stg, uint32_t n_par, uint32_t n_out)
{
    return UINT64_C(4) * n_stg + UINT64_C(8) * n_par + UINT64_C(2) * n_out + 2;
}

static int too_large(int region)
{
    return tide_fail(TIDE_ERR_ARGUMENT, "groups: region %s would exceed 2^63 bytes", plan_region_name(region));
}

static bool align_checked(uint64_t bytes, uint64_t *out)
{
    if (!tide_add(bytes, TIDE_ALIGN - 1, &bytes))
        return false;
    *out = bytes / TIDE_ALIGN * TIDE_ALIGN;
    return true;
}

/* Gives `region` n banks of `bytes` each; none at all when there are no bytes. */
static int even_banks(plan_map *map, int region, uint32_t n, uint64_t bytes)
{
    uint64_t offset = 0;
    map->region[region].n_banks = n;
    map->region[region].banks = tide_calloc(n, sizeof(plan_bank));
    if (!map->region[region].banks)
        return TIDE_ERR_MEMORY;
    if (!align_checked(bytes, &bytes))
        return too_large(region);
    for (uint32_t i = 0; i < n; i++) {
        map->region[region].banks[i] = (plan_bank){offset, bytes};
        if (!tide_add(offset, bytes, &offset))
            return too_large(region);
    }
    map->region[region].bytes = offset;
    return TIDE_OK;
}

/* Landing slots are as large as the groups assigned to them, not as the largest group (paper App. F). */
static int place_landings(tide_plan *plan)
{
    plan_map *map = &plan->map;
    plan_bank *banks = tide_calloc(plan->n_slots, sizeof *banks);
    uint64_t offset = 0;

    map->region[REGION_LANDING].banks = banks;
    map->region[REGION_LANDING].n_banks = plan->n_slots;
    if (!banks)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i < plan->n_groups; i++) {
        plan_bank *bank = &banks[plan->groups[i].slot];
        bank->bytes = tide_max_u64(bank->bytes, plan->groups[i].geo.landing_bytes); /* a multiple of TIDE_ALIGN */
    }
    for (uint32_t i = 0; i < plan->n_slots; i++) {
        banks[i].offset = offset;
        if (!tide_add(offset, banks[i].bytes, &offset))
            return too_large(REGION_LANDING);
    }
    map->region[REGION_LANDING].bytes = offset;
    return TIDE_OK;
}

static int place_resident(tide_plan *plan)
{
    uint64_t offset = 0, bytes;
    for (uint32_t i = 0; i < plan->n_groups; i++) {
        plan_group *g = &plan->groups[i];
        if (g->geo.input != TIDE_INPUT_ADOPTED)
            continue;
        g->resident = offset;
        if (!align_checked(g->geo.shard_bytes, &bytes) || !tide_add(offset, bytes, &offset))
            return too_large(REGION_RESIDENT);
    }
    return even_banks(&plan->map, REGION_RESIDENT, 1, offset);
}

static int place_stage(tide_plan *plan)
{
    uint64_t most = 0, bytes, nodes = plan->topology.nodes;
    for (uint32_t i = 0; i < plan->n_groups && nodes > 1; i++) {
        const plan_group *g = &plan->groups[i];
        if (g->direct)
            continue;
        if (!tide_mul(g->geo.shard_bytes, g->stage_cast ? nodes : nodes - 1, &bytes))
            return too_large(REGION_STAGE);
        most = tide_max_u64(most, bytes);
    }
    return even_banks(&plan->map, REGION_STAGE, 1, most);
}

static int place_staging(tide_plan *plan)
{
    uint64_t most = 0, bytes, local = plan->topology.local;
    for (uint32_t i = 0; i < plan->n_groups; i++) {
        const plan_group *g = &plan->groups[i];
        if (g->geo.grad_dtype == TIDE_NONE || g->cut.n_chunks == 0)
            continue;
        if (!tide_mul(g->cut.chunk * tide_dtype_bytes(g->geo.grad_dtype), (local - 1) * g->cut.rows, &bytes))
            return too_large(REGION_STAGING);
        most = tide_max_u64(most, bytes);
    }
    return even_banks(&plan->map, REGION_STAGING, (uint32_t)plan->options.n_stg, most);
}

/* Outbox, spare and inbox count in blocks of one stride, so that a stale block means the same bytes to all groups. */
static int place_blocks(tide_plan *plan)
{
    plan_map *map = &plan->map;
    const plan_rs *rs = &plan->rs;
    uint64_t stride = 0, outbox, spare, inbox, bytes;
    int status;

    for (uint32_t i = 0; i < plan->n_groups && rs->nodes > 1; i++) {
        const plan_group *g = &plan->groups[i];
        if (g->geo.grad_dtype == TIDE_NONE)
            continue;
        if (!tide_mul(g->cut.part, g->cut.rows * sizeof(float), &bytes) || !align_checked(bytes, &bytes))
            return too_large(REGION_OUTBOX);
        stride = tide_max_u64(stride, bytes);
    }
    map->block_stride = stride;
    if (!tide_mul(stride, rs->n_out, &outbox))
        return too_large(REGION_OUTBOX);
    if (!tide_mul(stride, rs->n_part, &spare))
        return too_large(REGION_SPARE);
    if (!tide_mul(stride, rs->n_inbox, &inbox))
        return too_large(REGION_INBOX);
    status = even_banks(map, REGION_OUTBOX, 2, outbox);
    if (status == TIDE_OK)
        status = even_banks(map, REGION_SPARE, 2, spare);
    if (status == TIDE_OK)
        status = even_banks(map, REGION_INBOX, rs->n_par, inbox);
    return status;
}

int plan_map_init(tide_plan *plan)
{
    uint64_t total = plan_control_bytes(plan->topology.nodes, plan->topology.local, plan->n_slots);
    int status = place_landings(plan);

    if (status == TIDE_OK)
        status = place_resident(plan);
    if (status == TIDE_OK)
        status = place_stage(plan);
    if (status == TIDE_OK)
        status = place_staging(plan);
    if (status == TIDE_OK)
        status = place_blocks(plan);
    for (int i = 0; i < REGION_COUNT && status == TIDE_OK; i++)
        if (!tide_add(total, plan->map.region[i].bytes, &total))
            status = tide_fail(TIDE_ERR_ARGUMENT, "groups: all regions together would exceed 2^63 bytes");
    if (status != TIDE_OK)
        plan_map_clear(&plan->map);
    return status;
}

void plan_map_clear(plan_map *map)
{
    for (int i = 0; i < REGION_COUNT; i++)
        tide_free(map->region[i].banks);
    memset(map, 0, sizeof *map);
}

int tide_plan_bytes(const tide_plan *plan, uint32_t rank, tide_bytes *out)
{
    uint64_t ranks;

    if (!plan)
        return tide_fail(TIDE_ERR_ARGUMENT, "plan: NULL, expected a plan");
    if (!out || out->size != sizeof *out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: %s, expected a tide_bytes from TIDE_BYTES_INIT",
                         out ? "wrong size" : "NULL");
    ranks = (uint64_t)plan->topology.nodes * plan->topology.local;
    if (rank >= ranks)
        return tide_fail(TIDE_ERR_ARGUMENT, "rank: %u is not in 0..%llu", rank, (unsigned long long)ranks - 1);
    out->control = plan_control_bytes(plan->topology.nodes, plan->topology.local, plan->n_slots);
    out->landing = plan->map.region[REGION_LANDING].bytes;
    if (plan_shared_landing(plan) && rank % plan->topology.local != 0)
        out->landing = 0; /* the node has one, local rank 0's */
    out->resident = plan->map.region[REGION_RESIDENT].bytes;
    out->stage = plan->map.region[REGION_STAGE].bytes;
    out->staging = plan->map.region[REGION_STAGING].bytes;
    out->outbox = plan->map.region[REGION_OUTBOX].bytes;
    out->spare = plan->map.region[REGION_SPARE].bytes;
    out->inbox = plan->map.region[REGION_INBOX].bytes;
    out->total =
        out->control + out->landing + out->resident + out->stage + out->staging + out->outbox + out->spare + out->inbox;
    out->granularity = 1;
    return TIDE_OK;
}
