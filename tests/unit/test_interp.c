/* The interpreter of op lists on hand-written lists: sums, parities, fragments, and every rule that it must hold a list
 * to. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/interp.h"

enum { N = 4, ELEMENTS = 8 }; /* two nodes of two ranks; gradients of 8 elements */

static tide_plan *plan;
static schedule lists[N];
static interp *t;
static float grads[N][ELEMENTS], outs[N][ELEMENTS];

static int open_plan(void **state)
{
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    const tide_param p = {"w", 1, 0, {64}};
    (void)state;
    topology.nodes = topology.local = 2;
    d.n_params = 1;
    d.params = &p;
    o.multicast = 1;
    return tide_plan_create(&topology, &d, 1, &o, &plan);
}

static int close_plan(void **state)
{
    (void)state;
    tide_plan_destroy(plan);
    return 0;
}

static int open_lists(void **state)
{
    (void)state;
    for (uint32_t r = 0; r < N; r++) {
        memset(&lists[r], 0, sizeof lists[r]);
        lists[r].kind = SCHEDULE_RS;
        lists[r].rank = r;
        lists[r].n_args = 2;
        lists[r].tag = 7;
    }
    t = interp_create(plan, 1);
    return 0;
}

static int close_lists(void **state)
{
    (void)state;
    interp_destroy(t);
    for (uint32_t r = 0; r < N; r++)
        schedule_clear(&lists[r]);
    return 0;
}

static op *append(uint32_t r, int kind, int stream, int scope)
{
    op *o = schedule_op(&lists[r], kind, stream, PHASE_RS_SUM);
    o->scope = (uint8_t)scope;
    return o;
}

static op_addr at(int region, uint32_t bank, int32_t who, uint64_t offset)
{
    return (op_addr){SPACE_REGION, (uint8_t)region, (uint16_t)bank, who, offset};
}

static op_addr arg(int32_t index)
{
    return (op_addr){SPACE_ARG, 0, 0, index, 0};
}

static int enqueue(uint32_t r, int part, float alpha, int accumulate)
{
    void *pointers[] = {grads[r], outs[r]};
    interp_args args = {pointers, alpha, accumulate};
    return interp_enqueue(t, &lists[r], part, &args);
}

static void runs_through(void)
{
    if (interp_run(t) != 0)
        fail_msg("%s", interp_error(t));
}

static void fails_with(const char *text)
{
    assert_int_not_equal(interp_run(t), 0);
    if (!strstr(interp_error(t), text))
        fail_msg("expected '%s' in '%s'", text, interp_error(t));
}

/* READ: gradient to the outbox bank of the call. NET: swap it with the other node, add both of this node's ranks. */
static void exchange_and_add(uint32_t r)
{
    const uint32_t node = r / 2, peer = r ^ 2;
    op *o;
    append(r, OP_JOIN, STREAM_RS_SUM, SCOPE_EXTERN)->event = EVENT_IN;
    append(r, OP_COPY, STREAM_RS_SUM, 0);
    schedule_run(&lists[r], &(op_run){arg(0), at(REGION_OUTBOX, BANK_CALL, (int32_t)r, 0), 4 * ELEMENTS, 1, 0, 0});
    o = append(r, OP_RECORD, STREAM_RS_SUM, SCOPE_CALL);
    o = append(r, OP_RECORD, STREAM_RS_SUM, SCOPE_EXTERN);
    o->event = EVENT_READ_DONE;
    lists[r].n_call_events = 2;
    lists[r].n_read = lists[r].n_ops;
    append(r, OP_JOIN, STREAM_RS_NET, SCOPE_CALL);
    o = append(r, OP_JOIN, STREAM_RS_NET, SCOPE_RESOURCE);
    o->event = EVENT_LANDED;
    append(r, OP_SIGNAL, STREAM_RS_NET, SCOPE_RAIL);
    schedule_post(&lists[r], (int32_t)peer, 0, SIG_CREDIT, 1);
    append(r, OP_WAIT, STREAM_RS_NET, SCOPE_RAIL);
    schedule_post(&lists[r], (int32_t)peer, 0, SIG_CREDIT, 1);
    append(r, OP_PUT, STREAM_RS_NET, SCOPE_RAIL);
    schedule_put(&lists[r], &(op_put){(int32_t)peer, 1, SIG_HEAD, at(REGION_OUTBOX, BANK_CALL, (int32_t)r, 0),
                                      at(REGION_INBOX, 0, (int32_t)peer, 0), 4 * ELEMENTS});
    append(r, OP_WAIT, STREAM_RS_NET, SCOPE_RAIL);
    schedule_post(&lists[r], (int32_t)peer, 1, SIG_HEAD, 1);
    o = append(r, OP_RECORD, STREAM_RS_NET, SCOPE_CALL);
    o->event = 1;
    o = append(r, OP_JOIN, STREAM_RS_LAND, SCOPE_CALL);
    o->event = 1;
    for (int which = WORD_A; which <= WORD_B; which++) {
        if (which == WORD_B) {
            o = append(r, OP_REDUCE, STREAM_RS_LAND, 0);
            o->flags = OP_FINAL | OP_BETA_CALL;
            schedule_segment(
                &lists[r],
                &(op_segment){arg(1), 0, ELEMENTS, 1, 1, {{at(REGION_INBOX, 0, WHO_NODE, 0), 0, 0, 2, 1, TIDE_F32}}});
        }
        for (int kind = OP_SIGNAL; kind <= OP_WAIT; kind++) {
            o = append(r, kind, STREAM_RS_LAND, SCOPE_LOCAL);
            o->resource = RESOURCE_INBOX;
            o->which = (uint8_t)which;
            o->delta = 1;
            schedule_post(&lists[r], (int32_t)(2 * node), 0, 0, 0);
            schedule_post(&lists[r], (int32_t)(2 * node + 1), 0, 0, 0);
        }
    }
    o = append(r, OP_RECORD, STREAM_RS_LAND, SCOPE_RESOURCE);
    o->event = EVENT_LANDED;
    o = append(r, OP_RECORD, STREAM_RS_LAND, SCOPE_EXTERN);
    o->event = EVENT_DONE;
    schedule_set_step(&lists[r], RESOURCE_INBOX, 1);
}

static float given(uint32_t call, uint32_t r, uint32_t x)
{
    return (float)(call * 1000 + r * 100 + x);
}

static uint32_t calls_seen[N];

static int check_call(void *context, uint32_t r) /* after DONE: the other node's two gradients, scaled, on top if odd */
{
    uint32_t call = calls_seen[r]++;
    (void)context;
    for (uint32_t x = 0; x < ELEMENTS; x++) {
        uint32_t other = (r / 2 ^ 1) * 2;
        float sum = 2 * (given(call, other, x) + given(call, other + 1, x));
        if (outs[r][x] != (call % 2 ? 0.5f + sum : sum))
            return interp_fail(t, "call %u rank %u element %u: %g", call, r, x, (double)outs[r][x]);
    }
    return 0;
}

static int next_call(void *context, uint32_t r) /* new gradients, and what an accumulating call adds to */
{
    uint32_t call = calls_seen[r];
    (void)context;
    for (uint32_t x = 0; x < ELEMENTS; x++) {
        grads[r][x] = given(call, r, x);
        outs[r][x] = 0.5f;
    }
    return 0;
}

static void fragments_parities_and_sums(void **state)
{
    (void)state;
    for (uint32_t r = 0; r < N; r++)
        exchange_and_add(r);
    memset(calls_seen, 0, sizeof calls_seen);
    for (uint32_t call = 0; call < 5; call++)
        for (uint32_t r = 0; r < N; r++) {
            interp_consume(t, r, -1, 0, next_call, NULL);
            enqueue(r, call == 4 ? INTERP_ALL : INTERP_READ, 2, call % 2);
            if (call != 4)
                enqueue(r, INTERP_NET, 0, 0); /* its arguments are the READ's */
            interp_consume(t, r, EVENT_DONE, 0, check_call, NULL);
            interp_steps(t, 3);
        }
    runs_through();
    for (uint32_t r = 0; r < N; r++)
        assert_int_equal(calls_seen[r], 5);
    /* both banks of the outbox were used, by call parity */
    assert_memory_equal(interp_memory(t, REGION_OUTBOX, 0, 1), grads[1], sizeof grads[1]);
    assert_true(*(float *)(void *)interp_memory(t, REGION_OUTBOX, 1, 1) == given(3, 1, 0));
}

static void casts_zeros_and_shared_landings(void **state)
{
    static const float values[] = {1.5f, -2, 1.0009765625f /* rounds */, 1e30f};
    op *o;
    (void)state;
    memcpy(grads[0], values, sizeof values);
    o = append(0, OP_COPY, STREAM_RS_SUM, 0);
    o->src_dtype = TIDE_F32;
    o->dst_dtype = TIDE_BF16;
    schedule_run(&lists[0], &(op_run){arg(0), at(REGION_LANDING, 0, WHO_NODE, 0), 2, 2, 8, 16});
    append(0, OP_COPY, STREAM_RS_SUM, 0);
    schedule_run(&lists[0], &(op_run){{SPACE_ZERO, 0, 0, 0, 0}, at(REGION_LANDING, 0, 1, 4), 8, 1, 0, 0});
    lists[0].n_read = lists[0].n_ops;
    enqueue(0, INTERP_STASH, 1, 0);
    runs_through();
    const uint16_t expected[] = {0x3fc0, 0xc000, 0, 0, 0, 0, 0xffff, 0xffff, 0x3f80, 0x714a};
    for (uint32_t r = 0; r < 2; r++)
        assert_memory_equal(interp_memory(t, REGION_LANDING, 0, r), expected, sizeof expected);
    assert_int_equal(interp_memory(t, REGION_LANDING, 0, 2)[0], 0xff); /* the other node's */
}

static void sources_are_added_in_order(void **state)
{
    const float big = 16777216.0f; /* 2^24: big + 1 + 1 differs from big + 2 */
    op *o;
    (void)state;
    grads[0][0] = 1;
    grads[0][1] = 1;
    grads[0][2] = big;
    for (int first = 0; first < 2; first++) {
        const op_sources ones = {arg(0), 0, 4, 2, 0, TIDE_F32},
                         one_big = {{SPACE_ARG, 0, 0, 0, 8}, 0, 0, 1, 0, TIDE_F32};
        op_segment g = {arg(1), 0, 1, 1, 2, {first ? one_big : ones, first ? ones : one_big}};
        g.dst.offset = 4 * (uint64_t)first;
        o = append(0, OP_REDUCE, STREAM_RS_SUM, 0);
        o->flags = 0;
        schedule_segment(&lists[0], &g);
    }
    o = append(0, OP_REDUCE, STREAM_RS_SUM, 0);
    o->flags = OP_FINAL | OP_BETA_ONE;
    schedule_segment(&lists[0], &(op_segment){.dst = {SPACE_ARG, 0, 0, 1, 8}, .elems = 1, .rows = 1});
    outs[0][2] = 3;
    lists[0].n_read = lists[0].n_ops;
    enqueue(0, INTERP_READ, 1, 0);
    runs_through();
    assert_true(outs[0][0] == big + 2);
    assert_true(outs[0][1] == big); /* each 1 is lost on its own */
    assert_true(outs[0][2] == 3);
}

/* ---- rules ---------------------------------------------------------------------------------- */

static void one_run(op_addr src, op_addr dst, uint64_t bytes, const char *text)
{
    append(0, OP_COPY, STREAM_RS_SUM, 0);
    schedule_run(&lists[0], &(op_run){src, dst, bytes, 1, bytes, bytes});
    lists[0].n_read = lists[0].n_ops;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with(text);
}

static void bounds(void **state)
{
    uint64_t size = plan->map.region[REGION_INBOX].banks[0].bytes;
    (void)state;
    one_run(arg(0), at(REGION_INBOX, 0, 0, size - 4), 8, "of region inbox bank 0, which has");
}
static void bank_out_of_range(void **state)
{
    (void)state;
    one_run(arg(0), at(REGION_INBOX, 9, 0, 0), 8, "address in no region or bank");
}
static void argument_out_of_range(void **state)
{
    (void)state;
    one_run(arg(2), at(REGION_INBOX, 0, 0, 0), 8, "argument that the call does not have");
}
static void other_node(void **state)
{
    (void)state;
    one_run(arg(0), at(REGION_INBOX, 0, 2, 0), 8, "address on a rank that this op may not touch");
}
static void pull(void **state)
{
    (void)state;
    one_run(at(REGION_INBOX, 0, 1, 0), at(REGION_INBOX, 0, 0, 0), 8, "address on a rank that this op may not touch");
}

static void call_event_too_late(void **state)
{
    (void)state;
    lists[0].n_call_events = 1;
    append(0, OP_JOIN, STREAM_RS_LAND, SCOPE_CALL);
    append(0, OP_RECORD, STREAM_RS_SUM, SCOPE_CALL);
    lists[0].n_read = 2;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with("joins a call event that is not recorded yet");
}

static void rail_on_two_streams(void **state)
{
    (void)state;
    append(0, OP_SIGNAL, STREAM_RS_LAND, SCOPE_RAIL);
    schedule_post(&lists[0], 2, 0, SIG_CREDIT, 1);
    lists[0].n_read = 1;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with("a rail op outside the lane's one rail stream");
}

static void rail_to_another_rail(void **state)
{
    (void)state;
    append(0, OP_SIGNAL, STREAM_RS_NET, SCOPE_RAIL);
    schedule_post(&lists[0], 3, 0, SIG_CREDIT, 1);
    lists[0].n_read = 1;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with("a peer that is not on this rail");
}

static void signal_that_nobody_takes(void **state)
{
    (void)state;
    append(0, OP_SIGNAL, STREAM_RS_NET, SCOPE_RAIL);
    schedule_post(&lists[0], 2, 0, SIG_GO, 1);
    lists[0].n_read = 1;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with("rank 2: 1 rail signals from node 0 (lane 1, ctx 0, sig 3) were never waited for");
}

static void falling_counter(void **state)
{
    (void)state;
    for (uint64_t delta = 2; delta > 0; delta--) {
        append(0, OP_SIGNAL, STREAM_RS_SUM, SCOPE_LOCAL)->delta = delta;
        schedule_post(&lists[0], 1, 0, 0, 0);
    }
    lists[0].n_read = 2;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with("a counter would fall");
}

static void deadlock_names_who_waits(void **state)
{
    (void)state;
    append(0, OP_WAIT, STREAM_RS_SUM, SCOPE_LOCAL)->delta = 3;
    schedule_post(&lists[0], 1, 0, 0, 0);
    append(0, OP_WAIT, STREAM_RS_NET, SCOPE_RAIL);
    schedule_post(&lists[0], 2, 1, SIG_HEAD, 2);
    lists[0].n_read = 2;
    enqueue(0, INTERP_READ, 1, 0);
    fails_with("deadlock: 2 streams are blocked for good:\n"
               "  rank 0 rs.sum op 0 WAIT (reduce_scatter sum, group 0) [1 resource 0.0: 0 of 3]\n"
               "  rank 0 rs.net op 1 WAIT (reduce_scatter sum, group 0) [2 ctx 1 sig 0: 0 of 2]");
    assert_int_not_equal(enqueue(1, INTERP_READ, 1, 0), 0); /* failed for good */
}

static void net_without_read(void **state)
{
    (void)state;
    assert_int_not_equal(enqueue(0, INTERP_NET, 1, 0), 0);
    assert_string_equal(interp_error(t), "rank 0: NET without its READ");
}

int main(void)
{
#define CASE(f) cmocka_unit_test_setup_teardown(f, open_lists, close_lists)
    const struct CMUnitTest tests[] = {
        CASE(fragments_parities_and_sums),
        CASE(casts_zeros_and_shared_landings),
        CASE(sources_are_added_in_order),
        CASE(bounds),
        CASE(bank_out_of_range),
        CASE(argument_out_of_range),
        CASE(other_node),
        CASE(pull),
        CASE(call_event_too_late),
        CASE(rail_on_two_streams),
        CASE(rail_to_another_rail),
        CASE(signal_that_nobody_takes),
        CASE(falling_counter),
        CASE(deadlock_names_who_waits),
        CASE(net_without_read),
    };
    return cmocka_run_group_tests(tests, open_plan, close_plan);
}
