/*
 * reduce.h - what a reduce-scatter must give, computed from the unsharded gradients of all ranks, an element at a time.
 *
 * Shares no code with the library. reduce_exact follows the contract's order of additions and so gives its bits;
 * reduce_f64 adds in double precision: the truth that these must be close to.
 */
#ifndef ORACLE_REDUCE_H
#define ORACLE_REDUCE_H

#include <stdint.h>

enum reduce_format { REDUCE_F32, REDUCE_BF16, REDUCE_F16 };

/* A parameter, sharded along shard_dim; along 0 with rows padded to a multiple of the ranks. ndim 0: one row. */
typedef struct reduce_param {
    int ndim, shard_dim;
    int64_t dims[8];
} reduce_param;

typedef struct reduce_case {
    uint32_t nodes, local, w_wave; /* w_wave is of no meaning for one node */
    uint32_t n_params;             /* those that have gradients in this call */
    const reduce_param *params;
    int format;
    const void *const *grads; /* [rank * n_params + p], contiguous */
    float alpha;
    int accumulate;
} reduce_case;

/* Elements of one rank's packed output. */
uint64_t reduce_elements(const reduce_case *c);
/* Both update `out`, which holds what is there before the call (read when it accumulates). */
void reduce_exact(const reduce_case *c, uint32_t rank, float *out);
void reduce_f64(const reduce_case *c, uint32_t rank, double *out);

#endif
