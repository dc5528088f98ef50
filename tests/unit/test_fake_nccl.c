/* The fake NCCL on the fake driver: its moods, its faults, its complaints, what it counts. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "../fakes/fake_nccl.h"
#include "base/base.h"

enum { RANKS = 3, CONTEXTS = 2, SIGNALS = 2, BYTES = 65536, HALF = BYTES / 2 };

/* Ranks that one thread plays, but for the calls that wait for all. */
typedef struct world world;
typedef struct rank {
    world *w;
    int number;
    cu_context context;
    cu_stream stream[2];
    cu_handle handle;
    cu_ptr memory;
    nccl_comm comm;
    nccl_window window;
    nccl_result result;
    pthread_t thread;
    _Atomic int done;
} rank;
struct world {
    const cuda_driver *d;
    const nccl_library *n;
    nccl_id id;
    rank r[RANKS];
};

#define ON(rank) assert_int_equal(w->d->CtxPush((rank)->context), CU_OK)
#define OFF assert_int_equal(w->d->CtxPop(NULL), CU_OK)
#define GIVES(call, code) assert_int_equal((call), (code))

static void driver_open(world *w, const fake_cuda_options *c)
{
    memset(w, 0, sizeof *w);
    w->d = fake_cuda_start(c);
    GIVES(w->d->Init(0), CU_OK);
    for (int i = 0; i < RANKS; i++) {
        rank *r = &w->r[i];
        cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD, .location = {CU_LOCATION_DEVICE, i}};
        cu_access access = {{CU_LOCATION_DEVICE, i}, CU_ACCESS_READ_WRITE};
        *r = (rank){.w = w, .number = i};
        GIVES(w->d->PrimaryRetain(&r->context, i), CU_OK);
        ON(r);
        GIVES(w->d->StreamCreate(&r->stream[0], CU_STREAM_NON_BLOCKING, 0), CU_OK);
        GIVES(w->d->StreamCreate(&r->stream[1], CU_STREAM_NON_BLOCKING, 0), CU_OK);
        GIVES(w->d->MemCreate(&r->handle, BYTES, &prop, 0), CU_OK);
        GIVES(w->d->MemAddressReserve(&r->memory, BYTES, 0, 0, 0), CU_OK);
        GIVES(w->d->MemMap(r->memory, BYTES, 0, r->handle, 0), CU_OK);
        GIVES(w->d->MemSetAccess(r->memory, BYTES, &access, 1), CU_OK);
        GIVES(w->d->MemsetD8Async(r->memory, 0, BYTES, r->stream[0]), CU_OK);
        GIVES(w->d->StreamSynchronize(r->stream[0]), CU_OK);
        OFF;
    }
}

static void driver_close(world *w)
{
    for (int i = 0; i < RANKS; i++) {
        rank *r = &w->r[i];
        ON(r);
        GIVES(w->d->StreamDestroy(r->stream[0]), CU_OK);
        GIVES(w->d->StreamDestroy(r->stream[1]), CU_OK);
        GIVES(w->d->MemUnmap(r->memory, BYTES), CU_OK);
        GIVES(w->d->MemAddressFree(r->memory, BYTES), CU_OK);
        GIVES(w->d->MemRelease(r->handle), CU_OK);
        OFF;
        GIVES(w->d->PrimaryRelease(i), CU_OK);
    }
}

static void *init(void *context)
{
    rank *r = context;
    nccl_config config = NCCL_CONFIG_INIT;
    config.num_rma_ctx = CONTEXTS;
    config.num_rma_sig = SIGNALS;
    config.blocking = 1;
    r->w->d->CtxPush(r->context);
    r->result = r->w->n->CommInitRankConfig(&r->comm, RANKS, r->w->id, r->number, &config);
    r->w->d->CtxPop(NULL);
    atomic_store(&r->done, 1);
    return NULL;
}

static void *enlist(void *context)
{
    rank *r = context;
    r->w->d->CtxPush(r->context);
    r->result = r->w->n->CommWindowRegister(r->comm, (void *)(uintptr_t)r->memory, BYTES, &r->window, NCCL_WIN_SYMMETRIC);
    r->w->d->CtxPop(NULL);
    atomic_store(&r->done, 1);
    return NULL;
}

static void *destroy(void *context)
{
    rank *r = context;
    r->result = r->w->n->CommFinalize(r->comm);
    if (r->result == NCCL_OK)
        r->result = r->w->n->CommDestroy(r->comm);
    atomic_store(&r->done, 1);
    return NULL;
}

static void begin(world *w, int from, int to, void *(*what)(void *))
{
    for (int i = from; i < to; i++) {
        atomic_store(&w->r[i].done, 0);
        GIVES(pthread_create(&w->r[i].thread, NULL, what, &w->r[i]), 0);
    }
}

static void join(world *w, int from, int to, nccl_result expected)
{
    for (int i = from; i < to; i++) {
        pthread_join(w->r[i].thread, NULL);
        GIVES(w->r[i].result, expected);
    }
}

static void all(world *w, void *(*what)(void *))
{
    begin(w, 0, RANKS, what);
    join(w, 0, RANKS, NCCL_OK);
}

static fake_cuda_options three_devices(uint64_t seed)
{
    fake_cuda_options c = FAKE_CUDA_OPTIONS;
    c.devices = RANKS;
    c.seed = seed;
    return c;
}

static void open_all(world *w, uint64_t seed, const fake_nccl_options *o)
{
    fake_cuda_options c = three_devices(seed);
    driver_open(w, &c);
    w->n = fake_nccl_start(o);
    GIVES(w->n->GetUniqueId(&w->id), NCCL_OK);
    all(w, init);
    all(w, enlist);
}

static void close_all(world *w)
{
    for (int i = 0; i < RANKS; i++)
        GIVES(w->n->CommWindowDeregister(w->r[i].comm, w->r[i].window), NCCL_OK);
    all(w, destroy);
    GIVES(fake_nccl_stop(), 0);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

/* Both calls for a rank, with its context current. */
static nccl_result put(rank *r, int peer, uint64_t to, uint64_t from, uint64_t bytes, int sig, int ctx, int stream)
{
    world *w = r->w;
    nccl_result result;
    ON(r);
    result = w->n->PutSignal((const void *)(uintptr_t)(r->memory + from), bytes, NCCL_UINT8, peer, r->window, to, sig, ctx, 0,
                             r->comm, r->stream[stream]);
    OFF;
    return result;
}
static nccl_result wait_for(rank *r, int count, int peer, int sig, int ctx, int stream)
{
    world *w = r->w;
    nccl_wait_desc d = {count, peer, sig, ctx};
    nccl_result result;
    ON(r);
    result = w->n->WaitSignal(1, &d, r->comm, r->stream[stream]);
    OFF;
    return result;
}
static cu_result settle(rank *r, int stream)
{
    world *w = r->w;
    cu_result result;
    ON(r);
    result = w->d->StreamSynchronize(r->stream[stream]);
    OFF;
    return result;
}
static bool still(rank *r, int stream)
{
    world *w = r->w;
    cu_result result;
    ON(r);
    usleep(2000);
    result = w->d->StreamQuery(r->stream[stream]);
    OFF;
    return result == CU_NOT_READY;
}
static unsigned char *bytes_of(rank *r) { return (unsigned char *)(uintptr_t)r->memory; }

/* ---- moods ----------------------------------------------------------------------------------- */

/* In a group, what goes to different peers or contexts comes in both orders over the seeds; what goes to one peer on one
 * context always comes in its own. */
static void test_order_in_a_group(void **state)
{
    int first_context_first = 0, seeds = 24;

    (void)state;
    for (uint64_t seed = 0; seed < (uint64_t)seeds; seed++) {
        fake_nccl_options o = FAKE_NCCL_OPTIONS;
        world own, *w = &own;
        o.delay = 8;
        open_all(w, seed, &o);
        memset(bytes_of(&w->r[0]), 1, 100);
        memset(bytes_of(&w->r[0]) + 4096, 2, 100);
        fake_cuda_stall(1); /* rank 0's first stream: nothing goes before the group is whole */
        GIVES(w->n->GroupStart(), NCCL_OK);
        GIVES(put(&w->r[0], 1, HALF + 4096, 0, 100, 0, 0, 0), NCCL_OK);
        GIVES(put(&w->r[0], 1, HALF + 4096, 4096, 100, 0, 1, 0), NCCL_OK); /* beside the first */
        GIVES(put(&w->r[0], 1, HALF, 0, 100, 0, 0, 0), NCCL_OK);
        GIVES(put(&w->r[0], 1, HALF, 4096, 100, 0, 0, 0), NCCL_OK); /* over the third: stays */
        GIVES(w->n->GroupEnd(), NCCL_OK);
        GIVES(wait_for(&w->r[1], 3, 0, 0, 0, 0), NCCL_OK);
        GIVES(wait_for(&w->r[1], 1, 0, 0, 1, 0), NCCL_OK);
        fake_cuda_stall(0);
        GIVES(settle(&w->r[1], 0), CU_OK);
        GIVES(bytes_of(&w->r[1])[HALF], 2);
        GIVES(bytes_of(&w->r[1])[HALF + 99], 2);
        first_context_first += bytes_of(&w->r[1])[HALF + 4096] == 2;
        GIVES(settle(&w->r[0], 0), CU_OK);
        close_all(w);
    }
    assert_in_range(first_context_first, 1, seeds - 1);
}

/* A wait that is enqueued first stands before a put of the same communicator on another stream; a stalled stream holds the
 * communicator up as well. */
static void test_one_queue(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 8; seed++) {
        fake_nccl_options o = FAKE_NCCL_OPTIONS;
        world own, *w = &own;
        char text[200];
        open_all(w, seed, &o);
        bytes_of(&w->r[0])[0] = 7;
        GIVES(wait_for(&w->r[0], 1, 2, 0, 0, 1), NCCL_OK);
        GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
        assert_true(still(&w->r[0], 0) && still(&w->r[0], 1));
        GIVES(fake_cuda_blocked(text, sizeof text), 2);
        assert_non_null(strstr(text, "NCCL"));
        GIVES(put(&w->r[2], 0, HALF, 0, 64, 0, 0, 0), NCCL_OK);
        for (int i = 0; i < 3; i++)
            GIVES(settle(&w->r[i], 0), CU_OK);
        GIVES(settle(&w->r[0], 1), CU_OK);
        GIVES(bytes_of(&w->r[1])[HALF], 7);

        fake_cuda_stall(2); /* rank 0's second stream */
        GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 1), NCCL_OK);
        GIVES(put(&w->r[0], 2, HALF, 0, 1, 0, 0, 0), NCCL_OK);
        assert_true(still(&w->r[0], 0));
        fake_cuda_stall(0);
        GIVES(settle(&w->r[0], 0), CU_OK);
        close_all(w);
    }
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void abort_all(world *w)
{
    for (int i = 0; i < RANKS; i++)
        GIVES(w->n->CommAbort(w->r[i].comm), NCCL_OK);
    for (int i = 0; i < RANKS; i++) {
        GIVES(settle(&w->r[i], 0), CU_OK);
        GIVES(settle(&w->r[i], 1), CU_OK);
    }
    GIVES(fake_nccl_leaks(NULL, 0), 0);
    GIVES(fake_nccl_stop(), 0);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

static void test_lost_signal(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    (void)state;
    o.abort_releases = true;
    open_all(w, 1, &o);
    fake_nccl_lose_signal(2);
    bytes_of(&w->r[0])[1] = 9;
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
    GIVES(put(&w->r[0], 1, HALF + 1, 1, 1, 0, 0, 0), NCCL_OK);
    GIVES(wait_for(&w->r[1], 1, 0, 0, 0, 0), NCCL_OK);
    GIVES(settle(&w->r[1], 0), CU_OK);
    GIVES(settle(&w->r[0], 0), CU_OK); /* the sender sees nothing */
    GIVES(wait_for(&w->r[1], 1, 0, 0, 0, 0), NCCL_OK);
    assert_true(still(&w->r[1], 0) && fake_nccl_failed());
    GIVES(bytes_of(&w->r[1])[HALF + 1], 9);
    abort_all(w);
}

static void test_lost_completion(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    (void)state;
    o.abort_releases = true;
    open_all(w, 2, &o);
    fake_nccl_lose_completion(1);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 1), NCCL_OK);
    GIVES(wait_for(&w->r[1], 1, 0, 0, 0, 0), NCCL_OK);
    GIVES(settle(&w->r[1], 0), CU_OK); /* the receiver sees nothing */
    assert_true(still(&w->r[0], 0) && still(&w->r[0], 1) && fake_nccl_failed());
    abort_all(w);
}

static void test_async_error(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    nccl_result error = NCCL_INTERNAL_ERROR;
    (void)state;
    o.abort_releases = true;
    open_all(w, 3, &o);
    fake_nccl_async_error(2, NCCL_REMOTE_ERROR);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
    GIVES(settle(&w->r[0], 0), CU_OK);
    GIVES(w->n->CommGetAsyncError(w->r[0].comm, &error), NCCL_OK);
    GIVES(error, NCCL_OK);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
    for (int i = 0; i < 5000 && !fake_nccl_failed(); i++)
        usleep(1000);
    assert_true(still(&w->r[0], 0));
    GIVES(w->n->CommGetAsyncError(w->r[0].comm, &error), NCCL_OK);
    GIVES(error, NCCL_REMOTE_ERROR);
    GIVES(w->n->CommGetAsyncError(w->r[1].comm, &error), NCCL_OK);
    GIVES(error, NCCL_OK);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_REMOTE_ERROR);
    abort_all(w);
}

static void *give_up(void *context)
{
    rank *r = context;
    r->result = r->w->n->CommAbort(r->comm);
    atomic_store(&r->done, 1);
    return NULL;
}

/* An abort that does not release waits for the stream in the wait: for the signal, or for the fake's end. */
static void test_abort(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    (void)state;
    open_all(w, 9, &o);
    GIVES(wait_for(&w->r[0], 1, 1, 0, 0, 0), NCCL_OK);
    GIVES(wait_for(&w->r[2], 1, 1, 0, 0, 0), NCCL_OK);
    begin(w, 0, 1, give_up);
    begin(w, 2, 3, give_up);
    assert_true(still(&w->r[0], 0));
    assert_false(atomic_load(&w->r[0].done) || atomic_load(&w->r[2].done));
    GIVES(put(&w->r[1], 0, HALF, 0, 64, 0, 0, 0), NCCL_OK);
    join(w, 0, 1, NCCL_OK);
    GIVES(settle(&w->r[0], 0), CU_OK);
    assert_true(still(&w->r[2], 0));
    GIVES(settle(&w->r[1], 0), CU_OK);
    GIVES(w->n->CommAbort(w->r[1].comm), NCCL_OK);
    GIVES(fake_nccl_leaks(NULL, 0), 2); /* rank 2's communicator and its window */
    GIVES(fake_nccl_stop(), 2);
    join(w, 2, 3, NCCL_INTERNAL_ERROR);
    GIVES(settle(&w->r[2], 0), CU_OK);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

/* A rank that does not come: the others stand until they are aborted, or until the fake stops. */
static void test_rendezvous(void **state)
{
    fake_cuda_options c = three_devices(4);
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    nccl_comm comms[RANKS];

    (void)state;
    driver_open(w, &c);
    w->n = fake_nccl_start(&o);
    GIVES(w->n->GetUniqueId(&w->id), NCCL_OK);
    begin(w, 0, RANKS - 1, init);
    usleep(20000);
    assert_false(atomic_load(&w->r[0].done) || atomic_load(&w->r[1].done));
    begin(w, RANKS - 1, RANKS, init);
    join(w, 0, RANKS, NCCL_OK);

    begin(w, 0, RANKS - 1, enlist);
    usleep(20000);
    assert_false(atomic_load(&w->r[0].done) || atomic_load(&w->r[1].done));
    GIVES(w->n->CommAbort(w->r[0].comm), NCCL_OK);
    join(w, 0, 1, NCCL_INTERNAL_ERROR);
    assert_false(atomic_load(&w->r[1].done));
    GIVES(w->n->CommAbort(w->r[1].comm), NCCL_OK);
    join(w, 1, 2, NCCL_INTERNAL_ERROR);
    GIVES(w->n->CommAbort(w->r[2].comm), NCCL_OK);
    GIVES(fake_nccl_leaks(NULL, 0), 0);

    GIVES(w->n->GetUniqueId(&w->id), NCCL_OK);
    all(w, init);
    for (int i = 0; i < RANKS; i++)
        comms[i] = w->r[i].comm;
    begin(w, 0, 1, destroy);
    usleep(20000);
    assert_false(atomic_load(&w->r[0].done));
    begin(w, 1, RANKS, destroy);
    join(w, 0, RANKS, NCCL_OK);
    GIVES(w->n->CommAbort(comms[0]), NCCL_INVALID_ARGUMENT);
    GIVES(fake_cuda_complaints(NULL, 0), 1);
    fake_cuda_forgive();

    GIVES(w->n->GetUniqueId(&w->id), NCCL_OK);
    begin(w, 0, RANKS - 1, init);
    usleep(5000);
    fake_nccl_hang("ncclGroupStart", 1);
    fake_nccl_stop();
    join(w, 0, RANKS - 1, NCCL_INTERNAL_ERROR);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

static void *open_group(void *context)
{
    rank *r = context;
    r->result = r->w->n->GroupStart();
    atomic_store(&r->done, 1);
    return NULL;
}

static void test_hang(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    (void)state;
    open_all(w, 5, &o);
    fake_nccl_hang("ncclGroupStart", 1);
    begin(w, 0, 1, open_group);
    usleep(20000);
    assert_false(atomic_load(&w->r[0].done));
    assert_true(fake_nccl_failed());
    for (int i = 0; i < RANKS; i++)
        GIVES(w->n->CommAbort(w->r[i].comm), NCCL_OK);
    GIVES(fake_nccl_stop(), 0);
    join(w, 0, 1, NCCL_INTERNAL_ERROR);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

/* The n-th call of any function, and of one; what gives back does so nevertheless. */
static void test_failures(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    uint64_t calls;
    (void)state;
    open_all(w, 6, &o);
    calls = fake_nccl_calls();
    fake_nccl_fail(NULL, 2, NCCL_SYSTEM_ERROR);
    GIVES(w->n->GroupStart(), NCCL_OK);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_SYSTEM_ERROR);
    GIVES(w->n->GroupEnd(), NCCL_SYSTEM_ERROR); /* nothing of it goes */
    GIVES(fake_nccl_calls(), calls + 3);
    GIVES(settle(&w->r[0], 0), CU_OK);
    assert_non_null(strstr(w->n->GetLastError(w->r[0].comm), "a fault in ncclPutSignal"));
    fake_nccl_fail("ncclSignal", 1, NCCL_INTERNAL_ERROR);
    GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
    ON(&w->r[0]);
    GIVES(w->n->Signal(1, 0, 0, 0, w->r[0].comm, w->r[0].stream[0]), NCCL_INTERNAL_ERROR);
    GIVES(w->n->Signal(1, 0, 0, 0, w->r[0].comm, w->r[0].stream[0]), NCCL_OK);
    OFF;
    GIVES(wait_for(&w->r[1], 2, 0, 0, 0, 0), NCCL_OK);
    GIVES(settle(&w->r[1], 0), CU_OK);
    GIVES(settle(&w->r[0], 0), CU_OK);
    fake_nccl_fail("ncclCommWindowDeregister", 1, NCCL_SYSTEM_ERROR);
    GIVES(w->n->CommWindowDeregister(w->r[0].comm, w->r[0].window), NCCL_SYSTEM_ERROR);
    fake_nccl_fail("ncclCommAbort", 1, NCCL_SYSTEM_ERROR);
    GIVES(w->n->CommAbort(w->r[0].comm), NCCL_SYSTEM_ERROR);
    for (int i = 1; i < RANKS; i++)
        GIVES(w->n->CommAbort(w->r[i].comm), NCCL_OK);
    GIVES(fake_nccl_stop(), 0);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

/* ---- libraries that are less ----------------------------------------------------------------- */

static void test_null_windows(void **state)
{
    fake_cuda_options c = three_devices(7);
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    (void)state;
    for (int rma = 0; rma < 2; rma++) {
        nccl_properties p = NCCL_PROPERTIES_INIT;
        driver_open(w, &c);
        o.null_windows = !rma;
        o.no_host_rma = rma;
        w->n = fake_nccl_start(&o);
        GIVES(w->n->GetUniqueId(&w->id), NCCL_OK);
        all(w, init);
        all(w, enlist);
        assert_int_equal(w->r[0].window != NULL, rma);
        GIVES(w->n->CommQueryProperties(w->r[0].comm, &p), NCCL_OK);
        assert_false(p.host_rma_support);
        GIVES(put(&w->r[0], 1, HALF, 0, 1, 0, 0, 0), NCCL_INVALID_ARGUMENT);
        assert_non_null(strstr(w->n->GetLastError(w->r[0].comm), "host RMA is not supported"));
        for (int i = 0; i < RANKS && rma; i++)
            GIVES(w->n->CommWindowDeregister(w->r[i].comm, w->r[i].window), NCCL_OK);
        all(w, destroy);
        GIVES(fake_nccl_stop(), 0);
        driver_close(w);
        GIVES(fake_cuda_stop(), 0);
    }
}

static void test_versions(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    const nccl_library *l = NULL;
    (void)state;
    o.version = 22809;
    nccl_library_fake(fake_nccl_start(&o));
    GIVES(nccl_library_get(&l), TIDE_ERR_UNSUPPORTED);
    assert_non_null(strstr(tide_last_error(), "2.28.9"));
    assert_non_null(strstr(tide_last_error(), "2.31.2"));
    GIVES(fake_nccl_stop(), 0);
    o.version = 23203;
    nccl_library_fake(fake_nccl_start(&o));
    GIVES(nccl_library_get(&l), TIDE_OK);
    GIVES(l->version, 23203);
    nccl_library_fake(NULL);
    GIVES(fake_nccl_stop(), 0);
}

/* ---- complaints ------------------------------------------------------------------------------ */

#define COMPLAINS(expected)                                        \
    do {                                                           \
        assert_true(fake_cuda_complaints(text, sizeof text) >= 1); \
        assert_non_null(strstr(text, expected));                   \
        fake_cuda_forgive();                                       \
    } while (0)

static void test_complaints(void **state)
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;
    world own, *w = &own;
    char text[256];
    rank *r = &own.r[0];

    (void)state;
    open_all(w, 8, &o);
    const void *local = (const void *)(uintptr_t)r->memory;
    GIVES(w->n->PutSignal(local, 1, NCCL_UINT8, 1, r->window, 0, 0, 0, 0, r->comm, r->stream[0]), NCCL_OK);
    COMPLAINS("context is not current");
    GIVES(settle(r, 0), CU_OK);
    ON(r);
    GIVES(w->n->PutSignal(local, 1, NCCL_UINT8, 1, r->window, 0, 0, 0, 0, r->comm, NULL), NCCL_INVALID_ARGUMENT);
    COMPLAINS("work on the legacy stream");
    GIVES(w->n->PutSignal(local, 0, NCCL_UINT8, 1, r->window, 0, 0, 0, 0, r->comm, r->stream[0]), NCCL_INVALID_ARGUMENT);
    COMPLAINS("a put of no bytes");
    GIVES(w->n->PutSignal(local, 1, NCCL_UINT8, 1, r->window, 0, 0, 0, 0, r->comm, w->r[1].stream[0]), NCCL_INVALID_ARGUMENT);
    GIVES(fake_cuda_complaints(NULL, 0), 0); /* another device's stream: refused */
    GIVES(w->n->GroupStart(), NCCL_OK);
    GIVES(w->n->Signal(1, 0, 0, 0, r->comm, r->stream[0]), NCCL_OK);
    GIVES(w->n->Signal(1, 0, 0, 0, r->comm, r->stream[1]), NCCL_OK);
    GIVES(w->n->GroupEnd(), NCCL_OK);
    COMPLAINS("two streams of one communicator");
    GIVES(w->n->GroupStart(), NCCL_OK);
    for (int i = 0; i <= FAKE_NCCL_IN_FLIGHT; i++)
        GIVES(w->n->Signal(1, 0, 0, 0, r->comm, r->stream[0]), NCCL_OK);
    GIVES(w->n->GroupEnd(), NCCL_OK);
    COMPLAINS("129 puts in one group");
    OFF;
    GIVES(settle(r, 0), CU_OK);
    GIVES(settle(r, 1), CU_OK);

    GIVES(w->d->MemUnmap(r->memory, BYTES), CU_OK); /* under the window */
    COMPLAINS("is registered with a library");
    cu_access access = {{CU_LOCATION_DEVICE, 0}, CU_ACCESS_READ_WRITE};
    GIVES(w->d->MemMap(r->memory, BYTES, 0, r->handle, 0), CU_OK);
    GIVES(w->d->MemSetAccess(r->memory, BYTES, &access, 1), CU_OK);

    GIVES(w->n->CommWindowDeregister(w->r[1].comm, w->r[1].window), NCCL_OK);
    GIVES(put(r, 1, HALF, 0, 1, 0, 0, 0), NCCL_OK);
    GIVES(settle(r, 0), CU_OK);
    COMPLAINS("a window that rank 1 has deregistered");
    GIVES(w->n->GroupStart(), NCCL_OK);
    GIVES(fake_nccl_leaks(text, sizeof text), 6);
    assert_string_equal(text, "3 communicators, 2 windows, 1 open groups");
    GIVES(w->n->GroupEnd(), NCCL_OK);
    GIVES(w->n->CommWindowDeregister(r->comm, r->window), NCCL_OK);
    begin(w, 0, RANKS, destroy); /* rank 2 with its window */
    join(w, 0, RANKS, NCCL_OK);
    COMPLAINS("a window of the communicator is registered");
    GIVES(fake_nccl_leaks(text, sizeof text), 0);
    GIVES(fake_nccl_stop(), 0);
    driver_close(w);
    GIVES(fake_cuda_stop(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_in_a_group), cmocka_unit_test(test_one_queue),
        cmocka_unit_test(test_lost_signal),      cmocka_unit_test(test_lost_completion),
        cmocka_unit_test(test_async_error),      cmocka_unit_test(test_abort),
        cmocka_unit_test(test_rendezvous),
        cmocka_unit_test(test_hang),             cmocka_unit_test(test_failures),
        cmocka_unit_test(test_null_windows),     cmocka_unit_test(test_versions),
        cmocka_unit_test(test_complaints)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
