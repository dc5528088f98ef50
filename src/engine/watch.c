/* watch.c - failures as the engine sees them. Deadlines and deaths are found by the device, which knows what waits. */
#include <stdio.h>

#include "engine/state.h"

int engine_failure(const fab_device *device, tide_failure *out)
{
    /* looking may adopt a failure that another rank has announced; the device does its own locking */
    return device->verbs->failure((fab_device *)(uintptr_t)device, out);
}

int engine_abort(fab_device *device)
{
    tide_failure f = TIDE_FAILURE_INIT;
    int status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    f.code = TIDE_ERR_ABORTED;
    f.rank = device->rank;
    snprintf(f.phase, sizeof f.phase, "abort");
    snprintf(f.text, sizeof f.text, "rank %u aborted the communicator", device->rank);
    device->verbs->fail(device, &f);
    return TIDE_OK;
}

/* A call that was enqueued in part cannot be taken back: what the peers have seen of it is unknown. */
int engine_poison(engine *e, const engine_program *p, uint64_t call, int code)
{
    tide_failure f = TIDE_FAILURE_INIT;
    f.code = code;
    f.rank = e->rank;
    f.call = call;
    snprintf(f.phase, sizeof f.phase, "%s enqueue", p->kind == SCHEDULE_AG ? "all_gather" : "reduce_scatter");
    snprintf(f.text, sizeof f.text, "rank %u could not enqueue call %llu: %.180s", e->rank, (unsigned long long)call,
             tide_last_error());
    return e->device->verbs->fail(e->device, &f);
}
