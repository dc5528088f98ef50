/* Sizes at the edges: bytes near 2^63, 4096 parameters, parameters without rows or without elements in a row. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/small.h"
#include "plan/plan.h"
#include "schedule/proof.h"

/* ---- near 2^63 bytes ------------------------------------------------------------------------------ */

static int plan_of(uint32_t nodes, uint32_t local, int ndim, const int64_t *dims, int shard_dim, int dtype,
                   tide_plan **plan)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_param param = {.name = "w", .ndim = ndim, .shard_dim = shard_dim};
    tide_group_desc d = TIDE_GROUP_DESC_INIT;

    t.nodes = nodes;
    t.local = local;
    memcpy(param.dims, dims, (size_t)ndim * sizeof *dims);
    d.n_params = 1;
    d.params = &param;
    d.dtype = d.shard_dtype = d.grad_dtype = dtype;
    return tide_plan_create(&t, &d, 1, NULL, plan);
}

/* Whether {rows, width} has a plan; if so its memory has to add up on every kind of rank. */
static bool planned(uint32_t nodes, uint32_t local, int64_t rows, int64_t width, int dtype)
{
    const int64_t dims[2] = {rows, width};
    tide_plan *plan = NULL;
    int status = plan_of(nodes, local, 2, dims, 0, dtype, &plan);

    if (status != TIDE_OK) {
        assert_int_equal(status, TIDE_ERR_ARGUMENT);
        assert_true(strstr(tide_last_error(), "2^63") || strstr(tide_last_error(), "2^32 chunks"));
        return false;
    }
    for (uint32_t rank = 0; rank < nodes * local; rank += nodes * local - 1 ? nodes * local - 1 : 1) {
        tide_bytes b = TIDE_BYTES_INIT;
        uint64_t parts = 0, part[8];
        assert_int_equal(tide_plan_bytes(plan, rank, &b), TIDE_OK);
        memcpy(part,
               (const uint64_t[]){b.control, b.landing, b.resident, b.stage, b.staging, b.outbox, b.spare, b.inbox},
               sizeof part);
        for (int i = 0; i < 8; i++)
            assert_false(__builtin_add_overflow(parts, part[i], &parts));
        assert_true(parts <= b.total && b.total <= INT64_MAX);
        assert_true(b.landing >= (uint64_t)rows * (uint64_t)width * tide_dtype_bytes(dtype));
    }
    tide_plan_destroy(plan);
    return true;
}

/* There is one edge: up to it everything is planned, behind it everything refused. */
static void sizes_near_2_to_the_63(void **state)
{
    static const struct { uint32_t nodes, local; } ranks[] = {{1, 1}, {1, 4}, {2, 2}, {7, 3}, {64, 8}, {1024, 64}};
    static const int64_t widths[] = {1, 3, 4096, (INT64_C(1) << 31) - 1};

    (void)state;
    for (size_t r = 0; r < sizeof ranks / sizeof ranks[0]; r++) {
        for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
            for (int dtype = TIDE_F32; dtype <= TIDE_BF16; dtype++) {
                int64_t good = 1, bad = INT64_MAX;
                assert_true(planned(ranks[r].nodes, ranks[r].local, good, widths[w], dtype));
                assert_false(planned(ranks[r].nodes, ranks[r].local, bad, widths[w], dtype));
                while (bad - good > 1) {
                    int64_t middle = good + (bad - good) / 2;
                    if (planned(ranks[r].nodes, ranks[r].local, middle, widths[w], dtype))
                        good = middle;
                    else
                        bad = middle;
                }
                for (int64_t i = 0; i < 4; i++) {
                    assert_true(good - i < 1 || planned(ranks[r].nodes, ranks[r].local, good - i, widths[w], dtype));
                    assert_false(planned(ranks[r].nodes, ranks[r].local, bad + i * (bad / 8), widths[w], dtype));
                }
            }
        }
    }
}

static void extents_that_overflow(void **state)
{
    static const struct {
        int ndim, shard_dim;
        int64_t dims[4];
    } bad[] = {
        {4, 0, {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}},
        {2, 0, {INT64_MAX, 1}},
        {2, 0, {1, INT64_MAX}},
        {2, 1, {INT64_MAX, 4}},
        {2, 1, {2, INT64_MAX - 3}},
        {3, 0, {INT64_C(1) << 32, INT64_C(1) << 31, 2}}, /* the product is 2^64 */
        {3, 0, {INT64_C(1) << 32, INT64_C(1) << 32, 1}},
        {4, 0, {INT64_C(1) << 16, INT64_C(1) << 16, INT64_C(1) << 16, INT64_C(1) << 16}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tide_plan *plan = NULL;
        assert_int_equal(plan_of(2, 2, bad[i].ndim, bad[i].dims, bad[i].shard_dim, TIDE_F32, &plan), TIDE_ERR_ARGUMENT);
        assert_null(plan);
        assert_non_null(strstr(tide_last_error(), "group 0"));
    }
    for (int zero = 0; zero < 3; zero++) { /* huge in the other extents, and still nothing */
        int64_t dims[3] = {INT64_MAX, INT64_MAX, INT64_MAX};
        tide_plan *plan = NULL;
        int status;
        dims[zero] = 0;
        status = plan_of(2, 2, 3, dims, 0, TIDE_F32, &plan);
        if (status == TIDE_OK) {
            tide_bytes b = TIDE_BYTES_INIT;
            assert_int_equal(tide_plan_bytes(plan, 0, &b), TIDE_OK);
            assert_int_equal(b.total, b.control);
        } else {
            assert_int_equal(status, TIDE_ERR_ARGUMENT);
        }
        tide_plan_destroy(plan);
    }
}

/* ---- many parameters, and empty ones, for real ---------------------------------------------------- */

enum { NODES = 2, LOCAL = 2, RANKS = NODES * LOCAL };

typedef struct job {
    const tide_param *params;
    uint32_t n_params;
} job;

static float value(uint32_t rank, uint32_t p, uint64_t i)
{
    return (float)((rank * 7 + p * 13 + i * 3) % 61) - 30;
}

/* Rows of parameters that are sharded by rows. */
static uint64_t width_of(const tide_param *p)
{
    uint64_t n = 1;
    for (int d = 1; d < p->ndim; d++)
        n *= (uint64_t)p->dims[d];
    return n;
}

static int gather_and_reduce(threads_rank *rank)
{
    const job *j = rank->context;
    tide_group_desc desc = TIDE_GROUP_DESC_INIT;
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    void **buffers = calloc(j->n_params, sizeof *buffers);
    uint64_t elements = 0, at = 0;
    tide_comm *comm;
    tide_group *g;
    float *out;

    CHECK(buffers);
    desc.n_params = j->n_params;
    desc.params = j->params;
    desc.dtype = desc.shard_dtype = desc.grad_dtype = TIDE_F32;
    desc.input = TIDE_INPUT_ARGUMENT;
    CHECK(small_comm(rank, LOCAL, NULL, &comm) == TIDE_OK);
    CHECK(tide_groups_create(comm, &desc, 1, &g) == TIDE_OK);
    for (uint32_t p = 0; p < j->n_params; p++) {
        uint64_t width = width_of(&j->params[p]), rows = ((uint64_t)j->params[p].dims[0] + RANKS - 1) / RANKS;
        float *shard = malloc((rows * width + 1) * sizeof *shard);
        CHECK(shard);
        for (uint64_t i = 0; i < rows * width; i++)
            shard[i] = value(0, p, rank->rank * rows * width + i);
        buffers[p] = shard;
    }
    CHECK(tide_all_gather(g, (const void *const *)buffers, NULL) == TIDE_OK);
    CHECK(tide_wait(g, TIDE_READY, NULL) == TIDE_OK);
    for (uint32_t p = 0; p < j->n_params; p++) {
        uint64_t whole = (uint64_t)j->params[p].dims[0] * width_of(&j->params[p]);
        tide_tensor t = {.size = sizeof t};
        CHECK(tide_group_tensor(g, TIDE_TENSOR_PARAM, p, &t) == TIDE_OK);
        for (uint64_t i = 0; i < whole; i++)
            CHECK(((const float *)t.data)[i] == value(0, p, i));
        free(buffers[p]);
        buffers[p] = malloc((whole + 1) * sizeof(float));
        CHECK(buffers[p]);
        for (uint64_t i = 0; i < whole; i++)
            ((float *)buffers[p])[i] = value(rank->rank + 1, p, i);
    }
    CHECK(tide_slot_release(g, NULL) == TIDE_OK);
    CHECK(tide_group_output_elements(g, NULL, &elements) == TIDE_OK);
    out = malloc((elements + 1) * sizeof *out);
    CHECK(out);
    args.grads = (const void *const *)buffers;
    args.out = out;
    args.grad_dtype = TIDE_F32;
    CHECK(tide_reduce_scatter(g, &args, NULL) == TIDE_OK);
    CHECK(tide_wait(g, TIDE_DONE, NULL) == TIDE_OK);
    for (uint32_t p = 0; p < j->n_params; p++) {
        uint64_t width = width_of(&j->params[p]), rows = ((uint64_t)j->params[p].dims[0] + RANKS - 1) / RANKS;
        uint64_t whole = (uint64_t)j->params[p].dims[0] * width;
        for (uint64_t i = 0; i < rows * width; i++, at++) {
            uint64_t x = rank->rank * rows * width + i;
            float sum = 0;
            for (uint32_t u = 0; x < whole && u < RANKS; u++)
                sum += value(u + 1, p, x);
            CHECK(out[at] == sum);
        }
        free(buffers[p]);
    }
    CHECK(at == elements);
    free(out);
    free(buffers);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void many_parameters(void **state)
{
    tide_param *params = calloc(TIDE_MAX_PARAMS, sizeof *params);
    job j = {params, TIDE_MAX_PARAMS};

    (void)state;
    assert_non_null(params);
    for (uint32_t p = 0; p < TIDE_MAX_PARAMS; p++)
        params[p] = (tide_param){.ndim = 2, .dims = {p % 6, 1 + p % 3}};
    assert_int_equal(threads_run(RANKS, gather_and_reduce, &j), 0);
    free(params);
}

static void empty_parameters(void **state)
{
    static const tide_param rows = {"no rows", 2, 0, {0, 7}}, columns = {"no columns", 2, 0, {7, 0}},
                            both = {"nothing", 3, 0, {0, 0, 0}}, some = {"some", 2, 0, {5, 3}};
    const tide_param sets[][3] = {
        {rows, columns, both}, {some, rows, columns}, {rows, some, both}, {columns, rows, some}};

    (void)state;
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        for (uint32_t n = 1; n <= 3; n++) {
            job j = {sets[i], n};
            assert_int_equal(threads_run(RANKS, gather_and_reduce, &j), 0);
        }
    }
}

/* Empty parameters among others, proven in every order. */
static void empty_parameters_are_proven(void **state)
{
    static const tide_param params[] = {
        {"a", 2, 0, {0, 7}}, {"b", 2, 0, {9, 2}}, {"c", 2, 0, {7, 0}}, {"d", 2, 1, {0, 24}}, {"e", 1, 0, {3}}};
    const verify_options options = {.stop_after = 1};

    (void)state;
    for (uint32_t nodes = 1; nodes <= 4; nodes++) {
        for (uint32_t first = 0; first < 4; first++) {
            tide_topology t = TIDE_TOPOLOGY_INIT;
            tide_group_desc d = TIDE_GROUP_DESC_INIT;
            proof_result result;
            tide_plan *plan;
            t.nodes = nodes;
            t.local = 2;
            d.params = params + first;
            d.n_params = 5 - first;
            assert_int_equal(tide_plan_create(&t, &d, 1, NULL, &plan), TIDE_OK);
            assert_int_equal(proof_plan(plan, PROOF_ALL_ORDERS, 1, &options, &result), TIDE_OK);
            assert_int_equal(result.violations, 0);
            tide_plan_destroy(plan);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_near_2_to_the_63), cmocka_unit_test(extents_that_overflow),
        cmocka_unit_test(many_parameters),        cmocka_unit_test(empty_parameters),
        cmocka_unit_test(empty_parameters_are_proven),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
