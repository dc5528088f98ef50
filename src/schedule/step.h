/*
 * step.h - a training step of equal layers under FSDP2, on TIDE's op lists or with stock FSDP2's copies and ring
 * collectives, in simulated time.
 */
#ifndef TIDE_STEP_H
#define TIDE_STEP_H

#include "schedule/simulate.h"

typedef struct step_model {
    uint32_t layers;
    double forward, backward; /* seconds of compute a layer with nothing beside it; recomputation is part of backward */
    double ring_slowdown;     /* time of compute beside a resident ring kernel over its time alone; 0: from ring_ctas */
} step_model;

typedef struct step_result {
    double seconds, compute;  /* of the step; of its compute alone */
    double exposed;           /* the rest */
    double copies;            /* of it, layout copies on the compute stream */
    uint64_t live_bytes;      /* while a layer's gradients are made: unsharded parameters, buffers, gradients still needed */
    simulate_result simulated;
} step_result;

/* Two equal groups are the plan: layers take turns. In-Place, or Slot-Reuse with the mode knob where landings are not shared. */
int step_tide(const tide_plan *plan, const plan_machine *m, const step_model *model, uint32_t rank, step_result *out,
              tide_text *trace);
int step_stock(const tide_plan *plan, const plan_machine *m, const step_model *model, uint32_t rank, step_result *out,
               tide_text *trace);
/* Seconds of a ring collective that brings `bytes` into each GPU. */
double step_ring_seconds(const plan_machine *m, uint32_t nodes, uint32_t local, double bytes);

#endif
