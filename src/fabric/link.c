/* link.c - the link's thread: what is to be said to whom, what is heard, and how it ends. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "fabric/link.h"

enum {
    ANSWER_MS = 500,  /* how long a question waits */
    LINGER_MS = 1000, /* how long who leaves waits for being heard */
    POINTS = 32,      /* sequences whose hashes rank 0 remembers: ranks are not further apart */
    AT_ONCE = 8       /* reads of one connection before it is the others' turn */
};
#define NOBODY UINT32_MAX

enum {
    SAY_CALLS = 1, SAY_BARRIER, SAY_PASSED, SAY_GAVE_UP, SAY_FAILURE, SAY_DEATH, SAY_QUESTION, SAY_ANSWER, SAY_GOODBYE
};

typedef struct message {
    uint32_t kind, rank;
    uint64_t number, value[2];
} message;
typedef struct record { /* follows SAY_FAILURE */
    int64_t peer;
    uint64_t call;
    int32_t code;
    uint32_t rank;
    char phase[sizeof((tide_failure *)0)->phase], text[sizeof((tide_failure *)0)->text];
} record;

/* Where `rank` waits; of NOBODY: who has not come to barrier `count`. number 0: no question. */
typedef struct question { uint64_t number; uint32_t rank, count; } question;
/* rank: who is missing, or whose place it is; NOBODY: none, or not known. */
typedef struct answer { uint64_t number, value[2]; uint32_t rank; } answer;

/* The latest set-up that was given up, and by which rails: bit i of rail i. */
typedef struct given_up { uint64_t set_up, rails; } given_up;
_Static_assert(TIDE_MAX_LOCAL <= 64, "a bit a rail");

/* The other end of a connection. */
typedef struct peer {
    int fd; /* -1: none any more; changes under the registry's lock */
    uint32_t rank;
    bool left;             /* it has said goodbye */
    bool bye, shut, mute;  /* this end has; has sent all; cannot be heard */
    bool told;             /* that something has failed; or it has told */
    bool ask, asked;       /* it is to be asked where it waits; has been */
    uint32_t count;        /* barriers that it has come to */
    uint32_t said_barrier; /* what it has been told */
    uint64_t said_calls, said_question;
    given_up said_given_up;
    question wants;
    answer ready;
    size_t n_in, n_out;
    unsigned char in[sizeof(message) + sizeof(record)], out[2 * (sizeof(message) + sizeof(record))];
} peer;

/* What this rank wants said. */
typedef struct orders {
    bool stop, leaving, failed;
    uint32_t barrier;
    fab_link_calls calls, at_barrier;
    given_up given_up;
    tide_failure failure;
    question question;
} orders;

struct fab_link {
    fab_link *next; /* registry */
    uint32_t rank, n_ranks;
    const fab_link_hooks *hooks;
    void *context;
    uint32_t n_peers; /* of rank 0 n_ranks: peers[r] is rank r; else 1 */
    peer *peers;
    struct pollfd *set; /* n_peers + 1: the last is `wake` */
    int wake;
    pthread_t thread;
    bool started;

    pthread_mutex_t asking; /* one question at a time */
    pthread_mutex_t lock;   /* of the next three */
    pthread_cond_t answered;
    orders wanted;
    answer answer;

    /* The thread's own. */
    orders now;
    int64_t linger_until; /* 0: not leaving */
    uint32_t dead;        /* first rank that has died without any other having failed; NOBODY */
    /* Of rank 0. */
    uint32_t count, passed, n_came; /* own barriers; all ranks'; how many have come to the next */
    uint64_t seen_calls, seen_question;
    given_up given_up; /* by any rank */
    bool differ; /* ranks make different calls: no barrier is passed any more */
    question wants;
    struct { fab_link_calls calls; uint32_t rank; } points[POINTS], at_barrier; /* of the rank that came first */
};

/* ---- sockets and forks -------------------------------------------------------------------------- */

/* A child of this process would keep connections open that end when this process does, so it closes its copies. */
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static fab_link *registry;
static pthread_once_t registry_once = PTHREAD_ONCE_INIT;
static int registry_status;

static void before_fork(void)
{
    pthread_mutex_lock(&registry_lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&registry_lock);
}

static void after_fork_in_child(void)
{
    for (const fab_link *l = registry; l; l = l->next)
        for (uint32_t i = 0; i < l->n_peers; i++)
            if (l->peers[i].fd >= 0)
                close(l->peers[i].fd);
    pthread_mutex_unlock(&registry_lock);
}

static void open_registry(void)
{
    registry_status = pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static void enter_registry(fab_link *l)
{
    pthread_mutex_lock(&registry_lock);
    l->next = registry;
    registry = l;
    pthread_mutex_unlock(&registry_lock);
}

static void leave_registry(fab_link *l)
{
    pthread_mutex_lock(&registry_lock);
    for (fab_link **at = &registry; *at; at = &(*at)->next) {
        if (*at == l) {
            *at = l->next;
            break;
        }
    }
    pthread_mutex_unlock(&registry_lock);
}

static void hang_up(peer *p)
{
    pthread_mutex_lock(&registry_lock);
    if (p->fd >= 0)
        close(p->fd);
    p->fd = -1;
    pthread_mutex_unlock(&registry_lock);
}

/* ---- what goes wrong ---------------------------------------------------------------------------- */

static bool is_root(const fab_link *l)
{
    return l->rank == 0;
}

static tide_failure failure_of(const fab_link *l, int code, uint32_t peer, const char *phase)
{
    tide_failure f = TIDE_FAILURE_INIT;
    f.code = code;
    f.rank = l->rank;
    f.peer = peer;
    snprintf(f.phase, sizeof f.phase, "%s", phase);
    return f;
}

static void report_death(fab_link *l, uint32_t rank)
{
    if (l->dead == NOBODY)
        l->dead = rank;
    l->hooks->died(l->context, rank);
}

static void reply(fab_link *l, peer *p, const answer *a)
{
    if (p) {
        p->ready = *a;
        p->wants.number = 0;
        return;
    }
    pthread_mutex_lock(&l->lock);
    l->answer = *a;
    pthread_cond_broadcast(&l->answered);
    pthread_mutex_unlock(&l->lock);
    l->wants.number = 0;
}

/* Rank 0: to all who have asked where `rank` waits. */
static void reply_all(fab_link *l, uint32_t rank, const answer *a)
{
    answer mine = *a;
    for (uint32_t i = 1; i < l->n_peers; i++) {
        peer *p = &l->peers[i];
        mine.number = p->wants.number;
        if (mine.number && p->wants.rank == rank)
            reply(l, p, &mine);
    }
    mine.number = l->wants.number;
    if (mine.number && l->wants.rank == rank)
        reply(l, NULL, &mine);
}

/* A connection has ended. */
static void lose(fab_link *l, peer *p)
{
    static const answer unknown = {.rank = NOBODY};

    hang_up(p);
    if (is_root(l))
        reply_all(l, p->rank, &unknown);
    if (!p->left && !l->now.leaving && !l->hooks->has_left(l->context, p->rank))
        report_death(l, p->rank);
}

static void refuse(fab_link *l, peer *p, const message *m)
{
    tide_failure f = failure_of(l, TIDE_ERR_NETWORK, p->rank, "link");
    snprintf(f.text, sizeof f.text, "link: rank %u got a message from rank %u that makes no sense: kind %u, rank %u, number "
             "%llu", f.rank, p->rank, m->kind, m->rank, (unsigned long long)m->number);
    l->hooks->failed(l->context, &f);
    hang_up(p);
}

/* ---- rank 0: what ranks have done --------------------------------------------------------------- */

static void report_mismatch(fab_link *l, uint32_t first, const fab_link_calls *theirs, uint32_t rank,
                            const fab_link_calls *calls)
{
    uint32_t other = first < rank ? first : rank, peer_rank = first < rank ? rank : first;
    tide_failure f = failure_of(l, TIDE_ERR_MISMATCH, peer_rank, "calls");

    l->differ = true;
    f.rank = other;
    f.call = calls->sequence;
    if (theirs->sequence != calls->sequence)
        snprintf(f.text, sizeof f.text, "rank %u and rank %u disagree: they came to the same barrier after %llu and %llu "
                 "calls, expected the same calls on all ranks", first, rank, (unsigned long long)theirs->sequence,
                 (unsigned long long)calls->sequence);
    else
        snprintf(f.text, sizeof f.text, "rank %u and rank %u disagree: among their calls up to number %llu are different "
                 "ones, expected the same groups, dtypes and parameters in the same order", other, peer_rank,
                 (unsigned long long)calls->sequence);
    l->hooks->failed(l->context, &f);
}

static bool same_calls(const fab_link_calls *a, const fab_link_calls *b)
{
    return a->sequence == b->sequence && a->hash == b->hash;
}

static void has_called(fab_link *l, uint32_t rank, const fab_link_calls *calls)
{
    uint64_t at = calls->sequence / FAB_LINK_EVERY % POINTS;

    if (l->points[at].calls.sequence == calls->sequence) {
        if (!same_calls(&l->points[at].calls, calls))
            report_mismatch(l, l->points[at].rank, &l->points[at].calls, rank, calls);
    } else if (l->points[at].calls.sequence < calls->sequence) {
        l->points[at].calls = *calls;
        l->points[at].rank = rank;
    }
}

/* Nobody comes to a barrier before all have come to the last one. */
static void has_come(fab_link *l, uint32_t rank, uint32_t count, const fab_link_calls *calls)
{
    if (l->n_came++ == 0) {
        l->at_barrier.calls = *calls;
        l->at_barrier.rank = rank;
    } else if (!same_calls(&l->at_barrier.calls, calls)) {
        report_mismatch(l, l->at_barrier.rank, &l->at_barrier.calls, rank, calls);
    }
    if (l->n_came < l->n_ranks || l->differ)
        return;
    l->n_came = 0;
    l->passed = count;
    l->hooks->passed(l->context, count);
}

static uint32_t first_missing(const fab_link *l, uint32_t count)
{
    if (l->count < count)
        return 0;
    for (uint32_t r = 1; r < l->n_peers; r++)
        if (l->peers[r].count < count)
            return r;
    return NOBODY;
}

static void add_given_up(given_up *all, const given_up *more)
{
    if (more->set_up > all->set_up)
        *all = *more;
    else if (more->set_up == all->set_up)
        all->rails |= more->rails;
}

/* p: who asks; NULL: this rank. */
static void consider(fab_link *l, peer *p, const question *q)
{
    answer a = {.number = q->number, .rank = q->rank};

    if (q->rank == NOBODY) {
        a.rank = first_missing(l, q->count);
    } else if (q->rank == 0) {
        l->hooks->where(l->context, &a.value[0], &a.value[1]);
    } else if (q->rank < l->n_peers && l->peers[q->rank].fd >= 0 && !l->peers[q->rank].left) {
        *(p ? &p->wants : &l->wants) = *q;
        l->peers[q->rank].ask = true;
        return;
    } else {
        a.rank = NOBODY;
    }
    reply(l, p, &a);
}

/* ---- hearing ------------------------------------------------------------------------------------ */

static bool read_failure(const fab_link *l, const record *r, tide_failure *f)
{
    *f = (tide_failure)TIDE_FAILURE_INIT;
    f->code = tide_code_from_peer(r->code);
    f->rank = r->rank;
    f->peer = r->peer;
    f->call = r->call;
    memcpy(f->phase, r->phase, sizeof f->phase);
    memcpy(f->text, r->text, sizeof f->text);
    return f->code != TIDE_OK && f->rank < l->n_ranks && f->peer >= -1 && f->peer < (int64_t)l->n_ranks &&
           memchr(f->phase, 0, sizeof f->phase) && memchr(f->text, 0, sizeof f->text);
}

/* false: no such message is to be expected. */
static bool heed(fab_link *l, peer *p, const message *m, const record *r)
{
    fab_link_calls calls = {m->value[0], m->value[1]};
    question q = {m->number, m->rank, (uint32_t)m->value[0]};
    answer a = {m->number, {m->value[0], m->value[1]}, m->rank};
    given_up g = {m->number, m->value[0]};
    bool root = is_root(l);
    tide_failure f;

    switch (m->kind) {
    case SAY_CALLS:
        if (root)
            has_called(l, p->rank, &calls);
        return root && calls.sequence % FAB_LINK_EVERY == 0;
    case SAY_BARRIER:
        if (!root || m->number != p->count + UINT64_C(1) || m->number > l->passed + UINT64_C(1))
            return false;
        has_come(l, p->rank, ++p->count, &calls);
        return true;
    case SAY_PASSED:
        if (!root)
            l->hooks->passed(l->context, (uint32_t)m->number);
        return !root;
    case SAY_GAVE_UP:
        if (root)
            add_given_up(&l->given_up, &g);
        l->hooks->gave_up(l->context, g.set_up, g.rails);
        return true;
    case SAY_FAILURE:
        if (!read_failure(l, r, &f))
            return false;
        p->told = true;
        l->hooks->failed(l->context, &f);
        return true;
    case SAY_DEATH:
        if (m->rank >= l->n_ranks)
            return false;
        p->told = true;
        report_death(l, m->rank);
        return true;
    case SAY_QUESTION:
        if (root) {
            consider(l, p, &q);
        } else {
            l->hooks->where(l->context, &a.value[0], &a.value[1]);
            a.rank = l->rank;
            reply(l, p, &a);
        }
        return m->number != 0;
    case SAY_ANSWER:
        if (root) {
            p->asked = false;
            reply_all(l, p->rank, &a);
        } else {
            reply(l, NULL, &a);
        }
        return true;
    case SAY_GOODBYE:
        p->left = true;
        return true;
    default:
        return false;
    }
}

static size_t bytes_of(const message *m)
{
    return sizeof *m + (m->kind == SAY_FAILURE ? sizeof(record) : 0);
}

/* Whole messages that have come. */
static void heed_all(fab_link *l, peer *p)
{
    message m;
    record r;
    size_t at = 0;

    memset(&r, 0, sizeof r);
    while (p->fd >= 0 && p->n_in - at >= sizeof m) {
        memcpy(&m, p->in + at, sizeof m);
        if (p->n_in - at < bytes_of(&m))
            break;
        if (m.kind == SAY_FAILURE)
            memcpy(&r, p->in + at + sizeof m, sizeof r);
        at += bytes_of(&m);
        if (!heed(l, p, &m, &r))
            refuse(l, p, &m);
    }
    memmove(p->in, p->in + at, p->n_in - at);
    p->n_in -= at;
}

static void listen_to(fab_link *l, peer *p)
{
    for (int i = 0; i < AT_ONCE && p->fd >= 0; i++) {
        ssize_t n = recv(p->fd, p->in + p->n_in, sizeof p->in - p->n_in, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            lose(l, p);
            return;
        }
        p->n_in += (size_t)n;
        heed_all(l, p);
    }
}

/* ---- saying ------------------------------------------------------------------------------------- */

static void write_failure(const tide_failure *f, record *r)
{
    r->code = f->code;
    r->rank = f->rank;
    r->peer = f->peer;
    r->call = f->call;
    memcpy(r->phase, f->phase, sizeof r->phase);
    memcpy(r->text, f->text, sizeof r->text);
}

/* Each rank names its own wait for a rank that has died, so of a death only that is said. */
static bool say_failure(const fab_link *l, message *m, record *r)
{
    const tide_failure *f = &l->now.failure;

    if (l->now.failed && f->code != TIDE_ERR_PEER_DEAD) {
        m->kind = SAY_FAILURE;
        write_failure(f, r);
        return true;
    }
    m->kind = SAY_DEATH;
    m->rank = l->now.failed && f->peer >= 0 ? (uint32_t)f->peer : l->dead;
    return m->rank != NOBODY;
}

/* The next thing to say to a peer; false: nothing. */
static bool next_message(fab_link *l, peer *p, message *m, record *r)
{
    const orders *o = &l->now;
    const given_up *g = is_root(l) ? &l->given_up : &o->given_up;

    memset(m, 0, sizeof *m); /* padding too: it travels */
    if (!p->told && say_failure(l, m, r)) {
        p->told = true;
    } else if (!is_root(l) && o->calls.sequence > p->said_calls) {
        *m = (message){SAY_CALLS, 0, 0, {o->calls.sequence, o->calls.hash}};
        p->said_calls = o->calls.sequence;
    } else if (!is_root(l) && o->barrier > p->said_barrier) {
        *m = (message){SAY_BARRIER, 0, o->barrier, {o->at_barrier.sequence, o->at_barrier.hash}};
        p->said_barrier = o->barrier;
    } else if (l->passed > p->said_barrier && is_root(l)) {
        *m = (message){SAY_PASSED, 0, l->passed, {0, 0}};
        p->said_barrier = l->passed;
    } else if (g->set_up != p->said_given_up.set_up || g->rails != p->said_given_up.rails) {
        *m = (message){SAY_GAVE_UP, 0, g->set_up, {g->rails, 0}};
        p->said_given_up = *g;
    } else if (!is_root(l) && o->question.number != p->said_question) {
        *m = (message){SAY_QUESTION, o->question.rank, o->question.number, {o->question.count, 0}};
        p->said_question = o->question.number;
    } else if (p->ask && !p->asked) {
        *m = (message){SAY_QUESTION, p->rank, 1, {0, 0}};
        p->asked = true;
        p->ask = false;
    } else if (p->ready.number) {
        *m = (message){SAY_ANSWER, p->ready.rank, p->ready.number, {p->ready.value[0], p->ready.value[1]}};
        p->ready.number = 0;
    } else if (o->leaving) {
        *m = (message){.kind = SAY_GOODBYE};
        p->bye = true;
    } else {
        return false;
    }
    return true;
}

static void talk_to(fab_link *l, peer *p)
{
    message m;
    record r;

    memset(&r, 0, sizeof r);
    while (!p->bye && !p->mute && !p->left && sizeof p->out - p->n_out >= sizeof m + sizeof r &&
           next_message(l, p, &m, &r)) {
        memcpy(p->out + p->n_out, &m, sizeof m);
        if (m.kind == SAY_FAILURE)
            memcpy(p->out + p->n_out + sizeof m, &r, sizeof r);
        p->n_out += bytes_of(&m);
    }
    while (p->n_out > 0) {
        ssize_t n = send(p->fd, p->out, p->n_out, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) { /* what it has sent before it went may still be read */
            p->mute = true;
            p->n_out = 0;
            return;
        }
        memmove(p->out, p->out + n, p->n_out - (size_t)n);
        p->n_out -= (size_t)n;
    }
    if (p->bye && !p->shut) {
        shutdown(p->fd, SHUT_WR);
        p->shut = true;
    }
}

/* ---- the thread --------------------------------------------------------------------------------- */

static void take_orders(fab_link *l)
{
    pthread_mutex_lock(&l->lock);
    l->now = l->wanted;
    pthread_mutex_unlock(&l->lock);
    if (l->now.leaving && !l->linger_until)
        l->linger_until = tide_now_ns() + (int64_t)LINGER_MS * 1000000;
    if (!is_root(l))
        return;
    add_given_up(&l->given_up, &l->now.given_up);
    if (l->now.calls.sequence > l->seen_calls) {
        l->seen_calls = l->now.calls.sequence;
        has_called(l, 0, &l->now.calls);
    }
    if (l->now.barrier > l->count) {
        l->count = l->now.barrier;
        has_come(l, 0, l->count, &l->now.at_barrier);
    }
    if (l->now.question.number != l->seen_question) {
        l->seen_question = l->now.question.number;
        consider(l, NULL, &l->now.question);
    }
}

/* Whether nothing is left to do. Else, in ms, how long until there may be; -1: until something happens. */
static bool finished(const fab_link *l, int *timeout)
{
    int64_t left = l->linger_until - tide_now_ns();
    bool alone = true;

    for (uint32_t i = 0; i < l->n_peers; i++)
        alone &= l->peers[i].fd < 0;
    *timeout = l->linger_until ? left > 0 ? (int)((left + 999999) / 1000000) : 0 : -1;
    return l->now.leaving ? alone || left <= 0 : l->now.stop;
}

static void *link_main(void *argument)
{
    fab_link *l = argument;
    struct pollfd *bell = &l->set[l->n_peers];
    int timeout;

    for (;;) {
        take_orders(l);
        for (uint32_t i = 0; i < l->n_peers; i++) {
            peer *p = &l->peers[i];
            if (p->fd >= 0)
                talk_to(l, p);
            l->set[i] = (struct pollfd){.fd = p->fd, .events = p->n_out ? POLLIN | POLLOUT : POLLIN};
        }
        if (finished(l, &timeout))
            return NULL;
        if (poll(l->set, l->n_peers + 1, timeout) < 0)
            continue;
        if (bell->revents) {
            uint64_t rung;
            if (read(bell->fd, &rung, sizeof rung) < 0 && errno != EAGAIN)
                return NULL;
        }
        for (uint32_t i = 0; i < l->n_peers; i++)
            if (l->set[i].fd >= 0 && l->set[i].revents & ~POLLOUT)
                listen_to(l, &l->peers[i]);
    }
}

static void wake(fab_link *l)
{
    uint64_t one = 1;
    ssize_t ignored = write(l->wake, &one, sizeof one); /* full: it is awake */
    (void)ignored;
}

/* ---- opening and closing ------------------------------------------------------------------------ */

void fab_link_free(fab_link *l)
{
    if (!l)
        return;
    leave_registry(l);
    for (uint32_t i = 0; l->peers && i < l->n_peers; i++)
        hang_up(&l->peers[i]);
    if (l->wake >= 0)
        close(l->wake);
    pthread_cond_destroy(&l->answered);
    pthread_mutex_destroy(&l->lock);
    pthread_mutex_destroy(&l->asking);
    tide_free(l->set);
    tide_free(l->peers);
    tide_free(l);
}

static int new_link(const fab_open *desc, fab_link **out)
{
    fab_link *l = tide_calloc(1, sizeof *l);
    pthread_condattr_t monotonic;

    *out = l;
    if (!l)
        return TIDE_ERR_MEMORY;
    l->rank = desc->rank;
    l->n_ranks = desc->n_ranks;
    l->dead = NOBODY;
    l->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&l->asking, NULL);
    pthread_mutex_init(&l->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->answered, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (l->wake < 0)
        return tide_fail(TIDE_ERR_SYSTEM, "link: eventfd: %s", strerror(errno));
    l->n_peers = desc->rank == 0 ? desc->n_ranks : 1;
    l->peers = tide_calloc(l->n_peers, sizeof *l->peers);
    l->set = tide_calloc((size_t)l->n_peers + 1, sizeof *l->set);
    if (!l->peers || !l->set)
        return TIDE_ERR_MEMORY;
    for (uint32_t i = 0; i < l->n_peers; i++) {
        l->peers[i].fd = -1;
        l->peers[i].rank = i;
    }
    l->set[l->n_peers] = (struct pollfd){.fd = l->wake, .events = POLLIN};
    pthread_once(&registry_once, open_registry);
    return registry_status == 0 ? TIDE_OK
                                : tide_fail(TIDE_ERR_SYSTEM, "link: pthread_atfork: %s", strerror(registry_status));
}

int fab_link_meet(const fab_open *desc, int status, fab_link **out)
{
    int *sockets = tide_calloc(desc->rank == 0 ? desc->n_ranks : 1, sizeof *sockets);
    fab_link *l = NULL;

    *out = NULL;
    if (status == TIDE_OK && !sockets)
        status = TIDE_ERR_MEMORY;
    if (status == TIDE_OK)
        status = new_link(desc, &l);
    status = fab_link_connect(desc, status, sockets);
    if (status == TIDE_OK) {
        for (uint32_t i = 0; i < l->n_peers; i++)
            l->peers[i].fd = sockets[i];
        enter_registry(l);
        *out = l;
    } else {
        fab_link_free(l);
    }
    tide_free(sockets);
    return status;
}

int fab_link_start(fab_link *l, const fab_link_hooks *hooks, void *context)
{
    sigset_t all, before;
    int status;

    l->hooks = hooks;
    l->context = context;
    sigfillset(&all); /* library threads take no signals: those are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    status = pthread_create(&l->thread, NULL, link_main, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0)
        return tide_fail(TIDE_ERR_SYSTEM, "link: pthread_create: %s", strerror(status));
    l->started = true;
    return TIDE_OK;
}

void fab_link_leave(fab_link *l)
{
    pthread_mutex_lock(&l->lock);
    l->wanted.leaving = true;
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

void fab_link_stop(fab_link *l)
{
    pthread_mutex_lock(&l->lock);
    l->wanted.stop = true;
    pthread_mutex_unlock(&l->lock);
    if (l->started) {
        wake(l);
        pthread_join(l->thread, NULL);
    } else if (l->wanted.leaving) { /* nobody has been told anything before */
        l->now.leaving = true;
        for (uint32_t i = 0; i < l->n_peers; i++)
            if (l->peers[i].fd >= 0)
                talk_to(l, &l->peers[i]);
    }
}

/* ---- what a rank wants said --------------------------------------------------------------------- */

void fab_link_called(fab_link *l, const fab_link_calls *calls)
{
    pthread_mutex_lock(&l->lock);
    l->wanted.calls = *calls;
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

void fab_link_barrier(fab_link *l, uint32_t count, const fab_link_calls *calls)
{
    pthread_mutex_lock(&l->lock);
    l->wanted.barrier = count;
    l->wanted.at_barrier = *calls;
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

void fab_link_give_up(fab_link *l, uint64_t set_up, uint32_t rail)
{
    pthread_mutex_lock(&l->lock);
    l->wanted.given_up = (given_up){set_up, UINT64_C(1) << rail};
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

void fab_link_fail(fab_link *l, const tide_failure *failure)
{
    pthread_mutex_lock(&l->lock);
    if (!l->wanted.failed)
        l->wanted.failure = *failure;
    l->wanted.failed = true;
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

static bool ask(fab_link *l, uint32_t rank, uint32_t count, answer *out)
{
    int64_t end = tide_now_ns() + (int64_t)ANSWER_MS * 1000000;
    struct timespec until = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    uint64_t number;
    int waited = 0;

    pthread_mutex_lock(&l->asking);
    pthread_mutex_lock(&l->lock);
    number = l->wanted.question.number + 1;
    l->wanted.question = (question){number, rank, count};
    wake(l);
    while (l->answer.number != number && waited == 0)
        waited = pthread_cond_timedwait(&l->answered, &l->lock, &until);
    *out = l->answer;
    pthread_mutex_unlock(&l->lock);
    pthread_mutex_unlock(&l->asking);
    return out->number == number;
}

bool fab_link_where(fab_link *l, uint32_t rank, uint64_t *call, uint64_t *op)
{
    answer a;
    if (!ask(l, rank, 0, &a) || a.rank != rank)
        return false;
    *call = a.value[0];
    *op = a.value[1];
    return true;
}

bool fab_link_missing(fab_link *l, uint32_t count, uint32_t *rank)
{
    answer a;
    if (!ask(l, NOBODY, count, &a))
        return false;
    *rank = a.rank;
    return true;
}
