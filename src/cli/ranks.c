/* ranks.c - ranks as threads with an all-gather through memory, or as processes with the library's local bootstrap. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/ranks.h"

enum { GATHER_SECONDS = 120 };

void *ranks_alloc(size_t bytes)
{
    void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void ranks_free(void *memory, size_t bytes)
{
    if (memory)
        munmap(memory, bytes ? bytes : 1);
}

/* ---- threads ----------------------------------------------------------------------------- */

/* All ranks meet twice a gather: when all inputs are in, and when all have copied them out. */
typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t n_ranks, arrived;
    uint64_t round;
    bool broken;
    const void **inputs;
} meeting;

typedef struct thread_rank {
    rank_start start;
    meeting *meeting;
    int (*fn)(const rank_start *start);
    int result;
} thread_rank;

/* Called with the lock held; true once all ranks have come. */
static bool meet(meeting *m)
{
    uint64_t round = m->round;
    struct timespec until;

    if (++m->arrived == m->n_ranks) {
        m->arrived = 0;
        m->round++;
        pthread_cond_broadcast(&m->changed);
        return !m->broken;
    }
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += GATHER_SECONDS;
    while (m->round == round && !m->broken) {
        if (pthread_cond_timedwait(&m->changed, &m->lock, &until) == ETIMEDOUT) {
            m->broken = true;
            pthread_cond_broadcast(&m->changed);
        }
    }
    return !m->broken;
}

static int thread_allgather(void *context, const void *in, void *out, size_t bytes)
{
    thread_rank *self = context;
    meeting *m = self->meeting;
    bool ok;

    pthread_mutex_lock(&m->lock);
    m->inputs[self->start.rank] = in;
    ok = meet(m);
    for (uint32_t r = 0; ok && r < m->n_ranks; r++)
        memcpy((char *)out + r * bytes, m->inputs[r], bytes);
    ok = ok && meet(m);
    pthread_mutex_unlock(&m->lock);
    return ok ? 0 : -1;
}

static void *thread_main(void *context)
{
    thread_rank *self = context;

    self->result = self->fn(&self->start);
    if (self->result) {
        pthread_mutex_lock(&self->meeting->lock);
        self->meeting->broken = true;
        pthread_cond_broadcast(&self->meeting->changed);
        pthread_mutex_unlock(&self->meeting->lock);
    }
    return NULL;
}

static int run_threads(uint32_t n, int (*fn)(const rank_start *), void *job, char *text, size_t text_bytes)
{
    meeting m = {.n_ranks = n};
    thread_rank *ranks = calloc(n, sizeof *ranks);
    pthread_t *threads = calloc(n, sizeof *threads);
    uint32_t started = 0;
    int result = 0;

    m.inputs = calloc(n, sizeof *m.inputs);
    pthread_mutex_init(&m.lock, NULL);
    pthread_cond_init(&m.changed, NULL);
    if (!ranks || !threads || !m.inputs) {
        snprintf(text, text_bytes, "out of memory");
        result = -1;
        goto out;
    }
    for (; started < n; started++) {
        thread_rank *r = &ranks[started];
        r->start = (rank_start){started, n, thread_allgather, r, job};
        r->meeting = &m;
        r->fn = fn;
        if (pthread_create(&threads[started], NULL, thread_main, r) != 0) {
            snprintf(text, text_bytes, "rank %u could not be started as a thread", started);
            result = -1;
            pthread_mutex_lock(&m.lock);
            m.broken = true;
            pthread_cond_broadcast(&m.changed);
            pthread_mutex_unlock(&m.lock);
            break;
        }
    }
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
        if (ranks[i].result && !result)
            result = ranks[i].result;
    }
out:
    pthread_cond_destroy(&m.changed);
    pthread_mutex_destroy(&m.lock);
    free(m.inputs);
    free(threads);
    free(ranks);
    return result;
}

/* ---- processes --------------------------------------------------------------------------- */

static int process_main(const char *path, rank_start start, int (*fn)(const rank_start *))
{
    tide_bootstrap *bootstrap = NULL;
    int status = tide_bootstrap_local(path, start.rank, start.n_ranks, GATHER_SECONDS * 1000, &bootstrap);

    if (status != TIDE_OK) {
        fprintf(stderr, "rank %u: %s\n", start.rank, tide_last_error());
        return 1;
    }
    start.allgather = tide_bootstrap_allgather;
    start.allgather_context = bootstrap;
    status = fn(&start);
    tide_bootstrap_destroy(bootstrap);
    return status != 0;
}

static int run_processes(uint32_t n, int (*fn)(const rank_start *), void *job, char *text, size_t text_bytes)
{
    static unsigned serial;
    char path[64];
    pid_t *pids = calloc(n, sizeof *pids);
    uint32_t started = 0;
    int result = 0;

    if (!pids) {
        snprintf(text, text_bytes, "out of memory");
        return -1;
    }
    snprintf(path, sizeof path, "tide-cli-%ld-%u", (long)getpid(), serial++);
    fflush(NULL); /* else a child would print what the parent has buffered */
    for (; started < n; started++) {
        pids[started] = fork();
        if (pids[started] == 0)
            _exit(process_main(path, (rank_start){started, n, NULL, NULL, job}, fn));
        if (pids[started] < 0) {
            snprintf(text, text_bytes, "rank %u could not be started: fork: %s", started, strerror(errno));
            result = -1;
            break;
        }
    }
    for (uint32_t i = 0; result && i < started; i++) /* the others would wait for the missing rank */
        kill(pids[i], SIGKILL);
    for (uint32_t i = 0; i < started; i++) {
        int status = 0;
        while (waitpid(pids[i], &status, 0) < 0 && errno == EINTR)
            ;
        if (result)
            continue;
        if (WIFSIGNALED(status)) {
            snprintf(text, text_bytes, "rank %u was killed by signal %d", i, WTERMSIG(status));
            result = -1;
        } else {
            result = WEXITSTATUS(status);
        }
    }
    free(pids);
    return result;
}

int ranks_run(uint32_t n_ranks, bool procs, int (*fn)(const rank_start *start), void *job, char *text,
              size_t text_bytes)
{
    text[0] = '\0';
    return procs ? run_processes(n_ranks, fn, job, text, text_bytes) : run_threads(n_ranks, fn, job, text, text_bytes);
}
