/* verify_access.c - what an operation reads and writes, and what the results have to be. */
#include <stdio.h>

#include "schedule/verify_internal.h"

/* ---- addresses -------------------------------------------------------------------------------------- */

enum target_kind { TARGET_OBJECT, TARGET_INPUT, TARGET_OUTPUT, TARGET_ZERO };
typedef struct target {
    int kind;
    object *first; /* OBJECT: `count` of them, one after the other (the local ranks of a node); OUTPUT: one */
    uint32_t count;
    uint32_t arg;    /* INPUT */
    uint64_t origin; /* INPUT: offset of the argument in the packed input */
    uint64_t base, limit; /* byte offset; bytes of the memory it lies in */
} target;

static bool forbidden(const actor *a, const char *what)
{
    if (verify_fresh(a->v, VERIFY_FORM, a->self, epoch_start)) {
        char name[160];
        verify_name(a->v, a->self, name);
        verify_line(a->v, VERIFY_FORM, "%s %s", name, what);
    }
    return false;
}

static bool resolve(const actor *a, const op_addr *p, bool rail_peer, target *t)
{
    verifier *v = a->v;
    const verify_input *in = v->in;
    const verify_contract *c = in->calls[a->call].contract;
    uint32_t node = a->rank / in->local, bank = p->bank, rank;

    *t = (target){.base = p->offset, .count = 1};
    if (p->space == SPACE_ZERO) {
        t->kind = TARGET_ZERO;
        t->limit = UINT64_MAX;
        return true;
    }
    if (p->space == SPACE_ARG) {
        if (p->who >= 0 && (uint32_t)p->who < c->n_inputs) {
            t->kind = TARGET_INPUT;
            t->arg = (uint32_t)p->who;
            t->limit = c->input_bytes[p->who];
            t->origin = c->input_offset ? c->input_offset[p->who] : 0;
            return true;
        }
        if (c->kind == VERIFY_RS && p->who >= 0 && (uint32_t)p->who == c->n_inputs) {
            t->kind = TARGET_OUTPUT;
            t->first = &a->cr->out;
            t->limit = t->first->bytes;
            return true;
        }
        return forbidden(a, "names an argument that the call does not have");
    }
    if (p->space != SPACE_REGION || p->region >= REGION_COUNT)
        return forbidden(a, "names an unknown space or region");
    if (p->who != WHO_NODE && (p->who < 0 || (uint32_t)p->who >= v->n_ranks))
        return forbidden(a, "names a rank that does not exist");
    rank = p->who == WHO_NODE ? node * in->local : (uint32_t)p->who;
    if (rank / in->local != node && !rail_peer)
        return forbidden(a, "reaches into another node without the rail");
    if (p->region == REGION_RESIDENT) {
        if (c->kind != VERIFY_AG || !c->adopted || p->who != (int32_t)a->rank)
            return forbidden(a, "touches resident shards that are not its input");
        t->kind = TARGET_INPUT;
        if (p->bank || p->offset < c->resident) { /* below the group's shards: out of bounds */
            t->base = 1;
            t->limit = 0;
            return true;
        }
        t->base = p->offset - c->resident;
        t->limit = c->packed;
        return true;
    }
    if (bank == BANK_CALL)
        bank = a->cr->parity;
    if (bank >= in->map->region[p->region].n_banks)
        return forbidden(a, "names a bank that does not exist");
    if (p->region == REGION_LANDING && in->shared_landing) {
        if (p->who != WHO_NODE && p->who != (int32_t)a->rank)
            return forbidden(a, "names a peer's landing where the node shares one");
        rank = node * in->local;
    } else if (p->who == WHO_NODE) {
        t->count = in->local;
    }
    t->kind = TARGET_OBJECT;
    t->first = &v->objects[v->first_object[p->region] + bank * v->n_ranks + rank];
    t->limit = t->first->bytes;
    return true;
}

/* All of rows x width bytes from t->base on lie within the memory. */
static bool in_bounds(const actor *a, const target *t, uint64_t rows, uint64_t width, uint64_t pitch, const char *does)
{
    uint64_t end;
    char name[160], where[64] = "an input";
    if (t->kind == TARGET_ZERO || (tide_mul(rows - 1, pitch, &end) && tide_add(end, width, &end) &&
                                   tide_add(end, t->base, &end) && end <= t->limit))
        return true;
    if (!verify_fresh(a->v, VERIFY_BOUNDS, a->self, epoch_start))
        return false;
    verify_name(a->v, a->self, name);
    if (t->first)
        object_name(a->v, t->first, where);
    verify_line(a->v, VERIFY_BOUNDS, "%s %s %llu rows of %llu bytes, pitch %llu, from byte %llu of %s, which has %llu",
                name, does, (unsigned long long)rows, (unsigned long long)width, (unsigned long long)pitch,
                (unsigned long long)t->base, where, (unsigned long long)t->limit);
    return false;
}

/* ---- reading and writing one span ------------------------------------------------------------------- */

static void read_input(actor *a, const target *t, uint64_t at, uint64_t bytes, pieces *out)
{
    verifier *v = a->v;
    call_rank *cr = a->cr;
    const verify_contract *c = v->in->calls[a->call].contract;
    value x = {.kind = VALUE_BYTES, .dtype = (uint8_t)c->in_dtype, .arg = (uint16_t)(c->kind == VERIFY_AG ? 0 : t->arg),
               .call = a->call, .who = a->rank, .off = t->origin + at};

    if (!verify_ordered(a, cr->in))
        verify_race(a, cr->in, false, true, "an input", at, at + bytes);
    if (cr->inputs_closed && verify_fresh(v, VERIFY_RACE, a->self, epoch_start)) {
        char name[160];
        verify_name(v, a->self, name);
        verify_line(v, VERIFY_RACE, "%s reads an input, but nothing makes the event that gives it back wait for that",
                    name);
    }
    cr->readers[a->self.chain - a->rank * v->per_rank] = a->self.at;
    v->result->accesses++;
    if (v->options->digest)
        v->result->digest += verify_mix(a->name + verify_mix(t->arg + 1)) * (bytes * (2 * at + bytes - 1) / 2) +
                             verify_mix(a->name) * bytes;
    pieces_add(v, out, bytes, x);
}

static void read_span(actor *a, const target *t, uint64_t at, uint64_t bytes, pieces *out)
{
    switch (t->kind) {
    case TARGET_ZERO:
        pieces_add(a->v, out, bytes, (value){.kind = VALUE_ZERO});
        break;
    case TARGET_INPUT:
        read_input(a, t, at, bytes, out);
        break;
    default:
        object_read(a, t->first, at, at + bytes, out);
    }
}

static void write_span(actor *a, const target *t, uint64_t at, const pieces *in)
{
    for (uint32_t i = 0; i < t->count; i++)
        object_write(a, t->first + i, at, in);
}

static void unwritten(actor *a, const target *t, uint64_t at, uint64_t bytes)
{
    char name[160], where[64] = "memory";
    if (!verify_fresh(a->v, VERIFY_UNWRITTEN, a->self, epoch_start))
        return;
    verify_name(a->v, a->self, name);
    if (t->first)
        object_name(a->v, t->first, where);
    verify_line(a->v, VERIFY_UNWRITTEN, "%s reads [%llu, %llu) of %s, which nobody has written", name,
                (unsigned long long)at, (unsigned long long)(at + bytes), where);
}

/* What leaves the outbox or a spare was made for this block: the rest of an older one would go along unnoticed. */
static void check_fresh(actor *a, const target *t, const op_addr *from, uint64_t at, uint64_t bytes)
{
    char name[160], where[64];
    if ((from->region != REGION_OUTBOX && from->region != REGION_SPARE) || t->kind != TARGET_OBJECT ||
        object_fresh(t->first, at, at + bytes) || !verify_fresh(a->v, VERIFY_UNWRITTEN, a->self, epoch_start))
        return;
    verify_name(a->v, a->self, name);
    object_name(a->v, t->first, where);
    verify_line(a->v, VERIFY_UNWRITTEN,
                "%s takes [%llu, %llu) of %s, of which nobody has written all since it was last read", name,
                (unsigned long long)at, (unsigned long long)(at + bytes), where);
}

/* All of what was just read from `at` on has been written. */
static void check_written(actor *a, const target *t, uint64_t at)
{
    for (uint32_t i = 0; i < a->v->read.n; i++) {
        if (a->v->read.items[i].v.kind == VALUE_NONE)
            unwritten(a, t, at, a->v->read.items[i].bytes);
        at += a->v->read.items[i].bytes;
    }
}

/* ---- COPY -------------------------------------------------------------------------------------------- */

/* A cast keeps which element it is and changes its size. */
static bool cast(actor *a, pieces *p, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < p->n; i++) {
        piece *x = &p->items[i];
        if (x->bytes % from || (x->v.kind != VALUE_BYTES && x->v.kind != VALUE_ZERO) ||
            (x->v.kind == VALUE_BYTES && (x->v.off % from || x->v.dtype != a->o->src_dtype)))
            return forbidden(a, x->v.kind == VALUE_NONE ? "casts bytes that nobody has written"
                                                        : "casts what is not whole elements of its source type");
        x->bytes = x->bytes / from * to;
        x->v.off = x->v.off / from * to;
        x->v.dtype = a->o->dst_dtype;
    }
    return true;
}

/* What lay in an inbox block before may be longer than what this call knows of: fills take whole blocks. */
static bool whole_blocks(actor *a, const op_run *r, const target *dst, uint64_t bytes)
{
    uint64_t stride = a->v->in->map->block_stride;
    if (r->dst.region != REGION_INBOX || (stride && dst->base % stride == 0 && bytes % stride == 0 && r->rows == 1))
        return true;
    return forbidden(a, "zeroes parts of inbox blocks");
}

void access_copy(actor *a)
{
    verifier *v = a->v;
    const op *o = a->o;
    uint32_t from = o->src_dtype == TIDE_OPAQUE ? 1 : tide_dtype_bytes(o->src_dtype);
    uint32_t to = o->dst_dtype == TIDE_OPAQUE ? 1 : tide_dtype_bytes(o->dst_dtype);
    bool casts = o->src_dtype != o->dst_dtype;

    if (!from || !to || (casts && (o->src_dtype == TIDE_OPAQUE || o->dst_dtype == TIDE_OPAQUE))) {
        forbidden(a, "copies items of unknown size");
        return;
    }
    for (uint32_t i = 0; i < o->count && v->status == TIDE_OK; i++) {
        const op_run *r = &a->s->runs[o->first + i];
        uint64_t rows = r->rows, src_bytes = r->width * from, dst_bytes = r->width * to;
        target src, dst;
        if (!r->rows || !r->width) {
            forbidden(a, "has an empty run");
            continue;
        }
        if (!resolve(a, &r->src, false, &src) || !resolve(a, &r->dst, false, &dst) ||
            !in_bounds(a, &src, rows, src_bytes, r->src_pitch, "reads") ||
            !in_bounds(a, &dst, rows, dst_bytes, r->dst_pitch, "writes"))
            continue;
        if (dst.kind != TARGET_OBJECT) {
            forbidden(a, "copies to what is not the library's memory");
            continue;
        }
        if (r->dst.region == REGION_LANDING && v->in->shared_landing && r->dst.who != WHO_NODE) {
            forbidden(a, "writes one rank's landing where the node shares one");
            continue;
        }
        if (src.kind == TARGET_ZERO && !whole_blocks(a, r, &dst, dst_bytes))
            continue;
        if ((src.kind == TARGET_ZERO || r->src_pitch == src_bytes) && r->dst_pitch == dst_bytes) {
            src_bytes *= rows;
            dst_bytes *= rows;
            rows = 1;
        }
        for (uint64_t row = 0; row < rows; row++) {
            v->read.n = 0;
            check_fresh(a, &src, &r->src, src.base + row * r->src_pitch, src_bytes);
            read_span(a, &src, src.base + row * r->src_pitch, src_bytes, &v->read);
            check_written(a, &src, src.base + row * r->src_pitch);
            if (casts && !cast(a, &v->read, from, to))
                break;
            write_span(a, &dst, dst.base + row * r->dst_pitch, &v->read);
        }
    }
}

/* ---- PUT ----------------------------------------------------------------------------------------------- */

void access_put(actor *a, const op_put *put)
{
    verifier *v = a->v;
    target src, dst;
    uint32_t write = a->put;

    if (put->src.space != SPACE_REGION || put->dst.space != SPACE_REGION) {
        forbidden(a, "puts from or to memory that is not registered: an argument");
        return;
    }
    if (put->src.who != (int32_t)a->rank || put->dst.who != put->peer || !put->bytes) {
        forbidden(a, "puts something other than own bytes into its peer's memory");
        return;
    }
    if (!resolve(a, &put->src, false, &src) || !resolve(a, &put->dst, true, &dst) ||
        !in_bounds(a, &src, 1, put->bytes, 0, "reads") || !in_bounds(a, &dst, 1, put->bytes, 0, "writes"))
        return;
    if (dst.kind != TARGET_OBJECT) {
        forbidden(a, "puts into an input");
        return;
    }
    v->read.n = 0;
    a->put = 0; /* its source is read when the stream passes it */
    check_fresh(a, &src, &put->src, src.base, put->bytes);
    read_span(a, &src, src.base, put->bytes, &v->read);
    a->put = write;
    check_written(a, &src, src.base);
    write_span(a, &dst, dst.base, &v->read);
}

/* ---- REDUCE -------------------------------------------------------------------------------------------- */

static void bad_sum(actor *a, const char *why, value x, value y)
{
    char name[160], first[128], second[128];
    if (!verify_fresh(a->v, VERIFY_SUM, a->self, epoch_start))
        return;
    verify_name(a->v, a->self, name);
    value_name(a->v, x, first);
    value_name(a->v, y, second);
    verify_line(a->v, VERIFY_SUM, "%s %s: %s and %s", name, why, first, second);
}

/* What was read as `dtype`, as sums of fp32; lengths become bytes of fp32. */
static void to_sums(actor *a, pieces *p, int dtype, const target *t, uint64_t at)
{
    uint32_t item = tide_dtype_bytes(dtype);
    for (uint32_t i = 0; i < p->n; i++) {
        piece *x = &p->items[i];
        uint64_t bytes = x->bytes;
        if (bytes % item || ((x->v.kind == VALUE_BYTES || x->v.kind == VALUE_SUM) && x->v.off % item)) {
            bad_sum(a, "adds what is not whole elements", x->v, x->v);
            x->v = (value){.kind = VALUE_ZERO};
        } else if (x->v.kind == VALUE_BYTES) {
            if (x->v.dtype != dtype || a->v->in->calls[x->v.call].contract->kind == VERIFY_AG)
                bad_sum(a, "adds as another type than it is", x->v, x->v);
            x->v.kind = VALUE_SUM;
            x->v.dtype = TIDE_F32;
            x->v.off = x->v.off / item * 4;
            x->v.who = sets_single(a->v, x->v.who);
        } else if (x->v.kind == VALUE_NONE) {
            unwritten(a, t, at, bytes);
            x->v = (value){.kind = VALUE_ZERO};
        } else if (x->v.kind == VALUE_OUT || x->v.kind == VALUE_PRIOR ||
                   (x->v.kind == VALUE_SUM && dtype != TIDE_F32)) {
            bad_sum(a, "adds as another type than it is", x->v, x->v);
            x->v = (value){.kind = VALUE_ZERO};
        }
        x->bytes = bytes / item * 4;
        at += bytes;
    }
}

static value add(actor *a, value x, value y)
{
    int32_t twice;
    uint32_t set;
    if (y.kind == VALUE_ZERO)
        return x;
    if (x.kind == VALUE_ZERO)
        return y;
    if (x.kind == VALUE_OUT && x.arg == ARG_NOTHING) {
        y.kind = VALUE_OUT;
        return y;
    }
    if (x.call != y.call || x.arg != y.arg || x.off != y.off) {
        bad_sum(a, "adds different elements", x, y);
        return x;
    }
    set = sets_union(a->v, x.who, y.who, &twice);
    if (twice >= 0 && verify_fresh(a->v, VERIFY_SUM, a->self, epoch_start)) {
        char name[160], what[128];
        verify_name(a->v, a->self, name);
        value_name(a->v, y, what);
        verify_line(a->v, VERIFY_SUM, "%s adds %s, where rank %d's contribution is already in", name, what, twice);
    }
    x.who = set;
    return x;
}

/* *out = x + y, element by element; both cover the same bytes. */
static void add_pieces(actor *a, const pieces *x, const pieces *y, pieces *out)
{
    uint32_t i = 0, k = 0;
    uint64_t skip_x = 0, skip_y = 0;
    out->n = 0;
    while (i < x->n && k < y->n) {
        uint64_t bytes = tide_min_u64(x->items[i].bytes - skip_x, y->items[k].bytes - skip_y);
        pieces_add(a->v, out, bytes, add(a, value_shift(x->items[i].v, skip_x), value_shift(y->items[k].v, skip_y)));
        skip_x += bytes;
        skip_y += bytes;
        if (skip_x == x->items[i].bytes)
            skip_x = 0, i++;
        if (skip_y == y->items[k].bytes)
            skip_y = 0, k++;
    }
}

static void swap_pieces(pieces *a, pieces *b)
{
    pieces t = *a;
    *a = *b;
    *b = t;
}

/* v->fold = the sum of `row` over all sources of the segment. */
static bool fold_row(actor *a, const op_segment *g, uint64_t row)
{
    verifier *v = a->v;
    bool first = true;
    v->fold.n = 0;
    for (uint32_t k = 0; k < g->n_sets; k++) {
        const op_sources *set = &g->source[k];
        uint64_t bytes = g->elems * tide_dtype_bytes(set->dtype);
        if (!bytes || !set->count)
            return forbidden(a, "has a source without a type, or no source");
        for (uint32_t i = 0; i < set->count; i++) {
            op_addr at = set->at;
            target t, one;
            at.offset += i * set->step + row * set->row_pitch;
            if (at.space == SPACE_REGION && at.who != WHO_NODE)
                at.who += (int32_t)(i * set->rank_step);
            if (!resolve(a, &at, false, &t) || !in_bounds(a, &t, 1, bytes, 0, "reads"))
                return false;
            if (at.who == WHO_NODE && at.space == SPACE_REGION && set->count > 1 && set->count != v->in->local)
                return forbidden(a, "reads a node's memories in another number than there are");
            one = t;
            for (uint32_t j = 0; j < t.count; j++) {
                if (t.first)
                    one.first = t.first + j;
                v->read.n = 0;
                check_fresh(a, &one, &at, t.base, bytes);
                read_span(a, &one, t.base, bytes, &v->read);
                to_sums(a, &v->read, set->dtype, &one, t.base);
                if (first)
                    swap_pieces(&v->read, &v->fold);
                else
                    add_pieces(a, &v->fold, &v->read, &v->next), swap_pieces(&v->fold, &v->next);
                first = false;
            }
            if (at.who == WHO_NODE && at.space == SPACE_REGION)
                break; /* one multimem read covers the set */
        }
    }
    if (first) {
        value x = {.kind = VALUE_SUM,
                   .dtype = TIDE_F32,
                   .arg = ARG_PADDING,
                   .call = a->call,
                   .off = g->dst.offset + row * g->dst_pitch};
        if (g->dst.space == SPACE_REGION && v->in->map->block_stride)
            x.off %= v->in->map->block_stride;
        pieces_add(v, &v->fold, g->elems * 4, x);
    }
    return true;
}

/* v->fold becomes beta(dst) + alpha * fold. */
static bool finish_row(actor *a, const target *dst, uint64_t at, uint64_t bytes)
{
    verifier *v = a->v;
    const op *o = a->o;
    if (!(o->flags & (OP_BETA_CALL | OP_BETA_ONE)) || (o->flags & OP_BETA_CALL && o->flags & OP_BETA_ONE))
        return forbidden(a, "finishes an output without saying whether it starts or continues it");
    v->read.n = 0;
    object_peek(v, dst->first, at, at + bytes, &v->read);
    for (uint32_t i = 0; i < v->read.n; i++) {
        piece *x = &v->read.items[i];
        if (x->v.kind != (o->flags & OP_BETA_CALL ? VALUE_PRIOR : VALUE_OUT)) {
            bad_sum(
                a, o->flags & OP_BETA_CALL ? "starts an output that is begun" : "continues an output that is not begun",
                x->v, x->v);
            return false;
        }
        if (o->flags & OP_BETA_CALL)
            x->v = (value){.kind = VALUE_OUT, .dtype = TIDE_F32, .arg = ARG_NOTHING};
    }
    add_pieces(a, &v->read, &v->fold, &v->next);
    swap_pieces(&v->fold, &v->next);
    return true;
}

void access_reduce(actor *a)
{
    verifier *v = a->v;
    const op *o = a->o;
    for (uint32_t i = 0; i < o->count && v->status == TIDE_OK; i++) {
        const op_segment *g = &a->s->segments[o->first + i];
        target dst;
        if (!g->rows || !g->elems || g->n_sets > 2) {
            forbidden(a, "has an empty segment");
            continue;
        }
        if (!resolve(a, &g->dst, false, &dst) || !in_bounds(a, &dst, g->rows, g->elems * 4, g->dst_pitch, "writes"))
            continue;
        if (g->dst.who == WHO_NODE || dst.kind != (o->flags & OP_FINAL ? TARGET_OUTPUT : TARGET_OBJECT)) {
            forbidden(a, o->flags & OP_FINAL ? "finishes what is not an output"
                                             : "writes a partial sum where none belongs");
            continue;
        }
        if (dst.kind == TARGET_OUTPUT) {
            if (!verify_ordered(a, a->cr->in))
                verify_race(a, a->cr->in, true, true, "an output", dst.base, dst.base + g->elems * 4);
            if (a->cr->out_closed && verify_fresh(v, VERIFY_RACE, a->self, epoch_start)) {
                char name[160];
                verify_name(v, a->self, name);
                verify_line(v, VERIFY_RACE, "%s writes the output, but nothing makes DONE wait for that", name);
            }
        }
        for (uint64_t row = 0; row < g->rows; row++) {
            uint64_t at = dst.base + row * g->dst_pitch, bytes = g->elems * 4;
            if (!fold_row(a, g, row) || (o->flags & OP_FINAL && !finish_row(a, &dst, at, bytes)))
                break;
            write_span(a, &dst, at, &v->fold);
        }
    }
}

/* ---- results --------------------------------------------------------------------------------------------- */

static void wrong(actor *a, const object *o, uint64_t at, value is, value expected, int class)
{
    char name[160], where[64], holds[128], wants[128];
    if (!verify_fresh(a->v, class, a->self, epoch_start))
        return;
    verify_name(a->v, a->self, name);
    object_name(a->v, o, where);
    value_name(a->v, is, holds);
    value_name(a->v, expected, wants);
    verify_line(a->v, class, "%s: byte %llu of %s holds %s, expected %s", name, (unsigned long long)at, where, holds,
                wants);
}

/* [at, at + bytes) of o, as just read, equals `expected` and what follows it. */
static bool matches(actor *a, const object *o, uint64_t at, const pieces *p, value expected, int class)
{
    for (uint32_t i = 0; i < p->n; i++) {
        value is = p->items[i].v;
        bool same = is.kind == expected.kind && is.who == expected.who &&
                    (!(is.kind == VALUE_BYTES || is.who) ||
                     (is.call == expected.call && is.arg == expected.arg && is.off == expected.off)) &&
                    (is.kind != VALUE_BYTES || is.dtype == expected.dtype);
        if (!same) {
            wrong(a, o, at, is, expected, class);
            return false;
        }
        at += p->items[i].bytes;
        expected = value_shift(expected, p->items[i].bytes);
    }
    return true;
}

void access_landing(actor *a)
{
    verifier *v = a->v;
    const verify_contract *c = v->in->calls[a->call].contract;
    uint32_t rank = v->in->shared_landing ? a->rank / v->in->local * v->in->local : a->rank;
    object *o = &v->objects[v->first_object[REGION_LANDING] + c->slot * v->n_ranks + rank];

    for (uint32_t i = 0; i < c->n_spans && v->status == TIDE_OK; i++) {
        const verify_span *s = &c->spans[i];
        for (uint64_t row = 0; row < s->rows; row++) {
            uint64_t at = s->at + row * s->at_pitch;
            value expected = {.kind = VALUE_BYTES, .dtype = (uint8_t)c->out_dtype, .call = a->call, .who = s->source,
                              .off = s->from + row * s->from_pitch};
            if (at + s->width > o->bytes) {
                wrong(a, o, at, (value){.kind = VALUE_NONE}, expected, VERIFY_CONTENT);
                return;
            }
            v->read.n = 0;
            object_read(a, o, at, at + s->width, &v->read);
            if (!matches(a, o, at, &v->read, expected, VERIFY_CONTENT))
                return;
        }
    }
}

static bool padding(actor *a, object *o, uint64_t lo, uint64_t hi)
{
    value expected = {.kind = VALUE_OUT};
    if (lo >= hi)
        return true;
    a->v->read.n = 0;
    object_read(a, o, lo, hi, &a->v->read);
    return matches(a, o, lo, &a->v->read, expected, VERIFY_SUM);
}

void access_output(actor *a)
{
    verifier *v = a->v;
    const verify_call *call = &v->in->calls[a->call];
    const verify_contract *c = call->contract;
    object *o = &a->cr->out;
    uint64_t cursor = 0;

    a->cr->out_closed = true;
    for (uint32_t i = c->first_span[a->rank]; i < c->first_span[a->rank + 1] && v->status == TIDE_OK; i++) {
        const verify_span *s = &c->spans[i];
        for (uint64_t row = 0; row < s->rows; row++) {
            uint64_t at = 4 * (s->at + row * s->at_pitch), bytes = 4 * s->width;
            value expected = {.kind = VALUE_OUT, .arg = (uint16_t)s->source, .call = call->source, .who = sets_all(v),
                              .off = 4 * (s->from + row * s->from_pitch)};
            if (at < cursor || at + bytes > o->bytes) {
                wrong(a, o, at, (value){.kind = VALUE_NONE}, expected, VERIFY_SUM);
                return;
            }
            if (!padding(a, o, cursor, at))
                return;
            v->read.n = 0;
            object_read(a, o, at, at + bytes, &v->read);
            if (!matches(a, o, at, &v->read, expected, VERIFY_SUM))
                return;
            cursor = at + bytes;
        }
    }
    padding(a, o, cursor, o->bytes);
}

void access_close_inputs(actor *a, const char *event)
{
    verifier *v = a->v;
    uint32_t base = a->rank * v->per_rank;
    a->cr->inputs_closed = true;
    for (uint32_t i = 0; i < v->per_rank; i++) {
        epoch reader = {base + i, a->cr->readers[i]};
        if (reader.at && reader.chain != a->self.chain && a->clock[reader.chain] < reader.at &&
            verify_fresh(v, VERIFY_RACE, a->self, reader)) {
            char mine[160], other[160];
            verify_name(v, a->self, mine);
            verify_name(v, reader, other);
            verify_line(v, VERIFY_RACE, "%s says %s, but no path leads to it from %s, which reads an input", mine,
                        event, other);
        }
    }
}
