/* wake.c - the bells. */
#include "fabric/host/host.h"

static void wake(host_control *c, uint32_t who, enum host_bell bell)
{
    atomic_fetch_and(&c->sleepers, ~who);
    atomic_fetch_add(&c->bell[bell], 1);
    fab_futex_wake(&c->bell[bell]);
}

void host_ring(host_control *c)
{
    uint32_t s = atomic_load(&c->sleepers);
    if (s & HELPER) {
        if (s & SLEEPER_CALLER)
            wake(c, SLEEPER_CALLER, BELL_CALLER);
    } else if (s & SLEEPER_WORKER) {
        wake(c, SLEEPER_WORKER, BELL_WORKER);
    }
}

void host_ring_caller(host_control *c)
{
    if (atomic_load(&c->sleepers) & SLEEPER_CALLER)
        wake(c, SLEEPER_CALLER, BELL_CALLER);
}

void host_ring_all(host_control *c)
{
    wake(c, SLEEPER_CALLER, BELL_CALLER);
    wake(c, SLEEPER_WORKER, BELL_WORKER);
}
