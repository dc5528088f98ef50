/* fail.c - the failure record of a rank, how it reaches the others, and the watch over peer processes. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fabric/host/host.h"

/* First one wins. The record is complete before `failed` and `poison` can be seen. */
static bool keep_failure(host_device *d, const tide_failure *failure)
{
    bool first;
    pthread_mutex_lock(&d->fail_lock);
    first = !host_has_failed(d);
    if (first) {
        d->own->failure = *failure;
        d->own->failure.size = sizeof *failure;
        atomic_store(&d->own->failed, 1);
        atomic_store_explicit(&d->failed, failure->code, memory_order_release);
    }
    pthread_mutex_unlock(&d->fail_lock);
    if (first) {
        host_ring_all(d->own);
        host_room_made(d);
        tide_log(0, "%s", failure->text);
    }
    return first;
}

void host_fail(host_device *d, const tide_failure *failure, bool spread)
{
    if (!keep_failure(d, failure) || !spread)
        return;
    for (uint32_t r = 0; r < d->face.n_ranks; r++) {
        uint32_t none = 0;
        if (r != d->face.rank && atomic_compare_exchange_strong(&host_page(d, r)->poison, &none, d->face.rank + 1))
            host_ring_all(host_page(d, r));
    }
}

void host_adopt_poison(host_device *d)
{
    uint32_t origin = atomic_load(&d->own->poison);
    tide_failure copy;
    if (!origin || origin > d->face.n_ranks || host_has_failed(d))
        return;
    copy = host_page(d, origin - 1)->failure;
    keep_failure(d, &copy);
}

int host_failure(fab_device *face, tide_failure *out)
{
    host_device *d = (host_device *)face;
    tide_failure healthy = TIDE_FAILURE_INIT;
    host_adopt_poison(d);
    if (!host_has_failed(d)) {
        if (out)
            *out = healthy;
        return TIDE_OK;
    }
    host_stand_still(d); /* who is told may free what it has handed in */
    if (out)
        *out = d->own->failure;
    return tide_fail(d->own->failure.code, "%s", d->own->failure.text);
}

int host_fail_face(fab_device *face, const tide_failure *failure)
{
    host_fail((host_device *)face, failure, true);
    return host_failure(face, NULL);
}

void host_fail_wait(host_device *d, int code, const host_item *item, uint32_t peer)
{
    tide_failure f = TIDE_FAILURE_INIT;
    host_control *theirs = host_page(d, peer);

    f.code = code;
    f.rank = d->face.rank;
    f.peer = peer;
    f.call = item->number;
    snprintf(f.phase, sizeof f.phase, "%s", item->where->phase);
    if (code == TIDE_ERR_MISMATCH)
        snprintf(f.text, sizeof f.text,
                 "rank %u and rank %u disagree: in call %llu (%s, op %u) the ranks make different calls, expected "
                 "the same group, dtype and parameters",
                 f.rank, peer, (unsigned long long)f.call, f.phase, item->where->op);
    else
        snprintf(f.text, sizeof f.text,
                 "rank %u waited %.3f s for rank %u in %s of call %llu (op %u); rank %u last waited in call %llu, "
                 "op %llu",
                 f.rank, (double)(tide_now_ns() - item->enqueued) / 1e9, peer, f.phase, (unsigned long long)f.call,
                 item->where->op, peer, (unsigned long long)atomic_load(&theirs->crumb_call),
                 (unsigned long long)atomic_load(&theirs->crumb_op));
    host_fail(d, &f, true);
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
                if (peer >= 0 && d->pids[peer] == pid) {
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

static void report_death(host_device *d, uint32_t peer)
{
    enum { PATIENCE_MS = 100 }; /* for running streams to come to their wait */
    tide_failure f = TIDE_FAILURE_INIT;
    host_item item = {0};
    int found = FOUND_BUSY;

    for (int ms = 0; ms < PATIENCE_MS && found == FOUND_BUSY; ms++) {
        if (ms)
            poll(NULL, 0, 1);
        pthread_mutex_lock(&d->lock);
        found = find_wait(d, d->pids[peer], &item);
        pthread_mutex_unlock(&d->lock);
    }
    f.code = TIDE_ERR_PEER_DEAD;
    f.rank = d->face.rank;
    f.peer = peer;
    if (found == FOUND_WAIT) {
        f.call = item.number;
        snprintf(f.phase, sizeof f.phase, "%s", item.where->phase);
        snprintf(f.text, sizeof f.text, "rank %u (process %lld) died; rank %u was in %s of call %llu (op %u)", peer,
                 (long long)d->pids[peer], f.rank, f.phase, (unsigned long long)f.call, item.where->op);
    } else {
        snprintf(f.phase, sizeof f.phase, "idle");
        snprintf(f.text, sizeof f.text, "rank %u (process %lld) died; rank %u was idle", peer, (long long)d->pids[peer],
                 f.rank);
    }
    host_fail(d, &f, false); /* every rank watches every process: each names its own wait */
}

/* watch_set[r + 1] is the process of rank r (the lowest rank stands for a process; fd -1: ignored), watch_set[0] the
 * stop event. */
static void *watch_main(void *argument)
{
    host_device *d = argument;
    uint32_t n = d->face.n_ranks;

    for (;;) {
        if (poll(d->watch_set, n + 1, -1) < 0 && errno != EINTR)
            return NULL;
        if (d->watch_set[0].revents)
            return NULL;
        for (uint32_t first = 0; first < n; first++) {
            if (d->watch_set[first + 1].fd < 0 || !d->watch_set[first + 1].revents)
                continue;
            close(d->watch_set[first + 1].fd);
            d->watch_set[first + 1].fd = -1;
            for (uint32_t r = first; r < n; r++) {
                if (d->pids[r] == d->pids[first] && !atomic_load(&host_page(d, r)->closed)) {
                    report_death(d, r);
                    break;
                }
            }
        }
    }
}

int host_watch_start(host_device *d)
{
    uint32_t n = d->face.n_ranks, watched = 0;
    int status = TIDE_OK;

    d->watch_set = tide_calloc((size_t)n + 1, sizeof *d->watch_set);
    if (!d->watch_set)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i <= n; i++)
        d->watch_set[i] = (struct pollfd){.fd = -1, .events = POLLIN};
    for (uint32_t r = 0; r < n && status == TIDE_OK; r++) {
        uint32_t first = 0;
        while (d->pids[first] != d->pids[r])
            first++;
        if (!d->pids[r] || first != r)
            continue;
        d->watch_set[r + 1].fd = (int)syscall(SYS_pidfd_open, d->pids[r], 0);
        if (d->watch_set[r + 1].fd < 0)
            status = errno == ESRCH ? tide_fail(TIDE_ERR_PEER_DEAD, "rank %u (process %lld) died during set-up", r,
                                                (long long)d->pids[r])
                                    : tide_fail(TIDE_ERR_SYSTEM, "pidfd_open of rank %u: %s", r, strerror(errno));
        watched++;
    }
    if (!watched || status != TIDE_OK)
        return status;
    d->watch_set[0].fd = eventfd(0, EFD_CLOEXEC);
    if (d->watch_set[0].fd < 0)
        return tide_fail(TIDE_ERR_SYSTEM, "eventfd: %s", strerror(errno));
    status = pthread_create(&d->watch, NULL, watch_main, d);
    if (status != 0)
        return tide_fail(TIDE_ERR_SYSTEM, "pthread_create: %s", strerror(status));
    d->watching = 1;
    return TIDE_OK;
}

void host_watch_stop(host_device *d)
{
    uint64_t one = 1;
    if (d->watching && write(d->watch_set[0].fd, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(d->watch, NULL);
    for (uint32_t i = 0; d->watch_set && i <= d->face.n_ranks; i++)
        if (d->watch_set[i].fd >= 0)
            close(d->watch_set[i].fd);
    tide_free(d->watch_set);
    d->watch_set = NULL;
    d->watching = 0;
}
