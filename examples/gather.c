/* gather.c - four processes, as two nodes of two, all-gather and reduce-scatter three tensors and check every element. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <tide/tide.h>
#include <unistd.h>

enum { RANKS = 4, TENSORS = 3 };
static const tide_param params[TENSORS] = {
    {"weight", 2, 0, {10, 3}}, /* 10 rows over 4 ranks: 3, 3, 3 and 1 */
    {"bias", 1, 0, {2}},       /* ranks 2 and 3 own no row */
    {"head", 2, 0, {8, 16}},
};

static void must(int status, const char *what)
{
    if (status == TIDE_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, tide_last_error());
    _exit(1);
}

static size_t row(int p) { return params[p].ndim > 1 ? (size_t)params[p].dims[1] : 1; }
static size_t whole(int p) { return (size_t)params[p].dims[0] * row(p); }
static size_t shard(int p) { return ((size_t)params[p].dims[0] + RANKS - 1) / RANKS * row(p); } /* padded */
static float value(int p, size_t i) { return (float)(100000 * p + (int)i); }

static int run(const char *path, uint32_t rank)
{
    tide_bootstrap *bootstrap;
    tide_comm *comm;
    tide_group *group;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_group_desc layer = TIDE_GROUP_DESC_INIT;
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    float *grads[TENSORS], *out;
    uint64_t elements, at = 0;
    int wrong = 0;

    must(tide_bootstrap_local(path, rank, RANKS, 20000, &bootstrap), "bootstrap");
    desc.rank = rank, desc.n_ranks = RANKS, desc.node_size = 2;
    desc.allgather = tide_bootstrap_allgather, desc.allgather_context = bootstrap;
    must(tide_comm_create(&desc, &comm), "communicator");
    layer.name = "layer", layer.n_params = TENSORS, layer.params = params;
    layer.dtype = layer.shard_dtype = layer.grad_dtype = TIDE_F32;
    must(tide_groups_create(comm, &layer, 1, &group), "group");

    for (int p = 0; p < TENSORS; p++) { /* each rank puts its rows into the arena */
        size_t first = rank * shard(p), n = first < whole(p) ? whole(p) - first : 0;
        float *rows = calloc(shard(p), sizeof *rows);
        for (size_t i = 0; i < n && i < shard(p); i++)
            rows[i] = value(p, first + i);
        must(tide_shard_adopt(group, (uint32_t)p, rows, shard(p) * sizeof *rows, NULL), "adopt");
        free(rows);
    }
    must(tide_all_gather(group, NULL, NULL), "all_gather");
    must(tide_wait(group, TIDE_READY, NULL), "ready");
    for (int p = 0; p < TENSORS; p++) { /* the whole tensor is at its address now */
        tide_tensor full = {.size = sizeof full};
        must(tide_group_tensor(group, TIDE_TENSOR_PARAM, (uint32_t)p, &full), "tensor");
        for (size_t i = 0; i < whole(p); i++)
            wrong += ((float *)full.data)[i] != value(p, i);
        grads[p] = malloc(whole(p) * sizeof(float));
        for (size_t i = 0; i < whole(p); i++)
            grads[p][i] = (float)(rank + 1) * value(p, i);
    }
    must(tide_slot_release(group, NULL), "release");

    must(tide_group_output_elements(group, NULL, &elements), "elements");
    out = malloc(elements * sizeof *out);
    args.grads = (const void *const *)grads, args.out = out, args.grad_dtype = TIDE_F32;
    args.alpha = 0.5f; /* the sum over ranks is 1 + 2 + 3 + 4 = 10 times the value */
    must(tide_reduce_scatter(group, &args, NULL), "reduce_scatter");
    must(tide_wait(group, TIDE_DONE, NULL), "done");
    for (int p = 0; p < TENSORS; at += shard(p++))
        for (size_t i = 0; i < shard(p) && rank * shard(p) + i < whole(p); i++)
            wrong += out[at + i] != 5.0f * value(p, rank * shard(p) + i);
    printf("rank %u: %d wrong\n", rank, wrong);
    must(tide_comm_destroy(comm), "destroy");
    tide_bootstrap_destroy(bootstrap);
    return wrong != 0;
}

int main(void)
{
    char path[64];
    int failed = 0, code;
    snprintf(path, sizeof path, "tide-gather-%ld", (long)getpid());
    for (uint32_t rank = 0; rank < RANKS; rank++)
        if (fork() == 0)
            return run(path, rank);
    while (wait(&code) > 0)
        failed += code != 0;
    puts(failed ? "gather: failed" : "gather: ok");
    return failed != 0;
}
