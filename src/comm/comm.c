/* comm.c - the communicator: creation by agreement, health, the end. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "comm/comm.h"

int comm_enter(const tide_comm *comm)
{
    tide_failure f = TIDE_FAILURE_INIT;
    int status;
    if (!comm)
        return tide_fail(TIDE_ERR_ARGUMENT, "comm: NULL, expected a communicator");
    status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    status = engine_failure(comm->device, &f);
    return status == TIDE_OK ? TIDE_OK : tide_fail(status, "%s", f.text);
}

/* ---- creation ----------------------------------------------------------------------------------- */

typedef struct fabric {
    const char *name;
    int (*open)(const fab_open *desc, fab_device **out);
    bool gpus;
    bool machines; /* ranks may be on several */
} fabric;
static const fabric fabrics[] = {
    [TIDE_FABRIC_HOST] = {"host", fab_host_open, false, false},
    [TIDE_FABRIC_CUDA] = {"cuda", fab_cuda_open, true, false},
    [TIDE_FABRIC_NCCL] = {"nccl", fab_nccl_open, true, true},
};

/* What can be wrong with one rank's description; the verdict is exchanged, so that the others do not wait for this
 * rank. */
static int check_desc(const tide_comm_desc *desc)
{
    if (desc->fabric < 0 || (size_t)desc->fabric >= sizeof fabrics / sizeof fabrics[0])
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "fabric: %d is not built into this library, expected TIDE_FABRIC_HOST (0), "
                         "TIDE_FABRIC_CUDA (1) or TIDE_FABRIC_NCCL (2)",
                         desc->fabric);
    if (desc->node_size > 0 && desc->n_ranks % desc->node_size != 0)
        return tide_fail(TIDE_ERR_ARGUMENT, "node_size: %u does not divide n_ranks %u", desc->node_size, desc->n_ranks);
    if (desc->node_size > TIDE_MAX_LOCAL)
        return tide_fail(TIDE_ERR_ARGUMENT, "node_size: %u is not in 0..%d", desc->node_size, TIDE_MAX_LOCAL);
    return tide_options_check(desc->options);
}

/* TIDE_DEADLINE_MS stands in for a deadline that the program left at its default. */
static int deadline_from_environment(tide_options *options)
{
    const char *text = getenv("TIDE_DEADLINE_MS");
    char *end;
    long long value;

    if (options->deadline_ms == TIDE_AUTO)
        options->deadline_ms = ((tide_options)TIDE_OPTIONS_INIT).deadline_ms;
    if (!text || !text[0] || options->deadline_ms != ((tide_options)TIDE_OPTIONS_INIT).deadline_ms)
        return TIDE_OK;
    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno != 0 || *end || value < 1)
        return tide_fail(TIDE_ERR_ARGUMENT, "TIDE_DEADLINE_MS: '%.40s', expected a positive number of milliseconds",
                         text);
    return tide_options_set(options, "deadline_ms", value);
}

static int agree_on_settings(tide_comm *comm, const tide_comm_desc *desc)
{
    comm_field fields[COMM_FIELDS];
    uint32_t n = 0;

    fields[n++] =
        (comm_field){"version", VALUE_VERSION, TIDE_VERSION_MAJOR << 16 | TIDE_VERSION_MINOR << 8 | TIDE_VERSION_PATCH};
    fields[n++] = (comm_field){"node_size", VALUE_INT, desc->node_size};
    fields[n++] = (comm_field){"fabric", VALUE_INT, desc->fabric};
    fields[n++] = (comm_field){"TIDE_MACHINE (1: given)", VALUE_INT, comm->rates_given};
#define TIDE_X(name, dflt, lo, hi, help) fields[n++] = (comm_field){"options." #name, VALUE_KNOB, comm->options.name};
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
    return comm_agree_fields(&comm->open, comm->scratch, "", fields, n);
}

static int agree_on_nodes(tide_comm *comm, uint32_t node_size)
{
    uint64_t own = tide_host_identity(), *hosts = comm->machines;
    int status;

    status = fab_allgather(&comm->open, &own, hosts, sizeof own);
    if (status != TIDE_OK)
        return status;
    for (uint32_t r = 1; r < comm->open.n_ranks; r++) {
        if (hosts[r] == hosts[0])
            continue;
        if (!fabrics[comm->fabric].machines)
            return tide_fail(TIDE_ERR_UNSUPPORTED,
                             "fabric: %s needs all ranks on one machine, rank %u is on another than rank 0",
                             fabrics[comm->fabric].name, r);
        comm->open.machines = hosts;
    }
    status = comm_node_size(hosts, comm->open.n_ranks, node_size, &comm->local, comm->nodes_reason,
                            sizeof comm->nodes_reason);
    if (status != TIDE_OK)
        return status;
    comm->nodes = comm->open.n_ranks / comm->local;
    if (comm->nodes > TIDE_MAX_NODES)
        return tide_fail(TIDE_ERR_ARGUMENT, "node_size: %u makes %u nodes of %u ranks, expected at most %d", node_size,
                         comm->nodes, comm->open.n_ranks, TIDE_MAX_NODES);
    comm->open.node_size = comm->local;
    return TIDE_OK;
}

/* One write can serve a node where the fabric offers it, unless that means one landing and a rank must be able to write its
 * own: Slot-Reuse puts gradients there, poison overwrites it at release. */
static int resolve_multicast(tide_comm *comm)
{
    tide_options *o = &comm->options;
    bool alone = comm->local == 1 || (o->target == 0 && (o->mode == 1 || o->poison == 1));

    if (o->multicast == TIDE_AUTO)
        o->multicast = o->target == 0 && comm->device->multicast && !alone;
    if (o->multicast == 1 && o->poison == 1 && o->target == 0)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "poison: 1 needs a landing a rank, expected multicast 0 or auto");
    if (o->multicast == 1 && !comm->device->multicast && !comm->device->no_multicast)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "multicast: 1, but the %s fabric has none here", comm->device->name);
    comm_name_path(comm);
    return TIDE_OK;
}

void comm_name_path(tide_comm *comm)
{
    tide_options *o = &comm->options;
    const char *none = comm->device->no_multicast, *more = "", *own_order = "";

    if (none) {
        o->multicast = 0;
        more = "; no multicast: ";
    } else if (o->multicast == 1 && o->target == 1 && comm->nodes > 1) {
        own_order = "; multicast: a switch adds what lands, in its own order: sums may differ from unicast in the last bits";
    }
    snprintf(comm->reason, sizeof comm->reason, "%s%s%s%s", comm->nodes_reason, own_order, more, none ? none : "");
    snprintf(comm->path, sizeof comm->path, "%s M=%u L=%u %s", comm->device->name, comm->nodes, comm->local,
             o->multicast == 1 ? "multicast" : "unicast");
}

static void comm_free(tide_comm *comm)
{
    while (comm->sets) {
        comm_set *next = comm->sets->next;
        comm_set_free(comm->sets);
        comm->sets = next;
    }
    if (comm->device)
        comm->device->verbs->close(comm->device);
    tide_free(comm->scratch);
    tide_free(comm->machines);
    tide_free(comm);
}

static tide_comm *comm_allocate(const tide_comm_desc *desc)
{
    static const tide_options defaults = TIDE_OPTIONS_INIT;
    tide_comm *comm = tide_calloc(1, sizeof *comm);
    if (!comm)
        return NULL;
    comm->fabric = desc->fabric;
    comm->options = desc->options ? *desc->options : defaults;
    if (fabrics[desc->fabric].gpus)
        comm->options.target = 1;
    comm->scratch = tide_calloc((size_t)desc->n_ranks * COMM_FIELDS, sizeof *comm->scratch);
    comm->machines = tide_calloc(desc->n_ranks, sizeof *comm->machines);
    if (!comm->scratch || !comm->machines) {
        comm_free(comm);
        return NULL;
    }
    return comm;
}

static int allgather_alone(void *context, const void *in, void *out, size_t bytes)
{
    (void)context;
    memcpy(out, in, bytes);
    return 0;
}

int tide_comm_create(const tide_comm_desc *desc, tide_comm **out)
{
    fab_open open;
    tide_comm *comm = NULL;
    int status;

    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected a place for the communicator");
    if (!desc || desc->size != sizeof *desc)
        return tide_fail(TIDE_ERR_ARGUMENT, "desc: %s, expected a tide_comm_desc from TIDE_COMM_DESC_INIT",
                         desc ? "wrong size" : "NULL");
    if (desc->n_ranks < 1 || desc->n_ranks > TIDE_MAX_NODES * TIDE_MAX_LOCAL)
        return tide_fail(TIDE_ERR_ARGUMENT, "n_ranks: %u is not in 1..%d", desc->n_ranks,
                         TIDE_MAX_NODES * TIDE_MAX_LOCAL);
    if (desc->rank >= desc->n_ranks)
        return tide_fail(TIDE_ERR_ARGUMENT, "rank: %u is not in 0..%u", desc->rank, desc->n_ranks - 1);
    if (!desc->allgather && desc->n_ranks > 1)
        return tide_fail(TIDE_ERR_ARGUMENT, "allgather: NULL, expected a function");
    status = fab_check_fork();
    if (status != TIDE_OK)
        return status;

    /* From here on every rank takes part in every exchange, whatever it has found. */
    open = (fab_open){.rank = desc->rank,
                      .n_ranks = desc->n_ranks,
                      .node_size = 1,
                      .device = desc->device,
                      .allgather = desc->allgather ? desc->allgather : allgather_alone,
                      .allgather_context = desc->allgather_context};
    status = comm_agree_size(&open);
    if (status != TIDE_OK)
        return status;
    status = check_desc(desc);
    if (status == TIDE_OK) {
        comm = comm_allocate(desc);
        status = comm ? deadline_from_environment(&comm->options) : TIDE_ERR_MEMORY;
        if (status == TIDE_OK)
            status = comm_rates_read(&comm->rates, &comm->rates_given);
    }
    status = fab_agree(&open, status);
    if (status != TIDE_OK)
        goto fail;
    comm->open = open;
    comm->open.options = &comm->options;
    status = agree_on_settings(comm, desc);
    if (status == TIDE_OK && comm->rates_given)
        status = comm_rates_agree(&comm->open, comm->scratch, &comm->rates);
    if (status == TIDE_OK)
        status = agree_on_nodes(comm, desc->node_size);
    if (status == TIDE_OK)
        status = fabrics[comm->fabric].open(&comm->open, &comm->device);
    if (status == TIDE_OK) /* capabilities may differ between ranks */
        status = fab_agree(&comm->open, resolve_multicast(comm));
    if (status == TIDE_OK) {
        comm_field multicast = {"fabric multicast", VALUE_INT, comm->options.multicast};
        status = comm_agree_fields(&comm->open, comm->scratch, "", &multicast, 1);
    }
    if (status != TIDE_OK)
        goto fail;
    tide_log(2, "rank %u of %u: %s: %s", desc->rank, desc->n_ranks, comm->path, comm->reason);
    if (comm->rates_given)
        tide_log(2, "rank %u of %u: plans with machine %s of TIDE_MACHINE, each rate the lowest of all ranks", desc->rank,
                 desc->n_ranks, comm->rates.name);
    *out = comm;
    return TIDE_OK;
fail:
    if (comm)
        comm_free(comm);
    return status;
}

/* ---- questions ---------------------------------------------------------------------------------- */

int tide_comm_get_info(const tide_comm *comm, tide_comm_info *out)
{
    int status;
    if (!comm)
        return tide_fail(TIDE_ERR_ARGUMENT, "comm: NULL, expected a communicator");
    if (!out || out->size != sizeof *out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: %s, expected a tide_comm_info with its size set",
                         out ? "wrong size" : "NULL");
    status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    *out = (tide_comm_info){.size = sizeof *out,
                            .rank = comm->open.rank,
                            .n_ranks = comm->open.n_ranks,
                            .nodes = comm->nodes,
                            .local = comm->local,
                            .fabric = comm->fabric,
                            .multicast = (int)comm->options.multicast,
                            .calls = comm->calls};
    for (const comm_set *set = comm->sets; set; set = set->next) {
        out->arena_bytes += engine_allocated(set->engine);
        out->live_views += engine_views(set->engine);
    }
    return TIDE_OK;
}

int tide_comm_check(tide_comm *comm, tide_failure *out)
{
    tide_failure f = TIDE_FAILURE_INIT;
    int status;
    if (!comm)
        return tide_fail(TIDE_ERR_ARGUMENT, "comm: NULL, expected a communicator");
    if (out && out->size != sizeof *out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: wrong size, expected a tide_failure from TIDE_FAILURE_INIT");
    status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    status = engine_failure(comm->device, &f);
    if (out)
        *out = f;
    return status == TIDE_OK ? TIDE_OK : tide_fail(status, "%s", f.text);
}

int tide_comm_sync(tide_comm *comm)
{
    int status = comm_enter(comm);
    for (const comm_set *set = status == TIDE_OK ? comm->sets : NULL; set && status == TIDE_OK; set = set->next)
        status = engine_sync(set->engine);
    return status;
}

/* ---- the end ------------------------------------------------------------------------------------ */

int tide_comm_abort(tide_comm *comm)
{
    int status;
    if (!comm)
        return tide_fail(TIDE_ERR_ARGUMENT, "comm: NULL, expected a communicator");
    status = fab_check_fork();
    return status == TIDE_OK ? engine_abort(comm->device) : status;
}

int tide_comm_destroy(tide_comm *comm)
{
    int status;
    if (!comm)
        return TIDE_OK;
    status = fab_check_fork();
    if (status != TIDE_OK)
        return status;
    status = tide_comm_sync(comm);
    /* Nobody unmaps what a peer may still write: all ranks have synced before one goes on. After a failure nothing runs
     * any more. */
    status = status == TIDE_OK ? comm->device->verbs->barrier(comm->device, "destroy") : TIDE_OK;
    comm_free(comm);
    return status;
}
