/*
 * geometry.h - where the bytes of a parameter group are: packed shards, landings, gradients.
 *
 * A parameter is `outer` strips, each of N equal pieces, one a rank; rank r's shard is its piece of every strip:
 *
 *     full parameter    | r0 | r1 | r2 | r3 | r0 | r1 | r2 | r3 |      outer = 2, N = 4
 *     shard of rank 1        | r1 |              | r1 |                strip elements each
 *
 * Shard(0) has outer = 1 and strip = R * K (R = ceil(D / N) padded rows, K the product of the other extents), so
 * that padding is the tail of the parameter. Shard(d > 0) has outer = the product of the extents before d and needs
 * an even split. (paper 2.1, equation 2)
 */
#ifndef TIDE_GEOMETRY_H
#define TIDE_GEOMETRY_H

#include "base/base.h"

/* Landing base and region alignment: every A_p, slot and region base is a multiple of this. */
#define TIDE_ALIGN 256u

typedef struct geo_param {
    char *name;
    uint64_t outer;  /* strips of the shard */
    uint64_t strip;  /* elements of one rank's piece of one strip */
    uint64_t shard;  /* outer * strip: elements of a padded shard */
    uint64_t whole;  /* real elements of the parameter, padding excluded */
    uint64_t offset; /* packed offset in elements: sum of shard of the parameters before (o_p / b) */
    uint64_t landing; /* A_p: byte offset of the parameter in its landing, TIDE_ALIGN-aligned */
} geo_param;

typedef struct geo_group {
    char *name;
    uint32_t nodes, local, ranks; /* M, L, N */
    uint32_t n_params;
    geo_param *params;
    int dtype, shard_dtype, grad_dtype, input, landing_kind;
    uint32_t item; /* bytes of an all-gather item */
    uint64_t elements; /* E: elements of a packed shard */
    uint64_t shard_bytes; /* S = E * item */
    uint64_t landing_bytes; /* one landing: sum of aligned N * s_p */
} geo_group;

/* Checks one description and computes its geometry. `index` only serves messages ("group 3 param 2 dims[0]: ..."). */
int geo_group_init(geo_group *g, const tide_topology *topology, const tide_group_desc *desc, uint32_t index);
void geo_group_clear(geo_group *g);

/* Geometry of the subset of parameters with present[p] != 0 (NULL: all), offsets packed anew. Names and landing
 * offsets are kept; out->params[i] is the i-th present one and source_index (n_params entries, may be NULL) its index in g. */
int geo_group_subset(geo_group *out, const geo_group *g, const uint8_t *present, uint32_t *source_index);

/* Real (not padded) elements of rank r's shard. For outer > 1 always the whole shard. */
static inline uint64_t geo_valid(const geo_param *p, uint32_t rank)
{
    uint64_t start;
    if (p->outer != 1)
        return p->shard;
    start = (uint64_t)rank * p->strip;
    return start >= p->whole ? 0 : tide_min_u64(p->whole - start, p->strip);
}

/* One contiguous or strided span of a rank's shard inside the full parameter, in elements. */
typedef struct geo_span {
    uint64_t full;  /* first element in the full parameter */
    uint64_t shard; /* first element in the shard */
    uint64_t width; /* elements a row */
    uint64_t rows;
    uint64_t full_pitch; /* elements between rows in the full parameter */
    uint64_t shard_pitch;
} geo_span;
/* Splits elements [begin, end) of rank's shard into at most 3 spans (head, whole strips, tail). Returns the count. */
int geo_spans(const geo_param *p, uint32_t n_ranks, uint32_t rank, uint64_t begin, uint64_t end, geo_span out[3]);

#endif
