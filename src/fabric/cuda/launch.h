/*
 * launch.h - batches on a stream, by copy engine or by kernel, and how a sum is spread over a GPU.
 */
#ifndef TIDE_CUDA_LAUNCH_H
#define TIDE_CUDA_LAUNCH_H

#include "fabric/cuda/driver.h"
#include "fabric/cuda/kernels/kernels.h"
#include "fabric/fabric.h"

/* The kernels' image in one context. It is current in load, unload and every launch. No launch allocates or asks the
 * driver anything. */
typedef struct cuda_kernels cuda_kernels;
int cuda_kernels_load(const cuda_driver *driver, cu_context context, cuda_kernels **out);
void cuda_kernels_unload(cuda_kernels *k, bool in_use); /* in_use: the code stays. NULL is fine */
/* What a kernel posts at its end. words: addresses of words that get `value` once all results are visible to their owners.
 * done: 4 bytes of zeroed device memory that belong to the stream. */
typedef struct launch_posts {
    cu_ptr done;
    const cu_ptr *words;
    uint32_t n;
    uint64_t value;
} launch_posts;
/* args: of the call, NULL when nothing in the batch depends on one. device_local: both sides are in this GPU. ctas: of
 * those ops that a kernel does. posts, posted: NULL, or *posted says whether they go with the batch; they do not where
 * copy engines have a part in it. */
int cuda_launch_copy(cuda_kernels *k, cu_stream stream, const fab_copy *copy, const void *const *args,
                     int device_local, uint32_t ctas, const launch_posts *posts, bool *posted);
/* accumulate, alpha: the call's. posts: NULL, or with the batch. */
int cuda_launch_reduce(cuda_kernels *k, cu_stream stream, const fab_reduce *reduce, const void *const *args,
                       int accumulate, float alpha, uint32_t ctas, const launch_posts *posts);

/* What bytes to a peer cost, in us and bytes a us. A pure function of it says whether a batch of copies is a kernel's:
 * `descriptors` that a copy engine would need, in units of so many bytes; mixed: some of it is a kernel's in any case. */
typedef struct launch_cost {
    double engine_start, engine_descriptor, engine_rate;
    double kernel_start, kernel_cta_rate, kernel_rate; /* cta_rate: with units of 16 bytes */
    double kernel_weight; /* of the time in which its CTAs keep others from their SMs */
} launch_cost;
extern launch_cost launch_peer_cost; /* tests may change it while nothing is launched */
bool launch_by_kernel(const launch_cost *cost, uint64_t descriptors, uint64_t bytes, bool mixed, uint32_t unit,
                      uint32_t ctas);

/* A CTA of a ring kernel: its slots' bytes (KERNEL_THIN_SLOT or KERNEL_FAT_SLOT), its warps, the slots of each. */
typedef struct launch_shape {
    uint32_t slot, warps, slots;
} launch_shape;

/* Up to LAUNCH_FAT_CTAS CTAs are fat: they are meant for SMs that others leave free, and need few of them. More are thin,
 * to fit beside the CTAs of other kernels; LAUNCH_WIDE_CTAS and more fill the GPU anyway. */
enum { LAUNCH_FAT_CTAS = 4, LAUNCH_WIDE_CTAS = 100 };
typedef struct launch_shapes {
    launch_shape fat, thin, wide;
} launch_shapes;
extern const launch_shapes launch_default_shapes;

/* For measurements and tests: other shapes from the next launch on. */
void cuda_kernels_shapes(cuda_kernels *k, const launch_shapes *shapes);
uint32_t launch_shared_bytes(const launch_shape *shape);
/* Warps that the kernel of a shape can have; add: with the results so far (beta one). */
uint32_t launch_max_warps(uint32_t slot, int add);

#endif
