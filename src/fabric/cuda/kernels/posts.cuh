/*
 * posts.cuh - how a kernel tells other ranks that it has ended.
 */
#ifndef TIDE_CUDA_POSTS_CUH
#define TIDE_CUDA_POSTS_CUH

#include "fabric/cuda/kernels/device.cuh"

/* Every CTA of a launch that posts ends with this, all of its threads. What all CTAs wrote becomes visible before the posts
 * do: each CTA's first thread, after the barrier, orders what its CTA wrote before its count; the last CTA's posts are
 * ordered after all counts. PEERS: some of it is in other GPUs, and each CTA waits until it has got there. */
template <bool PEERS> __device__ static void post(const kernel_posts &p)
{
    bool last = false;
    if (p.n == 0)
        return;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *done = (uint32_t *)p.done;
        if (PEERS)
            __threadfence_system();
        else
            __threadfence();
        last = atomicAdd(done, 1) == gridDim.x - 1;
        if (last)
            *done = 0;
    }
    if (!__syncthreads_or(last))
        return;
    __threadfence_system();
    for (uint32_t i = threadIdx.x; i < p.n; i += blockDim.x)
        post_word(p.words[i], p.value);
}

#endif
