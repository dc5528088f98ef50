/* threads.c - ranks as threads of one process. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "threads.h"

struct threads_group {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint32_t n_ranks, arrived;
    uint64_t generation; /* barriers passed */
    bool broken;
    struct { const void *in; size_t bytes; } *post; /* a rank */
};

typedef struct threads_start {
    threads_rank rank;
    threads_fn fn;
    pthread_t thread;
    int result;
} threads_start;

static void leave(threads_group *g)
{
    pthread_mutex_lock(&g->lock);
    g->broken = true;
    pthread_cond_broadcast(&g->moved);
    pthread_mutex_unlock(&g->lock);
}

/* Returns true when all ranks came. Called with the lock held. */
static bool barrier(threads_group *g)
{
    uint64_t mine = g->generation;
    struct timespec until;

    if (g->broken)
        return false;
    if (++g->arrived == g->n_ranks) {
        g->arrived = 0;
        g->generation++;
        pthread_cond_broadcast(&g->moved);
        return true;
    }
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    while (g->generation == mine && !g->broken) {
        if (pthread_cond_timedwait(&g->moved, &g->lock, &until) == ETIMEDOUT)
            g->broken = true;
    }
    return g->generation != mine;
}

int threads_allgather(void *context, const void *in, void *out, size_t bytes)
{
    threads_rank *rank = context;
    threads_group *g = rank->group;
    bool same = true, all;

    pthread_mutex_lock(&g->lock);
    g->post[rank->rank].in = in;
    g->post[rank->rank].bytes = bytes;
    all = barrier(g);
    for (uint32_t r = 0; all && r < g->n_ranks; r++) {
        same = same && g->post[r].bytes == bytes;
        if (same)
            memcpy((char *)out + (size_t)r * bytes, g->post[r].in, bytes);
    }
    all = all && barrier(g); /* nobody's `in` goes away before all have read it */
    pthread_mutex_unlock(&g->lock);
    return all && same ? 0 : -1;
}

static void *run_rank(void *context)
{
    threads_start *start = context;
    start->result = start->fn(&start->rank);
    leave(start->rank.group);
    return NULL;
}

int threads_run(uint32_t n_ranks, threads_fn fn, void *context)
{
    threads_group g = {.n_ranks = n_ranks};
    threads_start *starts = calloc(n_ranks, sizeof *starts);
    uint32_t started = 0;
    int failed = 0;

    g.post = calloc(n_ranks, sizeof *g.post);
    if (!starts || !g.post) {
        free(starts);
        free(g.post);
        return -1;
    }
    pthread_mutex_init(&g.lock, NULL);
    pthread_cond_init(&g.moved, NULL);
    for (; started < n_ranks; started++) {
        starts[started] = (threads_start){.rank = {&g, started, n_ranks, context}, .fn = fn};
        if (pthread_create(&starts[started].thread, NULL, run_rank, &starts[started]) != 0)
            break;
    }
    if (started < n_ranks)
        leave(&g);
    for (uint32_t r = 0; r < started; r++) {
        pthread_join(starts[r].thread, NULL);
        failed += starts[r].result != 0;
    }
    if (started < n_ranks)
        failed = -1;
    pthread_cond_destroy(&g.moved);
    pthread_mutex_destroy(&g.lock);
    free(g.post);
    free(starts);
    return failed;
}
