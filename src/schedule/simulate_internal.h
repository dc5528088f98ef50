/* simulate_internal.h - the state of a simulation, shared by simulate*.c. */
#ifndef TIDE_SIMULATE_INTERNAL_H
#define TIDE_SIMULATE_INTERNAL_H

#include "schedule/simulate.h"

typedef int64_t sim_time; /* picoseconds, so that equal ranks meet at equal moments */
#define SIM_SECOND 1e12
#define SIM_NEVER INT64_MAX

/* ---- fair sharing (simulate_flow.c) ------------------------------------------------------------- */

typedef struct sim_demand { uint32_t resource; double weight; } sim_demand; /* units of the resource for one of the flow */
typedef struct sim_flow {
    uint32_t owner;        /* instance */
    uint32_t aux;          /* PUT: first put of the segment */
    double left, rate;     /* units; a second */
    double alone;          /* rate with nothing beside it */
    uint32_t rank;         /* simulated */
    double holds;          /* share of the rank's compute that is lost while it runs */
    bool squeezed;         /* is compute: runs on what the others do not hold */
    sim_time since, finish;
    uint32_t n_demands, cap_demands;
    bool frozen;
    sim_demand *demands;
} sim_flow;

typedef struct sim_flows {
    sim_flow *all; /* the active ones; demand arrays of the others are kept behind them */
    uint32_t n, made, capacity;
    double *capacity_of, *used, *wanted; /* by resource */
    uint32_t *touched; /* resources with a flow */
    bool *is_touched;
    double *units;     /* total by resource */
    double *held;      /* by rank */
    uint32_t n_resources, n_touched;
    bool changed;
} sim_flows;
int flows_init(sim_flows *f, uint32_t n_ranks);
void flows_clear(sim_flows *f);
/* A flow of `units` whose own limit is `cap` units a second; its demands are to be added, then flows_start. NULL: out of memory. */
sim_flow *flows_add(sim_flows *f, uint32_t owner, uint32_t aux, double units, double cap);
/* The flow alone is no faster than `weight` of the resource allows: one call for what one rank's resource gives it. Where one rank
 * stands for all, calls for different ranks meet in one resource, and only their sum is shared. */
int flows_demand(const sim_flows *f, sim_flow *flow, uint32_t resource, double weight);
void flows_start(sim_flows *f, sim_flow *flow, sim_time now);
void flows_share(sim_flows *f, sim_time now);  /* new rates, when flows have come or gone */
sim_time flows_next(const sim_flows *f);       /* the first to end; SIM_NEVER */
void flows_remove(sim_flows *f, uint32_t index); /* the last one takes its index */

/* ---- instances ------------------------------------------------------------------------------------ */

#define SIM_TASK_OP UINT32_MAX
#define SIM_HOST_CAUSE 0u /* its enqueueing */

typedef struct sim_instance {
    uint32_t call, op;   /* a call and an operation of its list; or a task and SIM_TASK_OP */
    uint32_t aux;        /* RECORD, JOIN, task: record + 1; rail operation: its turn */
    uint32_t pending;    /* flows not ended */
    uint32_t cause;      /* instance + 1 whose end, or signal, let it start */
    uint32_t chain;
    sim_time enqueued, start, end;
} sim_instance;

typedef struct sim_record { uint32_t instance; bool done; } sim_record;
typedef struct sim_word { uint64_t value; uint32_t from; sim_time at; } sim_word;
typedef struct sim_chain {
    uint32_t *queue, n, capacity, done;
    uint32_t last; /* instance + 1 that ended last */
    bool running;
    /* What the head was last found to lack; nothing else about it needs to be looked at before that has come. */
    sim_time lacks_time;
    uint32_t lacks_record; /* + 1 */
    const sim_word *lacks_word;
    uint64_t lacks_value;
} sim_chain;
typedef struct sim_lane { uint32_t enqueued, turn, last; } sim_lane;

typedef struct sim_program { schedule *by_rank; uint64_t digest; } sim_program;
typedef struct sim_call_state { uint32_t *events; uint64_t *base; uint32_t ready, read_done, done; uint8_t parity; bool begun; } sim_call_state;
typedef struct sim_rank {
    uint64_t *base;        /* ledger */
    uint32_t *free;        /* by slot: record + 1 */
    struct { uint64_t key; uint32_t record; } *events;
    uint32_t n_events, size_events;
    uint32_t reads;
    uint32_t compute;      /* record + 1 of the last task on the compute stream */
    sim_time host;
    double lane_busy[2];
    bool dirty;
} sim_rank;

/* A landing slot is free after record - 1; 0: at once. */
typedef struct sim_release { uint32_t index, slot, record; } sim_release;

typedef struct sim_timer { sim_time at; uint64_t order; uint32_t kind, a, b; } sim_timer;

typedef struct simulation {
    const simulate_input *in;
    const plan_machine *m;
    uint32_t n_ranks, per_rank, nodes, local, n_ctx, n_resources; /* n_resources: of the ledger */
    bool mirror;
    sim_program *programs; /* group * 3 + kind */
    sim_call_state *calls; /* call * n_ranks + rank */
    uint32_t *task_records; /* task * n_ranks + rank: record + 1 */
    sim_rank *ranks;
    sim_chain *chains;
    sim_instance *instances;
    uint32_t n_instances, cap_instances;
    sim_record *records;
    uint32_t n_records, cap_records;
    sim_release *releases;
    uint32_t n_releases, cap_releases;
    sim_word *words, *rails;
    sim_lane *lanes;
    sim_timer *timers;
    uint32_t n_timers, cap_timers;
    uint64_t n_orders;
    uint32_t *dirty;
    uint32_t n_dirty;
    sim_flows flows;
    sim_time now;
    uint64_t ops_done, events;
    int status;
} simulation;

static inline sim_time sim_ticks(double seconds) { return (sim_time)(seconds * SIM_SECOND + 0.5); }
/* Rank of an address as simulated: itself, or the one rank that stands for all. */
static inline uint32_t sim_index(const simulation *s, uint32_t rank) { return s->mirror ? 0 : rank; }
static inline uint32_t sim_rank_of(const simulation *s, uint32_t index) { return s->mirror ? s->in->rank : index; }
static inline const schedule *sim_list(const simulation *s, uint32_t call, uint32_t index)
{
    const simulate_call *c = &s->in->calls[call];
    return &s->programs[c->group * 3 + (uint32_t)c->kind].by_rank[index];
}

/* simulate_work.c: the flows of an operation; false when it moves nothing. *put: in, first put of the segment. */
bool work_start(simulation *s, uint32_t instance);
bool work_next_put(simulation *s, uint32_t instance, uint32_t put); /* the segment behind the one that begins at put */
uint32_t work_segment_end(const schedule *list, const op *o, uint32_t put);

/* simulate_report.c */
void report_fill(const simulation *s, simulate_result *result);
void report_trace(const simulation *s, tide_text *out); /* its status: what went wrong */

/* simulate_memory.c: the memory in use on every rank, as counters of a trace. */
int memory_trace(const simulation *s, tide_text *out);

#endif
