/*
 * fuzz_plan.c - tide_plan_create with any description. What it accepts it plans: memory that adds up, the same plan
 * twice, a text; and for a few ranks a proof without a violation.
 */
#include <string.h>

#include "fuzz.h"
#include "plan/plan.h"
#include "schedule/proof.h"

enum { MAX_GROUPS = 3, MAX_PARAMS = 6, PROVED_RANKS = 4, PROVED_BLOCKS = 24, PROVED_ELEMENTS = 2000 };
enum { PRINTED_RANKS = 64, PRINTED_BLOCKS = 256, PRINTED_CHUNKS = 1024 };

static uint64_t most_elements(const tide_plan *plan)
{
    uint64_t most = 0;
    for (uint32_t g = 0; g < plan->n_groups; g++)
        most = plan->groups[g].geo.elements > most ? plan->groups[g].geo.elements : most;
    return most;
}

static int64_t any_extent(fuzz_input *in)
{
    uint8_t how = fuzz_byte(in);
    if (how < 0xf0)
        return how % 40;
    switch (how & 7) {
    case 0:
        return INT64_MAX - fuzz_byte(in);
    case 1:
        return INT64_C(1) << (fuzz_byte(in) & 63);
    case 2:
        return (int64_t)fuzz_u64(in);
    default:
        return (INT64_C(1) << (fuzz_byte(in) % 40)) + (int8_t)fuzz_byte(in);
    }
}

static void any_param(fuzz_input *in, tide_param *p)
{
    *p = (tide_param){.name = fuzz_byte(in) & 1 ? "p" : NULL};
    p->ndim = fuzz_byte(in) < 0xf8 ? fuzz_byte(in) % 4 : (int8_t)fuzz_byte(in);
    p->shard_dim = fuzz_byte(in) < 0xc0 ? 0 : (int8_t)fuzz_byte(in);
    for (int d = 0; d < TIDE_MAX_DIMS && d < p->ndim; d++)
        p->dims[d] = any_extent(in);
}

static void any_group(fuzz_input *in, tide_group_desc *g, tide_param params[MAX_PARAMS])
{
    uint8_t how = fuzz_byte(in);
    *g = (tide_group_desc)TIDE_GROUP_DESC_INIT;
    g->n_params = 1 + how % MAX_PARAMS;
    g->params = params;
    for (uint32_t p = 0; p < g->n_params; p++)
        any_param(in, &params[p]);
    how = fuzz_byte(in);
    g->dtype = how < 0xf0 ? how & 3 : (int8_t)fuzz_byte(in);
    g->item_size = g->dtype == TIDE_OPAQUE || how >= 0xf8 ? (uint32_t)(fuzz_u64(in) >> (fuzz_byte(in) & 63)) : 0;
    how = fuzz_byte(in);
    g->shard_dtype = how < 0xa0 ? g->dtype : how < 0xf0 ? how & 3 : (int8_t)fuzz_byte(in);
    how = fuzz_byte(in);
    g->grad_dtype = how < 0xf0 ? how % 5 : (int8_t)fuzz_byte(in);
    how = fuzz_byte(in);
    g->input = how < 0xf0 ? how & 1 : (int8_t)fuzz_byte(in);
    g->landing = how < 0xf0 ? how >> 1 & 1 : (int8_t)fuzz_byte(in);
}

static void any_options(fuzz_input *in, tide_options *o)
{
    tide_knob_info knob;
    int64_t *values = (int64_t *)(void *)((char *)o + sizeof o->size); /* in the table's order */
    for (size_t i = 0; tide_knob_describe(i, &knob) == TIDE_OK; i++) {
        uint8_t how = fuzz_byte(in);
        if (how < 0xa0)
            continue;
        values[i] = how < 0xf0 ? knob.minimum + fuzz_byte(in) % 8 : (int64_t)(fuzz_u64(in) >> (fuzz_byte(in) & 63));
    }
}

static int count(void *total, const char *text, size_t bytes)
{
    (void)text;
    *(size_t *)total += bytes;
    return 0;
}

static void look_at(const tide_plan *plan, const tide_topology *t, uint32_t n_groups)
{
    uint32_t n_ranks = t->nodes * t->local;
    tide_bytes b = TIDE_BYTES_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    tide_knob_info knob;
    const int64_t *values = (const int64_t *)(const void *)((const char *)&o + sizeof o.size);
    size_t printed = 0;

    HOLDS(tide_plan_bytes(plan, n_ranks - 1, &b) == TIDE_OK);
    HOLDS(b.total <= INT64_MAX);
    HOLDS(b.control <= b.total && b.landing <= b.total && b.inbox <= b.total && b.outbox <= b.total);
    HOLDS(tide_plan_bytes(plan, n_ranks, &b) == TIDE_ERR_ARGUMENT);
    HOLDS(tide_plan_options(plan, &o) == TIDE_OK);
    for (size_t i = 0; tide_knob_describe(i, &knob) == TIDE_OK; i++)
        HOLDS(values[i] >= knob.minimum && values[i] <= knob.maximum);
    HOLDS(n_groups > 0);
    /* Op lists grow with blocks and chunks, and a text says how many ops there are. */
    if (n_ranks <= PRINTED_RANKS && plan->rs.n_blocks <= PRINTED_BLOCKS &&
        most_elements(plan) / (uint64_t)o.chunk <= PRINTED_CHUNKS) {
        HOLDS(tide_plan_print(plan, 0, TIDE_PRINT_JSON, count, &printed) == TIDE_OK);
        HOLDS(printed > 0);
    }
}

/* What takes long proves nothing new. */
static int small(const tide_plan *plan, const tide_topology *t)
{
    return t->nodes * t->local <= PROVED_RANKS && plan->rs.n_blocks <= PROVED_BLOCKS &&
           most_elements(plan) <= PROVED_ELEMENTS;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_options options = TIDE_OPTIONS_INIT;
    tide_group_desc groups[MAX_GROUPS];
    tide_param params[MAX_GROUPS][MAX_PARAMS];
    tide_plan *plan = NULL, *again = NULL;
    uint8_t how = fuzz_byte(&in);
    uint32_t n_groups = 1 + how % MAX_GROUPS;
    const verify_options verify = {.stop_after = 1};
    proof_result proved;

    topology.nodes = how < 0xf0 ? 1u + fuzz_byte(&in) % 9 : (uint32_t)(fuzz_u64(&in) >> (fuzz_byte(&in) & 63));
    topology.local = how < 0xe0 ? 1u + fuzz_byte(&in) % 8 : (uint32_t)(fuzz_u64(&in) >> (fuzz_byte(&in) & 63));
    any_options(&in, &options);
    for (uint32_t g = 0; g < n_groups; g++)
        any_group(&in, &groups[g], params[g]);
    if (tide_plan_create(&topology, groups, n_groups, &options, &plan) != TIDE_OK) {
        HOLDS(tide_last_error()[0]);
        return 0;
    }
    look_at(plan, &topology, n_groups);
    HOLDS(tide_plan_create(&topology, groups, n_groups, &options, &again) == TIDE_OK);
    HOLDS(tide_plan_digest(plan) == tide_plan_digest(again));
    tide_plan_destroy(again);
    if (small(plan, &topology)) {
        HOLDS(proof_plan(plan, 1u << PROOF_TRAIN | 1u << PROOF_RANDOM, how, &verify, &proved) == TIDE_OK);
        HOLDS(proved.violations == 0);
    }
    tide_plan_destroy(plan);
    return 0;
}
