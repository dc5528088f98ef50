/*
 * explain.c - tide_plan_print: a plan for people, or as one JSON object. What it says about streams and descriptors is
 * counted in the op lists themselves, so that it cannot differ from what runs.
 */
#include <stdio.h>

#include "schedule/schedule.h"

enum { N_STREAMS = STREAM_RS_PUSH0 + TIDE_MAX_LOCAL, SHOWN_WAVES = 8 };

/* What one rank enqueues for one kind of call. */
typedef struct tally {
    uint64_t digest, ops[OP_KIND_COUNT];
    uint64_t copies, segments, puts, put_bytes, posts;
    uint64_t stream[N_STREAMS]; /* ops by stream */
} tally;

static const char *const kind_name[OP_KIND_COUNT] = {"copy", "reduce", "put", "signal", "wait", "record", "join"};

static void count(const schedule *s, tally *t)
{
    memset(t, 0, sizeof *t);
    t->digest = schedule_digest(s);
    t->copies = s->n_runs;
    t->segments = s->n_segments;
    t->puts = s->n_puts;
    t->posts = s->n_posts;
    for (uint32_t i = 0; i < s->n_puts; i++)
        t->put_bytes += s->puts[i].bytes;
    for (uint32_t i = 0; i < s->n_ops; i++) {
        t->ops[s->ops[i].kind]++;
        t->stream[s->ops[i].stream]++;
    }
}

static bool reduces(const tide_plan *plan, uint32_t group)
{
    return plan->groups[group].geo.grad_dtype != TIDE_NONE;
}

static void put_u64(tide_text *t, const char *key, uint64_t value)
{
    tide_text_put(t, ", \"%s\": %llu", key, (unsigned long long)value);
}

/* ---- text -------------------------------------------------------------------------------- */

static void text_bytes(tide_text *t, const char *name, uint64_t bytes, const char *note)
{
    tide_text_put(t, "  %-10s %16llu B %12.3f MiB  %s\n", name, (unsigned long long)bytes, (double)bytes / 1048576,
                  note);
}

static void text_group(tide_text *t, const tide_plan *plan, uint32_t index)
{
    const plan_group *p = &plan->groups[index];
    const geo_group *g = &p->geo;

    tide_text_put(t, "\ngroup %u %s\n", index, g->name);
    tide_text_put(t, "  %u parameters of %s; shards %s, %s%s; gradients %s; landing slot %u (%s)\n", g->n_params,
                  tide_dtype_name(g->dtype), tide_dtype_name(g->shard_dtype),
                  g->input == TIDE_INPUT_ADOPTED ? "adopted in the arena" : "passed to each call",
                  g->shard_dtype != g->dtype ? " and cast" : "", tide_dtype_name(g->grad_dtype), p->slot,
                  g->landing_kind == TIDE_LANDING_RING ? "ring" : "private");
    tide_text_put(t, "  packed shard %llu elements, %llu B; landing %llu B; output of a reduce-scatter %llu B\n",
                  (unsigned long long)g->elements, (unsigned long long)g->shard_bytes,
                  (unsigned long long)g->landing_bytes, (unsigned long long)(g->elements * sizeof(float)));
    if (p->direct)
        tide_text_put(t, "  all-gather from landing to landing, no stage: at most %u messages a peer\n", p->direct_puts);
    else if (p->direct_puts)
        tide_text_put(t, "  all-gather through the stage: from landing to landing a peer would get %u messages, more than its ring "
                         "holds (rail_ring)\n", p->direct_puts);
    if (reduces(plan, index))
        tide_text_put(
            t, "  output cut: %u sub-slices of %llu elements, passes of %llu, %u chunks of %llu a block of %u rows\n",
            plan->topology.nodes > 1 ? plan->topology.local : 1, (unsigned long long)p->cut.sub,
            (unsigned long long)p->cut.part, p->cut.n_chunks, (unsigned long long)p->cut.chunk, p->cut.rows);
    tide_text_put(t, "  %14s %14s %12s %10s  %s\n", "landing (B)", "packed (elems)", "shard", "strips", "parameter");
    for (uint32_t i = 0; i < g->n_params; i++) {
        const geo_param *q = &g->params[i];
        tide_text_put(t, "  %14llu %14llu %12llu %10llu  %s", (unsigned long long)q->landing,
                      (unsigned long long)q->offset, (unsigned long long)q->shard, (unsigned long long)q->outer,
                      q->name);
        if (q->shard * g->ranks != q->whole)
            tide_text_put(t, " (%llu elements of padding)", (unsigned long long)(q->shard * g->ranks - q->whole));
        tide_text_put(t, "\n");
    }
}

static void text_rounds(tide_text *t, const tide_plan *plan)
{
    const plan_rs *rs = &plan->rs;
    plan_ag_round rounds[11];
    uint32_t n = plan_ag_rounds(plan->topology.nodes, rounds);

    tide_text_put(t, "\nall_gather: %u rounds between nodes\n", n);
    for (uint32_t d = 0; d < n; d++)
        tide_text_put(t, "  round %u: %u slots to node - %u\n", d, rounds[d].count, rounds[d].distance);
    if (rs->nodes < 2) {
        tide_text_put(t, "\nreduce_scatter: one node; the sum is the output\n");
        return;
    }
    tide_text_put(
        t, "\nreduce_scatter: %u waves of at most %u contributors, %u rounds of at most %u transfers, %u passes\n",
        rs->n_waves, rs->w_wave, rs->n_rounds, rs->k, rs->n_part);
    tide_text_put(t, "  outbox %u of %u blocks (%s), %u inbox generations\n", rs->n_out, rs->n_blocks,
                  rs->n_out < rs->n_blocks ? "partial: sums wait for sends" : "full: reads never wait for the network",
                  rs->n_par);
    for (uint32_t w = 0; w < rs->n_waves; w++) {
        const plan_wave *wave = &rs->waves[w];
        if (w == SHOWN_WAVES && rs->n_waves > SHOWN_WAVES + 2) { /* they are alike; the last one holds the own node */
            tide_text_put(t, "  ...\n");
            w = rs->n_waves - 2;
            continue;
        }
        tide_text_put(t, "  wave %u: contributors %u..%u%s, rounds", w, wave->first, wave->first + wave->count - 1,
                      wave->first + wave->count - 1 == rs->nodes ? " (own node last)" : "");
        for (uint32_t i = 0; i < wave->n_rounds; i++)
            tide_text_put(t, " %u", rs->rounds[wave->first_round + i].count);
        tide_text_put(t, wave->n_rounds ? "\n" : " none\n");
    }
}

static void text_memory(tide_text *t, const tide_plan *plan, uint32_t rank, const tide_bytes *b)
{
    char note[64];

    tide_text_put(t, "\nmemory of rank %u\n", rank);
    text_bytes(t, "control", b->control, "counters and rail words");
    snprintf(note, sizeof note, "%u slots%s", plan->n_slots, plan_shared_landing(plan) ? ", one landing a node" : "");
    text_bytes(t, "landing", b->landing, note);
    text_bytes(t, "resident", b->resident, "adopted shards");
    text_bytes(t, "stage", b->stage, "all-gather receive stage");
    snprintf(note, sizeof note, "%lld slots", (long long)plan->options.n_stg);
    text_bytes(t, "staging", b->staging, note);
    snprintf(note, sizeof note, "2 banks of %u blocks", plan->rs.n_out);
    text_bytes(t, "outbox", b->outbox, note);
    text_bytes(t, "spare", b->spare, "own-node partials, 2 banks");
    snprintf(note, sizeof note, "%u generations of %u blocks", plan->rs.n_par, plan->rs.n_inbox);
    text_bytes(t, "inbox", b->inbox, note);
    text_bytes(t, "total", b->total, "");
}

static void text_tally(tide_text *t, const char *what, uint32_t group, const tally *c)
{
    char name[24];

    tide_text_put(t, "%s of group %u: digest %016llx\n  ops", what, group, (unsigned long long)c->digest);
    for (int k = 0; k < OP_KIND_COUNT; k++)
        if (c->ops[k])
            tide_text_put(t, " %s %llu", kind_name[k], (unsigned long long)c->ops[k]);
    tide_text_put(
        t, "\n  descriptors: %llu copies, %llu sums, %llu puts of %llu B in all, %llu signals and waits\n  streams",
        (unsigned long long)c->copies, (unsigned long long)c->segments, (unsigned long long)c->puts,
        (unsigned long long)c->put_bytes, (unsigned long long)c->posts);
    for (int i = 0; i < N_STREAMS; i++)
        if (c->stream[i])
            tide_text_put(t, " %s %llu", op_stream_name(i, name), (unsigned long long)c->stream[i]);
    tide_text_put(t, "\n");
}

static void text_plan(tide_text *t, const tide_plan *plan, uint32_t rank, const tide_bytes *bytes)
{
    tide_text_put(t, "plan %016llx: %u nodes x %u = %u ranks, %u group%s\n", (unsigned long long)plan->digest,
                  plan->topology.nodes, plan->topology.local, plan->topology.nodes * plan->topology.local,
                  plan->n_groups, plan->n_groups == 1 ? "" : "s");
    for (uint32_t i = 0; i < plan->n_groups; i++)
        text_group(t, plan, i);
    tide_text_put(t, "\nknobs\n ");
#define TIDE_X(name, dflt, lo, hi, help) tide_text_put(t, " " #name " %lld", (long long)plan->options.name);
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
    tide_text_put(t, "\n");
    text_rounds(t, plan);
    text_memory(t, plan, rank, bytes);
    tide_text_put(
        t, "\ncounters of a rank: %u resources (staging, inbox, %u landing slots) with 2 words for each of %u posters",
        schedule_resources(plan), plan->n_slots, plan->topology.local);
    if (plan->topology.nodes > 1)
        tide_text_put(
            t, "; on the rail %u signals on each of %lld contexts of %u peers, all_gather and reduce_scatter apart",
            SIG_COUNT, (long long)plan->options.n_ctx, plan->topology.nodes - 1);
    tide_text_put(t, "\n");
}

/* ---- JSON -------------------------------------------------------------------------------- */

static void json_group(tide_text *t, const tide_plan *plan, uint32_t index)
{
    const plan_group *p = &plan->groups[index];
    const geo_group *g = &p->geo;

    tide_text_put(t, "%s{\"name\": ", index ? ", " : "");
    tide_text_json_string(t, g->name);
    tide_text_put(
        t,
        ", \"dtype\": \"%s\", \"shard_dtype\": \"%s\", \"grad_dtype\": \"%s\", \"input\": \"%s\", \"landing\": \"%s\"",
        tide_dtype_name(g->dtype), tide_dtype_name(g->shard_dtype), tide_dtype_name(g->grad_dtype),
        g->input == TIDE_INPUT_ADOPTED ? "adopted" : "argument",
        g->landing_kind == TIDE_LANDING_RING ? "ring" : "private");
    put_u64(t, "item_size", g->item);
    put_u64(t, "slot", p->slot);
    put_u64(t, "elements", g->elements);
    put_u64(t, "shard_bytes", g->shard_bytes);
    put_u64(t, "landing_bytes", g->landing_bytes);
    tide_text_put(t, ", \"landing_to_landing\": %s", p->direct ? "true" : "false");
    put_u64(t, "sub_slice_elements", p->cut.sub);
    put_u64(t, "part_elements", p->cut.part);
    put_u64(t, "chunk_elements", p->cut.chunk);
    put_u64(t, "chunks", p->cut.n_chunks);
    tide_text_put(t, ", \"params\": [");
    for (uint32_t i = 0; i < g->n_params; i++) {
        const geo_param *q = &g->params[i];
        tide_text_put(t, "%s{\"name\": ", i ? ", " : "");
        tide_text_json_string(t, q->name);
        put_u64(t, "strips", q->outer);
        put_u64(t, "shard", q->shard);
        put_u64(t, "elements", q->whole);
        put_u64(t, "packed_offset", q->offset);
        put_u64(t, "landing_offset", q->landing);
        tide_text_put(t, "}");
    }
    tide_text_put(t, "]}");
}

static void json_rounds(tide_text *t, const tide_plan *plan)
{
    const plan_rs *rs = &plan->rs;
    plan_ag_round rounds[11];
    uint32_t n = plan_ag_rounds(plan->topology.nodes, rounds);

    tide_text_put(t, ", \"all_gather_rounds\": [");
    for (uint32_t d = 0; d < n; d++)
        tide_text_put(t, "%s{\"distance\": %u, \"slots\": %u}", d ? ", " : "", rounds[d].distance, rounds[d].count);
    tide_text_put(t, "], \"waves\": [");
    for (uint32_t w = 0; w < rs->n_waves; w++) {
        const plan_wave *wave = &rs->waves[w];
        tide_text_put(t, "%s{\"first\": %u, \"count\": %u, \"rounds\": [", w ? ", " : "", wave->first, wave->count);
        for (uint32_t i = 0; i < wave->n_rounds; i++)
            tide_text_put(t, "%s%u", i ? ", " : "", rs->rounds[wave->first_round + i].count);
        tide_text_put(t, "]}");
    }
    tide_text_put(t, "]");
    put_u64(t, "rounds", rs->n_rounds);
    put_u64(t, "blocks", rs->n_blocks);
}

static void json_tally(tide_text *t, const char *what, uint32_t group, const tally *c)
{
    char name[24];
    bool first = true;

    tide_text_put(t, "{\"collective\": \"%s\", \"group\": %u, \"digest\": \"%016llx\", \"ops\": {", what, group,
                  (unsigned long long)c->digest);
    for (int k = 0; k < OP_KIND_COUNT; k++)
        tide_text_put(t, "%s\"%s\": %llu", k ? ", " : "", kind_name[k], (unsigned long long)c->ops[k]);
    tide_text_put(t, "}");
    put_u64(t, "copies", c->copies);
    put_u64(t, "sums", c->segments);
    put_u64(t, "puts", c->puts);
    put_u64(t, "put_bytes", c->put_bytes);
    put_u64(t, "signals_and_waits", c->posts);
    tide_text_put(t, ", \"streams\": {");
    for (int i = 0; i < N_STREAMS; i++) {
        if (!c->stream[i])
            continue;
        tide_text_put(t, "%s\"%s\": %llu", first ? "" : ", ", op_stream_name(i, name),
                      (unsigned long long)c->stream[i]);
        first = false;
    }
    tide_text_put(t, "}}");
}

static void json_plan(tide_text *t, const tide_plan *plan, uint32_t rank, const tide_bytes *b)
{
    tide_text_put(t, "{\"schema\": 1, \"digest\": \"%016llx\", \"nodes\": %u, \"local\": %u, \"rank\": %u",
                  (unsigned long long)plan->digest, plan->topology.nodes, plan->topology.local, rank);
#define TIDE_X(name, dflt, lo, hi, help) tide_text_put(t, ", \"" #name "\": %lld", (long long)plan->options.name);
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
    json_rounds(t, plan);
    tide_text_put(t, ", \"memory\": {\"control\": %llu", (unsigned long long)b->control);
    put_u64(t, "landing", b->landing);
    put_u64(t, "resident", b->resident);
    put_u64(t, "stage", b->stage);
    put_u64(t, "staging", b->staging);
    put_u64(t, "outbox", b->outbox);
    put_u64(t, "spare", b->spare);
    put_u64(t, "inbox", b->inbox);
    put_u64(t, "total", b->total);
    tide_text_put(t, "}, \"landing_slots\": %u, \"local_resources\": %u, \"groups\": [", plan->n_slots,
                  schedule_resources(plan));
    for (uint32_t i = 0; i < plan->n_groups; i++)
        json_group(t, plan, i);
    tide_text_put(t, "], \"schedules\": [");
}

/* ---- both -------------------------------------------------------------------------------- */

/* Walks the op lists of `rank` and either says what is in them or prints them whole. */
static int put_schedules(tide_text *t, const tide_plan *plan, uint32_t rank, bool json, bool whole)
{
    static const char *const what[] = {"all_gather", "reduce_scatter"};
    bool first = true;

    for (uint32_t g = 0; g < plan->n_groups; g++) {
        for (int kind = SCHEDULE_AG; kind <= SCHEDULE_RS; kind++) {
            schedule s;
            tally c;
            int status;

            if (kind == SCHEDULE_RS && !reduces(plan, g))
                continue;
            status = schedule_build_call(plan, g, rank, kind, &s);
            if (status == TIDE_OK) {
                tide_text_put(t, !json ? "\n" : first ? "" : ", ");
                first = false;
                count(&s, &c);
                if (whole)
                    (json ? schedule_print_json : schedule_print)(&s, plan, t);
                else
                    (json ? json_tally : text_tally)(t, what[kind], g, &c);
            }
            schedule_clear(&s);
            if (status != TIDE_OK)
                return status;
        }
    }
    return t->status;
}

int tide_plan_print(const tide_plan *plan, uint32_t rank, unsigned flags, tide_write_fn write, void *context)
{
    tide_text t = {write, context, TIDE_OK};
    tide_bytes bytes = TIDE_BYTES_INIT;
    bool json = flags & TIDE_PRINT_JSON;
    int status;

    if (!write)
        return tide_fail(TIDE_ERR_ARGUMENT, "write: NULL, expected a function");
    if (flags & ~(TIDE_PRINT_JSON | TIDE_PRINT_OPS))
        return tide_fail(TIDE_ERR_ARGUMENT, "flags: %#x, expected TIDE_PRINT_JSON and TIDE_PRINT_OPS at most", flags);
    status = tide_plan_bytes(plan, rank, &bytes);
    if (status != TIDE_OK)
        return status;
    if (json)
        json_plan(&t, plan, rank, &bytes);
    else
        text_plan(&t, plan, rank, &bytes);
    status = put_schedules(&t, plan, rank, json, false);
    if (status == TIDE_OK && json)
        tide_text_put(&t, "]");
    if (status == TIDE_OK && (flags & TIDE_PRINT_OPS)) {
        tide_text_put(&t, json ? ", \"op_lists\": [" : "\n");
        status = put_schedules(&t, plan, rank, json, true);
        tide_text_put(&t, json ? "]" : "");
    }
    if (status == TIDE_OK && json)
        tide_text_put(&t, "}\n");
    return status == TIDE_OK ? t.status : status;
}
