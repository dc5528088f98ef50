/*
 * device.cuh - the few instructions that CUDA C++ has no words for, and formats whose bits equal the host's.
 */
#ifndef TIDE_CUDA_DEVICE_CUH
#define TIDE_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "fabric/cuda/kernels/kernels.h"
#include "tide/tide.h"

enum { BETA_NOT_FINAL, BETA_ZERO, BETA_ONE }; /* fab_beta */

/* Kept in a register: reading it anew is slow. */
__device__ static inline uint32_t lane_id()
{
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* ---- bulk copies ----------------------------------------------------------------------------- */

__device__ static inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline void barrier_init(uint32_t barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

/* After the last init, before the first copy that completes on one of them. */
__device__ static inline void barriers_ready()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ static inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred ready;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n"
                 "@!ready bra again;\n"
                 "}\n" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Addresses and bytes are multiples of 16. */
__device__ static inline void bulk_load(uint32_t shared, uint64_t global, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ static inline void bulk_store(uint64_t global, uint32_t shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until at most N of this thread's stores still read shared memory. */
template <int N> __device__ static inline void bulk_stores_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/* Until they are done, and ordered before what the thread does next: they are made by another proxy than its own stores. */
__device__ static inline void bulk_stores_done()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* ---- global memory, by an address that the compiler takes for nothing else --------------------- */

__device__ static inline float global_load(uint64_t at)
{
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}

__device__ static inline float4 global_load_four(uint64_t at)
{
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ static inline void global_store(uint64_t at, float v)
{
    asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(v) : "memory");
}

__device__ static inline void global_store_four(uint64_t at, float4 v)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

/* The switch's sum of what is behind a multicast address; at is a multiple of 16. */
__device__ static inline float4 multimem_load_add(uint64_t at)
{
    float4 v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

/* What the thread has seen and done becomes visible to every processor before the value does. */
__device__ static inline void post_word(uint64_t at, uint64_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

/* ---- formats --------------------------------------------------------------------------------- */

template <int DTYPE> struct format;
template <> struct format<TIDE_F32> {
    typedef float type;
    static constexpr int bytes = 4;
    __device__ static float widen(float v) { return v; }
    __device__ static float narrow(float v) { return v; }
};
template <> struct format<TIDE_BF16> {
    typedef uint16_t type;
    static constexpr int bytes = 2;
    __device__ static float widen(uint16_t v) { return __uint_as_float((uint32_t)v << 16); }
    /* The instruction makes every NaN 0x7fff; the host keeps its sign and upper bits, made quiet. */
    __device__ static uint16_t narrow(float v)
    {
        uint32_t bits = __float_as_uint(v);
        return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)(bits >> 16 | 0x0040u)
                                                  : __bfloat16_as_ushort(__float2bfloat16_rn(v));
    }
};
template <> struct format<TIDE_F16> {
    typedef uint16_t type;
    static constexpr int bytes = 2;
    /* For sums, where a NaN is a NaN. */
    __device__ static float widen(uint16_t v) { return __half2float(__ushort_as_half(v)); }
    __device__ static uint16_t narrow(float v)
    {
        uint32_t bits = __float_as_uint(v);
        return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((bits >> 16 & 0x8000u) | 0x7e00u)
                                                  : __half_as_ushort(__float2half_rn(v));
    }
};

/* For casts: the host moves a NaN's bits. */
template <int DTYPE> __device__ static inline float widen_exact(typename format<DTYPE>::type v)
{
    float wide = format<DTYPE>::widen(v);
    if constexpr (DTYPE == TIDE_F16)
        if ((v & 0x7fffu) > 0x7c00u)
            return __uint_as_float((uint32_t)(v & 0x8000u) << 16 | 0x7f800000u | (uint32_t)(v & 0x3ffu) << 13);
    return wide;
}

/* Four neighbours, as they lie in memory. */
template <int DTYPE> struct four;
template <> struct four<TIDE_F32> {
    typedef float4 type;
    __device__ static float4 widen(float4 v) { return v; }
};
template <> struct four<TIDE_BF16> {
    typedef uint2 type;
    __device__ static float4 widen(uint2 v)
    {
        return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                           __uint_as_float(v.y & 0xffff0000u));
    }
};
template <> struct four<TIDE_F16> {
    typedef uint2 type;
    __device__ static float4 widen(uint2 v)
    {
        float2 a = __half22float2(*(const __half2 *)&v.x), b = __half22float2(*(const __half2 *)&v.y);
        return make_float4(a.x, a.y, b.x, b.y);
    }
};

#endif
