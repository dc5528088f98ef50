/* wake.c - futexes and bells. */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fabric/host/host.h"

void host_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns)
{
    struct timespec t = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout_ns < 0 ? NULL : &t, NULL, 0);
}

void host_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void wake(host_control *c, uint32_t who, enum host_bell bell)
{
    atomic_fetch_and(&c->sleepers, ~who);
    atomic_fetch_add(&c->bell[bell], 1);
    host_futex_wake(&c->bell[bell]);
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
