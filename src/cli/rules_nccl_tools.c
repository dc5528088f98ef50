/* rules_nccl_tools.c - what rules of NCCL are written with: communicators, memory, streams, puts and waits. */
#include <stdlib.h>

#include "cli/rules_nccl.h"

/* ---- communicators --------------------------------------------------------------------------- */

nccl_config nccl_rules_config(void)
{
    nccl_config c = NCCL_CONFIG_INIT;
    c.blocking = 1;
    c.min_ctas = c.max_ctas = 1;
    c.graph_usage_mode = 0;
    c.num_rma_ctx = NCCL_RULES_CONTEXTS;
    c.num_rma_sig = NCCL_RULES_SIGNALS;
    c.rma_eager_init = 1;
    return c;
}

enum outcome nccl_rules_id(nccl_side *r, nccl_id *id)
{
    MUST(nccl_rules_meet(r)); /* nobody reads the last one any more */
    if (r->rank == 0)
        NCCL_GIVES(r->n->GetUniqueId(&r->w->id[0]), NCCL_OK);
    MUST(nccl_rules_meet(r));
    *id = r->w->id[0];
    return OK;
}

enum outcome nccl_rules_make(nccl_side *r, int ranks, nccl_id id, nccl_config *config, nccl_comm *comm, nccl_result *result)
{
    nccl_comm made = NULL;

    atomic_store(&r->call, "ncclCommInitRankConfig");
    *result = r->n->CommInitRankConfig(&made, ranks, id, r->rank, config);
    atomic_store(&r->call, NULL);
    NCCL_GIVES(*result, NCCL_OK);
    MUST(made);
    *comm = made;
    return OK;
}

enum outcome nccl_rules_init(nccl_side *r, int which, nccl_config *config)
{
    nccl_id id;
    nccl_result result = NCCL_OK;
    enum outcome o = nccl_rules_id(r, &id);

    if (o != OK)
        return o;
    o = nccl_rules_make(r, r->ranks, id, config, &r->comm[which], &result);
    NEEDS(!(r->w->shared && result == NCCL_INVALID_USAGE), "one device, and ranks of a communicator may not share it");
    return o;
}

enum outcome nccl_rules_register(nccl_side *r, int which)
{
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[which], (void *)(uintptr_t)r->memory.at, r->memory.bytes, &r->window[which],
                                        NCCL_WIN_SYMMETRIC),
               NCCL_OK);
    MUST(r->window[which]);
    return OK;
}

enum outcome nccl_rules_tear_down(nccl_side *r, int which)
{
    nccl_comm comm = r->comm[which];

    if (r->window[which])
        NCCL_GIVES(r->n->CommWindowDeregister(comm, r->window[which]), NCCL_OK);
    r->window[which] = NULL;
    NCCL_GIVES(r->n->CommFinalize(comm), NCCL_OK);
    r->comm[which] = NULL; /* whatever destroying says: it is not to be used again */
    NCCL_GIVES(r->n->CommDestroy(comm), NCCL_OK);
    return OK;
}

/* ---- calls that may stay where they are ------------------------------------------------------ */

struct nccl_rules_call {
    nccl_rules_call *next;
    nccl_side *r;
    nccl_comm comm;
    bool registers; /* else it aborts */
    pthread_t thread;
    nccl_result result;
    _Atomic int begun, done;
};

static void *do_call(void *context)
{
    nccl_rules_call *c = context;
    nccl_side *r = c->r;
    nccl_window window = NULL;

    r->d->CtxPush(r->context);
    atomic_store(&c->begun, 1);
    c->result = c->registers ? r->n->CommWindowRegister(c->comm, (void *)(uintptr_t)r->memory.at, r->memory.bytes, &window,
                                                        NCCL_WIN_SYMMETRIC)
                             : r->n->CommAbort(c->comm);
    r->d->CtxPop(NULL);
    atomic_store(&c->done, 1);
    return NULL;
}

static nccl_rules_call *begin_call(nccl_side *r, int which, bool registers)
{
    nccl_rules_call *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    *c = (nccl_rules_call){.r = r, .comm = r->comm[which], .registers = registers};
    if (pthread_create(&c->thread, NULL, do_call, c) != 0) {
        free(c);
        return NULL;
    }
    c->next = r->pending;
    r->pending = c;
    while (!atomic_load(&c->begun))
        rules_sleep_ms(1);
    return c;
}

nccl_rules_call *nccl_rules_begin_register(nccl_side *r, int which) { return begin_call(r, which, true); }
nccl_rules_call *nccl_rules_begin_abort(nccl_side *r, int which)
{
    nccl_rules_call *c = begin_call(r, which, false);
    if (c) {
        r->comm[which] = NULL;
        r->window[which] = NULL;
    }
    return c;
}

bool nccl_rules_ended(nccl_rules_call *call, int64_t within_ms)
{
    int64_t began = tide_now_ns();
    while (!atomic_load(&call->done) && nccl_rules_ms(began) < (double)within_ms)
        rules_sleep_ms(1);
    return atomic_load(&call->done);
}

nccl_result nccl_rules_end_call(nccl_rules_call *call)
{
    nccl_rules_call **at = &call->r->pending;
    nccl_result result;
    while (*at != call)
        at = &(*at)->next;
    *at = call->next;
    pthread_join(call->thread, NULL);
    result = call->result;
    free(call);
    return result;
}

void nccl_rules_end_calls(nccl_side *r)
{
    while (r->pending && !r->w->spoiled) {
        if (nccl_rules_ended(r->pending, NCCL_RULES_ABORT_MS))
            nccl_rules_end_call(r->pending);
        else
            r->w->spoiled = true;
    }
}

bool nccl_rules_abort(nccl_side *r, int which, nccl_result *result, double *ms)
{
    int64_t began = tide_now_ns();
    nccl_rules_call *c = nccl_rules_begin_abort(r, which);

    if (!c || !nccl_rules_ended(c, NCCL_RULES_ABORT_MS)) {
        r->w->spoiled = true;
        return false;
    }
    *ms = nccl_rules_ms(began);
    *result = nccl_rules_end_call(c);
    return true;
}

/* ---- memory ---------------------------------------------------------------------------------- */

bool nccl_rules_memory(nccl_side *r, const cu_alloc_prop *how, nccl_memory *out)
{
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD, .location = {CU_LOCATION_DEVICE, r->device}};
    cu_access access = {{CU_LOCATION_DEVICE, r->device}, CU_ACCESS_READ_WRITE};
    size_t granularity = 0;

    prop = how ? *how : prop;
    *out = (nccl_memory){0, 0, 0};
    if (r->d->MemGetAllocationGranularity(&granularity, &prop, 0) != CU_OK || !granularity)
        return false;
    out->bytes = (NCCL_RULES_BYTES + granularity - 1) / granularity * granularity;
    if (r->d->MemCreate(&out->handle, out->bytes, &prop, 0) != CU_OK) {
        out->handle = 0;
    } else if (r->d->MemAddressReserve(&out->at, out->bytes, 0, 0, 0) != CU_OK) {
        out->at = 0;
    } else if (r->d->MemMap(out->at, out->bytes, 0, out->handle, 0) != CU_OK) {
        r->d->MemAddressFree(out->at, out->bytes);
        out->at = 0;
    } else if (r->d->MemSetAccess(out->at, out->bytes, &access, 1) == CU_OK) {
        return true;
    }
    nccl_rules_memory_free(r, out);
    return false;
}

bool nccl_rules_memory_free(nccl_side *r, nccl_memory *m)
{
    bool fine = true;
    if (m->at)
        fine = r->d->MemUnmap(m->at, m->bytes) == CU_OK && r->d->MemAddressFree(m->at, m->bytes) == CU_OK;
    if (m->handle)
        fine &= r->d->MemRelease(m->handle) == CU_OK;
    *m = (nccl_memory){0, 0, 0};
    return fine;
}

static bool copy_through_host(nccl_side *r, uint64_t at, uint64_t bytes, bool in)
{
    cu_result result = bytes > NCCL_RULES_HALF ? CU_INVALID_VALUE
                       : in ? r->d->MemcpyHtoDAsync(r->memory.at + at, r->host, bytes, r->own_stream)
                            : r->d->MemcpyDtoHAsync(r->host, r->memory.at + at, bytes, r->own_stream);
    return result == CU_OK && r->d->StreamSynchronize(r->own_stream) == CU_OK;
}

static unsigned char pattern(uint64_t i, unsigned seed) { return (unsigned char)(i * 7 + i / 251 + seed); }

bool nccl_rules_fill(nccl_side *r, uint64_t at, uint64_t bytes, unsigned seed)
{
    for (uint64_t i = 0; i < bytes; i++)
        r->host[i] = pattern(i, seed);
    return copy_through_host(r, at, bytes, true);
}

bool nccl_rules_holds(nccl_side *r, uint64_t at, uint64_t bytes, unsigned seed)
{
    if (!copy_through_host(r, at, bytes, false))
        return false;
    for (uint64_t i = 0; i < bytes; i++)
        if (r->host[i] != pattern(i, seed))
            return false;
    return true;
}

bool nccl_rules_clear(nccl_side *r)
{
    memset(r->host, 0, NCCL_RULES_HALF);
    return copy_through_host(r, NCCL_RULES_HALF, NCCL_RULES_HALF, true);
}

/* ---- streams --------------------------------------------------------------------------------- */

void nccl_rules_pause(nccl_side *r) { rules_sleep_ms(r->w->grace_ms); }

bool nccl_rules_dry(nccl_side *r, int stream)
{
    int64_t began = tide_now_ns();
    cu_result result;
    while ((result = r->d->StreamQuery(r->stream[stream])) == CU_NOT_READY && nccl_rules_ms(began) < PATIENCE_MS)
        rules_sleep_ms(1);
    return result == CU_OK;
}

bool nccl_rules_blocked(nccl_side *r, int stream)
{
    nccl_rules_pause(r);
    return r->d->StreamQuery(r->stream[stream]) == CU_NOT_READY;
}

static _Atomic uint64_t *gate_at(nccl_side *r, int gate)
{
    return (_Atomic uint64_t *)(void *)(r->host + NCCL_RULES_HALF) + gate;
}

bool nccl_rules_gate(nccl_side *r, int stream, int gate)
{
    cu_ptr address = 0;
    cu_stream_op op;

    atomic_store(gate_at(r, gate), 0);
    if (r->d->MemHostGetDevicePointer(&address, r->host, 0) != CU_OK)
        return false;
    op = rules_word_op(CU_OP_WAIT_64, address + NCCL_RULES_HALF + (cu_ptr)gate * 8, 1, CU_WAIT_GEQ);
    return r->d->StreamBatchMemOp(r->stream[stream], 1, &op, 0) == CU_OK;
}

void nccl_rules_open(nccl_side *r, int gate) { atomic_store(gate_at(r, gate), 1); }

/* ---- transfers ------------------------------------------------------------------------------- */

nccl_result nccl_rules_put(nccl_side *r, int which, int peer, uint64_t from, uint64_t to, uint64_t bytes, int sig, int ctx,
                           int stream)
{
    return r->n->PutSignal((const void *)(uintptr_t)(r->memory.at + from), bytes, NCCL_UINT8, peer, r->window[which], to, sig,
                           ctx, 0, r->comm[which], r->stream[stream]);
}

nccl_result nccl_rules_wait(nccl_side *r, int which, int count, int peer, int sig, int ctx, int stream)
{
    nccl_wait_desc d = {count, peer, sig, ctx};
    return r->n->WaitSignal(1, &d, r->comm[which], r->stream[stream]);
}
