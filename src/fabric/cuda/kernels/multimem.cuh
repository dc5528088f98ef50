/*
 * multimem.cuh - a sum over a multicast address: the switch adds. Launched only where a knob asks for it and the device
 * supports it; never run on hardware. The order of additions is the switch's own.
 */
#ifndef TIDE_CUDA_MULTIMEM_CUH
#define TIDE_CUDA_MULTIMEM_CUH

#include "fabric/cuda/kernels/device.cuh"

/* beta and alpha as in every sum. dst is a multiple of 4; src of 16. */
__device__ static float multimem_finish(const kernel_multimem &p, uint64_t at, float v)
{
    float old = p.beta == BETA_ONE ? global_load(at) : 0.0f;
    return p.beta == BETA_NOT_FINAL ? v : __fadd_rn(old, __fmul_rn(p.alpha, v));
}

__device__ static void multimem_reduce(const kernel_multimem &p)
{
    uint64_t vectors = (p.elems + 3) / 4, step = (uint64_t)gridDim.x * blockDim.x;
    bool aligned = p.dst % 16 == 0;

    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += step) {
        float4 v = multimem_load_add(p.src + 16 * i);
        uint64_t dst = p.dst + 16 * i, left = p.elems - 4 * i;
        if (aligned && left >= 4) {
            global_store_four(dst, make_float4(multimem_finish(p, dst, v.x), multimem_finish(p, dst + 4, v.y),
                                               multimem_finish(p, dst + 8, v.z), multimem_finish(p, dst + 12, v.w)));
            continue;
        }
        global_store(dst, multimem_finish(p, dst, v.x));
        if (left > 1)
            global_store(dst + 4, multimem_finish(p, dst + 4, v.y));
        if (left > 2)
            global_store(dst + 8, multimem_finish(p, dst + 8, v.z));
        if (left > 3)
            global_store(dst + 12, multimem_finish(p, dst + 12, v.w));
    }
}

#endif
