/*
 * oracle.h - what the collectives must produce, computed element by element from the contract. Shares no code with the
 * library: no geometry, plan or number format of src/ outside this folder.
 */
#ifndef TIDE_CLI_ORACLE_H
#define TIDE_CLI_ORACLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tide/tide.h"

/* A well-mixed 64-bit function of five words. */
uint64_t oracle_mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e);

/* Elements of a padded shard, and of the parameter itself. */
uint64_t oracle_shard(const tide_param *p, uint32_t n_ranks);
uint64_t oracle_whole(const tide_param *p);
/* Index in the (padded) full parameter of element i of `rank`'s shard; it is padding when >= oracle_whole. */
uint64_t oracle_locate(const tide_param *p, uint32_t n_ranks, uint32_t rank, uint64_t i);

/* Number formats: bits of an item of `dtype` (fp32, bf16, fp16) to a float and back, to nearest even. */
uint32_t oracle_item(int dtype, uint32_t item_size);
float oracle_load(int dtype, const void *at);
void oracle_store(int dtype, void *at, float value);

/* Kinds of values. */
enum oracle_values {
    VALUES_INTEGERS, /* -8..8: every sum is exact */
    VALUES_NORMAL,   /* standard normal */
    VALUES_SPECIAL,  /* normal with infinities, NaNs, zeros of both signs and subnormals among them */
    VALUES_WIDE,     /* any finite exponent that cannot overflow a sum */
    VALUES_KINDS
};
float oracle_value(int kind, uint64_t hash);

/* One item of a shard (raw bits for a plain copy, a value of `kind` for a cast), a function of its place only. */
void oracle_shard_item(int shard_dtype, uint32_t item, bool cast, uint64_t key, uint64_t param, uint64_t full,
                       void *at);
/* What an all-gather makes of it in the landing. */
void oracle_landing_item(int shard_dtype, int dtype, uint32_t item, uint64_t key, uint64_t param, uint64_t full,
                         void *at);
/* Equal bits, or two NaNs of a cast. */
bool oracle_same_item(int dtype, uint32_t item, bool cast, const void *a, const void *b);

/* One reduce-scatter. Gradient of parameter p on rank u, element x: stored as grad_dtype. */
typedef struct oracle_reduce {
    uint32_t nodes, local, w_wave;
    uint32_t n_params;
    const tide_param *params;
    const uint8_t *present; /* n_params flags */
    int grad_dtype, kind;
    uint64_t key;
    float alpha;
    bool accumulate;
} oracle_reduce;
void oracle_grad_item(const oracle_reduce *r, uint32_t rank, uint32_t param, uint64_t x, void *at);
float oracle_output_before(const oracle_reduce *r, uint32_t rank, uint64_t e);
/* Elements of the packed output. */
uint64_t oracle_output_elements(const oracle_reduce *r);
/* Fills `out` (the contract's order of additions) and `exact` (fp64), both oracle_output_elements long. False when out
 * of memory. */
bool oracle_reduce_run(const oracle_reduce *r, uint32_t rank, float *out, double *exact);

#endif
