/* fake_nccl_internal.h - what the files of the fake NCCL share. All state is behind the fake driver's lock. */
#ifndef FAKE_NCCL_INTERNAL_H
#define FAKE_NCCL_INTERNAL_H

#include "fake_internal.h"
#include "fake_nccl.h"

enum { MAGIC_COMM = 0x636f6d6d, MAGIC_WINDOW = 0x77696e64 };

/* What is given back stays in memory until stop: whoever uses it is told, and what is under way may look at it. */
struct nccl_window {
    uint32_t magic;
    nccl_window next;
    nccl_comm comm;
    uint64_t index; /* among the communicator's registrations: a rank's n-th is its peers' n-th */
    uintptr_t base;
    uint64_t bytes;
    bool symmetric, gone;
};

/* A rank's side of a communicator. */
struct nccl_comm {
    uint32_t magic;
    nccl_comm next;
    struct fake_clique *clique;
    int rank, device;
    int n_ctx, n_sig;
    bool eager; /* one-sided calls before the first window */
    bool aborting, released, finalized, gone; /* released: what stands in it goes on without effect */
    nccl_result async;
    nccl_window windows;
    uint64_t registered;            /* registrations that this rank has come to */
    uint64_t issued, finished;      /* operations: the queue */
    uint64_t *delivered, *expected; /* of (peer, signal, context) */
    const void *group;              /* of the thread that holds operations of it back; NULL: none */
};

/* All ranks of a communicator. */
typedef struct fake_clique {
    struct fake_clique *next;
    uint64_t id;
    int n_ranks, joined;
    nccl_result wrong; /* found when all have come */
    char why[160];
    nccl_comm ranks[FAKE_NCCL_MAX_RANKS];
} fake_clique;

/* One put, signal or wait of a call. */
typedef struct fake_transfer {
    nccl_comm comm;
    cu_stream stream;
    bool waits;
    int peer, sig, ctx;
    /* put; signal: no bytes */
    uintptr_t src;
    uint64_t window, offset, bytes;
    struct fake_arrival { uint64_t at, bytes; } piece[4]; /* in the order in which they arrive */
    uint32_t n_pieces, arrived, put_off;
    bool done, signal_lost;
    /* wait */
    struct fake_awaited { int peer, sig, ctx; uint64_t count; } *awaited; /* once on its stream: the count since ever */
    int n_awaited;
} fake_transfer;

/* What one turn of a communicator's queue is: a wait, or the puts and signals of a group. */
typedef struct fake_plan {
    struct fake_plan *next;
    nccl_comm comm; /* NULL: the fake has been stopped; it runs out without effect */
    uint64_t turn;
    fake_transfer *transfers;
    int n;
    bool endless; /* its completion is lost */
} fake_plan;

enum nccl_function {
#define X(field, name, result, parameters) NCCL_FAKE_##field,
    NCCL_LIBRARY(X)
#undef X
};
#define X(field, name, result, parameters) result fake_nccl_##field parameters;
NCCL_LIBRARY(X)
#undef X

typedef struct fake_nccl_world {
    bool running;
    uint64_t generation, next_id;
    fake_nccl_options options;
    struct fake_clique *cliques;
    nccl_comm comms;
    fake_plan *plans; /* that are on streams */
    int inside, open_groups;

    struct { const char *function; uint64_t at, seen; nccl_result result; } fail, hang;
    struct { uint64_t at, seen; nccl_result result; } completion, signal, async;
    uint64_t calls;
    bool failed;
    char last[256]; /* what GetLastError says */
} fake_nccl_world;
extern fake_nccl_world fake_nccl;

/* fake_nccl.c. Every function of the table is enter .. leave; `needs` is of fake_needs. */
nccl_result fake_nccl_enter(enum nccl_function function, int needs);
nccl_result fake_nccl_leave(nccl_result result);
/* Stands until it holds; false: the fake is being stopped. */
bool fake_nccl_stand(bool (*holds)(const void *), const void *context);
nccl_result fake_nccl_refuse(nccl_result result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* NCCL_OK, or why calls on the communicator are refused. */
nccl_result fake_nccl_good(nccl_comm comm, const char *what);

/* fake_nccl_window.c: the window of the rank's that holds all of it and is registered; NULL: none. */
nccl_window fake_nccl_window_at(nccl_comm comm, uintptr_t at, uint64_t bytes);
nccl_window fake_nccl_window_of(nccl_comm comm, uint64_t index); /* given back or not */
bool fake_nccl_registered(uintptr_t base, uint64_t bytes);       /* by any communicator that is alive */

/* fake_nccl_queue.c */
void fake_nccl_queue_clear(void); /* what is on streams runs out without effect */

#endif
