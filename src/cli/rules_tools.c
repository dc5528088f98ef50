/* rules_tools.c - things that are given back, gates, a kernel, calls that may wait. */
#include <pthread.h>
#include <time.h>

#include "cli/rules_tools.h"

/* ---- things ---------------------------------------------------------------------------------- */

uint64_t rules_keep(rules *r, enum thing_kind kind, uint64_t at, uint64_t bytes)
{
    if (r->n_things < MAX_THINGS)
        r->things[r->n_things++] = (thing){kind, at, bytes};
    return at;
}

/* Given back by the rule itself. */
void rules_forget(rules *r, enum thing_kind kind, uint64_t at)
{
    for (int i = 0; i < r->n_things; i++) {
        if (r->things[i].kind == kind && r->things[i].at == at) {
            memmove(&r->things[i], &r->things[i + 1], (size_t)(r->n_things - i - 1) * sizeof r->things[0]);
            r->n_things--;
            return;
        }
    }
}

void rules_sleep_ms(int64_t ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* The stream runs dry in good time. */
bool rules_dry(rules *r, cu_stream s)
{
    int64_t until = tide_now_ns() + (int64_t)PATIENCE_MS * 1000000;
    cu_result result;
    while ((result = r->d->StreamQuery(s)) == CU_NOT_READY && tide_now_ns() < until)
        rules_sleep_ms(1);
    return result == CU_OK;
}

/* The stream does not, for as long as we care to look. */
bool rules_blocked(rules *r, cu_stream s)
{
    rules_sleep_ms(GRACE_MS);
    return r->d->StreamQuery(s) == CU_NOT_READY;
}

void rules_give_back(rules *r)
{
    const cuda_driver *d = r->d;

    for (int i = 0; i < GATES; i++)
        atomic_store(&r->gates[i], UINT64_MAX / 4);
    for (int i = 0; i < r->n_things; i++)
        if (r->things[i].kind == A_STREAM)
            rules_dry(r, (cu_stream)(uintptr_t)r->things[i].at);
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
cu_stream rules_stream(rules *r)
{
    cu_stream s = NULL;
    if (r->d->StreamCreate(&s, CU_STREAM_NON_BLOCKING, 0) == CU_OK)
        rules_keep(r, A_STREAM, (uintptr_t)s, 0);
    return s;
}

cu_event rules_event(rules *r, unsigned flags)
{
    cu_event e = NULL;
    if (r->d->EventCreate(&e, flags) == CU_OK)
        rules_keep(r, AN_EVENT, (uintptr_t)e, 0);
    return e;
}

cu_ptr rules_device_memory(rules *r, size_t bytes)
{
    cu_ptr p = 0;
    if (r->d->MemAlloc(&p, bytes) == CU_OK)
        rules_keep(r, AN_ALLOCATION, p, 0);
    return p;
}

void *rules_host_memory(rules *r, size_t bytes)
{
    void *p = NULL;
    if (r->d->MemHostAlloc(&p, bytes, CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED) == CU_OK)
        rules_keep(r, A_HOST_ALLOCATION, (uintptr_t)p, 0);
    return p;
}

cu_stream_op rules_word_op(int operation, cu_ptr address, uint64_t value, unsigned flags)
{
    cu_stream_op op;
    memset(&op, 0, sizeof op);
    op.at.operation = operation;
    op.at.address = address;
    op.at.value = value;
    op.at.flags = flags;
    return op;
}

cu_result rules_one_word(rules *r, cu_stream s, int operation, cu_ptr address, uint64_t value)
{
    cu_stream_op op = rules_word_op(operation, address, value, 0);
    return r->d->StreamBatchMemOp(s, 1, &op, 0);
}

/* Blocks the stream until the gate is opened; its number, or -1. */
int rules_gate(rules *r, cu_stream s)
{
    int g = r->n_gates++;
    if (g >= GATES || rules_one_word(r, s, CU_OP_WAIT_64, r->gates_device + (cu_ptr)g * 8, 1) != CU_OK)
        return -1;
    return g;
}
void rules_open_gate(rules *r, int g) { atomic_store(&r->gates[g], 1); }

bool rules_put(rules *r, cu_ptr to, const void *bytes, size_t n)
{
    cu_stream s = rules_stream(r);
    void *h = rules_host_memory(r, n);
    if (!s || !h)
        return false;
    memcpy(h, bytes, n);
    return r->d->MemcpyHtoDAsync(to, h, n, s) == CU_OK && rules_dry(r, s);
}

bool rules_get(rules *r, void *bytes, cu_ptr from, size_t n)
{
    cu_stream s = rules_stream(r);
    void *h = rules_host_memory(r, n);
    if (!s || !h || r->d->MemcpyDtoHAsync(h, from, n, s) != CU_OK || !rules_dry(r, s))
        return false;
    memcpy(bytes, h, n);
    return true;
}

bool rules_put_word(rules *r, cu_ptr to, uint64_t value) { return rules_put(r, to, &value, sizeof value); }
uint64_t rules_get_word(rules *r, cu_ptr from)
{
    uint64_t value = 0;
    return rules_get(r, &value, from, sizeof value) ? value : UINT64_MAX;
}

/* Physical memory of a device. */
cu_handle rules_handle_on(rules *r, int device, size_t *bytes)
{
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD,
                          .location = {CU_LOCATION_DEVICE, r->device[device]}};
    size_t granularity = 0;
    cu_handle h = 0;
    if (r->d->MemGetAllocationGranularity(&granularity, &prop, 0) == CU_OK && granularity &&
        r->d->MemCreate(&h, granularity, &prop, 0) == CU_OK) {
        rules_keep(r, A_HANDLE, h, 0);
        *bytes = granularity;
    }
    return h;
}

cu_ptr rules_mapping(rules *r, cu_handle h, size_t bytes, int access)
{
    cu_ptr p = 0;
    cu_access a = {{CU_LOCATION_DEVICE, access < 0 ? 0 : r->device[access]}, CU_ACCESS_READ_WRITE};
    if (!h || r->d->MemAddressReserve(&p, bytes, 0, 0, 0) != CU_OK)
        return 0;
    rules_keep(r, A_RESERVATION, p, bytes);
    if (r->d->MemMap(p, bytes, 0, h, 0) != CU_OK)
        return 0;
    rules_keep(r, A_MAPPING, p, bytes);
    return access < 0 || r->d->MemSetAccess(p, bytes, &a, 1) == CU_OK ? p : 0;
}

/* ---- kernels ------------------------------------------------------------------------------- */

const char rules_ptx[] = ".version 7.8\n.target sm_80\n.address_size 64\n"
                          ".visible .entry " RULES_KERNEL "(.param .align 8 .b8 p[24])\n{\n"
                          ".reg .b64 %rd<6>;\n"
                          "ld.param.u64 %rd1, [p];\n"
                          "ld.param.u64 %rd2, [p+8];\n"
                          "ld.param.u64 %rd3, [p+16];\n"
                          "ld.global.u64 %rd4, [%rd2];\n"
                          "add.u64 %rd5, %rd4, %rd3;\n"
                          "st.global.u64 [%rd1], %rd5;\n"
                          "ret;\n}\n"
                          ".visible .entry " RULES_POST "(.param .align 8 .b8 p[40])\n{\n"
                          ".reg .pred %p<4>;\n"
                          ".reg .b32 %r<9>;\n"
                          ".reg .b64 %rd<10>;\n"
                          "ld.param.u64 %rd1, [p];\n"
                          "ld.param.u64 %rd2, [p+8];\n"
                          "ld.param.u64 %rd3, [p+16];\n"
                          "ld.param.u64 %rd4, [p+24];\n"
                          "ld.param.u64 %rd5, [p+32];\n"
                          "mov.u32 %r1, %ctaid.x;\n"
                          "mov.u32 %r2, %ntid.x;\n"
                          "mov.u32 %r3, %tid.x;\n"
                          "mov.u32 %r4, %nctaid.x;\n"
                          "mad.lo.u32 %r5, %r1, %r2, %r3;\n"
                          "mul.lo.u32 %r6, %r4, %r2;\n"
                          "cvt.u64.u32 %rd6, %r5;\n"
                          "cvt.u64.u32 %rd7, %r6;\n"
                          "next:\n"
                          "setp.ge.u64 %p1, %rd6, %rd2;\n"
                          "@%p1 bra stored;\n"
                          "shl.b64 %rd8, %rd6, 3;\n"
                          "add.u64 %rd9, %rd1, %rd8;\n"
                          "st.global.u64 [%rd9], %rd3;\n"
                          "add.u64 %rd6, %rd6, %rd7;\n"
                          "bra next;\n"
                          "stored:\n"
                          "bar.sync 0;\n"
                          "setp.ne.u32 %p2, %r3, 0;\n"
                          "@%p2 bra end;\n"
                          "membar.sys;\n"
                          "atom.global.add.u32 %r7, [%rd4], 1;\n"
                          "add.u32 %r7, %r7, 1;\n"
                          "setp.ne.u32 %p3, %r7, %r4;\n"
                          "@%p3 bra end;\n"
                          "mov.u32 %r8, 0;\n"
                          "st.global.u32 [%rd4], %r8;\n"
                          "membar.sys;\n"
                          "st.release.sys.global.u64 [%rd5], %rd3;\n"
                          "end:\n"
                          "ret;\n}\n";

cu_result rules_load(rules *r, const char *name, cu_function *f)
{
    cu_module m = NULL;
    cu_result result = r->d->ModuleLoadData(&m, rules_ptx);
    if (result != CU_OK)
        return result;
    rules_keep(r, A_MODULE, (uintptr_t)m, 0);
    return r->d->ModuleGetFunction(f, m, name);
}

cu_result rules_load_kernel(rules *r, cu_function *f)
{
    return rules_load(r, RULES_KERNEL, f);
}

cu_result rules_launch(rules *r, cu_function f, cu_stream s, rules_kernel *args)
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
enum outcome rules_returns_while_blocked(rules *r, cu_result (*call)(rules *, cu_ptr), cu_ptr at, bool *returned)
{
    helper h = {r, call, at, CU_OK, 0};
    cu_stream s = rules_stream(r);
    int g = rules_gate(r, s), patience = 60;
    pthread_t thread;

    MUST(g >= 0 && rules_blocked(r, s));
    MUST(pthread_create(&thread, NULL, run_helper, &h) == 0);
    while (!atomic_load(&h.done) && patience--)
        rules_sleep_ms(1);
    *returned = atomic_load(&h.done);
    rules_open_gate(r, g);
    pthread_join(thread, NULL);
    MUST(h.result == CU_OK);
    return OK;
}
