/*
 * reduce.cuh - ordered sums in fp32.
 *
 * The ring kernels: each warp is a pipeline of its own. It owns a ring of slots in shared memory; a slot takes one tile
 * of one source, by one bulk copy that completes on the slot's barrier. The warp waits for the oldest slot, adds it to
 * its accumulators, and at once has the slot filled with what comes `slots` places later in its own order of tiles and
 * sources. No warp waits for another: the CTA meets only at its end.
 *
 * What cannot go through the ring (addresses off 16 bytes, the last elements of a row) is loaded from global memory, by
 * the code that is the whole of the plain kernel. The order of additions of an element is that of its sources everywhere.
 */
#ifndef TIDE_CUDA_REDUCE_CUH
#define TIDE_CUDA_REDUCE_CUH

#include "fabric/cuda/kernels/device.cuh"

/* ---- the end: posts -------------------------------------------------------------------------- */

/* Every CTA of the launch ends with this. Results of all CTAs become visible before the posts do: each CTA's first
 * thread, after the barrier, orders what its CTA wrote before its count; the last CTA's posts are ordered after all counts.
 */
__device__ static void post(const kernel_reduce &p)
{
    __shared__ uint32_t last;
    if (p.n_posts == 0)
        return;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *done = (uint32_t *)p.done;
        __threadfence();
        last = atomicAdd(done, 1) == gridDim.x - 1;
        if (last)
            *done = 0;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence_system();
    for (uint32_t i = threadIdx.x; i < p.n_posts; i += blockDim.x)
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p.posts[i]), "l"(p.post_value) : "memory");
}

__device__ static inline float finish(const kernel_reduce &p, float old, float sum)
{
    return p.beta == BETA_NOT_FINAL ? sum : __fadd_rn(old, __fmul_rn(p.alpha, sum));
}

/* ---- where a tile is ------------------------------------------------------------------------- */

typedef struct place {
    uint32_t segment, row, elems; /* elems: of this tile */
    uint64_t column;
} place;

/* Tiles are asked for in ascending order: the search goes on from w->segment. */
__device__ static inline void find(const kernel_reduce &p, uint32_t tile, uint32_t tile_elems, place *w)
{
    while (w->segment + 1 < p.n_segments && tile >= p.segments[w->segment + 1].tile)
        w->segment++;
    const kernel_segment &s = p.segments[w->segment];
    uint32_t in_row = tile - s.tile;
    w->row = 0;
    if (s.rows > 1) {
        w->row = in_row / s.row_tiles;
        in_row -= w->row * s.row_tiles;
    }
    w->column = (uint64_t)in_row * tile_elems;
    w->elems = (uint32_t)min((uint64_t)tile_elems, s.elems - w->column);
}

/* ---- element by element ---------------------------------------------------------------------- */

/* A lane's elements: first, first + 32, ... of the tile. */
template <int DTYPE>
__device__ static void sum_elements(const kernel_reduce &p, const place &w, uint32_t first)
{
    typedef format<DTYPE> f;
    constexpr int AT_ONCE = 4;
    const kernel_segment &s = p.segments[w.segment];
    float *dst = (float *)(s.dst + w.row * s.dst_pitch) + w.column;
    for (uint32_t e = first; e < w.elems; e += AT_ONCE * 32) {
        float acc[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            acc[i] = s.n_sources ? -0.0f : 0.0f; /* -0 + x is x */
#pragma unroll 4
        for (uint32_t k = 0; k < s.n_sources; k++) {
            const kernel_source &from = p.sources[s.first_source + k];
            const typename f::type *src = (const typename f::type *)(from.at + w.row * from.row_pitch) + w.column;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (e + i * 32 < w.elems)
                    acc[i] = __fadd_rn(acc[i], f::widen(src[e + i * 32]));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (e + i * 32 < w.elems)
                dst[e + i * 32] = finish(p, p.beta == BETA_ONE ? dst[e + i * 32] : 0.0f, acc[i]);
    }
}

template <int DTYPE> __device__ static void reduce_plain(const kernel_reduce &p)
{
    place w = {0, 0, 0, 0};
    uint32_t warps = blockDim.x >> 5;
    for (uint32_t tile = blockIdx.x * warps + (threadIdx.x >> 5); tile < p.n_tiles; tile += gridDim.x * warps) {
        find(p, tile, p.tile_elems, &w);
        sum_elements<DTYPE>(p, w, threadIdx.x & 31);
    }
    post(p);
}

/* ---- the ring -------------------------------------------------------------------------------- */

/* What of a tile goes through the ring. */
template <int DTYPE> __device__ static inline uint32_t bulk_elems(const kernel_reduce &p, const place &w)
{
    return p.segments[w.segment].bulk ? w.elems & ~(16u / format<DTYPE>::bytes - 1) : 0;
}

/* The warp's order of loads: source by source of tile by tile. Lane i holds the address of source i of the tile (of its
 * i-th among 32, where there are more), so that a load costs its lane two instructions. */
template <int DTYPE, int SLOT> struct loads {
    static constexpr uint32_t TILE = SLOT / format<DTYPE>::bytes;
    place w;
    uint32_t tile, source, n_sources, bytes;
    uint64_t address;

    __device__ void look_up(const kernel_reduce &p, uint32_t lane)
    {
        if (source + lane < n_sources) {
            const kernel_source &from = p.sources[p.segments[w.segment].first_source + source + lane];
            address = from.at + w.row * from.row_pitch + w.column * format<DTYPE>::bytes;
        }
    }

    /* The tile that comes `ahead` later, where it lies in the same row: into the L2 cache, so that its loads answer
     * sooner and the ring, which bounds what is in flight, turns faster. */
    __device__ void prefetch(const kernel_reduce &p, uint32_t step, uint32_t lane)
    {
        uint64_t distance = (uint64_t)p.ahead * step * TILE;
        if (p.ahead && lane < n_sources && w.column + distance + TILE <= p.segments[w.segment].elems)
            bulk_prefetch(address + distance * format<DTYPE>::bytes, SLOT);
    }

    /* On to the next tile that loads anything, from `tile` on. */
    __device__ void settle(const kernel_reduce &p, uint32_t step, uint32_t lane)
    {
        for (; tile < p.n_tiles; tile += step) {
            find(p, tile, TILE, &w);
            bytes = bulk_elems<DTYPE>(p, w) * format<DTYPE>::bytes;
            n_sources = p.segments[w.segment].n_sources;
            source = 0;
            if (bytes && n_sources) {
                look_up(p, lane);
                prefetch(p, step, lane);
                return;
            }
        }
    }

    __device__ void next(const kernel_reduce &p, uint32_t slot, uint32_t barrier, uint32_t step, uint32_t lane)
    {
        if (tile >= p.n_tiles)
            return;
        if (lane == (source & 31)) {
            barrier_expect(barrier, bytes);
            bulk_load(slot, address, bytes, barrier);
        }
        if (++source == n_sources) {
            tile += step;
            settle(p, step, lane);
        } else if ((source & 31) == 0) {
            look_up(p, lane);
        }
    }
};

/* ADD: beta is one, results so far are fetched while the sources arrive. */
template <int DTYPE, int SLOT, bool ADD> __device__ static void reduce_ring(const kernel_reduce &p)
{
    constexpr uint32_t TILE = SLOT / format<DTYPE>::bytes;
    constexpr int FOURS = TILE / 128; /* of a lane: elements 128 i + 4 lane .. + 3 */
    typedef typename four<DTYPE>::type packed;
    extern __shared__ __align__(128) unsigned char shared[];

    uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    uint32_t first = blockIdx.x * warps + warp, step = gridDim.x * warps;
    const unsigned char *ring = shared + warp * p.slots * SLOT;
    uint32_t ring_at = shared_address(ring);
    uint32_t barriers = shared_address(shared) + warps * p.slots * SLOT + warp * p.slots * KERNEL_BARRIER_BYTES;
    uint32_t slot = 0, parity = 0;
    loads<DTYPE, SLOT> to_load;
    place w = {0, 0, 0, 0};

    for (uint32_t i = lane; i < p.slots; i += 32)
        barrier_init(barriers + i * KERNEL_BARRIER_BYTES);
    barriers_ready();
    __syncwarp();
    to_load.w = w;
    to_load.tile = first;
    to_load.settle(p, step, lane);
    for (uint32_t i = 0; i < p.slots; i++)
        to_load.next(p, ring_at + i * SLOT, barriers + i * KERNEL_BARRIER_BYTES, step, lane);

    for (uint32_t tile = first; tile < p.n_tiles; tile += step) {
        find(p, tile, TILE, &w);
        const kernel_segment &s = p.segments[w.segment];
        uint32_t n_sources = s.n_sources, fast = bulk_elems<DTYPE>(p, w);
        float4 *dst = (float4 *)((float *)(s.dst + w.row * s.dst_pitch) + w.column) + lane;
        float4 acc[FOURS], old[FOURS];

        if (fast) {
            float start = n_sources ? -0.0f : 0.0f;
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                acc[i] = make_float4(start, start, start, start);
                old[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (ADD && i * 128 + lane * 4 < fast)
                    old[i] = dst[i * 32];
            }
            for (uint32_t k = 0; k < n_sources; k++) {
                const packed *from = (const packed *)(ring + slot * SLOT) + lane;
                packed v[FOURS];
                barrier_wait(barriers + slot * KERNEL_BARRIER_BYTES, parity);
#pragma unroll
                for (int i = 0; i < FOURS; i++)
                    v[i] = from[i * 32];
#pragma unroll
                for (int i = 0; i < FOURS; i++) { /* past `fast` these are left-overs, not stored */
                    float4 x = four<DTYPE>::widen(v[i]);
                    acc[i].x = __fadd_rn(acc[i].x, x.x);
                    acc[i].y = __fadd_rn(acc[i].y, x.y);
                    acc[i].z = __fadd_rn(acc[i].z, x.z);
                    acc[i].w = __fadd_rn(acc[i].w, x.w);
                }
                __syncwarp();
                to_load.next(p, ring_at + slot * SLOT, barriers + slot * KERNEL_BARRIER_BYTES, step, lane);
                if (++slot == p.slots) {
                    slot = 0;
                    parity ^= 1;
                }
            }
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                if (i * 128 + lane * 4 < fast)
                    dst[i * 32] = make_float4(finish(p, old[i].x, acc[i].x), finish(p, old[i].y, acc[i].y),
                                              finish(p, old[i].z, acc[i].z), finish(p, old[i].w, acc[i].w));
        }
        if (fast < w.elems)
            sum_elements<DTYPE>(p, w, fast + lane);
    }
    post(p);
}

#endif
