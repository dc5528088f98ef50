/*
 * device.cuh - stands in for the library's file of this name, so that the source of the kernels runs on a CPU: lanes are
 * threads that meet where a warp or a CTA does, CTAs run one after the other.
 *
 * A bulk load poisons its slot when it is issued and arrives when its barrier is waited for: who reads a slot too early, or
 * has it loaded again while somebody still reads it, computes something else. A bulk store reads its slot when that is waited
 * for, and writes when its end is. Alignment and byte counts are checked. At a post the test looks whether all is there.
 */
#ifndef TIDE_CUDA_DEVICE_CUH
#define TIDE_CUDA_DEVICE_CUH

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

extern "C" {
#include "fabric/cuda/kernels/kernels.h"
}
#include "tide/tide.h"

#define __device__
#define __shared__
#define __align__(bytes)
using std::max;
using std::min;

#define REQUIRE(condition, ...) ((condition) ? (void)0 : (std::printf(__VA_ARGS__), std::printf("\n"), std::exit(1)))

struct position { uint32_t x; };
struct warp_meeting { std::barrier<> all{32}; bool votes[32]; };
struct cta_meeting {
    std::barrier<> all;
    std::atomic<bool> any{false};
    explicit cta_meeting(uint32_t threads) : all(threads) {}
};
inline thread_local position threadIdx, blockIdx, blockDim, gridDim;
inline thread_local warp_meeting *this_warp;
inline thread_local cta_meeting *this_cta;
alignas(128) inline unsigned char shared[228 << 10];

inline void __syncwarp() { this_warp->all.arrive_and_wait(); }
inline bool __any_sync(uint32_t, bool vote)
{
    bool any = false;
    this_warp->votes[threadIdx.x & 31] = vote;
    __syncwarp();
    for (bool v : this_warp->votes)
        any |= v;
    __syncwarp();
    return any;
}
inline void __syncthreads() { this_cta->all.arrive_and_wait(); }
inline bool __syncthreads_or(bool vote)
{
    if (vote)
        this_cta->any = true;
    __syncthreads();
    return this_cta->any;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
inline uint32_t atomicAdd(uint32_t *p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }

struct float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits)
{
    return (uint32_t)(((uint64_t)high << 32 | low) >> (bits & 31));
}

enum { BETA_NOT_FINAL, BETA_ZERO, BETA_ONE };
inline uint32_t lane_id() { return threadIdx.x & 31; }
inline uint32_t shared_address(const void *p) { return (uint32_t)((const unsigned char *)p - shared); }

/* ---- barriers and bulk copies: addresses are offsets into `shared` ---- */

struct arrival {
    uint64_t from;
    uint32_t to, bytes, expected, phase;
};
inline std::mutex arrivals_lock;
inline arrival arrivals[sizeof shared / 8];

inline void barrier_init(uint32_t barrier) { arrivals[barrier / 8] = {}; }
inline void barriers_ready() {}
inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    std::lock_guard<std::mutex> hold(arrivals_lock);
    arrival *a = &arrivals[barrier / 8];
    REQUIRE(barrier % 8 == 0 && a->expected == 0, "a barrier that is still awaited expects more");
    a->expected = bytes;
    a->phase += bytes == 0;
}
inline void bulk_load(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier)
{
    std::lock_guard<std::mutex> hold(arrivals_lock);
    arrival *a = &arrivals[barrier / 8];
    REQUIRE(to % 16 == 0 && from % 16 == 0 && bytes % 16 == 0 && bytes == a->expected, "a bulk copy of %u bytes from %llx to %x",
            bytes, (unsigned long long)from, to);
    std::memset(shared + to, 0x5a, bytes);
    a->from = from;
    a->to = to;
    a->bytes = bytes;
}
inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
    std::lock_guard<std::mutex> hold(arrivals_lock);
    arrival *a = &arrivals[barrier / 8];
    if ((a->phase & 1) == parity) { /* the phase is not over: its copy arrives now */
        REQUIRE(a->bytes && a->bytes == a->expected, "a wait for a copy that nobody has issued");
        std::memcpy(shared + a->to, (const void *)a->from, a->bytes);
        a->bytes = a->expected = 0;
        a->phase++;
    }
}
struct departure {
    uint64_t to;
    uint32_t from, bytes;
    std::vector<unsigned char> read; /* empty: not yet */
};
inline thread_local std::deque<departure> departures;
inline void bulk_store(uint64_t to, uint32_t from, uint32_t bytes)
{
    REQUIRE(to % 16 == 0 && from % 16 == 0 && bytes % 16 == 0, "a bulk copy of %u bytes to %llx", bytes, (unsigned long long)to);
    departures.push_back({to, from, bytes, {}});
}
template <int N> inline void bulk_stores_read()
{
    for (size_t i = 0; i + N < departures.size(); i++)
        if (departures[i].read.empty())
            departures[i].read.assign(shared + departures[i].from, shared + departures[i].from + departures[i].bytes);
}
inline void bulk_stores_done()
{
    bulk_stores_read<0>();
    for (const departure &d : departures)
        std::memcpy((void *)d.to, d.read.data(), d.bytes);
    departures.clear();
}

/* ---- global memory ---- */

inline float global_load(uint64_t at) { return *(const float *)at; }
inline float4 global_load_four(uint64_t at)
{
    REQUIRE(at % 16 == 0, "a load of 16 bytes at %llx", (unsigned long long)at);
    return *(const float4 *)at;
}
inline void global_store(uint64_t at, float v) { *(float *)at = v; }
inline void global_store_four(uint64_t at, float4 v)
{
    REQUIRE(at % 16 == 0, "a store of 16 bytes at %llx", (unsigned long long)at);
    *(float4 *)at = v;
}

/* What is behind the multicast address `multicast`: copies of one memory that lie `apart` bytes from each other, added from
 * the second one on, as a switch may. */
inline uint64_t multicast, multicast_apart, multicast_bytes;
inline uint32_t multicast_members;
inline float4 multimem_load_add(uint64_t at)
{
    float4 sum = {0, 0, 0, 0};
    REQUIRE(at % 16 == 0 && at >= multicast && at + 16 <= multicast + multicast_bytes, "a sum of the switch at %llx",
            (unsigned long long)at);
    for (uint32_t i = 0; i < multicast_members; i++) {
        float4 v = *(const float4 *)(at + (i + 1) % multicast_members * multicast_apart);
        sum = i ? float4{sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w} : v;
    }
    return sum;
}
inline std::function<void()> at_post;
inline void post_word(uint64_t at, uint64_t value)
{
    at_post();
    *(uint64_t *)at = value;
}

/* ---- formats: fp16 is left to the GPU ---- */

inline float bits_float(uint32_t bits)
{
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
template <int DTYPE> struct format;
template <> struct format<TIDE_F32> {
    typedef float type;
    static constexpr int bytes = 4;
    static float widen(float v) { return v; }
    static float narrow(float v) { return v; }
};
template <> struct format<TIDE_BF16> {
    typedef uint16_t type;
    static constexpr int bytes = 2;
    static float widen(uint16_t v) { return bits_float((uint32_t)v << 16); }
};
template <int DTYPE> inline float widen_exact(typename format<DTYPE>::type v) { return format<DTYPE>::widen(v); }
template <int DTYPE> struct four;
template <> struct four<TIDE_F32> {
    typedef float4 type;
    static float4 widen(float4 v) { return v; }
};
template <> struct four<TIDE_BF16> {
    typedef uint2 type;
    static float4 widen(uint2 v)
    {
        return {bits_float(v.x << 16), bits_float(v.x & 0xffff0000u), bits_float(v.y << 16), bits_float(v.y & 0xffff0000u)};
    }
};

#endif
