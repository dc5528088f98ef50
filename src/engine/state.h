/* state.h - what the engine's files share. */
#ifndef TIDE_ENGINE_STATE_H
#define TIDE_ENGINE_STATE_H

#include "engine/engine.h"

enum { LANE_AG, LANE_RS, LANE_COUNT };
_Static_assert((int)LANE_COUNT == (int)PLAN_RAIL_LANES, "the control region holds the rail words of every lane");

/* Events that outlive calls. */
typedef struct engine_events {
    fab_event *in, *gate, *scattered;
    fab_event *spared[2];
    uint32_t n_sent, n_landed, n_slots, n_groups;
    fab_event **sent;   /* n_sent (= n_out) a bank */
    fab_event **landed; /* per generation */
    fab_event **free;   /* per slot */
    fab_event **group;  /* READY, READ_DONE, DONE of each group */
} engine_events;

/* Running bases of the resources. */
typedef struct engine_ledger {
    uint32_t n;
    uint64_t *base;
} engine_ledger;

enum { MAX_PENDING = 8, MAX_RESOURCES = 8 };

/* A call whose READ has been enqueued and whose NET has not. */
typedef struct pending_call {
    engine_program *program;
    fab_call *call;
    uint32_t parity;
    uint64_t base[MAX_RESOURCES];
} pending_call;

struct engine {
    fab_device *device;
    const tide_plan *plan;
    uint32_t rank, local, nodes, node, local_rank;
    uint64_t region_at[REGION_COUNT]; /* offset in an arena; the landing is last, because some ranks have none */
    fab_arena *arena;
    fab_queue *queue;
    fab_rail *rail[LANE_COUNT];
    engine_events events;
    engine_ledger ledger;
    uint64_t n_ops, rs_calls;
    pending_call pending[MAX_PENDING]; /* in the order of their READs */
    uint32_t first_pending, n_pending, max_pending;
    engine_program *programs;
    struct engine_views *views;
};

typedef struct bound_op {
    uint8_t kind, scope, flags, which;
    uint32_t stream, n;
    uint32_t resource;    /* index into the program's resources */
    uint64_t delta;
    const void *list[2];  /* batch, puts or posts, for an even and an odd call */
    fab_event *event[2];
    fab_rail *rail;
    fab_where where;
} bound_op;

struct engine_program {
    engine *e;
    engine_program *next;
    int kind;
    bool retired;
    uint32_t n_args, n_read, n_ops, n_call_events, n_resources, n_steps;
    uint64_t tag, digest;
    bound_op *ops;
    uint8_t *arg_used;
    fab_event **call_events;
    fab_calls *calls;
    uint32_t resources[MAX_RESOURCES];
    schedule_step *steps;
    /* What the ops point to. */
    fab_copy *copies;
    fab_run *runs;
    fab_reduce *reduces;
    fab_segment *segments;
    fab_source *sources;
    fab_put *puts;
    fab_post *posts;
    fab_rail_post *rail_posts;
};

/* create.c */
static inline bool engine_same_node(const engine *e, uint32_t rank) { return rank / e->local == e->node; }
static inline bool engine_same_rail(const engine *e, uint32_t rank) { return rank % e->local == e->local_rank; }
uint64_t engine_offset(const engine *e, int region, uint32_t bank); /* in an arena, the same on all ranks */
/* Where {region, bank, rank} begins here; NULL when it is not mapped. */
char *engine_region(const engine *e, int region, uint32_t bank, uint32_t rank);
fab_word *engine_word(const engine *e, uint32_t owner, uint32_t resource, uint32_t which, uint32_t poster);

/* bind.c */
void engine_program_free(engine_program *p);
void engine_reap(engine *e);

/* ledger.c */
int ledger_init(engine_ledger *l, uint32_t n_resources);
void ledger_clear(engine_ledger *l);
void ledger_snapshot(const engine_ledger *l, const uint32_t *resources, uint32_t n, uint64_t *base);
void ledger_advance(engine_ledger *l, const schedule_step *steps, uint32_t n);

/* watch.c */
int engine_poison(engine *e, const engine_program *p, uint64_t call, int code);

#endif
