/*
 * bind.c - resolves a schedule once: addresses to pointers, events to objects, waits to words. What comes out needs
 * neither the schedule nor the plan to run. Nothing here trusts the schedule: what does not fit is an error that names
 * the op.
 */
#include "engine/state.h"

/* Items that the bound program needs; a region written or summed "on all local ranks" becomes one item a rank where it
 * is not one memory. */
typedef struct sizes {
    uint64_t copies, runs, reduces, segments, sources, puts, posts, rail_posts;
} sizes;

typedef struct binder {
    engine *e;
    const schedule *s;
    engine_program *p;
    uint32_t op; /* being bound */
    sizes used;
} binder;

static int bad(const binder *b, const char *what)
{
    return tide_fail(TIDE_ERR_INTERNAL, "schedule op %u: %s", b->op, what);
}

static bool shared_landing(const engine *e, int region)
{
    return region == REGION_LANDING && plan_shared_landing(e->plan);
}

enum { VECTOR_BYTES = PLAN_VECTOR * sizeof(float) };

static bool banked(const op_addr *a)
{
    return a->space == SPACE_REGION && a->bank == BANK_CALL;
}

/* 2 when an address of the op depends on the parity of the call. */
static uint32_t variants(const schedule *s, const op *o)
{
    bool two = false;
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        if (o->kind == OP_COPY)
            two |= banked(&s->runs[i].src) || banked(&s->runs[i].dst);
        if (o->kind == OP_PUT)
            two |= banked(&s->puts[i].src) || banked(&s->puts[i].dst);
        if (o->kind == OP_REDUCE) {
            two |= banked(&s->segments[i].dst);
            for (uint32_t k = 0; k < s->segments[i].n_sets; k++)
                two |= banked(&s->segments[i].source[k].at);
        }
    }
    return two ? 2 : 1;
}

static uint32_t copies_of(const engine *e, const op_run *r)
{
    return r->dst.space == SPACE_REGION && r->dst.who == WHO_NODE && !shared_landing(e, r->dst.region) && !e->arena->multicast
               ? e->local
               : 1;
}

/* A source that the switch adds: fp32, alone in its sum, where the vectors of a kernel lie. */
static bool by_switch(const engine *e, const op_segment *g, const op_sources *set)
{
    return e->arena->multicast && set->at.space == SPACE_REGION && set->at.who == WHO_NODE && set->dtype == TIDE_F32 &&
           g->n_sets == 1 && set->count == e->local && set->step == 0 && set->at.offset % VECTOR_BYTES == 0 &&
           set->row_pitch % VECTOR_BYTES == 0;
}

static int count_items(binder *b, sizes *n)
{
    const schedule *s = b->s;
    for (b->op = 0; b->op < s->n_ops; b->op++) {
        const op *o = &s->ops[b->op];
        uint64_t end = (uint64_t)o->first + o->count, v;
        uint64_t have[OP_KIND_COUNT] = {[OP_COPY] = s->n_runs, [OP_REDUCE] = s->n_segments, [OP_PUT] = s->n_puts,
                                        [OP_SIGNAL] = s->n_posts, [OP_WAIT] = s->n_posts};
        if (o->kind >= OP_KIND_COUNT || o->stream >= STREAM_RS_PUSH0 + b->e->local || o->phase >= PHASE_COUNT)
            return bad(b, "kind, stream or phase out of range");
        if (o->kind < OP_RECORD && end > have[o->kind])
            return bad(b, "items out of range");
        v = variants(s, o);
        switch (o->kind) {
        case OP_COPY:
            n->copies += v;
            for (uint32_t i = o->first; i < end; i++)
                n->runs += v * copies_of(b->e, &s->runs[i]);
            break;
        case OP_REDUCE:
            n->reduces += v;
            n->segments += v * o->count;
            for (uint32_t i = o->first; i < end; i++) {
                if (s->segments[i].n_sets > 2)
                    return bad(b, "more than two source sets");
                for (uint32_t k = 0; k < s->segments[i].n_sets; k++)
                    n->sources += v * s->segments[i].source[k].count;
            }
            break;
        case OP_PUT:
            n->puts += v * o->count;
            break;
        case OP_SIGNAL:
        case OP_WAIT:
            *(o->scope == SCOPE_RAIL ? &n->rail_posts : &n->posts) += o->count;
            break;
        default:
            break;
        }
    }
    return TIDE_OK;
}

static uint32_t bank_of(const op_addr *a, uint32_t parity)
{
    return a->bank == BANK_CALL ? parity : a->bank;
}

/* `extent` bytes at an address of `rank` must lie within its bank. */
static int check_region(const binder *b, const op_addr *a, uint32_t bank, int64_t rank, uint64_t extent)
{
    const engine *e = b->e;
    uint64_t end;
    if (a->region >= REGION_COUNT || bank >= e->plan->map.region[a->region].n_banks)
        return bad(b, "region or bank out of range");
    if (rank < 0 || rank >= e->device->n_ranks)
        return bad(b, "rank out of range");
    if (!tide_add(a->offset, extent, &end) || end > e->plan->map.region[a->region].banks[bank].bytes)
        return bad(b, "address past the end of its bank");
    return TIDE_OK;
}

/* rank: for a region address; the caller resolves WHO_NODE. */
static int resolve(binder *b, const op_addr *a, uint32_t parity, int64_t rank, uint64_t extent, fab_ptr *out)
{
    *out = (fab_ptr){0, -1, 0};
    switch (a->space) {
    case SPACE_ZERO:
        out->zero = 1;
        return TIDE_OK;
    case SPACE_ARG:
        if (a->who < 0 || (uint32_t)a->who >= b->s->n_args)
            return bad(b, "argument out of range");
        b->p->arg_used[a->who] = 1;
        out->arg = a->who;
        out->base = (uintptr_t)a->offset;
        return TIDE_OK;
    case SPACE_REGION: {
        uint32_t bank = bank_of(a, parity);
        int status = check_region(b, a, bank, rank, extent);
        char *base = status == TIDE_OK ? engine_region(b->e, a->region, bank, (uint32_t)rank) : NULL;
        if (status != TIDE_OK)
            return status;
        if (!base)
            return bad(b, "address on a rank whose memory is not mapped here");
        out->base = (uintptr_t)(base + a->offset);
        return TIDE_OK;
    }
    default:
        return bad(b, "unknown address space");
    }
}

/* A region of all local ranks, behind the arenas' multicast address. */
static int resolve_node(binder *b, const op_addr *a, uint32_t parity, uint64_t extent, fab_ptr *out)
{
    uint32_t bank = bank_of(a, parity);
    int status = check_region(b, a, bank, b->e->rank, extent);
    *out = (fab_ptr){0, -1, 0};
    if (status == TIDE_OK)
        out->base = (uintptr_t)b->e->arena->multicast + engine_offset(b->e, a->region, bank) + a->offset;
    return status;
}

static uint64_t item_bytes(int dtype)
{
    uint32_t bytes = tide_dtype_bytes(dtype);
    return bytes ? bytes : 1;
}

static uint64_t extent_of(uint64_t rows, uint64_t pitch, uint64_t bytes)
{
    return rows && bytes ? (rows - 1) * pitch + bytes : 0;
}

static int bind_copy(binder *b, const op *o, bound_op *out)
{
    uint32_t v = variants(b->s, o);
    for (uint32_t parity = 0; parity < v; parity++) {
        fab_copy *copy = &b->p->copies[b->used.copies++];
        *copy = (fab_copy){.runs = &b->p->runs[b->used.runs],
                           .src_dtype = o->src_dtype,
                           .dst_dtype = o->dst_dtype,
                           .rank = (uint16_t)b->e->rank,
                           .ctas = o->flags & OP_SM ? PLAN_CAST_CTAS : 0};
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            const op_run *r = &b->s->runs[i];
            uint32_t n = copies_of(b->e, r);
            for (uint32_t k = 0; k < n; k++) {
                fab_run *run = &b->p->runs[b->used.runs++];
                int64_t rank = r->dst.who == WHO_NODE ? (int64_t)(b->e->node * b->e->local + k) : r->dst.who;
                bool node = r->dst.space == SPACE_REGION && r->dst.who == WHO_NODE && b->e->arena->multicast;
                uint64_t extent = extent_of(r->rows, r->dst_pitch, r->width * item_bytes(o->dst_dtype));
                if (r->dst.space == SPACE_REGION && rank >= 0)
                    copy->rank = (uint16_t)rank;
                if (i > o->first && copy->multicast != node)
                    return bad(b, "a copy to one rank and to all");
                copy->multicast = node;
                int status = resolve(b, &r->src, parity, r->src.who,
                                     extent_of(r->rows, r->src_pitch, r->width * item_bytes(o->src_dtype)), &run->src);
                if (status == TIDE_OK)
                    status = node ? resolve_node(b, &r->dst, parity, extent, &run->dst)
                                  : resolve(b, &r->dst, parity, rank, extent, &run->dst);
                if (status != TIDE_OK)
                    return status;
                if (run->dst.zero)
                    return bad(b, "a fill as destination");
                run->width = r->width;
                run->rows = r->rows;
                run->src_pitch = r->src_pitch;
                run->dst_pitch = r->dst_pitch;
                copy->n_runs++;
            }
        }
        out->list[parity] = copy;
    }
    if (v == 1)
        out->list[1] = out->list[0];
    return TIDE_OK;
}

static int bind_sources(binder *b, const op_segment *g, uint32_t parity)
{
    for (uint32_t k = 0; k < g->n_sets; k++) {
        const op_sources *set = &g->source[k];
        bool all = by_switch(b->e, g, set);
        if (set->dtype > TIDE_F16)
            return bad(b, "a source that is no number");
        for (uint32_t i = 0; i < (all ? 1 : set->count); i++) {
            fab_source *source = &b->p->sources[b->used.sources++];
            op_addr at = set->at;
            int64_t rank = at.who == WHO_NODE ? (int64_t)(b->e->node * b->e->local + i)
                                              : (int64_t)at.who + (int64_t)i * set->rank_step;
            int status;
            at.offset += i * set->step;
            if (all)
                status = resolve_node(b, &at, parity,
                                      extent_of(g->rows, set->row_pitch, tide_align_up(g->elems * sizeof(float), VECTOR_BYTES)),
                                      &source->at);
            else
                status = resolve(b, &at, parity, rank,
                                 extent_of(g->rows, set->row_pitch, g->elems * item_bytes(set->dtype)), &source->at);
            if (status != TIDE_OK)
                return status;
            if (source->at.zero)
                return bad(b, "a fill as source of a sum");
            source->row_pitch = set->row_pitch;
            source->dtype = set->dtype;
            source->multimem = all ? set->count : 0;
        }
    }
    return TIDE_OK;
}

static int bind_reduce(binder *b, const op *o, bound_op *out)
{
    uint32_t v = variants(b->s, o);
    uint32_t ctas = (uint32_t)(o->stream == STREAM_RS_SUM ? b->e->plan->options.c_sum : b->e->plan->options.c_land);
    int beta = FAB_NOT_FINAL;

    if (o->flags & OP_FINAL)
        beta = o->flags & OP_BETA_CALL ? FAB_BETA_CALL : o->flags & OP_BETA_ONE ? FAB_BETA_ONE : FAB_BETA_ZERO;
    for (uint32_t parity = 0; parity < v; parity++) {
        fab_reduce *reduce = &b->p->reduces[b->used.reduces++];
        *reduce = (fab_reduce){&b->p->segments[b->used.segments], b->p->sources, o->count, beta, ctas};
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            const op_segment *g = &b->s->segments[i];
            fab_segment *segment = &b->p->segments[b->used.segments++];
            uint64_t first = b->used.sources;
            int status = resolve(b, &g->dst, parity, g->dst.who,
                                 extent_of(g->rows, g->dst_pitch, g->elems * sizeof(float)), &segment->dst);
            if (status == TIDE_OK && segment->dst.zero)
                status = bad(b, "a fill as destination");
            if (status == TIDE_OK)
                status = bind_sources(b, g, parity);
            if (status != TIDE_OK)
                return status;
            segment->dst_pitch = g->dst_pitch;
            segment->elems = g->elems;
            segment->rows = g->rows;
            segment->first_source = (uint32_t)first;
            segment->n_sources = (uint32_t)(b->used.sources - first);
        }
        out->list[parity] = reduce;
    }
    if (v == 1)
        out->list[1] = out->list[0];
    return TIDE_OK;
}

static bool on_rail(const engine *e, int64_t rank, uint32_t ctx, uint32_t sig)
{
    return rank >= 0 && rank < e->device->n_ranks && engine_same_rail(e, (uint32_t)rank) && (uint32_t)rank != e->rank &&
           ctx < (uint32_t)e->plan->options.n_ctx && sig < PLAN_RAIL_SIGNALS;
}

static int bind_put(binder *b, const op *o, bound_op *out)
{
    uint32_t v = variants(b->s, o);
    for (uint32_t parity = 0; parity < v; parity++) {
        out->list[parity] = &b->p->puts[b->used.puts];
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            const op_put *u = &b->s->puts[i];
            fab_put *put = &b->p->puts[b->used.puts++];
            uint32_t bank = bank_of(&u->dst, parity);
            char *there;
            fab_ptr src;
            int status;
            if (!on_rail(b->e, u->peer, u->ctx, u->sig))
                return bad(b, "a put outside the rail");
            if (u->src.space != SPACE_REGION || u->dst.space != SPACE_REGION || u->bytes == 0)
                return bad(b, "a put of nothing, or not between regions");
            if (u->dst.who != u->peer)
                return bad(b, "a put to another rank's memory than its peer's");
            status = resolve(b, &u->src, parity, u->src.who, u->bytes, &src);
            if (status == TIDE_OK)
                status = check_region(b, &u->dst, bank, u->dst.who, u->bytes);
            if (status != TIDE_OK)
                return status;
            there = engine_region(b->e, u->dst.region, bank, (uint32_t)u->peer);
            *put = (fab_put){.peer = (uint32_t)u->peer,
                             .ctx = u->ctx,
                             .sig = u->sig,
                             .dst = there ? there + u->dst.offset : NULL,
                             .src = (const void *)src.base,
                             .bytes = u->bytes,
                             .at = engine_offset(b->e, u->dst.region, bank) + u->dst.offset};
        }
    }
    if (v == 1)
        out->list[1] = out->list[0];
    return TIDE_OK;
}

static int bind_posts(binder *b, const op *o, bound_op *out)
{
    const engine *e = b->e;
    engine_program *p = b->p;

    if (o->scope == SCOPE_RAIL) {
        out->list[0] = out->list[1] = &p->rail_posts[b->used.rail_posts];
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            const op_post *post = &b->s->posts[i];
            if (!on_rail(e, post->rank, post->ctx, post->sig))
                return bad(b, "a post outside the rail");
            p->rail_posts[b->used.rail_posts++] =
                (fab_rail_post){(uint32_t)post->rank, post->ctx, post->sig, post->count};
            /* data carries the tag of the sender's call; a credit or a go may be a call ahead */
            if (o->kind == OP_WAIT && (post->sig == SIG_HEAD || post->sig == SIG_TAIL))
                out->flags |= OP_CHECK_TAG;
        }
        return TIDE_OK;
    }
    if (o->scope != SCOPE_LOCAL || o->resource >= e->ledger.n || o->which > WORD_B)
        return bad(b, "scope, resource or word out of range");
    out->list[0] = out->list[1] = &p->posts[b->used.posts];
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        int64_t rank = b->s->posts[i].rank;
        fab_post *post = &p->posts[b->used.posts++];
        if (rank < 0 || rank >= e->device->n_ranks || !engine_same_node(e, (uint32_t)rank))
            return bad(b, "a local post outside the node");
        post->rank = (uint32_t)rank;
        post->word = o->kind == OP_SIGNAL ? engine_word(e, (uint32_t)rank, o->resource, o->which, e->rank)
                                          : engine_word(e, e->rank, o->resource, o->which, (uint32_t)rank);
    }
    for (out->resource = 0; out->resource < p->n_resources; out->resource++)
        if (p->resources[out->resource] == o->resource)
            return TIDE_OK;
    if (p->n_resources == MAX_RESOURCES)
        return bad(b, "more resources than a call can use");
    p->resources[p->n_resources++] = o->resource;
    return TIDE_OK;
}

static fab_event *event_at(fab_event *const *list, uint64_t n, uint64_t index)
{
    return index < n ? list[index] : NULL;
}

static fab_event *resource_event(const engine_events *v, const op *o, uint32_t parity)
{
    uint32_t bank = o->bank == BANK_CALL ? parity : o->bank;
    switch (o->event) {
    case EVENT_SCATTERED:
        return v->scattered;
    case EVENT_SENT:
        return bank < 2 && o->index < v->n_sent ? v->sent[bank * v->n_sent + o->index] : NULL;
    case EVENT_SPARED:
        return bank < 2 ? v->spared[bank] : NULL;
    case EVENT_LANDED:
        return event_at(v->landed, v->n_landed, o->index);
    default:
        return NULL;
    }
}

static fab_event *extern_event(const engine_events *v, const op *o, uint32_t group)
{
    switch (o->event) {
    case EVENT_IN:
        return v->in;
    case EVENT_GATE:
        return v->gate;
    case EVENT_FREE:
        return event_at(v->free, v->n_slots, o->bank);
    case EVENT_READY:
    case EVENT_READ_DONE:
    case EVENT_DONE:
        return v->group[3 * group + (o->event - EVENT_READY)];
    default:
        return NULL;
    }
}

/* recorded: the CALL events that ops before this one record. */
static int bind_event(binder *b, const op *o, uint8_t *recorded, bound_op *out)
{
    const engine_events *v = &b->e->events;
    for (uint32_t parity = 0; parity < 2; parity++) {
        if (o->scope == SCOPE_CALL)
            out->event[parity] = event_at(b->p->call_events, b->p->n_call_events, o->event);
        else if (o->scope == SCOPE_RESOURCE)
            out->event[parity] = resource_event(v, o, parity);
        else if (o->scope == SCOPE_EXTERN)
            out->event[parity] = extern_event(v, o, b->s->group);
        if (!out->event[parity])
            return bad(b, "unknown event");
    }
    if (o->scope == SCOPE_EXTERN && o->kind == OP_RECORD && (o->event == EVENT_IN || o->event == EVENT_GATE))
        return bad(b, "records an event of the caller");
    if (o->scope == SCOPE_CALL && o->kind == OP_JOIN && !recorded[o->event])
        return bad(b, "joins an event that no op before it records");
    if (o->scope == SCOPE_CALL && o->kind == OP_RECORD)
        recorded[o->event] = 1;
    return TIDE_OK;
}

static int allocate(binder *b, const sizes *n)
{
    engine_program *p = b->p;
    const schedule *s = b->s;
    if (n->runs > UINT32_MAX || n->sources > UINT32_MAX || n->segments > UINT32_MAX)
        return tide_fail(TIDE_ERR_MEMORY, "schedule: more than 2^32 items");
    p->ops = tide_calloc(s->n_ops, sizeof *p->ops);
    p->arg_used = tide_calloc(s->n_args, 1);
    p->call_events = tide_calloc(s->n_call_events, sizeof *p->call_events);
    p->steps = tide_calloc(s->n_steps, sizeof *p->steps);
    p->copies = tide_calloc(n->copies, sizeof *p->copies);
    p->runs = tide_calloc(n->runs, sizeof *p->runs);
    p->reduces = tide_calloc(n->reduces, sizeof *p->reduces);
    p->segments = tide_calloc(n->segments, sizeof *p->segments);
    p->sources = tide_calloc(n->sources, sizeof *p->sources);
    p->puts = tide_calloc(n->puts, sizeof *p->puts);
    p->posts = tide_calloc(n->posts, sizeof *p->posts);
    p->rail_posts = tide_calloc(n->rail_posts, sizeof *p->rail_posts);
    if (!p->ops || !p->arg_used || !p->call_events || !p->steps || !p->copies || !p->runs || !p->reduces ||
        !p->segments || !p->sources || !p->puts || !p->posts || !p->rail_posts)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i < s->n_call_events; i++) {
        int status = b->e->device->verbs->event_create(b->e->queue, &p->call_events[i]);
        if (status != TIDE_OK)
            return status;
    }
    return TIDE_OK;
}

static int bind_ops(binder *b)
{
    const schedule *s = b->s;
    uint8_t *recorded = tide_calloc(s->n_call_events, 1);
    int status = recorded ? TIDE_OK : TIDE_ERR_MEMORY;

    for (b->op = 0; b->op < s->n_ops && status == TIDE_OK; b->op++) {
        const op *o = &s->ops[b->op];
        bound_op *out = &b->p->ops[b->op];
        *out = (bound_op){.kind = o->kind,
                          .scope = o->scope,
                          .flags = o->flags,
                          .which = o->which,
                          .stream = o->stream,
                          .n = o->count,
                          .delta = o->delta,
                          .where = {op_phase_name(o->phase), b->op}};
        out->rail = b->e->rail[s->kind == SCHEDULE_AG ? LANE_AG : LANE_RS];
        switch (o->kind) {
        case OP_COPY:
            status = bind_copy(b, o, out);
            break;
        case OP_REDUCE:
            status = bind_reduce(b, o, out);
            break;
        case OP_PUT:
            status = bind_put(b, o, out);
            break;
        case OP_SIGNAL:
        case OP_WAIT:
            status = bind_posts(b, o, out);
            break;
        default:
            status = bind_event(b, o, recorded, out);
            break;
        }
    }
    tide_free(recorded);
    return status;
}

static int bind_calls(binder *b)
{
    const fab_device_verbs *verbs = b->e->device->verbs;
    uint32_t *ops = tide_calloc(STREAM_RS_PUSH0 + b->e->local, sizeof *ops);
    int status;
    if (!ops)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i < b->p->n_ops; i++)
        ops[b->p->ops[i].stream]++;
    status = verbs->calls_create(b->e->queue, b->p->n_args, ops, &b->p->calls);
    tide_free(ops);
    return status;
}

int engine_bind(engine *e, const schedule *s, engine_program **out)
{
    sizes n = {0};
    binder b = {.e = e, .s = s};
    int status = fab_check_fork();

    *out = NULL;
    if (status != TIDE_OK)
        return status;
    if (s->rank != e->rank || s->nodes != e->nodes || s->local != e->local || s->group >= e->events.n_groups ||
        s->n_read > s->n_ops)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "schedule: rank %u of %u x %u, group %u, expected rank %u of %u x %u, group below %u", s->rank,
                         s->nodes, s->local, s->group, e->rank, e->nodes, e->local, e->events.n_groups);
    if (!(b.p = tide_calloc(1, sizeof *b.p)))
        return TIDE_ERR_MEMORY;
    b.p->e = e;
    b.p->kind = s->kind;
    b.p->n_args = s->n_args;
    b.p->n_ops = s->n_ops;
    b.p->n_read = s->n_read;
    b.p->n_call_events = s->n_call_events;
    b.p->n_steps = s->n_steps;
    b.p->tag = s->tag;
    b.p->digest = schedule_digest(s);
    status = count_items(&b, &n);
    if (status == TIDE_OK)
        status = allocate(&b, &n);
    for (uint32_t i = 0; i < s->n_steps && status == TIDE_OK; i++) {
        b.p->steps[i] = s->steps[i];
        if (s->steps[i].resource >= e->ledger.n)
            status = tide_fail(TIDE_ERR_INTERNAL, "schedule step %u: resource %u is not below %u", i,
                               s->steps[i].resource, e->ledger.n);
    }
    if (status == TIDE_OK)
        status = bind_ops(&b);
    if (status == TIDE_OK)
        status = bind_calls(&b);
    if (status != TIDE_OK) {
        engine_program_free(b.p);
        return status;
    }
    b.p->next = e->programs;
    e->programs = b.p;
    *out = b.p;
    return TIDE_OK;
}

void engine_program_free(engine_program *p)
{
    const fab_device_verbs *verbs = p->e->device->verbs;
    verbs->calls_destroy(p->calls);
    for (uint32_t i = 0; p->call_events && i < p->n_call_events; i++)
        verbs->event_destroy(p->call_events[i]);
    tide_free(p->rail_posts);
    tide_free(p->posts);
    tide_free(p->puts);
    tide_free(p->sources);
    tide_free(p->segments);
    tide_free(p->reduces);
    tide_free(p->runs);
    tide_free(p->copies);
    tide_free(p->steps);
    tide_free(p->call_events);
    tide_free(p->arg_used);
    tide_free(p->ops);
    tide_free(p);
}

/* What is queued may still refer to a program, so it is freed when nothing is: at the next complete sync, or with the
 * engine. */
void engine_unbind(engine_program *p)
{
    if (p)
        p->retired = true;
}

void engine_reap(engine *e)
{
    engine_program **link = &e->programs;
    while (*link) {
        engine_program *p = *link;
        if (!p->retired) {
            link = &p->next;
            continue;
        }
        *link = p->next;
        engine_program_free(p);
    }
}
