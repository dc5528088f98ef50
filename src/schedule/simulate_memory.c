/*
 * simulate_memory.c - memory over time, as counters of a trace: what holds data, by region, and gradients.
 *
 * A unit (a landing slot, a staging slot, a block, a stage slot) is in use from the first write to the last access before it
 * is written anew. A landing slot is read by the caller's compute, which no operation shows: it is in use until it is
 * released. Adopted shards are the parameters themselves and are left out.
 */
#include <stdlib.h>

#include "schedule/simulate_internal.h"

enum { CLASS_GRADIENTS = REGION_COUNT, CLASS_COUNT };
enum { ACCESS_READ, ACCESS_WRITE, ACCESS_RELEASE };

/* key: rank as simulated, region, bank, number of the unit; room: bytes of a unit. */
typedef struct access { uint64_t key, room, order; sim_time begin, end; double bytes; int kind; } access;
typedef struct edge { uint32_t index, class; sim_time at; int64_t change; } edge;
typedef struct trace_memory {
    const simulation *s;
    access *accesses;
    edge *edges;
    uint32_t n_accesses, cap_accesses, n_edges, cap_edges;
    int status;
} trace_memory;

static uint32_t key_index(uint64_t key) { return (uint32_t)(key >> 47); }
static uint32_t key_region(uint64_t key) { return (uint32_t)(key >> 44 & 7); }

static void note(trace_memory *t, uint32_t index, uint32_t region, uint32_t bank, uint64_t number, access a)
{
    if (t->status == TIDE_OK)
        t->status = tide_grow(&t->accesses, &t->cap_accesses, (uint64_t)t->n_accesses + 1, sizeof *t->accesses);
    if (t->status != TIDE_OK)
        return;
    a.key = (uint64_t)index << 47 | (uint64_t)region << 44 | (uint64_t)bank << 28 | number;
    a.order = t->n_accesses;
    t->accesses[t->n_accesses++] = a;
}

/* Bytes of a unit of a region. */
static uint64_t unit_bytes(const tide_plan *plan, uint32_t group, uint32_t region, uint32_t bank)
{
    switch (region) {
    case REGION_STAGE:
        return plan->groups[group].geo.shard_bytes;
    case REGION_OUTBOX:
    case REGION_SPARE:
    case REGION_INBOX:
        return plan->map.block_stride;
    default:
        return plan->map.region[region].banks[bank].bytes;
    }
}

/* `extent` bytes from an address on, `bytes` of them touched, on the rank or ranks where it is. */
static void touch(trace_memory *t, const sim_instance *x, const op_addr *at, uint64_t extent, double bytes, int kind)
{
    const simulation *s = t->s;
    uint32_t index = x->chain / s->per_rank, rank = sim_rank_of(s, index), group = s->in->calls[x->call].group, bank = at->bank;
    bool node = at->who == WHO_NODE;
    uint32_t first_rank = node ? rank / s->local * s->local : (uint32_t)at->who, n = node && !s->mirror ? s->local : 1;
    uint64_t room, first, last;
    access a = {.begin = x->start, .end = x->end, .kind = kind};

    if (at->space != SPACE_REGION || at->region == REGION_RESIDENT || extent == 0)
        return;
    if (bank == BANK_CALL)
        bank = s->calls[x->call * (uint64_t)s->n_ranks + index].parity;
    a.room = room = unit_bytes(s->in->plan, group, at->region, bank);
    if (room == 0)
        return;
    first = at->offset / room;
    last = (at->offset + extent - 1) / room;
    a.bytes = bytes / (double)(last - first + 1);
    if (node && s->mirror)
        a.bytes *= s->local; /* what all ranks of the node write there */
    for (uint32_t i = 0; i < n; i++)
        for (uint64_t u = first; u <= last; u++)
            note(t, sim_index(s, first_rank + i), at->region, bank, u, a);
}

static uint64_t extent_of(uint64_t rows, uint64_t pitch, uint64_t row)
{
    return rows && row ? (rows - 1) * pitch + row : 0;
}

static uint64_t item_bytes(int dtype) { return dtype == TIDE_OPAQUE ? 1 : tide_dtype_bytes(dtype); }

static void touch_copy(trace_memory *t, const sim_instance *x, const op *o, const op_run *r)
{
    uint64_t in = r->width * item_bytes(o->src_dtype), out = r->width * item_bytes(o->dst_dtype);
    touch(t, x, &r->src, extent_of(r->rows, r->src_pitch, in), (double)(in * r->rows), ACCESS_READ);
    touch(t, x, &r->dst, extent_of(r->rows, r->dst_pitch, out), (double)(out * r->rows), ACCESS_WRITE);
}

static void touch_reduce(trace_memory *t, const sim_instance *x, const op_segment *g)
{
    for (uint32_t k = 0; k < g->n_sets; k++) {
        const op_sources *q = &g->source[k];
        for (uint32_t i = 0; i < (q->at.who == WHO_NODE ? 1 : q->count); i++) {
            uint64_t row = g->elems * item_bytes(q->dtype);
            op_addr at = q->at;
            at.offset += i * q->step;
            if (at.who != WHO_NODE)
                at.who += (int32_t)(i * q->rank_step);
            touch(t, x, &at, extent_of(g->rows, q->row_pitch, row), (double)(row * g->rows), ACCESS_READ);
        }
    }
    touch(t, x, &g->dst, extent_of(g->rows, g->dst_pitch, g->elems * sizeof(float)),
          (double)(g->elems * sizeof(float) * g->rows), ACCESS_WRITE);
}

static void touch_all(trace_memory *t)
{
    const simulation *s = t->s;
    for (uint32_t n = 0; n < s->n_instances; n++) {
        const sim_instance *x = &s->instances[n];
        const schedule *list;
        const op *o;
        if (x->op == SIM_TASK_OP)
            continue;
        list = sim_list(s, x->call, x->chain / s->per_rank);
        o = &list->ops[x->op];
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            if (o->kind == OP_COPY)
                touch_copy(t, x, o, &list->runs[i]);
            else if (o->kind == OP_REDUCE)
                touch_reduce(t, x, &list->segments[i]);
            else if (o->kind == OP_PUT) {
                touch(t, x, &list->puts[i].src, list->puts[i].bytes, (double)list->puts[i].bytes, ACCESS_READ);
                touch(t, x, &list->puts[i].dst, list->puts[i].bytes, (double)list->puts[i].bytes, ACCESS_WRITE);
            }
        }
    }
    for (uint32_t i = 0; i < s->n_releases; i++) {
        const sim_release *r = &s->releases[i];
        sim_time at = r->record ? s->instances[s->records[r->record - 1].instance].end : 0;
        note(t, r->index, REGION_LANDING, r->slot, 0, (access){.begin = at, .end = at, .kind = ACCESS_RELEASE});
    }
}

/* ---- from accesses to times in use ------------------------------------------------------------------ */

static int by_unit_and_time(const void *a, const void *b)
{
    const access *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->order < y->order ? -1 : 1;
}

static int by_rank_and_time(const void *a, const void *b)
{
    const edge *x = a, *y = b;
    if (x->index != y->index)
        return x->index < y->index ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* end SIM_NEVER: still in use when the simulation ends. */
static void in_use(trace_memory *t, uint32_t index, uint32_t class, sim_time begin, sim_time end, uint64_t bytes)
{
    if (t->status == TIDE_OK)
        t->status = tide_grow(&t->edges, &t->cap_edges, (uint64_t)t->n_edges + 2, sizeof *t->edges);
    if (t->status != TIDE_OK || begin >= end || bytes == 0)
        return;
    t->edges[t->n_edges++] = (edge){index, class, begin, (int64_t)bytes};
    if (end != SIM_NEVER)
        t->edges[t->n_edges++] = (edge){index, class, end, -(int64_t)bytes};
}

/* One unit's accesses, in order of their begin. */
static void unit_times(trace_memory *t, const access *a, uint32_t n)
{
    bool landing = key_region(a->key) == REGION_LANDING, open = false, read = false;
    sim_time begin = 0, end = 0;
    double bytes = 0;

    for (uint32_t i = 0; i <= n; i++) {
        bool over = i == n || a[i].kind == ACCESS_RELEASE || (a[i].kind == ACCESS_WRITE && read);
        if (open && over) {
            if (i < n && a[i].kind == ACCESS_RELEASE)
                end = a[i].end > end ? a[i].end : end;
            else if (landing && !read)
                end = SIM_NEVER; /* never released */
            in_use(t, key_index(a->key), key_region(a->key), begin, end,
                   bytes < (double)a->room ? (uint64_t)(bytes + 0.5) : a->room);
            open = false;
        }
        if (i == n || a[i].kind == ACCESS_RELEASE || (!open && a[i].kind == ACCESS_READ))
            continue;
        if (!open) {
            open = true;
            read = false;
            begin = end = a[i].begin;
            bytes = 0;
        }
        read = read || a[i].kind == ACCESS_READ;
        end = a[i].end > end ? a[i].end : end;
        bytes += a[i].kind == ACCESS_WRITE ? a[i].bytes : 0;
    }
}

static sim_time gone(const simulation *s, uint32_t index, const simulate_after *until)
{
    const sim_call_state *cs = &s->calls[until->index * (uint64_t)s->n_ranks + index];
    uint32_t record = until->event == AFTER_TASK    ? s->task_records[until->index * (uint64_t)s->n_ranks + index]
                      : until->event == AFTER_READY ? cs->ready
                      : until->event == AFTER_DONE  ? cs->done
                                                    : cs->read_done;
    return until->event == AFTER_NOTHING || !record ? SIM_NEVER : s->instances[s->records[record - 1].instance].end;
}

static void gradients(trace_memory *t)
{
    const simulation *s = t->s;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        for (uint32_t k = 0; k < s->in->n_gradients; k++) {
            const simulate_gradients *g = &s->in->gradients[k];
            uint32_t record = s->task_records[g->task * (uint64_t)s->n_ranks + i];
            in_use(t, i, CLASS_GRADIENTS, s->instances[s->records[record - 1].instance].start, gone(s, i, &g->until),
                   g->bytes);
        }
    }
}

static void put_counters(const trace_memory *t, tide_text *out)
{
    int64_t level[CLASS_COUNT] = {0};
    for (uint32_t i = 0; i < t->n_edges; i++) {
        const edge *e = &t->edges[i];
        bool last = i + 1 == t->n_edges || e[1].index != e->index;
        level[e->class] += e->change;
        if (!last && e[1].at == e->at)
            continue;
        tide_text_put(out, ",\n{\"ph\": \"C\", \"name\": \"memory\", \"pid\": %u, \"ts\": %.6f, \"args\": {",
                      sim_rank_of(t->s, e->index), (double)e->at / 1e6);
        for (int k = 0, n = 0; k < CLASS_COUNT; k++)
            if (k != REGION_RESIDENT)
                tide_text_put(out, "%s\"%s\": %lld", n++ ? ", " : "",
                              k == CLASS_GRADIENTS ? "gradients" : plan_region_name(k), (long long)level[k]);
        tide_text_put(out, "}}");
        for (int k = 0; last && k < CLASS_COUNT; k++)
            level[k] = 0;
    }
}

int memory_trace(const simulation *s, tide_text *out)
{
    trace_memory t = {.s = s};

    touch_all(&t);
    if (t.status == TIDE_OK && t.n_accesses)
        qsort(t.accesses, t.n_accesses, sizeof *t.accesses, by_unit_and_time);
    for (uint32_t i = 0, n; t.status == TIDE_OK && i < t.n_accesses; i += n) {
        for (n = 1; i + n < t.n_accesses && t.accesses[i + n].key == t.accesses[i].key; n++)
            ;
        unit_times(&t, &t.accesses[i], n);
    }
    gradients(&t);
    if (t.status == TIDE_OK && t.n_edges)
        qsort(t.edges, t.n_edges, sizeof *t.edges, by_rank_and_time);
    if (t.status == TIDE_OK)
        put_counters(&t, out);
    tide_free(t.accesses);
    tide_free(t.edges);
    return t.status;
}
