/* processes.c - ranks as processes. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "processes.h"

enum { MOST = 32 };

typedef struct child {
    pid_t pid;
    bool ended;
    int64_t stopped; /* since when; 0: runs */
} child;

void *processes_shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void processes_unshare(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

/* One look at every child that is left; true when there is none. */
static bool look(child *children, uint32_t n, int *how)
{
    bool all = true;
    for (uint32_t r = 0; r < n; r++) {
        int status = 0;
        pid_t got = children[r].ended ? 0 : waitpid(children[r].pid, &status, WNOHANG | WUNTRACED);
        if (got > 0 && WIFSTOPPED(status)) {
            children[r].stopped = tide_now_ns();
        } else if (got > 0) {
            how[r] = status;
            children[r].ended = true;
        }
        all = all && children[r].ended;
    }
    return all;
}

static void resume(child *children, uint32_t n, int resume_ms)
{
    bool others = false;
    for (uint32_t r = 0; r < n; r++)
        others = others || (!children[r].ended && !children[r].stopped);
    for (uint32_t r = 0; r < n; r++) {
        child *c = &children[r];
        if (c->ended || !c->stopped)
            continue;
        if (resume_ms < 0 ? !others : tide_now_ns() - c->stopped >= (int64_t)resume_ms * 1000000) {
            c->stopped = 0;
            kill(c->pid, SIGCONT);
        }
    }
}

double processes_run(uint32_t n_ranks, processes_fn fn, void *context, int resume_ms, int limit_s, int *how)
{
    static unsigned serial;
    int64_t start = tide_now_ns();
    child children[MOST] = {{0}};
    char path[64];
    bool killed = false;

    snprintf(path, sizeof path, "tide-test-%ld-%u", (long)getpid(), serial++);
    fflush(NULL); /* else a child would print what the parent has buffered */
    for (uint32_t r = 0; r < n_ranks; r++) {
        processes_rank rank = {r, n_ranks, path, context};
        children[r].pid = n_ranks <= MOST ? fork() : -1;
        if (children[r].pid == 0) {
            fn(&rank);
            _exit(0);
        }
        if (children[r].pid < 0) {
            while (r-- > 0)
                kill(children[r].pid, SIGKILL);
            while (wait(NULL) > 0 || errno == EINTR)
                continue;
            return -1;
        }
    }
    while (!look(children, n_ranks, how)) {
        struct timespec pause = {0, 1000000};
        resume(children, n_ranks, resume_ms);
        if (!killed && tide_now_ns() - start > (int64_t)limit_s * 1000000000) {
            for (uint32_t r = 0; r < n_ranks; r++)
                if (!children[r].ended)
                    kill(children[r].pid, SIGKILL);
            killed = true;
        }
        nanosleep(&pause, NULL);
    }
    return (double)(tide_now_ns() - start) / 1e9;
}
