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

#include "../fakes/fake_cuda.h"
#include "../harness/small.h"
#include "base/base.h"

enum { MAX = 8, LAYERS = 2 };

typedef struct job job;
typedef struct gpu gpu;
struct job {
    uint32_t n_ranks, node_size;
    int calls;        /* rounds of gathers and reduce-scatters */
    int caller;       /* the caller's stream: 0 one of its own, 1 the legacy one, 2 the thread's */
    tide_options options;
    int (*act)(job *j, uint32_t rank, gpu *g, const small_layer *layers, tide_group **groups); /* NULL: rounds */
    int status[MAX];  /* what a rank was told */
    char text[MAX][512];
    tide_failure failure[MAX];
    int wrong[MAX];   /* wrong bytes: never right */
    tide_comm *comm[MAX];
};

static const cuda_driver *driver;

static job base_job(uint32_t n_ranks, uint32_t node_size)
{
    job j = {.n_ranks = n_ranks, .node_size = node_size, .calls = 2, .options = TIDE_OPTIONS_INIT};
    j.options.deadline_ms = 20000;
    return j;
}

/* ---- a rank ---------------------------------------------------------------------------------- */

/* What a rank's program has besides the library: a context, a stream, memory. */
struct gpu {
    cu_dev device;
    cu_context context;
    int retained, pushed;
    cu_stream own;
    void *stream;
    cu_ptr blocks[256];
    int n_blocks;
};

static int gpu_open(gpu *g, uint32_t rank, int caller)
{
    int count = 0;

    memset(g, 0, sizeof *g);
    if (driver->Init(0) != CU_OK || driver->DeviceGetCount(&count) != CU_OK || count == 0)
        return -1;
    g->device = (int)rank % count;
    g->retained = driver->PrimaryRetain(&g->context, g->device) == CU_OK;
    g->pushed = g->retained && driver->CtxPush(g->context) == CU_OK;
    if (!g->pushed || driver->StreamCreate(&g->own, CU_STREAM_NON_BLOCKING, 0) != CU_OK)
        return -1;
    g->stream = caller == 0 ? (void *)g->own : caller == 1 ? NULL : (void *)(uintptr_t)2;
    return 0;
}

static void gpu_close(gpu *g)
{
    cu_context c;
    for (int i = 0; i < g->n_blocks; i++)
        driver->MemFree(g->blocks[i]);
    if (g->own)
        driver->StreamDestroy(g->own);
    if (g->pushed)
        driver->CtxPop(&c);
    if (g->retained)
        driver->PrimaryRelease(g->device);
}

/* Memory of the device, which here is host memory as well, with these bytes. */
static void *give(gpu *g, const void *bytes, size_t n)
{
    cu_ptr p = 0;
    if (g->n_blocks == 256 || driver->MemAlloc(&p, n ? n : 1) != CU_OK)
        return NULL;
    g->blocks[g->n_blocks++] = p;
    memcpy((void *)(uintptr_t)p, bytes, n);
    return (void *)(uintptr_t)p;
}

static int tell(job *j, uint32_t rank, int status)
{
    if (status == TIDE_OK || j->status[rank] != TIDE_OK)
        return status;
    j->status[rank] = status;
    snprintf(j->text[rank], sizeof j->text[rank], "%s", tide_last_error());
    return status;
}

/* The layer's shards in device memory. */
static int give_shards(gpu *g, const small_layer *s, void *shards[SMALL_PARAMS])
{
    void *host[SMALL_PARAMS];
    int missing = 0;
    small_shards(s, host);
    for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
        shards[p] = give(g, host[p], small_shard(s, p) * 4);
        missing += !shards[p];
    }
    small_free(host);
    return missing ? TIDE_ERR_MEMORY : TIDE_OK;
}

typedef struct scatter {
    tide_reduce_scatter_args args;
    void *grads[SMALL_PARAMS];
    float *out, before;
    unsigned present;
    int call;
} scatter;

static int begin_scatter(gpu *g, const small_layer *s, int call, int mode, scatter *c)
{
    static const int dtypes[] = {TIDE_BF16, TIDE_F32, TIDE_F16};
    void *host[SMALL_PARAMS];
    float before[2048];
    int missing = 0;

    *c = (scatter){.args = TIDE_REDUCE_SCATTER_ARGS_INIT, .before = (float)(call % 3), .call = call};
    c->present = call % 4 == 3 ? 0xb : 0xf;
    c->args.grad_dtype = mode ? TIDE_BF16 : dtypes[call % 3];
    c->args.alpha = 0.5f;
    c->args.accumulate = call % 3 != 0;
    c->args.mode = mode;
    small_grads(s, call, c->args.grad_dtype, c->present, host);
    for (uint32_t p = 0; p < SMALL_PARAMS; p++)
        if (c->present >> p & 1 &&
            !(c->grads[p] = give(g, host[p], small_whole(s, p) * (c->args.grad_dtype == TIDE_F32 ? 4 : 2))))
            missing = 1;
    small_free(host);
    for (int i = 0; i < 2048; i++)
        before[i] = c->before;
    c->out = give(g, before, sizeof before);
    c->args.grads = (const void *const *)c->grads;
    c->args.out = c->out;
    return c->out && !missing ? TIDE_OK : TIDE_ERR_MEMORY;
}

/* All layers are gathered and scattered, several calls under way at once, then looked at. */
static int round_of_calls(job *j, uint32_t rank, gpu *g, small_layer *layers, tide_group **groups, int call)
{
    int mode = (int)j->options.mode && call % 2, wrong = 0, status;
    void *shards[LAYERS][SMALL_PARAMS];
    scatter c[LAYERS];

    for (int l = 0; l < LAYERS; l++) {
        bool argument = layers[l].desc.input == TIDE_INPUT_ARGUMENT;
        status = argument ? give_shards(g, &layers[l], shards[l]) : TIDE_OK;
        if (status == TIDE_OK)
            status = tide_all_gather(groups[l], argument ? (const void *const *)shards[l] : NULL, g->stream);
        if (status == TIDE_OK)
            status = tide_wait(groups[l], TIDE_READY, g->stream);
        if (tell(j, rank, status) != TIDE_OK)
            return status;
    }
    if (driver->StreamSynchronize(g->stream) != CU_OK)
        return TIDE_ERR_SYSTEM;
    if (tell(j, rank, tide_comm_check(j->comm[rank], NULL)) != TIDE_OK)
        return j->status[rank];
    for (int l = 0; l < LAYERS; l++)
        wrong += small_wrong_params(&layers[l], groups[l]) != 0;
    if (wrong && tide_comm_check(j->comm[rank], NULL) == TIDE_OK) /* after a failure bytes may be anything */
        j->wrong[rank]++;
    wrong = 0;
    for (int l = 0; l < LAYERS; l++) {
        status = begin_scatter(g, &layers[l], call + l, mode, &c[l]);
        if (status == TIDE_OK)
            status = mode ? tide_grads_stash(groups[l], &c[l].args, g->stream) : tide_slot_release(groups[l], g->stream);
        if (status == TIDE_OK)
            status = tide_reduce_scatter(groups[l], &c[l].args, g->stream);
        if (tell(j, rank, status) != TIDE_OK)
            return status;
    }
    for (int l = 0; l < LAYERS; l++)
        if (tell(j, rank, tide_wait(groups[l], TIDE_DONE, g->stream)) != TIDE_OK)
            return j->status[rank];
    if (driver->StreamSynchronize(g->stream) != CU_OK)
        return TIDE_ERR_SYSTEM;
    if (tell(j, rank, tide_comm_check(j->comm[rank], NULL)) != TIDE_OK)
        return j->status[rank];
    for (int l = 0; l < LAYERS; l++)
        wrong += small_wrong_output(&layers[l], c[l].call, c[l].present, 0.5f,
                                             c[l].args.accumulate ? c[l].before : 0.0f, c[l].out) != 0;
    if (wrong && tide_comm_check(j->comm[rank], NULL) == TIDE_OK)
        j->wrong[rank]++;
    return TIDE_OK;
}

static int adopt(gpu *g, const small_layer *s, tide_group *group)
{
    void *shards[SMALL_PARAMS];
    int status = give_shards(g, s, shards);
    for (uint32_t p = 0; p < SMALL_PARAMS && status == TIDE_OK; p++)
        status = tide_shard_adopt(group, p, shards[p], small_shard(s, p) * 2, g->stream);
    return status;
}

static int run_rank(threads_rank *rank)
{
    job *j = rank->context;
    uint32_t r = rank->rank;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_group_desc descs[LAYERS];
    tide_group *groups[LAYERS];
    small_layer layers[LAYERS];
    int status;
    gpu g;
    bool ready = gpu_open(&g, r, j->caller) == 0; /* if not, the library is to say so */

    small_init(&layers[0], rank, "first", TIDE_BF16, TIDE_BF16, TIDE_BF16, 1);
    small_init(&layers[1], rank, "second", TIDE_BF16, TIDE_F32, TIDE_BF16, 2);
    layers[1].params[2].dims[0] = 35; /* unequal sizes on the same staging */
    desc.rank = r;
    desc.n_ranks = rank->n_ranks;
    desc.node_size = j->node_size;
    desc.fabric = TIDE_FABRIC_CUDA;
    desc.device = g.device;
    desc.allgather = threads_allgather;
    desc.allgather_context = rank;
    desc.options = &j->options;
    status = tide_comm_create(&desc, &j->comm[r]);
    if (status == TIDE_OK) {
        for (int l = 0; l < LAYERS; l++)
            descs[l] = layers[l].desc;
        status = tide_groups_create(j->comm[r], descs, LAYERS, groups);
    }
    tell(j, r, status);
    if (status == TIDE_OK && !ready)
        status = TIDE_ERR_MEMORY;
    if (status == TIDE_OK && j->act) {
        status = j->act(j, r, &g, layers, groups);
    } else if (status == TIDE_OK) {
        status = tell(j, r, adopt(&g, &layers[0], groups[0]));
        for (int i = 0; i < j->calls && status == TIDE_OK; i++)
            status = round_of_calls(j, r, &g, layers, groups, i * LAYERS);
    }
    j->failure[r] = (tide_failure)TIDE_FAILURE_INIT;
    if (j->comm[r])
        tide_comm_check(j->comm[r], &j->failure[r]);
    if (status != TIDE_OK && j->status[r] == TIDE_OK) /* the program's own driver call or memory */
        j->status[r] = status;
    if (j->comm[r] && status != TIDE_OK)
        tide_comm_abort(j->comm[r]);
    if (j->comm[r])
        tell(j, r, tide_comm_destroy(j->comm[r]));
    gpu_close(&g);
    return 0;
}

/* Starts a driver and runs the ranks; leaves nothing behind. */
static void run(job *j, const fake_cuda_options *o)
{
    driver = fake_cuda_start(o);
    cuda_driver_fake(driver);
    assert_int_equal(threads_run(j->n_ranks, run_rank, j), 0);
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
    (void)state;
    for (uint64_t seed = 0; seed < seeds; seed++) {
        const uint32_t *shape = shapes[seed % 8];
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        job j = base_job(shape[0], shape[1]);
        o.seed = seed;
        o.devices = 2 + (int)(seed / 8 % 3);
        o.no_batch = seed % 5 == 4;
        o.no_peer_words = seed % 3 == 2;
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
}

/* ---- opening --------------------------------------------------------------------------------- */

static void test_no_driver(void **state)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
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
        j = base_job(2, 2);
        o.attribute = missing[i].attribute;
        run(&j, &o);
        assert_told(&j, TIDE_ERR_UNSUPPORTED, missing[i].text);
    }
    o = FAKE_CUDA_OPTIONS;
    o.no_peers = true;
    j = base_job(2, 2);
    run(&j, &o);
    assert_told(&j, TIDE_ERR_UNSUPPORTED, "cannot access device");
    o = FAKE_CUDA_OPTIONS;
    o.devices = 0;
    j = base_job(1, 1);
    run(&j, &o);
    assert_told(&j, TIDE_ERR_UNSUPPORTED, "CUDA_ERROR_NO_DEVICE");
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* Runs with one fault; true when it came. Ranks may differ in what they are told, but end, with nothing left behind; and
 * where all are content, all results are right. */
static bool run_with_fault(uint64_t n, cu_result code, uint64_t seed, uint32_t n_ranks, uint32_t node_size)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    job j = base_job(n_ranks, node_size);
    bool came, pushing;

    o.seed = seed;
    j.calls = 1;
    j.options.deadline_ms = 2000;
    driver = fake_cuda_start(&o);
    cuda_driver_fake(driver);
    if (code == CU_OUT_OF_MEMORY)
        fake_cuda_oom(n);
    else
        fake_cuda_fail(NULL, n, code);
    assert_int_equal(threads_run(j.n_ranks, run_rank, &j), 0);
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

static int gather_and_wait(tide_comm *comm, tide_group *group, void *stream)
{
    int status = tide_all_gather(group, NULL, stream);
    if (status == TIDE_OK)
        status = tide_wait(group, TIDE_READY, stream);
    return status == TIDE_OK ? tide_comm_sync(comm) : status;
}

static int act_late(job *j, uint32_t r, gpu *g, const small_layer *layers, tide_group **groups)
{
    int status = gather_and_wait(j->comm[r], groups[0], g->stream); /* call 1: all of them */
    (void)layers;
    if (status == TIDE_OK)
        status = tide_slot_release(groups[0], g->stream);
    if (status == TIDE_OK && r == 1) { /* not in time for call 2 */
        while (tide_comm_check(j->comm[1], NULL) == TIDE_OK)
            usleep(1000);
        status = tide_comm_check(j->comm[1], NULL);
    } else if (status == TIDE_OK) {
        status = gather_and_wait(j->comm[r], groups[0], g->stream);
    }
    return tell(j, r, status);
}

static void test_deadline(void **state)
{
    (void)state;
    for (uint32_t node_size = 1; node_size <= 2; node_size++) {
        fake_cuda_options o = FAKE_CUDA_OPTIONS;
        job j = base_job(2, node_size);
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
static int act_gather(job *j, uint32_t r, gpu *g, const small_layer *layers, tide_group **groups)
{
    (void)layers;
    return tell(j, r, gather_and_wait(j->comm[r], groups[0], g->stream));
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
        job j = base_job(2, 2);
        pthread_t thread;
        j.act = act_gather;
        j.options.deadline_ms = 100;
        driver = fake_cuda_start(&o);
        cuda_driver_fake(driver);
        fake_cuda_stall(stream);
        assert_int_equal(pthread_create(&thread, NULL, go_on, NULL), 0);
        assert_int_equal(threads_run(2, run_rank, &j), 0);
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
static int act_capture(job *j, uint32_t r, gpu *g, const small_layer *layers, tide_group **groups)
{
    int status;
    (void)layers;
    fake_cuda_capture(g->stream, true);
    status = tell(j, r, tide_all_gather(groups[0], NULL, g->stream));
    fake_cuda_capture(g->stream, false);
    if (status != TIDE_ERR_UNSUPPORTED || tide_comm_check(j->comm[r], NULL) != TIDE_OK)
        return TIDE_ERR_INTERNAL;
    status = gather_and_wait(j->comm[r], groups[0], g->stream);
    return status == TIDE_OK ? tide_slot_release(groups[0], g->stream) : status;
}

static void test_capture(void **state)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    job j = base_job(2, 2);
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
        job j = base_job(2, 2);
        pthread_t thread;
        o.seed = seed;
        o.devices = seed < 4 ? 1 : 2;
        o.connections = 8;
        j.options.deadline_ms = 150;
        driver = fake_cuda_start(&o);
        cuda_driver_fake(driver);
        assert_int_equal(pthread_create(&thread, NULL, separate, NULL), 0);
        assert_int_equal(threads_run(2, run_rank, &j), 0);
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

/* usage: test_cuda [SEEDS]: with a number, only that many worlds. */
int main(int n_arguments, char **arguments)
{
    const struct CMUnitTest long_run[] = {cmocka_unit_test(test_seeds)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seeds),         cmocka_unit_test(test_no_driver),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_out_of_memory), cmocka_unit_test(test_failing_calls),  cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_stalled_stream),
        cmocka_unit_test(test_capture),       cmocka_unit_test(test_aliased_queues),
    };
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    if (n_arguments > 1) {
        seeds = strtoull(arguments[1], NULL, 10);
        return cmocka_run_group_tests(long_run, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
