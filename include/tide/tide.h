/*
 * tide.h - zero-copy, layout-aware all-gather and reduce-scatter for FSDP2.
 *
 * One header, read top to bottom: types first, then calls in the order in which
 * a program meets them. Section numbers ("paper 3.1") are those of the TIDE paper.
 *
 * Conventions
 *   - Every call returns TIDE_OK (0) or a negative code of the table below, unless its
 *     declaration says otherwise. tide_last_error() then gives one line that names the
 *     argument, the value and what was expected. Invalid arguments change nothing.
 *   - The library never prints, exits or aborts.
 *   - Sizes are bytes unless a name says "elements"; ranks count from 0, node-major:
 *     rank = node * local + local_rank.
 *   - Structs that a caller fills begin with their size; use the *_INIT initializers.
 *   - "L" local call, "C" collective (all ranks of the communicator, same order),
 *     "E" enqueued in collective order (all ranks, same order, does not block on peers).
 *   - `stream` is a CUstream for a CUDA fabric. On the host fabric it is the calling
 *     thread: inputs must be ready at the call, tide_wait() blocks; pass NULL.
 *   - One caller at a time per communicator; tide_comm_check and tide_comm_abort may be
 *     called from any thread.
 */
#ifndef TIDE_TIDE_H
#define TIDE_TIDE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TIDE_VERSION_MAJOR 0
#define TIDE_VERSION_MINOR 1
#define TIDE_VERSION_PATCH 0

#if defined(__GNUC__)
#define TIDE_API __attribute__((visibility("default")))
#else
#define TIDE_API
#endif

/* ---- errors ------------------------------------------------------------------------ */

/* X(name, code, message, who is affected) */
#define TIDE_ERRORS(X)                                                                              \
    X(OK, 0, "success", "nobody")                                                                   \
    X(ERR_ARGUMENT, -1, "an argument is invalid", "the caller; nothing was changed")                \
    X(ERR_STATE, -2, "the call is not allowed in this state", "the caller; nothing was changed")    \
    X(ERR_MEMORY, -3, "memory could not be allocated", "the caller; nothing was changed")           \
    X(ERR_UNSUPPORTED, -4, "not supported here", "the caller; nothing was changed")                 \
    X(ERR_MISMATCH, -5, "ranks disagree", "all ranks of the communicator")                          \
    X(ERR_PEER_DEAD, -6, "a peer has died", "all ranks of the communicator")                        \
    X(ERR_DEADLINE, -7, "a wait passed its deadline", "all ranks of the communicator")              \
    X(ERR_ABORTED, -8, "the communicator was aborted", "all ranks of the communicator")             \
    X(ERR_SYSTEM, -9, "an operating system call failed", "the caller")                              \
    X(ERR_BUSY, -10, "the object is still in use", "the caller; nothing was changed")               \
    X(ERR_FORKED, -11, "called in a forked child", "the child; nothing was changed")                \
    X(ERR_END, -12, "past the last row of a table", "nobody")                                       \
    X(ERR_INTERNAL, -13, "an internal invariant does not hold", "all ranks of the communicator")    \
    X(ERR_NETWORK, -14, "a message was lost, repeated, overtaken or cut", "all ranks of the communicator")

typedef enum tide_status {
#define TIDE_X(name, code, message, affected) TIDE_##name = (code),
    TIDE_ERRORS(TIDE_X)
#undef TIDE_X
} tide_status;

typedef struct tide_error_info {
    int code;
    const char *name;     /* "TIDE_ERR_DEADLINE" */
    const char *message;  /* one clause */
    const char *affected; /* whom it concerns */
} tide_error_info;

/* L  Library version, "0.1.0". Never NULL; static storage. */
TIDE_API const char *tide_version(void);

/* L  Row of the error table for `code`. TIDE_ERR_ARGUMENT when no row has that code. */
TIDE_API int tide_error_describe(int code, tide_error_info *out);

/* L  Text of the calling thread's last failed call: one line, no newline. Never NULL; valid
 * until the thread's next failing call. Empty when none has failed. */
TIDE_API const char *tide_last_error(void);

/* L  Receives one line per event worth a log (fallback, failure, slow set-up). `level`: 0 error,
 * 1 warning, 2 info. NULL restores silence, the default. May be called from library threads;
 * must not call back into the library. */
typedef void (*tide_log_fn)(void *context, int level, const char *line);
TIDE_API void tide_log_set(tide_log_fn fn, void *context);

/* ---- knobs and options --------------------------------------------------------------- */

#define TIDE_AUTO INT64_C(-1) /* let the plan decide */

/* X(name, default, minimum, maximum, help). A knob is TIDE_AUTO or within its bounds. */
#define TIDE_KNOBS(X)                                                                               \
    X(mode, 0, 0, 1, "0 In-Place: gradients are read where autograd left them; 1 Slot-Reuse")       \
    X(w_wave, TIDE_AUTO, 1, 64, "contributors a wave (default: local; 8 when local is 1)")          \
    X(k, TIDE_AUTO, 1, 1023, "rail transfers a round (default: from the solver)")                   \
    X(n_par, TIDE_AUTO, 1, 2, "inbox generations (default: 1 for one wave, else 2)")                \
    X(n_part, TIDE_AUTO, 1, 64, "passes over each sub-slice (default: 1)")                          \
    X(n_out, TIDE_AUTO, 1, 65472, "outbox blocks a bank (default: full In-Place, 2k-bound Slot-Reuse)") \
    X(n_stg, 2, 1, 16, "staging slots a rank")                                                      \
    X(chunk, TIDE_AUTO, 16, INT64_C(1) << 40, "elements of a staging chunk")                        \
    X(c_sum, TIDE_AUTO, 1, 148, "CTAs (host: ignored) that sum Level 1")                            \
    X(c_land, TIDE_AUTO, 1, 148, "CTAs (host: ignored) that land a wave")                           \
    X(n_ctx, 4, 1, 16, "RMA contexts a rail communicator")                                          \
    X(ring_slots, 2, 1, 64, "landing slots that ring groups share")                                 \
    X(head_bytes, INT64_C(8) << 20, 16, INT64_C(1) << 40, "bytes of heads a round of the all-gather, of a part of a cast") \
    X(multicast, TIDE_AUTO, 0, 1, "1: one write serves a node (auto: on the host, whose ranks share a landing); 0: one a rank") \
    X(poison, 0, 0, 1, "1: fill a released landing with 0xFF, so that use after reshard shows")     \
    X(deadline_ms, 600000, 1, INT64_C(1) << 40, "milliseconds a wait may take from its enqueue")    \
    X(target, 0, 0, 1, "what chunk and c_sum are chosen for: 0 CPU cores, 1 GPUs")                  \
    X(rail_ring, 0, 0, 65536, "puts and signals of a call to one peer and context (0: what the rail holds)")

typedef struct tide_options {
    size_t size;
#define TIDE_X(name, dflt, lo, hi, help) int64_t name;
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
} tide_options;

#define TIDE_OPTIONS_INIT                                                                           \
    {                                                                                               \
        sizeof(tide_options), 0, TIDE_AUTO, TIDE_AUTO, TIDE_AUTO, TIDE_AUTO, TIDE_AUTO, 2,          \
            TIDE_AUTO, TIDE_AUTO, TIDE_AUTO, 4, 2, INT64_C(8) << 20, TIDE_AUTO, 0, 600000, 0, 0     \
    }

typedef struct tide_knob_info {
    const char *name;
    int64_t dflt, minimum, maximum; /* dflt may be TIDE_AUTO */
    const char *help;
} tide_knob_info;

/* L  Row `index` of the knob table; TIDE_ERR_END past the last. */
TIDE_API int tide_knob_describe(size_t index, tide_knob_info *out);

/* L  Sets one knob by name after checking its bounds. */
TIDE_API int tide_options_set(tide_options *options, const char *name, int64_t value);

/* ---- what is communicated -------------------------------------------------------------- */

typedef enum tide_dtype {
    TIDE_F32 = 0,
    TIDE_BF16 = 1,
    TIDE_F16 = 2,
    TIDE_OPAQUE = 3, /* all-gather only; item_size bytes each */
    TIDE_NONE = 4    /* no gradients: a group of frozen parameters */
} tide_dtype;

#define TIDE_MAX_DIMS 8
#define TIDE_MAX_PARAMS 4096
#define TIDE_MAX_NODES 1024
#define TIDE_MAX_LOCAL 64

typedef struct tide_topology {
    size_t size;
    uint32_t nodes; /* M, 1..1024 */
    uint32_t local; /* L, 1..64 */
} tide_topology;
#define TIDE_TOPOLOGY_INIT { sizeof(tide_topology), 1, 1 }

/* One parameter, unsharded. shard_dim 0: padded rows R = ceil(dims[0] / N), a rank may own no row.
 * shard_dim d > 0: dims[d] must be a multiple of N. A 0-d parameter has ndim 0 and counts as one row. */
typedef struct tide_param {
    const char *name; /* copied; may be NULL */
    int ndim;         /* 0..TIDE_MAX_DIMS */
    int shard_dim;    /* 0..max(ndim-1, 0) */
    int64_t dims[TIDE_MAX_DIMS];
} tide_param;

typedef enum tide_landing {
    TIDE_LANDING_RING = 0,   /* shares the ring: resharded before two further groups are gathered */
    TIDE_LANDING_PRIVATE = 1 /* a landing of its own */
} tide_landing;

typedef enum tide_input {
    TIDE_INPUT_ADOPTED = 0, /* shards live in the arena (tide_shard_adopt); same dtype */
    TIDE_INPUT_ARGUMENT = 1 /* shards are passed to each call; copied, or cast from shard_dtype */
} tide_input;

typedef struct tide_group_desc {
    size_t size;
    const char *name; /* copied; may be NULL */
    uint32_t n_params;
    const tide_param *params; /* read during the call only */
    int dtype;                /* of the unsharded parameters (tide_dtype) */
    uint32_t item_size;       /* used when dtype is TIDE_OPAQUE; else 0 */
    int shard_dtype;          /* of the shards; != dtype needs TIDE_INPUT_ARGUMENT (cast) */
    int grad_dtype;           /* of the gradients usually handed in; TIDE_NONE: no reduce-scatter */
    int input;                /* tide_input */
    int landing;              /* tide_landing; ring slots are given out in array order */
} tide_group_desc;
#define TIDE_GROUP_DESC_INIT                                                                        \
    { sizeof(tide_group_desc), NULL, 0, NULL, TIDE_BF16, 0, TIDE_BF16, TIDE_BF16, TIDE_INPUT_ADOPTED, TIDE_LANDING_RING }

/* ---- plans: everything decided, nothing allocated on a device -------------------------- */

typedef struct tide_plan tide_plan;

/* Bytes that one rank allocates (requested, before allocation granularity). */
typedef struct tide_bytes {
    size_t size;
    uint64_t control;   /* counters and rail words */
    uint64_t landing;   /* all slots; on a node with one shared landing: 0 but on local rank 0 */
    uint64_t resident;  /* adopted shards */
    uint64_t stage;     /* all-gather receive stage */
    uint64_t staging;   /* Level 1 chunks */
    uint64_t outbox;    /* both banks, spares not included */
    uint64_t spare;     /* own-node partials, both banks */
    uint64_t inbox;     /* all generations */
    uint64_t total;     /* sum of the above, region alignment included */
    uint64_t granularity; /* the fabric rounds each allocation up to a multiple of this */
} tide_bytes;
#define TIDE_BYTES_INIT { sizeof(tide_bytes), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* L  Pure function of its arguments. Errors: TIDE_ERR_ARGUMENT (names the field),
 * TIDE_ERR_UNSUPPORTED (a wave width whose contributors would collide, paper App. D),
 * TIDE_ERR_MEMORY. `multicast` TIDE_AUTO counts as 0 here unless tide_groups_create resolved it. */
TIDE_API int tide_plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                              const tide_options *options, tide_plan **out);

/* L  What `rank` will allocate for this plan: a promise (paper 5.4 gives the bound). */
TIDE_API int tide_plan_bytes(const tide_plan *plan, uint32_t rank, tide_bytes *out);

/* L  The resolved knobs: no TIDE_AUTO left. */
TIDE_API int tide_plan_options(const tide_plan *plan, tide_options *out);

/* L  64-bit FNV-1a over topology, geometry, options and memory map; equal on all ranks. */
TIDE_API uint64_t tide_plan_digest(const tide_plan *plan);

#define TIDE_PRINT_JSON 1u /* one JSON object instead of text */
#define TIDE_PRINT_OPS 2u  /* the op lists of `rank` as well */
typedef int (*tide_write_fn)(void *context, const char *text, size_t bytes); /* nonzero stops */
/* L  Describes the plan for people (or as JSON) through `write`. */
TIDE_API int tide_plan_print(const tide_plan *plan, uint32_t rank, unsigned flags, tide_write_fn write,
                             void *context);

/* L  NULL is fine. */
TIDE_API void tide_plan_destroy(tide_plan *plan);

/* ---- communicator ------------------------------------------------------------------------ */

/* Blocking all-gather of `bytes` bytes from each rank into out (rank order). 0 on success. */
typedef int (*tide_allgather_fn)(void *context, const void *in, void *out, size_t bytes);

typedef struct tide_bootstrap tide_bootstrap;
/* C  A bootstrap for ranks of one machine without any other library: rank 0 listens on the abstract Unix socket
 * `path` (at most 90 bytes, no name in the file system), the others connect; peers of another uid are refused.
 * Blocks up to timeout_ms, and a second longer to learn from rank 0 who was missing. Errors: TIDE_ERR_ARGUMENT,
 * TIDE_ERR_DEADLINE (names a missing rank), TIDE_ERR_MISMATCH (two processes claim one rank; sizes or versions
 * differ), TIDE_ERR_SYSTEM (the path is taken), TIDE_ERR_MEMORY. */
TIDE_API int tide_bootstrap_local(const char *path, uint32_t rank, uint32_t n_ranks, int64_t timeout_ms,
                                  tide_bootstrap **out);
/* C  A tide_allgather_fn: pass the bootstrap as its context. Waits up to timeout_ms for the slowest rank.
 * Errors: TIDE_ERR_DEADLINE, TIDE_ERR_PEER_DEAD (a rank has closed or died), TIDE_ERR_MISMATCH (byte counts
 * differ), TIDE_ERR_FORKED; after one, every later call returns it. */
TIDE_API int tide_bootstrap_allgather(void *bootstrap, const void *in, void *out, size_t bytes);
/* L  After the communicators that use it. NULL is fine. */
TIDE_API void tide_bootstrap_destroy(tide_bootstrap *bootstrap);

typedef enum tide_fabric {
    TIDE_FABRIC_HOST = 0, /* threads and processes of one machine, memory of the CPU */
    TIDE_FABRIC_CUDA = 1, /* GPUs of one machine that can access each other's memory */
    TIDE_FABRIC_NCCL = 2  /* the same within a node; between nodes NCCL's one-sided transfers, also to other machines */
} tide_fabric;

typedef struct tide_comm tide_comm;
typedef struct tide_comm_desc {
    size_t size;
    uint32_t rank, n_ranks;
    uint32_t node_size;          /* local ranks a node, all of one machine; 0: all ranks of a machine are one node */
    int fabric;                  /* tide_fabric */
    int device;                  /* ordinal of this rank's GPU; ignored by the host fabric */
    tide_allgather_fn allgather; /* used by create and groups_create only, in the caller's thread; NULL when n_ranks
                                    is 1 */
    void *allgather_context;
    const tide_options *options; /* NULL: defaults. Lane-wide for all groups of the communicator */
} tide_comm_desc;
#define TIDE_COMM_DESC_INIT { sizeof(tide_comm_desc), 0, 1, 0, TIDE_FABRIC_HOST, 0, NULL, NULL, NULL }

/* L  Equal for two processes that can be ranks of one node: same machine since the same boot, same network namespace.
 * node_size 0 goes by it. */
TIDE_API uint64_t tide_host_identity(void);

/* C  The struct, its options and its strings are read during the call only. Takes deadline_ms from the
 * environment variable TIDE_DEADLINE_MS where the program left it at its default. TIDE_MACHINE names a machine file
 * (`tide calibrate` writes one) whose rates the plans of this communicator are made with, each the worst of all ranks;
 * given on all ranks or on none. Errors: TIDE_ERR_ARGUMENT (also: that file is bad, with its line),
 * TIDE_ERR_MISMATCH (ranks, node sizes, versions or options differ: names field and ranks, alike on all ranks),
 * TIDE_ERR_UNSUPPORTED (no driver, no NCCL or one that is too old, ...), TIDE_ERR_SYSTEM (the all-gather failed, or a
 * system call), TIDE_ERR_PEER_DEAD and TIDE_ERR_DEADLINE (as the exchange of descriptors and tide_bootstrap_allgather find them), TIDE_ERR_MEMORY,
 * TIDE_ERR_FORKED (in a child of a process that had a communicator). A rank whose own arguments are bad still
 * takes part, so that all ranks return its error. */
TIDE_API int tide_comm_create(const tide_comm_desc *desc, tide_comm **out);

typedef struct tide_comm_info {
    size_t size;
    uint32_t rank, n_ranks, nodes, local;
    int fabric;
    int multicast;        /* 1 when one write serves a node; as found so far */
    uint64_t calls;       /* collectives enqueued so far */
    uint64_t arena_bytes; /* allocated now, granularity included */
    uint64_t live_views;  /* tensors handed out and not yet released */
} tide_comm_info;
/* L  Also after a failure. */
TIDE_API int tide_comm_get_info(const tide_comm *comm, tide_comm_info *out);

/* ---- groups --------------------------------------------------------------------------------- */

typedef struct tide_group tide_group;

/* C  Plans, agrees, allocates and registers n_groups groups: all or none. Ring slots, stage, staging, outbox
 * and inbox are shared by the groups of one call. out receives n_groups handles, owned by the communicator
 * until tide_comm_destroy. Descriptions are read during the call only. Errors alike on all ranks, nothing stays
 * allocated and the communicator can be used further: TIDE_ERR_MISMATCH names group, parameter, field and ranks
 * ("group 1 'b' param 2 'head' dims[1]: 33 on ranks 0-2, 34 on rank 3"); TIDE_ERR_UNSUPPORTED: NCCL has no one-sided
 * transfers between these ranks; or a call of a group has more puts and signals to one peer and context than the rail
 * holds (rail_ring), the text then begins with "group 1 "; TIDE_ERR_DEADLINE (a call of NCCL's did not return: names lane
 * and call; its thread and communicator are given up); also those of tide_plan_create, TIDE_ERR_SYSTEM. */
TIDE_API int tide_groups_create(tide_comm *comm, const tide_group_desc *groups, uint32_t n_groups,
                                tide_group **out);

typedef struct tide_group_path {
    size_t size;
    const char *path;   /* "host M=2 L=2 multicast", "cuda M=1 L=2 unicast", "nccl M=2 L=1 unicast" */
    const char *reason; /* why this path; valid while the communicator lives */
    uint64_t digest;    /* of the plan, equal on all ranks */
    uint64_t all_gathers, reduce_scatters; /* calls enqueued */
    /* Written a call by this rank: copies and puts, a multicast once. The reduce-scatter's are those of all parameters
     * in the group's grad_dtype, In-Place. */
    uint64_t all_gather_bytes, reduce_scatter_bytes;
} tide_group_path;
/* L  Also after a failure. */
TIDE_API int tide_group_get_path(const tide_group *group, tide_group_path *out);

typedef enum tide_tensor_kind {
    TIDE_TENSOR_PARAM = 0, /* unsharded parameter in its landing, padded rows behind it */
    TIDE_TENSOR_SHARD = 1  /* adopted shard in the arena (TIDE_INPUT_ADOPTED only), padded */
} tide_tensor_kind;
typedef struct tide_tensor {
    size_t size;
    void *data;
    uint64_t bytes; /* padding included */
    int dtype;
    uint32_t item_size;
} tide_tensor;
/* L  Address of a tensor; fixed for the life of the group. */
TIDE_API int tide_group_tensor(const tide_group *group, int kind, uint32_t index, tide_tensor *out);

/* L  The same memory as a 1-D DLManagedTensor (DLPack 0.8, byte_offset 0, kDLCPU or kDLCUDA) of
 * bytes / item_size elements; opaque dtypes come as bytes. Holds the arena alive until its deleter
 * (plain C, any thread, needs no lock of the caller) has run. *out is a DLManagedTensor*. */
TIDE_API int tide_group_dlpack(tide_group *group, int kind, uint32_t index, void **out);

/* L  Copies `bytes` bytes (the padded shard, exactly tide_group_tensor(SHARD).bytes, or fewer: the rest is
 * zeroed) into the arena at this point of `stream`; from then on all_gather reads parameter `index` there (paper
 * 3.1). `data` may lie in the shard itself. Not while an all-gather of the group is under way. Errors:
 * TIDE_ERR_ARGUMENT, TIDE_ERR_STATE (not an adopted group). */
TIDE_API int tide_shard_adopt(tide_group *group, uint32_t index, const void *data, uint64_t bytes, void *stream);

/* ---- the collectives ------------------------------------------------------------------------- */

/* E  Gathers every parameter of the group into its landing. shards: n_params pointers to the padded
 * (shard_dim 0) shards for TIDE_INPUT_ARGUMENT, kept alive by the caller until READY; NULL for adopted groups. A rank that
 * owns fewer rows than R must still pass R rows (padding is written as it is). Errors: TIDE_ERR_STATE when the
 * landing slot still belongs to an unreleased group (names both) or holds stashed gradients that have not been
 * read; TIDE_ERR_ARGUMENT. */
TIDE_API int tide_all_gather(tide_group *group, const void *const *shards, void *stream);

/* E  The landing may be overwritten once work before this point on `stream` is done (reshard). With the poison
 * knob the landing is filled with 0xFF first, once READY. Errors: TIDE_ERR_STATE when the group is not
 * gathered, or has stashed gradients. */
TIDE_API int tide_slot_release(tide_group *group, void *stream);

typedef struct tide_reduce_scatter_args {
    size_t size;
    const void *const *grads; /* n_params pointers to contiguous unsharded gradients; NULL: parameter has
                                 none in this call (the same parameters on all ranks) */
    float *out;               /* packed fp32 output over the parameters that have gradients; E elements */
    int grad_dtype;           /* of every gradient of this call: TIDE_F32, TIDE_BF16, TIDE_F16 */
    int accumulate;           /* 0: out = alpha * sum; 1: out = out + alpha * sum */
    float alpha;
    int mode;                 /* 0 In-Place; 1 Slot-Reuse: read what tide_grads_stash left in the slot (grads is
                                 ignored, grad_dtype that of the stash) */
} tide_reduce_scatter_args;
#define TIDE_REDUCE_SCATTER_ARGS_INIT \
    { sizeof(tide_reduce_scatter_args), NULL, NULL, TIDE_BF16, 0, 1.0f, 0 }

/* L  Elements of the packed output for the parameters whose entry in `present` is nonzero (NULL: all). */
TIDE_API int tide_group_output_elements(const tide_group *group, const uint8_t *present, uint64_t *elements);

/* E  Slot-Reuse: copies gradients into the landing this group still holds, layout kept; the gradients may be
 * freed by the host after the call (host fabric) or after `stream` has run it (CUDA). The slot is given back
 * when the following reduce-scatter's reads are done; call instead of tide_slot_release. Uses grads and
 * grad_dtype of args. Errors: TIDE_ERR_STATE (slot not held), TIDE_ERR_UNSUPPORTED (gradient item larger than
 * the parameter's, or a landing shared by the node: use In-Place). */
TIDE_API int tide_grads_stash(tide_group *group, const tide_reduce_scatter_args *args, void *stream);

/* E  Read phase (paper 5.2): consumes the gradients; READ_DONE follows. Two read phases may be ahead of the
 * network phases (the banks), with a partial outbox one, whose READ_DONE then comes with its network phase.
 * When no parameter has a gradient the call does nothing, counts as no collective and may pass out NULL; its
 * network phase is still due. A subset of parameters, a dtype or a mode that is new to the group is compiled at
 * its first call (TIDE_ERR_MEMORY); later calls allocate nothing. Errors: TIDE_ERR_ARGUMENT, TIDE_ERR_STATE
 * (too many reads ahead; mode 1 without a stash), TIDE_ERR_UNSUPPORTED (TIDE_NONE). */
TIDE_API int tide_reduce_scatter_read(tide_group *group, const tide_reduce_scatter_args *args, void *stream);
/* E  Network phase, behind the previous call's; DONE follows. One for each read, in the same order;
 * TIDE_ERR_STATE names the group whose turn it is. */
TIDE_API int tide_reduce_scatter_net(tide_group *group, void *stream);
/* E  Both phases. Gradients stay untouched by the caller until READ_DONE, `out` until DONE. TIDE_ERR_STATE
 * while a read phase waits for its network phase. */
TIDE_API int tide_reduce_scatter(tide_group *group, const tide_reduce_scatter_args *args, void *stream);

typedef enum tide_event {
    TIDE_READY = 0,     /* unsharded parameters may be read */
    TIDE_READ_DONE = 1, /* gradients are no longer needed */
    TIDE_DONE = 2       /* out is complete */
} tide_event;
/* L  Makes `stream` (host: the calling thread) wait for the group's latest such event; none yet: nothing to
 * wait for. On the host fabric returns the failure that ended the wait: TIDE_ERR_PEER_DEAD, _DEADLINE,
 * _MISMATCH, _NETWORK, _ABORTED. TIDE_ERR_STATE when the event comes with a network phase that has not been enqueued. */
TIDE_API int tide_wait(tide_group *group, int event, void *stream);

/* ---- memory that PyTorch counts ------------------------------------------------------------------ */

/* L  The next tide_torch_alloc of this thread gives `memory`. */
TIDE_API void tide_torch_offer(void *memory);
/* L  The pair for torch.cuda.memory.CUDAPluggableAllocator. It allocates nothing: in a torch.cuda.MemPool it makes torch
 * count memory that a communicator has allocated (tide_comm_info.arena_bytes, at the address of one of its tensors).
 * alloc gives what was offered, once, else NULL; free does nothing. */
TIDE_API void *tide_torch_alloc(ptrdiff_t bytes, int device, void *stream);
TIDE_API void tide_torch_free(void *memory, size_t bytes, int device, void *stream);

/* ---- health and the end ------------------------------------------------------------------------ */

typedef struct tide_failure {
    size_t size;
    int code;           /* TIDE_OK while healthy */
    uint32_t rank;      /* who noticed */
    int64_t peer;       /* whom it waited for; -1 unknown */
    uint64_t call;      /* number of the collective, from 1; 0 unknown */
    char phase[32];     /* "reduce_scatter push" */
    char text[256];     /* the whole sentence */
} tide_failure;
#define TIDE_FAILURE_INIT { sizeof(tide_failure), 0, 0, -1, 0, { 0 }, { 0 } }
/* L  Any thread; out may be NULL. Returns failure.code. After a failure every later call on the communicator
 * and its groups returns the same code and text, but for tide_comm_get_info, tide_group_get_path,
 * tide_comm_abort and tide_comm_destroy; outputs are undefined, and nothing that was handed in is touched any more. */
TIDE_API int tide_comm_check(tide_comm *comm, tide_failure *out);
/* L  Blocks until all that was enqueued has completed, or returns the failure. */
TIDE_API int tide_comm_sync(tide_comm *comm);
/* L  Any thread. Fails the communicator on all ranks; waits end with TIDE_ERR_ABORTED. Harmless after a
 * failure. */
TIDE_API int tide_comm_abort(tide_comm *comm);
/* C  Waits for what was enqueued and, up to the deadline, for all ranks; then frees everything. After a failure it
 * waits for nobody. Arenas with live views stay until the last view's deleter has run. NULL is fine. Everything is
 * freed also when it returns the failure that ended its wait for the others (TIDE_ERR_PEER_DEAD, _DEADLINE, _ABORTED
 * ...); TIDE_ERR_FORKED changes nothing. */
TIDE_API int tide_comm_destroy(tide_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
