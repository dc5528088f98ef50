/* verify_memory.c - symbolic memory: interval maps with access histories, and interned sets of ranks. */
#include <stdio.h>

#include "schedule/verify_internal.h"

/* ---- values --------------------------------------------------------------------------------------- */

value value_shift(value x, uint64_t bytes)
{
    if (x.kind >= VALUE_BYTES)
        x.off += bytes;
    return x;
}

static bool value_continues(value a, uint64_t bytes, value b)
{
    a = value_shift(a, bytes);
    return a.kind == b.kind && a.dtype == b.dtype && a.arg == b.arg && a.call == b.call && a.who == b.who &&
           a.off == b.off;
}

void value_name(const verifier *v, value x, char out[128])
{
    uint32_t ranks = 0;
    switch (x.kind) {
    case VALUE_NONE:
        snprintf(out, 128, "nothing");
        return;
    case VALUE_ZERO:
        snprintf(out, 128, "zero");
        return;
    case VALUE_PRIOR:
        snprintf(out, 128, "the caller's prior value");
        return;
    case VALUE_BYTES:
        snprintf(out, 128, "byte %llu of input %u of rank %u in call %u (%s)", (unsigned long long)x.off, x.arg, x.who,
                 x.call, tide_dtype_name(x.dtype));
        return;
    default:
        if (!x.who) {
            snprintf(out, 128, "%spadding", x.kind == VALUE_OUT ? "output " : "");
            return;
        }
        for (uint32_t r = 0; r < v->n_ranks; r++)
            ranks += sets_has(v, x.who, r);
        snprintf(out, 128, "%selement %llu of gradient %u of call %u from %u ranks",
                 x.kind == VALUE_OUT ? "output " : "", (unsigned long long)x.off / 4, x.arg, x.call, ranks);
    }
}

void pieces_add(verifier *v, pieces *p, uint64_t bytes, value x)
{
    if (p->n && value_continues(p->items[p->n - 1].v, p->items[p->n - 1].bytes, x)) {
        p->items[p->n - 1].bytes += bytes;
        return;
    }
    if (tide_grow(&p->items, &p->capacity, (uint64_t)p->n + 1, sizeof *p->items) != TIDE_OK) {
        v->status = TIDE_ERR_MEMORY;
        return;
    }
    p->items[p->n].bytes = bytes;
    p->items[p->n++].v = x;
}

/* ---- interval map: leaves of at most LEAF segments, in address order ------------------------------- */

int object_init(object *o, uint64_t bytes, value v, epoch writer)
{
    memset(o, 0, sizeof *o);
    o->bytes = bytes;
    if (!bytes)
        return TIDE_OK;
    if (tide_grow(&o->leaves, &o->capacity, 1, sizeof *o->leaves) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    o->leaves[0] = (leaf_ref){0, tide_calloc(1, sizeof(leaf))};
    if (!o->leaves[0].l)
        return TIDE_ERR_MEMORY;
    o->n = 1;
    o->leaves[0].l->n = 1;
    o->leaves[0].l->item[0] = (segment_state){.hi = bytes, .writer = writer, .reader = epoch_start, .v = v};
    return TIDE_OK;
}

void object_clear(object *o)
{
    for (uint32_t i = 0; i < o->n; i++)
        tide_free(o->leaves[i].l);
    tide_free(o->leaves);
    memset(o, 0, sizeof *o);
}

/* A place in an object: leaf and index in it. */
typedef struct cursor {
    leaf *l;
    uint32_t k, i;
} cursor;

static cursor cursor_next(const object *o, cursor c)
{
    if (++c.i == c.l->n && c.k + 1 < o->n) {
        c.l = o->leaves[++c.k].l;
        c.i = 0;
    }
    return c;
}

static bool within(const leaf *l, uint32_t i, uint64_t at)
{
    return i < l->n && l->item[i].lo <= at && at < l->item[i].hi;
}

/* The segment that contains `at` (< bytes). Accesses mostly go upwards: the one found last and the next are looked at
 * first. */
static cursor object_find(object *o, uint64_t at)
{
    uint32_t lo = 0, hi = o->n, n;
    cursor c;
    if (o->hint < o->n) {
        c = (cursor){o->leaves[o->hint].l, o->hint, 0};
        for (uint32_t i = o->hint_item; i < o->hint_item + 2; i++) {
            if (within(c.l, i, at)) {
                c.i = o->hint_item = i;
                return c;
            }
        }
        if (c.l->item[0].lo <= at && at < c.l->item[c.l->n - 1].hi)
            goto found;
        if (c.l->item[0].lo <= at)
            lo = o->hint;
        else
            hi = o->hint;
    }
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (o->leaves[mid].lo <= at)
            lo = mid;
        else
            hi = mid;
    }
    c = (cursor){o->leaves[lo].l, lo, 0};
found:
    o->hint = c.k;
    for (n = c.l->n; n > 1;) {
        uint32_t half = n / 2;
        if (c.l->item[c.i + half].lo <= at)
            c.i += half, n -= half;
        else
            n = half;
    }
    o->hint_item = c.i;
    return c;
}

static uint32_t readers_copy(verifier *v, uint32_t from)
{
    uint32_t copy = 0;
    for (; from; from = v->readers[from].next) {
        uint32_t node = v->free_readers;
        if (node) {
            v->free_readers = v->readers[node].next;
        } else {
            if (tide_grow(&v->readers, &v->cap_readers, (uint64_t)v->n_readers + 1, sizeof *v->readers) != TIDE_OK) {
                v->status = TIDE_ERR_MEMORY;
                return copy;
            }
            node = v->n_readers++;
        }
        v->readers[node].at = v->readers[from].at;
        v->readers[node].next = copy;
        copy = node;
    }
    return copy;
}

static void readers_free(verifier *v, uint32_t node)
{
    while (node) {
        uint32_t next = v->readers[node].next;
        v->readers[node].next = v->free_readers;
        v->free_readers = node;
        node = next;
    }
}

/* Cuts the segment at c in two at `at`; *c becomes the second. */
static void object_cut(verifier *v, object *o, cursor *c, uint64_t at)
{
    segment_state *s;
    if (c->l->n == LEAF) {
        leaf *l = c->l, *right = tide_calloc(1, sizeof *right);
        if (!right || tide_grow(&o->leaves, &o->capacity, (uint64_t)o->n + 1, sizeof *o->leaves) != TIDE_OK) {
            tide_free(right);
            v->status = TIDE_ERR_MEMORY;
            return;
        }
        memmove(o->leaves + c->k + 2, o->leaves + c->k + 1, (o->n - c->k - 1) * sizeof *o->leaves);
        o->n++;
        right->n = LEAF / 2;
        l->n = LEAF - LEAF / 2;
        memcpy(right->item, l->item + l->n, right->n * sizeof *right->item);
        o->leaves[c->k + 1] = (leaf_ref){right->item[0].lo, right};
        if (c->i >= l->n)
            *c = (cursor){right, c->k + 1, c->i - l->n};
    }
    s = &c->l->item[c->i];
    memmove(s + 1, s, (c->l->n - c->i) * sizeof *s);
    c->l->n++;
    s[0].hi = at;
    s[1].lo = at;
    s[1].more = readers_copy(v, s[0].more);
    s[1].v = value_shift(s[0].v, at - s[0].lo);
    c->i++;
}

/* The segment that begins at lo, cut out when need be. */
static cursor object_begin(verifier *v, object *o, uint64_t lo)
{
    cursor c = object_find(o, lo);
    if (c.l->item[c.i].lo < lo)
        object_cut(v, o, &c, lo);
    return c;
}

/* The segment at c, cut so that it does not pass `hi`; NULL when out of memory. */
static segment_state *object_within(verifier *v, object *o, cursor *c, uint64_t hi)
{
    if (c->l->item[c->i].hi > hi) {
        cursor rest = *c;
        object_cut(v, o, &rest, hi);
        if (v->status != TIDE_OK)
            return NULL;
        *c = (cursor){rest.l, rest.k, rest.i - 1}; /* both halves are in one leaf */
    }
    return &c->l->item[c->i];
}

void object_name(const verifier *v, const object *o, char out[64])
{
    if (o >= v->objects && o < v->objects + v->first_object[REGION_COUNT]) {
        uint32_t index = (uint32_t)(o - v->objects), region = 0;
        static const char *const names[] = {"landing", "resident", "stage", "staging", "outbox", "spare", "inbox"};
        while (index >= v->first_object[region + 1])
            region++;
        index -= v->first_object[region];
        snprintf(out, 64, "%s[%u] of rank %u", names[region], index / v->n_ranks, index % v->n_ranks);
        return;
    }
    for (uint32_t i = 0; i < v->in->n_calls * v->n_ranks; i++) {
        if (o == &v->calls[i].out) {
            snprintf(out, 64, "output of rank %u in call %u", i % v->n_ranks, i / v->n_ranks);
            return;
        }
    }
    snprintf(out, 64, "memory");
}

static bool is_padding(value x)
{
    return (x.kind == VALUE_SUM || x.kind == VALUE_OUT) && !x.who;
}

/* Adds "a touched [lo, hi) of o after `before`" to the digest, byte by byte: how the bytes are cut does not matter.
 * Which zero is read where padding is read makes no difference to anything, nor where padding lies that nobody reads. */
static void digest(const actor *a, const object *o, const segment_state *s, bool writes, value x)
{
    verifier *v = a->v;
    uint64_t n = s->hi - s->lo, h, index = (uint64_t)(o - v->objects);
    if (is_padding(x) || (x.kind == VALUE_ZERO && !writes))
        return;
    if (index >= v->first_object[REGION_COUNT])
        index = UINT64_C(1) << 32;
    h = verify_mix(a->name + verify_mix(verify_identity(v, s->writer) + verify_mix(index * 2 + writes + 1)));
    v->result->digest += h * (n * (s->lo + s->hi - 1) / 2 + verify_mix(h) * n);
}

static void check_writer(actor *a, object *o, const segment_state *s, bool writes)
{
    if (!verify_ordered(a, s->writer)) {
        char where[64];
        object_name(a->v, o, where);
        verify_race(a, s->writer, writes, true, where, s->lo, s->hi);
    }
}

static void check_readers(actor *a, object *o, const segment_state *s)
{
    char where[64];
    if (!verify_ordered(a, s->reader)) {
        object_name(a->v, o, where);
        verify_race(a, s->reader, true, false, where, s->lo, s->hi);
    }
    for (uint32_t k = s->more; k; k = a->v->readers[k].next) {
        if (!verify_ordered(a, a->v->readers[k].at)) {
            object_name(a->v, o, where);
            verify_race(a, a->v->readers[k].at, true, false, where, s->lo, s->hi);
        }
    }
}

/* A reader that happened before this one need not be kept: whoever follows this one follows it too. */
static void mark_read(actor *a, segment_state *s)
{
    verifier *v = a->v;
    s->unread = 0;
    if (s->reader.chain == CHAIN_START || s->reader.chain == a->self.chain || verify_ordered(a, s->reader)) {
        s->reader = a->self;
        return;
    }
    for (uint32_t k = s->more; k; k = v->readers[k].next) {
        if (v->readers[k].at.chain == a->self.chain || verify_ordered(a, v->readers[k].at)) {
            v->readers[k].at = a->self;
            return;
        }
    }
    if (!v->free_readers) {
        if (tide_grow(&v->readers, &v->cap_readers, (uint64_t)v->n_readers + 1, sizeof *v->readers) != TIDE_OK) {
            v->status = TIDE_ERR_MEMORY;
            return;
        }
        v->readers[v->n_readers].next = 0;
        v->free_readers = v->n_readers++;
    }
    {
        uint32_t node = v->free_readers;
        v->free_readers = v->readers[node].next;
        v->readers[node].at = a->self;
        v->readers[node].next = s->more;
        s->more = node;
    }
}

void object_read(actor *a, object *o, uint64_t lo, uint64_t hi, pieces *out)
{
    verifier *v = a->v;
    if (lo >= hi)
        return;
    for (cursor c = object_begin(v, o, lo); lo < hi && v->status == TIDE_OK; c = cursor_next(o, c)) {
        segment_state *s = object_within(v, o, &c, hi);
        if (!s)
            return;
        check_writer(a, o, s, false);
        mark_read(a, s);
        v->result->accesses++;
        if (v->options->digest)
            digest(a, o, s, false, s->v);
        pieces_add(v, out, s->hi - s->lo, s->v);
        lo = s->hi;
    }
}

bool object_fresh(object *o, uint64_t lo, uint64_t hi)
{
    if (lo >= hi)
        return true;
    for (cursor c = object_find(o, lo); lo < hi; c = cursor_next(o, c)) {
        if (!c.l->item[c.i].unread)
            return false;
        lo = c.l->item[c.i].hi;
    }
    return true;
}

void object_peek(verifier *v, object *o, uint64_t lo, uint64_t hi, pieces *out)
{
    if (lo >= hi)
        return;
    for (cursor c = object_find(o, lo); lo < hi; c = cursor_next(o, c)) {
        const segment_state *s = &c.l->item[c.i];
        uint64_t end = tide_min_u64(s->hi, hi);
        pieces_add(v, out, end - lo, value_shift(s->v, lo - s->lo));
        lo = end;
    }
}

/* Zeros may lie in what nobody will read, the unused rest of a block; an output continues what it overwrites. */
static bool matters(value x)
{
    return x.kind != VALUE_NONE && x.kind != VALUE_ZERO && !is_padding(x);
}

static void check_unread(actor *a, object *o, const segment_state *s, value x)
{
    char where[64], mine[160], other[160];
    if (!s->unread || !matters(s->v) || x.kind == VALUE_ZERO || x.kind == VALUE_OUT ||
        !verify_fresh(a->v, VERIFY_REWRITTEN, a->self, s->writer))
        return;
    object_name(a->v, o, where);
    verify_name(a->v, a->self, mine);
    verify_name(a->v, s->writer, other);
    verify_line(a->v, VERIFY_REWRITTEN, "%s overwrites [%llu, %llu) of %s, written by %s and read by nobody", mine,
                (unsigned long long)s->lo, (unsigned long long)s->hi, where, other);
}

/* Drops `gone` segments behind the one at c. */
static void object_drop(object *o, cursor c, uint32_t gone)
{
    uint32_t here = (uint32_t)tide_min_u64(gone, c.l->n - c.i - 1);
    memmove(c.l->item + c.i + 1, c.l->item + c.i + 1 + here, (c.l->n - c.i - 1 - here) * sizeof *c.l->item);
    c.l->n -= here;
    gone -= here;
    while (gone && gone >= o->leaves[c.k + 1].l->n) { /* whole leaves */
        gone -= o->leaves[c.k + 1].l->n;
        tide_free(o->leaves[c.k + 1].l);
        memmove(o->leaves + c.k + 1, o->leaves + c.k + 2, (o->n - c.k - 2) * sizeof *o->leaves);
        o->n--;
    }
    if (gone) { /* the beginning of the next leaf */
        leaf *l = o->leaves[c.k + 1].l;
        memmove(l->item, l->item + gone, (l->n - gone) * sizeof *l->item);
        l->n -= gone;
        o->leaves[c.k + 1].lo = l->item[0].lo;
    }
    o->hint = c.k;
}

/* Every old segment in [lo, hi) is checked; one with the new history takes their place. */
static void write_piece(actor *a, object *o, uint64_t lo, uint64_t hi, value x)
{
    verifier *v = a->v;
    cursor first = object_begin(v, o, lo), c = first;
    uint32_t n = 0;
    for (uint64_t at = lo; at < hi && v->status == TIDE_OK; n++) {
        segment_state *s;
        c = n ? cursor_next(o, c) : c;
        s = object_within(v, o, &c, hi);
        if (!s)
            return;
        check_writer(a, o, s, true);
        check_readers(a, o, s);
        check_unread(a, o, s, x);
        v->result->accesses++;
        if (v->options->digest)
            digest(a, o, s, true, x);
        readers_free(v, s->more);
        s->more = 0;
        at = s->hi;
    }
    if (v->status != TIDE_OK)
        return;
    first = n > 1 ? object_find(o, lo) : c; /* a cut may have moved it into another leaf */
    if (n > 1)
        object_drop(o, first, n - 1);
    first.l->item[first.i] = (segment_state){.lo = lo,
                                             .hi = hi,
                                             .writer = a->put ? (epoch){CHAIN_PUT, (int32_t)(a->put - 1)} : a->self,
                                             .reader = epoch_start,
                                             .unread = 1,
                                             .v = x};
}

void object_write(actor *a, object *o, uint64_t lo, const pieces *in)
{
    for (uint32_t i = 0; i < in->n && a->v->status == TIDE_OK; i++) {
        if (in->items[i].bytes) /* less than an element: reported where it was read */
            write_piece(a, o, lo, lo + in->items[i].bytes, in->items[i].v);
        lo += in->items[i].bytes;
    }
}

/* ---- sets of ranks ---------------------------------------------------------------------------------- */

bool sets_has(const verifier *v, uint32_t set, uint32_t rank)
{
    return v->sets.bits[(uint64_t)set * v->sets.words + rank / 64] >> rank % 64 & 1;
}

/* A set with these bits: an old one if there is one. Few sets exist, and unions are memoized. */
static uint32_t sets_intern(verifier *v, const uint64_t *bits)
{
    rank_sets *t = &v->sets;
    size_t bytes = t->words * sizeof *bits;
    for (uint32_t i = 0; i < t->n; i++)
        if (memcmp(t->bits + (uint64_t)i * t->words, bits, bytes) == 0)
            return i;
    if (tide_grow(&t->bits, &t->capacity, (uint64_t)t->n + 1, bytes) != TIDE_OK) {
        v->status = TIDE_ERR_MEMORY;
        return 0;
    }
    memcpy(t->bits + (uint64_t)t->n * t->words, bits, bytes);
    return t->n++;
}

uint32_t sets_single(verifier *v, uint32_t rank)
{
    if (!v->sets.single[rank]) {
        uint64_t bits[TIDE_MAX_NODES * TIDE_MAX_LOCAL / 64] = {0};
        bits[rank / 64] = UINT64_C(1) << rank % 64;
        v->sets.single[rank] = sets_intern(v, bits);
    }
    return v->sets.single[rank];
}

uint32_t sets_all(verifier *v)
{
    if (!v->sets.all) {
        uint64_t bits[TIDE_MAX_NODES * TIDE_MAX_LOCAL / 64] = {0};
        for (uint32_t r = 0; r < v->n_ranks; r++)
            bits[r / 64] |= UINT64_C(1) << r % 64;
        v->sets.all = sets_intern(v, bits);
    }
    return v->sets.all;
}

uint32_t sets_union(verifier *v, uint32_t a, uint32_t b, int32_t *twice)
{
    rank_sets *t = &v->sets;
    uint64_t bits[TIDE_MAX_NODES * TIDE_MAX_LOCAL / 64];
    uint32_t *known, result;
    *twice = -1;
    if (!a || !b)
        return a ? a : b;
    known = tide_map_at(&t->memo, (uint64_t)a << 32 | b);
    if (!known) {
        v->status = TIDE_ERR_MEMORY;
        return a;
    }
    if (known[0]) {
        *twice = (int32_t)known[1] - 1;
        return known[0];
    }
    for (uint32_t i = 0; i < t->words; i++) {
        uint64_t x = t->bits[(uint64_t)a * t->words + i], y = t->bits[(uint64_t)b * t->words + i];
        if (*twice < 0 && (x & y))
            *twice = (int32_t)(i * 64 + (uint32_t)__builtin_ctzll(x & y));
        bits[i] = x | y;
    }
    result = sets_intern(v, bits);
    known[0] = result;
    known[1] = (uint32_t)(*twice + 1);
    return result;
}
