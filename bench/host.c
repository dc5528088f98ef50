/*
 * host.c - the C side of bench/host.py, loaded by each of its ranks: TIDE's calls as a user makes them, and the
 * plainest thing that could do the job: memcpy (or a loop that adds) between two futex barriers, without any layout.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tide/tide.h"

#define EXPORT __attribute__((visibility("default")))
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        if ((call) != TIDE_OK) {                                                                                       \
            fprintf(stderr, "host.c: %s: %s\n", #call, tide_last_error());                                             \
            return NULL;                                                                                               \
        }                                                                                                              \
    } while (0)

EXPORT double host_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- plain: memory that all ranks map, a barrier, memcpy --------------------------------- */

typedef struct plain_barrier {
    _Atomic uint32_t arrived, round;
} plain_barrier;

EXPORT void plain_wait(plain_barrier *b, uint32_t n)
{
    uint32_t round = atomic_load(&b->round);

    if (atomic_fetch_add(&b->arrived, 1) + 1 == n) {
        atomic_store(&b->arrived, 0);
        atomic_fetch_add(&b->round, 1);
        syscall(SYS_futex, &b->round, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return;
    }
    while (atomic_load(&b->round) == round) {
        const struct timespec limit = {60, 0};
        if (syscall(SYS_futex, &b->round, FUTEX_WAIT, round, &limit, NULL, 0) != 0 && errno == ETIMEDOUT) {
            fprintf(stderr, "host.c: a rank did not reach the barrier within 60 s\n");
            _exit(1);
        }
    }
}

/* Each rank copies its shard into `copies` rank-major landings: n for private ones, 1 for one that all ranks share. */
EXPORT void plain_all_gather(plain_barrier *b, uint32_t n, uint32_t rank, const char *shard, uint64_t bytes,
                             char *landings, uint32_t copies)
{
    plain_wait(b, n);
    for (uint32_t c = 0; c < copies; c++)
        memcpy(landings + ((uint64_t)(rank + c) % copies * n + rank) * bytes, shard, bytes);
    plain_wait(b, n);
}

static inline float widen(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("avx2", "default"))) /* as the library's own loops */
#else
#define CLONES
#endif

/* out = alpha * (rank 0's + rank 1's + ...), a block that fits the first-level cache at a time. */
CLONES static void sum_ranks(const uint16_t *first, uint64_t stride, uint32_t n, uint64_t elements, float *out,
                             float alpha)
{
    enum { BLOCK = 2048 };

    for (uint64_t begin = 0; begin < elements; begin += BLOCK) {
        uint64_t count = elements - begin < BLOCK ? elements - begin : BLOCK;
        float *restrict o = out + begin;
        for (uint32_t u = 0; u < n; u++) {
            const uint16_t *restrict g = first + u * stride + begin;
            if (u == 0)
                for (uint64_t e = 0; e < count; e++)
                    o[e] = widen(g[e]);
            else
                for (uint64_t e = 0; e < count; e++)
                    o[e] += widen(g[e]);
        }
        for (uint64_t e = 0; e < count; e++)
            o[e] *= alpha;
    }
}

/* Each rank adds its part of all ranks' rank-major bf16 gradients, in fp32. */
EXPORT void plain_reduce_scatter(plain_barrier *b, uint32_t n, uint32_t rank, const uint16_t *grads, uint64_t elements,
                                 float *out, float alpha)
{
    plain_wait(b, n);
    sum_ranks(grads + rank * elements, n * elements, n, elements, out, alpha);
    plain_wait(b, n);
}

/* ---- TIDE -------------------------------------------------------------------------------- */

typedef struct host_tide {
    tide_bootstrap *bootstrap;
    tide_comm *comm;
    tide_group *group;
    uint32_t n_params;
} host_tide;

/* A group of n_params bf16 matrices rows x columns on one node; `multicast` as the knob. */
EXPORT host_tide *host_open(const char *path, uint32_t rank, uint32_t n, uint32_t n_params, int64_t rows,
                            int64_t columns, int64_t multicast)
{
    host_tide *h = calloc(1, sizeof *h);
    tide_param *params = calloc(n_params, sizeof *params);
    tide_comm_desc comm = TIDE_COMM_DESC_INIT;
    tide_group_desc group = TIDE_GROUP_DESC_INIT;
    tide_options options = TIDE_OPTIONS_INIT;

    if (!h || !params)
        return NULL;
    for (uint32_t i = 0; i < n_params; i++)
        params[i] = (tide_param){.ndim = 2, .dims = {rows, columns}};
    CHECK(tide_bootstrap_local(path, rank, n, 60000, &h->bootstrap));
    CHECK(tide_options_set(&options, "multicast", multicast));
    comm.rank = rank;
    comm.n_ranks = n;
    comm.node_size = n;
    comm.allgather = tide_bootstrap_allgather;
    comm.allgather_context = h->bootstrap;
    comm.options = &options;
    CHECK(tide_comm_create(&comm, &h->comm));
    group.n_params = h->n_params = n_params;
    group.params = params;
    CHECK(tide_groups_create(h->comm, &group, 1, &h->group));
    free(params);
    return h;
}

EXPORT const char *host_path(host_tide *h)
{
    static char text[256];
    tide_group_path path = {.size = sizeof path};

    CHECK(tide_group_get_path(h->group, &path));
    snprintf(text, sizeof text, "%s", path.path);
    return text;
}

EXPORT void *host_tensor(host_tide *h, int kind, uint32_t index)
{
    tide_tensor t = {.size = sizeof t};

    CHECK(tide_group_tensor(h->group, kind, index, &t));
    return t.data;
}

EXPORT void *host_adopt(host_tide *h, uint32_t index, const void *data, uint64_t bytes)
{
    CHECK(tide_shard_adopt(h->group, index, data, bytes, NULL));
    return h;
}

EXPORT void *host_all_gather(host_tide *h)
{
    CHECK(tide_all_gather(h->group, NULL, NULL));
    CHECK(tide_wait(h->group, TIDE_READY, NULL));
    return h;
}

EXPORT void *host_release(host_tide *h)
{
    CHECK(tide_slot_release(h->group, NULL));
    return h;
}

EXPORT void *host_reduce_scatter(host_tide *h, const void *const *grads, float *out, float alpha)
{
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;

    args.grads = grads;
    args.out = out;
    args.alpha = alpha;
    CHECK(tide_reduce_scatter(h->group, &args, NULL));
    CHECK(tide_wait(h->group, TIDE_DONE, NULL));
    return h;
}

EXPORT void host_close(host_tide *h)
{
    tide_comm_destroy(h->comm);
    tide_bootstrap_destroy(h->bootstrap);
    free(h);
}
