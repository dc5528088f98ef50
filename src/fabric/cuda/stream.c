/* stream.c - what is enqueued on a stream, and what is put off until more is known. */
#include "fabric/cuda/cuda.h"
#include "fabric/cuda/kernels/kernels.h"

enum {
    COPY_CTAS = 16,  /* they move 32 MiB within a GPU in 52 us; with 4 it takes 182 */
    PEER_CTAS = 32,  /* 4 MiB to a peer 2 us sooner than with 16 */
    POSTS = 32       /* words posted in one go */
};
_Static_assert(POSTS <= (int)KERNEL_MAX_POSTS && POSTS <= (int)CUDA_STAGED, "posts of one go");

/* ---- going on ----------------------------------------------------------------------------------- */

int cuda_enter(fab_queue *q)
{
    cuda_device *d = q->device;
    int before = atomic_exchange(&d->current, 1), status = TIDE_OK;

    if (atomic_load(&d->peers.failed)) /* after that exchange: the watch looks the other way round */
        status = fab_peers_failure(&d->peers, NULL);
    else if (!before)
        status = cuda_push(d);
    if (status != TIDE_OK && !before)
        atomic_store(&d->current, 0);
    return status;
}

static bool put_off(const cuda_stream *s)
{
    return s->reduce || s->copy;
}

/* The op that is put off; posts may be NULL. *posted: whether they go with it. */
static int launch(fab_queue *q, cuda_stream *s, const launch_posts *posts, bool *posted)
{
    const cuda_device *d = q->device;
    const fab_reduce *reduce = s->reduce;
    const fab_copy *copy = s->copy;
    const fab_call *call = s->put_off_call;

    s->reduce = NULL;
    s->copy = NULL;
    if (copy)
        return cuda_launch_copy(d->kernels, s->handle, copy, call->args, d->same_gpu[copy->rank],
                                copy->ctas ? copy->ctas : d->same_gpu[copy->rank] ? COPY_CTAS : PEER_CTAS, posts, posted);
    *posted = true;
    return cuda_launch_reduce(d->kernels, s->handle, reduce, call->args, call->accumulate, call->alpha, reduce->ctas, posts);
}

int cuda_flush(fab_queue *q, cuda_stream *s)
{
    const cuda_driver *driver = q->device->driver;
    uint32_t n = s->n_ops;
    bool posted;

    if (put_off(s))
        return launch(q, s, NULL, &posted);
    s->n_ops = 0;
    return n ? cuda_check(driver, driver->StreamBatchMemOp(s->handle, n, s->ops, 0), "cuStreamBatchMemOp") : TIDE_OK;
}

int cuda_flush_all(fab_queue *q)
{
    int status = TIDE_OK;
    for (uint32_t i = 0; i < q->n_streams && status == TIDE_OK; i++)
        status = cuda_flush(q, &q->streams[i]);
    return status;
}

/* A driver whose queue for a stream is full blocks its caller, and with it perhaps the other ranks of this process. So a
 * stream that has much before it is waited for here: two marks, and never more than two rooms under way. */
int cuda_room(fab_queue *q, cuda_stream *s, uint32_t weight)
{
    cuda_device *d = q->device;
    cu_event older;
    cu_result now;
    int64_t ns = 0;
    int status;

    s->since_mark += weight;
    if (s->since_mark < CUDA_ROOM)
        return TIDE_OK;
    s->since_mark = weight;
    status = cuda_flush_all(q); /* what other ranks wait for must not stay here */
    if (status == TIDE_OK)
        status = cuda_check(d->driver, d->driver->EventRecord(s->marks[s->mark], s->handle), "cuEventRecord");
    s->mark ^= 1;
    older = s->marks[s->mark];
    while (status == TIDE_OK && (now = d->driver->EventQuery(older)) != CU_OK) {
        if (now != CU_NOT_READY)
            return cuda_check(d->driver, now, "cuEventQuery");
        fab_peers_adopt(&d->peers);
        if (fab_peers_failed(&d->peers))
            return fab_peers_failure(&d->peers, NULL);
        cuda_nap(&ns);
    }
    return status;
}

/* Room for n stream operations that go out together. */
static int gather(fab_queue *q, cuda_stream *s, uint32_t n)
{
    return put_off(s) || s->n_ops + n > CUDA_OPS ? cuda_flush(q, s) : TIDE_OK;
}

static void put_op(cuda_stream *s, int operation, cu_ptr address, uint64_t value, unsigned flags)
{
    cu_stream_op *op = &s->ops[s->n_ops++];
    memset(op, 0, sizeof *op);
    op->at.operation = operation;
    op->at.address = address;
    op->at.value = value;
    op->at.flags = flags;
}

/* ---- words -------------------------------------------------------------------------------------- */

/* Words of equal value share a staging word. A staging word is written again by its own stream only, behind the copies
 * that read it. */
int cuda_post(fab_queue *q, cuda_stream *s, const cu_ptr *words, const uint64_t *values, uint32_t n)
{
    const cuda_driver *driver = q->device->driver;
    cu_ptr from[POSTS];
    int status = TIDE_OK;

    if (q->device->direct) {
        for (uint32_t i = 0; i < n && status == TIDE_OK; i++) {
            status = gather(q, s, 1);
            if (status == TIDE_OK)
                put_op(s, CU_OP_WRITE_64, words[i], values[i], 0);
        }
        return status;
    }
    for (uint32_t at = 0, count; at < n && status == TIDE_OK; at += count) {
        count = (uint32_t)tide_min_u64(POSTS, n - at);
        status = gather(q, s, count);
        for (uint32_t i = 0; i < count && status == TIDE_OK; i++) {
            if (i > 0 && values[at + i] == values[at + i - 1]) {
                from[i] = from[i - 1];
                continue;
            }
            from[i] = s->staged + s->next_staged * sizeof(uint64_t);
            s->next_staged = (s->next_staged + 1) % CUDA_STAGED;
            put_op(s, CU_OP_WRITE_64, from[i], values[at + i], 0);
        }
        if (status == TIDE_OK)
            status = cuda_flush(q, s);
        for (uint32_t i = 0; i < count && status == TIDE_OK; i++)
            status = cuda_check(driver, driver->MemcpyAsync(words[at + i], from[i], sizeof(uint64_t), s->handle),
                                "cuMemcpyAsync of a counter");
    }
    return status;
}

int cuda_signal(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value)
{
    cuda_device *d = q->device;
    cuda_stream *s = &q->streams[stream];
    cu_ptr words[KERNEL_MAX_POSTS];
    uint64_t values[POSTS];
    uint32_t count = 0;
    bool posted = false;
    int status = cuda_enter(q);

    (void)call;
    if (status == TIDE_OK && put_off(s) && n <= KERNEL_MAX_POSTS) {
        for (uint32_t i = 0; i < n; i++)
            words[i] = cuda_address(posts[i].word);
        status = launch(q, s, &(launch_posts){s->done, words, n, value}, &posted);
        if (posted)
            return status;
    }
    for (uint32_t i = 0; i < n && status == TIDE_OK; i++) {
        if (posts[i].rank == d->face.rank) {
            status = cuda_room(q, s, 1);
            if (status == TIDE_OK)
                status = gather(q, s, 1);
            if (status == TIDE_OK)
                put_op(s, CU_OP_WRITE_64, cuda_address(posts[i].word), value, 0);
            continue;
        }
        words[count] = cuda_address(posts[i].word);
        values[count++] = value;
        if (count == POSTS) {
            status = cuda_room(q, s, POSTS + 1);
            if (status == TIDE_OK)
                status = cuda_post(q, s, words, values, count);
            count = 0;
        }
    }
    if (status == TIDE_OK && count > 0)
        status = cuda_room(q, s, count + 1);
    if (status == TIDE_OK && count > 0)
        status = cuda_post(q, s, words, values, count);
    /* behind work there is time to go out together with the next wait; else others stand and wait for it */
    return status == TIDE_OK && !s->behind_work ? cuda_flush(q, s) : status;
}

/* The crumb says to which wait the stream has come. It is written first, and never taken back: whether that wait is over
 * is looked up when it matters. */
static void announce(fab_queue *q, cuda_stream *s, cuda_target *targets, uint32_t n, const fab_waiting *wait)
{
    cuda_device *d = q->device;
    uint64_t first;

    pthread_mutex_lock(&d->lock);
    first = s->n_targets + 1;
    for (uint32_t i = 0; i < n; i++) {
        targets[i].last = s->n_targets + n - i;
        targets[i].wait = *wait;
        s->targets[++s->n_targets % CUDA_TARGETS] = targets[i];
    }
    pthread_mutex_unlock(&d->lock);
    put_op(s, CU_OP_WRITE_64, s->crumb_device, first, 0);
}

int cuda_await(fab_queue *q, cuda_stream *s, cuda_target *targets, uint32_t n, const fab_waiting *wait)
{
    int status = cuda_room(q, s, n + 1);

    if (status == TIDE_OK)
        status = gather(q, s, n + 1);
    if (status != TIDE_OK)
        return status;
    announce(q, s, targets, n, wait);
    for (uint32_t i = 0; i < n; i++)
        put_op(s, CU_OP_WAIT_64, targets[i].word, targets[i].value, CU_WAIT_GEQ);
    s->behind_work = 0;
    return TIDE_OK;
}

/* The library may hold its caller up until the network has moved on, and with it perhaps other ranks: nothing that they
 * wait for may stay here. */
int cuda_hand_over(fab_queue *q, cuda_stream *s, cuda_target *targets, uint32_t n, uint32_t operations,
                   const fab_waiting *wait)
{
    enum { COMMANDS = 3 }; /* of the driver's for an operation: bytes, a staged counter, its copy */
    uint64_t weight = n + 2 + (uint64_t)COMMANDS * operations;
    int status = cuda_room(q, s, (uint32_t)tide_min_u64(weight, CUDA_ROOM));

    if (status == TIDE_OK)
        status = gather(q, s, 1);
    if (status != TIDE_OK)
        return status;
    announce(q, s, targets, n, wait);
    s->handed_over = 1;
    if (!atomic_exchange(&q->device->handed_over, 1))
        cuda_gpu_unsettle(q->device->gpu, 1);
    return cuda_flush_all(q);
}

/* No word tells that this is over, so the crumb is taken back. */
int cuda_take_back(fab_queue *q, cuda_stream *s)
{
    int status = gather(q, s, 1);

    if (status == TIDE_OK)
        put_op(s, CU_OP_WRITE_64, s->crumb_device, 0, 0);
    s->behind_work = 1;
    return status;
}

int cuda_wait(fab_queue *q, uint32_t stream, fab_call *call, const fab_post *posts, uint32_t n, uint64_t value,
              int check, const fab_where *where)
{
    fab_waiting wait = {call->number, q->now, where};
    cuda_target targets[CUDA_AWAIT];
    int status = cuda_enter(q);

    (void)check; /* the control pages have been compared */
    for (uint32_t at = 0, count; at < n && status == TIDE_OK; at += count) {
        count = (uint32_t)tide_min_u64(CUDA_AWAIT, n - at);
        for (uint32_t i = 0; i < count; i++)
            targets[i] = (cuda_target){
                .word = cuda_address(posts[at + i].word), .value = value, .rank = posts[at + i].rank};
        status = cuda_await(q, &q->streams[stream], targets, count, &wait);
    }
    return status;
}

/* ---- bytes -------------------------------------------------------------------------------------- */

/* At most. Rows to a multicast address are a command each, where the driver has no batches. */
static uint32_t commands_of(const fab_copy *copy)
{
    uint64_t n = copy->n_runs;
    for (uint32_t i = 0; i < copy->n_runs && copy->multicast; i++)
        n += copy->runs[i].rows;
    return (uint32_t)tide_min_u64(n, CUDA_ROOM);
}

int cuda_copy(fab_queue *q, uint32_t stream, fab_call *call, const fab_copy *copy)
{
    cuda_stream *s = &q->streams[stream];
    int status = cuda_enter(q);

    if (status == TIDE_OK)
        status = cuda_room(q, s, commands_of(copy));
    if (status == TIDE_OK)
        status = cuda_flush(q, s);
    if (status != TIDE_OK)
        return status;
    s->copy = copy;
    s->put_off_call = call;
    s->behind_work = 1;
    return TIDE_OK;
}

int cuda_reduce(fab_queue *q, uint32_t stream, fab_call *call, const fab_reduce *reduce)
{
    cuda_stream *s = &q->streams[stream];
    int status = cuda_enter(q);

    if (status == TIDE_OK)
        status = cuda_room(q, s, 1);
    if (status == TIDE_OK)
        status = cuda_flush(q, s);
    if (status != TIDE_OK)
        return status;
    s->reduce = reduce;
    s->put_off_call = call;
    s->behind_work = 1;
    return TIDE_OK;
}

/* ---- events ------------------------------------------------------------------------------------- */

static int ready_for_event(fab_queue *q, cuda_stream *s)
{
    int status = cuda_enter(q);
    if (status == TIDE_OK)
        status = cuda_room(q, s, 1);
    return status == TIDE_OK ? cuda_flush(q, s) : status;
}

static int record_tally(fab_queue *q, cuda_stream *s, fab_event *e)
{
    int status = cuda_enter(q);
    if (status == TIDE_OK)
        status = cuda_room(q, s, 1);
    if (status == TIDE_OK)
        status = gather(q, s, 1);
    if (status == TIDE_OK)
        put_op(s, CU_OP_WRITE_64, e->tally->word, ++e->tally->count, 0);
    return status;
}

int cuda_record(fab_queue *q, uint32_t stream, fab_event *e)
{
    const cuda_driver *driver = q->device->driver;
    cuda_stream *s = &q->streams[stream];
    int status;

    e->tallied_by = e->tally && s->handed_over ? s : NULL;
    if (e->tallied_by)
        return record_tally(q, s, e);
    status = ready_for_event(q, s);
    return status == TIDE_OK ? cuda_check(driver, driver->EventRecord(e->handle, s->handle), "cuEventRecord") : status;
}

static int join_tally(fab_queue *q, cuda_stream *s, const fab_event *e)
{
    const fab_waiting wait = {0, q->now, NULL};
    cuda_target target = {.word = e->tally->word, .value = e->tally->count, .rank = q->device->face.rank};
    int status = cuda_enter(q);

    return status == TIDE_OK && e->tallied_by != s ? cuda_await(q, s, &target, 1, &wait) : status;
}

int cuda_join(fab_queue *q, uint32_t stream, fab_event *e)
{
    const cuda_driver *driver = q->device->driver;
    cuda_stream *s = &q->streams[stream];
    int status;

    if (e->tallied_by)
        return join_tally(q, s, e);
    status = ready_for_event(q, s);
    return status == TIDE_OK ? cuda_check(driver, driver->StreamWaitEvent(s->handle, e->handle, 0), "cuStreamWaitEvent")
                             : status;
}
