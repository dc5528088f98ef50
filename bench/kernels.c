/*
 * kernels.c - the C side of bench/kernels.py: the library's sums on a stream of the caller's, in any shape.
 */
#include "base/base.h"
#include "fabric/cuda/launch.h"

#define EXPORT __attribute__((visibility("default")))
enum { MAX_SOURCES = 16 };

EXPORT const char *kernels_error(void)
{
    return tide_last_error();
}

/* Into the context that is current. NULL: kernels_error says why. */
EXPORT void *kernels_open(void)
{
    const cuda_driver *driver;
    cuda_kernels *k;
    if (cuda_driver_get(&driver) != TIDE_OK || cuda_kernels_load(driver, NULL, &k) != TIDE_OK)
        return NULL;
    return k;
}

EXPORT void kernels_close(void *k)
{
    cuda_kernels_unload(k, false);
}

EXPORT void kernels_shape(void *k, uint32_t slot, uint32_t warps, uint32_t slots)
{
    launch_shape shape = {slot, warps, slots};
    launch_shapes shapes = {shape, shape, shape};
    cuda_kernels_shapes(k, &shapes);
}

/* dst[0 .. elems) = the sum of n_sources runs of bf16, `apart` bytes from one to the next. done: 4 zeroed bytes. */
EXPORT int kernels_sum(void *k, void *stream, uint64_t src, uint64_t apart, uint32_t n_sources, uint64_t dst, uint64_t elems,
                       uint32_t ctas, uint64_t done)
{
    fab_source sources[MAX_SOURCES];
    fab_segment segment = {.dst = {(uintptr_t)dst, -1, 0}, .elems = elems, .rows = 1, .n_sources = n_sources};
    fab_reduce reduce = {.segments = &segment, .sources = sources, .n_segments = 1, .beta = FAB_BETA_ZERO};
    launch_posts posts = {.done = done};
    if (n_sources > MAX_SOURCES)
        return tide_fail(TIDE_ERR_ARGUMENT, "n_sources: %u, expected at most %d", n_sources, MAX_SOURCES);
    for (uint32_t i = 0; i < n_sources; i++)
        sources[i] = (fab_source){{(uintptr_t)(src + i * apart), -1, 0}, 0, TIDE_BF16, 0};
    return cuda_launch_reduce(k, stream, &reduce, NULL, 0, 1.0f, ctas, &posts);
}
