/* proof.c - contracts from geometry, and the orders in which calls may come. */
#include "schedule/proof.h"

/* ---- programs ------------------------------------------------------------------------------------------- */

int proof_create(const tide_plan *plan, proof *out)
{
    memset(out, 0, sizeof *out);
    out->plan = plan;
    out->n_ranks = plan->topology.nodes * plan->topology.local;
    out->n_programs = plan->n_groups * PROOF_KIND_COUNT;
    out->programs = tide_calloc(out->n_programs, sizeof *out->programs);
    return out->programs ? TIDE_OK : TIDE_ERR_MEMORY;
}

static void program_free(proof_program *g, uint32_t n_ranks)
{
    for (uint32_t r = 0; g && g->by_rank && r < n_ranks; r++)
        schedule_clear(&g->by_rank[r]);
    if (!g)
        return;
    tide_free(g->by_rank);
    tide_free(g->lists);
    tide_free(g->origins);
    tide_free(g->input_bytes);
    tide_free(g->input_offset);
    tide_free(g->spans);
    tide_free(g->first_span);
    tide_free(g);
}

void proof_clear(proof *p)
{
    for (uint32_t i = 0; p->programs && i < p->n_programs; i++)
        program_free(p->programs[i], p->n_ranks);
    tide_free(p->programs);
    memset(p, 0, sizeof *p);
}

static int add_span(proof_program *g, uint32_t *capacity, const verify_span *span)
{
    if (!span->rows || !span->width)
        return TIDE_OK;
    if (tide_grow(&g->spans, capacity, (uint64_t)g->contract.n_spans + 1, sizeof *g->spans) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    g->spans[g->contract.n_spans++] = *span;
    return TIDE_OK;
}

/* Landing(p, r) = A_p + r * s_p; with strips, strip o of rank r at A_p + (o * N + r) * strip (paper 2.1, equation 2).
 */
static int gather_contract(const proof *p, const plan_group *group, proof_program *g)
{
    const geo_group *geo = &group->geo;
    verify_contract *c = &g->contract;
    uint32_t capacity = 0, ranks = p->n_ranks;

    c->kind = VERIFY_AG;
    c->in_dtype = geo->shard_dtype;
    c->in_item = geo->dtype == geo->shard_dtype ? geo->item : tide_dtype_bytes(geo->shard_dtype);
    c->out_dtype = geo->dtype;
    c->out_item = geo->item;
    c->adopted = geo->input == TIDE_INPUT_ADOPTED;
    c->resident = group->resident;
    c->packed = geo->elements * c->in_item;
    c->n_inputs = c->adopted ? 0 : geo->n_params;
    for (uint32_t i = 0; i < geo->n_params; i++) {
        const geo_param *param = &geo->params[i];
        uint64_t strip = param->strip * geo->item;
        g->input_bytes[i] = param->shard * c->in_item;
        g->input_offset[i] = param->offset * c->in_item;
        for (uint32_t r = 0; r < ranks; r++) {
            verify_span span = {.at = param->landing + r * strip,
                                .from = param->offset * geo->item,
                                .width = strip,
                                .rows = param->outer,
                                .at_pitch = ranks * strip,
                                .from_pitch = strip,
                                .source = r};
            if (add_span(g, &capacity, &span) != TIDE_OK)
                return TIDE_ERR_MEMORY;
        }
    }
    c->input_offset = g->input_offset;
    return TIDE_OK;
}

/* out_p = the sum over u of G_p(u)[rows of r], packed over the parameters that have gradients; rows past the end count
 * as zero. */
static int reduce_contract(const proof *p, const geo_group *geo, int dtype, int kind, proof_program *g)
{
    verify_contract *c = &g->contract;
    uint32_t capacity = 0, ranks = p->n_ranks;

    c->kind = kind;
    c->in_dtype = dtype;
    c->in_item = tide_dtype_bytes(dtype);
    c->out_dtype = TIDE_F32;
    c->out_item = 4;
    c->n_inputs = geo->n_params;
    for (uint32_t i = 0; i < geo->n_params; i++)
        g->input_bytes[i] = geo->params[i].whole * c->in_item;
    if (kind == VERIFY_STASH)
        return TIDE_OK;
    c->elements = geo->elements;
    g->first_span = tide_calloc(ranks + 1u, sizeof *g->first_span);
    if (!g->first_span)
        return TIDE_ERR_MEMORY;
    for (uint32_t r = 0; r < ranks; r++) {
        g->first_span[r] = c->n_spans;
        for (uint32_t i = 0; i < geo->n_params; i++) {
            const geo_param *param = &geo->params[i];
            verify_span span = {.at = param->offset,
                                .from = r * param->strip,
                                .width = param->strip,
                                .rows = param->outer,
                                .at_pitch = param->strip,
                                .from_pitch = ranks * param->strip,
                                .source = i};
            if (param->outer == 1) /* the last ranks' rows may be padding */
                span.width = span.from >= param->whole ? 0 : tide_min_u64(param->whole - span.from, param->strip);
            if (add_span(g, &capacity, &span) != TIDE_OK)
                return TIDE_ERR_MEMORY;
        }
    }
    g->first_span[ranks] = c->n_spans;
    c->first_span = g->first_span;
    return TIDE_OK;
}

static int other_dtype(int dtype)
{
    return dtype == TIDE_F32 ? TIDE_BF16 : TIDE_F32;
}

static int compile(const proof *p, int kind, uint32_t group_index, uint8_t *present, proof_program *g)
{
    const tide_plan *plan = p->plan;
    const plan_group *group = &plan->groups[group_index];
    geo_group subset = {0};
    schedule_rs_options options = {.grad_dtype = group->geo.grad_dtype};
    int status = TIDE_OK;

    g->by_rank = tide_calloc(p->n_ranks, sizeof *g->by_rank);
    g->lists = tide_calloc(p->n_ranks, sizeof *g->lists);
    g->origins = tide_calloc(p->n_ranks, sizeof *g->origins);
    g->input_bytes = tide_calloc(group->geo.n_params, sizeof *g->input_bytes);
    g->input_offset = tide_calloc(group->geo.n_params, sizeof *g->input_offset);
    if (!g->by_rank || !g->lists || !g->origins || !g->input_bytes || !g->input_offset)
        return TIDE_ERR_MEMORY;
    if (kind == PROOF_AG) {
        status = gather_contract(p, group, g);
    } else {
        if (kind == PROOF_RS_SUBSET) {
            for (uint32_t i = 0; i < group->geo.n_params; i++)
                present[i] = i % 3 != 1;
            options.present = present;
        } else if (kind == PROOF_RS_DTYPE) {
            options.grad_dtype = other_dtype(options.grad_dtype);
        }
        options.mode = kind == PROOF_RS_REUSE || kind == PROOF_STASH;
        status = geo_group_subset(&subset, &group->geo, options.present, NULL);
        if (status == TIDE_OK)
            status = reduce_contract(p, &subset, options.grad_dtype, kind == PROOF_STASH ? VERIFY_STASH : VERIFY_RS, g);
        geo_group_clear(&subset);
    }
    for (uint32_t r = 0; r < p->n_ranks && status == TIDE_OK; r++) {
        g->lists[r] = &g->by_rank[r];
        if (kind == PROOF_AG)
            status = schedule_build_ag(plan, group_index, r, &g->by_rank[r]);
        else if (kind == PROOF_STASH)
            status = schedule_build_stash(plan, group_index, r, &options, &g->by_rank[r]);
        else
            status = schedule_build_rs(plan, group_index, r, &options, &g->by_rank[r]);
    }
    g->contract.group = group_index;
    g->contract.slot = group->slot;
    g->contract.spans = g->spans;
    g->contract.input_bytes = g->input_bytes;
    return status;
}

static bool reusable(const tide_plan *plan, const geo_group *geo)
{
    return !plan_shared_landing(plan) && geo->grad_dtype != TIDE_NONE && tide_dtype_bytes(geo->grad_dtype) <= geo->item;
}

int proof_compile(proof *p, int kind, uint32_t group, proof_program **out)
{
    proof_program **slot = &p->programs[group * PROOF_KIND_COUNT + (uint32_t)kind], *g;
    const geo_group *geo = &p->plan->groups[group].geo;
    uint8_t *present;
    int status;

    if ((kind != PROOF_AG && geo->grad_dtype == TIDE_NONE) || (kind == PROOF_RS_SUBSET && geo->n_params < 2) ||
        ((kind == PROOF_RS_REUSE || kind == PROOF_STASH) && !reusable(p->plan, geo)))
        return TIDE_ERR_UNSUPPORTED;
    *out = *slot;
    if (*slot)
        return TIDE_OK;
    g = tide_calloc(1, sizeof *g);
    present = tide_calloc(geo->n_params, 1);
    status = g && present ? compile(p, kind, group, present, g) : TIDE_ERR_MEMORY;
    tide_free(present);
    if (status != TIDE_OK) {
        program_free(g, p->n_ranks);
        return status;
    }
    g->kind = kind;
    g->group = group;
    *out = *slot = g;
    return TIDE_OK;
}

/* ---- cases ------------------------------------------------------------------------------------------------- */

/* What the rules of the public calls depend on. */
typedef struct host {
    proof *p;
    proof_case *c;
    int64_t *holder;     /* per slot: the all-gather call that holds it, -1: free */
    uint8_t *called;     /* per group */
    uint8_t *reading;    /* per slot: stashed gradients that a network phase still reads */
    uint32_t pending[2]; /* reads without their network phase, oldest first */
    uint32_t n_pending, max_pending;
    uint64_t random;
    int status;
} host;

static uint32_t choose(host *h, uint32_t n)
{
    h->random += UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(tide_fnv_u64(TIDE_FNV_BASIS, h->random) >> 20) % n;
}

static void step(host *h, uint32_t call, int part)
{
    proof_case *c = h->c;
    if (h->status != TIDE_OK)
        return;
    h->status = tide_grow(&c->steps, &c->cap_steps, (uint64_t)c->n_steps + 1, sizeof *c->steps);
    if (h->status == TIDE_OK)
        c->steps[c->n_steps++] = (verify_step){call, part, -1};
}

/* Appends a call; source: UINT32_MAX for itself. False when the group has no such call, or on failure. */
static bool call(host *h, int kind, uint32_t group, uint32_t source, uint32_t *out)
{
    proof_case *c = h->c;
    proof_program *g;
    int status;
    if (h->status != TIDE_OK)
        return false;
    status = proof_compile(h->p, kind, group, &g);
    if (status == TIDE_ERR_UNSUPPORTED)
        return false;
    if (status == TIDE_OK)
        status = tide_grow(&c->calls, &c->cap_calls, (uint64_t)c->n_calls + 1, sizeof *c->calls);
    h->status = status;
    if (status != TIDE_OK)
        return false;
    *out = c->n_calls;
    c->calls[c->n_calls] =
        (verify_call){g->lists, g->origins, &g->contract, source == UINT32_MAX ? c->n_calls : source};
    c->n_calls++;
    if (!h->called[group]) {
        h->called[group] = 1;
        c->n_groups++;
    }
    return true;
}

static void net(host *h)
{
    step(h, h->pending[0], VERIFY_PART_NET);
    h->reading[h->c->calls[h->pending[0]].contract->slot] = 0;
    h->pending[0] = h->pending[1];
    h->n_pending--;
}

static bool held(const host *h, uint32_t group)
{
    int64_t holder = h->holder[h->p->plan->groups[group].slot];
    return holder >= 0 && h->c->calls[holder].contract->group == group;
}

static void release(host *h, uint32_t group)
{
    uint32_t slot = h->p->plan->groups[group].slot;
    if (!held(h, group))
        return;
    step(h, (uint32_t)h->holder[slot], VERIFY_PART_RELEASE);
    h->holder[slot] = -1;
}

static void gather(host *h, uint32_t group)
{
    uint32_t slot = h->p->plan->groups[group].slot, n;
    if (held(h, group))
        return;
    if (h->reading[slot]) /* the network phase gives it back */
        net(h);
    if (h->holder[slot] >= 0)
        release(h, h->c->calls[h->holder[slot]].contract->group);
    if (!call(h, PROOF_AG, group, UINT32_MAX, &n))
        return;
    step(h, n, VERIFY_PART_AG);
    h->holder[slot] = n;
}

static bool scatter(host *h, int kind, uint32_t group)
{
    uint32_t n, stash = UINT32_MAX, slot = h->p->plan->groups[group].slot;
    if (h->p->plan->groups[group].geo.grad_dtype == TIDE_NONE)
        return false;
    while (h->n_pending >= h->max_pending)
        net(h);
    if (kind == PROOF_RS_REUSE) {
        if (!held(h, group) || !call(h, PROOF_STASH, group, UINT32_MAX, &stash))
            return false;
        step(h, (uint32_t)h->holder[slot], VERIFY_PART_USE);
        step(h, stash, VERIFY_PART_STASH);
        h->holder[slot] = -1; /* given back once it is read */
    }
    if (!call(h, kind, group, stash, &n))
        return false;
    step(h, n, VERIFY_PART_READ);
    h->reading[slot] = kind == PROOF_RS_REUSE && h->max_pending == 1;
    h->pending[h->n_pending++] = n;
    return true;
}

static void train(host *h, int order)
{
    uint32_t n = h->p->plan->n_groups;
    for (uint32_t g = 0; g < n; g++) { /* forward, gathered one ahead */
        gather(h, g);
        if (g + 1 < n && h->p->plan->groups[g + 1].slot != h->p->plan->groups[g].slot)
            gather(h, g + 1);
        release(h, g);
    }
    for (uint32_t g = n; g-- > 0;) { /* backward */
        bool ahead = g > 0 && h->p->plan->groups[g - 1].slot != h->p->plan->groups[g].slot;
        gather(h, g);
        if (ahead && order != PROOF_TRAIN)
            gather(h, g - 1);
        if (order != PROOF_TRAIN_REUSE || !scatter(h, PROOF_RS_REUSE, g)) {
            release(h, g);
            scatter(h, PROOF_RS, g);
        }
        if (ahead && order == PROOF_TRAIN)
            gather(h, g - 1);
        if (h->n_pending && (order != PROOF_TRAIN_PLAIN || g % 2 == 0))
            net(h);
    }
}

static void random_step(host *h)
{
    uint32_t group = choose(h, h->p->plan->n_groups);
    switch (choose(h, 8)) {
    case 0:
    case 1:
        gather(h, group);
        break;
    case 2:
        release(h, group);
        break;
    case 3:
        if (!scatter(h, PROOF_RS_SUBSET, group))
            gather(h, group);
        break;
    case 4:
        scatter(h, PROOF_RS_DTYPE, group);
        break;
    case 5:
        gather(h, group);
        if (!scatter(h, PROOF_RS_REUSE, group))
            release(h, group);
        break;
    case 6:
        scatter(h, PROOF_RS, group);
        break;
    default:
        if (h->n_pending)
            net(h);
    }
}

int proof_case_create(proof *p, int order, uint32_t length, uint64_t seed, proof_case *out)
{
    const tide_plan *plan = p->plan;
    host h = {.p = p, .c = out, .random = seed};

    memset(out, 0, sizeof *out);
    /* A read that sums in its network phase, too, has to be complete before the next one begins. */
    h.max_pending = plan->topology.nodes == 1 || plan->rs.n_out >= plan->rs.n_blocks ? 2 : 1;
    h.holder = tide_calloc(plan->n_slots, sizeof *h.holder);
    h.called = tide_calloc(plan->n_groups, 1);
    h.reading = tide_calloc(plan->n_slots, 1);
    if (!h.holder || !h.called || !h.reading)
        h.status = TIDE_ERR_MEMORY;
    for (uint32_t i = 0; h.holder && i < plan->n_slots; i++)
        h.holder[i] = -1;
    for (uint32_t i = 0; i < length && h.status == TIDE_OK; i++) {
        if (order == PROOF_RANDOM)
            random_step(&h);
        else
            train(&h, order);
    }
    while (h.n_pending && h.status == TIDE_OK)
        net(&h);
    for (uint32_t g = 0; g < plan->n_groups && h.status == TIDE_OK; g++)
        release(&h, g);
    tide_free(h.holder);
    tide_free(h.called);
    tide_free(h.reading);
    if (h.status != TIDE_OK)
        proof_case_clear(out);
    return h.status;
}

void proof_case_clear(proof_case *c)
{
    tide_free(c->calls);
    tide_free(c->steps);
    memset(c, 0, sizeof *c);
}

int proof_case_verify(const proof *p, const proof_case *c, const verify_options *options, verify_result *result)
{
    const tide_plan *plan = p->plan;
    verify_input in = {.nodes = plan->topology.nodes,
                       .local = plan->topology.local,
                       .n_ctx = (uint32_t)plan->options.n_ctx,
                       .n_slots = plan->n_slots,
                       .shared_landing = plan_shared_landing(plan),
                       .map = &plan->map,
                       .calls = c->calls,
                       .n_calls = c->n_calls,
                       .steps = c->steps,
                       .n_steps = c->n_steps};
    return verify_run(&in, options, result);
}

int proof_plan(const tide_plan *plan, uint32_t orders, uint64_t seed, const verify_options *options, proof_result *out)
{
    proof p;
    int status = proof_create(plan, &p);

    memset(out, 0, sizeof *out);
    for (int order = 0; order < PROOF_ORDER_COUNT && status == TIDE_OK; order++) {
        proof_case c;
        verify_result r;
        if (!(orders >> order & 1))
            continue;
        /* Two steps: what one leaves behind is what the next one meets. */
        status = proof_case_create(&p, order, order == PROOF_RANDOM ? 6 + 3 * plan->n_groups : 2, seed, &c);
        if (status != TIDE_OK)
            break;
        status = proof_case_verify(&p, &c, options, &r);
        if (status == TIDE_OK) {
            out->ag_ops += r.ag_ops;
            out->rs_ops += r.rs_ops;
            out->calls += r.calls;
            out->violations += r.violations;
            out->accesses += r.accesses;
            out->groups = tide_max_u64(out->groups, c.n_groups);
            out->cases++;
        }
        proof_case_clear(&c);
        if (options->stop_after && out->violations >= options->stop_after)
            break;
    }
    proof_clear(&p);
    return status;
}
