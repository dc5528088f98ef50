/*
 * twins.c - what each kernel computes, one element after the other, from the same struct over host memory. The order of
 * tiles and the shape of a launch do not show in a result, so nothing here knows them.
 */
#include "base/base.h"
#include "fabric/cuda/kernels/kernels.h"
#include "fabric/fabric.h"

static float load(uint64_t at, int dtype)
{
    uint16_t h;
    float f;
    if (dtype == TIDE_F32) {
        memcpy(&f, (const void *)(uintptr_t)at, sizeof f);
        return f;
    }
    memcpy(&h, (const void *)(uintptr_t)at, sizeof h);
    return dtype == TIDE_BF16 ? tide_bf16_to_f32(h) : tide_f16_to_f32(h);
}

static void store(uint64_t at, int dtype, float f)
{
    uint16_t h = dtype == TIDE_BF16 ? tide_f32_to_bf16(f) : tide_f32_to_f16(f);
    if (dtype == TIDE_F32)
        memcpy((void *)(uintptr_t)at, &f, sizeof f);
    else
        memcpy((void *)(uintptr_t)at, &h, sizeof h);
}

static void finish(uint64_t dst, int beta, float alpha, float sum)
{
    if (beta != FAB_NOT_FINAL) {
        float old = beta == FAB_BETA_ONE ? load(dst, TIDE_F32) : 0.0f, scaled = alpha * sum;
        sum = old + scaled;
    }
    store(dst, TIDE_F32, sum);
}

static void post(const kernel_posts *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        __atomic_store_n((uint64_t *)(uintptr_t)p->words[i], p->value, __ATOMIC_RELEASE);
}

static void reduce(const kernel_reduce *p, int dtype)
{
    uint32_t item = tide_dtype_bytes(dtype);
    for (uint32_t i = 0; i < p->n_segments; i++) {
        const kernel_segment *s = &p->segments[i];
        for (uint64_t row = 0; row < s->rows; row++) {
            for (uint64_t e = 0; e < s->elems; e++) {
                uint64_t dst = s->dst + row * s->dst_pitch + e * sizeof(float);
                float sum = 0.0f;
                for (uint32_t k = 0; k < s->n_sources; k++) {
                    const kernel_source *from = &p->sources[s->first_source + k];
                    float v = load(from->at + row * from->row_pitch + e * item, dtype);
                    sum = k ? sum + v : v;
                }
                finish(dst, p->beta, p->alpha, sum);
            }
        }
    }
    post(&p->posts);
}

void cuda_multimem_reduce_twin(const kernel_multimem *p, const uint64_t *memories, uint32_t n)
{
    for (uint64_t e = 0; e < p->elems; e++) {
        float sum = load(memories[0] + e * sizeof sum, TIDE_F32);
        for (uint32_t i = 1; i < n; i++)
            sum = sum + load(memories[i] + e * sizeof sum, TIDE_F32);
        finish(p->dst + e * sizeof sum, p->beta, p->alpha, sum);
    }
}

static void reduce_f32(const void *p) { reduce(p, TIDE_F32); }
static void reduce_bf16(const void *p) { reduce(p, TIDE_BF16); }
static void reduce_f16(const void *p) { reduce(p, TIDE_F16); }

static void copy(const kernel_copy *p, int from, int to)
{
    for (uint32_t i = 0; i < p->n_runs; i++) {
        const kernel_run *r = &p->runs[i];
        for (uint64_t row = 0; row < r->rows; row++) {
            for (uint64_t c = 0; c < r->width; c++) {
                uint64_t src = r->src + row * r->src_pitch + c * p->src_item;
                uint64_t dst = r->dst + row * r->dst_pitch + c * p->dst_item;
                if (!r->src)
                    memset((void *)(uintptr_t)dst, 0, p->dst_item);
                else if (from == to)
                    memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, p->dst_item);
                else
                    store(dst, to, load(src, from));
            }
        }
    }
    post(&p->posts);
}

static void copy_bytes(const void *p) { copy(p, TIDE_OPAQUE, TIDE_OPAQUE); }
static void cast_f32_bf16(const void *p) { copy(p, TIDE_F32, TIDE_BF16); }
static void cast_f32_f16(const void *p) { copy(p, TIDE_F32, TIDE_F16); }
static void cast_bf16_f32(const void *p) { copy(p, TIDE_BF16, TIDE_F32); }
static void cast_bf16_f16(const void *p) { copy(p, TIDE_BF16, TIDE_F16); }
static void cast_f16_f32(const void *p) { copy(p, TIDE_F16, TIDE_F32); }
static void cast_f16_bf16(const void *p) { copy(p, TIDE_F16, TIDE_BF16); }

#define SUMS(kind) [kind##_F32] = reduce_f32, [kind##_BF16] = reduce_bf16, [kind##_F16] = reduce_f16
static const kernel_twin twins[KERNEL_COUNT] = {
    SUMS(KERNEL_REDUCE_PLAIN),
    SUMS(KERNEL_REDUCE_THIN),
    SUMS(KERNEL_REDUCE_THIN_ADD),
    SUMS(KERNEL_REDUCE_FAT),
    SUMS(KERNEL_REDUCE_FAT_ADD),
    [KERNEL_COPY_PLAIN] = copy_bytes,
    [KERNEL_COPY_BULK] = copy_bytes,
    [KERNEL_CAST_F32_BF16] = cast_f32_bf16,
    [KERNEL_CAST_F32_F16] = cast_f32_f16,
    [KERNEL_CAST_BF16_F32] = cast_bf16_f32,
    [KERNEL_CAST_BF16_F16] = cast_bf16_f16,
    [KERNEL_CAST_F16_F32] = cast_f16_f32,
    [KERNEL_CAST_F16_BF16] = cast_f16_bf16,
};

kernel_twin cuda_kernel_twin(const char *name, size_t *n_bytes)
{
    static const struct {
        const char *name;
        size_t n_bytes;
    } all[KERNEL_COUNT] = {
#define KERNEL_X(id, name, type) [id] = {#name, sizeof(type)},
        KERNELS(KERNEL_X)
#undef KERNEL_X
    };
    *n_bytes = 0;
    for (uint32_t i = 0; i < KERNEL_COUNT; i++) {
        if (strcmp(all[i].name, name) == 0) {
            *n_bytes = all[i].n_bytes;
            return twins[i];
        }
    }
    return NULL;
}
