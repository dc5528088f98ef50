/*
 * fake_run.c - the fake driver's scheduler: a thread that takes one step of one queue's head at a time.
 *
 * Its choices come from the seed: which queue, how many pieces of a copy; in some worlds a few queues are favoured until
 * the favour moves on, or one is run as long as it can, or callers go before it whenever they want something, so that
 * the device lags behind the host.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/base.h"
#include "fake_internal.h"

void fake_wake(void)
{
    pthread_cond_broadcast(&fake.work);
    pthread_cond_broadcast(&fake.moved);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static bool satisfied(const cu_stream_op *o)
{
    uint64_t at = o->at.operation == CU_OP_WAIT_64 ? __atomic_load_n((uint64_t *)(uintptr_t)o->at.address, __ATOMIC_ACQUIRE)
                                                   : __atomic_load_n((uint32_t *)(uintptr_t)o->at.address, __ATOMIC_ACQUIRE);
    bool wide = o->at.operation == CU_OP_WAIT_64;
    uint64_t value = wide ? o->at.value : (uint32_t)o->at.value;
    switch (o->at.flags & 3) {
    case CU_WAIT_GEQ: /* cyclic */
        return wide ? (int64_t)(at - value) >= 0 : (int32_t)((uint32_t)at - (uint32_t)value) >= 0;
    case CU_WAIT_EQ:
        return at == value;
    case 2:
        return (at & value) != 0;
    default:
        return (wide ? ~(at | value) : (uint64_t)(uint32_t)~(at | value)) != 0;
    }
}

/* The memory of queued work may have been freed; that has been complained of. */
static bool there(const fake_op *op, const cu_stream_op *o)
{
    return fake_find(o->at.address, 4, op->stream->device) != NULL;
}

bool fake_op_blocked(const fake_op *op)
{
    if (op->stream->stalled)
        return true;
    if (op->kind == OP_JOIN)
        return !op->record->done;
    if (op->kind == OP_MEMORY) {
        const cu_stream_op *o = &op->memory[op->done];
        if (o->at.operation == CU_OP_WAIT_64 || o->at.operation == CU_OP_WAIT_32)
            return there(op, o) && !satisfied(o);
    }
    return op->kind == OP_FOREIGN && op->foreign->blocked(op->item);
}

static void copy_row(uintptr_t dst, uintptr_t src, uint64_t bytes, int fill)
{
    if (!src)
        memset((void *)dst, fill, bytes);
    else if (bytes == 8 && dst % 8 == 0 && src % 8 == 0) /* a word that somebody may be looking at */
        __atomic_store_n((uint64_t *)dst, __atomic_load_n((uint64_t *)src, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
    else
        memmove((void *)dst, (void *)src, bytes);
}

static void run_piece(const fake_op *op, const fake_piece *p)
{
    uintptr_t memories[FAKE_MAX_DEVICES];
    int n = fake_multicast_memories(p->dst, p->width, op->stream->device, memories);

    for (int i = 0; i < n - fake.options.multicast_deaf; i++)
        copy_row(memories[i], p->src, p->width, 0);
    if (n)
        return;
    if (p->width == 0 || p->rows == 0 || !fake_find(p->dst, 1, op->stream->device) ||
        (p->src && !fake_find(p->src, 1, op->stream->device)))
        return;
    for (uint64_t row = 0; row < p->rows; row++)
        copy_row(p->dst + row * p->dst_pitch, p->src ? p->src + row * p->src_pitch : 0, p->width, p->fill);
}

static void run_word(const fake_op *op, const cu_stream_op *o)
{
    if (o->at.operation == CU_OP_FLUSH || !there(op, o))
        return;
    if (o->at.operation == CU_OP_WRITE_64)
        __atomic_store_n((uint64_t *)(uintptr_t)o->at.address, o->at.value, __ATOMIC_RELEASE);
    else if (o->at.operation == CU_OP_WRITE_32)
        __atomic_store_n((uint32_t *)(uintptr_t)o->at.address, (uint32_t)o->at.value, __ATOMIC_RELEASE);
}

static int running_on;
int fake_kernel_device(void) { return running_on; }

/* One step; true when the operation has ended. */
static bool step(fake_op *op)
{
    uint64_t pieces;
    switch (op->kind) {
    case OP_COPY:
        for (pieces = 1 + fake_random(op->n - op->done); pieces; pieces--)
            run_piece(op, &op->pieces[op->done++]);
        return op->done == op->n;
    case OP_MEMORY:
        run_word(op, &op->memory[op->done++]);
        return op->done == op->n;
    case OP_KERNEL:
        for (uint32_t i = 0; i < op->n_ranges; i++)
            if (!fake_find(op->ranges[i].base, op->ranges[i].bytes, op->stream->device) &&
                !fake_find_multicast(op->ranges[i].base, op->ranges[i].bytes, op->stream->device))
                return true; /* freed under it: complained of */
        running_on = op->stream->device;
        op->kernel->run(op->args);
        return true;
    case OP_RECORD:
        op->record->done = true;
        op->record->when = tide_now_ns();
        return true;
    case OP_FOREIGN:
        return op->foreign->step(op->item);
    default:
        return true;
    }
}

/* ---- choice ---------------------------------------------------------------------------------- */

static fake_queue *queue_at(uint32_t i)
{
    return &fake.contexts[i / FAKE_MAX_CONNECTIONS].queues[i % FAKE_MAX_CONNECTIONS];
}

/* Number of a queue whose head can run; UINT32_MAX: none can. *poll: a word may change without our knowledge. */
static uint32_t choose(bool *poll)
{
    uint32_t able[FAKE_MAX_DEVICES * FAKE_MAX_CONNECTIONS], n = 0, favoured = 0;

    *poll = false;
    for (uint32_t i = 0; i < (uint32_t)fake.options.devices * FAKE_MAX_CONNECTIONS; i++) {
        const fake_op *op = queue_at(i)->head;
        if (!op)
            continue;
        if (!fake_op_blocked(op)) {
            able[n++] = i;
        } else if (op->kind == OP_MEMORY) {
            fake_span *s = fake_find(op->memory[op->done].at.address, 4, op->stream->device);
            *poll |= fake.foreign || (s && s->kind == SPAN_HOST);
        }
    }
    if (n == 0)
        return UINT32_MAX;
    switch (fake.options.seed % 4) {
    case 1: /* some queues are favoured, for a while */
        if (fake.bursts-- == 0) {
            fake.favour = (uint32_t)fake_random(UINT32_MAX);
            fake.bursts = 1 + (uint32_t)fake_random(64);
        }
        for (uint32_t i = 0; i < n; i++) {
            if (fake.favour >> able[i] % 32 & 1) {
                uint32_t t = able[favoured];
                able[favoured++] = able[i];
                able[i] = t;
            }
        }
        n = favoured ? favoured : n;
        break;
    case 2: /* one queue as long as it can */
        for (uint32_t i = 0; i < n; i++)
            if (able[i] == fake.last && fake_random(16))
                return fake.last;
        break;
    default:
        break;
    }
    return fake.last = able[fake_random(n)];
}

static void *work(void *none)
{
    pthread_mutex_lock(&fake.lock);
    while (!fake.stop) {
        bool poll;
        uint32_t i = choose(&poll);
        if (i == UINT32_MAX) {
            pthread_cond_broadcast(&fake.moved); /* who waits for what is blocked may want to know */
            if (poll) {
                struct timespec until;
                clock_gettime(CLOCK_REALTIME, &until);
                until.tv_nsec += 1000000;
                until.tv_sec += until.tv_nsec / 1000000000;
                until.tv_nsec %= 1000000000;
                pthread_cond_timedwait(&fake.work, &fake.lock, &until);
            } else {
                pthread_cond_wait(&fake.work, &fake.lock);
            }
            continue;
        }
        fake_queue *q = queue_at(i);
        fake_op *op = q->head;
        if (step(op)) {
            cu_stream s = op->stream;
            q->head = op->next;
            fake_op_free(op);
            s->finished++;
            fake_stream_drained(s);
            pthread_cond_broadcast(&fake.moved);
        }
        if (fake.options.seed & 4 && atomic_load(&fake.callers) && !fake.stop) { /* a caller goes first: leave signals */
            pthread_cond_wait(&fake.work, &fake.lock);
        } else if (atomic_load(&fake.callers)) {
            pthread_mutex_unlock(&fake.lock);
            pthread_mutex_lock(&fake.lock);
        }
    }
    pthread_mutex_unlock(&fake.lock);
    return none;
}

/* A process that was forked has no worker until it starts the driver itself. */
static void before_fork(void) { pthread_mutex_lock(&fake.lock); }
static void after_fork(void) { pthread_mutex_unlock(&fake.lock); }
static void in_child(void)
{
    fake.working = false;
    atomic_store(&fake.callers, 0);
    pthread_cond_init(&fake.work, NULL);
    pthread_cond_init(&fake.moved, NULL);
    pthread_mutex_unlock(&fake.lock);
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

bool fake_worker_start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (!fake.working)
        fake.working = pthread_create(&fake.worker, NULL, work, NULL) == 0;
    return fake.working;
}

int fake_cuda_blocked(char *text, size_t bytes)
{
    int n = 0;
    size_t at = 0;
    pthread_mutex_lock(&fake.lock);
    if (text && bytes)
        text[0] = '\0';
    for (uint32_t i = 0; i < (uint32_t)fake.options.devices * FAKE_MAX_CONNECTIONS; i++) {
        const fake_op *op = queue_at(i)->head;
        if (!op || !fake_op_blocked(op))
            continue;
        n++;
        if (text && at < bytes)
            at += (size_t)snprintf(text + at, bytes - at, "%sdevice %d stream %llu: %s", at ? "; " : "",
                                   op->stream->device, (unsigned long long)op->stream->number,
                                   op->stream->stalled      ? "stands still"
                                   : op->kind == OP_JOIN    ? "an event"
                                   : op->kind == OP_FOREIGN ? op->foreign->name
                                                            : "a word");
    }
    pthread_mutex_unlock(&fake.lock);
    return n;
}
