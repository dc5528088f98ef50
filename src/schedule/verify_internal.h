/* verify_internal.h - what verify.c (order), verify_access.c (operations), verify_memory.c (bytes) and verify_report.c
 * share. */
#ifndef TIDE_VERIFY_INTERNAL_H
#define TIDE_VERIFY_INTERNAL_H

#include "schedule/verify.h"

/* ---- order ------------------------------------------------------------------------------------ */

/* A chain is a totally ordered list of operation instances: a stream of a rank, or what its caller does. An operation
 * is known by its chain and its position there, from 1; a clock says up to which position each chain is known to have
 * run. */
typedef struct epoch {
    uint32_t chain;
    int32_t at;
} epoch;
#define CHAIN_START UINT32_MAX     /* before everything */
#define CHAIN_PUT (UINT32_MAX - 1) /* `at` is an index into puts: complete where its signal has been awaited */
static const epoch epoch_start = {CHAIN_START, 0};

/* Shared and immutable while refs > 1. */
typedef struct vclock {
    uint32_t refs;
    struct vclock *next; /* in the free list */
    int32_t at[];
} vclock;

typedef struct instance {
    uint32_t step, op; /* op: index in the rank's schedule, or one of the caller's: */
    uint32_t
        aux; /* JOIN, USE: record to wait for + 1 (0: none); RECORD, FREE: its record + 1; rail: number in the lane */
} instance;
enum { INSTANCE_IN = -1, INSTANCE_USE = -2, INSTANCE_FREE = -3 };

typedef struct chain {
    instance *queue;
    uint32_t n, capacity, done;
    vclock *clock; /* of everything before the next operation; own entry unused */
} chain;

typedef struct record {
    epoch at;
    vclock *clock;
    bool done;
} record;

typedef struct put_state {
    epoch sender, waiter; /* waiter: CHAIN_START until awaited */
} put_state;

/* ---- bytes ------------------------------------------------------------------------------------- */

enum value_kind {
    VALUE_NONE, /* never written */
    VALUE_ZERO,
    VALUE_PRIOR, /* what the caller had in the output */
    VALUE_BYTES, /* bytes `off`.. of input `arg` (AG: of the packed shard) of rank `who` in `call`, as dtype */
    VALUE_SUM,   /* element off / 4.. of gradient `arg` of `call`, added over the ranks in set `who`; set 0: padding, of
                    ARG_PADDING */
    VALUE_OUT    /* the caller's prior value (or zero) plus such a sum; arg ARG_NOTHING: plus nothing yet */
};
/* Padding is zero, but not any zero: `off` is where in its block it was made, so that it adds up with its like only. */
enum { ARG_PADDING = UINT16_MAX, ARG_NOTHING = UINT16_MAX - 1 };
typedef struct value {
    uint8_t kind, dtype;
    uint16_t arg;
    uint32_t call, who;
    uint64_t off;
} value;

typedef struct piece {
    uint64_t bytes;
    value v;
} piece;
typedef struct pieces {
    piece *items;
    uint32_t n, capacity;
} pieces;

typedef struct segment_state { /* bytes [lo, hi) share a history */
    uint64_t lo, hi;
    epoch writer, reader;
    uint32_t more;   /* further readers: index into v->readers, 0: none */
    uint32_t unread; /* no reader since the last write */
    value v;
} segment_state;

enum { LEAF = 32 };
typedef struct leaf {
    uint32_t n;
    segment_state item[LEAF];
} leaf;
typedef struct leaf_ref {
    uint64_t lo; /* of its first segment */
    leaf *l;
} leaf_ref;
typedef struct object { /* one bank of one region on one rank, or an output: always covered from 0 to bytes */
    leaf_ref *leaves;
    uint32_t n, capacity, hint, hint_item;
    uint64_t bytes;
} object;

typedef struct reader_node {
    epoch at;
    uint32_t next;
} reader_node;

/* Sets of ranks, interned: 0 is empty. */
typedef struct rank_sets {
    uint32_t words, n, capacity;
    uint64_t *bits;
    uint32_t *single; /* per rank, 0: not made yet */
    uint32_t all;     /* 0: not made yet */
    tide_map memo;    /* unions: by both sets, the result and 1 + a rank that is in both */
} rank_sets;

/* ---- the state ------------------------------------------------------------------------------------ */

typedef struct post { /* a local counter value or a rail signal on its way */
    uint64_t value, tag;
    epoch at;
    vclock *clock;
    uint32_t put; /* rail: index into puts + 1, 0: a plain signal */
    uint32_t next;
} post;

typedef struct word { /* one local counter in its waiter's memory */
    uint64_t last, dropped;
    epoch at;
    uint32_t head, tail;
    uint32_t waiter; /* chain + 1; 0: nobody yet */
    bool several;    /* chains wait for it */
} word;
typedef struct flow { uint32_t head, tail, n; } flow; /* rail signals of one (receiver, lane, sender, ctx, sig) */
typedef struct lane { /* the rail operations of a rank: one queue */
    uint32_t enqueued, done;
    epoch at;
    vclock *clock;
} lane;

typedef struct call_rank { /* a call on one rank */
    uint32_t *events; /* CALL event -> record + 1 */
    uint64_t *base;   /* per resource, at the call's first step */
    int32_t *readers; /* per chain of this rank: last position that read an input */
    object out;
    epoch in, gate;
    vclock *in_clock;
    uint32_t ready, read_done, done; /* record + 1 */
    uint32_t parity;
    bool begun, inputs_closed, out_closed, gated;
} call_rank;

typedef struct rank_state {
    uint64_t *base;    /* the ledger */
    uint32_t *free;    /* per slot: record + 1 of the latest FREE */
    tide_map events;   /* RESOURCE events: record + 1 of the latest */
    uint32_t reads;    /* RS calls begun: parity of the next */
} rank_state;

typedef struct verifier {
    const verify_input *in;
    const verify_options *options;
    verify_result *result;
    int status;
    bool stop; /* enough violations, or no progress is possible */
    uint32_t n_ranks, per_rank, n_chains, n_resources;
    uint32_t chain_in, chain_slot; /* within a rank */
    chain *chains;
    vclock *free_clocks;
    rank_state *ranks;
    call_rank *calls;
    object *objects;
    uint32_t first_object[REGION_COUNT + 1];
    record *records;       uint32_t n_records, cap_records;
    put_state *puts;       uint32_t n_puts, cap_puts;
    post *posts;           uint32_t n_posts, cap_posts, free_posts;
    reader_node *readers;  uint32_t n_readers, cap_readers, free_readers;
    word *words;
    flow *flows;
    uint64_t in_flight; /* rail signals */
    lane *lanes;
    rank_sets sets;
    pieces read, fold, next; /* scratch */
    tide_map seen;           /* by hash of the report */
    bool *dirty;
} verifier;

/* The operation that is running. */
typedef struct actor {
    verifier *v;
    epoch self;
    const int32_t *clock;
    uint32_t rank, call;
    call_rank *cr;
    const schedule *s;
    const op *o;
    uint64_t name; /* for the digest */
    uint32_t put;  /* index + 1 while a put writes */
} actor;

static inline bool on_rail(const op *o)
{
    return o->kind == OP_PUT || ((o->kind == OP_SIGNAL || o->kind == OP_WAIT) && o->scope == SCOPE_RAIL);
}

static inline uint32_t lane_of(uint32_t rank, const op *o)
{
    return rank * 2 + (o->stream >= STREAM_RS_STASH);
}

static inline uint64_t word_index(const verifier *v, uint32_t waiter, const op *o, uint32_t poster)
{
    return (((uint64_t)waiter * v->n_resources + o->resource) * 2 + o->which) * v->in->local + poster % v->in->local;
}

static inline uint64_t flow_index(const verifier *v, uint32_t receiver, uint32_t sender, uint32_t lane, uint32_t ctx,
                           uint32_t sig)
{
    return ((((uint64_t)receiver * 2 + lane) * v->in->nodes + sender / v->in->local) * v->in->n_ctx + ctx) * SIG_COUNT +
           sig;
}

/* verify.c */
bool verify_ordered(const actor *a, epoch before);

/* verify_report.c */
void verify_name(const verifier *v, epoch e, char out[160]);
uint64_t verify_identity(const verifier *v, epoch e);
/* True when (class, a, b) has not been reported yet and should be now. */
bool verify_fresh(verifier *v, int class, epoch a, epoch b);
void verify_line(verifier *v, int class, const char *format, ...) __attribute__((format(printf, 3, 4)));
void verify_race(const actor *a, epoch other, bool writes, bool other_writes, const char *where, uint64_t lo,
                 uint64_t hi);
/* All that is enqueued has run, and no signal is left over: else reports it, and stops. */
void verify_progress(verifier *v, uint32_t step);
/* Every call has said what its caller waits for. */
void verify_ends(verifier *v);
static inline uint64_t verify_mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* verify_memory.c */
int object_init(object *o, uint64_t bytes, value v, epoch writer);
void object_clear(object *o);
void object_name(const verifier *v, const object *o, char out[64]);
/* Appends what [lo, hi) holds to *out and marks it read by `a`; in bounds. */
void object_read(actor *a, object *o, uint64_t lo, uint64_t hi, pieces *out);
void object_write(actor *a, object *o, uint64_t lo, const pieces *in);
/* Every byte has been written since it was last read. */
bool object_fresh(object *o, uint64_t lo, uint64_t hi);
/* What [lo, hi) holds, without touching it. */
void object_peek(verifier *v, object *o, uint64_t lo, uint64_t hi, pieces *out);
void pieces_add(verifier *v, pieces *p, uint64_t bytes, value x);
value value_shift(value x, uint64_t bytes);
void value_name(const verifier *v, value x, char out[128]);
uint32_t sets_single(verifier *v, uint32_t rank);
uint32_t sets_all(verifier *v);
/* Union; *twice = a rank in both, or -1. */
uint32_t sets_union(verifier *v, uint32_t a, uint32_t b, int32_t *twice);
bool sets_has(const verifier *v, uint32_t set, uint32_t rank);

/* verify_access.c */
void access_copy(actor *a);
void access_reduce(actor *a);
void access_put(actor *a, const op_put *put);
void access_landing(actor *a); /* the caller reads the landing of its call */
void access_output(actor *a);  /* ... its reduce-scatter output, which is closed thereby */
void access_close_inputs(actor *a, const char *event);

#endif
