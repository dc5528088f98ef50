/*
 * The CUDA device over the fake driver, where ranks and callers are in the way: ranks that disagree, stay away, abort or
 * are killed, streams that cannot be taken, adopted memory, views, a heap that fails at each place in turn. A driver that
 * fails is in test_cuda.c; `tide-fake check --fabric cuda` looks at bytes.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "../fakes/fake_cuda.h"
#include "../harness/small.h"
#include "base/base.h"
#include "comm/comm.h"
#include "comm/dlpack.h"
#include "fabric/cuda/launch.h"

enum { RANKS = 2, ROWS = 40, COLUMNS = 6, ELEMENTS = ROWS * COLUMNS };

static const cuda_driver *driver;
static int64_t multicast; /* the knob, of every communicator */

static void start(uint64_t seed)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    o.seed = seed;
    o.multicast = true;
    driver = fake_cuda_start(&o);
    cuda_driver_fake(driver);
}

static void stop(void)
{
    cuda_driver_fake(NULL);
    assert_int_equal(fake_cuda_stop(), 0);
}

/* ---- one rank with a group of one matrix ------------------------------------------------------- */

typedef struct gpu {
    cu_context context;
    cu_stream stream;
    cu_ptr gradient, out;
    int device, pushed, retained;
    tide_comm *comm;
    tide_group *groups[2];
} gpu;

/* Returns a tide_status; gpu_close in any case. */
static int gpu_open(gpu *g, uint32_t rank, uint32_t n_ranks, uint32_t node_size, tide_allgather_fn allgather,
                    void *context, int64_t deadline_ms)
{
    static const tide_param param = {"w", 2, 0, {ROWS, COLUMNS}};
    tide_group_desc descs[2] = {TIDE_GROUP_DESC_INIT, TIDE_GROUP_DESC_INIT};
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_options options = TIDE_OPTIONS_INIT;
    cu_result r;
    int status;

    memset(g, 0, sizeof *g);
    g->device = (int)(rank % 2);
    r = driver->Init(0) ? CU_NOT_INITIALIZED : driver->PrimaryRetain(&g->context, g->device);
    g->retained = r == CU_OK;
    if (r == CU_OK && (r = driver->CtxPush(g->context)) == CU_OK)
        g->pushed = 1;
    if (r == CU_OK)
        r = driver->StreamCreate(&g->stream, CU_STREAM_NON_BLOCKING, 0);
    if (r == CU_OK)
        r = driver->MemAlloc(&g->gradient, ELEMENTS * sizeof(float));
    if (r == CU_OK)
        r = driver->MemAlloc(&g->out, ELEMENTS * sizeof(float));
    for (int i = 0; i < 2; i++) {
        descs[i].n_params = 1;
        descs[i].params = &param;
        descs[i].dtype = descs[i].shard_dtype = descs[i].grad_dtype = TIDE_F32;
        descs[i].landing = TIDE_LANDING_PRIVATE;
    }
    options.deadline_ms = deadline_ms;
    options.multicast = multicast;
    desc.rank = rank;
    desc.n_ranks = n_ranks;
    desc.node_size = node_size;
    desc.fabric = TIDE_FABRIC_CUDA;
    desc.device = r == CU_OK ? g->device : -1; /* a rank that cannot go on says so where all listen */
    desc.allgather = allgather;
    desc.allgather_context = context;
    desc.options = &options;
    status = tide_comm_create(&desc, &g->comm);
    return status == TIDE_OK ? tide_groups_create(g->comm, descs, 2, g->groups) : status;
}

static int gpu_close(gpu *g)
{
    cu_context ignored;
    int status = tide_comm_destroy(g->comm);
    if (g->out)
        driver->MemFree(g->out);
    if (g->gradient)
        driver->MemFree(g->gradient);
    if (g->stream)
        driver->StreamDestroy(g->stream);
    if (g->pushed)
        driver->CtxPop(&ignored);
    if (g->retained)
        driver->PrimaryRelease(g->device);
    return status;
}

static int reduce(gpu *g, int group)
{
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    const void *grads[] = {(const void *)(uintptr_t)g->gradient};
    args.grads = grads;
    args.out = (float *)(uintptr_t)g->out;
    args.grad_dtype = TIDE_F32;
    return tide_reduce_scatter(g->groups[group], &args, g->stream);
}

static int gather(gpu *g, int group)
{
    return tide_all_gather(g->groups[group], NULL, g->stream);
}

/* ---- ranks that disagree, stay away, abort ----------------------------------------------------- */

typedef struct scene {
    int64_t deadline_ms;
    int (*act)(gpu *g, uint32_t rank, uint32_t n_ranks);
} scene;

static int scene_body(threads_rank *rank)
{
    const scene *s = rank->context;
    gpu g;
    int wrong = 0;
    if (gpu_open(&g, rank->rank, rank->n_ranks, rank->n_ranks == RANKS ? 0 : 2, threads_allgather, rank,
                 s->deadline_ms) != TIDE_OK)
        wrong = 1;
    else
        wrong = s->act(&g, rank->rank, rank->n_ranks);
    if (wrong)
        fprintf(stderr, "rank %u: last error: %s\n", rank->rank, tide_last_error());
    return wrong + (gpu_close(&g) != TIDE_OK);
}

static void play(int (*act)(gpu *, uint32_t, uint32_t), uint32_t n_ranks, int64_t deadline_ms)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        scene s = {deadline_ms, act};
        start(seed);
        assert_int_equal(threads_run(n_ranks, scene_body, &s), 0);
        stop();
    }
}

/* The failure, as a later call and as tide_comm_check tell it; and it is where the caller's stream gets to its end. */
static int expect_failure(gpu *g, int code, const char *text)
{
    tide_failure f = TIDE_FAILURE_INIT;
    CHECK(tide_comm_sync(g->comm) == code);
    CHECK(tide_comm_check(g->comm, &f) == code && f.code == code);
    if (!strstr(f.text, text)) {
        fprintf(stderr, "'%s', expected '%s'\n", f.text, text);
        return 1;
    }
    CHECK(reduce(g, 0) == code && strstr(tide_last_error(), text));
    while (driver->StreamQuery(g->stream) == CU_NOT_READY)
        usleep(200);
    CHECK(driver->StreamQuery(g->stream) == CU_OK);
    return 0;
}

static int disagree(gpu *g, uint32_t rank, uint32_t n_ranks)
{
    int status;
    (void)n_ranks;
    CHECK(gather(g, 0) == TIDE_OK);
    CHECK(tide_wait(g->groups[0], TIDE_READY, g->stream) == TIDE_OK);
    status = rank == 0 ? gather(g, 1) : reduce(g, 0);
    CHECK(status == TIDE_OK || status == TIDE_ERR_MISMATCH);
    return expect_failure(g, TIDE_ERR_MISMATCH, "disagree: in call 2");
}

static void test_ranks_disagree(void **state)
{
    (void)state;
    play(disagree, RANKS, 20000);
}

static int stay_away(gpu *g, uint32_t rank, uint32_t n_ranks)
{
    char text[64];
    CHECK(gather(g, 0) == TIDE_OK && tide_slot_release(g->groups[0], g->stream) == TIDE_OK);
    CHECK(tide_comm_sync(g->comm) == TIDE_OK);
    if (rank == n_ranks - 1) { /* does not make the call */
        while (tide_comm_check(g->comm, NULL) == TIDE_OK)
            usleep(1000);
        return expect_failure(g, TIDE_ERR_DEADLINE, "waited");
    }
    CHECK(reduce(g, 1) == TIDE_OK && tide_wait(g->groups[1], TIDE_DONE, g->stream) == TIDE_OK);
    snprintf(text, sizeof text, "of call 2");
    return expect_failure(g, TIDE_ERR_DEADLINE, text);
}

static void test_rank_stays_away(void **state)
{
    (void)state;
    play(stay_away, RANKS, 300);
    play(stay_away, 4, 300); /* two nodes of two */
}

static int give_up(gpu *g, uint32_t rank, uint32_t n_ranks)
{
    if (rank == n_ranks - 1)
        CHECK(tide_comm_abort(g->comm) == TIDE_OK);
    else
        CHECK(reduce(g, 1) == TIDE_OK || tide_comm_check(g->comm, NULL) == TIDE_ERR_ABORTED);
    return expect_failure(g, TIDE_ERR_ABORTED, "aborted the communicator");
}

static void test_rank_aborts(void **state)
{
    (void)state;
    play(give_up, RANKS, 20000);
    play(give_up, 4, 20000);
}

/* ---- small copies ------------------------------------------------------------------------------ */

/* What goes to the driver: copies by engine, and words that stream operations write. */
static struct { _Atomic uint32_t copies, writes, launches; } enqueued;
static const cuda_driver *below;

static cu_result count_copy(cu_ptr dst, cu_ptr src, size_t bytes, cu_stream stream)
{
    enqueued.copies++;
    return below->MemcpyAsync(dst, src, bytes, stream);
}
static cu_result count_copy2d(const cu_copy2d *copy, cu_stream stream)
{
    enqueued.copies++;
    return below->Memcpy2DAsync(copy, stream);
}
static cu_result count_words(cu_stream stream, unsigned n, cu_stream_op *ops, unsigned flags)
{
    for (unsigned i = 0; i < n; i++)
        enqueued.writes += ops[i].at.operation == CU_OP_WRITE_64;
    return below->StreamBatchMemOp(stream, n, ops, flags);
}
static cu_result count_launch(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned shared, cu_stream stream, void **parameters, void **extra)
{
    enqueued.launches++;
    return below->LaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

static int one_of_each(gpu *g, uint32_t rank, uint32_t n_ranks)
{
    (void)rank;
    (void)n_ranks;
    CHECK(gather(g, 0) == TIDE_OK && reduce(g, 0) == TIDE_OK && tide_comm_sync(g->comm) == TIDE_OK);
    return 0;
}

/* A small copy to a peer is a kernel, which also posts what is signalled behind it: of an all-gather `done` to both ranks,
 * of a reduce-scatter `filled` to the owner. */
static void test_small_copies_post(void **state)
{
    const double usual = launch_peer_cost.kernel_weight;
    uint32_t copies[2], writes[2], launches[2];
    scene s = {20000, one_of_each};
    cuda_driver counted;
    (void)state;

    for (int engines = 0; engines < 2; engines++) {
        start(7);
        below = driver;
        counted = *driver;
        counted.MemcpyAsync = count_copy;
        counted.Memcpy2DAsync = count_copy2d;
        counted.StreamBatchMemOp = count_words;
        counted.LaunchKernel = count_launch;
        cuda_driver_fake(&counted);
        enqueued.copies = enqueued.writes = enqueued.launches = 0;
        launch_peer_cost.kernel_weight = engines ? 1e9 : usual;
        assert_int_equal(threads_run(RANKS, scene_body, &s), 0);
        stop();
        copies[engines] = enqueued.copies;
        writes[engines] = enqueued.writes;
        launches[engines] = enqueued.launches;
    }
    launch_peer_cost.kernel_weight = usual;
    assert_int_equal(copies[1] - copies[0], 2 * RANKS);
    assert_int_equal(launches[0] - launches[1], 2 * RANKS);
    assert_int_equal(writes[1] - writes[0], RANKS * (RANKS + 1));
}

/* ---- what is refused --------------------------------------------------------------------------- */

static int refuse(gpu *g, uint32_t rank, uint32_t n_ranks)
{
    cu_stream captured;
    (void)rank;
    (void)n_ranks;
    CHECK(driver->StreamCreate(&captured, CU_STREAM_NON_BLOCKING, 0) == CU_OK);
    fake_cuda_capture(captured, true);
    CHECK_FAILS(tide_all_gather(g->groups[0], NULL, captured), TIDE_ERR_UNSUPPORTED, "captured into a CUDA graph");
    CHECK_FAILS(tide_wait(g->groups[0], TIDE_READY, captured), TIDE_ERR_UNSUPPORTED, "captured");
    fake_cuda_capture(captured, false);
    CHECK(driver->StreamDestroy(captured) == CU_OK);
    /* Nothing was changed: the legacy stream is taken, and nothing of ours runs there. */
    CHECK(tide_all_gather(g->groups[0], NULL, NULL) == TIDE_OK);
    CHECK(tide_wait(g->groups[0], TIDE_READY, NULL) == TIDE_OK);
    CHECK(tide_slot_release(g->groups[0], NULL) == TIDE_OK);
    CHECK(tide_comm_sync(g->comm) == TIDE_OK);
    return 0;
}

static void test_streams(void **state)
{
    (void)state;
    play(refuse, RANKS, 20000);
}

static void test_old_driver(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    const cuda_driver *old;
    (void)state;
    o.version = 11080;
    cuda_driver_fake(fake_cuda_start(&o));
    assert_int_equal(cuda_driver_get(&old), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(), "CUDA driver: version 11.8, expected at least 12.0");
    stop();
}

static int queues_body(threads_rank *rank)
{
    gpu g;
    int status = gpu_open(&g, rank->rank, rank->n_ranks, 0, threads_allgather, rank, 20000);
    if (status != TIDE_ERR_UNSUPPORTED || !strstr(tide_last_error(), "CUDA_DEVICE_MAX_CONNECTIONS"))
        fprintf(stderr, "rank %u: %d, %s\n", rank->rank, status, tide_last_error());
    else
        status = 0;
    return gpu_close(&g) != TIDE_OK || status;
}

static void test_hardware_queues(void **state)
{
    (void)state;
    start(1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
    assert_int_equal(threads_run(4, queues_body, NULL), 0); /* two ranks a GPU */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    stop();
}

/* ---- the arena and the caller's memory ---------------------------------------------------------- */

static int adopt(gpu *g, uint32_t rank, uint32_t n_ranks)
{
    tide_tensor shard = {.size = sizeof shard}, whole = {.size = sizeof whole};
    DLManagedTensor *view;
    float *mine = (float *)(uintptr_t)g->gradient, *at;

    CHECK(tide_group_tensor(g->groups[0], TIDE_TENSOR_SHARD, 0, &shard) == TIDE_OK);
    CHECK(tide_group_tensor(g->groups[0], TIDE_TENSOR_PARAM, 0, &whole) == TIDE_OK);
    at = shard.data;
    for (uint32_t i = 0; i < ELEMENTS / n_ranks; i++)
        mine[i] = (float)(rank * 1000 + i); /* the fake's memory is the CPU's */
    CHECK(tide_shard_adopt(g->groups[0], 0, mine, shard.bytes, g->stream) == TIDE_OK);
    CHECK(tide_comm_sync(g->comm) == TIDE_OK);
    CHECK(memcmp(at, mine, shard.bytes) == 0);
    /* Its own memory, one element on; then the same place. What is not given becomes zero. */
    CHECK(tide_shard_adopt(g->groups[0], 0, at + 1, shard.bytes - sizeof(float), g->stream) == TIDE_OK);
    CHECK(tide_shard_adopt(g->groups[0], 0, at, shard.bytes, g->stream) == TIDE_OK);
    CHECK(tide_comm_sync(g->comm) == TIDE_OK);
    CHECK(memcmp(at, mine + 1, shard.bytes - sizeof(float)) == 0 && at[ELEMENTS / n_ranks - 1] == 0);
    CHECK(gather(g, 0) == TIDE_OK && tide_wait(g->groups[0], TIDE_READY, g->stream) == TIDE_OK);
    CHECK(tide_group_dlpack(g->groups[0], TIDE_TENSOR_PARAM, 0, (void **)&view) == TIDE_OK);
    CHECK(view->dl_tensor.device.device_type == DLPACK_CUDA && view->dl_tensor.device.device_id == g->device);
    CHECK(tide_comm_sync(g->comm) == TIDE_OK);
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        uint32_t n = ELEMENTS / n_ranks, r = i / n, k = i % n;
        CHECK(((float *)whole.data)[i] == (k == n - 1 ? 0 : (float)(r * 1000 + k + 1)));
    }
    view->deleter(view);
    return 0;
}

static void test_adoption(void **state)
{
    (void)state;
    play(adopt, RANKS, 20000);
}

static int lasting_body(threads_rank *rank)
{
    DLManagedTensor *view;
    gpu g;
    CHECK(gpu_open(&g, rank->rank, rank->n_ranks, 0, threads_allgather, rank, 20000) == TIDE_OK);
    CHECK(gather(&g, 0) == TIDE_OK && tide_comm_sync(g.comm) == TIDE_OK);
    CHECK(tide_group_dlpack(g.groups[0], TIDE_TENSOR_PARAM, 0, (void **)&view) == TIDE_OK);
    CHECK(gpu_close(&g) == TIDE_OK);
    CHECK(((float *)view->dl_tensor.data)[ELEMENTS - 1] == 0); /* the arena is still there */
    view->deleter(view);
    return 0;
}

static void test_view_outlives(void **state)
{
    (void)state;
    start(1);
    assert_int_equal(threads_run(RANKS, lasting_body, NULL), 0);
    stop();
}

/* ---- a heap that fails -------------------------------------------------------------------------- */

/* A rank's whole life. Whatever fails, it comes to its end, and says why. */
static int life_body(threads_rank *rank)
{
    gpu g;
    int status = gpu_open(&g, rank->rank, rank->n_ranks, 0, threads_allgather, rank, 20000);
    if (status == TIDE_OK)
        status = gather(&g, 0);
    if (status == TIDE_OK)
        status = tide_wait(g.groups[0], TIDE_READY, g.stream);
    if (status == TIDE_OK)
        status = tide_slot_release(g.groups[0], g.stream);
    if (status == TIDE_OK)
        status = reduce(&g, 1);
    if (status == TIDE_OK)
        status = tide_comm_sync(g.comm);
    if (status != TIDE_OK && !tide_last_error()[0]) {
        fprintf(stderr, "rank %u: %d without a text\n", rank->rank, status);
        return 1;
    }
    if (status != TIDE_OK && g.comm) /* the others may wait for this one */
        tide_comm_abort(g.comm);
    gpu_close(&g);
    return 0;
}

static void heap_fails(void)
{
    uint64_t n = 1, live = tide_alloc_live(), made;
    do {
        start(n);
        made = tide_alloc_count();
        tide_alloc_fail_at(n);
        assert_int_equal(threads_run(RANKS, life_body, NULL), 0);
        tide_alloc_fail_at(0);
        made = tide_alloc_count() - made;
        stop();
        assert_int_equal(tide_alloc_live(), live);
        n += 1 + n / 16;
    } while (n <= made);
}

static void test_heap_fails(void **state)
{
    (void)state;
    heap_fails();
    multicast = 1;
    heap_fails();
    multicast = 0;
}

/* ---- a process that is killed ------------------------------------------------------------------- */

static int process_main(const char *path, uint32_t rank, int ready)
{
    tide_comm_info info = {.size = sizeof info};
    tide_bootstrap *boot = NULL;
    gpu g;
    char one = 1;
    int status = tide_bootstrap_local(path, rank, RANKS, 20000, &boot);
    if (status == TIDE_OK)
        status = gpu_open(&g, rank, RANKS, 0, tide_bootstrap_allgather, boot, 20000);
    if (status == TIDE_OK)
        status = gather(&g, 0);
    if (status == TIDE_OK)
        status = tide_comm_sync(g.comm);
    CHECK(status != TIDE_OK || (tide_comm_get_info(g.comm, &info) == TIDE_OK && info.multicast == multicast));
    if (status != TIDE_OK || write(ready, &one, 1) != 1)
        return 1;
    if (rank == 1)
        for (;;)
            pause();
    CHECK(reduce(&g, 1) == TIDE_OK);
    if (expect_failure(&g, TIDE_ERR_PEER_DEAD, "rank 1 (process "))
        return 1;
    CHECK(gpu_close(&g) == TIDE_OK);
    tide_bootstrap_destroy(boot);
    return fake_cuda_leaks(NULL, 0);
}

static void test_rank_is_killed(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        pid_t pids[RANKS];
        char path[64], byte;
        int ready[2], status;

        multicast = seed > 3;

        start(seed);
        assert_int_equal(pipe(ready), 0);
        snprintf(path, sizeof path, "tide-cuda-%d-%d", (int)getpid(), (int)seed);
        for (uint32_t r = 0; r < RANKS; r++) {
            pids[r] = fork();
            if (pids[r] == 0)
                _exit(process_main(path, r, ready[1]));
        }
        close(ready[1]);
        for (int i = 0; i < RANKS; i++)
            assert_int_equal(read(ready[0], &byte, 1), 1);
        usleep(20000); /* rank 0 is perhaps in its wait by now, perhaps not: both must do */
        kill(pids[1], SIGKILL);
        assert_int_equal(waitpid(pids[1], &status, 0), pids[1]);
        assert_int_equal(waitpid(pids[0], &status, 0), pids[0]);
        assert_int_equal(status, 0);
        close(ready[0]);
        stop();
    }
    multicast = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rank_is_killed), /* first: forks before there are threads */
        cmocka_unit_test(test_ranks_disagree), cmocka_unit_test(test_rank_stays_away),
        cmocka_unit_test(test_rank_aborts),    cmocka_unit_test(test_streams),
        cmocka_unit_test(test_old_driver),     cmocka_unit_test(test_hardware_queues),
        cmocka_unit_test(test_small_copies_post), cmocka_unit_test(test_adoption),
        cmocka_unit_test(test_view_outlives),  cmocka_unit_test(test_heap_fails),
    };
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
