/*
 * link_meet.c - how the ranks of several machines connect to rank 0: at which address, and who is let in.
 *
 * Rank 0 listens at an address that the all-gather carries, with two random tokens. Who connects shows the first; rank 0
 * answers with the second, so that a rank which reached something else at that address notices. Anybody else is turned
 * away, and holds up nobody: connections are read side by side. Once all ranks are there nobody listens any more.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fabric/link.h"

#define MAGIC UINT64_C(0x4b4e494c45444954) /* "TIDELINK" */
#define IFNAME "TIDE_SOCKET_IFNAME"

enum {
    SETUP_MS = 60000,  /* all ranks are in the same call by then; who cannot connect is not let wait for the deadline */
    SILENCE_MS = 5000, /* how long who connects may take to say who it is */
    GUESTS = 64        /* who are read side by side */
};
enum { KEEP_IDLE_S = 10, KEEP_INTERVAL_S = 5, KEEP_COUNT = 3, GONE_MS = 25000 };

typedef struct card {
    uint16_t family, port; /* port: in network order */
    unsigned char address[16];
    char interface[IFNAMSIZ];
    uint64_t show[2], answer[2];
} card;

typedef struct hello {
    uint64_t magic, token[2];
    uint32_t rank, n_ranks;
} hello;

typedef struct welcome { uint64_t magic, token[2]; } welcome;

typedef struct guest {
    int fd; /* -1: nobody */
    int64_t until;
    size_t got;
    hello said;
} guest;

static int system_error(const char *what)
{
    return tide_fail(TIDE_ERR_SYSTEM, "link: %s: %s", what, strerror(errno));
}

/* ---- addresses ---------------------------------------------------------------------------------- */

static bool is_loopback(const struct ifaddrs *i)
{
    return (i->ifa_flags & IFF_LOOPBACK) != 0;
}

/* An address that ranks of other machines could use as it stands: a link-local one needs their own interface's number. */
static bool usable(const struct ifaddrs *i)
{
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP))
        return false;
    if (i->ifa_addr->sa_family == AF_INET6)
        return !IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)(const void *)i->ifa_addr)->sin6_addr);
    return i->ifa_addr->sa_family == AF_INET;
}

/* "eth,ib": names that begin so; "=eth0,ib0": these names; either behind a "^": all others. As NCCL_SOCKET_IFNAME. */
static bool listed(const char *list, const char *name)
{
    bool others = list[0] == '^', exact, found = false;

    list += others;
    exact = list[0] == '=';
    list += exact;
    for (size_t n; *list; list += n + (list[n] == ',')) {
        n = strcspn(list, ",");
        found |= n > 0 && strncmp(list, name, n) == 0 && (!exact || name[n] == '\0');
    }
    return found != others;
}

/* Less is better, of equals the system's first; -1: not at all. */
static int rate(const struct ifaddrs *i, const char *wanted, bool one_machine)
{
    if (!usable(i))
        return -1;
    if (wanted)
        return listed(wanted, i->ifa_name) ? 0 : -1;
    if (one_machine)
        return is_loopback(i) ? 0 : 1;
    if (is_loopback(i))
        return -1;
    return strncmp(i->ifa_name, "docker", 6) == 0 || strncmp(i->ifa_name, "virbr", 5) == 0; /* of this machine alone */
}

static int choose_address(bool one_machine, card *c)
{
    const char *wanted = getenv(IFNAME);
    struct ifaddrs *all = NULL, *best = NULL;

    wanted = wanted && wanted[0] ? wanted : NULL;
    if (getifaddrs(&all) != 0)
        return system_error("getifaddrs");
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        int mine = rate(i, wanted, one_machine);
        if (mine >= 0 && (!best || mine < rate(best, wanted, one_machine)))
            best = i;
    }
    if (best) {
        c->family = best->ifa_addr->sa_family;
        if (c->family == AF_INET)
            memcpy(c->address, &((struct sockaddr_in *)(void *)best->ifa_addr)->sin_addr, 4);
        else
            memcpy(c->address, &((struct sockaddr_in6 *)(void *)best->ifa_addr)->sin6_addr, 16);
        snprintf(c->interface, sizeof c->interface, "%s", best->ifa_name);
    }
    freeifaddrs(all);
    if (best)
        return TIDE_OK;
    if (wanted)
        return tide_fail(TIDE_ERR_ARGUMENT, IFNAME ": '%.80s' names no interface of this machine that is up and has an "
                         "address", wanted);
    return tide_fail(TIDE_ERR_SYSTEM, "link: no interface but loopback is up and has an address: other machines cannot "
                     "reach rank 0");
}

static socklen_t socket_address(const card *c, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    out->ss_family = c->family;
    if (c->family == AF_INET) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)out;
        v4->sin_port = c->port;
        memcpy(&v4->sin_addr, c->address, 4);
        return sizeof *v4;
    }
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)out;
    v6->sin6_port = c->port;
    memcpy(&v6->sin6_addr, c->address, 16);
    return sizeof *v6;
}

/* "10.0.0.1 port 40404 (eth0)" */
static const char *name_of(const card *c, char text[96])
{
    char address[INET6_ADDRSTRLEN] = "?";
    inet_ntop(c->family, c->address, address, sizeof address);
    snprintf(text, 96, "%s port %u (%.*s)", address, ntohs(c->port), IFNAMSIZ - 1, c->interface);
    return text;
}

/* ---- sockets ------------------------------------------------------------------------------------ */

/* What it does not take is no reason to fail: then a machine that vanishes is found out about later. */
static void tune(int s)
{
    const struct { int level, option, value; } wishes[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, KEEP_IDLE_S},
        {IPPROTO_TCP, TCP_KEEPINTVL, KEEP_INTERVAL_S},
        {IPPROTO_TCP, TCP_KEEPCNT, KEEP_COUNT},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, GONE_MS},
    };
    for (size_t i = 0; i < sizeof wishes / sizeof wishes[0]; i++)
        (void)setsockopt(s, wishes[i].level, wishes[i].option, &wishes[i].value, sizeof wishes[i].value);
}

static int listen_at(card *c, uint32_t n_ranks, int *out)
{
    struct sockaddr_storage address;
    socklen_t bytes;
    char text[96];
    int s = socket(c->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    *out = s;
    if (s < 0)
        return system_error("socket");
    bytes = socket_address(c, &address);
    if (bind(s, (struct sockaddr *)&address, bytes) != 0 || listen(s, (int)n_ranks + GUESTS) != 0)
        return tide_fail(TIDE_ERR_SYSTEM, "link: rank 0 cannot listen at %s: %s", name_of(c, text), strerror(errno));
    bytes = sizeof address;
    if (getsockname(s, (struct sockaddr *)&address, &bytes) != 0)
        return system_error("getsockname");
    c->port = c->family == AF_INET ? ((struct sockaddr_in *)(void *)&address)->sin_port
                                   : ((struct sockaddr_in6 *)(void *)&address)->sin6_port;
    if (getrandom(c->show, sizeof c->show, 0) != (ssize_t)sizeof c->show ||
        getrandom(c->answer, sizeof c->answer, 0) != (ssize_t)sizeof c->answer)
        return system_error("getrandom");
    return TIDE_OK;
}

static int remaining_ms(int64_t until)
{
    int64_t ms = (until - tide_now_ns() + 999999) / 1000000;
    return ms < 0 ? 0 : ms > INT32_MAX ? INT32_MAX : (int)ms;
}

/* ---- rank 0 ------------------------------------------------------------------------------------- */

static void turn_away(guest *g)
{
    close(g->fd);
    g->fd = -1;
}

/* Reads on; a guest that has said all is seated or turned away. */
static void hear(const fab_open *desc, const card *own, guest *g, int *sockets, uint32_t *seated)
{
    ssize_t n = recv(g->fd, (char *)&g->said + g->got, sizeof g->said - g->got, MSG_DONTWAIT);
    welcome w = {MAGIC, {own->answer[0], own->answer[1]}};

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        turn_away(g);
        return;
    }
    g->got += (size_t)n;
    if (g->got < sizeof g->said)
        return;
    if (g->said.magic != MAGIC || g->said.token[0] != own->show[0] || g->said.token[1] != own->show[1] ||
        g->said.n_ranks != desc->n_ranks || g->said.rank == 0 || g->said.rank >= desc->n_ranks ||
        sockets[g->said.rank] >= 0 || send(g->fd, &w, sizeof w, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof w) {
        turn_away(g);
        return;
    }
    tune(g->fd);
    sockets[g->said.rank] = g->fd;
    g->fd = -1;
    ++*seated;
}

static int let_in(int listener, guest *seat)
{
    int s = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (s < 0)
        return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED ? TIDE_OK : system_error("accept");
    *seat = (guest){.fd = s, .until = tide_now_ns() + (int64_t)SILENCE_MS * 1000000};
    return TIDE_OK;
}

static int seat_all(const fab_open *desc, const card *own, int listener, int64_t begin, int64_t until, int *sockets)
{
    struct pollfd set[GUESTS + 1];
    guest guests[GUESTS];
    uint32_t seated = 1, missing = 1;
    char text[96];
    int status = TIDE_OK;

    for (int i = 0; i < GUESTS; i++)
        guests[i].fd = -1;
    while (status == TIDE_OK && seated < desc->n_ranks && tide_now_ns() < until) {
        int64_t next = until;
        guest *seat = NULL; /* while there is none, who comes waits in the listener's queue */
        for (int i = 0; i < GUESTS; i++) {
            if (guests[i].fd >= 0 && tide_now_ns() >= guests[i].until)
                turn_away(&guests[i]);
            if (guests[i].fd >= 0 && guests[i].until < next)
                next = guests[i].until;
            if (guests[i].fd < 0)
                seat = &guests[i];
            set[i] = (struct pollfd){.fd = guests[i].fd, .events = POLLIN};
        }
        set[GUESTS] = (struct pollfd){.fd = seat ? listener : -1, .events = POLLIN};
        if (poll(set, GUESTS + 1, remaining_ms(next)) < 0) {
            status = errno == EINTR ? TIDE_OK : system_error("poll");
            continue;
        }
        for (int i = 0; i < GUESTS; i++)
            if (set[i].fd >= 0 && set[i].revents)
                hear(desc, own, &guests[i], sockets, &seated);
        if (seat && set[GUESTS].revents)
            status = let_in(listener, seat);
    }
    for (int i = 0; i < GUESTS; i++)
        if (guests[i].fd >= 0)
            turn_away(&guests[i]);
    if (status != TIDE_OK || seated == desc->n_ranks)
        return status;
    while (missing + 1 < desc->n_ranks && sockets[missing] >= 0)
        missing++;
    return tide_fail(TIDE_ERR_DEADLINE, "link: rank 0 waited %.3f s for rank %u to connect to %s; %u of %u ranks are there",
                     (double)(tide_now_ns() - begin) / 1e9, missing, name_of(own, text), seated, desc->n_ranks);
}

/* ---- the others --------------------------------------------------------------------------------- */

/* Until the socket is ready for `events`; an errno. */
static int await(int s, short events, int64_t until)
{
    struct pollfd one = {.fd = s, .events = events};
    int n;
    do
        n = poll(&one, 1, remaining_ms(until));
    while (n < 0 && errno == EINTR);
    return n > 0 ? 0 : n == 0 ? ETIMEDOUT : errno;
}

static int reach(int s, const card *root, int64_t until)
{
    struct sockaddr_storage address;
    socklen_t bytes = socket_address(root, &address), size = sizeof(int);
    int error = connect(s, (struct sockaddr *)&address, bytes) == 0 ? 0 : errno;

    if (error != EINPROGRESS && error != EINTR)
        return error;
    error = await(s, POLLOUT, until);
    if (error == 0 && getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
        error = errno;
    return error;
}

static int be_welcomed(int s, int64_t until, welcome *w)
{
    size_t got = 0;
    while (got < sizeof *w) {
        int error = await(s, POLLIN, until);
        ssize_t n = error ? 0 : recv(s, (char *)w + got, sizeof *w - got, MSG_DONTWAIT);
        if (error)
            return error;
        if (n == 0)
            return ECONNRESET;
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return errno;
        got += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int join(const fab_open *desc, const card *root, int64_t until, int *out)
{
    hello h = {MAGIC, {root->show[0], root->show[1]}, desc->rank, desc->n_ranks};
    welcome w = {0};
    char text[96];
    int s, error;

    if (root->family != AF_INET && root->family != AF_INET6)
        return tide_fail(TIDE_ERR_MISMATCH, "link: rank 0 sent an address of family %u, expected IPv4 or IPv6",
                         root->family);
    s = socket(root->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0)
        return system_error("socket");
    *out = s;
    error = reach(s, root, until);
    if (error)
        return tide_fail(TIDE_ERR_SYSTEM, "link: rank %u cannot connect to rank 0 at %s: %s; " IFNAME
                         " of rank 0 chooses the interface", desc->rank, name_of(root, text), strerror(error));
    tune(s);
    if (send(s, &h, sizeof h, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof h)
        return system_error("send");
    error = be_welcomed(s, until, &w);
    if (error == 0 && w.magic == MAGIC && w.token[0] == root->answer[0] && w.token[1] == root->answer[1])
        return TIDE_OK;
    return tide_fail(TIDE_ERR_SYSTEM, "link: rank %u is connected to %s and %s%s", desc->rank, name_of(root, text),
                     error ? "was not let in: " : "that is not rank 0", error ? strerror(error) : "");
}

/* ---- all ---------------------------------------------------------------------------------------- */

/* C  Whether all ranks are in truth on this machine, whatever they have been told. */
static int on_one_machine(const fab_open *desc, uint64_t *scratch, bool *one)
{
    uint64_t own = fab_machine();
    int status = fab_allgather(desc, &own, scratch, sizeof own);

    *one = true;
    for (uint32_t r = 0; status == TIDE_OK && r < desc->n_ranks; r++)
        *one &= scratch[r] == own;
    return status;
}

int fab_link_connect(const fab_open *desc, int status, int *sockets)
{
    uint32_t n = desc->n_ranks, n_sockets = desc->rank == 0 ? n : 1;
    card own, *cards = tide_calloc(n, sizeof *cards);
    int listener = -1;
    int64_t begin, until;
    bool one = false;

    memset(&own, 0, sizeof own); /* padding too: it travels */
    for (uint32_t i = 0; sockets && i < n_sockets; i++)
        sockets[i] = -1;
    if (status == TIDE_OK && (!cards || !sockets))
        status = TIDE_ERR_MEMORY;
    status = fab_agree(desc, status);
    if (status == TIDE_OK)
        status = on_one_machine(desc, (uint64_t *)(void *)cards, &one);
    if (status != TIDE_OK)
        goto done;
    if (desc->rank == 0) {
        status = choose_address(one, &own);
        if (status == TIDE_OK)
            status = listen_at(&own, n, &listener);
        if (status == TIDE_OK)
            status = fab_descriptors_check("link", listener, n - 1 + GUESTS);
    }
    status = fab_agree(desc, status);
    if (status == TIDE_OK)
        status = fab_allgather(desc, &own, cards, sizeof own);
    if (status != TIDE_OK)
        goto done;
    begin = tide_now_ns();
    until = begin + (int64_t)tide_min_u64((uint64_t)fab_deadline_ns(desc), UINT64_C(1000000) * SETUP_MS);
    status = desc->rank == 0 ? seat_all(desc, &own, listener, begin, until, sockets)
                             : join(desc, &cards[0], until, &sockets[0]);
    if (listener >= 0) /* before the others are met again: who still waits there hears that it is over */
        close(listener);
    listener = -1;
    status = fab_agree(desc, status);
done:
    if (listener >= 0)
        close(listener);
    for (uint32_t i = 0; status != TIDE_OK && sockets && i < n_sockets; i++) {
        if (sockets[i] >= 0)
            close(sockets[i]);
        sockets[i] = -1;
    }
    tide_free(cards);
    return status;
}
