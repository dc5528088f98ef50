/* groups.c - sets of groups: planned, agreed, allocated and compiled together; programs of subsets; tensors; path and
 * reason. */
#include <stdio.h>

#include "comm/comm.h"

int comm_enter_group(const tide_group *group)
{
    if (!group)
        return tide_fail(TIDE_ERR_ARGUMENT, "group: NULL, expected a group");
    return comm_enter(group->set->comm);
}

const char *comm_group_label(const tide_group *group, char buffer[96])
{
    const char *name = group->plan->geo.name;
    if (name[0])
        snprintf(buffer, 96, "group %u '%.64s'", group->index, name);
    else
        snprintf(buffer, 96, "group %u", group->index);
    return buffer;
}

/* ---- programs ----------------------------------------------------------------------------------- */

/* Bytes that this rank writes: each copy's destination once (one multicast write counts once), each put. */
static uint64_t schedule_bytes(const schedule *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_ops; i++) {
        const op *o = &s->ops[i];
        if (o->kind == OP_COPY) {
            uint64_t item = o->dst_dtype == TIDE_OPAQUE ? 1 : tide_dtype_bytes(o->dst_dtype);
            for (uint32_t r = o->first; r < o->first + o->count; r++)
                bytes += s->runs[r].width * s->runs[r].rows * item;
        } else if (o->kind == OP_PUT) {
            for (uint32_t p = o->first; p < o->first + o->count; p++)
                bytes += s->puts[p].bytes;
        }
    }
    return bytes;
}

/* Whether the network fragment records this event of the caller's. */
static bool recorded_late(const schedule *s, int event)
{
    for (uint32_t i = s->n_read; i < s->n_ops; i++) {
        const op *o = &s->ops[i];
        if (o->kind == OP_RECORD && o->scope == SCOPE_EXTERN && o->event == event)
            return true;
    }
    return false;
}

static void program_free(comm_program *p)
{
    if (!p)
        return;
    if (p->run)
        engine_unbind(p->run);
    tide_free(p->present);
    tide_free(p);
}

static int program_compile(tide_group *group, comm_program *p)
{
    const tide_plan *plan = group->set->plan;
    uint32_t rank = group->set->comm->open.rank;
    schedule_rs_options options = {p->present, p->grad_dtype, p->mode};
    schedule s;
    int status = p->stash ? schedule_build_stash(plan, group->index, rank, &options, &s)
                          : schedule_build_rs(plan, group->index, rank, &options, &s);
    if (status == TIDE_OK)
        status = engine_bind(group->set->engine, &s, &p->run);
    if (status == TIDE_OK) {
        p->n_args = s.n_args;
        p->bytes = schedule_bytes(&s);
        p->late_read_done = recorded_late(&s, EVENT_READ_DONE);
        p->late_free = recorded_late(&s, EVENT_FREE);
    }
    schedule_clear(&s);
    return status;
}

int comm_program_find(tide_group *group, bool stash, const uint8_t *present, int grad_dtype, int mode,
                      comm_program **out)
{
    uint32_t n = group->plan->geo.n_params;
    comm_program *p;
    int status;

    for (p = group->programs; p; p = p->next) {
        if (p->stash == stash && p->grad_dtype == grad_dtype && p->mode == mode &&
            memcmp(p->present, present, n) == 0) {
            *out = p;
            return TIDE_OK;
        }
    }
    p = tide_calloc(1, sizeof *p);
    if (!p)
        return TIDE_ERR_MEMORY;
    *p = (comm_program){.stash = stash, .grad_dtype = grad_dtype, .mode = mode};
    p->present = tide_calloc(n, 1);
    if (!p->present) {
        program_free(p);
        return TIDE_ERR_MEMORY;
    }
    memcpy(p->present, present, n);
    status = program_compile(group, p);
    if (status != TIDE_OK) {
        program_free(p);
        return status;
    }
    p->next = group->programs;
    group->programs = p;
    *out = p;
    return TIDE_OK;
}

/* ---- creation ----------------------------------------------------------------------------------- */

static void group_free(tide_group *g)
{
    while (g->programs) {
        comm_program *next = g->programs->next;
        program_free(g->programs);
        g->programs = next;
    }
    if (g->all_gather)
        engine_unbind(g->all_gather);
    tide_free(g->present);
    tide_free(g->args);
}

void comm_set_free(comm_set *set)
{
    if (!set)
        return;
    for (uint32_t i = 0; set->groups && i < set->n_groups; i++)
        group_free(&set->groups[i]);
    engine_destroy(set->engine);
    tide_free(set->groups);
    tide_free(set->slots);
    tide_plan_destroy(set->plan);
    tide_free(set);
}

/* ---- what a rail holds --------------------------------------------------------------------------- */

/* One more message of a call to (peer, ctx). counts: of every node and context. */
static int count_message(const tide_group *g, const char *call, uint32_t *counts, int32_t peer, uint16_t ctx,
                         uint32_t most)
{
    const tide_comm *comm = g->set->comm;
    uint32_t *n = &counts[(uint32_t)peer / comm->local * PLAN_RAIL_CONTEXTS + ctx];
    char label[96];

    if (++*n <= most)
        return TIDE_OK;
    return tide_fail(TIDE_ERR_UNSUPPORTED,
                     "%s: its %s has more than %u puts and signals to rank %d in context %u, which is all that the rail "
                     "holds: expected fewer passes (n_part %lld) or more contexts (n_ctx %lld)",
                     comm_group_label(g, label), call, most, peer, ctx, (long long)g->set->plan->options.n_part,
                     (long long)g->set->plan->options.n_ctx);
}

static int check_messages(const tide_group *g, const char *call, const schedule *s, uint32_t *counts, uint32_t most)
{
    int status = TIDE_OK;

    memset(counts, 0, (size_t)g->set->comm->nodes * PLAN_RAIL_CONTEXTS * sizeof *counts);
    for (uint32_t i = 0; i < s->n_puts && status == TIDE_OK; i++)
        status = count_message(g, call, counts, s->puts[i].peer, s->puts[i].ctx, most);
    for (uint32_t i = 0; i < s->n_ops; i++) {
        const op *o = &s->ops[i];
        if (o->kind != OP_SIGNAL || o->scope != SCOPE_RAIL)
            continue;
        for (uint32_t k = o->first; k < o->first + o->count && status == TIDE_OK; k++)
            status = count_message(g, call, counts, s->posts[k].rank, s->posts[k].ctx, most);
    }
    return status;
}

/* Whether the rail takes a call of the group without making its caller wait: a ring of descriptors for each peer and
 * context is all that stands between. Subsets of the parameters need no more than all of them, and either mode as many. */
static int check_rail(const tide_group *g)
{
    const tide_comm *comm = g->set->comm;
    uint32_t most = comm->options.rail_ring ? (uint32_t)comm->options.rail_ring : comm->device->rail_ring;
    const schedule_rs_options all = {NULL, g->plan->geo.grad_dtype, 0};
    uint32_t *counts;
    schedule s;
    int status;

    if (most == 0 || comm->nodes == 1)
        return TIDE_OK;
    counts = tide_calloc((size_t)comm->nodes * PLAN_RAIL_CONTEXTS, sizeof *counts);
    if (!counts)
        return TIDE_ERR_MEMORY;
    status = schedule_build_ag(g->set->plan, g->index, comm->open.rank, &s);
    if (status == TIDE_OK) {
        status = check_messages(g, "all-gather", &s, counts, most);
        schedule_clear(&s);
    }
    if (status == TIDE_OK && g->plan->geo.grad_dtype != TIDE_NONE) {
        status = schedule_build_rs(g->set->plan, g->index, comm->open.rank, &all, &s);
        if (status == TIDE_OK) {
            status = check_messages(g, "reduce-scatter", &s, counts, most);
            schedule_clear(&s);
        }
    }
    tide_free(counts);
    return status;
}

/* What one rank can do alone; needs no peer. */
static int set_prepare(tide_comm *comm, const tide_group_desc *descs, uint32_t n_groups, tide_group **out,
                       comm_set **created)
{
    tide_topology topology = {sizeof topology, comm->nodes, comm->local};
    comm_set *set;
    int status;

    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected room for %u groups", n_groups);
    set = *created = tide_calloc(1, sizeof *set);
    if (!set)
        return TIDE_ERR_MEMORY;
    set->comm = comm;
    status = comm->rates_given
                 ? plan_machine_create(&comm->rates, &topology, descs, n_groups, &comm->options, &set->plan)
                 : tide_plan_create(&topology, descs, n_groups, &comm->options, &set->plan);
    if (status != TIDE_OK)
        return status;
    set->groups = tide_calloc(n_groups, sizeof *set->groups);
    set->slots = tide_calloc(set->plan->n_slots, sizeof *set->slots);
    if (!set->groups || !set->slots)
        return TIDE_ERR_MEMORY;
    set->n_groups = n_groups;
    for (uint32_t i = 0; i < n_groups; i++) {
        tide_group *g = &set->groups[i];
        *g = (tide_group){.set = set, .index = i, .plan = &set->plan->groups[i]};
        g->present = tide_calloc(g->plan->geo.n_params, 1);
        g->args = tide_calloc((size_t)g->plan->geo.n_params + 1, sizeof *g->args);
        if (!g->present || !g->args)
            return TIDE_ERR_MEMORY;
        status = check_rail(g);
        if (status != TIDE_OK)
            return status;
    }
    return TIDE_OK;
}

/* The all-gather, and the reduce-scatter that the group expects; others follow at their first call. */
static int group_compile(tide_group *g)
{
    const geo_group *geo = &g->plan->geo;
    comm_program *program;
    schedule s;
    uint32_t present = 0;
    int status = schedule_build_ag(g->set->plan, g->index, g->set->comm->open.rank, &s);

    if (status == TIDE_OK)
        status = engine_bind(g->set->engine, &s, &g->all_gather);
    if (status == TIDE_OK)
        g->all_gather_bytes = schedule_bytes(&s);
    schedule_clear(&s);
    for (uint32_t p = 0; p < geo->n_params; p++)
        present += g->present[p] = geo->params[p].shard > 0;
    if (status != TIDE_OK || geo->grad_dtype == TIDE_NONE || present == 0)
        return status;
    status = comm_program_find(g, false, g->present, geo->grad_dtype, 0, &program);
    if (status == TIDE_OK)
        g->reduce_scatter_bytes = program->bytes;
    return status;
}

/* C  A set with its plan and its memory. */
static int set_allocate(tide_comm *comm, const tide_group_desc *groups, uint32_t n_groups, tide_group **out, comm_set **set)
{
    int status = set_prepare(comm, groups, n_groups, out, set);

    status = comm_agree_groups(&comm->open, comm->scratch, status, groups, n_groups, comm->device->multicast,
                               status == TIDE_OK ? (*set)->plan->digest : 0);
    return status == TIDE_OK ? engine_create(comm->device, (*set)->plan, &(*set)->engine) : status;
}

int tide_groups_create(tide_comm *comm, const tide_group_desc *groups, uint32_t n_groups, tide_group **out)
{
    comm_set *set = NULL;
    int status = comm_enter(comm);

    if (status != TIDE_OK)
        return status;
    /* From here on every rank takes part in every exchange, whatever it has found. */
    status = set_allocate(comm, groups, n_groups, out, &set);
    if (status != TIDE_OK && comm->options.multicast == 1 && comm->device->no_multicast) { /* as was found out just now */
        comm_set_free(set);
        set = NULL;
        comm_name_path(comm);
        status = set_allocate(comm, groups, n_groups, out, &set);
    }
    if (status == TIDE_OK) {
        for (uint32_t i = 0; i < n_groups && status == TIDE_OK; i++)
            status = group_compile(&set->groups[i]);
        status = fab_agree(&comm->open, status);
    }
    if (status != TIDE_OK) {
        comm_set_free(set);
        return status;
    }
    memcpy(set->path, comm->path, sizeof set->path);
    memcpy(set->reason, comm->reason, sizeof set->reason);
    set->next = comm->sets;
    comm->sets = set;
    for (uint32_t i = 0; i < n_groups; i++)
        out[i] = &set->groups[i];
    return TIDE_OK;
}

/* ---- questions ---------------------------------------------------------------------------------- */

int tide_group_get_path(const tide_group *group, tide_group_path *out)
{
    int status;
    if (!group)
        return tide_fail(TIDE_ERR_ARGUMENT, "group: NULL, expected a group");
    if (!out || out->size != sizeof *out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: %s, expected a tide_group_path with its size set",
                         out ? "wrong size" : "NULL");
    status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    *out = (tide_group_path){.size = sizeof *out,
                             .path = group->set->path,
                             .reason = group->set->reason,
                             .digest = group->set->plan->digest,
                             .all_gathers = group->all_gathers,
                             .reduce_scatters = group->reduce_scatters,
                             .all_gather_bytes = group->all_gather_bytes,
                             .reduce_scatter_bytes = group->reduce_scatter_bytes};
    return TIDE_OK;
}

static int check_index(const tide_group *group, uint32_t index)
{
    char label[96];
    if (index >= group->plan->geo.n_params)
        return tide_fail(TIDE_ERR_ARGUMENT, "index: %u, but %s has %u parameters", index,
                         comm_group_label(group, label), group->plan->geo.n_params);
    return TIDE_OK;
}

static int check_adopted(const tide_group *group, const char *argument)
{
    char label[96];
    if (group->plan->geo.input != TIDE_INPUT_ADOPTED)
        return tide_fail(TIDE_ERR_STATE, "%s: %s takes its shards as arguments, expected TIDE_INPUT_ADOPTED", argument,
                         comm_group_label(group, label));
    return TIDE_OK;
}

static void *shard_address(const tide_group *group, uint32_t index)
{
    const geo_group *geo = &group->plan->geo;
    return engine_address(group->set->engine, REGION_RESIDENT, 0,
                          group->plan->resident + geo->params[index].offset * geo->item);
}

int tide_group_tensor(const tide_group *group, int kind, uint32_t index, tide_tensor *out)
{
    const geo_group *geo;
    const geo_param *param;
    int status = comm_enter_group(group);

    if (status != TIDE_OK)
        return status;
    if (!out || out->size != sizeof *out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: %s, expected a tide_tensor with its size set",
                         out ? "wrong size" : "NULL");
    if (kind != TIDE_TENSOR_PARAM && kind != TIDE_TENSOR_SHARD)
        return tide_fail(TIDE_ERR_ARGUMENT, "kind: %d is not TIDE_TENSOR_PARAM or TIDE_TENSOR_SHARD", kind);
    status = check_index(group, index);
    if (status == TIDE_OK && kind == TIDE_TENSOR_SHARD)
        status = check_adopted(group, "kind");
    if (status != TIDE_OK)
        return status;
    geo = &group->plan->geo;
    param = &geo->params[index];
    *out = (tide_tensor){.size = sizeof *out, .dtype = geo->dtype, .item_size = geo->item};
    if (kind == TIDE_TENSOR_PARAM) {
        out->data = engine_address(group->set->engine, REGION_LANDING, group->plan->slot, param->landing);
        out->bytes = param->shard * geo->ranks * geo->item;
    } else {
        out->data = shard_address(group, index);
        out->bytes = param->shard * geo->item;
    }
    return TIDE_OK;
}

int tide_shard_adopt(tide_group *group, uint32_t index, const void *data, uint64_t bytes, void *stream)
{
    uint64_t room;
    char *shard;
    engine *e;
    int status = comm_enter_group(group);

    if (status == TIDE_OK)
        status = engine_check_stream(group->set->comm->device, stream);
    if (status == TIDE_OK)
        status = check_index(group, index);
    if (status == TIDE_OK)
        status = check_adopted(group, "group");
    if (status != TIDE_OK)
        return status;
    room = group->plan->geo.params[index].shard * group->plan->geo.item;
    if (bytes > room)
        return tide_fail(TIDE_ERR_ARGUMENT, "bytes: %llu, expected at most the %llu of the padded shard",
                         (unsigned long long)bytes, (unsigned long long)room);
    if (bytes > 0 && !data)
        return tide_fail(TIDE_ERR_ARGUMENT, "data: NULL, expected %llu bytes", (unsigned long long)bytes);
    e = group->set->engine;
    shard = shard_address(group, index);
    if (bytes > 0)
        status = engine_copy(e, shard, data, bytes, stream);
    if (status == TIDE_OK && room > bytes)
        status = engine_fill(e, shard + bytes, 0, room - bytes, stream);
    return status;
}

int tide_group_output_elements(const tide_group *group, const uint8_t *present, uint64_t *elements)
{
    int status = comm_enter_group(group);
    if (status != TIDE_OK)
        return status;
    if (!elements)
        return tide_fail(TIDE_ERR_ARGUMENT, "elements: NULL, expected a place for the count");
    *elements = 0;
    for (uint32_t p = 0; p < group->plan->geo.n_params; p++)
        *elements += !present || present[p] ? group->plan->geo.params[p].shard : 0;
    return TIDE_OK;
}
