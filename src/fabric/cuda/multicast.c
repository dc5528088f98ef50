/*
 * multicast.c - how a multicast object comes about, and how it goes:
 *
 *     every rank     may it be: knob, environment, driver, GPU          agreed when the device is opened
 *     local rank 0   creates the object; the others import it           agreed
 *     every rank     adds its GPU                                       agreed: the team is complete
 *     every rank     binds its arena, maps the object                   agreed: all memory is there
 *     every rank     writes a word to all, looks for everybody's        agreed: it works
 *     ...
 *     every rank     unmaps, unbinds, releases                          once nobody writes any more
 *
 * The driver makes a bind or a map wait for devices that are missing; so nobody gets there before all have been added.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fabric/cuda/cuda.h"

enum { REST_MS = 10000, WORDS_BYTES = TIDE_MAX_LOCAL * (int)sizeof(uint64_t) };
_Static_assert((int)TIDE_MAX_LOCAL <= (int)CUDA_READ_BACK, "everybody's word is read back in one go");

struct cuda_multicast {
    cuda_device *device;
    const cuda_driver *driver;
    cu_dev gpu;
    cu_handle handle;
    cu_ptr base;
    uint64_t bytes;
    int created, reserved, mapped, bound;
};

/* ---- whether ------------------------------------------------------------------------------------ */

/* A variable by which a machine's other libraries are told to keep off multicast. */
static int switched_off(void)
{
    const char *nccl = getenv("NCCL_NVLS_ENABLE"), *torch = getenv("TORCH_SYMM_MEM_DISABLE_MULTICAST");

    if (nccl && nccl[0] && strtol(nccl, NULL, 10) == 0)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "NCCL_NVLS_ENABLE=%.20s: multicast is switched off in this environment", nccl);
    if (torch && torch[0] && strcmp(torch, "0") != 0)
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "TORCH_SYMM_MEM_DISABLE_MULTICAST=%.20s: multicast is switched off in this environment", torch);
    return TIDE_OK;
}

int cuda_multicast_allowed(const cuda_driver *driver, cu_dev gpu)
{
    int value = 0, status = switched_off();

    if (status != TIDE_OK)
        return status;
    if (!driver->MulticastCreate || !driver->MulticastAddDevice || !driver->MulticastBindMem || !driver->MulticastUnbind ||
        !driver->MulticastGetGranularity)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "the driver has no multicast");
    if (driver->DeviceGetAttribute(&value, CU_ATTR_MULTICAST, gpu) != CU_OK || !value)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "the device has no multicast");
    return TIDE_OK;
}

static uint32_t first_of_node(const cuda_device *d)
{
    return d->face.rank - d->face.rank % d->face.node_size;
}

static int may(const cuda_device *d)
{
    uint32_t first = first_of_node(d);

    if (d->peers.options.multicast != 1)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "the knob multicast is not 1");
    if (d->face.node_size == 1)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "one rank a node has nobody to write to");
    for (uint32_t r = first; r < first + d->face.node_size; r++)
        if (r != d->face.rank && d->same_gpu[r])
            return tide_fail(TIDE_ERR_UNSUPPORTED, "ranks %u and %u share a device", d->face.rank < r ? d->face.rank : r,
                             d->face.rank < r ? r : d->face.rank);
    return cuda_multicast_allowed(d->driver, d->gpu);
}

/* C  An agreed refusal: the device does without, and all ranks say so in rank 0's words; in rank 1's if it was rank 0 that
 * refused, for rank 1 names it. Other errors stay. */
static int do_without(cuda_device *d, int status)
{
    char own[sizeof d->no_multicast] = {0}, *all;

    if (status != TIDE_ERR_UNSUPPORTED)
        return status;
    snprintf(own, sizeof own, "%s", tide_last_error());
    d->face.multicast = 0;
    all = tide_calloc(d->face.n_ranks, sizeof own);
    status = fab_agree(&d->open, all ? TIDE_OK : TIDE_ERR_MEMORY);
    if (status == TIDE_OK)
        status = fab_allgather(&d->open, own, all, sizeof own);
    if (status == TIDE_OK) {
        memcpy(d->no_multicast, d->face.n_ranks > 1 && strncmp(all, "rank ", 5) != 0 ? all + sizeof own : all, sizeof own);
        d->no_multicast[sizeof own - 1] = '\0';
        d->face.no_multicast = d->no_multicast;
        tide_log(1, "rank %u: no multicast: %s", d->face.rank, d->no_multicast);
    }
    tide_free(all);
    return status;
}

int cuda_multicast_settle(cuda_device *d)
{
    int status;

    if (d->peers.options.multicast != 1) /* on all ranks alike */
        return TIDE_OK;
    status = fab_agree(&d->open, may(d));
    d->face.multicast = status == TIDE_OK;
    return do_without(d, status);
}

/* ---- steps -------------------------------------------------------------------------------------- */

/* What the driver does not do is no reason to fail: it goes without. */
static int step(const cuda_device *d, cu_result result, const char *what)
{
    if (result == CU_OK)
        return TIDE_OK;
    cuda_check(d->driver, result, what);
    return tide_fail(TIDE_ERR_UNSUPPORTED, "%.180s", tide_last_error());
}

static cu_multicast_prop team_of(const cuda_device *d, uint64_t bytes)
{
    return (cu_multicast_prop){.n_devices = d->face.node_size, .size = bytes, .handle_types = CU_HANDLE_FD};
}

/* One that cannot be asked for is found out about when the object is made. */
uint64_t cuda_multicast_granularity(const cuda_device *d, uint64_t bytes)
{
    const cu_multicast_prop prop = team_of(d, tide_align_up(bytes, d->face.granularity));
    size_t granularity = 1;

    if (!d->face.multicast || d->driver->MulticastGetGranularity(&granularity, &prop, CU_MULTICAST_MINIMUM) != CU_OK)
        return 1;
    return granularity ? granularity : 1;
}

/* The only place where a multicast object is created: what allows it is asked once more. */
static int create_object(const cuda_device *d, cuda_multicast *m, int *fd)
{
    const cu_multicast_prop prop = team_of(d, m->bytes);
    int status = may(d);

    if (status == TIDE_OK)
        status = step(d, d->driver->MulticastCreate(&m->handle, &prop), "cuMulticastCreate");
    m->created = status == TIDE_OK;
    if (status == TIDE_OK)
        status = step(d, d->driver->MemExport(fd, m->handle, CU_HANDLE_FD, 0), "cuMemExportToShareableHandle");
    if (status != TIDE_OK)
        *fd = -1;
    return status;
}

/* C  Local rank 0 gives the others a descriptor of the object. An exchange goes both ways: what it gets for that, one of the
 * other's arena, is of no use. */
static int hand_round(cuda_device *d, cuda_multicast *m, int arena)
{
    uint32_t n = d->face.n_ranks, first = first_of_node(d);
    bool root = d->face.rank == first;
    uint8_t *peers = tide_calloc(n, 1);
    int *fds = tide_calloc(n, sizeof *fds), own = -1;
    int status = fab_agree(&d->open, peers && fds ? TIDE_OK : TIDE_ERR_MEMORY);

    if (status == TIDE_OK) {
        for (uint32_t r = first; r < first + d->face.node_size; r++)
            peers[r] = r != d->face.rank && (root || r == first);
        if (root)
            status = create_object(d, m, &own);
        status = fab_handles_exchange(&d->open, status, peers, root ? own : arena, fds, NULL);
    }
    if (status == TIDE_OK && !root) {
        status = step(d, d->driver->MemImport(&m->handle, (void *)(intptr_t)fds[first], CU_HANDLE_FD),
                      "cuMemImportFromShareableHandle of a multicast object");
        m->created = status == TIDE_OK;
    }
    for (uint32_t r = 0; fds && r < n; r++)
        if (peers && peers[r] && fds[r] >= 0)
            close(fds[r]);
    if (own >= 0)
        close(own);
    tide_free(fds);
    tide_free(peers);
    return status;
}

static int bind_and_map(const cuda_device *d, cuda_multicast *m, const cuda_memory *own)
{
    const cu_access access = {{CU_LOCATION_DEVICE, d->gpu}, CU_ACCESS_READ_WRITE};
    int status =
        step(d, d->driver->MulticastBindMem(m->handle, 0, own->handle, 0, m->bytes, 0), "cuMulticastBindMem");

    m->bound = status == TIDE_OK;
    if (status == TIDE_OK) {
        status = step(d, d->driver->MemAddressReserve(&m->base, m->bytes, 0, 0, 0), "cuMemAddressReserve");
        m->reserved = status == TIDE_OK;
    }
    if (status == TIDE_OK) {
        status = step(d, d->driver->MemMap(m->base, m->bytes, 0, m->handle, 0), "cuMemMap of a multicast object");
        m->mapped = status == TIDE_OK;
    }
    if (status == TIDE_OK)
        status = step(d, d->driver->MemSetAccess(m->base, m->bytes, &access, 1), "cuMemSetAccess of a multicast object");
    return status;
}

/* ---- a word of everybody ------------------------------------------------------------------------ */

/* From a word of my own memory, behind everybody's. */
static int write_word(const cuda_device *d, const cuda_multicast *m, const cuda_memory *own)
{
    uint32_t local = d->face.rank % d->face.node_size;
    cu_ptr from = own->base + WORDS_BYTES;
    int status = step(d, d->driver->MemsetD8Async(from, (unsigned char)(local + 1), sizeof(uint64_t), d->rescue),
                      "cuMemsetD8Async");

    if (status == TIDE_OK)
        status = step(d, d->driver->MemcpyAsync(m->base + local * sizeof(uint64_t), from, sizeof(uint64_t), d->rescue),
                      "cuMemcpyAsync to a multicast address");
    if (status == TIDE_OK && cuda_rest(d, "a multicast word") != TIDE_OK)
        status = tide_fail(TIDE_ERR_UNSUPPORTED, "%.180s", tide_last_error());
    return status;
}

static int look_for_words(cuda_device *d, const cuda_memory *own)
{
    const uint64_t ones = UINT64_C(0x0101010101010101);
    int status;

    pthread_mutex_lock(&d->lock); /* of what is read back */
    status = step(d, d->driver->MemcpyDtoHAsync(d->read_back, own->base, d->face.node_size * sizeof(uint64_t), d->rescue),
                  "cuMemcpyDtoHAsync");
    if (status == TIDE_OK && cuda_rest(d, "multicast words") != TIDE_OK)
        status = tide_fail(TIDE_ERR_UNSUPPORTED, "%.180s", tide_last_error());
    for (uint32_t i = 0; i < d->face.node_size && status == TIDE_OK; i++)
        if (d->read_back[i] != ones * (i + 1))
            status = tide_fail(TIDE_ERR_UNSUPPORTED, "what rank %u wrote to all did not come to rank %u",
                               first_of_node(d) + i, d->face.rank);
    pthread_mutex_unlock(&d->lock);
    return status;
}

/* C  Leaves the memory zeroed. */
static int try_out(cuda_device *d, const cuda_multicast *m, const cuda_memory *own)
{
    int status = fab_agree(&d->open, write_word(d, m, own));

    if (status == TIDE_OK)
        status = fab_agree(&d->open, look_for_words(d, own));
    if (status == TIDE_OK)
        status = fab_agree(&d->open, cuda_zero(d, own->base, WORDS_BYTES + sizeof(uint64_t)));
    return status;
}

/* ---- from beginning to end ---------------------------------------------------------------------- */

/* Whether nobody in the node writes through the object any more: each has come to rest, has left, or is dead. */
static bool node_at_rest(const cuda_device *d)
{
    int64_t ns = 0, end = tide_now_ns() + (int64_t)REST_MS * 1000000;
    uint32_t first = first_of_node(d);

    for (uint32_t r = first; r < first + d->face.node_size; r++) {
        const cuda_page *page = cuda_rank_page(d, r);
        while (!atomic_load(&page->at_rest) && !atomic_load(&page->page.closed) && !atomic_load(&d->gone[r])) {
            if (tide_now_ns() >= end || atomic_load(&d->restless))
                return false;
            cuda_nap(&ns);
        }
    }
    return true;
}

static void drop(cuda_multicast *m, bool look)
{
    cuda_device *d = m ? m->device : NULL;
    bool pushed;

    if (!m)
        return;
    if (m->mapped && (cuda_gpu_given_up(m->gpu) || (look && !node_at_rest(d)))) {
        tide_log(0, "rank %u: a multicast object is left as it is: not all streams have come to rest", d->face.rank);
        tide_free(m);
        return;
    }
    pushed = cuda_push_to_free(d);
    if (m->mapped)
        m->driver->MemUnmap(m->base, m->bytes);
    if (m->reserved)
        m->driver->MemAddressFree(m->base, m->bytes);
    if (m->bound && m->driver->MulticastUnbind(m->handle, m->gpu, 0, m->bytes) != CU_OK)
        tide_log(0, "rank %u: cuMulticastUnbind has failed", d->face.rank);
    if (m->created)
        m->driver->MemRelease(m->handle);
    if (pushed)
        cuda_pop(d);
    tide_free(m);
}

int cuda_multicast_create(cuda_device *d, const cuda_memory *own, int fd, cuda_multicast **out)
{
    cuda_multicast *m = NULL;
    int status = TIDE_OK;

    *out = NULL;
    if (!d->face.multicast)
        return TIDE_OK;
    atomic_store(&cuda_rank_page(d, d->face.rank)->at_rest, 0);
    m = tide_calloc(1, sizeof *m);
    status = fab_agree(&d->open, m ? TIDE_OK : TIDE_ERR_MEMORY);
    if (status == TIDE_OK) {
        *m = (cuda_multicast){.device = d, .driver = d->driver, .gpu = d->gpu, .bytes = own->bytes};
        status = hand_round(d, m, fd);
        if (status == TIDE_OK)
            status = step(d, d->driver->MulticastAddDevice(m->handle, d->gpu), "cuMulticastAddDevice");
        status = fab_agree(&d->open, status);
    }
    if (status == TIDE_OK)
        status = fab_agree(&d->open, bind_and_map(d, m, own));
    if (status == TIDE_OK)
        status = try_out(d, m, own);
    if (status == TIDE_OK) {
        *out = m;
        return TIDE_OK;
    }
    status = do_without(d, status); /* keeps the reason before anything else can fail */
    atomic_store(&cuda_rank_page(d, d->face.rank)->at_rest, 1);
    drop(m, status != TIDE_OK); /* agreed: nobody is writing */
    if (status == TIDE_OK) /* written to by halves, perhaps */
        status = cuda_zero(d, own->base, WORDS_BYTES + sizeof(uint64_t));
    return fab_agree(&d->open, status);
}

void *cuda_multicast_base(const cuda_multicast *m)
{
    return m ? (void *)(uintptr_t)m->base : NULL;
}

void cuda_multicast_drop(cuda_multicast *m)
{
    drop(m, m && fab_peers_failed(&m->device->peers)); /* without a failure all have met after their last call */
}
