/*
 * rail.c - puts and signals between nodes, in memory. A rail word counts the signals of one (source node, context,
 * index); the waiter keeps what it has consumed, in the order in which its stream waits.
 */
#include "fabric/host/host.h"

fab_rail_word *host_rail_own_word(const fab_rail *r, const fab_rail_post *post, _Atomic uint64_t **consumed)
{
    uint64_t index = fab_rail_index(r->node_of[post->peer], r->n_ctx, r->n_sig, post->ctx, post->sig);
    *consumed = &r->consumed[index];
    return &r->words[r->node][index];
}

void host_rail_deliver(fab_rail *r, uint32_t peer, uint32_t ctx, uint32_t sig, uint64_t tag)
{
    fab_rail_word *word = &r->words[r->node_of[peer]][fab_rail_index(r->node, r->n_ctx, r->n_sig, ctx, sig)];
    atomic_store_explicit(&word->tag, tag, memory_order_relaxed);
    atomic_fetch_add(&word->value, 1);
    host_ring(host_page(r->queue->device, peer));
}

static void put_now(fab_rail *r, const fab_put *put, uint64_t tag)
{
    memcpy(put->dst, put->src, put->bytes);
    host_rail_deliver(r, put->peer, put->ctx, put->sig, tag);
}

static void destroy_nothing(fab_rail *r)
{
    (void)r;
}

static const host_wire direct_wire = {put_now, host_rail_deliver, destroy_nothing};

static void rail_destroy(fab_rail *r)
{
    if (!r)
        return;
    r->wire->destroy(r);
    tide_free(r->words);
    tide_free((void *)r->consumed);
    tide_free(r->node_of);
    tide_free(r);
}

static int rail_create(fab_queue *q, const fab_rail_desc *desc, fab_rail **out)
{
    host_device *d = q->device;
    fab_rail *r = tide_calloc(1, sizeof *r);
    int status = TIDE_OK;

    *out = NULL;
    if (!r)
        return TIDE_ERR_MEMORY;
    r->queue = q;
    r->wire = &direct_wire;
    r->nodes = desc->nodes;
    r->node = desc->node;
    r->n_ctx = desc->n_ctx;
    r->n_sig = desc->n_sig;
    r->words = tide_calloc(desc->nodes, sizeof *r->words);
    r->consumed = tide_calloc((size_t)desc->nodes * desc->n_ctx * desc->n_sig, sizeof *r->consumed);
    r->node_of = tide_calloc(d->face.n_ranks, sizeof *r->node_of);
    if (!r->words || !r->consumed || !r->node_of) {
        status = TIDE_ERR_MEMORY;
        goto done;
    }
    memset(r->node_of, 0xff, d->face.n_ranks * sizeof *r->node_of);
    for (uint32_t n = 0; n < desc->nodes; n++) {
        r->words[n] = desc->words[n];
        r->node_of[desc->ranks[n]] = n;
    }
    if (d->injecting)
        status = host_inject_wire(r, &d->inject);
done:
    if (status != TIDE_OK)
        rail_destroy(r);
    else
        *out = r;
    return status;
}

static int rail_put(fab_rail *r, uint32_t stream, fab_call *call, const fab_put *puts, uint32_t n)
{
    host_item item = {.kind = ITEM_PUT, .n = n, .list = puts, .object = r, .tag = call->tag, .number = call->number};
    return host_enqueue(r->queue, stream, &item);
}

static int rail_signal(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n)
{
    host_item item = {
        .kind = ITEM_RAIL_SIGNAL, .n = n, .list = posts, .object = r, .tag = call->tag, .number = call->number};
    return host_enqueue(r->queue, stream, &item);
}

static int rail_wait(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n, int check,
                     const fab_where *where)
{
    host_item item = {.kind = ITEM_RAIL_WAIT, .check = (uint16_t)check, .n = n, .list = posts, .object = r, .tag = call->tag,
                      .number = call->number, .enqueued = r->queue->now, .where = where};
    return host_enqueue(r->queue, stream, &item);
}

const fab_rail_verbs host_rail_verbs = {rail_create, rail_destroy, rail_put, rail_signal, rail_wait};
