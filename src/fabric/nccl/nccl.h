/*
 * nccl.h - the NCCL fabric: the CUDA device with a rail between nodes of NCCL's one-sided transfers.
 *
 * A lane of an engine is a communicator of the M ranks with one local index, with a window over their arenas. There is no
 * communicator of all ranks: within a node the CUDA device maps memory itself.
 */
#ifndef TIDE_NCCL_H
#define TIDE_NCCL_H

#include "fabric/cuda/cuda.h"
#include "fabric/nccl/library.h"

/* What a device has of NCCL; cuda_device.extra. */
typedef struct nccl_device {
    const nccl_library *library;
    pthread_mutex_t lock; /* rails; comes before a rail's own */
    fab_rail *rails;
    uint64_t set_ups;     /* rails whose making has begun, alike on all ranks */
} nccl_device;

static inline nccl_device *nccl_of(const cuda_device *d)
{
    return d->extra;
}

/* ---- calls that may never return (setup.c) ------------------------------------------------------- */

enum nccl_function {
    NCCL_DO_ID,
    NCCL_DO_INIT,
    NCCL_DO_QUERY,
    NCCL_DO_REGISTER,
    NCCL_DO_DEREGISTER,
    NCCL_DO_FINALIZE,
    NCCL_DO_DESTROY,
    NCCL_DO_ABORT
};

/* What a call takes and gives. */
typedef struct nccl_call {
    enum nccl_function function;
    nccl_comm comm;
    nccl_window window;
    nccl_id id;
    nccl_config config;
    nccl_properties properties;
    int n_ranks, rank;
    void *base;
    size_t bytes;
    nccl_result result;
} nccl_call;

/* In a thread of its own, with the device's context. Whoever has waited long enough leaves it: then the thread, and what the
 * call holds, are given up; a communicator that it still makes is aborted by the thread. */
typedef struct nccl_job nccl_job;
int nccl_begin(const cuda_device *d, const nccl_call *call, nccl_job **out);
/* Waits for at most limit_ns; true: it has ended, and `call` is what it has become. */
bool nccl_ended(nccl_job *job, int64_t limit_ns, nccl_call *call);
void nccl_leave(nccl_job *job); /* NULL is fine */

/* Makes the call within the device's deadline. set_up: number of the rail that is being made (0: none): when a rank of this
 * rail has said that it will not finish making it, there is no sense in waiting; then *alone, and TIDE_OK, since that
 * rank knows why. Errors name lane and function. A failure of the device ends it as well. */
int nccl_do(cuda_device *d, nccl_call *call, const char *lane, uint64_t set_up, bool *alone);

/* ---- rail.c -------------------------------------------------------------------------------------- */

extern const fab_rail_verbs nccl_rail_verbs;
void nccl_poll(cuda_device *d);
void nccl_failed(cuda_device *d);

#endif
