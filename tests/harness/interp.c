/* interp.c - see interp.h. Plain code first: this is what the op list means. */
#include "interp.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct call {
    struct call *next, *next_net;
    const schedule *s;
    void **args;
    float alpha;
    int accumulate;
    uint16_t parity;
    uint64_t *base;     /* of every resource, when the call was enqueued */
    uint32_t *recorded; /* event instance of every CALL event; 0: not recorded yet */
} call;

/* One op in a stream, or an action of the caller. */
typedef struct item {
    call *call;
    const op *op;      /* NULL: action of the caller */
    uint32_t instance; /* RECORD: to complete. JOIN and actions: to wait for, 0 none */
    uint32_t complete; /* actions: to complete afterwards, 0 none */
    interp_fn fn;
    void *context;
} item;

typedef struct stream {
    item *items;
    size_t head, count, capacity;
    uint32_t done, start; /* items of the head op finished; where its shuffled order starts */
} stream;

typedef struct packet {
    uint32_t lane, from, to;
    uint16_t ctx, sig;
    uint8_t *bytes; /* NULL: a bare signal */
    uint8_t *target;
    uint64_t n;
} packet;

typedef struct named_event {
    uint64_t key;
    uint32_t instance;
} named_event;
typedef struct word {
    uint64_t value, tag;
} word;

typedef struct rank_state {
    uint8_t *memory[REGION_COUNT];
    stream *streams; /* the last one is the caller's */
    uint64_t *base;
    word *words;       /* [resource][which][poster] */
    uint32_t *arrived; /* [lane][from node][ctx][sig], not yet consumed */
    named_event *events;
    size_t n_events;
    uint16_t parity;
    call *first_net, *last_net;
} rank_state;

struct interp {
    const tide_plan *plan;
    uint32_t n_ranks, local, nodes, n_streams, n_resources;
    rank_state *ranks;
    uint8_t *instances; /* 1: complete */
    uint32_t n_instances, cap_instances;
    packet *wire;
    size_t n_wire, cap_wire;
    call *calls;
    uint64_t random;
    uint32_t slow_rank, wire_bias, mood; /* of the scheduler, changed now and then */
    char error[4096];
};

enum { CTXS = 16 };

/* ---- small things --------------------------------------------------------------------------- */

static void *grab(size_t n, size_t bytes)
{
    void *p = calloc(n ? n : 1, bytes ? bytes : 1);
    if (!p)
        abort();
    return p;
}

static void *more(void *old, size_t n, size_t bytes)
{
    void *p = realloc(old, n * bytes);
    if (!p)
        abort();
    return p;
}

uint64_t interp_random(interp *t)
{
    uint64_t z = t->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

int interp_fail(interp *t, const char *format, ...)
{
    va_list args;
    if (t->error[0])
        return -1;
    va_start(args, format);
    vsnprintf(t->error, sizeof t->error, format, args);
    va_end(args);
    return -1;
}

const char *interp_error(const interp *t)
{
    return t->error;
}

static const char *op_text(const interp *t, uint32_t rank, const item *it, char text[160])
{
    static const char *const kinds[] = {"COPY", "REDUCE", "PUT", "SIGNAL", "WAIT", "RECORD", "JOIN"};
    char name[24];
    (void)t;
    if (!it->op)
        snprintf(text, 160, "rank %u caller", rank);
    else
        snprintf(text, 160, "rank %u %s op %u %s (%s, group %u)", rank, op_stream_name(it->op->stream, name),
                 (unsigned)(it->op - it->call->s->ops), kinds[it->op->kind], op_phase_name(it->op->phase),
                 it->call->s->group);
    return text;
}

static int op_fail(interp *t, uint32_t rank, const item *it, const char *what)
{
    char text[160];
    return interp_fail(t, "%s: %s", op_text(t, rank, it, text), what);
}

static uint32_t new_instance(interp *t)
{
    if (t->n_instances == t->cap_instances) {
        t->cap_instances = t->cap_instances ? t->cap_instances * 2 : 1024;
        t->instances = more(t->instances, t->cap_instances, 1);
    }
    t->instances[t->n_instances] = 0;
    return t->n_instances++;
}

static uint32_t *event_slot(rank_state *r, uint64_t key)
{
    for (size_t i = 0; i < r->n_events; i++)
        if (r->events[i].key == key)
            return &r->events[i].instance;
    r->events = more(r->events, r->n_events + 1, sizeof *r->events);
    r->events[r->n_events] = (named_event){key, 0};
    return &r->events[r->n_events++].instance;
}

static uint64_t resource_key(const op *o, const call *c)
{
    uint64_t bank = o->bank == BANK_CALL ? c->parity : o->bank;
    return UINT64_C(1) << 60 | (uint64_t)o->event << 48 | bank << 32 | o->index;
}

static uint64_t extern_key(int event, uint32_t which) /* which: slot for FREE, else group */
{
    return UINT64_C(2) << 60 | (uint64_t)event << 48 | which;
}

static void push(stream *q, const item *it)
{
    if (q->head > 64 && q->head * 2 > q->count) {
        memmove(q->items, q->items + q->head, (q->count - q->head) * sizeof *q->items);
        q->count -= q->head;
        q->head = 0;
    }
    if (q->count == q->capacity) {
        q->capacity = q->capacity ? q->capacity * 2 : 64;
        q->items = more(q->items, q->capacity, sizeof *q->items);
    }
    q->items[q->count++] = *it;
}

/* ---- creation ------------------------------------------------------------------------------- */

interp *interp_create(const tide_plan *plan, uint64_t seed)
{
    interp *t = grab(1, sizeof *t);
    t->plan = plan;
    t->nodes = plan->topology.nodes;
    t->local = plan->topology.local;
    t->n_ranks = t->nodes * t->local;
    t->n_streams = STREAM_RS_PUSH0 + t->local + 1;
    t->n_resources = schedule_resources(plan);
    t->random = seed;
    new_instance(t);
    t->instances[0] = 1; /* instance 0 means none: nothing to wait for */
    t->ranks = grab(t->n_ranks, sizeof *t->ranks);
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        rank_state *r = &t->ranks[i];
        for (int k = 0; k < REGION_COUNT; k++) {
            r->memory[k] = grab(plan->map.region[k].bytes, 1);
            if (k != REGION_INBOX)
                memset(r->memory[k], 0xff, plan->map.region[k].bytes);
        }
        r->streams = grab(t->n_streams, sizeof *r->streams);
        r->base = grab(t->n_resources, sizeof *r->base);
        r->words = grab((size_t)t->n_resources * 2 * t->local, sizeof *r->words);
        r->arrived = grab((size_t)2 * t->nodes * CTXS * SIG_COUNT, sizeof *r->arrived);
    }
    return t;
}

void interp_destroy(interp *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        rank_state *r = &t->ranks[i];
        for (int k = 0; k < REGION_COUNT; k++)
            free(r->memory[k]);
        for (uint32_t k = 0; k < t->n_streams; k++)
            free(r->streams[k].items);
        free(r->streams);
        free(r->base);
        free(r->words);
        free(r->arrived);
        free(r->events);
    }
    while (t->calls) {
        call *c = t->calls;
        t->calls = c->next;
        free(c->args);
        free(c->base);
        free(c->recorded);
        free(c);
    }
    for (size_t i = 0; i < t->n_wire; i++)
        free(t->wire[i].bytes);
    free(t->wire);
    free(t->instances);
    free(t->ranks);
    free(t);
}

uint8_t *interp_memory(interp *t, int region, uint32_t bank, uint32_t rank)
{
    if (region == REGION_LANDING && plan_shared_landing(t->plan))
        rank -= rank % t->local;
    return t->ranks[rank].memory[region] + t->plan->map.region[region].banks[bank].offset;
}

/* ---- enqueueing ----------------------------------------------------------------------------- */

static stream *caller(interp *t, uint32_t rank)
{
    return &t->ranks[rank].streams[t->n_streams - 1];
}

static call *new_call(interp *t, const schedule *s, const interp_args *args)
{
    rank_state *r = &t->ranks[s->rank];
    call *c = grab(1, sizeof *c);
    c->next = t->calls;
    t->calls = c;
    c->s = s;
    c->args = grab(s->n_args, sizeof *c->args);
    if (args && args->args)
        memcpy(c->args, args->args, s->n_args * sizeof *c->args);
    c->alpha = args ? args->alpha : 1;
    c->accumulate = args ? args->accumulate : 0;
    c->base = grab(t->n_resources, sizeof *c->base);
    memcpy(c->base, r->base, t->n_resources * sizeof *c->base);
    c->recorded = grab(s->n_call_events, sizeof *c->recorded);
    return c;
}

static int bind_event(interp *t, rank_state *r, call *c, item *it)
{
    const op *o = it->op;
    uint32_t *slot = NULL;
    if (o->scope == SCOPE_CALL) {
        if (o->event >= c->s->n_call_events)
            return op_fail(t, c->s->rank, it, "call event out of range");
        slot = &c->recorded[o->event];
        if (o->kind == OP_JOIN && *slot == 0)
            return op_fail(t, c->s->rank, it, "joins a call event that is not recorded yet");
    } else if (o->scope == SCOPE_RESOURCE) {
        slot = event_slot(r, resource_key(o, c));
    } else if (o->scope == SCOPE_EXTERN) {
        slot = event_slot(r, extern_key(o->event, o->event == EVENT_FREE   ? o->bank
                                                  : o->event <= EVENT_GATE ? 0
                                                                           : c->s->group));
    } else {
        return op_fail(t, c->s->rank, it, "event with a scope that is not one");
    }
    if (o->kind == OP_RECORD)
        *slot = new_instance(t);
    it->instance = *slot;
    return 0;
}

/* IN and GATE: this point of the caller's stream. */
static void record_call_point(interp *t, uint32_t rank)
{
    item it = {0};
    it.complete = new_instance(t);
    push(caller(t, rank), &it);
    *event_slot(&t->ranks[rank], extern_key(EVENT_IN, 0)) = it.complete;
    *event_slot(&t->ranks[rank], extern_key(EVENT_GATE, 0)) = it.complete;
}

static int enqueue_ops(interp *t, call *c, uint32_t from, uint32_t to)
{
    rank_state *r = &t->ranks[c->s->rank];
    record_call_point(t, c->s->rank);
    for (uint32_t i = from; i < to; i++) {
        item it = {0};
        bool rail;
        it.call = c;
        it.op = &c->s->ops[i];
        if (it.op->stream >= t->n_streams - 1)
            return op_fail(t, c->s->rank, &it, "no such stream");
        rail = it.op->kind == OP_PUT ||
               ((it.op->kind == OP_SIGNAL || it.op->kind == OP_WAIT) && it.op->scope == SCOPE_RAIL);
        if (rail && it.op->stream != (c->s->kind == SCHEDULE_AG ? STREAM_AG_CALL : STREAM_RS_NET))
            return op_fail(t, c->s->rank, &it, "a rail op outside the lane's one rail stream");
        if ((it.op->kind == OP_RECORD || it.op->kind == OP_JOIN) && bind_event(t, r, c, &it) != 0)
            return -1;
        push(&r->streams[it.op->stream], &it);
    }
    return 0;
}

int interp_enqueue(interp *t, const schedule *s, int part, const interp_args *args)
{
    rank_state *r = &t->ranks[s->rank];
    call *c;

    if (t->error[0])
        return -1;
    if (part == INTERP_NET) {
        c = r->first_net;
        if (!c || c->s != s)
            return interp_fail(t, "rank %u: NET without its READ", s->rank);
        r->first_net = c->next_net;
        return enqueue_ops(t, c, s->n_read, s->n_ops);
    }
    c = new_call(t, s, args);
    if (part == INTERP_STASH)
        return enqueue_ops(t, c, 0, s->n_ops);
    for (uint32_t i = 0; i < s->n_steps; i++)
        r->base[s->steps[i].resource] += s->steps[i].step;
    if (s->kind == SCHEDULE_AG)
        return enqueue_ops(t, c, 0, s->n_ops);
    c->parity = r->parity;
    r->parity ^= 1;
    if (r->first_net)
        r->last_net->next_net = c;
    else
        r->first_net = c;
    r->last_net = c;
    if (enqueue_ops(t, c, 0, s->n_read) != 0)
        return -1;
    return part == INTERP_ALL ? interp_enqueue(t, s, INTERP_NET, NULL) : 0;
}

int interp_consume(interp *t, uint32_t rank, int event, uint32_t group, interp_fn fn, void *context)
{
    item it = {0};
    if (t->error[0])
        return -1;
    if (event >= 0) {
        it.instance = *event_slot(&t->ranks[rank], extern_key(event, group));
        if (!it.instance)
            return interp_fail(t, "rank %u: the caller waits for event %d of group %u, which no schedule records", rank,
                               event, group);
    }
    it.fn = fn;
    it.context = context;
    push(caller(t, rank), &it);
    return 0;
}

int interp_free_slot(interp *t, uint32_t rank, uint32_t slot)
{
    item it = {0};
    if (t->error[0])
        return -1;
    it.complete = new_instance(t);
    *event_slot(&t->ranks[rank], extern_key(EVENT_FREE, slot)) = it.complete;
    push(caller(t, rank), &it);
    return 0;
}

/* ---- addresses ------------------------------------------------------------------------------ */

enum access { READ_OWN, READ_NODE, WRITE_OWN, WRITE_NODE };

/* Pointer to `extent` bytes at `a`, checked; rank `who` overrides a.who for regions. NULL after a failure. */
static uint8_t *resolve(interp *t, uint32_t rank, const item *it, const op_addr *a, uint32_t who, uint64_t extent,
                        int access)
{
    const call *c = it->call;
    uint32_t bank = a->bank == BANK_CALL ? c->parity : a->bank;
    const plan_bank *b;

    if (a->space == SPACE_ARG) {
        if (a->who < 0 || (uint32_t)a->who >= c->s->n_args || !c->args[a->who]) {
            op_fail(t, rank, it, "argument that the call does not have");
            return NULL;
        }
        return (uint8_t *)c->args[a->who] + a->offset;
    }
    if (a->space != SPACE_REGION || a->region >= REGION_COUNT || bank >= t->plan->map.region[a->region].n_banks) {
        op_fail(t, rank, it, "address in no region or bank");
        return NULL;
    }
    if (who >= t->n_ranks || who / t->local != rank / t->local ||
        ((access == READ_OWN || access == WRITE_OWN) && who != rank)) {
        op_fail(t, rank, it, "address on a rank that this op may not touch");
        return NULL;
    }
    b = &t->plan->map.region[a->region].banks[bank];
    if (a->offset > b->bytes || extent > b->bytes - a->offset) {
        char text[160];
        interp_fail(t, "%s: bytes %llu..%llu of region %s bank %u, which has %llu", op_text(t, rank, it, text),
                    (unsigned long long)a->offset, (unsigned long long)(a->offset + extent),
                    plan_region_name(a->region), bank, (unsigned long long)b->bytes);
        return NULL;
    }
    return interp_memory(t, a->region, bank, who) + a->offset;
}

static uint64_t item_bytes(int dtype)
{
    return dtype == TIDE_OPAQUE ? 1 : dtype == TIDE_F32 ? 4 : 2;
}

static float load(const uint8_t *p, int dtype)
{
    float f;
    uint16_t h;
    if (dtype == TIDE_F32) {
        memcpy(&f, p, 4);
        return f;
    }
    memcpy(&h, p, 2);
    return dtype == TIDE_BF16 ? tide_bf16_to_f32(h) : tide_f16_to_f32(h);
}

static void store(uint8_t *p, int dtype, float f)
{
    uint16_t h;
    if (dtype == TIDE_F32) {
        memcpy(p, &f, 4);
        return;
    }
    h = dtype == TIDE_BF16 ? tide_f32_to_bf16(f) : tide_f32_to_f16(f);
    memcpy(p, &h, 2);
}

/* ---- the seven kinds ------------------------------------------------------------------------ */

static int do_run(interp *t, uint32_t rank, const item *it, const op_run *r)
{
    const op *o = it->op;
    uint64_t src_item = item_bytes(o->src_dtype), dst_item = item_bytes(o->dst_dtype);
    uint64_t dst_extent, src_extent, first = (uint32_t)r->dst.who, count = 1;
    const uint8_t *src = NULL;

    if (r->width == 0 || r->rows == 0)
        return op_fail(t, rank, it, "a run without bytes");
    dst_extent = (r->rows - 1) * r->dst_pitch + r->width * dst_item;
    src_extent = (r->rows - 1) * r->src_pitch + r->width * src_item;
    if (r->rows > 1 && r->dst_pitch < r->width * dst_item)
        return op_fail(t, rank, it, "rows of the destination overlap");
    if (r->src.space != SPACE_ZERO) {
        src = resolve(t, rank, it, &r->src, (uint32_t)r->src.who, src_extent, READ_OWN);
        if (!src)
            return -1;
    }
    if (r->dst.space == SPACE_REGION && r->dst.who == WHO_NODE) {
        if (!t->plan->options.multicast)
            return op_fail(t, rank, it, "a multicast write in a unicast plan");
        first = rank - rank % t->local;
        count = r->dst.region == REGION_LANDING && plan_shared_landing(t->plan) ? 1 : t->local;
    }
    for (uint64_t w = first; w < first + count; w++) {
        uint8_t *dst = resolve(t, rank, it, &r->dst, (uint32_t)w, dst_extent, WRITE_NODE);
        if (!dst)
            return -1;
        for (uint64_t row = 0; row < r->rows; row++) {
            uint8_t *to = dst + row * r->dst_pitch;
            const uint8_t *from = src ? src + row * r->src_pitch : NULL;
            if (!from)
                memset(to, 0, r->width * dst_item);
            else if (o->src_dtype == o->dst_dtype)
                memmove(to, from, r->width * dst_item);
            else
                for (uint64_t x = 0; x < r->width; x++)
                    store(to + x * dst_item, o->dst_dtype, load(from + x * src_item, o->src_dtype));
        }
    }
    return 0;
}

/* Adds the sources of one set in order; *have says whether `sum` holds anything yet. */
static int add_set(interp *t, uint32_t rank, const item *it, const op_segment *g, const op_sources *q, float *sums,
                   bool *have)
{
    uint32_t count = q->count;
    bool node = q->at.space == SPACE_REGION && q->at.who == WHO_NODE;
    uint64_t bytes = item_bytes(q->dtype);

    if (node && count != t->local)
        return op_fail(t, rank, it, "a multimem source must count the local ranks");
    if (q->dtype > TIDE_F16)
        return op_fail(t, rank, it, "sources of a dtype that cannot be added");
    for (uint32_t i = 0; i < count; i++) {
        uint32_t who = node ? rank - rank % t->local + i : (uint32_t)q->at.who + i * q->rank_step;
        op_addr at = q->at;
        const uint8_t *p;
        if (!node)
            at.offset += i * q->step;
        p = resolve(t, rank, it, &at, who, (g->rows - 1) * q->row_pitch + g->elems * bytes, READ_NODE);
        if (!p)
            return -1;
        for (uint64_t row = 0; row < g->rows; row++)
            for (uint64_t x = 0; x < g->elems; x++) {
                float f = load(p + row * q->row_pitch + x * bytes, q->dtype), *sum = &sums[row * g->elems + x];
                *sum = *have ? *sum + f : f;
            }
        *have = true;
    }
    return 0;
}

static int do_segment(interp *t, uint32_t rank, const item *it, const op_segment *g)
{
    const op *o = it->op;
    float *sums;
    uint8_t *dst;
    bool have = false;
    int status = 0;

    if (g->rows == 0 || g->elems == 0)
        return op_fail(t, rank, it, "a segment without elements");
    if (g->rows > 1 && g->dst_pitch < g->elems * 4)
        return op_fail(t, rank, it, "rows of the destination overlap");
    dst = resolve(t, rank, it, &g->dst, (uint32_t)g->dst.who, (g->rows - 1) * g->dst_pitch + g->elems * 4, WRITE_OWN);
    if (!dst)
        return -1;
    sums = grab(g->rows * g->elems, sizeof *sums);
    for (uint32_t k = 0; k < g->n_sets && status == 0; k++)
        status = add_set(t, rank, it, g, &g->source[k], sums, &have);
    for (uint64_t row = 0; row < g->rows && status == 0; row++)
        for (uint64_t x = 0; x < g->elems; x++) {
            uint8_t *p = dst + row * g->dst_pitch + 4 * x;
            float sum = sums[row * g->elems + x];
            if (o->flags & OP_FINAL) {
                bool keep = (o->flags & OP_BETA_ONE) || ((o->flags & OP_BETA_CALL) && it->call->accumulate);
                float scaled = it->call->alpha * sum;
                sum = (keep ? load(p, TIDE_F32) : 0.0f) + scaled;
            }
            store(p, TIDE_F32, sum);
        }
    free(sums);
    return status;
}

static void send_packet(interp *t, const packet *p)
{
    if (t->n_wire == t->cap_wire) {
        t->cap_wire = t->cap_wire ? t->cap_wire * 2 : 64;
        t->wire = more(t->wire, t->cap_wire, sizeof *t->wire);
    }
    t->wire[t->n_wire++] = *p;
}

static int check_peer(interp *t, uint32_t rank, const item *it, int64_t peer, uint32_t ctx, uint32_t sig)
{
    if (peer < 0 || peer >= t->n_ranks || peer == rank || peer % t->local != rank % t->local)
        return op_fail(t, rank, it, "a peer that is not on this rail");
    if (ctx >= (uint32_t)t->plan->options.n_ctx || sig >= SIG_COUNT)
        return op_fail(t, rank, it, "a context or signal index that the rail does not have");
    return 0;
}

/* The source may be reused once the op has passed; bytes and signal arrive at some later time. */
static int do_put(interp *t, uint32_t rank, const item *it, const op_put *p)
{
    packet k = {it->call->s->kind == SCHEDULE_RS, rank, (uint32_t)p->peer, p->ctx, p->sig, NULL, NULL, p->bytes};
    const uint8_t *src;

    if (check_peer(t, rank, it, p->peer, p->ctx, p->sig) != 0)
        return -1;
    if (p->bytes == 0 || p->src.space != SPACE_REGION || p->dst.space != SPACE_REGION || p->dst.who != p->peer)
        return op_fail(t, rank, it, "a put without bytes, of an argument, or to another rank than its peer");
    src = resolve(t, rank, it, &p->src, (uint32_t)p->src.who, p->bytes, READ_OWN);
    k.target = src ? resolve(t, k.to, it, &p->dst, k.to, p->bytes, WRITE_OWN) : NULL;
    if (!k.target)
        return -1;
    k.bytes = grab(p->bytes, 1);
    memcpy(k.bytes, src, p->bytes);
    send_packet(t, &k);
    return 0;
}

static uint32_t *arrivals(interp *t, uint32_t rank, uint32_t lane, uint32_t from, uint32_t ctx, uint32_t sig)
{
    return &t->ranks[rank].arrived[((lane * t->nodes + from / t->local) * CTXS + ctx) * SIG_COUNT + sig];
}

static void deliver(interp *t)
{
    size_t i = interp_random(t) % t->n_wire;
    packet *p = &t->wire[i], k;
    for (size_t e = 0; e < i; e++) { /* the oldest of the same lane, pair and context goes first */
        const packet *q = &t->wire[e];
        if (q->lane == p->lane && q->from == p->from && q->to == p->to && q->ctx == p->ctx) {
            i = e;
            break;
        }
    }
    k = t->wire[i];
    memmove(&t->wire[i], &t->wire[i + 1], (t->n_wire - i - 1) * sizeof *t->wire);
    t->n_wire--;
    if (k.bytes)
        memcpy(k.target, k.bytes, k.n);
    free(k.bytes);
    ++*arrivals(t, k.to, k.lane, k.from, k.ctx, k.sig);
}

static word *local_word(interp *t, uint32_t waiter, const op *o, uint32_t poster)
{
    return &t->ranks[waiter].words[((size_t)o->resource * 2 + o->which) * t->local + poster % t->local];
}

static int check_local(interp *t, uint32_t rank, const item *it, int64_t peer)
{
    if (peer < 0 || peer >= t->n_ranks || peer / t->local != rank / t->local)
        return op_fail(t, rank, it, "a local counter of another node");
    if (it->op->resource >= t->n_resources || it->op->which > WORD_B)
        return op_fail(t, rank, it, "no such counter");
    return 0;
}

static int do_signal(interp *t, uint32_t rank, const item *it, const op_post *p)
{
    word *w;
    uint64_t value;
    if (it->op->scope == SCOPE_RAIL) {
        packet k = {it->call->s->kind == SCHEDULE_RS, rank, (uint32_t)p->rank, p->ctx, p->sig, NULL, NULL, 0};
        if (check_peer(t, rank, it, p->rank, p->ctx, p->sig) != 0)
            return -1;
        if (p->count != 1)
            return op_fail(t, rank, it, "a rail post is one signal");
        send_packet(t, &k);
        return 0;
    }
    if (check_local(t, rank, it, p->rank) != 0)
        return -1;
    w = local_word(t, (uint32_t)p->rank, it->op, rank);
    value = it->call->base[it->op->resource] + it->op->delta;
    if (value < w->value)
        return op_fail(t, rank, it, "a counter would fall");
    *w = (word){value, it->call->s->tag};
    return 0;
}

/* 1: all there (and consumed), 0: not yet, -1: failed */
static int try_wait(interp *t, uint32_t rank, const item *it)
{
    const op *o = it->op;
    const op_post *posts = &it->call->s->posts[o->first];
    uint32_t lane = it->call->s->kind == SCHEDULE_RS;

    for (uint32_t i = 0; i < o->count; i++) {
        const op_post *p = &posts[i];
        if (o->scope == SCOPE_RAIL) {
            uint32_t need = 0;
            if (check_peer(t, rank, it, p->rank, p->ctx, p->sig) != 0)
                return -1;
            for (uint32_t k = 0; k <= i; k++)
                if (posts[k].rank == p->rank && posts[k].ctx == p->ctx && posts[k].sig == p->sig)
                    need += posts[k].count;
            if (*arrivals(t, rank, lane, (uint32_t)p->rank, p->ctx, p->sig) < need)
                return 0;
        } else {
            const word *w;
            if (check_local(t, rank, it, p->rank) != 0)
                return -1;
            w = local_word(t, rank, o, (uint32_t)p->rank);
            if (w->value < it->call->base[o->resource] + o->delta)
                return 0;
            if ((o->flags & OP_CHECK_TAG) && w->tag != it->call->s->tag)
                return op_fail(t, rank, it, "the poster is in another call");
        }
    }
    for (uint32_t i = 0; i < o->count && o->scope == SCOPE_RAIL; i++)
        *arrivals(t, rank, lane, (uint32_t)posts[i].rank, posts[i].ctx, posts[i].sig) -= posts[i].count;
    return 1;
}

/* ---- running -------------------------------------------------------------------------------- */

/* Runs one item of the stream's head. 1: went on, 0: blocked, -1: failed. */
static int step_stream(interp *t, uint32_t rank, stream *q)
{
    const item *it = &q->items[q->head];
    const op *o = it->op;
    const schedule *s = o ? it->call->s : NULL;
    uint32_t at;
    int status = 0;

    if (!o || o->kind == OP_JOIN) {
        if (!t->instances[it->instance])
            return 0;
        if (it->fn && it->fn(it->context, rank) != 0)
            return op_fail(t, rank, it, "the caller's check failed");
        if (it->complete)
            t->instances[it->complete] = 1;
        q->head++;
        return 1;
    }
    if (o->kind == OP_RECORD) {
        t->instances[it->instance] = 1;
        q->head++;
        return 1;
    }
    if (o->kind == OP_WAIT) {
        status = try_wait(t, rank, it);
        if (status == 1)
            q->head++;
        return status;
    }
    if (q->done == 0) /* items of an op have no order among each other, but puts and posts of a context do */
        q->start =
            o->count && (o->kind == OP_COPY || o->kind == OP_REDUCE) ? (uint32_t)(interp_random(t) % o->count) : 0;
    if (q->done < o->count) {
        at = o->first + (q->start + q->done) % o->count;
        if (o->kind == OP_COPY)
            status = do_run(t, rank, it, &s->runs[at]);
        else if (o->kind == OP_REDUCE)
            status = do_segment(t, rank, it, &s->segments[at]);
        else if (o->kind == OP_PUT)
            status = do_put(t, rank, it, &s->puts[at]);
        else if (o->kind == OP_SIGNAL)
            status = do_signal(t, rank, it, &s->posts[at]);
        else
            return op_fail(t, rank, it, "no such kind");
        q->done++;
    }
    if (q->done >= o->count) {
        q->done = 0;
        q->head++;
    }
    return status == 0 ? 1 : -1;
}

/* Ranks fall behind and the wire stalls for a while, so that whoever does not wait runs far ahead. */
static void change_mood(interp *t)
{
    if (t->mood-- > 0)
        return;
    t->mood = (uint32_t)(interp_random(t) % 400);
    t->slow_rank = (uint32_t)(interp_random(t) % (t->n_ranks + 1)); /* n_ranks: none */
    t->wire_bias = (uint32_t)(interp_random(t) % 5);
}

/* 1: something went on, 0: nothing can, -1: failed */
static int step(interp *t)
{
    uint32_t total = t->n_ranks * t->n_streams, start = (uint32_t)(interp_random(t) % total);

    change_mood(t);
    if (t->n_wire && interp_random(t) % 8 < t->wire_bias) {
        deliver(t);
        return 1;
    }
    for (int slow = 0; slow < 2; slow++) {
        for (uint32_t i = 0; i < total; i++) {
            uint32_t k = (start + i) % total, rank = k / t->n_streams, burst = (uint32_t)(interp_random(t) % 8);
            stream *q = &t->ranks[rank].streams[k % t->n_streams];
            int status = 0;
            if ((rank == t->slow_rank) != slow || q->head == q->count)
                continue;
            for (uint32_t b = 0; b <= burst && q->head < q->count; b++) {
                int more_status = step_stream(t, rank, q);
                if (more_status < 0)
                    return -1;
                if (more_status == 0)
                    break;
                status = 1;
            }
            if (status == 1)
                return 1;
        }
        if (t->n_wire) {
            deliver(t);
            return 1;
        }
    }
    return 0;
}

int interp_steps(interp *t, uint64_t n)
{
    int status = 1;
    while (n-- > 0 && status == 1 && !t->error[0])
        status = step(t);
    return t->error[0] ? -1 : 0;
}

static int report_deadlock(interp *t)
{
    char text[sizeof t->error], line[160];
    size_t used = 0;
    uint32_t blocked = 0;
    for (uint32_t r = 0; r < t->n_ranks; r++)
        for (uint32_t k = 0; k < t->n_streams; k++) {
            const stream *q = &t->ranks[r].streams[k];
            const item *it;
            if (q->head == q->count)
                continue;
            it = &q->items[q->head];
            blocked++;
            if (used + 400 > sizeof text)
                continue;
            used += (size_t)snprintf(text + used, sizeof text - used, "\n  %s", op_text(t, r, it, line));
            if (it->op && it->op->kind == OP_WAIT)
                for (uint32_t i = 0; i < it->op->count && used + 200 < sizeof text; i++) {
                    const op_post *p = &it->call->s->posts[it->op->first + i];
                    if (it->op->scope == SCOPE_RAIL)
                        used += (size_t)snprintf(
                            text + used, sizeof text - used, " [%d ctx %u sig %u: %u of %u]", p->rank, p->ctx, p->sig,
                            *arrivals(t, r, it->call->s->kind == SCHEDULE_RS, (uint32_t)p->rank, p->ctx, p->sig),
                            p->count);
                    else
                        used +=
                            (size_t)snprintf(text + used, sizeof text - used, " [%d resource %u.%u: %llu of %llu]",
                                             p->rank, it->op->resource, it->op->which,
                                             (unsigned long long)local_word(t, r, it->op, (uint32_t)p->rank)->value,
                                             (unsigned long long)(it->call->base[it->op->resource] + it->op->delta));
                }
        }
    return blocked ? interp_fail(t, "deadlock: %u streams are blocked for good:%.*s", blocked, (int)used, text) : 0;
}

int interp_run(interp *t)
{
    int status = 1;
    while (status == 1 && !t->error[0])
        status = step(t);
    if (t->error[0] || report_deadlock(t) != 0)
        return -1;
    for (uint32_t r = 0; r < t->n_ranks; r++)
        for (uint32_t i = 0; i < 2 * t->nodes * CTXS * SIG_COUNT; i++)
            if (t->ranks[r].arrived[i])
                return interp_fail(
                    t, "rank %u: %u rail signals from node %u (lane %u, ctx %u, sig %u) were never waited for", r,
                    t->ranks[r].arrived[i], i / (CTXS * SIG_COUNT) % t->nodes, i / (CTXS * SIG_COUNT * t->nodes),
                    i / SIG_COUNT % CTXS, i % SIG_COUNT);
    return 0;
}
