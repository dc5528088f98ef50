/*
 * kernels.c - copies, casts, fills and ordered sums.
 *
 * Sums work on blocks of a row that fit the first-level cache: up to four sources are loaded (and widened) and added in
 * order into an accumulator, then up to four more to it, the last step writes the result. The order of additions of
 * an element is the order of its sources whatever the block size, so the bits are those of the naive twin at the end of
 * this file. Loops are written for the compiler's vectorizer and built twice, plain and for AVX2; the machine decides
 * at run time.
 */
#include "fabric/host/host.h"

enum { BLOCK = 2048 }; /* elements: 8 KiB of accumulators */

static char *resolve(const fab_ptr *p, const fab_call *call)
{
    return (char *)(p->arg >= 0 ? (uintptr_t)call->args[p->arg] + p->base : p->base);
}

#define INLINE static inline __attribute__((always_inline))

/* ---- one element --------------------------------------------------------------------------------- */

INLINE float from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE uint32_t to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

INLINE float widen_bf16(uint16_t h)
{
    return from_bits((uint32_t)h << 16);
}

/* A choice that the vectorizer may turn into a blend: both sides are computed, whatever they could trap. */
INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0u - (uint32_t)(condition != 0);
    return (yes & mask) | (no & ~mask);
}

/* Exponents are rebiased by 112; infinities and NaN by twice that; subnormals are their mantissa times 2^-24. No branch
 * and no fp32 subnormal on the way, which would be slow. */
INLINE float widen_f16(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t normal = magnitude + choose(magnitude >= 0x0f800000u, 0x70000000u, 0x38000000u);
    uint32_t subnormal = to_bits((float)(int32_t)(h & 0x3ffu) * 0x1p-24f);
    return from_bits(choose(magnitude >= 0x00800000u, normal, subnormal) | sign);
}

/* Adding 0.5 leaves a number's multiple of 2^-24, rounded to nearest even, in the low bits: that is a subnormal's
 * mantissa. */
INLINE uint16_t narrow_f16(float f)
{
    uint32_t bits = to_bits(f), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t finite = choose(magnitude >= 0x477ff000u, 0x7c00u, choose(magnitude >= 0x38800000u, normal, subnormal));
    return (uint16_t)(sign | choose(magnitude > 0x7f800000u, 0x7e00u, finite));
}

INLINE uint16_t narrow_bf16(float f)
{
    uint32_t bits = to_bits(f), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x0040u : rounded);
}

/* Unaligned loads and stores by memcpy: the compiler turns them into vector moves. */
INLINE uint16_t load_u16(const char *p, uint64_t i)
{
    uint16_t v;
    memcpy(&v, p + 2 * i, sizeof v);
    return v;
}

INLINE float load_f32(const char *p, uint64_t i)
{
    float v;
    memcpy(&v, p + 4 * i, sizeof v);
    return v;
}

INLINE float load_bf16(const char *p, uint64_t i)
{
    return widen_bf16(load_u16(p, i));
}

INLINE float load_f16(const char *p, uint64_t i)
{
    return widen_f16(load_u16(p, i));
}

INLINE void store_f32(char *p, uint64_t i, float v)
{
    memcpy(p + 4 * i, &v, sizeof v);
}

INLINE void store_u16(char *p, uint64_t i, uint16_t v)
{
    memcpy(p + 2 * i, &v, sizeof v);
}

/* ---- loops over a block ---------------------------------------------------------------------- */

/* X(name, parameters, body): n elements, index i. Nothing aliases: sources and destination of an op are disjoint.
 * set_*_k, add_*_k: k sources in one pass, each added to the sum of those before it. */
#define ACC (float *restrict acc, const char *const *restrict src, uint64_t n)
#define OUT (char *restrict dst, const float *restrict acc, float alpha, uint64_t n)
#define CAST (char *restrict dst, const char *restrict src, uint64_t n)
#define SUMS(X, type, load)                                                                         \
    X(set_##type##_1, ACC, acc[i] = load(src[0], i))                                                \
    X(set_##type##_2, ACC, acc[i] = load(src[0], i) + load(src[1], i))                              \
    X(set_##type##_3, ACC, acc[i] = load(src[0], i) + load(src[1], i) + load(src[2], i))            \
    X(set_##type##_4, ACC,                                                                          \
      acc[i] = load(src[0], i) + load(src[1], i) + load(src[2], i) + load(src[3], i))               \
    X(add_##type##_1, ACC, acc[i] = acc[i] + load(src[0], i))                                       \
    X(add_##type##_2, ACC, acc[i] = acc[i] + load(src[0], i) + load(src[1], i))                     \
    X(add_##type##_3, ACC, acc[i] = acc[i] + load(src[0], i) + load(src[1], i) + load(src[2], i))   \
    X(add_##type##_4, ACC,                                                                          \
      acc[i] = acc[i] + load(src[0], i) + load(src[1], i) + load(src[2], i) + load(src[3], i))
#define LOOPS(X)                                                              \
    SUMS(X, f32, load_f32)                                                    \
    SUMS(X, bf16, load_bf16)                                                  \
    SUMS(X, f16, load_f16)                                                    \
    X(put_scaled, OUT, store_f32(dst, i, 0.0f + alpha * acc[i]))              \
    X(put_added, OUT, store_f32(dst, i, load_f32(dst, i) + alpha * acc[i]))   \
    X(f32_bf16, CAST, store_u16(dst, i, narrow_bf16(load_f32(src, i))))       \
    X(f32_f16, CAST, store_u16(dst, i, narrow_f16(load_f32(src, i))))    \
    X(bf16_f32, CAST, store_f32(dst, i, widen_bf16(load_u16(src, i))))        \
    X(f16_f32, CAST, store_f32(dst, i, widen_f16(load_u16(src, i))))          \
    X(bf16_f16, CAST, store_u16(dst, i, narrow_f16(widen_bf16(load_u16(src, i))))) \
    X(f16_bf16, CAST, store_u16(dst, i, narrow_bf16(widen_f16(load_u16(src, i)))))

#define LOOP(suffix, attributes, name, parameters, body) \
    attributes static void name##_##suffix parameters    \
    {                                                    \
        for (uint64_t i = 0; i < n; i++)                 \
            body;                                        \
    }
#define PLAIN(name, parameters, body) LOOP(plain, , name, parameters, body)
LOOPS(PLAIN)
#if defined(__x86_64__)
#define AVX2(name, parameters, body) LOOP(avx2, __attribute__((target("avx2"))), name, parameters, body)
LOOPS(AVX2)
#endif

typedef struct kernels {
#define MEMBER(name, parameters, body) void(*name) parameters;
    LOOPS(MEMBER)
} kernels;

static const kernels *pick(void)
{
#define PLAIN_ENTRY(name, parameters, body) .name = name##_plain,
    static const kernels plain = {LOOPS(PLAIN_ENTRY)};
#if defined(__x86_64__)
#define AVX2_ENTRY(name, parameters, body) .name = name##_avx2,
    static const kernels avx2 = {LOOPS(AVX2_ENTRY)};
    if (__builtin_cpu_supports("avx2"))
        return &avx2;
#endif
    return &plain;
}

/* ---- COPY ------------------------------------------------------------------------------------ */

static void (*cast_loop(const kernels *k, int from, int to)) CAST
{
    void(*const table[3][3]) CAST = {
        [TIDE_F32] = {[TIDE_BF16] = k->f32_bf16, [TIDE_F16] = k->f32_f16},
        [TIDE_BF16] = {[TIDE_F32] = k->bf16_f32, [TIDE_F16] = k->bf16_f16},
        [TIDE_F16] = {[TIDE_F32] = k->f16_f32, [TIDE_BF16] = k->f16_bf16},
    };
    return from < 3 && to < 3 ? table[from][to] : NULL;
}

static uint64_t item_bytes(int dtype)
{
    uint32_t bytes = tide_dtype_bytes(dtype);
    return bytes ? bytes : 1;
}

void host_run_copy(const fab_copy *copy, const fab_call *call)
{
    void(*cast) CAST = copy->src_dtype == copy->dst_dtype ? NULL : cast_loop(pick(), copy->src_dtype, copy->dst_dtype);

    for (uint32_t i = 0; i < copy->n_runs; i++) {
        const fab_run *run = &copy->runs[i];
        char *dst = resolve(&run->dst, call);
        uint64_t bytes = run->width * item_bytes(copy->dst_dtype), rows = run->rows;
        if (run->src.zero) {
            for (uint64_t r = 0; r < rows; r++)
                memset(dst + r * run->dst_pitch, 0, bytes);
        } else if (cast) {
            const char *src = resolve(&run->src, call);
            for (uint64_t r = 0; r < rows; r++)
                cast(dst + r * run->dst_pitch, src + r * run->src_pitch, run->width);
        } else {
            const char *src = resolve(&run->src, call);
            if (run->src_pitch == bytes && run->dst_pitch == bytes) {
                bytes *= rows;
                rows = rows != 0;
            }
            for (uint64_t r = 0; r < rows; r++)
                memcpy(dst + r * run->dst_pitch, src + r * run->src_pitch, bytes);
        }
    }
}

/* ---- REDUCE ---------------------------------------------------------------------------------- */

enum { SOURCES_A_PASS = 4 };

static void (*sum_loop(const kernels *k, uint32_t dtype, bool further, uint32_t count)) ACC
{
#define SUM_ROW(type)                                                                   \
    {                                                                                   \
        {k->set_##type##_1, k->set_##type##_2, k->set_##type##_3, k->set_##type##_4},   \
        {k->add_##type##_1, k->add_##type##_2, k->add_##type##_3, k->add_##type##_4}    \
    }
    void(*const table[3][2][SOURCES_A_PASS]) ACC = {
        [TIDE_F32] = SUM_ROW(f32), [TIDE_BF16] = SUM_ROW(bf16), [TIDE_F16] = SUM_ROW(f16)};
    return table[dtype][further][count - 1];
}

static void reduce_row(const kernels *k, const fab_reduce *reduce, const fab_segment *segment, const fab_call *call,
                       char *dst, uint64_t row)
{
    const fab_source *sources = reduce->sources + segment->first_source;
    int beta = reduce->beta;
    float alpha = 1.0f, acc[BLOCK];

    if (beta == FAB_BETA_CALL)
        beta = call->accumulate ? FAB_BETA_ONE : FAB_BETA_ZERO;
    if (beta != FAB_NOT_FINAL)
        alpha = call->alpha;
    for (uint64_t at = 0; at < segment->elems; at += BLOCK) {
        uint64_t n = tide_min_u64(BLOCK, segment->elems - at);
        if (segment->n_sources == 0)
            memset(acc, 0, n * sizeof *acc);
        for (uint32_t i = 0, count; i < segment->n_sources; i += count) {
            const char *src[SOURCES_A_PASS];
            uint32_t dtype = sources[i].dtype;
            for (count = 0; count < SOURCES_A_PASS && i + count < segment->n_sources; count++) {
                const fab_source *s = &sources[i + count];
                if (s->dtype != dtype)
                    break;
                src[count] = resolve(&s->at, call) + row * s->row_pitch + at * item_bytes((int)dtype);
            }
            sum_loop(k, dtype, i != 0, count)(acc, src, n);
        }
        if (beta == FAB_NOT_FINAL)
            memcpy(dst + at * sizeof(float), acc, n * sizeof(float));
        else
            (beta == FAB_BETA_ONE ? k->put_added : k->put_scaled)(dst + at * sizeof(float), acc, alpha, n);
    }
}

void host_run_reduce(const fab_reduce *reduce, const fab_call *call)
{
    const kernels *k = pick();
    for (uint32_t i = 0; i < reduce->n_segments; i++) {
        const fab_segment *segment = &reduce->segments[i];
        char *dst = resolve(&segment->dst, call);
        for (uint32_t row = 0; row < segment->rows; row++)
            reduce_row(k, reduce, segment, call, dst + row * segment->dst_pitch, row);
    }
}

/* ---- the naive twins: what the loops above have to equal, bit for bit ------------------------ */

static float naive_load(const char *p, int dtype)
{
    uint16_t h;
    float f;
    if (dtype == TIDE_F32) {
        memcpy(&f, p, sizeof f);
        return f;
    }
    memcpy(&h, p, sizeof h);
    return dtype == TIDE_BF16 ? tide_bf16_to_f32(h) : tide_f16_to_f32(h);
}

static void naive_store(char *p, int dtype, float f)
{
    uint16_t h = dtype == TIDE_BF16 ? tide_f32_to_bf16(f) : tide_f32_to_f16(f);
    if (dtype == TIDE_F32)
        memcpy(p, &f, sizeof f);
    else
        memcpy(p, &h, sizeof h);
}

void host_naive_copy(const fab_copy *copy, const fab_call *call)
{
    uint64_t from = item_bytes(copy->src_dtype), to = item_bytes(copy->dst_dtype);
    for (uint32_t i = 0; i < copy->n_runs; i++) {
        const fab_run *run = &copy->runs[i];
        for (uint64_t r = 0; r < run->rows; r++) {
            for (uint64_t c = 0; c < run->width; c++) {
                char *dst = resolve(&run->dst, call) + r * run->dst_pitch + c * to;
                if (run->src.zero)
                    memset(dst, 0, to);
                else if (copy->src_dtype == copy->dst_dtype)
                    memcpy(dst, resolve(&run->src, call) + r * run->src_pitch + c * from, to);
                else
                    naive_store(dst, copy->dst_dtype,
                                naive_load(resolve(&run->src, call) + r * run->src_pitch + c * from, copy->src_dtype));
            }
        }
    }
}

void host_naive_reduce(const fab_reduce *reduce, const fab_call *call)
{
    for (uint32_t i = 0; i < reduce->n_segments; i++) {
        const fab_segment *segment = &reduce->segments[i];
        for (uint32_t row = 0; row < segment->rows; row++) {
            for (uint64_t e = 0; e < segment->elems; e++) {
                char *dst = resolve(&segment->dst, call) + row * segment->dst_pitch + e * sizeof(float);
                float sum = 0.0f, old = 0.0f, scaled;
                for (uint32_t k = 0; k < segment->n_sources; k++) {
                    const fab_source *s = &reduce->sources[segment->first_source + k];
                    const char *src = resolve(&s->at, call) + row * s->row_pitch + e * item_bytes((int)s->dtype);
                    sum = k ? sum + naive_load(src, (int)s->dtype) : naive_load(src, (int)s->dtype);
                }
                if (reduce->beta != FAB_NOT_FINAL) {
                    if (reduce->beta == FAB_BETA_ONE || (reduce->beta == FAB_BETA_CALL && call->accumulate))
                        memcpy(&old, dst, sizeof old);
                    scaled = call->alpha * sum;
                    sum = old + scaled;
                }
                memcpy(dst, &sum, sizeof sum);
            }
        }
    }
}
