/* test_comm.c - communicators and groups: agreement, all or none, the end; nodes; views that outlive their communicator.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "../harness/small.h"
#include "base/base.h"
#include "comm/comm.h"
#include "comm/dlpack.h"

enum { MAX = 8 };

/* What each rank of a test was told; compared afterwards on the main thread. */
typedef struct told {
    int status[MAX];
    char text[MAX][512];
} told;

static void tell(told *t, uint32_t rank, int status)
{
    t->status[rank] = status;
    snprintf(t->text[rank], sizeof t->text[rank], "%s", status == TIDE_OK ? "" : tide_last_error());
}

static void assert_told(const told *t, uint32_t n, int status, const char *text)
{
    for (uint32_t r = 0; r < n; r++) {
        assert_string_equal(t->text[r], text);
        assert_int_equal(t->status[r], status);
    }
}

/* ---- nodes -------------------------------------------------------------------------------------- */

static void test_nodes(void **state)
{
    static const struct {
        uint64_t hosts[8];
        uint32_t n, node_size;
        int status;
        uint32_t local;
        const char *text;
    } cases[] = {
        {{1}, 1, 0, TIDE_OK, 1, "one node: all 1 ranks are on this machine"},
        {{1, 1, 1, 1}, 4, 0, TIDE_OK, 4, "one node: all 4 ranks are on this machine"},
        {{1, 1, 1, 1}, 4, 2, TIDE_OK, 2, "virtual nodes: node_size 2 of 4 ranks on this machine"},
        {{1, 1, 1, 1}, 4, 1, TIDE_OK, 1, "virtual nodes: node_size 1 of 4 ranks on this machine"},
        {{1, 1, 1, 1}, 4, 4, TIDE_OK, 4, "node_size 4: a node is a machine"},
        {{1, 1, 2, 2}, 4, 0, TIDE_OK, 2, "a node is a machine: 2 ranks each"},
        {{1, 1, 2, 2}, 4, 2, TIDE_OK, 2, "node_size 2: a node is a machine"},
        {{1, 1, 2, 2},
         4,
         4,
         TIDE_ERR_ARGUMENT,
         0,
         "node_size: 4 puts ranks 0 and 2 into one node, but they are on different machines"},
        {{1, 2, 1, 2},
         4,
         0,
         TIDE_OK,
         1,
         "ranks are not node-major: ranks 0 and 2 share a machine, rank 1 between them does not"},
        {{1, 1, 2, 1},
         4,
         0,
         TIDE_OK,
         1,
         "ranks are not node-major: ranks 0 and 3 share a machine, rank 2 between them does not"},
        {{1, 1, 1, 2},
         4,
         0,
         TIDE_OK,
         1,
         "machines hold different numbers of ranks: 3 from rank 0 on, 1 from rank 3 on"},
        {{1, 2, 2, 3, 3},
         5,
         0,
         TIDE_OK,
         1,
         "machines hold different numbers of ranks: 1 from rank 0 on, 2 from rank 1 on"},
    };
    uint64_t many[65];
    char reason[192];
    uint32_t local;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        local = 99;
        assert_int_equal(comm_node_size(cases[i].hosts, cases[i].n, cases[i].node_size, &local, reason, sizeof reason),
                         cases[i].status);
        assert_string_equal(cases[i].status == TIDE_OK ? reason : tide_last_error(), cases[i].text);
        if (cases[i].status == TIDE_OK)
            assert_int_equal(local, cases[i].local);
    }
    for (int i = 0; i < 65; i++)
        many[i] = 7;
    assert_int_equal(comm_node_size(many, 65, 0, &local, reason, sizeof reason), TIDE_ERR_ARGUMENT);
    assert_int_equal(tide_host_identity(), tide_host_identity());
}

static int info_body(threads_rank *rank)
{
    const uint32_t *node_size = rank->context;
    tide_comm_info info = {.size = sizeof info};
    tide_group_path path = {.size = sizeof path};
    uint32_t local = *node_size ? *node_size : rank->n_ranks;
    small_layer s;
    char expected[96];
    tide_group *g;
    tide_comm *comm;
    CHECK(small_comm(rank, *node_size, NULL, &comm) == TIDE_OK);
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK);
    CHECK(info.rank == rank->rank && info.n_ranks == rank->n_ranks && info.local == local &&
          info.nodes == rank->n_ranks / local);
    CHECK(info.multicast == (local > 1) && info.calls == 0 && info.arena_bytes == 0 && info.live_views == 0);
    small_init(&s, rank, "g", TIDE_F32, TIDE_F32, TIDE_F32, 0);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK);
    CHECK(tide_group_get_path(g, &path) == TIDE_OK);
    snprintf(expected, sizeof expected, "host M=%u L=%u %s", rank->n_ranks / local, local,
             local > 1 ? "multicast" : "unicast");
    CHECK(strcmp(path.path, expected) == 0 && path.reason[0] && path.digest != 0);
    CHECK(path.all_gathers == 0 && path.reduce_scatters == 0);
    CHECK(tide_comm_check(comm, NULL) == TIDE_OK && tide_comm_sync(comm) == TIDE_OK);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_info(void **state)
{
    static const uint32_t cases[][2] = {{1, 0}, {1, 1}, {2, 0}, {4, 0}, {4, 2}, {4, 1}, {6, 3}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t node_size = cases[i][1];
        assert_int_equal(threads_run(cases[i][0], info_body, &node_size), 0);
    }
}

static void test_alone_without_a_callback(void **state)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_comm *comm;
    (void)state;
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_OK);
    assert_int_equal(tide_comm_destroy(comm), TIDE_OK);
    assert_int_equal(tide_comm_destroy(NULL), TIDE_OK);
}

/* ---- disagreement at tide_comm_create ----------------------------------------------------------- */

typedef struct creation {
    tide_comm_desc desc[MAX];
    tide_options options[MAX];
    told told;
} creation;

static int create_body(threads_rank *rank)
{
    creation *c = rank->context;
    tide_comm_desc desc = c->desc[rank->rank];
    tide_comm *comm = NULL;
    desc.allgather_context = rank;
    tell(&c->told, rank->rank, tide_comm_create(&desc, &comm));
    return comm != NULL;
}

static void creation_init(creation *c, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        c->options[r] = (tide_options)TIDE_OPTIONS_INIT;
        c->desc[r] = (tide_comm_desc)TIDE_COMM_DESC_INIT;
        c->desc[r].rank = r;
        c->desc[r].n_ranks = n;
        c->desc[r].allgather = threads_allgather;
        c->desc[r].options = &c->options[r];
    }
}

#define DISAGREE(n, change, status, text)                                                                              \
    do {                                                                                                               \
        uint64_t live_ = tide_alloc_live();                                                                            \
        creation_init(&c, n);                                                                                          \
        change;                                                                                                        \
        assert_int_equal(threads_run(n, create_body, &c), 0);                                                          \
        assert_told(&c.told, n, status, text);                                                                         \
        assert_int_equal(tide_alloc_live(), live_);                                                                    \
    } while (0)

static void test_creation_disagrees(void **state)
{
    static creation c;
    (void)state;
    DISAGREE(4, c.options[3].k = 4, TIDE_ERR_MISMATCH, "options.k: auto on ranks 0-2, 4 on rank 3");
    DISAGREE(6, (c.options[1].n_stg = 3, c.options[2].n_stg = 3, c.options[5].n_stg = 4), TIDE_ERR_MISMATCH,
             "options.n_stg: 2 on ranks 0, 3-4, 3 on ranks 1-2, 4 on rank 5");
    DISAGREE(4, c.options[0].deadline_ms = 5, TIDE_ERR_MISMATCH,
             "options.deadline_ms: 5 on rank 0, 600000 on ranks 1-3");
    DISAGREE(4, (c.desc[1].node_size = 2, c.desc[2].node_size = 2), TIDE_ERR_MISMATCH,
             "node_size: 0 on ranks 0, 3, 2 on ranks 1-2");
    DISAGREE(4, c.desc[2].n_ranks = 6, TIDE_ERR_MISMATCH, "n_ranks: 4 on rank 0, 6 on rank 2");
    DISAGREE(4, c.desc[3].n_ranks = 4 + 60, TIDE_ERR_MISMATCH, "n_ranks: 4 on rank 0, 64 on rank 3");
    DISAGREE(2, (c.desc[0].n_ranks = 3, c.desc[1].n_ranks = 3), TIDE_ERR_MISMATCH,
             "rank: entry 2 of the all-gather came from rank 65535; expected rank order and 3 entries");
    DISAGREE(4, c.desc[2].rank = 1, TIDE_ERR_MISMATCH,
             "rank: entry 2 of the all-gather came from rank 1; expected rank order and 4 entries");
}

/* One rank's bad argument reaches all; on the rank itself the text has no "rank 1: " in front. */
static void test_bad_arguments_reach_all(void **state)
{
    static creation c;
    (void)state;
    for (int what = 0; what < 4; what++) {
        static const struct {
            int status;
            const char *text;
        } expected[] = {
            {TIDE_ERR_ARGUMENT, "k: 4000 is not in 1..1023"},
            {TIDE_ERR_UNSUPPORTED, "fabric: 7 is not built into this library, expected TIDE_FABRIC_HOST (0), "
                                   "TIDE_FABRIC_CUDA (1) or TIDE_FABRIC_NCCL (2)"},
            {TIDE_ERR_ARGUMENT, "node_size: 2 does not divide n_ranks 3"},
            {TIDE_ERR_ARGUMENT, "options.size: 4, expected 152"},
        };
        creation_init(&c, 3);
        switch (what) {
        case 0:
            c.options[1].k = 4000;
            break;
        case 1:
            c.desc[1].fabric = 7;
            break;
        case 2:
            c.desc[1].node_size = 2;
            break;
        default:
            c.options[1].size = 4;
        }
        assert_int_equal(threads_run(3, create_body, &c), 0);
        for (int r = 0; r < 3; r++) {
            assert_int_equal(c.told.status[r], expected[what].status);
            assert_string_equal(c.told.text[r] + (r == 1 ? 0 : strlen("rank 1: ")), expected[what].text);
        }
    }
}

static void test_creation_refuses(void **state)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_options options = TIDE_OPTIONS_INIT;
    tide_comm *comm = NULL;
    (void)state;
    desc.options = &options;
    options.multicast = 1;
    options.poison = 1;
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(), "poison: 1 needs a landing a rank, expected multicast 0 or auto");
    assert_null(comm);
}

static void test_deadline_from_the_environment(void **state)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_comm *comm = NULL;
    (void)state;
    setenv("TIDE_DEADLINE_MS", "soon", 1);
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "TIDE_DEADLINE_MS: 'soon', expected a positive number of milliseconds");
    setenv("TIDE_DEADLINE_MS", "1234", 1);
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_OK);
    assert_int_equal(comm->options.deadline_ms, 1234);
    assert_int_equal(tide_comm_destroy(comm), TIDE_OK);
    unsetenv("TIDE_DEADLINE_MS");
}

/* ---- disagreement at tide_groups_create --------------------------------------------------------- */

/* Every rank has two groups; `change` alters those of one rank. Afterwards the communicator still works. */
typedef struct grouping {
    void (*change)(tide_group_desc *groups, tide_param *params, uint32_t *n_groups); /* params: those of group 1 */
    uint32_t who;
    told told;
} grouping;

static int group_body(threads_rank *rank)
{
    grouping *t = rank->context;
    small_layer a, b;
    tide_group_desc groups[2];
    tide_group *g[2] = {NULL, NULL};
    tide_comm_info info = {.size = sizeof info};
    tide_comm *comm;
    uint32_t n = 2;
    CHECK(small_comm(rank, 2, NULL, &comm) == TIDE_OK);
    small_init(&a, rank, "a", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    small_init(&b, rank, "b", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    groups[0] = a.desc;
    groups[1] = b.desc;
    if (rank->rank == t->who)
        t->change(groups, b.params, &n);
    tell(&t->told, rank->rank, tide_groups_create(comm, groups, n, g));
    CHECK(!g[0] && !g[1]);
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.arena_bytes == 0);
    groups[1] = groups[0] = a.desc;
    CHECK(tide_groups_create(comm, groups, 2, g) == TIDE_OK);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void change_count(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)g, (void)p, *n = 1; }
static void change_dims(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)g, (void)n, p[2].dims[1] = 34; }
static void change_ndim(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)g, (void)n, p[1].ndim = 0; }
static void change_shard_dim(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)g, (void)n, p[3].shard_dim = 0; }
static void change_param_name(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)g, (void)n, p[0].name = "width"; }
static void change_name(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)p, (void)n, g[1].name = NULL; }
static void change_dtype(tide_group_desc *g, tide_param *p, uint32_t *n)
{
    (void)p, (void)n, g[0].dtype = g[0].shard_dtype = TIDE_F32;
}
static void change_grad(tide_group_desc *g, tide_param *p, uint32_t *n)
{
    (void)p, (void)n, g[1].grad_dtype = TIDE_F32;
}
static void change_input(tide_group_desc *g, tide_param *p, uint32_t *n)
{
    (void)p, (void)n, g[1].input = TIDE_INPUT_ARGUMENT;
}
static void change_landing(tide_group_desc *g, tide_param *p, uint32_t *n)
{
    (void)p, (void)n, g[1].landing = TIDE_LANDING_PRIVATE;
}
static void change_params(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)p, (void)n, g[1].n_params = 3; }
static void change_bad(tide_group_desc *g, tide_param *p, uint32_t *n) { (void)p, (void)n, g[1].n_params = 0; }

static void test_groups_disagree(void **state)
{
    static const struct {
        void (*change)(tide_group_desc *, tide_param *, uint32_t *);
        uint32_t who;
        const char *text;
    } cases[] = {
        {change_count, 1, "n_groups: 2 on ranks 0, 2-3, 1 on rank 1"},
        {change_dims, 3, "group 1 'b' param 2 'head' dims[1]: 33 on ranks 0-2, 34 on rank 3"},
        {change_ndim, 0, "group 1 'b' param 1 'bias' ndim: 0 on rank 0, 1 on ranks 1-3"},
        {change_shard_dim, 2, "group 1 'b' param 3 'columns' shard_dim: 1 on ranks 0-1, 3, 0 on rank 2"},
        {change_param_name, 2, "group 1 'b' param 0 name: 'weight' on ranks 0-1, 3, 'width' on rank 2"},
        {change_name, 1, "group 1 name: 'b' on ranks 0, 2-3, '' on rank 1"},
        {change_dtype, 1, "group 0 'a' dtype: 1 on ranks 0, 2-3, 0 on rank 1"},
        {change_grad, 1, "group 1 'b' grad_dtype: 1 on ranks 0, 2-3, 0 on rank 1"},
        {change_input, 1, "group 1 'b' input: 0 on ranks 0, 2-3, 1 on rank 1"},
        {change_landing, 1, "group 1 'b' landing: 0 on ranks 0, 2-3, 1 on rank 1"},
        {change_params, 1, "group 1 'b' n_params: 4 on ranks 0, 2-3, 3 on rank 1"},
    };
    uint64_t live = tide_alloc_live();
    grouping t;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        t = (grouping){.change = cases[i].change, .who = cases[i].who};
        assert_int_equal(threads_run(4, group_body, &t), 0);
        assert_told(&t.told, 4, TIDE_ERR_MISMATCH, cases[i].text);
        assert_int_equal(tide_alloc_live(), live);
    }
    t = (grouping){.change = change_bad, .who = 2};
    assert_int_equal(threads_run(4, group_body, &t), 0);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(t.told.status[r], TIDE_ERR_ARGUMENT);
        assert_string_equal(t.told.text[r] + (r == 2 ? 0 : strlen("rank 2: ")),
                            "group 1 n_params: 0 is not in 1..4096");
    }
}

/* ---- calls that a rail does not take ---------------------------------------------------------------- */

typedef struct ringing {
    tide_options options;
    uint32_t device; /* what the device says that its rails hold */
    told told;
} ringing;

static int ring_body(threads_rank *rank)
{
    ringing *t = rank->context;
    small_layer a, b;
    tide_group_desc groups[2];
    tide_group *g[2] = {NULL, NULL};
    tide_comm_info info = {.size = sizeof info};
    tide_comm *comm;

    CHECK(small_comm(rank, 2, &t->options, &comm) == TIDE_OK);
    comm->device->rail_ring = t->device;
    small_init(&a, rank, "a", TIDE_BF16, TIDE_BF16, TIDE_NONE, 0);
    small_init(&b, rank, "b", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    groups[0] = a.desc;
    groups[1] = b.desc;
    tell(&t->told, rank->rank, tide_groups_create(comm, groups, 2, g));
    CHECK((t->told.status[rank->rank] == TIDE_OK) == (g[1] != NULL));
    if (!g[1]) { /* without the group that was refused */
        CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.arena_bytes == 0);
        CHECK(tide_groups_create(comm, groups, 1, g) == TIDE_OK || t->device == 1);
    }
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_what_a_rail_holds(void **state)
{
    static const struct {
        int64_t n_part, ring;
        uint32_t device;
        const char *refused; /* up to the peer */
    } cases[] = {
        {6, 0, 0, NULL}, /* any number */
        {1, 0, 8, NULL},
        {6, 0, 8, "group 1 'b': its reduce-scatter has more than 8 puts and signals to rank 2 in context 0"},
        {6, 32, 8, NULL}, /* the knob goes before the device */
        {6, 4, 0, "group 1 'b': its reduce-scatter has more than 4 puts and signals to rank 2 in context 0"},
        {1, 0, 1, "group 0 'a': its all-gather has more than 1 puts and signals to rank 2 in context 0"},
    };
    static ringing t;
    uint64_t live = tide_alloc_live();
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        t = (ringing){.options = TIDE_OPTIONS_INIT, .device = cases[i].device};
        t.options.n_part = cases[i].n_part;
        t.options.rail_ring = cases[i].ring;
        assert_int_equal(threads_run(4, ring_body, &t), 0);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(t.told.status[r], cases[i].refused ? TIDE_ERR_UNSUPPORTED : TIDE_OK);
            if (cases[i].refused) /* rank 0's sentence on all */
                assert_memory_equal(t.told.text[r] + (r == 0 ? 0 : strlen("rank 0: ")), cases[i].refused,
                                    strlen(cases[i].refused));
        }
        assert_int_equal(tide_alloc_live(), live);
    }
}

/* The last resort: everything the caller gave is equal, the plans are not. */
static int digest_body(threads_rank *rank)
{
    told *t = rank->context;
    fab_open open = {.rank = rank->rank,
                     .n_ranks = rank->n_ranks,
                     .allgather = threads_allgather,
                     .allgather_context = rank};
    int64_t scratch[MAX * COMM_FIELDS];
    small_layer s;
    small_init(&s, rank, "s", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    tell(t, rank->rank, comm_agree_groups(&open, scratch, TIDE_OK, &s.desc, 1, 1, rank->rank == 2 ? 0xbad : 0x600d));
    return 0;
}

static int multicast_body(threads_rank *rank)
{
    told *t = rank->context;
    fab_open open = {.rank = rank->rank,
                     .n_ranks = rank->n_ranks,
                     .allgather = threads_allgather,
                     .allgather_context = rank};
    int64_t scratch[MAX * COMM_FIELDS];
    small_layer s;
    small_init(&s, rank, "s", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    tell(t, rank->rank, comm_agree_groups(&open, scratch, TIDE_OK, &s.desc, 1, rank->rank != 0, 1));
    return 0;
}

static void test_digest_and_capabilities_disagree(void **state)
{
    told t;
    (void)state;
    assert_int_equal(threads_run(4, digest_body, &t), 0);
    assert_told(&t, 4, TIDE_ERR_MISMATCH, "plan digest: 000000000000600d on ranks 0-1, 3, 0000000000000bad on rank 2");
    assert_int_equal(threads_run(4, multicast_body, &t), 0);
    assert_told(&t, 4, TIDE_ERR_MISMATCH, "fabric multicast: 0 on rank 0, 1 on ranks 1-3");
}

/* ---- all or none, out of memory ----------------------------------------------------------------- */

typedef struct shortage {
    told told;
} shortage;

static int shortage_body(threads_rank *rank)
{
    shortage *s = rank->context;
    tide_comm *comm = NULL;
    small_layer a, b;
    tide_group_desc groups[2];
    tide_group *g[2];
    int status;
    small_init(&a, rank, "a", TIDE_BF16, TIDE_BF16, TIDE_BF16, 0);
    small_init(&b, rank, "b", TIDE_BF16, TIDE_F32, TIDE_BF16, 0);
    groups[0] = a.desc;
    groups[1] = b.desc;
    status = small_comm(rank, rank->n_ranks / 2, NULL, &comm);
    if (status == TIDE_OK)
        status = tide_groups_create(comm, groups, 2, g);
    tell(&s->told, rank->rank, status);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static int open_files(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Allocations 1, 1 + stride, ... of the whole process, until nothing fails any more. */
static void fail_allocations(uint32_t n_ranks, uint64_t stride)
{
    uint64_t live = tide_alloc_live();
    int files = open_files();
    shortage s;
    uint64_t n = 1;
    for (;; n += stride) {
        memset(&s, 0, sizeof s);
        tide_alloc_fail_at(n);
        assert_int_equal(threads_run(n_ranks, shortage_body, &s), 0);
        tide_alloc_fail_at(0);
        assert_int_equal(tide_alloc_live(), live);
        assert_int_equal(open_files(), files);
        for (uint32_t r = 1; r < n_ranks; r++)
            assert_int_equal(s.told.status[r], s.told.status[0]);
        if (s.told.status[0] == TIDE_OK)
            break;
        assert_int_equal(s.told.status[0], TIDE_ERR_MEMORY);
    }
    assert_true(n > 50); /* it really went through all of them */
}

static void test_out_of_memory(void **state)
{
    (void)state;
    fail_allocations(2, 1); /* two nodes of one */
    fail_allocations(4, 7); /* two nodes of two */
}

/* ---- views -------------------------------------------------------------------------------------- */

static int views_body(threads_rank *rank)
{
    static const struct {
        int dtype;
        uint8_t code, bits;
    } types[] = {{TIDE_F32, DLPACK_FLOAT, 32}, {TIDE_BF16, DLPACK_BFLOAT, 16}, {TIDE_F16, DLPACK_FLOAT, 16}};
    tide_comm_info info = {.size = sizeof info};
    DLManagedTensor *views[6];
    tide_group_desc descs[3];
    small_layer s[3];
    tide_group *g[3];
    tide_tensor t = {.size = sizeof t};
    tide_comm *comm;
    uint64_t live;
    CHECK(small_comm(rank, 0, NULL, &comm) == TIDE_OK);
    for (int i = 0; i < 3; i++) {
        small_init(&s[i], rank, "v", types[i].dtype, types[i].dtype, TIDE_F32, i);
        s[i].desc.landing = TIDE_LANDING_PRIVATE;
        descs[i] = s[i].desc;
    }
    CHECK(tide_groups_create(comm, descs, 3, g) == TIDE_OK);
    for (int i = 0; i < 3; i++) {
        CHECK(small_adopt(&s[i], g[i]) == TIDE_OK);
        CHECK(tide_all_gather(g[i], NULL, NULL) == TIDE_OK && tide_wait(g[i], TIDE_READY, NULL) == TIDE_OK);
        CHECK(tide_group_dlpack(g[i], TIDE_TENSOR_PARAM, 2, (void **)&views[2 * i]) == TIDE_OK);
        CHECK(tide_group_dlpack(g[i], TIDE_TENSOR_SHARD, 2, (void **)&views[2 * i + 1]) == TIDE_OK);
        CHECK(tide_group_tensor(g[i], TIDE_TENSOR_PARAM, 2, &t) == TIDE_OK);
        CHECK(views[2 * i]->dl_tensor.data == t.data && views[2 * i]->dl_tensor.byte_offset == 0);
        for (int k = 2 * i; k < 2 * i + 2; k++) {
            const DLTensor *d = &views[k]->dl_tensor;
            CHECK(d->dtype.code == types[i].code && d->dtype.bits == types[i].bits && d->dtype.lanes == 1);
            CHECK(d->ndim == 1 && !d->strides && d->device.device_type == DLPACK_CPU && d->device.device_id == 0);
            CHECK((uint64_t)d->shape[0] == small_shard(&s[i], 2) * (k == 2 * i ? rank->n_ranks : 1));
        }
    }
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.live_views == 6);
    views[1]->deleter(views[1]);
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK && info.live_views == 5);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    /* The memory of the others is still there, and what was gathered in it. */
    for (uint64_t i = 0; i < small_whole(&s[0], 2); i++)
        CHECK(((float *)views[0]->dl_tensor.data)[i] == (float)((int)((i * 7 + 2 * 31) % 241) - 120));
    memset(views[3]->dl_tensor.data, 1, (size_t)views[3]->dl_tensor.shape[0] * 2);
    live = tide_alloc_live();
    for (int k = 0; k < 6; k++) {
        if (k != 1)
            views[k]->deleter(views[k]);
    }
    return rank->n_ranks == 1 && tide_alloc_live() >= live;
}

static int opaque_body(threads_rank *rank)
{
    tide_param param = {"packed", 1, 0, {6}};
    tide_group_desc desc = TIDE_GROUP_DESC_INIT;
    DLManagedTensor *view;
    tide_comm *comm;
    tide_group *g;
    char mine[21], *all;
    CHECK(small_comm(rank, 0, NULL, &comm) == TIDE_OK);
    desc.n_params = 1;
    desc.params = &param;
    desc.dtype = desc.shard_dtype = TIDE_OPAQUE;
    desc.item_size = 7;
    desc.grad_dtype = TIDE_NONE;
    CHECK(tide_groups_create(comm, &desc, 1, &g) == TIDE_OK);
    memset(mine, 'a' + (int)rank->rank, sizeof mine);
    CHECK(tide_shard_adopt(g, 0, mine, sizeof mine, NULL) == TIDE_OK);
    CHECK(tide_all_gather(g, NULL, NULL) == TIDE_OK && tide_wait(g, TIDE_READY, NULL) == TIDE_OK);
    CHECK(tide_group_dlpack(g, TIDE_TENSOR_PARAM, 0, (void **)&view) == TIDE_OK);
    CHECK(view->dl_tensor.dtype.code == DLPACK_UINT && view->dl_tensor.dtype.bits == 8 &&
          view->dl_tensor.shape[0] == 42);
    all = view->dl_tensor.data;
    for (int i = 0; i < 42; i++)
        CHECK(all[i] == 'a' + i / 21);
    view->deleter(view);
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_views(void **state)
{
    uint64_t live = tide_alloc_live();
    (void)state;
    for (uint32_t n = 1; n <= 4; n *= 2)
        assert_int_equal(threads_run(n, views_body, NULL), 0);
    assert_int_equal(threads_run(2, opaque_body, NULL), 0);
    assert_int_equal(tide_alloc_live(), live);
}

static int adopt_body(threads_rank *rank)
{
    tide_tensor t = {.size = sizeof t};
    unsigned char *data, bytes[64];
    small_layer s;
    tide_comm *comm;
    tide_group *g;
    CHECK(small_comm(rank, 0, NULL, &comm) == TIDE_OK);
    small_init(&s, rank, "x", TIDE_F32, TIDE_F32, TIDE_F32, 0);
    CHECK(tide_groups_create(comm, &s.desc, 1, &g) == TIDE_OK);
    CHECK(tide_group_tensor(g, TIDE_TENSOR_SHARD, 0, &t) == TIDE_OK && t.bytes == small_shard(&s, 0) * 4);
    data = t.data;
    memset(bytes, 9, sizeof bytes);
    CHECK(tide_shard_adopt(g, 0, bytes, 5, NULL) == TIDE_OK); /* the rest becomes zero */
    for (uint64_t i = 0; i < t.bytes; i++)
        CHECK(data[i] == (i < 5 ? 9 : 0));
    CHECK(tide_shard_adopt(g, 0, data, 3, NULL) == TIDE_OK); /* its own memory */
    for (uint64_t i = 0; i < t.bytes; i++)
        CHECK(data[i] == (i < 3 ? 9 : 0));
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

static void test_adopt(void **state)
{
    (void)state;
    assert_int_equal(threads_run(2, adopt_body, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nodes),
        cmocka_unit_test(test_info),
        cmocka_unit_test(test_alone_without_a_callback),
        cmocka_unit_test(test_creation_disagrees),
        cmocka_unit_test(test_bad_arguments_reach_all),
        cmocka_unit_test(test_creation_refuses),
        cmocka_unit_test(test_deadline_from_the_environment),
        cmocka_unit_test(test_groups_disagree),
        cmocka_unit_test(test_what_a_rail_holds),
        cmocka_unit_test(test_digest_and_capabilities_disagree),
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_adopt),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
