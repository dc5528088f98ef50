/*
 * verify.h - proves a sequence of calls from the op lists and the memory map alone.
 *
 * The caller hands over what every rank enqueues (schedules), in which collective order (steps), and what the result
 * has to be (contracts). verify links without src/plan and src/geometry: it cannot repeat a planner's mistake.
 *
 * Happens-before is built from stream order, RECORD -> JOIN (bound when the JOIN is enqueued), local SIGNAL -> WAIT by
 * counter value, rail SIGNAL and PUT -> WAIT by count, and lane order (the rail operations of a lane are one queue, and
 * they block as one). Memory holds symbols, not data: which rank's shard byte, or which gradient element added from
 * which ranks, lies at an address. docs/verify.md says what is proven and under which assumptions.
 */
#ifndef TIDE_VERIFY_H
#define TIDE_VERIFY_H

#include "schedule/schedule.h"

/* ---- what has to come out --------------------------------------------------------------------- */

/* `rows` rows of `width` units: unit at + i * at_pitch + x of the result holds unit from + i * from_pitch + x of
 * `source`. */
typedef struct verify_span {
    uint64_t at, from, width, rows, at_pitch, from_pitch;
    uint32_t source;
} verify_span;

enum verify_kind { VERIFY_AG, VERIFY_RS, VERIFY_STASH };

/* AG: a span's unit is a byte, its result the landing of every rank, its source the packed shard of rank `source`.
 * RS: a span's unit is an element, its result rank t's packed output, its source gradient `source` of every rank; spans
 * of a rank ascend and do not overlap; what they leave out is padding and has to be zero. */
typedef struct verify_contract {
    int kind;
    uint32_t group;    /* for messages, and whose READY / READ_DONE / DONE it is */
    uint32_t slot;     /* AG, STASH: landing bank */
    int in_dtype;      /* of the shards or gradients as handed in */
    uint32_t in_item;  /* bytes */
    int out_dtype;     /* AG: of the landing */
    uint32_t out_item;
    bool adopted;      /* AG: shards lie in REGION_RESIDENT at `resident`, else they are arguments */
    uint64_t resident;
    uint64_t packed;   /* AG: bytes of a packed shard as handed in */
    uint32_t n_inputs; /* arguments that are read: shards or gradients */
    const uint64_t *input_bytes;  /* n_inputs */
    const uint64_t *input_offset; /* AG: byte offset of argument i in the packed shard; RS: NULL */
    uint64_t elements; /* RS: of the packed output, which is argument n_inputs */
    const verify_span *spans;
    const uint32_t *first_span; /* RS: n_ranks + 1 entries; NULL for AG: all spans hold for every rank */
    uint32_t n_spans;
} verify_contract;

typedef struct verify_call {
    const schedule *const *by_rank;   /* n_ranks op lists */
    const uint32_t *const *origin;    /* NULL, or per rank NULL or a name for each op (mutants keep the original's) */
    const verify_contract *contract;
    uint32_t source;                  /* RS: the call whose inputs are the gradients: itself, or its stash */
} verify_call;

/* What the host does next on every rank, in collective order.
 *   AG       enqueue an all-gather                       USE      the caller reads the whole landing of AG `call` after
 * READY STASH    enqueue the gradients' copy, after USE      RELEASE  ... and gives its slot back (USE, then FREE) READ
 * RS read phase                               NET      RS network phase */
enum verify_part {
    VERIFY_PART_AG,
    VERIFY_PART_USE,
    VERIFY_PART_RELEASE,
    VERIFY_PART_STASH,
    VERIFY_PART_READ,
    VERIFY_PART_NET
};
typedef struct verify_step {
    uint32_t call;
    int part;
    int32_t without; /* a rank that leaves the step out; -1: none */
} verify_step;

typedef struct verify_input {
    uint32_t nodes, local, n_ctx, n_slots;
    bool shared_landing; /* multicast: the landing of a node is one memory, written for all by WHO_NODE */
    const plan_map *map;
    const verify_call *calls;
    uint32_t n_calls;
    const verify_step *steps;
    uint32_t n_steps;
} verify_input;

/* ---- what came out -------------------------------------------------------------------------------- */

/* X(name, what) */
#define VERIFY_CLASSES(X)                                                                            \
    X(RACE, "conflicting accesses are not ordered")                                                  \
    X(STUCK, "a wait's producer cannot come")                                                        \
    X(UNWRITTEN, "bytes are read that were never written")                                           \
    X(REWRITTEN, "bytes are written twice without a reader between")                                 \
    X(BOUNDS, "an access leaves its memory")                                                         \
    X(CONTENT, "a result is missing or comes from elsewhere")                                        \
    X(SUM, "an element is not the sum of all ranks, each once")                                      \
    X(EVENT, "an event is joined before it is recorded, or never recorded")                          \
    X(COUNTER, "a counter or signal does not add up")                                                \
    X(FORM, "an operation is not allowed")
enum verify_class {
#define VERIFY_X(name, what) VERIFY_##name,
    VERIFY_CLASSES(VERIFY_X)
#undef VERIFY_X
    VERIFY_CLASS_COUNT
};
const char *verify_class_name(int class); /* "race" */

typedef struct verify_result {
    uint64_t violations;                  /* distinct (class, operation, other operation) */
    uint64_t by_class[VERIFY_CLASS_COUNT];
    uint64_t ag_ops, rs_ops, calls;       /* op instances that ran, over all ranks; AG and RS calls */
    uint64_t accesses;                    /* byte ranges checked */
    /* Over all accesses: who touched which byte after whom. Equal digests of two violation-free runs mean that all
     * conflicting accesses are ordered alike. */
    uint64_t digest;
} verify_result;

typedef struct verify_options {
    uint64_t stop_after; /* violations; 0: never */
    tide_text *out;      /* a line a violation, the first `lines` of them; NULL: none */
    uint64_t lines;
    bool digest;         /* compute verify_result.digest */
} verify_options;

/* TIDE_OK when the run could be done, whatever it found; TIDE_ERR_MEMORY, TIDE_ERR_ARGUMENT. */
int verify_run(const verify_input *input, const verify_options *options, verify_result *result);

#endif
