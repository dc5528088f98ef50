/*
 * The NCCL fabric over the fake NCCL and the fake driver: real calls with ranks as threads, a node a GPU; what is refused,
 * and that all ranks are told the same; a fault at every call of NCCL's, in set-up and in calls; lost signals, hung calls,
 * errors that NCCL reports. Whoever is told that all is well has the right bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../fakes/fake_nccl.h"
#include "../harness/gpu_ranks.h"
#include "comm/comm.h"
#include "engine/state.h"
#include "fabric/nccl/nccl.h"

static gpu_job job_of(uint32_t nodes, uint32_t local)
{
    gpu_job j = gpu_job_of(nodes * local, local);
    j.fabric = TIDE_FABRIC_NCCL;
    j.machines = true;
    return j;
}

static fake_cuda_options gpus(uint32_t nodes, uint64_t seed)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    o.devices = (int)nodes;
    o.seed = seed;
    return o;
}

/* How a test sets the stage, once both libraries are there. */
typedef void (*prepare)(void *context);

/* What is left behind of both libraries, and whether the fault has come. */
typedef struct left { int cuda, nccl; bool came; } left;

/* The ranks may find wrong bytes. */
static left run_any(gpu_job *j, const fake_cuda_options *c, const fake_nccl_options *n, prepare set, void *context)
{
    const cuda_driver *driver = fake_cuda_start(c);
    left l;

    cuda_driver_fake(driver);
    nccl_library_fake(fake_nccl_start(n));
    if (set)
        set(context);
    assert_int_equal(gpu_ranks_run(j, driver), 0);
    l.came = fake_nccl_failed();
    nccl_library_fake(NULL);
    l.nccl = fake_nccl_stop(); /* streams that stand in it go free */
    gpu_ranks_close(j);
    cuda_driver_fake(NULL);
    l.cuda = fake_cuda_stop();
    return l;
}

static left run(gpu_job *j, const fake_cuda_options *c, const fake_nccl_options *n, prepare set, void *context)
{
    left l = run_any(j, c, n, set, context);
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (j->wrong[r])
            fprintf(stderr, "rank %u: wrong bytes; told: %s\n", r, j->text[r]);
        assert_int_equal(j->wrong[r], 0);
    }
    return l;
}

static void assert_nothing_left(left l)
{
    assert_int_equal(l.cuda, 0);
    assert_int_equal(l.nccl, 0);
}

static void assert_fine(const gpu_job *j)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (j->status[r] != TIDE_OK)
            fprintf(stderr, "rank %u: %s\n", r, j->text[r]);
        assert_int_equal(j->status[r], TIDE_OK);
    }
}

/* The same code on all ranks, and the text; whose trouble it is may be said by who was there ("rank 1: "). */
static void assert_told(const gpu_job *j, int status, const char *text)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (j->status[r] != status || !strstr(j->text[r], text))
            fprintf(stderr, "rank %u: %d (%s), expected %d with '%s'\n", r, j->status[r], j->text[r], status, text);
        assert_int_equal(j->status[r], status);
        assert_non_null(strstr(j->text[r], text));
    }
}

/* ---- right whatever the order -------------------------------------------------------------------- */

static uint64_t seeds = 16;

static void test_seeds(void **state)
{
    static const uint32_t shapes[][2] = {{2, 1}, {2, 2}, {3, 1}, {4, 1}, {3, 2}, {5, 1}, {1, 2}, {8, 1}};
    (void)state;
    for (uint64_t seed = 0; seed < seeds; seed++) {
        const uint32_t *shape = shapes[seed % 8];
        fake_cuda_options c = gpus(shape[0], seed);
        fake_nccl_options n = FAKE_NCCL_OPTIONS;
        gpu_job j = job_of(shape[0], shape[1]);
        c.no_peer_words = seed % 3 == 2;
        n.delay = (uint32_t)(seed % 4 * 7);
        j.caller = (int)(seed % 2 ? 0 : 2 * (shape[1] == 1)); /* ranks that share a GPU have streams of their own */
        j.options.mode = (int64_t)(seed / 4 % 2);
        j.options.chunk = seed % 2 ? 16 : 4096;
        j.options.head_bytes = 64;
        j.options.k = 1 + (int64_t)(seed % 2);
        j.options.n_ctx = 1 + (int64_t)(seed % 5);
        j.machines = seed / 8 % 2 == 0;
        assert_nothing_left(run(&j, &c, &n, NULL, NULL));
        assert_fine(&j);
    }
}

static int act_path(gpu_job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    tide_group_path path = {.size = sizeof path};
    int status = gpu_adopt(g, &layers[0], groups[0]);
    if (status == TIDE_OK)
        status = tide_group_get_path(groups[0], &path);
    if (status == TIDE_OK && (strcmp(path.path, "nccl M=2 L=1 unicast") != 0 ||
                              !strstr(path.reason, j->machines ? "a node is a machine" : "virtual nodes")))
        status = TIDE_ERR_INTERNAL;
    return gpu_tell(j, r, status);
}

static void test_path(void **state)
{
    fake_cuda_options c = gpus(2, 1);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    (void)state;
    for (int machines = 0; machines < 2; machines++) {
        gpu_job j = job_of(2, 1);
        j.act = act_path;
        j.machines = machines;
        assert_nothing_left(run(&j, &c, &n, NULL, NULL));
        assert_fine(&j);
    }
}

/* Another set of gradients on rank 1, in a call of the same shape: nothing stands still, sums are wrong, and all are told at
 * the end. */
static int act_other_call(gpu_job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status = gpu_tell(j, r, gpu_adopt(g, &layers[0], groups[0]));
    if (status == TIDE_OK)
        status = gpu_round(j, r, g, layers, groups, r == 1 ? 3 : 0);
    j->wrong[r] = 0;
    return status;
}

static void test_other_call(void **state)
{
    fake_cuda_options c = gpus(2, 1);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    gpu_job j = job_of(2, 1);
    (void)state;
    j.act = act_other_call;
    run(&j, &c, &n, NULL, NULL);
    assert_told(&j, TIDE_ERR_MISMATCH, "rank 0 and rank 1 disagree: among their calls up to number 4 are different ones");
}

/* ---- refusals ------------------------------------------------------------------------------------ */

static void test_refusals(void **state)
{
    static const struct { fake_nccl_options nccl; int devices; int status; const char *text; } rows[] = {
        {{.version = 22809}, 2, TIDE_ERR_UNSUPPORTED, "NCCL: version 2.28.9, expected at least 2.31.2"},
        {{.version = NCCL_OLDEST, .no_host_rma = true}, 2, TIDE_ERR_UNSUPPORTED,
         "lane all-gather: NCCL 2.31.2 has no one-sided transfers between these ranks (hostRmaSupport 0"},
        {{.version = NCCL_OLDEST, .null_windows = true}, 2, TIDE_ERR_UNSUPPORTED,
         "lane all-gather: NCCL 2.31.2 has no one-sided transfers"},
        {{.version = NCCL_OLDEST}, 1, TIDE_ERR_SYSTEM, "lane all-gather: ncclCommInitRankConfig: "},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (uint32_t local = 1; local <= 2; local++) {
            fake_cuda_options c = gpus((uint32_t)rows[i].devices, i);
            gpu_job j = job_of(2, local);
            assert_nothing_left(run(&j, &c, &rows[i].nccl, NULL, NULL));
            assert_told(&j, rows[i].status, rows[i].text);
        }
    }
}

/* One node needs no communicator: what NCCL cannot do between nodes does not matter. */
static void test_one_node(void **state)
{
    fake_cuda_options c = gpus(1, 1);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    gpu_job j = job_of(1, 2);
    (void)state;
    n.no_host_rma = n.null_windows = true;
    assert_nothing_left(run(&j, &c, &n, NULL, NULL));
    assert_fine(&j);
}

/* ---- faults -------------------------------------------------------------------------------------- */

typedef struct fault {
    void (*set)(const struct fault *f);
    const char *function;
    uint64_t n;
    nccl_result result;
} fault;

static void fail_it(const fault *f) { fake_nccl_fail(f->function, f->n, f->result); }
static void hang_it(const fault *f) { fake_nccl_hang(f->function, f->n); }
static void lose_signal(const fault *f) { fake_nccl_lose_signal(f->n); }
static void lose_completion(const fault *f) { fake_nccl_lose_completion(f->n); }
static void report_error(const fault *f) { fake_nccl_async_error(f->n, f->result); }
static void set_fault(void *context)
{
    const fault *f = context;
    f->set(f);
}

/* Two nodes of so many ranks run one round with the fault. */
static left run_fault(gpu_job *j, uint32_t local, int64_t deadline_ms, fault f)
{
    fake_cuda_options c = gpus(2, f.n);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    *j = job_of(2, local);
    j->calls = 1;
    j->machines = f.n % 2;
    j->options.deadline_ms = deadline_ms;
    return run(j, &c, &n, set_fault, &f);
}

/* Every call of the set-up fails once: all ranks are told the same, by whom it concerns, and nothing is left behind; but a
 * communicator that another rank was making meanwhile, in a call that NCCL does not let go, is given up. */
static void test_failing_set_up(void **state)
{
    static const char *const functions[] = {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommQueryProperties",
                                            "ncclCommWindowRegister"};
    (void)state;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        for (uint32_t local = 1; local <= 2; local++) {
            for (uint64_t k = 1, last = (i ? 4 : 2) * local; k <= last; k++) {
                gpu_job j;
                left l = run_fault(&j, local, 20000, (fault){fail_it, functions[i], k, NCCL_SYSTEM_ERROR});
                assert_true(l.came);
                assert_told(&j, TIDE_ERR_SYSTEM, functions[i]);
                assert_told(&j, TIDE_ERR_SYSTEM, k <= last / 2 ? "lane all-gather: " : "lane reduce-scatter: ");
                assert_int_equal(l.cuda, 0);
                assert_true(i == 1 ? l.nccl <= 1 : l.nccl == 0);
            }
        }
    }
}

/* A call that does not return: past the deadline all are told by whom, and which. */
static void test_hanging_set_up(void **state)
{
    static const char *const functions[] = {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommQueryProperties",
                                            "ncclCommWindowRegister"};
    (void)state;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        gpu_job j;
        char text[80];
        left l = run_fault(&j, 1, 400, (fault){hang_it, functions[i], 1, 0});
        snprintf(text, sizeof text, "lane all-gather: %s has not returned for ", functions[i]);
        assert_true(l.came);
        assert_told(&j, TIDE_ERR_DEADLINE, text);
        assert_int_equal(l.cuda, 0);
        assert_true(l.nccl <= 2);
    }
}

/* What a call enqueues fails: the rank cannot take it back, so the communicator fails on all ranks. */
static void test_failing_calls(void **state)
{
    static const fault rows[] = {
        {fail_it, "ncclGroupStart", 1, NCCL_INTERNAL_ERROR}, {fail_it, "ncclGroupEnd", 6, NCCL_INVALID_USAGE},
        {fail_it, "ncclPutSignal", 3, NCCL_TIMEOUT},         {fail_it, "ncclSignal", 2, NCCL_INVALID_ARGUMENT},
        {fail_it, "ncclWaitSignal", 14, NCCL_SYSTEM_ERROR},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        gpu_job j;
        assert_true(run_fault(&j, 1 + i % 2, 20000, rows[i]).came);
        assert_told(&j, TIDE_ERR_SYSTEM, "could not enqueue call ");
        assert_told(&j, TIDE_ERR_SYSTEM, rows[i].function);
    }
}

/* The results are there; what fails on the way out is nobody's loss. */
static void test_failing_end(void **state)
{
    static const char *const functions[] = {"ncclCommWindowDeregister", "ncclCommFinalize", "ncclCommDestroy"};
    (void)state;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        gpu_job j;
        left l = run_fault(&j, 1, 4000, (fault){fail_it, functions[i], 2, NCCL_SYSTEM_ERROR});
        assert_true(l.came);
        assert_fine(&j);
        assert_int_equal(l.cuda, 0);
    }
}

/* Nobody says that a signal was lost: the deadline names the wait, and all ranks end, the caller's streams among them. */
static void test_lost_signal(void **state)
{
    (void)state;
    for (uint64_t n = 1; n <= 6; n += 5) {
        gpu_job j;
        assert_true(run_fault(&j, 1, 2000, (fault){lose_signal, NULL, n, 0}).came);
        assert_told(&j, TIDE_ERR_DEADLINE, " waited ");
        for (uint32_t r = 0; r < j.n_ranks; r++) {
            assert_int_equal(j.failure[r].code, TIDE_ERR_DEADLINE);
            assert_int_equal(j.failure[r].rank + j.failure[r].peer, 1);
            assert_true(j.failure[r].call >= 1);
        }
    }
}

static void test_lost_completion(void **state)
{
    gpu_job j;
    (void)state;
    assert_true(run_fault(&j, 2, 2000, (fault){lose_completion, NULL, 4, 0}).came);
    assert_told(&j, TIDE_ERR_DEADLINE, " waited ");
}

static void test_reported_error(void **state)
{
    (void)state;
    for (uint64_t n = 2; n <= 8; n += 6) {
        gpu_job j;
        assert_true(run_fault(&j, 1, 20000, (fault){report_error, NULL, n, NCCL_REMOTE_ERROR}).came);
        assert_told(&j, TIDE_ERR_NETWORK, "lane all-gather: "); /* by the watch, or the next call that NCCL refuses */
    }
}

/* ---- ends that are asked for --------------------------------------------------------------------- */

/* Nothing but the rail's stream may stand still after a failure: not the library's others, and not the caller's. */
static int others_rest(const gpu_job *j, uint32_t r, const gpu *g, int rail_stream)
{
    const fab_queue *q = j->comm[r]->sets->engine->queue;
    for (uint32_t i = 0; i < q->n_streams; i++)
        if ((int)i != rail_stream && q->streams[i].handle && g->driver->StreamQuery(q->streams[i].handle) != CU_OK)
            return TIDE_ERR_INTERNAL;
    return g->driver->StreamQuery(g->stream) == CU_OK ? TIDE_OK : TIDE_ERR_INTERNAL;
}

static int act_abort(gpu_job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status = gpu_adopt(g, &layers[0], groups[0]);
    if (status == TIDE_OK && r == 1) { /* rank 0's stream comes to stand in NCCL meanwhile */
        usleep(50000);
        status = tide_comm_abort(j->comm[1]);
        return gpu_tell(j, r, status == TIDE_OK ? tide_comm_check(j->comm[1], NULL) : status);
    }
    if (status == TIDE_OK)
        status = gpu_gather(j->comm[r], groups[0], g->stream);
    if (status != TIDE_ERR_ABORTED || others_rest(j, r, g, STREAM_AG_CALL) != TIDE_OK)
        return TIDE_ERR_INTERNAL;
    return gpu_tell(j, r, gpu_gather(j->comm[r], groups[0], g->stream)); /* the same again */
}

/* Of three nodes one makes no further call: all the others are told by their deadline for whom they wait. */
static int act_late(gpu_job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status = gpu_adopt(g, &layers[0], groups[0]);
    if (status == TIDE_OK)
        status = gpu_gather(j->comm[r], groups[0], g->stream);
    if (status == TIDE_OK)
        status = tide_slot_release(groups[0], g->stream);
    while (status == TIDE_OK && r == 1) {
        usleep(1000);
        status = tide_comm_check(j->comm[1], NULL);
    }
    if (status == TIDE_OK)
        status = gpu_gather(j->comm[r], groups[0], g->stream);
    if (others_rest(j, r, g, STREAM_AG_CALL) != TIDE_OK)
        return TIDE_ERR_INTERNAL;
    return gpu_tell(j, r, status);
}

static void test_late(void **state)
{
    fake_cuda_options c = gpus(3, 1);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    gpu_job j = job_of(3, 1);
    (void)state;
    j.act = act_late;
    j.options.deadline_ms = 2000;
    run(&j, &c, &n, NULL, NULL);
    assert_told(&j, TIDE_ERR_DEADLINE, "rank 1 in all_gather ");
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(j.failure[r].peer, 1);
        assert_true(j.failure[r].call == 2);
    }
}

static void test_abort(void **state)
{
    fake_cuda_options c = gpus(2, 1);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    gpu_job j = job_of(2, 1);
    left l;
    (void)state;
    j.act = act_abort;
    l = run(&j, &c, &n, NULL, NULL);
    assert_told(&j, TIDE_ERR_ABORTED, "rank 1 aborted the communicator");
    assert_true(l.cuda > 0 && l.nccl == 2); /* rank 0's lane, window, and what is freed with the whole GPU at rest only */
}

/* ---- what the signals are for ------------------------------------------------------------------- */

/* The rail with one thing left out: from the waits or the signals of one index, on all ranks. */
typedef struct mutant {
    const char *name;
    int waits, sig;
} mutant;
static mutant now;
static fab_rail_verbs mutant_verbs;

static uint32_t filter(const fab_rail_post *posts, uint32_t n, int sig, fab_rail_post *out)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++)
        if (posts[i].sig != sig)
            out[kept++] = posts[i];
    return kept;
}

static int mutant_signal(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n,
                         const fab_where *where)
{
    fab_rail_post kept[64];
    n = filter(posts, n, now.waits ? -1 : now.sig, kept);
    return n ? nccl_rail_verbs.signal(r, stream, call, kept, n, where) : TIDE_OK;
}

static int mutant_wait(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n, int check,
                       const fab_where *where)
{
    fab_rail_post kept[64];
    n = filter(posts, n, now.waits ? now.sig : -1, kept);
    return n ? nccl_rail_verbs.wait(r, stream, call, kept, n, check, where) : TIDE_OK;
}

static int act_mutant(gpu_job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status = gpu_tell(j, r, gpu_adopt(g, &layers[0], groups[0]));

    j->comm[r]->device->rail = &mutant_verbs;
    for (int i = 0; i < j->calls && status == TIDE_OK; i++)
        status = gpu_round(j, r, g, layers, groups, i * GPU_LAYERS);
    return status;
}

/* A run in which somebody found wrong bytes, or was told of a failure. */
static bool shows(uint64_t seed, uint32_t nodes)
{
    fake_cuda_options c = gpus(nodes, seed);
    fake_nccl_options n = FAKE_NCCL_OPTIONS;
    gpu_job j = job_of(nodes, 1);
    bool shown = false;
    n.delay = 1 + (uint32_t)(seed % 40);
    j.act = act_mutant;
    j.calls = 3;
    j.options.deadline_ms = now.name ? 400 : 20000;
    j.options.head_bytes = 64;
    j.options.k = 1 + (int64_t)(seed % 2);
    run_any(&j, &c, &n, NULL, NULL);
    for (uint32_t r = 0; r < j.n_ranks; r++)
        shown |= j.wrong[r] || j.status[r] != TIDE_OK;
    return shown;
}

/* Without a credit, a go, or the wait for what arrives, some order gives wrong bytes or a wait that does not end; the whole
 * rail never does. A go that nobody waits for changes no byte: it paces the rounds. */
static void test_mutants(void **state)
{
    static const mutant mutants[] = {
        {"credits are not sent", 0, SIG_CREDIT},
        {"credits are not waited for", 1, SIG_CREDIT},
        {"gos are not sent", 0, SIG_GO},
        {"heads and blocks are not waited for", 1, SIG_HEAD},
        {"tails are not waited for", 1, SIG_TAIL},
    };
    enum { TRIES = 60 };
    (void)state;
    mutant_verbs = nccl_rail_verbs;
    mutant_verbs.signal = mutant_signal;
    mutant_verbs.wait = mutant_wait;
    now = (mutant){NULL, 0, -1};
    for (uint64_t seed = 1; seed <= 12; seed++)
        assert_false(shows(seed, 2 + seed % 4));
    for (size_t i = 0; i < sizeof mutants / sizeof mutants[0]; i++) {
        uint64_t seed = 1;
        now = mutants[i];
        while (seed <= TRIES && !shows(seed, 2 + seed % 4))
            seed++;
        printf("%s: shows in run %llu\n", now.name, (unsigned long long)seed);
        assert_true(seed <= TRIES);
    }
}

int main(int n_arguments, char **arguments)
{
    const struct CMUnitTest long_run[] = {cmocka_unit_test(test_seeds)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seeds),          cmocka_unit_test(test_path),
        cmocka_unit_test(test_other_call),
        cmocka_unit_test(test_refusals),       cmocka_unit_test(test_one_node),
        cmocka_unit_test(test_failing_set_up), cmocka_unit_test(test_hanging_set_up),
        cmocka_unit_test(test_failing_calls),  cmocka_unit_test(test_failing_end),
        cmocka_unit_test(test_lost_signal),    cmocka_unit_test(test_lost_completion),
        cmocka_unit_test(test_reported_error), cmocka_unit_test(test_abort),
        cmocka_unit_test(test_late),           cmocka_unit_test(test_mutants),
    };
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    if (n_arguments > 1) {
        seeds = strtoull(arguments[1], NULL, 10);
        return cmocka_run_group_tests(long_run, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
