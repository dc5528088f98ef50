/* simulate_work.c - what an operation asks of the resources: bytes, directions, and its own limit. */
#include <math.h>

#include "schedule/simulate_internal.h"

static uint32_t resource_at(const simulation *s, uint32_t rank, int kind)
{
    return sim_index(s, rank) * SIMULATE_SHARED + (uint32_t)kind;
}

static void demand(simulation *s, sim_flow *flow, uint32_t rank, int kind, double weight)
{
    if (s->status == TIDE_OK)
        s->status = flows_demand(&s->flows, flow, resource_at(s, rank, kind), weight);
}

static sim_flow *flow_of(simulation *s, uint32_t instance, uint32_t aux, double units, double cap)
{
    sim_flow *flow = s->status == TIDE_OK ? flows_add(&s->flows, instance, aux, units, cap) : NULL;
    if (!flow)
        s->status = TIDE_ERR_MEMORY;
    else {
        flow->rank = s->instances[instance].chain / s->per_rank;
        s->instances[instance].pending++;
    }
    return flow;
}

/* SMs that compute does without while the flow runs. They are counted, not shared: nothing waits for an SM. */
static void hold(simulation *s, sim_flow *flow, double sms)
{
    flow->holds = fmin(sms / s->m->sms, 1);
    s->flows.units[flow->rank * SIMULATE_SHARED + SIMULATE_SM] += sms * flow->left / flow->alone;
}

/* Bytes of one item of a copy's side; byte copies have items of one byte. */
static double item_bytes(int dtype) { return dtype == TIDE_OPAQUE ? 1 : tide_dtype_bytes(dtype); }

/* All runs of a COPY have one destination space. Unit: a byte written. */
static bool start_copy(simulation *s, uint32_t instance, uint32_t rank, const schedule *list, const op *o)
{
    const op_run *first = &list->runs[o->first];
    const plan_machine *m = s->m;
    bool fill = first->src.space == SPACE_ZERO, region = first->dst.space == SPACE_REGION;
    bool everyone = region && first->dst.who == WHO_NODE;
    uint32_t peer = region && !everyone ? (uint32_t)first->dst.who : rank;
    double bytes = 0, descriptor, rate, read = fill ? 0 : item_bytes(o->src_dtype) / item_bytes(o->dst_dtype);
    bool local = !everyone && peer == rank, by_kernel;
    double ctas = 0;
    sim_flow *flow;

    for (uint32_t i = o->first; i < o->first + o->count; i++)
        bytes += (double)list->runs[i].width * (double)list->runs[i].rows * item_bytes(o->dst_dtype);
    if (bytes <= 0)
        return false;
    descriptor = o->count * (local ? m->local_copy_descriptor : m->copy_descriptor);
    rate = local ? m->local_copy_rate : m->copy_rate;
    by_kernel = o->flags & OP_SM && m->copy_cta_rate > 0;
    if (by_kernel) { /* a cast, as fast as it is worth SMs for */
        ctas = PLAN_CAST_CTAS;
        rate = ctas * m->copy_cta_rate;
    }
    if (!by_kernel && bytes < rate * descriptor)
        rate = bytes / descriptor;
    flow = flow_of(s, instance, 0, bytes, rate);
    if (!flow)
        return false;
    if (by_kernel)
        hold(s, flow, ctas);
    else
        demand(s, flow, rank, local ? SIMULATE_LOCAL_COPY : SIMULATE_COPY, 1);
    demand(s, flow, rank, SIMULATE_HBM, read + local);
    if (!local)
        demand(s, flow, rank, SIMULATE_NVLINK_OUT, 1);
    for (uint32_t i = 0; i < (everyone ? s->local : 1) && !local; i++) {
        uint32_t to = everyone ? rank / s->local * s->local + i : peer;
        demand(s, flow, to, SIMULATE_NVLINK_IN, 1);
        demand(s, flow, to, SIMULATE_HBM, 1);
    }
    if (s->status == TIDE_OK)
        flows_start(&s->flows, flow, s->now);
    return true;
}

/* Level 1: unit a byte read or written, all of it in the own memory. */
static bool start_sum(simulation *s, uint32_t instance, uint32_t rank, const schedule *list, const op *o)
{
    double bytes = 0, ctas = (double)s->in->plan->options.c_sum, rate = ctas * s->m->sum_cta_rate_in_situ;
    sim_flow *flow;

    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_segment *g = &list->segments[i];
        double row = sizeof(float);
        for (uint32_t k = 0; k < g->n_sets; k++)
            row += g->source[k].count * item_bytes(g->source[k].dtype);
        bytes += row * g->rows * (double)g->elems;
    }
    if (bytes <= 0)
        return false;
    flow = flow_of(s, instance, 0, bytes, rate);
    if (!flow)
        return false;
    hold(s, flow, ctas);
    demand(s, flow, rank, SIMULATE_HBM, 1);
    if (s->status == TIDE_OK)
        flows_start(&s->flows, flow, s->now);
    return true;
}

/* What a landing reads of its own GPU's memory for each byte of output, when all lies there (L = 1). */
static double own_sources(const op_segment *g)
{
    double bytes = 0;
    for (uint32_t k = 0; k < g->n_sets; k++)
        bytes += g->source[k].count * item_bytes(g->source[k].dtype);
    return bytes / sizeof(float);
}

/* Landing: unit a byte of output. The switch reads one from each local GPU and hands on one; without it all arrive. */
static bool start_landing(simulation *s, uint32_t instance, uint32_t rank, const schedule *list, const op *o)
{
    const op_sources *q = &list->segments[o->first].source[0];
    double bytes = 0, ctas = (double)s->in->plan->options.c_land, rate = ctas * s->m->land_cta_rate;
    bool multicast = q->at.who == WHO_NODE;
    sim_flow *flow;

    for (uint32_t i = o->first; i < o->first + o->count; i++)
        bytes += (double)list->segments[i].rows * (double)list->segments[i].elems * sizeof(float);
    if (bytes <= 0)
        return false;
    if (rate > s->m->land_rate_cap)
        rate = s->m->land_rate_cap;
    flow = flow_of(s, instance, 0, bytes, rate);
    if (!flow)
        return false;
    hold(s, flow, ctas);
    if (s->local == 1) {
        demand(s, flow, rank, SIMULATE_HBM, (o->flags & OP_BETA_ONE ? 2 : 1) + own_sources(&list->segments[o->first]));
        if (s->status == TIDE_OK)
            flows_start(&s->flows, flow, s->now);
        return true;
    }
    demand(s, flow, rank, SIMULATE_HBM, o->flags & OP_BETA_ONE ? 3 : 2);
    demand(s, flow, rank, SIMULATE_NVLINK_IN, multicast ? 1 : q->count - 1);
    for (uint32_t i = 0; i < s->local; i++) {
        uint32_t from = rank / s->local * s->local + i;
        if (from != rank)
            demand(s, flow, from, SIMULATE_HBM, 1);
        if (multicast || from != rank)
            demand(s, flow, from, SIMULATE_NVLINK_OUT, 1);
    }
    if (s->status == TIDE_OK)
        flows_start(&s->flows, flow, s->now);
    return true;
}

/* Stripes of one transfer lie next to each other, one a context; they go together. Transfers to one peer go in order. */
uint32_t work_segment_end(const schedule *list, const op *o, uint32_t put)
{
    uint32_t end = put + 1;
    while (end < o->first + o->count && list->puts[end].peer == list->puts[put].peer &&
           list->puts[end].ctx > list->puts[end - 1].ctx)
        end++;
    return end;
}

static void start_segment(simulation *s, uint32_t instance, uint32_t rank, const schedule *list, const op *o,
                          uint32_t put)
{
    uint32_t end = work_segment_end(list, o, put), peer = (uint32_t)list->puts[put].peer;
    double bytes = 0;
    sim_flow *flow;

    for (uint32_t i = put; i < end; i++)
        bytes += (double)list->puts[i].bytes;
    flow = flow_of(s, instance, put, bytes, s->m->nic_rate);
    if (!flow)
        return;
    demand(s, flow, rank, SIMULATE_NIC_OUT, 1);
    demand(s, flow, rank, SIMULATE_HBM, 1);
    demand(s, flow, peer, SIMULATE_NIC_IN, 1);
    demand(s, flow, peer, SIMULATE_HBM, 1);
    if (s->status == TIDE_OK)
        flows_start(&s->flows, flow, s->now);
}

static bool first_to_peer(const schedule *list, const op *o, uint32_t put)
{
    for (uint32_t i = o->first; i < put; i++)
        if (list->puts[i].peer == list->puts[put].peer)
            return false;
    return true;
}

bool work_next_put(simulation *s, uint32_t instance, uint32_t put)
{
    const sim_instance *x = &s->instances[instance];
    uint32_t index = x->chain / s->per_rank;
    const schedule *list = sim_list(s, x->call, index);
    const op *o = &list->ops[x->op];

    for (uint32_t i = work_segment_end(list, o, put); i < o->first + o->count; i++) {
        if (list->puts[i].peer != list->puts[put].peer)
            continue;
        start_segment(s, instance, sim_rank_of(s, index), list, o, i);
        return true;
    }
    return false;
}

static bool start_task(simulation *s, uint32_t instance, uint32_t rank, const simulate_task *t)
{
    sim_flow *flow;
    if (t->seconds <= 0)
        return false;
    flow = flow_of(s, instance, 0, t->seconds, 1);
    if (!flow)
        return false;
    flow->squeezed = t->stream == SIMULATE_COMPUTE;
    flow->holds = t->holds;
    for (int k = 0; k < SIMULATE_SHARED; k++)
        if (k != SIMULATE_SM)
            demand(s, flow, rank, k, t->demand[k] * s->flows.capacity_of[k]);
    s->flows.units[flow->rank * SIMULATE_SHARED + SIMULATE_SM] += t->demand[SIMULATE_SM] * s->m->sms * t->seconds;
    if (s->status == TIDE_OK)
        flows_start(&s->flows, flow, s->now);
    return true;
}

bool work_start(simulation *s, uint32_t instance)
{
    const sim_instance *x = &s->instances[instance];
    uint32_t index = x->chain / s->per_rank, rank = sim_rank_of(s, index);
    const schedule *list;
    const op *o;

    if (x->op == SIM_TASK_OP)
        return start_task(s, instance, rank, &s->in->tasks[x->call]);
    list = sim_list(s, x->call, index);
    o = &list->ops[x->op];
    switch (o->kind) {
    case OP_COPY:
        return start_copy(s, instance, rank, list, o);
    case OP_REDUCE:
        return (o->phase == PHASE_RS_LAND ? start_landing : start_sum)(s, instance, rank, list, o);
    case OP_PUT:
        for (uint32_t i = o->first; i < o->first + o->count; i = work_segment_end(list, o, i))
            if (first_to_peer(list, o, i))
                start_segment(s, instance, rank, list, o, i);
        return true;
    default:
        return false;
    }
}
