/* cuda.c - GPUs as a command sees them: what is there, and memory for a rank's test data. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/cuda.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/kernels/kernels.h"
#include "fabric/cuda/multicast.h"
#include "fabric/nccl/library.h"

/* ---- memory for a rank ------------------------------------------------------------------- */

enum { PINNED = 1 << 20 };

/* Freeing waits for the whole GPU, where other ranks may wait for this one: what is released is freed at the end. */
typedef struct block {
    struct block *next;
    cu_ptr at;
} block;

typedef struct own {
    const cuda_driver *driver;
    cu_dev gpu;
    cu_context context;
    bool retained, pushed;
    cu_stream stream;
    void *pinned;
    uint32_t *gate;        /* of the timer, NULL: not made here */
    cu_event begin, end;   /* of the timer */
    block *blocks;
} own;

/* The driver takes one wait for all of it when CUDA starts; a user's own setting stays. */
static int get_driver(const cuda_driver **out)
{
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    return cuda_driver_get(out);
}

int cli_cuda_count(int *count)
{
    const cuda_driver *driver;
    int status = get_driver(&driver);
    *count = 0;
    return status == TIDE_OK ? cuda_check(driver, driver->DeviceGetCount(count), "cuDeviceGetCount") : status;
}

static int pick_gpu(cli_device *d, uint32_t rank, uint32_t n_ranks)
{
    int count, status = cli_cuda_count(&count);
    uint32_t gpus;

    if (status != TIDE_OK)
        return status;
    if (d->gpus > count)
        return tide_fail(TIDE_ERR_ARGUMENT, "--gpus: %d, but there are %d", d->gpus, count);
    gpus = (uint32_t)(d->gpus ? d->gpus : count);
    d->ordinal = (int)((d->fabric->nodes_apart && n_ranks > gpus ? rank / d->local : rank) % gpus);
    return TIDE_OK;
}

void cli_cuda_close(cli_device *d)
{
    own *o = d->own;
    cu_context ignored;

    if (!o)
        return;
    while (o->blocks) {
        block *b = o->blocks;
        o->blocks = b->next;
        o->driver->MemFree(b->at);
        free(b);
    }
    if (o->begin)
        o->driver->EventDestroy(o->begin);
    if (o->end)
        o->driver->EventDestroy(o->end);
    if (o->gate)
        o->driver->MemFreeHost(o->gate);
    if (o->pinned)
        o->driver->MemFreeHost(o->pinned);
    if (o->stream)
        o->driver->StreamDestroy(o->stream);
    if (o->pushed)
        o->driver->CtxPop(&ignored);
    if (o->retained)
        o->driver->PrimaryRelease(o->gpu);
    free(o);
    d->own = NULL;
}

static int open_own(cli_device *d, own *o, uint32_t rank, uint32_t n_ranks)
{
    int status;

    status = get_driver(&o->driver);
    if (status == TIDE_OK)
        status = pick_gpu(d, rank, n_ranks);
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->DeviceGet(&o->gpu, d->ordinal), "cuDeviceGet");
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->PrimaryRetain(&o->context, o->gpu), "cuDevicePrimaryCtxRetain");
    if (status != TIDE_OK)
        return status;
    o->retained = true;
    status = cuda_check(o->driver, o->driver->CtxPush(o->context), "cuCtxPushCurrent");
    o->pushed = status == TIDE_OK;
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->StreamCreate(&o->stream, CU_STREAM_NON_BLOCKING, 0),
                            "cuStreamCreateWithPriority");
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->MemHostAlloc(&o->pinned, PINNED, CU_HOSTALLOC_PORTABLE),
                            "cuMemHostAlloc");
    d->stream = o->stream;
    return status;
}

int cli_cuda_open(cli_device *d, uint32_t rank, uint32_t n_ranks)
{
    int status;

    d->own = calloc(1, sizeof(own));
    status = d->own ? open_own(d, d->own, rank, n_ranks) : tide_fail(TIDE_ERR_MEMORY, "out of memory");
    if (status != TIDE_OK)
        cli_cuda_close(d);
    return status;
}

/* NCCL takes several ranks of a communicator on a GPU when it is told so before it starts; a user's own setting stays. */
int cli_nccl_open(cli_device *d, uint32_t rank, uint32_t n_ranks)
{
    int count, status = cli_cuda_count(&count);

    if (status != TIDE_OK)
        return status;
    if (n_ranks / d->local > (uint32_t)(d->gpus ? d->gpus : count))
        setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
    return cli_cuda_open(d, rank, n_ranks);
}

void *cli_cuda_alloc(cli_device *d, size_t bytes)
{
    own *o = d->own;
    block *b = malloc(sizeof *b);

    if (!b || o->driver->MemAlloc(&b->at, bytes ? bytes : 1) != CU_OK) {
        free(b);
        return NULL;
    }
    b->next = o->blocks;
    o->blocks = b;
    return (void *)(uintptr_t)b->at;
}

void cli_cuda_release(cli_device *d, void *p)
{
    (void)d;
    (void)p; /* see block */
}

static int finish(own *o)
{
    const struct timespec nap = {0, 20000}; /* no longer: benchmarks end here */
    cu_result now;

    while ((now = o->driver->StreamQuery(o->stream)) == CU_NOT_READY)
        nanosleep(&nap, NULL);
    return cuda_check(o->driver, now, "the caller's stream");
}

int cli_cuda_copy_in(cli_device *d, void *to, const void *host, size_t bytes)
{
    own *o = d->own;
    int status = TIDE_OK;

    for (size_t at = 0, n; at < bytes && status == TIDE_OK; at += n) {
        n = bytes - at < PINNED ? bytes - at : PINNED;
        memcpy(o->pinned, (const char *)host + at, n);
        status = cuda_check(o->driver, o->driver->MemcpyHtoDAsync((cu_ptr)(uintptr_t)to + at, o->pinned, n, o->stream),
                            "cuMemcpyHtoDAsync");
        if (status == TIDE_OK)
            status = finish(o);
    }
    return status;
}

int cli_cuda_copy_out(cli_device *d, void *host, const void *from, size_t bytes)
{
    own *o = d->own;
    int status = TIDE_OK;

    for (size_t at = 0, n; at < bytes && status == TIDE_OK; at += n) {
        n = bytes - at < PINNED ? bytes - at : PINNED;
        status = cuda_check(o->driver,
                            o->driver->MemcpyDtoHAsync(o->pinned, (cu_ptr)(uintptr_t)from + at, n, o->stream),
                            "cuMemcpyDtoHAsync");
        if (status == TIDE_OK)
            status = finish(o);
        if (status == TIDE_OK)
            memcpy((char *)host + at, o->pinned, n);
    }
    return status;
}

int cli_cuda_finish(cli_device *d)
{
    return finish(d->own);
}

/* ---- device time --------------------------------------------------------------------------- */

static int timer_devices(cli_device *d)
{
    int count = 0;
    (void)d;
    return cli_cuda_count(&count) == TIDE_OK ? count : 0;
}

static int timer_sms(cli_device *d)
{
    const own *o = d->own;
    int sms = 0;
    return o->driver->DeviceGetAttribute(&sms, CU_ATTR_SM_COUNT, o->gpu) == CU_OK ? sms : 0;
}

/* A word of the host that the streams of all GPUs wait for. */
static int timer_gate(cli_device *d, void **gate)
{
    own *o = d->own;
    void *word;
    int status = cuda_check(o->driver, o->driver->MemHostAlloc(&word, sizeof *o->gate, CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED),
                            "cuMemHostAlloc");
    if (status != TIDE_OK)
        return status;
    o->gate = word;
    *o->gate = 0;
    *gate = o->gate;
    return TIDE_OK;
}

static int timer_begin(cli_device *d, void *gate, uint32_t turn)
{
    own *o = d->own;
    cu_stream_op wait = {.at = {.operation = CU_OP_WAIT_32, .value = turn, .flags = CU_WAIT_GEQ}};
    int status = TIDE_OK;

    if (!o->begin)
        status = cuda_check(o->driver, o->driver->EventCreate(&o->begin, 0), "cuEventCreate");
    if (status == TIDE_OK && !o->end)
        status = cuda_check(o->driver, o->driver->EventCreate(&o->end, 0), "cuEventCreate");
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->MemHostGetDevicePointer(&wait.at.address, gate, 0), "cuMemHostGetDevicePointer");
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->StreamBatchMemOp(o->stream, 1, &wait, 0), "cuStreamBatchMemOp");
    return status == TIDE_OK ? cuda_check(o->driver, o->driver->EventRecord(o->begin, o->stream), "cuEventRecord") : status;
}

static void timer_open(void *gate, uint32_t turn)
{
    __atomic_store_n((uint32_t *)gate, turn, __ATOMIC_RELEASE);
}

static int timer_end(cli_device *d, double *seconds)
{
    own *o = d->own;
    float ms = 0;
    int status = cuda_check(o->driver, o->driver->EventRecord(o->end, o->stream), "cuEventRecord");

    if (status == TIDE_OK)
        status = finish(o);
    if (status == TIDE_OK)
        status = cuda_check(o->driver, o->driver->EventElapsedTime(&ms, o->begin, o->end), "cuEventElapsedTime");
    *seconds = (double)ms / 1e3;
    return status;
}

static int timer_copy(cli_device *d, void *to, const void *from, size_t bytes)
{
    own *o = d->own;
    return cuda_check(o->driver, o->driver->MemcpyAsync((cu_ptr)(uintptr_t)to, (cu_ptr)(uintptr_t)from, bytes, o->stream),
                      "cuMemcpyAsync");
}

const cli_timer cli_cuda_timer = {timer_devices, timer_sms, timer_gate, timer_begin, timer_open, timer_end, timer_copy};

/* A GPU's primary context is made when the first one asks for it and goes with the last. */
void cli_cuda_keep(bool on)
{
    static uint64_t kept;
    const cuda_driver *driver;
    cu_context ignored;
    int count = 0;

    if (get_driver(&driver) != TIDE_OK || driver->DeviceGetCount(&count) != CU_OK)
        return;
    for (int i = 0; i < count && i < 64; i++) {
        uint64_t bit = UINT64_C(1) << i;
        cu_dev gpu;
        if (driver->DeviceGet(&gpu, i) != CU_OK)
            continue;
        if (on && !(kept & bit) && driver->PrimaryRetain(&ignored, gpu) == CU_OK)
            kept |= bit;
        else if (!on && (kept & bit) && driver->PrimaryRelease(gpu) == CU_OK)
            kept &= ~bit;
    }
}

/* Ranks of one process share a GPU's hardware queues: a stream each for the caller and for failures, four of the
 * all-gather, the pushes to the neighbours, and the sums with (several nodes) rail and landing, and the stash. */
static bool fits(const tide_topology *t, int gpus, uint32_t further)
{
    uint32_t n = t->nodes * t->local, streams = 2 + 4 + (t->local - 1) + (t->nodes > 1 ? 3 : 1) + 1 + further;
    int count = gpus;

    if (count == 0 && cli_cuda_count(&count) != TIDE_OK)
        return true; /* the rank will say so */
    return (n + (uint32_t)count - 1) / (uint32_t)count * streams <= 32;
}

bool cli_cuda_fits(const tide_topology *t, int gpus)
{
    return fits(t, gpus, 0);
}

/* NCCL has streams of its own, three a communicator, of which a rank has two here: three ranks in one process and on one GPU
 * have stood still where their own streams were few enough; that this is why has not been shown. */
bool cli_nccl_fits(const tide_topology *t, int gpus)
{
    return fits(t, gpus, t->nodes > 1 ? 6 : 0);
}

/* ---- tide info --------------------------------------------------------------------------- */

enum { MAX_GPUS = 64, P2P_PERFORMANCE_RANK = 1 };

static int attribute(const cuda_driver *driver, int which, cu_dev gpu)
{
    int value = 0;
    return driver->DeviceGetAttribute(&value, which, gpu) == CU_OK ? value : 0;
}

void cli_cuda_probe(bool *usable, char *why, size_t room)
{
    const cuda_driver *driver;
    size_t image = 0;
    int count = 0, status = get_driver(&driver);

    *usable = false;
    (void)cuda_image(&image);
    if (status == TIDE_OK)
        status = cuda_check(driver, driver->DeviceGetCount(&count), "cuDeviceGetCount");
    if (status != TIDE_OK) {
        snprintf(why, room, "%s", tide_last_error());
    } else if (image == 0) {
        snprintf(why, room, "driver %d.%d, %d device%s, but this library was built without nvcc", driver->version / 1000,
                 driver->version % 1000 / 10, count, count == 1 ? "" : "s");
    } else {
        *usable = true;
        snprintf(why, room, "GPUs of this machine, driver %d.%d, %d device%s", driver->version / 1000,
                 driver->version % 1000 / 10, count, count == 1 ? "" : "s");
    }
    for (int i = 0; *usable && i < count && i < MAX_GPUS; i++) {
        cu_dev gpu;
        if (driver->DeviceGet(&gpu, i) == CU_OK && attribute(driver, CU_ATTR_COMPUTE_MAJOR, gpu) < 9) {
            *usable = i > 0;
            snprintf(why, room, "device %d has compute capability %d.%d, expected at least 9.0", i,
                     attribute(driver, CU_ATTR_COMPUTE_MAJOR, gpu), attribute(driver, CU_ATTR_COMPUTE_MINOR, gpu));
            break;
        }
    }
}

void cli_nccl_probe(bool *usable, char *why, size_t room)
{
    const nccl_library *library;

    cli_cuda_probe(usable, why, room);
    if (!*usable || nccl_library_get(&library) != TIDE_OK) {
        if (*usable)
            snprintf(why, room, "%s", tide_last_error());
        *usable = false;
        return;
    }
    snprintf(why, room,
             "GPUs as with cuda, between nodes NCCL %d.%d.%d; whether it reaches other machines shows with the first groups",
             library->version / 10000, library->version / 100 % 100, library->version % 100);
}

static void put_device(tide_text *t, const cuda_driver *driver, int i, bool json)
{
    char name[96] = "";
    const char *no_multicast;
    size_t bytes = 0;
    cu_dev gpu;

    if (driver->DeviceGet(&gpu, i) != CU_OK)
        return;
    no_multicast = cuda_multicast_allowed(driver, gpu) == TIDE_OK ? NULL : tide_last_error();
    driver->DeviceGetName(name, sizeof name, gpu);
    driver->DeviceTotalMem(&bytes, gpu);
    if (json) {
        tide_text_put(t, "%s{\"ordinal\": %d, \"name\": ", i ? ", " : "", i);
        tide_text_json_string(t, name);
        tide_text_put(t,
                      ", \"compute\": \"%d.%d\", \"sms\": %d, \"bytes\": %llu, \"l2_bytes\": %d, \"copy_engines\": %d, "
                      "\"multicast\": %s, \"no_multicast\": ",
                      attribute(driver, CU_ATTR_COMPUTE_MAJOR, gpu), attribute(driver, CU_ATTR_COMPUTE_MINOR, gpu),
                      attribute(driver, CU_ATTR_SM_COUNT, gpu), (unsigned long long)bytes,
                      attribute(driver, CU_ATTR_L2_BYTES, gpu), attribute(driver, CU_ATTR_COPY_ENGINES, gpu),
                      attribute(driver, CU_ATTR_MULTICAST, gpu) ? "true" : "false");
        if (no_multicast)
            tide_text_json_string(t, no_multicast);
        tide_text_put(t, "%s}", no_multicast ? "" : "null");
        return;
    }
    tide_text_put(t, "  %d  %s, compute %d.%d, %d SMs, %.1f GiB, L2 %d MiB, %d copy engines, multicast %s%s\n", i, name,
                  attribute(driver, CU_ATTR_COMPUTE_MAJOR, gpu), attribute(driver, CU_ATTR_COMPUTE_MINOR, gpu),
                  attribute(driver, CU_ATTR_SM_COUNT, gpu), (double)bytes / (1 << 30),
                  attribute(driver, CU_ATTR_L2_BYTES, gpu) >> 20, attribute(driver, CU_ATTR_COPY_ENGINES, gpu),
                  no_multicast ? "never: " : "where the knob multicast is 1", no_multicast ? no_multicast : "");
}

/* What one device can do with another's memory: '-' itself, 'n' access, 'a' with atomics as over NVLink, '.' none. */
static char peer_mark(const cuda_driver *driver, int from, int to)
{
    int can = 0, atomic = 0;
    cu_dev a, b;

    if (from == to)
        return '-';
    if (driver->DeviceGet(&a, from) != CU_OK || driver->DeviceGet(&b, to) != CU_OK ||
        driver->DeviceCanAccessPeer(&can, a, b) != CU_OK || !can)
        return '.';
    driver->DeviceGetP2PAttribute(&atomic, CU_P2P_NATIVE_ATOMIC, a, b);
    return atomic ? 'a' : 'n';
}

static void put_peers(tide_text *t, const cuda_driver *driver, int count, bool json)
{
    if (json)
        tide_text_put(t, "], \"peers\": [");
    else
        tide_text_put(t, "  peer access (a: with native atomics, as over NVLink; n: without; .: none)\n");
    for (int from = 0; from < count; from++) {
        char row[MAX_GPUS + 1] = "";
        for (int to = 0; to < count; to++)
            row[to] = peer_mark(driver, from, to);
        tide_text_put(t, json ? "%s\"%s\"" : "%s    %s\n", json && from ? ", " : "", row);
    }
    if (!json && count > 1)
        tide_text_put(t, "  NVLink lanes: the driver's interface does not tell; nvidia-smi nvlink -s does\n");
}

void cli_cuda_describe(tide_text *t, bool json)
{
    const cuda_driver *driver;
    int count = 0;
    bool any = get_driver(&driver) == TIDE_OK && driver->DeviceGetCount(&count) == CU_OK;

    if (!any && json)
        tide_text_put(t, ", \"devices\": [], \"peers\": []");
    if (!any)
        return;
    count = count < MAX_GPUS ? count : MAX_GPUS;
    tide_text_put(t, json ? ", \"devices\": [" : "\ndevices\n");
    for (int i = 0; i < count; i++)
        put_device(t, driver, i, json);
    put_peers(t, driver, count, json);
    if (json)
        tide_text_put(t, "]");
}
