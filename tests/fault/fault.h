/*
 * fault.h - one row a fault: when it strikes, what it does, and what every rank has to say about it.
 *
 * Each case runs on ranks that hold more than the fault can touch: a second communicator, and in the struck one a set
 * of groups that was used before. Both have to come out of it unharmed, and nothing may be left behind.
 */
#ifndef FAULT_H
#define FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../harness/belongings.h"
#include "fabric/fabric.h"

enum fault_work { WORK_GATHER = 1, WORK_SCATTER = 2 };

/* When it strikes the victim... */
enum fault_when {
    WHEN_RAIL,   /* on the rail, as fab_inject says */
    WHEN_ITEM,   /* before item `at` of its streams, of a phase */
    WHEN_GATHER, /* after the caller's all-gather `at` of set-up */
    WHEN_CALL,   /* at system call `at` of a kind, in set-up */
    WHEN_MEMORY, /* at allocation `at`, in set-up; with `late` in the first call of a subset of gradients */
    WHEN_IDLE,   /* between two calls */
    WHEN_LEAVING /* before tide_comm_destroy */
};
/* ...and how. FAIL: for at = 1, 2, ... until nothing fails any more. DIFFER: it calls, or describes, something else. */
enum fault_what { WHAT_RAIL, WHAT_FAIL, WHAT_KILL, WHAT_EXIT, WHAT_STOP, WHAT_DIFFER };

enum fault_differ {
    DIFFER_NOT, DIFFER_OPTION, DIFFER_NODE_SIZE, DIFFER_EXTENT, DIFFER_DTYPE, DIFFER_NAME, DIFFER_GROUPS, DIFFER_PLAN,
    DIFFER_CALL, DIFFER_SKIP
};

enum fault_call {
    CALL_MEMFD, CALL_FALLOCATE, CALL_MMAP, CALL_SOCKET, CALL_BIND, CALL_LISTEN, CALL_CONNECT, CALL_SENDMSG, CALL_ACCEPT,
    CALL_RECVMSG, CALL_PIDFD, CALL_EVENTFD, CALL_THREAD, CALL_COUNT
};

enum { FAULT_RANKS = 8, FAULT_OR = 3 };
typedef struct fault_row {
    const char *kind, *name;
    uint32_t nodes, local;
    int work; /* fault_work, or'ed */
    int when, what;
    int64_t at;
    int which; /* fault_differ or fault_call */
    fab_inject rail;
    const char *phase; /* of WHEN_ITEM; NULL: any item */
    bool threads;  /* ranks are threads of one process */
    bool large;    /* messages of several contexts */
    bool late;
    bool alone;    /* the others go on */
    int resume_ms; /* a stopped victim goes on after that long; 0: when the others have ended */
    int64_t deadline_ms, limit_ms; /* of the communicator; from the strike to the last rank's error. 0: 20 s */
    int codes[FAULT_OR]; /* any of them, until 0; none: all goes well */
    const char *texts[2]; /* pieces of every rank's sentence */
} fault_row;

/* What a rank tells; shared memory. */
typedef struct fault_report {
    bool began, ended;
    int code;           /* of the first error; TIDE_OK */
    double ms;          /* until then, since the strike was due */
    char text[256];
    char phase[32];     /* of the communicator's failure */
    int64_t peer;
    uint64_t call;
    _Atomic uint64_t items; /* items: of the row's phase */
    uint32_t gathers, refused; /* exchanges of set-up; attempts that failed (WHAT_FAIL) */
    char wrong[160];    /* what the test does not like, "" */
    char left[128];     /* what is left behind, "" */
} fault_report;

typedef struct fault_case {
    const fault_row *row;
    fault_report *reports;
} fault_case;

enum { FAULT_VICTIM = 1 };

/* play.c: one rank's part, as a process, or all ranks as threads of one. */
struct processes_rank;
void fault_play_process(const struct processes_rank *rank);
void fault_play_threads(const struct processes_rank *rank);

/* rows.c */
extern const fault_row fault_rows[];
extern const uint32_t fault_n_rows;

/* wrap.c: the library's system calls pass through here. fn is called at call `at` (1: next); it returns an errno to
 * fail with, or 0 to go on. */
void wrap_arm(int call, int64_t at, int (*fn)(void));
bool wrap_disarm(void); /* whether it has been called */
void wrap_plan(bool differ); /* the next plan's digest is another */

#endif
