/*
 * threads.h - ranks as threads of one process: an all-gather callback over a barrier, and a runner.
 *
 * A rank that leaves (its function returns) breaks the group: all-gathers that wait for it, and all later ones, fail on
 * the others instead of hanging. Every wait sleeps and is bounded by a minute.
 */
#ifndef HARNESS_THREADS_H
#define HARNESS_THREADS_H

#include <stddef.h>
#include <stdint.h>

typedef struct threads_group threads_group;
typedef struct threads_rank {
    threads_group *group;
    uint32_t rank, n_ranks;
    void *context; /* the one given to threads_run */
} threads_rank;

/* A tide_allgather_fn; its context is the rank's threads_rank. */
int threads_allgather(void *rank, const void *in, void *out, size_t bytes);

/* Runs fn on n_ranks threads, one a rank, and joins them all. Returns how many ranks returned nonzero; -1 when a thread
 * could not be started. */
typedef int (*threads_fn)(threads_rank *rank);
int threads_run(uint32_t n_ranks, threads_fn fn, void *context);

#endif
