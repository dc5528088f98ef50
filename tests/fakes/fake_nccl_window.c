/* fake_nccl_window.c - the fake NCCL's windows: memory that peers may write to and that puts read from. */
#include <stdio.h>
#include <stdlib.h>

#include "fake_nccl_internal.h"

nccl_window fake_nccl_window_at(nccl_comm comm, uintptr_t at, uint64_t bytes)
{
    for (nccl_window w = comm->windows; w; w = w->next)
        if (!w->gone && w->symmetric && at >= w->base && at - w->base <= w->bytes && bytes <= w->bytes - (at - w->base))
            return w;
    return NULL;
}

nccl_window fake_nccl_window_of(nccl_comm comm, uint64_t index)
{
    nccl_window w = comm->windows;
    while (w && w->index != index)
        w = w->next;
    return w;
}

bool fake_nccl_registered(uintptr_t base, uint64_t bytes)
{
    for (nccl_comm c = fake_nccl.comms; c; c = c->next)
        for (nccl_window w = c->windows; w; w = w->next)
            if (!w->gone && w->base < base + bytes && base < w->base + w->bytes)
                return true;
    return false;
}

/* One allocation of the communicator's device, by a handle that other ranks can have. */
static nccl_result good_memory(nccl_comm comm, uintptr_t base, uint64_t bytes)
{
    fake_span *s;

    if (!base || !bytes || base % NCCL_WIN_ALIGNMENT)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommWindowRegister: %#lx, %llu bytes: the base has to be aligned to %d",
                                (unsigned long)base, (unsigned long long)bytes, NCCL_WIN_ALIGNMENT);
    s = fake_find(base, bytes, comm->device);
    if (!s || s->kind != SPAN_MAPPING)
        return fake_nccl_refuse(NCCL_UNHANDLED_CUDA_ERROR, "ncclCommWindowRegister: %#lx, %llu bytes are not memory of cuMemCreate",
                                (unsigned long)base, (unsigned long long)bytes);
    if (s->device != comm->device)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommWindowRegister: memory of device %d, the communicator's is %d",
                                s->device, comm->device);
    if (s->base != base)
        fake_complain("ncclCommWindowRegister: a window that does not begin where the allocation does");
    for (nccl_window w = comm->windows; w; w = w->next)
        if (!w->gone && w->base < s->base + s->bytes && s->base < w->base + w->bytes)
            fake_complain("ncclCommWindowRegister: two windows of a communicator in one allocation");
    return NCCL_OK;
}

/* Everyone has come to this registration; or there is no use in waiting. */
static bool all_registered(const void *context)
{
    const struct nccl_window *w = context;
    const fake_clique *q = w->comm->clique;
    for (int i = 0; i < q->n_ranks; i++)
        if (q->ranks[i]->registered <= w->index)
            return w->comm->aborting;
    return true;
}

nccl_result fake_nccl_CommWindowRegister(nccl_comm comm, void *base, size_t bytes, nccl_window *window, int flags)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommWindowRegister, NEEDS_CONTEXT);

    if (r == NCCL_OK)
        r = fake_nccl_good(comm, "ncclCommWindowRegister");
    if (r == NCCL_OK && !window)
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommWindowRegister: NULL for the window");
    if (r == NCCL_OK && fake_current()->device != comm->device)
        fake_complain("ncclCommWindowRegister: another device's context is current");
    if (r == NCCL_OK && fake_nccl.options.null_windows) {
        *window = NULL;
        return fake_nccl_leave(NCCL_OK);
    }
    if (r == NCCL_OK && flags & ~(NCCL_WIN_SYMMETRIC | 2))
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommWindowRegister: flags %#x", (unsigned)flags);
    if (r == NCCL_OK)
        r = good_memory(comm, (uintptr_t)base, bytes);
    if (r == NCCL_OK) {
        nccl_window w = calloc(1, sizeof *w);
        *w = (struct nccl_window){MAGIC_WINDOW, comm->windows, comm, comm->registered++, (uintptr_t)base, bytes,
                                  (flags & NCCL_WIN_SYMMETRIC) != 0, false};
        comm->windows = w;
        if (!fake_nccl_stand(all_registered, w) || comm->aborting) {
            w->gone = true;
            r = fake_nccl_refuse(NCCL_INTERNAL_ERROR, "ncclCommWindowRegister: the communicator has been aborted");
        } else {
            *window = w;
        }
    }
    return fake_nccl_leave(r);
}

nccl_result fake_nccl_CommWindowDeregister(nccl_comm comm, nccl_window window)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommWindowDeregister, RELEASES);
    if (r == NCCL_OK)
        r = fake_nccl_good(comm, "ncclCommWindowDeregister");
    if (r == NCCL_OK && (!window || window->magic != MAGIC_WINDOW || window->comm != comm || window->gone))
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommWindowDeregister: not a window of the communicator");
    if (r == NCCL_OK) {
        if (comm->finished != comm->issued)
            fake_complain("ncclCommWindowDeregister: operations of the communicator are under way");
        window->gone = true;
    }
    return fake_nccl_leave(r);
}
