/* fake_device.c - the fake driver's start and end, faults, devices, contexts, modules. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_internal.h"

fake_world fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER};

static const char *const names[] = {
#define X(field, name, parameters) name,
    CUDA_DRIVER(X) CUDA_DRIVER_OPTIONAL(X)
#undef X
};

/* The contexts that a thread has pushed. Of an earlier world: none. */
static _Thread_local struct {
    uint64_t generation;
    int depth;
    cu_context at[16];
} stack;
static _Thread_local cu_result late; /* a fault that comes with leave */

void fake_complain(const char *format, ...)
{
    va_list args;
    if (fake.complaints++)
        return;
    va_start(args, format);
    vsnprintf(fake.first, sizeof fake.first, format, args);
    va_end(args);
}

uint64_t fake_random(uint64_t below)
{
    uint64_t z = fake.random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % below;
}

cu_context fake_current(void)
{
    if (stack.generation != fake.generation || stack.depth == 0)
        return NULL;
    return stack.at[stack.depth - 1]->retained ? stack.at[stack.depth - 1] : NULL;
}

cu_result fake_enter(enum fake_function function, int needs)
{
    cu_result injected = CU_OK;

    atomic_fetch_add(&fake.callers, 1);
    pthread_mutex_lock(&fake.lock);
    late = CU_OK;
    if (!fake.running)
        return CU_NOT_INITIALIZED;
    fake.calls++;
    if (fake.fail_at && (!fake.fail_function || strcmp(fake.fail_function, names[function]) == 0) &&
        ++fake.fail_seen == fake.fail_at)
        injected = fake.fail_result;
    if (needs & ALLOCATES && fake.oom_at && ++fake.oom_seen == fake.oom_at)
        injected = CU_OUT_OF_MEMORY;
    if (injected != CU_OK) {
        fake.failed = true;
        fake.fault = names[function];
        if (!(needs & RELEASES))
            return injected;
        late = injected;
    }
    if (!fake.initialized && !(needs & UNINITIALIZED))
        return CU_NOT_INITIALIZED;
    if (needs & NEEDS_CONTEXT && !fake_current())
        return CU_INVALID_CONTEXT;
    return CU_OK;
}

cu_result fake_leave(cu_result result)
{
    cu_result injected = late;
    late = CU_OK;
    atomic_fetch_sub(&fake.callers, 1);
    pthread_cond_signal(&fake.work);
    pthread_mutex_unlock(&fake.lock);
    return result == CU_OK ? injected : result;
}

/* ---- start and end --------------------------------------------------------------------------- */

static cuda_driver table;

const cuda_driver *fake_cuda_start(const fake_cuda_options *options)
{
    pthread_mutex_lock(&fake.lock);
    fake.options = *options;
    fake.generation++;
    fake.random = options->seed * 0x9e3779b97f4a7c15u + 1;
    fake.initialized = fake.stop = fake.foreign = fake.failed = false;
    fake.complaints = 0;
    fake.calls = fake.fail_at = fake.fail_seen = fake.oom_at = fake.oom_seen = fake.stalled = fake.n_streams = fake.multicasts = 0;
    fake.favour = fake.bursts = fake.last = 0;
    fake.next_handle = 1;
    for (int d = 0; d < FAKE_MAX_DEVICES; d++) {
        memset(&fake.contexts[d], 0, sizeof fake.contexts[d]);
        fake.contexts[d].device = d;
        fake.contexts[d].magic = MAGIC_CONTEXT;
        for (int q = 0; q < FAKE_MAX_CONNECTIONS; q++)
            fake.contexts[d].queues[q].tail = &fake.contexts[d].queues[q].head;
    }
    table = (cuda_driver){
#define X(field, name, parameters) .field = fake_##field,
        CUDA_DRIVER(X) CUDA_DRIVER_OPTIONAL(X)
#undef X
            .version = options->version};
    if (options->no_batch)
        table.MemcpyBatchAsync = NULL;
    fake.running = true;
    pthread_mutex_unlock(&fake.lock);
    fake_kernels_add();
    return &table;
}

static int add(char *text, size_t bytes, int n, const char *what)
{
    size_t at = strlen(text);
    if (n)
        snprintf(text + at, bytes - at, "%s%d %s", at ? ", " : "", n, what);
    return n;
}

static int leaks(char *text, size_t bytes)
{
    int n = 0, retained = 0, counts[4] = {0};

    text[0] = '\0';
    for (fake_handle *h = fake.handles; h; h = h->next)
        counts[0]++;
    for (fake_reservation *r = fake.reservations; r; r = r->next)
        counts[1]++;
    for (cu_stream s = fake.streams; s; s = s->next)
        counts[2] += s->own && !s->destroyed;
    for (cu_event e = fake.events; e; e = e->next)
        counts[3]++;
    n += add(text, bytes, counts[0], "handles");
    n += add(text, bytes, counts[1], "reservations");
    n += add(text, bytes, fake_memory_count(SPAN_MAPPING), "mappings");
    n += add(text, bytes, fake_memory_count(SPAN_MULTICAST), "multicast mappings");
    n += add(text, bytes, fake_multicast_bindings(), "multicast bindings");
    n += add(text, bytes, fake_memory_count(SPAN_ALLOCATION), "allocations");
    n += add(text, bytes, fake_memory_count(SPAN_HOST), "host allocations");
    n += add(text, bytes, counts[2], "streams");
    n += add(text, bytes, counts[3], "events");
    counts[0] = counts[1] = 0;
    for (cu_module m = fake.modules; m; m = m->next)
        counts[0]++;
    for (int d = 0; d < FAKE_MAX_DEVICES; d++)
        retained += fake.contexts[d].retained;
    for (cu_stream s = fake.streams; s; s = s->next)
        counts[1] += s->destroyed;
    n += add(text, bytes, counts[0], "modules");
    n += add(text, bytes, retained, "retained contexts");
    n += add(text, bytes, counts[1], "destroyed streams that have work");
    return n;
}

int fake_cuda_leaks(char *text, size_t bytes)
{
    char own[256];
    int n;
    pthread_mutex_lock(&fake.lock);
    n = leaks(own, sizeof own);
    pthread_mutex_unlock(&fake.lock);
    if (text)
        snprintf(text, bytes, "%s", own);
    return n;
}

int fake_cuda_complaints(char *text, size_t bytes)
{
    int n;
    pthread_mutex_lock(&fake.lock);
    n = fake.complaints;
    if (text)
        snprintf(text, bytes, "%s", n ? fake.first : "");
    pthread_mutex_unlock(&fake.lock);
    return n;
}

void fake_cuda_forgive(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.complaints = 0;
    pthread_mutex_unlock(&fake.lock);
}

int fake_cuda_stop(void)
{
    char text[256];
    int n;

    pthread_mutex_lock(&fake.lock);
    n = leaks(text, sizeof text);
    if (n)
        fprintf(stderr, "fake driver: seed %llu: alive at the end: %s\n", (unsigned long long)fake.options.seed, text);
    if (fake.complaints)
        fprintf(stderr, "fake driver: seed %llu: %d complaints, the first: %s\n",
                (unsigned long long)fake.options.seed, fake.complaints, fake.first);
    n += fake.complaints;
    fake.running = false;
    fake.stop = true;
    fake_wake();
    pthread_mutex_unlock(&fake.lock);
    if (fake.working)
        pthread_join(fake.worker, NULL);
    fake.working = false;
    fake_streams_clear();
    while (fake.modules) {
        cu_module m = fake.modules;
        fake.modules = m->next;
        free(m);
    }
    fake_memory_clear();
    return n;
}

/* ---- faults ---------------------------------------------------------------------------------- */

void fake_cuda_fail(const char *function, uint64_t n, cu_result result)
{
    pthread_mutex_lock(&fake.lock);
    fake.fail_function = function;
    fake.fail_at = n;
    fake.fail_seen = 0;
    fake.fail_result = result;
    fake.failed = false;
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_oom(uint64_t n)
{
    pthread_mutex_lock(&fake.lock);
    fake.oom_at = n;
    fake.oom_seen = 0;
    fake.failed = false;
    pthread_mutex_unlock(&fake.lock);
}

bool fake_cuda_failed(void)
{
    bool failed;
    pthread_mutex_lock(&fake.lock);
    failed = fake.failed;
    pthread_mutex_unlock(&fake.lock);
    return failed;
}

const char *fake_cuda_fault(void)
{
    const char *name;
    pthread_mutex_lock(&fake.lock);
    name = fake.failed ? fake.fault : "";
    pthread_mutex_unlock(&fake.lock);
    return name;
}

uint64_t fake_cuda_calls(void)
{
    uint64_t n;
    pthread_mutex_lock(&fake.lock);
    n = fake.calls;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

uint64_t fake_cuda_multicasts(void)
{
    uint64_t n;
    pthread_mutex_lock(&fake.lock);
    n = fake.multicasts;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

void fake_cuda_stall(uint64_t n)
{
    pthread_mutex_lock(&fake.lock);
    fake.stalled = n;
    for (cu_stream s = fake.streams; s; s = s->next)
        s->stalled = n && s->number == n;
    fake_wake();
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_connections(int n)
{
    pthread_mutex_lock(&fake.lock);
    fake_streams_deal(n);
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_capture(cu_stream stream, bool on)
{
    pthread_mutex_lock(&fake.lock);
    stream = fake_stream_of(stream);
    if (stream)
        stream->capturing = on;
    pthread_mutex_unlock(&fake.lock);
}

/* ---- the driver and its devices -------------------------------------------------------------- */

static bool is_device(int d) { return d >= 0 && d < fake.options.devices; }

cu_result fake_Init(unsigned flags)
{
    cu_result r = fake_enter(FAKE_Init, UNINITIALIZED);
    if (r == CU_OK)
        r = flags ? CU_INVALID_VALUE : fake.options.devices == 0 ? CU_NO_DEVICE : CU_OK;
    if (r == CU_OK && !fake_worker_start())
        r = CU_OUT_OF_MEMORY;
    if (r == CU_OK)
        fake.initialized = true;
    return fake_leave(r);
}

cu_result fake_DriverGetVersion(int *version)
{
    cu_result r = fake_enter(FAKE_DriverGetVersion, UNINITIALIZED);
    if (r == CU_OK)
        *version = fake.options.version;
    return fake_leave(r);
}

static const struct { cu_result code; const char *name, *text; } errors[] = {
    {CU_OK, "CUDA_SUCCESS", "no error"},
    {CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CU_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static cu_result describe(cu_result error, const char **out, bool name)
{
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].code == error) {
            *out = name ? errors[i].name : errors[i].text;
            return CU_OK;
        }
    }
    return CU_INVALID_VALUE;
}

cu_result fake_GetErrorName(cu_result error, const char **name) { return describe(error, name, true); }
cu_result fake_GetErrorString(cu_result error, const char **text) { return describe(error, text, false); }

cu_result fake_DeviceGet(cu_dev *device, int ordinal)
{
    cu_result r = fake_enter(FAKE_DeviceGet, 0);
    if (r == CU_OK && !is_device(ordinal))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK)
        *device = ordinal;
    return fake_leave(r);
}

cu_result fake_DeviceGetCount(int *count)
{
    cu_result r = fake_enter(FAKE_DeviceGetCount, 0);
    if (r == CU_OK)
        *count = fake.options.devices;
    return fake_leave(r);
}

cu_result fake_DeviceGetName(char *name, int bytes, cu_dev device)
{
    cu_result r = fake_enter(FAKE_DeviceGetName, 0);
    if (r == CU_OK && !is_device(device))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK)
        snprintf(name, (size_t)bytes, "fake device");
    return fake_leave(r);
}

cu_result fake_DeviceGetUuid(cu_uuid *uuid, cu_dev device)
{
    cu_result r = fake_enter(FAKE_DeviceGetUuid, 0);
    if (r == CU_OK && !is_device(device))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK) {
        memset(uuid, 0, sizeof *uuid);
        snprintf(uuid->bytes, sizeof uuid->bytes, "fake %d", device);
    }
    return fake_leave(r);
}

cu_result fake_DeviceTotalMem(size_t *bytes, cu_dev device)
{
    cu_result r = fake_enter(FAKE_DeviceTotalMem, 0);
    if (r == CU_OK && !is_device(device))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK)
        *bytes = (size_t)1 << 34;
    return fake_leave(r);
}

cu_result fake_DeviceGetAttribute(int *value, int attribute, cu_dev device)
{
    static const int known[][2] = {
        {CU_ATTR_COMPUTE_MAJOR, 9}, {CU_ATTR_COMPUTE_MINOR, 0}, {CU_ATTR_SM_COUNT, 132}, {CU_ATTR_COPY_ENGINES, 3},
        {CU_ATTR_SHARED_PER_BLOCK_OPTIN, 232448}, {CU_ATTR_SHARED_PER_SM, 233472}, {CU_ATTR_L2_BYTES, 50 << 20},
        {CU_ATTR_VMM, 1}, {CU_ATTR_HANDLE_FD, 1}, {CU_ATTR_RDMA_VMM, 1}, {CU_ATTR_STREAM_WAIT_64, 1}};
    cu_result r = fake_enter(FAKE_DeviceGetAttribute, 0);
    if (r == CU_OK && !is_device(device))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK) {
        r = CU_INVALID_VALUE;
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
            if (known[i][0] == attribute) {
                *value = known[i][1];
                r = CU_OK;
            }
        }
        if (attribute == CU_ATTR_MULTICAST) {
            *value = fake.options.multicast;
            r = CU_OK;
        }
        if (fake.options.attribute && attribute == fake.options.attribute) {
            *value = fake.options.value;
            r = CU_OK;
        }
        if (r != CU_OK)
            fake_complain("cuDeviceGetAttribute: attribute %d is not one that the fake knows", attribute);
    }
    return fake_leave(r);
}

cu_result fake_DeviceCanAccessPeer(int *can, cu_dev device, cu_dev peer)
{
    cu_result r = fake_enter(FAKE_DeviceCanAccessPeer, 0);
    if (r == CU_OK && (!is_device(device) || !is_device(peer)))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK)
        *can = device != peer && !fake.options.no_peers;
    return fake_leave(r);
}

cu_result fake_DeviceGetP2PAttribute(int *value, int attribute, cu_dev from, cu_dev to)
{
    cu_result r = fake_enter(FAKE_DeviceGetP2PAttribute, 0);
    if (r == CU_OK && (!is_device(from) || !is_device(to) || from == to))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK && attribute != CU_P2P_ACCESS && attribute != CU_P2P_NATIVE_ATOMIC)
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        *value = !fake.options.no_peers;
    return fake_leave(r);
}

/* ---- contexts -------------------------------------------------------------------------------- */

cu_result fake_PrimaryRetain(cu_context *context, cu_dev device)
{
    cu_result r = fake_enter(FAKE_PrimaryRetain, ALLOCATES);
    if (r == CU_OK && !is_device(device))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK) {
        fake.contexts[device].retained++;
        *context = &fake.contexts[device];
    }
    return fake_leave(r);
}

static bool populated(int device)
{
    for (cu_stream s = fake.streams; s; s = s->next)
        if (s->own && s->device == device)
            return true;
    for (cu_event e = fake.events; e; e = e->next)
        if (e->device == device)
            return true;
    for (cu_module m = fake.modules; m; m = m->next)
        if (m->device == device)
            return true;
    for (size_t i = 0; i < fake.n_spans; i++)
        if (fake.spans[i]->kind != SPAN_MAPPING && fake.spans[i]->device == device)
            return true;
    return false;
}

cu_result fake_PrimaryRelease(cu_dev device)
{
    cu_result r = fake_enter(FAKE_PrimaryRelease, RELEASES);
    if (r == CU_OK && !is_device(device))
        r = CU_INVALID_DEVICE;
    if (r == CU_OK && fake.contexts[device].retained == 0)
        r = CU_INVALID_CONTEXT;
    if (r == CU_OK && --fake.contexts[device].retained == 0 && populated(device))
        fake_complain("cuDevicePrimaryCtxRelease: device %d: the last reference, and objects of the context are alive",
                      device);
    return fake_leave(r);
}

cu_result fake_CtxPush(cu_context context)
{
    cu_result r = fake_enter(FAKE_CtxPush, 0);
    if (r == CU_OK && (!context || context->magic != MAGIC_CONTEXT || context->retained == 0))
        r = CU_INVALID_CONTEXT;
    if (r == CU_OK) {
        if (stack.generation != fake.generation) {
            stack.generation = fake.generation;
            stack.depth = 0;
        }
        if (stack.depth == sizeof stack.at / sizeof stack.at[0]) {
            fake_complain("cuCtxPushCurrent: %d contexts are pushed: is one not popped?", stack.depth);
            r = CU_OUT_OF_MEMORY;
        } else {
            stack.at[stack.depth++] = context;
        }
    }
    return fake_leave(r);
}

cu_result fake_CtxPop(cu_context *context)
{
    cu_result r = fake_enter(FAKE_CtxPop, RELEASES);
    if (r == CU_OK && (stack.generation != fake.generation || stack.depth == 0))
        r = CU_INVALID_CONTEXT;
    if (r == CU_OK) {
        stack.depth--;
        if (context)
            *context = stack.at[stack.depth];
    }
    return fake_leave(r);
}

cu_result fake_CtxGetStreamPriorityRange(int *least, int *greatest)
{
    cu_result r = fake_enter(FAKE_CtxGetStreamPriorityRange, NEEDS_CONTEXT);
    if (r == CU_OK) {
        *least = 0;
        *greatest = -5;
    }
    return fake_leave(r);
}

/* ---- modules --------------------------------------------------------------------------------- */

void fake_cuda_kernel(const char *name, size_t args_bytes, void (*run)(const void *args),
                      void (*ranges)(const void *args, fake_touch *t))
{
    fake_kernel *k;
    pthread_mutex_lock(&fake.lock);
    for (k = fake.kernels; k && strcmp(k->name, name) != 0; k = k->next)
        ;
    if (!k) {
        k = calloc(1, sizeof *k);
        k->next = fake.kernels;
        fake.kernels = k;
    }
    k->name = name;
    k->bytes = args_bytes;
    k->run = run;
    k->ranges = ranges;
    pthread_mutex_unlock(&fake.lock);
}

cu_result fake_ModuleLoadData(cu_module *module, const void *image)
{
    cu_result r = fake_enter(FAKE_ModuleLoadData, NEEDS_CONTEXT | ALLOCATES);
    if (r == CU_OK && (!image || !module))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        cu_module m = calloc(1, sizeof *m);
        m->magic = MAGIC_MODULE;
        m->device = fake_current()->device;
        m->next = fake.modules;
        fake.modules = m;
        *module = m;
    }
    return fake_leave(r);
}

cu_result fake_ModuleUnload(cu_module module)
{
    cu_result r = fake_enter(FAKE_ModuleUnload, NEEDS_CONTEXT | RELEASES);
    cu_module *at = &fake.modules;
    while (r == CU_OK && *at && *at != module)
        at = &(*at)->next;
    if (r == CU_OK && !*at)
        r = CU_INVALID_HANDLE;
    if (r == CU_OK) {
        *at = module->next;
        fake_wait_idle(module->device, NULL, "cuModuleUnload");
        free(module);
    }
    return fake_leave(r);
}

cu_result fake_ModuleGetFunction(cu_function *function, cu_module module, const char *name)
{
    cu_result r = fake_enter(FAKE_ModuleGetFunction, NEEDS_CONTEXT);
    fake_kernel *k = fake.kernels;
    if (r == CU_OK && (!module || module->magic != MAGIC_MODULE))
        r = CU_INVALID_HANDLE;
    while (k && strcmp(k->name, name) != 0)
        k = k->next;
    if (r == CU_OK && (!k || module->n_functions == FAKE_MAX_FUNCTIONS))
        r = CU_NOT_FOUND;
    if (r == CU_OK) {
        for (int i = 0; i < module->n_functions; i++) {
            if (module->functions[i].kernel == k) {
                *function = &module->functions[i];
                return fake_leave(CU_OK);
            }
        }
        *function = &module->functions[module->n_functions++];
        **function = (struct cu_function){k, module, 48 << 10};
    }
    return fake_leave(r);
}

cu_result fake_FuncSetAttribute(cu_function function, int attribute, int value)
{
    cu_result r = fake_enter(FAKE_FuncSetAttribute, NEEDS_CONTEXT);
    if (r == CU_OK && !function)
        r = CU_INVALID_HANDLE;
    if (r == CU_OK && attribute == CU_FUNC_SHARED_CARVEOUT)
        return fake_leave(value >= -1 && value <= 100 ? CU_OK : CU_INVALID_VALUE);
    if (r == CU_OK && (attribute != CU_FUNC_MAX_DYNAMIC_SHARED || value < 0 || value > 232448))
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        function->shared = value > 48 << 10 ? value : 48 << 10;
    return fake_leave(r);
}
