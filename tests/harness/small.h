/*
 * small.h - a small layer on thread ranks: its parameters, values that every dtype holds exactly, and checks of what
 * the collectives made of them, element by element, from the definitions alone.
 */
#ifndef HARNESS_SMALL_H
#define HARNESS_SMALL_H

#include <stdbool.h>
#include <stdio.h>

#include "threads.h"
#include "tide/tide.h"

/* In a function that returns 0 when all is well: cmocka's asserts must not be used off the main thread. */
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, tide_last_error());        \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)
#define CHECK_FAILS(call, code, message)                                                                               \
    do {                                                                                                               \
        int status_ = (call);                                                                                          \
        if (status_ != (code) || !strstr(tide_last_error(), message)) {                                                \
            fprintf(stderr, "%s:%d: %s returned %d (%s), expected %s with '%s'\n", __FILE__, __LINE__, #call, status_, \
                    tide_last_error(), #code, message);                                                                \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

enum { SMALL_PARAMS = 4 };
/* Uneven rows, ranks without rows, an even matrix, and one sharded by columns when n_ranks divides its second extent.
 */
typedef struct small_layer {
    tide_param params[SMALL_PARAMS];
    tide_group_desc desc;
    uint32_t n_ranks, rank;
    int seed; /* values differ between layers */
} small_layer;
void small_init(small_layer *s, const threads_rank *rank, const char *name, int dtype, int shard_dtype, int grad_dtype,
                int seed);

/* A communicator with a deadline of 20 s; options may be NULL. */
int small_comm(const threads_rank *rank, uint32_t node_size, const tide_options *options, tide_comm **out);

uint64_t small_whole(const small_layer *s, uint32_t p); /* elements of the parameter */
uint64_t small_shard(const small_layer *s, uint32_t p); /* elements of a padded shard */

/* Adopts every shard; returns a tide_status. */
int small_adopt(const small_layer *s, tide_group *group);
/* The shards as arguments, in the layer's shard_dtype: SMALL_PARAMS buffers to free. */
void small_shards(const small_layer *s, void *shards[SMALL_PARAMS]);
void small_free(void *buffers[SMALL_PARAMS]);
/* Elements of all landings that are not what was gathered. */
uint64_t small_wrong_params(const small_layer *s, const tide_group *group);

/* Gradients of call `call` on this rank in grad_dtype; parameters whose bit is not in `present` get NULL. */
void small_grads(const small_layer *s, int call, int grad_dtype, unsigned present, void *grads[SMALL_PARAMS]);
/* Elements of the packed output that differ from before + alpha * sum over ranks; before: value of every element (0:
 * not accumulated). */
uint64_t small_wrong_output(const small_layer *s, int call, unsigned present, float alpha, float before,
                            const float *out);

#endif
