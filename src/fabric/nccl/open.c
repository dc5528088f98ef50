/* open.c - opening the NCCL fabric. */
#include "fabric/nccl/nccl.h"

/* NCCL's network thread takes puts and signals from a ring for each peer and context; when one is full, who enqueues spins. */
enum { RING = 32 };

static int open_library(cuda_device *d)
{
    const nccl_library *library;
    nccl_device *n;
    int status = nccl_library_get(&library);

    if (status != TIDE_OK)
        return status;
    n = tide_calloc(1, sizeof *n);
    if (!n)
        return TIDE_ERR_MEMORY;
    n->library = library;
    pthread_mutex_init(&n->lock, NULL);
    d->extra = n;
    return TIDE_OK;
}

static void close_library(cuda_device *d)
{
    nccl_device *n = nccl_of(d);

    if (!n)
        return;
    pthread_mutex_destroy(&n->lock);
    tide_free(n);
    d->extra = NULL;
}

int fab_nccl_open(const fab_open *desc, fab_device **out)
{
    static const cuda_extension nccl = {.name = "nccl",
                                        .rail = &nccl_rail_verbs,
                                        .rdma = 1,
                                        .open = open_library,
                                        .poll = nccl_poll,
                                        .failed = nccl_failed,
                                        .close = close_library};
    int status = cuda_open_extended(desc, &nccl, out);

    if (status == TIDE_OK)
        (*out)->rail_ring = RING;
    return status;
}
