/* The simulation against times worked out by hand, and properties that any machine and plan must keep. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "schedule/simulate.h"

/* Round numbers, so that times by hand are exact. */
static const plan_machine plain = {
    .name = "plain",
    .sms = 100,
    .hbm_rate = 1e15,
    .nvlink_rate = 1e9,
    .copy_rate = 1e15,
    .copy_descriptor = 0,
    .local_copy_rate = 1e15,
    .local_copy_descriptor = 0,
    .sum_cta_rate = 1e9,
    .sum_cta_rate_in_situ = 1e9,
    .land_cta_rate = 1e9,
    .land_rate_cap = 4e9,
    .nic_rate = 1e8,
    .nic_latency = 0,
    .round_wait = 1e-3,
    .device_op = 0,
    .signal_latency = 0,
    .host_op = 0,
    .host_item = 0,
    .pack_rate = 1e12,
    .ring_rate = 1e12,
    .ring_ctas = 16,
    .flops = 1e15,
};

typedef struct outcome { simulate_result r; double seconds; } outcome;

static tide_plan *plan_of(uint32_t nodes, uint32_t local, uint32_t n_params, int64_t each, const tide_options *options)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_param params[32];
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    tide_plan *plan;
    assert_true(n_params <= 32);
    t.nodes = nodes;
    t.local = local;
    for (uint32_t i = 0; i < n_params; i++)
        params[i] = (tide_param){"w", 1, 0, {each}};
    d.n_params = n_params;
    d.params = params;
    assert_int_equal(tide_plan_create(&t, &d, 1, options, &plan), TIDE_OK);
    return plan;
}

static outcome run(const tide_plan *plan, const plan_machine *m, int kind, bool every_rank, uint32_t rank)
{
    const simulate_step ag[] = {{SIMULATE_AG, 0}}, rs[] = {{SIMULATE_READ, 0}, {SIMULATE_NET, 0}};
    simulate_call call = {kind, 0};
    outcome out = {.seconds = 0};
    simulate_input in = {.plan = plan, .machine = m, .calls = &call, .n_calls = 1, .every_rank = every_rank,
                         .rank = rank};
    in.steps = kind == SCHEDULE_AG ? ag : rs;
    in.n_steps = kind == SCHEDULE_AG ? 1 : 2;
    out.r.call_seconds = &out.seconds;
    if (simulate_run(&in, &out.r, NULL) != TIDE_OK)
        fail_msg("%s", tide_last_error());
    return out;
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 + 1e-6 * fabs(b); }

/* ---- by hand ------------------------------------------------------------------------------------------------ */

static void all_gather_of_one_node_by_hand(void **state)
{
    tide_options unicast = TIDE_OPTIONS_INIT, multicast = TIDE_OPTIONS_INIT;
    tide_plan *plan;
    (void)state;
    /* 4 ranks, shards of 1 MB: three of them come in through a port of 1 GB/s; with multicast the own one too */
    unicast.multicast = 0;
    plan = plan_of(1, 4, 1, 4 * 500000, &unicast);
    assert_true(near(run(plan, &plain, SCHEDULE_AG, true, 0).seconds, 3e-3));
    tide_plan_destroy(plan);
    multicast.multicast = 1;
    plan = plan_of(1, 4, 1, 4 * 500000, &multicast);
    assert_true(near(run(plan, &plain, SCHEDULE_AG, true, 0).seconds, 4e-3));
    tide_plan_destroy(plan);
}

static void latencies_by_hand(void **state)
{
    tide_options options = TIDE_OPTIONS_INIT;
    plan_machine m = plain;
    tide_plan *plan;
    (void)state;
    options.multicast = 1;
    m.device_op = 1e-6;
    m.signal_latency = 10e-6;
    plan = plan_of(1, 2, 1, 2 * 500000, &options);
    /* SIGNAL free 1, its way 10, WAIT 1, COPY 1 + 2 MB through the port, SIGNAL done 1, its way 10, WAIT 1 */
    assert_true(near(run(plan, &m, SCHEDULE_AG, true, 0).seconds, 25e-6 + 2e-3));
    m.host_op = 100e-6; /* JOIN and SIGNAL free; JOIN, WAIT free, COPY; SIGNAL, WAIT done; RECORD: hides the rest */
    assert_true(near(run(plan, &m, SCHEDULE_AG, true, 0).seconds, 500e-6 + 1e-6 + 2e-3 + 12e-6));
    tide_plan_destroy(plan);
}

static void descriptors_hide_behind_bytes(void **state)
{
    plan_machine m = plain;
    tide_plan *plan = plan_of(1, 2, 30, 2 * 500, NULL); /* equal parameters merge into one strided copy ... */
    tide_param params[30];
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    double merged, apart;
    (void)state;
    m.copy_descriptor = m.local_copy_descriptor = 1e-3;
    merged = run(plan, &m, SCHEDULE_AG, true, 0).seconds;
    tide_plan_destroy(plan);
    for (int i = 0; i < 30; i++) /* ... unequal ones do not */
        params[i] = (tide_param){"w", 1, 0, {2 * (485 + i)}};
    t.local = 2;
    d.n_params = 30;
    d.params = params;
    assert_int_equal(tide_plan_create(&t, &d, 1, NULL, &plan), TIDE_OK);
    apart = run(plan, &m, SCHEDULE_AG, true, 0).seconds;
    assert_true(near(merged, 1e-3) && near(apart, 30e-3));
    m.copy_descriptor = m.local_copy_descriptor = 1e-9; /* less than the bytes need: 30 KB at 1 GB/s */
    assert_true(fabs(run(plan, &m, SCHEDULE_AG, true, 0).seconds - 30e-6) < 1e-6);
    tide_plan_destroy(plan);
}

static void all_gather_of_two_nodes_by_hand(void **state)
{
    tide_options options = TIDE_OPTIONS_INIT;
    plan_machine m = plain;
    tide_plan *plan;
    (void)state;
    options.multicast = 1;
    m.nic_latency = 1e-3;
    plan = plan_of(2, 2, 1, 4 * 500000, &options); /* 1 MB: 10 ms on the rail, one latency, 2 MB through the port */
    assert_true(near(run(plan, &m, SCHEDULE_AG, true, 0).seconds, 1e-3 /* credit */ + 10e-3 + 1e-3 + 2e-3));
    tide_plan_destroy(plan);
}

static void reduce_scatter_by_hand(void **state)
{
    tide_options options = TIDE_OPTIONS_INIT;
    plan_machine m = plain;
    tide_plan *plan;
    (void)state;
    options.c_sum = 2;
    options.chunk = 1 << 20;
    plan = plan_of(1, 2, 1, 2 * 500000, &options);
    /* 1 MB of bf16 to the peer at 1 GB/s; then two bf16 in, one fp32 out: 4 MB at 2 x 1 GB/s */
    assert_true(near(run(plan, &m, SCHEDULE_RS, true, 0).seconds, 1e-3 + 2e-3));
    options.chunk = 250000; /* two chunks: the second one's push hides behind the first one's sum */
    tide_plan_destroy(plan);
    plan = plan_of(1, 2, 1, 2 * 500000, &options);
    assert_true(near(run(plan, &m, SCHEDULE_RS, true, 0).seconds, 0.5e-3 + 2e-3));
    tide_plan_destroy(plan);
}

/* ---- properties --------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;
static double uniform(void) /* 0..1 */
{
    random_state = tide_fnv_u64(TIDE_FNV_BASIS, random_state);
    return (double)(random_state >> 11) / 9007199254740992.0;
}

static plan_machine random_machine(void)
{
    plan_machine m = plain;
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) {
        double *at = (double *)((char *)&m + plan_machine_keys[i].offset);
        *at = plan_machine_keys[i].unit == UNIT_FLAG    ? 1
              : plan_machine_keys[i].unit == UNIT_TIME  ? 20e-6 * uniform()
              : plan_machine_keys[i].unit == UNIT_COUNT ? 64 + floor(100 * uniform())
                                                        : 1e10 * exp(6 * uniform());
    }
    return m;
}

static tide_plan *random_plan(bool even)
{
    tide_options o = TIDE_OPTIONS_INIT;
    uint32_t nodes = 1 + (uint32_t)(5 * uniform()), local = 1 + (uint32_t)(4 * uniform());
    uint32_t params = 1 + (uint32_t)(5 * uniform());
    int64_t each = even ? (int64_t)(nodes * local * local * 64) * (1 + (int64_t)(30 * uniform()))
                        : 1 + (int64_t)(100000 * uniform());
    o.multicast = uniform() < 0.5;
    o.chunk = 4096 + (int64_t)(40000 * uniform());
    o.n_stg = 1 + (int64_t)(3 * uniform());
    o.head_bytes = 1024 + (int64_t)(100000 * uniform());
    o.n_part = 1 + (int64_t)(2 * uniform());
    o.w_wave = uniform() < 0.5 ? (local > 1 ? local : 3) : 1;
    o.k = 1 + (int64_t)(3 * uniform());
    o.mode = uniform() < 0.3;
    return plan_of(nodes, local, params, each, &o);
}

static void no_faster_than_any_resource(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++) {
        tide_plan *plan = random_plan(false);
        plan_machine m = random_machine();
        for (int kind = SCHEDULE_AG; kind <= SCHEDULE_RS; kind++) {
            outcome all = run(plan, &m, kind, true, 0), one = run(plan, &m, kind, false, 0);
            assert_true(all.r.seconds >= all.r.bound * (1 - 1e-6));
            assert_true(one.r.seconds >= one.r.bound * (1 - 1e-6));
            assert_true(all.seconds <= all.r.seconds + 1e-12);
            for (int k = 0; k < SIMULATE_RESOURCE_COUNT; k++)
                assert_true(all.r.resource[k].busy >= 0 && all.r.resource[k].busy <= 1 + 1e-6);
        }
        tide_plan_destroy(plan);
    }
}

static void same_input_same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++) {
        tide_plan *plan = random_plan(false);
        plan_machine m = random_machine();
        for (int kind = SCHEDULE_AG; kind <= SCHEDULE_RS; kind++) {
            outcome a = run(plan, &m, kind, true, 0), b = run(plan, &m, kind, true, 0);
            a.r.call_seconds = b.r.call_seconds = NULL;
            assert_memory_equal(&a.r, &b.r, sizeof a.r);
            assert_true(a.seconds == b.seconds);
        }
        tide_plan_destroy(plan);
    }
}

/* Where all ranks have alike lists (even sizes, one wrap of the ring only), the time is that of all of them. */
static void one_rank_stands_for_all(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++) {
        tide_plan *plan = random_plan(true);
        plan_machine m = random_machine();
        for (int kind = SCHEDULE_AG; kind <= SCHEDULE_RS; kind++) {
            double all, one;
            if (kind == SCHEDULE_AG && plan->topology.nodes > 2)
                continue;
            all = run(plan, &m, kind, true, 0).seconds;
            one = run(plan, &m, kind, false, (uint32_t)i % (plan->topology.nodes * plan->topology.local)).seconds;
            if (fabs(all - one) > 1e-9 + 1e-6 * all)
                fail_msg("plan %d, %u x %u, kind %d: all ranks %.9f, one %.9f", i, plan->topology.nodes,
                         plan->topology.local, kind, all, one);
        }
        tide_plan_destroy(plan);
    }
}

/* One rank, or two where nothing meets: a faster machine is never slower. */
static void faster_is_never_slower(void **state)
{
    (void)state;
    for (int i = 0; i < 100; i++) {
        tide_options o = TIDE_OPTIONS_INIT;
        plan_machine m = random_machine();
        tide_plan *plan;
        m.hbm_rate = 1e18; /* shared by everything */
        o.chunk = 1 << 20;
        plan = plan_of(1, 2, 3, 2 * (1 + (int64_t)(100000 * uniform())), &o);
        for (int kind = SCHEDULE_AG; kind <= SCHEDULE_RS; kind++) {
            double before = run(plan, &m, kind, true, 0).seconds;
            for (uint32_t k = 0; k < plan_machine_n_keys; k++) {
                plan_machine faster = m;
                double *at = (double *)((char *)&faster + plan_machine_keys[k].offset);
                *at = plan_machine_keys[k].unit == UNIT_TIME ? *at / 2 : *at * 2;
                if (run(plan, &faster, kind, true, 0).seconds > before + 1e-11)
                    fail_msg("machine %d: %s %g instead of %g is slower", i, plan_machine_keys[k].name, *at,
                             plan_machine_get(&m, k));
            }
        }
        tide_plan_destroy(plan);
    }
}

static void digest_is_that_of_the_lists(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        tide_plan *plan = random_plan(false);
        plan_machine m = random_machine();
        for (int kind = SCHEDULE_AG; kind <= SCHEDULE_RS; kind++) {
            outcome out = run(plan, &m, kind, true, 0);
            uint64_t lists = TIDE_FNV_BASIS, ops = 0;
            for (uint32_t r = 0; r < plan->topology.nodes * plan->topology.local; r++) {
                schedule s;
                assert_int_equal(schedule_build_call(plan, 0, r, kind, &s), TIDE_OK);
                lists = tide_fnv_u64(lists, schedule_digest(&s));
                ops += s.n_ops;
                schedule_clear(&s);
            }
            assert_true(out.r.digest == tide_fnv_u64(TIDE_FNV_BASIS, lists));
            assert_true(out.r.ops == ops); /* every operation was executed, none twice */
        }
        tide_plan_destroy(plan);
    }
}

static int count_bytes(void *bytes, const char *text, size_t n)
{
    (void)text;
    *(uint64_t *)bytes += n;
    return 0;
}

static void memory_runs_out_anywhere(void **state)
{
    tide_plan *plan = plan_of(2, 2, 3, 4096, NULL);
    const simulate_step steps[] = {{SIMULATE_AG, 0}, {SIMULATE_TASK, 0}, {SIMULATE_RELEASE, 0}, {SIMULATE_READ, 1}, {SIMULATE_NET, 1}};
    const simulate_call calls[] = {{SCHEDULE_AG, 0}, {SCHEDULE_RS, 0}};
    const simulate_task task = {.label = "backward", .after = {{AFTER_READY, 0}}, .seconds = 1};
    const simulate_gradients gradients = {8192, 0, {AFTER_READ_DONE, 1}};
    simulate_input in = {.plan = plan, .machine = &plain, .calls = calls, .n_calls = 2, .steps = steps, .n_steps = 5,
                         .tasks = &task, .n_tasks = 1, .gradients = &gradients, .n_gradients = 1, .every_rank = true};
    uint64_t live = tide_alloc_live();
    int status = TIDE_ERR_MEMORY;
    (void)state;
    for (uint64_t n = 1; status != TIDE_OK; n++) {
        double seconds[2];
        simulate_result r = {.call_seconds = seconds};
        uint64_t bytes = 0;
        tide_text trace = {count_bytes, &bytes, TIDE_OK};
        tide_alloc_fail_at(n);
        status = simulate_run(&in, &r, &trace);
        tide_alloc_fail_at(0);
        assert_true(status == TIDE_OK || status == TIDE_ERR_MEMORY);
        assert_true(tide_alloc_live() == live);
        assert_true(n < 100000);
    }
    tide_plan_destroy(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_gather_of_one_node_by_hand),
        cmocka_unit_test(latencies_by_hand),
        cmocka_unit_test(descriptors_hide_behind_bytes),
        cmocka_unit_test(all_gather_of_two_nodes_by_hand),
        cmocka_unit_test(reduce_scatter_by_hand),
        cmocka_unit_test(no_faster_than_any_resource),
        cmocka_unit_test(same_input_same_bits),
        cmocka_unit_test(one_rank_stands_for_all),
        cmocka_unit_test(faster_is_never_slower),
        cmocka_unit_test(digest_is_that_of_the_lists),
        cmocka_unit_test(memory_runs_out_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
