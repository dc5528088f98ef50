/*
 * fuzz_bootstrap.c - what the other side may send: to rank 0 a hello and the asks of all-gathers, to another rank the
 * verdicts and results. The bytes are there, and the connection's end behind them, before the bootstrap looks.
 *
 * Includes the module to get at its connections.
 */
#include "comm/bootstrap.c"

#include "fuzz.h"

enum { MAX_RANKS = 4, MAX_BYTES = 65536, GATHERS = 3 };

/* A connection on which `bytes` have arrived and no more will. */
static int arrived(const uint8_t *data, size_t bytes, int *other)
{
    int pair[2];
    HOLDS(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    HOLDS(send(pair[1], data, bytes, MSG_DONTWAIT) == (ssize_t)bytes);
    HOLDS(shutdown(pair[1], SHUT_WR) == 0);
    *other = pair[1];
    return pair[0];
}

static void gather(tide_bootstrap *b, size_t bytes)
{
    char *in = calloc(bytes + 1, 1), *out = malloc(bytes * b->n_ranks + 1);
    HOLDS(in && out);
    out[bytes * b->n_ranks] = 0x55;
    for (int i = 0; i < GATHERS; i++) {
        tide_error_info info;
        int status = tide_bootstrap_allgather(b, in, out, bytes);
        HOLDS(tide_error_describe(status, &info) == TIDE_OK);
        HOLDS(status == TIDE_OK || tide_last_error()[0]);
        HOLDS(out[bytes * b->n_ranks] == 0x55);
        HOLDS(status == TIDE_OK || tide_bootstrap_allgather(b, in, out, bytes) == status);
    }
    free(out);
    free(in);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size > MAX_BYTES ? MAX_BYTES : size};
    int first = fuzz_byte(&in) & 1;
    uint32_t n_ranks = 2 + fuzz_byte(&in) % (MAX_RANKS - 1), n_peers = first ? n_ranks - 1 : 1, seated = 1;
    size_t bytes = fuzz_byte(&in), part;
    struct pollfd fds[MAX_RANKS];
    int others[MAX_RANKS], status = TIDE_OK;
    tide_bootstrap b = {.rank = first ? 0 : 1, .n_ranks = n_ranks, .pid = getpid(), .timeout_ns = INT64_C(1) << 30,
                        .n_fds = first ? (int)n_ranks : 1, .fds = fds};

    for (int i = 0; i < MAX_RANKS; i++)
        fds[i] = (struct pollfd){.fd = -1};
    part = in.size / n_peers;
    for (uint32_t i = 0; i < n_peers; i++) {
        int fd = arrived(in.data + i * part, part, &others[i]);
        if (!first)
            fds[0].fd = fd;
        else if (status == TIDE_OK)
            status = seat(&b, fd, &seated, tide_now_ns() + b.timeout_ns);
        else
            close(fd);
        HOLDS(status == TIDE_OK || status == TIDE_ERR_MISMATCH);
    }
    if (!first)
        status = receive_verdict(&b, tide_now_ns() + b.timeout_ns);
    if (status == TIDE_OK && (!first || seated == n_ranks))
        gather(&b, bytes);
    for (uint32_t i = 0; i < n_peers; i++)
        close(others[i]);
    for (int i = 0; i < MAX_RANKS; i++)
        if (fds[i].fd >= 0)
            close(fds[i].fd);
    return 0;
}
