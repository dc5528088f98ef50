/* rules_stream.c - rules of streams, words, events and kernels, and of what waits for a busy device. */
#include <stdlib.h>

#include "cli/rules_tools.h"

/* ---- rules: streams and words ---------------------------------------------------------------- */

static enum outcome rule_stream_order(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r), other = rules_stream(r);
    int g;
    MUST(a && s && other && rules_put_word(r, a, 1) && (g = rules_gate(r, s)) >= 0);
    GIVES(rules_one_word(r, s, CU_OP_WRITE_64, a, 2), CU_OK);
    GIVES(r->d->MemcpyAsync(a + 64, a, 8, s), CU_OK);
    MUST(rules_blocked(r, s) && rules_dry(r, other)); /* other streams go on */
    GIVES(r->d->StreamQuery(s), CU_NOT_READY);
    MUST(rules_get_word(r, a) == 1);
    rules_open_gate(r, g);
    MUST(rules_dry(r, s));
    GIVES(r->d->StreamSynchronize(s), CU_OK);
    MUST(rules_get_word(r, a + 64) == 2);
    return OK;
}

static enum outcome rule_wait_cyclic(rules *r)
{
    static const struct { uint64_t word, value; bool passes; } cases[] = {
        {5, 5, true},          {6, 5, true},           {4, 5, false},
        {3, UINT64_MAX, true}, {UINT64_MAX, 3, false}, {UINT64_C(1) << 62, 0, true}, {(UINT64_C(1) << 63) + 1, 0, false}};
    cu_ptr a = rules_device_memory(r, 4096);
    MUST(a);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cu_stream s = rules_stream(r);
        MUST(s && rules_put_word(r, a, cases[i].word));
        GIVES(rules_one_word(r, s, CU_OP_WAIT_64, a, cases[i].value), CU_OK);
        MUST(cases[i].passes ? rules_dry(r, s) : rules_blocked(r, s));
        MUST(rules_put_word(r, a, cases[i].value) && rules_dry(r, s));
        rules_give_back(r);
        a = rules_device_memory(r, 4096);
        MUST(a);
    }
    return OK;
}

static enum outcome rule_batch_of_words(rules *r)
{
    _Atomic uint64_t *crumb = rules_host_memory(r, 64);
    cu_ptr a = rules_device_memory(r, 4096), c = 0;
    cu_stream s = rules_stream(r), other = rules_stream(r);
    cu_stream_op ops[4];
    int64_t until = tide_now_ns() + (int64_t)PATIENCE_MS * 1000000;
    MUST(crumb && a && s && other && rules_put_word(r, a, 0) && rules_put_word(r, a + 64, 0));
    GIVES(r->d->MemHostGetDevicePointer(&c, (void *)crumb, 0), CU_OK);
    atomic_store(crumb, 5);
    ops[0] = rules_word_op(CU_OP_WRITE_64, c, 17, 0);
    ops[1] = rules_word_op(CU_OP_WAIT_64, a, 1, CU_WAIT_GEQ);
    ops[2] = rules_word_op(CU_OP_WAIT_64, a + 64, 1, CU_WAIT_GEQ);
    ops[3] = rules_word_op(CU_OP_WRITE_64, c, 0, 0);
    GIVES(r->d->StreamBatchMemOp(s, 4, ops, 0), CU_OK);
    while (atomic_load(crumb) != 17 && tide_now_ns() < until) /* seen by the host while the stream waits */
        rules_sleep_ms(1);
    MUST(atomic_load(crumb) == 17);
    GIVES(rules_one_word(r, other, CU_OP_WRITE_64, a, 1), CU_OK);
    MUST(rules_dry(r, other) && rules_blocked(r, s));
    MUST(atomic_load(crumb) == 17);
    GIVES(rules_one_word(r, other, CU_OP_WRITE_64, a + 64, 2), CU_OK);
    MUST(rules_dry(r, other) && rules_dry(r, s) && atomic_load(crumb) == 0);
    return OK;
}

/* A word that a copy brings releases a wait, and what was written before the copy is there. */
static enum outcome rule_copied_word(rules *r)
{
    cu_ptr a = rules_device_memory(r, 1 << 20), b = rules_device_memory(r, 1 << 20);
    cu_stream s = rules_stream(r), other = rules_stream(r);
    MUST(a && b && s && other && rules_put_word(r, a, 0) && rules_put_word(r, a + 64, 0));
    GIVES(rules_one_word(r, s, CU_OP_WAIT_64, a, 3), CU_OK);
    GIVES(r->d->MemcpyAsync(a + 128, b + 4096 + 8, 8, s), CU_OK);
    GIVES(r->d->MemsetD8Async(b + 4096, 0x55, 500000, other), CU_OK);
    GIVES(rules_one_word(r, other, CU_OP_WRITE_64, a + 64, 3), CU_OK); /* staged, */
    GIVES(r->d->MemcpyAsync(a, a + 64, 8, other), CU_OK);        /* then copied */
    MUST(rules_dry(r, other) && rules_dry(r, s));
    MUST(rules_get_word(r, a + 128) == UINT64_C(0x5555555555555555));
    return OK;
}

/* A source word may be written again when the copy has read it: the stream's order is enough. */
static enum outcome rule_staging(rules *r)
{
    enum { POSTS = 50 };
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    uint64_t words[POSTS];
    MUST(a && s);
    for (uint64_t i = 0; i < POSTS; i++) {
        GIVES(rules_one_word(r, s, CU_OP_WRITE_64, a, i + 1), CU_OK);
        GIVES(r->d->MemcpyAsync(a + 8 * (i + 1), a, 8, s), CU_OK);
    }
    MUST(rules_dry(r, s) && rules_get(r, words, a + 8, sizeof words));
    for (uint64_t i = 0; i < POSTS; i++)
        MUST(words[i] == i + 1);
    return OK;
}

static enum outcome rule_words_refused(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    cu_stream_op op = rules_word_op(CU_OP_WRITE_64, a, 1, 0), many[255];
    MUST(a && s);
    REFUSED(r->d->StreamBatchMemOp(s, 1, &op, 1));
    op.at.flags = 1; /* a write without its barrier: not with this version of the call */
    REFUSED(r->d->StreamBatchMemOp(s, 1, &op, 0));
    op.at.flags = 0;
    for (int i = 0; i < 255; i++)
        many[i] = op;
    GIVES(r->d->StreamBatchMemOp(s, 255, many, 0), CU_OK);
    MUST(rules_dry(r, s) && rules_get_word(r, a) == 1);
    op.at.operation = 77;
    REFUSED(r->d->StreamBatchMemOp(s, 1, &op, 0));
    return OK;
}

static enum outcome rule_stream_destroyed(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    int g, patience = PATIENCE_MS / 10;
    MUST(a && s && rules_put_word(r, a, 1) && (g = rules_gate(r, s)) >= 0);
    GIVES(rules_one_word(r, s, CU_OP_WRITE_64, a, 2), CU_OK);
    GIVES(r->d->StreamDestroy(s), CU_OK); /* what is queued still runs */
    rules_forget(r, A_STREAM, (uintptr_t)s);
    MUST(rules_get_word(r, a) == 1);
    rules_open_gate(r, g);
    while (rules_get_word(r, a) != 2 && --patience)
        rules_sleep_ms(10);
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
        MUST((s[i] = rules_stream(r)) && rules_gate(r, s[i]) >= 0);
    free_one = rules_stream(r);
    GIVES(rules_one_word(r, free_one, CU_OP_WRITE_64, r->gates_device + (GATES - 1) * 8, 1), CU_OK);
    MUST(rules_dry(r, free_one) && rules_blocked(r, s[0]) && rules_blocked(r, s[n - 3]));
    return OK;
}

static enum outcome rule_capture(rules *r)
{
    int status = 7;
    cu_stream s = rules_stream(r);
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
    cu_stream s = rules_stream(r), other = rules_stream(r);
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && (g = rules_gate(r, s)) >= 0);
    GIVES(r->d->EventQuery(e), CU_OK); /* never recorded */
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    MUST(rules_blocked(r, other));
    GIVES(r->d->EventQuery(e), CU_NOT_READY);
    rules_open_gate(r, g);
    MUST(rules_dry(r, other));
    GIVES(r->d->EventQuery(e), CU_OK);
    return OK;
}

static enum outcome rule_event_unrecorded(rules *r)
{
    cu_stream s = rules_stream(r), other = rules_stream(r);
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && (g = rules_gate(r, s)) >= 0);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK); /* before the record: no wait */
    GIVES(r->d->EventRecord(e, s), CU_OK);
    MUST(rules_dry(r, other) && rules_blocked(r, s));
    rules_open_gate(r, g);
    return OK;
}

static enum outcome rule_event_binds(rules *r)
{
    cu_stream s = rules_stream(r), idle = rules_stream(r), other = rules_stream(r);
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && idle && other && e && (g = rules_gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    GIVES(r->d->EventRecord(e, idle), CU_OK); /* a later record, which happens at once */
    MUST(rules_dry(r, idle));
    GIVES(r->d->EventQuery(e), CU_OK);
    MUST(rules_blocked(r, other)); /* still for the first one */
    rules_open_gate(r, g);
    MUST(rules_dry(r, other));
    return OK;
}

static enum outcome rule_event_destroyed(rules *r)
{
    cu_stream s = rules_stream(r), other = rules_stream(r);
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && (g = rules_gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    GIVES(r->d->EventDestroy(e), CU_OK);
    rules_forget(r, AN_EVENT, (uintptr_t)e);
    MUST(rules_blocked(r, other));
    rules_open_gate(r, g);
    MUST(rules_dry(r, other));
    return OK;
}

static enum outcome rule_event_legacy(rules *r)
{
    cu_stream s = rules_stream(r), other = rules_stream(r);
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING), f = rules_event(r, CU_EVENT_DISABLE_TIMING);
    int g;
    MUST(s && other && e && f && (g = rules_gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, NULL), CU_OK); /* waits for no stream that is non-blocking */
    GIVES(r->d->StreamWaitEvent(other, e, 0), CU_OK);
    MUST(rules_dry(r, other));
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->StreamWaitEvent(NULL, e, 0), CU_OK);
    GIVES(r->d->EventRecord(f, NULL), CU_OK);
    rules_sleep_ms(GRACE_MS);
    GIVES(r->d->EventQuery(f), CU_NOT_READY);
    MUST(rules_dry(r, other)); /* nor do they wait for it */
    rules_open_gate(r, g);
    MUST(rules_dry(r, NULL));
    GIVES(r->d->EventQuery(f), CU_OK);
    return OK;
}

static enum outcome rule_event_time(rules *r)
{
    cu_stream s = rules_stream(r);
    cu_event a = rules_event(r, 0), b = rules_event(r, 0), untimed = rules_event(r, CU_EVENT_DISABLE_TIMING);
    float ms = -1;
    int g;
    MUST(s && a && b && untimed);
    GIVES(r->d->EventRecord(a, s), CU_OK);
    MUST(rules_dry(r, s) && (g = rules_gate(r, s)) >= 0); /* `a` has its time before the other waits */
    GIVES(r->d->EventRecord(b, s), CU_OK);
    GIVES(r->d->EventRecord(untimed, s), CU_OK);
    rules_sleep_ms(GRACE_MS);
    GIVES(r->d->EventElapsedTime(&ms, a, b), CU_NOT_READY);
    rules_open_gate(r, g);
    MUST(rules_dry(r, s));
    GIVES(r->d->EventElapsedTime(&ms, a, b), CU_OK);
    MUST(ms >= 1 && ms < 1000 * PATIENCE_MS);
    REFUSED(r->d->EventElapsedTime(&ms, a, untimed));
    return OK;
}

/* ---- rules: kernels -------------------------------------------------------------------------- */

static enum outcome rule_kernel(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    cu_function f = NULL;
    rules_kernel args = {a + 64, a, 5};
    int g;
    MUST(a && s && rules_put_word(r, a, 100));
    GIVES(rules_load_kernel(r, &f), CU_OK);
    MUST((g = rules_gate(r, s)) >= 0);
    GIVES(rules_launch(r, f, s, &args), CU_OK);
    args = (rules_kernel){a + 128, a, 7}; /* the launch has its own copy */
    rules_open_gate(r, g);
    MUST(rules_dry(r, s) && rules_get_word(r, a + 64) == 105);
    return OK;
}

static enum outcome rule_kernel_refused(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    cu_function f = NULL, none = NULL;
    cu_module m = NULL;
    rules_kernel args = {a, a + 64, 0};
    void *parameters[] = {&args};
    int most = 0;
    MUST(a && s && rules_put_word(r, a + 64, 0));
    GIVES(rules_load_kernel(r, &f), CU_OK);
    GIVES(r->d->LaunchKernel(f, 0, 1, 1, 32, 1, 1, 0, s, parameters, NULL), CU_INVALID_VALUE);
    REFUSED(r->d->LaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, s, parameters, NULL));
    REFUSED(r->d->LaunchKernel(f, 1, 1, 1, 32, 1, 1, 64 << 10, s, parameters, NULL)); /* more than 48 KiB: */
    GIVES(r->d->DeviceGetAttribute(&most, CU_ATTR_SHARED_PER_BLOCK_OPTIN, r->device[0]), CU_OK);
    GIVES(r->d->FuncSetAttribute(f, CU_FUNC_MAX_DYNAMIC_SHARED, most), CU_OK); /* only when asked for */
    GIVES(r->d->LaunchKernel(f, 1, 1, 1, 32, 1, 1, (unsigned)most, s, parameters, NULL), CU_OK);
    REFUSED(r->d->FuncSetAttribute(f, CU_FUNC_MAX_DYNAMIC_SHARED, most + 1024));
    MUST(rules_dry(r, s));
    GIVES(r->d->ModuleLoadData(&m, rules_ptx), CU_OK);
    rules_keep(r, A_MODULE, (uintptr_t)m, 0);
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
    o = rules_returns_while_blocked(r, do_free, p, &returned);
    if (o != OK)
        return o;
    MUST(!returned);
    GIVES(r->d->MemHostAlloc(&h, 1 << 20, CU_HOSTALLOC_PORTABLE), CU_OK);
    o = rules_returns_while_blocked(r, do_free_host, (cu_ptr)(uintptr_t)h, &returned);
    if (o != OK)
        return o;
    MUST(!returned);
    return OK;
}

static cu_result do_create(rules *r, cu_ptr none)
{
    cu_stream s = rules_stream(r);
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING);
    (void)none;
    return s && e && rules_device_memory(r, 1 << 20) && rules_host_memory(r, 1 << 16) ? CU_OK : CU_INVALID_VALUE;
}

static enum outcome rule_creation_does_not_wait(rules *r)
{
    bool returned = false;
    enum outcome o = rules_returns_while_blocked(r, do_create, 0, &returned);
    if (o != OK)
        return o;
    MUST(returned);
    return OK;
}

static cu_result do_map(rules *r, cu_ptr none)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes);
    cu_ptr p = rules_mapping(r, h, bytes, 0);
    (void)none;
    if (!p)
        return CU_INVALID_VALUE;
    rules_forget(r, A_MAPPING, p);
    return r->d->MemUnmap(p, bytes);
}

static enum outcome rule_mapping_does_not_wait(rules *r)
{
    bool returned = false;
    enum outcome o = rules_returns_while_blocked(r, do_map, 0, &returned);
    if (o != OK)
        return o;
    MUST(returned);
    return OK;
}

const rule rules_of_streams[] = {
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
    {NULL, NULL},
};
