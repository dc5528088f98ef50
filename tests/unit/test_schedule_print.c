/* Op lists as text and as JSON: every kind of op once, against the exact lines; JSON is parsed. */
#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "schedule/schedule.h"

typedef struct sink {
    char text[1 << 16];
    size_t used, limit; /* refuses what goes past limit */
} sink;

static int sink_write(void *context, const char *text, size_t bytes)
{
    sink *k = context;
    if (k->used + bytes >= k->limit)
        return 1;
    memcpy(k->text + k->used, text, bytes);
    k->used += bytes;
    k->text[k->used] = 0;
    return 0;
}

static tide_plan *small_plan(void)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    const tide_param p = {"w", 2, 0, {8, 6}};
    tide_plan *plan;
    t.nodes = 2;
    t.local = 2;
    d.name = "block \"0\"";
    d.n_params = 1;
    d.params = &p;
    assert_int_equal(tide_plan_create(&t, &d, 1, NULL, &plan), TIDE_OK);
    return plan;
}

static op *append(schedule *s, int kind, int stream, int phase, int scope)
{
    op *o = schedule_op(s, kind, stream, phase);
    assert_non_null(o);
    o->scope = (uint8_t)scope;
    return o;
}

/* Not a call that makes sense: one op of every kind and form. */
static void one_of_each(schedule *s)
{
    const op_addr grad = {SPACE_ARG, 0, 0, 1, 8}, out = {SPACE_REGION, REGION_OUTBOX, BANK_CALL, 3, 64};
    const op_addr landing = {SPACE_REGION, REGION_LANDING, 0, WHO_NODE, 256},
                  inbox = {SPACE_REGION, REGION_INBOX, 1, 1, 0};
    const op_addr zero = {SPACE_ZERO, 0, 0, 0, 0};
    op *o;

    memset(s, 0, sizeof *s);
    s->kind = SCHEDULE_RS;
    s->rank = 3;
    s->tag = 0xabc;
    o = append(s, OP_JOIN, STREAM_RS_SUM, PHASE_RS_SUM, SCOPE_EXTERN);
    o->event = EVENT_FREE;
    o->bank = 1;
    o = append(s, OP_COPY, STREAM_RS_PUSH0 + 1, PHASE_RS_PUSH, 0);
    schedule_run(s, &(op_run){grad, landing, 12, 2, 24, 48});
    schedule_run(s, &(op_run){zero, landing, 12, 1, 0, 12});
    o = append(s, OP_COPY, STREAM_RS_PUSH0, PHASE_RS_PUSH, 0);
    o->src_dtype = TIDE_F32;
    o->dst_dtype = TIDE_BF16;
    o->flags = OP_SM;
    o = append(s, OP_WAIT, STREAM_RS_SUM, PHASE_RS_SUM, SCOPE_LOCAL);
    o->resource = RESOURCE_STAGING;
    o->flags = OP_CHECK_TAG;
    o->delta = 2;
    schedule_post(s, 0, 0, 0, 0);
    schedule_post(s, 1, 0, 0, 0);
    schedule_post(s, 3, 0, 0, 0);
    o = append(s, OP_REDUCE, STREAM_RS_SUM, PHASE_RS_SUM, 0);
    o->flags = OP_FINAL | OP_BETA_CALL;
    schedule_segment(
        s, &(op_segment){out, 32, 8, 2, 2, {{inbox, 32, 16, 2, 1, TIDE_F32}, {grad, 24, 0, 1, 0, TIDE_BF16}}});
    schedule_segment(s, &(op_segment){.dst = out, .dst_pitch = 32, .elems = 4, .rows = 1});
    o = append(s, OP_RECORD, STREAM_RS_SUM, PHASE_RS_SUM, SCOPE_RESOURCE);
    o->event = EVENT_SENT;
    o->index = 2;
    o->bank = BANK_CALL;
    s->n_read = s->n_ops;
    append(s, OP_PUT, STREAM_RS_NET, PHASE_RS_ARRIVE, SCOPE_RAIL);
    schedule_put(s, &(op_put){1, 2, SIG_HEAD, out, inbox, 128});
    append(s, OP_WAIT, STREAM_RS_NET, PHASE_RS_CREDIT, SCOPE_RAIL);
    schedule_post(s, 1, 0, SIG_CREDIT, 1);
    schedule_post(s, 1, 3, SIG_HEAD, 2);
    o = append(s, OP_SIGNAL, STREAM_RS_LAND, PHASE_RS_LAND, SCOPE_LOCAL);
    o->resource = RESOURCE_SLOT0 + 1;
    o->which = WORD_B;
    o->delta = 1;
    schedule_post(s, 2, 0, 0, 0);
    o = append(s, OP_RECORD, STREAM_RS_LAND, PHASE_RS_LAND, SCOPE_CALL);
    o->event = 4;
    o = append(s, OP_JOIN, STREAM_RS_LAND, PHASE_RS_LAND, SCOPE_RESOURCE);
    o->event = EVENT_LANDED;
    o->index = 1;
    schedule_set_step(s, RESOURCE_INBOX, 3);
    schedule_set_step(s, RESOURCE_SLOT0, 1);
}

static void text_lines(void **state)
{
    static sink k;
    tide_text t = {sink_write, &k, TIDE_OK};
    tide_plan *plan = small_plan();
    schedule s;
    const char *body;
    (void)state;
    k.limit = sizeof k.text;
    one_of_each(&s);
    schedule_print(&s, plan, &t);
    assert_int_equal(t.status, TIDE_OK);
    body = strchr(k.text, '\n') + 1;
    assert_non_null(strstr(k.text, "reduce_scatter of group 0 \"block \"0\"\" on rank 3: 11 ops, digest "));
    assert_string_equal(
        body, "      0  rs.sum     JOIN    free slot 1\n"
              "      1  rs.push1   COPY    2 runs of bytes\n"
              "                              arg1+8 -> landing[0]@node+256  2 x 12 pitch 24 -> 48\n"
              "                              zero -> landing[0]@node+256  1 x 12\n"
              "      2  rs.push0   COPY    0 runs, fp32 to bf16, by kernel\n"
              "      3  rs.sum     WAIT    staging.filled +2 from 0..1 3, same call\n"
              "      4  rs.sum     REDUCE  2 segments, out = (accumulate ? out : 0) + alpha * sum\n"
              "                              outbox[*]@3+64  2 x 8 pitch 32 = fp32 inbox[1]@1+0 pitch 32 x2 step 16 "
              "rank_step 1 + bf16 arg1+8 pitch 24\n"
              "                              outbox[*]@3+64  1 x 4 = 0\n"
              "      5  rs.sum     RECORD  sent[2] of the call's bank\n"
              "  network phase\n"
              "      6  rs.net     PUT     1 transfers\n"
              "                              outbox[*]@3+64 -> inbox[1]@1+0  128 B, ctx 2, head to 1\n"
              "      7  rs.net     WAIT    credit from 1 ctx 0, head from 1 ctx 3 x2\n"
              "      8  rs.land    SIGNAL  slot1.done +1 to 2\n"
              "      9  rs.land    RECORD  event 4\n"
              "     10  rs.land    JOIN    landed[1]\n"
              "  then inbox += 3\n"
              "  then slot0 += 1\n");
    k.used = 0;
    k.limit = 100; /* the writer refuses: printing ends with its failure */
    schedule_print(&s, plan, &t);
    assert_int_equal(t.status, TIDE_ERR_SYSTEM);
    schedule_clear(&s);
    tide_plan_destroy(plan);
}

/* Skips one JSON value; NULL when it is none. */
static const char *json_value(const char *p)
{
    const char open = *p;
    if (open == '{' || open == '[') {
        const char close = open == '{' ? '}' : ']';
        if (*++p == close)
            return p + 1;
        for (;; p += p[0] == ' ') {
            if (open == '{' && (*p != '"' || !(p = json_value(p)) || *p++ != ':' || *p++ != ' '))
                return NULL;
            p = json_value(p);
            if (p && *p == close)
                return p + 1;
            if (!p || *p++ != ',')
                return NULL;
        }
    }
    if (open == '"') {
        for (p++; *p != '"'; p++)
            if (!*p || (*p == '\\' && !*++p))
                return NULL;
        return p + 1;
    }
    if (strncmp(p, "true", 4) == 0)
        return p + 4;
    if (strncmp(p, "false", 5) == 0)
        return p + 5;
    if (*p == '-')
        p++;
    if (!isdigit((unsigned char)*p))
        return NULL;
    while (isdigit((unsigned char)*p))
        p++;
    return p;
}

static void json_parses(void **state)
{
    static sink k;
    tide_plan *plan = small_plan();
    (void)state;
    k.limit = sizeof k.text;
    for (int which = 0; which < 2; which++) {
        tide_text t = {sink_write, &k, TIDE_OK};
        const char *end;
        schedule s;
        k.used = 0;
        if (which == 0)
            one_of_each(&s);
        else
            assert_int_equal(schedule_build_ag(plan, 0, 3, &s), TIDE_OK);
        schedule_print_json(&s, plan, &t);
        assert_int_equal(t.status, TIDE_OK);
        end = json_value(k.text);
        assert_non_null(end);
        assert_int_equal(*end, 0);
        assert_non_null(strstr(k.text, "\"name\": \"block \\\"0\\\"\""));
        if (which == 0) {
            assert_non_null(strstr(
                k.text,
                "{\"kind\": \"WAIT\", \"stream\": \"rs.sum\", \"phase\": \"reduce_scatter sum\", \"scope\": \"local\", "
                "\"counter\": \"staging.filled\", \"delta\": 2, \"check_tag\": true, \"posts\": [0, 1, 3]}"));
            assert_non_null(strstr(
                k.text, "\"src\": {\"space\": \"outbox\", \"bank\": \"call\", \"rank\": 3, \"offset\": 64}, "
                        "\"dst\": {\"space\": \"inbox\", \"bank\": 1, \"rank\": 1, \"offset\": 0}, \"bytes\": 128"));
        }
        schedule_clear(&s);
    }
    assert_null(json_value("[1, ]"));
    assert_null(json_value("{\"a\" 1}"));
    tide_plan_destroy(plan);
}

static void names_cover_every_value(void **state)
{
    char name[24];
    (void)state;
    for (int i = 0; i < PHASE_COUNT; i++) {
        assert_string_not_equal(op_phase_name(i), "invalid");
        for (int k = 0; k < i; k++)
            assert_string_not_equal(op_phase_name(i), op_phase_name(k));
    }
    assert_string_equal(op_phase_name(PHASE_COUNT), "invalid");
    assert_string_equal(op_phase_name(PHASE_RS_PUSH), "reduce_scatter push");
    assert_string_equal(op_stream_name(STREAM_AG_READY, name), "ag.ready");
    assert_string_equal(op_stream_name(STREAM_RS_LAND, name), "rs.land");
    assert_string_equal(op_stream_name(STREAM_RS_PUSH0 + 63, name), "rs.push63");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_lines),
        cmocka_unit_test(json_parses),
        cmocka_unit_test(names_cover_every_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
