/*
 * plan.h - everything that is decided before a byte moves. Pure functions: no I/O, no device, no clock.
 */
#ifndef TIDE_PLAN_H
#define TIDE_PLAN_H

#include "geometry/geometry.h"

/* ---- memory map: the same on every rank -------------------------------------------------- */

enum plan_region {
    REGION_LANDING,  /* banks: slots (ring slots first, then private landings) */
    REGION_RESIDENT, /* one bank; group offsets in plan_group.resident */
    REGION_STAGE,    /* one bank; slot i of group g at (i - (cast ? 0 : 1)) * S_g */
    REGION_STAGING,  /* banks: n_stg slots */
    REGION_OUTBOX,   /* banks: 2 (call parity); block J at J * block_stride */
    REGION_SPARE,    /* banks: 2; pass q at q * block_stride */
    REGION_INBOX,    /* banks: n_par generations; block i (plan_rs_block) at i * block_stride */
    REGION_COUNT
};
const char *plan_region_name(int region);

typedef struct plan_bank { uint64_t offset, bytes; } plan_bank; /* offset within the region */
typedef struct plan_map {
    struct {
        uint64_t bytes; /* all banks */
        uint32_t n_banks;
        plan_bank *banks;
    } region[REGION_COUNT];
    uint64_t block_stride; /* bytes of an outbox, spare or inbox block: max over groups of rows * E_part * 4, aligned */
} plan_map;

/* ---- reduce-scatter numbers, lane-wide ------------------------------------------------------ */

typedef struct plan_round { uint32_t first, count; } plan_round; /* contributors c = first .. first+count-1 */
typedef struct plan_wave {
    uint32_t first, count;        /* contributors 1..M; the own node is c = M */
    uint32_t first_round, n_rounds; /* into plan_rs.rounds; own-only waves have none */
} plan_wave;
typedef struct plan_rs {
    uint32_t nodes, local, w_wave, k, n_par, n_part, n_out;
    uint32_t n_waves, n_rounds; /* a pass */
    plan_wave *waves;
    plan_round *rounds;
    uint32_t n_blocks; /* D = n_part * (M - 1) */
    uint32_t n_inbox;  /* blocks of an inbox generation: L; L = 1: the remote contributors of a wave */
} plan_rs;

/* Waves and rounds for (M, L, W_wave, k); TIDE_ERR_UNSUPPORTED when two contributors of a wave meet in one block
 * (names wave and contributors). k is clamped to max(1, M - 1). n_par, n_part, n_out already resolved. */
int plan_rs_init(plan_rs *rs, uint32_t nodes, uint32_t local, uint32_t w_wave, uint32_t k, uint32_t n_par,
                 uint32_t n_part, uint32_t n_out);
void plan_rs_clear(plan_rs *rs);
/* cbar: contributor c's rotation; local rank that holds contributor c's partial of sub-slice s, and its inverse. */
static inline uint32_t plan_cbar(uint32_t nodes, uint32_t c) { return c % nodes; }
static inline uint32_t plan_holder(uint32_t local, uint32_t s, uint32_t cbar) { return (s + local - cbar % local) % local; }
static inline uint32_t plan_subslice(uint32_t local, uint32_t j, uint32_t cbar) { return (j + cbar) % local; }
/* Inbox block of contributor c on local rank j. One rank a node has no sub-slices to tell contributors apart by: each has a block
 * of its own in its wave, and waves may be as wide as one likes. */
static inline uint32_t plan_rs_block(const plan_rs *rs, uint32_t j, uint32_t c)
{
    return rs->local > 1 ? plan_subslice(rs->local, j, plan_cbar(rs->nodes, c)) : (c - 1) % rs->w_wave;
}
enum { PLAN_SINGLE_WAVE = 8 }; /* contributors a wave when L = 1 (paper App. F: a sum of eight sources) */
/* Bit s set: wave w (of a pass) writes inbox block s on local rank j. At most 64 blocks. */
uint64_t plan_rs_wave_mask(const plan_rs *rs, uint32_t wave, uint32_t j);
/* Blocks to zero before wave g (= pass * n_waves + w, of a call) lands on local rank j: written by the previous wave on its
 * generation (of this call or of the one before) and not by this one. None when L = 1: a landing reads only what its wave wrote. */
uint64_t plan_rs_stale_mask(const plan_rs *rs, uint32_t g, uint32_t j);
/* max over consecutive rounds of k_i + k_{i-1}, over the rounds of all passes in order (paper 5.3, equation 9). */
uint32_t plan_rs_partial_outbox(const plan_rs *rs);

/* Element ranges of one group (or subset) on the packed output: sub-slice s, pass q.
 * M = 1: one sub-slice, one pass, the whole packed shard. */
typedef struct plan_cut {
    uint64_t elements; /* E */
    uint64_t sub;      /* E_sub: vector-aligned capacity of a sub-slice */
    uint64_t part;     /* E_part: vector-aligned capacity of one pass's part of a sub-slice */
    uint64_t chunk;    /* elements a row of a staging chunk; >= 1, <= max(part, 1) */
    uint32_t n_chunks; /* chunks a block: ceil(part / chunk); 0 when E = 0 */
    uint32_t rows;     /* destination rows of a block: L, or 1 when M = 1 */
} plan_cut;
#define PLAN_VECTOR 4u /* elements: sub-slices, parts and chunks are multiples of 16 bytes of fp32 */
void plan_cut_init(plan_cut *cut, uint32_t nodes, uint32_t local, uint32_t n_part, uint64_t elements, uint64_t chunk);
/* Range [begin, end) of packed elements of sub-slice s, pass q; empty when past E. */
void plan_cut_range(const plan_cut *cut, uint32_t s, uint32_t q, uint64_t *begin, uint64_t *end);

/* ---- all-gather rounds ------------------------------------------------------------------------ */

typedef struct plan_ag_round {
    uint32_t distance; /* 2^d: node n sends to n - 2^d and receives from n + 2^d */
    uint32_t count;    /* c_d = min(2^d, M - 2^d) slots */
} plan_ag_round;
/* One rank a node may put its landing's bytes to where they belong in the next one's (paper App. F). They lie there parameter by
 * parameter: a round is a put for each strip of each, two where its slots wrap at M. What a peer's ring of messages holds
 * decides: knob rail_ring, or NCCL's. */
enum { PLAN_RAIL_RING = 32, PLAN_ROUND_EXTRA = 3 /* a piece cut between heads and tails, a credit, a go */ };
/* Rounds for M nodes (paper 3.1); out has room for 11. Returns ceil(log2 M). */
uint32_t plan_ag_rounds(uint32_t nodes, plan_ag_round out[11]);

/* ---- the plan ------------------------------------------------------------------------------------ */

typedef struct plan_group {
    geo_group geo;
    uint32_t slot;     /* landing bank */
    uint64_t resident; /* byte offset of the group's shards in REGION_RESIDENT; parameter p at + offset_p * item */
    bool stage_cast;   /* slot 0 of the stage holds the own shard: input is an argument, M > 1 and not direct */
    bool direct;       /* L = 1, M > 1: the all-gather goes from landing to landing, without a stage */
    uint32_t direct_puts; /* to a peer, at most, when it does; 0: the rail has more than one rank a node */
    plan_cut cut;      /* of the full group */
} plan_group;

#define TIDE_MAX_GROUPS 65000 /* banks and resources of slots are 16-bit numbers in the op list */
struct tide_plan {
    tide_topology topology;
    tide_options options; /* resolved */
    uint32_t n_groups;
    plan_group *groups;
    uint32_t n_slots; /* landing banks */
    plan_rs rs;       /* lane-wide; for M = 1: no waves */
    plan_map map;
    uint64_t digest;
};

/* Multicast to CPU cores: one landing in memory serves all ranks of a node. To GPUs: each rank has its own, and one address
 * behind which they all are. */
static inline bool plan_shared_landing(const tide_plan *plan)
{
    return plan->options.multicast == 1 && plan->options.target == 0;
}

/* Local resources, each with two counter words a poster. */
enum { RESOURCE_STAGING = 0, RESOURCE_INBOX = 1, RESOURCE_SLOT0 = 2 }; /* slot q: RESOURCE_SLOT0 + q */

/* Counters and rail words of one rank. A local word has a cache line of its own; a rail word counts the signals that arrived and
 * those consumed, for each lane, peer node, context and signal index. */
enum { PLAN_WORD_LINE = 64, PLAN_RAIL_LANES = 2, PLAN_RAIL_CONTEXTS = 16, PLAN_RAIL_SIGNALS = 4, PLAN_RAIL_WORD = 16 };
uint64_t plan_control_bytes(uint32_t nodes, uint32_t local, uint32_t n_slots);

/* Memory map and tide_plan_bytes of a plan whose groups, options and rs are set. Names what exceeds 2^63 bytes. */
int plan_map_init(tide_plan *plan);
void plan_map_clear(plan_map *map);

/* Solver (paper App. G, equations 13-14). Rates in bytes a second, time in seconds. */
typedef struct plan_rates { double bw_nic, bw_sum, bw_land, bw_cap, t_round; } plan_rates;
extern const plan_rates plan_rates_paper;
typedef struct plan_choice { uint32_t k, c_sum, c_land; } plan_choice;
void plan_solve(const plan_rates *rates, uint32_t nodes, uint32_t local, uint32_t w_wave, uint32_t n_part,
                uint64_t s32_bytes, uint32_t grad_item, plan_choice *out);
/* What a rank sends each node of a reduce-scatter whose output is s32_bytes of fp32: sums; L = 1: gradients as they are. */
double plan_wire_bytes(uint32_t local, double s32_bytes, uint32_t grad_item);
/* One node has no NIC: the CTAs that add a reduce-scatter's elements as fast as the peers' pushes bring them. Bytes a second:
 * what arrives at a GPU, and what one CTA reads and writes. */
typedef struct plan_node_rates { double bw_link, bw_sum; } plan_node_rates;
extern const plan_node_rates plan_node_rates_h200;
uint32_t plan_solve_node(const plan_node_rates *rates, uint32_t local, uint32_t grad_item);
/* tide_plan_create with the solver's rates; there they are plan_rates_paper and plan_node_rates_h200. */
int plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                const tide_options *options, const plan_rates *rates, const plan_node_rates *node_rates, tide_plan **out);
/* CTAs of a cast: one an SM. A matrix product whose CTAs stay on their SMs begins when the last SM is free, so a cast costs
 * it the time it takes, not the SMs. Two H200s, training steps of two models: 0.4 and 0.7 % shorter than with 32 CTAs, whose
 * casts take 2.3 times as long. */
enum { PLAN_CAST_CTAS = 132 };
/* Closed-form bound of the paper's 5.4 in S32 blocks: 4 n_stg + 8 n_par + 2 n_out + 2 (L = 8, bf16). */
uint64_t plan_area_bound(uint32_t n_stg, uint32_t n_par, uint32_t n_out);

#endif
