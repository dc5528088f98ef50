/* run.c - replays a bound program: a loop over its ops, each one verb. */
#include "engine/state.h"

/* Chunks of a reduce-scatter are posted ahead of the sum, by the staging's slots; a rank leaves the call only behind the
 * sums of all others. A landing slot may be declared free for the next all-gather while this one is under way. */
static int tag_check(const bound_op *o)
{
    if (!(o->flags & OP_CHECK_TAG))
        return FAB_CHECK_NONE;
    return o->scope == SCOPE_LOCAL && o->resource < RESOURCE_SLOT0 ? FAB_CHECK_ANY : FAB_CHECK_EQUAL;
}

static int run_op(engine *e, const bound_op *o, fab_call *call, uint32_t parity, const uint64_t *base)
{
    const fab_device_verbs *verbs = e->device->verbs;
    const fab_rail_verbs *rail = e->device->rail;
    const void *list = o->list[parity];

    switch (o->kind) {
    case OP_COPY:
        return verbs->copy(e->queue, o->stream, call, list);
    case OP_REDUCE:
        return verbs->reduce(e->queue, o->stream, call, list);
    case OP_PUT:
        return rail->put(o->rail, o->stream, call, list, o->n, &o->where);
    case OP_SIGNAL:
        if (o->scope == SCOPE_RAIL)
            return rail->signal(o->rail, o->stream, call, list, o->n, &o->where);
        return verbs->signal(e->queue, o->stream, call, list, o->n, base[o->resource] + o->delta);
    case OP_WAIT:
        if (o->scope == SCOPE_RAIL)
            return rail->wait(o->rail, o->stream, call, list, o->n, tag_check(o), &o->where);
        return verbs->wait(e->queue, o->stream, call, list, o->n, base[o->resource] + o->delta, tag_check(o),
                           &o->where);
    case OP_RECORD:
        return verbs->record(e->queue, o->stream, o->event[parity]);
    default:
        return verbs->join(e->queue, o->stream, o->event[parity]);
    }
}

static int run_ops(engine *e, const engine_program *p, uint32_t first, uint32_t end, const pending_call *c)
{
    int status = TIDE_OK;
    for (uint32_t i = first; i < end && status == TIDE_OK; i++)
        status = run_op(e, &p->ops[i], c->call, c->parity, c->base);
    e->n_ops += end - first;
    return status;
}

static int check_args(const engine_program *p, const engine_args *args)
{
    if (!args || args->n_args != p->n_args || (p->n_args && !args->args))
        return tide_fail(TIDE_ERR_ARGUMENT, "args: %u pointers, expected %u", args && args->args ? args->n_args : 0,
                         p->n_args);
    for (uint32_t i = 0; i < p->n_args; i++)
        if (p->arg_used[i] && !args->args[i])
            return tide_fail(TIDE_ERR_ARGUMENT, "args[%u]: NULL, expected a pointer", i);
    return TIDE_OK;
}

/* What a whole call or a READ begins with. */
static int begin(engine *e, engine_program *p, const engine_args *args, void *stream, pending_call *out)
{
    uint64_t tag = p->kind == SCHEDULE_STASH ? 0 : p->tag;
    fab_call_desc desc = {args->args, p->n_args, args->accumulate, args->alpha, args->call, tag};
    int status = e->device->verbs->caller_record(e->queue, e->events.in, stream);
    if (status == TIDE_OK)
        status = e->device->verbs->call_begin(p->calls, &desc, &out->call);
    if (status != TIDE_OK)
        return status;
    out->program = p;
    ledger_snapshot(&e->ledger, p->resources, p->n_resources, out->base);
    ledger_advance(&e->ledger, p->steps, p->n_steps);
    out->parity = (uint32_t)(e->rs_calls & 1);
    if (p->kind == SCHEDULE_RS)
        e->rs_calls++;
    return TIDE_OK;
}

int engine_run(engine *e, engine_program *p, int part, const engine_args *args, void *stream)
{
    const fab_device_verbs *verbs = e->device->verbs;
    pending_call c = {0};
    int status = fab_check_fork();

    if (status != TIDE_OK)
        return status;
    if (part < ENGINE_ALL || part > ENGINE_NET || (p->kind != SCHEDULE_RS && part != ENGINE_ALL))
        return tide_fail(TIDE_ERR_ARGUMENT, "part: %d, expected %s", part,
                         p->kind != SCHEDULE_RS ? "ENGINE_ALL" : "an engine_part");
    if (part != ENGINE_NET && (status = check_args(p, args)) != TIDE_OK)
        return status;
    if (part == ENGINE_READ && e->n_pending == e->max_pending)
        return tide_fail(TIDE_ERR_STATE, "part: READ, but %u network phases are still to be enqueued, expected fewer",
                         e->n_pending);
    if (part == ENGINE_NET && (e->n_pending == 0 || e->pending[e->first_pending].program != p))
        return tide_fail(TIDE_ERR_STATE, "part: NET, expected it in the order of the READs, one for each");
    if (part == ENGINE_ALL && p->kind == SCHEDULE_RS && e->n_pending != 0)
        return tide_fail(TIDE_ERR_STATE, "part: ALL, but %u network phases are still to be enqueued, expected none",
                         e->n_pending);

    if (part == ENGINE_NET) {
        status = verbs->failure(e->device, NULL);
        if (status != TIDE_OK)
            return status;
        c = e->pending[e->first_pending];
        e->first_pending = (e->first_pending + 1) % MAX_PENDING;
        e->n_pending--;
    } else {
        status = begin(e, p, args, stream, &c);
        if (status != TIDE_OK)
            return status;
    }
    if (part != ENGINE_NET)
        status = run_ops(e, p, 0, p->n_read, &c);
    if (part != ENGINE_READ && status == TIDE_OK && p->n_read < p->n_ops) {
        status = verbs->caller_record(e->queue, e->events.gate, stream);
        if (status == TIDE_OK)
            status = run_ops(e, p, p->n_read, p->n_ops, &c);
    }
    if (part == ENGINE_READ && status == TIDE_OK)
        e->pending[(e->first_pending + e->n_pending++) % MAX_PENDING] = c;
    verbs->call_submit(c.call, part == ENGINE_READ);
    if (status != TIDE_OK)
        return engine_poison(e, p, args ? args->call : 0, status);
    return TIDE_OK;
}

int engine_free_slot(engine *e, uint32_t slot, void *stream)
{
    int status = fab_check_fork();
    if (status == TIDE_OK)
        status = e->device->verbs->failure(e->device, NULL);
    if (status != TIDE_OK)
        return status;
    if (slot >= e->events.n_slots)
        return tide_fail(TIDE_ERR_ARGUMENT, "slot: %u is not below %u", slot, e->events.n_slots);
    return e->device->verbs->caller_record(e->queue, e->events.free[slot], stream);
}

int engine_wait(engine *e, uint32_t group, int event, void *stream)
{
    int status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    if (group >= e->events.n_groups || event < EVENT_READY || event > EVENT_DONE)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "group %u, event %d: expected a group below %u and READY, READ_DONE or DONE", group, event,
                         e->events.n_groups);
    return e->device->verbs->caller_wait(e->queue, e->events.group[3 * group + (uint32_t)(event - EVENT_READY)],
                                         stream);
}

int engine_check_stream(const fab_device *device, void *stream)
{
    return device->verbs->caller_check((fab_device *)(uintptr_t)device, stream); /* changes nothing */
}

/* STREAM_AG_READY waits for the caller only. */
int engine_fill(engine *e, void *dst, uint8_t value, uint64_t bytes, void *stream)
{
    return e->device->verbs->caller_fill(e->queue, STREAM_AG_READY, dst, value, bytes, stream);
}

int engine_copy(engine *e, void *dst, const void *src, uint64_t bytes, void *stream)
{
    return e->device->verbs->caller_copy(e->queue, STREAM_AG_READY, dst, src, bytes, stream);
}

int engine_sync(engine *e)
{
    int status = fab_check_fork();
    if (status == TIDE_OK)
        status = e->device->verbs->sync(e->queue);
    if (status == TIDE_OK)
        engine_reap(e);
    return status;
}

uint64_t engine_ops(const engine *e)
{
    return e->n_ops;
}

uint64_t engine_program_digest(const engine_program *p)
{
    return p->digest;
}
