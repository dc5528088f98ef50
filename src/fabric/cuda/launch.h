/*
 * launch.h - how a sum is spread over a GPU: the shapes that launch.c chooses from.
 */
#ifndef TIDE_CUDA_LAUNCH_H
#define TIDE_CUDA_LAUNCH_H

#include "fabric/cuda/cuda.h"
#include "fabric/cuda/kernels/kernels.h"

/* A CTA of a ring kernel: its warps, the slots of each, and how many tiles later a tile is prefetched into the L2 cache
 * (0: not). */
typedef struct launch_shape {
    uint32_t warps, slots, ahead;
} launch_shape;

/* Up to LAUNCH_FAT_CTAS CTAs are fat: they are meant for SMs that others leave free, and need few of them. More are thin,
 * to fit beside the CTAs of other kernels; LAUNCH_WIDE_CTAS and more, which fill the GPU anyway, are fat again. */
enum { LAUNCH_FAT_CTAS = 4, LAUNCH_WIDE_CTAS = 100 };
typedef struct launch_shapes {
    launch_shape thin, fat;
} launch_shapes;
extern const launch_shapes launch_default_shapes;

/* For measurements and tests: other shapes from the next launch on. */
void cuda_kernels_shapes(cuda_kernels *k, const launch_shapes *shapes);
uint32_t launch_shared_bytes(const launch_shape *shape, uint32_t slot_bytes);

#endif
