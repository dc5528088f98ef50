/* dice.h - seeded random numbers for tests that a seed has to replay; one generator a program, one thread. */
#ifndef HARNESS_DICE_H
#define HARNESS_DICE_H

#include <stdint.h>

void dice_seed(uint64_t seed);
uint32_t dice(uint32_t n); /* 0..n-1 */

#endif
