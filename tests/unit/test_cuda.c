/*
 * The CUDA fabric over the fake driver: real calls with ranks as threads, on one fake GPU or several, in whatever order
 * the driver may run them, and with a fault at every place: whoever is told that all is well has the right bytes. After
 * each test nothing of the driver's is alive and nothing was complained of.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../harness/gpu_ranks.h"
#include "fabric/cuda/launch.h"

typedef gpu_job job;

/* Starts a driver and runs the ranks; leaves nothing behind. */
static void run(job *j, const fake_cuda_options *o)
{
    const cuda_driver *driver = fake_cuda_start(o);

    cuda_driver_fake(driver);
    assert_int_equal(gpu_ranks_run(j, driver), 0);
    gpu_ranks_close(j);
    cuda_driver_fake(NULL);
    assert_int_equal(fake_cuda_stop(), 0);
    for (uint32_t r = 0; r < j->n_ranks; r++)
        assert_int_equal(j->wrong[r], 0);
}

static void assert_fine(const job *j)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (j->status[r] != TIDE_OK)
            fprintf(stderr, "rank %u: %s\n", r, j->text[r]);
        assert_int_equal(j->status[r], TIDE_OK);
    }
}

static void assert_told(const job *j, int status, const char *text)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (j->status[r] != status || !strstr(j->text[r], text))
            fprintf(stderr, "rank %u: %d (%s), expected %d with '%s'\n", r, j->status[r], j->text[r], status, text);
        assert_int_equal(j->status[r], status);
        assert_non_null(strstr(j->text[r], text));
    }
}

/* ---- right whatever the order ---------------------------------------------------------------- */

static uint64_t seeds = 48;

static void test_seeds(void **state)
{
    static const uint32_t shapes[][2] = {{1, 1}, {2, 2}, {2, 1}, {3, 3}, {4, 4}, {4, 2}, {4, 1}, {3, 1}};
    const double usual = launch_peer_cost.kernel_weight;
    (void)state;
    for (uint64_t seed = 0; seed < seeds; seed++) {
        const uint32_t *shape = shapes[seed % 8];
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        job j = gpu_job_of(shape[0], shape[1]);
        o.seed = seed;
        o.devices = 2 + (int)(seed / 8 % 3);
        o.no_batch = seed % 5 == 4;
        o.no_peer_words = seed % 3 == 2;
        launch_peer_cost.kernel_weight = seed % 4 < 2 ? usual : 1e9; /* so little goes to a peer by kernel, else by copy engine */
        /* On a stream that they share, one rank's wait would stand before what the other one still has to record. */
        j.caller = (int)(seed % 3 == 1 && j.n_ranks > (uint32_t)o.devices ? 2 : seed % 3);
        j.options.mode = (int64_t)(seed / 4 % 2);
        j.options.chunk = seed % 2 ? 16 : 4096;
        j.options.n_stg = 1 + (int64_t)(seed % 3);
        j.options.head_bytes = 64;
        j.options.k = 1 + (int64_t)(seed % 2);
        run(&j, &o);
        assert_fine(&j);
    }
    launch_peer_cost.kernel_weight = usual;
    printf("%llu worlds, all right\n", (unsigned long long)seeds);
}

/* ---- opening --------------------------------------------------------------------------------- */

static void test_no_driver(void **state)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    const cuda_driver *driver;
    tide_comm *comm;
    (void)state;
    desc.fabric = TIDE_FABRIC_CUDA;
    if (cuda_driver_get(&driver) == TIDE_OK)
        skip(); /* there is one */
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_ERR_UNSUPPORTED);
    assert_non_null(strstr(tide_last_error(), "CUDA driver: "));
}

static void test_refusals(void **state)
{
    static const struct { int attribute; const char *text; } missing[] = {
        {CU_ATTR_VMM, "no virtual memory management"},
        {CU_ATTR_HANDLE_FD, "no memory handles as file descriptors"},
        {CU_ATTR_STREAM_WAIT_64, "no 64-bit stream memory operations"},
    };
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    job j;

    (void)state;
    for (size_t i = 0; i < sizeof missing / sizeof missing[0]; i++) {
        j = gpu_job_of(2, 2);
        o.attribute = missing[i].attribute;
        run(&j, &o);
        assert_told(&j, TIDE_ERR_UNSUPPORTED, missing[i].text);
    }
    o = FAKE_CUDA_OPTIONS;
    o.no_peers = true;
    j = gpu_job_of(2, 2);
    run(&j, &o);
    assert_told(&j, TIDE_ERR_UNSUPPORTED, "cannot access device");
    o = FAKE_CUDA_OPTIONS;
    o.devices = 0;
    j = gpu_job_of(1, 1);
    run(&j, &o);
    assert_told(&j, TIDE_ERR_UNSUPPORTED, "CUDA_ERROR_NO_DEVICE");
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* Runs with one fault; true when it came. Ranks may differ in what they are told, but end, with nothing left behind; and
 * where all are content, all results are right. */
static bool run_with_fault(uint64_t n, cu_result code, uint64_t seed, uint32_t n_ranks, uint32_t node_size)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    job j = gpu_job_of(n_ranks, node_size);
    bool came, pushing;

    o.seed = seed;
    j.calls = 1;
    j.options.deadline_ms = 2000;
    const cuda_driver *driver = fake_cuda_start(&o);
    cuda_driver_fake(driver);
    if (code == CU_OUT_OF_MEMORY)
        fake_cuda_oom(n);
    else
        fake_cuda_fail(NULL, n, code);
    assert_int_equal(gpu_ranks_run(&j, driver), 0);
    gpu_ranks_close(&j);
    came = fake_cuda_failed();
    pushing = strcmp(fake_cuda_fault(), "cuCtxPushCurrent_v2") == 0; /* then nobody can say that the streams rest: their memory stays */
    cuda_driver_fake(NULL);
    if (fake_cuda_stop() != 0 && !pushing) {
        fprintf(stderr, "fault at call %llu, code %d: rank 0: %s\n", (unsigned long long)n, code, j.text[0]);
        fail();
    }
    for (uint32_t r = 0; r < j.n_ranks; r++) {
        if (j.wrong[r])
            fprintf(stderr, "rank %u: wrong bytes; fault at call %llu, %s; told: %s | %s\n", r, (unsigned long long)n,
                    fake_cuda_fault(), j.text[0], j.text[1]);
        assert_int_equal(j.wrong[r], 0);
    }
    return came;
}

static void test_out_of_memory(void **state)
{
    uint64_t n = 1;
    (void)state;
    for (; run_with_fault(n, CU_OUT_OF_MEMORY, n, 2, n % 4 ? 2 : 1); n += 1 + n / 40)
        ;
    assert_true(n > 60);
}

static void test_failing_calls(void **state)
{
    uint64_t n = 1, runs = 0;
    (void)state;
    for (; run_with_fault(n, CU_INVALID_HANDLE, n, 2, n % 2 ? 2 : 1); n += 1 + n % 23)
        runs++;
    assert_true(runs > 40);
}

/* ---- failures of calls ----------------------------------------------------------------------- */

static int act_late(job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status = gpu_gather(j->comm[r], groups[0], g->stream); /* call 1: all of them */
    (void)layers;
    if (status == TIDE_OK)
        status = tide_slot_release(groups[0], g->stream);
    if (status == TIDE_OK && r == 1) { /* not in time for call 2 */
        while (tide_comm_check(j->comm[1], NULL) == TIDE_OK)
            usleep(1000);
        status = tide_comm_check(j->comm[1], NULL);
    } else if (status == TIDE_OK) {
        status = gpu_gather(j->comm[r], groups[0], g->stream);
    }
    return gpu_tell(j, r, status);
}

static void test_deadline(void **state)
{
    (void)state;
    for (uint32_t node_size = 1; node_size <= 2; node_size++) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        job j = gpu_job_of(2, node_size);
        j.act = act_late;
        j.options.deadline_ms = 150;
        run(&j, &o);
        assert_told(&j, TIDE_ERR_DEADLINE, "waited");
        for (uint32_t r = 0; r < 2; r++) {
            assert_int_equal(j.failure[r].code, TIDE_ERR_DEADLINE);
            assert_int_equal(j.failure[r].rank, 0);
            assert_int_equal(j.failure[r].peer, 1);
            assert_true(j.failure[r].call == 2);
            assert_memory_equal(j.failure[r].phase, "all_gather", 10);
        }
    }
}

/* A stream of the library that stands still for much longer than the deadline: the deadline says so, and all come to rest
 * when it goes on. */
static int act_gather(job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    (void)layers;
    return gpu_tell(j, r, gpu_gather(j->comm[r], groups[0], g->stream));
}

static void *go_on(void *none)
{
    usleep(500000);
    fake_cuda_stall(0);
    return none;
}

static void test_stalled_stream(void **state)
{
    int failed = 0;
    (void)state;
    for (uint64_t stream = 3; stream <= 9; stream += 2) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        job j = gpu_job_of(2, 2);
        pthread_t thread;
        j.act = act_gather;
        j.options.deadline_ms = 100;
        const cuda_driver *driver = fake_cuda_start(&o);
        cuda_driver_fake(driver);
        fake_cuda_stall(stream);
        assert_int_equal(pthread_create(&thread, NULL, go_on, NULL), 0);
        assert_int_equal(gpu_ranks_run(&j, driver), 0);
        gpu_ranks_close(&j);
        pthread_join(thread, NULL);
        cuda_driver_fake(NULL);
        assert_int_equal(fake_cuda_stop(), 0);
        for (uint32_t r = 0; r < 2; r++)
            assert_true(j.status[r] == TIDE_OK || j.status[r] == TIDE_ERR_DEADLINE);
        failed += j.status[0] != TIDE_OK;
    }
    assert_true(failed > 0);
}

/* Refused before the first operation, and no harm done. */
static int act_capture(job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status;
    (void)layers;
    fake_cuda_capture(g->stream, true);
    status = gpu_tell(j, r, tide_all_gather(groups[0], NULL, g->stream));
    fake_cuda_capture(g->stream, false);
    if (status != TIDE_ERR_UNSUPPORTED || tide_comm_check(j->comm[r], NULL) != TIDE_OK)
        return TIDE_ERR_INTERNAL;
    status = gpu_gather(j->comm[r], groups[0], g->stream);
    return status == TIDE_OK ? tide_slot_release(groups[0], g->stream) : status;
}

static void test_capture(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    job j = gpu_job_of(2, 2);
    (void)state;
    j.act = act_capture;
    run(&j, &o);
    assert_told(&j, TIDE_ERR_UNSUPPORTED, "captured");
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(j.failure[r].code, TIDE_OK);
}

/* Fewer hardware queues than the library was told of: streams that share one can block each other for good, those that
 * end the others' waits among them. Until something gives way nobody gets free, but the deadline has been noticed; there
 * are no wrong bytes, and nothing is left behind. */
static void *separate(void *none)
{
    usleep(500000);
    fake_cuda_connections(32);
    return none;
}

static void test_aliased_queues(void **state)
{
    int fine = 0;
    (void)state;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
    setenv("TIDE_CUDA_CONNECTIONS_UNCHECKED", "1", 1);
    for (uint64_t seed = 0; seed < 8; seed++) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        job j = gpu_job_of(2, 2);
        pthread_t thread;
        o.seed = seed;
        o.devices = seed < 4 ? 1 : 2;
        o.connections = 8;
        j.options.deadline_ms = 150;
        const cuda_driver *driver = fake_cuda_start(&o);
        cuda_driver_fake(driver);
        assert_int_equal(pthread_create(&thread, NULL, separate, NULL), 0);
        assert_int_equal(gpu_ranks_run(&j, driver), 0);
        gpu_ranks_close(&j);
        pthread_join(thread, NULL);
        cuda_driver_fake(NULL);
        assert_int_equal(fake_cuda_stop(), 0);
        for (uint32_t r = 0; r < 2; r++) {
            assert_true(j.status[r] == TIDE_OK || j.status[r] == TIDE_ERR_DEADLINE);
            assert_int_equal(j.wrong[r], 0);
        }
        fine += j.status[0] == TIDE_OK;
    }
    unsetenv("TIDE_CUDA_CONNECTIONS_UNCHECKED");
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    printf("8 hardware queues: %d of 8 runs came to their end\n", fine);
}

/* Two GPUs: what a plan picks by itself fits the hardware queues that a process has by default. */
static void test_default_queues(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    (void)state;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
    o.devices = 2;
    for (int mode = 0; mode < 2; mode++) {
        job j = gpu_job_of(2, 2);
        j.options.mode = mode;
        j.options.chunk = 16;
        run(&j, &o);
        assert_fine(&j);
    }
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

/* usage: test_cuda [SEEDS]: with a number, only that many worlds. */
int main(int n_arguments, char **arguments)
{
    const struct CMUnitTest long_run[] = {cmocka_unit_test(test_seeds)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seeds),         cmocka_unit_test(test_no_driver),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_out_of_memory), cmocka_unit_test(test_failing_calls),  cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_stalled_stream),
        cmocka_unit_test(test_capture),       cmocka_unit_test(test_aliased_queues),
        cmocka_unit_test(test_default_queues),
    };
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    if (n_arguments > 1) {
        seeds = strtoull(arguments[1], NULL, 10);
        return cmocka_run_group_tests(long_run, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
