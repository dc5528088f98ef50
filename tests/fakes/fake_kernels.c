/* fake_kernels.c - the library's kernels on the fake driver: their C twins, and what each of them touches. */
#include "base/base.h"
#include "cli/rules.h"
#include "fabric/cuda/kernels/kernels.h"
#include "fake_internal.h"

/* ---- those of the rules ----------------------------------------------------------------------- */

static void add_word(const void *args)
{
    const rules_kernel *k = args;
    *(uint64_t *)(uintptr_t)k->target = *(const uint64_t *)(uintptr_t)k->source + k->value;
}

static void add_word_ranges(const void *args, fake_touch *t)
{
    const rules_kernel *k = args;
    fake_cuda_touch(t, k->target, sizeof(uint64_t));
    fake_cuda_touch(t, k->source, sizeof(uint64_t));
}

static void fill_and_post(const void *args)
{
    const rules_post *k = args;
    for (uint64_t i = 0; i < k->words; i++)
        ((uint64_t *)(uintptr_t)k->data)[i] = k->value;
    __atomic_store_n((uint64_t *)(uintptr_t)k->word, k->value, __ATOMIC_RELEASE);
}

static void fill_and_post_ranges(const void *args, fake_touch *t)
{
    const rules_post *k = args;
    fake_cuda_touch(t, k->data, k->words * sizeof(uint64_t));
    fake_cuda_touch(t, k->done, sizeof(uint32_t));
    fake_cuda_touch(t, k->word, sizeof(uint64_t));
}

/* ---- the library's --------------------------------------------------------------------------- */

/* Rows may lie in several allocations. */
static void touch_rows(fake_touch *t, uint64_t at, uint64_t width, uint64_t rows, uint64_t pitch)
{
    for (uint64_t i = 0; i < rows; i++)
        fake_cuda_touch(t, at + i * pitch, width);
}

static void touch_posts(fake_touch *t, const kernel_posts *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        fake_cuda_touch(t, p->words[i], sizeof(uint64_t));
    if (p->n)
        fake_cuda_touch(t, p->done, sizeof(uint32_t));
}

/* The source's item shows in the kernel's name alone. */
static void reduce_ranges(const void *args, fake_touch *t)
{
    const kernel_reduce *p = args;
    uint64_t item = strstr(t->op->kernel->name, "_f32") ? 4 : 2;

    for (uint32_t i = 0; i < p->n_segments; i++) {
        const kernel_segment *s = &p->segments[i];
        touch_rows(t, s->dst, s->elems * 4, s->rows, s->dst_pitch);
        for (uint32_t k = s->first_source; k < s->first_source + s->n_sources; k++)
            touch_rows(t, p->sources[k].at, s->elems * item, s->rows, p->sources[k].row_pitch);
    }
    touch_posts(t, &p->posts);
}

static void copy_ranges(const void *args, fake_touch *t)
{
    const kernel_copy *p = args;
    for (uint32_t i = 0; i < p->n_runs; i++) {
        const kernel_run *r = &p->runs[i];
        touch_rows(t, r->dst, r->width * p->dst_item, r->rows, r->dst_pitch);
        if (r->src)
            touch_rows(t, r->src, r->width * p->src_item, r->rows, r->src_pitch);
    }
    touch_posts(t, &p->posts);
}

/* A switch adds in an order of its own. */
static void add_by_switch(const void *args)
{
    const kernel_multimem *p = args;
    uintptr_t memories[FAKE_MAX_DEVICES];
    uint64_t order[FAKE_MAX_DEVICES];
    uint32_t n = (uint32_t)fake_multicast_memories(p->src, p->elems * sizeof(float), fake_kernel_device(), memories), first;

    if (n == 0)
        return;
    first = (uint32_t)fake_random(n);
    for (uint32_t i = 0; i < n; i++)
        order[i] = memories[(first + i) % n];
    cuda_multimem_reduce_twin(p, order, n);
}

static void switch_ranges(const void *args, fake_touch *t)
{
    const kernel_multimem *p = args;
    fake_cuda_touch(t, p->dst, p->elems * sizeof(float));
    fake_touch_multicast(t, p->src, tide_align_up(p->elems * sizeof(float), 16));
}

void fake_kernels_add(void)
{
    static const char *const names[] = {
#define X(id, name, type) #name,
        KERNELS(X)
#undef X
    };
    fake_cuda_kernel(RULES_KERNEL, sizeof(rules_kernel), add_word, add_word_ranges);
    fake_cuda_kernel(RULES_POST, sizeof(rules_post), fill_and_post, fill_and_post_ranges);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t bytes;
        kernel_twin twin = cuda_kernel_twin(names[i], &bytes);
        fake_cuda_kernel(names[i], bytes, twin ? twin : add_by_switch,
                         !twin                             ? switch_ranges
                         : bytes == sizeof(kernel_reduce) ? reduce_ranges
                                                          : copy_ranges);
    }
}
