/*
 * handles.c - file descriptors between ranks: SCM_RIGHTS over abstract Unix sockets.
 *
 * Every rank listens on a name that the kernel picks (nothing is left in a file system when a process dies) and pushes
 * its descriptor to each peer that wants it. A connect and a small send succeed as soon as the listener exists, so
 * nobody has to accept before everybody has sent: no order of the ranks can lock up. The receiver takes a message only
 * from a process of its own user that shows the token which the receiver gave out through the all-gather. Until a peer's
 * parcel has come its process is watched: one that dies will not send it.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "fabric/fabric.h"

enum {
    SILENCE_MS = 5000, /* how long a stranger who connects and stays silent holds up the others */
    STRANGERS = 64,    /* who may wait for being turned away without holding up a peer */
    IN_HAND = 3        /* descriptors of one message */
};

typedef struct card {
    uint64_t token[2];
    uint32_t name_bytes;
    char name[20]; /* sun_path of an autobound socket: a zero byte and five digits */
} card;

typedef struct parcel {
    uint64_t token[2]; /* the receiver's */
    uint32_t rank;     /* the sender */
    uint32_t refused;  /* 1: without a descriptor, for the sender has failed */
} parcel;

static int system_error(const char *what)
{
    return tide_fail(TIDE_ERR_SYSTEM, "%s: %s", what, strerror(errno));
}

static int died(uint32_t rank)
{
    return tide_fail(TIDE_ERR_PEER_DEAD, "handle exchange: rank %u died during set-up", rank);
}

static int listen_anywhere(card *c, uint32_t n_peers, int *out)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    socklen_t bytes = sizeof name;
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (s < 0)
        return system_error("socket");
    *out = s;
    if (bind(s, (struct sockaddr *)&name, sizeof(sa_family_t)) != 0)
        return system_error("bind");
    if (listen(s, (int)n_peers + STRANGERS) != 0)
        return system_error("listen");
    if (getsockname(s, (struct sockaddr *)&name, &bytes) != 0)
        return system_error("getsockname");
    c->name_bytes = (uint32_t)(bytes - offsetof(struct sockaddr_un, sun_path));
    if (c->name_bytes > sizeof c->name)
        return tide_fail(TIDE_ERR_SYSTEM, "getsockname: a name of %u bytes, expected at most %zu", c->name_bytes,
                         sizeof c->name);
    memcpy(c->name, name.sun_path, c->name_bytes);
    if (getrandom(c->token, sizeof c->token, 0) != (ssize_t)sizeof c->token)
        return system_error("getrandom");
    return TIDE_OK;
}

static int same_user(int s, struct ucred *cred)
{
    socklen_t bytes = sizeof *cred;
    if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, cred, &bytes) != 0)
        return system_error("getsockopt SO_PEERCRED");
    if (cred->uid != geteuid())
        return tide_fail(TIDE_ERR_SYSTEM, "peer process %d: user %u, expected user %u", (int)cred->pid,
                         (unsigned)cred->uid, (unsigned)geteuid());
    return TIDE_OK;
}

/* Of at most `most` milliseconds; at least one, since to a socket none means for ever. */
static int time_left_ms(int64_t deadline, int most)
{
    int64_t ms = (deadline - tide_now_ns() + 999999) / 1000000;
    return ms < 1 ? 1 : ms > most ? most : (int)ms;
}

static struct timeval timeval_of(int ms)
{
    return (struct timeval){.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
}

/* fd < 0: a refusal. */
static int send_parcel(const card *to, uint32_t rank, uint32_t own_rank, int fd, int64_t deadline, pid_t *peer)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    parcel p = {.token = {to->token[0], to->token[1]}, .rank = own_rank, .refused = fd < 0};
    struct iovec part = {&p, sizeof p};
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    struct cmsghdr *header;
    struct ucred cred;
    int status = TIDE_OK, s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), failed;
    struct timeval patience = timeval_of(time_left_ms(deadline, INT32_MAX)); /* strangers may fill the peer's queue */
    ssize_t sent;

    if (s < 0)
        return system_error("socket");
    if (to->name_bytes < 1 || to->name_bytes > sizeof to->name)
        status = tide_fail(TIDE_ERR_MISMATCH, "handle exchange: a peer's socket has a name of %u bytes, expected 1..%zu",
                           to->name_bytes, sizeof to->name);
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (status == TIDE_OK) {
        memcpy(name.sun_path, to->name, to->name_bytes);
        do
            failed = connect(s, (struct sockaddr *)&name,
                             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + to->name_bytes));
        while (failed && errno == EINTR);
        if (failed)
            status = errno == ECONNREFUSED ? died(rank) : system_error("connect");
    }
    if (status == TIDE_OK)
        status = same_user(s, &cred);
    if (status == TIDE_OK) {
        if (fd >= 0) {
            memset(&control, 0, sizeof control);
            message.msg_control = control.bytes;
            message.msg_controllen = sizeof control.bytes;
            header = CMSG_FIRSTHDR(&message);
            header->cmsg_level = SOL_SOCKET;
            header->cmsg_type = SCM_RIGHTS;
            header->cmsg_len = CMSG_LEN(sizeof fd);
            memcpy(CMSG_DATA(header), &fd, sizeof fd);
        }
        do
            sent = sendmsg(s, &message, MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        if (sent != (ssize_t)sizeof p)
            status = system_error("sendmsg");
        *peer = cred.pid;
    }
    close(s);
    return status;
}

/* Descriptors do not leave a machine. */
static bool wanted(const fab_open *desc, const uint8_t *peers, uint32_t rank)
{
    return peers[rank] && rank != desc->rank && fab_same_machine(desc, rank);
}

/* Peers from `first` on need not wait for this rank, which has failed; the error text stays that of `status`. */
static void refuse(const fab_open *desc, int status, const uint8_t *peers, const card *cards, uint32_t first,
                   int64_t deadline)
{
    char text[256];
    pid_t peer;

    snprintf(text, sizeof text, "%s", tide_last_error());
    for (uint32_t r = first; r < desc->n_ranks; r++)
        if (wanted(desc, peers, r))
            (void)send_parcel(&cards[r], r, desc->rank, -1, deadline, &peer); /* who does not hear it waits longer */
    tide_fail(status, "%s", text);
}

int fab_descriptors_check(const char *what, int fd, uint32_t wanted)
{
    uint32_t n = 0;
    int *probe = tide_calloc(wanted, sizeof *probe);
    int status = TIDE_OK;

    if (!probe)
        return TIDE_ERR_MEMORY;
    while (n < wanted && (probe[n] = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0)
        n++;
    if (n < wanted)
        status = tide_fail(TIDE_ERR_SYSTEM, "%s: %u free file descriptors, expected %u: %s", what, n, wanted,
                           strerror(errno));
    while (n > 0)
        close(probe[--n]);
    tide_free(probe);
    return status;
}

/* watch[r + 1] becomes readable when process `pid` of rank r ends. One of another pid namespace (0) cannot be watched.
 */
static int watch_peer(struct pollfd *watch, uint32_t rank, pid_t pid)
{
    if (pid <= 0)
        return TIDE_OK;
    watch[rank + 1].fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (watch[rank + 1].fd >= 0)
        return TIDE_OK;
    return errno == ESRCH
               ? tide_fail(TIDE_ERR_PEER_DEAD, "rank %u (process %ld) died during set-up", rank, (long)pid)
               : system_error("pidfd_open");
}

static void unwatch_peer(struct pollfd *watch, uint32_t rank)
{
    if (watch[rank + 1].fd >= 0)
        close(watch[rank + 1].fd);
    watch[rank + 1].fd = -1;
}

/* The descriptor that came along; -1: none. Room for one is room for two (padding), so a stranger can hand in more. */
static int descriptor_of(struct cmsghdr *header)
{
    int first = -1, fd;
    size_t bytes;

    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
        return -1;
    bytes = header->cmsg_len - CMSG_LEN(0);
    for (size_t at = 0; at + sizeof fd <= bytes; at += sizeof fd) {
        memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
        if (at)
            close(fd);
        else
            first = fd;
    }
    return first;
}

/* Takes one message. *from = n_ranks when none came in time or a stranger knocked: the connection is dropped. */
static int take_parcel(struct pollfd *watch, const card *own, uint32_t n_ranks, int64_t deadline, uint32_t *from,
                       int *fd, int64_t *pid)
{
    parcel p;
    struct iovec part = {&p, sizeof p};
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct timeval patience = timeval_of(time_left_ms(deadline, SILENCE_MS));
    struct ucred cred;
    ssize_t got;
    int s, n = poll(watch, n_ranks + 1, time_left_ms(deadline, INT32_MAX));

    *from = n_ranks;
    *fd = -1;
    if (n == 0)
        return TIDE_OK;
    for (uint32_t r = 0; n > 0 && !watch[0].revents && r < n_ranks; r++) /* what it sent before it died comes first */
        if (watch[r + 1].revents)
            return died(r);
    s = accept4(watch[0].fd, NULL, NULL, SOCK_CLOEXEC);
    if (s < 0)
        return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED ? TIDE_OK : system_error("accept");
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (same_user(s, &cred) != TIDE_OK)
        goto stranger;
    do
        got = recvmsg(s, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
    while (got < 0 && errno == EINTR);
    if (got >= 0)
        *fd = descriptor_of(CMSG_FIRSTHDR(&message));
    if (got < 0 && errno != EAGAIN && errno != ECONNRESET) { /* neither silent nor gone */
        int status = system_error("recvmsg");
        close(s);
        return status;
    }
    if (got == (ssize_t)sizeof p && p.token[0] == own->token[0] && p.token[1] == own->token[1] && p.rank < n_ranks) {
        if (p.refused) {
            if (*fd >= 0)
                close(*fd);
            *fd = -1;
            close(s);
            return tide_fail(TIDE_ERR_SYSTEM, "handle exchange: rank %u has failed and sends no descriptor", p.rank);
        }
        if (*fd < 0) { /* a genuine peer whose descriptor did not fit this process' table */
            close(s);
            return tide_fail(TIDE_ERR_SYSTEM,
                             "handle exchange: rank %u's descriptor did not arrive (too many open files?)", p.rank);
        }
        *from = p.rank;
        *pid = cred.pid;
        close(s);
        return TIDE_OK;
    }
stranger:
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    close(s);
    return TIDE_OK;
}

static int late(const uint8_t *peers, const int *fds, const fab_open *desc, int64_t waited)
{
    uint32_t r = 0;
    while (r + 1 < desc->n_ranks && (!wanted(desc, peers, r) || fds[r] >= 0))
        r++;
    return tide_fail(TIDE_ERR_DEADLINE, "handle exchange: rank %u waited %.3f s for rank %u", desc->rank,
                     (double)waited / 1e9, r);
}

int fab_handles_exchange(const fab_open *desc, int status, const uint8_t *peers, int fd, int *fds, int64_t *pids)
{
    card own = {0}, *cards = NULL;
    struct pollfd *watch = NULL;
    uint32_t n_peers = 0, missing;
    int listener = -1;
    int64_t begin, deadline;

    for (uint32_t r = 0; r < desc->n_ranks; r++) {
        fds[r] = -1;
        n_peers += wanted(desc, peers, r);
    }
    if (status == TIDE_OK && (!(cards = tide_calloc(desc->n_ranks, sizeof *cards)) ||
                              !(watch = tide_calloc((size_t)desc->n_ranks + 1, sizeof *watch))))
        status = TIDE_ERR_MEMORY;
    for (uint32_t i = 0; watch && i <= desc->n_ranks; i++)
        watch[i] = (struct pollfd){.fd = -1, .events = POLLIN};
    if (status == TIDE_OK && n_peers)
        status = listen_anywhere(&own, n_peers, &listener);
    /* A rank that cannot even open a socket keeps its peers waiting, so it must not run out of descriptors in between: a
     * peer's process is watched until its descriptor has come, one more message is in hand. */
    if (status == TIDE_OK && n_peers)
        status = fab_descriptors_check("handle exchange", fd, n_peers + IN_HAND);
    status = fab_agree(desc, status);
    if (status == TIDE_OK)
        status = fab_allgather(desc, &own, cards, sizeof own);
    if (status != TIDE_OK)
        goto done;
    watch[0].fd = listener;
    begin = tide_now_ns();
    deadline = begin + fab_deadline_ns(desc);
    for (uint32_t r = 0; r < desc->n_ranks && status == TIDE_OK; r++) {
        pid_t peer = 0;
        if (!wanted(desc, peers, r))
            continue;
        status = send_parcel(&cards[r], r, desc->rank, fd, deadline, &peer);
        if (status != TIDE_OK) {
            refuse(desc, status, peers, cards, r, deadline);
        } else {
            status = watch_peer(watch, r, peer);
            if (status != TIDE_OK)
                refuse(desc, status, peers, cards, r + 1, deadline);
        }
    }
    for (missing = n_peers; missing && status == TIDE_OK;) {
        uint32_t from;
        int64_t pid = 0;
        int got;
        if (tide_now_ns() >= deadline) {
            status = late(peers, fds, desc, tide_now_ns() - begin);
            break;
        }
        status = take_parcel(watch, &own, desc->n_ranks, deadline, &from, &got, &pid);
        if (status != TIDE_OK || from == desc->n_ranks)
            continue;
        if (!wanted(desc, peers, from) || fds[from] >= 0) {
            close(got);
            status = tide_fail(TIDE_ERR_SYSTEM, "handle exchange: rank %u sent twice or unasked", from);
            continue;
        }
        fds[from] = got;
        unwatch_peer(watch, from);
        if (pids)
            pids[from] = pid;
        missing--;
    }
    status = fab_agree(desc, status);
done:
    if (status != TIDE_OK) {
        for (uint32_t r = 0; r < desc->n_ranks; r++) {
            if (fds[r] >= 0)
                close(fds[r]);
            fds[r] = -1;
        }
    }
    for (uint32_t r = 0; watch && r < desc->n_ranks; r++)
        unwatch_peer(watch, r);
    if (listener >= 0)
        close(listener);
    tide_free(watch);
    tide_free(cards);
    return status;
}
