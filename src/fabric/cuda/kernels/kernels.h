/*
 * kernels.h - the device's kernels: each takes one struct by value, which nvcc and the C compiler see alike, and has a naive
 * twin in C that is told apart by no bit of its result.
 *
 * Addresses in the structs are device addresses (cu_ptr). Tables travel inside the struct: nothing is uploaded. A batch that
 * needs more rows than one struct holds is several launches.
 */
#ifndef TIDE_CUDA_KERNELS_H
#define TIDE_CUDA_KERNELS_H

#include <stdint.h>

enum {
    KERNEL_MAX_POSTS = 64, /* words that a kernel posts when its last CTA has ended */
    KERNEL_SEGMENTS = 96,
    KERNEL_SOURCES = 512,
    KERNEL_RUNS = 256
};

/* A block of rows x elems fp32 results; pitches in bytes. `tile`: first of its tiles, counted over the whole launch. */
typedef struct kernel_segment {
    uint64_t dst, dst_pitch, elems;
    uint32_t rows, first_source, n_sources, tile;
} kernel_segment;
typedef struct kernel_source {
    uint64_t at, row_pitch;
} kernel_source;

/* What is stored in the memory of another rank (or this one) after all results of the launch are visible to it. */
typedef struct kernel_post { uint64_t word; } kernel_post; /* 8-byte word; gets `value` */

/* Sum of a segment's sources in their order, in fp32, starting with the first (none: +0). beta: fab_beta without
 * FAB_BETA_CALL. `done`: counter in device memory, zero before and after, by which the last CTA is known. */
typedef struct kernel_reduce {
    uint64_t done, post_value;
    uint32_t n_segments, n_tiles, n_posts;
    int32_t beta;
    uint32_t dtype; /* of all sources: TIDE_F32, TIDE_BF16 or TIDE_F16 */
    float alpha;
    uint32_t tile_elems, unused;
    uint64_t posts[KERNEL_MAX_POSTS];
    kernel_segment segments[KERNEL_SEGMENTS];
    kernel_source sources[KERNEL_SOURCES];
} kernel_reduce;

/* Rows of `width` items from src to dst: a cast when the dtypes differ, bytes when both are TIDE_OPAQUE; src 0: zero fill. */
typedef struct kernel_run {
    uint64_t src, dst, width, rows, src_pitch, dst_pitch;
    uint32_t tile, unused;
} kernel_run;
typedef struct kernel_copy {
    uint32_t n_runs, n_tiles, src_dtype, dst_dtype;
    uint64_t tile_items;
    kernel_run runs[KERNEL_RUNS];
} kernel_copy;

#endif
