/* arena.c - arenas of the host device: shared memory, counted. */
#include "fabric/host/host.h"

int host_arena_create(fab_device *face, uint64_t bytes, const uint8_t *peers, fab_arena **out)
{
    host_device *d = (host_device *)face;
    uint32_t n = face->n_ranks;
    fab_memory *own = NULL;
    host_arena *a = tide_calloc(1, sizeof *a);
    int status = TIDE_OK;

    *out = NULL;
    if (!a || !(a->memory = tide_calloc(n, sizeof(fab_memory *))) || !(a->face.base = tide_calloc(n, sizeof(void *))))
        status = TIDE_ERR_MEMORY;
    if (status == TIDE_OK)
        status = fab_memory_create("tide-arena", bytes, &own);
    status = fab_memory_exchange(&d->open, status, d->peers.process, own, peers, a ? a->memory : NULL, NULL);
    fab_memory_drop(own); /* memory[rank] holds it now */
    if (status != TIDE_OK) {
        if (a) {
            tide_free(a->face.base);
            tide_free(a->memory);
        }
        tide_free(a);
        return status;
    }
    a->refs = 1;
    a->rank = face->rank;
    a->n_ranks = n;
    for (uint32_t r = 0; r < n; r++)
        a->face.base[r] = a->memory[r] ? a->memory[r]->base : NULL;
    a->face.bytes = bytes;
    a->face.allocated = a->memory[a->rank]->bytes;
    *out = &a->face;
    return TIDE_OK;
}

void host_arena_hold(fab_arena *face)
{
    atomic_fetch_add(&((host_arena *)face)->refs, 1);
}

void host_arena_drop(fab_arena *face)
{
    host_arena *a = (host_arena *)face;
    if (!a || atomic_fetch_sub(&a->refs, 1) != 1)
        return;
    for (uint32_t r = 0; r < a->n_ranks; r++)
        fab_memory_drop(a->memory[r]);
    tide_free(a->face.base);
    tide_free(a->memory);
    tide_free(a);
}

void host_arena_trim(fab_arena *face, uint32_t keep)
{
    host_arena *a = (host_arena *)face;
    for (uint32_t r = 0; r < a->n_ranks; r++) {
        if (r == a->rank || r == keep)
            continue;
        fab_memory_drop(a->memory[r]);
        a->memory[r] = NULL;
        a->face.base[r] = NULL;
    }
}
