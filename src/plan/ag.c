/* ag.c - rounds of Bruck's recursive doubling (paper 3.1). */
#include "plan/plan.h"

uint32_t plan_ag_rounds(uint32_t nodes, plan_ag_round out[11])
{
    uint32_t n = 0;
    for (uint32_t distance = 1; distance < nodes; distance *= 2)
        out[n++] = (plan_ag_round){distance, distance < nodes - distance ? distance : nodes - distance};
    return n;
}
