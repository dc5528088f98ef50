/* device.c - opening and closing a host device. */
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "fabric/host/host.h"

enum { MAX_WORKERS = 8 };

static void host_close(fab_device *face);

static int host_agree(fab_device *face, int status)
{
    return fab_agree(&((host_device *)face)->open, status);
}

static int host_barrier(fab_device *face, const char *phase)
{
    return fab_peers_barrier(&((host_device *)face)->peers, phase);
}

static const fab_device_verbs host_verbs = FAB_DEVICE_VERBS(host);

static int workers_wanted(uint32_t *out)
{
    const char *text = getenv("TIDE_HOST_WORKERS");
    char *end;
    long n;

    *out = 1;
    if (!text || !*text)
        return TIDE_OK;
    n = strtol(text, &end, 10);
    if (*end || n < 1 || n > MAX_WORKERS)
        return tide_fail(TIDE_ERR_ARGUMENT, "TIDE_HOST_WORKERS: '%s' is not in 1..%d", text, MAX_WORKERS);
    *out = (uint32_t)n;
    return TIDE_OK;
}

static int open_local(host_device *d, const fab_open *desc)
{
    int status;

    d->open = *desc;
    status = fab_peers_init(&d->peers, &d->open, sizeof(host_control), &host_peers_hooks, d);
    if (status == TIDE_OK)
        status = workers_wanted(&d->n_workers);
    if (status != TIDE_OK)
        return status;
    d->face = (fab_device){.verbs = &host_verbs, .rail = &host_rail_verbs, .name = "host", .rank = desc->rank,
                           .n_ranks = desc->n_ranks, .node_size = desc->node_size, .rail_mapped = 1, .multicast = 1,
                           .granularity = (uint64_t)sysconf(_SC_PAGESIZE)};
    d->workers = tide_calloc(d->n_workers, sizeof *d->workers);
    return d->workers ? TIDE_OK : TIDE_ERR_MEMORY;
}

/* Library threads take no signals: those are the program's. */
static int start_threads(host_device *d)
{
    sigset_t all, before;
    int status = TIDE_OK;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; d->n_started < d->n_workers && status == TIDE_OK; d->n_started++) {
        status = pthread_create(&d->workers[d->n_started], NULL, host_worker, d);
        if (status != 0) {
            status = tide_fail(TIDE_ERR_SYSTEM, "pthread_create: %s", strerror(status));
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status == TIDE_OK ? fab_peers_watch(&d->peers) : status;
}

int fab_host_open(const fab_open *desc, fab_device **out)
{
    host_device *d;
    int status = fab_check_fork();

    *out = NULL;
    if (status != TIDE_OK)
        return status;
    d = tide_calloc(1, sizeof *d);
    if (d)
        pthread_mutex_init(&d->lock, NULL);
    status = fab_peers_meet(desc, d ? &d->peers : NULL, d ? open_local(d, desc) : TIDE_ERR_MEMORY);
    if (status == TIDE_OK) {
        d->own = host_page(d, desc->rank);
        status = fab_agree(desc, start_threads(d));
        if (status != TIDE_OK)
            fab_peers_leave(&d->peers);
    }
    if (status != TIDE_OK) {
        if (d)
            host_close(&d->face);
        return status;
    }
    *out = &d->face;
    return TIDE_OK;
}

static void host_close(fab_device *face)
{
    host_device *d = (host_device *)face;

    if (!d || atomic_load(&fab_forked_flag)) /* a child has no threads to stop, and the rest is the parent's */
        return;
    fab_peers_leave(&d->peers);
    if (d->own) {
        pthread_mutex_lock(&d->lock);
        d->stop = 1;
        pthread_mutex_unlock(&d->lock);
        host_ring_all(d->own);
    }
    for (uint32_t i = 0; i < d->n_started; i++)
        pthread_join(d->workers[i], NULL);
    fab_peers_clear(&d->peers);
    pthread_mutex_destroy(&d->lock);
    tide_free(d->workers);
    tide_free(d);
}

void fab_host_set_seed(fab_device *face, uint64_t seed)
{
    host_device *d = (host_device *)face;
    pthread_mutex_lock(&d->lock);
    d->seed = seed;
    pthread_mutex_unlock(&d->lock);
}

void fab_host_inject(fab_device *face, const fab_inject *inject)
{
    host_device *d = (host_device *)face;
    d->injecting = inject != NULL;
    if (inject)
        d->inject = *inject;
}

void fab_host_on_item(fab_device *face, void (*fn)(void *context, const char *phase), void *context)
{
    host_device *d = (host_device *)face;
    d->on_item = fn;
    d->on_item_context = context;
}
