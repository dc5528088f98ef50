/* test_api_errors.c - every public call with bad arguments: the code, one line that names the argument, and nothing
 * changed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "../harness/small.h"
#include "base/base.h"

/* One rank, so that everything can be looked at from here. */
typedef struct rig {
    tide_comm *comm;
    tide_group *adopted, *argument, *frozen;
    small_layer layer[3];
    tide_comm_info before;
} rig;

static int set_up(void **state)
{
    static rig r;
    threads_rank rank = {NULL, 0, 1, NULL};
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_group_desc descs[3];
    tide_group *g[3];
    if (tide_comm_create(&desc, &r.comm) != TIDE_OK)
        return -1;
    small_init(&r.layer[0], &rank, "adopted", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    small_init(&r.layer[1], &rank, "argument", TIDE_BF16, TIDE_F32, TIDE_BF16, 1);
    small_init(&r.layer[2], &rank, "frozen", TIDE_F16, TIDE_F16, TIDE_NONE, 2);
    for (int i = 0; i < 3; i++) {
        r.layer[i].desc.landing = TIDE_LANDING_PRIVATE;
        descs[i] = r.layer[i].desc;
    }
    if (tide_groups_create(r.comm, descs, 3, g) != TIDE_OK || small_adopt(&r.layer[0], g[0]) != TIDE_OK)
        return -1;
    r.adopted = g[0];
    r.argument = g[1];
    r.frozen = g[2];
    r.before = (tide_comm_info){.size = sizeof r.before};
    *state = &r;
    return tide_comm_get_info(r.comm, &r.before);
}

/* After everything that was refused: not a call, a view or a byte more, and the group still works. */
static int tear_down(void **state)
{
    rig *r = *state;
    tide_comm_info after = {.size = sizeof after};
    if (tide_comm_get_info(r->comm, &after) != TIDE_OK || memcmp(&after, &r->before, sizeof after) != 0)
        return -1;
    if (tide_all_gather(r->adopted, NULL, NULL) != TIDE_OK || tide_wait(r->adopted, TIDE_READY, NULL) != TIDE_OK ||
        small_wrong_params(&r->layer[0], r->adopted) != 0)
        return -1;
    return tide_comm_destroy(r->comm);
}

static void refused(int status, int code, const char *text)
{
    const char *said = tide_last_error();
    if (!strstr(said, text))
        fprintf(stderr, "said '%s', expected '%s'\n", said, text);
    assert_non_null(strstr(said, text));
    assert_null(strchr(said, '\n'));
    assert_int_equal(status, code);
    tide_error_describe(-99, NULL); /* the next failure must set its own text */
}
#define ARGUMENT(call, text) refused(call, TIDE_ERR_ARGUMENT, text)

static void test_errors_and_knobs(void **state)
{
    tide_options o = TIDE_OPTIONS_INIT, copy = o;
    tide_error_info info = {.code = 42};
    tide_knob_info knob = {.name = "untouched"};
    size_t n = 0;
    char end[64];
    (void)state;
    ARGUMENT(tide_error_describe(0, NULL), "out: NULL");
    ARGUMENT(tide_error_describe(-1000, &info), "code: -1000 is not in the error table");
    assert_int_equal(info.code, 42);
    ARGUMENT(tide_knob_describe(0, NULL), "out: NULL");
    while (tide_knob_describe(n, &knob) == TIDE_OK)
        n++;
    assert_true(n > 10);
    snprintf(end, sizeof end, "index: %zu is not in 0..%zu", n, n - 1);
    refused(tide_knob_describe(n, &knob), TIDE_ERR_END, end);
    ARGUMENT(tide_options_set(NULL, "k", 1), "options: NULL");
    ARGUMENT(tide_options_set(&o, NULL, 1), "name: NULL");
    ARGUMENT(tide_options_set(&o, "kk", 1), "name: 'kk' is not a knob");
    ARGUMENT(tide_options_set(&o, "k", 1024), "k: 1024 is not in 1..1023");
    assert_memory_equal(&o, &copy, sizeof o);
    o.size = 3;
    ARGUMENT(tide_options_set(&o, "k", 1), "options: wrong size");
    for (int code = -14; code <= 0; code++) {
        assert_int_equal(tide_error_describe(code, &info), TIDE_OK);
        assert_int_equal(info.code, code);
        assert_true(info.name[0] && info.message[0] && info.affected[0]);
    }
}

static void test_communicator(void **state)
{
    rig *r = *state;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT, bad;
    tide_comm_info info = {.size = 1};
    tide_failure failure = TIDE_FAILURE_INIT;
    tide_comm *comm = NULL;

    ARGUMENT(tide_comm_create(&desc, NULL), "out: NULL");
    ARGUMENT(tide_comm_create(NULL, &comm), "desc: NULL");
    bad = desc, bad.size = 8;
    ARGUMENT(tide_comm_create(&bad, &comm), "desc: wrong size");
    bad = desc, bad.n_ranks = 0;
    ARGUMENT(tide_comm_create(&bad, &comm), "n_ranks: 0 is not in 1..65536");
    bad = desc, bad.n_ranks = 65537;
    ARGUMENT(tide_comm_create(&bad, &comm), "n_ranks: 65537 is not in 1..65536");
    bad = desc, bad.rank = 1;
    ARGUMENT(tide_comm_create(&bad, &comm), "rank: 1 is not in 0..0");
    bad = desc, bad.n_ranks = 2;
    ARGUMENT(tide_comm_create(&bad, &comm), "allgather: NULL");
    bad = desc, bad.node_size = 2;
    ARGUMENT(tide_comm_create(&bad, &comm), "node_size: 2 does not divide n_ranks 1");
    bad = desc, bad.fabric = -1;
    refused(tide_comm_create(&bad, &comm), TIDE_ERR_UNSUPPORTED, "fabric: -1 is not built into this library");
    assert_null(comm);

    ARGUMENT(tide_comm_get_info(NULL, &info), "comm: NULL");
    ARGUMENT(tide_comm_get_info(r->comm, NULL), "out: NULL");
    ARGUMENT(tide_comm_get_info(r->comm, &info), "out: wrong size");
    ARGUMENT(tide_comm_check(NULL, &failure), "comm: NULL");
    failure.size = 0;
    ARGUMENT(tide_comm_check(r->comm, &failure), "out: wrong size");
    ARGUMENT(tide_comm_sync(NULL), "comm: NULL");
    ARGUMENT(tide_comm_abort(NULL), "comm: NULL");
    assert_int_equal(tide_comm_check(r->comm, NULL), TIDE_OK);
}

static void test_groups(void **state)
{
    rig *r = *state;
    tide_param param = {"p", 1, 0, {4}}, odd = {"p", 99, 0, {4}};
    tide_group_desc desc = TIDE_GROUP_DESC_INIT, bad;
    tide_group *g = NULL;

    desc.n_params = 1, desc.params = &param;
    ARGUMENT(tide_groups_create(NULL, &desc, 1, &g), "comm: NULL");
    ARGUMENT(tide_groups_create(r->comm, NULL, 1, &g), "groups: NULL");
    ARGUMENT(tide_groups_create(r->comm, &desc, 0, &g), "n_groups: 0");
    ARGUMENT(tide_groups_create(r->comm, &desc, 1, NULL), "out: NULL");
    bad = desc, bad.size = 0;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 size: 0");
    bad = desc, bad.n_params = 0;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 n_params: 0");
    bad = desc, bad.n_params = 4097;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 n_params: 4097");
    bad = desc, bad.params = NULL;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 params: NULL");
    bad = desc, bad.dtype = 9;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 dtype: 9");
    bad = desc, bad.shard_dtype = TIDE_F32;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 shard_dtype");
    bad = desc, bad.grad_dtype = TIDE_OPAQUE;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 grad_dtype: 3");
    bad = desc, bad.input = 2;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 input: 2");
    bad = desc, bad.landing = 2;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "group 0 landing: 2");
    bad = desc, bad.params = &odd;
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "ndim: 99");
    odd = (tide_param){"p", 1, 1, {4}};
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "shard_dim: 1");
    odd = (tide_param){"p", 1, 0, {-4}};
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "dims[0]: -4");
    odd = (tide_param){"p", 2, 0, {INT64_MAX, INT64_MAX}};
    ARGUMENT(tide_groups_create(r->comm, &bad, 1, &g), "exceed");
    assert_null(g);
}

static void test_tensors(void **state)
{
    rig *r = *state;
    tide_group_path path = {.size = 1};
    tide_tensor t = {.size = sizeof t}, small = {.size = 8};
    uint64_t n = 77;
    char data[64] = {0};
    void *view = NULL;

    ARGUMENT(tide_group_get_path(NULL, &path), "group: NULL");
    ARGUMENT(tide_group_get_path(r->adopted, NULL), "out: NULL");
    ARGUMENT(tide_group_get_path(r->adopted, &path), "out: wrong size");
    ARGUMENT(tide_group_tensor(NULL, TIDE_TENSOR_PARAM, 0, &t), "group: NULL");
    ARGUMENT(tide_group_tensor(r->adopted, 2, 0, &t), "kind: 2");
    ARGUMENT(tide_group_tensor(r->adopted, TIDE_TENSOR_PARAM, 4, &t),
             "index: 4, but group 0 'adopted' has 4 parameters");
    ARGUMENT(tide_group_tensor(r->adopted, TIDE_TENSOR_PARAM, 0, NULL), "out: NULL");
    ARGUMENT(tide_group_tensor(r->adopted, TIDE_TENSOR_PARAM, 0, &small), "out: wrong size");
    refused(tide_group_tensor(r->argument, TIDE_TENSOR_SHARD, 0, &t), TIDE_ERR_STATE,
            "kind: group 1 'argument' takes its shards as arguments");
    assert_null(t.data);
    ARGUMENT(tide_group_dlpack(NULL, TIDE_TENSOR_PARAM, 0, &view), "group: NULL");
    ARGUMENT(tide_group_dlpack(r->adopted, -1, 0, &view), "kind: -1");
    ARGUMENT(tide_group_dlpack(r->adopted, TIDE_TENSOR_SHARD, 9, &view), "index: 9");
    ARGUMENT(tide_group_dlpack(r->adopted, TIDE_TENSOR_SHARD, 0, NULL), "out: NULL");
    assert_null(view);
    ARGUMENT(tide_shard_adopt(NULL, 0, data, 1, NULL), "group: NULL");
    ARGUMENT(tide_shard_adopt(r->adopted, 4, data, 1, NULL), "index: 4");
    ARGUMENT(tide_shard_adopt(r->adopted, 0, NULL, 1, NULL), "data: NULL");
    ARGUMENT(tide_shard_adopt(r->adopted, 1, data, 5, NULL), "bytes: 5, expected at most the 4 of the padded shard");
    refused(tide_shard_adopt(r->argument, 0, data, 1, NULL), TIDE_ERR_STATE,
            "group: group 1 'argument' takes its shards as arguments");
    ARGUMENT(tide_group_output_elements(NULL, NULL, &n), "group: NULL");
    ARGUMENT(tide_group_output_elements(r->adopted, NULL, NULL), "elements: NULL");
    assert_int_equal(n, 77);
}

static void test_all_gather(void **state)
{
    rig *r = *state;
    void *shards[SMALL_PARAMS], *keep;
    char *odd = malloc(64);

    small_shards(&r->layer[1], shards);
    ARGUMENT(tide_all_gather(NULL, NULL, NULL), "group: NULL");
    ARGUMENT(tide_all_gather(r->adopted, (const void *const *)shards, NULL),
             "shards: not NULL, but group 0 'adopted' reads its adopted");
    ARGUMENT(tide_all_gather(r->adopted, NULL, shards), "stream: ");
    ARGUMENT(tide_all_gather(r->argument, NULL, NULL), "shards: NULL, expected 4 pointers for group 1 'argument'");
    keep = shards[2], shards[2] = NULL;
    ARGUMENT(tide_all_gather(r->argument, (const void *const *)shards, NULL),
             "shards[2]: NULL, expected 528 elements of fp32");
    shards[2] = odd + 2;
    ARGUMENT(tide_all_gather(r->argument, (const void *const *)shards, NULL), "is not aligned to the 4 bytes of fp32");
    shards[2] = keep;
    ARGUMENT(tide_slot_release(NULL, NULL), "group: NULL");
    ARGUMENT(tide_slot_release(r->adopted, odd), "stream: ");
    refused(tide_slot_release(r->adopted, NULL), TIDE_ERR_STATE, "group 0 'adopted' is not gathered");
    ARGUMENT(tide_wait(NULL, TIDE_READY, NULL), "group: NULL");
    ARGUMENT(tide_wait(r->adopted, 3, NULL), "event: 3");
    ARGUMENT(tide_wait(r->adopted, TIDE_READY, odd), "stream: ");
    assert_int_equal(tide_wait(r->adopted, TIDE_READY, NULL), TIDE_OK); /* none yet: nothing to wait for */
    small_free(shards);
    free(odd);
}

typedef int (*rs_call)(tide_group *, const tide_reduce_scatter_args *, void *);

static void test_reduce_scatter(void **state)
{
    static const rs_call calls[] = {tide_reduce_scatter, tide_reduce_scatter_read, tide_grads_stash};
    rig *r = *state;
    void *grads[SMALL_PARAMS], *keep;
    float out[1024];
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT, bad;

    small_grads(&r->layer[0], 0, TIDE_BF16, 15, grads);
    args.grads = (const void *const *)grads;
    args.out = out;
    out[0] = 5.0f;
    for (size_t i = 0; i < 3; i++) {
        rs_call call = calls[i];
        ARGUMENT(call(NULL, &args, NULL), "group: NULL");
        ARGUMENT(call(r->adopted, NULL, NULL), "args: NULL");
        ARGUMENT(call(r->adopted, &args, out), "stream: ");
        bad = args, bad.size = 2;
        ARGUMENT(call(r->adopted, &bad, NULL), "args: wrong size");
        bad = args, bad.grad_dtype = TIDE_OPAQUE;
        ARGUMENT(call(r->adopted, &bad, NULL), "grad_dtype: 3 is not");
        bad = args, bad.accumulate = 2;
        ARGUMENT(call(r->adopted, &bad, NULL), "accumulate: 2");
        bad = args, bad.mode = -1;
        ARGUMENT(call(r->adopted, &bad, NULL), "mode: -1");
        refused(call(r->frozen, &args, NULL), TIDE_ERR_UNSUPPORTED, "group 2 'frozen' was created without gradients");
        if (call == tide_grads_stash)
            continue;
        bad = args, bad.grads = NULL;
        ARGUMENT(call(r->adopted, &bad, NULL), "grads: NULL");
        bad = args, bad.out = NULL;
        ARGUMENT(call(r->adopted, &bad, NULL), "out: NULL");
        bad = args, bad.out = (float *)(void *)((char *)out + 2);
        ARGUMENT(call(r->adopted, &bad, NULL), "out: ");
        keep = grads[1], grads[1] = (char *)grads[2] + 1;
        ARGUMENT(call(r->adopted, &args, NULL), "grads[1]: ");
        grads[1] = keep;
        bad = args, bad.mode = 1;
        refused(call(r->adopted, &bad, NULL), TIDE_ERR_STATE, "group 0 'adopted' has no stashed gradients");
    }
    refused(tide_grads_stash(r->adopted, &args, NULL), TIDE_ERR_STATE, "group 0 'adopted' is not gathered");
    ARGUMENT(tide_reduce_scatter_net(NULL, NULL), "group: NULL");
    ARGUMENT(tide_reduce_scatter_net(r->adopted, out), "stream: ");
    refused(tide_reduce_scatter_net(r->adopted, NULL), TIDE_ERR_STATE, "group 0 'adopted' has no read phase");
    assert_true(out[0] == 5.0f);
    small_free(grads);
}

static int refuse_write(void *context, const char *text, size_t bytes)
{
    (void)context, (void)text, (void)bytes;
    return 1;
}

static void test_plans(void **state)
{
    tide_topology topology = TIDE_TOPOLOGY_INIT, bad = TIDE_TOPOLOGY_INIT;
    tide_param param = {"p", 1, 0, {64}};
    tide_group_desc desc = TIDE_GROUP_DESC_INIT;
    tide_options options = TIDE_OPTIONS_INIT;
    tide_bytes bytes = TIDE_BYTES_INIT;
    tide_plan *plan = NULL;
    (void)state;
    desc.n_params = 1, desc.params = &param;
    ARGUMENT(tide_plan_create(NULL, &desc, 1, NULL, &plan), "topology: NULL");
    bad.nodes = 0;
    ARGUMENT(tide_plan_create(&bad, &desc, 1, NULL, &plan), "nodes: 0 is not in 1..1024");
    bad.nodes = 1, bad.local = 65;
    ARGUMENT(tide_plan_create(&bad, &desc, 1, NULL, &plan), "local: 65 is not in 1..64");
    ARGUMENT(tide_plan_create(&topology, &desc, 0, NULL, &plan), "n_groups: 0");
    ARGUMENT(tide_plan_create(&topology, NULL, 1, NULL, &plan), "groups: NULL");
    ARGUMENT(tide_plan_create(&topology, &desc, 1, NULL, NULL), "out: NULL");
    options.n_stg = 17;
    ARGUMENT(tide_plan_create(&topology, &desc, 1, &options, &plan), "n_stg: 17 is not in 1..16");
    assert_null(plan);
    ARGUMENT(tide_plan_bytes(NULL, 0, &bytes), "plan: NULL");
    ARGUMENT(tide_plan_options(NULL, &options), "plan: NULL");
    assert_int_equal(tide_plan_digest(NULL), 0);
    tide_plan_destroy(NULL);
    assert_int_equal(tide_plan_create(&topology, &desc, 1, NULL, &plan), TIDE_OK);
    ARGUMENT(tide_plan_bytes(plan, 1, &bytes), "rank: 1");
    ARGUMENT(tide_plan_bytes(plan, 0, NULL), "out: NULL");
    ARGUMENT(tide_plan_options(plan, NULL), "out: NULL");
    options.size = 1;
    ARGUMENT(tide_plan_options(plan, &options), "out: wrong size");
    ARGUMENT(tide_plan_print(NULL, 0, 0, refuse_write, NULL), "plan: NULL");
    ARGUMENT(tide_plan_print(plan, 1, 0, refuse_write, NULL), "rank: 1");
    ARGUMENT(tide_plan_print(plan, 0, 0, NULL, NULL), "write: NULL");
    refused(tide_plan_print(plan, 0, 0, refuse_write, NULL), TIDE_ERR_SYSTEM, "write: ");
    tide_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors_and_knobs),
        cmocka_unit_test(test_communicator),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_all_gather),
        cmocka_unit_test(test_reduce_scatter),
        cmocka_unit_test(test_plans),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
