/* dice.c - a linear congruential generator; its upper bits. */
#include "dice.h"

static uint64_t state;

void dice_seed(uint64_t seed)
{
    state = seed;
}

uint32_t dice(uint32_t n)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(state >> 33) % n;
}
