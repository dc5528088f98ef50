/*
 * tiles.cuh - which segment or run a tile belongs to.
 */
#ifndef TIDE_CUDA_TILES_CUH
#define TIDE_CUDA_TILES_CUH

#include "fabric/cuda/kernels/device.cuh"

/* The last of n parts whose first tile is not behind `tile`. A warp's tiles ascend: it is `part` or a later one. */
__device__ static inline uint32_t part_of(const uint32_t *tiles, uint32_t n, uint32_t part, uint32_t tile)
{
    if (part + 1 >= n || tile < tiles[part + 1])
        return part;
    uint32_t low = part + 1, high = n; /* tiles[low] <= tile, and tile < tiles[high] where there is such */
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (tile < tiles[middle])
            high = middle;
        else
            low = middle;
    }
    return low;
}

#endif
