/*
 * build_rs.c - the reduce-scatter as ops (paper 4 and Algorithm 1): Level 1 sums each destination's block over the
 * node, Level 2 sends the blocks over the rails in waves and folds them at the destination.
 *
 *     block (c, q): what this node adds to the L ranks of node n + c in pass q
 *                   local rank j owns sub-slice (j + c) mod L of it
 *
 *                    | live elements of the sub-slice's pass, to a whole vector |
 *     row 0 = rank 0 of the destination node, row 1, ... row L-1                  in outbox, spare and inbox
 *
 * Blocks are numbered J = q * (M - 1) + c - 1; block J lies in outbox block J mod n_out. c = M, the own node: spare q.
 *
 * One rank a node (L = 1, a group of experts) has nothing to add in Level 1: its blocks are the gradients, copied in their
 * own dtype, since what autograd made lies in no registered memory. A wave's blocks and the spare are widened and added in
 * contributor order as they land; widening is exact, so the bits are those of fp32 blocks.
 *
 * What orders what:
 *     freed    the owner has added the chunk that was in the staging slot    before a push into it
 *     filled   all local ranks' pushes of a chunk                            before it is added
 *     sent     the outbox block's last send                                  before it is written
 *     spared   the bank's spares are in the inbox                            before they are written
 *     credit   the target's node has landed what was in the generation       before a put into it
 *     arrived  a wave's blocks                                               before the node is told "armed"
 *     armed    arrivals, zeros and own blocks on all local ranks (L > 1)     before a landing reads them
 *     landed   all local ranks have read (L > 1)                             before the generation's next credit
 *
 * No wait without an earlier producer: Level 1 waits for the network through `sent` and `spared` only. In the read
 * phase these belong to the call before the previous one; in the network phase `sent` belongs to a round before the
 * previous one (n_out >= k_i + k_{i-1}). A round waits for its own blocks, for credits that the start of its wave sends
 * on all nodes, and for arrivals that the same round sends; the start of a wave for the landing n_par waves before.
 */
#include "schedule/rects.h"
#include "schedule/schedule.h"

typedef struct block { uint32_t c, pass; } block; /* contributor index at the destination, 1..M */

typedef struct builder {
    const tide_plan *plan;
    const plan_rs *rs;
    geo_group geo; /* of the parameters that have gradients */
    plan_cut cut;
    schedule *s;
    uint32_t rank, node, local_rank, nodes, local;
    uint32_t dtype, item; /* of the gradients */
    int mode;
    uint32_t slot;
    uint64_t stride;      /* of an outbox, spare or inbox block */
    bool single;          /* L = 1, M > 1 */
    int block_dtype;      /* of what lies in blocks: sums, or gradients */
    uint64_t chunk;       /* elements a row */
    uint32_t n_chunks;    /* a block */
    uint64_t next_chunk;  /* chunks of this call so far */
    uint32_t next_block, next_round; /* remote blocks and rounds (of all passes) that Level 1 has so far */
    uint32_t stashed, spared, summed, arrived; /* call events; pushed to owner j: j */
    int status; /* sticky: after a failure nothing is appended */
    op ignored; /* what a caller's stores go to then */
} builder;

/* ---- ops ---------------------------------------------------------------------------------------- */

static op *add(builder *b, int kind, int stream, int phase)
{
    return schedule_op_or(b->s, &b->status, &b->ignored, kind, stream, phase);
}

static op *event(builder *b, int kind, int stream, int phase, int scope, uint32_t which)
{
    op *o = add(b, kind, stream, phase);
    o->scope = (uint8_t)scope;
    o->event = (uint16_t)which;
    return o;
}

static void call_event(builder *b, int kind, int stream, int phase, uint32_t which)
{
    event(b, kind, stream, phase, SCOPE_CALL, which);
}

static void resource_event(builder *b, int kind, int stream, int phase, uint32_t which, uint32_t bank, uint32_t index)
{
    op *o = event(b, kind, stream, phase, SCOPE_RESOURCE, which);
    o->bank = (uint16_t)bank;
    o->index = index;
}

static op *local_op(builder *b, int kind, int stream, int phase, int resource, int which, uint64_t delta)
{
    op *o = add(b, kind, stream, phase);
    o->scope = SCOPE_LOCAL;
    o->resource = (uint16_t)resource;
    o->which = (uint8_t)which;
    o->delta = delta;
    return o;
}

static void local_post(builder *b, uint32_t local_rank)
{
    if (b->status == TIDE_OK)
        b->status = schedule_post(b->s, (int32_t)(b->node * b->local + local_rank), 0, 0, 0);
}

static void post_all(builder *b, bool self)
{
    for (uint32_t i = 0; i < b->local; i++)
        if (self || i != b->local_rank)
            local_post(b, i);
}

static void rail_op(builder *b, int kind, int phase)
{
    add(b, kind, STREAM_RS_NET, phase)->scope = SCOPE_RAIL;
}

static void run(builder *b, op_addr src, op_addr dst, uint64_t width, uint64_t rows, uint64_t src_pitch,
                uint64_t dst_pitch)
{
    op_run r = {src, dst, width, rows, src_pitch, dst_pitch};
    if (b->status == TIDE_OK)
        b->status = schedule_run(b->s, &r);
}

/* ---- addresses ---------------------------------------------------------------------------------- */

static op_addr region(int which, uint32_t bank, uint32_t rank, uint64_t offset)
{
    return (op_addr){SPACE_REGION, (uint8_t)which, (uint16_t)bank, (int32_t)rank, offset};
}

/* Element `at` of the own gradient of parameter p. */
static op_addr gradient(const builder *b, uint32_t p, uint64_t at)
{
    if (b->mode == 1)
        return region(REGION_LANDING, b->slot, b->rank, b->geo.params[p].landing + at * b->item);
    return (op_addr){SPACE_ARG, 0, 0, (int32_t)p, at * b->item};
}

static op_addr output(const builder *b, uint64_t at)
{
    return (op_addr){SPACE_ARG, 0, 0, (int32_t)b->s->n_args - 1, at * sizeof(float)};
}

static uint32_t node_plus(const builder *b, uint32_t c) { return (b->node + c) % b->nodes; }
static uint32_t node_minus(const builder *b, uint32_t c) { return (b->node + b->nodes - c % b->nodes) % b->nodes; }

static int32_t rail_rank(const builder *b, uint32_t node)
{
    return (int32_t)(node * b->local + b->local_rank);
}

/* ---- blocks ------------------------------------------------------------------------------------- */

static uint32_t subslice(const builder *b, uint32_t owner, uint32_t c)
{
    return b->nodes == 1 ? 0 : plan_subslice(b->local, owner, plan_cbar(b->nodes, c));
}

/* Packed elements of the block that local rank `owner` of any node makes. */
static void block_range(const builder *b, uint32_t owner, block k, uint64_t *begin, uint64_t *end)
{
    plan_cut_range(&b->cut, subslice(b, owner, k.c), k.pass, begin, end);
}

/* Elements between its rows; also what a sent block takes, so that sender and receiver agree on its bytes. */
static uint64_t block_pitch(const builder *b, uint32_t owner, block k)
{
    uint64_t begin, end;
    block_range(b, owner, k, &begin, &end);
    return tide_align_up(end - begin, PLAN_VECTOR);
}

static uint64_t block_bytes(const builder *b, block k)
{
    return block_pitch(b, b->local_rank, k) * b->cut.rows * tide_dtype_bytes(b->block_dtype);
}

/* Where contributor c's block lies in an inbox generation of local rank j. */
static uint64_t inbox_offset(const builder *b, uint32_t j, uint32_t c)
{
    return plan_rs_block(b->rs, j, c) * b->stride;
}

/* Rank of row 0. With one node each rank owns its own output: one row, its own. */
static uint32_t first_destination(const builder *b, uint32_t owner, block k)
{
    return b->nodes == 1 ? owner : node_plus(b, k.c) * b->local;
}

/* ---- Level 1 ------------------------------------------------------------------------------------ */

/* One chunk of a block, as its contributors push it and its owner adds it. */
typedef struct piece {
    uint32_t owner, first; /* rank of row 0 */
    uint64_t block_begin, pitch, begin, end; /* packed elements; pitch of the block's rows */
    uint64_t number;       /* of the call's chunks */
} piece;

static piece block_piece(const builder *b, uint32_t owner, block k, uint32_t chunk)
{
    piece c = {.owner = owner, .number = b->next_chunk};
    uint64_t end;
    c.first = first_destination(b, owner, k);
    c.pitch = block_pitch(b, owner, k);
    block_range(b, owner, k, &c.block_begin, &end);
    c.begin = tide_min_u64(c.block_begin + chunk * b->chunk, end);
    c.end = tide_min_u64(c.begin + b->chunk, end);
    return c;
}

/* Staging slot: | contributor 0 | 1 | ... without the owner, each | row 0: chunk elements | row 1 | ... */
static op_addr staged(const builder *b, const piece *c, uint32_t owner, uint32_t contributor, const schedule_rect *r)
{
    uint64_t at = (contributor * (uint64_t)b->cut.rows + r->row) * b->chunk + (r->at - c->begin);
    return region(REGION_STAGING, (uint32_t)(c->number % (uint64_t)b->plan->options.n_stg), owner, at * b->item);
}

static uint64_t staging_pitch(const builder *b, const schedule_rect *r)
{
    return (r->strips ? r->strips : b->chunk) * b->item;
}

/* Until the owner has added so many chunks of this call; 0: all of the calls before it. */
static void await_freed(builder *b, uint32_t owner, uint64_t chunks)
{
    local_op(b, OP_WAIT, (int)(STREAM_RS_PUSH0 + owner), PHASE_RS_PUSH, RESOURCE_STAGING, WORD_B, chunks);
    local_post(b, owner);
}

static void push(builder *b, const piece *c)
{
    uint32_t contributor = b->local_rank - (b->local_rank > c->owner), n_stg = (uint32_t)b->plan->options.n_stg;
    uint32_t owner = b->node * b->local + c->owner;
    int stream = (int)(STREAM_RS_PUSH0 + c->owner);
    const geo_group *geo = &b->geo;
    bool any = false;
    schedule_rect rects[SCHEDULE_MAX_RECTS];

    if (c->number >= n_stg || (c->number == 0 && b->nodes > 1)) /* the first chunk has waited for all slots */
        await_freed(b, c->owner, c->number < n_stg ? 0 : c->number - n_stg + 1);
    for (uint32_t p = schedule_param_at(geo, c->begin); p < geo->n_params && geo->params[p].offset < c->end; p++) {
        uint32_t n = schedule_rects(geo, p, c->first, b->cut.rows, c->begin, c->end, rects);
        for (uint32_t i = 0; i < n; i++) {
            const schedule_rect *r = &rects[i];
            if (r->padding)
                continue;
            if (!any)
                add(b, OP_COPY, stream, PHASE_RS_PUSH);
            any = true;
            run(b, gradient(b, p, r->full), staged(b, c, owner, contributor, r),
                r->width * b->item, r->rows, r->full_pitch * b->item, staging_pitch(b, r));
        }
    }
    local_op(b, OP_SIGNAL, stream, PHASE_RS_PUSH, RESOURCE_STAGING, WORD_A, c->number + 1);
    local_post(b, c->owner);
}

/* The first segment of a piece opens the op. */
static void segment(builder *b, bool *any, const op_segment *g)
{
    if (!*any)
        add(b, OP_REDUCE, STREAM_RS_SUM, PHASE_RS_SUM)->flags = b->nodes == 1 ? OP_FINAL | OP_BETA_CALL : 0;
    *any = true;
    if (b->status == TIDE_OK)
        b->status = schedule_segment(b->s, g);
}

static op_addr moved(op_addr a, uint64_t bytes)
{
    a.offset += bytes;
    return a;
}

/* Staged contributions in local-rank order, then the own gradient (paper 4.3). `to`: the block's row 0. */
static void sum(builder *b, const piece *c, op_addr to)
{
    const geo_group *geo = &b->geo;
    bool any = false;
    schedule_rect rects[SCHEDULE_MAX_RECTS];

    if (b->local > 1) {
        op *o = local_op(b, OP_WAIT, STREAM_RS_SUM, PHASE_RS_SUM, RESOURCE_STAGING, WORD_A, c->number + 1);
        o->flags = c->number == 0 ? OP_CHECK_TAG : 0; /* no poster is in a later call: it would need my `freed` */
        post_all(b, false);
    }
    for (uint32_t p = schedule_param_at(geo, c->begin); p < geo->n_params && geo->params[p].offset < c->end; p++) {
        uint32_t n = schedule_rects(geo, p, c->first, b->cut.rows, c->begin, c->end, rects);
        for (uint32_t i = 0; i < n; i++) {
            const schedule_rect *r = &rects[i];
            op_segment g = {.elems = r->width, .rows = (uint32_t)r->rows};
            g.dst = moved(to, (r->row * c->pitch + (r->at - c->block_begin)) * sizeof(float));
            g.dst_pitch = (r->strips ? r->strips : c->pitch) * sizeof(float);
            if (!r->padding && b->local > 1)
                g.source[g.n_sets++] = (op_sources){.at = staged(b, c, b->rank, 0, r),
                                                    .row_pitch = staging_pitch(b, r),
                                                    .step = b->cut.rows * b->chunk * b->item,
                                                    .count = b->local - 1,
                                                    .dtype = (uint16_t)b->dtype};
            if (!r->padding)
                g.source[g.n_sets++] = (op_sources){.at = gradient(b, p, r->full),
                                                    .row_pitch = r->full_pitch * b->item,
                                                    .count = 1,
                                                    .dtype = (uint16_t)b->dtype};
            segment(b, &any, &g);
        }
    }
    if (b->nodes > 1 && c->end > c->begin && c->end == b->cut.elements && c->end < c->block_begin + c->pitch) {
        op_segment g = {.rows = b->cut.rows, .dst_pitch = c->pitch * sizeof(float)}; /* a put sends whole vectors */
        g.elems = c->block_begin + c->pitch - c->end;
        g.dst = moved(to, (c->end - c->block_begin) * sizeof(float));
        segment(b, &any, &g);
    }
    if (b->local > 1) {
        local_op(b, OP_SIGNAL, STREAM_RS_SUM, PHASE_RS_SUM, RESOURCE_STAGING, WORD_B, c->number + 1);
        post_all(b, false);
    }
}

/* The gradients of a block, or the zeros in it: padding, and the rest of its last vector when a put sends it. */
static void copy_parts(builder *b, const piece *c, op_addr to, bool zeros)
{
    const geo_group *geo = &b->geo;
    uint64_t rest = to.region == REGION_OUTBOX ? c->block_begin + c->pitch - c->end : 0;
    bool any = false;
    schedule_rect rects[SCHEDULE_MAX_RECTS];

    for (uint32_t p = schedule_param_at(geo, c->begin); p < geo->n_params && geo->params[p].offset < c->end; p++) {
        uint32_t n = schedule_rects(geo, p, c->first, b->cut.rows, c->begin, c->end, rects);
        for (uint32_t i = 0; i < n; i++) {
            const schedule_rect *r = &rects[i];
            if (r->padding != zeros)
                continue;
            if (!any)
                add(b, OP_COPY, STREAM_RS_SUM, PHASE_RS_SUM);
            any = true;
            run(b, zeros ? (op_addr){.space = SPACE_ZERO} : gradient(b, p, r->full),
                moved(to, (r->at - c->block_begin) * b->item), r->width * b->item, r->rows,
                zeros ? 0 : r->full_pitch * b->item, (r->strips ? r->strips : c->pitch) * b->item);
        }
    }
    if (zeros && rest > 0 && c->end > c->begin) {
        if (!any)
            add(b, OP_COPY, STREAM_RS_SUM, PHASE_RS_SUM);
        run(b, (op_addr){.space = SPACE_ZERO}, moved(to, (c->end - c->block_begin) * b->item), rest * b->item, 1, 0,
            rest * b->item);
    }
}

static void copy_block(builder *b, block k, op_addr to)
{
    piece c = block_piece(b, 0, k, 0); /* a chunk is the whole block */
    copy_parts(b, &c, to, false);
    copy_parts(b, &c, to, true);
}

/* Pushes of the own gradients to the other owners and the sum of the own sub-slice into `to`. */
static void level1(builder *b, block k, op_addr to)
{
    if (b->single) {
        copy_block(b, k, to);
        return;
    }
    for (uint32_t i = 0; i < b->n_chunks; i++, b->next_chunk++) {
        for (uint32_t d = 1; d < b->local; d++) {
            piece theirs = block_piece(b, (b->local_rank + d) % b->local, k, i);
            push(b, &theirs);
        }
        piece own = block_piece(b, b->local_rank, k, i);
        sum(b, &own, to);
    }
}

static block remote_block(const builder *b, uint32_t number)
{
    return (block){number % (b->nodes - 1) + 1, number / (b->nodes - 1)};
}

static uint32_t remote_number(const builder *b, block k)
{
    return k.pass * (b->nodes - 1) + k.c - 1;
}

static uint64_t outbox_offset(const builder *b, uint32_t number)
{
    return number % b->rs->n_out * b->stride;
}

/* First block behind a round of any pass. */
static uint32_t round_end(const builder *b, uint32_t round)
{
    const plan_round *r = &b->rs->rounds[round % b->rs->n_rounds];
    return round / b->rs->n_rounds * (b->nodes - 1) + r->first - 1 + r->count;
}

static void sum_next_block(builder *b)
{
    uint32_t number = b->next_block++;
    resource_event(b, OP_JOIN, STREAM_RS_SUM, PHASE_RS_SUM, EVENT_SENT, BANK_CALL, number % b->rs->n_out);
    level1(b, remote_block(b, number), region(REGION_OUTBOX, BANK_CALL, b->rank, outbox_offset(b, number)));
    if (b->next_block == round_end(b, b->next_round))
        call_event(b, OP_RECORD, STREAM_RS_SUM, PHASE_RS_SUM, b->summed + b->next_round++);
}

static void sum_own_blocks(builder *b)
{
    resource_event(b, OP_JOIN, STREAM_RS_SUM, PHASE_RS_SUM, EVENT_SPARED, BANK_CALL, 0);
    for (uint32_t q = 0; q < b->rs->n_part; q++)
        level1(b, (block){b->nodes, q}, region(REGION_SPARE, BANK_CALL, b->rank, q * b->stride));
    call_event(b, OP_RECORD, STREAM_RS_SUM, PHASE_RS_SUM, b->spared);
}

static void begin_reads(builder *b)
{
    if (b->mode == 1) /* behind the copy into the slot, which ran on this stream */
        call_event(b, OP_RECORD, STREAM_RS_STASH, PHASE_RS_STASH, b->stashed);
    for (uint32_t d = 0; d < b->local; d++) {
        int stream = d ? (int)(STREAM_RS_PUSH0 + (b->local_rank + d) % b->local) : STREAM_RS_SUM;
        int phase = d ? PHASE_RS_PUSH : PHASE_RS_SUM;
        if (d && b->nodes == 1) /* mostly over before the gradients are there */
            await_freed(b, (b->local_rank + d) % b->local, 0);
        if (d == 0 || b->mode == 0) /* the output, and gradients that are not in the slot */
            event(b, OP_JOIN, stream, phase, SCOPE_EXTERN, EVENT_IN);
        if (b->mode == 1)
            call_event(b, OP_JOIN, stream, phase, b->stashed);
    }
}

static void end_reads(builder *b)
{
    for (uint32_t d = 1; d < b->local; d++) {
        uint32_t owner = (b->local_rank + d) % b->local;
        call_event(b, OP_RECORD, (int)(STREAM_RS_PUSH0 + owner), PHASE_RS_PUSH, owner);
        call_event(b, OP_JOIN, STREAM_RS_SUM, PHASE_RS_SUM, owner);
    }
    event(b, OP_RECORD, STREAM_RS_SUM, PHASE_RS_SUM, SCOPE_EXTERN, EVENT_READ_DONE);
    if (b->mode == 1)
        event(b, OP_RECORD, STREAM_RS_SUM, PHASE_RS_SUM, SCOPE_EXTERN, EVENT_FREE)->bank = (uint16_t)b->slot;
}

/* ---- Level 2: the rail -------------------------------------------------------------------------- */

/* A credit to every node that has bytes for this wave. */
static void send_credits(builder *b, const plan_wave *wave, uint32_t pass)
{
    bool any = false;
    for (uint32_t c = wave->first; c < wave->first + wave->count; c++) {
        if (c == b->nodes || block_bytes(b, (block){c, pass}) == 0)
            continue;
        if (!any)
            rail_op(b, OP_SIGNAL, PHASE_RS_CREDIT);
        any = true;
        if (b->status == TIDE_OK)
            b->status = schedule_post(b->s, rail_rank(b, node_minus(b, c)), 0, SIG_CREDIT, 1);
    }
}

/* Sends the round's blocks once allowed. A block without bytes has no credit, no put and no arrival, on both sides. */
static void send_round(builder *b, const plan_round *round, uint32_t pass, uint32_t generation)
{
    const uint32_t n_ctx = (uint32_t)b->plan->options.n_ctx;
    bool any = false;

    for (uint32_t c = round->first; c < round->first + round->count; c++) {
        if (block_bytes(b, (block){c, pass}) == 0)
            continue;
        if (!any)
            rail_op(b, OP_WAIT, PHASE_RS_CREDIT);
        any = true;
        if (b->status == TIDE_OK)
            b->status = schedule_post(b->s, rail_rank(b, node_plus(b, c)), 0, SIG_CREDIT, 1);
    }
    if (any)
        rail_op(b, OP_PUT, PHASE_RS_ARRIVE);
    for (uint32_t c = round->first; c < round->first + round->count && any; c++) {
        int32_t peer = rail_rank(b, node_plus(b, c));
        op_addr src = region(REGION_OUTBOX, BANK_CALL, b->rank, outbox_offset(b, remote_number(b, (block){c, pass})));
        op_addr dst = region(REGION_INBOX, generation, (uint32_t)peer, inbox_offset(b, b->local_rank, c));
        if (b->status == TIDE_OK)
            b->status = schedule_put_striped(b->s, peer, SIG_HEAD, n_ctx, &src, &dst, block_bytes(b, (block){c, pass}));
    }
    for (uint32_t c = round->first; c < round->first + round->count; c++)
        resource_event(b, OP_RECORD, STREAM_RS_NET, PHASE_RS_ARRIVE, EVENT_SENT, BANK_CALL,
                       remote_number(b, (block){c, pass}) % b->rs->n_out);
}

static void await_round(builder *b, const plan_round *round, uint32_t pass)
{
    const uint32_t n_ctx = (uint32_t)b->plan->options.n_ctx;
    bool any = false;
    for (uint32_t c = round->first; c < round->first + round->count; c++) {
        uint64_t bytes = block_bytes(b, (block){c, pass}); /* the sender has my local rank */
        if (bytes == 0)
            continue;
        if (!any)
            rail_op(b, OP_WAIT, PHASE_RS_ARRIVE);
        any = true;
        if (b->status == TIDE_OK)
            b->status = schedule_await_striped(b->s, rail_rank(b, node_minus(b, c)), SIG_HEAD, n_ctx, bytes);
    }
}

/* A wave of the own node alone comes last in its pass and has nothing on the rail: behind earlier waves' arrivals and
 * landings, its own stream orders it. */
static bool own_only(const builder *b, uint32_t g)
{
    return b->rs->waves[g % b->rs->n_waves].n_rounds == 0;
}

static void wave_rail(builder *b, uint32_t g)
{
    uint32_t pass = g / b->rs->n_waves, generation = g % b->rs->n_par;
    const plan_wave *wave = &b->rs->waves[g % b->rs->n_waves];

    resource_event(b, OP_JOIN, STREAM_RS_NET, PHASE_RS_CREDIT, EVENT_LANDED, 0, generation);
    send_credits(b, wave, pass);
    for (uint32_t i = wave->first_round; i < wave->first_round + wave->n_rounds; i++) {
        const plan_round *round = &b->rs->rounds[i];
        call_event(b, OP_JOIN, STREAM_RS_NET, PHASE_RS_ARRIVE, b->summed + pass * b->rs->n_rounds + i);
        send_round(b, round, pass, generation);
        for (uint32_t k = 0; k < round->count && b->next_block < b->rs->n_blocks; k++) { /* into the blocks just sent */
            sum_next_block(b);
            if (b->next_block == b->rs->n_blocks)
                end_reads(b);
        }
        await_round(b, round, pass);
    }
    call_event(b, OP_RECORD, STREAM_RS_NET, PHASE_RS_ARRIVE, b->arrived + g);
}

/* ---- Level 2: the landing ----------------------------------------------------------------------- */

/* Whole blocks: what the wave before left there may be longer than this group's. */
static void zero_stale(builder *b, uint32_t g)
{
    uint64_t mask = plan_rs_stale_mask(b->rs, g, b->local_rank);
    uint32_t generation = g % b->rs->n_par;
    if (mask == 0 || b->stride == 0)
        return;
    add(b, OP_COPY, STREAM_RS_LAND, PHASE_RS_LAND);
    for (uint32_t s = 0, n; s < b->local; s += n) {
        for (n = 0; s + n < b->local && mask >> (s + n) & 1; n++)
            ;
        if (n > 0)
            run(b, (op_addr){.space = SPACE_ZERO}, region(REGION_INBOX, generation, b->rank, s * b->stride),
                n * b->stride, 1, 0, n * b->stride);
        else
            n = 1;
    }
}

/* Row l of every block, folded over the local ranks in order, zeroed blocks included. */
static void land(builder *b, uint32_t g)
{
    uint32_t pass = g / b->rs->n_waves, generation = g % b->rs->n_par;
    bool multicast = b->plan->options.multicast != 0, any = false;
    uint8_t beta = g % b->rs->n_waves == 0 ? OP_BETA_CALL : OP_BETA_ONE;

    for (uint32_t s = 0; s < b->local; s++) {
        uint64_t begin, end, pitch;
        op_segment row = {.rows = 1, .n_sets = 1};
        plan_cut_range(&b->cut, s, pass, &begin, &end);
        if (begin == end)
            continue;
        if (!any)
            add(b, OP_REDUCE, STREAM_RS_LAND, PHASE_RS_LAND)->flags = OP_FINAL | beta;
        any = true;
        pitch = tide_align_up(end - begin, PLAN_VECTOR) * sizeof(float);
        row.dst = output(b, begin);
        row.elems = end - begin;
        row.dst_pitch = row.elems * sizeof(float);
        row.source[0] = (op_sources){.row_pitch = pitch, .count = b->local, .rank_step = 1, .dtype = TIDE_F32};
        row.source[0].at = region(REGION_INBOX, generation, b->node * b->local, s * b->stride + b->local_rank * pitch);
        if (multicast) {
            row.source[0].at.who = WHO_NODE;
            row.source[0].rank_step = 0;
        }
        if (b->status == TIDE_OK)
            b->status = schedule_segment(b->s, &row);
    }
}

/* L = 1: the wave's blocks in contributor order, the own one last and straight from its spare. */
static void land_single(builder *b, const plan_wave *wave, uint32_t pass, uint32_t generation)
{
    uint32_t remote = tide_min_u64(wave->first + wave->count, b->nodes) - wave->first;
    uint64_t begin, end, pitch;
    op_segment row = {.rows = 1};

    plan_cut_range(&b->cut, 0, pass, &begin, &end);
    if (begin == end)
        return;
    row.dst = output(b, begin);
    row.elems = end - begin;
    row.dst_pitch = row.elems * sizeof(float);
    pitch = row.elems * b->item;
    if (remote > 0)
        row.source[row.n_sets++] = (op_sources){
            .at = region(REGION_INBOX, generation, b->rank, inbox_offset(b, 0, wave->first)),
            .row_pitch = pitch,
            .step = b->stride,
            .count = remote,
            .dtype = (uint16_t)b->dtype};
    if (wave->first + wave->count > b->nodes)
        row.source[row.n_sets++] = (op_sources){.at = region(REGION_SPARE, BANK_CALL, b->rank, pass * b->stride),
                                                .row_pitch = pitch,
                                                .count = 1,
                                                .dtype = (uint16_t)b->dtype};
    add(b, OP_REDUCE, STREAM_RS_LAND, PHASE_RS_LAND)->flags = OP_FINAL | (wave->first == 1 ? OP_BETA_CALL : OP_BETA_ONE);
    if (b->status == TIDE_OK)
        b->status = schedule_segment(b->s, &row);
}

/* Says to all ranks of the node, or hears from them, how far the waves are. A rank alone is in its stream's order. */
static void node_fence(builder *b, int kind, int which, uint32_t g)
{
    op *o;
    if (b->local == 1)
        return;
    o = local_op(b, kind, STREAM_RS_LAND, PHASE_RS_LAND, RESOURCE_INBOX, which, g + 1);
    o->flags = kind == OP_WAIT && which == WORD_A && g == 0 ? OP_CHECK_TAG : 0;
    post_all(b, true);
}

static void wave_land(builder *b, uint32_t g)
{
    const plan_rs *rs = b->rs;
    uint32_t pass = g / rs->n_waves, generation = g % rs->n_par;
    const plan_wave *wave = &rs->waves[g % rs->n_waves];
    bool with_own = wave->first + wave->count > b->nodes, last_own = with_own && pass == rs->n_part - 1;
    block own = {b->nodes, pass};

    zero_stale(b, g);
    if (!own_only(b, g))
        call_event(b, OP_JOIN, STREAM_RS_LAND, PHASE_RS_LAND, b->arrived + g);
    if (with_own && pass == 0) /* the spares of all passes */
        call_event(b, OP_JOIN, STREAM_RS_LAND, PHASE_RS_LAND, b->spared);
    if (with_own && !b->single) {
        uint64_t bytes = block_bytes(b, own);
        if (bytes > 0) {
            add(b, OP_COPY, STREAM_RS_LAND, PHASE_RS_LAND);
            run(b, region(REGION_SPARE, BANK_CALL, b->rank, pass * b->stride),
                region(REGION_INBOX, generation, b->rank, inbox_offset(b, b->local_rank, own.c)), bytes, 1,
                bytes, bytes);
        }
    }
    if (last_own && !b->single)
        resource_event(b, OP_RECORD, STREAM_RS_LAND, PHASE_RS_LAND, EVENT_SPARED, BANK_CALL, 0);
    node_fence(b, OP_SIGNAL, WORD_A, g);
    node_fence(b, OP_WAIT, WORD_A, g);
    if (b->single)
        land_single(b, wave, pass, generation);
    else
        land(b, g);
    if (last_own && b->single)
        resource_event(b, OP_RECORD, STREAM_RS_LAND, PHASE_RS_LAND, EVENT_SPARED, BANK_CALL, 0);
    node_fence(b, OP_SIGNAL, WORD_B, g);
    if (g == rs->n_waves * rs->n_part - 1) /* the output is complete; the neighbours may still read my blocks */
        event(b, OP_RECORD, STREAM_RS_LAND, PHASE_RS_LAND, SCOPE_EXTERN, EVENT_DONE);
    node_fence(b, OP_WAIT, WORD_B, g);
    if (g + rs->n_par >= rs->n_waves * rs->n_part || !own_only(b, g + rs->n_par)) /* else no credit asks for it */
        resource_event(b, OP_RECORD, STREAM_RS_LAND, PHASE_RS_LAND, EVENT_LANDED, 0, generation);
}

/* ---- the two phases ----------------------------------------------------------------------------- */

static void build_one_node(builder *b)
{
    begin_reads(b);
    level1(b, (block){1, 0}, output(b, 0));
    end_reads(b);
    event(b, OP_RECORD, STREAM_RS_SUM, PHASE_RS_SUM, SCOPE_EXTERN, EVENT_DONE);
    b->s->n_read = b->s->n_ops;
}

static void build_nodes(builder *b)
{
    const plan_rs *rs = b->rs;
    uint32_t n_waves = rs->n_waves * rs->n_part;

    begin_reads(b);
    while (b->next_block < rs->n_blocks && b->next_block < rs->n_out)
        sum_next_block(b);
    sum_own_blocks(b);
    if (b->next_block == rs->n_blocks)
        end_reads(b);
    b->s->n_read = b->s->n_ops;

    event(b, OP_JOIN, STREAM_RS_NET, PHASE_RS_CREDIT, SCOPE_EXTERN, EVENT_GATE);
    for (uint32_t g = 0; g < n_waves; g++) {
        if (!own_only(b, g))
            wave_rail(b, g);
        wave_land(b, g);
    }
    if (b->status == TIDE_OK && b->local > 1)
        b->status = schedule_set_step(b->s, RESOURCE_INBOX, n_waves);
}

/* ---- checks and sizes --------------------------------------------------------------------------- */

static int check(const tide_plan *plan, uint32_t group, uint32_t rank, const schedule_rs_options *options)
{
    uint32_t n_ranks = plan->topology.nodes * plan->topology.local, item;
    if (group >= plan->n_groups)
        return tide_fail(TIDE_ERR_ARGUMENT, "group: %u is not in 0..%u", group, plan->n_groups - 1);
    if (rank >= n_ranks)
        return tide_fail(TIDE_ERR_ARGUMENT, "rank: %u is not in 0..%u", rank, n_ranks - 1);
    if (options->grad_dtype != TIDE_F32 && options->grad_dtype != TIDE_BF16 && options->grad_dtype != TIDE_F16)
        return tide_fail(TIDE_ERR_ARGUMENT, "grad_dtype: %d is not fp32, bf16 or fp16", options->grad_dtype);
    if (plan->groups[group].geo.grad_dtype == TIDE_NONE)
        return tide_fail(TIDE_ERR_ARGUMENT, "group: %u was planned without gradients (grad_dtype TIDE_NONE)", group);
    if (options->mode != 0 && options->mode != 1)
        return tide_fail(TIDE_ERR_ARGUMENT, "mode: %d is not 0 (In-Place) or 1 (Slot-Reuse)", options->mode);
    if (options->mode == 0)
        return TIDE_OK;
    item = plan->groups[group].geo.item;
    if (tide_dtype_bytes(options->grad_dtype) > item)
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "mode: 1, but %s gradients do not fit the landing of %u-byte parameters: use mode 0 "
                         "(In-Place)",
                         tide_dtype_name(options->grad_dtype), item);
    if (plan_shared_landing(plan) && plan->topology.local > 1)
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "mode: 1, but the local ranks share one landing (multicast): use mode 0 (In-Place)");
    return TIDE_OK;
}

/* A chunk as planned, or as large as the staging slots allow when the call's gradients are wider than planned. */
static void size_chunks(builder *b)
{
    plan_cut_init(&b->cut, b->nodes, b->local, b->rs->n_part, b->geo.elements, (uint64_t)b->plan->options.chunk);
    b->chunk = b->cut.chunk;
    if (b->local == 1) /* nothing is staged */
        b->chunk = tide_max_u64(b->cut.part, 1);
    else if (b->cut.part > 0) {
        uint64_t column = (uint64_t)(b->local - 1) * b->cut.rows * b->item; /* bytes of a chunk of one element */
        uint64_t fits = b->plan->map.region[REGION_STAGING].banks[0].bytes / column;
        if (fits < b->chunk)
            b->chunk = fits < PLAN_VECTOR ? fits : fits / PLAN_VECTOR * PLAN_VECTOR;
    }
    /* a call without elements still has one chunk a block, so that ranks that call differently notice */
    b->n_chunks = (uint32_t)tide_max_u64(1, tide_ceil_div(b->cut.part, b->chunk));
}

static int number_events(builder *b)
{
    uint32_t rounds = b->rs->n_rounds * b->rs->n_part, waves = b->rs->n_waves * b->rs->n_part;
    b->stashed = b->local;
    b->spared = b->local + 1;
    b->summed = b->local + 2;
    b->arrived = b->summed + rounds;
    b->s->n_call_events = b->arrived + waves;
    if (b->s->n_call_events > UINT16_MAX)
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "n_part: %u passes of %u rounds and %u waves need more than %d events a call; expected a "
                         "larger k or w_wave, or fewer passes",
                         b->rs->n_part, b->rs->n_rounds, b->rs->n_waves, UINT16_MAX);
    return TIDE_OK;
}

/* What both builders begin with; b->geo is to be cleared when it returns TIDE_OK. */
static int open_builder(builder *b, const tide_plan *plan, uint32_t group, uint32_t rank,
                        const schedule_rs_options *options, int kind, schedule *out)
{
    int status = check(plan, group, rank, options);
    memset(out, 0, sizeof *out);
    memset(b, 0, sizeof *b);
    if (status == TIDE_OK)
        status = geo_group_subset(&b->geo, &plan->groups[group].geo, options->present, NULL);
    if (status != TIDE_OK)
        return status;
    b->plan = plan;
    b->rs = &plan->rs;
    b->s = out;
    b->nodes = plan->topology.nodes;
    b->local = plan->topology.local;
    b->rank = rank;
    b->node = rank / b->local;
    b->local_rank = rank % b->local;
    b->dtype = (uint32_t)options->grad_dtype;
    b->item = tide_dtype_bytes(options->grad_dtype);
    b->mode = options->mode;
    b->slot = plan->groups[group].slot;
    b->stride = plan->map.block_stride;
    b->single = b->nodes > 1 && b->local == 1;
    b->block_dtype = b->single ? options->grad_dtype : TIDE_F32;
    out->kind = kind;
    out->rank = rank;
    out->nodes = b->nodes;
    out->local = b->local;
    out->group = group;
    out->n_args = b->geo.n_params;
    out->tag = schedule_tag(plan, kind, group, options->present, options->grad_dtype);
    return TIDE_OK;
}

static int close_builder(builder *b)
{
    geo_group_clear(&b->geo);
    if (b->status != TIDE_OK)
        schedule_clear(b->s);
    return b->status;
}

int schedule_build_rs(const tide_plan *plan, uint32_t group, uint32_t rank, const schedule_rs_options *options,
                      schedule *out)
{
    builder b;
    int status = open_builder(&b, plan, group, rank, options, SCHEDULE_RS, out);
    if (status != TIDE_OK)
        return status;
    out->n_args++; /* the output */
    size_chunks(&b);
    b.status = number_events(&b);
    if (b.status == TIDE_OK && b.nodes == 1)
        build_one_node(&b);
    else if (b.status == TIDE_OK)
        build_nodes(&b);
    if (b.status == TIDE_OK && b.local > 1)
        b.status = schedule_set_step(out, RESOURCE_STAGING, b.next_chunk);
    return close_builder(&b);
}

int schedule_build_stash(const tide_plan *plan, uint32_t group, uint32_t rank, const schedule_rs_options *options,
                         schedule *out)
{
    schedule_rs_options slot_reuse = *options;
    builder b;
    int status;

    slot_reuse.mode = 1;
    status = open_builder(&b, plan, group, rank, &slot_reuse, SCHEDULE_STASH, out);
    if (status != TIDE_OK)
        return status;
    event(&b, OP_JOIN, STREAM_RS_STASH, PHASE_RS_STASH, SCOPE_EXTERN, EVENT_IN);
    if (b.geo.elements > 0)
        add(&b, OP_COPY, STREAM_RS_STASH, PHASE_RS_STASH);
    for (uint32_t p = 0; p < b.geo.n_params; p++) {
        uint64_t bytes = b.geo.params[p].whole * b.item;
        if (bytes > 0)
            run(&b, (op_addr){SPACE_ARG, 0, 0, (int32_t)p, 0}, gradient(&b, p, 0), bytes, 1, bytes, bytes);
    }
    event(&b, OP_RECORD, STREAM_RS_STASH, PHASE_RS_STASH, SCOPE_EXTERN, EVENT_READ_DONE);
    out->n_read = out->n_ops;
    return close_builder(&b);
}

int schedule_build_call(const tide_plan *plan, uint32_t group, uint32_t rank, int kind, schedule *out)
{
    schedule_rs_options options = {NULL, TIDE_BF16, (int)plan->options.mode};

    if (kind == SCHEDULE_AG)
        return schedule_build_ag(plan, group, rank, out);
    if (group < plan->n_groups) {
        options.grad_dtype = plan->groups[group].geo.grad_dtype;
        /* Slot-Reuse needs gradients that fit the slot; such a call of a wider group goes In-Place. */
        if (plan_shared_landing(plan) || tide_dtype_bytes(options.grad_dtype) > plan->groups[group].geo.item)
            options.mode = 0;
    }
    return kind == SCHEDULE_RS ? schedule_build_rs(plan, group, rank, &options, out)
                               : schedule_build_stash(plan, group, rank, &options, out);
}
