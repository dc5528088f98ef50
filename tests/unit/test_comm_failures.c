/* test_comm_failures.c - a communicator that fails: by an abort, a rank that is late, ranks that make different calls; and
 * in a forked child. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../harness/small.h"
#include "base/base.h"
#include "comm/dlpack.h"

enum { MAX = 8 };

static int abort_body(threads_rank *rank)
{
    char (*texts)[256] = rank->context; /* a rank */
    tide_failure f = TIDE_FAILURE_INIT;
    tide_reduce_scatter_args a = TIDE_REDUCE_SCATTER_ARGS_INIT;
    tide_tensor tensor = {.size = sizeof tensor};
    tide_comm_info info = {.size = sizeof info};
    tide_group_path path = {.size = sizeof path};
    tide_comm *comm;
    tide_group *g, *other = NULL;
    small_layer s;
    void *view = NULL;
    char all[MAX], here = 1;
    uint64_t n;
    int status;
    CHECK(small_comm(rank, 2, NULL, &comm) == TIDE_OK);
    small_init(&s, rank, "x", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK && small_adopt(&s, g) == TIDE_OK);
    CHECK(threads_allgather(rank, &here, all, 1) == 0); /* nobody is still setting up */
    if (rank->rank == 1) {
        CHECK(tide_comm_abort(comm) == TIDE_OK);
    } else { /* the wait of a gather that rank 1 never enters ends */
        status = tide_all_gather(g, NULL, NULL);
        if (status == TIDE_OK)
            status = tide_wait(g, TIDE_READY, NULL);
        CHECK(status == TIDE_ERR_ABORTED);
    }
    CHECK(tide_comm_check(comm, &f) == TIDE_ERR_ABORTED && f.code == TIDE_ERR_ABORTED && f.text[0]);
    snprintf(texts[rank->rank], sizeof texts[0], "%s", f.text);
#define SAME(call) CHECK((call) == TIDE_ERR_ABORTED && strcmp(tide_last_error(), f.text) == 0)
    SAME(tide_comm_check(comm, NULL));
    SAME(tide_all_gather(g, NULL, NULL));
    SAME(tide_slot_release(g, NULL));
    SAME(tide_grads_stash(g, &a, NULL));
    SAME(tide_reduce_scatter_read(g, &a, NULL));
    SAME(tide_reduce_scatter_net(g, NULL));
    SAME(tide_reduce_scatter(g, &a, NULL));
    SAME(tide_wait(g, TIDE_DONE, NULL));
    SAME(tide_comm_sync(comm));
    SAME(tide_groups_create(comm, &s.desc, 1, &other));
    SAME(tide_shard_adopt(g, 0, NULL, 0, NULL));
    SAME(tide_group_tensor(g, TIDE_TENSOR_PARAM, 0, &tensor));
    SAME(tide_group_dlpack(g, TIDE_TENSOR_PARAM, 0, &view));
    SAME(tide_group_output_elements(g, NULL, &n));
    CHECK(!other && !view && !tensor.data);
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.n_ranks == 4); /* what a report needs still answers */
    CHECK(tide_group_get_path(g, &path) == TIDE_OK && path.path[0]);
    CHECK(tide_comm_abort(comm) == TIDE_OK);
    CHECK(tide_comm_destroy(comm) == TIDE_OK); /* waits for nobody */
    return 0;
}

static void test_abort(void **state)
{
    char texts[4][256];
    uint64_t live = tide_alloc_live();
    (void)state;
    assert_int_equal(threads_run(4, abort_body, texts), 0);
    for (int r = 1; r < 4; r++)
        assert_string_equal(texts[r], texts[0]);
    assert_int_equal(tide_alloc_live(), live);
}

/* A rank that has seen the failure may unmap its gradients at once, also in the middle of a long copy. */
static int free_body(threads_rank *rank)
{
    enum { ROWS = 1 << 12, COLUMNS = 1 << 12 };
    size_t bytes = sizeof(float) * ROWS * COLUMNS;
    tide_param param = {"big", 2, 0, {ROWS, COLUMNS}};
    tide_options options = TIDE_OPTIONS_INIT;
    tide_group_desc desc = TIDE_GROUP_DESC_INIT;
    tide_reduce_scatter_args a = TIDE_REDUCE_SCATTER_ARGS_INIT;
    tide_comm *comm;
    tide_group *g;
    void *grads, *out;
    char all[MAX], here = 1;

    options.chunk = ROWS * COLUMNS; /* one copy */
    CHECK(small_comm(rank, 0, &options, &comm) == TIDE_OK);
    desc.n_params = 1;
    desc.params = &param;
    desc.grad_dtype = TIDE_F32;
    CHECK(tide_groups_create(comm, &desc, 1, &g) == TIDE_OK);
    grads = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    out = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(grads != MAP_FAILED && out != MAP_FAILED);
    a.grads = (const void *const[]){grads};
    a.out = out;
    a.grad_dtype = TIDE_F32;
    CHECK(threads_allgather(rank, &here, all, 1) == 0);
    if (rank->rank == 1) {
        usleep(2000);
        CHECK(tide_comm_abort(comm) == TIDE_OK);
    } else {
        int status = tide_reduce_scatter(g, &a, NULL);
        CHECK(status == TIDE_OK || status == TIDE_ERR_ABORTED);
        while (tide_comm_check(comm, NULL) == TIDE_OK)
            usleep(50);
    }
    munmap(grads, bytes);
    munmap(out, bytes);
    CHECK(threads_allgather(rank, &here, all, 1) == 0);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_nothing_is_touched_after_a_failure(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        assert_int_equal(threads_run(2, free_body, NULL), 0);
}

static int deadline_body(threads_rank *rank)
{
    tide_options options = TIDE_OPTIONS_INIT;
    tide_failure f = TIDE_FAILURE_INIT;
    tide_comm *comm;
    tide_group *g;
    small_layer s;
    int64_t start;
    options.deadline_ms = 200;
    CHECK(small_comm(rank, 2, &options, &comm) == TIDE_OK);
    small_init(&s, rank, "x", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK && small_adopt(&s, g) == TIDE_OK);
    start = tide_now_ns();
    if (rank->rank != 1) { /* rank 1 is late for good */
        CHECK(tide_all_gather(g, NULL, NULL) == TIDE_OK);
        CHECK(tide_wait(g, TIDE_READY, NULL) == TIDE_ERR_DEADLINE);
        CHECK(tide_now_ns() - start < INT64_C(10) * 1000000000);
        CHECK(tide_comm_check(comm, &f) == TIDE_ERR_DEADLINE && f.call == 1 && f.phase[0]);
        CHECK(tide_all_gather(g, NULL, NULL) == TIDE_ERR_DEADLINE);
    } else {
        while (tide_comm_check(comm, &f) == TIDE_OK && tide_now_ns() - start < INT64_C(10) * 1000000000)
            usleep(1000);
        CHECK(f.code == TIDE_ERR_DEADLINE);
    }
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_deadline(void **state)
{
    (void)state;
    assert_int_equal(threads_run(2, deadline_body, NULL), 0);
    assert_int_equal(threads_run(4, deadline_body, NULL), 0);
}

static int order_body(threads_rank *rank) /* rank 0 gathers the groups in another order */
{
    tide_options options = TIDE_OPTIONS_INIT;
    tide_group_desc descs[2];
    small_layer a, b;
    tide_group *g[2];
    tide_comm *comm;
    int status;
    options.ring_slots = 1;
    CHECK(small_comm(rank, 2, &options, &comm) == TIDE_OK);
    small_init(&a, rank, "a", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    small_init(&b, rank, "b", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    descs[0] = a.desc;
    descs[1] = b.desc;
    CHECK(tide_groups_create(comm, descs, 2, g) == TIDE_OK && small_adopt(&a, g[0]) == TIDE_OK &&
          small_adopt(&b, g[1]) == TIDE_OK);
    status = tide_all_gather(g[rank->rank == 0], NULL, NULL);
    if (status == TIDE_OK)
        status = tide_wait(g[rank->rank == 0], TIDE_READY, NULL);
    CHECK(status == TIDE_ERR_MISMATCH);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_order_mismatch(void **state)
{
    (void)state;
    assert_int_equal(threads_run(2, order_body, NULL), 0);
}

typedef struct masks {
    uint32_t node_size, odd; /* rank `odd` has another subset than the others */
    unsigned usual, other;
    int64_t chunk;
    uint32_t late_us; /* the others come so much later: the odd one is as far ahead as it can get */
} masks;

static int masks_body(threads_rank *rank)
{
    const masks *m = rank->context;
    unsigned present = rank->rank == m->odd ? m->other : m->usual;
    tide_options options = TIDE_OPTIONS_INIT;
    tide_reduce_scatter_args a = TIDE_REDUCE_SCATTER_ARGS_INIT;
    void *grads[SMALL_PARAMS];
    float out[1024];
    small_layer s;
    tide_group *g;
    tide_comm *comm;
    int status;
    options.chunk = m->chunk;
    CHECK(small_comm(rank, m->node_size, &options, &comm) == TIDE_OK);
    small_init(&s, rank, "x", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK);
    small_grads(&s, 0, TIDE_BF16, present, grads);
    a.grads = (const void *const *)grads;
    a.out = out;
    if (rank->rank != m->odd)
        usleep(m->late_us);
    status = tide_reduce_scatter(g, &a, NULL);
    if (status == TIDE_OK)
        status = tide_wait(g, TIDE_DONE, NULL);
    CHECK(status == TIDE_ERR_MISMATCH); /* on all ranks: nobody takes a wrong sum for a good one */
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    small_free(grads);
    return 0;
}

static void test_masks_differ(void **state)
{
    /* one rank of a node, one of several nodes, a node that is one rank; equal and different numbers of chunks */
    static const struct {
        uint32_t n, node_size;
    } shapes[] = {{2, 2}, {3, 3}, {4, 2}, {3, 1}, {6, 2}};
    static const unsigned pairs[][2] = {{15, 13}, {13, 15}, {5, 11}, {1, 2}, {4, 8}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
            masks m = {shapes[i].node_size, (uint32_t)k % shapes[i].n, pairs[k][0], pairs[k][1], 16, 0};
            for (m.late_us = 0; m.late_us <= 2000; m.late_us += 2000)
                assert_int_equal(threads_run(shapes[i].n, masks_body, &m), 0);
        }
    }
}

/* ---- fork --------------------------------------------------------------------------------------- */

static int child_calls(tide_comm *comm, tide_group *g, DLManagedTensor *view)
{
    tide_failure f = TIDE_FAILURE_INIT;
    tide_comm_info info = {.size = sizeof info};
    tide_group_path path = {.size = sizeof path};
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_comm *fresh = NULL;
    int wrong = 0;
    wrong += tide_all_gather(g, NULL, NULL) != TIDE_ERR_FORKED;
    wrong += tide_slot_release(g, NULL) != TIDE_ERR_FORKED;
    wrong += tide_wait(g, TIDE_READY, NULL) != TIDE_ERR_FORKED;
    wrong += tide_shard_adopt(g, 0, NULL, 0, NULL) != TIDE_ERR_FORKED;
    wrong += tide_group_get_path(g, &path) != TIDE_ERR_FORKED;
    wrong += tide_comm_get_info(comm, &info) != TIDE_ERR_FORKED;
    wrong += tide_comm_check(comm, &f) != TIDE_ERR_FORKED;
    wrong += tide_comm_sync(comm) != TIDE_ERR_FORKED;
    wrong += tide_comm_abort(comm) != TIDE_ERR_FORKED;
    wrong += tide_comm_destroy(comm) != TIDE_ERR_FORKED;
    wrong += tide_comm_create(&desc, &fresh) != TIDE_ERR_FORKED;
    view->deleter(view);
    return wrong;
}

static void test_forked_child(void **state)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    threads_rank rank = {NULL, 0, 1, NULL};
    DLManagedTensor *view;
    tide_comm *comm;
    tide_group *g;
    small_layer s;
    pid_t child;
    int code;
    (void)state;
    small_init(&s, &rank, "x", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_OK);
    assert_int_equal(tide_groups_create(comm, &s.desc, 1, &g), TIDE_OK);
    assert_int_equal(tide_group_dlpack(g, TIDE_TENSOR_PARAM, 0, (void **)&view), TIDE_OK);
    child = fork();
    if (child == 0)
        _exit(child_calls(comm, g, view));
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
    assert_int_equal(small_adopt(&s, g), TIDE_OK); /* the parent goes on */
    assert_int_equal(tide_all_gather(g, NULL, NULL), TIDE_OK);
    assert_int_equal(tide_wait(g, TIDE_READY, NULL), TIDE_OK);
    assert_int_equal(small_wrong_params(&s, g), 0);
    view->deleter(view);
    assert_int_equal(tide_comm_destroy(comm), TIDE_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_nothing_is_touched_after_a_failure),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_order_mismatch),
        cmocka_unit_test(test_masks_differ),
        cmocka_unit_test(test_forked_child),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
