/*
 * rules.c - each rule is a function; what it makes is given back after it, whatever came of it. Streams are blocked by
 * gates: words of host memory that a batch of memory operations waits for, and that we open.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/rules.h"

enum { PATIENCE_MS = 5000, GRACE_MS = 5, MAX_THINGS = 96, GATES = 64 };

enum thing_kind { A_STREAM, AN_EVENT, A_MODULE, AN_ALLOCATION, A_HOST_ALLOCATION, A_HANDLE, A_RESERVATION, A_MAPPING, AN_FD };
typedef struct thing {
    enum thing_kind kind;
    uint64_t at, bytes;
} thing;

typedef struct rules {
    const cuda_driver *d;
    int n_devices;
    cu_dev device[2];
    cu_context context[2];
    thing things[MAX_THINGS];
    int n_things;
    _Atomic uint64_t *gates; /* host memory, GATES words */
    cu_ptr gates_device;
    int n_gates;
    char why[200];
    const char *note; /* which of two ways the driver has, where both will do */
} rules;

enum outcome { OK, FAILED, NOT_RUN };

#define MUST(condition)                                                                     \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            snprintf(r->why, sizeof r->why, "line %d: not so: %s", __LINE__, #condition);   \
            return FAILED;                                                                  \
        }                                                                                   \
    } while (0)
/* A call with its result. */
#define GIVES(call, code)                                                                                      \
    do {                                                                                                       \
        cu_result result_ = (call);                                                                            \
        if (result_ != (code)) {                                                                               \
            snprintf(r->why, sizeof r->why, "line %d: %s gives %d, not %d", __LINE__, #call, result_, (code)); \
            return FAILED;                                                                                     \
        }                                                                                                      \
    } while (0)
#define REFUSED(call)                                                                       \
    do {                                                                                    \
        if ((call) == CU_OK) {                                                              \
            snprintf(r->why, sizeof r->why, "line %d: %s is accepted", __LINE__, #call);    \
            return FAILED;                                                                  \
        }                                                                                   \
    } while (0)
#define NEEDS(condition, text)                              \
    do {                                                    \
        if (!(condition)) {                                 \
            snprintf(r->why, sizeof r->why, "%s", (text));  \
            return NOT_RUN;                                 \
        }                                                   \
    } while (0)

/* ---- things ---------------------------------------------------------------------------------- */

static uint64_t keep(rules *r, enum thing_kind kind, uint64_t at, uint64_t bytes)
{
    if (r->n_things < MAX_THINGS)
        r->things[r->n_things++] = (thing){kind, at, bytes};
    return at;
}

/* Given back by the rule itself. */
static void forget(rules *r, enum thing_kind kind, uint64_t at)
{
    for (int i = 0; i < r->n_things; i++) {
        if (r->things[i].kind == kind && r->things[i].at == at) {
            memmove(&r->things[i], &r->things[i + 1], (size_t)(r->n_things - i - 1) * sizeof r->things[0]);
            r->n_things--;
            return;
        }
    }
}

static void sleep_ms(int64_t ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* The stream runs dry in good time. */
static bool dry(rules *r, cu_stream s)
{
    int64_t until = tide_now_ns() + (int64_t)PATIENCE_MS * 1000000;
    cu_result result;
    while ((result = r->d->StreamQuery(s)) == CU_NOT_READY && tide_now_ns() < until)
        sleep_ms(1);
    return result == CU_OK;
}

/* The stream does not, for as long as we care to look. */
static bool blocked(rules *r, cu_stream s)
{
    sleep_ms(GRACE_MS);
    return r->d->StreamQuery(s) == CU_NOT_READY;
}

static void give_back(rules *r)
{
    const cuda_driver *d = r->d;

    for (int i = 0; i < GATES; i++)
        atomic_store(&r->gates[i], UINT64_MAX / 4);
    for (int i = 0; i < r->n_things; i++)
        if (r->things[i].kind == A_STREAM)
            dry(r, (cu_stream)(uintptr_t)r->things[i].at);
    while (r->n_things) {
        thing t = r->things[--r->n_things];
        switch (t.kind) {
        case A_STREAM: d->StreamDestroy((cu_stream)(uintptr_t)t.at); break;
        case AN_EVENT: d->EventDestroy((cu_event)(uintptr_t)t.at); break;
        case A_MODULE: d->ModuleUnload((cu_module)(uintptr_t)t.at); break;
        case AN_ALLOCATION: d->MemFree(t.at); break;
        case A_HOST_ALLOCATION: d->MemFreeHost((void *)(uintptr_t)t.at); break;
        case A_HANDLE: d->MemRelease(t.at); break;
        case A_RESERVATION: d->MemAddressFree(t.at, t.bytes); break;
        case A_MAPPING: d->MemUnmap(t.at, t.bytes); break;
        case AN_FD: close((int)t.at); break;
        }
    }
    for (int i = 0; i < GATES; i++)
        atomic_store(&r->gates[i], 0);
    r->n_gates = 0;
}

/* Of the current context; NULL or 0 when it cannot be made, which the uses then show. */
static cu_stream stream(rules *r)
{
    cu_stream s = NULL;
    if (r->d->StreamCreate(&s, CU_STREAM_NON_BLOCKING, 0) == CU_OK)
        keep(r, A_STREAM, (uintptr_t)s, 0);
    return s;
}

static cu_event event(rules *r, unsigned flags)
{
    cu_event e = NULL;
    if (r->d->EventCreate(&e, flags) == CU_OK)
        keep(r, AN_EVENT, (uintptr_t)e, 0);
    return e;
}

static cu_ptr device_memory(rules *r, size_t bytes)
{
    cu_ptr p = 0;
    if (r->d->MemAlloc(&p, bytes) == CU_OK)
        keep(r, AN_ALLOCATION, p, 0);
    return p;
}

static void *host_memory(rules *r, size_t bytes)
{
    void *p = NULL;
    if (r->d->MemHostAlloc(&p, bytes, CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED) == CU_OK)
        keep(r, A_HOST_ALLOCATION, (uintptr_t)p, 0);
    return p;
}

static cu_stream_op word_op(int operation, cu_ptr address, uint64_t value, unsigned flags)
{
    cu_stream_op op;
    memset(&op, 0, sizeof op);
    op.at.operation = operation;
    op.at.address = address;
    op.at.value = value;
    op.at.flags = flags;
    return op;
}

static cu_result one_word(rules *r, cu_stream s, int operation, cu_ptr address, uint64_t value)
{
    cu_stream_op op = word_op(operation, address, value, 0);
    return r->d->StreamBatchMemOp(s, 1, &op, 0);
}

/* Blocks the stream until the gate is opened; its number, or -1. */
static int gate(rules *r, cu_stream s)
{
    int g = r->n_gates++;
    if (g >= GATES || one_word(r, s, CU_OP_WAIT_64, r->gates_device + (cu_ptr)g * 8, 1) != CU_OK)
        return -1;
    return g;
}
static void open_gate(rules *r, int g) { atomic_store(&r->gates[g], 1); }

static bool put(rules *r, cu_ptr to, const void *bytes, size_t n)
{
    cu_stream s = stream(r);
    void *h = host_memory(r, n);
    if (!s || !h)
        return false;
    memcpy(h, bytes, n);
    return r->d->MemcpyHtoDAsync(to, h, n, s) == CU_OK && dry(r, s);
}

static bool get(rules *r, void *bytes, cu_ptr from, size_t n)
{
    cu_stream s = stream(r);
    void *h = host_memory(r, n);
    if (!s || !h || r->d->MemcpyDtoHAsync(h, from, n, s) != CU_OK || !dry(r, s))
        return false;
    memcpy(bytes, h, n);
    return true;
}

static bool put_word(rules *r, cu_ptr to, uint64_t value) { return put(r, to, &value, sizeof value); }
static uint64_t get_word(rules *r, cu_ptr from)
{
    uint64_t value = 0;
    return get(r, &value, from, sizeof value) ? value : UINT64_MAX;
}

/* Physical memory of a device. */
static cu_handle handle_on(rules *r, int device, size_t *bytes)
{
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD,
                          .location = {CU_LOCATION_DEVICE, r->device[device]}};
    size_t granularity = 0;
    cu_handle h = 0;
    if (r->d->MemGetAllocationGranularity(&granularity, &prop, 0) == CU_OK && granularity &&
        r->d->MemCreate(&h, granularity, &prop, 0) == CU_OK) {
        keep(r, A_HANDLE, h, 0);
        *bytes = granularity;
    }
    return h;
}

static cu_ptr mapping(rules *r, cu_handle h, size_t bytes, int access)
{
    cu_ptr p = 0;
    cu_access a = {{CU_LOCATION_DEVICE, access < 0 ? 0 : r->device[access]}, CU_ACCESS_READ_WRITE};
    if (!h || r->d->MemAddressReserve(&p, bytes, 0, 0, 0) != CU_OK)
        return 0;
    keep(r, A_RESERVATION, p, bytes);
    if (r->d->MemMap(p, bytes, 0, h, 0) != CU_OK)
        return 0;
    keep(r, A_MAPPING, p, bytes);
    return access < 0 || r->d->MemSetAccess(p, bytes, &a, 1) == CU_OK ? p : 0;
}

/* ---- a kernel -------------------------------------------------------------------------------- */

static const char ptx[] = ".version 7.8\n.target sm_80\n.address_size 64\n"
                          ".visible .entry " RULES_KERNEL "(.param .align 8 .b8 p[24])\n{\n"
                          ".reg .b64 %rd<6>;\n"
                          "ld.param.u64 %rd1, [p];\n"
                          "ld.param.u64 %rd2, [p+8];\n"
                          "ld.param.u64 %rd3, [p+16];\n"
                          "ld.global.u64 %rd4, [%rd2];\n"
                          "add.u64 %rd5, %rd4, %rd3;\n"
                          "st.global.u64 [%rd1], %rd5;\n"
                          "ret;\n}\n";

static cu_result kernel(rules *r, cu_function *f)
{
    cu_module m = NULL;
    cu_result result = r->d->ModuleLoadData(&m, ptx);
    if (result != CU_OK)
        return result;
    keep(r, A_MODULE, (uintptr_t)m, 0);
    return r->d->ModuleGetFunction(f, m, RULES_KERNEL);
}

static cu_result launch(rules *r, cu_function f, cu_stream s, rules_kernel *args)
{
    void *parameters[] = {args};
    return r->d->LaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, parameters, NULL);
}

/* ---- calls that may wait --------------------------------------------------------------------- */

typedef struct helper {
    rules *r;
    cu_result (*call)(rules *r, cu_ptr at);
    cu_ptr at;
    cu_result result;
    _Atomic int done;
} helper;

static void *run_helper(void *context)
{
    helper *h = context;
    cu_context c;
    h->result = h->r->d->CtxPush(h->r->context[0]);
    if (h->result == CU_OK) {
        h->result = h->call(h->r, h->at);
        h->r->d->CtxPop(&c);
    }
    atomic_store(&h->done, 1);
    return NULL;
}

/* Makes the call on another thread while a stream is blocked: does it return before the gate opens? *result is its. */
static enum outcome returns_while_blocked(rules *r, cu_result (*call)(rules *, cu_ptr), cu_ptr at, bool *returned)
{
    helper h = {r, call, at, CU_OK, 0};
    cu_stream s = stream(r);
    int g = gate(r, s), patience = 60;
    pthread_t thread;

    MUST(g >= 0 && blocked(r, s));
    MUST(pthread_create(&thread, NULL, run_helper, &h) == 0);
    while (!atomic_load(&h.done) && patience--)
        sleep_ms(1);
    *returned = atomic_load(&h.done);
    open_gate(r, g);
    pthread_join(thread, NULL);
    MUST(h.result == CU_OK);
    return OK;
}

/* ---- rules: the driver, errors, contexts ----------------------------------------------------- */

static enum outcome rule_names(rules *r)
{
    const char *name = NULL, *text = NULL;
    GIVES(r->d->GetErrorName(CU_INVALID_VALUE, &name), CU_OK);
    MUST(name && strcmp(name, "CUDA_ERROR_INVALID_VALUE") == 0);
    GIVES(r->d->GetErrorName(CU_NOT_READY, &name), CU_OK);
    MUST(name && strcmp(name, "CUDA_ERROR_NOT_READY") == 0);
    GIVES(r->d->GetErrorString(CU_OUT_OF_MEMORY, &text), CU_OK);
    MUST(text && *text);
    REFUSED(r->d->GetErrorName(987654, &name));
    return OK;
}

static enum outcome rule_device(rules *r)
{
    int value = -1;
    cu_dev dev;
    REFUSED(r->d->DeviceGet(&dev, 1000));
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_SM_COUNT, r->device[0]), CU_OK);
    MUST(value > 0);
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_VMM, r->device[0]), CU_OK);
    MUST(value == 1);
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_HANDLE_FD, r->device[0]), CU_OK);
    MUST(value == 1);
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_STREAM_WAIT_64, r->device[0]), CU_OK);
    MUST(value == 1);
    return OK;
}

static enum outcome rule_context_needed(rules *r)
{
    cu_context c;
    cu_stream s = NULL;
    cu_event e = NULL;
    cu_module m = NULL;
    cu_ptr p = 0;
    void *h = NULL;
    cu_result result[5];

    GIVES(r->d->CtxPop(&c), CU_OK);
    result[0] = r->d->MemAlloc(&p, 64);
    result[1] = r->d->MemHostAlloc(&h, 64, 0);
    result[2] = r->d->StreamCreate(&s, CU_STREAM_NON_BLOCKING, 0);
    result[3] = r->d->EventCreate(&e, CU_EVENT_DISABLE_TIMING);
    result[4] = r->d->ModuleLoadData(&m, ptx);
    GIVES(r->d->CtxPush(c), CU_OK);
    for (int i = 0; i < 5; i++) {
        snprintf(r->why, sizeof r->why, "call %d gives %d without a context", i, result[i]);
        if (result[i] != CU_INVALID_CONTEXT)
            return FAILED;
    }
    return OK;
}

static enum outcome rule_context_stack(rules *r)
{
    cu_context again = NULL, a = NULL, b = NULL;
    GIVES(r->d->PrimaryRetain(&again, r->device[0]), CU_OK);
    GIVES(r->d->PrimaryRelease(r->device[0]), CU_OK);
    MUST(again == r->context[0]);
    GIVES(r->d->CtxPush(r->context[0]), CU_OK);
    GIVES(r->d->CtxPop(&a), CU_OK);
    MUST(a == r->context[0]);
    GIVES(r->d->CtxPop(&b), CU_OK);
    a = NULL;
    int empty = r->d->CtxPop(&a);
    GIVES(r->d->CtxPush(b), CU_OK);
    MUST(b == r->context[0] && empty == CU_INVALID_CONTEXT);
    return OK;
}

static enum outcome rule_priorities(rules *r)
{
    int least = -100, greatest = 100;
    cu_stream s = NULL;
    GIVES(r->d->CtxGetStreamPriorityRange(&least, &greatest), CU_OK);
    MUST(greatest <= least);
    GIVES(r->d->StreamCreate(&s, CU_STREAM_NON_BLOCKING, greatest), CU_OK);
    keep(r, A_STREAM, (uintptr_t)s, 0);
    MUST(dry(r, s));
    return OK;
}

/* ---- rules: memory --------------------------------------------------------------------------- */

static enum outcome rule_two_mappings(rules *r)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes);
    cu_ptr a = mapping(r, h, bytes, 0), b = mapping(r, h, bytes, 0);
    MUST(h && a && b && a != b);
    MUST(put_word(r, a + 64, 7) && get_word(r, b + 64) == 7);
    return OK;
}

static enum outcome rule_handle_released(rules *r)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes);
    cu_ptr a = mapping(r, h, bytes, 0);
    MUST(h && a);
    GIVES(r->d->MemRelease(h), CU_OK);
    forget(r, A_HANDLE, h);
    MUST(put_word(r, a, 9) && get_word(r, a) == 9); /* what is mapped stays */
    return OK;
}

static enum outcome rule_export(rules *r)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes), again = 0;
    cu_ptr a = mapping(r, h, bytes, 0), b;
    int fd = -1;
    struct stat st;
    MUST(h && a);
    GIVES(r->d->MemExport(&fd, h, CU_HANDLE_FD, 0), CU_OK);
    MUST(fd >= 0 && fstat(fd, &st) == 0);
    keep(r, AN_FD, (uint64_t)fd, 0);
    GIVES(r->d->MemImport(&again, (void *)(intptr_t)fd, CU_HANDLE_FD), CU_OK);
    keep(r, A_HANDLE, again, 0);
    close(fd); /* the handle needs it no more */
    forget(r, AN_FD, (uint64_t)fd);
    b = mapping(r, again, bytes, 0);
    MUST(b && put_word(r, b + 8, 11) && get_word(r, a + 8) == 11);
    GIVES(r->d->MemUnmap(a, bytes), CU_OK);
    forget(r, A_MAPPING, a);
    GIVES(r->d->MemRelease(h), CU_OK);
    forget(r, A_HANDLE, h);
    MUST(get_word(r, b + 8) == 11); /* the importer's reference holds it */
    return OK;
}

static enum outcome rule_import_nonsense(rules *r)
{
    cu_handle h = 0;
    int pipes[2];
    cu_result result;
    MUST(pipe(pipes) == 0);
    result = r->d->MemImport(&h, (void *)(intptr_t)pipes[0], CU_HANDLE_FD);
    close(pipes[0]);
    close(pipes[1]);
    MUST(result != CU_OK);
    return OK;
}

static enum outcome rule_granularity(rules *r)
{
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD,
                          .location = {CU_LOCATION_DEVICE, r->device[0]}};
    size_t bytes = 0;
    cu_handle h = 0;
    GIVES(r->d->MemGetAllocationGranularity(&bytes, &prop, 0), CU_OK);
    MUST(bytes >= 4096 && (bytes & (bytes - 1)) == 0);
    GIVES(r->d->MemCreate(&h, bytes + 512, &prop, 0), CU_INVALID_VALUE);
    GIVES(r->d->MemCreate(&h, 0, &prop, 0), CU_INVALID_VALUE);
    return OK;
}

static enum outcome rule_address_in_use(rules *r)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes);
    cu_ptr a = mapping(r, h, bytes, 0);
    MUST(h && a);
    REFUSED(r->d->MemAddressFree(a, bytes));
    REFUSED(r->d->MemMap(a, bytes, 0, h, 0));
    return OK;
}

static enum outcome rule_access_once(rules *r)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes);
    cu_ptr a = mapping(r, h, bytes, 0);
    cu_access again = {{CU_LOCATION_DEVICE, r->device[0]}, CU_ACCESS_READ_WRITE};
    MUST(h && a);
    r->note = r->d->MemSetAccess(a, bytes, &again, 1) == CU_OK ? "the same again is fine" : "the same again is refused";
    MUST(put_word(r, a, 5) && get_word(r, a) == 5); /* it stays */
    return OK;
}

static enum outcome rule_free_unknown(rules *r)
{
    cu_ptr p = device_memory(r, 4096);
    MUST(p);
    REFUSED(r->d->MemFree(p + 256));
    GIVES(r->d->MemFree(0), CU_OK);
    return OK;
}

static enum outcome rule_pointers(rules *r)
{
    cu_ptr p = device_memory(r, 4096), q = 0;
    void *h = host_memory(r, 4096);
    unsigned type = 0;
    int ordinal = -1;
    cu_context c = NULL;
    MUST(p && h);
    GIVES(r->d->PointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, p + 100), CU_OK);
    MUST(type == CU_MEMORY_DEVICE);
    GIVES(r->d->PointerGetAttribute(&ordinal, CU_POINTER_DEVICE_ORDINAL, p), CU_OK);
    MUST(ordinal == r->device[0]);
    GIVES(r->d->PointerGetAttribute(&c, CU_POINTER_CONTEXT, p), CU_OK);
    MUST(c == r->context[0]);
    GIVES(r->d->MemHostGetDevicePointer(&q, h, 0), CU_OK);
    MUST(q == (cu_ptr)(uintptr_t)h);
    GIVES(r->d->PointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, q), CU_OK);
    MUST(type == 1);
    GIVES(r->d->PointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, (cu_ptr)(uintptr_t)&type), CU_INVALID_VALUE);
    return OK;
}

/* ---- rules: copies --------------------------------------------------------------------------- */

static void pattern(unsigned char *at, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (unsigned char)(i * 7 + i / 251 + seed);
}

static enum outcome rule_copy(rules *r)
{
    enum { N = 5000 };
    unsigned char in[N], out[N];
    cu_ptr a = device_memory(r, N), b = device_memory(r, N);
    cu_stream s = stream(r);
    pattern(in, N, 1);
    MUST(a && b && s && put(r, a, in, N));
    GIVES(r->d->MemsetD8Async(b, 0x11, N, s), CU_OK);
    GIVES(r->d->MemcpyAsync(b + 3, a + 1, 4001, s), CU_OK);
    GIVES(r->d->MemcpyAsync(b, a, 0, s), CU_OK);
    MUST(dry(r, s) && get(r, out, b, N));
    MUST(out[2] == 0x11 && out[4004] == 0x11 && memcmp(out + 3, in + 1, 4001) == 0);
    return OK;
}

static enum outcome rule_copy_2d(rules *r)
{
    enum { N = 8192, WIDTH = 37, ROWS = 41, FROM = 101, TO = 53 };
    unsigned char in[N], out[N];
    cu_ptr a = device_memory(r, N), b = device_memory(r, N);
    cu_stream s = stream(r);
    cu_copy2d c = {.src_type = CU_MEMORY_DEVICE, .src_device = a + 1, .src_pitch = FROM, .dst_type = CU_MEMORY_DEVICE,
                   .dst_device = b + 7, .dst_pitch = TO, .width = WIDTH, .height = ROWS};
    pattern(in, N, 2);
    MUST(a && b && s && put(r, a, in, N));
    GIVES(r->d->MemsetD8Async(b, 0x22, N, s), CU_OK);
    GIVES(r->d->Memcpy2DAsync(&c, s), CU_OK);
    GIVES(r->d->MemsetD2D8Async(b + 5000, 61, 0x33, 13, 5, s), CU_OK);
    MUST(dry(r, s) && get(r, out, b, N));
    for (int i = 0; i < ROWS; i++) {
        MUST(memcmp(out + 7 + i * TO, in + 1 + i * FROM, WIDTH) == 0);
        MUST(out[7 + i * TO + WIDTH] == 0x22);
    }
    for (int i = 0; i < 5; i++)
        MUST(out[5000 + i * 61] == 0x33 && out[5012 + i * 61] == 0x33 && out[5013 + i * 61] == 0x22);
    return OK;
}

static enum outcome rule_pitch(rules *r)
{
    cu_ptr a = device_memory(r, 8192);
    cu_stream s = stream(r);
    cu_copy2d c = {.src_type = CU_MEMORY_DEVICE, .src_device = a, .src_pitch = 16, .dst_type = CU_MEMORY_DEVICE,
                   .dst_device = a + 4096, .dst_pitch = 64, .width = 32, .height = 2};
    MUST(a && s);
    GIVES(r->d->Memcpy2DAsync(&c, s), CU_INVALID_VALUE); /* rows that overlap */
    return OK;
}

/* Rows that are equally far apart, each in an allocation of its own. */
static enum outcome rule_copy_2d_apart(rules *r)
{
    enum { ROWS = 3, BYTES = 4 << 20 };
    cu_ptr from[ROWS], to = device_memory(r, 4096);
    cu_stream s = stream(r);
    cu_copy2d c = {.src_type = CU_MEMORY_DEVICE, .dst_type = CU_MEMORY_DEVICE, .dst_device = to, .dst_pitch = 16,
                   .width = 8, .height = ROWS};
    cu_result result;
    uint64_t words[2 * ROWS];

    for (int i = 0; i < ROWS; i++)
        MUST((from[i] = device_memory(r, BYTES)) && put_word(r, from[i], (uint64_t)i + 1));
    NEEDS(from[1] - from[0] == from[2] - from[1] && from[1] > from[0] && from[1] - from[0] < INT32_MAX,
          "allocations are not equally far apart");
    c.src_device = from[0];
    c.src_pitch = from[1] - from[0];
    result = r->d->Memcpy2DAsync(&c, s);
    r->note = result == CU_OK ? "copied" : "refused";
    MUST(to && dry(r, s));
    MUST(get(r, words, to, sizeof words));
    MUST(result != CU_OK || (words[0] == 1 && words[2] == 2 && words[4] == 3));
    return OK;
}

static enum outcome rule_batch(rules *r)
{
    enum { COPIES = 40, EACH = 300 };
    unsigned char in[COPIES * EACH], out[COPIES * EACH];
    cu_ptr a = device_memory(r, sizeof in), b = device_memory(r, sizeof in), to[COPIES], from[COPIES];
    size_t bytes[COPIES], first[2] = {0, 10};
    cu_copy_attributes how[2] = {{.src_access_order = CU_ORDER_STREAM},
                                 {.src_access_order = CU_ORDER_STREAM, .flags = CU_COPY_PREFER_OVERLAP}};
    cu_stream s = stream(r);
    NEEDS(r->d->MemcpyBatchAsync, "no cuMemcpyBatchAsync");
    pattern(in, sizeof in, 3);
    MUST(a && b && s && put(r, a, in, sizeof in));
    for (int i = 0; i < COPIES; i++) {
        to[i] = b + (cu_ptr)(COPIES - 1 - i) * EACH;
        from[i] = a + (cu_ptr)i * EACH;
        bytes[i] = EACH - (size_t)i;
    }
    GIVES(r->d->MemsetD8Async(b, 0x44, sizeof in, s), CU_OK);
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, COPIES, how, first, 2, s), CU_OK);
    memset(to, 0, sizeof to); /* read at the call */
    memset(from, 0, sizeof from);
    MUST(dry(r, s) && get(r, out, b, sizeof out));
    for (int i = 0; i < COPIES; i++) {
        const unsigned char *at = out + (COPIES - 1 - i) * EACH;
        MUST(memcmp(at, in + i * EACH, EACH - (size_t)i) == 0 && (i == 0 || at[EACH - i] == 0x44));
    }
    return OK;
}

static enum outcome rule_batch_refused(rules *r)
{
    cu_ptr a = device_memory(r, 4096), to[2] = {a, a + 512}, from[2] = {a + 1024, a + 2048};
    size_t bytes[2] = {64, 64}, first[2] = {0, 0};
    cu_copy_attributes how[3] = {{.src_access_order = CU_ORDER_STREAM}, {.src_access_order = CU_ORDER_STREAM}};
    cu_stream s = stream(r);
    NEEDS(r->d->MemcpyBatchAsync, "no cuMemcpyBatchAsync");
    MUST(a && s);
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 2, s), CU_INVALID_VALUE); /* not ascending */
    first[0] = 1;
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 1, s), CU_INVALID_VALUE); /* not from 0 */
    first[0] = 0;
    how[0].src_access_order = 0;
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 1, s), CU_INVALID_VALUE);
    how[0].src_access_order = CU_ORDER_STREAM;
    REFUSED(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 1, NULL)); /* the legacy stream */
    return OK;
}

/* ---- rules: streams and words ---------------------------------------------------------------- */

static enum outcome rule_stream_order(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r), other = stream(r);
    int g;
    MUST(a && s && other && put_word(r, a, 1) && (g = gate(r, s)) >= 0);
    GIVES(one_word(r, s, CU_OP_WRITE_64, a, 2), CU_OK);
    GIVES(r->d->MemcpyAsync(a + 64, a, 8, s), CU_OK);
    MUST(blocked(r, s) && dry(r, other)); /* other streams go on */
    GIVES(r->d->StreamQuery(s), CU_NOT_READY);
    MUST(get_word(r, a) == 1);
    open_gate(r, g);
    MUST(dry(r, s));
    GIVES(r->d->StreamSynchronize(s), CU_OK);
    MUST(get_word(r, a + 64) == 2);
    return OK;
}

static enum outcome rule_wait_cyclic(rules *r)
{
    static const struct { uint64_t word, value; bool passes; } cases[] = {
        {5, 5, true},          {6, 5, true},           {4, 5, false},
        {3, UINT64_MAX, true}, {UINT64_MAX, 3, false}, {UINT64_C(1) << 62, 0, true}, {(UINT64_C(1) << 63) + 1, 0, false}};
    cu_ptr a = device_memory(r, 4096);
    MUST(a);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cu_stream s = stream(r);
        MUST(s && put_word(r, a, cases[i].word));
        GIVES(one_word(r, s, CU_OP_WAIT_64, a, cases[i].value), CU_OK);
        MUST(cases[i].passes ? dry(r, s) : blocked(r, s));
        MUST(put_word(r, a, cases[i].value) && dry(r, s));
        give_back(r);
        a = device_memory(r, 4096);
        MUST(a);
    }
    return OK;
}

static enum outcome rule_batch_of_words(rules *r)
{
    _Atomic uint64_t *crumb = host_memory(r, 64);
    cu_ptr a = device_memory(r, 4096), c = 0;
    cu_stream s = stream(r), other = stream(r);
    cu_stream_op ops[4];
    int64_t until = tide_now_ns() + (int64_t)PATIENCE_MS * 1000000;
    MUST(crumb && a && s && other && put_word(r, a, 0) && put_word(r, a + 64, 0));
    GIVES(r->d->MemHostGetDevicePointer(&c, (void *)crumb, 0), CU_OK);
    atomic_store(crumb, 5);
    ops[0] = word_op(CU_OP_WRITE_64, c, 17, 0);
    ops[1] = word_op(CU_OP_WAIT_64, a, 1, CU_WAIT_GEQ);
    ops[2] = word_op(CU_OP_WAIT_64, a + 64, 1, CU_WAIT_GEQ);
    ops[3] = word_op(CU_OP_WRITE_64, c, 0, 0);
    GIVES(r->d->StreamBatchMemOp(s, 4, ops, 0), CU_OK);
    while (atomic_load(crumb) != 17 && tide_now_ns() < until) /* seen by the host while the stream waits */
        sleep_ms(1);
    MUST(atomic_load(crumb) == 17);
    GIVES(one_word(r, other, CU_OP_WRITE_64, a, 1), CU_OK);
    MUST(dry(r, other) && blocked(r, s));
    MUST(atomic_load(crumb) == 17);
    GIVES(one_word(r, other, CU_OP_WRITE_64, a + 64, 2), CU_OK);
    MUST(dry(r, other) && dry(r, s) && atomic_load(crumb) == 0);
    return OK;
}

/* A word that a copy brings releases a wait, and what was written before the copy is there. */
static enum outcome rule_copied_word(rules *r)
{
    cu_ptr a = device_memory(r, 1 << 20), b = device_memory(r, 1 << 20);
    cu_stream s = stream(r), other = stream(r);
    MUST(a && b && s && other && put_word(r, a, 0) && put_word(r, a + 64, 0));
    GIVES(one_word(r, s, CU_OP_WAIT_64, a, 3), CU_OK);
    GIVES(r->d->MemcpyAsync(a + 128, b + 4096 + 8, 8, s), CU_OK);
    GIVES(r->d->MemsetD8Async(b + 4096, 0x55, 500000, other), CU_OK);
    GIVES(one_word(r, other, CU_OP_WRITE_64, a + 64, 3), CU_OK); /* staged, */
    GIVES(r->d->MemcpyAsync(a, a + 64, 8, other), CU_OK);        /* then copied */
    MUST(dry(r, other) && dry(r, s));
    MUST(get_word(r, a + 128) == UINT64_C(0x5555555555555555));
    return OK;
}

/* A source word may be written again when the copy has read it: the stream's order is enough. */
static enum outcome rule_staging(rules *r)
{
    enum { POSTS = 50 };
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r);
    uint64_t words[POSTS];
    MUST(a && s);
    for (uint64_t i = 0; i < POSTS; i++) {
        GIVES(one_word(r, s, CU_OP_WRITE_64, a, i + 1), CU_OK);
        GIVES(r->d->MemcpyAsync(a + 8 * (i + 1), a, 8, s), CU_OK);
    }
    MUST(dry(r, s) && get(r, words, a + 8, sizeof words));
    for (uint64_t i = 0; i < POSTS; i++)
        MUST(words[i] == i + 1);
    return OK;
}

static enum outcome rule_words_refused(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r);
    cu_stream_op op = word_op(CU_OP_WRITE_64, a, 1, 0), many[255];
    MUST(a && s);
    REFUSED(r->d->StreamBatchMemOp(s, 1, &op, 1));
    op.at.flags = 1; /* a write without its barrier: not with this version of the call */
    REFUSED(r->d->StreamBatchMemOp(s, 1, &op, 0));
    op.at.flags = 0;
    for (int i = 0; i < 255; i++)
        many[i] = op;
    GIVES(r->d->StreamBatchMemOp(s, 255, many, 0), CU_OK);
    MUST(dry(r, s) && get_word(r, a) == 1);
    op.at.operation = 77;
    REFUSED(r->d->StreamBatchMemOp(s, 1, &op, 0));
    return OK;
}

static enum outcome rule_stream_destroyed(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r);
    int g, patience = 30;
    MUST(a && s && put_word(r, a, 1) && (g = gate(r, s)) >= 0);
    GIVES(one_word(r, s, CU_OP_WRITE_64, a, 2), CU_OK);
    GIVES(r->d->StreamDestroy(s), CU_OK); /* what is queued still runs */
    forget(r, A_STREAM, (uintptr_t)s);
    MUST(get_word(r, a) == 1);
    open_gate(r, g);
    while (get_word(r, a) != 2 && --patience)
        sleep_ms(10);
    MUST(patience);
    return OK;
}

/* As many streams as there are hardware queues, less the two of others: none waits for another one. */
static enum outcome rule_hardware_queues(rules *r)
{
    const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int n = text && atoi(text) > 0 ? atoi(text) : 8;
    cu_stream s[32], free_one;
    n = n > 32 ? 32 : n;
    MUST(n > 2);
    for (int i = 0; i < n - 2; i++)
        MUST((s[i] = stream(r)) && gate(r, s[i]) >= 0);
    free_one = stream(r);
    GIVES(one_word(r, free_one, CU_OP_WRITE_64, r->gates_device + (GATES - 1) * 8, 1), CU_OK);
    MUST(dry(r, free_one) && blocked(r, s[0]) && blocked(r, s[n - 3]));
    return OK;
}

static enum outcome rule_capture(rules *r)
{
    int status = 7;
    cu_stream s = stream(r);
    GIVES(r->d->StreamIsCapturing(s, &status), CU_OK);
    MUST(status == CU_CAPTURE_NONE);
    status = 7;
    GIVES(r->d->StreamIsCapturing(NULL, &status), CU_OK);
    MUST(status == CU_CAPTURE_NONE);
    return OK;
}

/* ---- rules: events --------------------------------------------------------------------------- */

static enum outcome rule_event(rules *r)
{
    cu_stream s = stream(r), other = stream(r);
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && (g = gate(r, s)) >= 0);
    GIVES(r->d->EventQuery(e), CU_OK); /* never recorded */
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    MUST(blocked(r, other));
    GIVES(r->d->EventQuery(e), CU_NOT_READY);
    open_gate(r, g);
    MUST(dry(r, other));
    GIVES(r->d->EventQuery(e), CU_OK);
    return OK;
}

static enum outcome rule_event_unrecorded(rules *r)
{
    cu_stream s = stream(r), other = stream(r);
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && (g = gate(r, s)) >= 0);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK); /* before the record: no wait */
    GIVES(r->d->EventRecord(e, s), CU_OK);
    MUST(dry(r, other) && blocked(r, s));
    open_gate(r, g);
    return OK;
}

static enum outcome rule_event_binds(rules *r)
{
    cu_stream s = stream(r), idle = stream(r), other = stream(r);
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && idle && other && e && (g = gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    GIVES(r->d->EventRecord(e, idle), CU_OK); /* a later record, which happens at once */
    MUST(dry(r, idle));
    GIVES(r->d->EventQuery(e), CU_OK);
    MUST(blocked(r, other)); /* still for the first one */
    open_gate(r, g);
    MUST(dry(r, other));
    return OK;
}

static enum outcome rule_event_destroyed(rules *r)
{
    cu_stream s = stream(r), other = stream(r);
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && (g = gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    GIVES(r->d->EventDestroy(e), CU_OK);
    forget(r, AN_EVENT, (uintptr_t)e);
    MUST(blocked(r, other));
    open_gate(r, g);
    MUST(dry(r, other));
    return OK;
}

static enum outcome rule_event_legacy(rules *r)
{
    cu_stream s = stream(r), other = stream(r);
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING), f = event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && f && (g = gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, NULL), CU_OK); /* waits for no stream that is non-blocking */
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    MUST(dry(r, other));
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(NULL, e, 0), CU_OK);
    GIVES(r->d->EventRecord(f, NULL), CU_OK);
    sleep_ms(GRACE_MS);
    GIVES(r->d->EventQuery(f), CU_NOT_READY);
    MUST(dry(r, other)); /* nor do they wait for it */
    open_gate(r, g);
    MUST(dry(r, NULL));
    GIVES(r->d->EventQuery(f), CU_OK);
    return OK;
}

static enum outcome rule_event_time(rules *r)
{
    cu_stream s = stream(r);
    cu_event a = event(r, 0), b = event(r, 0), untimed = event(r, CU_EVENT_DISABLE_TIMING);
    float ms = -1;
    int g;
    MUST(s && a && b && untimed);
    GIVES(r->d->EventRecord(a, s), CU_OK);
    MUST((g = gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(b, s), CU_OK);
    GIVES(r->d->EventRecord(untimed, s), CU_OK);
    sleep_ms(GRACE_MS);
    GIVES(r->d->EventElapsedTime(&ms, a, b), CU_NOT_READY);
    open_gate(r, g);
    MUST(dry(r, s));
    GIVES(r->d->EventElapsedTime(&ms, a, b), CU_OK);
    MUST(ms >= 1 && ms < 1000 * PATIENCE_MS);
    REFUSED(r->d->EventElapsedTime(&ms, a, untimed));
    return OK;
}

/* ---- rules: kernels -------------------------------------------------------------------------- */

static enum outcome rule_kernel(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r);
    cu_function f = NULL;
    rules_kernel args = {a + 64, a, 5};
    int g;
    MUST(a && s && put_word(r, a, 100));
    GIVES(kernel(r, &f), CU_OK);
    MUST((g = gate(r, s)) >= 0);
    GIVES(launch(r, f, s, &args), CU_OK);
    args = (rules_kernel){a + 128, a, 7}; /* the launch has its own copy */
    open_gate(r, g);
    MUST(dry(r, s) && get_word(r, a + 64) == 105);
    return OK;
}

static enum outcome rule_kernel_refused(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r);
    cu_function f = NULL, none = NULL;
    cu_module m = NULL;
    rules_kernel args = {a, a + 64, 0};
    void *parameters[] = {&args};
    int most = 0;
    MUST(a && s && put_word(r, a + 64, 0));
    GIVES(kernel(r, &f), CU_OK);
    GIVES(r->d->LaunchKernel(f, 0, 1, 1, 32, 1, 1, 0, s, parameters, NULL), CU_INVALID_VALUE);
    REFUSED(r->d->LaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, s, parameters, NULL));
    REFUSED(r->d->LaunchKernel(f, 1, 1, 1, 32, 1, 1, 64 << 10, s, parameters, NULL)); /* more than 48 KiB: */
    GIVES(r->d->DeviceGetAttribute(&most, CU_ATTR_SHARED_PER_BLOCK_OPTIN, r->device[0]), CU_OK);
    GIVES(r->d->FuncSetAttribute(f, CU_FUNC_MAX_DYNAMIC_SHARED, most), CU_OK); /* only when asked for */
    GIVES(r->d->LaunchKernel(f, 1, 1, 1, 32, 1, 1, (unsigned)most, s, parameters, NULL), CU_OK);
    REFUSED(r->d->FuncSetAttribute(f, CU_FUNC_MAX_DYNAMIC_SHARED, most + 1024));
    MUST(dry(r, s));
    GIVES(r->d->ModuleLoadData(&m, ptx), CU_OK);
    keep(r, A_MODULE, (uintptr_t)m, 0);
    GIVES(r->d->ModuleGetFunction(&none, m, "no_such_kernel"), CU_NOT_FOUND);
    return OK;
}

/* ---- rules: what waits for a busy device, and what does not ---------------------------------- */

static cu_result do_free(rules *r, cu_ptr at) { return r->d->MemFree(at); }
static cu_result do_free_host(rules *r, cu_ptr at) { return r->d->MemFreeHost((void *)(uintptr_t)at); }

static enum outcome rule_free_waits(rules *r)
{
    cu_ptr p = 0;
    void *h = NULL;
    bool returned = false;
    enum outcome o;
    GIVES(r->d->MemAlloc(&p, 1 << 20), CU_OK);
    o = returns_while_blocked(r, do_free, p, &returned);
    if (o != OK)
        return o;
    MUST(!returned);
    GIVES(r->d->MemHostAlloc(&h, 1 << 20, CU_HOSTALLOC_PORTABLE), CU_OK);
    o = returns_while_blocked(r, do_free_host, (cu_ptr)(uintptr_t)h, &returned);
    if (o != OK)
        return o;
    MUST(!returned);
    return OK;
}

static cu_result do_create(rules *r, cu_ptr none)
{
    cu_stream s = stream(r);
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING);
    (void)none;
    return s && e && device_memory(r, 1 << 20) && host_memory(r, 1 << 16) ? CU_OK : CU_INVALID_VALUE;
}

static enum outcome rule_creation_does_not_wait(rules *r)
{
    bool returned = false;
    enum outcome o = returns_while_blocked(r, do_create, 0, &returned);
    if (o != OK)
        return o;
    MUST(returned);
    return OK;
}

static cu_result do_map(rules *r, cu_ptr none)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes);
    cu_ptr p = mapping(r, h, bytes, 0);
    (void)none;
    if (!p)
        return CU_INVALID_VALUE;
    forget(r, A_MAPPING, p);
    return r->d->MemUnmap(p, bytes);
}

static enum outcome rule_mapping_does_not_wait(rules *r)
{
    bool returned = false;
    enum outcome o = returns_while_blocked(r, do_map, 0, &returned);
    if (o != OK)
        return o;
    MUST(returned);
    return OK;
}

/* ---- rules: peers ---------------------------------------------------------------------------- */

#define TWO_DEVICES NEEDS(r->n_devices == 2, "one device")

static enum outcome rule_peers(rules *r)
{
    int can = 0, value = 0;
    TWO_DEVICES;
    GIVES(r->d->DeviceCanAccessPeer(&can, r->device[0], r->device[1]), CU_OK);
    GIVES(r->d->DeviceGetP2PAttribute(&value, CU_P2P_ACCESS, r->device[0], r->device[1]), CU_OK);
    MUST(can == 1 && value == 1);
    return OK;
}

/* Memory of device 1 that device 0 and device 1 have mapped. */
static bool shared(rules *r, cu_ptr *near, cu_ptr *far)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 1, &bytes);
    *near = mapping(r, h, bytes, 0); /* as device 0 sees it */
    *far = mapping(r, h, bytes, 1);
    return *near && *far;
}

/* A wait of device 1 on its own memory is released by a copy of device 0, behind data. */
static enum outcome rule_peer_copy(rules *r)
{
    enum { N = 100000 };
    cu_ptr near = 0, far = 0, out, in = device_memory(r, N);
    cu_stream s = stream(r), t;
    cu_context c;
    uint64_t value = 0;
    cu_result result = CU_OK;
    TWO_DEVICES;
    MUST(in && s && shared(r, &near, &far));
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = stream(r);
    out = device_memory(r, 4096);
    result = one_word(r, t, CU_OP_WAIT_64, far, 1);
    if (result == CU_OK)
        result = r->d->MemcpyAsync(out, far + 4096, 8, t);
    r->d->CtxPop(&c);
    MUST(result == CU_OK && t && out);
    GIVES(r->d->MemsetD8Async(in, 0x66, 32768, s), CU_OK);
    GIVES(r->d->MemcpyAsync(near + 4096, in, 32768, s), CU_OK);
    GIVES(one_word(r, s, CU_OP_WRITE_64, in + 40000, 1), CU_OK);
    GIVES(r->d->MemcpyAsync(near, in + 40000, 8, s), CU_OK);
    MUST(dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    result = dry(r, t) && get(r, &value, out, 8) ? CU_OK : CU_NOT_READY;
    r->d->CtxPop(&c);
    MUST(result == CU_OK && value == UINT64_C(0x6666666666666666));
    return OK;
}

static enum outcome rule_peer_kernel(rules *r)
{
    cu_ptr near = 0, far = 0, a = device_memory(r, 4096);
    cu_stream s = stream(r);
    cu_function f = NULL;
    cu_context c;
    rules_kernel args;
    uint64_t value = 0;
    bool read;
    TWO_DEVICES;
    MUST(a && s && shared(r, &near, &far) && put_word(r, a, 30));
    GIVES(kernel(r, &f), CU_OK);
    args = (rules_kernel){near + 8, a, 3};
    GIVES(launch(r, f, s, &args), CU_OK); /* a kernel may store to a peer */
    MUST(dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    read = get(r, &value, far + 8, 8);
    r->d->CtxPop(&c);
    MUST(read && value == 33);
    return OK;
}

static enum outcome rule_peer_events(rules *r)
{
    cu_stream s = stream(r), t;
    cu_event e = event(r, CU_EVENT_DISABLE_TIMING);
    cu_context c;
    cu_result record, wait;
    bool was_blocked, was_dry;
    int g;
    TWO_DEVICES;
    MUST(s && e && (g = gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = stream(r);
    wait = r->d->StreamWaitEvent(t, e, 0); /* of another device: fine */
    was_blocked = blocked(r, t);
    open_gate(r, g);
    was_dry = dry(r, t);
    record = r->d->EventRecord(e, t); /* on another device's stream: not */
    r->d->CtxPop(&c);
    MUST(wait == CU_OK && was_blocked && was_dry && record != CU_OK);
    return OK;
}

static enum outcome rule_peer_stream(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_function f = NULL;
    cu_stream t;
    cu_context c;
    rules_kernel args = {a, a + 64, 0};
    TWO_DEVICES;
    MUST(a && put_word(r, a + 64, 0));
    GIVES(kernel(r, &f), CU_OK);
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = stream(r);
    r->d->CtxPop(&c);
    MUST(t);
    REFUSED(launch(r, f, t, &args)); /* of another device */
    return OK;
}

/* ---- rules whose breach may leave a context that is good for nothing: last -------------------- */

static enum outcome rule_range(rules *r)
{
    cu_ptr a = device_memory(r, 4096), b = device_memory(r, 4096);
    cu_stream s = stream(r);
    MUST(a && b && s);
    GIVES(r->d->MemcpyAsync(a, b, (size_t)1 << 40, s), CU_INVALID_VALUE);
    MUST(dry(r, s));
    return OK;
}

static enum outcome rule_word_alignment(rules *r)
{
    cu_ptr a = device_memory(r, 4096);
    cu_stream s = stream(r);
    MUST(a && s);
    REFUSED(one_word(r, s, CU_OP_WRITE_64, a + 4, 1));
    MUST(dry(r, s));
    return OK;
}

static enum outcome rule_no_access(rules *r)
{
    size_t bytes = 0;
    cu_handle h = handle_on(r, 0, &bytes);
    cu_ptr a = mapping(r, h, bytes, -1), b = device_memory(r, 4096);
    cu_stream s = stream(r);
    MUST(a && b && s);
    REFUSED(r->d->MemcpyAsync(b, a, 64, s));
    MUST(dry(r, s));
    return OK;
}

/* Where a stream operation writes words of a peer at all, the word comes behind the bytes that were copied before it. */
static enum outcome rule_peer_word_order(rules *r)
{
    enum { ROUNDS = 60, BYTES = 4 << 20, LOOKS = 4 };
    static const uint32_t at[LOOKS] = {64, BYTES / 3 / 8 * 8, BYTES / 2, BYTES - 8};
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD};
    cu_ptr near = 0, far = 0, in = device_memory(r, BYTES), out = 0;
    cu_stream s = stream(r), t = NULL;
    cu_handle h = 0;
    cu_context c;
    uint64_t words[ROUNDS * LOOKS];
    bool ok = true;
    TWO_DEVICES;
    prop.location = (cu_location){CU_LOCATION_DEVICE, r->device[1]};
    GIVES(r->d->MemCreate(&h, BYTES, &prop, 0), CU_OK);
    keep(r, A_HANDLE, h, 0);
    near = mapping(r, h, BYTES, 0);
    far = mapping(r, h, BYTES, 1);
    MUST(in && s && near && far);
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(dry(r, s));
    NEEDS(one_word(r, s, CU_OP_WRITE_64, near, 0) == CU_OK, "refused");
    MUST(dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = stream(r);
    out = device_memory(r, sizeof words);
    r->d->CtxPop(&c);
    MUST(t && out);
    for (uint32_t i = 0; i < ROUNDS && ok; i++) {
        r->d->CtxPush(r->context[1]);
        ok = one_word(r, t, CU_OP_WAIT_64, far, i + 1) == CU_OK;
        for (uint32_t k = 0; k < LOOKS && ok; k++)
            ok = r->d->MemcpyAsync(out + (i * LOOKS + k) * 8, far + at[k], 8, t) == CU_OK;
        r->d->CtxPop(&c);
        ok = ok && r->d->MemsetD8Async(in, (unsigned char)(i + 1), BYTES, s) == CU_OK &&
             r->d->MemcpyAsync(near + 64, in + 64, BYTES - 64, s) == CU_OK &&
             one_word(r, s, CU_OP_WRITE_64, near, i + 1) == CU_OK && dry(r, s) && dry(r, t);
    }
    MUST(ok);
    r->d->CtxPush(r->context[1]);
    ok = get(r, words, out, sizeof words);
    r->d->CtxPop(&c);
    MUST(ok);
    for (uint32_t i = 0; i < ROUNDS * LOOKS; i++)
        MUST(words[i] == (i / LOOKS + 1) * UINT64_C(0x0101010101010101));
    return OK;
}

/* What comes of a word of a peer. */
static enum outcome rule_peer_word(rules *r)
{
    cu_ptr near = 0, far = 0;
    cu_stream s = stream(r), t;
    cu_context c;
    cu_result written, awaited;
    uint64_t value = 0;
    bool came;
    TWO_DEVICES;
    MUST(s && shared(r, &near, &far));
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(dry(r, s));
    written = one_word(r, s, CU_OP_WRITE_64, near, 7);
    MUST(dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = stream(r);
    came = get(r, &value, far, 8) && value == 7;
    r->d->CtxPop(&c);
    awaited = one_word(r, s, CU_OP_WAIT_64, near, 9);
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    one_word(r, t, CU_OP_WRITE_64, far, 9);
    r->d->CtxPop(&c);
    MUST(t && dry(r, s));
    r->note = written != CU_OK ? awaited != CU_OK ? "both refused" : "not written, awaited"
              : !came          ? "written into the void"
              : awaited != CU_OK ? "written, not awaited"
                                 : "written and awaited";
    return OK;
}

static const struct { const char *name; enum outcome (*run)(rules *r); } list[] = {
    {"errors have names and texts", rule_names},
    {"attributes: memory mappings, descriptors, 64-bit waits", rule_device},
    {"most calls need a current context", rule_context_needed},
    {"one primary context a device; push and pop nest", rule_context_stack},
    {"greater priorities have lower numbers", rule_priorities},
    {"two mappings show one memory", rule_two_mappings},
    {"a mapping outlives its handle", rule_handle_released},
    {"a handle travels as a file descriptor and holds the memory", rule_export},
    {"importing what is no handle is refused", rule_import_nonsense},
    {"memory comes in multiples of the granularity", rule_granularity},
    {"addresses in use are neither freed nor mapped again", rule_address_in_use},
    {"access that a device has already", rule_access_once},
    {"freeing what was not allocated is refused; 0 is fine", rule_free_unknown},
    {"pointers know their memory, device and context; host memory has one address", rule_pointers},
    {"copies and fills of any alignment", rule_copy},
    {"2-D copies and fills of odd widths and pitches", rule_copy_2d},
    {"2-D copies: pitch at least the width", rule_pitch},
    {"2-D copies whose rows are in several allocations", rule_copy_2d_apart},
    {"a batch of copies: all of them; its arrays are read at the call", rule_batch},
    {"a batch of copies: wrong attributes and the legacy stream are refused", rule_batch_refused},
    {"a stream runs in order, beside the others", rule_stream_order},
    {"waits compare cyclically", rule_wait_cyclic},
    {"words of a batch in order, seen by the host on the way", rule_batch_of_words},
    {"a copied word releases a wait, with what came before it", rule_copied_word},
    {"a staging word is read before the stream writes it again", rule_staging},
    {"255 words are a batch; unknown operations and flags are refused", rule_words_refused},
    {"a destroyed stream finishes its work", rule_stream_destroyed},
    {"blocked streams block no others while there are hardware queues", rule_hardware_queues},
    {"streams are not captured unless asked", rule_capture},
    {"events: record, wait, query", rule_event},
    {"a wait for an event that was never recorded is none", rule_event_unrecorded},
    {"a wait binds to the record before it", rule_event_binds},
    {"a destroyed event is waited for all the same", rule_event_destroyed},
    {"events on the legacy stream, which is apart from non-blocking ones", rule_event_legacy},
    {"time between events that have it", rule_event_time},
    {"a launch copies its arguments", rule_kernel},
    {"launches of wrong shapes are refused; shared memory beyond 48 KiB on request", rule_kernel_refused},
    {"freeing memory waits for a busy device", rule_free_waits},
    {"creating streams, events and memory does not", rule_creation_does_not_wait},
    {"mapping and unmapping does not", rule_mapping_does_not_wait},
    {"peers see each other", rule_peers},
    {"a copy to a peer releases its wait, with what came before it", rule_peer_copy},
    {"a word written to a peer comes behind the bytes", rule_peer_word_order},
    {"a kernel stores to a peer", rule_peer_kernel},
    {"an event is awaited on any device, recorded on its own", rule_peer_events},
    {"a launch on another device's stream is refused", rule_peer_stream},
    {"a copy beyond an allocation is refused", rule_range},
    {"an unaligned word is refused", rule_word_alignment},
    {"memory without access is refused", rule_no_access},
    {"a word of a peer", rule_peer_word},
};

/* ---- all of them ----------------------------------------------------------------------------- */

static bool begin(rules *r, char *why, size_t bytes)
{
    void *gates = NULL;
    cu_result result = r->d->Init(0);
    if (result == CU_OK)
        result = r->d->DeviceGetCount(&r->n_devices);
    if (r->n_devices > 2)
        r->n_devices = 2;
    if (result == CU_OK && r->n_devices < 1)
        result = CU_NO_DEVICE;
    for (int i = 0; i < r->n_devices && result == CU_OK; i++) {
        result = r->d->DeviceGet(&r->device[i], i);
        if (result == CU_OK)
            result = r->d->PrimaryRetain(&r->context[i], r->device[i]);
    }
    if (result == CU_OK)
        result = r->d->CtxPush(r->context[0]);
    if (result == CU_OK)
        result = r->d->MemHostAlloc(&gates, GATES * 8, CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED);
    if (result == CU_OK)
        result = r->d->MemHostGetDevicePointer(&r->gates_device, gates, 0);
    r->gates = gates;
    if (result == CU_OK)
        memset(gates, 0, GATES * 8);
    else
        snprintf(why, bytes, "the driver does not start: error %d", result);
    return result == CU_OK;
}

static void end(rules *r)
{
    cu_context c;
    if (r->gates)
        r->d->MemFreeHost((void *)r->gates);
    if (r->context[0])
        r->d->CtxPop(&c);
    for (int i = 0; i < 2; i++)
        if (r->context[i])
            r->d->PrimaryRelease(r->device[i]);
}

static bool healthy(rules *r)
{
    cu_stream s = stream(r);
    bool fine = s && dry(r, s);
    give_back(r);
    return fine;
}

rules_count rules_run(const cuda_driver *driver, FILE *out)
{
    static const char *const words[] = {"ok", "FAILED", "not run"};
    rules_count count = {0, 0, 0};
    rules r = {.d = driver};
    char broken[200] = "";

    begin(&r, broken, sizeof broken);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        enum outcome o = NOT_RUN;
        r.why[0] = '\0';
        r.note = NULL;
        if (broken[0])
            snprintf(r.why, sizeof r.why, "%s", broken);
        else
            o = list[i].run(&r);
        if (o == OK && r.note)
            snprintf(r.why, sizeof r.why, "%s", r.note);
        else if (o == OK)
            r.why[0] = '\0';
        fprintf(out, "%-8s %s%s%s\n", words[o], list[i].name, r.why[0] ? ": " : "", r.why);
        fflush(out);
        *(o == OK ? &count.ok : o == FAILED ? &count.failed : &count.not_run) += 1;
        if (broken[0])
            continue;
        give_back(&r);
        if (o == FAILED && !healthy(&r))
            snprintf(broken, sizeof broken, "the context is of no use since '%s'", list[i].name);
    }
    end(&r);
    fprintf(out, "driver rules: %d ok, %d failed, %d not run\n", count.ok, count.failed, count.not_run);
    return count;
}
