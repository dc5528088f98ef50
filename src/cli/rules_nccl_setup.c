/* rules_nccl_setup.c - rules of the library, of communicators and windows, and of their end. */
#include <stdlib.h>

#include "cli/rules_nccl.h"

/* ---- the library ----------------------------------------------------------------------------- */

static enum outcome rule_version(nccl_side *r)
{
    MUST(r->n->version >= NCCL_OLDEST);
    snprintf(r->note, sizeof r->note, "%d", r->n->version);
    return OK;
}

static enum outcome rule_texts(nccl_side *r)
{
    for (int i = NCCL_OK; i <= NCCL_REMOTE_ERROR; i++)
        for (int k = NCCL_OK; k < i; k++) {
            const char *a = r->n->GetErrorString(i), *b = r->n->GetErrorString(k);
            MUST(a && *a && b && *b && strcmp(a, b) != 0);
        }
    return OK;
}

static enum outcome rule_ids(nccl_side *r)
{
    nccl_id a, b;
    NCCL_GIVES(r->n->GetUniqueId(&a), NCCL_OK);
    NCCL_GIVES(r->n->GetUniqueId(&b), NCCL_OK);
    MUST(memcmp(&a, &b, sizeof a) != 0);
    return OK;
}

static enum outcome rule_groups(nccl_side *r)
{
    NCCL_GIVES(r->n->GroupEnd(), NCCL_INVALID_USAGE);
    for (int i = 0; i < 2; i++) {
        NCCL_GIVES(r->n->GroupStart(), NCCL_OK);
        NCCL_GIVES(r->n->GroupStart(), NCCL_OK);
        NCCL_GIVES(r->n->GroupEnd(), NCCL_OK);
        NCCL_GIVES(r->n->GroupEnd(), NCCL_OK);
    }
    NCCL_GIVES(r->n->GroupEnd(), NCCL_INVALID_USAGE);
    return OK;
}

/* ---- communicators --------------------------------------------------------------------------- */

/* The last rank comes late; nobody is back before it has come. */
static enum outcome rule_init_waits(nccl_side *r)
{
    static _Atomic int last_came;
    nccl_config config = nccl_rules_config();
    nccl_result result = NCCL_OK;
    nccl_id id;
    int64_t began;
    enum outcome o = nccl_rules_id(r, &id);
    bool last = r->rank == r->ranks - 1;

    if (o != OK)
        return o;
    if (last)
        atomic_store(&last_came, 0);
    MUST(nccl_rules_meet(r));
    if (last) {
        nccl_rules_pause(r);
        atomic_store(&last_came, 1);
    }
    began = tide_now_ns();
    o = nccl_rules_make(r, r->ranks, id, &config, &r->comm[0], &result);
    NEEDS(!(r->w->shared && result == NCCL_INVALID_USAGE), "one device, and ranks of a communicator may not share it");
    if (o != OK)
        return o;
    MUST(atomic_load(&last_came));
    snprintf(r->note, sizeof r->note, "%.0f ms", nccl_rules_ms(began));
    return OK;
}

/* Refused before the other ranks are asked. */
static enum outcome rule_init_refused(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    nccl_comm comm = NULL;
    nccl_id id;

    NCCL_GIVES(r->n->GetUniqueId(&id), NCCL_OK);
    NCCL_GIVES(r->n->CommInitRankConfig(&comm, 2, id, 2, &config), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->CommInitRankConfig(&comm, 2, id, -1, &config), NCCL_INVALID_ARGUMENT);
    config.magic = 1;
    NCCL_GIVES(r->n->CommInitRankConfig(&comm, 2, id, 0, &config), NCCL_INVALID_ARGUMENT);
    MUST(*r->n->GetLastError(NULL));
    return OK;
}

static enum outcome rule_one_device_twice(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    nccl_result result = NCCL_OK;
    nccl_id id;
    enum outcome o = nccl_rules_id(r, &id);

    if (o != OK)
        return o;
    if (r->rank < 2) {
        MUST(r->d->CtxPush(r->w->side[0].context) == CU_OK);
        o = nccl_rules_make(r, 2, id, &config, &r->comm[0], &result);
        r->d->CtxPop(NULL);
        if (o == OK)
            snprintf(r->note, sizeof r->note, "they may");
        else
            NCCL_GIVES(result, NCCL_INVALID_USAGE);
    }
    MUST(nccl_rules_meet(r));
    return OK;
}

static enum outcome rule_properties(nccl_side *r)
{
    nccl_properties p = NCCL_PROPERTIES_INIT, raw = NCCL_PROPERTIES_INIT;

    NCCL_GIVES(r->n->CommQueryProperties(r->comm[0], &p), NCCL_OK);
    MUST(p.rank == r->rank && p.n_ranks == r->ranks && p.cuda_dev == r->device);
    MUST(p.host_rma_support);
    raw.magic = 1;
    nccl_result result = r->n->CommQueryProperties(r->comm[0], &raw);
    MUST(result != NCCL_OK);
    snprintf(r->note, sizeof r->note, "deviceApi %d, multimem %d, ginType %d, nLsaTeams %d", p.device_api_support,
             p.multimem_support, p.gin_type, p.n_lsa_teams);
    return OK;
}

static enum outcome rule_no_contexts(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    nccl_properties p = NCCL_PROPERTIES_INIT;
    enum outcome o;

    config.num_rma_ctx = 0;
    config.rma_eager_init = NCCL_UNDEF;
    o = nccl_rules_init(r, 0, &config);
    if (o == OK)
        o = nccl_rules_register(r, 0);
    if (o != OK)
        return o;
    NCCL_GIVES(r->n->CommQueryProperties(r->comm[0], &p), NCCL_OK);
    MUST(!p.host_rma_support);
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, NCCL_RULES_HALF, 64, 0, 0, 0), NCCL_INVALID_ARGUMENT);
    return OK;
}

static enum outcome rule_healthy(nccl_side *r)
{
    nccl_result error = NCCL_INTERNAL_ERROR;
    NCCL_GIVES(r->n->CommGetAsyncError(r->comm[0], &error), NCCL_OK);
    MUST(error == NCCL_OK);
    return OK;
}

/* ---- windows --------------------------------------------------------------------------------- */

/* Memory as the arenas have it: its handles may go as descriptors of files. When NCCL does not take it, what it takes. */
static enum outcome rule_window(nccl_side *r)
{
    static const struct { int handles, rdma; const char *text; } others[] = {
        {CU_HANDLE_FD, 1, "POSIX handles, GPUDirect"}, {CU_HANDLE_FD | 8, 0, "POSIX and fabric handles"},
        {CU_HANDLE_FD | 8, 1, "POSIX and fabric handles, GPUDirect"}};
    nccl_config config = nccl_rules_config();
    enum outcome o = nccl_rules_init(r, 0, &config);
    int64_t began = tide_now_ns();

    if (o != OK)
        return o;
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], (void *)(uintptr_t)r->memory.at, r->memory.bytes, &r->window[0],
                                        NCCL_WIN_SYMMETRIC),
               NCCL_OK);
    snprintf(r->note, sizeof r->note, "%.0f ms", nccl_rules_ms(began));
    if (r->window[0])
        return OK;
    snprintf(r->why, sizeof r->why, "NULL for memory with POSIX handles; also with");
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = others[i].handles,
                              .location = {CU_LOCATION_DEVICE, r->device}};
        nccl_window window = NULL;
        nccl_memory memory;
        size_t at = strlen(r->why);
        prop.flags.rdma = (unsigned char)others[i].rdma;
        if (!nccl_rules_memory(r, &prop, &memory)) /* alike on all ranks */
            continue;
        r->n->CommWindowRegister(r->comm[0], (void *)(uintptr_t)memory.at, memory.bytes, &window, NCCL_WIN_SYMMETRIC);
        if (window)
            r->n->CommWindowDeregister(r->comm[0], window);
        nccl_rules_memory_free(r, &memory);
        snprintf(r->why + at, sizeof r->why - at, "%s %s: %s", i ? ";" : "", others[i].text, window ? "a window" : "NULL");
    }
    return FAILED;
}

/* As a network card wants it. */
static enum outcome rule_window_rdma(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD, .location = {CU_LOCATION_DEVICE, r->device},
                          .flags = {.rdma = 1}};
    nccl_window window = NULL;
    enum outcome o = nccl_rules_init(r, 0, &config);

    if (o != OK)
        return o;
    NEEDS(nccl_rules_memory(r, &prop, &r->extra), "the device has no such memory");
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], (void *)(uintptr_t)r->extra.at, r->extra.bytes, &window, NCCL_WIN_SYMMETRIC),
               NCCL_OK);
    MUST(window);
    NCCL_GIVES(r->n->CommWindowDeregister(r->comm[0], window), NCCL_OK);
    return OK;
}

static enum outcome rule_window_refused(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    nccl_window window = NULL;
    enum outcome o = nccl_rules_init(r, 0, &config);
    void *at = (void *)(uintptr_t)(r->memory.at + 512);

    if (o != OK)
        return o;
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], at, 4096, &window, NCCL_WIN_SYMMETRIC), NCCL_INVALID_ARGUMENT);
    MUST(nccl_rules_meet(r));
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], NULL, 4096, &window, NCCL_WIN_SYMMETRIC), NCCL_INVALID_ARGUMENT);
    MUST(nccl_rules_meet(r));
    at = (void *)(uintptr_t)r->memory.at;
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], at, 0, &window, NCCL_WIN_SYMMETRIC), NCCL_INVALID_ARGUMENT);
    MUST(nccl_rules_meet(r));
    return nccl_rules_register(r, 0); /* none the worse */
}

static enum outcome rule_window_waits(nccl_side *r)
{
    static _Atomic int last_came;
    nccl_config config = nccl_rules_config();
    bool last = r->rank == r->ranks - 1;
    enum outcome o = nccl_rules_init(r, 0, &config);

    if (o != OK)
        return o;
    if (last)
        atomic_store(&last_came, 0);
    MUST(nccl_rules_meet(r));
    if (last) {
        nccl_rules_pause(r);
        atomic_store(&last_came, 1);
    }
    o = nccl_rules_register(r, 0);
    if (o == OK)
        MUST(atomic_load(&last_came));
    return o;
}

static enum outcome rule_eager(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    enum outcome o;

    config.rma_eager_init = NCCL_UNDEF;
    o = nccl_rules_init(r, 0, &config);
    if (o != OK)
        return o;
    NCCL_GIVES(r->n->Signal(r->next, 0, 0, 0, r->comm[0], r->stream[0]), NCCL_INVALID_USAGE);
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_INVALID_USAGE);
    config.rma_eager_init = 1;
    o = nccl_rules_init(r, 1, &config);
    if (o != OK)
        return o;
    NCCL_GIVES(r->n->Signal(r->next, 1, 1, 0, r->comm[1], r->stream[0]), NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 1, 1, r->previous, 1, 1, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    return OK;
}

/* Two communicators, a window each over the same memory: both serve, and the one goes on when the other has gone. */
static enum outcome rule_two_over_one(nccl_side *r)
{
    enum outcome o;

    MUST(nccl_rules_fill(r, 0, 1000, 40 + (unsigned)r->rank));
    for (int i = 0; i < 2; i++) {
        NCCL_GIVES(nccl_rules_put(r, i, r->next, 0, NCCL_RULES_HALF + 4096 * (uint64_t)i, 1000, 0, 0, i), NCCL_OK);
        NCCL_GIVES(nccl_rules_wait(r, i, 1, r->previous, 0, 0, i), NCCL_OK);
    }
    for (int i = 0; i < 2; i++)
        MUST(nccl_rules_dry(r, i) && nccl_rules_holds(r, NCCL_RULES_HALF + 4096 * (uint64_t)i, 1000, 40 + (unsigned)r->previous));
    MUST(nccl_rules_meet(r));
    o = nccl_rules_tear_down(r, 0);
    if (o != OK)
        return o;
    /* Destroying waits for all that the context does: a rank that shares it must not have gone on to wait for this one. */
    MUST(nccl_rules_meet(r));
    NCCL_GIVES(nccl_rules_put(r, 1, r->next, 0, NCCL_RULES_HALF + 8192, 1000, 0, 0, 0), NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 1, 1, r->previous, 0, 0, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0) && nccl_rules_holds(r, NCCL_RULES_HALF + 8192, 1000, 40 + (unsigned)r->previous));
    return OK;
}

/* Memory is a rank's own again when its window is gone. The last rank is late: do the others wait for it? */
static enum outcome rule_end(nccl_side *r)
{
    static _Atomic int last_came;
    nccl_config config = nccl_rules_config();
    nccl_window window = NULL;
    int64_t began;
    bool last = r->rank == r->ranks - 1;
    enum outcome o = nccl_rules_init(r, 0, &config);

    if (o != OK)
        return o;
    MUST(nccl_rules_memory(r, NULL, &r->extra));
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], (void *)(uintptr_t)r->extra.at, r->extra.bytes, &window,
                                        NCCL_WIN_SYMMETRIC),
               NCCL_OK);
    MUST(window);
    NCCL_GIVES(r->n->CommWindowDeregister(r->comm[0], window), NCCL_OK);
    if (last)
        atomic_store(&last_came, 0);
    MUST(nccl_rules_meet(r));
    if (last) {
        nccl_rules_pause(r);
        atomic_store(&last_came, 1);
    }
    began = tide_now_ns();
    NCCL_GIVES(r->n->CommFinalize(r->comm[0]), NCCL_OK);
    snprintf(r->note, sizeof r->note, "finalizing %s for the others, %.0f ms", atomic_load(&last_came) ? "waits" : "does not wait",
             nccl_rules_ms(began));
    nccl_comm comm = r->comm[0];
    r->comm[0] = NULL;
    NCCL_GIVES(r->n->CommDestroy(comm), NCCL_OK);
    MUST(nccl_rules_memory_free(r, &r->extra));
    return OK;
}

const nccl_rule nccl_rules_of_setup[] = {
    {"version 2.31.2 or newer", 0, rule_version},
    {"every result has a text", 0, rule_texts},
    {"ids differ", 0, rule_ids},
    {"a group ends that has begun", 0, rule_groups},
    {"a communicator is there when all ranks have come", 0, rule_init_waits},
    {"a rank or a config that is none is refused at once", 0, rule_init_refused},
    {"ranks of a communicator may not share a device", 0, rule_one_device_twice},
    {"properties: one-sided calls from the host", 1, rule_properties},
    {"without contexts there are no one-sided calls", 0, rule_no_contexts},
    {"no asynchronous error where nothing is wrong", 1, rule_healthy},
    {"memory of cuMemCreate with POSIX handles has a window", 0, rule_window},
    {"such memory for GPUDirect RDMA as well", 0, rule_window_rdma},
    {"a window has an aligned base and bytes", 0, rule_window_refused},
    {"a window is there when all ranks have come", 0, rule_window_waits},
    {"signals before the first window want rmaEagerInit", 0, rule_eager},
    {"two communicators over the same memory", 2, rule_two_over_one},
    {"deregister, finalize, destroy, free", 0, rule_end},
    {NULL, 0, NULL},
};
