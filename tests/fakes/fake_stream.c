/* fake_stream.c - the fake driver's streams and events: what is refused when it is enqueued, and what is kept. */
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "fake_internal.h"

enum { MAX_MEMORY_OPS = 255, WAIT_MODES = 3, FLUSH = 1 << 30, MAX_PITCH = INT32_MAX, MAX_ARGS = 32764 };

/* ---- streams --------------------------------------------------------------------------------- */

static cu_stream new_stream(cu_context c, bool own)
{
    cu_stream s = calloc(1, sizeof *s);
    s->magic = MAGIC_STREAM;
    s->device = c->device;
    s->own = own;
    s->position = c->streams++;
    s->queue = &c->queues[s->position % (uint64_t)fake.options.connections];
    s->next = fake.streams;
    fake.streams = s;
    return s;
}

cu_stream fake_stream_of(cu_stream handle)
{
    uintptr_t number = (uintptr_t)handle;
    cu_context c = fake_current();

    if (number > 2)
        return handle->magic == MAGIC_STREAM && !handle->destroyed ? handle : NULL;
    if (!c)
        return NULL;
    for (cu_stream s = fake.streams; s; s = s->next)
        if (!s->own && s->device == c->device && s->number == (number == 2) &&
            (number != 2 || pthread_equal(s->thread, pthread_self())))
            return s;
    handle = new_stream(c, false);
    handle->number = number == 2;
    handle->thread = pthread_self();
    return handle;
}

cu_result fake_StreamCreate(cu_stream *stream, unsigned flags, int priority)
{
    cu_result r = fake_enter(FAKE_StreamCreate, NEEDS_CONTEXT | ALLOCATES);
    (void)priority; /* the driver clamps it */
    if (r == CU_OK && flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        if (!(flags & CU_STREAM_NON_BLOCKING))
            fake_complain("cuStreamCreate: a stream that synchronizes with the legacy stream");
        fake_stream_of(NULL); /* the legacy stream has the first hardware queue */
        *stream = new_stream(fake_current(), true);
        (*stream)->number = ++fake.n_streams;
        (*stream)->stalled = fake.stalled == fake.n_streams;
    }
    return fake_leave(r);
}

static void unlink_stream(cu_stream s)
{
    cu_stream *at = &fake.streams;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    s->magic = 0;
    free(s);
}

void fake_stream_drained(cu_stream s)
{
    if (s->destroyed && s->finished == s->enqueued)
        unlink_stream(s);
}

cu_result fake_StreamDestroy(cu_stream stream)
{
    cu_result r = fake_enter(FAKE_StreamDestroy, RELEASES);
    if (r == CU_OK && ((uintptr_t)stream <= 2 || !(stream = fake_stream_of(stream))))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK) {
        stream->destroyed = true;
        fake_stream_drained(stream);
    }
    return fake_leave(r);
}

cu_result fake_StreamSynchronize(cu_stream stream)
{
    cu_result r = fake_enter(FAKE_StreamSynchronize, NEEDS_CONTEXT);
    if (r == CU_OK && !(stream = fake_stream_of(stream)))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK) {
        uint64_t want = stream->enqueued;
        atomic_fetch_sub(&fake.callers, 1);
        fake_wake();
        while (fake.running && stream->finished < want)
            pthread_cond_wait(&fake.moved, &fake.lock);
        atomic_fetch_add(&fake.callers, 1);
    }
    return fake_leave(r);
}

void fake_wait_idle(int device, const fake_span *memory, const char *what)
{
    const uintptr_t base = memory ? memory->base : 0;
    const uint64_t bytes = memory ? memory->bytes : 0;

    atomic_fetch_sub(&fake.callers, 1);
    fake_wake();
    for (bool busy = true; busy && fake.running;) {
        busy = false;
        for (cu_stream s = fake.streams; s; s = s->next)
            busy |= s->device == device && s->finished < s->enqueued;
        if (busy && bytes && fake_going_away(base, bytes, what, true))
            break;
        if (busy)
            pthread_cond_wait(&fake.moved, &fake.lock);
    }
    atomic_fetch_add(&fake.callers, 1);
}

cu_result fake_StreamQuery(cu_stream stream)
{
    cu_result r = fake_enter(FAKE_StreamQuery, NEEDS_CONTEXT);
    if (r == CU_OK && !(stream = fake_stream_of(stream)))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK && stream->finished < stream->enqueued)
        r = CU_NOT_READY;
    return fake_leave(r);
}

cu_result fake_StreamIsCapturing(cu_stream stream, int *status)
{
    cu_result r = fake_enter(FAKE_StreamIsCapturing, NEEDS_CONTEXT);
    if (r == CU_OK && !(stream = fake_stream_of(stream)))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK)
        *status = stream->capturing ? 1 : CU_CAPTURE_NONE;
    return fake_leave(r);
}

/* ---- operations ------------------------------------------------------------------------------ */

void fake_record_drop(fake_record *r)
{
    if (r && --r->refs == 0)
        free(r);
}

void fake_op_free(fake_op *op)
{
    fake_record_drop(op->record);
    if (op->kind == OP_FOREIGN)
        op->foreign->drop(op->item);
    free(op->pieces);
    free(op->memory);
    free(op->args);
    free(op->ranges);
    free(op);
}

void fake_streams_clear(void)
{
    for (int d = 0; d < FAKE_MAX_DEVICES; d++) {
        for (int q = 0; q < FAKE_MAX_CONNECTIONS; q++) {
            fake_queue *queue = &fake.contexts[d].queues[q];
            while (queue->head) {
                fake_op *op = queue->head;
                queue->head = op->next;
                fake_op_free(op);
            }
        }
        fake.contexts[d].retained = 0;
    }
    while (fake.streams)
        unlink_stream(fake.streams);
    while (fake.events) {
        cu_event e = fake.events;
        fake.events = e->next;
        fake_record_drop(e->record);
        free(e);
    }
}

static void append(fake_queue *q, fake_op *op)
{
    op->next = NULL;
    if (!q->head)
        q->tail = &q->head;
    *q->tail = op;
    q->tail = &op->next;
}

/* All of a stream's operations are in one queue: their order stays. */
void fake_streams_deal(int connections)
{
    fake.options.connections = connections;
    for (cu_stream s = fake.streams; s; s = s->next)
        s->queue = &fake.contexts[s->device].queues[s->position % (uint64_t)connections];
    for (int d = 0; d < FAKE_MAX_DEVICES; d++) {
        fake_op *heads[FAKE_MAX_CONNECTIONS];
        for (int q = 0; q < FAKE_MAX_CONNECTIONS; q++) {
            heads[q] = fake.contexts[d].queues[q].head;
            fake.contexts[d].queues[q].head = NULL;
        }
        for (int q = 0; q < FAKE_MAX_CONNECTIONS; q++) {
            for (fake_op *op = heads[q], *next; op; op = next) {
                next = op->next;
                append(op->stream->queue, op);
            }
        }
    }
    fake_wake();
}

static bool overlap(uintptr_t a, uint64_t a_bytes, uintptr_t b, uint64_t b_bytes)
{
    return a_bytes && b_bytes && a < b + b_bytes && b < a + a_bytes;
}

static uint64_t extent(uint64_t width, uint64_t rows, uint64_t pitch)
{
    return width && rows ? (rows - 1) * pitch + width : 0;
}

bool fake_op_uses(const fake_op *op, uintptr_t base, uint64_t bytes)
{
    for (uint32_t i = op->kind == OP_COPY ? op->done : op->n; i < op->n; i++) {
        const fake_piece *p = &op->pieces[i];
        if (overlap(p->dst, extent(p->width, p->rows, p->dst_pitch), base, bytes) ||
            (p->src && overlap(p->src, extent(p->width, p->rows, p->src_pitch), base, bytes)))
            return true;
    }
    for (uint32_t i = op->kind == OP_MEMORY ? op->done : op->n; i < op->n; i++)
        if (op->memory[i].at.operation != CU_OP_FLUSH && overlap(op->memory[i].at.address, 8, base, bytes))
            return true;
    for (uint32_t i = 0; i < op->n_ranges; i++)
        if (overlap(op->ranges[i].base, op->ranges[i].bytes, base, bytes))
            return true;
    return op->kind == OP_FOREIGN && op->foreign->uses(op->item, base, bytes);
}

bool fake_going_away(uintptr_t base, uint64_t bytes, const char *what, bool waits)
{
    if (fake.registered && fake.registered(base, bytes)) {
        fake_complain("%s: memory at %#lx is registered with a library", what, (unsigned long)base);
        return true;
    }
    for (int d = 0; d < fake.options.devices; d++) {
        for (int q = 0; q < FAKE_MAX_CONNECTIONS; q++) {
            bool counts = fake.contexts[d].queues[q].head && (!waits || fake_op_blocked(fake.contexts[d].queues[q].head));
            for (fake_op *op = fake.contexts[d].queues[q].head; op && counts; op = op->next) {
                if (fake_op_uses(op, base, bytes)) {
                    fake_complain("%s: memory at %#lx is used by work that is queued on device %d, stream %llu", what,
                                  (unsigned long)base, d, (unsigned long long)op->stream->number);
                    return true;
                }
            }
        }
    }
    return false;
}

void fake_stream_enqueue(cu_stream s, fake_op *op)
{
    op->stream = s;
    append(s->queue, op);
    s->enqueued++;
    fake_wake();
}

static fake_op *new_op(enum fake_op_kind kind, uint32_t n)
{
    fake_op *op = calloc(1, sizeof *op);
    op->kind = kind;
    op->n = n;
    return op;
}

void fake_stream_foreign(cu_stream s, const fake_foreign *foreign, void *item)
{
    fake_op *op = new_op(OP_FOREIGN, 0);
    op->foreign = foreign;
    op->item = item;
    fake_stream_enqueue(s, op);
}

cu_result fake_work_stream(cu_stream *stream, const char *what)
{
    uintptr_t number = (uintptr_t)*stream;
    if (number <= 1) {
        fake_complain("%s: work on the legacy stream", what);
        return CU_INVALID_VALUE;
    }
    *stream = fake_stream_of(*stream);
    if (!*stream)
        return CU_INVALID_HANDLE;
    if ((*stream)->capturing) {
        fake_complain("%s: work on a stream that is being captured", what);
        return CU_NOT_PERMITTED;
    }
    return CU_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Cuts pieces in two at random and shuffles them: the order within an operation is nobody's promise. */
static void stir(fake_op *op)
{
    uint32_t n = op->n;
    fake_piece *p = calloc(2 * (size_t)n + 1, sizeof *p);

    memcpy(p, op->pieces, n * sizeof *p);
    for (uint32_t i = 0; i < op->n; i++) {
        fake_piece *a = &p[i], *b = &p[n];
        uint64_t cut;
        if (a->width * a->rows <= 64 || fake_random(2))
            continue;
        *b = *a;
        if (a->rows > 1) {
            cut = 1 + fake_random(a->rows - 1);
            a->rows = cut;
            b->rows -= cut;
            b->dst += cut * a->dst_pitch;
            b->src += a->src ? cut * a->src_pitch : 0;
        } else {
            cut = (1 + fake_random(a->width / 16 - 1)) * 16;
            a->width = cut;
            b->width -= cut;
            b->dst += cut;
            b->src += a->src ? cut : 0;
        }
        n++;
    }
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = (uint32_t)fake_random(i);
        fake_piece t = p[j];
        p[j] = p[i - 1];
        p[i - 1] = t;
    }
    free(op->pieces);
    op->pieces = p;
    op->n = n;
}

/* What is known to go to a multicast address: plain copies of one row, from memory. */
static bool multicast_good(const fake_piece *p, int device)
{
    fake_span *s = fake_find_multicast(p->dst, p->width, device);
    if (!s)
        return false;
    if (!p->src || p->rows != 1)
        fake_complain("a %s to a multicast address, expected a copy of one row", p->src ? "copy of several rows" : "fill");
    else if (!fake_multicast_bound(s))
        fake_complain("a copy to a multicast address, behind which not all devices have memory");
    return fake_find(p->src, p->width, device) != NULL;
}

static bool piece_good(const fake_piece *p, int device)
{
    uint64_t to = extent(p->width, p->rows, p->dst_pitch), from = extent(p->width, p->rows, p->src_pitch);
    if (to && fake_find_multicast(p->dst, 1, device))
        return multicast_good(p, device);
    return (to == 0 || fake_find(p->dst, to, device)) && (from == 0 || !p->src || fake_find(p->src, from, device));
}

static cu_result one_copy(enum fake_function function, const char *what, cu_stream stream, fake_piece piece)
{
    cu_result r = fake_enter(function, NEEDS_CONTEXT);
    if (r == CU_OK)
        r = fake_work_stream(&stream, what);
    if (r == CU_OK && !piece_good(&piece, stream->device))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        fake_op *op = new_op(OP_COPY, 1);
        op->pieces = malloc(sizeof piece);
        op->pieces[0] = piece;
        stir(op);
        fake_stream_enqueue(stream, op);
    }
    return fake_leave(r);
}

cu_result fake_MemcpyAsync(cu_ptr dst, cu_ptr src, size_t bytes, cu_stream stream)
{
    if (!src && bytes)
        return CU_INVALID_VALUE;
    return one_copy(FAKE_MemcpyAsync, "cuMemcpyAsync", stream, (fake_piece){dst, src, bytes, 1, bytes, bytes, 0});
}

static void pinned(const void *host, size_t bytes, const char *what)
{
    fake_span *s;
    pthread_mutex_lock(&fake.lock);
    s = fake_find((uintptr_t)host, bytes, 0);
    if (bytes && (!s || s->kind != SPAN_HOST))
        fake_complain("%s: pageable memory in an asynchronous copy, which the driver makes a synchronous one", what);
    pthread_mutex_unlock(&fake.lock);
}

cu_result fake_MemcpyDtoHAsync(void *dst, cu_ptr src, size_t bytes, cu_stream stream)
{
    pinned(dst, bytes, "cuMemcpyDtoHAsync");
    return one_copy(FAKE_MemcpyDtoHAsync, "cuMemcpyDtoHAsync", stream,
                    (fake_piece){(uintptr_t)dst, src, bytes, 1, bytes, bytes, 0});
}

cu_result fake_MemcpyHtoDAsync(cu_ptr dst, const void *src, size_t bytes, cu_stream stream)
{
    pinned(src, bytes, "cuMemcpyHtoDAsync");
    return one_copy(FAKE_MemcpyHtoDAsync, "cuMemcpyHtoDAsync", stream,
                    (fake_piece){dst, (uintptr_t)src, bytes, 1, bytes, bytes, 0});
}

cu_result fake_MemsetD8Async(cu_ptr dst, unsigned char value, size_t bytes, cu_stream stream)
{
    return one_copy(FAKE_MemsetD8Async, "cuMemsetD8Async", stream, (fake_piece){dst, 0, bytes, 1, bytes, 0, value});
}

cu_result fake_MemsetD2D8Async(cu_ptr dst, size_t pitch, unsigned char value, size_t width, size_t height,
                               cu_stream stream)
{
    if (height > 1 && (pitch < width || pitch > MAX_PITCH))
        return CU_INVALID_VALUE;
    return one_copy(FAKE_MemsetD2D8Async, "cuMemsetD2D8Async", stream,
                    (fake_piece){dst, 0, width, height, pitch, 0, value});
}

cu_result fake_Memcpy2DAsync(const cu_copy2d *copy, cu_stream stream)
{
    fake_piece piece = {copy->dst_device + copy->dst_y * copy->dst_pitch + copy->dst_x,
                        copy->src_device + copy->src_y * copy->src_pitch + copy->src_x,
                        copy->width, copy->height, copy->dst_pitch, copy->src_pitch, 0};
    if (copy->src_type != CU_MEMORY_DEVICE || copy->dst_type != CU_MEMORY_DEVICE || !piece.src || !piece.dst ||
        copy->src_pitch < copy->width + copy->src_x || copy->dst_pitch < copy->width + copy->dst_x ||
        (copy->height > 1 && (copy->src_pitch > MAX_PITCH || copy->dst_pitch > MAX_PITCH)))
        return CU_INVALID_VALUE;
    return one_copy(FAKE_Memcpy2DAsync, "cuMemcpy2DAsync", stream, piece);
}

static int by_address(const void *a, const void *b)
{
    const fake_range *x = a, *y = b;
    return x->base < y->base ? -1 : x->base > y->base;
}

/* Copies of a batch run in any order: none may write what another one touches. */
static void check_batch(const fake_op *op)
{
    fake_range *to = malloc(op->n * sizeof *to);
    uint32_t n = 0;
    for (uint32_t i = 0; i < op->n; i++)
        if (op->pieces[i].width)
            to[n++] = (fake_range){op->pieces[i].dst, op->pieces[i].width};
    qsort(to, n, sizeof *to, by_address);
    for (uint32_t i = 1; i < n; i++)
        if (overlap(to[i - 1].base, to[i - 1].bytes, to[i].base, to[i].bytes))
            fake_complain("cuMemcpyBatchAsync: two copies of a batch write at %#lx", (unsigned long)to[i].base);
    for (uint32_t i = 0; i < op->n && n; i++) {
        uint32_t lo = 0, hi = n; /* the last destination that begins before the source ends */
        while (lo < hi) {
            uint32_t mid = (lo + hi) / 2;
            if (to[mid].base < op->pieces[i].src + op->pieces[i].width)
                lo = mid + 1;
            else
                hi = mid;
        }
        if (lo && overlap(to[lo - 1].base, to[lo - 1].bytes, op->pieces[i].src, op->pieces[i].width))
            fake_complain("cuMemcpyBatchAsync: a copy of a batch reads at %#lx what another one writes",
                          (unsigned long)op->pieces[i].src);
    }
    free(to);
}

cu_result fake_MemcpyBatchAsync(cu_ptr *dsts, cu_ptr *srcs, size_t *bytes, size_t count, cu_copy_attributes *attributes,
                                size_t *first_of_attribute, size_t n_attributes, cu_stream stream)
{
    cu_result r = fake_enter(FAKE_MemcpyBatchAsync, NEEDS_CONTEXT);
    fake_op *op = NULL;

    if (r == CU_OK && (uintptr_t)stream <= 1)
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        r = fake_work_stream(&stream, "cuMemcpyBatchAsync");
    if (r == CU_OK && (count == 0 || n_attributes == 0 || n_attributes > count || first_of_attribute[0] != 0))
        r = CU_INVALID_VALUE;
    for (size_t i = 0; r == CU_OK && i < n_attributes; i++)
        if (attributes[i].src_access_order < 1 || attributes[i].src_access_order > 3 || first_of_attribute[i] >= count ||
            (i && first_of_attribute[i] <= first_of_attribute[i - 1]))
            r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        op = new_op(OP_COPY, (uint32_t)count);
        op->pieces = calloc(count, sizeof *op->pieces);
    }
    for (size_t i = 0; r == CU_OK && i < count; i++) {
        op->pieces[i] = (fake_piece){dsts[i], srcs[i], bytes[i], 1, bytes[i], bytes[i], 0};
        if (!dsts[i] || !srcs[i] || !piece_good(&op->pieces[i], stream->device))
            r = CU_INVALID_VALUE;
    }
    if (r == CU_OK) {
        check_batch(op);
        stir(op);
        fake_stream_enqueue(stream, op);
    } else if (op) {
        fake_op_free(op);
    }
    return fake_leave(r);
}

/* ---- words ----------------------------------------------------------------------------------- */

cu_result fake_StreamBatchMemOp(cu_stream stream, unsigned count, cu_stream_op *ops, unsigned flags)
{
    cu_result r = fake_enter(FAKE_StreamBatchMemOp, NEEDS_CONTEXT);
    if (r == CU_OK)
        r = fake_work_stream(&stream, "cuStreamBatchMemOp");
    if (r == CU_OK && (flags || count == 0 || count > MAX_MEMORY_OPS))
        r = CU_INVALID_VALUE;
    for (unsigned i = 0; r == CU_OK && i < count; i++) {
        int operation = ops[i].at.operation;
        bool waits = operation == CU_OP_WAIT_32 || operation == CU_OP_WAIT_64;
        uint64_t bytes = operation == CU_OP_WAIT_64 || operation == CU_OP_WRITE_64 ? 8 : 4;
        fake_span *s;
        if (operation == CU_OP_FLUSH)
            continue;
        if ((!waits && operation != CU_OP_WRITE_32 && operation != CU_OP_WRITE_64) || ops[i].at.address % bytes ||
            ops[i].at.flags & ~(unsigned)(waits ? WAIT_MODES | FLUSH : 0)) {
            r = CU_INVALID_VALUE;
            break;
        }
        s = fake_find(ops[i].at.address, bytes, stream->device);
        if (!s)
            r = CU_INVALID_VALUE;
        else if (s->kind != SPAN_HOST && s->device != stream->device && fake.options.no_peer_words)
            r = CU_INVALID_VALUE;
        else if (s->kind != SPAN_HOST && s->device != stream->device && ops[i].at.operation != CU_OP_WRITE_64)
            fake_complain("cuStreamBatchMemOp: a stream of device %d waits for a word of device %d", stream->device,
                          s->device);
    }
    if (r == CU_OK) {
        fake_op *op = new_op(OP_MEMORY, count);
        op->memory = malloc(count * sizeof *ops);
        memcpy(op->memory, ops, count * sizeof *ops);
        fake_stream_enqueue(stream, op);
    }
    return fake_leave(r);
}

/* ---- kernels --------------------------------------------------------------------------------- */

static void note_range(fake_op *op, uint64_t address, uint64_t bytes)
{
    if (op->n_ranges == op->cap_ranges) {
        op->cap_ranges = op->cap_ranges ? 2 * op->cap_ranges : 64;
        op->ranges = realloc(op->ranges, op->cap_ranges * sizeof *op->ranges);
    }
    op->ranges[op->n_ranges++] = (fake_range){address, bytes};
}

void fake_cuda_touch(fake_touch *t, uint64_t address, uint64_t bytes)
{
    fake_op *op = t->op;
    if (bytes == 0)
        return;
    if (!fake_find(address, bytes, t->device)) {
        if (!t->bad)
            fake_complain("cuLaunchKernel: %s would touch %llu bytes at %#llx, where device %d has no such memory",
                          op->kernel->name, (unsigned long long)bytes, (unsigned long long)address, t->device);
        t->bad = true;
        return;
    }
    note_range(op, address, bytes);
}

void fake_touch_multicast(fake_touch *t, uint64_t address, uint64_t bytes)
{
    const fake_span *s = fake_find_multicast(address, bytes, t->device);
    if (bytes == 0)
        return;
    if (!s || !fake_multicast_bound(s)) {
        fake_complain("cuLaunchKernel: %s would add %llu bytes at %#llx, where device %d has no complete multicast mapping",
                      t->op->kernel->name, (unsigned long long)bytes, (unsigned long long)address, t->device);
        t->bad = true;
    } else {
        note_range(t->op, address, bytes);
    }
}

cu_result fake_LaunchKernel(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, cu_stream stream, void **parameters, void **extra)
{
    cu_result r = fake_enter(FAKE_LaunchKernel, NEEDS_CONTEXT);
    if (r == CU_OK)
        r = fake_work_stream(&stream, "cuLaunchKernel");
    if (r == CU_OK && (!function || function->module->device != stream->device ||
                       fake_current()->device != stream->device))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK && (!gx || !gy || !gz || !bx || !by || !bz || bx > 1024 || by > 1024 || bz > 64 ||
                       (uint64_t)bx * by * bz > 1024 || gx > INT32_MAX || gy > 65535 || gz > 65535 ||
                       shared > (unsigned)function->shared || !parameters || extra || function->kernel->bytes > MAX_ARGS))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        fake_op *op = new_op(OP_KERNEL, 0);
        fake_touch t = {op, stream->device, false};
        op->kernel = function->kernel;
        op->args = malloc(op->kernel->bytes);
        memcpy(op->args, parameters[0], op->kernel->bytes);
        if (op->kernel->ranges)
            op->kernel->ranges(op->args, &t);
        if (t.bad) {
            fake_op_free(op);
            r = CU_INVALID_VALUE;
        } else {
            fake_stream_enqueue(stream, op);
        }
    }
    return fake_leave(r);
}

/* ---- events ---------------------------------------------------------------------------------- */

cu_result fake_EventCreate(cu_event *event, unsigned flags)
{
    cu_result r = fake_enter(FAKE_EventCreate, NEEDS_CONTEXT | ALLOCATES);
    if (r == CU_OK && flags & ~(unsigned)(CU_EVENT_DISABLE_TIMING | 1))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        cu_event e = calloc(1, sizeof *e);
        *e = (struct cu_event){MAGIC_EVENT, fake.events, fake_current()->device, !(flags & CU_EVENT_DISABLE_TIMING), NULL};
        fake.events = e;
        *event = e;
    }
    return fake_leave(r);
}

static bool is_event(cu_event e) { return e && e->magic == MAGIC_EVENT; }

cu_result fake_EventDestroy(cu_event event)
{
    cu_result r = fake_enter(FAKE_EventDestroy, RELEASES);
    if (r == CU_OK && !is_event(event))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK) {
        cu_event *at = &fake.events;
        while (*at != event)
            at = &(*at)->next;
        *at = event->next;
        fake_record_drop(event->record);
        event->magic = 0;
        free(event);
    }
    return fake_leave(r);
}

/* Events may be recorded and awaited on the legacy stream: nothing of this project's runs there, but the caller's does. */
static cu_result event_stream(cu_stream *stream, cu_event event)
{
    *stream = fake_stream_of(*stream);
    if (!*stream || !is_event(event))
        return CU_INVALID_HANDLE;
    if ((*stream)->capturing) {
        fake_complain("an event operation on a stream that is being captured");
        return CU_NOT_PERMITTED;
    }
    return CU_OK;
}

cu_result fake_EventRecord(cu_event event, cu_stream stream)
{
    cu_result r = fake_enter(FAKE_EventRecord, NEEDS_CONTEXT);
    if (r == CU_OK)
        r = event_stream(&stream, event);
    if (r == CU_OK && event->device != stream->device)
        r = CU_INVALID_HANDLE;
    if (r == CU_OK) {
        fake_op *op = new_op(OP_RECORD, 0);
        op->record = calloc(1, sizeof *op->record);
        op->record->refs = 2;
        fake_record_drop(event->record);
        event->record = op->record;
        fake_stream_enqueue(stream, op);
    }
    return fake_leave(r);
}

cu_result fake_StreamWaitEvent(cu_stream stream, cu_event event, unsigned flags)
{
    cu_result r = fake_enter(FAKE_StreamWaitEvent, NEEDS_CONTEXT);
    if (r == CU_OK)
        r = event_stream(&stream, event);
    if (r == CU_OK && flags)
        r = CU_INVALID_VALUE;
    if (r == CU_OK && event->record) { /* never recorded: nothing to wait for */
        fake_op *op = new_op(OP_JOIN, 0);
        op->record = event->record;
        op->record->refs++;
        fake_stream_enqueue(stream, op);
    }
    return fake_leave(r);
}

cu_result fake_EventQuery(cu_event event)
{
    cu_result r = fake_enter(FAKE_EventQuery, 0);
    if (r == CU_OK && !is_event(event))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK && event->record && !event->record->done)
        r = CU_NOT_READY;
    return fake_leave(r);
}

cu_result fake_EventElapsedTime(float *ms, cu_event start, cu_event end)
{
    cu_result r = fake_enter(FAKE_EventElapsedTime, 0);
    if (r == CU_OK && (!is_event(start) || !is_event(end) || !start->timed || !end->timed || !start->record ||
                       !end->record))
        r = CU_INVALID_HANDLE;
    if (r == CU_OK && (!start->record->done || !end->record->done))
        r = CU_NOT_READY;
    if (r == CU_OK)
        *ms = (float)(end->record->when - start->record->when) / 1e6f;
    return fake_leave(r);
}
