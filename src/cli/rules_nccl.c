/* rules_nccl.c - an NCCL is held to all the rules, a line each: ranks as threads, and a limit on everything. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "cli/rules_nccl.h"

enum { LIMIT_MS = 40000 }; /* a rule on all ranks; none takes a tenth of it */

double nccl_rules_ms(int64_t since) { return (double)(tide_now_ns() - since) / 1e6; }

static struct timespec in_ms(int64_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

bool nccl_rules_meet(nccl_side *r)
{
    nccl_world *w = r->w;
    struct timespec until = in_ms(PATIENCE_MS);
    uint64_t meeting;
    bool all;

    pthread_mutex_lock(&w->lock);
    meeting = w->meetings;
    if (++w->waiting == w->n_ranks) {
        w->waiting = 0;
        w->meetings++;
        pthread_cond_broadcast(&w->moved);
    }
    while (w->meetings == meeting && !w->failed)
        if (pthread_cond_timedwait(&w->moved, &w->lock, &until) == ETIMEDOUT)
            break;
    all = w->meetings != meeting && !w->failed;
    r->deserted |= !all;
    pthread_mutex_unlock(&w->lock);
    return all;
}

/* ---- a rule on a rank ------------------------------------------------------------------------ */

static enum outcome prepare(nccl_side *r, const nccl_rule *rule)
{
    nccl_config config = nccl_rules_config();
    enum outcome o = OK;

    MUST(nccl_rules_clear(r));
    for (int i = 0; i < rule->comms && o == OK; i++) {
        o = nccl_rules_init(r, i, &config);
        if (o == OK)
            o = nccl_rules_register(r, i);
    }
    return o;
}

/* After a rule that all ranks kept everything has to go in order; else whatever is left is aborted. */
static enum outcome clean(nccl_side *r, bool kept)
{
    enum outcome o = OK;

    if (r->grouped)
        r->n->GroupEnd();
    r->grouped = false;
    for (int i = 0; i < NCCL_RULES_GATES; i++)
        nccl_rules_open(r, i);
    for (int i = 0; i < NCCL_RULES_STREAMS && kept && o == OK; i++)
        if (!nccl_rules_dry(r, i))
            o = snprintf(r->why, sizeof r->why, "rank %d: stream %d does not come to rest", r->rank, i) ? FAILED : OK;
    for (int i = 0; i < NCCL_RULES_COMMS && kept && o == OK; i++)
        if (r->comm[i])
            o = nccl_rules_tear_down(r, i);
    for (int i = 0; i < NCCL_RULES_COMMS && !r->w->spoiled; i++) {
        nccl_result result;
        double ms;
        if (r->comm[i])
            nccl_rules_abort(r, i, &result, &ms);
        r->comm[i] = NULL;
        r->window[i] = NULL;
    }
    nccl_rules_end_calls(r);
    for (int i = 0; i < NCCL_RULES_STREAMS; i++)
        if (!r->w->spoiled && !nccl_rules_dry(r, i))
            r->w->spoiled = true;
    if (!r->w->spoiled)
        nccl_rules_memory_free(r, &r->extra);
    return o;
}

typedef struct turn { nccl_side *r; const nccl_rule *rule; } turn;

/* Tells the others of it, and waits until they know theirs. */
static bool all_kept(nccl_side *r)
{
    nccl_world *w = r->w;
    bool kept;

    pthread_mutex_lock(&w->lock);
    if (r->outcome == FAILED)
        w->failed = r->told = true;
    w->ended++;
    pthread_cond_broadcast(&w->moved);
    while (w->ended < w->n_ranks) /* the limit on the rule is the limit on this */
        pthread_cond_wait(&w->moved, &w->lock);
    kept = !w->failed;
    pthread_mutex_unlock(&w->lock);
    return kept;
}

static void *take_turn(void *context)
{
    turn *t = context;
    nccl_side *r = t->r;
    enum outcome cleaned;
    bool kept;

    r->why[0] = r->note[0] = '\0';
    r->outcome = FAILED;
    r->deserted = r->told = false;
    if (r->d->CtxPush(r->context) == CU_OK) {
        r->outcome = prepare(r, t->rule);
        if (r->outcome == OK)
            r->outcome = t->rule->run(r);
        kept = all_kept(r);
        atomic_store(&r->call, "the tear-down");
        cleaned = clean(r, kept);
        atomic_store(&r->call, NULL);
        if (r->outcome != FAILED && cleaned == FAILED)
            r->outcome = FAILED;
        r->d->CtxPop(NULL);
    } else {
        all_kept(r);
    }
    pthread_mutex_lock(&r->w->lock);
    r->w->ended++;
    pthread_cond_broadcast(&r->w->moved);
    pthread_mutex_unlock(&r->w->lock);
    return NULL;
}

/* A rank does not come back: nothing can be given back, and nothing can be asked any more. */
static void give_up(nccl_world *w, const nccl_rule *rule, FILE *out)
{
    char text[1024];
    size_t at = (size_t)snprintf(text, sizeof text, "%-8s %s: stuck for %d s:", "FAILED", rule->name, LIMIT_MS / 1000);

    pthread_mutex_lock(&w->lock); /* a rank that has failed, and is waited for, has said why before */
    for (int i = 0; i < w->n_ranks && at < sizeof text; i++) {
        const nccl_side *r = &w->side[i];
        const char *call = atomic_load(&r->call);
        at += (size_t)snprintf(text + at, sizeof text - at, "%s rank %d %s%s", i ? ";" : "", i,
                               r->told ? r->why : call ? "in " : "in no call", !r->told && call ? call : "");
    }
    pthread_mutex_unlock(&w->lock);
    fprintf(out, "%s\n", text);
    fflush(out);
    if (out != stdout) /* what is in a file may not be read by anybody after this */
        fprintf(stderr, "%s\n", text);
    _exit(1);
}

static enum outcome run_on_all(nccl_world *w, const nccl_rule *rule, FILE *out)
{
    struct timespec until = in_ms(LIMIT_MS);
    pthread_t thread[NCCL_RULES_RANKS];
    turn turns[NCCL_RULES_RANKS];
    enum outcome o = OK;
    int late = 0;

    w->failed = false;
    w->waiting = w->ended = 0;
    for (int i = 0; i < w->n_ranks; i++) {
        turns[i] = (turn){&w->side[i], rule};
        if (pthread_create(&thread[i], NULL, take_turn, &turns[i]) != 0)
            give_up(w, rule, out);
    }
    pthread_mutex_lock(&w->lock);
    while (w->ended < 2 * w->n_ranks && late != ETIMEDOUT)
        late = pthread_cond_timedwait(&w->moved, &w->lock, &until);
    pthread_mutex_unlock(&w->lock);
    if (late == ETIMEDOUT)
        give_up(w, rule, out);
    for (int i = 0; i < w->n_ranks; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < w->n_ranks && o != FAILED; i++)
        o = w->side[i].outcome != OK ? w->side[i].outcome : o;
    return o;
}

/* What there is to say beside the outcome: the first rank's that has something, and that no other one left alone. */
static const char *remark(const nccl_world *w, enum outcome o)
{
    const char *said = "";
    for (int deserted = 1; deserted >= 0; deserted--)
        for (int i = w->n_ranks - 1; i >= 0; i--) {
            const nccl_side *r = &w->side[i];
            const char *own = o == OK ? r->note : r->outcome == o ? r->why : "";
            if (own[0] && r->deserted == (deserted == 1))
                said = own;
        }
    return said;
}

/* ---- all of them ----------------------------------------------------------------------------- */

static bool begin(nccl_world *w, char *why, size_t bytes)
{
    cu_result result = w->d->Init(0);

    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->moved, NULL);
    if (result == CU_OK)
        result = w->d->DeviceGetCount(&w->n_devices);
    if (result == CU_OK && w->n_devices < 1)
        result = CU_NO_DEVICE;
    w->n_devices = w->n_devices > NCCL_RULES_RANKS ? NCCL_RULES_RANKS : w->n_devices;
    w->n_ranks = w->n_devices > 1 ? w->n_devices : 2;
    w->shared = w->n_devices == 1;
    for (int i = 0; i < w->n_ranks && result == CU_OK; i++) {
        nccl_side *r = &w->side[i];
        void *host = NULL;
        *r = (nccl_side){.w = w, .n = w->n, .d = w->d, .rank = i, .ranks = w->n_ranks, .next = (i + 1) % w->n_ranks,
                         .previous = (i + w->n_ranks - 1) % w->n_ranks, .device = i % w->n_devices};
        result = w->d->PrimaryRetain(&r->context, r->device);
        if (result == CU_OK)
            result = w->d->CtxPush(r->context);
        if (result != CU_OK)
            break;
        result = w->d->MemHostAlloc(&host, NCCL_RULES_HALF + NCCL_RULES_GATES * 8, CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED);
        r->host = host;
        if (result == CU_OK)
            result = w->d->StreamCreate(&r->own_stream, CU_STREAM_NON_BLOCKING, 0);
        /* Once for all rules: streams that come and go would share a hardware queue with the rank's own at times. */
        for (int k = 0; k < NCCL_RULES_STREAMS && result == CU_OK; k++)
            result = w->d->StreamCreate(&r->stream[k], CU_STREAM_NON_BLOCKING, 0);
        if (result == CU_OK && !nccl_rules_memory(r, NULL, &r->memory))
            result = CU_OUT_OF_MEMORY;
        w->d->CtxPop(NULL);
    }
    if (result != CU_OK)
        snprintf(why, bytes, "the driver does not start: error %d", result);
    return result == CU_OK;
}

static void end(nccl_world *w)
{
    for (int i = 0; i < w->n_ranks && !w->spoiled; i++) {
        nccl_side *r = &w->side[i];
        if (!r->context || w->d->CtxPush(r->context) != CU_OK)
            continue;
        nccl_rules_memory_free(r, &r->memory);
        for (int k = 0; k < NCCL_RULES_STREAMS; k++)
            if (r->stream[k])
                w->d->StreamDestroy(r->stream[k]);
        if (r->own_stream)
            w->d->StreamDestroy(r->own_stream);
        if (r->host)
            w->d->MemFreeHost(r->host);
        w->d->CtxPop(NULL);
        w->d->PrimaryRelease(r->device);
    }
    pthread_cond_destroy(&w->moved);
    pthread_mutex_destroy(&w->lock);
}

rules_count nccl_rules_run(const nccl_library *library, const cuda_driver *driver, const char *word, int grace_ms, FILE *out,
                           bool *spoiled)
{
    static const char *const words[] = {"ok", "FAILED", "not run"};
    static const nccl_rule *const lists[] = {nccl_rules_of_setup, nccl_rules_of_transfers, nccl_rules_of_order,
                                             nccl_rules_of_aborts};
    nccl_world *w = calloc(1, sizeof *w);
    rules_count count = {0, 0, 0};
    char broken[200] = "";

    *spoiled = false;
    if (!w)
        return count;
    w->n = library;
    w->d = driver;
    w->grace_ms = grace_ms;
    begin(w, broken, sizeof broken);
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        for (const nccl_rule *rule = lists[i]; rule->name; rule++) {
            if (word && !strstr(rule->name, word))
                continue;
            enum outcome o = broken[0] ? NOT_RUN : run_on_all(w, rule, out);
            const char *said = broken[0] ? broken : remark(w, o);
            fprintf(out, "%-8s %s%s%s\n", words[o], rule->name, said[0] ? ": " : "", said);
            fflush(out);
            *(o == OK ? &count.ok : o == FAILED ? &count.failed : &count.not_run) += 1;
            if (w->spoiled && !broken[0])
                snprintf(broken, sizeof broken, "a call or a stream hangs since '%s'", rule->name);
        }
    }
    *spoiled = w->spoiled;
    fprintf(out, "NCCL rules: version %d.%d.%d, %d ranks on %d devices: %d ok, %d failed, %d not run\n", library->version / 10000,
            library->version / 100 % 100, library->version % 100, w->n_ranks, w->n_devices, count.ok, count.failed,
            count.not_run);
    end(w);
    if (!*spoiled)
        free(w);
    return count;
}
