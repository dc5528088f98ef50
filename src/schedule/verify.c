/* verify.c - happens-before: what is enqueued, what can run, and what each operation knows to have run before it. */
#include <stdio.h>

#include "schedule/verify_internal.h"

/* ---- clocks ------------------------------------------------------------------------------------------ */

static vclock *clock_new(verifier *v)
{
    vclock *c = v->free_clocks;
    if (c) {
        v->free_clocks = c->next;
    } else {
        c = tide_calloc(1, sizeof *c + v->n_chains * sizeof c->at[0]);
        if (!c) {
            v->status = TIDE_ERR_MEMORY;
            return NULL;
        }
    }
    c->refs = 1;
    return c;
}

static vclock *clock_keep(vclock *c)
{
    if (c)
        c->refs++;
    return c;
}

static void clock_drop(verifier *v, vclock *c)
{
    if (c && --c->refs == 0) {
        c->next = v->free_clocks;
        v->free_clocks = c;
    }
}

/* chain now follows `at` and everything in `from` (NULL: nothing else). */
static void clock_join(verifier *v, uint32_t chain_index, epoch at, const vclock *from)
{
    chain *c = &v->chains[chain_index];
    int32_t *mine;
    if (at.chain == CHAIN_START || at.chain == chain_index || c->clock->at[at.chain] >= at.at)
        return;
    if (c->clock->refs > 1) {
        vclock *copy = clock_new(v);
        if (!copy)
            return;
        memcpy(copy->at, c->clock->at, v->n_chains * sizeof copy->at[0]);
        clock_drop(v, c->clock);
        c->clock = copy;
    }
    mine = c->clock->at;
    if (from) {
        const int32_t *theirs = from->at;
        for (uint32_t i = 0; i < v->n_chains; i++)
            mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
    }
    if (mine[at.chain] < at.at)
        mine[at.chain] = at.at;
}

bool verify_ordered(const actor *a, epoch e)
{
    if (e.chain == CHAIN_PUT) {
        const put_state *p = &a->v->puts[e.at];
        if (a->put && (uint32_t)e.at == a->put - 1)
            return false; /* its own bytes twice */
        e = p->waiter;
        if (e.chain == CHAIN_START)
            return false; /* still on the rail */
    } else if (e.chain == CHAIN_START) {
        return true;
    }
    return e.chain == a->self.chain ? e.at < a->self.at : a->clock[e.chain] >= e.at;
}

/* ---- enqueueing ------------------------------------------------------------------------------------------ */

static uint32_t record_new(verifier *v) /* index + 1 */
{
    if (tide_grow(&v->records, &v->cap_records, (uint64_t)v->n_records + 1, sizeof *v->records) != TIDE_OK) {
        v->status = TIDE_ERR_MEMORY;
        return 0;
    }
    v->records[v->n_records] = (record){.at = epoch_start};
    return ++v->n_records;
}

static epoch chain_add(verifier *v, uint32_t index, uint32_t step, uint32_t op, uint32_t aux)
{
    chain *c = &v->chains[index];
    if (tide_grow(&c->queue, &c->capacity, (uint64_t)c->n + 1, sizeof *c->queue) != TIDE_OK) {
        v->status = TIDE_ERR_MEMORY;
        return epoch_start;
    }
    c->queue[c->n++] = (instance){step, op, aux};
    return (epoch){index, (int32_t)c->n};
}

/* The latest record of a RESOURCE event on a rank, + 1; NULL when out of memory. */
static uint32_t *resource_event(verifier *v, uint32_t rank, uint32_t event, uint32_t bank, uint32_t index)
{
    rank_state *r = &v->ranks[rank];
    uint64_t key = ((uint64_t)event << 48 | (uint64_t)bank << 32 | index) + 1;
    uint32_t *record = tide_map_at(&r->events, key);
    if (!record)
        v->status = TIDE_ERR_MEMORY;
    return record;
}

static void event_missing(verifier *v, epoch e, const char *what)
{
    char name[160];
    if (!verify_fresh(v, VERIFY_EVENT, e, epoch_start))
        return;
    verify_name(v, e, name);
    verify_line(v, VERIFY_EVENT, "%s %s", name, what);
}

/* Binds a RECORD or JOIN as the host enqueues it; returns the instance's aux. `e`: the instance to come. */
static uint32_t bind_event(verifier *v, uint32_t rank, call_rank *cr, const schedule *s, const op *o, epoch e,
                           const char **missing)
{
    uint32_t *slot = NULL, made;
    switch (o->scope) {
    case SCOPE_CALL:
        if (o->event >= s->n_call_events) {
            *missing = "names an event that the call does not have";
            return 0;
        }
        slot = &cr->events[o->event];
        if (o->kind == OP_JOIN && !*slot)
            *missing = "joins an event that is not recorded yet: no wait at all";
        break;
    case SCOPE_RESOURCE:
        slot = resource_event(v, rank, o->event, o->bank == BANK_CALL ? cr->parity : o->bank, o->index);
        break;
    case SCOPE_EXTERN:
        switch (o->event) {
        case EVENT_FREE:
            if (o->bank < v->in->n_slots)
                slot = &v->ranks[rank].free[o->bank];
            break;
        case EVENT_READY:
            slot = o->kind == OP_RECORD ? &cr->ready : NULL;
            break;
        case EVENT_READ_DONE:
            slot = o->kind == OP_RECORD ? &cr->read_done : NULL;
            break;
        case EVENT_DONE:
            slot = o->kind == OP_RECORD ? &cr->done : NULL;
            break;
        case EVENT_IN:
        case EVENT_GATE:
            if (o->kind == OP_JOIN && (o->event == EVENT_IN || cr->gated))
                return UINT32_MAX; /* the caller's events have run */
            break;
        default:
            break;
        }
        if (!slot)
            *missing = "uses an external event in a way that has no meaning";
        break;
    default:
        *missing = "has no event scope";
        break;
    }
    if (!slot)
        return 0;
    if (o->kind == OP_JOIN)
        return *slot;
    made = record_new(v);
    if (made)
        v->records[made - 1].at = e;
    *slot = made;
    return made;
}

/* The checks that make the rest safe: streams, resources, peers. */
static const char *malformed(const verifier *v, uint32_t rank, const schedule *s, const op *o)
{
    uint32_t items = o->kind == OP_COPY     ? s->n_runs
                     : o->kind == OP_REDUCE ? s->n_segments
                     : o->kind == OP_PUT    ? s->n_puts
                                            : s->n_posts;
    uint32_t local = v->in->local;
    if (o->kind >= OP_KIND_COUNT || o->stream >= STREAM_RS_PUSH0 + local)
        return "has an unknown kind or stream";
    if ((o->stream < STREAM_RS_STASH) != (s->kind == SCHEDULE_AG))
        return "is on the other lane's stream";
    if (o->kind == OP_RECORD || o->kind == OP_JOIN)
        return NULL;
    if (!o->count || o->first > items || o->count > items - o->first)
        return "has no items";
    if (o->kind == OP_PUT) {
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            const op_put *p = &s->puts[i];
            if (p->peer < 0 || (uint32_t)p->peer >= v->n_ranks || (uint32_t)p->peer == rank ||
                (uint32_t)p->peer % local != rank % local || p->ctx >= v->in->n_ctx || p->sig >= SIG_COUNT)
                return "names a peer, context or signal that its rail does not have";
        }
    }
    if (o->kind != OP_SIGNAL && o->kind != OP_WAIT)
        return NULL;
    if (o->scope != SCOPE_LOCAL && o->scope != SCOPE_RAIL)
        return "is neither local nor on the rail";
    if (o->scope == SCOPE_LOCAL && (o->resource >= v->n_resources || o->which > WORD_B))
        return "names a counter that does not exist";
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_post *p = &s->posts[i];
        if (p->rank < 0 || (uint32_t)p->rank >= v->n_ranks)
            return "names a rank that does not exist";
        if (o->scope == SCOPE_LOCAL && (uint32_t)p->rank / local != rank / local)
            return "counts across nodes";
        if (o->scope == SCOPE_RAIL &&
            ((uint32_t)p->rank == rank || (uint32_t)p->rank % local != rank % local || p->ctx >= v->in->n_ctx ||
             p->sig >= SIG_COUNT || (o->kind == OP_WAIT && !p->count)))
            return "names a peer, context, signal or count that its rail does not have";
    }
    return NULL;
}

static void enqueue_op(verifier *v, uint32_t step, uint32_t rank, call_rank *cr, const schedule *s, uint32_t index)
{
    const op *o = &s->ops[index];
    uint32_t chain_index = rank * v->per_rank + o->stream, aux = 0;
    const char *wrong = malformed(v, rank, s, o);
    epoch e = {chain_index, 0};

    if (wrong) { /* named on the rank's first stream, left out of the order */
        e = chain_add(v, rank * v->per_rank + (o->stream < STREAM_RS_PUSH0 ? o->stream : 0), step, index, 0);
        if (v->status == TIDE_OK && verify_fresh(v, VERIFY_FORM, e, epoch_start)) {
            char name[160];
            verify_name(v, e, name);
            verify_line(v, VERIFY_FORM, "%s %s", name, wrong);
        }
        v->stop = true;
        return;
    }
    e.at = (int32_t)v->chains[chain_index].n + 1;
    if (o->kind == OP_RECORD || o->kind == OP_JOIN)
        aux = bind_event(v, rank, cr, s, o, e, &wrong);
    else if (on_rail(o))
        aux = v->lanes[lane_of(rank, o)].enqueued++;
    if (o->kind == OP_WAIT && o->scope == SCOPE_LOCAL) {
        for (uint32_t i = o->first; i < o->first + o->count; i++) {
            word *w = &v->words[word_index(v, rank, o, (uint32_t)s->posts[i].rank)];
            if (!w->waiter)
                w->waiter = chain_index + 1;
            else if (w->waiter != chain_index + 1)
                w->several = true;
        }
    }
    chain_add(v, chain_index, step, index, aux);
    if (wrong && v->status == TIDE_OK)
        event_missing(v, e, wrong);
}

static void begin_call(verifier *v, uint32_t rank, call_rank *cr, const schedule *s, const verify_contract *c)
{
    if (cr->begun)
        return;
    cr->begun = true;
    cr->events = tide_calloc(s->n_call_events, sizeof *cr->events);
    cr->base = tide_calloc(v->n_resources, sizeof *cr->base);
    cr->readers = tide_calloc(v->per_rank, sizeof *cr->readers);
    if (!cr->events || !cr->base || !cr->readers) {
        v->status = TIDE_ERR_MEMORY;
        return;
    }
    memcpy(cr->base, v->ranks[rank].base, v->n_resources * sizeof *cr->base);
    for (uint32_t i = 0; i < s->n_steps; i++)
        if (s->steps[i].resource < v->n_resources)
            v->ranks[rank].base[s->steps[i].resource] += s->steps[i].step;
    if (c->kind == VERIFY_RS)
        cr->parity = v->ranks[rank].reads++ % 2;
}

static void enqueue(verifier *v, uint32_t step_index, uint32_t rank)
{
    const verify_step *step = &v->in->steps[step_index];
    const verify_call *call = &v->in->calls[step->call];
    const verify_contract *c = call->contract;
    call_rank *cr = &v->calls[(uint64_t)step->call * v->n_ranks + rank];
    const schedule *s = call->by_rank[rank];
    uint32_t slot_chain = rank * v->per_rank + v->chain_slot + c->slot, in_chain = rank * v->per_rank + v->chain_in;
    uint32_t first = 0, last = s->n_ops;

    switch (step->part) {
    case VERIFY_PART_USE:
    case VERIFY_PART_RELEASE: {
        epoch e = chain_add(v, slot_chain, step_index, (uint32_t)INSTANCE_USE, cr->ready);
        if (v->status == TIDE_OK && !cr->ready)
            event_missing(v, e, "waits for READY, which nothing records: no wait at all");
        if (step->part == VERIFY_PART_RELEASE) {
            uint32_t made = record_new(v);
            e = chain_add(v, slot_chain, step_index, (uint32_t)INSTANCE_FREE, made);
            if (v->status == TIDE_OK)
                v->records[made - 1].at = e;
            v->ranks[rank].free[c->slot] = made;
        }
        return;
    }
    case VERIFY_PART_READ:
        last = s->n_read;
        break;
    case VERIFY_PART_NET:
        first = s->n_read;
        break;
    default:
        break;
    }
    begin_call(v, rank, cr, s, c);
    /* IN and GATE are this point of the caller's time. A stash follows the caller's use of the slot, the others follow
     * nothing that the library did: what a caller happens to have waited for before must not be what makes a plan
     * correct. */
    if (step->part == VERIFY_PART_NET) {
        cr->gate = chain_add(v, in_chain, step_index, (uint32_t)INSTANCE_IN, 0);
        cr->gated = true;
    } else {
        cr->in =
            chain_add(v, step->part == VERIFY_PART_STASH ? slot_chain : in_chain, step_index, (uint32_t)INSTANCE_IN, 0);
        if (step->part == VERIFY_PART_READ && v->status == TIDE_OK &&
            object_init(&cr->out, c->elements * 4, (value){.kind = VALUE_PRIOR}, epoch_start) != TIDE_OK)
            v->status = TIDE_ERR_MEMORY;
    }
    for (uint32_t i = first; i < last && v->status == TIDE_OK && !v->stop; i++)
        enqueue_op(v, step_index, rank, cr, s, i);
}

/* ---- running ------------------------------------------------------------------------------------------------ */

static uint32_t post_new(verifier *v)
{
    uint32_t i = v->free_posts;
    if (i) {
        v->free_posts = v->posts[i].next;
        return i;
    }
    if (tide_grow(&v->posts, &v->cap_posts, (uint64_t)v->n_posts + 1, sizeof *v->posts) != TIDE_OK) {
        v->status = TIDE_ERR_MEMORY;
        return 0;
    }
    return v->n_posts++;
}

static uint32_t post_drop(verifier *v, uint32_t i) /* returns the next */
{
    uint32_t next = v->posts[i].next;
    clock_drop(v, v->posts[i].clock);
    v->posts[i].next = v->free_posts;
    v->free_posts = i;
    return next;
}

static void counter(const actor *a, epoch other, const char *format, uint64_t x, uint64_t y)
{
    char name[160], text[256];
    if (!verify_fresh(a->v, VERIFY_COUNTER, a->self, other))
        return;
    verify_name(a->v, a->self, name);
    snprintf(text, sizeof text, format, (unsigned long long)x, (unsigned long long)y);
    verify_line(a->v, VERIFY_COUNTER, "%s %s", name, text);
}

static void send_rail(actor *a, int32_t peer, uint32_t ctx, uint32_t sig, uint32_t put)
{
    verifier *v = a->v;
    flow *f = &v->flows[flow_index(v, (uint32_t)peer, a->rank, a->o->stream >= STREAM_RS_STASH, ctx, sig)];
    uint32_t i = post_new(v);
    if (!i)
        return;
    v->posts[i] = (post){.at = a->self, .clock = clock_keep(v->chains[a->self.chain].clock), .put = put};
    if (f->n++)
        v->posts[f->tail].next = i;
    else
        f->head = i;
    f->tail = i;
    v->in_flight++;
    v->dirty[peer] = true;
}

static bool rail_has(const verifier *v, uint32_t rank, const schedule *s, const op *o)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_post *p = &s->posts[i];
        uint64_t need = 0;
        for (uint32_t k = o->first; k <= i; k++)
            if (s->posts[k].rank == p->rank && s->posts[k].ctx == p->ctx && s->posts[k].sig == p->sig)
                need += s->posts[k].count;
        if (v->flows[flow_index(v, rank, (uint32_t)p->rank, o->stream >= STREAM_RS_STASH, p->ctx, p->sig)].n < need)
            return false;
    }
    return true;
}

static void wait_rail(actor *a)
{
    verifier *v = a->v;
    for (uint32_t i = a->o->first; i < a->o->first + a->o->count; i++) {
        const op_post *p = &a->s->posts[i];
        flow *f = &v->flows[flow_index(v, a->rank, (uint32_t)p->rank, a->o->stream >= STREAM_RS_STASH, p->ctx, p->sig)];
        for (uint32_t k = 0; k < p->count; k++) {
            post *x = &v->posts[f->head];
            clock_join(v, a->self.chain, x->at, x->clock);
            if (x->put)
                v->puts[x->put - 1].waiter = a->self;
            f->head = post_drop(v, f->head);
            f->n--;
            v->in_flight--;
        }
    }
}

static uint64_t declared(const schedule *s, uint32_t resource)
{
    for (uint32_t i = 0; i < s->n_steps; i++)
        if (s->steps[i].resource == resource)
            return s->steps[i].step;
    return 0;
}

/* Counters count: a post adds one, so that a lost or doubled one shows. */
static void signal_local(actor *a)
{
    verifier *v = a->v;
    uint64_t x = a->cr->base[a->o->resource] + a->o->delta, step = declared(a->s, a->o->resource);
    if (a->o->delta > step)
        counter(a, epoch_start, "posts %llu past its base, but the call declares a step of %llu", a->o->delta, step);
    for (uint32_t i = a->o->first; i < a->o->first + a->o->count; i++) {
        uint32_t target = (uint32_t)a->s->posts[i].rank, n;
        word *w = &v->words[word_index(v, target, a->o, a->rank)];
        if (!verify_ordered(a, w->at))
            counter(a, w->at, "posts %llu unordered with its previous post of %llu", x, w->last);
        if (x != w->last + 1)
            counter(a, epoch_start, "posts %llu after %llu, expected the next number", x, w->last);
        n = post_new(v);
        if (!n)
            return;
        v->posts[n] =
            (post){.value = x, .tag = a->s->tag, .at = a->self, .clock = clock_keep(v->chains[a->self.chain].clock)};
        if (w->head)
            v->posts[w->tail].next = n;
        else
            w->head = n;
        w->tail = n;
        w->last = tide_max_u64(w->last, x);
        w->at = a->self;
        v->dirty[target] = true;
    }
}

static void wait_local(actor *a)
{
    verifier *v = a->v;
    uint64_t x = a->cr->base[a->o->resource] + a->o->delta;
    for (uint32_t i = a->o->first; i < a->o->first + a->o->count; i++) {
        word *w = &v->words[word_index(v, a->rank, a->o, (uint32_t)a->s->posts[i].rank)];
        uint32_t k = w->head;
        if (x <= w->dropped && w->several)
            continue; /* satisfied by a post whose clock is gone: claim nothing */
        while (k && v->posts[k].value < x)
            k = v->posts[k].next;
        if (!k)
            continue; /* zero: satisfied from the start */
        clock_join(v, a->self.chain, v->posts[k].at, v->posts[k].clock);
        if (a->o->flags & OP_CHECK_TAG && v->posts[k].tag != a->s->tag)
            counter(a, v->posts[k].at, "meets tag %016llx, its own is %016llx: the ranks run different calls",
                    v->posts[k].tag, a->s->tag);
        /* The same chain gains nothing from a smaller value later. */
        while (!w->several && w->head && v->posts[w->head].value < x) {
            w->dropped = tide_max_u64(w->dropped, v->posts[w->head].value);
            w->head = post_drop(v, w->head);
        }
    }
}

static bool runnable(const verifier *v, uint32_t rank, const instance *i)
{
    const verify_call *call = &v->in->calls[v->in->steps[i->step].call];
    const schedule *s = call->by_rank[rank];
    const op *o;
    if ((int32_t)i->op < 0)
        return (int32_t)i->op != INSTANCE_USE || !i->aux || v->records[i->aux - 1].done;
    o = &s->ops[i->op];
    if (o->kind == OP_JOIN && i->aux == UINT32_MAX) {
        const call_rank *cr = &v->calls[(uint64_t)v->in->steps[i->step].call * v->n_ranks + rank];
        epoch e = o->event == EVENT_GATE ? cr->gate : cr->in;
        return (int32_t)v->chains[e.chain].done >= e.at;
    }
    if (o->kind == OP_JOIN)
        return !i->aux || v->records[i->aux - 1].done;
    if (on_rail(o)) {
        if (v->lanes[lane_of(rank, o)].done != i->aux)
            return false;
        return o->kind != OP_WAIT || rail_has(v, rank, s, o);
    }
    if (o->kind == OP_WAIT) {
        uint64_t x = v->calls[(uint64_t)v->in->steps[i->step].call * v->n_ranks + rank].base[o->resource] + o->delta;
        for (uint32_t k = o->first; k < o->first + o->count; k++)
            if (v->words[word_index(v, rank, o, (uint32_t)s->posts[k].rank)].last < x)
                return false;
    }
    return true;
}

static void run_record(actor *a, const instance *i)
{
    verifier *v = a->v;
    record *r;
    if (!i->aux)
        return;
    r = &v->records[i->aux - 1];
    r->done = true;
    r->clock = clock_keep(v->chains[a->self.chain].clock);
    if (!a->o || a->o->scope != SCOPE_EXTERN)
        return;
    if (a->o->event == EVENT_READY)
        access_close_inputs(a, "READY");
    else if (a->o->event == EVENT_READ_DONE)
        access_close_inputs(a, "READ_DONE");
    else if (a->o->event == EVENT_DONE)
        access_output(a);
}

static void run(verifier *v, uint32_t rank, uint32_t chain_index)
{
    chain *c = &v->chains[chain_index];
    const instance *i = &c->queue[c->done];
    uint32_t call = v->in->steps[i->step].call;
    actor a = {.v = v, .self = {chain_index, (int32_t)c->done + 1}, .rank = rank, .call = call,
               .cr = &v->calls[(uint64_t)call * v->n_ranks + rank], .s = v->in->calls[call].by_rank[rank]};
    lane *l = NULL;

    a.name = verify_identity(v, a.self);
    if ((int32_t)i->op >= 0) {
        a.o = &a.s->ops[i->op];
        if (a.s->kind == SCHEDULE_AG)
            v->result->ag_ops++;
        else
            v->result->rs_ops++;
    }
    if (a.o && on_rail(a.o)) {
        l = &v->lanes[lane_of(rank, a.o)];
        clock_join(v, chain_index, l->at, l->clock);
    }
    /* First what it follows ... */
    if ((a.o && a.o->kind == OP_JOIN) || (int32_t)i->op == INSTANCE_USE) {
        if (i->aux == UINT32_MAX)
            clock_join(v, chain_index, a.o->event == EVENT_GATE ? a.cr->gate : a.cr->in,
                       a.o->event == EVENT_GATE ? NULL : a.cr->in_clock);
        else if (i->aux)
            clock_join(v, chain_index, v->records[i->aux - 1].at, v->records[i->aux - 1].clock);
    } else if (a.o && a.o->kind == OP_WAIT) {
        if (a.o->scope == SCOPE_RAIL)
            wait_rail(&a);
        else
            wait_local(&a);
    }
    a.clock = c->clock->at;
    if (v->status != TIDE_OK)
        return;
    /* ... then what it does. */
    if (l && a.s->kind == SCHEDULE_RS && !verify_ordered(&a, a.cr->gate) &&
        verify_fresh(v, VERIFY_EVENT, a.self, a.cr->gate)) {
        char name[160];
        verify_name(v, a.self, name);
        verify_line(v, VERIFY_EVENT, "%s is on the rail but not behind the caller's gate", name);
    }
    if ((int32_t)i->op == INSTANCE_IN) {
        a.cr->in_clock = a.cr->in_clock ? a.cr->in_clock : clock_keep(c->clock);
    } else if ((int32_t)i->op == INSTANCE_USE) {
        access_landing(&a);
    } else if ((int32_t)i->op == INSTANCE_FREE) {
        run_record(&a, i);
    } else {
        switch (a.o->kind) {
        case OP_COPY:
            access_copy(&a);
            break;
        case OP_REDUCE:
            access_reduce(&a);
            break;
        case OP_PUT:
            for (uint32_t k = a.o->first; k < a.o->first + a.o->count && v->status == TIDE_OK; k++) {
                const op_put *p = &a.s->puts[k];
                if (tide_grow(&v->puts, &v->cap_puts, (uint64_t)v->n_puts + 1, sizeof *v->puts) != TIDE_OK) {
                    v->status = TIDE_ERR_MEMORY;
                    break;
                }
                v->puts[v->n_puts++] = (put_state){a.self, epoch_start};
                a.put = v->n_puts;
                access_put(&a, p);
                send_rail(&a, p->peer, p->ctx, p->sig, a.put);
            }
            break;
        case OP_SIGNAL:
            if (a.o->scope == SCOPE_LOCAL)
                signal_local(&a);
            else
                for (uint32_t k = a.o->first; k < a.o->first + a.o->count; k++)
                    send_rail(&a, a.s->posts[k].rank, a.s->posts[k].ctx, a.s->posts[k].sig, 0);
            break;
        case OP_RECORD:
            run_record(&a, i);
            break;
        default:
            break;
        }
    }
    if (l) {
        l->done++;
        clock_drop(v, l->clock);
        l->clock = clock_keep(c->clock);
        l->at = a.self;
    }
    c->done++;
}

/* Runs everything that can run. */
static void advance(verifier *v)
{
    for (bool any = true; any && v->status == TIDE_OK && !v->stop;) {
        any = false;
        for (uint32_t rank = 0; rank < v->n_ranks; rank++) {
            if (!v->dirty[rank])
                continue;
            v->dirty[rank] = false;
            any = true;
            for (bool more = true; more && v->status == TIDE_OK && !v->stop;) {
                more = false;
                for (uint32_t k = rank * v->per_rank; k < (rank + 1) * v->per_rank; k++) {
                    while (v->chains[k].done < v->chains[k].n && v->status == TIDE_OK && !v->stop &&
                           runnable(v, rank, &v->chains[k].queue[v->chains[k].done])) {
                        run(v, rank, k);
                        more = true;
                    }
                }
            }
        }
    }
}

/* ---- set-up --------------------------------------------------------------------------------------------------- */

static int set_up(verifier *v)
{
    const verify_input *in = v->in;
    uint32_t n_objects = 0;
    v->n_ranks = in->nodes * in->local;
    v->chain_in = STREAM_RS_PUSH0 + in->local;
    v->chain_slot = v->chain_in + 1;
    v->per_rank = v->chain_slot + in->n_slots;
    v->n_chains = v->n_ranks * v->per_rank;
    v->n_resources = RESOURCE_SLOT0 + in->n_slots;
    v->sets.words = (v->n_ranks + 63) / 64;
    for (uint32_t r = 0; r < REGION_COUNT; r++) {
        v->first_object[r] = n_objects;
        n_objects += in->map->region[r].n_banks * v->n_ranks;
    }
    v->first_object[REGION_COUNT] = n_objects;
    v->chains = tide_calloc(v->n_chains, sizeof *v->chains);
    v->ranks = tide_calloc(v->n_ranks, sizeof *v->ranks);
    v->calls = tide_calloc((uint64_t)in->n_calls * v->n_ranks, sizeof *v->calls);
    v->objects = tide_calloc(n_objects, sizeof *v->objects);
    v->words = tide_calloc((uint64_t)v->n_ranks * v->n_resources * 2 * in->local, sizeof *v->words);
    v->flows = tide_calloc((uint64_t)v->n_ranks * 2 * in->nodes * in->n_ctx * SIG_COUNT, sizeof *v->flows);
    v->lanes = tide_calloc(v->n_ranks * 2u, sizeof *v->lanes);
    v->dirty = tide_calloc(v->n_ranks, sizeof *v->dirty);
    v->sets.single = tide_calloc(v->n_ranks, sizeof *v->sets.single);
    v->sets.bits = tide_calloc(16, v->sets.words * sizeof *v->sets.bits);
    if (!v->chains || !v->ranks || !v->calls || !v->objects || !v->words || !v->flows || !v->lanes || !v->dirty ||
        !v->sets.single || !v->sets.bits)
        return TIDE_ERR_MEMORY;
    v->sets.capacity = 16;
    v->sets.n = 1; /* the empty set */
    v->n_posts = v->n_readers = 1; /* index 0 means none */
    for (uint64_t i = 0; i < (uint64_t)v->n_ranks * v->n_resources * 2 * in->local; i++)
        v->words[i].at = epoch_start;
    for (uint32_t i = 0; i < v->n_ranks * 2; i++)
        v->lanes[i].at = epoch_start;
    for (uint32_t i = 0; i < v->n_ranks; i++) {
        v->ranks[i].base = tide_calloc(v->n_resources, sizeof *v->ranks[i].base);
        v->ranks[i].free = tide_calloc(in->n_slots, sizeof *v->ranks[i].free);
        if (!v->ranks[i].base || !v->ranks[i].free)
            return TIDE_ERR_MEMORY;
    }
    for (uint32_t i = 0; i < v->n_chains; i++) {
        v->chains[i].clock = i ? clock_keep(v->chains[0].clock) : clock_new(v);
        if (!v->chains[i].clock)
            return TIDE_ERR_MEMORY;
    }
    for (uint32_t i = 0; i < in->n_calls * v->n_ranks; i++)
        v->calls[i].in = v->calls[i].gate = epoch_start;
    for (uint32_t r = 0; r < REGION_COUNT; r++) {
        for (uint32_t i = v->first_object[r]; i < v->first_object[r + 1]; i++) {
            uint64_t bytes =
                r == REGION_RESIDENT ? 0 : in->map->region[r].banks[(i - v->first_object[r]) / v->n_ranks].bytes;
            /* The inbox starts zeroed; the shards are not memory here but inputs. */
            if (object_init(&v->objects[i], bytes, (value){.kind = r == REGION_INBOX ? VALUE_ZERO : VALUE_NONE},
                            epoch_start) != TIDE_OK)
                return TIDE_ERR_MEMORY;
        }
    }
    if (tide_grow(&v->posts, &v->cap_posts, 64, sizeof *v->posts) != TIDE_OK ||
        tide_grow(&v->readers, &v->cap_readers, 64, sizeof *v->readers) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    return TIDE_OK;
}

static void tear_down(verifier *v)
{
    for (uint32_t i = 0; v->objects && i < v->first_object[REGION_COUNT]; i++)
        object_clear(&v->objects[i]);
    for (uint64_t i = 0; v->calls && i < (uint64_t)v->in->n_calls * v->n_ranks; i++) {
        object_clear(&v->calls[i].out);
        clock_drop(v, v->calls[i].in_clock);
        tide_free(v->calls[i].events);
        tide_free(v->calls[i].base);
        tide_free(v->calls[i].readers);
    }
    for (uint32_t i = 0; v->ranks && i < v->n_ranks; i++) {
        tide_free(v->ranks[i].base);
        tide_free(v->ranks[i].free);
        tide_free(v->ranks[i].events.entries);
    }
    for (uint32_t i = 0; v->lanes && i < v->n_ranks * 2; i++)
        clock_drop(v, v->lanes[i].clock);
    for (uint32_t i = 0; i < v->n_records; i++)
        clock_drop(v, v->records[i].clock);
    for (uint64_t i = 0; v->words && i < (uint64_t)v->n_ranks * v->n_resources * 2 * v->in->local; i++)
        for (uint32_t k = v->words[i].head; k;)
            k = post_drop(v, k);
    for (uint64_t i = 0; v->flows && i < (uint64_t)v->n_ranks * 2 * v->in->nodes * v->in->n_ctx * SIG_COUNT; i++)
        for (uint32_t k = v->flows[i].n ? v->flows[i].head : 0; k;)
            k = post_drop(v, k);
    for (uint32_t i = 0; v->chains && i < v->n_chains; i++) {
        clock_drop(v, v->chains[i].clock);
        tide_free(v->chains[i].queue);
    }
    while (v->free_clocks) {
        vclock *next = v->free_clocks->next;
        tide_free(v->free_clocks);
        v->free_clocks = next;
    }
    tide_free(v->seen.entries);
    tide_free(v->read.items);
    tide_free(v->fold.items);
    tide_free(v->next.items);
    tide_free(v->sets.memo.entries);
    tide_free(v->sets.bits);
    tide_free(v->sets.single);
    tide_free(v->dirty);
    tide_free(v->lanes);
    tide_free(v->flows);
    tide_free(v->words);
    tide_free(v->readers);
    tide_free(v->posts);
    tide_free(v->puts);
    tide_free(v->records);
    tide_free(v->objects);
    tide_free(v->calls);
    tide_free(v->ranks);
    tide_free(v->chains);
}

static int check_input(const verify_input *in)
{
    if (!in->nodes || in->nodes > TIDE_MAX_NODES || !in->local || in->local > TIDE_MAX_LOCAL || !in->n_ctx ||
        !in->n_slots)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "verify: nodes %u, local %u, n_ctx %u, n_slots %u: expected at least 1 each", in->nodes,
                         in->local, in->n_ctx, in->n_slots);
    for (uint32_t i = 0; i < in->n_steps; i++) {
        const verify_step *s = &in->steps[i];
        const verify_contract *c = s->call < in->n_calls ? in->calls[s->call].contract : NULL;
        if (!c)
            return tide_fail(TIDE_ERR_ARGUMENT, "verify: step %u names call %u of %u", i, s->call, in->n_calls);
        if (c->slot >= in->n_slots || c->slot >= in->map->region[REGION_LANDING].n_banks)
            return tide_fail(TIDE_ERR_ARGUMENT, "verify: call %u is in slot %u of %u", s->call, c->slot, in->n_slots);
    }
    return TIDE_OK;
}

int verify_run(const verify_input *input, const verify_options *options, verify_result *result)
{
    verifier v = {.in = input, .options = options, .result = result};
    int status = check_input(input);

    memset(result, 0, sizeof *result);
    if (status != TIDE_OK)
        return status;
    v.status = set_up(&v);
    for (uint32_t k = 0; k < input->n_steps && v.status == TIDE_OK && !v.stop; k++) {
        const verify_step *step = &input->steps[k];
        for (uint32_t rank = 0; rank < v.n_ranks && v.status == TIDE_OK && !v.stop; rank++) {
            if (step->without == (int32_t)rank)
                continue;
            enqueue(&v, k, rank);
            v.dirty[rank] = true;
        }
        if (step->part == VERIFY_PART_AG || step->part == VERIFY_PART_READ)
            result->calls++;
        advance(&v);
        if (v.status == TIDE_OK && !v.stop)
            verify_progress(&v, k);
    }
    if (v.status == TIDE_OK && !v.stop)
        verify_ends(&v);
    status = v.status;
    tear_down(&v);
    return status == TIDE_ERR_MEMORY ? tide_fail(status, "verify: out of memory") : status;
}
