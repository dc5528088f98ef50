/*
 * simulate.c - executes op lists in simulated time.
 *
 * Everything that the host enqueues becomes an instance in the queue of its stream, with the moment at which the host
 * has enqueued it. The head of a queue starts when it is enqueued and what it waits for has come; it then takes
 * device_op, moves its bytes as flows, and ends. Whatever changes on a rank marks the rank; marked ranks have the heads
 * of their queues looked at again before time goes on.
 *
 * Mirror: one rank stands for all. What it sends to the rank d further on arrives as if from the rank d before it.
 */
#include <stdio.h>

#include "schedule/simulate_internal.h"

enum { TIMER_WAKE, TIMER_BEGIN, TIMER_POSTS, TIMER_PUTS };

static const struct { const char *name, *unit; } resource_names[] = {
#define TIDE_X(name, text, unit) {text, unit},
    SIMULATE_RESOURCES(TIDE_X)
#undef TIDE_X
};
const char *simulate_resource_name(int resource) { return resource_names[resource].name; }
const char *simulate_resource_unit(int resource) { return resource_names[resource].unit; }

/* Behind the streams of the op lists. */
static uint32_t task_stream(const simulation *s, const simulate_task *t)
{
    return STREAM_RS_PUSH0 + s->local + (uint32_t)t->stream;
}

/* ---- timers: a heap ordered by time, then by order of making -------------------------------------- */

static bool earlier(const sim_timer *a, const sim_timer *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void timer_add(simulation *s, sim_time at, uint32_t kind, uint32_t a, uint32_t b)
{
    uint32_t i = s->n_timers;
    sim_timer t = {at, s->n_orders++, kind, a, b};
    if (tide_grow(&s->timers, &s->cap_timers, (uint64_t)i + 1, sizeof *s->timers) != TIDE_OK) {
        s->status = TIDE_ERR_MEMORY;
        return;
    }
    s->n_timers++;
    for (; i > 0 && earlier(&t, &s->timers[(i - 1) / 2]); i = (i - 1) / 2)
        s->timers[i] = s->timers[(i - 1) / 2];
    s->timers[i] = t;
}

static sim_timer timer_take(simulation *s)
{
    sim_timer first = s->timers[0], last = s->timers[--s->n_timers];
    uint32_t i = 0;
    for (uint32_t child; (child = 2 * i + 1) < s->n_timers; i = child) {
        if (child + 1 < s->n_timers && earlier(&s->timers[child + 1], &s->timers[child]))
            child++;
        if (!earlier(&s->timers[child], &last))
            break;
        s->timers[i] = s->timers[child];
    }
    s->timers[i] = last;
    return first;
}

/* ---- counters and signals ------------------------------------------------------------------------- */

static void mark(simulation *s, uint32_t index)
{
    if (!s->ranks[index].dirty) {
        s->ranks[index].dirty = true;
        s->dirty[s->n_dirty++] = index;
    }
}

/* Word in the memory of `index` that the local rank `poster` writes. */
static sim_word *word_at(simulation *s, uint32_t index, const op *o, uint32_t poster)
{
    return &s->words[((index * (uint64_t)s->n_resources + o->resource) * 2 + o->which) * s->local + poster];
}

/* Signals at `index` from its rail's rank on `node`. */
static sim_word *rail_at(simulation *s, uint32_t index, uint32_t lane, uint32_t node, uint32_t ctx, uint32_t sig)
{
    return &s->rails[(((index * UINT64_C(2) + lane) * s->nodes + node) * s->n_ctx + ctx) * SIG_COUNT + sig];
}

static uint32_t lane_of(const op *o) { return o->stream >= STREAM_RS_STASH; }

static bool on_rail(const op *o)
{
    return o->kind == OP_PUT || ((o->kind == OP_SIGNAL || o->kind == OP_WAIT) && o->scope == SCOPE_RAIL);
}

/* What `rank` sends to `peer` is found at the simulated rank *index, as from local rank or node *from. */
static void deliver(simulation *s, uint32_t rank, uint32_t peer, bool rail, uint32_t *index, uint32_t *from)
{
    uint32_t self = rail ? rank / s->local : rank % s->local, other = rail ? peer / s->local : peer % s->local;
    uint32_t n = rail ? s->nodes : s->local;
    *index = sim_index(s, peer);
    *from = s->mirror ? (2 * self + n - other) % n : self;
}

static void send_rail(simulation *s, uint32_t instance, uint32_t rank, uint32_t lane, int32_t peer, uint32_t ctx,
                      uint32_t sig)
{
    uint32_t index, node;
    sim_word *w;
    deliver(s, rank, (uint32_t)peer, true, &index, &node);
    w = rail_at(s, index, lane, node, ctx, sig);
    w->value++;
    w->from = instance + 1;
    w->at = s->now;
    mark(s, index);
}

static void arrive_posts(simulation *s, uint32_t instance)
{
    const sim_instance *x = &s->instances[instance];
    uint32_t mine = x->chain / s->per_rank, rank = sim_rank_of(s, mine);
    const schedule *list = sim_list(s, x->call, mine);
    const op *o = &list->ops[x->op];
    uint64_t value = s->calls[x->call * (uint64_t)s->n_ranks + mine].base[o->resource] + o->delta;

    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_post *p = &list->posts[i];
        uint32_t index, poster;
        sim_word *w;
        if (o->scope == SCOPE_RAIL) {
            send_rail(s, instance, rank, lane_of(o), p->rank, p->ctx, p->sig);
            continue;
        }
        deliver(s, rank, (uint32_t)p->rank, false, &index, &poster);
        w = word_at(s, index, o, poster);
        w->value = tide_max_u64(w->value, value);
        w->from = instance + 1;
        w->at = s->now;
        mark(s, index);
    }
}

static void arrive_puts(simulation *s, uint32_t instance, uint32_t put)
{
    const sim_instance *x = &s->instances[instance];
    uint32_t mine = x->chain / s->per_rank, rank = sim_rank_of(s, mine);
    const schedule *list = sim_list(s, x->call, mine);
    const op *o = &list->ops[x->op];
    for (uint32_t i = put, end = work_segment_end(list, o, put); i < end; i++)
        send_rail(s, instance, rank, lane_of(o), list->puts[i].peer, list->puts[i].ctx, list->puts[i].sig);
}

/* ---- enqueueing ------------------------------------------------------------------------------------- */

static uint32_t record_new(simulation *s) /* index + 1 */
{
    if (tide_grow(&s->records, &s->cap_records, (uint64_t)s->n_records + 1, sizeof *s->records) != TIDE_OK) {
        s->status = TIDE_ERR_MEMORY;
        return 0;
    }
    s->records[s->n_records] = (sim_record){0, false};
    return ++s->n_records;
}

/* The latest record of a RESOURCE event of a rank, + 1. */
static uint32_t *resource_event(simulation *s, sim_rank *r, const op *o, uint32_t bank)
{
    uint64_t key = ((uint64_t)o->event << 48 | (uint64_t)bank << 32 | o->index) + 1;
    uint32_t at;

    if (2 * r->n_events >= r->size_events) {
        uint32_t size = r->size_events ? 2 * r->size_events : 16;
        void *old = r->events;
        uint32_t old_size = r->size_events;
        r->events = tide_calloc(size, sizeof *r->events);
        if (!r->events) {
            r->events = old;
            s->status = TIDE_ERR_MEMORY;
            return NULL;
        }
        r->size_events = size;
        for (uint32_t i = 0; i < old_size; i++) {
            uint64_t k;
            memcpy(&k, (char *)old + i * sizeof *r->events, sizeof k);
            if (!k)
                continue;
            for (at = (uint32_t)tide_fnv_u64(TIDE_FNV_BASIS, k) & (size - 1); r->events[at].key;
                 at = (at + 1) & (size - 1))
                ;
            memcpy(&r->events[at], (char *)old + i * sizeof *r->events, sizeof *r->events);
        }
        tide_free(old);
    }
    at = (uint32_t)tide_fnv_u64(TIDE_FNV_BASIS, key) & (r->size_events - 1);
    while (r->events[at].key && r->events[at].key != key)
        at = (at + 1) & (r->size_events - 1);
    if (!r->events[at].key) {
        r->events[at].key = key;
        r->n_events++;
    }
    return &r->events[at].record;
}

static void enqueue(simulation *s, uint32_t index, uint32_t stream, uint32_t call, uint32_t op_index, uint32_t aux,
                    uint32_t items)
{
    sim_rank *r = &s->ranks[index];
    sim_chain *c = &s->chains[index * s->per_rank + stream];
    if (tide_grow(&s->instances, &s->cap_instances, (uint64_t)s->n_instances + 1, sizeof *s->instances) != TIDE_OK ||
        tide_grow(&c->queue, &c->capacity, (uint64_t)c->n + 1, sizeof *c->queue) != TIDE_OK) {
        s->status = TIDE_ERR_MEMORY;
        return;
    }
    r->host += sim_ticks(s->m->host_op + items * s->m->host_item);
    s->instances[s->n_instances] = (sim_instance){.call = call, .op = op_index, .aux = aux, .enqueued = r->host,
                                                  .chain = index * s->per_rank + stream};
    c->queue[c->n++] = s->n_instances++;
}

/* Binds a RECORD or JOIN as the host enqueues it: record + 1, or 0 for what is over already. */
static uint32_t bind(simulation *s, uint32_t index, sim_call_state *cs, const op *o)
{
    sim_rank *r = &s->ranks[index];
    uint32_t *slot = NULL;

    switch (o->scope) {
    case SCOPE_CALL:
        slot = &cs->events[o->event];
        break;
    case SCOPE_RESOURCE:
        slot = resource_event(s, r, o, o->bank == BANK_CALL ? cs->parity : o->bank);
        break;
    default:
        if (o->event == EVENT_FREE)
            slot = &r->free[o->bank];
        else if (o->event == EVENT_READY)
            slot = &cs->ready;
        else if (o->event == EVENT_READ_DONE)
            slot = &cs->read_done;
        else if (o->event == EVENT_DONE)
            slot = &cs->done;
        else /* IN, GATE: what the caller's stream has been given so far. Shards to be gathered are there already. */
            return o->stream < STREAM_RS_STASH ? 0 : r->compute;
    }
    if (!slot)
        return 0;
    if (o->kind == OP_RECORD)
        *slot = record_new(s);
    return *slot;
}

static void enqueue_call(simulation *s, uint32_t index, const simulate_step *step)
{
    uint32_t call = step->index;
    sim_call_state *cs = &s->calls[call * (uint64_t)s->n_ranks + index];
    const schedule *list = sim_list(s, call, index);
    sim_rank *r = &s->ranks[index];
    uint32_t first = step->part == SIMULATE_NET ? list->n_read : 0;
    uint32_t last = step->part == SIMULATE_READ ? list->n_read : list->n_ops;

    if (!cs->begun) {
        cs->begun = true;
        cs->events = tide_calloc(list->n_call_events, sizeof *cs->events);
        cs->base = tide_calloc(s->n_resources, sizeof *cs->base);
        if (!cs->events || !cs->base) {
            s->status = TIDE_ERR_MEMORY;
            return;
        }
        memcpy(cs->base, r->base, s->n_resources * sizeof *cs->base);
        for (uint32_t i = 0; i < list->n_steps; i++)
            r->base[list->steps[i].resource] += list->steps[i].step;
        if (list->kind == SCHEDULE_RS)
            cs->parity = r->reads++ % 2;
    }
    for (uint32_t i = first; i < last && s->status == TIDE_OK; i++) {
        const op *o = &list->ops[i];
        uint32_t aux = 0, items = o->kind == OP_RECORD || o->kind == OP_JOIN ? 0 : o->count;
        if (o->kind == OP_RECORD || o->kind == OP_JOIN)
            aux = bind(s, index, cs, o);
        else if (on_rail(o))
            aux = s->lanes[index * 2 + lane_of(o)].enqueued++;
        enqueue(s, index, o->stream, call, i, aux, items);
    }
}

static void enqueue_step(simulation *s, uint32_t index, const simulate_step *step)
{
    sim_rank *r = &s->ranks[index];

    if (step->part == SIMULATE_TASK) {
        uint32_t made = record_new(s);
        s->task_records[step->index * (uint64_t)s->n_ranks + index] = made;
        if (s->in->tasks[step->index].stream == SIMULATE_COMPUTE)
            r->compute = made;
        enqueue(s, index, task_stream(s, &s->in->tasks[step->index]), step->index, SIM_TASK_OP, made, 0);
    } else if (step->part == SIMULATE_RELEASE) {
        const simulate_call *call = &s->in->calls[step->index];
        uint32_t slot = s->in->plan->groups[call->group].slot;
        r->free[slot] = r->compute;
        s->status = tide_grow(&s->releases, &s->cap_releases, (uint64_t)s->n_releases + 1, sizeof *s->releases);
        if (s->status == TIDE_OK)
            s->releases[s->n_releases++] = (sim_release){index, slot, r->compute};
    } else {
        enqueue_call(s, index, step);
    }
}

/* ---- starting ------------------------------------------------------------------------------------------ */

/* Keeps the latest of what an instance had to wait for. */
typedef struct allowed { sim_time at; uint32_t cause; } allowed;
static void later(allowed *a, sim_time at, uint32_t cause)
{
    if (at > a->at)
        *a = (allowed){at, cause};
}

static bool record_over(const simulation *s, uint32_t record, sim_chain *c, allowed *a)
{
    const sim_record *r;
    if (!record)
        return true;
    r = &s->records[record - 1];
    if (!r->done) {
        c->lacks_record = record;
        return false;
    }
    later(a, s->instances[r->instance].end, r->instance + 1);
    return true;
}

static bool local_come(simulation *s, uint32_t index, const sim_instance *x, const schedule *list, const op *o,
                       sim_chain *c, allowed *a)
{
    uint64_t need = s->calls[x->call * (uint64_t)s->n_ranks + index].base[o->resource] + o->delta;
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const sim_word *w = word_at(s, index, o, (uint32_t)list->posts[i].rank % s->local);
        if (w->value < need) {
            c->lacks_word = w;
            c->lacks_value = need;
            return false;
        }
        if (need > 0)
            later(a, w->at, w->from);
    }
    return true;
}

static bool rail_come(simulation *s, uint32_t index, const schedule *list, const op *o, sim_chain *c, allowed *a)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_post *p = &list->posts[i];
        const sim_word *w = rail_at(s, index, lane_of(o), (uint32_t)p->rank / s->local, p->ctx, p->sig);
        if (w->value < p->count) {
            c->lacks_word = w;
            c->lacks_value = p->count;
            return false;
        }
        later(a, w->at, w->from);
    }
    return true;
}

static bool after_over(const simulation *s, uint32_t index, const simulate_after *after, sim_chain *c, allowed *a)
{
    const sim_call_state *cs = &s->calls[after->index * (uint64_t)s->n_ranks + index];
    switch (after->event) {
    case AFTER_READY:
        return record_over(s, cs->ready, c, a);
    case AFTER_READ_DONE:
        return record_over(s, cs->read_done, c, a);
    case AFTER_DONE:
        return record_over(s, cs->done, c, a);
    case AFTER_TASK:
        return record_over(s, s->task_records[after->index * (uint64_t)s->n_ranks + index], c, a);
    default:
        return true;
    }
}

/* The first records belong to the library's credits for first use, which are there from registration on. */
static bool may_start(simulation *s, uint32_t index, sim_chain *c, const sim_instance *x, allowed *a)
{
    const schedule *list;
    const op *o;

    *a = (allowed){x->enqueued, SIM_HOST_CAUSE};
    if (c->last)
        later(a, s->instances[c->last - 1].end, c->last);
    if (x->enqueued > s->now) {
        c->lacks_time = x->enqueued;
        timer_add(s, x->enqueued, TIMER_WAKE, index, 0);
        return false;
    }
    if (x->op == SIM_TASK_OP) {
        for (int i = 0; i < 3; i++)
            if (!after_over(s, index, &s->in->tasks[x->call].after[i], c, a))
                return false;
        return true;
    }
    list = sim_list(s, x->call, index);
    o = &list->ops[x->op];
    if (o->kind == OP_JOIN)
        return record_over(s, x->aux, c, a);
    if (on_rail(o)) {
        const sim_lane *l = &s->lanes[index * 2 + lane_of(o)];
        if (l->turn != x->aux)
            return false;
        if (l->last)
            later(a, s->instances[l->last - 1].end, l->last);
        return o->kind != OP_WAIT || rail_come(s, index, list, o, c, a);
    }
    return o->kind != OP_WAIT || local_come(s, index, x, list, o, c, a);
}

static void finish(simulation *s, uint32_t instance)
{
    sim_instance *x = &s->instances[instance];
    uint32_t index = x->chain / s->per_rank;
    sim_chain *c = &s->chains[x->chain];
    const op *o = x->op == SIM_TASK_OP ? NULL : &sim_list(s, x->call, index)->ops[x->op];

    x->end = s->now;
    c->running = false;
    c->done++;
    c->last = instance + 1;
    s->ops_done++;
    if ((!o || o->kind == OP_RECORD) && x->aux) {
        s->records[x->aux - 1].done = true;
        s->records[x->aux - 1].instance = instance;
    } else if (o && on_rail(o)) {
        sim_lane *l = &s->lanes[index * 2 + lane_of(o)];
        s->ranks[index].lane_busy[lane_of(o)] += (double)(x->end - x->start) / SIM_SECOND;
        l->turn++;
        l->last = instance + 1;
    }
    mark(s, index);
}

static void take_rail(simulation *s, uint32_t index, const schedule *list, const op *o)
{
    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        const op_post *p = &list->posts[i];
        rail_at(s, index, lane_of(o), (uint32_t)p->rank / s->local, p->ctx, p->sig)->value -= p->count;
    }
}

static bool still_lacks(const simulation *s, sim_chain *c)
{
    if (c->lacks_time > s->now || (c->lacks_record && !s->records[c->lacks_record - 1].done) ||
        (c->lacks_word && c->lacks_word->value < c->lacks_value))
        return true;
    c->lacks_record = 0;
    c->lacks_word = NULL;
    return false;
}

/* Starts what can start at the head of a queue. Events take no time, so that the next may follow at once. */
static void advance_chain(simulation *s, uint32_t index, sim_chain *c)
{
    while (!c->running && c->done < c->n && s->status == TIDE_OK) {
        uint32_t instance = c->queue[c->done];
        sim_instance *x = &s->instances[instance];
        const op *o = x->op == SIM_TASK_OP ? NULL : &sim_list(s, x->call, index)->ops[x->op];
        allowed a;

        if (!may_start(s, index, c, x, &a))
            return;
        x->start = s->now;
        x->cause = a.cause;
        c->running = true;
        if (o && (o->kind == OP_RECORD || o->kind == OP_JOIN)) {
            finish(s, instance);
            continue;
        }
        if (o && o->kind == OP_WAIT && o->scope == SCOPE_RAIL)
            take_rail(s, index, sim_list(s, x->call, index), o);
        timer_add(s, s->now + sim_ticks(s->m->device_op), TIMER_BEGIN, instance, 0);
    }
}

static void begin(simulation *s, uint32_t instance)
{
    const sim_instance *x = &s->instances[instance];
    uint32_t index = x->chain / s->per_rank;
    const op *o = x->op == SIM_TASK_OP ? NULL : &sim_list(s, x->call, index)->ops[x->op];

    if (o && o->kind == OP_SIGNAL)
        timer_add(s, s->now + sim_ticks(o->scope == SCOPE_RAIL ? s->m->nic_latency : s->m->signal_latency), TIMER_POSTS,
                  instance, 0);
    if (!work_start(s, instance))
        finish(s, instance);
}

/* ---- time ---------------------------------------------------------------------------------------------- */

static void settle(simulation *s)
{
    while (s->n_dirty > 0 && s->status == TIDE_OK) {
        uint32_t index = s->dirty[--s->n_dirty];
        s->ranks[index].dirty = false;
        for (uint32_t i = 0; i < s->per_rank; i++) {
            sim_chain *c = &s->chains[index * s->per_rank + i];
            if (!c->running && c->done < c->n && !still_lacks(s, c))
                advance_chain(s, index, c);
        }
    }
}

static void end_flows(simulation *s)
{
    for (uint32_t i = 0; i < s->flows.n && s->status == TIDE_OK;) {
        sim_flow *flow = &s->flows.all[i];
        uint32_t instance = flow->owner, put = flow->aux, index;
        sim_instance *x = &s->instances[instance];
        bool is_put;
        if (flow->finish > s->now) {
            i++;
            continue;
        }
        index = x->chain / s->per_rank;
        is_put = x->op != SIM_TASK_OP && sim_list(s, x->call, index)->ops[x->op].kind == OP_PUT;
        flows_remove(&s->flows, i);
        if (is_put) {
            timer_add(s, s->now + sim_ticks(s->m->nic_latency), TIMER_PUTS, instance, put);
            work_next_put(s, instance, put);
        }
        if (--s->instances[instance].pending == 0)
            finish(s, instance);
    }
}

static void fire(simulation *s, const sim_timer *t)
{
    switch (t->kind) {
    case TIMER_WAKE:
        mark(s, t->a);
        break;
    case TIMER_BEGIN:
        begin(s, t->a);
        break;
    case TIMER_POSTS:
        arrive_posts(s, t->a);
        break;
    default:
        arrive_puts(s, t->a, t->b);
    }
}

static int stuck(const simulation *s)
{
    for (uint32_t i = 0; i < s->n_ranks * s->per_rank; i++) {
        const sim_chain *c = &s->chains[i];
        const sim_instance *x;
        char name[24];
        if (c->done == c->n)
            continue;
        x = &s->instances[c->queue[c->done]];
        if (x->op == SIM_TASK_OP)
            return tide_fail(TIDE_ERR_INTERNAL, "simulation: task %u can never start on rank %u", x->call,
                             sim_rank_of(s, i / s->per_rank));
        return tide_fail(TIDE_ERR_INTERNAL, "simulation: operation %u of call %u (%s) can never start on rank %u", x->op,
                         x->call, op_stream_name((int)(i % s->per_rank), name), sim_rank_of(s, i / s->per_rank));
    }
    return TIDE_OK;
}

static int execute(simulation *s)
{
    for (uint32_t i = 0; i < s->n_ranks; i++)
        mark(s, i);
    while (s->status == TIDE_OK) {
        sim_time next;
        settle(s);
        flows_share(&s->flows, s->now);
        next = flows_next(&s->flows);
        if (s->n_timers && s->timers[0].at < next)
            next = s->timers[0].at;
        if (next == SIM_NEVER)
            break;
        s->now = next;
        s->events++;
        end_flows(s);
        while (s->n_timers && s->timers[0].at <= s->now && s->status == TIDE_OK) {
            sim_timer t = timer_take(s);
            fire(s, &t);
        }
    }
    return s->status == TIDE_OK ? stuck(s) : s->status;
}

/* ---- setting up ------------------------------------------------------------------------------------------ */

static int build_programs(simulation *s)
{
    const tide_plan *plan = s->in->plan;
    for (uint32_t c = 0; c < s->in->n_calls; c++) {
        const simulate_call *call = &s->in->calls[c];
        sim_program *p = &s->programs[call->group * 3 + (uint32_t)call->kind];
        if (p->by_rank)
            continue;
        p->by_rank = tide_calloc(s->n_ranks, sizeof *p->by_rank);
        if (!p->by_rank)
            return TIDE_ERR_MEMORY;
        p->digest = TIDE_FNV_BASIS;
        for (uint32_t i = 0; i < s->n_ranks; i++) {
            int status = schedule_build_call(plan, call->group, sim_rank_of(s, i), call->kind, &p->by_rank[i]);
            if (status != TIDE_OK)
                return status;
            p->digest = tide_fnv_u64(p->digest, schedule_digest(&p->by_rank[i]));
        }
    }
    return TIDE_OK;
}

static int check(const simulate_input *in)
{
    uint32_t n_ranks = in->plan->topology.nodes * in->plan->topology.local;
    if (!in->every_rank && in->rank >= n_ranks)
        return tide_fail(TIDE_ERR_ARGUMENT, "rank: %u is not in 0..%u", in->rank, n_ranks - 1);
    for (uint32_t i = 0; i < in->n_calls; i++)
        if (in->calls[i].group >= in->plan->n_groups)
            return tide_fail(TIDE_ERR_ARGUMENT, "calls[%u].group: %u is not in 0..%u", i, in->calls[i].group,
                             in->plan->n_groups - 1);
    for (uint32_t i = 0; i < in->n_steps; i++) {
        uint32_t n = in->steps[i].part == SIMULATE_TASK ? in->n_tasks : in->n_calls;
        if (in->steps[i].index >= n)
            return tide_fail(TIDE_ERR_ARGUMENT, "steps[%u].index: %u is not in 0..%u", i, in->steps[i].index, n);
    }
    for (uint32_t i = 0; i < in->n_gradients; i++)
        if (in->gradients[i].task >= in->n_tasks)
            return tide_fail(TIDE_ERR_ARGUMENT, "gradients[%u].task: %u, but there are %u", i, in->gradients[i].task,
                             in->n_tasks);
    return TIDE_OK;
}

static int open_simulation(simulation *s, const simulate_input *in)
{
    const plan_machine *m = in->machine;
    const double capacity[SIMULATE_SHARED] = {m->copy_rate, m->local_copy_rate, m->sms,      m->hbm_rate,
                                              m->nvlink_rate, m->nvlink_rate,   m->nic_rate, m->nic_rate};
    uint64_t rails;
    int status;

    memset(s, 0, sizeof *s);
    s->in = in;
    s->m = m;
    s->nodes = in->plan->topology.nodes;
    s->local = in->plan->topology.local;
    s->mirror = !in->every_rank;
    s->n_ranks = s->mirror ? 1 : s->nodes * s->local;
    s->per_rank = STREAM_RS_PUSH0 + s->local + SIMULATE_STREAMS;
    s->n_ctx = (uint32_t)in->plan->options.n_ctx;
    s->n_resources = schedule_resources(in->plan);
    rails = s->n_ranks * UINT64_C(2) * s->nodes * s->n_ctx * SIG_COUNT;
    s->programs = tide_calloc(in->plan->n_groups * 3, sizeof *s->programs);
    s->calls = tide_calloc(in->n_calls * (uint64_t)s->n_ranks + 1, sizeof *s->calls);
    s->task_records = tide_calloc(in->n_tasks * (uint64_t)s->n_ranks + 1, sizeof *s->task_records);
    s->ranks = tide_calloc(s->n_ranks, sizeof *s->ranks);
    s->chains = tide_calloc(s->n_ranks * s->per_rank, sizeof *s->chains);
    s->words = tide_calloc(s->n_ranks * (uint64_t)s->n_resources * 2 * s->local, sizeof *s->words);
    s->rails = tide_calloc(rails, sizeof *s->rails);
    s->lanes = tide_calloc(s->n_ranks * 2, sizeof *s->lanes);
    s->dirty = tide_calloc(s->n_ranks, sizeof *s->dirty);
    if (!s->programs || !s->calls || !s->task_records || !s->ranks || !s->chains || !s->words || !s->rails ||
        !s->lanes || !s->dirty)
        return TIDE_ERR_MEMORY;
    status = flows_init(&s->flows, s->n_ranks);
    if (status != TIDE_OK)
        return status;
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        memcpy(&s->flows.capacity_of[i * SIMULATE_SHARED], capacity, sizeof capacity);
        s->ranks[i].base = tide_calloc(s->n_resources, sizeof *s->ranks[i].base);
        s->ranks[i].free = tide_calloc(in->plan->n_slots, sizeof *s->ranks[i].free);
        if (!s->ranks[i].base || !s->ranks[i].free)
            return TIDE_ERR_MEMORY;
    }
    return build_programs(s);
}

static void close_simulation(simulation *s)
{
    for (uint32_t i = 0; s->programs && i < s->in->plan->n_groups * 3; i++) {
        for (uint32_t k = 0; s->programs[i].by_rank && k < s->n_ranks; k++)
            schedule_clear(&s->programs[i].by_rank[k]);
        tide_free(s->programs[i].by_rank);
    }
    for (uint64_t i = 0; s->calls && i < s->in->n_calls * (uint64_t)s->n_ranks; i++) {
        tide_free(s->calls[i].events);
        tide_free(s->calls[i].base);
    }
    for (uint32_t i = 0; s->ranks && i < s->n_ranks; i++) {
        tide_free(s->ranks[i].base);
        tide_free(s->ranks[i].free);
        tide_free(s->ranks[i].events);
    }
    for (uint32_t i = 0; s->chains && i < s->n_ranks * s->per_rank; i++)
        tide_free(s->chains[i].queue);
    flows_clear(&s->flows);
    tide_free(s->programs);
    tide_free(s->calls);
    tide_free(s->task_records);
    tide_free(s->ranks);
    tide_free(s->chains);
    tide_free(s->instances);
    tide_free(s->records);
    tide_free(s->releases);
    tide_free(s->words);
    tide_free(s->rails);
    tide_free(s->lanes);
    tide_free(s->timers);
    tide_free(s->dirty);
}

int simulate_run(const simulate_input *input, simulate_result *result, tide_text *trace)
{
    simulation s;
    int status = check(input);

    if (status != TIDE_OK)
        return status;
    status = open_simulation(&s, input);
    for (uint32_t i = 0; i < s.n_ranks && status == TIDE_OK; i++) {
        for (uint32_t k = 0; k < input->n_steps && s.status == TIDE_OK; k++)
            enqueue_step(&s, i, &input->steps[k]);
        status = s.status;
    }
    if (status == TIDE_OK)
        status = execute(&s);
    if (status == TIDE_OK)
        report_fill(&s, result);
    if (status == TIDE_OK && trace) {
        report_trace(&s, trace);
        status = trace->status;
    }
    close_simulation(&s);
    return status;
}
