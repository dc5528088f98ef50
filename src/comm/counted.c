/* counted.c - the allocator pair by which PyTorch counts memory that a communicator holds already. */
#include "tide/tide.h"

static _Thread_local void *offered;

void tide_torch_offer(void *memory)
{
    offered = memory;
}

void *tide_torch_alloc(ptrdiff_t bytes, int device, void *stream)
{
    void *memory = offered;
    (void)bytes, (void)device, (void)stream;
    offered = NULL;
    return memory;
}

void tide_torch_free(void *memory, size_t bytes, int device, void *stream)
{
    (void)memory, (void)bytes, (void)device, (void)stream; /* the communicator frees it */
}
