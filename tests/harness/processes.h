/*
 * processes.h - ranks as processes: forked from a parent that has no threads, watched until all have ended.
 *
 * What a rank has to tell goes into memory of processes_shared, which the parent reads afterwards.
 */
#ifndef HARNESS_PROCESSES_H
#define HARNESS_PROCESSES_H

#include <stddef.h>
#include <stdint.h>

typedef struct processes_rank {
    uint32_t rank, n_ranks;
    const char *path; /* for tide_bootstrap_local; a new one each run */
    void *context;
} processes_rank;

/* Zeroed, shared with the processes forked from here on; NULL when there is none. */
void *processes_shared(size_t bytes);
void processes_unshare(void *memory, size_t bytes);

/* Runs fn(rank) in n_ranks processes, at most 32. One that stops itself is continued `resume_ms` after it stopped, or
 * once all others have ended when resume_ms < 0. One that has not ended after `limit_s` seconds is killed. how[r]: as
 * of waitpid. Returns the seconds it took; -1 when a process could not be started. */
typedef void (*processes_fn)(const processes_rank *rank);
double processes_run(uint32_t n_ranks, processes_fn fn, void *context, int resume_ms, int limit_s, int *how);

#endif
