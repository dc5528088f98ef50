/* test_memory_promise.c - tide_plan_bytes is what is allocated: over many plans the sum over ranks is what the process
 * has mapped, as its own maps say; and every bank of every region is used up to its last item. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../harness/small.h"
#include "comm/comm.h"

enum { GROUPS = 2, CALLS = 4 };

typedef struct job {
    uint32_t nodes, local;
    tide_options options;
    tide_group_desc groups[GROUPS];
    tide_param params[GROUPS][2];
    uint64_t mapped;           /* seen by rank 0 while all ranks hold theirs */
    _Atomic uint64_t promised; /* of all ranks */
    bool fill;                 /* run calls and look at the banks' ends */
} job;

/* Bytes of arena mappings in this process; ranks that are threads share one mapping of each arena. */
static uint64_t mapped_arenas(void)
{
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    uint64_t bytes = 0;
    unsigned long from, to;
    while (f && fgets(line, sizeof line, f)) {
        if (strstr(line, "memfd:tide-arena") && sscanf(line, "%lx-%lx", &from, &to) == 2)
            bytes += to - from;
    }
    if (f)
        fclose(f);
    return bytes;
}

static void fill(void *at, int dtype, uint64_t elements)
{
    for (uint64_t i = 0; i < elements; i++) {
        if (dtype == TIDE_F32)
            ((float *)at)[i] = 1.0f;
        else
            ((uint16_t *)at)[i] = dtype == TIDE_BF16 ? tide_f32_to_bf16(1.0f) : tide_f32_to_f16(1.0f);
    }
}

/* Ones in every parameter and gradient: whatever was written does not end in a zero byte. */
static int use(tide_group *g, float *out)
{
    const geo_group *geo = &g->plan->geo;
    tide_reduce_scatter_args a = TIDE_REDUCE_SCATTER_ARGS_INIT;
    void *buffers[2];
    bool adopted = geo->input == TIDE_INPUT_ADOPTED;

    for (uint32_t p = 0; p < geo->n_params; p++) {
        buffers[p] = malloc((geo->params[p].shard * geo->ranks) * 4 + 1);
        fill(buffers[p], geo->shard_dtype, geo->params[p].shard);
        if (adopted)
            CHECK(tide_shard_adopt(g, p, buffers[p], geo->params[p].shard * geo->item, NULL) == TIDE_OK);
    }
    CHECK(tide_all_gather(g, adopted ? NULL : (const void *const *)buffers, NULL) == TIDE_OK);
    CHECK(tide_wait(g, TIDE_READY, NULL) == TIDE_OK && tide_slot_release(g, NULL) == TIDE_OK);
    for (uint32_t p = 0; p < geo->n_params; p++)
        fill(buffers[p], geo->grad_dtype, geo->params[p].whole);
    a.grads = (const void *const *)buffers;
    a.out = out;
    a.grad_dtype = geo->grad_dtype;
    for (int i = 0; i < CALLS && geo->grad_dtype != TIDE_NONE; i++)
        CHECK(tide_reduce_scatter(g, &a, NULL) == TIDE_OK && tide_wait(g, TIDE_DONE, NULL) == TIDE_OK);
    for (uint32_t p = 0; p < geo->n_params; p++)
        free(buffers[p]);
    return 0;
}

static int look_at_ends(const comm_set *set, uint32_t local_rank)
{
    for (int region = 0; region < REGION_COUNT; region++) {
        for (uint32_t b = 0; b < set->plan->map.region[region].n_banks; b++) {
            uint64_t bytes = set->plan->map.region[region].banks[b].bytes;
            const uint8_t *at;
            if (bytes == 0 || (region == REGION_LANDING && plan_shared_landing(set->plan) && local_rank > 0))
                continue;
            at = engine_address(set->engine, region, b, 0);
            if (at[bytes - 1] == 0)
                fprintf(stderr, "region %s bank %u: the last of its %llu bytes was never used\n",
                        plan_region_name(region), b, (unsigned long long)bytes);
            CHECK(at[bytes - 1] != 0);
        }
    }
    return 0;
}

static int body(threads_rank *rank)
{
    job *j = rank->context;
    tide_comm_info info = {.size = sizeof info};
    tide_topology topology = {sizeof topology, j->nodes, j->local};
    tide_bytes promise = TIDE_BYTES_INIT;
    tide_plan *plan;
    tide_comm *comm;
    tide_group *g[GROUPS];
    char all[64], here = 1;
    float *out;

    CHECK(small_comm(rank, j->local, &j->options, &comm) == TIDE_OK);
    CHECK(tide_plan_create(&topology, j->groups, GROUPS, &j->options, &plan) == TIDE_OK);
    CHECK(tide_plan_bytes(plan, rank->rank, &promise) == TIDE_OK);
    tide_plan_destroy(plan);
    CHECK(tide_groups_create(comm, j->groups, GROUPS, g) == TIDE_OK);
    CHECK(tide_comm_get_info(comm, &info) == TIDE_OK);
    CHECK(info.arena_bytes == tide_align_up(promise.total, comm->device->granularity));
    atomic_fetch_add(&j->promised, info.arena_bytes);
    CHECK(threads_allgather(rank, &here, all, 1) == 0);
    if (rank->rank == 0)
        j->mapped = mapped_arenas();
    CHECK(threads_allgather(rank, &here, all, 1) == 0);
    if (j->fill) {
        out = malloc((g[0]->plan->geo.elements + g[1]->plan->geo.elements) * sizeof *out);
        for (int i = 0; i < GROUPS; i++)
            CHECK(use(g[i], out) == 0);
        CHECK(tide_comm_sync(comm) == TIDE_OK);
        CHECK(threads_allgather(rank, &here, all, 1) == 0);
        CHECK(look_at_ends(g[0]->set, rank->rank % j->local) == 0);
        free(out);
    }
    CHECK(tide_comm_destroy(comm) == TIDE_OK);
    return 0;
}

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void draw(job *j, uint64_t seed)
{
    static const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16};
    uint64_t x = seed;

    *j = (job){.nodes = 1 + (uint32_t)(next(&x) % 4), .local = 1 + (uint32_t)(next(&x) % 4)};
    j->options = (tide_options)TIDE_OPTIONS_INIT;
    j->options.multicast = (int64_t)(next(&x) % 2);
    j->options.target = (int64_t)(next(&x) % 2);
    j->options.mode = j->options.multicast && !j->options.target ? 0 : (int64_t)(next(&x) % 2);
    j->options.n_stg = 1 + (int64_t)(next(&x) % 4);
    j->options.n_part = 1 + (int64_t)(next(&x) % 3);
    j->options.chunk = 16 << next(&x) % 8;
    j->options.ring_slots = 1 + (int64_t)(next(&x) % 3);
    for (int i = 0; i < GROUPS; i++) {
        tide_group_desc *g = &j->groups[i];
        *g = (tide_group_desc)TIDE_GROUP_DESC_INIT;
        g->n_params = 2;
        g->params = j->params[i];
        g->dtype = dtypes[next(&x) % 3];
        g->shard_dtype = next(&x) % 2 ? g->dtype : dtypes[next(&x) % 3];
        g->grad_dtype = next(&x) % 4 ? dtypes[next(&x) % 3] : TIDE_NONE;
        g->input = g->shard_dtype == g->dtype && next(&x) % 2 ? TIDE_INPUT_ADOPTED : TIDE_INPUT_ARGUMENT;
        g->landing = next(&x) % 3 ? TIDE_LANDING_RING : TIDE_LANDING_PRIVATE;
        for (int p = 0; p < 2; p++)
            j->params[i][p] = (tide_param){
                NULL, 2, 0, {(int64_t)(next(&x) % 300), (int64_t)(next(&x) % 200)}}; /* also without elements */
    }
}

static void test_promise_is_what_is_mapped(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 80; seed++) {
        job j;
        draw(&j, seed);
        assert_int_equal(threads_run(j.nodes * j.local, body, &j), 0);
        if (j.mapped != j.promised)
            print_error("seed %d: %lu bytes mapped, %lu promised\n", (int)seed, (unsigned long)j.mapped,
                        (unsigned long)j.promised);
        assert_int_equal(j.mapped, j.promised);
        assert_int_equal(mapped_arenas(), 0);
    }
}

/* Shapes whose sub-slices, parts and chunks come out even: then not an item of any bank is spare. */
static void test_every_bank_is_used_to_its_end(void **state)
{
    static const struct {
        uint32_t nodes, local, parts;
        int multicast;
    } cases[] = {{1, 1, 1, 0}, {1, 4, 1, 0}, {1, 3, 1, 1}, {2, 2, 1, 0}, {2, 2, 1, 1},
                 {4, 2, 1, 0}, {3, 1, 1, 0}, {4, 4, 2, 0}, {4, 2, 2, 1}};
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        job j = {.nodes = cases[c].nodes, .local = cases[c].local, .fill = true};
        int64_t n = j.nodes * j.local, rows = n * j.local * cases[c].parts;
        j.options = (tide_options)TIDE_OPTIONS_INIT;
        j.options.multicast = cases[c].multicast;
        j.options.n_part = cases[c].parts;
        j.options.chunk = 128;
        for (int i = 0; i < GROUPS; i++) {
            j.groups[i] = (tide_group_desc)TIDE_GROUP_DESC_INIT;
            j.groups[i].n_params = 2;
            j.groups[i].params = j.params[i];
            j.groups[i].input = i ? TIDE_INPUT_ARGUMENT : TIDE_INPUT_ADOPTED;
            j.groups[i].shard_dtype = i ? TIDE_F32 : TIDE_BF16;
            if (j.nodes > 1 && j.local == 1) /* blocks of gradients have room for the widest that a call may bring */
                j.groups[i].grad_dtype = TIDE_F32;
            j.params[i][0] = (tide_param){NULL, 2, 0, {rows, 512}};
            j.params[i][1] = (tide_param){NULL, 2, 0, {rows, 512}};
        }
        assert_int_equal(threads_run((uint32_t)n, body, &j), 0);
        assert_int_equal(j.mapped, j.promised);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_promise_is_what_is_mapped),
        cmocka_unit_test(test_every_bank_is_used_to_its_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
