/*
 * kernels.h - the device's kernels: each takes one struct by value, which nvcc and the C compiler see alike, and has a
 * naive twin in C that is told apart by no bit of its result (but which NaN a sum keeps).
 *
 * Addresses in the structs are device addresses (cu_ptr). Tables travel inside the struct: nothing is uploaded. A batch
 * that needs more rows than one struct holds is several launches.
 *
 * Work is counted in tiles, pieces of one row. Tiles are numbered over the whole launch: those of a segment (or run)
 * follow each other row by row, and tiles[i] is the number of its first. These numbers lie side by side: every warp looks
 * through them, in a constant memory that is cold.
 */
#ifndef TIDE_CUDA_KERNELS_H
#define TIDE_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum {
    KERNEL_MAX_POSTS = 64, /* words that a kernel posts when its last CTA has ended */
    KERNEL_SEGMENTS = 96,
    KERNEL_SOURCES = 512,
    KERNEL_RUNS = 256
};

/* A block of rows x elems fp32 results; pitches in bytes. Addresses and pitches are multiples of their items. */
typedef struct kernel_segment {
    uint64_t dst, dst_pitch, elems;
    uint32_t rows, first_source, n_sources, row_tiles;
} kernel_segment;
typedef struct kernel_source {
    uint64_t at, row_pitch;
} kernel_source;

/* Words that get `value` after all results of the launch are visible to every rank and no source is read any more. done:
 * counter in device memory, zero before and after, by which the last CTA is known. */
typedef struct kernel_posts {
    uint64_t done, value;
    uint32_t n, unused;
    uint64_t words[KERNEL_MAX_POSTS];
} kernel_posts;

/* Sum of a segment's sources in their order, in fp32, starting with the first (none: +0). beta: fab_beta without
 * FAB_BETA_CALL. */
typedef struct kernel_reduce {
    kernel_posts posts;
    uint32_t n_segments, n_tiles;
    int32_t beta;
    float alpha;
    uint32_t tile_elems;
    uint32_t slots; /* of the ring, a warp; a slot holds one tile of one source */
    uint32_t tiles[KERNEL_SEGMENTS];
    kernel_segment segments[KERNEL_SEGMENTS];
    kernel_source sources[KERNEL_SOURCES];
} kernel_reduce;

/* Rows of `width` items from src to dst; src 0: zero fill. unit: bytes that are moved at once where no cast is done; it
 * divides addresses, pitches and width. */
typedef struct kernel_run {
    uint64_t src, dst, width, src_pitch, dst_pitch;
    uint32_t rows, row_tiles, unit, unused;
} kernel_run;
typedef struct kernel_copy {
    kernel_posts posts;
    uint32_t n_runs, n_tiles;
    uint32_t src_item, dst_item; /* bytes of an item; both 1 where no cast is done */
    uint64_t tile_items;
    uint32_t tiles[KERNEL_RUNS];
    kernel_run runs[KERNEL_RUNS];
} kernel_copy;

/* Final or not as above, of the sum that a switch makes of the fp32 values behind a multicast address, in an order of its own.
 * src is a multiple of 16, and what lies behind it up to the next multiple of 16 bytes is read as well. */
typedef struct kernel_multimem {
    uint64_t dst, src, elems;
    int32_t beta;
    float alpha;
} kernel_multimem;

/* Every kernel. X(id, name, struct). */
#define KERNEL_DTYPES(X, id, name, type) \
    X(id##_F32, name##_f32, type) X(id##_BF16, name##_bf16, type) X(id##_F16, name##_f16, type)
#define KERNELS(X)                                                                 \
    KERNEL_DTYPES(X, KERNEL_REDUCE_PLAIN, tide_reduce_plain, kernel_reduce)        \
    KERNEL_DTYPES(X, KERNEL_REDUCE_THIN, tide_reduce_thin, kernel_reduce)          \
    KERNEL_DTYPES(X, KERNEL_REDUCE_THIN_ADD, tide_reduce_thin_add, kernel_reduce)  \
    KERNEL_DTYPES(X, KERNEL_REDUCE_FAT, tide_reduce_fat, kernel_reduce)            \
    KERNEL_DTYPES(X, KERNEL_REDUCE_FAT_ADD, tide_reduce_fat_add, kernel_reduce)    \
    X(KERNEL_COPY_PLAIN, tide_copy_plain, kernel_copy)                             \
    X(KERNEL_COPY_BULK, tide_copy_bulk, kernel_copy)                               \
    X(KERNEL_CAST_F32_BF16, tide_cast_f32_bf16, kernel_copy)                       \
    X(KERNEL_CAST_F32_F16, tide_cast_f32_f16, kernel_copy)                         \
    X(KERNEL_CAST_BF16_F32, tide_cast_bf16_f32, kernel_copy)                       \
    X(KERNEL_CAST_BF16_F16, tide_cast_bf16_f16, kernel_copy)                       \
    X(KERNEL_CAST_F16_F32, tide_cast_f16_f32, kernel_copy)                         \
    X(KERNEL_CAST_F16_BF16, tide_cast_f16_bf16, kernel_copy)                       \
    X(KERNEL_MULTIMEM_REDUCE, tide_multimem_reduce, kernel_multimem)              
enum kernel_id {
#define KERNEL_X(id, name, type) id,
    KERNELS(KERNEL_X)
#undef KERNEL_X
    KERNEL_COUNT
};

/* Every warp of a CTA takes tiles of its own. A slot's bytes fix the tile of a ring kernel. */
enum {
    KERNEL_THIN_SLOT = 1024,
    KERNEL_FAT_SLOT = 4096,
    KERNEL_THIN_WARPS = 32,  /* at most, of the ring kernels: what their registers allow */
    KERNEL_FAT_WARPS = 12,
    KERNEL_THIN_ADD_WARPS = 16, /* of those with beta one */
    KERNEL_FAT_ADD_WARPS = 8,
    KERNEL_RING_SOURCES = 32, /* at most, of a sum in a ring */
    KERNEL_PLAIN_WARPS = 16, /* of every other */
    KERNEL_PLAIN_TILE = 1024, /* elements of a sum, items of a cast */
    KERNEL_COPY_TILE = 4096,  /* bytes of a plain copy */
    KERNEL_COPY_SLOT = 4096, /* tile_items of a bulk copy */
    KERNEL_COPY_SLOTS = 3,   /* a warp */
    KERNEL_COPY_WARPS = 9, /* two CTAs an SM: a matrix product of one wave leaves few SMs free */
    KERNEL_BULK_ROW = 256,    /* narrower rows are copied plainly */
    KERNEL_SLOT_EXTRA = 64,  /* a slot of a sum, beside its tile: what it reaches into, what it is, its barrier */
    KERNEL_BARRIER_BYTES = 8 /* a slot of a copy */
};

/* image.c: the fatbin with all of them, or an empty PTX text (n_bytes 0) when this library was built without nvcc. */
const void *cuda_image(size_t *n_bytes);

/* twins.c, over host addresses. By a kernel's name; NULL for one that has none (multimem: the switch adds). *n_bytes: of
 * its struct; 0 for a name that no kernel has. */
typedef void (*kernel_twin)(const void *arguments);
kernel_twin cuda_kernel_twin(const char *name, size_t *n_bytes);
/* The one of tide_multimem_reduce: with the n memories that are behind src, in the order in which they are added. */
void cuda_multimem_reduce_twin(const kernel_multimem *p, const uint64_t *memories, uint32_t n);

#endif
