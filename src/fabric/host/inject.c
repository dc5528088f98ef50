/*
 * inject.c - a rail with faults, for tests: messages are held back, lost, delivered twice, out of order or in part, by
 * a seed.
 *
 * A put is complete for its sender when the payload has been taken, as on a network, so a message carries its own copy.
 * One thread delivers what is due.
 */
#include <signal.h>

#include "fabric/host/host.h"

typedef struct packet {
    struct packet *next; /* by due time, then by age */
    int64_t due;
    uint64_t bytes; /* that arrive */
    host_message message;
    char payload[];
} packet;

typedef struct wire_state {
    fab_inject how;
    uint64_t random;
    uint64_t candidates; /* messages so far whose signal index may be struck; by the thread that runs the stream */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    int stop;
    packet *first;
    int64_t *last_due; /* per (node, ctx) */
} wire_state;

static uint32_t draw(wire_state *w, uint32_t bound)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return bound ? (uint32_t)((w->random >> 16) % bound) : 0;
}

static void *deliver_main(void *argument)
{
    fab_rail *r = argument;
    wire_state *w = r->wire_state;

    pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        packet *p = w->first;
        int64_t now = tide_now_ns();
        if (!p) {
            pthread_cond_wait(&w->changed, &w->lock);
        } else if (p->due > now) {
            struct timespec until = {.tv_sec = p->due / 1000000000, .tv_nsec = p->due % 1000000000};
            pthread_cond_timedwait(&w->changed, &w->lock, &until);
        } else {
            w->first = p->next;
            pthread_mutex_unlock(&w->lock);
            host_rail_arrive(r, &p->message, p->payload, p->bytes);
            tide_free(p);
            pthread_mutex_lock(&w->lock);
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Out of memory: as if the network had lost it. Lock held. */
static void post(fab_rail *r, const host_message *m, const void *payload, uint64_t bytes, bool overtaken)
{
    wire_state *w = r->wire_state;
    int64_t *last = &w->last_due[(uint64_t)r->node_of[m->peer] * r->n_ctx + m->ctx];
    packet *p = tide_calloc(1, sizeof *p + bytes), **link;

    if (!p)
        return;
    p->message = *m;
    p->bytes = bytes;
    if (bytes)
        memcpy(p->payload, payload, bytes);
    if (overtaken) {
        p->due = tide_now_ns() + (int64_t)w->how.delay_us * 1000;
    } else {
        p->due = tide_now_ns() + (int64_t)draw(w, w->how.overtake ? 0 : w->how.delay_us + 1) * 1000;
        if (p->due < *last)
            p->due = *last;
        *last = p->due;
    }
    for (link = &w->first; *link && (*link)->due <= p->due; link = &(*link)->next)
        continue;
    p->next = *link;
    *link = p;
    pthread_cond_signal(&w->changed);
}

static bool struck(wire_state *w, bool candidate, uint32_t probability)
{
    return candidate && draw(w, 65536) < probability;
}

static void inject_send(fab_rail *r, const host_message *m, const void *payload)
{
    wire_state *w = r->wire_state;
    uint64_t bytes = m->bytes;
    bool candidate = !w->how.sigs || w->how.sigs >> m->sig & 1;

    w->candidates += candidate;
    candidate = candidate && (!w->how.nth || w->candidates == w->how.nth);
    pthread_mutex_lock(&w->lock);
    if (bytes && struck(w, candidate, w->how.cut))
        bytes = draw(w, 4) ? draw(w, (uint32_t)tide_min_u64(bytes, UINT32_MAX)) : 0;
    if (!struck(w, candidate, w->how.drop)) {
        bool twice = struck(w, candidate, w->how.duplicate);
        post(r, m, payload, bytes, struck(w, candidate, w->how.overtake));
        if (twice)
            post(r, m, payload, bytes, false);
    }
    pthread_mutex_unlock(&w->lock);
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
        packet *p = w->first;
        w->first = p->next;
        if (!host_has_failed(r->queue->device))
            host_rail_arrive(r, &p->message, p->payload, p->bytes);
        tide_free(p);
    }
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    tide_free(w->last_due);
    tide_free(w);
}

static const host_wire inject_wire = {inject_send, inject_destroy};

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
