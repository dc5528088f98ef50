/* verify_report.c - names of operations, each report once, and what is left when nothing can run any more. */
#include <stdarg.h>
#include <stdio.h>

#include "schedule/verify_internal.h"

static const char *const kind_names[OP_KIND_COUNT] = {"COPY", "REDUCE", "PUT", "SIGNAL", "WAIT", "RECORD", "JOIN"};

const char *verify_class_name(int class)
{
    static const char *const names[] = {"race",    "stuck", "unwritten", "rewritten", "bounds",
                                        "content", "sum",   "event",     "counter",   "form"};
    return class >= 0 && class < VERIFY_CLASS_COUNT ? names[class] : "unknown";
}

/* ---- names and reports --------------------------------------------------------------------------------- */

static const instance *instance_of(const verifier *v, epoch e)
{
    return &v->chains[e.chain].queue[e.at - 1];
}

void verify_name(const verifier *v, epoch e, char out[160])
{
    const instance *i;
    const schedule *s;
    uint32_t rank, call;
    char stream[24], put[32] = "";
    if (e.chain == CHAIN_PUT) {
        e = v->puts[e.at].sender;
        snprintf(put, sizeof put, " (its bytes)");
    }
    if (e.chain == CHAIN_START) {
        snprintf(out, 160, "the start");
        return;
    }
    i = instance_of(v, e);
    rank = e.chain / v->per_rank;
    call = v->in->steps[i->step].call;
    if ((int32_t)i->op < 0) {
        static const char *const names[] = {"", "the caller's call", "the caller's use of the landing",
                                            "the caller's release of the slot"};
        snprintf(out, 160, "rank %u call %u: %s", rank, call, names[-(int32_t)i->op]);
        return;
    }
    s = v->in->calls[call].by_rank[rank];
    snprintf(out, 160, "rank %u call %u (%s of group %u) op %u %s on %s%s", rank, call,
             s->kind == SCHEDULE_AG   ? "all_gather"
             : s->kind == SCHEDULE_RS ? "reduce_scatter"
                                      : "stash",
             s->group, i->op, kind_names[s->ops[i->op].kind], op_stream_name(s->ops[i->op].stream, stream), put);
}

uint64_t verify_identity(const verifier *v, epoch e)
{
    const instance *i;
    const verify_call *c;
    uint32_t rank, name;
    if (e.chain == CHAIN_PUT)
        e = v->puts[e.at].sender;
    if (e.chain == CHAIN_START)
        return 0;
    i = instance_of(v, e);
    rank = e.chain / v->per_rank;
    c = &v->in->calls[v->in->steps[i->step].call];
    name = (int32_t)i->op >= 0 && c->origin && c->origin[rank] ? c->origin[rank][i->op] : i->op;
    return verify_mix(verify_mix((uint64_t)i->step << 32 | name) + rank + 1);
}

bool verify_fresh(verifier *v, int class, epoch a, epoch b)
{
    uint64_t h = verify_mix(verify_mix((uint64_t)a.chain << 32 | (uint32_t)a.at) +
                            verify_mix((uint64_t)b.chain << 32 | (uint32_t)b.at) * 3 + (uint64_t)class + 1);
    uint32_t *seen;
    if (v->stop)
        return false;
    seen = tide_map_at(&v->seen, h + !h);
    if (!seen)
        v->status = TIDE_ERR_MEMORY;
    if (!seen || *seen)
        return false;
    *seen = 1;
    v->result->violations++;
    v->result->by_class[class]++;
    if (v->options->stop_after && v->result->violations >= v->options->stop_after)
        v->stop = true;
    return true;
}

void verify_line(verifier *v, int class, const char *format, ...)
{
    char text[1024];
    va_list args;
    if (!v->options->out || v->result->violations > v->options->lines)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    tide_text_put(v->options->out, "%s: %s\n", verify_class_name(class), text);
}

void verify_race(const actor *a, epoch other, bool writes, bool other_writes, const char *where, uint64_t lo,
                 uint64_t hi)
{
    verifier *v = a->v;
    char mine[160], theirs[160], known[160] = "nothing of it";
    epoch wait = other;
    if (!verify_fresh(v, VERIFY_RACE, a->self, other))
        return;
    verify_name(v, a->self, mine);
    verify_name(v, other, theirs);
    if (other.chain == CHAIN_PUT) {
        wait = v->puts[other.at].waiter;
        if (wait.chain == CHAIN_START)
            snprintf(known, sizeof known, "no wait for its signal");
    }
    if (wait.chain != CHAIN_START && wait.chain == a->self.chain)
        snprintf(known, sizeof known, "itself");
    else if (wait.chain != CHAIN_START && a->clock[wait.chain])
        verify_name(v, (epoch){wait.chain, a->clock[wait.chain]}, known);
    verify_line(v, VERIFY_RACE,
                "%s %s [%llu, %llu) of %s, which %s %s; missing: an edge from the latter to the former, which knows %s",
                mine, writes ? "writes" : "reads", (unsigned long long)lo, (unsigned long long)hi, where, theirs,
                other_writes ? "writes" : "reads", known);
}

/* ---- what remains -------------------------------------------------------------------------------------------- */

static void stuck_line(verifier *v, epoch e, const schedule *s, const op *o, const call_rank *cr)
{
    char name[160], text[256];
    verify_name(v, e, name);
    snprintf(text, sizeof text, "is behind an operation of its lane that cannot run");
    for (uint32_t k = o->first; o->kind == OP_WAIT && k < o->first + o->count; k++) {
        const op_post *p = &s->posts[k];
        uint32_t rank = e.chain / v->per_rank;
        if (o->scope == SCOPE_LOCAL) {
            const word *w = &v->words[word_index(v, rank, o, (uint32_t)p->rank)];
            uint64_t x = cr->base[o->resource] + o->delta;
            if (w->last >= x)
                continue;
            snprintf(text, sizeof text, "waits for rank %d to post %llu (resource %u word %c), which has posted %llu",
                     p->rank, (unsigned long long)x, o->resource, 'A' + o->which, (unsigned long long)w->last);
            break;
        }
        if (v->flows[flow_index(v, rank, (uint32_t)p->rank, o->stream >= STREAM_RS_STASH, p->ctx, p->sig)].n <
            p->count) {
            snprintf(text, sizeof text, "waits for %u signals %u of rank %d in context %u, has %u", p->count, p->sig,
                     p->rank, p->ctx,
                     v->flows[flow_index(v, rank, (uint32_t)p->rank, o->stream >= STREAM_RS_STASH, p->ctx, p->sig)].n);
            break;
        }
    }
    verify_line(v, VERIFY_STUCK, "%s %s; no operation enqueued so far can", name, text);
}

/* Everything enqueued so far has to have run: a producer that comes with a later call comes too late for a host that
 * waits. */
void verify_progress(verifier *v, uint32_t step)
{
    for (int pass = 0; pass < 2 && !v->stop;
         pass++) { /* first the waits themselves, then, if none, what is behind them */
        bool found = false, stuck = false;
        for (uint32_t k = 0; k < v->n_chains; k++) {
            const chain *c = &v->chains[k];
            const instance *i;
            uint32_t rank = k / v->per_rank, call;
            const schedule *s;
            const op *o;
            if (c->done == c->n)
                continue;
            stuck = true;
            i = &c->queue[c->done];
            if ((int32_t)i->op < 0)
                continue;
            call = v->in->steps[i->step].call;
            s = v->in->calls[call].by_rank[rank];
            o = &s->ops[i->op];
            if (pass == 0 && (o->kind != OP_WAIT || (on_rail(o) && v->lanes[lane_of(rank, o)].done != i->aux)))
                continue;
            found = true;
            if (verify_fresh(v, VERIFY_STUCK, (epoch){k, (int32_t)c->done + 1}, epoch_start))
                stuck_line(v, (epoch){k, (int32_t)c->done + 1}, s, o, &v->calls[(uint64_t)call * v->n_ranks + rank]);
        }
        if (!stuck)
            break;
        if (found || pass == 1) {
            v->stop = true;
            return;
        }
    }
    if (v->in_flight && !v->stop) {
        for (uint64_t k = 0; k < (uint64_t)v->n_ranks * 2 * v->in->nodes * v->in->n_ctx * SIG_COUNT; k++) {
            epoch e;
            char name[160];
            if (!v->flows[k].n)
                continue;
            e = v->posts[v->flows[k].head].at;
            if (!verify_fresh(v, VERIFY_COUNTER, e, (epoch){CHAIN_START, (int32_t)step + 1}))
                continue;
            verify_name(v, e, name);
            verify_line(v, VERIFY_COUNTER, "%s sends a signal that nobody awaits before the call is over", name);
        }
    }
}

void verify_ends(verifier *v)
{
    for (uint32_t i = 0; i < v->in->n_calls * v->n_ranks && !v->stop; i++) {
        const call_rank *cr = &v->calls[i];
        uint32_t call = i / v->n_ranks, rank = i % v->n_ranks;
        const verify_contract *c = v->in->calls[call].contract;
        const char *missing = NULL;
        if (!cr->begun)
            continue;
        if (c->kind == VERIFY_AG && !cr->ready)
            missing = "READY";
        if (c->kind != VERIFY_AG && !cr->read_done)
            missing = "READ_DONE";
        if (c->kind == VERIFY_RS && !cr->done)
            missing = "DONE";
        if (missing && verify_fresh(v, VERIFY_EVENT, cr->in, epoch_start))
            verify_line(v, VERIFY_EVENT, "rank %u call %u never records %s", rank, call, missing);
    }
}
