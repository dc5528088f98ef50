/*
 * rail.c - a lane between nodes: one communicator of its own, since NCCL runs what is enqueued on a communicator in one
 * queue, whatever streams it is on. Puts, signals and waits go to it as they come; NCCL counts the signals.
 *
 * A stream that stands in a wait of NCCL's can be freed by nobody but the peer: aborting the communicator does not do it,
 * and does not return. So a communicator is only aborted when its stream has come to rest; otherwise it, and the memory that
 * it has registered, are given up.
 */
#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "fabric/nccl/nccl.h"

enum {
    IN_FLIGHT = 32,   /* puts or signals of a group: a network card holds few hundred */
    AWAITED = 64,     /* descriptors of one wait */
    ABORT_MS = 5000,  /* of an idle communicator it takes a second */
    INSIDE_MS = 1000  /* how long a caller may be in NCCL after a failure, before that is ended by force */
};

struct fab_rail {
    fab_queue *queue;
    fab_rail *next; /* of the device */
    const char *lane;
    fab_arena *arena;
    uint32_t *node_of; /* per absolute rank; UINT32_MAX: not on this rail */
    nccl_comm comm;    /* NULL: one node */
    nccl_window window;
    int made;            /* on all ranks */
    const cuda_stream *stream; /* on which it is used; NULL: not yet */
    pthread_mutex_t use; /* held by who is in NCCL with it */
    _Atomic int gone;    /* the device has failed: nobody enters NCCL any more */
    int64_t gone_since;  /* these two under the device's lock */
    nccl_job *abort;
};

static cuda_device *device_of(const fab_rail *r)
{
    return r->queue->device;
}

/* ---- making one ---------------------------------------------------------------------------------- */

/* A step of the making has ended on this rank; on all, when it returns. Ranks that wait in NCCL for one that has failed are
 * told. */
static int agree_on(cuda_device *d, uint64_t set_up, int status, bool alone)
{
    if (status != TIDE_OK)
        fab_peers_give_up(&d->peers, set_up);
    status = fab_agree(&d->open, status);
    return status == TIDE_OK && alone ? tide_fail(TIDE_ERR_INTERNAL, "NCCL: left alone by no rank") : status;
}

static int step(fab_rail *r, nccl_call *call, uint64_t set_up)
{
    bool alone;
    int status = nccl_do(device_of(r), call, r->lane, set_up, &alone);
    return agree_on(device_of(r), set_up, status, alone);
}

/* The id that the rail's rank on node 0 has made. */
static int share_id(fab_rail *r, const fab_rail_desc *desc, uint64_t set_up, nccl_id *out)
{
    cuda_device *d = device_of(r);
    nccl_call call = {.function = NCCL_DO_ID};
    nccl_id *ids = tide_calloc(d->face.n_ranks, sizeof *ids);
    bool alone = false;
    int status = ids ? TIDE_OK : TIDE_ERR_MEMORY;

    if (status == TIDE_OK && desc->node == 0)
        status = nccl_do(d, &call, r->lane, set_up, &alone);
    status = agree_on(d, set_up, status, alone);
    if (status == TIDE_OK)
        status = fab_allgather(&d->open, &call.id, ids, sizeof *ids);
    if (status == TIDE_OK)
        *out = ids[desc->ranks[0]];
    tide_free(ids);
    return status;
}

static int check_support(const fab_rail *r, const nccl_properties *p)
{
    int version = nccl_of(device_of(r))->library->version;
    if (p->host_rma_support)
        return TIDE_OK;
    return tide_fail(TIDE_ERR_UNSUPPORTED,
                     "lane %s: NCCL %d.%d.%d has no one-sided transfers between these ranks (hostRmaSupport 0, %d groups of "
                     "GPUs in reach of each other): no network with GPUDirect RDMA that it can use, or no peer access",
                     r->lane, version / 10000, version / 100 % 100, version % 100, p->n_lsa_teams);
}

static int bring_up(fab_rail *r, const fab_rail_desc *desc, uint64_t set_up)
{
    cuda_device *d = device_of(r);
    nccl_call call = {.n_ranks = (int)desc->nodes, .rank = (int)desc->node, .config = NCCL_CONFIG_INIT};
    int status = share_id(r, desc, set_up, &call.id);

    if (status != TIDE_OK)
        return status;
    call.function = NCCL_DO_INIT;
    call.config.blocking = 1;
    call.config.min_ctas = call.config.max_ctas = 1; /* no collective runs on it */
    call.config.graph_usage_mode = 0;
    call.config.num_rma_ctx = (int)desc->n_ctx;
    call.config.num_rma_sig = (int)desc->n_sig;
    call.config.rma_eager_init = 1;
    call.config.comm_name = desc->lane;
    status = step(r, &call, set_up);
    r->comm = call.result == NCCL_OK ? call.comm : NULL;
    if (status != TIDE_OK)
        return status;
    call.function = NCCL_DO_QUERY;
    call.properties = (nccl_properties)NCCL_PROPERTIES_INIT;
    status = step(r, &call, set_up);
    if (status == TIDE_OK)
        status = agree_on(d, set_up, check_support(r, &call.properties), false);
    if (status != TIDE_OK)
        return status;
    call.function = NCCL_DO_REGISTER;
    call.base = desc->arena->base[d->face.rank];
    call.bytes = desc->arena->allocated;
    call.window = NULL;
    status = step(r, &call, set_up);
    if (status != TIDE_OK)
        return status;
    r->window = call.window;
    if (!r->window)
        status = tide_fail(TIDE_ERR_UNSUPPORTED,
                           "lane %s: NCCL gives no window over the arena (%llu bytes): it has no symmetric memory between "
                           "these ranks",
                           r->lane, (unsigned long long)call.bytes);
    return agree_on(d, set_up, status, false);
}

static void rail_destroy(fab_rail *r);

static int rail_create(fab_queue *q, const fab_rail_desc *desc, fab_rail **out)
{
    cuda_device *d = q->device;
    nccl_device *n = nccl_of(d);
    fab_rail *r = tide_calloc(1, sizeof *r);
    uint64_t set_up = ++n->set_ups;
    int status = r && (r->node_of = tide_calloc(d->face.n_ranks, sizeof *r->node_of)) ? TIDE_OK : TIDE_ERR_MEMORY;

    *out = NULL;
    if (status == TIDE_OK) {
        r->queue = q;
        r->lane = desc->lane;
        r->arena = (fab_arena *)(uintptr_t)desc->arena; /* counted: to be given up with the communicator */
        pthread_mutex_init(&r->use, NULL);
        memset(r->node_of, 0xff, d->face.n_ranks * sizeof *r->node_of);
        for (uint32_t i = 0; i < desc->nodes; i++)
            r->node_of[desc->ranks[i]] = i;
    }
    if (desc->nodes > 1) {
        status = agree_on(d, set_up, status, false);
        if (status == TIDE_OK)
            status = bring_up(r, desc, set_up);
    }
    if (status == TIDE_OK) {
        r->made = 1;
        pthread_mutex_lock(&n->lock);
        r->next = n->rails;
        n->rails = r;
        pthread_mutex_unlock(&n->lock);
        *out = r;
    } else if (r && r->queue) {
        rail_destroy(r);
    } else {
        tide_free(r);
    }
    return status;
}

/* ---- the end ------------------------------------------------------------------------------------- */

static bool orderly(cuda_device *d, fab_rail *r)
{
    static const enum nccl_function order[] = {NCCL_DO_DEREGISTER, NCCL_DO_FINALIZE, NCCL_DO_DESTROY};
    nccl_call call = {.comm = r->comm, .window = r->window};
    bool alone;

    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        call.function = order[i];
        if (nccl_do(d, &call, r->lane, 0, &alone) != TIDE_OK) {
            tide_log(1, "rank %u: %s", d->face.rank, tide_last_error());
            return order[i] == NCCL_DO_DESTROY; /* whatever is left of it then */
        }
    }
    return true;
}

static bool abort_now(cuda_device *d, fab_rail *r)
{
    nccl_call call = {.function = NCCL_DO_ABORT, .comm = r->comm};
    bool ended;

    if (!r->abort && nccl_begin(d, &call, &r->abort) != TIDE_OK)
        return false;
    ended = nccl_ended(r->abort, (int64_t)ABORT_MS * 1000000, &call);
    nccl_leave(r->abort);
    return ended;
}

static bool at_rest(const cuda_device *d, const fab_rail *r)
{
    bool rest;

    if (!r->stream)
        return true;
    if (!cuda_push_to_free(d))
        return false;
    rest = cuda_query(d, r->stream->handle) != CU_NOT_READY;
    cuda_pop(d);
    return rest;
}

/* The queue has been stopped. Finalizing takes all ranks: those that have made a rail which another has not abort it. */
static bool disconnect(cuda_device *d, fab_rail *r)
{
    if (!r->abort && !at_rest(d, r))
        return false;
    if (!r->abort && r->made && !fab_peers_failed(&d->peers) && orderly(d, r))
        return true;
    return abort_now(d, r);
}

/* Rails that have been given up: a stream may still come to use what they hold. */
static pthread_mutex_t lost_lock = PTHREAD_MUTEX_INITIALIZER;
static fab_rail *lost;

static void rail_destroy(fab_rail *r)
{
    cuda_device *d;
    nccl_device *n;
    bool given_up;
    char said[512]; /* why it is destroyed, perhaps: what goes wrong here is of less interest */

    if (!r)
        return;
    snprintf(said, sizeof said, "%s", tide_last_error());
    d = device_of(r);
    n = nccl_of(d);
    pthread_mutex_lock(&n->lock);
    for (fab_rail **link = &n->rails; *link; link = &(*link)->next) {
        if (*link == r) {
            *link = r->next;
            break;
        }
    }
    pthread_mutex_unlock(&n->lock);
    given_up = r->comm && !disconnect(d, r);
    tide_fail(TIDE_ERR_SYSTEM, "%s", said);
    if (given_up) {
        tide_log(0, "rank %u: lane %s: its communicator and %llu bytes of its arena are given up", d->face.rank, r->lane,
                 (unsigned long long)r->arena->allocated);
        cuda_arena_hold(r->arena);
        pthread_mutex_lock(&lost_lock);
        r->next = lost;
        lost = r;
        pthread_mutex_unlock(&lost_lock);
        return;
    }
    pthread_mutex_destroy(&r->use);
    tide_free(r->node_of);
    tide_free(r);
}

/* ---- the watch ----------------------------------------------------------------------------------- */

void nccl_poll(cuda_device *d)
{
    nccl_device *n = nccl_of(d);
    tide_failure f = TIDE_FAILURE_INIT;

    pthread_mutex_lock(&n->lock);
    for (const fab_rail *r = n->rails; r && f.code == TIDE_OK; r = r->next) {
        nccl_result now = NCCL_OK, status = r->comm ? n->library->CommGetAsyncError(r->comm, &now) : NCCL_OK;
        if (status == NCCL_OK && (now == NCCL_OK || now == NCCL_IN_PROGRESS))
            continue;
        nccl_check(n->library, r->comm, status == NCCL_OK ? now : status, "NCCL reports");
        f.code = TIDE_ERR_NETWORK;
        f.rank = d->face.rank;
        snprintf(f.phase, sizeof f.phase, "lane %s", r->lane);
        snprintf(f.text, sizeof f.text, "rank %u, lane %s: %.180s", f.rank, r->lane, tide_last_error());
    }
    pthread_mutex_unlock(&n->lock);
    if (f.code != TIDE_OK)
        fab_peers_fail(&d->peers, &f, true);
}

/* Who is in NCCL when the device fails usually comes out again. If NCCL waits there for a network that no longer moves,
 * aborting is the way out. */
void nccl_failed(cuda_device *d)
{
    nccl_device *n = nccl_of(d);
    int64_t now = tide_now_ns();

    pthread_mutex_lock(&n->lock);
    for (fab_rail *r = n->rails; r; r = r->next) {
        if (!atomic_exchange(&r->gone, 1))
            r->gone_since = now;
        if (!r->comm || r->abort || now - r->gone_since < (int64_t)INSIDE_MS * 1000000)
            continue;
        if (pthread_mutex_trylock(&r->use) == 0) {
            pthread_mutex_unlock(&r->use);
        } else {
            nccl_call call = {.function = NCCL_DO_ABORT, .comm = r->comm};
            if (nccl_begin(d, &call, &r->abort) != TIDE_OK)
                tide_log(0, "rank %u, lane %s: %s", d->face.rank, r->lane, tide_last_error());
        }
    }
    pthread_mutex_unlock(&n->lock);
}

/* ---- what is enqueued ---------------------------------------------------------------------------- */

/* For whom a stream may come to stand, each once. Long, so not cleared: only n is. */
typedef struct ranks {
    cuda_target each[CUDA_AWAIT];
    uint32_t n;
} ranks;

static void add_rank(ranks *list, uint32_t rank)
{
    if (list->n == CUDA_AWAIT || (list->n > 0 && list->each[list->n - 1].rank == rank))
        return;
    list->each[list->n++] = (cuda_target){.rank = rank};
}

/* Into NCCL, the device's context current, all before it enqueued. leave gives the text of what NCCL has refused. */
static int enter(fab_rail *r, cuda_stream *s, fab_call *call, ranks *list, uint32_t operations, const fab_where *where)
{
    const fab_waiting wait = {call->number, r->queue->now, where};
    int status = cuda_enter(r->queue);

    if (status == TIDE_OK)
        status = cuda_hand_over(r->queue, s, list->each, list->n, operations, &wait);
    if (status != TIDE_OK)
        return status;
    r->stream = s;
    pthread_mutex_lock(&r->use);
    if (atomic_load(&r->gone)) {
        pthread_mutex_unlock(&r->use);
        return fab_peers_failure(&device_of(r)->peers, NULL);
    }
    return TIDE_OK;
}

static int leave(fab_rail *r, cuda_stream *s, nccl_result result, const char *function)
{
    int status;
    char what[96];

    pthread_mutex_unlock(&r->use);
    snprintf(what, sizeof what, "lane %s: %s", r->lane, function);
    status = nccl_check(nccl_of(device_of(r))->library, NULL, result, what);
    return status == TIDE_OK ? cuda_take_back(r->queue, s) : status;
}

/* A group is ended also when one of its calls has been refused. */
static nccl_result end_group(const nccl_library *l, nccl_result result)
{
    nccl_result end = l->GroupEnd();
    return result == NCCL_OK ? end : result;
}

/* Puts or signals: the other one is NULL. */
typedef struct messages { const fab_put *puts; const fab_rail_post *posts; uint32_t n; } messages;

static uint32_t peer_of(const messages *m, uint32_t i)
{
    return m->puts ? m->puts[i].peer : m->posts[i].peer;
}

static nccl_result send_one(const fab_rail *r, const nccl_library *l, cu_stream stream, const messages *m, uint32_t i)
{
    int node = (int)r->node_of[peer_of(m, i)];
    const fab_put *put = m->puts ? &m->puts[i] : NULL;

    return put ? l->PutSignal(put->src, put->bytes, NCCL_UINT8, node, r->window, put->at, put->sig, put->ctx, 0, r->comm, stream)
               : l->Signal(node, m->posts[i].sig, m->posts[i].ctx, 0, r->comm, stream);
}

/* In groups, each of which the stream passes before it comes to the next. */
static int send_all(fab_rail *r, uint32_t stream, fab_call *call, const messages *m, const fab_where *where)
{
    const nccl_library *l = nccl_of(device_of(r))->library;
    cuda_stream *s = &r->queue->streams[stream];
    nccl_result result = NCCL_OK;
    ranks list;
    int status;

    list.n = 0;
    for (uint32_t i = 0; i < m->n; i++)
        add_rank(&list, peer_of(m, i));
    status = enter(r, s, call, &list, m->n, where);
    if (status != TIDE_OK)
        return status;
    for (uint32_t at = 0, end; at < m->n && result == NCCL_OK; at = end) {
        end = (uint32_t)tide_min_u64(m->n, at + IN_FLIGHT);
        result = l->GroupStart();
        if (result != NCCL_OK)
            break;
        for (uint32_t i = at; i < end && result == NCCL_OK; i++)
            result = send_one(r, l, s->handle, m, i);
        result = end_group(l, result);
    }
    return leave(r, s, result, m->puts ? "ncclPutSignal" : "ncclSignal");
}

static int rail_put(fab_rail *r, uint32_t stream, fab_call *call, const fab_put *puts, uint32_t n,
                    const fab_where *where)
{
    return send_all(r, stream, call, &(messages){puts, NULL, n}, where);
}

static int rail_signal(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n,
                       const fab_where *where)
{
    return send_all(r, stream, call, &(messages){NULL, posts, n}, where);
}

static int rail_wait(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n, int check,
                     const fab_where *where)
{
    const nccl_library *l = nccl_of(device_of(r))->library;
    cuda_stream *s = &r->queue->streams[stream];
    nccl_wait_desc descs[AWAITED];
    nccl_result result = NCCL_OK;
    ranks list;
    int status, count = 0;

    (void)check; /* the control pages have been compared */
    list.n = 0;
    for (uint32_t i = 0; i < n; i++)
        if (posts[i].count > 0)
            add_rank(&list, posts[i].peer);
    if (list.n == 0)
        return TIDE_OK;
    status = enter(r, s, call, &list, n, where);
    if (status != TIDE_OK)
        return status;
    for (uint32_t i = 0; i < n && result == NCCL_OK; i++) {
        if (posts[i].count > 0)
            descs[count++] = (nccl_wait_desc){.op_count = (int)posts[i].count,
                                              .peer = (int)r->node_of[posts[i].peer],
                                              .sig = posts[i].sig,
                                              .ctx = posts[i].ctx};
        if (count == AWAITED || (count > 0 && i + 1 == n)) {
            result = l->WaitSignal(count, descs, r->comm, s->handle);
            count = 0;
        }
    }
    return leave(r, s, result, "ncclWaitSignal");
}

const fab_rail_verbs nccl_rail_verbs = {rail_create, rail_destroy, rail_put, rail_signal, rail_wait};
