/* arena.c - device memory that the ranks of a machine map: allocations under a file descriptor, counted. */
#include <unistd.h>

#include "fabric/cuda/cuda.h"

/* ---- one rank's memory -------------------------------------------------------------------------- */

cu_alloc_prop cuda_arena_memory(const cuda_device *d)
{
    return (cu_alloc_prop){.type = CU_ALLOC_PINNED,
                           .handle_types = CU_HANDLE_FD,
                           .location = {CU_LOCATION_DEVICE, d->gpu},
                           .flags = {.rdma = d->rdma != 0}};
}

/* Also while the process exits, when the driver may refuse everything: then it has freed everything. */
static void memory_drop(cuda_memory *m)
{
    const cuda_driver *driver;

    if (!m || atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    driver = m->driver;
    if (m->retained) {
        cu_context ignored;
        int pushed = driver->CtxPush(m->context) == CU_OK || driver->CtxPush(m->context) == CU_OK;
        if (m->mapped)
            driver->MemUnmap(m->base, m->bytes);
        if (m->reserved)
            driver->MemAddressFree(m->base, m->bytes);
        if (m->created)
            driver->MemRelease(m->handle);
        if (pushed)
            driver->CtxPop(&ignored);
        driver->PrimaryRelease(m->gpu);
    }
    tide_free(m);
}

/* Retains the context of its own: an arena may outlive the device. */
static int memory_new(const cuda_device *d, uint64_t bytes, cuda_memory **out)
{
    cuda_memory *m = tide_calloc(1, sizeof *m);
    int status;

    *out = NULL;
    if (!m)
        return TIDE_ERR_MEMORY;
    m->refs = 1;
    m->driver = d->driver;
    m->gpu = d->gpu;
    m->bytes = bytes;
    status = cuda_check(d->driver, d->driver->PrimaryRetain(&m->context, d->gpu), "cuDevicePrimaryCtxRetain");
    m->retained = status == TIDE_OK;
    if (status == TIDE_OK)
        *out = m;
    else
        memory_drop(m);
    return status;
}

/* Once a GPU: the driver refuses what is allowed already. Ranks of this process that share a GPU may come here at the same
 * time; nobody uses the memory before all have agreed. */
static int allow(const cuda_device *d, cuda_memory *m)
{
    const cu_access access = {{CU_LOCATION_DEVICE, d->gpu}, CU_ACCESS_READ_WRITE};
    const uint64_t bit = UINT64_C(1) << d->gpu;

    if (atomic_fetch_or(&m->allowed, bit) & bit)
        return TIDE_OK;
    return cuda_check(d->driver, d->driver->MemSetAccess(m->base, m->bytes, &access, 1), "cuMemSetAccess");
}

/* The handle is there: addresses for it, which this GPU may use. */
static int map(const cuda_device *d, cuda_memory *m)
{
    int status = cuda_check(d->driver, d->driver->MemAddressReserve(&m->base, m->bytes, 0, 0, 0), "cuMemAddressReserve");

    m->reserved = status == TIDE_OK;
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->MemMap(m->base, m->bytes, 0, m->handle, 0), "cuMemMap");
    m->mapped = m->reserved && status == TIDE_OK;
    return status == TIDE_OK ? allow(d, m) : status;
}

static int create_own(const cuda_device *d, uint64_t bytes, cuda_memory **out, int *fd)
{
    const cu_alloc_prop prop = cuda_arena_memory(d);
    uint64_t granularity = tide_max_u64(d->face.granularity, cuda_multicast_granularity(d, bytes)); /* powers of two */
    int status = memory_new(d, tide_align_up(tide_max_u64(bytes, 1), granularity), out);

    if (status != TIDE_OK)
        return status;
    status = cuda_check(d->driver, d->driver->MemCreate(&(*out)->handle, (*out)->bytes, &prop, 0), "cuMemCreate");
    if (status != TIDE_OK)
        return tide_fail(status, "device memory: %llu bytes on device %d: %.160s", (unsigned long long)(*out)->bytes,
                         d->open.device, tide_last_error());
    (*out)->created = 1;
    status = map(d, *out);
    if (status == TIDE_OK)
        status = cuda_zero(d, (*out)->base, (*out)->bytes);
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->MemExport(fd, (*out)->handle, CU_HANDLE_FD, 0),
                            "cuMemExportToShareableHandle");
    if (status != TIDE_OK)
        *fd = -1;
    return status;
}

/* All arenas of a call are of one size. */
static int import_peer(const cuda_device *d, uint64_t bytes, int fd, cuda_memory **out)
{
    int status = memory_new(d, bytes, out);

    if (status != TIDE_OK)
        return status;
    status = cuda_check(d->driver, d->driver->MemImport(&(*out)->handle, (void *)(intptr_t)fd, CU_HANDLE_FD),
                        "cuMemImportFromShareableHandle");
    (*out)->created = status == TIDE_OK;
    return status == TIDE_OK ? map(d, *out) : status;
}

/* ---- arenas ------------------------------------------------------------------------------------- */

static void arena_free(cuda_arena *a)
{
    cuda_multicast_drop(a->multicast);
    for (uint32_t r = 0; a->memory && r < a->n_ranks; r++)
        memory_drop(a->memory[r]);
    tide_free(a->face.base);
    tide_free(a->memory);
    tide_free(a);
}

/* The ranks of this process share the owner's mapping, the others get one each. */
static int map_peers(cuda_device *d, cuda_arena *a, uint64_t bytes, cuda_memory *const *here, const int *fds)
{
    int status = TIDE_OK;
    for (uint32_t r = 0; r < a->n_ranks && status == TIDE_OK; r++) {
        if (here[r]) {
            a->memory[r] = here[r];
            atomic_fetch_add(&here[r]->refs, 1);
            status = allow(d, here[r]);
        } else if (fds[r] >= 0) {
            status = import_peer(d, bytes, fds[r], &a->memory[r]);
        }
        if (status != TIDE_OK)
            status = tide_fail(status, "arena of rank %u: %.200s", r, tide_last_error());
    }
    return status;
}

/* Every mapped peer gets a word of mine by a stream operation. Context current. */
static int write_words(const cuda_device *d, const cuda_arena *a)
{
    if (d->face.n_ranks * sizeof(uint64_t) > a->memory[a->rank]->bytes)
        return 0;
    for (uint32_t r = 0; r < a->n_ranks; r++) {
        cu_stream_op op;
        if (!a->memory[r] || r == a->rank)
            continue;
        memset(&op, 0, sizeof op);
        op.at.operation = CU_OP_WRITE_64;
        op.at.address = a->memory[r]->base + a->rank * sizeof(uint64_t);
        op.at.value = a->rank + 1;
        if (d->driver->StreamBatchMemOp(d->rescue, 1, &op, 0) != CU_OK)
            return 0;
    }
    return cuda_rest(d, "words of peers") == TIDE_OK;
}

/* Whether mine have come from all of them. */
static int words_came(cuda_device *d, const cuda_arena *a)
{
    int came = 1;

    pthread_mutex_lock(&d->lock); /* of what is read back */
    for (uint32_t r = 0; r < a->n_ranks && came; r++) {
        if (!a->memory[r] || r == a->rank)
            continue;
        if (d->driver->MemcpyDtoHAsync(d->read_back, a->memory[a->rank]->base + r * sizeof(uint64_t), sizeof *d->read_back,
                                       d->rescue) != CU_OK ||
            cuda_rest(d, "words of peers") != TIDE_OK || *d->read_back != r + 1)
            came = 0;
    }
    pthread_mutex_unlock(&d->lock);
    return came;
}

/* C  Not every driver writes a word of another GPU by a stream operation, and none says so: it is tried. Then a post is
 * that; else it is a copy. Leaves the memory zeroed. Context current. */
static int try_words(cuda_device *d, const cuda_arena *a)
{
    uint8_t *all = tide_calloc(d->face.n_ranks, 1), own;
    int status = fab_agree(&d->open, all ? TIDE_OK : TIDE_ERR_MEMORY), direct = 1;

    if (status == TIDE_OK) {
        int written = write_words(d, a);
        status = fab_agree(&d->open, TIDE_OK); /* all are there, or will not come */
        own = status == TIDE_OK && written && words_came(d, a);
        if (status == TIDE_OK)
            status = cuda_zero(d, a->memory[a->rank]->base,
                               tide_min_u64(d->face.n_ranks * sizeof(uint64_t), a->memory[a->rank]->bytes));
        status = fab_agree(&d->open, status);
        if (status == TIDE_OK)
            status = fab_allgather(&d->open, &own, all, sizeof own);
        for (uint32_t r = 0; status == TIDE_OK && r < d->face.n_ranks; r++)
            direct &= all[r];
        d->direct = direct;
    }
    tide_free(all);
    return status;
}

int cuda_arena_create(fab_device *face, uint64_t bytes, const uint8_t *peers, fab_arena **out)
{
    cuda_device *d = (cuda_device *)face;
    uint32_t n = face->n_ranks;
    cuda_arena *a = tide_calloc(1, sizeof *a);
    cuda_memory *own = NULL, **here = tide_calloc(n, sizeof *here);
    int *fds = tide_calloc(n, sizeof *fds), fd = -1, pushed = 0;
    int status = a && here && fds ? TIDE_OK : TIDE_ERR_MEMORY;

    *out = NULL;
    if (status == TIDE_OK) {
        a->refs = 1;
        a->rank = face->rank;
        a->n_ranks = n;
        a->memory = tide_calloc(n, sizeof(cuda_memory *));
        a->face.base = tide_calloc(n, sizeof(void *));
        status = a->memory && a->face.base ? cuda_push(d) : TIDE_ERR_MEMORY;
        pushed = status == TIDE_OK;
    }
    if (status == TIDE_OK)
        status = create_own(d, bytes, &own, &fd);
    status = fab_objects_exchange(&d->open, status, d->peers.process, own, fd, peers, (void **)here, fds, NULL);
    if (status == TIDE_OK) {
        status = map_peers(d, a, own->bytes, here, fds);
        for (uint32_t r = 0; r < n; r++)
            if (fds[r] >= 0)
                close(fds[r]);
        status = fab_agree(&d->open, status);
        if (status == TIDE_OK)
            status = try_words(d, a);
        if (status == TIDE_OK)
            status = cuda_multicast_create(d, own, fd, &a->multicast);
    }
    if (fd >= 0)
        close(fd);
    memory_drop(own); /* memory[rank] holds it now */
    if (pushed)
        cuda_pop(d);
    if (status == TIDE_OK) {
        for (uint32_t r = 0; r < n; r++)
            a->face.base[r] = a->memory[r] ? (void *)(uintptr_t)a->memory[r]->base : NULL;
        a->face.multicast = cuda_multicast_base(a->multicast);
        a->face.bytes = bytes;
        a->face.allocated = a->memory[a->rank]->bytes;
        *out = &a->face;
    } else if (a) {
        arena_free(a);
    }
    tide_free(fds);
    tide_free(here);
    return status;
}

void cuda_arena_hold(fab_arena *face)
{
    atomic_fetch_add(&((cuda_arena *)face)->refs, 1);
}

void cuda_arena_drop(fab_arena *face)
{
    cuda_arena *a = (cuda_arena *)face;
    if (a && atomic_fetch_sub(&a->refs, 1) == 1)
        arena_free(a);
}

void cuda_arena_trim(fab_arena *face, uint32_t keep)
{
    cuda_arena *a = (cuda_arena *)face;

    cuda_multicast_drop(a->multicast);
    a->multicast = NULL;
    a->face.multicast = NULL;
    for (uint32_t r = 0; r < a->n_ranks; r++) {
        if (r == a->rank || r == keep)
            continue;
        memory_drop(a->memory[r]);
        a->memory[r] = NULL;
        a->face.base[r] = NULL;
    }
}
