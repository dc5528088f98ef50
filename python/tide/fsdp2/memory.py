"""Arenas in torch's memory accounting.

The library allocates its arenas itself. Here torch gets a MemPool whose allocator gives it an arena's address, and one
tensor of the arena's size in it: memory_reserved, memory_allocated, their peaks and snapshots then contain it, once.
Nothing is read or written through that tensor.
"""

import torch

from tide._lib import lib


class Counted:
    def __init__(self, address, n_bytes, device):
        self.memory = self.pool = None  # dropped in this order: the tensor before its pool
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(lib._name, "tide_torch_alloc", "tide_torch_free")
        self.pool = torch.cuda.MemPool(self.allocator.allocator())
        lib.tide_torch_offer(address)
        try:
            with torch.cuda.use_mem_pool(self.pool, device):
                self.memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        finally:
            lib.tide_torch_offer(None)

    def drop(self):
        """Before the arena goes: torch forgets it."""
        self.memory = None
        self.pool = None
        self.allocator = None
