/*
 * rail.c - puts and signals between nodes of one machine: copies to mapped memory. A rail word counts the signals of one
 * (source node, context, index). Its sender keeps the count and sets the word like a local one; the waiter keeps what it
 * has consumed. Both do so as they enqueue: all ops of a rail are on one stream.
 */
#include "fabric/cuda/cuda.h"

enum { POSTS = 32 };

struct fab_rail {
    fab_queue *queue;
    uint32_t nodes, node, n_ctx, n_sig;
    cu_ptr *words;      /* per node: this lane's rail words */
    uint64_t *sent;     /* per (node, ctx, sig): signals so far */
    uint64_t *consumed; /* the same of those awaited */
    uint32_t *node_of;  /* per absolute rank; UINT32_MAX: not on this rail */
};

static void rail_destroy(fab_rail *r)
{
    if (!r)
        return;
    tide_free(r->words);
    tide_free(r->sent);
    tide_free(r->consumed);
    tide_free(r->node_of);
    tide_free(r);
}

static int rail_create(fab_queue *q, const fab_rail_desc *desc, fab_rail **out)
{
    uint64_t n_words = (uint64_t)desc->nodes * desc->n_ctx * desc->n_sig;
    fab_rail *r = tide_calloc(1, sizeof *r);

    *out = NULL;
    if (!r)
        return TIDE_ERR_MEMORY;
    r->queue = q;
    r->nodes = desc->nodes;
    r->node = desc->node;
    r->n_ctx = desc->n_ctx;
    r->n_sig = desc->n_sig;
    r->words = tide_calloc(desc->nodes, sizeof *r->words);
    r->sent = tide_calloc(n_words, sizeof *r->sent);
    r->consumed = tide_calloc(n_words, sizeof *r->consumed);
    r->node_of = tide_calloc(q->device->face.n_ranks, sizeof *r->node_of);
    if (!r->words || !r->sent || !r->consumed || !r->node_of) {
        rail_destroy(r);
        return TIDE_ERR_MEMORY;
    }
    memset(r->node_of, 0xff, q->device->face.n_ranks * sizeof *r->node_of);
    for (uint32_t n = 0; n < desc->nodes; n++) {
        r->words[n] = cuda_address(desc->words[n]);
        r->node_of[desc->ranks[n]] = n;
    }
    *out = r;
    return TIDE_OK;
}

/* Words to be set, gathered. */
typedef struct outgoing {
    cu_ptr words[POSTS];
    uint64_t values[POSTS];
    uint32_t n;
} outgoing;

static int send_off(fab_rail *r, cuda_stream *s, outgoing *o)
{
    int status = o->n ? cuda_room(r->queue, s, 2 * o->n) : TIDE_OK;
    if (status == TIDE_OK)
        status = cuda_post(r->queue, s, o->words, o->values, o->n);
    o->n = 0;
    return status;
}

static int count_up(fab_rail *r, cuda_stream *s, outgoing *o, uint32_t peer, uint32_t ctx, uint32_t sig)
{
    uint32_t node = r->node_of[peer];
    uint64_t there = fab_rail_index(r->node, r->n_ctx, r->n_sig, ctx, sig);

    o->words[o->n] = r->words[node] + there * sizeof(fab_rail_word);
    o->values[o->n++] = ++r->sent[fab_rail_index(node, r->n_ctx, r->n_sig, ctx, sig)];
    return o->n == POSTS ? send_off(r, s, o) : TIDE_OK;
}

/* The bytes of all transfers, then their signals. */
static int rail_put(fab_rail *r, uint32_t stream, fab_call *call, const fab_put *puts, uint32_t n,
                    const fab_where *where)
{
    const cuda_driver *driver = r->queue->device->driver;
    cuda_stream *s = &r->queue->streams[stream];
    outgoing o = {.n = 0};
    int status = cuda_enter(r->queue);

    (void)call;
    (void)where; /* a copy to mapped memory arrives, once and in order */
    if (status == TIDE_OK)
        status = cuda_room(r->queue, s, (uint32_t)tide_min_u64(n, CUDA_ROOM));
    if (status == TIDE_OK)
        status = cuda_flush(r->queue, s);
    for (uint32_t i = 0; i < n && status == TIDE_OK; i++)
        status = cuda_check(driver,
                            driver->MemcpyAsync(cuda_address(puts[i].dst), cuda_address(puts[i].src), puts[i].bytes,
                                                s->handle),
                            "cuMemcpyAsync of a put");
    for (uint32_t i = 0; i < n && status == TIDE_OK; i++)
        status = count_up(r, s, &o, puts[i].peer, puts[i].ctx, puts[i].sig);
    return status == TIDE_OK ? send_off(r, s, &o) : status;
}

static int rail_signal(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n,
                       const fab_where *where)
{
    cuda_stream *s = &r->queue->streams[stream];
    outgoing o = {.n = 0};
    int status = cuda_enter(r->queue);

    (void)call;
    (void)where; /* a copy to mapped memory arrives, once and in order */
    for (uint32_t i = 0; i < n && status == TIDE_OK; i++)
        status = count_up(r, s, &o, posts[i].peer, posts[i].ctx, posts[i].sig);
    return status == TIDE_OK ? send_off(r, s, &o) : status;
}

static int rail_wait(fab_rail *r, uint32_t stream, fab_call *call, const fab_rail_post *posts, uint32_t n, int check,
                     const fab_where *where)
{
    fab_waiting wait = {call->number, r->queue->now, where};
    cuda_target targets[CUDA_AWAIT];
    int status = cuda_enter(r->queue);

    (void)check; /* the control pages have been compared */
    for (uint32_t at = 0, count; at < n && status == TIDE_OK; at += count) {
        count = (uint32_t)tide_min_u64(CUDA_AWAIT, n - at);
        for (uint32_t i = 0; i < count; i++) {
            const fab_rail_post *post = &posts[at + i];
            uint64_t index = fab_rail_index(r->node_of[post->peer], r->n_ctx, r->n_sig, post->ctx, post->sig);
            targets[i] = (cuda_target){.word = r->words[r->node] + index * sizeof(fab_rail_word),
                                       .value = r->consumed[index] += post->count,
                                       .rank = post->peer};
        }
        status = cuda_await(r->queue, &r->queue->streams[stream], targets, count, &wait);
    }
    return status;
}

const fab_rail_verbs cuda_rail_verbs = {rail_create, rail_destroy, rail_put, rail_signal, rail_wait};
