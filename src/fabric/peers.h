/*
 * peers.h - what the fabrics share: memory under a file descriptor, a control page a rank, the failure that goes round on
 * these pages, and the watch over the peers' processes.
 *
 * The page of a rank of another machine is a mirror in this process: nobody writes into it but this rank, as the link
 * (link.h) tells.
 */
#ifndef TIDE_PEERS_H
#define TIDE_PEERS_H

#include <poll.h>
#include <pthread.h>

#include "fabric/link.h"

/* Shared memory of one rank as this process sees it. Ranks of one process share the object, so it is counted. */
typedef struct fab_memory {
    _Atomic uint32_t refs;
    int fd;         /* the owner's, else -1 */
    void *base;
    uint64_t bytes; /* mapped */
} fab_memory;
int fab_memory_create(const char *name, uint64_t bytes, fab_memory **out);
int fab_memory_private(uint64_t bytes, fab_memory **out); /* zeroed, of this process alone, without a descriptor */
void fab_memory_drop(fab_memory *m);
/* C  memory[r] for every r of this machine with peers[r] != 0, and own; all or none. process: from fab_process. pids (may
 * be NULL): per rank, 0 for this process, negative and its own for a rank of another machine. */
int fab_memory_exchange(const fab_open *desc, int status, uint64_t process, fab_memory *own, const uint8_t *peers,
                        fab_memory **memory, int64_t *pids);

/* C  What lies under a descriptor: objects[r] is the `own` of rank r where that rank is of this process (its owner keeps it
 * until all have agreed on what they made of it), else fds[r] is its `fd`, owned by the caller. For every r of this
 * machine with peers[r] != 0, and this rank; NULL and -1 for the others. */
int fab_objects_exchange(const fab_open *desc, int status, uint64_t process, void *own, int fd, const uint8_t *peers,
                         void **objects, int *fds, int64_t *pids);

/* What this process tells its ranks from others by: pids alone could be equal in different pid namespaces. */
int fab_process(uint64_t *token);

/* Sleeps while the word, in shared memory, is `seen`. timeout_ns < 0: none. */
void fab_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns);
void fab_futex_wake(_Atomic uint32_t *word);

/* A control page begins with this. */
typedef struct fab_page {
    _Atomic uint32_t barriers; /* how many this rank has come to */
    _Atomic uint32_t bell;     /* futex of a rank in a barrier */
    _Atomic uint32_t poison; /* 1 + rank whose page holds the failure */
    _Atomic uint32_t failed; /* `failure` is complete */
    _Atomic uint32_t closed; /* the rank has left in order: its process may end */
    _Atomic uint64_t given_up; /* latest set-up that this rank has failed in; of another machine: its rail */
    _Atomic uint64_t crumb_call, crumb_op; /* last wait that did not find its word */
    tide_failure failure;
} fab_page;

/* What a fabric does about it. */
typedef struct fab_peers_hooks {
    void (*failed)(void *device);               /* this rank has: its threads wake up */
    void (*told)(void *device, uint32_t rank);  /* that rank's page says so now; may be NULL */
    void (*died)(void *device, uint32_t rank);  /* a process has ended and this rank of it had not left */
    /* Called by the watch at its start, after so many milliseconds as it returned (-1: never), and when woken; may be
     * NULL. */
    int (*tick)(void *device);
} fab_peers_hooks;

typedef struct fab_peers {
    const fab_open *open;
    tide_options options;
    const fab_peers_hooks *hooks;
    void *device;
    int64_t deadline_ns;
    uint64_t process;
    int fork_watched;
    fab_memory *page;   /* own, until they have met */
    fab_memory **pages; /* per rank */
    fab_page *own;
    int64_t *pids;      /* per rank; 0: this process; negative: on another machine */
    uint64_t page_bytes;
    fab_link *link;        /* NULL: all ranks are on this machine */
    fab_link_calls calls;  /* made so far */
    _Atomic uint32_t lost; /* 1 + rank that has died, says the link; for the watch */
    pthread_mutex_t lock;
    _Atomic int failed; /* code, once the own page's failure is complete */
    pthread_t watch;
    int watching, locked;
    _Atomic int stop;
    struct pollfd *watch_set;
} fab_peers;

/* What one rank can do alone. open: kept; its options are copied and point to the copy then, for later set-up calls.
 * page_bytes: of a control page. */
int fab_peers_init(fab_peers *p, fab_open *open, uint64_t page_bytes, const fab_peers_hooks *hooks, void *device);
/* C  Pages of all ranks. status: this rank's so far; p may be NULL when it is none. */
int fab_peers_meet(const fab_open *desc, fab_peers *p, int status);
int fab_peers_watch(fab_peers *p);      /* starts the watch */
void fab_peers_wake(fab_peers *p);      /* ticks once more */
void fab_peers_leave(fab_peers *p);     /* in order; before the threads of the device end */
void fab_peers_clear(fab_peers *p);     /* after an init, whatever it returned */

static inline fab_page *fab_peers_page(const fab_peers *p, uint32_t rank)
{
    return p->pages[rank]->base;
}
static inline bool fab_peers_here(const fab_peers *p, uint32_t rank)
{
    return fab_same_machine(p->open, rank);
}
static inline bool fab_peers_failed(fab_peers *p)
{
    return atomic_load_explicit(&p->failed, memory_order_acquire) != 0;
}

/* spread: the other ranks fail with this record (else they find out by themselves). */
void fab_peers_fail(fab_peers *p, const tide_failure *failure, bool spread);
/* Takes over what another rank has announced. */
void fab_peers_adopt(fab_peers *p);
/* The same, also of what no other rank has been told of: a wait here may have ended only because a rank has failed. */
void fab_peers_adopt_any(fab_peers *p);
/* The failure verb, but for standing still. */
int fab_peers_failure(fab_peers *p, tide_failure *out);

/* C  Until every rank is here: TIDE_OK. Or the failure that came first, for then the others may not come; the deadline
 * is one. The barrier verb. */
int fab_peers_barrier(fab_peers *p, const char *phase);

/* This rank makes its next call, with this tag. Ranks of other machines are compared now and then: the link. */
void fab_peers_called(fab_peers *p, uint64_t tag);

/* Set-ups in which the ranks of a rail wait for each other inside some library, counted from 1 and alike on all ranks. Who
 * has failed in one says so, for the others would wait in vain. */
void fab_peers_give_up(fab_peers *p, uint64_t set_up);
bool fab_peers_given_up(const fab_peers *p, uint64_t set_up); /* by a rank of this rail */

/* A wait that failed, or whose poster has died. */
typedef struct fab_waiting {
    uint64_t call;
    int64_t enqueued;
    const fab_where *where;
} fab_waiting;
/* `peer`'s word is missing (TIDE_ERR_DEADLINE), or it made another call (TIDE_ERR_MISMATCH). */
void fab_peers_fail_wait(fab_peers *p, int code, const fab_waiting *wait, uint32_t peer);
/* "rank 3 last waited in call 6, op 6". One of another machine is asked, which takes up to half a second. */
void fab_peers_last_wait(fab_peers *p, uint32_t peer, char text[96]);
void fab_peers_fail_death(fab_peers *p, uint32_t peer, const fab_waiting *wait); /* NULL: nothing waited */

#endif
