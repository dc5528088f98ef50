/*
 * rail.c - puts and signals between nodes, in memory. A rail word counts the signals of one (source node, context,
 * index); the waiter keeps what it has consumed, in the order in which its stream waits.
 *
 * Messages are checked where they arrive, before a byte of them is written: each carries its length and its running
 * number within (sender, receiver, context), and the receiver's words of that context, which share a cache line, add up
 * to the number of the last one. So a message that is repeated, overtaken, cut, or that follows a lost one fails the
 * communicator; a lost one that nothing follows leaves a wait to its deadline.
 */
#include <stdio.h>

#include "fabric/host/host.h"

fab_rail_word *host_rail_own_word(const fab_rail *r, const fab_rail_post *post, _Atomic uint64_t **consumed)
{
    uint64_t index = fab_rail_index(r->node_of[post->peer], r->n_ctx, r->n_sig, post->ctx, post->sig);
    *consumed = &r->consumed[index];
    return &r->words[r->node][index];
}

static void refuse(fab_rail *r, const host_message *m, uint64_t arrived, uint64_t bytes)
{
    char what[96];
    if (m->number <= arrived)
        snprintf(what, sizeof what, "came again, expected message %llu", (unsigned long long)arrived + 1);
    else if (m->number > arrived + 1)
        snprintf(what, sizeof what, "came, expected message %llu: it is lost or was overtaken",
                 (unsigned long long)arrived + 1);
    else
        snprintf(what, sizeof what, "has %llu bytes, expected %llu", (unsigned long long)bytes,
                 (unsigned long long)m->bytes);
    host_fail_message(r->queue->device, m, what);
}

void host_rail_arrive(fab_rail *r, const host_message *m, const void *payload, uint64_t bytes)
{
    fab_rail_word *words = &r->words[r->node_of[m->peer]][fab_rail_index(r->node, r->n_ctx, r->n_sig, m->ctx, 0)];
    uint64_t arrived = 0; /* this rank alone writes these words */

    for (uint32_t sig = 0; sig < r->n_sig; sig++)
        arrived += atomic_load_explicit(&words[sig].value, memory_order_relaxed);
    if (m->number != arrived + 1 || bytes != m->bytes) {
        refuse(r, m, arrived, bytes);
        return;
    }
    if (bytes)
        memcpy(m->dst, payload, bytes);
    atomic_store_explicit(&words[m->sig].tag, m->tag, memory_order_relaxed);
    atomic_fetch_add(&words[m->sig].value, 1);
    host_ring(host_page(r->queue->device, m->peer));
}

static void arrive_now(fab_rail *r, const host_message *m, const void *payload)
{
    host_rail_arrive(r, m, payload, m->bytes);
}

static void destroy_nothing(fab_rail *r)
{
    (void)r;
}

static const host_wire direct_wire = {arrive_now, destroy_nothing};

static void send(fab_rail *r, host_message *m, const host_item *item, const void *payload)
{
    m->number = ++r->sent[(uint64_t)r->node_of[m->peer] * r->n_ctx + m->ctx];
    m->tag = item->tag;
    m->call = item->number;
    m->where = item->where;
    r->wire->send(r, m, payload);
}

void host_rail_put(fab_rail *r, const fab_put *put, const host_item *item)
{
    host_message m = {.bytes = put->bytes, .dst = put->dst, .peer = put->peer, .ctx = put->ctx, .sig = put->sig};
    send(r, &m, item, put->src);
}

void host_rail_signal(fab_rail *r, const fab_rail_post *post, const host_item *item)
{
    host_message m = {.peer = post->peer, .ctx = post->ctx, .sig = post->sig};
    send(r, &m, item, NULL);
}

static void rail_destroy(fab_rail *r)
{
    if (!r)
        return;
    r->wire->destroy(r);
    tide_free(r->words);
    tide_free((void *)r->consumed);
    tide_free(r->sent);
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
    r->sent = tide_calloc((size_t)desc->nodes * desc->n_ctx, sizeof *r->sent);
    r->node_of = tide_calloc(d->face.n_ranks, sizeof *r->node_of);
    if (!r->words || !r->consumed || !r->sent || !r->node_of) {
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

static int rail_put(fab_rail *r, uint32_t stream, fab_call *call, const fab_put *puts, uint32_t n,
                    const fab_where *where)
{
    host_item item = {.kind = ITEM_PUT, .n = n, .list = puts, .object = r, .tag = call->tag, .number = call->number,
                      .where = where};
    return host_enqueue(r->queue, stream, &item);
}

static int rail_signal(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n,
                       const fab_where *where)
{
    host_item item = {.kind = ITEM_RAIL_SIGNAL, .n = n, .list = posts, .object = r, .tag = call->tag,
                      .number = call->number, .where = where};
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
