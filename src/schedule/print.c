/* print.c - an op list for people, a line an op with its items indented, or as one JSON object. */
#include <stdio.h>

#include "schedule/schedule.h"

static const char *const kind_names[OP_KIND_COUNT] = {"COPY", "REDUCE", "PUT", "SIGNAL", "WAIT", "RECORD", "JOIN"};
static const char *const scope_names[] = {"local", "rail", "call", "resource", "extern"};
static const char *const resource_event_names[EVENT_RESOURCE_COUNT] = {"scattered", "sent", "spared", "landed"};
static const char *const extern_event_names[EVENT_EXTERN_COUNT] = {"in", "gate", "free", "ready", "read_done", "done"};
static const char *const signal_names[SIG_COUNT] = {"head", "tail", "credit", "go"};

static unsigned long long ull(uint64_t value)
{
    return (unsigned long long)value;
}

static const char *resource_name(uint32_t resource, char buffer[24])
{
    if (resource >= RESOURCE_SLOT0)
        snprintf(buffer, 24, "slot%u", resource - RESOURCE_SLOT0);
    else
        snprintf(buffer, 24, "%s", resource == RESOURCE_STAGING ? "staging" : "inbox");
    return buffer;
}

/* "slot3.free" */
static const char *counter_name(const op *o, char buffer[64])
{
    static const char *const words[3][2] = {{"filled", "freed"}, {"armed", "landed"}, {"free", "done"}};
    char resource[24];
    snprintf(buffer, 64, "%s.%s", resource_name(o->resource, resource),
             words[o->resource < RESOURCE_SLOT0 ? o->resource : RESOURCE_SLOT0][o->which]);
    return buffer;
}

/* "sent[3] of the call's bank" */
static const char *event_name(const op *o, char buffer[64])
{
    if (o->scope == SCOPE_CALL)
        snprintf(buffer, 64, "event %u", o->event);
    else if (o->scope == SCOPE_EXTERN && o->event == EVENT_FREE)
        snprintf(buffer, 64, "free slot %u", o->bank);
    else if (o->scope == SCOPE_EXTERN)
        snprintf(buffer, 64, "%s", extern_event_names[o->event]);
    else if (o->bank == BANK_CALL)
        snprintf(buffer, 64, "%s[%u] of the call's bank", resource_event_names[o->event], o->index);
    else
        snprintf(buffer, 64, "%s[%u]", resource_event_names[o->event], o->index);
    return buffer;
}

/* "landing[1]@3+4096", the bank of the call's parity as '*', all local ranks as "node" */
static const char *addr_name(const op_addr *a, char buffer[80])
{
    char bank[8] = "*", who[16] = "node";
    if (a->space == SPACE_ZERO) {
        snprintf(buffer, 80, "zero");
    } else if (a->space == SPACE_ARG) {
        snprintf(buffer, 80, "arg%d+%llu", a->who, ull(a->offset));
    } else {
        if (a->bank != BANK_CALL)
            snprintf(bank, sizeof bank, "%u", a->bank);
        if (a->who != WHO_NODE)
            snprintf(who, sizeof who, "%d", a->who);
        snprintf(buffer, 80, "%s[%s]@%s+%llu", plan_region_name(a->region), bank, who, ull(a->offset));
    }
    return buffer;
}

/* ---- text ----------------------------------------------------------------------------------- */

#define ITEM "                              "

static void text_copy(const schedule *s, const op *o, tide_text *out)
{
    char src[80], dst[80];
    if (o->src_dtype == o->dst_dtype)
        tide_text_put(out, "%u runs of %s%s\n", o->count,
                      o->src_dtype == TIDE_OPAQUE ? "bytes" : tide_dtype_name(o->src_dtype),
                      o->flags & OP_SM ? ", by kernel" : "");
    else
        tide_text_put(out, "%u runs, %s to %s%s\n", o->count, tide_dtype_name(o->src_dtype),
                      tide_dtype_name(o->dst_dtype), o->flags & OP_SM ? ", by kernel" : "");
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_run *r = &s->runs[i];
        tide_text_put(out, ITEM "%s -> %s  %llu x %llu", addr_name(&r->src, src), addr_name(&r->dst, dst), ull(r->rows),
                      ull(r->width));
        if (r->rows > 1)
            tide_text_put(out, " pitch %llu -> %llu", ull(r->src_pitch), ull(r->dst_pitch));
        tide_text_put(out, "\n");
    }
}

static void text_reduce(const schedule *s, const op *o, tide_text *out)
{
    char name[80];
    tide_text_put(out, "%u segments", o->count);
    if (o->flags & OP_FINAL)
        tide_text_put(out, ", out = %salpha * sum",
                      o->flags & OP_BETA_ONE    ? "out + "
                      : o->flags & OP_BETA_CALL ? "(accumulate ? out : 0) + "
                                                : "");
    tide_text_put(out, "\n");
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_segment *g = &s->segments[i];
        tide_text_put(out, ITEM "%s  %u x %llu", addr_name(&g->dst, name), g->rows, ull(g->elems));
        if (g->rows > 1)
            tide_text_put(out, " pitch %llu", ull(g->dst_pitch));
        tide_text_put(out, g->n_sets ? " =" : " = 0");
        for (uint32_t k = 0; k < g->n_sets; k++) {
            const op_sources *q = &g->source[k];
            tide_text_put(out, "%s %s %s", k ? " +" : "", tide_dtype_name(q->dtype), addr_name(&q->at, name));
            if (g->rows > 1)
                tide_text_put(out, " pitch %llu", ull(q->row_pitch));
            if (q->count > 1)
                tide_text_put(out, " x%u step %llu rank_step %u", q->count, ull(q->step), q->rank_step);
        }
        tide_text_put(out, "\n");
    }
}

static void text_put(const schedule *s, const op *o, tide_text *out)
{
    char src[80], dst[80];
    tide_text_put(out, "%u transfers\n", o->count);
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_put *p = &s->puts[i];
        tide_text_put(out, ITEM "%s -> %s  %llu B, ctx %u, %s to %d\n", addr_name(&p->src, src),
                      addr_name(&p->dst, dst), ull(p->bytes), p->ctx, signal_names[p->sig], p->peer);
    }
}

/* Runs of consecutive ranks as "a..b". */
static void text_posts(const schedule *s, const op *o, tide_text *out)
{
    char name[64];
    if (o->scope == SCOPE_RAIL) {
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            const op_post *p = &s->posts[i];
            tide_text_put(out, "%s%s %s %d ctx %u", i > o->first ? ", " : "", signal_names[p->sig],
                          o->kind == OP_SIGNAL ? "to" : "from", p->rank, p->ctx);
            if (p->count > 1)
                tide_text_put(out, " x%u", p->count);
        }
        tide_text_put(out, "\n");
        return;
    }
    tide_text_put(out, "%s +%llu %s", counter_name(o, name), ull(o->delta), o->kind == OP_SIGNAL ? "to" : "from");
    for (uint32_t i = o->first, end = o->first + o->count, next; i < end; i = next) {
        for (next = i + 1; next < end && s->posts[next].rank == s->posts[next - 1].rank + 1; next++)
            ;
        if (next - i > 1)
            tide_text_put(out, " %d..%d", s->posts[i].rank, s->posts[next - 1].rank);
        else
            tide_text_put(out, " %d", s->posts[i].rank);
    }
    tide_text_put(out, o->flags & OP_CHECK_TAG ? ", same call\n" : "\n");
}

void schedule_print(const schedule *s, const tide_plan *plan, tide_text *out)
{
    char name[64];

    tide_text_put(out, "%s of group %u \"%s\" on rank %u: %u ops, digest %016llx, tag %016llx\n",
                  s->kind == SCHEDULE_AG ? "all_gather" : "reduce_scatter", s->group, plan->groups[s->group].geo.name,
                  s->rank, s->n_ops, ull(schedule_digest(s)), ull(s->tag));
    for (uint32_t i = 0; i < s->n_ops && out->status == TIDE_OK; i++) {
        const op *o = &s->ops[i];
        if (s->kind == SCHEDULE_RS && i == s->n_read)
            tide_text_put(out, "  network phase\n");
        tide_text_put(out, "  %5u  %-11s%-7s ", i, op_stream_name(o->stream, name), kind_names[o->kind]);
        switch (o->kind) {
        case OP_COPY:
            text_copy(s, o, out);
            break;
        case OP_REDUCE:
            text_reduce(s, o, out);
            break;
        case OP_PUT:
            text_put(s, o, out);
            break;
        case OP_SIGNAL:
        case OP_WAIT:
            text_posts(s, o, out);
            break;
        default:
            tide_text_put(out, "%s\n", event_name(o, name));
            break;
        }
    }
    for (uint32_t i = 0; i < s->n_steps; i++) {
        tide_text_put(out, "  then %s += %llu\n", resource_name(s->steps[i].resource, name), ull(s->steps[i].step));
    }
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static void json_addr(const char *key, const op_addr *a, tide_text *out)
{
    if (a->space == SPACE_ZERO)
        tide_text_put(out, "\"%s\": {\"space\": \"zero\"}", key);
    else if (a->space == SPACE_ARG)
        tide_text_put(out, "\"%s\": {\"space\": \"arg\", \"arg\": %d, \"offset\": %llu}", key, a->who, ull(a->offset));
    else {
        tide_text_put(out, "\"%s\": {\"space\": \"%s\", \"bank\": ", key, plan_region_name(a->region));
        if (a->bank == BANK_CALL)
            tide_text_put(out, "\"call\", \"rank\": ");
        else
            tide_text_put(out, "%u, \"rank\": ", a->bank);
        if (a->who == WHO_NODE)
            tide_text_put(out, "\"node\"");
        else
            tide_text_put(out, "%d", a->who);
        tide_text_put(out, ", \"offset\": %llu}", ull(a->offset));
    }
}

static void json_segment(const op_segment *g, tide_text *out)
{
    tide_text_put(out, "{");
    json_addr("dst", &g->dst, out);
    tide_text_put(out, ", \"dst_pitch\": %llu, \"elements\": %llu, \"rows\": %u, \"sources\": [", ull(g->dst_pitch),
                  ull(g->elems), g->rows);
    for (uint32_t k = 0; k < g->n_sets; k++) {
        const op_sources *q = &g->source[k];
        tide_text_put(out, k ? ", {" : "{");
        json_addr("at", &q->at, out);
        tide_text_put(out,
                      ", \"row_pitch\": %llu, \"step\": %llu, \"count\": %u, \"rank_step\": %u, \"dtype\": \"%s\"}",
                      ull(q->row_pitch), ull(q->step), q->count, q->rank_step, tide_dtype_name(q->dtype));
    }
    tide_text_put(out, "]}");
}

static void json_item(const schedule *s, const op *o, uint32_t i, tide_text *out)
{
    if (o->kind == OP_COPY) {
        const op_run *r = &s->runs[i];
        tide_text_put(out, "{");
        json_addr("src", &r->src, out);
        tide_text_put(out, ", ");
        json_addr("dst", &r->dst, out);
        tide_text_put(out, ", \"width\": %llu, \"rows\": %llu, \"src_pitch\": %llu, \"dst_pitch\": %llu}",
                      ull(r->width), ull(r->rows), ull(r->src_pitch), ull(r->dst_pitch));
    } else if (o->kind == OP_REDUCE) {
        json_segment(&s->segments[i], out);
    } else if (o->kind == OP_PUT) {
        const op_put *p = &s->puts[i];
        tide_text_put(out, "{\"peer\": %d, \"ctx\": %u, \"signal\": \"%s\", ", p->peer, p->ctx, signal_names[p->sig]);
        json_addr("src", &p->src, out);
        tide_text_put(out, ", ");
        json_addr("dst", &p->dst, out);
        tide_text_put(out, ", \"bytes\": %llu}", ull(p->bytes));
    } else if (o->scope == SCOPE_RAIL) {
        const op_post *p = &s->posts[i];
        tide_text_put(out, "{\"rank\": %d, \"ctx\": %u, \"signal\": \"%s\", \"count\": %u}", p->rank, p->ctx,
                      signal_names[p->sig], p->count);
    } else {
        tide_text_put(out, "%d", s->posts[i].rank);
    }
}

static void json_op(const schedule *s, const op *o, tide_text *out)
{
    static const char *const item_keys[OP_KIND_COUNT] = {"runs", "segments", "transfers", "posts", "posts", NULL, NULL};
    char name[64];

    tide_text_put(out, "{\"kind\": \"%s\", \"stream\": \"%s\", \"phase\": \"%s\"", kind_names[o->kind],
                  op_stream_name(o->stream, name), op_phase_name(o->phase));
    if (o->kind == OP_COPY)
        tide_text_put(out, ", \"src_dtype\": \"%s\", \"dst_dtype\": \"%s\"", tide_dtype_name(o->src_dtype),
                      tide_dtype_name(o->dst_dtype));
    if (o->kind == OP_REDUCE)
        tide_text_put(out, ", \"final\": %s, \"adds_to\": \"%s\"", o->flags & OP_FINAL ? "true" : "false",
                      o->flags & OP_BETA_ONE    ? "output"
                      : o->flags & OP_BETA_CALL ? "output if the call accumulates"
                                                : "zero");
    if (o->kind == OP_SIGNAL || o->kind == OP_WAIT || o->kind == OP_RECORD || o->kind == OP_JOIN)
        tide_text_put(out, ", \"scope\": \"%s\"", scope_names[o->scope]);
    if (o->kind == OP_RECORD || o->kind == OP_JOIN) {
        tide_text_put(out, ", \"event\": ");
        tide_text_json_string(out, event_name(o, name));
    } else if (o->scope == SCOPE_LOCAL && (o->kind == OP_SIGNAL || o->kind == OP_WAIT)) {
        tide_text_put(out, ", \"counter\": \"%s\", \"delta\": %llu, \"check_tag\": %s", counter_name(o, name),
                      ull(o->delta), o->flags & OP_CHECK_TAG ? "true" : "false");
    }
    if (item_keys[o->kind]) {
        tide_text_put(out, ", \"%s\": [", item_keys[o->kind]);
        for (uint32_t i = 0; i < o->count; i++) {
            if (i)
                tide_text_put(out, ", ");
            json_item(s, o, o->first + i, out);
        }
        tide_text_put(out, "]");
    }
    tide_text_put(out, "}");
}

void schedule_print_json(const schedule *s, const tide_plan *plan, tide_text *out)
{
    tide_text_put(out, "{\"schema\": 1, \"collective\": \"%s\", \"group\": %u, \"name\": ",
                  s->kind == SCHEDULE_AG ? "all_gather" : "reduce_scatter", s->group);
    tide_text_json_string(out, plan->groups[s->group].geo.name);
    tide_text_put(
        out,
        ", \"rank\": %u, \"digest\": \"%016llx\", \"tag\": \"%016llx\", \"n_args\": %u, \"n_read\": %u, \"steps\": [",
        s->rank, ull(schedule_digest(s)), ull(s->tag), s->n_args, s->n_read);
    for (uint32_t i = 0; i < s->n_steps; i++)
        tide_text_put(out, "%s{\"resource\": %u, \"step\": %llu}", i ? ", " : "", s->steps[i].resource,
                      ull(s->steps[i].step));
    tide_text_put(out, "], \"ops\": [");
    for (uint32_t i = 0; i < s->n_ops && out->status == TIDE_OK; i++) {
        if (i)
            tide_text_put(out, ", ");
        json_op(s, &s->ops[i], out);
    }
    tide_text_put(out, "]}");
}
