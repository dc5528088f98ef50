/*
 * fabric.h - what a backend offers: a device (memory, streams, copies, sums, local signals) and a rail (puts and
 * signals between nodes). A fabric sees resolved pointers and words only; it never decides what moves where.
 *
 * Life of the objects: device > arena, queue > rail, event, calls. Verbs that enqueue are called by one thread at a
 * time per device, allocate nothing and never wait for a peer; they return TIDE_OK or the device's failure. `failure`
 * and `fail` may be called from any thread.
 */
#ifndef TIDE_FABRIC_H
#define TIDE_FABRIC_H

#include <stdatomic.h>

#include "base/base.h"

typedef struct fab_device fab_device;
typedef struct fab_queue fab_queue; /* a set of in-order streams, numbered from 0 */
typedef struct fab_event fab_event; /* binds at enqueue: a join means the latest record before it; none: no wait */
typedef struct fab_calls fab_calls; /* a bounded ring of calls in flight of one program */
typedef struct fab_call fab_call;   /* one of them: arguments, alpha, accumulate, number, tag */
typedef struct fab_rail fab_rail;

/* An address that may depend on the call: `base` itself, or args[arg] + base when arg >= 0. */
typedef struct fab_ptr {
    uintptr_t base;
    int32_t arg;
    int32_t zero; /* 1: source of a fill */
} fab_ptr;

typedef struct fab_run { fab_ptr src, dst; uint64_t width, rows, src_pitch, dst_pitch; } fab_run; /* width in items */
/* multimem: at is the arenas' multicast address, and so many values behind it are one source, added in any order; then it is
 * the segment's only one, of fp32, and a multiple of 16 as its pitch is. */
typedef struct fab_source { fab_ptr at; uint64_t row_pitch; uint32_t dtype, multimem; } fab_source;
typedef struct fab_segment {
    fab_ptr dst;
    uint64_t dst_pitch, elems;
    uint32_t rows, first_source, n_sources;
} fab_segment;

/* ---- batches: what one enqueued op refers to --------------------------------------------------- */

/* The caller keeps them alive and unchanged until its queue is destroyed. */

/* A cast when the dtypes differ, else bytes of one item each (TIDE_OPAQUE: item size 1). */
typedef struct fab_copy {
    const fab_run *runs;
    uint32_t n_runs;
    uint8_t src_dtype, dst_dtype;
    uint16_t rank; /* whose memory is written; sources are the own rank's */
    uint16_t ctas; /* of a kernel that does it; 0: the device's choice */
    uint8_t multicast; /* what is written is the arenas' multicast address */
} fab_copy;

/* Sum of sources first_source .. first_source + n_sources - 1 in this order, in fp32; the first one starts the sum;
 * none: +0. Not final: dst = sum. Final: dst = beta(dst) + alpha * sum, separate multiply and add. */
enum fab_beta { FAB_NOT_FINAL, FAB_BETA_ZERO, FAB_BETA_ONE, FAB_BETA_CALL };
typedef struct fab_reduce {
    const fab_segment *segments;
    const fab_source *sources;
    uint32_t n_segments;
    int beta;
    uint32_t ctas; /* that add, where the device has such */
} fab_reduce;

/* Counters in the memory of the rank that waits, each written by one rank only. A local word has its own line and holds
 * the value last posted; a rail word counts the signals that arrived (what of it is consumed is the waiting fabric's
 * own business), so that the words of a (node, context) add up to its messages. The tag is that of the call that
 * posted, stored before the value. */
typedef struct fab_word {
    _Atomic uint64_t value, tag;
    uint64_t unused[6];
} fab_word;
typedef struct fab_rail_word {
    _Atomic uint64_t value, tag;
} fab_rail_word;
_Static_assert(sizeof(fab_word) == 64 && sizeof(fab_rail_word) == 16, "the memory map counts with these sizes");

typedef struct fab_post { fab_word *word; uint32_t rank; } fab_post; /* rank: whose memory (signal), who posts (wait) */
/* dst: NULL where the peer's memory is not mapped here. at: the same place as an offset in the peer's arena. */
typedef struct fab_put {
    uint32_t peer;
    uint16_t ctx, sig;
    void *dst;
    const void *src;
    uint64_t bytes, at;
} fab_put;
typedef struct fab_rail_post { uint32_t peer; uint16_t ctx, sig; uint32_t count; } fab_rail_post;

/* A poster may be ahead of the waiter: then its word's tag can be that of a later call (only a word that equals the
 * awaited value says something), or, where no poster can leave the call before this wait, must be this call's. */
enum fab_check { FAB_CHECK_NONE, FAB_CHECK_EQUAL, FAB_CHECK_ANY };

/* Where a failure of a wait or of a rail's message is said to be. Static for the life of the queue. */
typedef struct fab_where { const char *phase; uint32_t op; } fab_where;

/* ---- arenas ---------------------------------------------------------------------------------- */

/* One allocation of this rank and mappings of those of the peers. base[r]: rank r's memory here, NULL when not mapped.
 * multicast: an address behind which those of all ranks of the node are, NULL when there is none. */
typedef struct fab_arena {
    void **base;
    void *multicast;
    uint64_t bytes;     /* requested */
    uint64_t allocated; /* after granularity */
} fab_arena;

typedef struct fab_call_desc {
    const void *const *args; /* copied */
    uint32_t n_args;
    int accumulate;
    float alpha;
    uint64_t number, tag; /* tag 0: no collective, other ranks do not make this call */
} fab_call_desc;

/* ---- device ---------------------------------------------------------------------------------- */

typedef struct fab_rail_desc {
    uint32_t nodes, node;   /* M and this rank's node */
    uint32_t n_ctx, n_sig;  /* what calls use at most: extents of the words */
    fab_rail_word *const *words; /* M: this lane's rail words in the memory of the rail's rank on each node; NULL: not
                                    mapped here */
    const uint32_t *ranks;   /* M: absolute ranks of the rail */
    const fab_arena *arena;  /* sources and destinations of its puts lie in it */
    const char *lane;        /* "all-gather"; static */
} fab_rail_desc;
/* Index, in the receiver's words, of a signal that `node` sends. */
static inline uint64_t fab_rail_index(uint32_t node, uint32_t n_ctx, uint32_t n_sig, uint32_t ctx, uint32_t sig)
{
    return ((uint64_t)node * n_ctx + ctx) * n_sig + sig;
}

typedef struct fab_device_verbs {
    /* C  fab_agree among the ranks of the device. */
    int (*agree)(fab_device *d, int status);
    /* C  Returns once every rank is here, or the failure that came first: then the others may not come. Without the
     * caller's all-gather. */
    int (*barrier)(fab_device *d, const char *phase);
    /* C  Allocates `bytes` zeroed bytes, maps those of every rank r with peers[r] != 0 (a symmetric relation). All or
     * none. */
    int (*arena_create)(fab_device *d, uint64_t bytes, const uint8_t *peers, fab_arena **out);
    /* References. `hold` and `drop` from any thread, also after close. `trim` unmaps all but this rank's memory and
     * `keep`'s. */
    void (*arena_hold)(fab_arena *a);
    void (*arena_drop)(fab_arena *a);
    void (*arena_trim)(fab_arena *a, uint32_t keep);

    int (*queue_create)(fab_device *d, uint32_t n_streams, fab_queue **out);
    /* stop: nothing runs any more once it returns; what is still queued is dropped. destroy: after a stop, and after
     * the rails, events and calls of the queue are gone. */
    void (*queue_stop)(fab_queue *q);
    void (*queue_destroy)(fab_queue *q);
    int (*event_create)(fab_queue *q, fab_event **out);
    void (*event_destroy)(fab_event *e);
    /* ops: n_streams upper bounds of what one call enqueues on each stream. */
    int (*calls_create)(fab_queue *q, uint32_t n_args, const uint32_t *ops, fab_calls **out);
    void (*calls_destroy)(fab_calls *c);

    /* A call's arguments enter the ring (at least 8 calls); when it is full, sleeps until the oldest call has finished
     * (TIDE_ERR_STATE when that one is still held). `call_submit` lets the streams run; hold != 0: a later part of the
     * same call follows. */
    int (*call_begin)(fab_calls *c, const fab_call_desc *desc, fab_call **out);
    void (*call_submit)(fab_call *call, int hold);

    int (*copy)(fab_queue *q, uint32_t stream, fab_call *call, const fab_copy *copy);
    int (*reduce)(fab_queue *q, uint32_t stream, fab_call *call, const fab_reduce *reduce);
    /* Stores {value, the call's tag} in n words of local ranks, after all that the stream did before. */
    int (*signal)(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value);
    /* Until n words are >= value. check (fab_check): whose tag must be the call's, else TIDE_ERR_MISMATCH. */
    int (*wait)(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value,
                int check, const fab_where *where);
    int (*record)(fab_queue *q, uint32_t stream, fab_event *e);
    int (*join)(fab_queue *q, uint32_t stream, fab_event *e);

    /* The caller's stream (host: the calling thread): records e at this point of it; makes it wait for e's latest
     * record. */
    int (*caller_record)(fab_queue *q, fab_event *e, void *stream);
    int (*caller_wait)(fab_queue *q, fab_event *e, void *stream);
    /* Whether `stream` can be a caller's. Changes nothing. */
    int (*caller_check)(fab_device *d, void *stream);
    /* Arena memory at this point of the caller's stream: `bytes` times a value, or a copy of the caller's memory, which
     * may be part of what is written. through: a stream that waits for no peer. */
    int (*caller_fill)(fab_queue *q, uint32_t through, void *dst, uint8_t value, uint64_t bytes, void *stream);
    int (*caller_copy)(fab_queue *q, uint32_t through, void *dst, const void *src, uint64_t bytes, void *stream);
    int (*sync)(fab_queue *q);

    /* Returns out->code (out may be NULL). `fail` records a failure unless there is one, ends every wait and tells all
     * ranks. */
    int (*failure)(fab_device *d, tide_failure *out);
    int (*fail)(fab_device *d, const tide_failure *failure);
    /* After all queues and arenas. Waits for no peer. */
    void (*close)(fab_device *d);
} fab_device_verbs;
/* Of a device whose functions are named after the verbs: name_agree, ... and name_fail_face for `fail`. */
#define FAB_DEVICE_VERBS(name)                                                                                        \
    {                                                                                                                 \
        .agree = name##_agree, .barrier = name##_barrier, .arena_create = name##_arena_create,                        \
        .arena_hold = name##_arena_hold, .arena_drop = name##_arena_drop, .arena_trim = name##_arena_trim,            \
        .queue_create = name##_queue_create, .queue_stop = name##_queue_stop, .queue_destroy = name##_queue_destroy,  \
        .event_create = name##_event_create, .event_destroy = name##_event_destroy,                                   \
        .calls_create = name##_calls_create, .calls_destroy = name##_calls_destroy, .call_begin = name##_call_begin,  \
        .call_submit = name##_call_submit, .copy = name##_copy, .reduce = name##_reduce, .signal = name##_signal,     \
        .wait = name##_wait, .record = name##_record, .join = name##_join, .caller_record = name##_caller_record,     \
        .caller_wait = name##_caller_wait, .caller_check = name##_caller_check, .caller_fill = name##_caller_fill,    \
        .caller_copy = name##_caller_copy, .sync = name##_sync, .failure = name##_failure, .fail = name##_fail_face,  \
        .close = name##_close                                                                                         \
    }

/* ---- rail: puts and signals between the ranks with one local index --------------------------- */

typedef struct fab_rail_verbs {
    /* C  All ranks of the device make their rails in one order. Where that takes several ranks they all return alike; where a
     * rank does it alone its status is its own. The description is read during the call only, but for the arena. */
    int (*create)(fab_queue *q, const fab_rail_desc *desc, fab_rail **out);
    void (*destroy)(fab_rail *r); /* NULL is fine */
    /* One stream enqueues on a rail at a time. Each transfer delivers its bytes, then one signal (ctx, sig) to its
     * peer; messages to one (peer, ctx) arrive in their order. Complete when the sources may be written again. */
    int (*put)(fab_rail *r, uint32_t stream, fab_call *call, const fab_put *puts, uint32_t n, const fab_where *where);
    int (*signal)(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n,
                  const fab_where *where);
    /* Until `count` further signals of each (peer, ctx, sig) are there; consumes them. check: as in the local wait,
     * where a fabric carries tags. */
    int (*wait)(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n, int check,
                const fab_where *where);
} fab_rail_verbs;

struct fab_device {
    const fab_device_verbs *verbs;
    const fab_rail_verbs *rail;
    const char *name; /* "host" */
    uint32_t rank, n_ranks, node_size;
    int rail_mapped;      /* the rail reaches its peers through their memory as mapped here */
    int multicast;        /* one write can serve a node: its ranks share a landing, or arenas have a multicast address */
    const char *no_multicast; /* NULL, or why not although the knob multicast is 1; alike on all ranks */
    uint64_t granularity; /* arenas are rounded up to a multiple */
    uint32_t rail_ring;   /* puts and signals to one peer and context that its rails hold at once; a call that has more
                             would block the thread that enqueues it. 0: any number */
};

/* Collective opening of a device: ranks find each other through the all-gather callback. */
typedef struct fab_open {
    uint32_t rank, n_ranks, node_size; /* node_size: resolved, divides n_ranks */
    const uint64_t *machines; /* per rank: which machine, alike on all ranks; kept. NULL: all on one */
    int device;
    tide_allgather_fn allgather; /* kept: used again by arena_create */
    void *allgather_context;
    const tide_options *options; /* NULL: defaults; not kept */
} fab_open;
int fab_host_open(const fab_open *desc, fab_device **out);
int fab_cuda_open(const fab_open *desc, fab_device **out);
int fab_nccl_open(const fab_open *desc, fab_device **out);
static inline bool fab_same_machine(const fab_open *desc, uint32_t rank)
{
    return !desc->machines || desc->machines[rank] == desc->machines[desc->rank];
}
int64_t fab_deadline_ns(const fab_open *desc); /* that of its options; small enough to be added to a time */

/* ---- set-up helpers -------------------------------------------------------------------------- */

/* Identity of this machine as its processes can reach each other: boot and network namespace. */
uint64_t fab_machine(void);

/* C  The caller's all-gather. When it fails and has set the error text it is one of the library's: its code, if that
 * concerns all ranks, and its text. Else TIDE_ERR_SYSTEM. */
int fab_allgather(const fab_open *desc, const void *in, void *out, size_t bytes);

/* Every rank's contribution `status` is exchanged; returns TIDE_OK only if all are OK, else the lowest failing rank's
 * code and text on all ranks alike. The building block of "all or none". */
int fab_agree(const fab_open *desc, int status);

/* C  Gives file descriptor `fd` to every rank r of this machine with peers[r] != 0 (a symmetric relation) and takes theirs:
 * fds[r], owned by the caller, -1 for the others; pids[r] (may be NULL) is the process that sent it, as the kernel says.
 * Descriptors travel over abstract Unix sockets between processes of one user. A peer that sends nothing is waited for
 * until the deadline. status: this rank's so far; when any rank's is not TIDE_OK all return the same error. */
int fab_handles_exchange(const fab_open *desc, int status, const uint8_t *peers, int fd, int *fds, int64_t *pids);

/* Whether this process may open `wanted` more descriptors; tried with copies of fd. */
int fab_descriptors_check(const char *what, int fd, uint32_t wanted);

/* True in a process that was forked while a device was open: its threads are gone, its arenas are the parent's. */
extern _Atomic int fab_forked_flag;
int fab_fork_watch(void); /* a device is being opened; registers the handler once */
void fab_fork_unwatch(void);
static inline int fab_check_fork(void)
{
    if (atomic_load_explicit(&fab_forked_flag, memory_order_relaxed))
        return tide_fail(TIDE_ERR_FORKED,
                         "process: forked after a communicator was opened, expected the process that opened it");
    return TIDE_OK;
}

/* ---- the host device's own switches, for tests ----------------------------------------------- */

/* Of the streams that can run choose one by this seed, item by item, instead of running them in turn; 0: in turn. */
void fab_host_set_seed(fab_device *d, uint64_t seed);

/* Faults of the rail, per message: a transfer with its signal, or a signal. Probabilities in 1/65536. Contexts overtake
 * each other by their delays; within a (peer, context) only `overtake` breaks the order. */
typedef struct fab_inject {
    uint64_t seed;
    uint32_t delay_us; /* up to this much, drawn per message */
    uint32_t drop, duplicate;
    uint32_t cut;      /* fewer bytes arrive than were sent; maybe none, the signal does */
    uint32_t overtake; /* held back for delay_us while those behind it pass: no other is then */
    uint32_t sigs;     /* bit s: these four strike messages of signal index s; 0: of any */
    uint64_t nth;      /* and of those only the n-th that this rail sends; 0: any */
} fab_inject;
/* Wraps the rails that are created afterwards; NULL: none. */
void fab_host_inject(fab_device *d, const fab_inject *inject);
/* Called by the thread that runs a stream before each item; phase: of a wait, a transfer or a rail's signal, else NULL.
 * Set while nothing is enqueued. */
void fab_host_on_item(fab_device *d, void (*fn)(void *context, const char *phase), void *context);

#endif
