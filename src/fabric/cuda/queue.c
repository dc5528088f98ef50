/* queue.c - streams, events and calls as they are set up; the caller's stream. */
#include <stdio.h>
#include <time.h>

#include "fabric/cuda/cuda.h"

enum { STREAM_BYTES = 1024, STAGED_AT = 256, CRUMB_LINE = 64 };
_Static_assert(STAGED_AT + CUDA_STAGED * 8 <= STREAM_BYTES, "a stream's words");

void cuda_nap(int64_t *ns)
{
    enum { SHORTEST = 20000, LONGEST = 1000000 };
    struct timespec t = {0, 0};
    *ns = *ns < SHORTEST ? SHORTEST : *ns * 2 < LONGEST ? *ns * 2 : LONGEST;
    t.tv_nsec = (long)*ns;
    nanosleep(&t, NULL);
}

/* ---- streams ------------------------------------------------------------------------------------ */

static int event_new(cuda_device *d, cu_event *out)
{
    return cuda_check(d->driver, d->driver->EventCreate(out, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

static int queue_init(fab_queue *q)
{
    cuda_device *d = q->device;
    uint64_t bytes = (uint64_t)q->n_streams * STREAM_BYTES;
    cu_ptr crumbs = 0;
    int status = cuda_check(d->driver, d->driver->MemAlloc(&q->words, bytes), "cuMemAlloc");

    if (status == TIDE_OK)
        status = cuda_zero(d, q->words, bytes);
    if (status == TIDE_OK)
        status = cuda_check(d->driver,
                            d->driver->MemHostAlloc(&q->crumbs, (size_t)q->n_streams * CRUMB_LINE,
                                                    CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED),
                            "cuMemHostAlloc");
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->MemHostGetDevicePointer(&crumbs, q->crumbs, 0),
                            "cuMemHostGetDevicePointer");
    for (int i = 0; i < 2 && status == TIDE_OK; i++)
        status = event_new(d, &q->bridge[i]);
    if (status != TIDE_OK)
        return status;
    memset(q->crumbs, 0, (size_t)q->n_streams * CRUMB_LINE);
    for (uint32_t i = 0; i < q->n_streams; i++) {
        cuda_stream *s = &q->streams[i];
        s->done = q->words + (cu_ptr)i * STREAM_BYTES;
        s->staged = s->done + STAGED_AT;
        s->crumb = (_Atomic uint64_t *)(void *)((char *)q->crumbs + (size_t)i * CRUMB_LINE);
        s->crumb_device = crumbs + (cu_ptr)i * CRUMB_LINE;
    }
    return TIDE_OK;
}

int cuda_queue_create(fab_device *face, uint32_t n_streams, fab_queue **out)
{
    cuda_device *d = (cuda_device *)face;
    fab_queue *q = tide_calloc(1, sizeof *q);
    int status;

    *out = NULL;
    if (!q || !(q->streams = tide_calloc(n_streams, sizeof *q->streams))) {
        tide_free(q);
        return TIDE_ERR_MEMORY;
    }
    q->device = d;
    q->n_streams = n_streams;
    pthread_mutex_lock(&d->lock);
    q->next = d->queues;
    d->queues = q;
    pthread_mutex_unlock(&d->lock);
    status = cuda_push(d);
    if (status == TIDE_OK) {
        status = queue_init(q);
        cuda_pop(d);
    }
    if (status != TIDE_OK) {
        cuda_queue_destroy(q);
        return status;
    }
    *out = q;
    return TIDE_OK;
}

static int stream_open(cuda_device *d, cuda_stream *s)
{
    int least = 0, greatest = 0, status;
    cuda_target *targets = tide_calloc(CUDA_TARGETS, sizeof *targets);
    cu_stream handle = NULL;

    if (!targets)
        return TIDE_ERR_MEMORY;
    status = cuda_check(d->driver, d->driver->CtxGetStreamPriorityRange(&least, &greatest),
                        "cuCtxGetStreamPriorityRange");
    for (int i = 0; i < 2 && status == TIDE_OK; i++)
        if (!s->marks[i])
            status = event_new(d, &s->marks[i]);
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->StreamCreate(&handle, CU_STREAM_NON_BLOCKING, greatest),
                            "cuStreamCreateWithPriority");
    if (status != TIDE_OK) {
        tide_free(targets);
        return status;
    }
    pthread_mutex_lock(&d->lock); /* the watch goes by the handle */
    s->targets = targets;
    s->handle = handle;
    pthread_mutex_unlock(&d->lock);
    return TIDE_OK;
}

/* Streams come with the first program that has ops on them: a plan of one node has none for a rail. */
static int open_streams(fab_queue *q, const uint32_t *ops)
{
    cuda_device *d = q->device;
    uint32_t wanted = 0, opened = 0;
    int status;

    for (uint32_t i = 0; i < q->n_streams; i++)
        wanted += ops[i] > 0 && !q->streams[i].handle;
    if (wanted == 0)
        return TIDE_OK;
    status = cuda_queues_take(d, wanted);
    if (status != TIDE_OK)
        return status;
    status = cuda_push(d);
    if (status == TIDE_OK) {
        for (uint32_t i = 0; i < q->n_streams && status == TIDE_OK; i++) {
            if (ops[i] > 0 && !q->streams[i].handle) {
                status = stream_open(d, &q->streams[i]);
                opened += status == TIDE_OK;
            }
        }
        cuda_pop(d);
    }
    cuda_queues_give(d, wanted - opened);
    return status;
}

int cuda_queue_idle(fab_queue *q)
{
    const cuda_driver *driver = q->device->driver;
    int idle = TIDE_OK;

    for (uint32_t i = 0; i < q->n_streams; i++) {
        cu_result now = q->streams[i].handle ? cuda_query(q->device, q->streams[i].handle) : CU_OK;
        if (now == CU_NOT_READY)
            idle = 1;
        else if (now != CU_OK)
            return cuda_check(driver, now, "a stream's work");
    }
    return idle;
}

void cuda_queue_stop(fab_queue *q)
{
    cuda_bring_to_rest(q->device, q);
    if (fab_peers_failed(&q->device->peers))
        cuda_settle(q->device);
}

void cuda_queue_destroy(fab_queue *q)
{
    cuda_device *d;
    int pushed;

    if (!q)
        return;
    d = q->device;
    pthread_mutex_lock(&d->lock);
    for (fab_queue **link = &d->queues; *link; link = &(*link)->next) {
        if (*link == q) {
            *link = q->next;
            break;
        }
    }
    pthread_mutex_unlock(&d->lock);
    pushed = cuda_push_to_free(d);
    for (uint32_t i = 0; i < q->n_streams; i++) {
        cuda_stream *s = &q->streams[i];
        if (s->handle) {
            d->driver->StreamDestroy(s->handle);
            cuda_queues_give(d, 1);
        }
        for (int k = 0; k < 2; k++)
            if (s->marks[k])
                d->driver->EventDestroy(s->marks[k]);
        tide_free(s->targets);
    }
    for (int i = 0; i < 2; i++)
        if (q->bridge[i])
            d->driver->EventDestroy(q->bridge[i]);
    cuda_free_host(d, q->crumbs);
    cuda_free(d, q->words);
    while (q->tallies) {
        cuda_tallies *chunk = q->tallies;
        q->tallies = chunk->next;
        cuda_free(d, chunk->words);
        tide_free(chunk);
    }
    if (pushed)
        cuda_pop(d);
    tide_free(q->streams);
    tide_free(q);
}

/* ---- events ------------------------------------------------------------------------------------- */

/* A word that comes back keeps its count. Context current. */
static int take_tally(fab_queue *q, cuda_tally **out)
{
    const cuda_device *d = q->device;

    if (!q->spare) {
        cuda_tallies *chunk = tide_calloc(1, sizeof *chunk);
        int status = chunk ? cuda_check(d->driver, d->driver->MemAlloc(&chunk->words, CUDA_TALLIES * sizeof(uint64_t)),
                                        "cuMemAlloc")
                           : TIDE_ERR_MEMORY;
        if (status != TIDE_OK) {
            tide_free(chunk);
            return status;
        }
        chunk->next = q->tallies;
        q->tallies = chunk;
        status = cuda_zero(d, chunk->words, CUDA_TALLIES * sizeof(uint64_t));
        if (status != TIDE_OK)
            return status;
        for (uint32_t i = CUDA_TALLIES; i-- > 0;) {
            chunk->each[i].word = chunk->words + i * sizeof(uint64_t);
            chunk->each[i].next = q->spare;
            q->spare = &chunk->each[i];
        }
    }
    *out = q->spare;
    q->spare = (*out)->next;
    return TIDE_OK;
}

int cuda_event_create(fab_queue *q, fab_event **out)
{
    fab_event *e = tide_calloc(1, sizeof *e);
    int status;

    *out = NULL;
    if (!e)
        return TIDE_ERR_MEMORY;
    e->queue = q;
    status = cuda_push(q->device);
    if (status == TIDE_OK) {
        status = event_new(q->device, &e->handle);
        if (status == TIDE_OK && !q->device->face.rail_mapped)
            status = take_tally(q, &e->tally);
        cuda_pop(q->device);
    }
    if (status != TIDE_OK) {
        cuda_event_destroy(e);
        return status;
    }
    *out = e;
    return TIDE_OK;
}

void cuda_event_destroy(fab_event *e)
{
    int pushed;
    if (!e)
        return;
    pushed = cuda_push_to_free(e->queue->device);
    if (e->handle)
        e->queue->device->driver->EventDestroy(e->handle);
    if (pushed)
        cuda_pop(e->queue->device);
    if (e->tally) {
        e->tally->next = e->queue->spare;
        e->queue->spare = e->tally;
    }
    tide_free(e);
}

/* ---- calls -------------------------------------------------------------------------------------- */

int cuda_calls_create(fab_queue *q, uint32_t n_args, const uint32_t *ops, fab_calls **out)
{
    fab_calls *c = tide_calloc(1, sizeof *c);
    int status = TIDE_ERR_MEMORY;

    *out = NULL;
    if (!c || !(c->args = tide_calloc((size_t)CUDA_CALLS * n_args, sizeof *c->args)))
        goto fail;
    c->queue = q;
    c->n_args = n_args;
    for (uint32_t i = 0; i < CUDA_CALLS; i++) {
        c->ring[i].calls = c;
        c->ring[i].args = c->args + (size_t)i * n_args;
    }
    status = open_streams(q, ops);
    if (status == TIDE_OK) {
        *out = c;
        return TIDE_OK;
    }
fail:
    cuda_calls_destroy(c);
    return status;
}

void cuda_calls_destroy(fab_calls *c)
{
    if (!c)
        return;
    tide_free(c->args);
    tide_free(c);
}

/* Every rank writes down what it calls and then looks at what the others of this machine have written: of two that differ,
 * the later one sees it. */
static int compare_calls(cuda_device *d, const fab_call_desc *desc)
{
    static const fab_where where = {"begin", 0};
    fab_waiting wait = {desc->number, 0, &where};
    uint64_t sequence = ++d->sequence, at = sequence % CUDA_TAGS;
    cuda_tag *own = &cuda_rank_page(d, d->face.rank)->tags[at];

    atomic_store(&own->sequence, 0);
    atomic_store(&own->tag, desc->tag);
    atomic_store(&own->sequence, sequence);
    fab_peers_called(&d->peers, desc->tag);
    for (uint32_t r = 0; r < d->face.n_ranks; r++) {
        cuda_tag *other = &cuda_rank_page(d, r)->tags[at];
        uint64_t tag;
        if (!fab_same_machine(&d->open, r) || atomic_load(&other->sequence) != sequence)
            continue;
        tag = atomic_load(&other->tag);
        if (tag == desc->tag || atomic_load(&other->sequence) != sequence)
            continue;
        fab_peers_fail_wait(&d->peers, TIDE_ERR_MISMATCH, &wait, r);
        return cuda_failure(&d->face, NULL);
    }
    return TIDE_OK;
}

int cuda_call_begin(fab_calls *c, const fab_call_desc *desc, fab_call **out)
{
    cuda_device *d = c->queue->device;
    fab_call *call = &c->ring[c->next];
    int status;

    *out = NULL;
    status = cuda_failure(&d->face, NULL);
    if (status != TIDE_OK)
        return status;
    if (call->held)
        return tide_fail(TIDE_ERR_STATE,
                         "call: %d calls of this kind are begun and not finished, expected their network phases first",
                         CUDA_CALLS);
    status = desc->tag ? compare_calls(d, desc) : TIDE_OK;
    if (status != TIDE_OK)
        return status;
    c->next = (c->next + 1) % CUDA_CALLS;
    call->held = 1;
    call->accumulate = desc->accumulate;
    call->alpha = desc->alpha;
    call->number = desc->number;
    if (desc->n_args)
        memcpy(call->args, desc->args, desc->n_args * sizeof *call->args);
    *out = call;
    return TIDE_OK;
}

void cuda_call_submit(fab_call *call, int hold)
{
    fab_queue *q = call->calls->queue;
    cuda_device *d = q->device;
    int status = cuda_enter(q);

    if (status == TIDE_OK)
        status = cuda_flush_all(q);
    if (status != TIDE_OK) {
        tide_failure f = TIDE_FAILURE_INIT;
        f.code = status;
        f.rank = d->face.rank;
        f.call = call->number;
        snprintf(f.phase, sizeof f.phase, "submit");
        snprintf(f.text, sizeof f.text, "rank %u could not submit call %llu: %.180s", f.rank,
                 (unsigned long long)call->number, tide_last_error());
        fab_peers_fail(&d->peers, &f, true); /* a failure of before stays */
        for (uint32_t i = 0; i < q->n_streams; i++) {
            q->streams[i].reduce = NULL;
            q->streams[i].copy = NULL;
            q->streams[i].n_ops = 0;
        }
    }
    if (d->current)
        cuda_pop(d);
    d->current = 0;
    call->held = hold != 0;
    if (atomic_exchange(&d->busy, 1) == 0 || status != TIDE_OK)
        fab_peers_wake(&d->peers);
}

/* ---- the caller's stream ------------------------------------------------------------------------ */

static cu_stream caller_stream(void *stream)
{
    return stream; /* a CUstream; 0 is the legacy stream, on which events are recorded and awaited but nothing runs */
}

int cuda_caller_check(fab_device *face, void *stream)
{
    cuda_device *d = (cuda_device *)face;
    int capturing = CU_CAPTURE_NONE, status = cuda_push(d);
    cu_result now;

    if (status != TIDE_OK)
        return status;
    now = d->driver->StreamIsCapturing(caller_stream(stream), &capturing);
    cuda_pop(d);
    if (now == CU_CAPTURE_IMPLICIT || (now == CU_OK && capturing != CU_CAPTURE_NONE))
        return tide_fail(TIDE_ERR_UNSUPPORTED,
                         "stream: %p is being captured into a CUDA graph, expected a stream that runs", stream);
    if (now != CU_OK)
        return tide_fail(TIDE_ERR_ARGUMENT, "stream: %p is not a CUstream of device %d", stream, d->open.device);
    return TIDE_OK;
}

int cuda_caller_record(fab_queue *q, fab_event *e, void *stream)
{
    cuda_device *d = q->device;
    int status = cuda_push(d);

    if (status != TIDE_OK)
        return status;
    status = cuda_check(d->driver, d->driver->EventRecord(e->handle, caller_stream(stream)),
                        "cuEventRecord on the caller's stream");
    cuda_pop(d);
    q->now = tide_now_ns();
    return status;
}

int cuda_caller_wait(fab_queue *q, fab_event *e, void *stream)
{
    cuda_device *d = q->device;
    int status = cuda_failure(&d->face, NULL);

    if (status == TIDE_OK && e->tallied_by) /* a word's wait would have to run on the caller's stream */
        status = tide_fail(TIDE_ERR_INTERNAL, "event: recorded on a stream of the rail, expected one that joins it");
    if (status == TIDE_OK)
        status = cuda_push(d);
    if (status != TIDE_OK)
        return status;
    status = cuda_check(d->driver, d->driver->StreamWaitEvent(caller_stream(stream), e->handle, 0),
                        "cuStreamWaitEvent of the caller's stream");
    cuda_pop(d);
    return status;
}

/* Work for the caller runs on a stream of ours, between two events of the caller's: its own may be the legacy one. */
static int begin_bridge(fab_queue *q, uint32_t through, void *stream)
{
    const cuda_driver *driver = q->device->driver;
    int status;

    if (!q->streams[through].handle)
        return tide_fail(TIDE_ERR_STATE, "stream %u: no program has been bound that uses it", through);
    status = cuda_push(q->device);
    if (status != TIDE_OK)
        return status;
    status = cuda_check(driver, driver->EventRecord(q->bridge[0], caller_stream(stream)),
                        "cuEventRecord on the caller's stream");
    if (status == TIDE_OK)
        status = cuda_check(driver, driver->StreamWaitEvent(q->streams[through].handle, q->bridge[0], 0),
                            "cuStreamWaitEvent");
    if (status != TIDE_OK)
        cuda_pop(q->device);
    return status;
}

static int end_bridge(fab_queue *q, uint32_t through, void *stream, int status)
{
    const cuda_driver *driver = q->device->driver;

    if (status == TIDE_OK)
        status = cuda_check(driver, driver->EventRecord(q->bridge[1], q->streams[through].handle), "cuEventRecord");
    if (status == TIDE_OK)
        status = cuda_check(driver, driver->StreamWaitEvent(caller_stream(stream), q->bridge[1], 0),
                            "cuStreamWaitEvent of the caller's stream");
    cuda_pop(q->device);
    return status;
}

int cuda_caller_fill(fab_queue *q, uint32_t through, void *dst, uint8_t value, uint64_t bytes, void *stream)
{
    const cuda_driver *driver = q->device->driver;
    int status = begin_bridge(q, through, stream);

    if (status != TIDE_OK)
        return status;
    status = cuda_check(driver,
                        driver->MemsetD8Async(cuda_address(dst), value, bytes, q->streams[through].handle),
                        "cuMemsetD8Async");
    return end_bridge(q, through, stream, status);
}

/* Bytes that overlap go through memory of their own, which is freed once they are there. */
static int move_overlapping(fab_queue *q, cuda_stream *s, cu_ptr to, cu_ptr from, uint64_t bytes)
{
    const cuda_driver *driver = q->device->driver;
    cu_ptr between = 0;
    cu_result now = CU_OK;
    int64_t ns = 0;
    int status = cuda_check(driver, driver->MemAlloc(&between, bytes), "cuMemAlloc");

    if (status != TIDE_OK)
        return status;
    status = cuda_check(driver, driver->MemcpyAsync(between, from, bytes, s->handle), "cuMemcpyAsync");
    if (status == TIDE_OK)
        status = cuda_check(driver, driver->MemcpyAsync(to, between, bytes, s->handle), "cuMemcpyAsync");
    while (status == TIDE_OK && (now = driver->StreamQuery(s->handle)) == CU_NOT_READY)
        cuda_nap(&ns);
    if (status == TIDE_OK)
        status = cuda_check(driver, now, "copying a shard");
    cuda_free(q->device, between);
    return status;
}

int cuda_caller_copy(fab_queue *q, uint32_t through, void *dst, const void *src, uint64_t bytes, void *stream)
{
    const cuda_driver *driver = q->device->driver;
    cu_ptr to = cuda_address(dst), from = cuda_address(src);
    int status;

    if (to == from)
        return TIDE_OK;
    status = begin_bridge(q, through, stream);
    if (status != TIDE_OK)
        return status;
    if (to < from + bytes && from < to + bytes)
        status = move_overlapping(q, &q->streams[through], to, from, bytes);
    else
        status = cuda_check(driver, driver->MemcpyAsync(to, from, bytes, q->streams[through].handle), "cuMemcpyAsync");
    return end_bridge(q, through, stream, status);
}

int cuda_sync(fab_queue *q)
{
    cuda_device *d = q->device;
    int64_t ns = 0;
    int status;

    for (;;) {
        status = cuda_failure(&d->face, NULL);
        if (status != TIDE_OK)
            return status;
        if (cuda_push(d) != TIDE_OK) /* the others will wait for this rank where it ends */
            return cuda_fail_device(d);
        status = cuda_queue_idle(q);
        cuda_pop(d);
        if (status < 0)
            return cuda_fail_device(d);
        if (status == TIDE_OK) /* at rest because all is done, or because a failure has ended the waits */
            return cuda_failure(&d->face, NULL);
        cuda_nap(&ns);
    }
}
