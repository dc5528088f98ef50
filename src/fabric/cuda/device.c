/* device.c - opening and closing a CUDA device. */
#include <stdlib.h>

#include "fabric/cuda/cuda.h"

static void cuda_close(fab_device *face);

static int cuda_agree(fab_device *face, int status)
{
    return fab_agree(&((cuda_device *)face)->open, status);
}

static int cuda_barrier(fab_device *face, const char *phase)
{
    return fab_peers_barrier(&((cuda_device *)face)->peers, phase);
}

static const fab_device_verbs cuda_verbs = FAB_DEVICE_VERBS(cuda);

/* ---- hardware queues ---------------------------------------------------------------------------- */

/* Streams of a process share CUDA_DEVICE_MAX_CONNECTIONS hardware queues a GPU. Two streams on one queue run one after
 * the other: behind a wait for a peer nothing else may stand. */
enum { MAX_GPUS = 64, DEFAULT_CONNECTIONS = 8, MAX_CONNECTIONS = 32 };
static pthread_mutex_t taken_lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t taken[MAX_GPUS];

static uint32_t connections(void)
{
    const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    long n = text ? strtol(text, NULL, 10) : 0;
    return n < 1 ? DEFAULT_CONNECTIONS : n > MAX_CONNECTIONS ? MAX_CONNECTIONS : (uint32_t)n;
}

int cuda_queues_take(cuda_device *d, uint32_t n)
{
    const char *unchecked = getenv("TIDE_CUDA_CONNECTIONS_UNCHECKED");
    uint32_t limit = connections(), before;
    int status = TIDE_OK;

    pthread_mutex_lock(&taken_lock);
    before = taken[d->gpu % MAX_GPUS];
    if (before + n > limit && !(unchecked && strcmp(unchecked, "1") == 0)) {
        status = tide_fail(TIDE_ERR_UNSUPPORTED,
                           "device %d: %u streams of this process' ranks, expected at most %u hardware queues: set "
                           "CUDA_DEVICE_MAX_CONNECTIONS=%d before CUDA starts",
                           d->open.device, before + n, limit, MAX_CONNECTIONS);
    } else {
        taken[d->gpu % MAX_GPUS] += n;
    }
    pthread_mutex_unlock(&taken_lock);
    return status;
}

void cuda_queues_give(cuda_device *d, uint32_t n)
{
    pthread_mutex_lock(&taken_lock);
    taken[d->gpu % MAX_GPUS] -= n;
    pthread_mutex_unlock(&taken_lock);
}

int cuda_rest(const cuda_device *d, const char *what)
{
    int64_t ns = 0;
    cu_result now;

    while ((now = cuda_query(d, d->rescue)) == CU_NOT_READY)
        cuda_nap(&ns);
    return cuda_check(d->driver, now, what);
}

int cuda_zero(const cuda_device *d, cu_ptr at, uint64_t bytes)
{
    int status = cuda_check(d->driver, d->driver->MemsetD8Async(at, 0, bytes, d->rescue), "cuMemsetD8Async");
    return status == TIDE_OK ? cuda_rest(d, "zeroing device memory") : status;
}

/* ---- opening ------------------------------------------------------------------------------------ */

/* What the device must have, by attribute. */
static int check_attributes(cuda_device *d)
{
    static const struct { int attribute; const char *what; } needed[] = {
        {CU_ATTR_VMM, "virtual memory management"},
        {CU_ATTR_HANDLE_FD, "memory handles as file descriptors"},
        {CU_ATTR_STREAM_WAIT_64, "64-bit stream memory operations"},
    };
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        int value = 0, status;
        status = cuda_check(d->driver, d->driver->DeviceGetAttribute(&value, needed[i].attribute, d->gpu),
                            "cuDeviceGetAttribute");
        if (status != TIDE_OK)
            return status;
        if (!value)
            return tide_fail(TIDE_ERR_UNSUPPORTED, "device %d: no %s", d->open.device, needed[i].what);
    }
    return TIDE_OK;
}

static int open_context(cuda_device *d)
{
    const cu_alloc_prop prop = cuda_arena_memory(d);
    int least = 0, greatest = 0, status;
    size_t granularity = 0;

    status = cuda_check(d->driver, d->driver->MemGetAllocationGranularity(&granularity, &prop, 0),
                        "cuMemGetAllocationGranularity");
    d->face.granularity = granularity;
    if (status == TIDE_OK)
        status = cuda_kernels_load(d->driver, d->context, &d->kernels);
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->CtxGetStreamPriorityRange(&least, &greatest),
                            "cuCtxGetStreamPriorityRange");
    if (status == TIDE_OK)
        status = cuda_queues_take(d, 1);
    if (status == TIDE_OK) {
        status = cuda_check(d->driver, d->driver->StreamCreate(&d->rescue, CU_STREAM_NON_BLOCKING, greatest),
                            "cuStreamCreateWithPriority");
        if (status != TIDE_OK)
            cuda_queues_give(d, 1);
    }
    if (status == TIDE_OK)
        status = cuda_check(d->driver,
                            d->driver->MemHostAlloc((void **)&d->read_back, CUDA_READ_BACK * sizeof *d->read_back,
                                                    CU_HOSTALLOC_PORTABLE),
                            "cuMemHostAlloc");
    return status;
}

static int open_local(cuda_device *d, const fab_open *desc, const cuda_extension *extension)
{
    int count = 0, status;

    d->open = *desc;
    status = fab_peers_init(&d->peers, &d->open, sizeof(cuda_page), &cuda_peers_hooks, d);
    d->extension = extension;
    d->face = (fab_device){.verbs = &cuda_verbs, .rail = extension->rail, .name = extension->name, .rank = desc->rank,
                           .n_ranks = desc->n_ranks, .node_size = desc->node_size,
                           .rail_mapped = extension->rail_mapped};
    if (status == TIDE_OK && (!(d->same_gpu = tide_calloc(desc->n_ranks, 1)) ||
                              !(d->gone = tide_calloc(desc->n_ranks, sizeof *d->gone))))
        status = TIDE_ERR_MEMORY;
    if (status == TIDE_OK)
        status = cuda_driver_get(&d->driver);
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->DeviceGetCount(&count), "cuDeviceGetCount");
    if (status == TIDE_OK && (desc->device < 0 || desc->device >= count))
        status = tide_fail(TIDE_ERR_ARGUMENT, "device: %d is not in 0..%d", desc->device, count - 1);
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->DeviceGet(&d->gpu, desc->device), "cuDeviceGet");
    if (status == TIDE_OK)
        status = check_attributes(d);
    if (status == TIDE_OK && extension->rdma)
        status = cuda_check(d->driver, d->driver->DeviceGetAttribute(&d->rdma, CU_ATTR_RDMA_VMM, d->gpu),
                            "cuDeviceGetAttribute");
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->PrimaryRetain(&d->context, d->gpu), "cuDevicePrimaryCtxRetain");
    d->retained = status == TIDE_OK;
    if (status == TIDE_OK)
        status = cuda_push(d);
    if (status == TIDE_OK) {
        status = open_context(d);
        cuda_pop(d);
    }
    return status == TIDE_OK && extension->open ? extension->open(d) : status;
}

/* A GPU that this process does not see is found out about when its memory is mapped. */
static int check_peer(cuda_device *d, uint32_t rank, const cu_uuid *theirs)
{
    int count = 0, can = 1;

    if (d->same_gpu[rank] || d->driver->DeviceGetCount(&count) != CU_OK)
        return TIDE_OK;
    for (int i = 0; i < count; i++) {
        cu_dev gpu;
        cu_uuid uuid;
        if (d->driver->DeviceGet(&gpu, i) != CU_OK || d->driver->DeviceGetUuid(&uuid, gpu) != CU_OK ||
            memcmp(&uuid, theirs, sizeof uuid) != 0)
            continue;
        if (d->driver->DeviceCanAccessPeer(&can, d->gpu, gpu) == CU_OK && !can)
            return tide_fail(TIDE_ERR_UNSUPPORTED, "device %d of rank %u cannot access device %d of rank %u",
                             d->open.device, d->face.rank, i, rank);
    }
    return TIDE_OK;
}

static int meet_gpus(cuda_device *d)
{
    uint32_t n = d->face.n_ranks;
    cu_uuid own, *all = tide_calloc(n, sizeof *all);
    int status = all ? TIDE_OK : TIDE_ERR_MEMORY;

    memset(&own, 0, sizeof own);
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->DeviceGetUuid(&own, d->gpu), "cuDeviceGetUuid");
    status = fab_agree(&d->open, status);
    if (status == TIDE_OK)
        status = fab_allgather(&d->open, &own, all, sizeof own);
    for (uint32_t r = 0; status == TIDE_OK && r < n; r++) {
        d->same_gpu[r] = memcmp(&own, &all[r], sizeof own) == 0;
        status = check_peer(d, r, &all[r]);
    }
    tide_free(all);
    return status;
}

int fab_cuda_open(const fab_open *desc, fab_device **out)
{
    static const cuda_extension none = {.name = "cuda", .rail = &cuda_rail_verbs, .rail_mapped = 1};
    return cuda_open_extended(desc, &none, out);
}

int cuda_open_extended(const fab_open *desc, const cuda_extension *extension, fab_device **out)
{
    cuda_device *d;
    int status = fab_check_fork();

    *out = NULL;
    if (status != TIDE_OK)
        return status;
    d = tide_calloc(1, sizeof *d);
    if (d)
        pthread_mutex_init(&d->lock, NULL);
    status = fab_peers_meet(desc, d ? &d->peers : NULL, d ? open_local(d, desc, extension) : TIDE_ERR_MEMORY);
    if (status == TIDE_OK) {
        status = meet_gpus(d);
        if (status == TIDE_OK)
            status = fab_peers_watch(&d->peers);
        status = fab_agree(desc, status);
        if (status == TIDE_OK)
            status = cuda_multicast_settle(d);
        if (status != TIDE_OK)
            fab_peers_leave(&d->peers);
    }
    if (status != TIDE_OK) {
        if (d)
            cuda_close(&d->face);
        return status;
    }
    *out = &d->face;
    return TIDE_OK;
}

static void cuda_close(fab_device *face)
{
    cuda_device *d = (cuda_device *)face;

    if (!d || atomic_load(&fab_forked_flag)) /* a child has no threads to stop, and no CUDA */
        return;
    fab_peers_leave(&d->peers);
    fab_peers_clear(&d->peers);
    cuda_settled(d);
    if (d->extension && d->extension->close) /* after the watch */
        d->extension->close(d);
    if (d->retained && cuda_push_to_free(d)) {
        if (d->rescue) {
            d->driver->StreamDestroy(d->rescue);
            cuda_queues_give(d, 1);
        }
        cuda_free_host(d, d->read_back);
        cuda_kernels_unload(d->kernels, cuda_gpu_given_up(d->gpu));
        cuda_pop(d);
    }
    if (d->retained && !cuda_gpu_given_up(d->gpu))
        d->driver->PrimaryRelease(d->gpu);
    pthread_mutex_destroy(&d->lock);
    tide_free(d->gone);
    tide_free(d->same_gpu);
    tide_free(d);
}
