/* fail.c - failures of the host device: who is woken, which wait is named. */
#include <stdio.h>

#include "fabric/host/host.h"

static void wake_all(void *device)
{
    host_device *d = device;
    host_ring_all(d->own);
    host_room_made(d);
}

static void wake_rank(void *device, uint32_t rank)
{
    host_ring_all(host_page(device, rank));
}

int host_failure(fab_device *face, tide_failure *out)
{
    host_device *d = (host_device *)face;
    host_adopt_poison(d);
    if (host_has_failed(d))
        host_stand_still(d); /* who is told may free what it has handed in */
    return fab_peers_failure(&d->peers, out);
}

int host_fail_face(fab_device *face, const tide_failure *failure)
{
    fab_peers_fail(&((host_device *)face)->peers, failure, true);
    return host_failure(face, NULL);
}

static fab_waiting waiting(const host_item *item)
{
    return (fab_waiting){item->number, item->enqueued, item->where};
}

void host_fail_wait(host_device *d, int code, const host_item *item, uint32_t peer)
{
    fab_waiting wait = waiting(item);
    fab_peers_fail_wait(&d->peers, code, &wait, peer);
}

void host_fail_message(host_device *d, const host_message *m, const char *what)
{
    tide_failure f = TIDE_FAILURE_INIT;

    f.code = TIDE_ERR_NETWORK;
    f.rank = m->peer;
    f.peer = d->face.rank;
    f.call = m->call;
    snprintf(f.phase, sizeof f.phase, "%s", m->where->phase);
    snprintf(f.text, sizeof f.text,
             "rank %u: message %llu of rank %u (context %u, signal %u) %s; sent in %s of call %llu (op %u)", f.rank,
             (unsigned long long)m->number, d->face.rank, m->ctx, m->sig, what, f.phase, (unsigned long long)f.call,
             m->where->op);
    fab_peers_fail(&d->peers, &f, true);
}

enum { FOUND_NONE, FOUND_BUSY, FOUND_WAIT };

/* The wait that a dead process holds up: the first unfinished one of a stream, best one whose word that process owes. A
 * stream that runs right now is not looked into. Device lock held. */
static int find_wait(host_device *d, int64_t pid, host_item *out)
{
    int found = FOUND_NONE;
    for (fab_queue *q = d->queues; q; q = q->next) {
        for (uint32_t i = 0; i < q->n_streams; i++) {
            host_stream *s = &q->streams[i];
            uint64_t tail = atomic_load(&s->tail);
            if (s->busy) {
                found = found == FOUND_NONE ? FOUND_BUSY : found;
                continue;
            }
            for (uint64_t at = atomic_load(&s->head); at < tail; at++) {
                host_item *item = &s->items[at & (s->capacity - 1)];
                int64_t peer;
                if (item->kind != ITEM_WAIT && item->kind != ITEM_RAIL_WAIT)
                    continue;
                peer = host_missing(d, item);
                if (peer >= 0 && d->peers.pids[peer] == pid) {
                    *out = *item;
                    return FOUND_WAIT;
                }
                if (found != FOUND_WAIT)
                    *out = *item;
                found = FOUND_WAIT;
                break;
            }
        }
    }
    return found;
}

static void report_death(void *device, uint32_t peer)
{
    enum { PATIENCE_MS = 100 }; /* for running streams to come to their wait */
    host_device *d = device;
    host_item item = {0};
    fab_waiting wait;
    int found = FOUND_BUSY;

    for (int ms = 0; ms < PATIENCE_MS && found == FOUND_BUSY; ms++) {
        if (ms)
            poll(NULL, 0, 1);
        pthread_mutex_lock(&d->lock);
        found = find_wait(d, d->peers.pids[peer], &item);
        pthread_mutex_unlock(&d->lock);
    }
    wait = waiting(&item);
    fab_peers_fail_death(&d->peers, peer, found == FOUND_WAIT ? &wait : NULL);
}

const fab_peers_hooks host_peers_hooks = {.failed = wake_all, .told = wake_rank, .died = report_death};
