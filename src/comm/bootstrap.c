/*
 * bootstrap.c - an all-gather among processes of one machine: a star around rank 0 over an abstract Unix socket.
 *
 *     rank r -> 0   hello {rank, n_ranks}          0 -> r   verdict
 *     rank r -> 0   ask {bytes}, payload           0 -> r   verdict, everybody's payloads
 *
 * A verdict carries rank 0's code and text, so that a failure reads the same on all ranks. After one, the bootstrap
 * only repeats it. Every wait is a poll with a deadline; while rank 0 waits for one peer it notices when any of them is
 * gone.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

#define MAGIC UINT32_C(0x45444954) /* "TIDE" */
#define MAX_PATH 90
#define HELLO_NS (INT64_C(2) * 1000000000) /* how long a stranger who connects and stays silent holds up the others */
#define GRACE_NS (INT64_C(1) * 1000000000)

struct tide_bootstrap {
    uint32_t rank, n_ranks;
    pid_t pid;
    int64_t timeout_ns;
    int n_fds; /* rank 0: n_ranks, entry r is rank r's socket, entry 0 unused (-1); others: 1 */
    struct pollfd *fds;
    int status; /* TIDE_OK until the first failure */
    char text[256];
};

typedef struct hello {
    uint32_t magic, version, rank, n_ranks;
} hello;
typedef struct ask {
    uint32_t magic, unused;
    uint64_t bytes;
} ask;
typedef struct verdict {
    int32_t code;
    char text[252];
} verdict;

static uint32_t wire_version(void)
{
    return TIDE_VERSION_MAJOR << 16 | TIDE_VERSION_MINOR << 8 | TIDE_VERSION_PATCH;
}

/* Rounded up, so that a poll never spins through the last part of a millisecond. */
static int remaining_ms(int64_t deadline)
{
    int64_t left = deadline - tide_now_ns();
    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000;
    return left > 1000000000 ? 1000000000 : (int)left;
}

/* Waits until fds[which] is ready for `events`. While it waits to receive it watches all peers; a peer that has been
 * sent its last bytes may close, so a wait to send does not. */
static int await(tide_bootstrap *b, int which, short events, int64_t deadline)
{
    for (;;) {
        int n;
        for (int i = 0; i < b->n_fds; i++)
            b->fds[i].events = i == which ? events : 0;
        n = events == POLLIN ? poll(b->fds, (nfds_t)b->n_fds, remaining_ms(deadline))
                             : poll(&b->fds[which], 1, remaining_ms(deadline));
        if (n < 0 && errno != EINTR)
            return tide_fail(TIDE_ERR_SYSTEM, "bootstrap: poll: %s", strerror(errno));
        if (n > 0 && b->fds[which].revents & (events | POLLERR | POLLHUP))
            return TIDE_OK; /* a closed socket shows when it is read */
        for (int i = 0; n > 0 && i < b->n_fds; i++) {
            if (events == POLLIN && b->fds[i].revents & (POLLHUP | POLLERR))
                return tide_fail(TIDE_ERR_PEER_DEAD, "bootstrap: rank %d has closed its connection", i);
        }
        if (n == 0 && tide_now_ns() >= deadline)
            return tide_fail(TIDE_ERR_DEADLINE, "bootstrap: rank %u waited %lld ms for rank %d", b->rank,
                             (long long)(b->timeout_ns / 1000000), b->rank == 0 ? which : 0);
    }
}

static int peer_gone(const tide_bootstrap *b, int which)
{
    return tide_fail(TIDE_ERR_PEER_DEAD, "bootstrap: rank %d has closed its connection", b->rank == 0 ? which : 0);
}

static int send_all(tide_bootstrap *b, int which, const void *data, size_t bytes, int64_t deadline)
{
    const char *p = data;
    while (bytes > 0) {
        ssize_t n = send(b->fds[which].fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            p += n;
            bytes -= (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            int status = await(b, which, POLLOUT, deadline);
            if (status != TIDE_OK)
                return status;
        } else if (n < 0 && errno != EINTR) {
            return peer_gone(b, which);
        }
    }
    return TIDE_OK;
}

static int receive_all(tide_bootstrap *b, int which, void *data, size_t bytes, int64_t deadline)
{
    char *p = data;
    while (bytes > 0) {
        ssize_t n = recv(b->fds[which].fd, p, bytes, MSG_DONTWAIT);
        if (n > 0) {
            p += n;
            bytes -= (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            int status = await(b, which, POLLIN, deadline);
            if (status != TIDE_OK)
                return status;
        } else if (n == 0 || errno != EINTR) {
            return peer_gone(b, which);
        }
    }
    return TIDE_OK;
}

static verdict verdict_of(int status)
{
    verdict v = {.code = status};
    if (status != TIDE_OK)
        snprintf(v.text, sizeof v.text, "%s", tide_last_error());
    return v;
}

static int receive_verdict(tide_bootstrap *b, int64_t deadline)
{
    verdict v;
    int status = receive_all(b, 0, &v, sizeof v, deadline);
    if (status != TIDE_OK || v.code == TIDE_OK)
        return status;
    v.text[sizeof v.text - 1] = '\0';
    return tide_fail(tide_code_from_peer(v.code), "%s", v.text[0] ? v.text : "bootstrap: rank 0 failed, without a text");
}

static socklen_t abstract_address(struct sockaddr_un *address, const char *path)
{
    size_t n = strlen(path);
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, path, n); /* the leading zero byte makes it abstract */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/* Seats one connection. Strangers are dropped and waited past (seated stays); ranks that contradict each other end the
 * set-up. */
static int seat(tide_bootstrap *b, int fd, uint32_t *seated, int64_t deadline)
{
    int64_t soon = tide_now_ns() + HELLO_NS;
    struct pollfd one = {.fd = fd};
    tide_bootstrap guest = {.rank = 0, .n_fds = 1, .fds = &one, .timeout_ns = b->timeout_ns};
    hello h;

    if (!same_user(fd) || receive_all(&guest, 0, &h, sizeof h, soon < deadline ? soon : deadline) != TIDE_OK ||
        h.magic != MAGIC) {
        close(fd);
        return TIDE_OK;
    }
    if (h.version != wire_version() || h.n_ranks != b->n_ranks || h.rank == 0 || h.rank >= b->n_ranks ||
        b->fds[h.rank].fd >= 0) {
        verdict v;
        int status;
        if (h.version != wire_version())
            status = tide_fail(TIDE_ERR_MISMATCH, "bootstrap: version: %u.%u.%u on rank %u, %s on rank 0",
                               h.version >> 16, h.version >> 8 & 0xff, h.version & 0xff, h.rank, tide_version());
        else if (h.n_ranks != b->n_ranks)
            status = tide_fail(TIDE_ERR_MISMATCH, "bootstrap: n_ranks: %u on rank %u, %u on rank 0", h.n_ranks, h.rank,
                               b->n_ranks);
        else
            status = tide_fail(TIDE_ERR_MISMATCH, "bootstrap: rank: two processes say that they are rank %u", h.rank);
        v = verdict_of(status);
        (void)send_all(&guest, 0, &v, sizeof v, deadline); /* it may be gone; the set-up has failed either way */
        close(fd);
        return status;
    }
    b->fds[h.rank].fd = fd;
    ++*seated;
    return TIDE_OK;
}

static int first_missing(const tide_bootstrap *b)
{
    int r = 1;
    while (r < b->n_fds && b->fds[r].fd >= 0)
        r++;
    return r;
}

/* Rank 0: tells every seated rank how it went; the error text stays that of `status`. */
static void announce(tide_bootstrap *b, int status, int64_t deadline)
{
    verdict v = verdict_of(status);
    for (int r = 1; r < b->n_fds; r++) {
        if (b->fds[r].fd >= 0)
            (void)send_all(b, r, &v, sizeof v, deadline); /* who is gone needs no news */
    }
    if (status != TIDE_OK)
        tide_fail(status, "%s", v.text);
}

static int listen_at(tide_bootstrap *b, const char *path, int64_t deadline)
{
    struct sockaddr_un address;
    socklen_t length = abstract_address(&address, path);
    uint32_t seated = 1;
    int status = TIDE_OK, listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (listener < 0)
        return tide_fail(TIDE_ERR_SYSTEM, "bootstrap: socket: %s", strerror(errno));
    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, 4096) != 0)
        status = tide_fail(TIDE_ERR_SYSTEM, "bootstrap: path: '%s': %s", path, strerror(errno));
    while (status == TIDE_OK && seated < b->n_ranks) {
        struct pollfd p = {.fd = listener, .events = POLLIN};
        int fd, n = poll(&p, 1, remaining_ms(deadline));
        if (n < 0 && errno != EINTR)
            status = tide_fail(TIDE_ERR_SYSTEM, "bootstrap: poll: %s", strerror(errno));
        else if (n == 0 && tide_now_ns() >= deadline)
            status = tide_fail(TIDE_ERR_DEADLINE, "bootstrap: %u of %u ranks came within %lld ms; rank %d is missing",
                               seated, b->n_ranks, (long long)(b->timeout_ns / 1000000), first_missing(b));
        if (n <= 0 || status != TIDE_OK)
            continue;
        fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            status = seat(b, fd, &seated, deadline);
        else if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED)
            status = tide_fail(TIDE_ERR_SYSTEM, "bootstrap: accept: %s", strerror(errno));
    }
    close(listener);
    announce(b, status, tide_now_ns() + b->timeout_ns);
    return status;
}

static int connect_to(tide_bootstrap *b, const char *path, int64_t deadline)
{
    struct sockaddr_un address;
    socklen_t length = abstract_address(&address, path);
    hello h = {MAGIC, wire_version(), b->rank, b->n_ranks};
    struct timespec pause = {0, 2000000};
    int status;

    /* Rank 0 may not listen yet, or may have taken a late hello for a stranger's: try again until the deadline. */
    do {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return tide_fail(TIDE_ERR_SYSTEM, "bootstrap: socket: %s", strerror(errno));
        b->fds[0].fd = fd;
        if (connect(fd, (struct sockaddr *)&address, length) == 0) {
            if (!same_user(fd))
                return tide_fail(TIDE_ERR_SYSTEM, "bootstrap: path: '%s' belongs to another user", path);
            status = send_all(b, 0, &h, sizeof h, deadline);
            if (status == TIDE_OK) /* rank 0 speaks at its own deadline, and says who is missing */
                status = receive_verdict(b, deadline + GRACE_NS);
            if (status != TIDE_ERR_PEER_DEAD)
                return status;
        } else if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
            return tide_fail(TIDE_ERR_SYSTEM, "bootstrap: path: '%s': %s", path, strerror(errno));
        }
        close(fd);
        b->fds[0].fd = -1;
        nanosleep(&pause, NULL);
    } while (tide_now_ns() < deadline);
    return tide_fail(TIDE_ERR_DEADLINE, "bootstrap: rank %u found no rank 0 at '%s' within %lld ms", b->rank, path,
                     (long long)(b->timeout_ns / 1000000));
}

int tide_bootstrap_local(const char *path, uint32_t rank, uint32_t n_ranks, int64_t timeout_ms, tide_bootstrap **out)
{
    tide_bootstrap *b;
    int64_t deadline;
    int status = TIDE_OK;

    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected a place for the bootstrap");
    if (!path || !path[0] || strlen(path) > MAX_PATH)
        return tide_fail(TIDE_ERR_ARGUMENT, "path: %s, expected 1 to %d bytes",
                         !path ? "NULL" : path[0] ? "too long" : "empty", MAX_PATH);
    if (n_ranks < 1 || n_ranks > TIDE_MAX_NODES * TIDE_MAX_LOCAL)
        return tide_fail(TIDE_ERR_ARGUMENT, "n_ranks: %u is not in 1..%d", n_ranks, TIDE_MAX_NODES * TIDE_MAX_LOCAL);
    if (rank >= n_ranks)
        return tide_fail(TIDE_ERR_ARGUMENT, "rank: %u is not in 0..%u", rank, n_ranks - 1);
    if (timeout_ms < 1 || timeout_ms > INT64_MAX / 1000000 / 4)
        return tide_fail(TIDE_ERR_ARGUMENT, "timeout_ms: %lld, expected a positive number of milliseconds",
                         (long long)timeout_ms);

    b = tide_calloc(1, sizeof *b);
    if (!b)
        return TIDE_ERR_MEMORY;
    *b = (tide_bootstrap){.rank = rank, .n_ranks = n_ranks, .pid = getpid(), .timeout_ns = timeout_ms * 1000000};
    b->fds = tide_calloc(rank == 0 ? n_ranks : 1, sizeof *b->fds);
    if (!b->fds) {
        tide_bootstrap_destroy(b);
        return TIDE_ERR_MEMORY;
    }
    b->n_fds = rank == 0 ? (int)n_ranks : 1;
    for (int i = 0; i < b->n_fds; i++)
        b->fds[i].fd = -1; /* poll skips negative ones */
    deadline = tide_now_ns() + b->timeout_ns;
    if (n_ranks > 1)
        status = rank == 0 ? listen_at(b, path, deadline) : connect_to(b, path, deadline);
    if (status != TIDE_OK) {
        tide_bootstrap_destroy(b);
        return status;
    }
    *out = b;
    return TIDE_OK;
}

/* Rank 0: everybody's payload into out, in rank order. */
static int collect(tide_bootstrap *b, char *out, size_t bytes, int64_t deadline)
{
    for (int r = 1; r < b->n_fds; r++) {
        ask a;
        int status = receive_all(b, r, &a, sizeof a, deadline);
        if (status == TIDE_OK && (a.magic != MAGIC || a.bytes != bytes))
            status = tide_fail(TIDE_ERR_MISMATCH, "bootstrap: bytes: %llu on rank %d, %zu on rank 0",
                               (unsigned long long)a.bytes, r, bytes);
        if (status == TIDE_OK)
            status = receive_all(b, r, out + (size_t)r * bytes, bytes, deadline);
        if (status != TIDE_OK)
            return status;
    }
    return TIDE_OK;
}

int tide_bootstrap_allgather(void *bootstrap, const void *in, void *out, size_t bytes)
{
    tide_bootstrap *b = bootstrap;
    int64_t deadline;
    int status;

    if (!b)
        return tide_fail(TIDE_ERR_ARGUMENT, "bootstrap: NULL, expected one from tide_bootstrap_local");
    if (bytes > 0 && (!in || !out))
        return tide_fail(TIDE_ERR_ARGUMENT, "%s: NULL, expected a buffer", in ? "out" : "in");
    if (b->pid != getpid())
        return tide_fail(TIDE_ERR_FORKED, "bootstrap: made by process %ld, used in its child %ld", (long)b->pid,
                         (long)getpid());
    if (b->status != TIDE_OK)
        return tide_fail(b->status, "%s", b->text);
    deadline = tide_now_ns() + b->timeout_ns;
    if (b->rank == 0) {
        if (bytes > 0)
            memmove(out, in, bytes);
        status = collect(b, out, bytes, deadline);
        announce(b, status, tide_now_ns() + b->timeout_ns);
        for (int r = 1; status == TIDE_OK && bytes > 0 && r < b->n_fds; r++)
            status = send_all(b, r, out, bytes * b->n_ranks, tide_now_ns() + b->timeout_ns);
    } else {
        ask a = {MAGIC, 0, bytes};
        status = send_all(b, 0, &a, sizeof a, deadline);
        if (status == TIDE_OK)
            status = send_all(b, 0, in, bytes, deadline);
        if (status == TIDE_ERR_PEER_DEAD) /* rank 0 may have said why before it closed */
            status = receive_verdict(b, deadline);
        /* Rank 0 gives the slowest rank its time and then speaks; its verdict names who was missing, so wait a little
         * longer. */
        if (status == TIDE_OK)
            status = receive_verdict(b, deadline + b->timeout_ns + GRACE_NS);
        if (status == TIDE_OK && bytes > 0)
            status = receive_all(b, 0, out, bytes * b->n_ranks, deadline + b->timeout_ns + GRACE_NS);
    }
    if (status != TIDE_OK) {
        b->status = status;
        snprintf(b->text, sizeof b->text, "%s", tide_last_error());
    }
    return status;
}

void tide_bootstrap_destroy(tide_bootstrap *bootstrap)
{
    if (!bootstrap)
        return;
    for (int i = 0; i < bootstrap->n_fds; i++) {
        if (bootstrap->fds[i].fd >= 0)
            close(bootstrap->fds[i].fd);
    }
    tide_free(bootstrap->fds);
    tide_free(bootstrap);
}
