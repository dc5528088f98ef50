/*
 * simulate.h - prices op lists on a machine that one does not have.
 *
 * A discrete-event simulation: it executes the same op lists that the engine runs, of every rank or of one rank whose
 * peers are taken to do the same, on the resources of a machine file. What shares a resource that is not enough for all
 * is slowed by one factor; streams, events, counters, the rail's queues and the host's enqueueing are those of the
 * op list. Integer time and a fixed order make it deterministic. docs/simulate.md has the model.
 */
#ifndef TIDE_SIMULATE_H
#define TIDE_SIMULATE_H

#include "plan/machine.h"
#include "schedule/schedule.h"

/* X(name, text, unit). The first eight can be shared: what asks for more than there is is slowed by one factor. Of these SMs are
 * only counted: CTAs that are resident take them from the compute stream. The rest do one thing at a time. */
#define SIMULATE_RESOURCES(X)                                                                                          \
    X(COPY, "copy", "B")             /* copy engines, to peers */                                                      \
    X(LOCAL_COPY, "local_copy", "B") /* copy engines, within the GPU */                                                \
    X(SM, "sm", "SM s")                                                                                                \
    X(HBM, "hbm", "B")                                                                                                 \
    X(NVLINK_OUT, "nvlink_out", "B")                                                                                   \
    X(NVLINK_IN, "nvlink_in", "B")                                                                                     \
    X(NIC_OUT, "nic_out", "B")                                                                                         \
    X(NIC_IN, "nic_in", "B")                                                                                           \
    X(HOST, "host", "s")                                                                                               \
    X(RAIL_AG, "rail_ag", "s") /* the all-gather's rail communicator: one queue */                                     \
    X(RAIL_RS, "rail_rs", "s")
enum simulate_resource {
#define TIDE_X(name, text, unit) SIMULATE_##name,
    SIMULATE_RESOURCES(TIDE_X)
#undef TIDE_X
    SIMULATE_RESOURCE_COUNT
};
#define SIMULATE_SHARED SIMULATE_HOST /* how many are shared fairly */
const char *simulate_resource_name(int resource);
const char *simulate_resource_unit(int resource);

/* ---- what is done ----------------------------------------------------------------------------- */

typedef struct simulate_call { int kind; uint32_t group; } simulate_call; /* schedule_kind */

/* Something that is no collective: a layer's compute, a layout copy, another library's collective. */
enum simulate_stream { SIMULATE_COMPUTE, SIMULATE_COPY_IN, SIMULATE_RING_AG, SIMULATE_RING_RS, SIMULATE_STREAMS };
enum simulate_event { AFTER_NOTHING, AFTER_READY, AFTER_READ_DONE, AFTER_DONE, AFTER_TASK };
typedef struct simulate_after { int event; uint32_t index; } simulate_after; /* of a call, or a task; enqueued before */
typedef struct simulate_task {
    const char *label; /* static */
    int stream;
    simulate_after after[3];
    double seconds;                  /* alone */
    double demand[SIMULATE_SHARED];  /* fractions of the rank's resources that it then takes */
    double holds;                    /* share of the rank's compute that is lost while it runs */
} simulate_task;

/* In the host's order, on every rank. READ, STASH and RELEASE follow what the compute stream has been given so far. */
enum simulate_part { SIMULATE_AG, SIMULATE_RELEASE, SIMULATE_STASH, SIMULATE_READ, SIMULATE_NET, SIMULATE_TASK };
typedef struct simulate_step { int part; uint32_t index; } simulate_step; /* call or task */

/* Gradients as autograd leaves them: from the begin of a task until an event. A trace's memory counts them. */
typedef struct simulate_gradients { uint64_t bytes; uint32_t task; simulate_after until; } simulate_gradients;

typedef struct simulate_input {
    const tide_plan *plan;
    const plan_machine *machine;
    const simulate_call *calls;
    const simulate_task *tasks;
    const simulate_step *steps;
    const simulate_gradients *gradients;
    uint32_t n_calls, n_tasks, n_steps, n_gradients;
    bool every_rank; /* else only `rank`, its peers' signals and bytes mirrored from its own */
    uint32_t rank;
} simulate_input;

/* ---- what came out ------------------------------------------------------------------------------ */

/* Where the time went, going back from the last operation to what let each one start. */
typedef struct simulate_path {
    double work[PHASE_COUNT][OP_KIND_COUNT]; /* operations of the lists */
    double task[SIMULATE_STREAMS];
    double host, signal; /* enqueueing; between a signal, or a put's last byte, and its waiter */
    uint32_t n_ops;
} simulate_path;

typedef struct simulate_result {
    double seconds;       /* until the last operation has ended */
    uint32_t ranks;       /* simulated */
    uint64_t ops, events; /* operations executed; moments at which something happened */
    uint64_t digest;      /* over schedule_digest of all lists executed, by call and rank */
    struct { double busy, units; } resource[SIMULATE_RESOURCE_COUNT]; /* of the rank with the busiest such resource */
    double bound;         /* the largest time that one resource alone needs for its units */
    simulate_path path;
    double *call_seconds; /* n_calls, owned by the caller: READY, READ_DONE (stash) or DONE on the slowest rank */
    double *task_begin, *task_end; /* n_tasks, owned by the caller; NULL: not wanted */
} simulate_result;

/* TIDE_ERR_ARGUMENT, TIDE_ERR_MEMORY, the builders' errors; TIDE_ERR_INTERNAL names an operation that can never start.
 * trace (may be NULL) receives a Chrome / Perfetto trace of every simulated rank and stream, with the memory in use. */
int simulate_run(const simulate_input *input, simulate_result *result, tide_text *trace);

#endif
