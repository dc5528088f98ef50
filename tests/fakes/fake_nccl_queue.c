/* fake_nccl_queue.c - the fake NCCL's groups, puts, signals and waits, and what comes of them on the streams. */
#include <stdio.h>
#include <stdlib.h>

#include "fake_nccl_internal.h"

/* What this thread holds back until its group ends. Of an earlier fake: nothing. */
static _Thread_local struct {
    uint64_t generation;
    int depth;
    nccl_result error; /* of a call in the group: then it comes to nothing */
    fake_transfer *transfers;
    int n, capacity;
} group;

static uint64_t *count_at(nccl_comm comm, uint64_t *counts, int peer, int sig, int ctx)
{
    return &counts[((size_t)peer * (size_t)comm->n_sig + (size_t)sig) * (size_t)comm->n_ctx + (size_t)ctx];
}

/* ---- on the streams -------------------------------------------------------------------------- */

static bool all_delivered(const fake_plan *p)
{
    for (int i = 0; i < p->n; i++)
        if (!p->transfers[i].done)
            return false;
    return true;
}

static bool awaited(const fake_plan *p)
{
    const fake_transfer *t = p->transfers;
    for (int i = 0; i < t->n_awaited; i++)
        if (*count_at(p->comm, p->comm->delivered, t->awaited[i].peer, t->awaited[i].sig, t->awaited[i].ctx) <
            t->awaited[i].count)
            return false;
    return true;
}

static bool plan_blocked(const void *item)
{
    const fake_plan *p = item;
    if (!p->comm || p->comm->released)
        return false;
    if (p->comm->async != NCCL_OK || p->comm->finished != p->turn)
        return true;
    return p->transfers->waits ? !awaited(p) : p->endless && all_delivered(p);
}

/* A piece of a put into the peer's memory. */
static void deliver(const fake_transfer *t, uint64_t at, uint64_t bytes)
{
    nccl_comm peer = t->comm->clique->ranks[t->peer];
    nccl_window w = fake_nccl_window_of(peer, t->window);

    if (peer->gone && peer->aborting)
        return;
    if (w->gone) {
        fake_complain("ncclPutSignal: rank %d puts into a window that rank %d has deregistered", t->comm->rank, peer->rank);
        return;
    }
    if (fake_find(t->src + at, bytes, t->comm->device) && fake_find(w->base + t->offset + at, bytes, peer->device))
        memcpy((void *)(w->base + t->offset + at), (const void *)(t->src + at), bytes);
}

static void count(const fake_transfer *t)
{
    nccl_comm peer = t->comm->clique->ranks[t->peer];
    if (t->signal_lost)
        return;
    if (peer->gone && !peer->aborting)
        fake_complain("ncclSignal: rank %d signals rank %d, whose communicator is destroyed", t->comm->rank, peer->rank);
    ++*count_at(peer, peer->delivered, t->comm->rank, t->sig, t->ctx);
}

/* One of those that can go on: the first of a peer and context. */
static fake_transfer *choose(fake_plan *p)
{
    fake_transfer *able[FAKE_NCCL_MAX_RANKS * 4];
    int n = 0;

    for (int i = 0; i < p->n && n < FAKE_NCCL_MAX_RANKS * 4; i++) {
        fake_transfer *t = &p->transfers[i];
        bool first = !t->done;
        for (int k = 0; k < n && first; k++)
            first = able[k]->peer != t->peer || able[k]->ctx != t->ctx;
        if (first)
            able[n++] = t;
    }
    return able[fake_random((uint64_t)n)];
}

static void advance(fake_transfer *t)
{
    if (t->put_off) {
        t->put_off--;
    } else if (t->arrived < t->n_pieces) {
        deliver(t, t->piece[t->arrived].at, t->piece[t->arrived].bytes);
        t->arrived++;
    } else {
        count(t);
        t->done = true;
    }
}

static bool plan_step(void *item)
{
    fake_plan *p = item;
    if (!p->comm)
        return true;
    if (!p->comm->released && !p->transfers->waits) {
        advance(choose(p));
        if (!all_delivered(p) || p->endless)
            return false;
    }
    if (!p->comm->released && fake_nccl.async.at && ++fake_nccl.async.seen == fake_nccl.async.at) {
        fake_nccl.failed = true;
        p->comm->async = fake_nccl_refuse(fake_nccl.async.result, "rank %d: a network error", p->comm->rank);
        return false;
    }
    p->comm->finished++;
    return true;
}

static bool plan_uses(const void *item, uintptr_t base, uint64_t bytes)
{
    const fake_plan *p = item;
    for (int i = 0; p->comm && !p->comm->released && i < p->n; i++) {
        const fake_transfer *t = &p->transfers[i];
        if (!t->done && t->bytes && t->src < base + bytes && base < t->src + t->bytes)
            return true;
    }
    return false;
}

static void clear_transfers(fake_transfer *t, int n)
{
    for (int i = 0; i < n; i++)
        free(t[i].awaited);
}

static void plan_drop(void *item)
{
    fake_plan *p = item, **at = &fake_nccl.plans;
    while (*at && *at != p)
        at = &(*at)->next;
    if (*at)
        *at = p->next;
    clear_transfers(p->transfers, p->n);
    free(p->transfers);
    free(p);
}

static const fake_foreign in_nccl = {"NCCL", plan_blocked, plan_step, plan_uses, plan_drop};

void fake_nccl_queue_clear(void)
{
    for (fake_plan *p = fake_nccl.plans; p; p = p->next)
        p->comm = NULL;
    fake_nccl.plans = NULL;
}

/* ---- onto the streams ------------------------------------------------------------------------ */

/* How the bytes of a put arrive: in up to four pieces, in any order. */
static void cut(fake_transfer *t)
{
    uint64_t left = t->bytes, at = 0;

    while (left) {
        uint64_t bytes = left;
        if (left > 64 && t->n_pieces < 3 && fake_random(2))
            bytes = (1 + fake_random(left / 16 - 1)) * 16;
        t->piece[t->n_pieces].at = at;
        t->piece[t->n_pieces++].bytes = bytes;
        at += bytes;
        left -= bytes;
    }
    for (uint32_t i = t->n_pieces; i > 1; i--) {
        uint32_t k = (uint32_t)fake_random(i);
        struct fake_arrival swap = t->piece[k];
        t->piece[k] = t->piece[i - 1];
        t->piece[i - 1] = swap;
    }
    t->put_off = (uint32_t)fake_random((uint64_t)fake_nccl.options.delay + 1);
}

/* Takes over what the transfers hold. */
static void launch_plan(const fake_transfer *transfers, int n)
{
    fake_plan *p = calloc(1, sizeof *p);

    *p = (fake_plan){fake_nccl.plans, transfers->comm, transfers->comm->issued++, calloc((size_t)n, sizeof *transfers), n, false};
    memcpy(p->transfers, transfers, (size_t)n * sizeof *transfers);
    for (int i = 0; i < n; i++) {
        fake_transfer *t = &p->transfers[i];
        if (t->stream != transfers->stream)
            fake_complain("ncclGroupEnd: the group has two streams of one communicator");
        for (int k = 0; k < t->n_awaited; k++) {
            struct fake_awaited *a = &t->awaited[k];
            a->count = *count_at(t->comm, t->comm->expected, a->peer, a->sig, a->ctx) += a->count;
        }
        if (t->waits)
            continue;
        cut(t);
        if (fake_nccl.completion.at && ++fake_nccl.completion.seen == fake_nccl.completion.at)
            fake_nccl.failed = p->endless = true;
        if (fake_nccl.signal.at && ++fake_nccl.signal.seen == fake_nccl.signal.at)
            fake_nccl.failed = t->signal_lost = true;
    }
    if (n > FAKE_NCCL_IN_FLIGHT)
        fake_complain("ncclGroupEnd: %d puts in one group", n);
    fake_nccl.plans = p;
    fake_stream_foreign(transfers->stream, &in_nccl, p);
}

/* Communicator by communicator, in the order of the calls: waits alone, what is between them together. */
static void launch(fake_transfer *t, int n)
{
    fake_transfer *own = calloc((size_t)n + 1, sizeof *own);

    for (int i = 0; i < n; i++) {
        nccl_comm comm = t[i].comm;
        int taken = 0;
        if (!comm)
            continue;
        for (int k = i; k < n; k++) {
            if (t[k].comm != comm)
                continue;
            if (t[k].waits && taken)
                launch_plan(own, taken), taken = 0;
            if (t[k].waits)
                launch_plan(&t[k], 1);
            else
                own[taken++] = t[k];
            t[k].comm = NULL;
        }
        if (taken)
            launch_plan(own, taken);
        comm->group = NULL;
    }
    free(own);
}

/* A group that an earlier fake left open is no more. */
static void renew(void)
{
    if (group.generation == fake_nccl.generation)
        return;
    free(group.transfers);
    memset(&group, 0, sizeof group);
    group.generation = fake_nccl.generation;
}

static nccl_result enqueue(nccl_result r, fake_transfer t)
{
    renew();
    if (r != NCCL_OK) {
        free(t.awaited);
        if (group.depth)
            group.error = r;
        return r;
    }
    if (t.comm->group && t.comm->group != &group)
        fake_complain("rank %d: two threads use one communicator at a time", t.comm->rank);
    if (!group.depth) {
        launch(&t, 1);
        return NCCL_OK;
    }
    if (group.n == group.capacity) {
        group.capacity = group.capacity ? 2 * group.capacity : 16;
        group.transfers = realloc(group.transfers, (size_t)group.capacity * sizeof t);
    }
    t.comm->group = &group;
    group.transfers[group.n++] = t;
    return NCCL_OK;
}

/* ---- calls ----------------------------------------------------------------------------------- */

nccl_result fake_nccl_GroupStart(void)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_GroupStart, 0);
    renew();
    if (r == NCCL_OK && group.depth++ == 0)
        fake_nccl.open_groups++;
    return fake_nccl_leave(r);
}

nccl_result fake_nccl_GroupEnd(void)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_GroupEnd, 0);

    if (group.generation != fake_nccl.generation || !group.depth)
        return fake_nccl_leave(r != NCCL_OK ? r : fake_nccl_refuse(NCCL_INVALID_USAGE, "ncclGroupEnd: not in a group"));
    if (r != NCCL_OK && group.error == NCCL_OK)
        group.error = r;
    if (--group.depth)
        return fake_nccl_leave(r);
    fake_nccl.open_groups -= fake_nccl.running;
    for (int i = 0; i < group.n && fake_nccl.running && group.error == NCCL_OK; i++)
        group.error = fake_nccl_good(group.transfers[i].comm, "ncclGroupEnd");
    if (fake_nccl.running && group.error == NCCL_OK) {
        launch(group.transfers, group.n);
    } else {
        for (int i = 0; i < group.n && fake_nccl.running; i++)
            group.transfers[i].comm->group = NULL;
        clear_transfers(group.transfers, group.n);
    }
    r = group.error;
    free(group.transfers);
    group.transfers = NULL;
    group.n = group.capacity = 0;
    group.error = NCCL_OK;
    return fake_nccl_leave(r);
}

/* What holds for puts, signals and waits: the communicator, its kind, the stream. */
static nccl_result good_call(nccl_comm comm, cu_stream *stream, const char *what)
{
    nccl_result r = fake_nccl_good(comm, what);

    if (r != NCCL_OK)
        return r;
    if (!fake_current() || fake_current()->device != comm->device)
        fake_complain("%s: the communicator's context is not current", what);
    if (comm->n_ctx == 0 || fake_nccl.options.no_host_rma || fake_nccl.options.null_windows)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: host RMA is not supported in this communicator", what);
    if (!comm->eager && !comm->registered)
        return fake_nccl_refuse(NCCL_INVALID_USAGE, "%s: no symmetric window is registered", what);
    if (fake_work_stream(stream, what) != CU_OK)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: the stream is none, or not one to work on", what);
    if ((*stream)->device != comm->device)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: a stream of device %d, the communicator's is %d", what,
                                (*stream)->device, comm->device);
    return NCCL_OK;
}

static nccl_result good_signal(nccl_comm comm, int peer, int sig, int ctx, const char *what)
{
    if (peer < 0 || peer >= comm->clique->n_ranks)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: peer %d of %d", what, peer, comm->clique->n_ranks);
    if (ctx < 0 || ctx >= comm->n_ctx)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: context %d of %d", what, ctx, comm->n_ctx);
    if (sig < 0 || sig >= comm->n_sig)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: signal %d of %d", what, sig, comm->n_sig);
    return NCCL_OK;
}

static nccl_result good_flags(unsigned flags, const char *what)
{
    return flags ? fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: flags %#x", what, flags) : NCCL_OK;
}

static nccl_result good_put(nccl_comm comm, uintptr_t local, uint64_t count, int datatype, int peer, nccl_window window,
                            uint64_t offset)
{
    nccl_window there;

    if (datatype != NCCL_UINT8) {
        fake_complain("ncclPutSignal: datatype %d is not one that the fake knows", datatype);
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclPutSignal: datatype %d", datatype);
    }
    if (!count) {
        fake_complain("ncclPutSignal: a put of no bytes");
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclPutSignal: no bytes");
    }
    if (!window || window->magic != MAGIC_WINDOW || window->comm != comm || window->gone || !window->symmetric)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclPutSignal: not a symmetric window of the communicator");
    if (!local || !fake_nccl_window_at(comm, local, count))
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclPutSignal: %#lx, %llu bytes are in no symmetric window of the communicator",
                                (unsigned long)local, (unsigned long long)count);
    there = fake_nccl_window_of(comm->clique->ranks[peer], window->index);
    if (!there || offset > there->bytes || count > there->bytes - offset)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclPutSignal: offset %llu, %llu bytes: the window of rank %d has %llu",
                                (unsigned long long)offset, (unsigned long long)count, peer,
                                (unsigned long long)(there ? there->bytes : 0));
    return NCCL_OK;
}

nccl_result fake_nccl_PutSignal(const void *local, size_t count, int datatype, int peer, nccl_window window, size_t offset,
                                int sig, int ctx, unsigned flags, nccl_comm comm, cu_stream stream)
{
    static const char *const what = "ncclPutSignal";
    nccl_result r = fake_nccl_enter(NCCL_FAKE_PutSignal, 0);

    if (r == NCCL_OK)
        r = good_call(comm, &stream, what);
    if (r == NCCL_OK)
        r = good_signal(comm, peer, sig, ctx, what);
    if (r == NCCL_OK)
        r = good_flags(flags, what);
    if (r == NCCL_OK)
        r = good_put(comm, (uintptr_t)local, count, datatype, peer, window, offset);
    return fake_nccl_leave(enqueue(r, (fake_transfer){.comm = comm, .stream = stream, .peer = peer, .sig = sig, .ctx = ctx,
                                                      .src = (uintptr_t)local, .window = r == NCCL_OK ? window->index : 0,
                                                      .offset = offset, .bytes = count}));
}

nccl_result fake_nccl_Signal(int peer, int sig, int ctx, unsigned flags, nccl_comm comm, cu_stream stream)
{
    static const char *const what = "ncclSignal";
    nccl_result r = fake_nccl_enter(NCCL_FAKE_Signal, 0);

    if (r == NCCL_OK)
        r = good_call(comm, &stream, what);
    if (r == NCCL_OK)
        r = good_signal(comm, peer, sig, ctx, what);
    if (r == NCCL_OK)
        r = good_flags(flags, what);
    return fake_nccl_leave(enqueue(r, (fake_transfer){.comm = comm, .stream = stream, .peer = peer, .sig = sig, .ctx = ctx}));
}

nccl_result fake_nccl_WaitSignal(int n, nccl_wait_desc *descs, nccl_comm comm, cu_stream stream)
{
    static const char *const what = "ncclWaitSignal";
    nccl_result r = fake_nccl_enter(NCCL_FAKE_WaitSignal, 0);
    fake_transfer t = {.comm = comm, .stream = stream, .waits = true, .n_awaited = n};

    if (r == NCCL_OK)
        r = good_call(comm, &t.stream, what);
    if (r == NCCL_OK && (n <= 0 || !descs))
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: %d descriptors", what, n);
    if (r == NCCL_OK)
        t.awaited = calloc((size_t)n, sizeof *t.awaited);
    for (int i = 0; i < n && r == NCCL_OK; i++) {
        r = good_signal(comm, descs[i].peer, descs[i].sig, descs[i].ctx, what);
        if (r == NCCL_OK && descs[i].op_count <= 0)
            r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: opCnt %d", what, descs[i].op_count);
        t.awaited[i] = (struct fake_awaited){descs[i].peer, descs[i].sig, descs[i].ctx, (uint64_t)descs[i].op_count};
    }
    return fake_nccl_leave(enqueue(r, t));
}
