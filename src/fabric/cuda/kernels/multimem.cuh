/*
 * multimem.cuh - sums and stores over a multicast address: the switch adds, or fans out. Launched only where a knob asks
 * for it and the device supports it. The order of additions is the switch's own.
 */
#ifndef TIDE_CUDA_MULTIMEM_CUH
#define TIDE_CUDA_MULTIMEM_CUH

#include "fabric/cuda/kernels/device.cuh"

__device__ static void multimem_reduce(const kernel_multimem &p)
{
    float4 *dst = (float4 *)p.dst;
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.elems / 4; i += step) {
        float4 v, old = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "l"(p.src + 16 * i)
                     : "memory");
        if (p.beta == BETA_ONE)
            old = dst[i];
        if (p.beta != BETA_NOT_FINAL)
            v = make_float4(__fadd_rn(old.x, __fmul_rn(p.alpha, v.x)), __fadd_rn(old.y, __fmul_rn(p.alpha, v.y)),
                            __fadd_rn(old.z, __fmul_rn(p.alpha, v.z)), __fadd_rn(old.w, __fmul_rn(p.alpha, v.w)));
        dst[i] = v;
    }
}

/* dst: the multicast address. */
__device__ static void multimem_store(const kernel_multimem &p)
{
    const float4 *src = (const float4 *)p.src;
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.elems / 4; i += step) {
        float4 v = src[i];
        asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p.dst + 16 * i), "f"(v.x),
                     "f"(v.y), "f"(v.z), "f"(v.w)
                     : "memory");
    }
}

#endif
