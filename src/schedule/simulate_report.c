/* simulate_report.c - what a simulation says: busy shares, the critical path, and a trace. */
#include <stdio.h>

#include "schedule/simulate_internal.h"

static const char *const kind_name[OP_KIND_COUNT] = {"COPY", "REDUCE", "PUT", "SIGNAL", "WAIT", "RECORD", "JOIN"};

static const op *op_of(const simulation *s, const sim_instance *x)
{
    return x->op == SIM_TASK_OP ? NULL : &sim_list(s, x->call, x->chain / s->per_rank)->ops[x->op];
}

static double seconds(sim_time t) { return (double)t / SIM_SECOND; }

static double record_end(const simulation *s, uint32_t record)
{
    return record ? seconds(s->instances[s->records[record - 1].instance].end) : 0;
}

/* ---- resources ---------------------------------------------------------------------------------- */

static void fill_resources(const simulation *s, simulate_result *out)
{
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        const sim_rank *r = &s->ranks[i];
        const double serial[] = {seconds(r->host), r->lane_busy[0], r->lane_busy[1]};
        for (int k = 0; k < SIMULATE_RESOURCE_COUNT; k++) {
            uint32_t at = i * SIMULATE_SHARED + (uint32_t)k;
            double units = k < SIMULATE_SHARED ? s->flows.units[at] : serial[k - SIMULATE_SHARED];
            double needs = k < SIMULATE_SHARED ? units / s->flows.capacity_of[at] : units;
            double busy = out->seconds > 0 ? needs / out->seconds : 0;
            if (busy > out->resource[k].busy) {
                out->resource[k].busy = busy;
                out->resource[k].units = units;
            }
            if (needs > out->bound && k < SIMULATE_SHARED)
                out->bound = needs;
        }
    }
}

/* ---- critical path ---------------------------------------------------------------------------------- */

/* Back from the last operation: its own time, then the time from the end of what allowed it. */
static void fill_path(const simulation *s, uint32_t last, simulate_path *path)
{
    for (const sim_instance *x = &s->instances[last];;) {
        const op *o = op_of(s, x);
        const sim_instance *from;
        sim_time gap;

        if (o)
            path->work[o->phase][o->kind] += seconds(x->end - x->start);
        else
            path->task[s->in->tasks[x->call].stream] += seconds(x->end - x->start);
        path->n_ops++;
        if (x->cause == SIM_HOST_CAUSE) {
            path->host += seconds(x->start);
            return;
        }
        from = &s->instances[x->cause - 1];
        gap = x->start - from->end;
        if (gap < 0) /* a segment of a put arrived before its last one left */
            gap = 0;
        path->signal += seconds(gap);
        if (from->end > x->start) { /* ... so count the put up to the arrival only */
            const op *f = op_of(s, from);
            if (f)
                path->work[f->phase][f->kind] -= seconds(from->end - x->start);
        }
        x = from;
    }
}

void report_fill(const simulation *s, simulate_result *out)
{
    double *call_seconds = out->call_seconds, *begin = out->task_begin, *end = out->task_end;
    uint32_t last = 0;

    memset(out, 0, sizeof *out);
    out->call_seconds = call_seconds;
    out->task_begin = begin;
    out->task_end = end;
    out->ranks = s->n_ranks;
    out->ops = s->ops_done;
    out->events = s->events;
    out->digest = TIDE_FNV_BASIS;
    for (uint32_t c = 0; c < s->in->n_calls; c++) {
        const simulate_call *call = &s->in->calls[c];
        out->digest = tide_fnv_u64(out->digest, s->programs[call->group * 3 + (uint32_t)call->kind].digest);
        call_seconds[c] = 0;
        for (uint32_t i = 0; i < s->n_ranks; i++) {
            const sim_call_state *cs = &s->calls[c * (uint64_t)s->n_ranks + i];
            double at = record_end(s, call->kind == SCHEDULE_AG   ? cs->ready
                                      : call->kind == SCHEDULE_RS ? cs->done
                                                                  : cs->read_done);
            if (at > call_seconds[c])
                call_seconds[c] = at;
        }
    }
    for (uint32_t i = 0; i < s->n_instances; i++) {
        const sim_instance *x = &s->instances[i];
        if (x->end > s->instances[last].end)
            last = i;
        if (x->op == SIM_TASK_OP && x->chain / s->per_rank == 0 && begin && end) {
            begin[x->call] = seconds(x->start);
            end[x->call] = seconds(x->end);
        }
    }
    if (s->n_instances == 0)
        return;
    out->seconds = seconds(s->instances[last].end);
    fill_resources(s, out);
    fill_path(s, last, &out->path);
}

/* ---- trace: https://ui.perfetto.dev reads it ---------------------------------------------------------- */

static void trace_thread(const simulation *s, uint32_t chain, tide_text *out)
{
    static const char *const tasks[SIMULATE_STREAMS] = {"compute", "copy in", "ring all-gather", "ring reduce-scatter"};
    uint32_t stream = chain % s->per_rank, real = STREAM_RS_PUSH0 + s->local;
    char name[24];
    tide_text_put(out, ",\n{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": %u, \"tid\": %u, \"args\": {\"name\": ",
                  sim_rank_of(s, chain / s->per_rank), stream);
    tide_text_json_string(out, stream < real ? op_stream_name((int)stream, name) : tasks[stream - real]);
    tide_text_put(out, "}}");
}

void report_trace(const simulation *s, tide_text *out)
{
    tide_text_put(out, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [");
    for (uint32_t i = 0; i < s->n_ranks; i++)
        tide_text_put(out, "%s\n{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %u, \"args\": {\"name\": \"rank %u\"}}",
                      i ? "," : "", sim_rank_of(s, i), sim_rank_of(s, i));
    for (uint32_t i = 0; i < s->n_ranks * s->per_rank; i++)
        if (s->chains[i].n)
            trace_thread(s, i, out);
    for (uint32_t i = 0; i < s->n_instances; i++) {
        const sim_instance *x = &s->instances[i];
        const op *o = op_of(s, x);
        if (x->end == x->start)
            continue;
        tide_text_put(out, ",\n{\"ph\": \"X\", \"pid\": %u, \"tid\": %u, \"ts\": %.6f, \"dur\": %.6f, \"name\": ",
                      sim_rank_of(s, x->chain / s->per_rank), x->chain % s->per_rank, (double)x->start / 1e6,
                      (double)(x->end - x->start) / 1e6);
        if (!o) {
            tide_text_json_string(out, s->in->tasks[x->call].label);
            tide_text_put(out, "}");
            continue;
        }
        tide_text_put(out, "\"%s\", \"cat\": \"%s\", \"args\": {\"call\": %u, \"op\": %u, \"items\": %u, \"waited\": %.6f}}",
                      kind_name[o->kind], op_phase_name(o->phase), x->call, x->op, o->count,
                      (double)(x->start - x->enqueued) / 1e6);
    }
    if (out->status == TIDE_OK)
        out->status = memory_trace(s, out);
    tide_text_put(out, "\n]}\n");
}
