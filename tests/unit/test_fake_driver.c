/*
 * The fake CUDA driver: it keeps the rules that a real driver keeps (the same checks run there: `tide driver-rules`), in
 * every mood of its scheduler; and what only a fake does: complaints, faults, aliased hardware queues, leaks counted.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "../fakes/fake_cuda.h"
#include "base/base.h"
#include "cli/rules.h"

static void test_rules(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 8; seed++) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        FILE *out = tmpfile();
        rules_count count;
        char line[300];
        assert_non_null(out);
        o.seed = seed;
        o.devices = seed == 7 ? 1 : 2;
        o.no_batch = seed == 6;
        count = rules_run(fake_cuda_start(&o), out);
        rewind(out);
        while (fgets(line, sizeof line, out))
            if (count.failed || count.not_run > (seed < 6 ? 1 : 9))
                fputs(line, stderr);
        fclose(out);
        fake_cuda_forgive(); /* of words of a peer */
        assert_int_equal(count.failed, 0);
        assert_in_range(count.not_run, seed == 7 ? 8 : seed == 6 ? 2 : 0, seed == 7 ? 9 : seed == 6 ? 3 : 1);
        assert_true(count.ok > 35);
        assert_int_equal(fake_cuda_stop(), 0);
    }
}

/* ---- a small world --------------------------------------------------------------------------- */

typedef struct world {
    const cuda_driver *d;
    cu_context context;
    cu_stream s[40];
    cu_ptr a;
} world;

static void world_open(world *w, const fake_cuda_options *o, int streams)
{
    memset(w, 0, sizeof *w);
    w->d = fake_cuda_start(o);
    assert_int_equal(w->d->Init(0), CU_OK);
    assert_int_equal(w->d->PrimaryRetain(&w->context, 0), CU_OK);
    assert_int_equal(w->d->CtxPush(w->context), CU_OK);
    assert_int_equal(w->d->MemAlloc(&w->a, 4096), CU_OK);
    for (int i = 0; i < streams; i++)
        assert_int_equal(w->d->StreamCreate(&w->s[i], CU_STREAM_NON_BLOCKING, 0), CU_OK);
    assert_int_equal(w->d->MemsetD8Async(w->a, 0, 4096, w->s[0]), CU_OK);
    assert_int_equal(w->d->StreamSynchronize(w->s[0]), CU_OK);
}

static void world_close(world *w, int streams)
{
    cu_context c;
    for (int i = 0; i < streams; i++)
        assert_int_equal(w->d->StreamDestroy(w->s[i]), CU_OK);
    assert_int_equal(w->d->MemFree(w->a), CU_OK);
    assert_int_equal(w->d->CtxPop(&c), CU_OK);
    assert_int_equal(w->d->PrimaryRelease(0), CU_OK);
}

static cu_result word(world *w, int stream, int operation, uint64_t at, uint64_t value)
{
    cu_stream_op op;
    memset(&op, 0, sizeof op);
    op.at.operation = operation;
    op.at.address = w->a + at;
    op.at.value = value;
    return w->d->StreamBatchMemOp(w->s[stream], 1, &op, 0);
}

/* Streams that share a hardware queue: the second one is stuck behind a wait of the first, and so is a write that the
 * wait is for. With a queue of its own it is not. */
static void test_aliased_queues(void **state)
{
    (void)state;
    for (int connections = 8; connections <= 32; connections += 24) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        world w;
        char text[200];
        o.connections = connections;
        world_open(&w, &o, 10);
        assert_int_equal(word(&w, 1, CU_OP_WAIT_64, 0, 1), CU_OK);
        assert_int_equal(word(&w, 9, CU_OP_WRITE_64, 0, 1), CU_OK); /* 8 streams later */
        for (int i = 2; i < 9; i++)
            assert_int_equal(w.d->StreamSynchronize(w.s[i]), CU_OK);
        if (connections == 8) {
            assert_int_equal(w.d->StreamQuery(w.s[9]), CU_NOT_READY);
            assert_int_equal(fake_cuda_blocked(text, sizeof text), 1);
            assert_string_equal(text, "device 0 stream 2: a word");
            assert_int_equal(word(&w, 2, CU_OP_WRITE_64, 0, 1), CU_OK);
        }
        assert_int_equal(w.d->StreamSynchronize(w.s[9]), CU_OK);
        assert_int_equal(w.d->StreamSynchronize(w.s[1]), CU_OK);
        world_close(&w, 10);
        assert_int_equal(fake_cuda_stop(), 0);
    }
}

/* One complaint each, and what it says. */
static void test_complaints(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    world w;
    char text[256], pageable[64] = {0};
    cu_stream blocking;
    cu_function f;
    cu_module m;
    cu_ptr to[2], from[2], other;
    size_t bytes[2] = {64, 64}, first = 0;
    cu_copy_attributes how = {.src_access_order = CU_ORDER_STREAM};
    rules_kernel args = {0};
    void *parameters[] = {&args};

    (void)state;
    world_open(&w, &o, 2);
#define COMPLAINS(expected)                                    \
    do {                                                       \
        assert_int_equal(fake_cuda_complaints(text, 256), 1);  \
        assert_non_null(strstr(text, expected));               \
        fake_cuda_forgive();                                   \
    } while (0)
    assert_int_equal(w.d->MemcpyAsync(w.a, w.a + 64, 8, NULL), CU_INVALID_VALUE);
    COMPLAINS("work on the legacy stream");
    w.d->MemcpyHtoDAsync(w.a, pageable, 64, w.s[0]);
    COMPLAINS("pageable memory");
    assert_int_equal(w.d->StreamCreate(&blocking, 0, 0), CU_OK);
    COMPLAINS("synchronizes with the legacy stream");
    assert_int_equal(w.d->StreamDestroy(blocking), CU_OK);
    fake_cuda_capture(w.s[1], true);
    assert_int_equal(w.d->MemcpyAsync(w.a, w.a + 64, 8, w.s[1]), CU_NOT_PERMITTED);
    COMPLAINS("being captured");
    fake_cuda_capture(w.s[1], false);
    assert_int_equal(w.d->ModuleLoadData(&m, "image"), CU_OK);
    assert_int_equal(w.d->ModuleGetFunction(&f, m, RULES_KERNEL), CU_OK);
    args = (rules_kernel){w.a, w.a + 4092, 1};
    assert_int_equal(w.d->LaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, w.s[0], parameters, NULL), CU_INVALID_VALUE);
    COMPLAINS("would touch 8 bytes");
    assert_int_equal(w.d->ModuleUnload(m), CU_OK);
    to[0] = w.a, from[0] = w.a + 1024, to[1] = w.a + 32, from[1] = w.a + 2048;
    assert_int_equal(w.d->MemcpyBatchAsync(to, from, bytes, 2, &how, &first, 1, w.s[0]), CU_OK);
    COMPLAINS("two copies of a batch write");
    to[1] = w.a + 1056;
    assert_int_equal(w.d->MemcpyBatchAsync(to, from, bytes, 2, &how, &first, 1, w.s[0]), CU_OK);
    COMPLAINS("what another one writes");
    assert_int_equal(word(&w, 0, CU_OP_WAIT_64, 2048, 1), CU_OK);
    assert_int_equal(w.d->MemAlloc(&other, 4096), CU_OK);
    assert_int_equal(w.d->MemFree(w.a), CU_OK);
    COMPLAINS("used by work that is queued");
    w.a = other;
    assert_int_equal(w.d->PrimaryRelease(0), CU_OK);
    COMPLAINS("objects of the context are alive");
    assert_int_equal(w.d->PrimaryRetain(&w.context, 0), CU_OK);
    world_close(&w, 2);
    assert_int_equal(fake_cuda_stop(), 0);
#undef COMPLAINS
}

static void test_leaks(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    cu_event e;
    world w;
    char text[200];
    (void)state;
    world_open(&w, &o, 3);
    assert_int_equal(w.d->EventCreate(&e, CU_EVENT_DISABLE_TIMING), CU_OK);
    assert_int_equal(fake_cuda_leaks(text, sizeof text), 6);
    assert_string_equal(text, "1 allocations, 3 streams, 1 events, 1 retained contexts");
    assert_int_equal(w.d->EventDestroy(e), CU_OK);
    world_close(&w, 3);
    assert_int_equal(fake_cuda_leaks(NULL, 0), 0);
    assert_int_equal(fake_cuda_stop(), 0);
}

static void test_faults(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    world w;
    cu_event e = NULL;
    cu_ptr p;
    (void)state;
    world_open(&w, &o, 2);
    fake_cuda_fail("cuEventCreate", 2, CU_INVALID_HANDLE);
    assert_int_equal(w.d->MemAlloc(&p, 64), CU_OK);
    assert_int_equal(w.d->EventCreate(&e, 0), CU_OK);
    assert_false(fake_cuda_failed());
    assert_int_equal(w.d->EventCreate(&e, 0), CU_INVALID_HANDLE);
    assert_true(fake_cuda_failed());
    fake_cuda_fail(NULL, 1, CU_INVALID_HANDLE);
    assert_int_equal(w.d->EventDestroy(e), CU_INVALID_HANDLE); /* and is gone */
    fake_cuda_oom(2);
    assert_int_equal(w.d->MemFree(p), CU_OK);
    assert_int_equal(w.d->MemAlloc(&p, 64), CU_OK);
    assert_int_equal(w.d->EventCreate(&e, 0), CU_OUT_OF_MEMORY);
    assert_int_equal(w.d->MemFree(p), CU_OK);
    fake_cuda_stall(2);
    assert_int_equal(w.d->MemsetD8Async(w.a, 1, 8, w.s[1]), CU_OK);
    assert_int_equal(w.d->MemsetD8Async(w.a + 8, 1, 8, w.s[0]), CU_OK);
    assert_int_equal(w.d->StreamSynchronize(w.s[0]), CU_OK);
    assert_int_equal(w.d->StreamQuery(w.s[1]), CU_NOT_READY);
    fake_cuda_stall(0);
    assert_int_equal(w.d->StreamSynchronize(w.s[1]), CU_OK);
    world_close(&w, 2);
    assert_int_equal(fake_cuda_stop(), 0);
}

/* A descriptor brings the memory into another process, which a driver started anew is as good as. */
static void test_foreign(void **state)
{
    const cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD, .location = {CU_LOCATION_DEVICE, 1}};
    const cu_access access = {{CU_LOCATION_DEVICE, 0}, CU_ACCESS_READ_WRITE};
    int fd = -1;
    (void)state;
    for (int process = 0; process < 2; process++) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        world w;
        cu_handle h = 0;
        cu_ptr p = 0;
        uint64_t *host;
        o.no_peer_words = true;
        world_open(&w, &o, 1);
        if (process == 0) {
            assert_int_equal(w.d->MemCreate(&h, 65536, &prop, 0), CU_OK);
            assert_int_equal(w.d->MemExport(&fd, h, CU_HANDLE_FD, 0), CU_OK);
        } else {
            assert_int_equal(w.d->MemImport(&h, (void *)(intptr_t)fd, CU_HANDLE_FD), CU_OK);
        }
        assert_int_equal(w.d->MemAddressReserve(&p, 65536, 0, 0, 0), CU_OK);
        assert_int_equal(w.d->MemMap(p, 65536, 0, h, 0), CU_OK);
        assert_int_equal(w.d->MemRelease(h), CU_OK);
        assert_int_equal(w.d->MemSetAccess(p, 65536, &access, 1), CU_OK);
        if (process == 0)
            assert_int_equal(w.d->MemsetD8Async(p + 4096, 0x77, 64, w.s[0]), CU_OK);
        assert_int_equal(w.d->MemHostAlloc((void **)&host, 64, CU_HOSTALLOC_PORTABLE), CU_OK);
        assert_int_equal(w.d->MemcpyDtoHAsync(host, p + 4096, 64, w.s[0]), CU_OK);
        assert_int_equal(w.d->StreamSynchronize(w.s[0]), CU_OK);
        assert_true(host[7] == UINT64_C(0x7777777777777777));
        assert_int_equal(word(&w, 0, CU_OP_WRITE_64, p - w.a, 1), CU_INVALID_VALUE); /* it is still device 1's */
        assert_int_equal(fake_cuda_complaints(NULL, 0), 0);
        assert_int_equal(w.d->StreamSynchronize(w.s[0]), CU_OK);
        assert_int_equal(w.d->MemFreeHost(host), CU_OK);
        assert_int_equal(w.d->MemUnmap(p, 65536), CU_OK);
        assert_int_equal(w.d->MemAddressFree(p, 65536), CU_OK);
        world_close(&w, 1);
        assert_int_equal(fake_cuda_stop(), 0);
    }
    close(fd);
}

/* The scheduler finds both orders of two streams that nothing orders, and interleaves the pieces of their copies. */
static void test_orders(void **state)
{
    int first = 0, second = 0, mixed = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        world w;
        uint64_t got[128];
        void *host;
        int ones = 0;
        o.seed = seed;
        world_open(&w, &o, 3);
        assert_int_equal(w.d->MemHostAlloc(&host, sizeof got, CU_HOSTALLOC_PORTABLE), CU_OK);
        assert_int_equal(word(&w, 1, CU_OP_WAIT_64, 2048, 1), CU_OK);
        assert_int_equal(word(&w, 2, CU_OP_WAIT_64, 2048, 1), CU_OK);
        for (int i = 0; i < 2; i++)
            assert_int_equal(w.d->MemsetD8Async(w.a, (unsigned char)(i + 1), sizeof got, w.s[1 + i]), CU_OK);
        assert_int_equal(word(&w, 0, CU_OP_WRITE_64, 2048, 1), CU_OK);
        for (int i = 0; i < 3; i++)
            assert_int_equal(w.d->StreamSynchronize(w.s[i]), CU_OK);
        assert_int_equal(w.d->MemcpyDtoHAsync(host, w.a, sizeof got, w.s[0]), CU_OK);
        assert_int_equal(w.d->StreamSynchronize(w.s[0]), CU_OK);
        memcpy(got, host, sizeof got);
        for (int i = 0; i < 128; i++)
            ones += got[i] == UINT64_C(0x0101010101010101);
        first += ones == 0;
        second += ones == 128;
        mixed += ones != 0 && ones != 128;
        assert_int_equal(w.d->MemFreeHost(host), CU_OK);
        world_close(&w, 3);
        assert_int_equal(fake_cuda_stop(), 0);
    }
    assert_true(first > 20 && second > 20 && mixed > 5);
}

/* ---- multicast: what the driver's documentation says, for no real driver is asked --------------- */

/* Complaints since the last look: 1 when there are some. */
static int complained(void)
{
    int n = fake_cuda_complaints(NULL, 0);
    fake_cuda_forgive();
    return n > 0;
}

static void test_multicast(void **state)
{
    enum { BYTES = 262144, LEAST = 131072, DEVICES = 3 };
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    cu_multicast_prop prop = {.n_devices = DEVICES, .size = BYTES, .handle_types = CU_HANDLE_FD}, wrong;
    cu_handle object, other, memory[DEVICES], small;
    cu_ptr base[DEVICES], all;
    cu_context contexts[DEVICES];
    size_t granularity = 0;
    world w;
    int fd = -1;

    (void)state;
    o.devices = DEVICES;
    world_open(&w, &o, 1);
    assert_int_equal(w.d->MulticastCreate(&object, &prop), CU_NOT_SUPPORTED);
    assert_int_equal(fake_cuda_multicasts(), 1);
    world_close(&w, 1);
    assert_int_equal(fake_cuda_stop(), 0);

    o.multicast = true;
    world_open(&w, &o, 1);
    for (int i = 1; i < DEVICES; i++)
        assert_int_equal(w.d->PrimaryRetain(&contexts[i], i), CU_OK);
    assert_int_equal(w.d->MulticastGetGranularity(&granularity, &prop, CU_MULTICAST_MINIMUM), CU_OK);
    assert_int_equal(granularity, LEAST);
    for (int i = 0; i < 4; i++) { /* size, devices, handle type, flags */
        wrong = prop;
        wrong.size += i == 0 ? 65536 : 0;
        wrong.n_devices += i == 1 ? 1 : 0;
        wrong.handle_types = i == 2 ? 0 : CU_HANDLE_FD;
        wrong.flags = i == 3;
        assert_int_equal(w.d->MulticastCreate(&other, &wrong), CU_INVALID_VALUE);
    }
    assert_int_equal(w.d->MulticastCreate(&object, &prop), CU_OK);
    assert_int_equal(w.d->MemExport(&fd, object, CU_HANDLE_FD, 0), CU_OK);
    assert_int_equal(w.d->MemImport(&other, (void *)(intptr_t)fd, CU_HANDLE_FD), CU_OK);
    close(fd);
    assert_int_equal(w.d->MemAddressReserve(&all, BYTES, 0, 0, 0), CU_OK);
    for (int i = 0; i < DEVICES; i++) {
        const cu_alloc_prop on = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD, .location = {CU_LOCATION_DEVICE, i}};
        const cu_access access = {{CU_LOCATION_DEVICE, i}, CU_ACCESS_READ_WRITE};
        assert_int_equal(w.d->MemCreate(&memory[i], BYTES, &on, 0), CU_OK);
        assert_int_equal(w.d->MemAddressReserve(&base[i], BYTES, 0, 0, 0), CU_OK);
        assert_int_equal(w.d->MemMap(base[i], BYTES, 0, memory[i], 0), CU_OK);
        assert_int_equal(w.d->MemSetAccess(base[i], BYTES, &access, 1), CU_OK);
        if (i == 0)
            assert_int_equal(w.d->MemCreate(&small, 65536, &on, 0), CU_OK);
    }

    /* a team that is not complete: nobody binds, nobody maps */
    assert_int_equal(w.d->MulticastAddDevice(object, 0), CU_OK);
    assert_int_equal(w.d->MulticastAddDevice(other, 0), CU_INVALID_VALUE); /* twice */
    assert_true(complained());
    assert_int_equal(w.d->MulticastAddDevice(object, DEVICES), CU_INVALID_VALUE);
    assert_int_equal(w.d->MulticastAddDevice(memory[0], 1), CU_INVALID_VALUE); /* no such object */
    assert_int_equal(w.d->MulticastBindMem(object, 0, memory[0], 0, BYTES, 0), CU_INVALID_VALUE);
    assert_true(complained());
    assert_int_equal(w.d->MemMap(all, BYTES, 0, object, 0), CU_INVALID_VALUE);
    assert_true(complained());
    for (int i = 1; i < DEVICES; i++)
        assert_int_equal(w.d->MulticastAddDevice(other, i), CU_OK);

    /* binding: extents, granularity, twice */
    assert_int_equal(w.d->MulticastBindMem(object, 0, memory[0], 0, BYTES + LEAST, 0), CU_INVALID_VALUE);
    assert_int_equal(w.d->MulticastBindMem(object, 0, memory[0], LEAST, BYTES, 0), CU_INVALID_VALUE);
    assert_int_equal(w.d->MulticastBindMem(object, 65536, memory[0], 0, LEAST, 0), CU_INVALID_VALUE);
    assert_int_equal(w.d->MulticastBindMem(object, 0, small, 0, 65536, 0), CU_INVALID_VALUE);
    assert_int_equal(w.d->MulticastBindMem(object, 0, memory[0], 0, BYTES, 0), CU_OK);
    assert_int_equal(w.d->MulticastBindMem(object, 0, memory[0], 0, BYTES, 0), CU_INVALID_VALUE);
    assert_true(complained());
    assert_int_equal(w.d->MulticastBindMem(other, 0, memory[1], 0, BYTES, 0), CU_OK);
    assert_int_equal(w.d->MemMap(all, BYTES, 0, object, 0), CU_OK);
    assert_int_equal(w.d->MemSetAccess(all, BYTES, &(cu_access){{CU_LOCATION_DEVICE, 0}, CU_ACCESS_READ_WRITE}, 1), CU_OK);

    /* writing: before all are bound; then it comes to all. Nothing else is let near it. */
    assert_int_equal(w.d->MemsetD8Async(base[0] + 4096, 0x5a, 64, w.s[0]), CU_OK);
    assert_int_equal(w.d->MemcpyAsync(all + 8, base[0] + 4096, 64, w.s[0]), CU_OK);
    assert_true(complained());
    assert_int_equal(w.d->StreamSynchronize(w.s[0]), CU_OK);
    assert_int_equal(w.d->MulticastBindMem(other, 0, memory[2], 0, BYTES, 0), CU_OK);
    assert_int_equal(w.d->MemcpyAsync(all + 8, base[0] + 4096, 64, w.s[0]), CU_OK);
    assert_int_equal(w.d->StreamSynchronize(w.s[0]), CU_OK);
    assert_false(complained());
    for (int i = 0; i < DEVICES; i++)
        assert_true(*(uint64_t *)(uintptr_t)(base[i] + 64) == UINT64_C(0x5a5a5a5a5a5a5a5a) &&
                    *(uint64_t *)(uintptr_t)(base[i] + 72) != UINT64_C(0x5a5a5a5a5a5a5a5a));
    assert_int_equal(w.d->MemcpyAsync(base[0], all, 64, w.s[0]), CU_INVALID_VALUE); /* as a source */
    assert_int_equal(w.d->MemsetD8Async(all, 0, 64, w.s[0]), CU_INVALID_VALUE);
    assert_true(complained());
    assert_int_equal(word(&w, 0, CU_OP_WRITE_64, all - w.a, 1), CU_INVALID_VALUE);

    /* the end: what is mapped is not unbound, what is bound is not released, and what was not bound so is neither */
    assert_int_equal(w.d->MulticastUnbind(object, 0, 0, LEAST), CU_INVALID_VALUE);
    assert_true(complained());
    assert_int_equal(w.d->MulticastUnbind(object, 0, 0, BYTES), CU_OK);
    assert_true(complained());
    assert_int_equal(w.d->MemUnmap(all, BYTES), CU_OK);
    for (int i = 0; i < DEVICES; i++) {
        assert_int_equal(w.d->MemUnmap(base[i], BYTES), CU_OK);
        assert_int_equal(w.d->MemAddressFree(base[i], BYTES), CU_OK);
    }
    assert_int_equal(w.d->MemAddressFree(all, BYTES), CU_OK);
    assert_false(complained());
    assert_int_equal(w.d->MulticastUnbind(object, 1, 0, BYTES), CU_OK);
    assert_int_equal(w.d->MemRelease(memory[0]), CU_OK);
    assert_false(complained());
    assert_int_equal(w.d->MemRelease(memory[2]), CU_OK);
    assert_true(complained());
    assert_int_equal(w.d->MemRelease(object), CU_OK);
    assert_int_equal(w.d->MemRelease(other), CU_OK);
    assert_true(complained());
    assert_int_equal(w.d->MemRelease(memory[1]), CU_OK);
    assert_int_equal(w.d->MemRelease(small), CU_OK);
    for (int i = 1; i < DEVICES; i++)
        assert_int_equal(w.d->PrimaryRelease(i), CU_OK);
    world_close(&w, 1);
    assert_int_equal(fake_cuda_leaks(NULL, 0), 1); /* the binding of device 2 */
    assert_int_equal(fake_cuda_stop(), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),  cmocka_unit_test(test_aliased_queues), cmocka_unit_test(test_complaints),
        cmocka_unit_test(test_leaks),  cmocka_unit_test(test_faults),         cmocka_unit_test(test_orders),
        cmocka_unit_test(test_foreign), cmocka_unit_test(test_multicast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
