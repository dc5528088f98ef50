/*
 * contract.h - inputs and expected results of the calls of a proof's case, from their contracts alone.
 *
 * Numbers are small integers, exact in bf16, and so are sums of them in fp32; another for each key (a call), rank,
 * input and element. For bf16 landings, bf16 or fp32 shards and gradients, alpha 1 and no accumulation.
 */
#ifndef HARNESS_CONTRACT_H
#define HARNESS_CONTRACT_H

#include <stdbool.h>

#include "schedule/verify.h"

/* A plan of CONTRACT_GROUPS groups of four parameters and three, the first adopted, the second passed to each call; knobs by
 * name and value, ended by {0}. NULL: tide_last_error says why. */
enum { CONTRACT_GROUPS = 2 };
tide_plan *contract_plan(uint32_t nodes, uint32_t local, const char *const (*knobs)[2]);

/* Buffers of one call on one rank: its inputs, then a reduce-scatter's output. Room behind each, since mutants may
 * reach an element too far. Full of 0xFF; NULL when out of memory. */
void **contract_buffers(const verify_contract *c);
void contract_buffers_free(const verify_contract *c, void **buffers);

/* Fills the inputs, adopted shards at `resident` (REGION_RESIDENT of the rank). */
void contract_give(const verify_contract *c, uint32_t key, uint32_t rank, void **buffers, uint8_t *resident);
/* Overwrites the inputs. */
void contract_take(const verify_contract *c, void **buffers);

/* Whether a landing, or a rank's output, holds what the call gives; else *wrong is the first byte or element that does
 * not. */
bool contract_landing_right(const verify_contract *c, uint32_t key, const uint8_t *landing, uint64_t *wrong);
bool contract_output_right(const verify_contract *c, uint32_t key, uint32_t n_ranks, uint32_t rank, const float *out,
                           uint64_t *wrong);

#endif
