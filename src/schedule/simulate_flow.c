/*
 * simulate_flow.c - flows that share resources.
 *
 * A flow alone moves at the least of its own limit and what its resources give it. When a resource is asked for more
 * than it has, everything that uses it is slowed by one factor; the flows that this does not use up are then looked at
 * again with what is left (progressive filling). So nothing is idle that somebody could use, and a flow of few units a
 * second is not slowed in favour of one of many.
 */
#include <math.h>

#include "schedule/simulate_internal.h"

static const double LEAST_COMPUTE = 0.05;

int flows_init(sim_flows *f, uint32_t n_ranks)
{
    uint32_t n_resources = n_ranks * SIMULATE_SHARED;
    memset(f, 0, sizeof *f);
    f->n_resources = n_resources;
    f->capacity_of = tide_calloc(n_resources, sizeof *f->capacity_of);
    f->used = tide_calloc(n_resources, sizeof *f->used);
    f->wanted = tide_calloc(n_resources, sizeof *f->wanted);
    f->units = tide_calloc(n_resources, sizeof *f->units);
    f->touched = tide_calloc(n_resources, sizeof *f->touched);
    f->is_touched = tide_calloc(n_resources, sizeof *f->is_touched);
    f->held = tide_calloc(n_ranks, sizeof *f->held);
    return f->held && f->capacity_of && f->used && f->wanted && f->units && f->touched && f->is_touched ? TIDE_OK
                                                                                             : TIDE_ERR_MEMORY;
}

void flows_clear(sim_flows *f)
{
    for (uint32_t i = 0; i < f->made; i++)
        tide_free(f->all[i].demands);
    tide_free(f->all);
    tide_free(f->capacity_of);
    tide_free(f->used);
    tide_free(f->wanted);
    tide_free(f->units);
    tide_free(f->held);
    tide_free(f->touched);
    tide_free(f->is_touched);
    memset(f, 0, sizeof *f);
}

sim_flow *flows_add(sim_flows *f, uint32_t owner, uint32_t aux, double units, double cap)
{
    sim_flow *flow;
    if (f->n == f->made) {
        if (tide_grow(&f->all, &f->capacity, (uint64_t)f->n + 1, sizeof *f->all) != TIDE_OK)
            return NULL;
        memset(&f->all[f->made++], 0, sizeof *f->all);
    }
    flow = &f->all[f->n++];
    flow->owner = owner;
    flow->aux = aux;
    flow->left = units;
    flow->alone = cap;
    flow->rate = 0;
    flow->holds = 0;
    flow->squeezed = false;
    flow->n_demands = 0;
    return flow;
}

int flows_demand(const sim_flows *f, sim_flow *flow, uint32_t resource, double weight)
{
    if (weight <= 0)
        return TIDE_OK;
    if (flow->alone * weight > f->capacity_of[resource])
        flow->alone = f->capacity_of[resource] / weight;
    for (uint32_t i = 0; i < flow->n_demands; i++) {
        if (flow->demands[i].resource == resource) {
            flow->demands[i].weight += weight;
            return TIDE_OK;
        }
    }
    if (tide_grow(&flow->demands, &flow->cap_demands, (uint64_t)flow->n_demands + 1, sizeof *flow->demands) != TIDE_OK)
        return TIDE_ERR_MEMORY;
    flow->demands[flow->n_demands++] = (sim_demand){resource, weight};
    return TIDE_OK;
}

void flows_start(sim_flows *f, sim_flow *flow, sim_time now)
{
    for (uint32_t i = 0; i < flow->n_demands; i++)
        f->units[flow->demands[i].resource] += flow->left * flow->demands[i].weight;
    f->held[flow->rank] += flow->holds;
    flow->since = now;
    flow->finish = SIM_NEVER;
    f->changed = true;
}

/* Brings what is left up to now and takes the new rate. */
static void set_rate(sim_flow *flow, double rate, sim_time now)
{
    double ticks;
    if (rate == flow->rate && flow->finish != SIM_NEVER)
        return;
    flow->left -= flow->rate * ((double)(now - flow->since) / SIM_SECOND);
    if (flow->left < 0)
        flow->left = 0;
    flow->since = now;
    flow->rate = rate;
    ticks = flow->left / rate * SIM_SECOND;
    flow->finish = now + (sim_time)ticks + ((double)(sim_time)ticks < ticks);
}

void flows_share(sim_flows *f, sim_time now)
{
    uint32_t left = f->n;

    if (!f->changed)
        return;
    f->changed = false;
    for (uint32_t i = 0; i < f->n_touched; i++)
        f->is_touched[f->touched[i]] = false;
    f->n_touched = 0;
    for (uint32_t i = 0; i < f->n; i++) {
        sim_flow *flow = &f->all[i];
        flow->frozen = false;
        if (flow->squeezed) /* resident CTAs are not preempted; something is left in any case */
            flow->alone = fmax(1 - f->held[flow->rank], LEAST_COMPUTE);
        for (uint32_t k = 0; k < flow->n_demands; k++) {
            uint32_t r = flow->demands[k].resource;
            if (!f->is_touched[r]) {
                f->is_touched[r] = true;
                f->touched[f->n_touched++] = r;
                f->used[r] = f->wanted[r] = 0;
            }
            f->wanted[r] += flow->demands[k].weight * flow->alone;
        }
    }
    while (left > 0) {
        double factor = 1;
        for (uint32_t i = 0; i < f->n_touched; i++) {
            uint32_t r = f->touched[i];
            double available = f->capacity_of[r] - f->used[r];
            if (f->wanted[r] > 0 && f->wanted[r] > available * (1 + 1e-9) && f->wanted[r] * factor > available)
                factor = available / f->wanted[r];
        }
        for (uint32_t i = 0; i < f->n; i++) {
            sim_flow *flow = &f->all[i];
            bool limited = factor >= 1;
            if (flow->frozen)
                continue;
            for (uint32_t k = 0; k < flow->n_demands && !limited; k++) {
                uint32_t r = flow->demands[k].resource;
                limited = f->wanted[r] * factor >= (f->capacity_of[r] - f->used[r]) * (1 - 1e-9);
            }
            if (!limited)
                continue;
            flow->frozen = true;
            set_rate(flow, flow->alone * factor, now);
            left--;
        }
        if (factor >= 1)
            break;
        for (uint32_t i = 0; i < f->n_touched; i++)
            f->used[f->touched[i]] = f->wanted[f->touched[i]] = 0;
        for (uint32_t i = 0; i < f->n; i++) {
            const sim_flow *flow = &f->all[i];
            for (uint32_t k = 0; k < flow->n_demands; k++) {
                const sim_demand *d = &flow->demands[k];
                *(flow->frozen ? &f->used[d->resource] : &f->wanted[d->resource]) +=
                    d->weight * (flow->frozen ? flow->rate : flow->alone);
            }
        }
    }
}

sim_time flows_next(const sim_flows *f)
{
    sim_time next = SIM_NEVER;
    for (uint32_t i = 0; i < f->n; i++)
        if (f->all[i].finish < next)
            next = f->all[i].finish;
    return next;
}

void flows_remove(sim_flows *f, uint32_t index)
{
    sim_flow gone = f->all[index];
    f->held[gone.rank] -= gone.holds;
    f->all[index] = f->all[--f->n];
    f->all[f->n] = gone; /* its demand array is used again */
    f->changed = true;
}
