/* schedule.c - the op list itself: appending, clearing, names, digest. */
#include <stdio.h>

#include "schedule/schedule.h"

_Static_assert((int)SIG_COUNT == (int)PLAN_RAIL_SIGNALS,
               "the rail words in plan_control_bytes have one word a signal index");

const char *op_stream_name(int stream, char buffer[24])
{
    static const char *const names[] = {"ag.ready", "ag.call", "ag.scatter", "ag.done",
                                        "rs.stash", "rs.sum",  "rs.net",     "rs.land"};
    if (stream >= 0 && stream < STREAM_RS_PUSH0)
        snprintf(buffer, 24, "%s", names[stream]);
    else
        snprintf(buffer, 24, "rs.push%d", stream - STREAM_RS_PUSH0);
    return buffer;
}

const char *op_phase_name(int phase)
{
    static const char *const names[PHASE_COUNT] = {
        "all_gather free",       "all_gather push",     "all_gather credit",  "all_gather go",
        "all_gather heads",      "all_gather tails",    "all_gather scatter", "all_gather done",
        "reduce_scatter stash",  "reduce_scatter push", "reduce_scatter sum", "reduce_scatter credit",
        "reduce_scatter arrive", "reduce_scatter land",
    };
    return phase >= 0 && phase < PHASE_COUNT ? names[phase] : "invalid";
}

void schedule_clear(schedule *s)
{
    tide_free(s->ops);
    tide_free(s->runs);
    tide_free(s->segments);
    tide_free(s->puts);
    tide_free(s->posts);
    tide_free(s->steps);
    memset(s, 0, sizeof *s);
}

op *schedule_op(schedule *s, int kind, int stream, int phase)
{
    op *o;
    if (tide_grow(&s->ops, &s->cap_ops, (uint64_t)s->n_ops + 1, sizeof *s->ops) != TIDE_OK)
        return NULL;
    o = &s->ops[s->n_ops++];
    memset(o, 0, sizeof *o);
    o->kind = (uint8_t)kind;
    o->stream = (uint8_t)stream;
    o->phase = (uint8_t)phase;
    o->src_dtype = o->dst_dtype = TIDE_OPAQUE;
    switch (kind) {
    case OP_COPY:
        o->first = s->n_runs;
        break;
    case OP_REDUCE:
        o->first = s->n_segments;
        break;
    case OP_PUT:
        o->first = s->n_puts;
        break;
    case OP_SIGNAL:
    case OP_WAIT:
        o->first = s->n_posts;
        break;
    default:
        break;
    }
    return o;
}

op *schedule_op_or(schedule *s, int *status, op *ignored, int kind, int stream, int phase)
{
    op *o = *status == TIDE_OK ? schedule_op(s, kind, stream, phase) : NULL;
    if (o)
        return o;
    *status = TIDE_ERR_MEMORY;
    return ignored;
}

int schedule_run(schedule *s, const op_run *run)
{
    if (tide_grow(&s->runs, &s->cap_runs, (uint64_t)s->n_runs + 1, sizeof *s->runs) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    s->runs[s->n_runs++] = *run;
    s->ops[s->n_ops - 1].count++;
    return TIDE_OK;
}

int schedule_segment(schedule *s, const op_segment *segment)
{
    if (tide_grow(&s->segments, &s->cap_segments, (uint64_t)s->n_segments + 1, sizeof *s->segments) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    s->segments[s->n_segments++] = *segment;
    s->ops[s->n_ops - 1].count++;
    return TIDE_OK;
}

int schedule_put(schedule *s, const op_put *put)
{
    if (tide_grow(&s->puts, &s->cap_puts, (uint64_t)s->n_puts + 1, sizeof *s->puts) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    s->puts[s->n_puts++] = *put;
    s->ops[s->n_ops - 1].count++;
    return TIDE_OK;
}

int schedule_post(schedule *s, int32_t rank, uint16_t ctx, uint16_t sig, uint32_t count)
{
    if (tide_grow(&s->posts, &s->cap_posts, (uint64_t)s->n_posts + 1, sizeof *s->posts) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    s->posts[s->n_posts++] = (op_post){rank, ctx, sig, count};
    s->ops[s->n_ops - 1].count++;
    return TIDE_OK;
}

/* Stripe i of n covers [begin, end): whole vectors but for the last one's end. */
static uint64_t stripe_edge(uint64_t bytes, uint32_t i, uint32_t n)
{
    if (i == n)
        return bytes;
    return (bytes / n * i + bytes % n * i / n) / SCHEDULE_STRIPE_ALIGN * SCHEDULE_STRIPE_ALIGN;
}

uint32_t schedule_stripes(uint64_t bytes, uint32_t n_ctx)
{
    if (bytes == 0)
        return 0;
    return (uint32_t)tide_max_u64(1, tide_min_u64(n_ctx, bytes / SCHEDULE_STRIPE_BYTES));
}

int schedule_put_striped(schedule *s, int32_t peer, uint16_t sig, uint32_t n_ctx, const op_addr *src,
                         const op_addr *dst, uint64_t bytes)
{
    uint32_t n = schedule_stripes(bytes, n_ctx);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t begin = stripe_edge(bytes, i, n), end = stripe_edge(bytes, i + 1, n);
        op_put put = {peer, (uint16_t)i, sig, *src, *dst, end - begin};
        put.src.offset += begin;
        put.dst.offset += begin;
        if (schedule_put(s, &put) != TIDE_OK)
            return TIDE_ERR_MEMORY;
    }
    return TIDE_OK;
}

int schedule_await_striped(schedule *s, int32_t peer, uint16_t sig, uint32_t n_ctx, uint64_t bytes)
{
    uint32_t n = schedule_stripes(bytes, n_ctx);
    for (uint32_t i = 0; i < n; i++) {
        const op *o = &s->ops[s->n_ops - 1];
        uint32_t at = o->first;
        while (at < s->n_posts && !(s->posts[at].rank == peer && s->posts[at].ctx == i && s->posts[at].sig == sig))
            at++;
        if (at < s->n_posts)
            s->posts[at].count++;
        else if (schedule_post(s, peer, (uint16_t)i, sig, 1) != TIDE_OK)
            return TIDE_ERR_MEMORY;
    }
    return TIDE_OK;
}

int schedule_set_step(schedule *s, uint32_t resource, uint64_t step)
{
    for (uint32_t i = 0; i < s->n_steps; i++)
        if (s->steps[i].resource == resource) {
            s->steps[i].step += step;
            return TIDE_OK;
        }
    if (tide_grow(&s->steps, &s->cap_steps, (uint64_t)s->n_steps + 1, sizeof *s->steps) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    s->steps[s->n_steps++] = (schedule_step){resource, step};
    return TIDE_OK;
}

uint64_t schedule_tag(const tide_plan *plan, int kind, uint32_t group, const uint8_t *present, int grad_dtype)
{
    uint64_t h = tide_fnv_u64(TIDE_FNV_BASIS, plan->digest);
    h = tide_fnv_u64(h, (uint64_t)kind);
    h = tide_fnv_u64(h, group);
    h = tide_fnv_u64(h, (uint64_t)grad_dtype);
    for (uint32_t i = 0; i < plan->groups[group].geo.n_params; i++)
        h = tide_fnv_u64(h, !present || present[i]);
    return h;
}

/* ---- digest --------------------------------------------------------------------------------- */

static uint64_t digest_addr(uint64_t h, const op_addr *a)
{
    h = tide_fnv_u64(h, (uint64_t)a->space << 32 | (uint64_t)a->region << 16 | a->bank);
    h = tide_fnv_u64(h, (uint64_t)(int64_t)a->who);
    return tide_fnv_u64(h, a->offset);
}

static uint64_t digest_runs(uint64_t h, const schedule *s, const op *o)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_run *r = &s->runs[i];
        h = digest_addr(digest_addr(h, &r->src), &r->dst);
        h = tide_fnv_u64(tide_fnv_u64(h, r->width), r->rows);
        h = tide_fnv_u64(tide_fnv_u64(h, r->src_pitch), r->dst_pitch);
    }
    return h;
}

static uint64_t digest_segments(uint64_t h, const schedule *s, const op *o)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_segment *g = &s->segments[i];
        h = digest_addr(h, &g->dst);
        h = tide_fnv_u64(tide_fnv_u64(h, g->dst_pitch), g->elems);
        h = tide_fnv_u64(tide_fnv_u64(h, g->rows), g->n_sets);
        for (uint32_t k = 0; k < g->n_sets; k++) {
            const op_sources *q = &g->source[k];
            h = digest_addr(h, &q->at);
            h = tide_fnv_u64(tide_fnv_u64(h, q->row_pitch), q->step);
            h = tide_fnv_u64(tide_fnv_u64(h, q->count), (uint64_t)q->rank_step << 16 | q->dtype);
        }
    }
    return h;
}

static uint64_t digest_puts(uint64_t h, const schedule *s, const op *o)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_put *p = &s->puts[i];
        h = tide_fnv_u64(tide_fnv_u64(h, (uint64_t)(int64_t)p->peer), (uint64_t)p->ctx << 16 | p->sig);
        h = digest_addr(digest_addr(h, &p->src), &p->dst);
        h = tide_fnv_u64(h, p->bytes);
    }
    return h;
}

static uint64_t digest_posts(uint64_t h, const schedule *s, const op *o)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_post *p = &s->posts[i];
        h = tide_fnv_u64(tide_fnv_u64(h, (uint64_t)(int64_t)p->rank), (uint64_t)p->ctx << 16 | p->sig);
        h = tide_fnv_u64(h, p->count);
    }
    return h;
}

uint64_t schedule_digest(const schedule *s)
{
    uint64_t h = tide_fnv_u64(TIDE_FNV_BASIS, (uint64_t)s->kind);
    const uint32_t header[] = {s->rank,   s->nodes,         s->local, s->group,  s->n_args,
                               s->n_read, s->n_call_events, s->n_ops, s->n_steps};

    for (size_t i = 0; i < sizeof header / sizeof header[0]; i++)
        h = tide_fnv_u64(h, header[i]);
    h = tide_fnv_u64(h, s->tag);
    for (uint32_t i = 0; i < s->n_ops; i++) {
        const op *o = &s->ops[i];
        h = tide_fnv_u64(h, (uint64_t)o->kind | (uint64_t)o->stream << 8 | (uint64_t)o->phase << 16 |
                                (uint64_t)o->scope << 24 | (uint64_t)o->flags << 32 | (uint64_t)o->src_dtype << 40 |
                                (uint64_t)o->dst_dtype << 48 | (uint64_t)o->which << 56);
        h = tide_fnv_u64(h, (uint64_t)o->resource | (uint64_t)o->event << 16 | (uint64_t)o->bank << 32);
        h = tide_fnv_u64(h, (uint64_t)o->index << 32 | o->count);
        h = tide_fnv_u64(h, o->delta);
        switch (o->kind) {
        case OP_COPY:
            h = digest_runs(h, s, o);
            break;
        case OP_REDUCE:
            h = digest_segments(h, s, o);
            break;
        case OP_PUT:
            h = digest_puts(h, s, o);
            break;
        case OP_SIGNAL:
        case OP_WAIT:
            h = digest_posts(h, s, o);
            break;
        default:
            break;
        }
    }
    for (uint32_t i = 0; i < s->n_steps; i++)
        h = tide_fnv_u64(tide_fnv_u64(h, s->steps[i].resource), s->steps[i].step);
    return h;
}
