/* agree.c - the same answer on all ranks, and how long to wait for it; the mark of a forked child. */
#include <pthread.h>
#include <stdio.h>

#include "fabric/fabric.h"

int fab_allgather(const fab_open *desc, const void *in, void *out, size_t bytes)
{
    char before[512], said[200];
    int code;

    snprintf(before, sizeof before, "%s", tide_last_error());
    code = desc->allgather(desc->allgather_context, in, out, bytes);
    if (code == TIDE_OK)
        return TIDE_OK;
    if (strcmp(before, tide_last_error()) == 0) /* not the library's own */
        return tide_fail(TIDE_ERR_SYSTEM, "allgather: the caller's function failed");
    if (code != TIDE_ERR_PEER_DEAD && code != TIDE_ERR_DEADLINE && code != TIDE_ERR_MISMATCH)
        code = TIDE_ERR_SYSTEM;
    snprintf(said, sizeof said, "%s", tide_last_error());
    return tide_fail(code, "allgather: the caller's function failed: %s", said);
}

int64_t fab_deadline_ns(const fab_open *desc)
{
    const tide_options defaults = TIDE_OPTIONS_INIT;
    int64_t ms = (desc->options ? desc->options : &defaults)->deadline_ms;
    if (ms < 0)
        ms = defaults.deadline_ms;
    return (int64_t)tide_min_u64((uint64_t)ms, INT64_MAX / 4000000) * 1000000;
}

/* Works without the heap, so that a rank that is out of memory can still say so: the text of the failing rank travels
 * in pieces that fit a fixed buffer. */
int fab_agree(const fab_open *desc, int status)
{
    enum { ROOM = 65536, TEXT = 256 };
    char gathered[ROOM], own[TEXT] = {0}, text[TEXT] = {0};
    signed char code = (signed char)status;
    uint32_t piece, who;
    int exchanged;

    if (desc->n_ranks > ROOM)
        return tide_fail(TIDE_ERR_ARGUMENT, "n_ranks: %u is not in 1..%d", desc->n_ranks, ROOM);
    if (status != TIDE_OK)
        snprintf(own, sizeof own, "%s", tide_last_error());
    exchanged = fab_allgather(desc, &code, gathered, 1);
    if (exchanged != TIDE_OK)
        return exchanged;
    for (who = 0; who < desc->n_ranks && gathered[who] == 0; who++)
        continue;
    if (who == desc->n_ranks)
        return TIDE_OK;
    code = (signed char)tide_code_from_peer(gathered[who]);
    piece = (uint32_t)tide_min_u64(TEXT, ROOM / desc->n_ranks);
    for (uint32_t at = 0; at < TEXT; at += piece) {
        uint32_t n = (uint32_t)tide_min_u64(piece, TEXT - at);
        exchanged = fab_allgather(desc, own + at, gathered, n);
        if (exchanged != TIDE_OK)
            return exchanged;
        memcpy(text + at, gathered + (size_t)who * n, n);
    }
    text[TEXT - 1] = '\0';
    if (!text[0])
        snprintf(text, sizeof text, "failed, without a text");
    return who == desc->rank ? tide_fail(code, "%s", text) : tide_fail(code, "rank %u: %.200s", who, text);
}

_Atomic int fab_forked_flag;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_status;
static _Atomic int open_devices;

static void mark_child(void)
{
    if (atomic_load_explicit(&open_devices, memory_order_relaxed) > 0)
        atomic_store_explicit(&fab_forked_flag, 1, memory_order_relaxed);
}

static void register_fork(void)
{
    fork_status = pthread_atfork(NULL, NULL, mark_child);
}

int fab_fork_watch(void)
{
    pthread_once(&fork_once, register_fork);
    if (fork_status != 0)
        return tide_fail(TIDE_ERR_SYSTEM, "pthread_atfork: %s", strerror(fork_status));
    atomic_fetch_add(&open_devices, 1);
    return TIDE_OK;
}

void fab_fork_unwatch(void)
{
    atomic_fetch_sub(&open_devices, 1);
}
