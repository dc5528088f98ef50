/*
 * schedule.h - the op list: a collective call as data.
 *
 * A schedule is what ONE rank enqueues for ONE kind of call: typed operations in enqueue order, each on a named stream. Ops of a
 * stream run in order; streams are ordered among each other only by RECORD/JOIN events inside the rank and by SIGNAL/PUT ->
 * WAIT between ranks. It is compiled once and replayed with new argument pointers and counter bases. The engine runs it over any
 * fabric; `verify` proves it; nothing here knows a device.
 */
#ifndef TIDE_SCHEDULE_H
#define TIDE_SCHEDULE_H

#include "plan/plan.h"

enum op_kind { OP_COPY, OP_REDUCE, OP_PUT, OP_SIGNAL, OP_WAIT, OP_RECORD, OP_JOIN, OP_KIND_COUNT };

/* Streams of a rank, per lane. AG and RS are separate lanes with their own streams and rail communicator. */
enum op_stream {
    STREAM_AG_READY,   /* joins "slot free", publishes it to the node */
    STREAM_AG_CALL,    /* M = 1: pushes; M > 1: the rail */
    STREAM_AG_SCATTER, /* M = 1: own shard's copy (unicast); M > 1: stage -> landings */
    STREAM_AG_DONE,    /* completion fence, READY */
    STREAM_RS_STASH,   /* Slot-Reuse copy of the gradients into the slot */
    STREAM_RS_SUM,     /* Level 1 */
    STREAM_RS_NET,     /* the rail */
    STREAM_RS_LAND,    /* zero, own spare, Level 2 landing */
    STREAM_RS_PUSH0    /* + owner's local rank: pushes to that owner (own index unused) */
};
const char *op_stream_name(int stream, char buffer[24]);

/* Where a wait's failure is said to be. */
enum op_phase {
    PHASE_AG_FREE, PHASE_AG_PUSH, PHASE_AG_CREDIT, PHASE_AG_GO, PHASE_AG_HEADS, PHASE_AG_TAILS, PHASE_AG_SCATTER, PHASE_AG_DONE,
    PHASE_RS_STASH, PHASE_RS_PUSH, PHASE_RS_SUM, PHASE_RS_CREDIT, PHASE_RS_ARRIVE, PHASE_RS_LAND, PHASE_COUNT
};
const char *op_phase_name(int phase); /* "reduce_scatter push" */

/* ---- addresses ---------------------------------------------------------------------------- */

enum op_space {
    SPACE_REGION, /* {region, bank, who = rank} + offset */
    SPACE_ARG,    /* caller's pointer who = argument index, + offset; own rank only, never in a PUT */
    SPACE_ZERO    /* source of a fill */
};
#define WHO_NODE (-1)        /* region on all local ranks at once: multicast destination, multimem source */
#define BANK_CALL UINT16_MAX /* bank = parity of the reduce-scatter call (outbox, spare) */

typedef struct op_addr {
    uint8_t space, region;
    uint16_t bank;
    int32_t who; /* absolute rank, WHO_NODE, or argument index */
    uint64_t offset; /* bytes */
} op_addr;

/* ---- items of the ops ------------------------------------------------------------------------ */

/* COPY: rows of `width` ITEMS (of the op's src_dtype / dst_dtype; byte copies have item size 1 on both sides). Pitches in
 * bytes. A cast op has src_dtype != dst_dtype. SPACE_ZERO sources fill zero bits. */
typedef struct op_run {
    op_addr src, dst;
    uint64_t width, rows, src_pitch, dst_pitch;
} op_run;

/* REDUCE: one block of `rows` x `elems` fp32 results. The sum of an element adds, in order, every source of source[0], then of
 * source[1]; source i of a set lies at `at` + i * step bytes on rank at.who + i * rank_step (WHO_NODE: multimem over the local
 * ranks, count = L). n_sets = 0: the sum is +0.0f (padding). First source starts the sum; it is not added to zero. */
typedef struct op_sources {
    op_addr at;
    uint64_t row_pitch; /* bytes */
    uint64_t step;      /* bytes from one source to the next */
    uint32_t count;
    uint16_t rank_step;
    uint16_t dtype;
} op_sources;
typedef struct op_segment {
    op_addr dst;
    uint64_t dst_pitch, elems;
    uint32_t rows, n_sets;
    op_sources source[2];
} op_segment;

/* PUT: one transfer of a network group; at most one signal (peer, ctx, sig) each, delivered after its bytes. */
typedef struct op_put {
    int32_t peer; /* absolute rank on the same rail (same local index) */
    uint16_t ctx, sig;
    op_addr src, dst; /* regions only */
    uint64_t bytes;   /* > 0 */
} op_put;

/* SIGNAL / WAIT. Local scope: rank = target (SIGNAL) or poster (WAIT), a rank of this node; ctx, sig, count unused.
 * Rail scope: one signal sent to, or `count` awaited from, (rank, ctx, sig). */
typedef struct op_post {
    int32_t rank;
    uint16_t ctx, sig;
    uint32_t count;
} op_post;

/* Signal indices of a rail communicator, one a purpose. */
enum op_sig { SIG_HEAD = 0, SIG_TAIL = 1, SIG_CREDIT = 2, SIG_GO = 3, SIG_COUNT = 4 }; /* RS: data = SIG_HEAD, SIG_CREDIT */

/* Local counters: two words a resource, word[resource][which][poster] in the waiter's memory, single writer, cumulative.
 * A SIGNAL stores base[resource] + delta; a WAIT is satisfied by >= base[resource] + delta. */
enum op_which { WORD_A = 0, WORD_B = 1 };
/*            WORD_A                         WORD_B
 * staging    filled: chunks pushed to me     freed: chunks of mine that the owner has added
 * inbox      armed: my blocks may be read     landed: I have read all blocks of this wave
 * slot q     free: my landing q may be written     done: my pushes into landing q are complete */

/* Events. CALL events live for one call and are always recorded before they are joined. RESOURCE events outlive calls: a JOIN
 * means the latest RECORD enqueued before, of any call; none yet: no wait. EXTERN events belong to the caller: IN and GATE are
 * recorded by the engine at the call, FREE by tide_slot_release; READY, READ_DONE and DONE are what tide_wait waits for. */
enum op_scope { SCOPE_LOCAL, SCOPE_RAIL, SCOPE_CALL, SCOPE_RESOURCE, SCOPE_EXTERN };
enum op_resource_event {
    EVENT_SCATTERED, /* AG lane: the previous call's scatter is complete, stage reusable */
    EVENT_SENT,      /* index J, banked: outbox block J's last send is complete */
    EVENT_SPARED,    /* banked: the spares of this bank have been copied to the inbox */
    EVENT_LANDED,    /* index = generation: landing done on all L local ranks */
    EVENT_RESOURCE_COUNT
};
enum op_extern_event { EVENT_IN, EVENT_GATE, EVENT_FREE, EVENT_READY, EVENT_READ_DONE, EVENT_DONE, EVENT_EXTERN_COUNT };

enum op_flags {
    OP_FINAL = 1,     /* REDUCE: dst = beta(dst) + alpha * sum, separate multiply and add; else dst = sum */
    OP_BETA_ONE = 2,  /* with OP_FINAL: beta(dst) = dst; neither BETA flag: beta(dst) = 0 */
    OP_BETA_CALL = 4, /* with OP_FINAL: dst if the call accumulates, else 0 */
    OP_CHECK_TAG = 8, /* local WAIT: the poster's call tag must equal mine, else TIDE_ERR_MISMATCH */
    OP_SM = 16        /* CUDA: by kernel rather than copy engine */
};

typedef struct op {
    uint8_t kind, stream, phase, scope;
    uint8_t flags, src_dtype, dst_dtype, which; /* COPY dtypes: TIDE_OPAQUE = bytes; which: local counter word */
    uint16_t resource; /* local SIGNAL / WAIT */
    uint16_t event;    /* RECORD / JOIN: CALL index, or op_resource_event, or op_extern_event */
    uint16_t bank;     /* RESOURCE event: bank or BANK_CALL; 0 when the event has none. FREE: slot */
    uint16_t unused;
    uint32_t index;    /* RESOURCE event: J or generation */
    uint32_t first, count; /* items in the schedule's array of the op's kind */
    uint64_t delta;    /* local SIGNAL / WAIT */
} op;

typedef struct schedule_step { uint32_t resource; uint64_t step; } schedule_step; /* base += step once enqueued */

enum schedule_kind {
    SCHEDULE_AG,
    SCHEDULE_RS,
    SCHEDULE_STASH /* no collective: takes no turn in the parity of the reduce-scatter calls */
};
typedef struct schedule {
    int kind;
    uint32_t rank, nodes, local;
    uint32_t group;       /* index in the plan */
    uint32_t n_args;      /* AG: shard i at i. RS: gradient i (of the subset) at i, output at n_args - 1 */
    uint32_t n_read;      /* RS: ops [0, n_read) are the READ fragment, the rest NET. AG: = n_ops */
    uint32_t n_call_events;
    uint64_t tag;         /* equal on all ranks that run the same call (kind, group, subset, dtype, plan digest) */
    op *ops;              uint32_t n_ops, cap_ops;
    op_run *runs;         uint32_t n_runs, cap_runs;
    op_segment *segments; uint32_t n_segments, cap_segments;
    op_put *puts;         uint32_t n_puts, cap_puts;
    op_post *posts;       uint32_t n_posts, cap_posts;
    schedule_step *steps; uint32_t n_steps, cap_steps;
} schedule;

/* ---- building ------------------------------------------------------------------------------------ */

/* The all-gather of `group` as `rank` enqueues it. *out is initialised by the call; schedule_clear in any case. */
int schedule_build_ag(const tide_plan *plan, uint32_t group, uint32_t rank, schedule *out);

typedef struct schedule_rs_options {
    const uint8_t *present; /* n_params flags; NULL: all */
    int grad_dtype;
    int mode;               /* 0 In-Place: gradients are arguments. 1 Slot-Reuse: they lie in the landing, parameter p at A_p, and the
                               schedule records EVENT_FREE of the slot at read_done */
} schedule_rs_options;
int schedule_build_rs(const tide_plan *plan, uint32_t group, uint32_t rank, const schedule_rs_options *options, schedule *out);
/* Slot-Reuse: the copy of the gradients into the landing (one stream, arguments = gradients of the subset); records READ_DONE of
 * the group when the gradients are no longer needed. */
int schedule_build_stash(const tide_plan *plan, uint32_t group, uint32_t rank, const schedule_rs_options *options, schedule *out);
/* Any of the three with all parameters, in the dtype and mode that the plan has for the group. */
int schedule_build_call(const tide_plan *plan, uint32_t group, uint32_t rank, int kind, schedule *out);
void schedule_clear(schedule *s);

/* Used by the builders. Each appends and returns TIDE_OK or TIDE_ERR_MEMORY; items are appended after schedule_op and counted in it. */
op *schedule_op(schedule *s, int kind, int stream, int phase); /* NULL when out of memory */
/* The same for a builder that looks at its status once, in the end: after a failure stores into the op go to *ignored. */
op *schedule_op_or(schedule *s, int *status, op *ignored, int kind, int stream, int phase);
int schedule_run(schedule *s, const op_run *run);         /* belongs to the last op */
int schedule_segment(schedule *s, const op_segment *segment);
int schedule_put(schedule *s, const op_put *put);
int schedule_post(schedule *s, int32_t rank, uint16_t ctx, uint16_t sig, uint32_t count);
int schedule_set_step(schedule *s, uint32_t resource, uint64_t step); /* adds to the resource's step */
/* A transfer spread over the rail's contexts, and the signals it will be known by: sender and receiver call these with the same
 * sig, n_ctx and bytes. schedule_stripes: how many puts and signals; context i carries stripe i; none for 0 bytes. The await merges
 * signals of one (peer, ctx, sig) within its WAIT. */
#define SCHEDULE_STRIPE_BYTES 65536u /* a stripe is not smaller than this unless it is the only one */
#define SCHEDULE_STRIPE_ALIGN 256u
uint32_t schedule_stripes(uint64_t bytes, uint32_t n_ctx);
int schedule_put_striped(schedule *s, int32_t peer, uint16_t sig, uint32_t n_ctx, const op_addr *src, const op_addr *dst,
                         uint64_t bytes);
int schedule_await_striped(schedule *s, int32_t peer, uint16_t sig, uint32_t n_ctx, uint64_t bytes);
/* The tag of a call: equal on all ranks that run the same call of equal plans. present: NULL for all. */
uint64_t schedule_tag(const tide_plan *plan, int kind, uint32_t group, const uint8_t *present, int grad_dtype);

/* Digest over the canonical little-endian ops and items; the fabric is not part of it. */
uint64_t schedule_digest(const schedule *s);
/* A line an op, items indented. */
void schedule_print(const schedule *s, const tide_plan *plan, tide_text *out);
void schedule_print_json(const schedule *s, const tide_plan *plan, tide_text *out);

/* Resource index -> number of local resources of a plan: RESOURCE_SLOT0 + n_slots. */
static inline uint32_t schedule_resources(const tide_plan *plan) { return RESOURCE_SLOT0 + plan->n_slots; }

#endif
