/* peers.c - the failure record of a rank, how it reaches the others, a barrier that it ends, and the watch over peer
 * processes; for ranks of other machines, what the link says. */
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fabric/peers.h"

/* ---- opening and closing ------------------------------------------------------------------------ */

int fab_peers_init(fab_peers *p, fab_open *open, uint64_t page_bytes, const fab_peers_hooks *hooks, void *device)
{
    int status;

    p->open = open;
    p->deadline_ns = fab_deadline_ns(open);
    p->options = open->options ? *open->options : (tide_options)TIDE_OPTIONS_INIT;
    open->options = &p->options;
    p->hooks = hooks;
    p->device = device;
    p->page_bytes = page_bytes;
    p->calls.hash = TIDE_FNV_BASIS;
    pthread_mutex_init(&p->lock, NULL);
    p->locked = 1;
    status = fab_fork_watch();
    p->fork_watched = status == TIDE_OK;
    if (status == TIDE_OK)
        status = fab_process(&p->process);
    if (status != TIDE_OK)
        return status;
    p->pages = tide_calloc(open->n_ranks, sizeof *p->pages);
    p->pids = tide_calloc(open->n_ranks, sizeof *p->pids);
    if (!p->pages || !p->pids)
        return TIDE_ERR_MEMORY;
    return fab_memory_create("tide-control", page_bytes, &p->page);
}

static bool one_machine(const fab_open *desc)
{
    bool one = true;
    for (uint32_t r = 0; r < desc->n_ranks; r++)
        one &= fab_same_machine(desc, r);
    return one;
}

static int make_mirrors(fab_peers *p)
{
    int status = TIDE_OK;
    for (uint32_t r = 0; r < p->open->n_ranks && status == TIDE_OK; r++)
        if (!fab_peers_here(p, r))
            status = fab_memory_private(p->page_bytes, &p->pages[r]);
    return status;
}

int fab_peers_meet(const fab_open *desc, fab_peers *p, int status)
{
    uint8_t *everybody = tide_calloc(desc->n_ranks, 1);

    if (everybody)
        memset(everybody, 1, desc->n_ranks);
    else if (status == TIDE_OK)
        status = TIDE_ERR_MEMORY;
    status = fab_memory_exchange(desc, status, p ? p->process : 0, p ? p->page : NULL, everybody, p ? p->pages : NULL,
                                 p ? p->pids : NULL);
    tide_free(everybody);
    if (p) {
        fab_memory_drop(p->page); /* pages[rank] holds it now */
        p->page = NULL;
    }
    if (status == TIDE_OK && !one_machine(desc)) /* all are here, so all have a p */
        status = fab_link_meet(desc, make_mirrors(p), &p->link);
    if (status == TIDE_OK)
        p->own = fab_peers_page(p, desc->rank);
    return status;
}

void fab_peers_leave(fab_peers *p)
{
    if (p->own)
        atomic_store(&p->own->closed, 1);
    if (p->link)
        fab_link_leave(p->link);
}

void fab_peers_clear(fab_peers *p)
{
    if (p->link) /* it wakes the watch, and the watch tells it what it finds: neither goes while the other's thread runs */
        fab_link_stop(p->link);
    if (p->watching) {
        atomic_store(&p->stop, 1);
        fab_peers_wake(p);
        pthread_join(p->watch, NULL);
    }
    fab_link_free(p->link);
    for (uint32_t i = 0; p->watch_set && i <= p->open->n_ranks; i++)
        if (p->watch_set[i].fd >= 0)
            close(p->watch_set[i].fd);
    tide_free(p->watch_set);
    fab_memory_drop(p->page);
    for (uint32_t r = 0; p->pages && r < p->open->n_ranks; r++)
        fab_memory_drop(p->pages[r]);
    if (p->fork_watched)
        fab_fork_unwatch();
    if (p->locked)
        pthread_mutex_destroy(&p->lock);
    tide_free(p->pids);
    tide_free(p->pages);
}

/* ---- the barrier -------------------------------------------------------------------------------- */

void fab_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns)
{
    struct timespec t = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout_ns < 0 ? NULL : &t, NULL, 0);
}

void fab_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void ring(fab_page *page)
{
    atomic_fetch_add(&page->bell, 1);
    fab_futex_wake(&page->bell);
}

/* Who of another machine has come is known to rank 0. */
static void fail_barrier(fab_peers *p, const char *phase, int64_t begin, uint32_t count, uint32_t missing)
{
    tide_failure f = TIDE_FAILURE_INIT;

    if (p->link && !fab_peers_here(p, missing) && !fab_link_missing(p->link, count, &missing))
        missing = 0;
    if (missing == UINT32_MAX) /* all have by now: rank 0 has said that first */
        return;

    f.code = TIDE_ERR_DEADLINE;
    f.rank = p->open->rank;
    f.peer = missing;
    snprintf(f.phase, sizeof f.phase, "%s", phase);
    snprintf(f.text, sizeof f.text, "rank %u waited %.3f s for rank %u in %s", f.rank,
             (double)(tide_now_ns() - begin) / 1e9, missing, phase);
    fab_peers_fail(p, &f, true);
}

/* Each rank counts on its own page and rings the others; whoever fails, or is told of a failure, is rung as well. It is
 * patient beyond the deadline: a rank that does not come because it waits in a call says so first, and knows more. */
int fab_peers_barrier(fab_peers *p, const char *phase)
{
    uint32_t n = p->open->n_ranks, mine = atomic_fetch_add(&p->own->barriers, 1) + 1;
    int64_t begin = tide_now_ns(), patience = p->deadline_ns / 2 < 1000000000 ? p->deadline_ns / 2 : 1000000000;

    for (uint32_t r = 0; r < n; r++)
        if (r != p->open->rank && fab_peers_here(p, r))
            ring(fab_peers_page(p, r));
    if (p->link)
        fab_link_barrier(p->link, mine, &p->calls);
    for (;;) {
        uint32_t seen = atomic_load(&p->own->bell), missing = 0;
        int64_t left = begin + p->deadline_ns + patience - tide_now_ns();
        while (missing < n && atomic_load(&fab_peers_page(p, missing)->barriers) >= mine)
            missing++;
        fab_peers_adopt(p); /* one who came too late for the others hears it */
        if (!fab_peers_failed(p) && missing < n && left <= 0)
            fail_barrier(p, phase, begin, mine, missing);
        if (fab_peers_failed(p))
            return fab_peers_failure(p, NULL);
        if (missing == n)
            return TIDE_OK;
        fab_futex_wait(&p->own->bell, seen, left);
    }
}

/* ---- failures ----------------------------------------------------------------------------------- */

/* First one wins. The record is complete before `failed` and `poison` can be seen. */
static bool keep_failure(fab_peers *p, const tide_failure *failure)
{
    bool first;
    pthread_mutex_lock(&p->lock);
    first = !fab_peers_failed(p);
    if (first) {
        p->own->failure = *failure;
        p->own->failure.size = sizeof *failure;
        atomic_store(&p->own->failed, 1);
        atomic_store_explicit(&p->failed, failure->code, memory_order_release);
    }
    pthread_mutex_unlock(&p->lock);
    if (first) {
        ring(p->own);
        p->hooks->failed(p->device);
        if (p->link)
            fab_link_fail(p->link, &p->own->failure);
        tide_log(0, "%s", failure->text);
    }
    return first;
}

void fab_peers_fail(fab_peers *p, const tide_failure *failure, bool spread)
{
    if (!keep_failure(p, failure) || !spread)
        return;
    for (uint32_t r = 0; r < p->open->n_ranks; r++) {
        uint32_t none = 0;
        if (r == p->open->rank || !fab_peers_here(p, r) ||
            !atomic_compare_exchange_strong(&fab_peers_page(p, r)->poison, &none, p->open->rank + 1))
            continue;
        ring(fab_peers_page(p, r));
        if (p->hooks->told)
            p->hooks->told(p->device, r);
    }
}

void fab_peers_adopt(fab_peers *p)
{
    uint32_t origin = atomic_load(&p->own->poison);
    tide_failure copy;
    if (!origin || origin > p->open->n_ranks || fab_peers_failed(p))
        return;
    copy = fab_peers_page(p, origin - 1)->failure;
    keep_failure(p, &copy);
}

void fab_peers_adopt_any(fab_peers *p)
{
    for (uint32_t r = 0; r < p->open->n_ranks && !fab_peers_failed(p); r++) {
        const fab_page *page = fab_peers_page(p, r);
        if (fab_peers_here(p, r) && atomic_load(&page->failed)) {
            tide_failure copy = page->failure;
            keep_failure(p, &copy);
        }
    }
}

int fab_peers_failure(fab_peers *p, tide_failure *out)
{
    tide_failure healthy = TIDE_FAILURE_INIT;
    if (!fab_peers_failed(p)) {
        if (out)
            *out = healthy;
        return TIDE_OK;
    }
    if (out)
        *out = p->own->failure;
    return tide_fail(p->own->failure.code, "%s", p->own->failure.text);
}

void fab_peers_last_wait(fab_peers *p, uint32_t peer, char text[96])
{
    uint64_t call = atomic_load(&fab_peers_page(p, peer)->crumb_call), op = atomic_load(&fab_peers_page(p, peer)->crumb_op);

    if (!fab_peers_here(p, peer) && !fab_link_where(p->link, peer, &call, &op))
        snprintf(text, 96, "rank %u does not say where it waits", peer);
    else
        snprintf(text, 96, "rank %u last waited in call %llu, op %llu", peer, (unsigned long long)call,
                 (unsigned long long)op);
}

void fab_peers_fail_wait(fab_peers *p, int code, const fab_waiting *wait, uint32_t peer)
{
    tide_failure f = TIDE_FAILURE_INIT;
    char theirs[96];

    f.code = code;
    f.rank = p->open->rank;
    f.peer = peer;
    f.call = wait->call;
    snprintf(f.phase, sizeof f.phase, "%s", wait->where->phase);
    if (code == TIDE_ERR_MISMATCH) {
        snprintf(f.text, sizeof f.text,
                 "rank %u and rank %u disagree: in call %llu (%s, op %u) the ranks make different calls, expected "
                 "the same group, dtype and parameters",
                 f.rank, peer, (unsigned long long)f.call, f.phase, wait->where->op);
    } else {
        double waited = (double)(tide_now_ns() - wait->enqueued) / 1e9;
        fab_peers_last_wait(p, peer, theirs);
        snprintf(f.text, sizeof f.text, "rank %u waited %.3f s for rank %u in %s of call %llu (op %u); %s", f.rank, waited,
                 peer, f.phase, (unsigned long long)f.call, wait->where->op, theirs);
    }
    fab_peers_fail(p, &f, true);
}

void fab_peers_fail_death(fab_peers *p, uint32_t peer, const fab_waiting *wait)
{
    tide_failure f = TIDE_FAILURE_INIT;
    char who[96];

    if (fab_peers_here(p, peer))
        snprintf(who, sizeof who, "rank %u (process %lld) died", peer, (long long)p->pids[peer]);
    else
        snprintf(who, sizeof who, "rank %u (on another machine) died or cannot be reached", peer);
    f.code = TIDE_ERR_PEER_DEAD;
    f.rank = p->open->rank;
    f.peer = peer;
    if (wait) {
        f.call = wait->call;
        snprintf(f.phase, sizeof f.phase, "%s", wait->where->phase);
        snprintf(f.text, sizeof f.text, "%s; rank %u was in %s of call %llu (op %u)", who, f.rank, f.phase,
                 (unsigned long long)f.call, wait->where->op);
    } else {
        snprintf(f.phase, sizeof f.phase, "idle");
        snprintf(f.text, sizeof f.text, "%s; rank %u was idle", who, f.rank);
    }
    fab_peers_fail(p, &f, false); /* every rank hears of every death: each names its own wait */
}

/* ---- ranks of other machines: what the link says, by its thread --------------------------------- */

static void link_passed(void *peers, uint32_t count)
{
    fab_peers *p = peers;
    for (uint32_t r = 0; r < p->open->n_ranks; r++)
        if (!fab_peers_here(p, r))
            atomic_store(&fab_peers_page(p, r)->barriers, count);
    ring(p->own);
}

static void link_gave_up(void *peers, uint64_t set_up, uint64_t rails)
{
    fab_peers *p = peers;
    for (uint32_t r = 0; r < p->open->n_ranks; r++)
        if (!fab_peers_here(p, r) && rails >> r % p->open->node_size & 1)
            atomic_store(&fab_peers_page(p, r)->given_up, set_up);
}

static void link_failed(void *peers, const tide_failure *failure)
{
    keep_failure(peers, failure);
}

/* Looking for the wait that it holds up takes a while: that is the watch's. */
static void link_died(void *peers, uint32_t rank)
{
    fab_peers *p = peers;
    uint32_t none = 0;
    atomic_compare_exchange_strong(&p->lost, &none, rank + 1);
    fab_peers_wake(p);
}

static bool link_has_left(void *peers, uint32_t rank)
{
    const fab_peers *p = peers;
    return fab_peers_here(p, rank) && atomic_load(&fab_peers_page(p, rank)->closed);
}

static void link_where(void *peers, uint64_t *call, uint64_t *op)
{
    const fab_peers *p = peers;
    *call = atomic_load(&p->own->crumb_call);
    *op = atomic_load(&p->own->crumb_op);
}

static const fab_link_hooks link_hooks = {link_passed, link_gave_up, link_failed, link_died, link_has_left, link_where};

void fab_peers_give_up(fab_peers *p, uint64_t set_up)
{
    atomic_store(&p->own->given_up, set_up);
    if (p->link)
        fab_link_give_up(p->link, set_up, p->open->rank % p->open->node_size);
}

bool fab_peers_given_up(const fab_peers *p, uint64_t set_up)
{
    for (uint32_t r = p->open->rank % p->open->node_size; r < p->open->n_ranks; r += p->open->node_size)
        if (atomic_load(&fab_peers_page(p, r)->given_up) >= set_up)
            return true;
    return false;
}

void fab_peers_called(fab_peers *p, uint64_t tag)
{
    p->calls.hash = tide_fnv_u64(p->calls.hash, tag);
    if (++p->calls.sequence % FAB_LINK_EVERY == 0 && p->link)
        fab_link_called(p->link, &p->calls);
}

/* ---- the watch ---------------------------------------------------------------------------------- */

static void look_at_lost(fab_peers *p)
{
    uint32_t lost = atomic_exchange(&p->lost, 0);
    if (lost && !fab_peers_failed(p))
        p->hooks->died(p->device, lost - 1);
}

static void look_at_processes(fab_peers *p)
{
    uint32_t n = p->open->n_ranks;
    for (uint32_t first = 0; first < n; first++) {
        if (p->watch_set[first + 1].fd < 0 || !p->watch_set[first + 1].revents)
            continue;
        close(p->watch_set[first + 1].fd);
        p->watch_set[first + 1].fd = -1;
        for (uint32_t r = first; r < n; r++) {
            if (p->pids[r] == p->pids[first] && !atomic_load(&fab_peers_page(p, r)->closed)) {
                p->hooks->died(p->device, r);
                break;
            }
        }
    }
}

/* watch_set[r + 1] is the process of rank r (the lowest rank stands for a process; fd -1: ignored), watch_set[0] the
 * event that wakes. */
static void *watch_main(void *argument)
{
    fab_peers *p = argument;

    while (!atomic_load(&p->stop)) {
        int timeout = p->hooks->tick ? p->hooks->tick(p->device) : -1;
        uint64_t woken;
        int n = poll(p->watch_set, p->open->n_ranks + 1, timeout);
        if (n < 0 && errno != EINTR)
            return NULL;
        if (n <= 0)
            continue;
        if (p->watch_set[0].revents && read(p->watch_set[0].fd, &woken, sizeof woken) < 0 && errno != EAGAIN)
            return NULL;
        if (!atomic_load(&p->stop)) {
            look_at_processes(p);
            look_at_lost(p);
        }
    }
    return NULL;
}

void fab_peers_wake(fab_peers *p)
{
    uint64_t one = 1;
    ssize_t ignored = p->watching ? write(p->watch_set[0].fd, &one, sizeof one) : 0; /* full: it is awake */
    (void)ignored;
}

int fab_peers_watch(fab_peers *p)
{
    uint32_t n = p->open->n_ranks, watched = 0;
    sigset_t all, before;
    int status = TIDE_OK;

    p->watch_set = tide_calloc((size_t)n + 1, sizeof *p->watch_set);
    if (!p->watch_set)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i <= n; i++)
        p->watch_set[i] = (struct pollfd){.fd = -1, .events = POLLIN};
    for (uint32_t r = 0; r < n && status == TIDE_OK; r++) {
        uint32_t first = 0;
        while (p->pids[first] != p->pids[r])
            first++;
        if (p->pids[r] <= 0 || first != r)
            continue;
        p->watch_set[r + 1].fd = (int)syscall(SYS_pidfd_open, p->pids[r], 0);
        if (p->watch_set[r + 1].fd < 0)
            status = errno == ESRCH ? tide_fail(TIDE_ERR_PEER_DEAD, "rank %u (process %lld) died during set-up", r,
                                                (long long)p->pids[r])
                                    : tide_fail(TIDE_ERR_SYSTEM, "pidfd_open of rank %u: %s", r, strerror(errno));
        watched++;
    }
    if (status != TIDE_OK || (!watched && !p->hooks->tick && !p->link))
        return status;
    p->watch_set[0].fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (p->watch_set[0].fd < 0)
        return tide_fail(TIDE_ERR_SYSTEM, "eventfd: %s", strerror(errno));
    sigfillset(&all); /* library threads take no signals: those are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    status = pthread_create(&p->watch, NULL, watch_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0)
        return tide_fail(TIDE_ERR_SYSTEM, "pthread_create: %s", strerror(status));
    p->watching = 1;
    return p->link ? fab_link_start(p->link, &link_hooks, p) : TIDE_OK;
}
