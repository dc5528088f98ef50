/* setup.c - calls of NCCL that wait for other ranks, without a limit of NCCL's: each in a thread that can be left. */
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "fabric/nccl/nccl.h"

enum { SLICE_MS = 20 }; /* how soon a failure, or a rank that has given up, is noticed */

struct nccl_job {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    bool ended, left;
    const nccl_library *library;
    const cuda_driver *driver;
    cu_context context;
    nccl_call call;
};

static const char *const names[] = {
    [NCCL_DO_ID] = "ncclGetUniqueId",
    [NCCL_DO_INIT] = "ncclCommInitRankConfig",
    [NCCL_DO_QUERY] = "ncclCommQueryProperties",
    [NCCL_DO_REGISTER] = "ncclCommWindowRegister",
    [NCCL_DO_DEREGISTER] = "ncclCommWindowDeregister",
    [NCCL_DO_FINALIZE] = "ncclCommFinalize",
    [NCCL_DO_DESTROY] = "ncclCommDestroy",
    [NCCL_DO_ABORT] = "ncclCommAbort",
};

static nccl_result carry_out(const nccl_library *l, nccl_call *c)
{
    switch (c->function) {
    case NCCL_DO_ID:
        return l->GetUniqueId(&c->id);
    case NCCL_DO_INIT:
        return l->CommInitRankConfig(&c->comm, c->n_ranks, c->id, c->rank, &c->config);
    case NCCL_DO_QUERY:
        return l->CommQueryProperties(c->comm, &c->properties);
    case NCCL_DO_REGISTER:
        return l->CommWindowRegister(c->comm, c->base, c->bytes, &c->window, NCCL_WIN_SYMMETRIC);
    case NCCL_DO_DEREGISTER:
        return l->CommWindowDeregister(c->comm, c->window);
    case NCCL_DO_FINALIZE:
        return l->CommFinalize(c->comm);
    case NCCL_DO_DESTROY:
        return l->CommDestroy(c->comm);
    default:
        return l->CommAbort(c->comm);
    }
}

static void job_free(nccl_job *j)
{
    pthread_cond_destroy(&j->moved);
    pthread_mutex_destroy(&j->lock);
    tide_free(j);
}

static void *job_main(void *argument)
{
    nccl_job *j = argument;
    const nccl_library *library = j->library;
    const cuda_driver *driver = j->driver;
    nccl_call call = j->call;
    cu_context ignored;
    bool left, pushed = driver->CtxPush(j->context) == CU_OK || driver->CtxPush(j->context) == CU_OK;

    call.result = pushed ? carry_out(library, &call) : NCCL_UNHANDLED_CUDA_ERROR;
    pthread_mutex_lock(&j->lock);
    j->call = call;
    j->ended = true;
    left = j->left;
    pthread_cond_broadcast(&j->moved);
    pthread_mutex_unlock(&j->lock); /* if it has not been left, it may be gone now */
    if (left && call.function == NCCL_DO_INIT && call.result == NCCL_OK) /* nobody else knows of it */
        library->CommAbort(call.comm);
    if (pushed)
        driver->CtxPop(&ignored);
    if (left)
        job_free(j);
    return NULL;
}

int nccl_begin(const cuda_device *d, const nccl_call *call, nccl_job **out)
{
    nccl_job *j = tide_calloc(1, sizeof *j);
    pthread_condattr_t attributes;
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t all, before;
    int status;

    *out = NULL;
    if (!j)
        return TIDE_ERR_MEMORY;
    j->library = nccl_of(d)->library;
    j->driver = d->driver;
    j->context = d->context;
    j->call = *call;
    pthread_mutex_init(&j->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&j->moved, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* library threads take no signals: those are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    status = pthread_create(&thread, &detached, job_main, j);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    if (status != 0) {
        job_free(j);
        return tide_fail(TIDE_ERR_SYSTEM, "pthread_create: %s", strerror(status));
    }
    *out = j;
    return TIDE_OK;
}

bool nccl_ended(nccl_job *j, int64_t limit_ns, nccl_call *call)
{
    int64_t until = tide_now_ns() + limit_ns;
    struct timespec t = {until / 1000000000, until % 1000000000};
    bool ended;

    pthread_mutex_lock(&j->lock);
    while (!j->ended && pthread_cond_timedwait(&j->moved, &j->lock, &t) == 0)
        continue;
    ended = j->ended;
    if (ended)
        *call = j->call;
    pthread_mutex_unlock(&j->lock);
    return ended;
}

void nccl_leave(nccl_job *j)
{
    bool ended;

    if (!j)
        return;
    pthread_mutex_lock(&j->lock);
    j->left = true;
    ended = j->ended;
    pthread_mutex_unlock(&j->lock);
    if (ended)
        job_free(j);
}

int nccl_do(cuda_device *d, nccl_call *call, const char *lane, uint64_t set_up, bool *alone)
{
    const char *name = names[call->function];
    int64_t begin = tide_now_ns(), waited = 0;
    nccl_job *j;
    int status = nccl_begin(d, call, &j);
    char what[96];

    *alone = false;
    if (status != TIDE_OK)
        return status;
    snprintf(what, sizeof what, "lane %s: %s", lane, name);
    while (!nccl_ended(j, (int64_t)SLICE_MS * 1000000, call)) {
        fab_peers_adopt(&d->peers);
        waited = tide_now_ns() - begin;
        if (fab_peers_failed(&d->peers))
            status = fab_peers_failure(&d->peers, NULL);
        else if (set_up && fab_peers_given_up(&d->peers, set_up))
            *alone = true;
        else if (waited >= d->peers.deadline_ns)
            status = tide_fail(TIDE_ERR_DEADLINE, "%s has not returned for %.3f s", what, (double)waited / 1e9);
        if (status != TIDE_OK || *alone) {
            nccl_leave(j);
            return status;
        }
    }
    nccl_leave(j);
    return nccl_check(nccl_of(d)->library, NULL, call->result, what);
}
