/*
 * Multicast of the CUDA fabric over the fake driver: used where it is asked for and nowhere else; whatever fails on whatever
 * rank, all ranks go without it, with one reason and the right bytes; nothing is left, and nobody's memory is taken away
 * while somebody may write to it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "../harness/gpu_ranks.h"

static void assert_fine(const gpu_job *j)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (j->status[r] != TIDE_OK)
            fprintf(stderr, "rank %u: %s\n", r, j->text[r]);
        assert_int_equal(j->status[r], TIDE_OK);
    }
}


static fake_cuda_options with_multicast(int devices, uint64_t seed)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    o.multicast = true;
    o.devices = devices;
    o.seed = seed;
    return o;
}

/* All ranks say the same of their path, and of its reason this. */
static void assert_path(const gpu_job *j, const char *path, const char *reason)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        if (!strstr(j->path[r], path) || !strstr(j->reason[r], reason) || strcmp(j->reason[0], j->reason[r]) != 0)
            fprintf(stderr, "rank %u: '%s' because '%s', expected '%s' because '%s', alike on all ranks\n", r, j->path[r],
                    j->reason[r], path, reason);
        assert_non_null(strstr(j->path[r], path));
        assert_non_null(strstr(j->reason[r], reason));
        assert_string_equal(j->reason[r], j->reason[0]);
    }
}

/* Runs the ranks, with one fault or none (n 0); leaves nothing behind. Returns how many objects somebody wanted to create.
 * *came: whether the fault did. */
static uint64_t run(gpu_job *j, const fake_cuda_options *o, const char *function, uint64_t n, cu_result fault, bool *came)
{
    const cuda_driver *driver = fake_cuda_start(o);
    uint64_t wanted;

    cuda_driver_fake(driver);
    fake_cuda_fail(function, n, fault);
    assert_int_equal(gpu_ranks_run(j, driver), 0);
    wanted = fake_cuda_multicasts();
    if (came)
        *came = fake_cuda_failed();
    gpu_ranks_close(j);
    cuda_driver_fake(NULL);
    assert_int_equal(fake_cuda_stop(), 0);
    for (uint32_t r = 0; r < j->n_ranks; r++)
        assert_int_equal(j->wrong[r], 0);
    return wanted;
}

static uint64_t run_counted(gpu_job *j, const fake_cuda_options *o)
{
    return run(j, o, NULL, 0, CU_OK, NULL);
}

static void test_multicast(void **state)
{
    static const uint32_t shapes[][2] = {{2, 2}, {3, 3}, {4, 2}, {6, 3}, {8, 8}, {8, 4}};
    (void)state;
    for (uint64_t seed = 0; seed < 24; seed++) {
        const uint32_t *shape = shapes[seed % 6];
        fake_cuda_options o = with_multicast((int)shape[0], seed);
        gpu_job j = gpu_job_of(shape[0], shape[1]);
        o.no_batch = seed % 5 == 4;
        o.no_peer_words = seed % 4 == 2;
        j.options.multicast = 1;
        j.options.mode = (int64_t)(seed / 6 % 2);
        j.options.chunk = 64;
        assert_int_equal(run_counted(&j, &o), shape[0] / shape[1]); /* one a node */
        assert_fine(&j);
        assert_path(&j, " multicast", shape[0] > shape[1] ? "in its own order" : "");
    }
}

static void test_no_multicast_unasked(void **state)
{
    static const int64_t knobs[] = {TIDE_AUTO, 0};
    (void)state;
    for (int i = 0; i < 2; i++) {
        fake_cuda_options o = with_multicast(4, 3);
        gpu_job j = gpu_job_of(4, i ? 2 : 4);
        j.options.multicast = knobs[i];
        assert_int_equal(run_counted(&j, &o), 0);
        assert_fine(&j);
        assert_path(&j, " unicast", "");
        assert_null(strstr(j.reason[0], "multicast"));
    }
}

static void test_multicast_refused(void **state)
{
    static const struct {
        const char *variable, *value;
        uint32_t n_ranks, node_size;
        int devices;
        bool multicast;
        const char *why;
    } cases[] = {
        {"NCCL_NVLS_ENABLE", "0", 2, 2, 2, true, "no multicast: rank 0: NCCL_NVLS_ENABLE=0: multicast is switched off"},
        {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", 4, 2, 4, true,
         "no multicast: rank 0: TORCH_SYMM_MEM_DISABLE_MULTICAST=1: multicast is switched off"},
        {"NONE", "", 3, 3, 3, false, "no multicast: rank 0: the device has no multicast"},
        {"NONE", "", 4, 4, 2, true, "no multicast: rank 0: ranks 0 and 2 share a device"},
        {"NONE", "", 3, 1, 3, true, "no multicast: rank 0: one rank a node"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake_cuda_options o = with_multicast(cases[i].devices, i);
        gpu_job j = gpu_job_of(cases[i].n_ranks, cases[i].node_size);
        o.multicast = cases[i].multicast;
        j.options.multicast = 1;
        j.calls = 1;
        setenv(cases[i].variable, cases[i].value, 1);
        assert_int_equal(run_counted(&j, &o), 0);
        unsetenv(cases[i].variable);
        assert_fine(&j);
        assert_path(&j, " unicast", cases[i].why);
    }
}

/* Every call of every kind that a multicast object needs, on whatever rank it comes, fails once: then nobody has one, for one
 * reason, everything is right, and nothing is left. */
static void test_multicast_fails(void **state)
{
    static const struct { const char *function, *said; uint64_t least; } steps[] = {
        {"cuMulticastGetGranularity", "", 0},
        {"cuMulticastCreate", ": cuMulticastCreate", 2},
        {"cuMulticastAddDevice", "cuMulticastAddDevice", 4},
        {"cuMulticastBindMem", "cuMulticastBindMem", 4},
        {"cuMulticastUnbind", NULL, 4},
    };
    (void)state;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        uint64_t n = 1;
        for (bool came = true; came; n++) {
            fake_cuda_options o = with_multicast(4, n + i);
            gpu_job j = gpu_job_of(4, 2);
            j.options.multicast = 1;
            j.calls = 1;
            run(&j, &o, steps[i].function, n, n % 2 ? CU_NOT_SUPPORTED : 802, &came);
            assert_fine(&j);
            if (came && steps[i].said && steps[i].said[0])
                assert_path(&j, " unicast", steps[i].said);
            else if (!came || !steps[i].said)
                assert_path(&j, " multicast", "");
        }
        assert_true(n - 2 >= steps[i].least);
    }
}

/* The same of calls that other memory needs as well. Who is told of an error is told the same as the others. */
static void test_multicast_half_way(void **state)
{
    static const char *const functions[] = {"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
                                            "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemcpyAsync",
                                            "cuMemsetD8Async", "cuMemcpyDtoHAsync_v2"};
    uint32_t without = 0;
    (void)state;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        bool came = true;
        for (uint64_t n = 1; came && n < 16; n++) {
            fake_cuda_options o = with_multicast(2, n + i);
            gpu_job j = gpu_job_of(2, 2);
            j.options.multicast = 1;
            j.options.deadline_ms = 2000;
            j.calls = 0;
            run(&j, &o, functions[i], n, CU_INVALID_VALUE, &came);
            assert_string_equal(j.reason[0], j.reason[1]);
            without += strstr(j.reason[0], "; no multicast: ") != NULL;
        }
    }
    assert_true(without >= 10);
}

/* Everything is granted, and then what is written does not come to everybody: it is tried before it is used. */
static void test_multicast_deaf(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 4; seed++) {
        fake_cuda_options o = with_multicast(3, seed);
        gpu_job j = gpu_job_of(3, 3);
        o.multicast_deaf = true;
        j.options.multicast = 1;
        assert_int_equal(run_counted(&j, &o), 1);
        assert_fine(&j);
        assert_path(&j, " unicast", "no multicast: rank 2: what rank 0 wrote to all did not come to rank 2");
    }
}

/* A rank gives up while the others write to all: nobody takes its memory away before they have come to rest. */
static int act_give_up(gpu_job *j, uint32_t r, gpu *g, small_layer *layers, tide_group **groups)
{
    int status = gpu_adopt(g, &layers[0], groups[0]);
    for (int i = 0; i < 3 && status == TIDE_OK; i++) {
        status = tide_all_gather(groups[0], NULL, g->stream);
        if (status == TIDE_OK)
            status = tide_slot_release(groups[0], g->stream);
        if (status == TIDE_OK && r == 1 && i == 1)
            status = tide_comm_abort(j->comm[r]);
    }
    return status == TIDE_OK ? tide_comm_sync(j->comm[r]) : status;
}

static void test_multicast_abort(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 12; seed++) {
        fake_cuda_options o = with_multicast(4, seed);
        gpu_job j = gpu_job_of(4, 4);
        j.options.multicast = 1;
        j.act = act_give_up;
        assert_int_equal(run_counted(&j, &o), 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_multicast),         cmocka_unit_test(test_no_multicast_unasked),
        cmocka_unit_test(test_multicast_refused), cmocka_unit_test(test_multicast_fails),
        cmocka_unit_test(test_multicast_half_way), cmocka_unit_test(test_multicast_abort),
        cmocka_unit_test(test_multicast_deaf),
    };
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
