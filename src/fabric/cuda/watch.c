/*
 * watch.c - what goes wrong on a CUDA device, and how its streams come to rest then.
 *
 * A stream that waits for a word has said so before (its crumb). The watch looks at the crumbs while something is under
 * way. Only when a wait has been due, or its poster has died, are its words read back. A failure ends all waits: the
 * words that a stream still waits for are set far ahead, again and again, until it stands still, since a peer's late post
 * may set one back. What then runs is undefined, but touches nothing that is not mapped.
 */
#include <stdio.h>

#include "fabric/cuda/cuda.h"

enum { PERIOD_MS = 50, RELEASE_MS = 5, REST_MS = 30000, STUCK_MS = 1000, READ_MS = 1000, PATIENCE_MS = 100 };
static const uint64_t FAR = UINT64_C(1) << 62; /* waits compare the signed difference */

/* ---- words -------------------------------------------------------------------------------------- */

static const cuda_target *target_at(const cuda_stream *s, uint64_t number)
{
    return number > 0 && number <= s->n_targets && s->n_targets - number < CUDA_TARGETS
               ? &s->targets[number % CUDA_TARGETS]
               : NULL;
}

/* Values of `n` words of this GPU, by the rescue stream. Watch thread, lock held, context current. */
static int read_words(cuda_device *d, const cuda_stream *s, uint64_t first, uint32_t n)
{
    cu_result now = CU_OK;
    int64_t ns = 0, end = tide_now_ns() + (int64_t)READ_MS * 1000000;

    for (uint32_t i = 0; i < n && now == CU_OK; i++)
        now = d->driver->MemcpyDtoHAsync(&d->read_back[i], target_at(s, first + i)->word, sizeof *d->read_back,
                                         d->rescue);
    while (now == CU_OK && (now = cuda_query(d, d->rescue)) == CU_NOT_READY && tide_now_ns() < end) {
        cuda_nap(&ns);
        now = CU_OK;
    }
    return cuda_check(d->driver, now, "reading counters back");
}

/* The first word of the wait that the stream has come to which is not there: NULL when there is none, or it cannot be
 * found out. */
static const cuda_target *missing(cuda_device *d, cuda_stream *s)
{
    uint64_t at = atomic_load(s->crumb), last;
    const cuda_target *t = at == s->settled ? NULL : target_at(s, at);

    if (!t || !t->wait.where)
        return NULL;
    if (!t->word)
        return t;
    for (last = t->last; at <= last; at += CUDA_READ_BACK) {
        uint32_t n = (uint32_t)tide_min_u64(CUDA_READ_BACK, last - at + 1);
        if (!target_at(s, at) || read_words(d, s, at, n) != TIDE_OK)
            return NULL;
        for (uint32_t i = 0; i < n; i++) {
            t = target_at(s, at + i);
            if ((int64_t)(d->read_back[i] - t->value) < 0)
                return t;
        }
    }
    s->settled = atomic_load(s->crumb) <= last ? atomic_load(s->crumb) : s->settled;
    return NULL;
}

/* Sets ahead what the stream may still wait for. Lock held, context current. */
static void release(cuda_device *d, const cuda_stream *s)
{
    cu_stream_op ops[CUDA_OPS];
    uint64_t at = atomic_load(s->crumb);
    uint32_t n = 0;

    if (!target_at(s, at))
        at = s->n_targets > CUDA_TARGETS ? s->n_targets - CUDA_TARGETS + 1 : 1;
    for (; at <= s->n_targets; at++) {
        const cuda_target *t = target_at(s, at);
        if (t->word) {
            memset(&ops[n], 0, sizeof ops[n]);
            ops[n].at.operation = CU_OP_WRITE_64;
            ops[n].at.address = t->word;
            ops[n++].at.value = t->value + FAR;
        }
        if (n == CUDA_OPS || (n > 0 && at == s->n_targets)) {
            d->driver->StreamBatchMemOp(d->rescue, n, ops, 0);
            n = 0;
        }
    }
}

/* Whether all stand still; those that do not are helped, but for what stands in the extension's library: `stuck`. Lock held,
 * context current. */
static bool release_all(cuda_device *d, fab_queue *only, bool *stuck)
{
    bool idle = true;
    *stuck = false;
    for (fab_queue *q = d->queues; q; q = q->next) {
        for (uint32_t i = 0; i < q->n_streams && (!only || q == only); i++) {
            const cuda_stream *s = &q->streams[i];
            const cuda_target *t = s->handle ? target_at(s, atomic_load(s->crumb)) : NULL;
            if (!s->handle || cuda_query(d, s->handle) != CU_NOT_READY)
                continue;
            if (t && !t->word) {
                *stuck = true;
                continue;
            }
            release(d, s);
            idle = false;
        }
    }
    return idle;
}

static void give_up(cuda_device *d, bool stuck)
{
    cuda_gpu_give_up(d->gpu);
    if (!atomic_exchange(&d->restless, 1))
        tide_log(0, "rank %u: streams of device %d do not come to rest%s", d->face.rank, d->open.device,
                 stuck ? ": they stand in the network's library" : "");
    cuda_settled(d);
}

void cuda_bring_to_rest(cuda_device *d, fab_queue *q)
{
    int64_t ns = 0, begin = tide_now_ns(), limit;
    bool idle, stuck;

    if (!cuda_push_to_free(d)) {
        cuda_gpu_give_up(d->gpu);
        return;
    }
    for (;;) {
        if (d->extension->failed && fab_peers_failed(&d->peers))
            d->extension->failed(d);
        pthread_mutex_lock(&d->lock);
        idle = release_all(d, q, &stuck);
        pthread_mutex_unlock(&d->lock);
        limit = (int64_t)(idle ? STUCK_MS : REST_MS) * 1000000;
        if ((idle && !stuck) || tide_now_ns() - begin >= limit || atomic_load(&d->restless))
            break;
        cuda_nap(&ns);
    }
    cuda_pop(d);
    if (!idle || stuck)
        give_up(d, stuck);
}

void cuda_settled(cuda_device *d)
{
    if (atomic_exchange(&d->handed_over, 0))
        cuda_gpu_unsettle(d->gpu, -1);
}

void cuda_settle(cuda_device *d)
{
    int64_t ns = 0, end = tide_now_ns() + (int64_t)2 * STUCK_MS * 1000000;

    while (cuda_gpu_unsettled(d->gpu) && !cuda_gpu_given_up(d->gpu)) {
        if (tide_now_ns() >= end)
            cuda_gpu_give_up(d->gpu);
        else
            cuda_nap(&ns);
    }
}

/* ---- failures ----------------------------------------------------------------------------------- */

int cuda_failure(fab_device *face, tide_failure *out)
{
    cuda_device *d = (cuda_device *)face;
    fab_peers_adopt_any(&d->peers); /* a stream may have gone on because a peer has failed, before that one could tell */
    if (fab_peers_failed(&d->peers))
        cuda_bring_to_rest(d, NULL); /* who is told may free what it has handed in */
    return fab_peers_failure(&d->peers, out);
}

int cuda_fail_face(fab_device *face, const tide_failure *failure)
{
    fab_peers_fail(&((cuda_device *)face)->peers, failure, true);
    return cuda_failure(face, NULL);
}

static void failed(void *device)
{
    fab_peers_wake(&((cuda_device *)device)->peers);
}

/* The wait that a dead process holds up: best one whose word it owes. Lock held, context current. */
static const cuda_target *find_wait(cuda_device *d, int64_t pid, bool *running)
{
    const cuda_target *found = NULL;
    *running = false;
    for (fab_queue *q = d->queues; q; q = q->next) {
        for (uint32_t i = 0; i < q->n_streams; i++) {
            cuda_stream *s = &q->streams[i];
            const cuda_target *t;
            if (!s->handle || d->driver->StreamQuery(s->handle) != CU_NOT_READY)
                continue;
            t = missing(d, s);
            if (t && d->peers.pids[t->rank] == pid)
                return t;
            found = t ? t : found;
            *running |= !t;
        }
    }
    return found;
}

static void died(void *device, uint32_t peer)
{
    cuda_device *d = device;
    bool running = true, found = false;

    for (uint32_t r = 0; r < d->face.n_ranks; r++)
        if (d->peers.pids[r] == d->peers.pids[peer])
            atomic_store(&d->gone[r], 1);
    if (cuda_push(d) == TIDE_OK) {
        for (int ms = 0; ms < PATIENCE_MS && running && !found; ms++) { /* running streams come to their wait */
            const cuda_target *t;
            if (ms)
                poll(NULL, 0, 1);
            pthread_mutex_lock(&d->lock);
            t = find_wait(d, d->peers.pids[peer], &running);
            found = t != NULL;
            if (t) /* under the lock: what the wait is of may be freed once its stream is at rest */
                fab_peers_fail_death(&d->peers, peer, &t->wait);
            pthread_mutex_unlock(&d->lock);
        }
        cuda_pop(d);
    }
    if (!found)
        fab_peers_fail_death(&d->peers, peer, NULL);
}

/* ---- the watch ---------------------------------------------------------------------------------- */

int cuda_fail_device(cuda_device *d)
{
    tide_failure f = TIDE_FAILURE_INIT;
    f.code = TIDE_ERR_SYSTEM;
    f.rank = d->face.rank;
    snprintf(f.phase, sizeof f.phase, "device");
    snprintf(f.text, sizeof f.text, "rank %u: device %d: %.180s", f.rank, d->open.device, tide_last_error());
    fab_peers_fail(&d->peers, &f, true);
    return fab_peers_failure(&d->peers, NULL);
}

/* A wait that stood in the extension's library, perhaps for one of several ranks. Lock held. */
static void fail_handed_over(cuda_device *d, const cuda_stream *s, const cuda_target *first)
{
    tide_failure f = TIDE_FAILURE_INIT;
    double waited = (double)(tide_now_ns() - first->wait.enqueued) / 1e9;
    const cuda_target *t = first;
    char whom[64], theirs[96]; /* names as many ranks as have room */
    size_t n = 0;

    while (n + sizeof ", 4294967295" < sizeof whom) {
        n += (size_t)snprintf(whom + n, sizeof whom - n, n ? ", %u" : "%u", t->rank);
        if (t == target_at(s, first->last))
            break;
        t = &s->targets[(t - s->targets + 1) % CUDA_TARGETS];
    }
    f.code = TIDE_ERR_DEADLINE;
    f.rank = d->face.rank;
    f.peer = first->rank;
    f.call = first->wait.call;
    snprintf(f.phase, sizeof f.phase, "%s", first->wait.where->phase);
    fab_peers_last_wait(&d->peers, first->rank, theirs);
    snprintf(f.text, sizeof f.text, "rank %u waited %.3f s for %s %s in %s of call %llu (op %u); %s", f.rank, waited,
             t == first ? "rank" : "one of ranks", whom, f.phase, (unsigned long long)f.call, first->wait.where->op, theirs);
    fab_peers_fail(&d->peers, &f, true);
}

/* Notes where the stream is; true: it waits past its deadline, which has failed the device. Lock held, so that what the
 * wait is of is not freed yet; context current. */
static bool look(cuda_device *d, cuda_stream *s, int64_t now)
{
    uint64_t at = atomic_load(s->crumb);
    const cuda_target *t = at == s->settled ? NULL : target_at(s, at);

    if (!t || !t->wait.where)
        return false;
    atomic_store_explicit(&d->peers.own->crumb_call, t->wait.call, memory_order_relaxed);
    atomic_store_explicit(&d->peers.own->crumb_op, t->wait.where->op, memory_order_relaxed);
    if (now - t->wait.enqueued < d->peers.deadline_ns)
        return false;
    t = missing(d, s);
    if (t && t->word)
        fab_peers_fail_wait(&d->peers, TIDE_ERR_DEADLINE, &t->wait, t->rank);
    else if (t)
        fail_handed_over(d, s, t);
    return t != NULL;
}

/* 1: a wait was due; -1: an error of the device. Lock held, context current. */
static int look_at_queues(cuda_device *d, bool *idle)
{
    int64_t now = tide_now_ns();
    *idle = true;
    for (fab_queue *q = d->queues; q; q = q->next) {
        int status = cuda_queue_idle(q);
        if (status < 0)
            return -1;
        *idle &= status == TIDE_OK;
        for (uint32_t i = 0; i < q->n_streams && status > 0; i++) {
            cuda_stream *s = &q->streams[i];
            if (s->handle && d->driver->StreamQuery(s->handle) == CU_NOT_READY && look(d, s, now))
                return 1;
        }
    }
    return 0;
}

/* After a failure, whatever its caller does meanwhile. */
static void settle(cuda_device *d, bool idle, bool stuck)
{
    if (idle && !stuck)
        cuda_settled(d);
    if (!stuck)
        d->stuck_since = 0;
    else if (!d->stuck_since)
        d->stuck_since = tide_now_ns();
    else if (tide_now_ns() - d->stuck_since >= (int64_t)STUCK_MS * 1000000)
        give_up(d, true);
}

/* The failure has been seen, and then no thread that enqueues: the next one will see it as well. What stands still after this
 * does so for good. */
static bool nothing_comes(cuda_device *d)
{
    return atomic_load(&d->peers.failed) != 0 && atomic_load(&d->current) == 0;
}

/* Looks again soon while anything is under way. */
static int tick(void *device)
{
    cuda_device *d = device;
    const cuda_extension *x = d->extension;
    bool idle = true, stuck = false, failed, over;
    int found = 0;

    fab_peers_adopt(&d->peers);
    if (cuda_push(d) != TIDE_OK)
        return PERIOD_MS;
    atomic_store(&d->busy, 0); /* who enqueues after this wakes the watch */
    failed = fab_peers_failed(&d->peers);
    over = nothing_comes(d);
    if (x->failed && failed)
        x->failed(d);
    pthread_mutex_lock(&d->lock);
    if (failed)
        idle = release_all(d, NULL, &stuck);
    else
        found = look_at_queues(d, &idle);
    pthread_mutex_unlock(&d->lock);
    if (failed) {
        settle(d, idle, stuck);
        if (over && idle && !stuck)
            atomic_store(&cuda_rank_page(d, d->face.rank)->at_rest, 1);
        idle = idle && over;
    }
    if (x->poll && !idle && !found && !fab_peers_failed(&d->peers))
        x->poll(d);
    if (!idle)
        atomic_store(&d->busy, 1);
    cuda_pop(d);
    if (found < 0)
        cuda_fail_device(d);
    if (found)
        return 0;
    if (idle && !stuck)
        return -1;
    return !idle && fab_peers_failed(&d->peers) ? RELEASE_MS : PERIOD_MS;
}

const fab_peers_hooks cuda_peers_hooks = {.failed = failed, .died = died, .tick = tick};
