/*
 * copy.cuh - strided rows: bytes, casts, fills; within the GPU or to a peer, whose memory takes plain and bulk stores alike.
 */
#ifndef TIDE_CUDA_COPY_CUH
#define TIDE_CUDA_COPY_CUH

#include "fabric/cuda/kernels/posts.cuh"
#include "fabric/cuda/kernels/tiles.cuh"

typedef struct row_piece {
    uint32_t run, items;
    uint64_t src, dst;
} row_piece;

__device__ static inline void find_piece(const kernel_copy &p, uint32_t tile, row_piece *w)
{
    w->run = part_of(p.tiles, p.n_runs, w->run, tile);
    const kernel_run &r = p.runs[w->run];
    uint32_t in_row = tile - p.tiles[w->run], row = 0;
    if (r.rows > 1) {
        row = in_row / r.row_tiles;
        in_row -= row * r.row_tiles;
    }
    uint64_t column = (uint64_t)in_row * p.tile_items;
    w->items = (uint32_t)min(p.tile_items, r.width - column);
    w->src = r.src + row * r.src_pitch + column * p.src_item;
    w->dst = r.dst + row * r.dst_pitch + column * p.dst_item;
}

/* ---- bytes and fills ------------------------------------------------------------------------- */

template <typename UNIT> __device__ static void move_units(const kernel_copy &p, const row_piece &w)
{
    constexpr int AT_ONCE = 4;
    const UNIT *src = (const UNIT *)w.src;
    UNIT *dst = (UNIT *)w.dst;
    uint32_t n = w.items / sizeof(UNIT);
    bool fill = p.runs[w.run].src == 0;
    for (uint32_t i = threadIdx.x & 31; i < n; i += AT_ONCE * 32) {
        UNIT v[AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (!fill && i + k * 32 < n)
                v[k] = src[i + k * 32];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (i + k * 32 < n)
                dst[i + k * 32] = v[k];
    }
}

__device__ static void copy_plain(const kernel_copy &p)
{
    row_piece w = {0, 0, 0, 0};
    uint32_t warps = blockDim.x >> 5;
    for (uint32_t tile = blockIdx.x * warps + (threadIdx.x >> 5); tile < p.n_tiles; tile += gridDim.x * warps) {
        find_piece(p, tile, &w);
        switch (p.runs[w.run].unit) {
        case 16:
            move_units<uint4>(p, w);
            break;
        case 8:
            move_units<uint2>(p, w);
            break;
        case 4:
            move_units<uint32_t>(p, w);
            break;
        case 2:
            move_units<uint16_t>(p, w);
            break;
        default:
            move_units<uint8_t>(p, w);
            break;
        }
    }
    post<true>(p.posts);
}

/* One thread a warp: loads run AHEAD tiles before the stores; a slot is loaded again when the store that reads it is not
 * among the latest one. */
__device__ static void copy_tiles(const kernel_copy &p)
{
    constexpr uint32_t SLOTS = KERNEL_COPY_SLOTS, AHEAD = SLOTS - 1;
    extern __shared__ __align__(128) unsigned char shared[];
    uint32_t warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    uint32_t step = gridDim.x * warps, tile = blockIdx.x * warps + warp, load = tile;
    uint32_t ring = shared_address(shared) + warp * SLOTS * KERNEL_COPY_SLOT;
    uint32_t barriers = shared_address(shared) + warps * SLOTS * KERNEL_COPY_SLOT + warp * SLOTS * KERNEL_BARRIER_BYTES;
    uint32_t from = 0, to = 0, parity = 0;
    row_piece w = {0, 0, 0, 0}, ahead = w;

    for (uint32_t i = 0; i < SLOTS; i++)
        barrier_init(barriers + i * KERNEL_BARRIER_BYTES);
    barriers_ready();
    for (; tile < p.n_tiles; tile += step) {
        /* Before the i-th store the last load is the (i + AHEAD - 1)-th, into the slot of store i - 2. */
        for (; load < p.n_tiles && load < tile + AHEAD * step; load += step) {
            bulk_stores_read<1>();
            find_piece(p, load, &ahead);
            barrier_expect(barriers + to * KERNEL_BARRIER_BYTES, ahead.items);
            bulk_load(ring + to * KERNEL_COPY_SLOT, ahead.src, ahead.items, barriers + to * KERNEL_BARRIER_BYTES);
            to = to + 1 == SLOTS ? 0 : to + 1;
        }
        find_piece(p, tile, &w);
        barrier_wait(barriers + from * KERNEL_BARRIER_BYTES, parity);
        bulk_store(w.dst, ring + from * KERNEL_COPY_SLOT, w.items);
        if (++from == SLOTS) {
            from = 0;
            parity ^= 1;
        }
    }
    bulk_stores_done();
}

/* Every run is made of 16-byte units, none is a fill. */
__device__ static void copy_bulk(const kernel_copy &p)
{
    if ((threadIdx.x & 31) == 0)
        copy_tiles(p);
    post<true>(p.posts);
}

/* ---- casts ----------------------------------------------------------------------------------- */

template <int FROM, int TO> __device__ static inline typename format<TO>::type cast(typename format<FROM>::type v)
{
    return format<TO>::narrow(widen_exact<FROM>(v));
}

template <typename T> struct alignas(4 * sizeof(T)) four_of { T at[4]; };

template <int FROM, int TO> __device__ static void copy_cast(const kernel_copy &p)
{
    typedef typename format<FROM>::type from;
    typedef typename format<TO>::type to;
    constexpr int AT_ONCE = 4;
    row_piece w = {0, 0, 0, 0};
    uint32_t warps = blockDim.x >> 5;
    for (uint32_t tile = blockIdx.x * warps + (threadIdx.x >> 5); tile < p.n_tiles; tile += gridDim.x * warps) {
        find_piece(p, tile, &w);
        const from *src = (const from *)w.src;
        to *dst = (to *)w.dst;
        bool fill = p.runs[w.run].src == 0;
        uint32_t lane = threadIdx.x & 31;
        uint32_t fours = w.src % (4 * sizeof(from)) == 0 && w.dst % (4 * sizeof(to)) == 0 ? w.items / 4 : 0;
        for (uint32_t i = lane; i < fours; i += AT_ONCE * 32) {
            four_of<from> v[AT_ONCE] = {};
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (!fill && i + k * 32 < fours)
                    v[k] = ((const four_of<from> *)src)[i + k * 32];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (i + k * 32 < fours) {
                    four_of<to> out;
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        out.at[e] = cast<FROM, TO>(v[k].at[e]);
                    ((four_of<to> *)dst)[i + k * 32] = out;
                }
        }
        for (uint32_t i = 4 * fours + lane; i < w.items; i += 32)
            dst[i] = fill ? to{} : cast<FROM, TO>(src[i]);
    }
    post<true>(p.posts);
}

#endif
