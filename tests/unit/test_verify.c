/*
 * verify on small op lists written by hand, each broken in one way, and on random plans over every knob.
 *
 * usage: test_verify [PLANS [SEED]]   random plans (default 2000) from a seed (default 1); a failing plan's seed is
 * printed
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/dice.h"
#include "../harness/sanitized.h"
#include "schedule/proof.h"

static uint32_t n_plans = SANITIZED ? 200 : 2000;
static uint64_t first_seed = 1;

/* ---- op lists by hand: each rank passes BYTES to its neighbour's landing ------------------------------------- */

enum { BYTES = 64, MAX_RANKS = 2 };

typedef struct world {
    uint32_t nodes, local;
    plan_bank landing[1], staging[1], none[2];
    plan_map map;
    schedule s[MAX_RANKS];
    const schedule *lists[MAX_RANKS];
    uint64_t input_bytes[1], input_offset[1];
    verify_span spans[MAX_RANKS];
    verify_contract contract;
    verify_call calls[3];
    verify_step steps[12];
    uint32_t n_calls, n_steps;
    char text[4096];
    size_t length;
} world;

static int keep(void *context, const char *text, size_t bytes)
{
    world *w = context;
    if (w->length + bytes < sizeof w->text) {
        memcpy(w->text + w->length, text, bytes);
        w->length += bytes;
        w->text[w->length] = '\0';
    }
    return 0;
}

static void open_world(world *w, uint32_t nodes, uint32_t local)
{
    memset(w, 0, sizeof *w);
    w->nodes = nodes;
    w->local = local;
    w->landing[0].bytes = BYTES * nodes * local;
    w->staging[0].bytes = BYTES;
    for (int r = 0; r < REGION_COUNT; r++) {
        w->map.region[r].n_banks = r == REGION_OUTBOX || r == REGION_SPARE ? 2 : 1;
        w->map.region[r].banks = w->none;
    }
    w->map.region[REGION_LANDING].banks = w->landing;
    w->map.region[REGION_STAGE].banks = w->staging;
    w->input_bytes[0] = BYTES;
    for (uint32_t r = 0; r < nodes * local; r++) {
        w->spans[r] = (verify_span){.at = r * BYTES, .width = BYTES, .rows = 1, .source = r};
        w->s[r].kind = SCHEDULE_AG;
        w->s[r].tag = 7;
        w->lists[r] = &w->s[r];
    }
    w->contract = (verify_contract){.kind = VERIFY_AG,
                                    .in_dtype = TIDE_BF16,
                                    .in_item = 2,
                                    .out_dtype = TIDE_BF16,
                                    .out_item = 2,
                                    .packed = BYTES,
                                    .n_inputs = 1,
                                    .input_bytes = w->input_bytes,
                                    .input_offset = w->input_offset,
                                    .spans = w->spans,
                                    .n_spans = nodes * local};
}

static op *put_op(world *w, uint32_t rank, int kind, int stream, int scope, uint32_t event)
{
    op *o = schedule_op(&w->s[rank], kind, stream, PHASE_AG_PUSH);
    assert_non_null(o);
    o->scope = (uint8_t)scope;
    o->event = (uint16_t)event;
    return o;
}

static void local_post(world *w, uint32_t rank, int kind, int stream, int which)
{
    op *o = put_op(w, rank, kind, stream, SCOPE_LOCAL, 0);
    o->which = (uint8_t)which;
    o->resource = RESOURCE_SLOT0;
    o->delta = 1;
    for (uint32_t i = 0; i < w->local; i++)
        assert_int_equal(schedule_post(&w->s[rank], (int32_t)(rank / w->local * w->local + i), 0, 0, 0), TIDE_OK);
}

static op_addr landing(uint32_t rank, uint64_t offset)
{
    return (op_addr){SPACE_REGION, REGION_LANDING, 0, (int32_t)rank, offset};
}

static void copy(world *w, uint32_t rank, int stream, op_addr src, op_addr dst)
{
    put_op(w, rank, OP_COPY, stream, 0, 0);
    assert_int_equal(schedule_run(&w->s[rank], &(op_run){src, dst, BYTES, 1, BYTES, BYTES}), TIDE_OK);
}

static const op_addr shard = {.space = SPACE_ARG};

/* An all-gather of one node; `call` twice or more, each released. */
static void one_node(world *w, uint32_t calls)
{
    open_world(w, 1, 2);
    for (uint32_t r = 0; r < 2; r++) {
        put_op(w, r, OP_JOIN, STREAM_AG_READY, SCOPE_EXTERN, EVENT_FREE);  /* 0 */
        local_post(w, r, OP_SIGNAL, STREAM_AG_READY, WORD_A);              /* 1 */
        put_op(w, r, OP_JOIN, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_IN);     /* 2 */
        local_post(w, r, OP_WAIT, STREAM_AG_CALL, WORD_A);                 /* 3 */
        w->s[r].ops[3].flags = OP_CHECK_TAG;
        for (uint32_t to = 0; to < 2; to++)
            copy(w, r, STREAM_AG_CALL, shard, landing(to, r * BYTES));     /* 4, 5 */
        local_post(w, r, OP_SIGNAL, STREAM_AG_CALL, WORD_B);               /* 6 */
        local_post(w, r, OP_WAIT, STREAM_AG_DONE, WORD_B);                 /* 7 */
        put_op(w, r, OP_RECORD, STREAM_AG_DONE, SCOPE_EXTERN, EVENT_READY); /* 8 */
        assert_int_equal(schedule_set_step(&w->s[r], RESOURCE_SLOT0, 1), TIDE_OK);
    }
    for (uint32_t i = 0; i < calls; i++) {
        w->calls[i] = (verify_call){w->lists, NULL, &w->contract, i};
        w->steps[w->n_steps++] = (verify_step){i, VERIFY_PART_AG, -1};
        w->steps[w->n_steps++] = (verify_step){i, VERIFY_PART_RELEASE, -1};
    }
    w->n_calls = calls;
}

static void put(world *w, uint32_t rank, op_addr src, op_addr dst, uint16_t sig)
{
    put_op(w, rank, OP_PUT, STREAM_AG_CALL, SCOPE_RAIL, 0);
    assert_int_equal(schedule_put(&w->s[rank], &(op_put){(int32_t)(1 - rank), 0, sig, src, dst, BYTES}), TIDE_OK);
}

static void rail(world *w, uint32_t rank, int kind, int stream, uint16_t sig)
{
    put_op(w, rank, kind, stream, SCOPE_RAIL, 0);
    assert_int_equal(schedule_post(&w->s[rank], (int32_t)(1 - rank), 0, sig, 1), TIDE_OK);
}

/* Two nodes of one rank: shards go into the own landing and from there to the other's, once the other is free. */
static void two_nodes(world *w, uint32_t calls)
{
    open_world(w, 2, 1);
    for (uint32_t r = 0; r < 2; r++) {
        put_op(w, r, OP_JOIN, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_FREE);  /* 0 */
        rail(w, r, OP_SIGNAL, STREAM_AG_CALL, SIG_CREDIT);                /* 1 */
        put_op(w, r, OP_JOIN, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_IN);    /* 2 */
        copy(w, r, STREAM_AG_CALL, shard, landing(r, r * BYTES));         /* 3 */
        rail(w, r, OP_WAIT, STREAM_AG_CALL, SIG_CREDIT);                  /* 4 */
        put(w, r, landing(r, r * BYTES), landing(1 - r, r * BYTES), SIG_HEAD); /* 5 */
        rail(w, r, OP_WAIT, STREAM_AG_CALL, SIG_HEAD);                    /* 6 */
        put_op(w, r, OP_RECORD, STREAM_AG_CALL, SCOPE_EXTERN, EVENT_READY); /* 7 */
    }
    for (uint32_t i = 0; i < calls; i++) {
        w->calls[i] = (verify_call){w->lists, NULL, &w->contract, i};
        w->steps[w->n_steps++] = (verify_step){i, VERIFY_PART_AG, -1};
        w->steps[w->n_steps++] = (verify_step){i, VERIFY_PART_RELEASE, -1};
    }
    w->n_calls = calls;
}

static void remove_op(world *w, uint32_t rank, uint32_t index)
{
    schedule *s = &w->s[rank];
    memmove(s->ops + index, s->ops + index + 1, (s->n_ops - index - 1) * sizeof *s->ops);
    s->n_ops--;
}

static void swap_ops(world *w, uint32_t rank, uint32_t a, uint32_t b)
{
    op t = w->s[rank].ops[a];
    w->s[rank].ops[a] = w->s[rank].ops[b];
    w->s[rank].ops[b] = t;
}

static verify_result judge(world *w)
{
    verify_input in = {.nodes = w->nodes,
                       .local = w->local,
                       .n_ctx = 1,
                       .n_slots = 1,
                       .map = &w->map,
                       .calls = w->calls,
                       .n_calls = w->n_calls,
                       .steps = w->steps,
                       .n_steps = w->n_steps};
    tide_text text = {keep, w, TIDE_OK};
    verify_options options = {.out = &text, .lines = 8};
    verify_result r;
    for (uint32_t i = 0; i < w->nodes * w->local; i++)
        w->s[i].n_read = w->s[i].n_ops;
    if (verify_run(&in, &options, &r) != TIDE_OK)
        fail_msg("%s", tide_last_error());
    for (uint32_t i = 0; i < w->nodes * w->local; i++)
        schedule_clear(&w->s[i]);
    return r;
}

static void expect_clean(world *w)
{
    verify_result r = judge(w);
    if (r.violations)
        fail_msg("%s", w->text);
    assert_int_equal(r.calls, w->n_calls);
}

/* At least one violation of this class, in which a line says `what`. */
static void expect(world *w, int class, const char *what)
{
    verify_result r = judge(w);
    if (!r.by_class[class] || !strstr(w->text, what))
        fail_msg("expected %s: \"%s\", got %llu violations: %s", verify_class_name(class), what,
                 (unsigned long long)r.violations, w->text);
}

static void a_correct_call_is_clean(void **state)
{
    world w;
    (void)state;
    one_node(&w, 3);
    expect_clean(&w);
    two_nodes(&w, 3);
    expect_clean(&w);
}

static void missing_edges_are_races(void **state)
{
    world w;
    (void)state;
    one_node(&w, 2); /* nobody waits until the landing is free */
    remove_op(&w, 1, 3);
    expect(&w, VERIFY_RACE,
           "rank 1 call 1 (all_gather of group 0) op 3 COPY on ag.call writes [64, 128) of landing[0] of rank 0, "
           "which rank 0 call 0: the caller's use of the landing reads");
    one_node(&w, 2); /* free is said before the caller is done */
    remove_op(&w, 0, 0);
    expect(&w, VERIFY_RACE, "the caller's use of the landing reads; missing: an edge from the latter to the former");
    one_node(&w, 1); /* reads the shard before the caller has written it */
    remove_op(&w, 0, 2);
    expect(&w, VERIFY_RACE, "reads [0, 64) of an input");
    one_node(&w, 1); /* READY before the peers are done */
    remove_op(&w, 0, 7);
    expect(&w, VERIFY_RACE, "the caller's use of the landing reads [64, 128) of landing[0] of rank 0, which rank 1");
    one_node(&w, 1); /* done is said before the copies */
    swap_ops(&w, 1, 5, 6);
    expect(&w, VERIFY_RACE, "which rank 1 call 0 (all_gather of group 0) op 6 COPY on ag.call writes");
    two_nodes(&w, 1); /* a put's bytes are there when its signal is, not before */
    swap_ops(&w, 0, 6, 7);
    expect(&w, VERIFY_RACE, "op 5 PUT on ag.call (its bytes) writes");
    two_nodes(&w, 2); /* no credit */
    swap_ops(&w, 0, 4, 5);
    expect(&w, VERIFY_RACE, "op 4 PUT on ag.call writes");
}

static void waits_without_producer_are_stuck(void **state)
{
    world w;
    (void)state;
    one_node(&w, 1);
    remove_op(&w, 1, 6);
    expect(&w, VERIFY_STUCK, "rank 0 call 0 (all_gather of group 0) op 7 WAIT on ag.done waits for rank 1 to post 1");
    one_node(&w, 2); /* a rank leaves a call out */
    w.steps[0].without = 1;
    w.steps[1].without = 1;
    expect(&w, VERIFY_STUCK, "waits for rank 1 to post 1");
    two_nodes(&w, 1);
    remove_op(&w, 0, 5);
    expect(&w, VERIFY_STUCK,
           "rank 1 call 0 (all_gather of group 0) op 6 WAIT on ag.call waits for 1 signals 0 of rank 0");
    two_nodes(&w, 1); /* both wait for the other's put before their own */
    swap_ops(&w, 0, 5, 6);
    swap_ops(&w, 1, 5, 6);
    expect(&w, VERIFY_STUCK, "WAIT on ag.call");
    two_nodes(&w, 2); /* the producer would come with the next call: too late for a caller who waits for this one */
    w.s[0].posts[w.s[0].ops[6].first].count = 2;
    expect(&w, VERIFY_STUCK, "waits for 2 signals 0");
}

/* A communicator is one queue: a wait on one stream blocks a put that is enqueued later on another. */
static void lanes_block(void **state)
{
    world w;
    (void)state;
    two_nodes(&w, 1);
    for (uint32_t r = 0; r < 2; r++) {
        put_op(&w, r, OP_RECORD, STREAM_AG_CALL, SCOPE_CALL, 0);
        w.s[r].n_call_events = 1;
        w.s[r].ops[6].stream = STREAM_AG_SCATTER; /* the wait, enqueued ahead of the put */
        w.s[r].ops[7].stream = STREAM_AG_SCATTER;
        swap_ops(&w, r, 5, 6);
    }
    expect(&w, VERIFY_STUCK, "WAIT on ag.scatter");
}

static void bytes_are_accounted_for(void **state)
{
    world w;
    (void)state;
    one_node(&w, 1);
    remove_op(&w, 1, 4);
    expect(&w, VERIFY_CONTENT, "byte 64 of landing[0] of rank 0 holds nothing");
    one_node(&w, 1);
    w.s[1].runs[0].dst.offset += 2;
    expect(&w, VERIFY_BOUNDS, "from byte 66 of landing[0] of rank 0, which has 128");
    one_node(&w, 1);
    w.s[1].runs[0].dst.offset = 0;
    expect(&w, VERIFY_RACE, "writes [0, 64) of landing[0] of rank 0");
    one_node(&w, 1);
    w.s[1].runs[1] = w.s[1].runs[0];
    expect(&w, VERIFY_REWRITTEN, "read by nobody");
    two_nodes(&w, 1); /* forwards what nobody has written */
    remove_op(&w, 0, 3);
    expect(&w, VERIFY_UNWRITTEN, "reads [0, 64) of landing[0] of rank 0, which nobody has written");
    one_node(&w, 1); /* half of a bf16 element */
    w.s[1].runs[0].src.offset = 1;
    w.s[1].runs[0].width--;
    expect(&w, VERIFY_CONTENT, "holds byte 1 of input 0 of rank 1");
}

static void events_and_counters_add_up(void **state)
{
    world w;
    op *o;
    (void)state;
    one_node(&w, 1);
    o = put_op(&w, 0, OP_JOIN, STREAM_AG_DONE, SCOPE_CALL, 0);
    (void)o;
    w.s[0].n_call_events = 1;
    expect(&w, VERIFY_EVENT, "joins an event that is not recorded yet");
    one_node(&w, 1);
    remove_op(&w, 0, 8);
    expect(&w, VERIFY_EVENT, "waits for READY, which nothing records");
    one_node(&w, 1);
    w.s[0].ops[6].delta = 2;
    expect(&w, VERIFY_COUNTER, "posts 2 past its base, but the call declares a step of 1");
    one_node(&w, 2);
    w.s[0].ops[1].delta = 0;
    expect(&w, VERIFY_COUNTER, "posts 0 after 0, expected the next number");
    one_node(&w, 1);
    w.s[0].tag = 8;
    expect(&w, VERIFY_COUNTER, "the ranks run different calls");
    two_nodes(&w, 1);
    rail(&w, 0, OP_SIGNAL, STREAM_AG_CALL, SIG_GO);
    expect(&w, VERIFY_COUNTER, "sends a signal that nobody awaits");
    two_nodes(&w, 2); /* one index for two purposes: the wait for the bytes takes the credit */
    for (uint32_t r = 0; r < 2; r++) {
        w.s[r].puts[0].sig = SIG_CREDIT;
        w.s[r].posts[w.s[r].ops[6].first].sig = SIG_CREDIT;
        swap_ops(&w, r, 1, 2);
        swap_ops(&w, r, 2, 3);
    }
    expect_clean(&w); /* in order it still works ... */
    two_nodes(&w, 1);
    w.s[0].puts[0].sig = SIG_CREDIT; /* ... with one side's change it does not */
    expect(&w, VERIFY_STUCK, "waits for 1 signals 0 of rank 0");
}

static void forbidden_operations_are_named(void **state)
{
    world w;
    (void)state;
    two_nodes(&w, 1);
    w.s[0].puts[0].src = shard;
    expect(&w, VERIFY_FORM, "puts from or to memory that is not registered");
    two_nodes(&w, 1);
    w.s[0].runs[0].dst.who = 1;
    expect(&w, VERIFY_FORM, "reaches into another node without the rail");
    two_nodes(&w, 1);
    w.s[0].puts[0].ctx = 1;
    expect(&w, VERIFY_FORM, "names a peer, context or signal that its rail does not have");
    one_node(&w, 1);
    w.s[0].runs[0].dst = shard;
    expect(&w, VERIFY_FORM, "copies to what is not the library's memory");
    one_node(&w, 1);
    w.s[0].runs[0].src.who = 1;
    expect(&w, VERIFY_FORM, "names an argument that the call does not have");
    one_node(&w, 1);
    w.s[0].posts[0].rank = 2;
    expect(&w, VERIFY_FORM, "names a rank that does not exist");
}

/* ---- sums by hand: two ranks of a node, each with half of the output ------------------------------------------ */

enum { ELEMENTS = 8 }; /* of a gradient; half of them are a rank's output */

static void two_sums(world *w)
{
    static const uint32_t first_span[] = {0, 1, 2};
    open_world(w, 1, 2);
    w->map.region[REGION_STAGING].banks = w->staging;
    w->input_bytes[0] = ELEMENTS * 4;
    w->contract = (verify_contract){.kind = VERIFY_RS,
                                    .in_dtype = TIDE_F32,
                                    .in_item = 4,
                                    .out_dtype = TIDE_F32,
                                    .out_item = 4,
                                    .n_inputs = 1,
                                    .input_bytes = w->input_bytes,
                                    .elements = ELEMENTS / 2,
                                    .spans = w->spans,
                                    .first_span = first_span,
                                    .n_spans = 2};
    for (uint32_t r = 0; r < 2; r++) {
        op_segment g = {.dst = {SPACE_ARG, 0, 0, 1, 0}, .dst_pitch = 16, .elems = ELEMENTS / 2, .rows = 1, .n_sets = 2};
        op *o;
        w->s[r].kind = SCHEDULE_RS;
        w->spans[r] = (verify_span){.at = 0, .from = r * ELEMENTS / 2, .width = ELEMENTS / 2, .rows = 1};
        put_op(w, r, OP_JOIN, STREAM_RS_PUSH0, SCOPE_EXTERN, EVENT_IN); /* 0 */
        put_op(w, r, OP_COPY, STREAM_RS_PUSH0, 0, 0);                   /* 1 */
        assert_int_equal(schedule_run(&w->s[r], &(op_run){{SPACE_ARG, 0, 0, 0, (1 - r) * 16},
                                                          {SPACE_REGION, REGION_STAGING, 0, (int32_t)(1 - r), 0},
                                                          16,
                                                          1,
                                                          16,
                                                          16}),
                         TIDE_OK);
        put_op(w, r, OP_RECORD, STREAM_RS_PUSH0, SCOPE_CALL, 0);        /* 2 */
        w->s[r].n_call_events = 1;
        local_post(w, r, OP_SIGNAL, STREAM_RS_PUSH0, WORD_A);           /* 3 */
        put_op(w, r, OP_JOIN, STREAM_RS_SUM, SCOPE_EXTERN, EVENT_IN);   /* 4 */
        local_post(w, r, OP_WAIT, STREAM_RS_SUM, WORD_A);               /* 5 */
        o = put_op(w, r, OP_REDUCE, STREAM_RS_SUM, 0, 0);               /* 6 */
        o->flags = OP_FINAL | OP_BETA_CALL;
        g.source[0] = (op_sources){{SPACE_REGION, REGION_STAGING, 0, (int32_t)r, 0}, 16, 0, 1, 0, TIDE_F32};
        g.source[1] = (op_sources){{SPACE_ARG, 0, 0, 0, r * 16}, 16, 0, 1, 0, TIDE_F32};
        assert_int_equal(schedule_segment(&w->s[r], &g), TIDE_OK);
        put_op(w, r, OP_JOIN, STREAM_RS_SUM, SCOPE_CALL, 0);            /* 7 */
        put_op(w, r, OP_RECORD, STREAM_RS_SUM, SCOPE_EXTERN, EVENT_READ_DONE); /* 8 */
        put_op(w, r, OP_RECORD, STREAM_RS_SUM, SCOPE_EXTERN, EVENT_DONE);      /* 9 */
        for (uint32_t i = 3; i <= 5; i += 2) { /* only to and from the peer */
            w->s[r].ops[i].first += 1 - r;
            w->s[r].ops[i].count = 1;
        }
        assert_int_equal(schedule_set_step(&w->s[r], RESOURCE_SLOT0, 1), TIDE_OK);
    }
    w->calls[0] = (verify_call){w->lists, NULL, &w->contract, 0};
    w->steps[0] = (verify_step){0, VERIFY_PART_READ, -1};
    w->n_steps = w->n_calls = 1;
}

static void sums_take_each_rank_once(void **state)
{
    world w;
    (void)state;
    two_sums(&w);
    expect_clean(&w);
    two_sums(&w); /* the own gradient twice */
    w.s[0].segments[0].source[0] = w.s[0].segments[0].source[1];
    expect(&w, VERIFY_SUM, "where rank 0's contribution is already in");
    two_sums(&w); /* only once */
    w.s[0].segments[0].n_sets = 1;
    expect(&w, VERIFY_SUM,
           "holds output element 0 of gradient 0 of call 0 from 1 ranks, expected output element 0 of gradient 0 of "
           "call 0 from 2");
    two_sums(&w); /* another element's */
    w.s[0].segments[0].source[1].at.offset = 4;
    expect(&w, VERIFY_SUM, "adds different elements");
    two_sums(&w);
    w.s[0].segments[0].source[0].dtype = w.s[0].segments[0].source[1].dtype = TIDE_BF16;
    expect(&w, VERIFY_SUM, "adds as another type than it is");
    two_sums(&w); /* padding that is not there */
    w.s[0].segments[0].n_sets = 0;
    expect(&w, VERIFY_SUM, "holds output padding");
    two_sums(&w);
    w.s[0].ops[6].flags = OP_FINAL | OP_BETA_ONE;
    expect(&w, VERIFY_SUM, "continues an output that is not begun");
    two_sums(&w);
    remove_op(&w, 0, 5);
    expect(&w, VERIFY_UNWRITTEN, "of staging[0] of rank 0, which nobody has written");
    two_sums(&w); /* gradients are given back while a push may still read them */
    remove_op(&w, 0, 7);
    expect(&w, VERIFY_RACE,
           "says READ_DONE, but no path leads to it from rank 0 call 0 (reduce_scatter of group 0) op 1 COPY");
    two_sums(&w); /* the output is announced before it is written */
    swap_ops(&w, 0, 6, 9);
    expect(&w, VERIFY_SUM, "holds the caller's prior value");
    two_sums(&w);
    remove_op(&w, 0, 9);
    expect(&w, VERIFY_EVENT, "never records DONE");
}

/* ---- plans ----------------------------------------------------------------------------------------------------- */

enum { MAX_GROUPS = 3, MAX_PARAMS = 5 };
typedef struct random_plan {
    tide_topology topology;
    tide_options options;
    tide_group_desc groups[MAX_GROUPS];
    tide_param params[MAX_GROUPS][MAX_PARAMS];
    uint32_t n_groups;
} random_plan;

static void draw_param(tide_param *p, uint32_t n_ranks)
{
    memset(p, 0, sizeof *p);
    p->ndim = (int)dice(4);
    for (int d = 0; d < p->ndim; d++)
        p->dims[d] = dice(12) ? 1 + dice(d == 0 ? 30 : 3) : 0;
    if (p->ndim > 1 && dice(4) == 0) {
        p->shard_dim = 1 + (int)dice((uint32_t)p->ndim - 1);
        p->dims[p->shard_dim] = n_ranks * dice(3);
    }
}

static void draw_group(tide_group_desc *g, tide_param *params, uint32_t n_ranks)
{
    static const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16};
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    *g = init;
    g->n_params = 1 + dice(MAX_PARAMS);
    g->params = params;
    for (uint32_t i = 0; i < g->n_params; i++)
        draw_param(&params[i], n_ranks);
    g->dtype = g->shard_dtype = dtypes[dice(3)];
    g->grad_dtype = dice(8) ? dtypes[dice(3)] : TIDE_NONE;
    g->landing = dice(4) ? TIDE_LANDING_RING : TIDE_LANDING_PRIVATE;
    if (dice(2)) {
        g->input = TIDE_INPUT_ARGUMENT;
        g->shard_dtype = dtypes[dice(3)];
    } else if (dice(8) == 0) {
        g->dtype = g->shard_dtype = TIDE_OPAQUE;
        g->item_size = 1 + dice(20);
        g->grad_dtype = TIDE_NONE;
    }
}

/* A plan over every knob; most draws that the planner refuses (a wave that collides, an outbox too small) are drawn
 * again. */
static tide_plan *draw_plan(random_plan *r, uint64_t seed)
{
    const tide_topology topology = TIDE_TOPOLOGY_INIT;
    const tide_options options = TIDE_OPTIONS_INIT;
    tide_plan *plan = NULL;
    dice_seed(seed * UINT64_C(0x9e3779b97f4a7c15) + 1);
    for (;;) {
        uint32_t n_ranks;
        int status;
        r->topology = topology;
        r->options = options;
        do {
            r->topology.nodes = 1 + dice(dice(3) ? 6 : 24);
            r->topology.local = 1 + dice(dice(3) ? 4 : 24);
            n_ranks = r->topology.nodes * r->topology.local;
        } while (n_ranks > 24);
        r->n_groups = 1 + dice(MAX_GROUPS);
        for (uint32_t g = 0; g < r->n_groups; g++)
            draw_group(&r->groups[g], r->params[g], n_ranks);
#define KNOB(name, value) r->options.name = dice(2) ? (int64_t)(value) : options.name
        KNOB(mode, dice(2));
        KNOB(w_wave, 1 + dice(r->topology.local > 1 ? r->topology.local : 8));
        KNOB(k, 1 + dice(4));
        KNOB(n_par, 2);
        KNOB(n_part, 1 + dice(4));
        KNOB(n_out, 2 + dice(6));
        KNOB(n_stg, 1 + dice(3));
        KNOB(chunk, 16 + dice(200));
        KNOB(n_ctx, 1 + dice(5));
        KNOB(ring_slots, 1 + dice(3));
        KNOB(head_bytes, 16 << dice(8));
        KNOB(multicast, dice(2));
        KNOB(target, dice(2));
        KNOB(rail_ring, 1 + dice(64)); /* which all-gathers of one rank a node go through the stage */
#undef KNOB
        status = tide_plan_create(&r->topology, r->groups, r->n_groups, &r->options, &plan);
        if (status == TIDE_OK)
            return plan;
        if (status != TIDE_ERR_ARGUMENT && status != TIDE_ERR_UNSUPPORTED)
            fail_msg("seed %llu: %s", (unsigned long long)seed, tide_last_error());
    }
}

static int print(void *context, const char *text, size_t bytes)
{
    return fwrite(text, 1, bytes, context) != bytes;
}

static void random_plans_are_proved(void **state)
{
    uint64_t ag = 0, rs = 0, waves = 0, passes = 0, partial = 0, cases = 0, accesses = 0;
    (void)state;
    for (uint32_t i = 0; i < n_plans; i++) {
        static random_plan r;
        tide_text text = {print, stderr, TIDE_OK};
        verify_options options = {.stop_after = 4, .out = &text, .lines = 4};
        proof_result result;
        tide_plan *plan = draw_plan(&r, first_seed + i);
        int status = proof_plan(plan, 1u << i % PROOF_RANDOM | 1u << PROOF_RANDOM, first_seed + i, &options, &result);
        if (status != TIDE_OK || result.violations)
            fail_msg("seed %llu (%u nodes of %u): %s", (unsigned long long)(first_seed + i), r.topology.nodes,
                     r.topology.local, status == TIDE_OK ? "violations" : tide_last_error());
        ag += result.ag_ops;
        rs += result.rs_ops;
        cases += result.cases;
        accesses += result.accesses;
        waves += plan->rs.n_waves > 1;
        passes += plan->rs.n_part > 1;
        partial += plan->rs.n_out < plan->rs.n_blocks;
        tide_plan_destroy(plan);
    }
    printf("random plans: %u proved, %llu cases, %llu ag ops, %llu rs ops, %llu accesses; %llu with several waves, "
           "%llu with passes, %llu with a partial "
           "outbox\n",
           n_plans, (unsigned long long)cases, (unsigned long long)ag, (unsigned long long)rs,
           (unsigned long long)accesses, (unsigned long long)waves, (unsigned long long)passes,
           (unsigned long long)partial);
    if (n_plans >= 200) {
        assert_true(waves > n_plans / 20);
        assert_true(passes > n_plans / 20);
        assert_true(partial > n_plans / 20);
    }
}

/* Allocation n fails, for n = 1.. until none does: an error each time, and nothing is kept (the sanitizer's run sees
 * that). */
static void every_allocation_may_fail(void **state)
{
    static random_plan r;
    const verify_options options = {0};
    tide_plan *plan = draw_plan(&r, 3);
    proof_result result;
    uint64_t n = 1, step = 1;
    (void)state;
    for (;; n += step) {
        int status;
        tide_alloc_fail_at(n);
        status = proof_plan(plan, PROOF_ALL_ORDERS, 1, &options, &result);
        tide_alloc_fail_at(0);
        if (status == TIDE_OK)
            break;
        assert_int_equal(status, TIDE_ERR_MEMORY);
        step = 1 + n / 64;
    }
    assert_int_equal(result.violations, 0);
    assert_true(n > 500);
    tide_plan_destroy(plan);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_correct_call_is_clean),       cmocka_unit_test(missing_edges_are_races),
        cmocka_unit_test(waits_without_producer_are_stuck), cmocka_unit_test(lanes_block),
        cmocka_unit_test(bytes_are_accounted_for),       cmocka_unit_test(events_and_counters_add_up),
        cmocka_unit_test(forbidden_operations_are_named), cmocka_unit_test(sums_take_each_rank_once),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(random_plans_are_proved),
    };
    if (argc > 1)
        n_plans = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        first_seed = strtoull(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
