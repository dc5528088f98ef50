/*
 * ledger.c - the running base of every counted resource.
 *
 * An op posts or awaits base[resource] + delta; once a call that owns steps is enqueued, base += step. So a group
 * skipped by all ranks leaves no trace, and no epoch has to be agreed on.
 */
#include "engine/state.h"

int ledger_init(engine_ledger *l, uint32_t n_resources)
{
    l->n = n_resources;
    l->base = tide_calloc(n_resources, sizeof *l->base);
    return l->base ? TIDE_OK : TIDE_ERR_MEMORY;
}

void ledger_clear(engine_ledger *l)
{
    tide_free(l->base);
    l->base = NULL;
}

void ledger_snapshot(const engine_ledger *l, const uint32_t *resources, uint32_t n, uint64_t *base)
{
    for (uint32_t i = 0; i < n; i++)
        base[i] = l->base[resources[i]];
}

void ledger_advance(engine_ledger *l, const schedule_step *steps, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        l->base[steps[i].resource] += steps[i].step;
}
