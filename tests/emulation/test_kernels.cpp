/*
 * test_kernels.cpp - the source of sums and copies, as nvcc compiles it, run on a CPU (device.cuh beside this says how) and
 * compared with a loop, bit for bit, on random batches of any alignment. usage: test_kernels [ROUNDS [SEED]]
 */
#include <vector>

#include "fabric/cuda/kernels/copy.cuh"
#include "fabric/cuda/kernels/multimem.cuh"
#include "fabric/cuda/kernels/reduce.cuh"

static uint64_t state = 88172645463325252u;
static uint32_t draw(uint32_t bound)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 20) % bound;
}

template <typename KERNEL> static void launch(KERNEL kernel, uint32_t ctas, uint32_t warps)
{
    for (uint32_t cta = 0; cta < ctas; cta++) {
        std::vector<std::thread> threads;
        std::vector<warp_meeting> meetings(warps);
        cta_meeting meeting(32 * warps);
        for (uint32_t i = 0; i < 32 * warps; i++)
            threads.emplace_back([&, i] {
                threadIdx = {i};
                blockIdx = {cta};
                blockDim = {32 * warps};
                gridDim = {ctas};
                this_warp = &meetings[i / 32];
                this_cta = &meeting;
                kernel();
                REQUIRE(departures.empty(), "a thread ends before its bulk stores");
            });
        for (std::thread &t : threads)
            t.join();
    }
}

template <int DTYPE, int SLOT> static void ring(const kernel_reduce &p)
{
    p.beta == BETA_ONE ? reduce_ring<DTYPE, SLOT, true>(p) : reduce_ring<DTYPE, SLOT, false>(p);
}

static float element(uint64_t at, int dtype)
{
    float f;
    uint16_t h;
    if (dtype == TIDE_BF16) {
        std::memcpy(&h, (const void *)at, sizeof h);
        return bits_float((uint32_t)h << 16);
    }
    std::memcpy(&f, (const void *)at, sizeof f);
    return f;
}

/* What the batch makes of `results`, which stand for what is at p's dst. */
static void expect(const kernel_reduce &p, int dtype, uint64_t dst, std::vector<float> &results)
{
    for (uint32_t i = 0; i < p.n_segments; i++) {
        const kernel_segment &s = p.segments[i];
        for (uint32_t row = 0; row < s.rows; row++) {
            for (uint64_t e = 0; e < s.elems; e++) {
                float &out = results[(s.dst - dst + row * s.dst_pitch) / 4 + e], sum = 0.0f;
                for (uint32_t k = 0; k < s.n_sources; k++) {
                    const kernel_source &from = p.sources[s.first_source + k];
                    float v = element(from.at + row * from.row_pitch + e * (dtype == TIDE_F32 ? 4 : 2), dtype);
                    sum = k ? sum + v : v;
                }
                if (p.beta != BETA_NOT_FINAL) {
                    float scaled = p.alpha * sum;
                    sum = (p.beta == BETA_ONE ? out : 0.0f) + scaled;
                }
                out = sum;
            }
        }
    }
}

/* Sums by the switch: its own order, to the bit; within SPEC's tolerance of the ranks' order. Nothing beside dst is touched. */
static void sums_by_switch(uint32_t rounds)
{
    enum { ROOM = 4096, MOST = 8 };
    float *memory = (float *)std::aligned_alloc(256, MOST * ROOM * sizeof(float));
    std::vector<float> dst(ROOM + 8), before;

    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t members = 2 + draw(MOST - 1), shift = draw(5), ctas = 1 + draw(3);
        kernel_multimem p = {};
        p.elems = draw(8) ? 1 + draw(ROOM - 4) : draw(5);
        p.src = (uint64_t)memory + 16 * draw((uint32_t)((ROOM - 4 - p.elems) / 4 + 1));
        p.dst = (uint64_t)(dst.data() + shift);
        p.beta = (int32_t)draw(3);
        p.alpha = 0.7f;
        multicast = (uint64_t)memory;
        multicast_bytes = multicast_apart = ROOM * sizeof(float);
        multicast_members = members;
        for (uint32_t i = 0; i < MOST * ROOM; i++)
            memory[i] = (float)((int)draw(2000) - 1000) / 700;
        for (float &f : dst)
            f = (float)draw(1000) / 333;
        before = dst;
        launch([&] { multimem_reduce(p); }, ctas, 1);
        for (uint32_t i = 0; i < dst.size(); i++) {
            uint32_t e = i - shift;
            float sum = 0, ordered = 0;
            if (i < shift || e >= p.elems) {
                REQUIRE(dst[i] == before[i], "switch, round %u: float %u is no result and was written", round, i);
                continue;
            }
            for (uint32_t m = 0; m < members; m++) {
                const float *values = (const float *)p.src + e;
                sum = m ? sum + values[(m + 1) % members * ROOM] : values[(m + 1) % members * ROOM];
                ordered = m ? ordered + values[m * ROOM] : values[m * ROOM];
            }
            if (p.beta != BETA_NOT_FINAL) {
                float old = p.beta == BETA_ONE ? before[i] : 0, scaled = p.alpha * sum, in_order = p.alpha * ordered;
                sum = old + scaled;
                ordered = old + in_order;
            }
            REQUIRE(std::memcmp(&dst[i], &sum, 4) == 0, "switch, round %u: result %u is %g, expected %g", round, e, (double)dst[i],
                    (double)sum);
            REQUIRE(std::abs(dst[i] - ordered) <= 1e-5f * max(1.0f, std::abs(ordered)), "switch, round %u: result %u is %g, in order %g",
                    round, e, (double)dst[i], (double)ordered);
        }
    }
    std::free(memory);
}

/* Bytes by both kernels, fills, and casts of bf16 to fp32. Nothing beside dst is touched, and nothing is missing at a post. */
static void copies(uint32_t rounds)
{
    enum { BYTES = 1 << 18, WORDS = 3 };
    unsigned char *src = (unsigned char *)std::aligned_alloc(256, BYTES), *dst = (unsigned char *)std::aligned_alloc(256, BYTES);
    std::vector<unsigned char> expected(BYTES);
    static kernel_copy p;
    uint32_t done = 0;
    uint64_t words[WORDS];

    for (uint32_t round = 0; round < rounds; round++) {
        bool cast = draw(4) == 0, bulk = !cast && draw(2);
        uint32_t warps = 1 + draw(bulk ? (uint32_t)KERNEL_COPY_WARPS : 3), ctas = 1 + draw(3);
        uint64_t used = 64, align = bulk ? 16 : cast ? 4 : 1;

        for (uint32_t i = 0; i < BYTES; i++) {
            src[i] = (unsigned char)draw(256);
            expected[i] = dst[i] = (unsigned char)draw(256);
        }
        std::memset(&p, 0, sizeof p);
        p.src_item = cast ? 2 : 1;
        p.dst_item = cast ? 4 : 1;
        p.tile_items = bulk ? (uint64_t)KERNEL_COPY_SLOT : cast ? 256 : 512;
        for (uint32_t n = 1 + draw(4); p.n_runs < n; p.n_runs++) {
            kernel_run &r = p.runs[p.n_runs];
            uint64_t all;
            r.rows = 1 + draw(3);
            r.width = align * (1 + draw((uint32_t)(20000 / r.rows / align)));
            r.width /= cast ? 4 : 1;
            r.src_pitch = r.width * p.src_item + align * draw(5);
            r.dst_pitch = r.width * p.dst_item + align * draw(5);
            r.dst = (uint64_t)dst + (used + align * draw(5) + align - 1) / align * align;
            used = r.dst - (uint64_t)dst + r.dst_pitch * r.rows + 16;
            r.src = bulk || draw(6) ? (uint64_t)src + draw((uint32_t)(BYTES - r.src_pitch * r.rows)) / align * align : 0;
            all = r.src | r.dst | r.width | r.src_pitch | r.dst_pitch;
            for (r.unit = 16; all % r.unit;)
                r.unit /= 2;
            p.tiles[p.n_runs] = p.n_tiles;
            r.row_tiles = (uint32_t)((r.width + p.tile_items - 1) / p.tile_items);
            p.n_tiles += r.row_tiles * r.rows;
            for (uint32_t row = 0; row < r.rows; row++)
                for (uint64_t i = 0; i < r.width * p.dst_item; i++) {
                    uint64_t from = r.src + row * r.src_pitch;
                    expected[r.dst - (uint64_t)dst + row * r.dst_pitch + i] =
                        !r.src ? 0 : !cast ? *(unsigned char *)(from + i) : i % 4 < 2 ? 0 : *(unsigned char *)(from + i / 4 * 2 + i % 2);
                }
        }
        REQUIRE(used <= BYTES, "the batch has no room");
        std::memset(words, 0, sizeof words);
        p.posts.done = (uint64_t)&done;
        p.posts.value = 9;
        p.posts.n = draw(WORDS + 1);
        for (uint32_t i = 0; i < p.posts.n; i++)
            p.posts.words[i] = (uint64_t)&words[i];
        at_post = [&] { REQUIRE(std::memcmp(dst, expected.data(), BYTES) == 0, "copies, round %u: a post before its bytes", round); };
        launch([&] { cast ? copy_cast<TIDE_BF16, TIDE_F32>(p) : bulk ? copy_bulk(p) : copy_plain(p); }, ctas, warps);
        for (uint32_t i = 0; i < BYTES; i++)
            REQUIRE(dst[i] == expected[i], "copies, round %u: byte %u is %02x, expected %02x", round, i, dst[i], expected[i]);
        for (uint32_t i = 0; i < WORDS; i++)
            REQUIRE(words[i] == (i < p.posts.n ? 9 : 0) && done == 0, "copies, round %u: word %u is %llu, the counter %u", round, i,
                    (unsigned long long)words[i], done);
    }
    std::free(dst);
    std::free(src);
}

int main(int argc, char **argv)
{
    enum { BYTES = 1 << 18, WORDS = 3 };
    unsigned char *src = (unsigned char *)std::aligned_alloc(256, BYTES), *dst = (unsigned char *)std::aligned_alloc(256, BYTES);
    std::vector<float> results(BYTES / 4);
    static kernel_reduce p;
    uint32_t rounds = argc > 1 ? (uint32_t)std::atoi(argv[1]) : 60, done = 0;
    uint64_t words[WORDS];

    state += argc > 2 ? (uint64_t)std::atoi(argv[2]) * 977 : 0;
    for (uint32_t round = 0; round < rounds; round++) {
        int dtype = draw(2) ? TIDE_BF16 : TIDE_F32, item = dtype == TIDE_F32 ? 4 : 2;
        uint32_t slot = draw(2) ? (uint32_t)KERNEL_FAT_SLOT : (uint32_t)KERNEL_THIN_SLOT, warps = 1 + draw(2), ctas = 1 + draw(3), sources = 0;
        uint64_t used = 64;
        bool plain = draw(6) == 0;

        for (uint32_t i = 0; i < BYTES / 4; i++) { /* small numbers: sums that round, and no NaN */
            uint32_t bits;
            float f = (float)((int)draw(2000) - 1000) / 7, old = (float)draw(1000) / 3;
            std::memcpy(&bits, &f, sizeof bits);
            bits = dtype == TIDE_F32 ? bits : (bits & 0xffff0000u) | (bits >> 16 ^ draw(64));
            std::memcpy(src + 4 * i, &bits, sizeof bits);
            std::memcpy(dst + 4 * i, &old, sizeof old);
            results[i] = old;
        }
        std::memset(&p, 0, sizeof p);
        p.posts.done = (uint64_t)&done;
        p.posts.value = 7;
        p.posts.n = draw(WORDS + 1);
        p.beta = (int32_t)draw(3);
        p.alpha = 0.7f;
        p.tile_elems = plain ? (uint32_t)KERNEL_PLAIN_TILE : slot / (uint32_t)item;
        p.slots = 2 + draw(5);
        for (uint32_t n = 1 + draw(4); p.n_segments < n; p.n_segments++) {
            kernel_segment &s = p.segments[p.n_segments];
            s.elems = 1 + (draw(3) ? draw(9) + draw(3) * (slot / item) : draw(4 * slot / item));
            s.rows = 1 + draw(3);
            s.dst_pitch = s.elems * 4 + 4 * draw(5);
            s.dst = (uint64_t)dst + used + 4 * draw(5);
            used = (s.dst - (uint64_t)dst + s.dst_pitch * s.rows + 67) & ~UINT64_C(3);
            s.n_sources = draw(6) ? draw(5) : draw(KERNEL_RING_SOURCES + 1);
            s.first_source = sources;
            p.tiles[p.n_segments] = p.n_tiles;
            s.row_tiles = (uint32_t)((s.elems + p.tile_elems - 1) / p.tile_elems);
            p.n_tiles += s.row_tiles * s.rows;
            for (uint32_t k = 0; k < s.n_sources; k++) {
                kernel_source &from = p.sources[sources++];
                uint64_t align = draw(2) ? 16 : (uint64_t)item;
                from.row_pitch = (s.elems * item + item * draw(9) + align - 1) / align * align;
                from.at = (uint64_t)src + 32 + draw((uint32_t)(BYTES - from.row_pitch * s.rows - 64)) / align * align;
            }
        }
        REQUIRE(used <= BYTES, "the batch has no room");
        std::memset(words, 0, sizeof words);
        for (uint32_t i = 0; i < p.posts.n; i++)
            p.posts.words[i] = (uint64_t)&words[i];
        expect(p, dtype, (uint64_t)dst, results);
        at_post = [&] { REQUIRE(std::memcmp(dst, results.data(), BYTES) == 0, "round %u: a post before its results", round); };
        launch(
            [&] {
                if (plain)
                    dtype == TIDE_F32 ? reduce_plain<TIDE_F32>(p) : reduce_plain<TIDE_BF16>(p);
                else if (slot == KERNEL_THIN_SLOT)
                    dtype == TIDE_F32 ? ring<TIDE_F32, KERNEL_THIN_SLOT>(p) : ring<TIDE_BF16, KERNEL_THIN_SLOT>(p);
                else
                    dtype == TIDE_F32 ? ring<TIDE_F32, KERNEL_FAT_SLOT>(p) : ring<TIDE_BF16, KERNEL_FAT_SLOT>(p);
            },
            ctas, warps);
        for (uint32_t i = 0; i < BYTES / 4; i++)
            REQUIRE(std::memcmp(dst + 4 * i, &results[i], 4) == 0, "round %u: result %u is %g, expected %g (%s, slots of %u, beta %d)",
                    round, i, (double)element((uint64_t)dst + 4 * i, TIDE_F32), (double)results[i],
                    dtype == TIDE_F32 ? "fp32" : "bf16", slot, p.beta);
        for (uint32_t i = 0; i < WORDS; i++)
            REQUIRE(words[i] == (i < p.posts.n ? 7 : 0) && done == 0, "round %u: word %u is %llu, the counter %u", round, i,
                    (unsigned long long)words[i], done);
    }
    sums_by_switch(rounds);
    copies(rounds);
    std::printf("kernels on a CPU: %u sums right, as many by a switch, and as many copies\n", rounds);
    std::free(dst);
    std::free(src);
    return 0;
}
