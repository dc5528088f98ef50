/* create.c - an engine's memory, counters, streams and events. */
#include "engine/state.h"

/* Outlives the engine while a view is held. */
struct engine_views {
    const fab_device_verbs *verbs;
    fab_arena *arena;
    _Atomic uint64_t live, refs;
};
struct engine_view {
    struct engine_views *owner;
};

uint64_t engine_offset(const engine *e, int region, uint32_t bank)
{
    return e->region_at[region] + e->plan->map.region[region].banks[bank].offset;
}

char *engine_region(const engine *e, int region, uint32_t bank, uint32_t rank)
{
    char *base;
    if (region == REGION_LANDING && plan_shared_landing(e->plan))
        rank -= rank % e->local; /* the node's one landing */
    base = e->arena->base[rank];
    return base ? base + engine_offset(e, region, bank) : NULL;
}

fab_word *engine_word(const engine *e, uint32_t owner, uint32_t resource, uint32_t which, uint32_t poster)
{
    fab_word *words = e->arena->base[owner];
    return words + ((uint64_t)resource * 2 + which) * e->local + poster % e->local;
}

/* The rail words follow the local ones: [lane][node][context][signal]. NULL when the owner is not mapped. */
static fab_rail_word *rail_words(const engine *e, uint32_t owner, uint32_t lane)
{
    fab_rail_word *words;
    if (!e->arena->base[owner])
        return NULL;
    words = (fab_rail_word *)(void *)engine_word(e, owner, schedule_resources(e->plan), 0, 0);
    return words + (uint64_t)lane * e->nodes * PLAN_RAIL_CONTEXTS * PLAN_RAIL_SIGNALS;
}

void *engine_address(const engine *e, int region, uint32_t bank, uint64_t offset)
{
    return engine_region(e, region, bank, e->rank) + offset;
}

uint64_t engine_allocated(const engine *e)
{
    return e->arena->allocated;
}

/* ---- events -------------------------------------------------------------------------------------- */

static int new_event(engine *e, fab_event **out)
{
    return e->device->verbs->event_create(e->queue, out);
}

static int new_events(engine *e, uint32_t n, fab_event ***out)
{
    int status = TIDE_OK;
    *out = tide_calloc(n, sizeof **out);
    if (!*out)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i < n && status == TIDE_OK; i++)
        status = new_event(e, &(*out)[i]);
    return status;
}

static void drop_events(engine *e, uint32_t n, fab_event **events)
{
    for (uint32_t i = 0; events && i < n; i++)
        e->device->verbs->event_destroy(events[i]);
    tide_free(events);
}

static int events_init(engine *e)
{
    engine_events *v = &e->events;
    fab_event **single[] = {&v->in, &v->gate, &v->scattered, &v->spared[0], &v->spared[1]};
    int status = TIDE_OK;

    v->n_sent = e->plan->rs.n_out;
    v->n_landed = e->plan->rs.n_par;
    v->n_slots = e->plan->n_slots;
    v->n_groups = e->plan->n_groups;
    for (size_t i = 0; i < sizeof single / sizeof single[0] && status == TIDE_OK; i++)
        status = new_event(e, single[i]);
    if (status == TIDE_OK)
        status = new_events(e, 2 * v->n_sent, &v->sent);
    if (status == TIDE_OK)
        status = new_events(e, v->n_landed, &v->landed);
    if (status == TIDE_OK)
        status = new_events(e, v->n_slots, &v->free);
    if (status == TIDE_OK)
        status = new_events(e, 3 * v->n_groups, &v->group);
    return status;
}

static void events_clear(engine *e)
{
    engine_events *v = &e->events;
    fab_event *single[] = {v->in, v->gate, v->scattered, v->spared[0], v->spared[1]};
    drop_events(e, 3 * v->n_groups, v->group);
    drop_events(e, v->n_slots, v->free);
    drop_events(e, v->n_landed, v->landed);
    drop_events(e, 2 * v->n_sent, v->sent);
    for (size_t i = 0; i < sizeof single / sizeof single[0]; i++)
        e->device->verbs->event_destroy(single[i]);
}

/* ---- create and destroy ---------------------------------------------------------------------- */

/* C  status: this rank's so far. A fabric's rails may be made together with the other ranks, so all begin, or none. */
static int create_rails(engine *e, int status)
{
    static const char *const lanes[LANE_COUNT] = {[LANE_AG] = "all-gather", [LANE_RS] = "reduce-scatter"};
    fab_rail_word **words = tide_calloc(e->nodes, sizeof *words);
    uint32_t *ranks = tide_calloc(e->nodes, sizeof *ranks);

    if (status == TIDE_OK && (!words || !ranks))
        status = TIDE_ERR_MEMORY;
    status = e->device->verbs->agree(e->device, status);
    for (uint32_t lane = 0; lane < LANE_COUNT && status == TIDE_OK; lane++) {
        fab_rail_desc desc = {.nodes = e->nodes,
                              .node = e->node,
                              .n_ctx = (uint32_t)e->plan->options.n_ctx,
                              .n_sig = PLAN_RAIL_SIGNALS,
                              .words = words,
                              .ranks = ranks,
                              .arena = e->arena,
                              .lane = lanes[lane]};
        for (uint32_t n = 0; n < e->nodes; n++) {
            ranks[n] = n * e->local + e->local_rank;
            words[n] = rail_words(e, ranks[n], lane);
        }
        status = e->device->rail->create(e->queue, &desc, &e->rail[lane]);
    }
    tide_free(ranks);
    tide_free(words);
    return status;
}

/* Offsets of the regions in an arena, and whether they add up to what the plan promised. */
static int lay_out(engine *e, uint64_t *bytes)
{
    tide_bytes promise = TIDE_BYTES_INIT;
    uint64_t at = plan_control_bytes(e->nodes, e->local, e->plan->n_slots);
    int status = tide_plan_bytes(e->plan, e->rank, &promise);

    if (status != TIDE_OK)
        return status;
    for (int region = REGION_LANDING + 1; region < REGION_COUNT; region++) {
        e->region_at[region] = at;
        at += e->plan->map.region[region].bytes;
    }
    e->region_at[REGION_LANDING] = at;
    if (at + promise.landing != promise.total)
        return tide_fail(TIDE_ERR_INTERNAL, "arena: %llu bytes are laid out, expected the plan's %llu",
                         (unsigned long long)(at + promise.landing), (unsigned long long)promise.total);
    *bytes = promise.total;
    return TIDE_OK;
}

int engine_create(fab_device *device, const tide_plan *plan, engine **out)
{
    const fab_device_verbs *verbs = device->verbs;
    engine *e = NULL;
    uint8_t *peers = NULL;
    uint64_t bytes = 0;
    int status = fab_check_fork();

    *out = NULL;
    if (status != TIDE_OK)
        return status;
    e = tide_calloc(1, sizeof *e);
    peers = tide_calloc(device->n_ranks, 1);
    if (!e || !peers)
        status = TIDE_ERR_MEMORY;
    else if ((uint64_t)plan->topology.nodes * plan->topology.local != device->n_ranks ||
             plan->topology.local != device->node_size)
        status = tide_fail(TIDE_ERR_ARGUMENT, "plan: %u nodes x %u ranks, expected %u x %u as the device",
                           plan->topology.nodes, plan->topology.local, device->n_ranks / device->node_size,
                           device->node_size);
    else if (plan->options.multicast == 1 && !device->multicast)
        status =
            tide_fail(TIDE_ERR_UNSUPPORTED, "multicast: 1, expected 0: fabric %s cannot share a landing", device->name);
    if (status == TIDE_OK) {
        e->device = device;
        e->plan = plan;
        e->rank = device->rank;
        e->local = plan->topology.local;
        e->nodes = plan->topology.nodes;
        e->node = e->rank / e->local;
        e->local_rank = e->rank % e->local;
        /* An outbox bank holds a call's sums until they are sent: with two banks two calls can have read. A partial
         * outbox is read into during the network phase. One node sends nothing. */
        e->max_pending = e->nodes == 1 ? MAX_PENDING : plan->rs.n_out < plan->rs.n_blocks ? 1 : 2;
        for (uint32_t r = 0; r < device->n_ranks; r++)
            peers[r] = engine_same_node(e, r) || (device->rail_mapped && engine_same_rail(e, r));
        status = lay_out(e, &bytes);
    }
    if (status == TIDE_OK)
        status = ledger_init(&e->ledger, schedule_resources(plan));
    if (status == TIDE_OK && !(e->views = tide_calloc(1, sizeof *e->views)))
        status = TIDE_ERR_MEMORY;
    if (status == TIDE_OK)
        e->views->refs = 1;
    status = verbs->agree(device, status);
    if (status == TIDE_OK)
        status = verbs->arena_create(device, bytes, peers, &e->arena);
    if (status == TIDE_OK) {
        e->views->verbs = verbs;
        e->views->arena = e->arena;
        if (plan->options.multicast == 1 && device->no_multicast) /* found out just now, on all ranks */
            status = tide_fail(TIDE_ERR_UNSUPPORTED, "multicast: 1, expected 0: %s", device->no_multicast);
        if (status == TIDE_OK)
            status = verbs->queue_create(device, STREAM_RS_PUSH0 + e->local, &e->queue);
        if (status == TIDE_OK)
            status = events_init(e);
        status = verbs->agree(device, create_rails(e, status));
    }
    tide_free(peers);
    if (status != TIDE_OK) {
        engine_destroy(e);
        return status;
    }
    *out = e;
    return TIDE_OK;
}

static void views_drop(struct engine_views *v)
{
    if (!v || atomic_fetch_sub(&v->refs, 1) != 1)
        return;
    if (v->arena)
        v->verbs->arena_drop(v->arena);
    tide_free(v);
}

void engine_destroy(engine *e)
{
    if (!e || atomic_load(&fab_forked_flag))
        return;
    if (e->device) {
        if (e->queue) {
            /* a rail's own threads may still deliver into peers: they end before the queue and the arena go */
            e->device->verbs->queue_stop(e->queue);
            for (int lane = 0; lane < LANE_COUNT; lane++)
                e->device->rail->destroy(e->rail[lane]);
            while (e->programs) {
                engine_program *p = e->programs;
                e->programs = p->next;
                engine_program_free(p);
            }
            events_clear(e);
            e->device->verbs->queue_destroy(e->queue);
        }
        if (e->arena)
            e->device->verbs->arena_trim(e->arena, e->rank - e->local_rank);
    }
    views_drop(e->views);
    ledger_clear(&e->ledger);
    tide_free(e);
}

/* ---- views ----------------------------------------------------------------------------------- */

engine_view *engine_view_take(engine *e)
{
    engine_view *v = tide_calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->owner = e->views;
    atomic_fetch_add(&v->owner->refs, 1);
    atomic_fetch_add(&v->owner->live, 1);
    return v;
}

void engine_view_drop(engine_view *v)
{
    if (!v)
        return;
    atomic_fetch_sub(&v->owner->live, 1);
    views_drop(v->owner);
    tide_free(v);
}

uint64_t engine_views(const engine *e)
{
    return atomic_load(&e->views->live);
}
