/* fake_nccl.c - the fake NCCL's start and end, faults, errors, communicators. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fake_nccl_internal.h"

fake_nccl_world fake_nccl;

static const char *const names[] = {
#define X(field, name, result, parameters) name,
    NCCL_LIBRARY(X)
#undef X
};

static _Thread_local nccl_result late; /* a fault that comes with leave */

/* ---- in and out ------------------------------------------------------------------------------ */

static bool never(const void *none)
{
    (void)none;
    return false;
}

/* The call is the one that `at` counts down to. */
static bool hit(const char *function, uint64_t at, uint64_t *seen, const char *name)
{
    return at && (!function || strcmp(function, name) == 0) && ++*seen == at;
}

nccl_result fake_nccl_enter(enum nccl_function function, int needs)
{
    nccl_result injected = NCCL_OK;

    atomic_fetch_add(&fake.callers, 1);
    pthread_mutex_lock(&fake.lock);
    late = NCCL_OK;
    fake_nccl.inside++;
    if (!fake_nccl.running)
        return fake_nccl_refuse(NCCL_INTERNAL_ERROR, "NCCL is not there");
    fake_nccl.calls++;
    if (hit(fake_nccl.hang.function, fake_nccl.hang.at, &fake_nccl.hang.seen, names[function])) {
        fake_nccl.failed = true;
        fake_nccl_stand(never, NULL);
        return fake_nccl_refuse(NCCL_INTERNAL_ERROR, "%s stood still", names[function]);
    }
    if (hit(fake_nccl.fail.function, fake_nccl.fail.at, &fake_nccl.fail.seen, names[function])) {
        fake_nccl.failed = true;
        injected = fake_nccl_refuse(fake_nccl.fail.result, "a fault in %s", names[function]);
        if (!(needs & RELEASES))
            return injected;
        late = injected;
    }
    if (needs & NEEDS_CONTEXT && !fake_current()) {
        fake_complain("%s: without a current context", names[function]);
        return fake_nccl_refuse(NCCL_UNHANDLED_CUDA_ERROR, "%s: no device is current", names[function]);
    }
    return NCCL_OK;
}

nccl_result fake_nccl_leave(nccl_result result)
{
    nccl_result injected = late;
    late = NCCL_OK;
    fake_nccl.inside--;
    if (!fake_nccl.running)
        pthread_cond_broadcast(&fake.moved);
    atomic_fetch_sub(&fake.callers, 1);
    pthread_cond_signal(&fake.work);
    pthread_mutex_unlock(&fake.lock);
    return result == NCCL_OK ? injected : result;
}

bool fake_nccl_stand(bool (*holds)(const void *), const void *context)
{
    atomic_fetch_sub(&fake.callers, 1);
    fake_wake();
    while (fake_nccl.running && !holds(context))
        pthread_cond_wait(&fake.moved, &fake.lock);
    atomic_fetch_add(&fake.callers, 1);
    return fake_nccl.running;
}

nccl_result fake_nccl_refuse(nccl_result result, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(fake_nccl.last, sizeof fake_nccl.last, format, args);
    va_end(args);
    return result;
}

/* ---- start and end --------------------------------------------------------------------------- */

static nccl_library table;

const nccl_library *fake_nccl_start(const fake_nccl_options *options)
{
    pthread_mutex_lock(&fake.lock);
    fake_nccl = (fake_nccl_world){.running = true, .generation = fake_nccl.generation + 1, .next_id = 1, .options = *options};
    fake.registered = fake_nccl_registered;
    table = (nccl_library){
#define X(field, name, result, parameters) .field = fake_nccl_##field,
        NCCL_LIBRARY(X)
#undef X
            .version = options->version};
    pthread_mutex_unlock(&fake.lock);
    return &table;
}

static int leaks(char *text, size_t bytes)
{
    int n[3] = {0, 0, fake_nccl.open_groups};
    static const char *const what[] = {"communicators", "windows", "open groups"};
    size_t at = 0;

    text[0] = '\0';
    for (nccl_comm c = fake_nccl.comms; c; c = c->next) {
        n[0] += !c->gone;
        for (nccl_window w = c->windows; w; w = w->next)
            n[1] += !w->gone;
    }
    for (int i = 0; i < 3; i++)
        if (n[i] && at < bytes)
            at += (size_t)snprintf(text + at, bytes - at, "%s%d %s", at ? ", " : "", n[i], what[i]);
    return n[0] + n[1] + n[2];
}

int fake_nccl_leaks(char *text, size_t bytes)
{
    char own[128];
    int n;
    pthread_mutex_lock(&fake.lock);
    n = leaks(own, sizeof own);
    pthread_mutex_unlock(&fake.lock);
    if (text)
        snprintf(text, bytes, "%s", own);
    return n;
}

int fake_nccl_stop(void)
{
    char text[128];
    int n;

    pthread_mutex_lock(&fake.lock);
    n = leaks(text, sizeof text);
    if (n)
        fprintf(stderr, "fake NCCL: seed %llu: alive at the end: %s\n", (unsigned long long)fake.options.seed, text);
    fake_nccl.running = false;
    fake.registered = NULL;
    fake_nccl_queue_clear();
    fake_wake();
    while (fake_nccl.inside)
        pthread_cond_wait(&fake.moved, &fake.lock);
    while (fake_nccl.comms) {
        nccl_comm c = fake_nccl.comms;
        fake_nccl.comms = c->next;
        while (c->windows) {
            nccl_window w = c->windows;
            c->windows = w->next;
            free(w);
        }
        free(c->delivered);
        free(c->expected);
        free(c);
    }
    while (fake_nccl.cliques) {
        fake_clique *q = fake_nccl.cliques;
        fake_nccl.cliques = q->next;
        free(q);
    }
    pthread_mutex_unlock(&fake.lock);
    return n;
}

/* ---- faults ---------------------------------------------------------------------------------- */

#define SET_FAULT(...)                         \
    do {                                       \
        pthread_mutex_lock(&fake.lock);        \
        __VA_ARGS__;                           \
        fake_nccl.failed = false;              \
        pthread_mutex_unlock(&fake.lock);      \
    } while (0)

void fake_nccl_fail(const char *function, uint64_t n, nccl_result result)
{
    SET_FAULT(fake_nccl.fail.function = function, fake_nccl.fail.at = n, fake_nccl.fail.seen = 0,
              fake_nccl.fail.result = result);
}
void fake_nccl_hang(const char *function, uint64_t n)
{
    SET_FAULT(fake_nccl.hang.function = function, fake_nccl.hang.at = n, fake_nccl.hang.seen = 0);
}
void fake_nccl_lose_completion(uint64_t n) { SET_FAULT(fake_nccl.completion.at = n, fake_nccl.completion.seen = 0); }
void fake_nccl_lose_signal(uint64_t n) { SET_FAULT(fake_nccl.signal.at = n, fake_nccl.signal.seen = 0); }
void fake_nccl_async_error(uint64_t n, nccl_result result)
{
    SET_FAULT(fake_nccl.async.at = n, fake_nccl.async.seen = 0, fake_nccl.async.result = result);
}

bool fake_nccl_failed(void)
{
    bool failed;
    pthread_mutex_lock(&fake.lock);
    failed = fake_nccl.failed;
    pthread_mutex_unlock(&fake.lock);
    return failed;
}

uint64_t fake_nccl_calls(void)
{
    uint64_t n;
    pthread_mutex_lock(&fake.lock);
    n = fake_nccl.calls;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

/* ---- errors ---------------------------------------------------------------------------------- */

const char *fake_nccl_GetErrorString(nccl_result result)
{
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                        "NCCL operation in progress", "NCCL operation timed out"};
    return result >= 0 && (size_t)result < sizeof texts / sizeof texts[0] ? texts[result] : "unknown result code";
}

/* The process', whatever the communicator; ours to keep, since another thread may fail meanwhile. */
const char *fake_nccl_GetLastError(nccl_comm comm)
{
    static _Thread_local char own[sizeof fake_nccl.last];
    (void)comm;
    pthread_mutex_lock(&fake.lock);
    memcpy(own, fake_nccl.last, sizeof own);
    pthread_mutex_unlock(&fake.lock);
    return own;
}

nccl_result fake_nccl_good(nccl_comm comm, const char *what)
{
    if (!comm || comm->magic != MAGIC_COMM)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: no communicator", what);
    if (comm->gone) {
        fake_complain("%s: a communicator that has been given back", what);
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: a communicator that has been given back", what);
    }
    if (comm->finalized && strcmp(what, names[NCCL_FAKE_CommDestroy]) != 0)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: the communicator is finalized", what);
    if (comm->async != NCCL_OK)
        return fake_nccl_refuse(comm->async, "%s: the communicator has failed", what);
    return NCCL_OK;
}

nccl_result fake_nccl_CommGetAsyncError(nccl_comm comm, nccl_result *error)
{
    nccl_result r = NCCL_OK;
    pthread_mutex_lock(&fake.lock);
    if (!fake_nccl.running || !comm || comm->magic != MAGIC_COMM || comm->gone || !error)
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "%s: no communicator", names[NCCL_FAKE_CommGetAsyncError]);
    else
        *error = comm->async;
    pthread_mutex_unlock(&fake.lock);
    return r;
}

/* ---- communicators --------------------------------------------------------------------------- */

/* An id is good in the process that made it. */
typedef struct id_content { uint64_t magic, number, generation; int64_t process; } id_content;
static const uint64_t id_magic = 0x66616b656e63636c;

nccl_result fake_nccl_GetUniqueId(nccl_id *id)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_GetUniqueId, 0);
    if (r == NCCL_OK && !id)
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclGetUniqueId: NULL");
    if (r == NCCL_OK) {
        id_content c = {id_magic, fake_nccl.next_id++, fake_nccl.generation, getpid()};
        memset(id, 0, sizeof *id);
        memcpy(id, &c, sizeof c);
    }
    return fake_nccl_leave(r);
}

/* The config that counts, and whether it is one. */
static nccl_result read_config(const nccl_config *config, nccl_config *out)
{
    *out = (nccl_config)NCCL_CONFIG_INIT;
    if (config)
        *out = *config;
    if (out->size != sizeof *out || out->magic != NCCL_MAGIC)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommInitRankConfig: a config that was not initialized");
    if ((int)out->version > fake_nccl.options.version)
        return fake_nccl_refuse(NCCL_INVALID_USAGE, "ncclCommInitRankConfig: a config of version %u, the library is %d",
                                out->version, fake_nccl.options.version);
    if (out->num_rma_ctx == NCCL_UNDEF)
        out->num_rma_ctx = 1;
    if (out->num_rma_sig == NCCL_UNDEF)
        out->num_rma_sig = 1;
    if (out->num_rma_ctx < 0 || out->num_rma_sig < 1)
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommInitRankConfig: numRmaCtx %d, numRmaSig %d",
                                out->num_rma_ctx, out->num_rma_sig);
    if (out->blocking != NCCL_UNDEF && out->blocking != 1) {
        fake_complain("ncclCommInitRankConfig: a communicator that does not block");
        return fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommInitRankConfig: blocking %d", out->blocking);
    }
    return NCCL_OK;
}

static fake_clique *clique_of(uint64_t id, int n_ranks)
{
    fake_clique *q = fake_nccl.cliques;
    while (q && q->id != id)
        q = q->next;
    if (!q) {
        q = calloc(1, sizeof *q);
        q->id = id;
        q->n_ranks = n_ranks;
        q->next = fake_nccl.cliques;
        fake_nccl.cliques = q;
    }
    return q;
}

static bool all_joined(const void *context)
{
    const fake_clique *q = context;
    return q->joined == q->n_ranks;
}

/* All have come. */
static void judge(fake_clique *q)
{
    for (int a = 0; a < q->n_ranks; a++) {
        for (int b = 0; b < a; b++) {
            if (q->ranks[a]->device == q->ranks[b]->device && !fake_nccl.options.shared_devices) {
                q->wrong = NCCL_INVALID_USAGE;
                snprintf(q->why, sizeof q->why, "Duplicate GPU detected: ranks %d and %d are both on device %d", b, a,
                         q->ranks[a]->device);
            }
            if (q->ranks[a]->n_ctx != q->ranks[b]->n_ctx || q->ranks[a]->n_sig != q->ranks[b]->n_sig)
                fake_complain("ncclCommInitRankConfig: ranks %d and %d differ in their contexts or signals", b, a);
        }
    }
}

static nccl_comm join_clique(fake_clique *q, int rank, const nccl_config *config)
{
    nccl_comm c = calloc(1, sizeof *c);
    size_t n = (size_t)q->n_ranks * (size_t)config->num_rma_sig * (size_t)config->num_rma_ctx;

    *c = (struct nccl_comm){.magic = MAGIC_COMM, .next = fake_nccl.comms, .clique = q, .rank = rank,
                            .device = fake_current()->device, .n_ctx = config->num_rma_ctx, .n_sig = config->num_rma_sig,
                            .eager = config->rma_eager_init == 1};
    c->delivered = calloc(n + 1, sizeof(uint64_t));
    c->expected = calloc(n + 1, sizeof(uint64_t));
    fake_nccl.comms = c;
    q->ranks[rank] = c;
    if (++q->joined == q->n_ranks)
        judge(q);
    return c;
}

nccl_result fake_nccl_CommInitRankConfig(nccl_comm *comm, int n_ranks, nccl_id id, int rank, nccl_config *config)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommInitRankConfig, NEEDS_CONTEXT);
    nccl_config own;
    id_content content;
    fake_clique *q = NULL;
    nccl_comm c;

    memcpy(&content, &id, sizeof content);
    if (comm)
        *comm = NULL;
    if (r == NCCL_OK && (!comm || n_ranks < 1 || n_ranks > FAKE_NCCL_MAX_RANKS || rank < 0 || rank >= n_ranks))
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommInitRankConfig: rank %d of %d", rank, n_ranks);
    if (r == NCCL_OK)
        r = read_config(config, &own);
    if (r == NCCL_OK && (content.magic != id_magic || content.generation != fake_nccl.generation))
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommInitRankConfig: not an id that ncclGetUniqueId gave");
    if (r == NCCL_OK && content.process != getpid()) {
        fake_complain("ncclCommInitRankConfig: an id of another process: this fake's ranks are threads of one");
        r = fake_nccl_refuse(NCCL_SYSTEM_ERROR, "ncclCommInitRankConfig: the ranks are not threads of one process");
    }
    if (r == NCCL_OK) {
        q = clique_of(content.number, n_ranks);
        if (q->n_ranks != n_ranks || q->ranks[rank]) {
            fake_complain("ncclCommInitRankConfig: rank %d of %d comes to a communicator of %d%s", rank, n_ranks, q->n_ranks,
                          q->ranks[rank] ? ", which has such a rank" : "");
            r = fake_nccl_refuse(NCCL_INVALID_USAGE, "ncclCommInitRankConfig: the ranks differ in what they say");
        }
    }
    if (r == NCCL_OK) {
        c = join_clique(q, rank, &own);
        if (!fake_nccl_stand(all_joined, q))
            r = fake_nccl_refuse(NCCL_INTERNAL_ERROR, "ncclCommInitRankConfig: not all ranks have come");
        else if (q->wrong != NCCL_OK)
            r = fake_nccl_refuse(q->wrong, "%s", q->why);
        c->gone = c->aborting = r != NCCL_OK;
        if (r == NCCL_OK)
            *comm = c;
    }
    return fake_nccl_leave(r);
}

nccl_result fake_nccl_CommQueryProperties(nccl_comm comm, nccl_properties *properties)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommQueryProperties, 0);
    if (r == NCCL_OK)
        r = fake_nccl_good(comm, "ncclCommQueryProperties");
    if (r == NCCL_OK && (!properties || properties->magic != NCCL_MAGIC || properties->size != sizeof *properties ||
                         (int)properties->version > fake_nccl.options.version))
        r = fake_nccl_refuse(NCCL_INVALID_USAGE, "ncclCommQueryProperties: properties that were not initialized");
    if (r == NCCL_OK) {
        properties->rank = comm->rank;
        properties->n_ranks = comm->clique->n_ranks;
        properties->cuda_dev = properties->nvml_dev = comm->device;
        properties->device_api_support = !fake_nccl.options.null_windows;
        properties->multimem_support = false;
        properties->gin_type = 0;
        properties->n_lsa_teams = 1;
        properties->host_rma_support =
            comm->n_ctx > 0 && !fake_nccl.options.no_host_rma && !fake_nccl.options.null_windows;
    }
    return fake_nccl_leave(r);
}

static bool quiet(const void *context)
{
    const struct nccl_comm *c = context;
    return c->finished == c->issued || c->released;
}

/* Nobody of the communicator goes on using it. */
static bool all_finalized(const void *context)
{
    const struct nccl_comm *c = context;
    for (int i = 0; i < c->clique->n_ranks; i++)
        if (!c->clique->ranks[i]->finalized && !c->clique->ranks[i]->aborting)
            return c->aborting;
    return true;
}

/* Waits for the communicator's operations, then for the other ranks. */
static nccl_result finalize(nccl_comm comm, const char *what)
{
    for (nccl_window w = comm->windows; w; w = w->next)
        if (!w->gone)
            fake_complain("%s: a window of the communicator is registered", what);
    fake_nccl_stand(quiet, comm);
    comm->finalized = true;
    fake_nccl_stand(all_finalized, comm);
    if (comm->aborting || !fake_nccl.running)
        return fake_nccl_refuse(NCCL_INTERNAL_ERROR, "%s: the communicator has been aborted", what);
    return NCCL_OK;
}

nccl_result fake_nccl_CommFinalize(nccl_comm comm)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommFinalize, RELEASES);
    if (r == NCCL_OK)
        r = fake_nccl_good(comm, names[NCCL_FAKE_CommFinalize]);
    if (r == NCCL_OK)
        r = finalize(comm, "ncclCommFinalize");
    return fake_nccl_leave(r);
}

/* What is registered with it goes with it. */
static void give_back(nccl_comm comm)
{
    comm->gone = true;
    for (nccl_window w = comm->windows; w; w = w->next)
        w->gone = true;
}

nccl_result fake_nccl_CommDestroy(nccl_comm comm)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommDestroy, RELEASES);
    if (r == NCCL_OK)
        r = fake_nccl_good(comm, names[NCCL_FAKE_CommDestroy]);
    if (r == NCCL_OK && !comm->finalized)
        r = finalize(comm, "ncclCommDestroy");
    if (r == NCCL_OK)
        give_back(comm);
    return fake_nccl_leave(r);
}

/* Calls of other threads that stand in the communicator go on; streams do so when this abort is of the kind that releases
 * them, else it waits until their operations have ended by themselves. */
nccl_result fake_nccl_CommAbort(nccl_comm comm)
{
    nccl_result r = fake_nccl_enter(NCCL_FAKE_CommAbort, RELEASES);
    if (r == NCCL_OK && (!comm || comm->magic != MAGIC_COMM))
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommAbort: no communicator");
    if (r == NCCL_OK && (comm->gone || comm->aborting)) {
        fake_complain("ncclCommAbort: a communicator that has been given back");
        r = fake_nccl_refuse(NCCL_INVALID_ARGUMENT, "ncclCommAbort: a communicator that has been given back");
    }
    if (r == NCCL_OK) {
        comm->aborting = true;
        comm->released = fake_nccl.options.abort_releases;
        if (!fake_nccl_stand(quiet, comm))
            r = fake_nccl_refuse(NCCL_INTERNAL_ERROR, "ncclCommAbort: operations stand in the communicator");
        else
            give_back(comm);
    }
    return fake_nccl_leave(r);
}
