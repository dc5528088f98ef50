/* gpu_ranks.c - ranks as threads on fake GPUs. */
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "gpu_ranks.h"

gpu_job gpu_job_of(uint32_t n_ranks, uint32_t node_size)
{
    gpu_job j = {.n_ranks = n_ranks, .node_size = node_size, .fabric = TIDE_FABRIC_CUDA, .calls = 2,
                 .options = TIDE_OPTIONS_INIT};
    j.options.deadline_ms = 20000;
    return j;
}

/* ---- a rank ---------------------------------------------------------------------------------- */

static int gpu_open(gpu *g, const gpu_job *j, uint32_t rank)
{
    const cuda_driver *driver = j->driver;
    uint32_t turn = j->fabric == TIDE_FABRIC_NCCL ? rank / j->node_size : rank;
    int count = 0;

    memset(g, 0, sizeof *g);
    g->driver = driver;
    if (driver->Init(0) != CU_OK || driver->DeviceGetCount(&count) != CU_OK || count == 0)
        return -1;
    g->device = (int)turn % count;
    g->retained = driver->PrimaryRetain(&g->context, g->device) == CU_OK;
    g->pushed = g->retained && driver->CtxPush(g->context) == CU_OK;
    if (!g->pushed || driver->StreamCreate(&g->own, CU_STREAM_NON_BLOCKING, 0) != CU_OK)
        return -1;
    g->stream = j->caller == 0 ? (void *)g->own : j->caller == 1 ? NULL : (void *)(uintptr_t)2;
    return 0;
}

/* Memory of the device, which here is host memory as well, with these bytes. */
static void *give(gpu *g, const void *bytes, size_t n)
{
    cu_ptr p = 0;
    if (g->n_blocks == 256 || g->driver->MemAlloc(&p, n ? n : 1) != CU_OK)
        return NULL;
    g->blocks[g->n_blocks++] = p;
    memcpy((void *)(uintptr_t)p, bytes, n);
    return (void *)(uintptr_t)p;
}

int gpu_tell(gpu_job *j, uint32_t rank, int status)
{
    if (status == TIDE_OK || j->status[rank] != TIDE_OK)
        return status;
    j->status[rank] = status;
    snprintf(j->text[rank], sizeof j->text[rank], "%s", tide_last_error());
    return status;
}

/* The layer's shards in device memory. */
static int give_shards(gpu *g, const small_layer *s, void *shards[SMALL_PARAMS])
{
    void *host[SMALL_PARAMS];
    int missing = 0;
    small_shards(s, host);
    for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
        shards[p] = give(g, host[p], small_shard(s, p) * 4);
        missing += !shards[p];
    }
    small_free(host);
    return missing ? TIDE_ERR_MEMORY : TIDE_OK;
}

typedef struct scatter {
    tide_reduce_scatter_args args;
    void *grads[SMALL_PARAMS];
    float *out, before;
    unsigned present;
    int call;
} scatter;

static int begin_scatter(gpu *g, const small_layer *s, int call, int mode, scatter *c)
{
    static const int dtypes[] = {TIDE_BF16, TIDE_F32, TIDE_F16};
    void *host[SMALL_PARAMS];
    float before[2048];
    int missing = 0;

    *c = (scatter){.args = TIDE_REDUCE_SCATTER_ARGS_INIT, .before = (float)(call % 3), .call = call};
    c->present = call % 4 == 3 ? 0xb : 0xf;
    c->args.grad_dtype = mode ? TIDE_BF16 : dtypes[call % 3];
    c->args.alpha = 0.5f;
    c->args.accumulate = call % 3 != 0;
    c->args.mode = mode;
    small_grads(s, call, c->args.grad_dtype, c->present, host);
    for (uint32_t p = 0; p < SMALL_PARAMS; p++)
        if (c->present >> p & 1 &&
            !(c->grads[p] = give(g, host[p], small_whole(s, p) * (c->args.grad_dtype == TIDE_F32 ? 4 : 2))))
            missing = 1;
    small_free(host);
    for (int i = 0; i < 2048; i++)
        before[i] = c->before;
    c->out = give(g, before, sizeof before);
    c->args.grads = (const void *const *)c->grads;
    c->args.out = c->out;
    return c->out && !missing ? TIDE_OK : TIDE_ERR_MEMORY;
}

int gpu_round(gpu_job *j, uint32_t rank, gpu *g, small_layer *layers, tide_group **groups, int call)
{
    int mode = j->options.mode && call / GPU_LAYERS % 2, wrong = 0, status;
    void *shards[GPU_LAYERS][SMALL_PARAMS];
    scatter c[GPU_LAYERS];

    for (int l = 0; l < GPU_LAYERS; l++) {
        bool argument = layers[l].desc.input == TIDE_INPUT_ARGUMENT;
        status = argument ? give_shards(g, &layers[l], shards[l]) : TIDE_OK;
        if (status == TIDE_OK)
            status = tide_all_gather(groups[l], argument ? (const void *const *)shards[l] : NULL, g->stream);
        if (status == TIDE_OK)
            status = tide_wait(groups[l], TIDE_READY, g->stream);
        if (gpu_tell(j, rank, status) != TIDE_OK)
            return status;
    }
    if (g->driver->StreamSynchronize(g->stream) != CU_OK)
        return TIDE_ERR_SYSTEM;
    if (gpu_tell(j, rank, tide_comm_check(j->comm[rank], NULL)) != TIDE_OK)
        return j->status[rank];
    for (int l = 0; l < GPU_LAYERS; l++)
        wrong += small_wrong_params(&layers[l], groups[l]) != 0;
    if (wrong && tide_comm_check(j->comm[rank], NULL) == TIDE_OK) /* after a failure bytes may be anything */
        j->wrong[rank]++;
    wrong = 0;
    for (int l = 0; l < GPU_LAYERS; l++) {
        status = begin_scatter(g, &layers[l], call + l, mode, &c[l]);
        if (status == TIDE_OK)
            status = mode ? tide_grads_stash(groups[l], &c[l].args, g->stream) : tide_slot_release(groups[l], g->stream);
        if (status == TIDE_OK)
            status = tide_reduce_scatter(groups[l], &c[l].args, g->stream);
        if (gpu_tell(j, rank, status) != TIDE_OK)
            return status;
    }
    for (int l = 0; l < GPU_LAYERS; l++)
        if (gpu_tell(j, rank, tide_wait(groups[l], TIDE_DONE, g->stream)) != TIDE_OK)
            return j->status[rank];
    if (g->driver->StreamSynchronize(g->stream) != CU_OK)
        return TIDE_ERR_SYSTEM;
    if (gpu_tell(j, rank, tide_comm_check(j->comm[rank], NULL)) != TIDE_OK)
        return j->status[rank];
    for (int l = 0; l < GPU_LAYERS; l++)
        wrong += small_wrong_output(&layers[l], c[l].call, c[l].present, 0.5f,
                                             c[l].args.accumulate ? c[l].before : 0.0f, c[l].out) != 0;
    if (wrong && tide_comm_check(j->comm[rank], NULL) == TIDE_OK)
        j->wrong[rank]++;
    return TIDE_OK;
}

int gpu_adopt(gpu *g, const small_layer *s, tide_group *group)
{
    void *shards[SMALL_PARAMS];
    int status = give_shards(g, s, shards);
    for (uint32_t p = 0; p < SMALL_PARAMS && status == TIDE_OK; p++)
        status = tide_shard_adopt(group, p, shards[p], small_shard(s, p) * 2, g->stream);
    return status;
}

static int run_rank(threads_rank *rank)
{
    gpu_job *j = rank->context;
    uint32_t r = rank->rank;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_group_desc descs[GPU_LAYERS];
    tide_group *groups[GPU_LAYERS];
    small_layer layers[GPU_LAYERS];
    int status;
    gpu *g = &j->gpus[r];
    cu_context ignored;
    bool ready = gpu_open(g, j, r) == 0; /* if not, the library is to say so */

    small_init(&layers[0], rank, "first", TIDE_BF16, TIDE_BF16, TIDE_BF16, 1);
    small_init(&layers[1], rank, "second", TIDE_BF16, TIDE_F32, TIDE_BF16, 2);
    layers[1].params[2].dims[0] = 35; /* unequal sizes on the same staging */
    desc.rank = r;
    desc.n_ranks = rank->n_ranks;
    desc.node_size = j->node_size;
    desc.fabric = j->fabric;
    desc.device = g->device;
    desc.allgather = threads_allgather;
    desc.allgather_context = rank;
    desc.options = &j->options;
    comm_pretended_host = j->machines ? 1 + r / j->node_size : 0;
    status = tide_comm_create(&desc, &j->comm[r]);
    if (status == TIDE_OK) {
        for (int l = 0; l < GPU_LAYERS; l++)
            descs[l] = layers[l].desc;
        status = tide_groups_create(j->comm[r], descs, GPU_LAYERS, groups);
    }
    gpu_tell(j, r, status);
    if (status == TIDE_OK) {
        tide_group_path path = {.size = sizeof path};
        tide_group_get_path(groups[0], &path);
        snprintf(j->path[r], sizeof j->path[r], "%s", path.path);
        snprintf(j->reason[r], sizeof j->reason[r], "%s", path.reason);
    }
    if (status == TIDE_OK && !ready)
        status = TIDE_ERR_MEMORY;
    if (status == TIDE_OK && j->act) {
        status = j->act(j, r, g, layers, groups);
    } else if (status == TIDE_OK) {
        status = gpu_tell(j, r, gpu_adopt(g, &layers[0], groups[0]));
        for (int i = 0; i < j->calls && status == TIDE_OK; i++)
            status = gpu_round(j, r, g, layers, groups, i * GPU_LAYERS);
    }
    j->failure[r] = (tide_failure)TIDE_FAILURE_INIT;
    if (j->comm[r])
        tide_comm_check(j->comm[r], &j->failure[r]);
    if (status != TIDE_OK && j->status[r] == TIDE_OK) /* the program's own driver call or memory */
        j->status[r] = status;
    if (j->comm[r] && status != TIDE_OK)
        tide_comm_abort(j->comm[r]);
    if (j->comm[r])
        gpu_tell(j, r, tide_comm_destroy(j->comm[r]));
    if (g->pushed)
        j->driver->CtxPop(&ignored);
    return 0;
}

int gpu_ranks_run(gpu_job *j, const cuda_driver *driver)
{
    j->driver = driver;
    return threads_run(j->n_ranks, run_rank, j);
}

void gpu_ranks_close(gpu_job *j)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        gpu *g = &j->gpus[r];
        const cuda_driver *driver = g->driver;
        cu_context ignored;
        bool pushed = g->retained && driver->CtxPush(g->context) == CU_OK;
        for (int i = 0; i < g->n_blocks; i++)
            driver->MemFree(g->blocks[i]);
        if (g->own)
            driver->StreamDestroy(g->own);
        if (pushed)
            driver->CtxPop(&ignored);
        if (g->retained)
            driver->PrimaryRelease(g->device);
    }
}

int gpu_gather(tide_comm *comm, tide_group *group, void *stream)
{
    int status = tide_all_gather(group, NULL, stream);
    if (status == TIDE_OK)
        status = tide_wait(group, TIDE_READY, stream);
    return status == TIDE_OK ? tide_comm_sync(comm) : status;
}
