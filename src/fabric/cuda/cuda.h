/*
 * cuda.h - what the files of the CUDA device share.
 */
#ifndef TIDE_CUDA_H
#define TIDE_CUDA_H

#include "fabric/cuda/driver.h"
#include "fabric/fabric.h"

/* ---- launch.c: batches on a stream, by copy engine or by kernel --------------------------------- */

/* The kernels' image in one context. It is current in load, unload and every launch. No launch allocates or asks the
 * driver anything. */
typedef struct cuda_kernels cuda_kernels;
int cuda_kernels_load(const cuda_driver *driver, cu_context context, cuda_kernels **out);
void cuda_kernels_unload(cuda_kernels *k); /* NULL is fine */
/* args: of the call, NULL when nothing in the batch depends on one. device_local: both sides are in this GPU. ctas: of
 * those ops that a kernel does. */
int cuda_launch_copy(cuda_kernels *k, cu_stream stream, const fab_copy *copy, const void *const *args,
                     int device_local, uint32_t ctas);
/* accumulate, alpha: the call's. done: 4 bytes of zeroed device memory that belong to the stream. posts: addresses of
 * words that get post_value once all results are visible to their owners; none when n_posts is 0. */
int cuda_launch_reduce(cuda_kernels *k, cu_stream stream, const fab_reduce *reduce, const void *const *args,
                       int accumulate, float alpha, uint32_t ctas, cu_ptr done, const cu_ptr *posts, uint32_t n_posts,
                       uint64_t post_value);

#endif
