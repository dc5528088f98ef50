/*
 * inject.c - a rail with faults, for tests: messages are held back, lost, delivered twice or out of order, by a seed.
 *
 * A put is complete for its sender when the payload has been taken, as on a network, so a message carries its own copy.
 * One thread delivers what is due. Within a (peer, context) messages keep their order unless `shuffle` says otherwise.
 */
#include <signal.h>

#include "fabric/host/host.h"

typedef struct message {
    struct message *next; /* by due time, then by arrival */
    int64_t due;
    uint64_t tag, bytes;
    void *dst;
    uint32_t peer;
    uint16_t ctx, sig;
    char payload[];
} message;

typedef struct wire_state {
    fab_inject how;
    uint64_t random;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    int stop;
    message *first;
    int64_t *last_due; /* per (node, ctx) */
} wire_state;

static uint32_t draw(wire_state *w, uint32_t bound)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return bound ? (uint32_t)((w->random >> 16) % bound) : 0;
}

static void deliver(fab_rail *r, const message *m)
{
    if (m->bytes)
        memcpy(m->dst, m->payload, m->bytes);
    host_rail_deliver(r, m->peer, m->ctx, m->sig, m->tag);
}

static void *deliver_main(void *argument)
{
    fab_rail *r = argument;
    wire_state *w = r->wire_state;

    pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        message *m = w->first;
        int64_t now = tide_now_ns();
        if (!m) {
            pthread_cond_wait(&w->changed, &w->lock);
        } else if (m->due > now) {
            struct timespec until = {.tv_sec = m->due / 1000000000, .tv_nsec = m->due % 1000000000};
            pthread_cond_timedwait(&w->changed, &w->lock, &until);
        } else {
            w->first = m->next;
            pthread_mutex_unlock(&w->lock);
            deliver(r, m);
            tide_free(m);
            pthread_mutex_lock(&w->lock);
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static void post_message(fab_rail *r, const message *head, const void *src)
{
    wire_state *w = r->wire_state;
    message *m, **link;
    int64_t *last = &w->last_due[(uint64_t)r->node_of[head->peer] * r->n_ctx + head->ctx];

    pthread_mutex_lock(&w->lock);
    m = draw(w, 65536) < w->how.drop ? NULL : tide_calloc(1, sizeof *m + head->bytes);
    if (m) {
        *m = *head;
        if (src)
            memcpy(m->payload, src, head->bytes);
        m->due = tide_now_ns() + (int64_t)draw(w, w->how.delay_us + 1) * 1000;
        if (!w->how.shuffle && m->due < *last)
            m->due = *last;
        *last = m->due;
        for (link = &w->first; *link && (*link)->due <= m->due; link = &(*link)->next)
            continue;
        m->next = *link;
        *link = m;
        pthread_cond_signal(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
}

static void send_message(fab_rail *r, const message *head, const void *src)
{
    wire_state *w = r->wire_state;
    bool twice;
    pthread_mutex_lock(&w->lock);
    twice = draw(w, 65536) < w->how.duplicate;
    pthread_mutex_unlock(&w->lock);
    post_message(r, head, src);
    if (twice)
        post_message(r, head, src);
}

static void inject_put(fab_rail *r, const fab_put *put, uint64_t tag)
{
    message head = {
        .tag = tag, .bytes = put->bytes, .dst = put->dst, .peer = put->peer, .ctx = put->ctx, .sig = put->sig};
    send_message(r, &head, put->src);
}

static void inject_signal(fab_rail *r, uint32_t peer, uint32_t ctx, uint32_t sig, uint64_t tag)
{
    message head = {.tag = tag, .peer = peer, .ctx = (uint16_t)ctx, .sig = (uint16_t)sig};
    send_message(r, &head, NULL);
}

static void inject_destroy(fab_rail *r)
{
    wire_state *w = r->wire_state;
    pthread_mutex_lock(&w->lock);
    w->stop = 1;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    while (w->first) { /* this rank may leave before its messages have arrived: the network still has them */
        message *m = w->first;
        w->first = m->next;
        if (!host_has_failed(r->queue->device))
            deliver(r, m);
        tide_free(m);
    }
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    tide_free(w->last_due);
    tide_free(w);
}

static const host_wire inject_wire = {inject_put, inject_signal, inject_destroy};

int host_inject_wire(fab_rail *r, const fab_inject *inject)
{
    wire_state *w = tide_calloc(1, sizeof *w);
    pthread_condattr_t attributes;
    sigset_t all, before;
    int status;

    if (!w || !(w->last_due = tide_calloc((size_t)r->nodes * r->n_ctx, sizeof *w->last_due))) {
        tide_free(w);
        return TIDE_ERR_MEMORY;
    }
    w->how = *inject;
    w->random = inject->seed * UINT64_C(0x9e3779b97f4a7c15) + r->node + 1;
    w->random = w->random ? w->random : 1;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    r->wire_state = w;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    status = pthread_create(&w->thread, NULL, deliver_main, r);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) {
        pthread_cond_destroy(&w->changed);
        pthread_mutex_destroy(&w->lock);
        tide_free(w->last_due);
        tide_free(w);
        r->wire_state = NULL;
        return tide_fail(TIDE_ERR_SYSTEM, "pthread_create: %s", strerror(status));
    }
    r->wire = &inject_wire;
    return TIDE_OK;
}
