/*
 * build_ag.c - the all-gather as ops (paper 3): one node by copies into the landings of all local ranks, several nodes
 * by recursive doubling on the rail into the stage and strided copies from there.
 *
 *     stage slot i on node n: the shard of rank ((n + i) mod M, l)
 *     landing of parameter p: | r0 | r1 | ... | rN-1 |  slots i, i+1, ... are S apart in the stage, L * s_p here
 *
 * What orders what:
 *     free     all local ranks' landings may be written        before any copy into them
 *     credit   the target's stage is empty                     before a put into it
 *     go       the target has the last round's heads           before the next round's put (pacing)
 *     arrived  heads and tails of a round                      before they are forwarded or scattered
 *     done     all local ranks' copies into my landing         before READY
 *
 * One rank a node (plan_group.direct) has landings instead of stage slots: a round's slots go from one landing to the same
 * places of the next. Credit then says that the landing is free; there is nothing to scatter.
 */
#include "schedule/schedule.h"

enum {
    MAX_PARTS = 8, /* of arguments that are cast while others are sent */
    MAX_SLOT_GROUPS = 4 /* the last round's tails arrive and are scattered in at most so many groups */
};

typedef struct builder {
    const tide_plan *plan;
    const plan_group *group;
    const geo_group *geo;
    schedule *s;
    uint32_t rank, node, local_rank, nodes, local;
    uint16_t bank, resource; /* of the landing slot */
    bool cast, multicast, direct;
    int status; /* sticky: after a failure nothing is appended */
    op ignored; /* what a caller's stores go to then */
} builder;

/* ---- ops ------------------------------------------------------------------------------------ */

static op *add(builder *b, int kind, int stream, int phase)
{
    return schedule_op_or(b->s, &b->status, &b->ignored, kind, stream, phase);
}

static void event(builder *b, int kind, int stream, int scope, int which, uint32_t bank)
{
    static const uint8_t phases[] = {PHASE_AG_FREE, PHASE_AG_PUSH, PHASE_AG_SCATTER, PHASE_AG_DONE}; /* by stream */
    op *o = add(b, kind, stream, phases[stream]);
    o->scope = (uint8_t)scope;
    o->event = (uint16_t)which;
    o->bank = (uint16_t)bank;
}

/* A counter of the landing slot, to or from all local ranks. */
static void fence(builder *b, int kind, int stream, int phase, int which, int flags)
{
    op *o = add(b, kind, stream, phase);
    o->scope = SCOPE_LOCAL;
    o->which = (uint8_t)which;
    o->resource = b->resource;
    o->flags = (uint8_t)flags;
    o->delta = 1;
    for (uint32_t i = 0; i < b->local && b->status == TIDE_OK; i++)
        b->status = schedule_post(b->s, (int32_t)(b->node * b->local + i), 0, 0, 0);
}

static uint32_t rail_rank(const builder *b, uint32_t node)
{
    return node % b->nodes * b->local + b->local_rank;
}

static void rail_post(builder *b, int sig, uint32_t peer)
{
    if (b->status == TIDE_OK)
        b->status = schedule_post(b->s, (int32_t)peer, 0, (uint16_t)sig, 1);
}

static void rail_op(builder *b, int kind, int phase)
{
    add(b, kind, STREAM_AG_CALL, phase)->scope = SCOPE_RAIL;
}

/* ---- addresses and runs --------------------------------------------------------------------- */

static op_addr region(int which, uint32_t bank, int32_t who, uint64_t offset)
{
    return (op_addr){SPACE_REGION, (uint8_t)which, (uint16_t)bank, who, offset};
}

/* Stage slot `slot` of `rank`; without a cast slot 0 is the resident shard. */
static op_addr slot_addr(const builder *b, uint32_t slot, uint32_t rank)
{
    if (b->cast)
        return region(REGION_STAGE, 0, (int32_t)rank, slot * b->geo->shard_bytes);
    if (slot == 0)
        return region(REGION_RESIDENT, 0, (int32_t)rank, b->group->resident);
    return region(REGION_STAGE, 0, (int32_t)rank, (slot - 1) * b->geo->shard_bytes);
}

static op_addr moved(op_addr a, uint64_t bytes)
{
    a.offset += bytes;
    return a;
}

static void run(builder *b, op_addr src, op_addr dst, uint64_t width, uint64_t rows, uint64_t src_pitch,
                uint64_t dst_pitch)
{
    op_run r = {src, dst, width, rows, src_pitch, dst_pitch};
    if (b->status == TIDE_OK)
        b->status = schedule_run(b->s, &r);
}

/* Parameters from `first` on that lie at equal pitch in shard and landing: one strip each, all of the same size. Empty
 * ones in between take no room and do not count. *next: first parameter behind them. */
static uint32_t equal_params(const geo_group *geo, uint32_t first, uint32_t end, uint32_t *next)
{
    uint32_t n = 1, i = first + 1;
    for (; geo->params[first].outer == 1 && i < end; i++) {
        if (geo->params[i].shard == 0)
            continue;
        if (geo->params[i].outer != 1 || geo->params[i].shard != geo->params[first].shard)
            break;
        n++;
    }
    *next = i;
    return n;
}

/* `count` packed shards, S apart from `src` on, of ranks first_rank, first_rank + L, ... to their places in the landing
 * `dst`. Of the two ways to fold a pair of axes into strided runs the one with fewer runs is taken. */
static void copy_slots(builder *b, op_addr src, uint32_t count, uint32_t first_rank, op_addr dst)
{
    const geo_group *geo = b->geo;
    uint64_t item = geo->item, ranks = geo->ranks, shard_bytes = geo->shard_bytes;

    for (uint32_t i = 0, next; i < geo->n_params; i = next) {
        const geo_param *p = &geo->params[i];
        uint64_t s = p->strip * item, inner, inner_src, inner_dst;
        uint64_t outer = count, outer_src = shard_bytes, outer_dst = b->local * s;
        op_addr from = moved(src, p->offset * item), to = moved(dst, p->landing + first_rank * s);
        next = i + 1;
        if (p->shard == 0)
            continue;
        if (p->outer == 1) { /* inner axis: equal neighbours */
            inner = equal_params(geo, i, geo->n_params, &next);
            inner_src = s;
            inner_dst = tide_align_up(ranks * s, TIDE_ALIGN);
        } else { /* inner axis: strips */
            inner = p->outer;
            inner_src = s;
            inner_dst = ranks * s;
        }
        if (inner > outer) {
            for (uint64_t k = 0; k < outer; k++)
                run(b, moved(from, k * outer_src), moved(to, k * outer_dst), s, inner, inner_src, inner_dst);
        } else {
            for (uint64_t k = 0; k < inner; k++)
                run(b, moved(from, k * inner_src), moved(to, k * inner_dst), s, outer, outer_src, outer_dst);
        }
    }
}

/* The own pieces of the own landing, of parameters [first, end), to the same places of another. */
static void copy_landing(builder *b, op_addr src, op_addr dst, uint32_t first, uint32_t end)
{
    const geo_group *geo = b->geo;
    for (uint32_t i = first, next; i < end; i = next) {
        const geo_param *p = &geo->params[i];
        uint64_t s = p->strip * geo->item, at = p->landing + b->rank * s, pitch = geo->ranks * s, rows = p->outer;
        next = i + 1;
        if (p->shard == 0)
            continue;
        if (p->outer == 1) {
            rows = equal_params(geo, i, end, &next);
            pitch = tide_align_up(pitch, TIDE_ALIGN);
        }
        run(b, moved(src, at), moved(dst, at), s, rows, pitch, pitch);
    }
}

/* Arguments [first, end), cast if need be, to a landing or packed into a slot. A run a parameter: each has its own pointer.
 * Nothing when they are empty. */
static void copy_arguments(builder *b, int stream, op_addr dst, bool packed, uint32_t first, uint32_t end)
{
    const geo_group *geo = b->geo;
    bool cast = geo->dtype != geo->shard_dtype;
    uint64_t item = geo->item, src_item = cast ? tide_dtype_bytes(geo->shard_dtype) : item;
    uint64_t unit = cast ? 1 : item; /* widths count items of the dtypes in a cast, else bytes */
    op *o;

    while (first < end && geo->params[first].shard == 0)
        first++;
    if (first == end)
        return;
    o = add(b, OP_COPY, stream, PHASE_AG_PUSH);
    if (cast) {
        o->src_dtype = (uint8_t)geo->shard_dtype;
        o->dst_dtype = (uint8_t)geo->dtype;
        o->flags = OP_SM;
    }
    for (uint32_t i = first; i < end; i++) {
        const geo_param *p = &geo->params[i];
        op_addr src = {SPACE_ARG, 0, 0, (int32_t)i, 0};
        if (p->shard == 0)
            continue;
        if (packed)
            run(b, src, moved(dst, p->offset * item), p->shard * unit, 1, p->shard * src_item, p->shard * item);
        else
            run(b, src, moved(dst, p->landing + b->rank * p->strip * item), p->strip * unit, p->outer,
                p->strip * src_item, geo->ranks * p->strip * item);
    }
}

/* One COPY of slots to every local landing: a multicast, or one op a local rank, the neighbour first so that not all
 * write to the same one. */
static void scatter_slots(builder *b, int stream, int phase, op_addr src, uint32_t count, uint32_t first_rank, bool own)
{
    if (b->geo->elements == 0)
        return;
    if (b->multicast) {
        add(b, OP_COPY, stream, phase);
        copy_slots(b, src, count, first_rank, region(REGION_LANDING, b->bank, WHO_NODE, 0));
        return;
    }
    for (uint32_t i = 1; i < b->local + own; i++) {
        uint32_t peer = b->node * b->local + (b->local_rank + i) % b->local;
        add(b, OP_COPY, stream, phase);
        copy_slots(b, src, count, first_rank, region(REGION_LANDING, b->bank, (int32_t)peer, 0));
    }
}

/* ---- one node ------------------------------------------------------------------------------- */

/* Parameters [first, end) to the landings of the local peers. */
static void push_landing(builder *b, op_addr own, uint32_t first, uint32_t end)
{
    uint64_t bytes = 0;
    for (uint32_t i = first; i < end; i++)
        bytes += b->geo->params[i].shard;
    for (uint32_t i = 1; i < b->local && bytes; i++) {
        uint32_t peer = b->node * b->local + (b->local_rank + i) % b->local;
        add(b, OP_COPY, STREAM_AG_CALL, PHASE_AG_PUSH);
        copy_landing(b, own, region(REGION_LANDING, b->bank, (int32_t)peer, 0), first, end);
    }
}

/* Arguments reach the own landing and go on from there. Where these are two machines' work, kernels and copy engines, the
 * parameters go in parts of at least head_bytes each, so that the second begins when the first part is through; ends[i]: end
 * of part i. */
static uint32_t split_arguments(const builder *b, uint32_t ends[MAX_PARTS])
{
    const geo_group *geo = b->geo;
    uint64_t parts = tide_min_u64(geo->shard_bytes / (uint64_t)b->plan->options.head_bytes, MAX_PARTS), at = 0;
    uint32_t n = 0;

    if (b->plan->options.target == 1 && b->local > 1 && !b->multicast) {
        for (uint32_t i = 0; i + 1 < geo->n_params && n + 1 < parts; i++) {
            at += geo->params[i].shard * geo->item;
            if (at * parts >= (n + 1) * geo->shard_bytes)
                ends[n++] = i + 1;
        }
    }
    ends[n++] = geo->n_params;
    return n;
}

static void gather_arguments(builder *b, op_addr own)
{
    enum { CALL_GO, CALL_PART };
    uint32_t ends[MAX_PARTS], n = split_arguments(b, ends);

    if (n == 1) {
        copy_arguments(b, STREAM_AG_CALL, own, false, 0, ends[0]);
        if (!b->multicast)
            push_landing(b, own, 0, ends[0]);
        return;
    }
    b->s->n_call_events = CALL_PART + n;
    event(b, OP_RECORD, STREAM_AG_CALL, SCOPE_CALL, CALL_GO, 0);
    event(b, OP_JOIN, STREAM_AG_SCATTER, SCOPE_CALL, CALL_GO, 0);
    for (uint32_t i = 0; i < n; i++) {
        copy_arguments(b, STREAM_AG_SCATTER, own, false, i ? ends[i - 1] : 0, ends[i]);
        event(b, OP_RECORD, STREAM_AG_SCATTER, SCOPE_CALL, (int)(CALL_PART + i), 0);
        event(b, OP_JOIN, STREAM_AG_CALL, SCOPE_CALL, (int)(CALL_PART + i), 0);
        push_landing(b, own, i ? ends[i - 1] : 0, ends[i]);
    }
}

static void build_one_node(builder *b)
{
    enum { CALL_GO, CALL_OWN, N_CALL };
    bool own_apart = !b->multicast && b->geo->input == TIDE_INPUT_ADOPTED;
    op_addr own = region(REGION_LANDING, b->bank, b->multicast ? WHO_NODE : (int32_t)b->rank, 0);
    op_addr resident = region(REGION_RESIDENT, 0, (int32_t)b->rank, b->group->resident);

    fence(b, OP_WAIT, STREAM_AG_CALL, PHASE_AG_FREE, WORD_A, OP_CHECK_TAG); /* mostly over before the input is there */
    event(b, OP_JOIN, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_IN, 0);
    if (own_apart) {
        b->s->n_call_events = N_CALL;
        event(b, OP_RECORD, STREAM_AG_CALL, SCOPE_CALL, CALL_GO, 0);
        event(b, OP_JOIN, STREAM_AG_SCATTER, SCOPE_CALL, CALL_GO, 0);
        if (b->geo->elements) {
            add(b, OP_COPY, STREAM_AG_SCATTER, PHASE_AG_PUSH);
            copy_slots(b, resident, 1, b->rank, own);
        }
        event(b, OP_RECORD, STREAM_AG_SCATTER, SCOPE_CALL, CALL_OWN, 0);
        scatter_slots(b, STREAM_AG_CALL, PHASE_AG_PUSH, resident, 1, b->rank, false);
    } else if (b->geo->input == TIDE_INPUT_ADOPTED) {
        scatter_slots(b, STREAM_AG_CALL, PHASE_AG_PUSH, resident, 1, b->rank, true);
    } else {
        gather_arguments(b, own);
    }
    fence(b, OP_SIGNAL, STREAM_AG_CALL, PHASE_AG_DONE, WORD_B, 0);
    fence(b, OP_WAIT, STREAM_AG_DONE, PHASE_AG_DONE, WORD_B, 0);
    if (own_apart)
        event(b, OP_JOIN, STREAM_AG_DONE, SCOPE_CALL, CALL_OWN, 0);
    event(b, OP_RECORD, STREAM_AG_DONE, SCOPE_EXTERN, EVENT_READY, 0);
}

/* ---- several nodes -------------------------------------------------------------------------- */

static void put_piece(builder *b, uint32_t peer, int sig, op_addr src, op_addr dst, uint64_t bytes)
{
    if (b->status == TIDE_OK)
        b->status = schedule_put_striped(b->s, (int32_t)peer, (uint16_t)sig, (uint32_t)b->plan->options.n_ctx, &src,
                                         &dst, bytes);
}

/* Bytes [begin, end) of a round in the landing: parameter by parameter, strip by strip, the slots of `count` nodes from
 * `first` on, which lie side by side up to the last node. Puts them to `peer`, or awaits them from there. */
static void landing_range(builder *b, int kind, uint32_t peer, int sig, uint32_t first, uint32_t count, uint64_t begin,
                          uint64_t end)
{
    const geo_group *geo = b->geo;
    const uint32_t n_ctx = (uint32_t)b->plan->options.n_ctx;
    uint64_t at = 0;

    for (uint32_t i = 0; i < geo->n_params; i++) {
        const geo_param *p = &geo->params[i];
        uint64_t strip = p->strip * geo->item;
        for (uint64_t o = 0; o < p->outer && p->shard > 0; o++) {
            for (uint32_t k = 0, n; k < count; k += n) {
                uint32_t node = (first + k) % b->nodes;
                n = (uint32_t)tide_min_u64(count - k, b->nodes - node);
                uint64_t lo = tide_max_u64(begin, at), hi = tide_min_u64(end, at + n * strip);
                uint64_t offset = p->landing + (o * b->nodes + node) * strip + (lo - at);
                at += n * strip;
                if (lo >= hi)
                    continue;
                if (kind == OP_PUT)
                    put_piece(b, peer, sig, region(REGION_LANDING, b->bank, (int32_t)b->rank, offset),
                              region(REGION_LANDING, b->bank, (int32_t)peer, offset), hi - lo);
                else if (b->status == TIDE_OK)
                    b->status = schedule_await_striped(b->s, (int32_t)peer, (uint16_t)sig, n_ctx, hi - lo);
            }
        }
    }
}

/* Bytes [begin, end) of a round: the first slots one after the other. Without a cast they lie in two places, so that
 * the sender's puts, and with them the signals that the receiver counts, break at S. */
static void put_range(builder *b, uint32_t peer, int sig, const plan_ag_round *r, uint64_t begin, uint64_t end)
{
    uint64_t shard = b->geo->shard_bytes, cut = b->cast ? begin : tide_min_u64(tide_max_u64(begin, shard), end);
    op_addr dst = slot_addr(b, r->distance, peer);

    if (b->direct) {
        landing_range(b, OP_PUT, peer, sig, b->node, r->count, begin, end);
        return;
    }
    put_piece(b, peer, sig, moved(slot_addr(b, 0, b->rank), begin), moved(dst, begin), cut - begin);
    if (end > cut) /* `cut` bytes into the stage with a cast, cut - S without */
        put_piece(b, peer, sig,
                  b->cast ? moved(slot_addr(b, 0, b->rank), cut) : moved(slot_addr(b, 1, b->rank), cut - shard),
                  moved(dst, cut), end - cut);
}

static void await_range(builder *b, uint32_t peer, int sig, const plan_ag_round *r, uint64_t begin, uint64_t end)
{
    uint64_t cut = b->cast ? begin : tide_min_u64(tide_max_u64(begin, b->geo->shard_bytes), end);
    const uint32_t n_ctx = (uint32_t)b->plan->options.n_ctx;

    if (b->direct) {
        landing_range(b, OP_WAIT, peer, sig, peer, r->count, begin, end);
        return;
    }
    if (b->status == TIDE_OK)
        b->status = schedule_await_striped(b->s, (int32_t)peer, (uint16_t)sig, n_ctx, cut - begin);
    if (b->status == TIDE_OK)
        b->status = schedule_await_striped(b->s, (int32_t)peer, (uint16_t)sig, n_ctx, end - cut);
}

/* Slots [first, first + count) of a round that arrive together, and the call event that says so. */
typedef struct arrival {
    uint32_t first, count, event;
} arrival;

static uint32_t split_arrivals(const builder *b, const plan_ag_round *r, bool last, arrival out[MAX_SLOT_GROUPS])
{
    uint64_t bytes = r->count * b->geo->shard_bytes;
    uint32_t n = 1;
    if (last && bytes > 0) /* whole slots, none smaller than what hides a signal */
        n = (uint32_t)tide_max_u64(1, tide_min_u64(tide_min_u64(MAX_SLOT_GROUPS, r->count),
                                                   bytes / (uint64_t)b->plan->options.head_bytes));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t from = r->count * i / n, to = r->count * (i + 1) / n;
        out[i] = (arrival){r->distance + from, to - from, b->s->n_call_events++};
    }
    return n;
}

/* Bytes of a round that an arrival adds to the heads. */
static void tail_of(const plan_ag_round *r, const arrival *a, uint64_t shard, uint64_t head, uint64_t *begin,
                    uint64_t *end)
{
    *begin = (a->first - r->distance) * shard;
    *end = *begin + a->count * shard;
    *begin = tide_max_u64(*begin, tide_min_u64(head, *end));
}

/* Where a tail is cut in two, so that the previous arrival is waited for under its second part. */
static uint64_t tail_cut(const builder *b, uint32_t i, uint64_t begin, uint64_t end)
{
    return i == 0 ? begin : tide_min_u64(end, begin + (uint64_t)b->plan->options.head_bytes);
}

static void put_tail(builder *b, uint32_t target, const plan_ag_round *r, uint64_t begin, uint64_t end)
{
    if (begin == end)
        return;
    rail_op(b, OP_PUT, PHASE_AG_TAILS);
    put_range(b, target, SIG_TAIL, r, begin, end);
}

static void await_tail(builder *b, uint32_t source, const plan_ag_round *r, const arrival *arrivals, uint32_t i,
                       uint64_t head)
{
    uint64_t begin, end, cut;
    tail_of(r, &arrivals[i], b->geo->shard_bytes, head, &begin, &end);
    cut = tail_cut(b, i, begin, end);
    if (end > begin) {
        rail_op(b, OP_WAIT, PHASE_AG_TAILS);
        await_range(b, source, SIG_TAIL, r, begin, cut);
        await_range(b, source, SIG_TAIL, r, cut, end);
    }
    if (!b->direct)
        event(b, OP_RECORD, STREAM_AG_CALL, SCOPE_CALL, (int)arrivals[i].event, 0);
}

static void build_round(builder *b, const plan_ag_round *rounds, uint32_t d, bool last, const arrival *arrivals,
                        uint32_t n_arrivals)
{
    const plan_ag_round *r = &rounds[d];
    uint32_t target = rail_rank(b, b->node + b->nodes - r->distance), source = rail_rank(b, b->node + r->distance);
    uint64_t shard = b->geo->shard_bytes, bytes = r->count * shard;
    uint64_t head = tide_min_u64(bytes, (uint64_t)b->plan->options.head_bytes);

    rail_op(b, OP_WAIT, d ? PHASE_AG_GO : PHASE_AG_CREDIT);
    rail_post(b, SIG_CREDIT, target);
    if (d > 0)
        rail_post(b, SIG_GO, target);
    if (head > 0) {
        rail_op(b, OP_PUT, PHASE_AG_HEADS);
        put_range(b, target, SIG_HEAD, r, 0, head);
        rail_op(b, OP_WAIT, PHASE_AG_HEADS);
        await_range(b, source, SIG_HEAD, r, 0, head);
    }
    if (!last) {
        rail_op(b, OP_SIGNAL, PHASE_AG_GO);
        rail_post(b, SIG_GO, rail_rank(b, b->node + rounds[d + 1].distance));
    }
    for (uint32_t i = 0; i < n_arrivals; i++) { /* a stream is blocked until its put has left */
        uint64_t begin, end, cut;
        tail_of(r, &arrivals[i], shard, head, &begin, &end);
        cut = tail_cut(b, i, begin, end);
        put_tail(b, target, r, begin, cut);
        if (i > 0)
            await_tail(b, source, r, arrivals, i - 1, head);
        put_tail(b, target, r, cut, end);
    }
    await_tail(b, source, r, arrivals, n_arrivals - 1, head);
}

/* Node n + i wraps at M: slots on both sides of it are two runs. */
static void scatter_arrival(builder *b, const arrival *a)
{
    uint32_t first = a->first, left = a->count;
    event(b, OP_JOIN, STREAM_AG_SCATTER, SCOPE_CALL, (int)a->event, 0);
    while (left > 0) {
        uint32_t node = (b->node + first) % b->nodes, count = left < b->nodes - node ? left : b->nodes - node;
        scatter_slots(b, STREAM_AG_SCATTER, PHASE_AG_SCATTER, slot_addr(b, first, b->rank), count,
                      node * b->local + b->local_rank, true);
        first += count;
        left -= count;
    }
}

static void build_nodes(builder *b)
{
    plan_ag_round rounds[11];
    arrival arrivals[11][MAX_SLOT_GROUPS];
    uint32_t n_rounds = plan_ag_rounds(b->nodes, rounds), n_arrivals[11], input = b->s->n_call_events++;

    event(b, OP_JOIN, STREAM_AG_CALL, SCOPE_RESOURCE, EVENT_SCATTERED, 0);
    rail_op(b, OP_SIGNAL, PHASE_AG_CREDIT);
    for (uint32_t d = 0; d < n_rounds; d++)
        rail_post(b, SIG_CREDIT, rail_rank(b, b->node + rounds[d].distance));
    event(b, OP_JOIN, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_IN, 0);
    if (b->cast)
        copy_arguments(b, STREAM_AG_CALL, slot_addr(b, 0, b->rank), true, 0, b->geo->n_params);
    event(b, OP_RECORD, STREAM_AG_CALL, SCOPE_CALL, (int)input, 0);
    for (uint32_t d = 0; d < n_rounds; d++) {
        n_arrivals[d] = split_arrivals(b, &rounds[d], d + 1 == n_rounds, arrivals[d]);
        build_round(b, rounds, d, d + 1 == n_rounds, arrivals[d], n_arrivals[d]);
    }
    fence(b, OP_WAIT, STREAM_AG_SCATTER, PHASE_AG_FREE, WORD_A, OP_CHECK_TAG);
    event(b, OP_JOIN, STREAM_AG_SCATTER, SCOPE_CALL, (int)input, 0);
    scatter_slots(b, STREAM_AG_SCATTER, PHASE_AG_SCATTER, slot_addr(b, 0, b->rank), 1, b->rank, true);
    for (uint32_t d = 0; d < n_rounds; d++)
        for (uint32_t i = 0; i < n_arrivals[d]; i++)
            scatter_arrival(b, &arrivals[d][i]);
    fence(b, OP_SIGNAL, STREAM_AG_SCATTER, PHASE_AG_DONE, WORD_B, 0);
    event(b, OP_RECORD, STREAM_AG_SCATTER, SCOPE_RESOURCE, EVENT_SCATTERED, 0);
    fence(b, OP_WAIT, STREAM_AG_DONE, PHASE_AG_DONE, WORD_B, 0);
    event(b, OP_RECORD, STREAM_AG_DONE, SCOPE_EXTERN, EVENT_READY, 0);
}

/* One stream has awaited what it forwards and says what may be overwritten: its order is all that is needed. */
static void build_landing_to_landing(builder *b)
{
    enum { CALL_FREE, CALL_ARRIVED, N_CALL };
    plan_ag_round rounds[11];
    uint32_t n_rounds = plan_ag_rounds(b->nodes, rounds);
    op_addr own = region(REGION_LANDING, b->bank, (int32_t)b->rank, 0);

    b->s->n_call_events = N_CALL;
    event(b, OP_JOIN, STREAM_AG_READY, SCOPE_EXTERN, EVENT_FREE, b->bank);
    event(b, OP_RECORD, STREAM_AG_READY, SCOPE_CALL, CALL_FREE, 0);
    event(b, OP_JOIN, STREAM_AG_CALL, SCOPE_CALL, CALL_FREE, 0);
    rail_op(b, OP_SIGNAL, PHASE_AG_CREDIT);
    for (uint32_t d = 0; d < n_rounds; d++)
        rail_post(b, SIG_CREDIT, rail_rank(b, b->node + rounds[d].distance));
    event(b, OP_JOIN, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_IN, 0);
    if (b->geo->input == TIDE_INPUT_ARGUMENT) {
        copy_arguments(b, STREAM_AG_CALL, own, false, 0, b->geo->n_params);
    } else if (b->geo->elements) {
        add(b, OP_COPY, STREAM_AG_CALL, PHASE_AG_PUSH);
        copy_slots(b, region(REGION_RESIDENT, 0, (int32_t)b->rank, b->group->resident), 1, b->rank, own);
    }
    for (uint32_t d = 0; d < n_rounds; d++) {
        const arrival all = {rounds[d].distance, rounds[d].count, 0};
        build_round(b, rounds, d, d + 1 == n_rounds, &all, 1);
    }
    event(b, OP_RECORD, STREAM_AG_CALL, SCOPE_CALL, CALL_ARRIVED, 0);
    event(b, OP_JOIN, STREAM_AG_DONE, SCOPE_CALL, CALL_ARRIVED, 0);
    event(b, OP_RECORD, STREAM_AG_DONE, SCOPE_EXTERN, EVENT_READY, 0);
}

/* A multicast address takes plain copies of rows. A cast's result would be read where it is being written, and many strips
 * would be many rows: such groups go to each landing by itself. */
static bool multicasts(const builder *b)
{
    if (b->plan->options.multicast != 1)
        return false;
    if (plan_shared_landing(b->plan))
        return true;
    for (uint32_t i = 0; i < b->geo->n_params; i++)
        if (b->geo->params[i].outer != 1 && b->geo->params[i].shard)
            return false;
    return b->nodes > 1 || b->geo->dtype == b->geo->shard_dtype;
}

int schedule_build_ag(const tide_plan *plan, uint32_t group, uint32_t rank, schedule *out)
{
    builder b = {0};

    memset(out, 0, sizeof *out);
    if (group >= plan->n_groups)
        return tide_fail(TIDE_ERR_ARGUMENT, "group: %u is not in 0..%u", group, plan->n_groups - 1);
    b.nodes = plan->topology.nodes;
    b.local = plan->topology.local;
    if (rank >= b.nodes * b.local)
        return tide_fail(TIDE_ERR_ARGUMENT, "rank: %u is not in 0..%u", rank, b.nodes * b.local - 1);
    b.plan = plan;
    b.group = &plan->groups[group];
    b.geo = &b.group->geo;
    b.s = out;
    b.rank = rank;
    b.node = rank / b.local;
    b.local_rank = rank % b.local;
    b.bank = (uint16_t)b.group->slot;
    b.resource = (uint16_t)(RESOURCE_SLOT0 + b.group->slot);
    b.cast = b.group->stage_cast;
    b.direct = b.group->direct;
    b.multicast = multicasts(&b);
    out->kind = SCHEDULE_AG;
    out->rank = rank;
    out->nodes = b.nodes;
    out->local = b.local;
    out->group = group;
    out->n_args = b.geo->input == TIDE_INPUT_ARGUMENT ? b.geo->n_params : 0;
    out->tag = schedule_tag(plan, SCHEDULE_AG, group, NULL, b.geo->dtype);

    if (b.direct) {
        build_landing_to_landing(&b);
    } else {
        event(&b, OP_JOIN, STREAM_AG_READY, SCOPE_EXTERN, EVENT_FREE, b.bank);
        fence(&b, OP_SIGNAL, STREAM_AG_READY, PHASE_AG_FREE, WORD_A, 0);
        if (b.nodes == 1)
            build_one_node(&b);
        else
            build_nodes(&b);
        if (b.status == TIDE_OK)
            b.status = schedule_set_step(out, b.resource, 1);
    }
    out->n_read = out->n_ops;
    if (b.status != TIDE_OK)
        schedule_clear(out);
    return b.status;
}
