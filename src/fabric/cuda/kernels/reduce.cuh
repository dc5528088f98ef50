/*
 * reduce.cuh - ordered sums in fp32.
 *
 * The ring kernels: each warp is a pipeline of its own. It owns a ring of slots in shared memory; a slot takes one tile
 * of one source, by one bulk copy that completes on the slot's barrier. The warp waits for the oldest slot, adds it to
 * its accumulators, and at once has the slot filled with what comes `slots` places later in its own order of tiles and
 * sources. No warp waits for another: the CTA meets only at its end.
 *
 * Tiles begin where dst is a multiple of 16, after up to 3 elements of a row. Sources need no alignment but their item's:
 * a bulk copy takes the 16-byte granules around its tile, and the elements are shifted into place on their way from
 * shared memory. The order of additions of an element is that of its sources everywhere.
 */
#ifndef TIDE_CUDA_REDUCE_CUH
#define TIDE_CUDA_REDUCE_CUH

#include "fabric/cuda/kernels/posts.cuh"
#include "fabric/cuda/kernels/tiles.cuh"

__device__ static inline float finish(const kernel_reduce &p, float old, float sum)
{
    return p.beta == BETA_NOT_FINAL ? sum : __fadd_rn(old, __fmul_rn(p.alpha, sum));
}

/* ---- element by element ---------------------------------------------------------------------- */

typedef struct place {
    uint32_t segment, row, elems;
    uint64_t column; /* first element */
} place;

/* A lane's elements: first, first + 32, ... of the place's. */
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
        w.segment = part_of(p.tiles, p.n_segments, w.segment, tile);
        const kernel_segment &s = p.segments[w.segment];
        uint32_t in_row = tile - p.tiles[w.segment];
        w.row = in_row / s.row_tiles;
        w.column = (uint64_t)(in_row - w.row * s.row_tiles) * p.tile_elems;
        w.elems = (uint32_t)min((uint64_t)p.tile_elems, s.elems - w.column);
        sum_elements<DTYPE>(p, w, threadIdx.x & 31);
    }
    post<false>(p.posts);
}

/* ---- the ring: what is loaded ---------------------------------------------------------------- */

/* Beside a slot: what the one who adds has to know. All but `shift` are of the tile, and there with its first source. */
struct alignas(16) slot_info {
    uint64_t dst;
    uint32_t elems, n_sources; /* of the tile */
    uint32_t segment, row;
    uint16_t head;    /* elements of the row before its first tile; 0 with the others */
    uint16_t shifted; /* some source's shift is not 0 */
    uint32_t shift;   /* bytes in the slot before the source's first element */
};

/* A slot, from its begin: the tile with the granule that it reaches into, what it is, its barrier. */
template <int SLOT> struct layout {
    static constexpr uint32_t info = SLOT + 16, barrier = info + sizeof(slot_info), bytes = SLOT + KERNEL_SLOT_EXTRA;
    static_assert(barrier + 8 <= bytes && bytes % 16 == 0, "as launch.c counts");
};

/* The warp's order of loads: source by source of tile by tile. Rows are looked up once, what follows in a row is a step
 * away. Lane i holds the address of source i. */
template <int DTYPE, int SLOT> struct loads {
    static constexpr uint32_t TILE = SLOT / format<DTYPE>::bytes;
    uint32_t tile, end;               /* end: of the row's tiles */
    uint32_t segment, row, n_sources, source, head, shifted, elems;
    uint32_t bytes;                   /* of the lane's copy; 0: there is none */
    uint64_t dst, address;            /* of the tile */
    int64_t left;                     /* elements of the row from the tile on; not more than 0 where the head was all */

    __device__ void enter_row(const kernel_reduce &p, uint32_t lane)
    {
        segment = part_of(p.tiles, p.n_segments, segment, tile);
        const kernel_segment &s = p.segments[segment];
        uint32_t first = p.tiles[segment];
        row = s.rows > 1 ? (tile - first) / s.row_tiles : 0;
        first += row * s.row_tiles;
        uint64_t before = (uint64_t)(tile - first) * TILE;
        end = first + s.row_tiles;
        n_sources = s.n_sources;
        dst = s.dst + row * s.dst_pitch;
        head = (uint32_t)((0 - dst) % 16 / sizeof(float));
        before += head;
        left = (int64_t)(s.elems - before);
        dst += before * sizeof(float);
        address = 0;
        if (lane < n_sources) {
            const kernel_source &from = p.sources[s.first_source + lane];
            address = from.at + row * from.row_pitch + before * format<DTYPE>::bytes;
        }
        head = tile == first ? (uint32_t)min((uint64_t)head, s.elems) : 0;
        shifted = __any_sync(~0u, address % 16 != 0);
    }

    __device__ void settle(const kernel_reduce &p, uint32_t lane)
    {
        source = 0;
        if (tile >= p.n_tiles) { /* no lane's turn any more, and no end of it */
            source = 32;
            n_sources = UINT32_MAX;
            return;
        }
        if (tile >= end)
            enter_row(p, lane);
        elems = (uint32_t)max(min(left, (int64_t)TILE), (int64_t)0);
        bytes = n_sources && elems ? (((uint32_t)address & 15) + elems * format<DTYPE>::bytes + 15) & ~15u : 0;
    }

    __device__ void start(const kernel_reduce &p, uint32_t at, uint32_t lane)
    {
        segment = 0;
        end = 0;
        tile = at;
        settle(p, lane);
    }

    __device__ void next(const kernel_reduce &p, unsigned char *slot, uint32_t slot_at, uint32_t step, uint32_t lane)
    {
        if (lane == source) {
            slot_info *info = (slot_info *)(slot + layout<SLOT>::info);
            if (source == 0) {
                info->dst = dst;
                info->elems = elems;
                info->n_sources = n_sources;
                info->segment = segment;
                info->row = row;
                info->head = head;
                info->shifted = shifted;
            }
            if (shifted)
                info->shift = (uint32_t)address & 15;
            barrier_expect(slot_at + layout<SLOT>::barrier, bytes);
            if (bytes)
                bulk_load(slot_at, address & ~UINT64_C(15), bytes, slot_at + layout<SLOT>::barrier);
        }
        if (++source >= n_sources) {
            uint64_t on = (uint64_t)step * TILE;
            tile += step;
            dst += on * sizeof(float);
            address += on * format<DTYPE>::bytes;
            left -= on;
            head = 0;
            settle(p, lane);
        }
    }
};

/* ---- the ring: what is added ----------------------------------------------------------------- */

/* Four neighbours that begin `shift` bytes off a multiple of 16 (bf16 and fp16: of 8). */
template <int DTYPE> __device__ static inline typename four<DTYPE>::type load_shifted(const unsigned char *at, uint32_t shift)
{
    if constexpr (DTYPE == TIDE_F32) {
        const float *w = (const float *)(at + shift);
        return make_float4(w[0], w[1], w[2], w[3]);
    } else {
        const uint32_t *w = (const uint32_t *)(at + (shift & ~3u));
        uint32_t bits = (shift & 2) * 8, a = w[0], b = w[1], c = w[2];
        return make_uint2(__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits));
    }
}

/* Four neighbours of dst, of which the tile has n (4 and more: all). */
__device__ static inline float4 load_results(uint64_t dst, int n)
{
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (n >= 4)
        return global_load_four(dst);
    if (n > 0)
        v.x = global_load(dst);
    if (n > 1)
        v.y = global_load(dst + 4);
    if (n > 2)
        v.z = global_load(dst + 8);
    return v;
}

__device__ static inline void store_results(uint64_t dst, float4 v, int n)
{
    if (n >= 4) {
        global_store_four(dst, v);
        return;
    }
    if (n > 0)
        global_store(dst, v.x);
    if (n > 1)
        global_store(dst + 4, v.y);
    if (n > 2)
        global_store(dst + 8, v.z);
}

/* ADD: beta is one, results so far are fetched while the sources arrive. */
template <int DTYPE, int SLOT, bool ADD> __device__ static void reduce_ring(const kernel_reduce &p)
{
    typedef layout<SLOT> in;
    typedef typename four<DTYPE>::type packed;
    constexpr int FOURS = SLOT / format<DTYPE>::bytes / 128; /* of a lane: elements 128 i + 4 lane .. + 3 */
    extern __shared__ __align__(128) unsigned char shared[];

    uint32_t lane = lane_id(), warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    uint32_t first = blockIdx.x * warps + warp, step = gridDim.x * warps;
    uint32_t base = shared_address(shared), begin = warp * p.slots * in::bytes, end = begin + p.slots * in::bytes;
    uint32_t at = begin, parity = 0; /* the oldest slot */
    loads<DTYPE, SLOT> to_load = {};

    for (uint32_t i = begin + lane * in::bytes; i < end; i += 32 * in::bytes)
        barrier_init(base + i + in::barrier);
    barriers_ready();
    __syncwarp();
    to_load.start(p, first, lane);
    for (uint32_t i = begin; i < end; i += in::bytes)
        to_load.next(p, shared + i, base + i, step, lane);
    __syncwarp();

    for (uint32_t tile = first; tile < p.n_tiles; tile += step) {
        const slot_info info = *(const slot_info *)(shared + at + in::info);
        uint64_t dst = info.dst + lane * sizeof(float4);
        float4 acc[FOURS], old[FOURS];
        int mine = (int)info.elems - 4 * (int)lane; /* elements from this lane's first on */
        float start = info.n_sources ? -0.0f : 0.0f;

        if (info.head) {
            place w = {info.segment, info.row, info.head, 0};
            sum_elements<DTYPE>(p, w, lane);
        }
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            acc[i] = make_float4(start, start, start, start);
            old[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (ADD)
                old[i] = load_results(dst + i * 512, mine - i * 128);
        }
        uint32_t k = 0;
        do {
            const unsigned char *from = shared + at + lane * sizeof(packed);
            packed v[FOURS];
            barrier_wait(base + at + in::barrier, parity);
            if (info.shifted) {
                uint32_t shift = ((const slot_info *)(shared + at + in::info))->shift;
#pragma unroll
                for (int i = 0; i < FOURS; i++)
                    v[i] = load_shifted<DTYPE>(from + i * 32 * sizeof(packed), shift);
            } else {
#pragma unroll
                for (int i = 0; i < FOURS; i++)
                    v[i] = *(const packed *)(from + i * 32 * sizeof(packed));
            }
            __syncwarp();
            /* The slot is loaded again before its values are added: what they wait for is hidden behind that. */
            to_load.next(p, shared + at, base + at, step, lane);
            at += in::bytes;
            if (at == end) {
                at = begin;
                parity ^= 1;
            }
            if (info.n_sources == 0)
                break;
#pragma unroll
            for (int i = 0; i < FOURS; i++) { /* beyond the tile's elements these are left-overs, not stored */
                float4 x = four<DTYPE>::widen(v[i]);
                acc[i].x = __fadd_rn(acc[i].x, x.x);
                acc[i].y = __fadd_rn(acc[i].y, x.y);
                acc[i].z = __fadd_rn(acc[i].z, x.z);
                acc[i].w = __fadd_rn(acc[i].w, x.w);
            }
        } while (++k < info.n_sources);
        if (p.beta != BETA_NOT_FINAL) {
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                acc[i] = make_float4(finish(p, old[i].x, acc[i].x), finish(p, old[i].y, acc[i].y),
                                     finish(p, old[i].z, acc[i].z), finish(p, old[i].w, acc[i].w));
        }
        if (info.elems == SLOT / format<DTYPE>::bytes) {
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                global_store_four(dst + i * 512, acc[i]);
        } else {
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                store_results(dst + i * 512, acc[i], mine - i * 128);
        }
    }
    post<false>(p.posts);
}

#endif
