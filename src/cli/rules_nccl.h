/*
 * rules_nccl.h - what this project relies on in NCCL, as checks over its table of functions and the driver's alone.
 *
 * They run on the NCCL of a GPU machine (`tide nccl-rules`) and on the fake of the tests, which so behaves as the real one
 * does. Ranks are threads, one a device; with one device two ranks share it, where the library allows that. A rule runs on
 * all ranks at once, with communicators and windows of its own. Nothing hangs: what waits for something to happen gives up
 * after a time, and a rank that comes back from no call at all ends the process, after a line that names the rule and the
 * call.
 */
#ifndef TIDE_CLI_RULES_NCCL_H
#define TIDE_CLI_RULES_NCCL_H

#include <pthread.h>

#include "cli/rules_tools.h"
#include "fabric/nccl/library.h"

/* A line a rule, and a last line. word: rules whose names contain it; NULL: all. What has not happened after grace_ms is
 * taken not to happen. *spoiled: a call or a stream hangs for good, so that the process can but _exit. */
rules_count nccl_rules_run(const nccl_library *library, const cuda_driver *driver, const char *word, int grace_ms, FILE *out,
                           bool *spoiled);

/* ---- for the rules --------------------------------------------------------------------------- */

enum {
    NCCL_RULES_RANKS = 8,
    NCCL_RULES_STREAMS = 3,
    NCCL_RULES_COMMS = 2,
    NCCL_RULES_CONTEXTS = 2,
    NCCL_RULES_SIGNALS = 2,
    NCCL_RULES_GATES = 8,
    NCCL_RULES_HALF = 1 << 20,              /* sources lie in the first half of a rank's memory, */
    NCCL_RULES_BYTES = 2 * NCCL_RULES_HALF, /* what comes in the second */
    NCCL_RULES_ABORT_MS = 10000
};

typedef struct nccl_world nccl_world;
typedef struct nccl_memory { cu_handle handle; cu_ptr at; size_t bytes; } nccl_memory;

/* A rank and what it has while a rule runs: streams, and communicators with a window over all of its memory each. */
typedef struct nccl_side {
    nccl_world *w;
    const nccl_library *n;
    const cuda_driver *d;
    int rank, ranks, next, previous; /* of the ring */
    int device;
    cu_context context;
    nccl_memory memory, extra; /* extra: of one rule, freed after it */
    unsigned char *host; /* of half a rank's memory; behind it the gates */
    cu_stream own_stream; /* of the copies through the host: never blocked */
    cu_stream stream[NCCL_RULES_STREAMS];
    nccl_comm comm[NCCL_RULES_COMMS];
    nccl_window window[NCCL_RULES_COMMS];
    struct nccl_rules_call *pending; /* calls on threads of their own */
    _Atomic(const char *) call; /* that it is in; NULL: none */
    enum outcome outcome;
    bool grouped;  /* a group of the rank's is open */
    bool deserted; /* another rank did not come to a meeting: what it says counts more */
    bool told; /* that it has failed, and why */
    char why[300], note[200];
} nccl_side;

struct nccl_world {
    const nccl_library *n;
    const cuda_driver *d;
    int n_ranks, n_devices, grace_ms;
    bool shared; /* ranks share a device */
    nccl_side side[NCCL_RULES_RANKS];
    nccl_id id[NCCL_RULES_COMMS];
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int waiting, ended;    /* at the meeting; with the rule */
    uint64_t meetings;
    bool failed;
    _Atomic bool spoiled;
};

/* comms: how many communicators, with windows, a rank finds when it begins. */
typedef struct nccl_rule { const char *name; int comms; enum outcome (*run)(nccl_side *r); } nccl_rule;
extern const nccl_rule nccl_rules_of_setup[], nccl_rules_of_transfers[], nccl_rules_of_order[], nccl_rules_of_aborts[];

/* A call of NCCL, with its result; the macros of rules_tools.h are for the rest. */
#define NCCL_GIVES(expression, code)                                                                                 \
    do {                                                                                                             \
        nccl_result result_;                                                                                         \
        atomic_store(&r->call, #expression);                                                                         \
        result_ = (expression);                                                                                      \
        atomic_store(&r->call, NULL);                                                                                \
        if (result_ != (code)) {                                                                                     \
            snprintf(r->why, sizeof r->why, "%s:%d: rank %d: %.120s gives %d, not %d (%.100s)", __FILE__, __LINE__,  \
                     r->rank, #expression, result_, (code), r->n->GetLastError(NULL));                               \
            return FAILED;                                                                                           \
        }                                                                                                            \
    } while (0)

#define NCCL_GROUP                              \
    do {                                        \
        NCCL_GIVES(r->n->GroupStart(), NCCL_OK); \
        r->grouped = true;                      \
    } while (0)
#define NCCL_GROUP_END(code)                    \
    do {                                        \
        r->grouped = false;                     \
        NCCL_GIVES(r->n->GroupEnd(), (code));   \
    } while (0)

/* All ranks have come here; false when one has failed or does not come. */
bool nccl_rules_meet(nccl_side *r);
nccl_config nccl_rules_config(void); /* contexts, signals, one CTA, blocking */
/* An id that all ranks have: rank 0 makes it. */
enum outcome nccl_rules_id(nccl_side *r, nccl_id *id);
/* *comm is written when it has been made: what NCCL leaves in it otherwise is nothing to look at. */
enum outcome nccl_rules_make(nccl_side *r, int ranks, nccl_id id, nccl_config *config, nccl_comm *comm, nccl_result *result);
enum outcome nccl_rules_init(nccl_side *r, int which, nccl_config *config); /* of all ranks */
enum outcome nccl_rules_register(nccl_side *r, int which);
enum outcome nccl_rules_tear_down(nccl_side *r, int which);

bool nccl_rules_memory(nccl_side *r, const cu_alloc_prop *how, nccl_memory *out); /* NULL: POSIX handles, as the arenas */
bool nccl_rules_memory_free(nccl_side *r, nccl_memory *m);

void nccl_rules_pause(nccl_side *r); /* for the grace */
bool nccl_rules_dry(nccl_side *r, int stream);
bool nccl_rules_blocked(nccl_side *r, int stream);
bool nccl_rules_gate(nccl_side *r, int stream, int gate); /* the stream waits until it is opened */
void nccl_rules_open(nccl_side *r, int gate);
/* The rank's memory through the host; at, bytes within it. fill: byte i is (i * 7 + i / 251 + seed) % 256. */
bool nccl_rules_fill(nccl_side *r, uint64_t at, uint64_t bytes, unsigned seed);
bool nccl_rules_holds(nccl_side *r, uint64_t at, uint64_t bytes, unsigned seed);
bool nccl_rules_clear(nccl_side *r); /* the second half: zeros */

nccl_result nccl_rules_put(nccl_side *r, int which, int peer, uint64_t from, uint64_t to, uint64_t bytes, int sig, int ctx,
                           int stream);
nccl_result nccl_rules_wait(nccl_side *r, int which, int count, int peer, int sig, int ctx, int stream);
/* Calls that may stay where they are: on threads of their own. NULL: it could not be begun. A call that has not ended keeps
 * what it has, for good. */
typedef struct nccl_rules_call nccl_rules_call;
nccl_rules_call *nccl_rules_begin_abort(nccl_side *r, int which); /* takes the communicator away from r */
nccl_rules_call *nccl_rules_begin_register(nccl_side *r, int which);
bool nccl_rules_ended(nccl_rules_call *call, int64_t within_ms);
nccl_result nccl_rules_end_call(nccl_rules_call *call); /* of one that has ended */
void nccl_rules_end_calls(nccl_side *r); /* those that are left over */
/* Aborts. False: it has not returned in NCCL_RULES_ABORT_MS, and the world is spoiled. */
bool nccl_rules_abort(nccl_side *r, int which, nccl_result *result, double *ms);
double nccl_rules_ms(int64_t since);

#endif
