/* fake_internal.h - what the files of the fake driver share. All state is behind one lock. */
#ifndef FAKE_INTERNAL_H
#define FAKE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "fake_cuda.h"

enum { MAGIC_CONTEXT = 0x636f6e74, MAGIC_STREAM = 0x73747265, MAGIC_EVENT = 0x6576656e, MAGIC_MODULE = 0x6d6f6475 };

enum { FAKE_MAX_FUNCTIONS = 40 }; /* of a module */

/* Physical memory of a device: a memfd whose last page describes it, so that another process can import it. Or a multicast
 * object, then with a team. */
typedef struct fake_memory {
    uint32_t refs; /* handles, mappings, bindings */
    int fd, device;
    uint64_t bytes, inode;
    struct fake_team *team;
} fake_memory;

typedef struct fake_handle {
    struct fake_handle *next;
    fake_memory *memory;
    cu_handle number;
} fake_handle;

typedef struct fake_reservation {
    struct fake_reservation *next;
    uintptr_t base;
    uint64_t bytes;
} fake_reservation;

/* Addresses that something is behind. */
enum fake_span_kind { SPAN_MAPPING, SPAN_ALLOCATION, SPAN_HOST, SPAN_MULTICAST };
typedef struct fake_span {
    enum fake_span_kind kind;
    uintptr_t base;
    uint64_t bytes;
    int device;      /* where the memory is; HOST: whose context allocated it */
    uint32_t access; /* a bit a device */
    fake_memory *memory;
} fake_span;

struct cu_function {
    struct fake_kernel *kernel;
    cu_module module;
    int shared;
};
struct cu_module {
    uint32_t magic;
    cu_module next;
    int device;
    struct cu_function functions[FAKE_MAX_FUNCTIONS];
    int n_functions;
};

/* One record of an event; joins keep the one they found. */
typedef struct fake_record {
    uint32_t refs;
    bool done;
    int64_t when;
} fake_record;
struct cu_event {
    uint32_t magic;
    cu_event next;
    int device;
    bool timed;
    fake_record *record; /* the latest; NULL: never */
};

typedef struct fake_piece {
    uintptr_t dst, src; /* src 0: fill */
    uint64_t width, rows, dst_pitch, src_pitch;
    int fill;
} fake_piece;
typedef struct fake_range { uintptr_t base; uint64_t bytes; } fake_range;

enum fake_op_kind { OP_COPY, OP_MEMORY, OP_KERNEL, OP_RECORD, OP_JOIN, OP_FOREIGN };

/* Work that a library on top of the driver has put on a stream. Called under the lock. */
typedef struct fake_foreign {
    const char *name; /* what a stream stands in */
    bool (*blocked)(const void *item);
    bool (*step)(void *item); /* true: it has ended */
    bool (*uses)(const void *item, uintptr_t base, uint64_t bytes);
    void (*drop)(void *item);
} fake_foreign;

typedef struct fake_op {
    struct fake_op *next;
    cu_stream stream;
    enum fake_op_kind kind;
    uint32_t n, done; /* pieces or memory operations */
    fake_piece *pieces;
    cu_stream_op *memory;
    fake_record *record;
    struct fake_kernel *kernel;
    void *args;
    fake_range *ranges; /* of a kernel */
    uint32_t n_ranges, cap_ranges;
    const fake_foreign *foreign;
    void *item;
} fake_op;

typedef struct fake_queue { fake_op *head, **tail; } fake_queue;

struct fake_touch { fake_op *op; int device; bool bad; };

struct cu_stream {
    uint32_t magic;
    cu_stream next;
    int device;
    bool own;       /* created by StreamCreate, and counted */
    bool destroyed; /* freed when it has run dry */
    bool capturing, stalled;
    uint64_t number;   /* of those created by StreamCreate, from 1; of the others: 0 the legacy stream, 1 a thread's */
    uint64_t position; /* among all of the context */
    uint64_t enqueued, finished;
    fake_queue *queue;
    pthread_t thread; /* of a per-thread stream */
};

struct cu_context {
    uint32_t magic;
    int device, retained;
    uint64_t streams;  /* created so far: which hardware queue is next */
    cu_stream implicit; /* the legacy stream and per-thread streams */
    fake_queue queues[FAKE_MAX_CONNECTIONS];
};

typedef struct fake_kernel {
    struct fake_kernel *next;
    const char *name;
    size_t bytes;
    void (*run)(const void *args);
    void (*ranges)(const void *args, fake_touch *t);
} fake_kernel;

typedef struct fake_world {
    pthread_mutex_t lock;
    pthread_cond_t work;  /* the worker: something to do, or to end */
    pthread_cond_t moved; /* callers: an operation has ended */
    pthread_t worker;
    bool running, working, stop, initialized; /* working: the worker is there */
    uint64_t generation, random;
    fake_cuda_options options;
    struct cu_context contexts[FAKE_MAX_DEVICES];
    fake_handle *handles;
    uint64_t next_handle;
    fake_reservation *reservations;
    fake_span **spans; /* by address */
    size_t n_spans, cap_spans;
    cu_stream streams;
    uint64_t n_streams;
    cu_event events;
    cu_module modules;
    fake_kernel *kernels;
    bool foreign; /* some memory is another process's: words may change unseen */
    char first[256];
    int complaints;

    uint64_t calls, fail_at, oom_at, fail_seen, oom_seen;
    const char *fail_function;
    cu_result fail_result;
    bool failed;
    const char *fault;
    uint64_t stalled;
    bool (*registered)(uintptr_t base, uint64_t bytes); /* a library holds on to this memory; NULL: there is none */
    uint64_t multicasts;      /* cuMulticastCreate was called */
    _Atomic uint32_t callers; /* inside or before the lock */
    uint32_t favour, bursts;  /* the scheduler's moods */
    uint32_t last;
} fake_world;
extern fake_world fake;

enum fake_function {
#define X(field, name, parameters) FAKE_##field,
    CUDA_DRIVER(X) CUDA_DRIVER_OPTIONAL(X)
#undef X
};
#define X(field, name, parameters) cu_result fake_##field parameters;
CUDA_DRIVER(X)
CUDA_DRIVER_OPTIONAL(X)
#undef X

/* fake_device.c. Every function of the table is enter .. leave; enter takes the lock and says whether to go on, leave gives it
 * back. RELEASES: an injected fault comes with leave, after the deed. */
enum fake_needs { NEEDS_CONTEXT = 1, ALLOCATES = 2, RELEASES = 4, UNINITIALIZED = 8 };
cu_result fake_enter(enum fake_function function, int needs);
cu_result fake_leave(cu_result result);
cu_context fake_current(void); /* NULL when there is none */
void fake_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t fake_random(uint64_t below);

/* fake_memory.c */
/* The span in which all of it lies, if streams of `device` may use it; else NULL. */
fake_span *fake_find(uintptr_t base, uint64_t bytes, int device);
fake_span *fake_find_multicast(uintptr_t base, uint64_t bytes, int device); /* the same; the other one finds none of these */
void fake_memory_clear(void); /* frees everything */
int fake_memory_count(enum fake_span_kind kind);
void fake_memory_drop(fake_memory *m);
cu_handle fake_handle_add(fake_memory *m);
fake_memory *fake_handle_memory(cu_handle handle); /* NULL: no such handle */
/* Whether the device's own mapping of the object is there, or queued work uses any mapping of it. */
bool fake_multicast_used(const fake_memory *team, int device);

/* fake_multicast.c */
fake_memory *fake_team_open(int fd, uint64_t inode); /* without a reference; NULL: the file is no team's */
void fake_team_close(struct fake_team *team);
cu_result fake_multicast_map(const fake_memory *team, uint64_t bytes);
bool fake_multicast_member(const fake_memory *team, int device);
void fake_multicast_released(const fake_memory *m); /* a handle is about to go */
int fake_multicast_bindings(void);
void fake_multicast_clear(void);
/* Where the memories behind an address are here; returns their number. */
int fake_multicast_memories(uintptr_t address, uint64_t bytes, int device, uintptr_t memories[FAKE_MAX_DEVICES]);
bool fake_multicast_bound(const fake_span *span); /* all devices of the team have memory behind it */

/* fake_stream.c */
cu_stream fake_stream_of(cu_stream handle); /* resolves 0, 1 and 2; NULL when it is none */
void fake_record_drop(fake_record *r);
void fake_op_free(fake_op *op);
bool fake_op_uses(const fake_op *op, uintptr_t base, uint64_t bytes);
/* Complains of queued work on memory that goes away. waits: the call waits for work; only what is blocked counts. */
bool fake_going_away(uintptr_t base, uint64_t bytes, const char *what, bool waits); /* true: there is some */
void fake_stream_enqueue(cu_stream s, fake_op *op);
/* The stream that work is enqueued on, resolved; or why not: also complained of. */
cu_result fake_work_stream(cu_stream *stream, const char *what);
void fake_stream_foreign(cu_stream s, const fake_foreign *foreign, void *item);
void fake_streams_clear(void);
void fake_streams_deal(int connections); /* onto hardware queues anew */
/* All that is enqueued on the device has ended; or some of it is blocked and uses the memory (NULL: none): complained of. */
void fake_wait_idle(int device, const fake_span *memory, const char *what);

/* A kernel that adds through a multicast address touches it so. */
void fake_touch_multicast(fake_touch *t, uint64_t address, uint64_t bytes);

/* fake_kernels.c */
void fake_kernels_add(void); /* the library's, as their C twins */

/* fake_run.c */
bool fake_worker_start(void);
void fake_wake(void);
bool fake_op_blocked(const fake_op *op);
void fake_stream_drained(cu_stream s);
int fake_kernel_device(void); /* on which the kernel runs that asks */

#endif
