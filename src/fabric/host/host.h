/*
 * host.h - the host device: ranks are threads or processes of one machine, streams are queues that worker threads and
 * waiting callers run cooperatively, memory is shared.
 *
 * Who wakes whom. Each rank has a control page in shared memory with two futex words (bells): BELL_WORKER for its
 * worker threads, BELL_CALLER for its thread inside caller_wait or sync. Whoever changes what such a thread may wait
 * for (a word, an event, a queue) stores the change, then calls host_ring, which reads `sleepers` after the store (both
 * sequentially consistent) and wakes only who sleeps. A sleeper reads the bell, announces itself in `sleepers`, looks
 * once more for work and only then sleeps on the bell value it has read: either it sees the change or the ringer sees
 * it.
 *
 * While a caller waits it runs the streams itself (HELPER is set and the bell goes to it), which saves two thread
 * switches a signal; the workers go on with what they run and otherwise sleep.
 */
#ifndef TIDE_HOST_H
#define TIDE_HOST_H

#include "fabric/peers.h"

enum host_bell { BELL_WORKER, BELL_CALLER, BELL_COUNT };
enum host_sleeper { SLEEPER_WORKER = 1, SLEEPER_CALLER = 2, HELPER = 4 };

typedef struct host_control {
    fab_page page;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t bell[BELL_COUNT];
} host_control;

typedef struct host_arena {
    fab_arena face;
    _Atomic uint32_t refs;
    uint32_t rank, n_ranks;
    fab_memory **memory;
} host_arena;

enum host_item_kind {
    ITEM_COPY, ITEM_REDUCE, ITEM_SIGNAL, ITEM_WAIT, ITEM_PUT, ITEM_RAIL_SIGNAL, ITEM_RAIL_WAIT, ITEM_RECORD, ITEM_JOIN
};

typedef struct host_item {
    uint16_t kind, check;
    uint32_t n;
    const void *list; /* batch or posts */
    fab_call *call;   /* COPY, REDUCE: held until the item has run */
    void *object;     /* fab_event or fab_rail */
    uint64_t value;   /* of the word; or the event's record number */
    uint64_t tag, number;
    int64_t enqueued;
    const fab_where *where;
} host_item;

/* One producer (the caller), one consumer at a time (whoever holds `busy`). */
typedef struct host_stream {
    host_item *items;
    uint32_t capacity;  /* power of two */
    uint32_t satisfied; /* posts of the head wait found present */
    uint32_t busy;      /* under the device lock */
    uint64_t priority;  /* of a seeded choice, 0: not drawn yet; under the device lock */
    _Atomic uint64_t head, tail;
} host_stream;

/* Records of one event complete in order when one stream makes them. Else up to this far ahead. */
enum { HOST_OUT_OF_ORDER = 64 };
struct fab_event {
    fab_queue *queue;
    uint64_t recorded;     /* by the caller */
    uint64_t out_of_order; /* bit i: record done + 1 + i has happened (bit 0: never); under the device lock */
    _Atomic uint64_t done; /* records 1..done have happened */
};

struct fab_queue {
    struct host_device *device;
    fab_queue *next;
    uint32_t n_streams;
    host_stream *streams;
    int64_t now; /* when the caller began the part it is enqueueing */
};

struct fab_call {
    fab_calls *calls;
    _Atomic uint32_t refs;
    uint32_t held; /* a further part follows */
    int accumulate;
    float alpha;
    uint64_t number, tag;
    const void **args;
};

enum { HOST_CALLS = 8 }; /* calls of one program in flight */
struct fab_calls {
    fab_queue *queue;
    uint32_t n_args, next;
    const void **args;
    fab_call ring[HOST_CALLS];
};

/* A transfer with its signal, or a signal (bytes 0). */
typedef struct host_message {
    uint64_t number; /* of what this rank sends to (peer, ctx), from 1 */
    uint64_t bytes;
    void *dst;
    uint64_t tag, call; /* the sender's */
    const fab_where *where;
    uint32_t peer;
    uint16_t ctx, sig;
} host_message;

/* What carries a rail's messages to host_rail_arrive: straight away, or through faults (inject.c). Called by the thread
 * that runs the stream. */
typedef struct host_wire {
    void (*send)(fab_rail *r, const host_message *m, const void *payload);
    void (*destroy)(fab_rail *r);
} host_wire;

struct fab_rail {
    fab_queue *queue;
    const host_wire *wire;
    void *wire_state;
    uint32_t nodes, node, n_ctx, n_sig;
    fab_rail_word **words; /* per node */
    _Atomic uint64_t *consumed; /* per own word; written by the thread that runs the stream */
    uint64_t *sent; /* messages per (node, ctx); likewise */
    uint32_t *node_of;  /* per absolute rank; UINT32_MAX: not on this rail */
};

typedef struct host_device {
    fab_device face;
    fab_open open;
    fab_peers peers;
    host_control *own;
    uint64_t seed;
    uint32_t n_workers, n_started;
    pthread_t *workers;

    pthread_mutex_t lock; /* queues, busy, events, helpers, stop */
    fab_queue *queues;
    uint32_t turn;    /* where the next scan starts */
    uint32_t helpers; /* callers inside caller_wait or sync */
    uint32_t workers_asleep;
    int stop;
    _Atomic uint32_t room, room_waiters; /* futex of an enqueuer that found a ring full, or of queue_destroy */

    fab_inject inject;
    int injecting;
    void (*on_item)(void *context, const char *phase);
    void *on_item_context;
} host_device;

static inline host_control *host_page(const host_device *d, uint32_t rank)
{
    return (host_control *)fab_peers_page(&d->peers, rank);
}
static inline bool host_has_failed(host_device *d)
{
    return fab_peers_failed(&d->peers);
}

static inline void host_adopt_poison(host_device *d)
{
    fab_peers_adopt(&d->peers);
}

/* arena.c */
int host_arena_create(fab_device *d, uint64_t bytes, const uint8_t *peers, fab_arena **out);
void host_arena_hold(fab_arena *a);
void host_arena_drop(fab_arena *a);
void host_arena_trim(fab_arena *a, uint32_t keep);

/* wake.c */
void host_ring(host_control *c);        /* a word or queue of this rank has changed */
void host_ring_caller(host_control *c); /* an event has */
void host_ring_all(host_control *c);    /* failure: everybody up */

/* fail.c */
int host_failure(fab_device *d, tide_failure *out);
int host_fail_face(fab_device *d, const tide_failure *failure);
/* The failure of a wait: `peer`'s word is missing or wrong. */
void host_fail_wait(host_device *d, int code, const host_item *item, uint32_t peer);
/* A message that is not the one that had to come; its receiver has noticed. `what` says how it differs. */
void host_fail_message(host_device *d, const host_message *m, const char *what);
extern const fab_peers_hooks host_peers_hooks;

/* stream.c: what the caller does */
int host_queue_create(fab_device *d, uint32_t n_streams, fab_queue **out);
void host_queue_stop(fab_queue *q);
void host_queue_destroy(fab_queue *q);
int host_event_create(fab_queue *q, fab_event **out);
void host_event_destroy(fab_event *e);
int host_calls_create(fab_queue *q, uint32_t n_args, const uint32_t *ops, fab_calls **out);
void host_calls_destroy(fab_calls *c);
int host_call_begin(fab_calls *c, const fab_call_desc *desc, fab_call **out);
void host_call_submit(fab_call *call, int hold);
/* After a failure: returns when no stream runs; what is still queued will not run. Not from a thread that runs one. */
void host_stand_still(host_device *d);
int host_enqueue(fab_queue *q, uint32_t stream, const host_item *item);
int host_copy(fab_queue *q, uint32_t stream, fab_call *call, const fab_copy *copy);
int host_reduce(fab_queue *q, uint32_t stream, fab_call *call, const fab_reduce *reduce);
int host_signal(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value);
int host_wait(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value,
              int check, const fab_where *where);
int host_record(fab_queue *q, uint32_t stream, fab_event *e);
int host_join(fab_queue *q, uint32_t stream, fab_event *e);
int host_caller_record(fab_queue *q, fab_event *e, void *stream);
int host_caller_check(fab_device *d, void *stream);
int host_caller_fill(fab_queue *q, uint32_t through, void *dst, uint8_t value, uint64_t bytes, void *stream);
int host_caller_copy(fab_queue *q, uint32_t through, void *dst, const void *src, uint64_t bytes, void *stream);

/* work.c: what workers and waiting callers do */
void *host_worker(void *device);
int host_caller_wait(fab_queue *q, fab_event *e, void *stream);
int host_sync(fab_queue *q);
void host_start(host_device *d); /* after a submit */
void host_event_complete(fab_event *e, uint64_t record); /* device lock held */
void host_room_made(host_device *d);
/* First missing rank of a wait that is not satisfied; -1 when it is. */
int64_t host_missing(host_device *d, const host_item *item);

/* rail.c, inject.c */
extern const fab_rail_verbs host_rail_verbs;
void host_rail_put(fab_rail *r, const fab_put *put, const host_item *item);
void host_rail_signal(fab_rail *r, const fab_rail_post *post, const host_item *item);
/* The receiving side: takes a message of which `bytes` bytes have come, or refuses it and fails the communicator. */
void host_rail_arrive(fab_rail *r, const host_message *m, const void *payload, uint64_t bytes);
fab_rail_word *host_rail_own_word(const fab_rail *r, const fab_rail_post *post, _Atomic uint64_t **consumed);
int host_inject_wire(fab_rail *r, const fab_inject *inject);

/* kernels.c: how a batch is executed; `call` may be NULL when nothing in it depends on a call. */
void host_run_copy(const fab_copy *copy, const fab_call *call);
void host_run_reduce(const fab_reduce *reduce, const fab_call *call);
/* The naive twins, for tests. */
void host_naive_copy(const fab_copy *copy, const fab_call *call);
void host_naive_reduce(const fab_reduce *reduce, const fab_call *call);

#endif
