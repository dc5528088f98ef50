/*
 * cuda.h - the CUDA device: ranks are processes or threads of one machine, one GPU each (or a share of one), streams are
 * CUDA streams of the GPU's primary context, memory is mapped between GPUs.
 *
 * A wait is a stream operation on a word in this GPU's memory, never in a peer's. A signal is a stream operation as well,
 * or a store of the kernel that it follows, be that a sum or a copy; where the driver does not write words of another GPU, it
 * is an 8-byte copy from a staging word that the same stream has written. Words carry no tag: whether ranks make the same call
 * is compared on the host, in the control pages, before anything of it is enqueued.
 *
 * What is enqueued is bound at once: a call's arguments travel in launches and copies. Stream operations of one stream
 * are gathered and a reduce or a copy waits for its posts; both go out before anything else on their stream, and at
 * call_submit.
 */
#ifndef TIDE_CUDA_H
#define TIDE_CUDA_H

#include "fabric/cuda/launch.h"
#include "fabric/cuda/multicast.h"
#include "fabric/peers.h"

/* ---- the device --------------------------------------------------------------------------------- */

enum {
    CUDA_CALLS = 8,      /* of one program that are begun and not submitted for good */
    CUDA_TAGS = 1024,    /* collectives that the control page remembers */
    CUDA_OPS = 128,      /* stream operations that go out together; the driver takes less than 256 */
    CUDA_STAGED = 64,    /* staging words of a stream */
    CUDA_ROOM = 512,     /* what a stream takes before it looks back, in commands and awaited words */
    CUDA_TARGETS = 2048, /* awaited words that a stream remembers: more than two such rooms */
    CUDA_READ_BACK = 64  /* words looked at together */
};
_Static_assert(CUDA_TARGETS > 3 * CUDA_ROOM, "what is under way stays in the ring");

/* Collective `sequence` of a rank, counted from 1. */
typedef struct cuda_tag { _Atomic uint64_t sequence, tag; } cuda_tag;
typedef struct cuda_page {
    fab_page page;
    _Atomic uint32_t at_rest; /* the rank has failed, its streams stand still, and nothing more comes on them */
    cuda_tag tags[CUDA_TAGS];
} cuda_page;

/* Device memory of one rank as this process sees it. Ranks of one process share the object, so it is counted; each
 * keeps the GPU's context. */
typedef struct cuda_memory {
    _Atomic uint32_t refs;
    const cuda_driver *driver;
    cu_dev gpu;
    _Atomic uint64_t allowed; /* bit i: GPU i may use it */
    cu_context context;
    cu_handle handle;
    cu_ptr base;
    uint64_t bytes;
    int retained, created, reserved, mapped;
} cuda_memory;

typedef struct cuda_arena {
    fab_arena face;
    _Atomic uint32_t refs;
    uint32_t rank, n_ranks;
    cuda_memory **memory;
    cuda_multicast *multicast;
} cuda_arena;

/* A word that a stream waits for; word 0: it stands in the extension's library, perhaps for this rank. */
typedef struct cuda_target {
    cu_ptr word;
    uint64_t value, last; /* last: number of the wait's last target */
    uint32_t rank;        /* who posts */
    fab_waiting wait;     /* where NULL: for another stream of this rank, whose own wait says more */
} cuda_target;

typedef struct cuda_stream {
    cu_stream handle;        /* NULL: no program has ops on it */
    const fab_reduce *reduce; /* put off, or a copy is, with its call: posts may follow */
    const fab_copy *copy;
    fab_call *put_off_call;
    uint32_t n_ops, next_staged;
    int behind_work;         /* bytes have been enqueued since the last wait */
    int handed_over;         /* once or more: it may come to stand in the library for good */
    cu_ptr done, staged;     /* device memory: a launch's counter; staging words */
    cu_ptr crumb_device;
    /* Number of the first target of the latest wait that the stream has come to; 0: none, or it has left the library again. */
    _Atomic uint64_t *crumb;
    uint64_t n_targets;      /* awaited so far: target t is targets[t % CUDA_TARGETS], counted from 1 */
    uint64_t settled;        /* the wait that begins with this target is over, as looked up; under the device lock */
    cuda_target *targets;    /* under the device lock */
    uint32_t since_mark, mark; /* mark: of the two, the next to be recorded */
    cu_event marks[2];
    cu_stream_op ops[CUDA_OPS];
} cuda_stream;

/* A stream that stands in the extension's library for good must not hold up the others, and a CUDA event behind it would.
 * What is recorded there is a count in a word, which a failure sets ahead like any other. */
typedef struct cuda_tally {
    struct cuda_tally *next; /* not in use */
    cu_ptr word;
    uint64_t count;
} cuda_tally;
enum { CUDA_TALLIES = 128 };
typedef struct cuda_tallies {
    struct cuda_tallies *next;
    cu_ptr words;
    cuda_tally each[CUDA_TALLIES];
} cuda_tallies;

struct fab_event {
    fab_queue *queue;
    cu_event handle;
    cuda_tally *tally;            /* NULL: no rail of another library */
    const cuda_stream *tallied_by; /* the latest record is in the tally, by this stream; NULL: it is the handle's */
};

struct fab_queue {
    struct cuda_device *device;
    fab_queue *next;
    uint32_t n_streams;
    cuda_stream *streams;
    cu_ptr words;  /* device memory of the streams */
    void *crumbs;  /* mapped host memory: a line a stream */
    cu_event bridge[2]; /* between the caller's stream and `through` */
    cuda_tallies *tallies;
    cuda_tally *spare;
    int64_t now;   /* when the caller began the part that it is enqueueing */
};

struct fab_call {
    fab_calls *calls;
    uint32_t held; /* a further part follows */
    int accumulate;
    float alpha;
    uint64_t number;
    const void **args;
};
struct fab_calls {
    fab_queue *queue;
    uint32_t n_args, next;
    const void **args;
    fab_call ring[CUDA_CALLS];
};

/* What another library's rail makes of this device: a fabric of its own name with this one's memory, streams and words.
 * A stream stands in its operations without a word that could be looked up or set ahead, after a failure perhaps for good. */
typedef struct cuda_extension {
    const char *name; /* of the fabric */
    const fab_rail_verbs *rail;
    int rail_mapped; /* of fab_device */
    int rdma;        /* network adapters are to read and write arenas, where the GPU has that */
    /* All may be NULL. open: what one rank can do alone. poll: by the watch, now and then while something is under way;
     * fails the device if the library has found something wrong. failed: the device has; returns at once, and is called again
     * until the streams have come to rest. close: whatever open has returned. */
    int (*open)(struct cuda_device *d);
    void (*poll)(struct cuda_device *d);
    void (*failed)(struct cuda_device *d);
    void (*close)(struct cuda_device *d);
} cuda_extension;

typedef struct cuda_device {
    fab_device face;
    const cuda_extension *extension;
    void *extra; /* the extension's */
    fab_open open;
    fab_peers peers;
    const cuda_driver *driver;
    cu_dev gpu;
    cu_context context;
    int rdma;              /* arenas are for network adapters as well */
    int retained;
    _Atomic int current;   /* pushed by the enqueueing thread until call_submit */
    cuda_kernels *kernels;
    cu_stream rescue;      /* never waits: ends the waits of the others, reads words back */
    uint64_t *read_back;   /* CUDA_READ_BACK words of pinned memory */
    uint8_t *same_gpu;     /* per rank: its memory is in this GPU */
    _Atomic uint8_t *gone; /* per rank: its process has ended */
    char no_multicast[192];
    uint64_t sequence;     /* collectives begun */
    int direct;            /* stream operations write words of peers */
    pthread_mutex_t lock;  /* queues and what their streams wait for */
    fab_queue *queues;
    _Atomic uint32_t busy; /* something may be under way: the watch looks again soon */
    _Atomic uint32_t restless; /* its streams have been given up: nobody waits for them again */
    _Atomic uint32_t handed_over; /* streams of it have been in the extension's library, and may be when it has failed */
    int64_t stuck_since;   /* the watch's: one has been there since the failure; 0: none */
} cuda_device;

static inline cuda_page *cuda_rank_page(const cuda_device *d, uint32_t rank)
{
    return (cuda_page *)fab_peers_page(&d->peers, rank);
}
static inline cu_ptr cuda_address(const void *p)
{
    return (cu_ptr)(uintptr_t)p;
}
static inline int cuda_push(const cuda_device *d)
{
    return cuda_check(d->driver, d->driver->CtxPush(d->context), "cuCtxPushCurrent");
}
static inline void cuda_pop(const cuda_device *d)
{
    cu_context ignored;
    d->driver->CtxPop(&ignored);
}
/* A GPU that has failed says so again. A call that has failed once says nothing about the stream, nor is it a reason not to
 * free what is there. */
static inline cu_result cuda_query(const cuda_device *d, cu_stream stream)
{
    cu_result now = d->driver->StreamQuery(stream);
    return now == CU_OK || now == CU_NOT_READY ? now : d->driver->StreamQuery(stream);
}
static inline bool cuda_push_to_free(const cuda_device *d)
{
    return d->driver->CtxPush(d->context) == CU_OK || d->driver->CtxPush(d->context) == CU_OK;
}
/* Of MemAlloc and MemHostAlloc; both wait for the GPU. 0 and NULL are fine. */
static inline void cuda_free(const cuda_device *d, cu_ptr at)
{
    if (at && !cuda_gpu_given_up(d->gpu))
        d->driver->MemFree(at);
}
static inline void cuda_free_host(const cuda_device *d, void *at)
{
    if (at && !cuda_gpu_given_up(d->gpu))
        d->driver->MemFreeHost(at);
}
/* Sleeps a little longer each time. GPUs ring no futex, and a driver's own wait would not see a failure. */
void cuda_nap(int64_t *ns);

/* device.c */
int cuda_open_extended(const fab_open *desc, const cuda_extension *extension, fab_device **out);
int cuda_queues_take(cuda_device *d, uint32_t n); /* hardware queues of this GPU for streams of this process */
void cuda_queues_give(cuda_device *d, uint32_t n);
int cuda_rest(const cuda_device *d, const char *what); /* until the rescue stream has nothing to do; context current */
int cuda_zero(const cuda_device *d, cu_ptr at, uint64_t bytes); /* done when it returns; context current */

/* arena.c */
cu_alloc_prop cuda_arena_memory(const cuda_device *d);
int cuda_arena_create(fab_device *d, uint64_t bytes, const uint8_t *peers, fab_arena **out);
void cuda_arena_hold(fab_arena *a);
void cuda_arena_drop(fab_arena *a);
void cuda_arena_trim(fab_arena *a, uint32_t keep);

/* queue.c: set-up, calls, the caller's stream */
int cuda_queue_create(fab_device *d, uint32_t n_streams, fab_queue **out);
void cuda_queue_stop(fab_queue *q);
void cuda_queue_destroy(fab_queue *q);
int cuda_event_create(fab_queue *q, fab_event **out);
void cuda_event_destroy(fab_event *e);
int cuda_calls_create(fab_queue *q, uint32_t n_args, const uint32_t *ops, fab_calls **out);
void cuda_calls_destroy(fab_calls *c);
int cuda_call_begin(fab_calls *c, const fab_call_desc *desc, fab_call **out);
void cuda_call_submit(fab_call *call, int hold);
int cuda_caller_record(fab_queue *q, fab_event *e, void *stream);
int cuda_caller_wait(fab_queue *q, fab_event *e, void *stream);
int cuda_caller_check(fab_device *d, void *stream);
int cuda_caller_fill(fab_queue *q, uint32_t through, void *dst, uint8_t value, uint64_t bytes, void *stream);
int cuda_caller_copy(fab_queue *q, uint32_t through, void *dst, const void *src, uint64_t bytes, void *stream);
int cuda_sync(fab_queue *q);

/* stream.c: what is enqueued */
int cuda_copy(fab_queue *q, uint32_t stream, fab_call *call, const fab_copy *copy);
int cuda_reduce(fab_queue *q, uint32_t stream, fab_call *call, const fab_reduce *reduce);
int cuda_signal(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value);
int cuda_wait(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value,
              int check, const fab_where *where);
int cuda_record(fab_queue *q, uint32_t stream, fab_event *e);
int cuda_join(fab_queue *q, uint32_t stream, fab_event *e);
/* Every verb that enqueues begins with it: the failure, or the context made current until call_submit. */
int cuda_enter(fab_queue *q);
/* Sends out what the stream has put off. */
int cuda_flush(fab_queue *q, cuda_stream *s);
int cuda_flush_all(fab_queue *q);
/* What `weight` more commands and words need; may sleep until the stream has done some. */
int cuda_room(fab_queue *q, cuda_stream *s, uint32_t weight);
/* One 8-byte word each in the memory of a rank that is not this one, after all that the stream did before. */
int cuda_post(fab_queue *q, cuda_stream *s, const cu_ptr *words, const uint64_t *values, uint32_t n);
/* Appends the wait for n words; their `last` and `wait` are filled in. n is at most CUDA_AWAIT. */
enum { CUDA_AWAIT = CUDA_OPS - 1 };
int cuda_await(fab_queue *q, cuda_stream *s, cuda_target *targets, uint32_t n, const fab_waiting *wait);
/* What the extension's library enqueues between the two, so many operations, may hold the stream up; targets, at most
 * CUDA_AWAIT of word 0, say for whom. All streams have been given what was put off. */
int cuda_hand_over(fab_queue *q, cuda_stream *s, cuda_target *targets, uint32_t n, uint32_t operations,
                   const fab_waiting *wait);
int cuda_take_back(fab_queue *q, cuda_stream *s);

/* rail.c */
extern const fab_rail_verbs cuda_rail_verbs;

/* watch.c */
extern const fab_peers_hooks cuda_peers_hooks;
int cuda_failure(fab_device *d, tide_failure *out);
int cuda_fail_face(fab_device *d, const tide_failure *failure);
int cuda_fail_device(cuda_device *d); /* the driver has said why: the thread's last error */
/* Ends all waits of the queue (NULL: of all queues) until its streams have come to rest. One that stands in the extension's
 * library gets a second. If they do not, the GPU is given up. */
void cuda_bring_to_rest(cuda_device *d, fab_queue *q);
/* After a failure: until it is known of all ranks of this process on this GPU whether they come to rest. */
void cuda_settle(cuda_device *d);
void cuda_settled(cuda_device *d); /* this one */
/* TIDE_OK: idle; 1: not yet; else an error of the device. Lock and context are the caller's business. */
int cuda_queue_idle(fab_queue *q);

#endif
