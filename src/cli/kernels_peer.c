/* kernels_peer.c - memory of a second GPU for `tide kernels`, as both GPUs see it. */
#include <time.h>

#include "base/base.h"
#include "cli/kernels.h"

static int map(const cli *c, const gpu *g, kernels_peer *p, cu_dev device, cu_ptr *out)
{
    const cuda_driver *d = g->driver;
    cu_access access = {{CU_LOCATION_DEVICE, device}, CU_ACCESS_READ_WRITE};
    int code = kernels_check(c, g, d->MemAddressReserve(out, p->bytes, 0, 0, 0), "cuMemAddressReserve");

    if (code != CLI_OK) {
        *out = 0;
        return code;
    }
    code = kernels_check(c, g, d->MemMap(*out, p->bytes, 0, p->handle, 0), "cuMemMap");
    if (code != CLI_OK) {
        d->MemAddressFree(*out, p->bytes);
        *out = 0;
        return code;
    }
    return kernels_check(c, g, d->MemSetAccess(*out, p->bytes, &access, 1), "cuMemSetAccess");
}

int kernels_peer_open(const cli *c, const gpu *g, uint64_t bytes, kernels_peer *p)
{
    const cuda_driver *d = g->driver;
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED};
    cu_context popped;
    size_t granularity = 0;
    int n = 0, can = 0, code;

    memset(p, 0, sizeof *p);
    if (d->DeviceGetCount(&n) != CU_OK || n < 2 || d->DeviceGet(&p->device, 1) != CU_OK ||
        d->DeviceCanAccessPeer(&can, g->device, p->device) != CU_OK || !can)
        return CLI_OK;
    prop.location = (cu_location){CU_LOCATION_DEVICE, p->device};
    code = kernels_check(c, g, d->PrimaryRetain(&p->context, p->device), "cuDevicePrimaryCtxRetain");
    if (code != CLI_OK) {
        p->context = NULL;
        return code;
    }
    code = kernels_check(c, g, d->MemGetAllocationGranularity(&granularity, &prop, 0), "cuMemGetAllocationGranularity");
    p->bytes = tide_align_up(bytes, granularity ? granularity : 1);
    if (code == CLI_OK)
        code = kernels_check(c, g, d->MemCreate(&p->handle, p->bytes, &prop, 0), "cuMemCreate");
    if (code == CLI_OK)
        code = map(c, g, p, g->device, &p->near);
    if (code == CLI_OK)
        code = map(c, g, p, p->device, &p->far);
    if (code == CLI_OK)
        code = kernels_check(c, g, d->CtxPush(p->context), "cuCtxPushCurrent");
    if (code != CLI_OK)
        return code;
    code = kernels_check(c, g, d->StreamCreate(&p->stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreate");
    d->CtxPop(&popped);
    return code;
}

static void unmap(const gpu *g, const kernels_peer *p, cu_ptr at)
{
    if (!at)
        return;
    g->driver->MemUnmap(at, p->bytes);
    g->driver->MemAddressFree(at, p->bytes);
}

void kernels_peer_close(const gpu *g, kernels_peer *p)
{
    if (p->stream)
        g->driver->StreamDestroy(p->stream);
    unmap(g, p, p->far);
    unmap(g, p, p->near);
    if (p->handle)
        g->driver->MemRelease(p->handle);
    if (p->context)
        g->driver->PrimaryRelease(p->device);
}

int kernels_peer_await(const cli *c, const gpu *g, kernels_peer *p, uint64_t word, uint64_t value, void *to, uint64_t bytes)
{
    const cuda_driver *d = g->driver;
    cu_stream_op op;
    cu_context popped;
    int code = kernels_check(c, g, d->CtxPush(p->context), "cuCtxPushCurrent");

    if (code != CLI_OK)
        return code;
    memset(&op, 0, sizeof op);
    op.at.operation = CU_OP_WAIT_64;
    op.at.address = p->far + word;
    op.at.value = value;
    op.at.flags = CU_WAIT_GEQ;
    code = kernels_check(c, g, d->StreamBatchMemOp(p->stream, 1, &op, 0), "cuStreamBatchMemOp");
    if (code == CLI_OK)
        code = kernels_check(c, g, d->MemcpyDtoHAsync(to, p->far, bytes, p->stream), "download");
    d->CtxPop(&popped);
    return code;
}

int kernels_peer_sync(const cli *c, const gpu *g, kernels_peer *p, bool *came)
{
    enum { NAP_US = 50, PATIENCE_MS = 10000 };
    const struct timespec nap = {0, NAP_US * 1000};
    cu_result now;
    int64_t until = tide_now_ns() + PATIENCE_MS * INT64_C(1000000);

    while ((now = g->driver->StreamQuery(p->stream)) == CU_NOT_READY && tide_now_ns() < until)
        nanosleep(&nap, NULL);
    *came = now == CU_OK;
    return now == CU_NOT_READY ? CLI_OK : kernels_check(c, g, now, "the peer's stream");
}
