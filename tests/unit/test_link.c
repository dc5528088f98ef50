/*
 * test_link.c - ranks of several machines, which are pretended: barriers, failures, deaths and goodbyes that go round by
 * TCP, and who is let in.
 *
 * Includes the module that connects to get at its messages.
 */
#include "fabric/link_meet.c"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "../harness/belongings.h"
#include "../harness/processes.h"
#include "../harness/threads.h"
#include "fabric/peers.h"

enum { MAX = 64 };
/* Times that are promised to a user, who has no sanitizer: with it the end of a process alone takes a tenth of a second. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const double promised = 5;
#else
static const double promised = 1;
#endif
#define CHECK(what)                                                                                                   \
    do {                                                                                                              \
        if (!(what)) {                                                                                                \
            print_error("line %d, rank %u: %s: %s\n", __LINE__, (unsigned)rank->rank, #what, tide_last_error());      \
            return 1;                                                                                                 \
        }                                                                                                             \
    } while (0)

/* ---- a device that has nothing but peers -------------------------------------------------------- */

typedef struct device {
    fab_open open;
    tide_options options;
    fab_peers peers;
} device;

static void nothing(void *d)
{
    (void)d;
}

static void died(void *d, uint32_t rank)
{
    fab_peers_fail_death(&((device *)d)->peers, rank, NULL);
}

static const fab_peers_hooks hooks = {.failed = nothing, .died = died};

static void device_close(device *d)
{
    fab_peers_leave(&d->peers);
    fab_peers_clear(&d->peers);
}

static int device_open(device *d, uint32_t rank, uint32_t n_ranks, uint32_t node_size, const uint64_t *machines,
                       tide_allgather_fn allgather, void *context, int64_t deadline_ms)
{
    int status;

    memset(d, 0, sizeof *d);
    d->options = (tide_options)TIDE_OPTIONS_INIT;
    d->options.deadline_ms = deadline_ms;
    d->open = (fab_open){.rank = rank, .n_ranks = n_ranks, .node_size = node_size, .machines = machines, .allgather = allgather,
                         .allgather_context = context, .options = &d->options};
    status = fab_peers_init(&d->peers, &d->open, sizeof(fab_page), &hooks, d);
    status = fab_peers_meet(&d->open, &d->peers, status);
    if (status == TIDE_OK)
        status = fab_agree(&d->open, fab_peers_watch(&d->peers));
    if (status != TIDE_OK)
        device_close(d);
    return status;
}

static bool fails_within(device *d, int ms)
{
    while (!fab_peers_failed(&d->peers) && ms-- > 0)
        poll(NULL, 0, 1);
    return fab_peers_failed(&d->peers);
}

static tide_failure some_failure(uint32_t rank)
{
    tide_failure f = TIDE_FAILURE_INIT;
    f.code = TIDE_ERR_ABORTED;
    f.rank = rank;
    f.call = 77;
    snprintf(f.phase, sizeof f.phase, "abort");
    snprintf(f.text, sizeof f.text, "rank %u has had enough", rank);
    return f;
}

/* What a test of threads is about. */
typedef struct scene {
    const uint64_t *machines;
    uint32_t who, node_size;
    _Atomic uint32_t arrived;
    _Atomic int64_t at;
    int64_t deadline_ms;
    int status[MAX];
    char texts[MAX][256];
    int steps;
} scene;

static int scene_open(threads_rank *rank, device *d)
{
    scene *s = rank->context;
    return device_open(d, rank->rank, rank->n_ranks, s->node_size ? s->node_size : 1, s->machines, threads_allgather, rank,
                       s->deadline_ms ? s->deadline_ms : 20000);
}

static void scene_end(threads_rank *rank, device *d, int status)
{
    scene *s = rank->context;
    s->status[rank->rank] = status;
    snprintf(s->texts[rank->rank], sizeof s->texts[0], "%s", status == TIDE_OK ? "" : tide_last_error());
    if (d)
        device_close(d);
}

static void assert_nothing_left(const belongings *before)
{
    char text[128];
    belongings_left(before, text);
    assert_string_equal(text, "");
}

static const uint64_t two_by_two[] = {7, 7, 9, 9}, three_by_two[] = {1, 1, 2, 2, 3, 3}, scattered[] = {1, 2, 1, 3, 2, 3};

/* ---- barriers ----------------------------------------------------------------------------------- */

static int barrier_body(threads_rank *rank)
{
    scene *s = rank->context;
    device d;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    for (uint32_t r = 0; r < rank->n_ranks; r++) {
        bool here = s->machines[r] == s->machines[rank->rank];
        CHECK(fab_peers_here(&d.peers, r) == here);
        CHECK(here ? d.peers.pids[r] == 0 : d.peers.pids[r] < 0);
    }
    for (int i = 1; i <= s->steps; i++) {
        if ((rank->rank * 7 + (uint32_t)i * 5) % 4 == 0)
            poll(NULL, 0, (int)(rank->rank + (uint32_t)i) % 3);
        atomic_fetch_add(&s->arrived, 1);
        CHECK(fab_peers_barrier(&d.peers, "test") == TIDE_OK);
        CHECK(atomic_load(&s->arrived) >= rank->n_ranks * (uint32_t)i);
    }
    device_close(&d);
    return 0;
}

static void test_barrier(void **state)
{
    static const uint64_t one_each[] = {1, 2, 3, 4, 5};
    belongings before = belongings_now();
    scene s = {.machines = two_by_two, .steps = 50};
    (void)state;
    assert_int_equal(threads_run(4, barrier_body, &s), 0);
    s = (scene){.machines = scattered, .steps = 20};
    assert_int_equal(threads_run(6, barrier_body, &s), 0);
    s = (scene){.machines = one_each, .steps = 20};
    assert_int_equal(threads_run(5, barrier_body, &s), 0);
    assert_nothing_left(&before);
}

static void test_many_ranks(void **state)
{
    uint64_t machines[MAX];
    belongings before = belongings_now();
    scene s = {.machines = machines, .steps = 3};
    (void)state;
    for (int r = 0; r < MAX; r++)
        machines[r] = 1 + (uint64_t)r / 4;
    assert_int_equal(threads_run(MAX, barrier_body, &s), 0);
    assert_nothing_left(&before);
}

static int absent_body(threads_rank *rank)
{
    scene *s = rank->context;
    device d;
    int status = TIDE_OK;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    CHECK(fab_peers_barrier(&d.peers, "first") == TIDE_OK);
    if (rank->rank == s->who)
        CHECK(fails_within(&d, 10000));
    status = fab_peers_barrier(&d.peers, "second");
    scene_end(rank, &d, status);
    return 0;
}

static void test_barrier_names_who_is_missing(void **state)
{
    (void)state;
    for (uint32_t who = 0; who < 6; who++) {
        scene s = {.machines = scattered, .who = who, .deadline_ms = 200};
        char expected[64];
        snprintf(expected, sizeof expected, "s for rank %u in second", who);
        assert_int_equal(threads_run(6, absent_body, &s), 0);
        for (int r = 0; r < 6; r++) {
            assert_int_equal(s.status[r], TIDE_ERR_DEADLINE);
            assert_non_null(strstr(s.texts[r], expected));
        }
    }
}

/* ---- failures ----------------------------------------------------------------------------------- */

static int spread_body(threads_rank *rank)
{
    scene *s = rank->context;
    tide_failure f = some_failure(rank->rank), heard = TIDE_FAILURE_INIT;
    device d;
    int64_t took;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    if (rank->rank == s->who) {
        poll(NULL, 0, 5); /* the others are in the barrier */
        atomic_store(&s->at, tide_now_ns());
        fab_peers_fail(&d.peers, &f, true);
    }
    CHECK(fab_peers_barrier(&d.peers, "test") == TIDE_ERR_ABORTED);
    took = tide_now_ns() - atomic_load(&s->at);
    CHECK((double)took < 1e9 * promised);
    CHECK(fab_peers_failure(&d.peers, &heard) == TIDE_ERR_ABORTED);
    CHECK(heard.rank == s->who && heard.call == 77 && heard.peer == -1 && strcmp(heard.phase, "abort") == 0);
    scene_end(rank, &d, fab_peers_failure(&d.peers, NULL));
    return 0;
}

static void test_failure_spreads(void **state)
{
    belongings before = belongings_now();
    (void)state;
    for (uint32_t who = 0; who < 6; who++) {
        scene s = {.machines = scattered, .who = who};
        char expected[64];
        snprintf(expected, sizeof expected, "rank %u has had enough", who);
        assert_int_equal(threads_run(6, spread_body, &s), 0);
        for (int r = 0; r < 6; r++)
            assert_string_equal(s.texts[r], expected);
    }
    assert_nothing_left(&before);
}

/* Who has failed may close at once: what it has to say is said first. */
static int fail_and_close_body(threads_rank *rank)
{
    scene *s = rank->context;
    tide_failure f = some_failure(rank->rank);
    device d;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    if (rank->rank == s->who)
        fab_peers_fail(&d.peers, &f, true);
    else
        CHECK(fails_within(&d, 5000));
    scene_end(rank, &d, fab_peers_failure(&d.peers, NULL));
    return 0;
}

static void test_failure_outlives_its_rank(void **state)
{
    (void)state;
    for (uint32_t who = 0; who < 4; who++) {
        scene s = {.machines = two_by_two, .who = who};
        assert_int_equal(threads_run(4, fail_and_close_body, &s), 0);
        for (int r = 0; r < 4; r++)
            assert_int_equal(s.status[r], TIDE_ERR_ABORTED);
    }
}

/* ---- set-ups that are given up ------------------------------------------------------------------ */

static int give_up_body(threads_rank *rank)
{
    scene *s = rank->context;
    char all[6], one = 1;
    bool mine = rank->rank % 2 == s->who % 2;
    device d;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    for (uint64_t set_up = 1; set_up < 5; set_up++) {
        CHECK(!fab_peers_given_up(&d.peers, set_up));
        CHECK(threads_allgather(rank, &one, all, 1) == 0);
        if (set_up % 2 == 0 && rank->rank == s->who)
            fab_peers_give_up(&d.peers, set_up);
        for (int ms = 0; set_up % 2 == 0 && ms < (mine ? 1000 : 10) && !fab_peers_given_up(&d.peers, set_up); ms++)
            poll(NULL, 0, 1);
        CHECK(fab_peers_given_up(&d.peers, set_up) == (mine && set_up % 2 == 0));
        CHECK(threads_allgather(rank, &one, all, 1) == 0);
    }
    CHECK(!fab_peers_failed(&d.peers));
    device_close(&d);
    return 0;
}

static void test_given_up(void **state)
{
    (void)state;
    for (uint32_t who = 0; who < 6; who++) {
        scene s = {.machines = three_by_two, .node_size = 2, .who = who};
        assert_int_equal(threads_run(6, give_up_body, &s), 0);
    }
}

/* ---- goodbyes ----------------------------------------------------------------------------------- */

static int goodbye_body(threads_rank *rank)
{
    scene *s = rank->context;
    uint32_t turn = (rank->rank + rank->n_ranks - s->who) % rank->n_ranks;
    int64_t begin;
    device d;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    poll(NULL, 0, (int)turn * 30);
    CHECK(!fab_peers_failed(&d.peers)); /* who has left before is not dead */
    begin = tide_now_ns();
    device_close(&d);
    CHECK((double)(tide_now_ns() - begin) < 0.7e9 * promised); /* the others' threads answer while they do something else */
    return 0;
}

static void test_goodbye(void **state)
{
    belongings before = belongings_now();
    (void)state;
    for (uint32_t first = 0; first < 4; first++) {
        scene s = {.machines = two_by_two, .who = first};
        assert_int_equal(threads_run(4, goodbye_body, &s), 0);
    }
    assert_nothing_left(&before);
}

/* ---- deaths ------------------------------------------------------------------------------------- */

typedef struct death {
    uint32_t who;
    bool parent;       /* a child of it lives on */
    bool stops;        /* it does not die, it stops */
    _Atomic int64_t at;
    struct { int status, open; double seconds; char text[256]; tide_failure failure; } reports[6];
} death;

static void mortal(const processes_rank *rank)
{
    death *x = *(death *const *)rank->context;
    tide_bootstrap *b = NULL;
    device d;
    int status = tide_bootstrap_local(rank->path, rank->rank, rank->n_ranks, 20000, &b);

    if (status == TIDE_OK)
        status = device_open(&d, rank->rank, rank->n_ranks, 1, scattered, tide_bootstrap_allgather, b, 20000);
    x->reports[rank->rank].open = status;
    if (status != TIDE_OK) {
        print_error("rank %u: %s\n", rank->rank, tide_last_error());
        return;
    }
    if (rank->rank == x->who) {
        poll(NULL, 0, 50);
        if (x->parent && fork() == 0) {
            poll(NULL, 0, 3000);
            _exit(0);
        }
        atomic_store(&x->at, tide_now_ns());
        raise(SIGKILL);
    }
    status = fab_peers_barrier(&d.peers, "test");
    x->reports[rank->rank].seconds = (double)(tide_now_ns() - atomic_load(&x->at)) / 1e9;
    x->reports[rank->rank].status = status;
    fab_peers_failure(&d.peers, &x->reports[rank->rank].failure);
    snprintf(x->reports[rank->rank].text, sizeof x->reports[0].text, "%s", tide_last_error());
    device_close(&d);
    tide_bootstrap_destroy(b);
}

static void die(death *x, uint32_t who, bool parent)
{
    char here[64], there[64];
    int how[6];

    memset(x, 0, sizeof *x);
    x->who = who;
    x->parent = parent;
    snprintf(here, sizeof here, "rank %u (process ", who);
    snprintf(there, sizeof there, "rank %u (on another machine) died or cannot be reached", who);
    assert_true(processes_run(6, mortal, &x, 0, 60, how) >= 0);
    for (uint32_t r = 0; r < 6; r++) {
        assert_int_equal(x->reports[r].open, TIDE_OK);
        if (r == who) {
            assert_true(WIFSIGNALED(how[r]) && WTERMSIG(how[r]) == SIGKILL);
            continue;
        }
        assert_int_equal(how[r], 0);
        assert_int_equal(x->reports[r].status, TIDE_ERR_PEER_DEAD);
        assert_int_equal(x->reports[r].failure.peer, who);
        assert_int_equal(x->reports[r].failure.rank, r);
        assert_non_null(strstr(x->reports[r].text, scattered[r] == scattered[who] ? here : there));
        assert_true(x->reports[r].seconds < promised);
    }
}

static void test_death(void **state)
{
    death *x = processes_shared(sizeof *x);
    (void)state;
    assert_non_null(x);
    die(x, 0, false); /* the star's middle */
    die(x, 2, false); /* of the same machine as that */
    die(x, 5, false);
    die(x, 3, true);
    die(x, 0, true);
    processes_unshare(x, sizeof *x);
}

/* ---- where a rank waits ------------------------------------------------------------------------- */

static const fab_where there = {"gather", 4};

static int where_body(threads_rank *rank)
{
    scene *s = rank->context;
    uint32_t asks = s->who / 4, asked = s->who % 4;
    fab_waiting wait = {8, tide_now_ns(), &there};
    char all[4], one = 1;
    device d;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    atomic_store(&d.peers.own->crumb_call, 100 + rank->rank);
    atomic_store(&d.peers.own->crumb_op, 10 + rank->rank);
    CHECK(threads_allgather(rank, &one, all, 1) == 0);
    if (rank->rank == asks)
        fab_peers_fail_wait(&d.peers, TIDE_ERR_DEADLINE, &wait, asked);
    CHECK(fails_within(&d, 5000));
    scene_end(rank, &d, fab_peers_failure(&d.peers, NULL));
    return 0;
}

static void test_where_a_rank_waits(void **state)
{
    (void)state;
    for (uint32_t pair = 0; pair < 16; pair++) {
        scene s = {.machines = two_by_two, .who = pair};
        char expected[96];
        if (pair / 4 == pair % 4)
            continue;
        snprintf(expected, sizeof expected, "s for rank %u in gather of call 8 (op 4); rank %u last waited in call %u, op %u",
                 pair % 4, pair % 4, 100 + pair % 4, 10 + pair % 4);
        assert_int_equal(threads_run(4, where_body, &s), 0);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(s.status[r], TIDE_ERR_DEADLINE);
            assert_non_null(strstr(s.texts[r], expected));
        }
    }
}

/* All ask for one that cannot answer. */
static void stopped(const processes_rank *rank)
{
    death *x = *(death *const *)rank->context;
    fab_waiting wait = {8, tide_now_ns(), &there};
    tide_bootstrap *b = NULL;
    device d;
    int status = tide_bootstrap_local(rank->path, rank->rank, rank->n_ranks, 20000, &b);

    if (status == TIDE_OK)
        status = device_open(&d, rank->rank, rank->n_ranks, 1, two_by_two, tide_bootstrap_allgather, b, 20000);
    x->reports[rank->rank].open = status;
    if (status != TIDE_OK)
        return;
    if (rank->rank == x->who) {
        raise(SIGSTOP);
    } else {
        poll(NULL, 0, 100);
        fab_peers_fail_wait(&d.peers, TIDE_ERR_DEADLINE, &wait, x->who);
    }
    fails_within(&d, 5000);
    x->reports[rank->rank].status = fab_peers_failure(&d.peers, &x->reports[rank->rank].failure);
    device_close(&d);
    tide_bootstrap_destroy(b);
}

static void test_a_stopped_rank(void **state)
{
    death *x = processes_shared(sizeof *x);
    int how[4];
    (void)state;
    assert_non_null(x);
    for (uint32_t who = 0; who < 4; who += 3) {
        memset(x, 0, sizeof *x);
        x->who = who;
        assert_true(processes_run(4, stopped, &x, 1200, 60, how) >= 0);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(how[r], 0);
            assert_int_equal(x->reports[r].open, TIDE_OK);
            assert_int_equal(x->reports[r].status, TIDE_ERR_DEADLINE);
            if (two_by_two[x->reports[r].failure.rank] != two_by_two[who])
                assert_non_null(strstr(x->reports[r].failure.text, who ? "rank 3 does not say where it waits"
                                                                       : "rank 0 does not say where it waits"));
        }
    }
    processes_unshare(x, sizeof *x);
}

/* ---- calls that differ -------------------------------------------------------------------------- */

static int calls_body(threads_rank *rank)
{
    scene *s = rank->context;
    device d;
    int status = TIDE_OK;
    CHECK(scene_open(rank, &d) == TIDE_OK);
    for (int i = 0; i < s->steps; i++) {
        if (rank->rank == s->who && s->at < 0 && i == -s->at) /* one fewer */
            continue;
        fab_peers_called(&d.peers, (uint64_t)i % 5 + (rank->rank == s->who && i == s->at ? 100 : 1));
    }
    if (s->who < rank->n_ranks && s->at >= 0 && s->steps >= FAB_LINK_EVERY && s->at < FAB_LINK_EVERY)
        CHECK(fails_within(&d, 5000));
    status = fab_peers_barrier(&d.peers, "destroy");
    scene_end(rank, &d, status);
    return 0;
}

static void differ(uint32_t who, int steps, int at, const char *expected)
{
    scene s = {.machines = scattered, .who = who, .steps = steps, .at = at};
    char name[16];
    snprintf(name, sizeof name, "rank %u", who);
    assert_int_equal(threads_run(6, calls_body, &s), 0);
    for (int r = 0; r < 6; r++) {
        assert_int_equal(s.status[r], expected ? TIDE_ERR_MISMATCH : TIDE_OK);
        assert_true(!expected || (strstr(s.texts[r], expected) && strstr(s.texts[r], name)));
        assert_string_equal(s.texts[r], s.texts[0]);
    }
}

static void test_calls_that_differ(void **state)
{
    (void)state;
    for (uint32_t who = 0; who < 6; who += 5) {
        differ(who, 64, 17, "among their calls up to number 64 are different ones");
        differ(who, 64 * 3, 0, "among their calls up to number "); /* not each of three is looked at in a hurry */
        differ(who, 20, 19, "among their calls up to number 20 are different ones"); /* at the barrier */
        differ(who, 100, 99, "among their calls up to number 100 are different ones");
        differ(who, 20, -7, "they came to the same barrier after ");
    }
    differ(MAX, 1000, 5, NULL);
    differ(MAX, 0, 5, NULL);
}

/* ---- strangers ---------------------------------------------------------------------------------- */

enum { NOTHING, GARBAGE, HALF, WRONG_TOKEN, NOT_A_RANK, ROOT, OTHER_SIZE, SILENT, KINDS };

/* An all-gather that looks into the cards. */
typedef struct intruder {
    threads_rank *rank;
    scene *scene;
    bool strangers, other_token, other_port;
    int silent[KINDS], n_silent;
    card seen;
} intruder;

static int knock(const card *at, int kind)
{
    struct sockaddr_storage address;
    socklen_t bytes = socket_address(at, &address);
    hello h = {MAGIC, {at->show[0], at->show[1]}, 2, 4};
    size_t n = sizeof h;
    int s = socket(at->family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (s < 0 || connect(s, (struct sockaddr *)&address, bytes) != 0) {
        close(s);
        return -1;
    }
    if (kind == GARBAGE)
        memset(&h, 0xa5, sizeof h);
    else if (kind == HALF)
        n /= 2;
    else if (kind == WRONG_TOKEN)
        h.token[1] ^= 1;
    else if (kind == NOT_A_RANK)
        h.rank = 4;
    else if (kind == ROOT)
        h.rank = 0;
    else if (kind == OTHER_SIZE)
        h.n_ranks = 5;
    if (kind != NOTHING && kind != SILENT && send(s, &h, n, MSG_NOSIGNAL) < 0) {
        close(s);
        return -1;
    }
    return s;
}

static int gather_and_knock(void *context, const void *in, void *out, size_t bytes)
{
    intruder *x = context;
    int status = threads_allgather(x->rank, in, out, bytes);

    if (status != 0 || bytes != sizeof(card))
        return status;
    memcpy(&x->seen, out, sizeof x->seen);
    for (int kind = 0; x->strangers && kind < KINDS; kind++) {
        int s = knock(&x->seen, kind);
        if (s < 0)
            return -1;
        if (kind >= WRONG_TOKEN) { /* turned away, or stays on in silence */
            x->silent[x->n_silent++] = s;
            continue;
        }
        close(s);
    }
    if (x->other_token)
        ((card *)out)->show[0] ^= 1;
    if (x->other_port) /* the discard service, or nobody */
        ((card *)out)->port = htons(9);
    return 0;
}

static int intruder_body(threads_rank *rank)
{
    scene *s = rank->context;
    intruder x = {.rank = rank, .scene = s, .strangers = s->steps == 0 && rank->rank == 1,
                  .other_token = s->steps == 1 && rank->rank == s->who,
                  .other_port = s->steps == 2 && rank->rank == s->who};
    char all[4], one = 1, byte;
    device d;
    int status = device_open(&d, rank->rank, rank->n_ranks, 1, s->machines, gather_and_knock, &x,
                             s->deadline_ms ? s->deadline_ms : 20000);
    for (int i = 0; i < x.n_silent; i++) {
        if (i + WRONG_TOKEN != SILENT) /* not a word to them */
            CHECK(recv(x.silent[i], &byte, 1, 0) <= 0);
        close(x.silent[i]);
    }
    if (status == TIDE_OK) {
        CHECK(fab_peers_barrier(&d.peers, "test") == TIDE_OK);
        CHECK(threads_allgather(rank, &one, all, 1) == 0);
        CHECK(knock(&x.seen, GARBAGE) < 0 && errno == ECONNREFUSED); /* nobody listens any more */
        CHECK(!fab_peers_failed(&d.peers));
        CHECK(threads_allgather(rank, &one, all, 1) == 0);
    }
    scene_end(rank, status == TIDE_OK ? &d : NULL, status);
    return 0;
}

static void test_strangers(void **state)
{
    belongings before = belongings_now();
    scene s = {.machines = two_by_two};
    (void)state;
    assert_int_equal(threads_run(4, intruder_body, &s), 0);
    for (int r = 0; r < 4; r++)
        assert_string_equal(s.texts[r], "");
    assert_nothing_left(&before);
}

static void test_who_does_not_connect(void **state)
{
    belongings before = belongings_now();
    (void)state;
    for (int steps = 1; steps <= 2; steps++) {
        scene s = {.machines = two_by_two, .who = 2, .steps = steps, .deadline_ms = 300};
        assert_int_equal(threads_run(4, intruder_body, &s), 0);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(s.status[r], TIDE_ERR_DEADLINE);
            assert_non_null(strstr(s.texts[r], "s for rank 2 to connect to 127.0.0.1 port "));
            assert_non_null(strstr(s.texts[r], " (lo); 3 of 4 ranks are there"));
        }
    }
    assert_nothing_left(&before);
}

/* ---- one of the ranks talks nonsense ------------------------------------------------------------ */

typedef struct heard {
    _Atomic int failed, dead;
    tide_failure failure;
} heard;

static void hear_passed(void *context, uint32_t count)
{
    (void)context;
    (void)count;
}

static void hear_gave_up(void *context, uint64_t set_up, uint64_t rails)
{
    (void)context;
    (void)rails;
    (void)set_up;
}

static void hear_failed(void *context, const tide_failure *failure)
{
    heard *h = context;
    if (atomic_load(&h->failed))
        return;
    h->failure = *failure;
    atomic_store(&h->failed, 1);
}

static void hear_died(void *context, uint32_t rank)
{
    atomic_store(&((heard *)context)->dead, 1 + (int)rank);
}

static bool hear_left(void *context, uint32_t rank)
{
    (void)context;
    (void)rank;
    return false;
}

static void hear_where(void *context, uint64_t *call, uint64_t *op)
{
    (void)context;
    *call = *op = 0;
}

static const fab_link_hooks hearing = {hear_passed, hear_gave_up, hear_failed, hear_died, hear_left, hear_where};

static int nonsense_body(threads_rank *rank)
{
    scene *s = rank->context;
    fab_open open = {.rank = rank->rank, .n_ranks = rank->n_ranks, .machines = s->machines, .allgather = threads_allgather,
                     .allgather_context = rank};
    unsigned char bytes[1024];
    fab_link *l = NULL;
    heard h = {.failure = TIDE_FAILURE_INIT};
    int socket = -1, ms;

    if (rank->rank == 1) { /* speaks for itself */
        CHECK(fab_link_connect(&open, TIDE_OK, &socket) == TIDE_OK);
        memset(bytes, s->steps, sizeof bytes);
        CHECK(send(socket, bytes, s->who, MSG_NOSIGNAL) == (ssize_t)s->who);
        for (ms = 0; s->who >= 32 && ms < 2000 && recv(socket, bytes, sizeof bytes, MSG_DONTWAIT) != 0 && errno != ECONNRESET;
             ms++)
            poll(NULL, 0, 1);
        close(socket);
        return ms == 2000;
    }
    CHECK(fab_link_meet(&open, TIDE_OK, &l) == TIDE_OK);
    CHECK(fab_link_start(l, &hearing, &h) == TIDE_OK);
    for (ms = 0; ms < 2000 && !atomic_load(s->who < 32 ? &h.dead : &h.failed); ms++) {
        if (atomic_load(&h.failed) && rank->rank == 0)
            break;
        if (rank->rank != 0 && s->who >= 32)
            break; /* rank 0 alone has been told; what it makes of it is the business of its peers.c */
        poll(NULL, 0, 1);
    }
    if (rank->rank == 0 && s->who >= 32)
        CHECK(h.failure.code == TIDE_ERR_NETWORK && h.failure.peer == 1 && strstr(h.failure.text, "makes no sense"));
    if (s->who < 32)
        CHECK(atomic_load(&h.dead) == 2);
    fab_link_leave(l);
    fab_link_stop(l);
    fab_link_free(l);
    return 0;
}

static void test_nonsense(void **state)
{
    belongings before = belongings_now();
    scene s = {.machines = two_by_two};
    (void)state;
    for (int byte = 0; byte < 256; byte += 51) {
        s.steps = byte;
        s.who = 64;
        assert_int_equal(threads_run(3, nonsense_body, &s), 0);
    }
    s.who = 17; /* less than a message, and gone */
    assert_int_equal(threads_run(3, nonsense_body, &s), 0);
    assert_nothing_left(&before);
}

/* ---- interfaces --------------------------------------------------------------------------------- */

static void test_interface_lists(void **state)
{
    static const struct { const char *list, *name; bool in; } cases[] = {
        {"eth", "eth0", true},       {"eth", "ib0", false},        {"eth0,ib", "ib3", true},  {"=eth0", "eth0", true},
        {"=eth0", "eth01", false},   {"=eth", "eth0", false},      {"^docker,lo", "lo", false},
        {"^docker,lo", "eth0", true}, {"^=docker", "docker0", true}, {"^=docker0", "docker0", false},
        {"eth0", "eth", false},      {",", "eth0", false},         {"=ib0,eth1", "eth1", true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(listed(cases[i].list, cases[i].name), cases[i].in);
}

static int interface_body(threads_rank *rank)
{
    device d;
    int status = scene_open(rank, &d);
    if (status == TIDE_OK)
        status = fab_peers_barrier(&d.peers, "test");
    scene_end(rank, status == TIDE_OK ? &d : NULL, status);
    return 0;
}

static void test_interface_by_name(void **state)
{
    scene s = {.machines = two_by_two};
    (void)state;
    setenv(IFNAME, "nosuch", 1);
    assert_int_equal(threads_run(4, interface_body, &s), 0);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(s.status[r], TIDE_ERR_ARGUMENT);
        assert_non_null(strstr(s.texts[r], IFNAME ": 'nosuch' names no interface"));
    }
    setenv(IFNAME, "=lo", 1);
    assert_int_equal(threads_run(4, interface_body, &s), 0);
    for (int r = 0; r < 4; r++)
        assert_string_equal(s.texts[r], "");
    unsetenv(IFNAME);
}

/* ---- memory and descriptors --------------------------------------------------------------------- */

static void test_too_few_descriptors(void **state)
{
    belongings before = belongings_now();
    scene s = {.machines = two_by_two};
    struct rlimit limit, less;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    less = limit;
    less.rlim_cur = 50;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &less), 0);
    assert_int_equal(threads_run(4, interface_body, &s), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(s.status[r], TIDE_ERR_SYSTEM);
        assert_non_null(strstr(s.texts[r], " free file descriptors, expected 67: Too many open files"));
    }
    assert_nothing_left(&before);
}

static void test_out_of_memory(void **state)
{
    belongings before = belongings_now();
    scene s = {.machines = two_by_two};
    uint64_t n = 1;
    bool failed = true;
    (void)state;
    for (; failed && n < 200; n++) {
        tide_alloc_fail_at(n);
        assert_int_equal(threads_run(4, interface_body, &s), 0);
        failed = s.status[0] != TIDE_OK;
        for (int r = 0; r < 4; r++)
            assert_int_equal(s.status[r], failed ? TIDE_ERR_MEMORY : TIDE_OK);
    }
    tide_alloc_fail_at(0);
    assert_true(n > 20 && n < 200);
    assert_nothing_left(&before);
}

static int one_thread(threads_rank *rank)
{
    (void)rank;
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_barrier),
        cmocka_unit_test(test_many_ranks),
        cmocka_unit_test(test_barrier_names_who_is_missing),
        cmocka_unit_test(test_failure_spreads),
        cmocka_unit_test(test_failure_outlives_its_rank),
        cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_goodbye),
        cmocka_unit_test(test_death),
        cmocka_unit_test(test_where_a_rank_waits),
        cmocka_unit_test(test_a_stopped_rank),
        cmocka_unit_test(test_calls_that_differ),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_who_does_not_connect),
        cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_interface_lists),
        cmocka_unit_test(test_interface_by_name),
        cmocka_unit_test(test_too_few_descriptors),
        cmocka_unit_test(test_out_of_memory),
    };
    if (threads_run(1, one_thread, NULL) != 0) /* a sanitizer's own thread comes with the first */
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
