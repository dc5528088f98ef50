/*
 * calls.c - the collectives: argument checks, who holds which landing slot, reads paired with network phases.
 *
 * Everything that can be refused is refused before the engine sees the call, and a refused call changes nothing.
 */
#include <stdio.h>

#include "comm/comm.h"

static int enter_call(const tide_group *group, void *stream)
{
    int status = comm_enter_group(group);
    return status == TIDE_OK ? engine_check_stream(group->set->comm->device, stream) : status;
}

static comm_slot *slot_of(const tide_group *group)
{
    return &group->set->slots[group->plan->slot];
}

static void slot_set(comm_slot *slot, int state, tide_group *owner)
{
    *slot = (comm_slot){.state = state, .owner = owner};
}

static int check_held(const tide_group *group)
{
    const comm_slot *slot = slot_of(group);
    char mine[96], other[96];
    if (slot->state == SLOT_HELD && slot->owner == group)
        return TIDE_OK;
    comm_group_label(group, mine);
    if (slot->owner == group)
        return tide_fail(TIDE_ERR_STATE,
                         "%s has stashed gradients in its landing; its reduce-scatter gives the landing back", mine);
    if (slot->owner)
        return tide_fail(TIDE_ERR_STATE, "%s is not gathered: landing slot %u belongs to %s", mine, group->plan->slot,
                         comm_group_label(slot->owner, other));
    return tide_fail(TIDE_ERR_STATE, "%s is not gathered: landing slot %u is free", mine, group->plan->slot);
}

/* ---- all-gather --------------------------------------------------------------------------------- */

static int check_shards(const tide_group *group, const void *const *shards)
{
    const geo_group *geo = &group->plan->geo;
    uint32_t item = tide_dtype_bytes(geo->shard_dtype);
    char label[96];

    if (geo->input == TIDE_INPUT_ADOPTED) {
        if (shards)
            return tide_fail(TIDE_ERR_ARGUMENT, "shards: not NULL, but %s reads its adopted shards",
                             comm_group_label(group, label));
        return TIDE_OK;
    }
    if (!shards)
        return tide_fail(TIDE_ERR_ARGUMENT, "shards: NULL, expected %u pointers for %s", geo->n_params,
                         comm_group_label(group, label));
    for (uint32_t p = 0; p < geo->n_params; p++) {
        if (!shards[p] && geo->params[p].shard > 0)
            return tide_fail(TIDE_ERR_ARGUMENT, "shards[%u]: NULL, expected %llu elements of %s", p,
                             (unsigned long long)geo->params[p].shard, tide_dtype_name(geo->shard_dtype));
        if (item > 1 && (uintptr_t)shards[p] % item != 0)
            return tide_fail(TIDE_ERR_ARGUMENT, "shards[%u]: %p is not aligned to the %u bytes of %s", p,
                             (const void *)shards[p], item, tide_dtype_name(geo->shard_dtype));
    }
    return TIDE_OK;
}

static int check_slot_free(const tide_group *group)
{
    const comm_slot *slot = slot_of(group);
    char mine[96], other[96];

    if (slot->state == SLOT_FREE)
        return TIDE_OK;
    comm_group_label(group, mine);
    comm_group_label(slot->owner, other);
    if (slot->state == SLOT_STASHED)
        return tide_fail(TIDE_ERR_STATE,
                         "%s needs landing slot %u, where %s has stashed gradients that its reduce-scatter has not "
                         "read",
                         mine, group->plan->slot, other);
    if (slot->state == SLOT_READING)
        return tide_fail(TIDE_ERR_STATE,
                         "%s needs landing slot %u, where the network phase of %s still reads gradients: enqueue it "
                         "first",
                         mine, group->plan->slot, other);
    if (slot->owner == group)
        return tide_fail(TIDE_ERR_STATE, "%s is already gathered and not released", mine);
    return tide_fail(TIDE_ERR_STATE,
                     "%s needs landing slot %u, which still belongs to %s: release that first, or give one of them a "
                     "private landing",
                     mine, group->plan->slot, other);
}

int tide_all_gather(tide_group *group, const void *const *shards, void *stream)
{
    engine_args args = {.alpha = 1.0f};
    tide_comm *comm;
    int status = enter_call(group, stream);

    if (status == TIDE_OK)
        status = check_shards(group, shards);
    if (status == TIDE_OK)
        status = check_slot_free(group);
    if (status != TIDE_OK)
        return status;
    comm = group->set->comm;
    if (shards) {
        args.args = shards;
        args.n_args = group->plan->geo.n_params;
    }
    args.call = comm->calls + 1;
    status = engine_run(group->set->engine, group->all_gather, ENGINE_ALL, &args, stream);
    if (status != TIDE_OK)
        return status;
    comm->calls++;
    group->all_gathers++;
    slot_set(slot_of(group), SLOT_HELD, group);
    return TIDE_OK;
}

int tide_slot_release(tide_group *group, void *stream)
{
    int status = enter_call(group, stream);
    engine *e;

    if (status == TIDE_OK)
        status = check_held(group);
    if (status != TIDE_OK)
        return status;
    e = group->set->engine;
    if (group->set->plan->options.poison == 1) {
        /* Peers may still be writing an all-gather that nobody waited for; 0xFF is NaN in every float type. */
        status = engine_wait(e, group->index, EVENT_READY, stream);
        if (status != TIDE_OK)
            return status;
        status = engine_fill(e, engine_address(e, REGION_LANDING, group->plan->slot, 0), 0xff,
                             group->plan->geo.landing_bytes, stream);
        if (status != TIDE_OK)
            return status;
    }
    status = engine_free_slot(e, group->plan->slot, stream);
    if (status == TIDE_OK)
        slot_set(slot_of(group), SLOT_FREE, NULL);
    return status;
}

/* ---- gradients ---------------------------------------------------------------------------------- */

static int check_args(const tide_group *group, const tide_reduce_scatter_args *args)
{
    char label[96];
    if (!args || args->size != sizeof *args)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "args: %s, expected a tide_reduce_scatter_args from TIDE_REDUCE_SCATTER_ARGS_INIT",
                         args ? "wrong size" : "NULL");
    if (group->plan->geo.grad_dtype == TIDE_NONE)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "%s was created without gradients (grad_dtype TIDE_NONE)",
                         comm_group_label(group, label));
    if (args->grad_dtype != TIDE_F32 && args->grad_dtype != TIDE_BF16 && args->grad_dtype != TIDE_F16)
        return tide_fail(TIDE_ERR_ARGUMENT, "grad_dtype: %d is not fp32, bf16 or fp16", args->grad_dtype);
    if (args->accumulate != 0 && args->accumulate != 1)
        return tide_fail(TIDE_ERR_ARGUMENT, "accumulate: %d is not 0 or 1", args->accumulate);
    if (args->mode != 0 && args->mode != 1)
        return tide_fail(TIDE_ERR_ARGUMENT, "mode: %d is not 0 (In-Place) or 1 (Slot-Reuse)", args->mode);
    return TIDE_OK;
}

/* Sorts the gradients out: group->present says which parameters have one, group->args holds them in order. A parameter
 * without elements never has one, whatever its pointer. *n_present of them. */
static int take_gradients(tide_group *group, const tide_reduce_scatter_args *args, uint32_t *n_present)
{
    const geo_group *geo = &group->plan->geo;
    uint32_t item = tide_dtype_bytes(args->grad_dtype);

    if (!args->grads)
        return tide_fail(TIDE_ERR_ARGUMENT, "grads: NULL, expected %u pointers (NULL entries: no gradient)",
                         geo->n_params);
    *n_present = 0;
    for (uint32_t p = 0; p < geo->n_params; p++) {
        if ((uintptr_t)args->grads[p] % item != 0)
            return tide_fail(TIDE_ERR_ARGUMENT, "grads[%u]: %p is not aligned to the %u bytes of %s", p,
                             (const void *)args->grads[p], item, tide_dtype_name(args->grad_dtype));
        group->present[p] = args->grads[p] && geo->params[p].shard > 0;
        if (group->present[p])
            group->args[(*n_present)++] = args->grads[p];
    }
    return TIDE_OK;
}

static int check_output(const tide_reduce_scatter_args *args)
{
    if (!args->out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected the packed output");
    if ((uintptr_t)args->out % sizeof(float) != 0)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: %p is not aligned to %zu bytes", (void *)args->out, sizeof(float));
    return TIDE_OK;
}

int tide_grads_stash(tide_group *group, const tide_reduce_scatter_args *args, void *stream)
{
    engine_args run = {.alpha = 1.0f};
    comm_program *stash, *read = NULL;
    comm_slot *slot;
    uint32_t n_present = 0;
    char label[96];
    int status = enter_call(group, stream);

    if (status == TIDE_OK)
        status = check_args(group, args);
    if (status == TIDE_OK)
        status = check_held(group);
    if (status != TIDE_OK)
        return status;
    if (plan_shared_landing(group->set->plan))
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "%s: one landing serves the node, expected the knob multicast 0 for Slot-Reuse",
                         comm_group_label(group, label));
    if (tide_dtype_bytes(args->grad_dtype) > group->plan->geo.item)
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "grad_dtype: %s items are larger than the %u bytes of %s's parameters: use In-Place",
                         tide_dtype_name(args->grad_dtype), group->plan->geo.item, comm_group_label(group, label));
    status = take_gradients(group, args, &n_present);
    if (status == TIDE_OK && n_present > 0) /* both programs now: the read may then not run out of memory */
        status = comm_program_find(group, true, group->present, args->grad_dtype, 1, &stash);
    if (status == TIDE_OK && n_present > 0)
        status = comm_program_find(group, false, group->present, args->grad_dtype, 1, &read);
    if (status == TIDE_OK && n_present > 0) {
        run.args = group->args;
        run.n_args = stash->n_args;
        run.call = group->set->comm->calls + 1;
        status = engine_run(group->set->engine, stash->run, ENGINE_ALL, &run, stream);
        if (status == TIDE_OK) /* the copy's own end, which needs no peer: then the gradients may go */
            status = engine_wait(group->set->engine, group->index, EVENT_READ_DONE, stream);
    }
    if (status != TIDE_OK)
        return status;
    slot = slot_of(group);
    slot_set(slot, SLOT_STASHED, group);
    slot->stash = read;
    slot->stash_dtype = args->grad_dtype;
    return TIDE_OK;
}

/* ---- reduce-scatter ----------------------------------------------------------------------------- */

/* Reads may run ahead of the network phases by the two banks; one whose sums need the network phase itself must see it
 * first. */
static int check_banks(const comm_set *set)
{
    const comm_pending *last = set->n_pending > 0 ? &set->pending[set->n_pending - 1] : NULL;
    char label[96];

    if (last && last->program && last->program->late_read_done)
        return tide_fail(TIDE_ERR_STATE,
                         "%s: its network phase holds the rest of its reads (partial outbox) and must be enqueued "
                         "before "
                         "another read",
                         comm_group_label(last->group, label));
    if (set->n_pending == COMM_BANKS)
        return tide_fail(TIDE_ERR_STATE,
                         "%d read phases wait for their network phase, the first of %s: enqueue that before another "
                         "read",
                         COMM_BANKS, comm_group_label(set->pending[0].group, label));
    return TIDE_OK;
}

static int check_stashed(const tide_group *group, int grad_dtype)
{
    const comm_slot *slot = slot_of(group);
    char label[96];
    if (slot->state != SLOT_STASHED || slot->owner != group)
        return tide_fail(TIDE_ERR_STATE, "%s has no stashed gradients: call tide_grads_stash before a read in mode 1",
                         comm_group_label(group, label));
    if (slot->stash_dtype != grad_dtype)
        return tide_fail(TIDE_ERR_ARGUMENT, "grad_dtype: %s, but %s has stashed gradients of %s",
                         tide_dtype_name(grad_dtype), comm_group_label(group, label),
                         tide_dtype_name(slot->stash_dtype));
    return TIDE_OK;
}

/* The program that reads the stash or the gradients; NULL when no parameter has one. group->args holds what it reads.
 */
static int choose_program(tide_group *group, const tide_reduce_scatter_args *args, comm_program **program)
{
    uint32_t n_present = 0;
    int status;

    *program = NULL;
    if (args->mode == 1) {
        status = check_stashed(group, args->grad_dtype);
        if (status != TIDE_OK)
            return status;
        *program = slot_of(group)->stash;
        memset(group->args, 0, (group->plan->geo.n_params + 1) * sizeof *group->args);
        return TIDE_OK;
    }
    status = take_gradients(group, args, &n_present);
    if (status == TIDE_OK && n_present > 0)
        status = comm_program_find(group, false, group->present, args->grad_dtype, 0, program);
    return status;
}

int tide_reduce_scatter_read(tide_group *group, const tide_reduce_scatter_args *args, void *stream)
{
    comm_program *program;
    comm_set *set;
    int status = enter_call(group, stream);

    if (status == TIDE_OK)
        status = check_args(group, args);
    if (status == TIDE_OK)
        status = check_banks(group->set);
    if (status == TIDE_OK)
        status = choose_program(group, args, &program);
    if (status == TIDE_OK && program)
        status = check_output(args);
    if (status != TIDE_OK)
        return status;
    set = group->set;
    if (program) {
        engine_args run = {.args = group->args,
                           .n_args = program->n_args,
                           .alpha = args->alpha,
                           .accumulate = args->accumulate,
                           .call = set->comm->calls + 1};
        group->args[program->n_args - 1] = args->out;
        status = engine_run(set->engine, program->run, ENGINE_READ, &run, stream);
    } else if (args->mode == 1) {
        status = engine_free_slot(set->engine, group->plan->slot, stream); /* nothing to read: the slot is free now */
    }
    if (status != TIDE_OK)
        return status;
    if (program) {
        set->comm->calls++;
        group->reduce_scatters++;
    }
    if (args->mode == 1)
        slot_set(slot_of(group), program && program->late_free ? SLOT_READING : SLOT_FREE,
                 program && program->late_free ? group : NULL);
    set->pending[set->n_pending++] =
        (comm_pending){group, program, set->comm->calls, args->mode == 1 && program && program->late_free};
    return TIDE_OK;
}

int tide_reduce_scatter_net(tide_group *group, void *stream)
{
    comm_pending first;
    comm_set *set;
    char mine[96], other[96];
    int status = enter_call(group, stream);

    if (status != TIDE_OK)
        return status;
    set = group->set;
    if (set->n_pending == 0)
        return tide_fail(TIDE_ERR_STATE, "%s has no read phase that waits for its network phase",
                         comm_group_label(group, mine));
    first = set->pending[0];
    if (first.group != group)
        return tide_fail(TIDE_ERR_STATE, "%s: the next network phase is that of %s, whose read came first",
                         comm_group_label(group, mine), comm_group_label(first.group, other));
    if (first.program) {
        engine_args run = {.alpha = 1.0f, .call = first.call};
        status = engine_run(set->engine, first.program->run, ENGINE_NET, &run, stream);
        if (status != TIDE_OK)
            return status;
    }
    if (first.frees_slot)
        slot_set(slot_of(group), SLOT_FREE, NULL);
    set->n_pending--;
    memmove(set->pending, set->pending + 1, set->n_pending * sizeof set->pending[0]);
    return TIDE_OK;
}

int tide_reduce_scatter(tide_group *group, const tide_reduce_scatter_args *args, void *stream)
{
    char mine[96], other[96];
    int status = enter_call(group, stream);

    if (status == TIDE_OK && group->set->n_pending > 0)
        return tide_fail(TIDE_ERR_STATE, "%s: the next network phase is that of %s, whose read came first",
                         comm_group_label(group, mine), comm_group_label(group->set->pending[0].group, other));
    if (status == TIDE_OK)
        status = tide_reduce_scatter_read(group, args, stream);
    return status == TIDE_OK ? tide_reduce_scatter_net(group, stream) : status;
}

/* ---- waiting ------------------------------------------------------------------------------------ */

/* An event that only the network phase records must not be mistaken for that of an earlier call. */
static int check_recorded(const tide_group *group, int event)
{
    const comm_set *set = group->set;
    char label[96];
    for (uint32_t i = 0; i < set->n_pending; i++) {
        const comm_pending *p = &set->pending[i];
        if (p->group == group && p->program && (event == TIDE_DONE || p->program->late_read_done))
            return tide_fail(TIDE_ERR_STATE,
                             "event: %s of %s comes with its network phase, which has not been enqueued",
                             event == TIDE_DONE ? "TIDE_DONE" : "TIDE_READ_DONE", comm_group_label(group, label));
    }
    return TIDE_OK;
}

int tide_wait(tide_group *group, int event, void *stream)
{
    int status = enter_call(group, stream);

    if (status != TIDE_OK)
        return status;
    switch (event) {
    case TIDE_READY:
        return engine_wait(group->set->engine, group->index, EVENT_READY, stream);
    case TIDE_READ_DONE:
        status = check_recorded(group, event);
        return status == TIDE_OK ? engine_wait(group->set->engine, group->index, EVENT_READ_DONE, stream) : status;
    case TIDE_DONE:
        status = check_recorded(group, event);
        return status == TIDE_OK ? engine_wait(group->set->engine, group->index, EVENT_DONE, stream) : status;
    default:
        return tide_fail(TIDE_ERR_ARGUMENT, "event: %d is not TIDE_READY, TIDE_READ_DONE or TIDE_DONE", event);
    }
}
