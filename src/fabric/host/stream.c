/* stream.c - queues, events and calls: what the enqueueing caller does. */
#include "fabric/host/host.h"

/* ---- queues ------------------------------------------------------------------------------------- */

/* Sleeps until nobody runs s. Device lock held. */
static void stand_still(host_device *d, host_stream *s)
{
    while (s->busy) {
        uint32_t seen = atomic_load(&d->room);
        atomic_fetch_add(&d->room_waiters, 1);
        pthread_mutex_unlock(&d->lock);
        fab_futex_wait(&d->room, seen, -1);
        atomic_fetch_sub(&d->room_waiters, 1);
        pthread_mutex_lock(&d->lock);
    }
}

void host_stand_still(host_device *d)
{
    pthread_mutex_lock(&d->lock);
    for (fab_queue *q = d->queues; q; q = q->next)
        for (uint32_t i = 0; i < q->n_streams; i++)
            stand_still(d, &q->streams[i]);
    pthread_mutex_unlock(&d->lock);
}

static int stream_reserve(host_device *d, host_stream *s, uint64_t need)
{
    uint32_t capacity = s->capacity ? s->capacity : 64;
    host_item *items;
    uint64_t head, tail;

    while (capacity < need)
        capacity *= 2;
    if (capacity == s->capacity)
        return TIDE_OK;
    items = tide_calloc(capacity, sizeof *items);
    if (!items)
        return TIDE_ERR_MEMORY;
    /* The consumer may be inside the old ring: wait until the stream stands still, then move what is queued. */
    pthread_mutex_lock(&d->lock);
    stand_still(d, s);
    head = atomic_load(&s->head);
    tail = atomic_load(&s->tail);
    for (uint64_t i = head; i < tail; i++)
        items[i & (capacity - 1)] = s->items[i & (s->capacity - 1)];
    tide_free(s->items);
    s->items = items;
    s->capacity = capacity;
    pthread_mutex_unlock(&d->lock);
    return TIDE_OK;
}

int host_queue_create(fab_device *face, uint32_t n_streams, fab_queue **out)
{
    host_device *d = (host_device *)face;
    fab_queue *q = tide_calloc(1, sizeof *q);

    *out = NULL;
    if (!q || !(q->streams = tide_calloc(n_streams, sizeof *q->streams))) {
        tide_free(q);
        return TIDE_ERR_MEMORY;
    }
    q->device = d;
    q->n_streams = n_streams;
    for (uint32_t i = 0; i < n_streams; i++) {
        if (stream_reserve(d, &q->streams[i], 1) != TIDE_OK) {
            while (i--)
                tide_free(q->streams[i].items);
            tide_free(q->streams);
            tide_free(q);
            return TIDE_ERR_MEMORY;
        }
    }
    pthread_mutex_lock(&d->lock);
    q->next = d->queues;
    d->queues = q;
    pthread_mutex_unlock(&d->lock);
    *out = q;
    return TIDE_OK;
}

void host_queue_stop(fab_queue *q)
{
    host_device *d = q->device;
    fab_queue **link;

    pthread_mutex_lock(&d->lock);
    for (link = &d->queues; *link != q; link = &(*link)->next)
        continue;
    *link = q->next; /* nobody picks from it any more */
    for (uint32_t i = 0; i < q->n_streams; i++)
        stand_still(d, &q->streams[i]);
    pthread_mutex_unlock(&d->lock);
}

void host_queue_destroy(fab_queue *q)
{
    if (!q)
        return;
    for (uint32_t i = 0; i < q->n_streams; i++)
        tide_free(q->streams[i].items);
    tide_free(q->streams);
    tide_free(q);
}

/* The caller's side of a full ring: sleeps until a consumer has moved on. */
static void wait_for_room(host_device *d, uint32_t seen)
{
    host_start(d);
    fab_futex_wait(&d->room, seen, -1);
}

int host_enqueue(fab_queue *q, uint32_t stream, const host_item *item)
{
    host_device *d = q->device;
    host_stream *s = &q->streams[stream];
    uint64_t tail = atomic_load_explicit(&s->tail, memory_order_relaxed);

    if (tail - atomic_load_explicit(&s->head, memory_order_acquire) == s->capacity) {
        atomic_fetch_add(&d->room_waiters, 1);
        for (;;) {
            uint32_t seen = atomic_load(&d->room);
            if (tail - atomic_load(&s->head) < s->capacity)
                break;
            wait_for_room(d, seen);
        }
        atomic_fetch_sub(&d->room_waiters, 1);
    }
    s->items[tail & (s->capacity - 1)] = *item;
    atomic_store_explicit(&s->tail, tail + 1, memory_order_release);
    return TIDE_OK;
}

/* ---- calls ----------------------------------------------------------------------------------- */

int host_calls_create(fab_queue *q, uint32_t n_args, const uint32_t *ops, fab_calls **out)
{
    fab_calls *c = tide_calloc(1, sizeof *c);

    *out = NULL;
    if (!c || !(c->args = tide_calloc((size_t)HOST_CALLS * n_args, sizeof *c->args)))
        goto fail;
    c->queue = q;
    c->n_args = n_args;
    for (uint32_t i = 0; i < HOST_CALLS; i++) {
        c->ring[i].calls = c;
        c->ring[i].args = c->args + (size_t)i * n_args;
    }
    /* Two whole calls: an enqueuer that sleeps on a full ring has an older call at its head, and that one is complete
     * on all ranks that can be waited for. */
    for (uint32_t i = 0; i < q->n_streams; i++)
        if (stream_reserve(q->device, &q->streams[i], (uint64_t)ops[i] * 2) != TIDE_OK)
            goto fail;
    *out = c;
    return TIDE_OK;
fail:
    host_calls_destroy(c);
    return TIDE_ERR_MEMORY;
}

void host_calls_destroy(fab_calls *c)
{
    if (!c)
        return;
    tide_free(c->args);
    tide_free(c);
}

int host_call_begin(fab_calls *c, const fab_call_desc *desc, fab_call **out)
{
    host_device *d = c->queue->device;
    fab_call *call = &c->ring[c->next];

    *out = NULL;
    host_adopt_poison(d);
    if (host_has_failed(d))
        return host_failure(&d->face, NULL);
    if (call->held)
        return tide_fail(TIDE_ERR_STATE,
                         "call: %d calls of this kind are begun and not finished, expected their network phases first",
                         HOST_CALLS);
    if (atomic_load_explicit(&call->refs, memory_order_acquire)) {
        atomic_fetch_add(&d->room_waiters, 1);
        for (;;) {
            uint32_t seen = atomic_load(&d->room);
            if (!atomic_load(&call->refs))
                break;
            wait_for_room(d, seen);
        }
        atomic_fetch_sub(&d->room_waiters, 1);
    }
    c->next = (c->next + 1) % HOST_CALLS;
    atomic_store_explicit(&call->refs, 1, memory_order_relaxed); /* the caller's, until its last submit */
    call->held = 1;
    call->accumulate = desc->accumulate;
    call->alpha = desc->alpha;
    call->number = desc->number;
    call->tag = desc->tag;
    if (desc->n_args)
        memcpy(call->args, desc->args, desc->n_args * sizeof *call->args);
    *out = call;
    return TIDE_OK;
}

void host_call_submit(fab_call *call, int hold)
{
    host_device *d = call->calls->queue->device;
    if (!hold) {
        call->held = 0;
        atomic_fetch_sub(&call->refs, 1);
    }
    host_start(d);
}

/* ---- ops ------------------------------------------------------------------------------------- */

static int enqueue_batch(fab_queue *q, uint32_t stream, fab_call *call, int kind, const void *batch)
{
    host_item item = {.kind = (uint16_t)kind, .list = batch, .call = call, .number = call->number};
    atomic_fetch_add_explicit(&call->refs, 1, memory_order_relaxed);
    return host_enqueue(q, stream, &item);
}

int host_copy(fab_queue *q, uint32_t stream, fab_call *call, const fab_copy *copy)
{
    return enqueue_batch(q, stream, call, ITEM_COPY, copy);
}

int host_reduce(fab_queue *q, uint32_t stream, fab_call *call, const fab_reduce *reduce)
{
    return enqueue_batch(q, stream, call, ITEM_REDUCE, reduce);
}

int host_signal(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value)
{
    host_item item = {
        .kind = ITEM_SIGNAL, .n = n, .list = posts, .value = value, .tag = call->tag, .number = call->number};
    return host_enqueue(q, stream, &item);
}

int host_wait(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value,
              int check, const fab_where *where)
{
    host_item item = {.kind = ITEM_WAIT, .check = (uint16_t)check, .n = n, .list = posts, .value = value, .tag = call->tag,
                      .number = call->number, .enqueued = q->now, .where = where};
    return host_enqueue(q, stream, &item);
}

/* ---- events ---------------------------------------------------------------------------------- */

int host_event_create(fab_queue *q, fab_event **out)
{
    fab_event *e = tide_calloc(1, sizeof *e);
    if (e)
        e->queue = q;
    *out = e;
    return e ? TIDE_OK : TIDE_ERR_MEMORY;
}

void host_event_destroy(fab_event *e)
{
    tide_free(e);
}

int host_record(fab_queue *q, uint32_t stream, fab_event *e)
{
    host_item item = {.kind = ITEM_RECORD, .object = e, .value = ++e->recorded};
    return host_enqueue(q, stream, &item);
}

int host_join(fab_queue *q, uint32_t stream, fab_event *e)
{
    host_item item = {.kind = ITEM_JOIN, .object = e, .value = e->recorded};
    if (atomic_load_explicit(&e->done, memory_order_acquire) >= e->recorded)
        return TIDE_OK;
    return host_enqueue(q, stream, &item);
}

/* The caller's stream is the calling thread: whatever came before has happened. */
int host_caller_record(fab_queue *q, fab_event *e, void *stream)
{
    host_device *d = q->device;
    (void)stream;
    if (e->recorded - atomic_load_explicit(&e->done, memory_order_acquire) >= HOST_OUT_OF_ORDER)
        return tide_fail(TIDE_ERR_STATE, "event: %d records are under way, expected a wait in between",
                         HOST_OUT_OF_ORDER);
    q->now = tide_now_ns();
    e->recorded++;
    if (atomic_load_explicit(&e->done, memory_order_relaxed) + 1 == e->recorded) {
        /* no record is under way: nobody else writes this event */
        atomic_store_explicit(&e->done, e->recorded, memory_order_release);
        return TIDE_OK;
    }
    pthread_mutex_lock(&d->lock);
    host_event_complete(e, e->recorded);
    pthread_mutex_unlock(&d->lock);
    return TIDE_OK;
}

int host_caller_check(fab_device *d, void *stream)
{
    (void)d;
    if (stream)
        return tide_fail(TIDE_ERR_ARGUMENT, "stream: %p, expected NULL on the host fabric (the calling thread)",
                         stream);
    return TIDE_OK;
}

int host_caller_fill(fab_queue *q, uint32_t through, void *dst, uint8_t value, uint64_t bytes, void *stream)
{
    (void)q;
    (void)through;
    (void)stream;
    memset(dst, value, bytes);
    return TIDE_OK;
}

int host_caller_copy(fab_queue *q, uint32_t through, void *dst, const void *src, uint64_t bytes, void *stream)
{
    (void)q;
    (void)through;
    (void)stream;
    memmove(dst, src, bytes);
    return TIDE_OK;
}
