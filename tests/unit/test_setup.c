/* test_setup.c - ranks as processes that are disturbed while they set up: killed between any two exchanges, interrupted
 * by signals, short of descriptors or of address space. Nobody hangs, nobody keeps anything. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "../harness/belongings.h"
#include "../harness/processes.h"
#include "base/base.h"
#include "tide/tide.h"

enum { RANKS = 3, NEVER = 1000 };

/* What a rank tells the test; shared memory. */
typedef struct report {
    int status, ended, exchanges;
    char text[512], kept[128];
} report;

typedef struct trouble {
    int victim, at;   /* rank that is killed after its at-th all-gather */
    int limit_rank;   /* rank whose descriptors or memory are limited; -1: none */
    rlim_t spare_fds, spare_bytes; /* beyond what it has open and mapped; 0: no limit */
    int timer_us;     /* every rank is interrupted that often */
    int64_t rows;
} trouble;

typedef struct exchanger {
    tide_bootstrap *bootstrap;
    report *report;
    int last; /* killed after that many */
} exchanger;

static int counted(void *context, const void *in, void *out, size_t bytes)
{
    exchanger *e = context;
    int status = tide_bootstrap_allgather(e->bootstrap, in, out, bytes);
    if (++e->report->exchanges > e->last) {
        struct timespec pause = {0, 20000000}; /* the others are past their next step that needs nobody's answer */
        nanosleep(&pause, NULL);
        raise(SIGKILL);
    }
    return status;
}

static rlim_t mapped_bytes(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%lu", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

static void on_alarm(int signal) { (void)signal; }

static void start_timer(int microseconds)
{
    struct sigaction act = {.sa_handler = on_alarm}; /* no SA_RESTART */
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &timer, NULL);
}

static int set_up(exchanger *e, int rank, const trouble *t)
{
    tide_param param = {"p", 2, 0, {t->rows, 64}};
    tide_group_desc group = TIDE_GROUP_DESC_INIT;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    struct rlimit limit;
    tide_comm *comm = NULL;
    tide_group *g;
    int status;

    if (rank == t->limit_rank && t->spare_fds) {
        limit.rlim_cur = limit.rlim_max = (rlim_t)belongings_now().fds - 3 + t->spare_fds;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (rank == t->limit_rank && t->spare_bytes) {
        limit.rlim_cur = limit.rlim_max = mapped_bytes() + t->spare_bytes;
        setrlimit(RLIMIT_AS, &limit);
    }
    desc.rank = (uint32_t)rank;
    desc.n_ranks = RANKS;
    desc.allgather = counted;
    desc.allgather_context = e;
    group.n_params = 1;
    group.params = &param;
    status = tide_comm_create(&desc, &comm);
    if (status == TIDE_OK)
        status = tide_groups_create(comm, &group, 1, &g);
    if (status == TIDE_OK)
        status = tide_all_gather(g, NULL, NULL);
    if (status == TIDE_OK)
        status = tide_wait(g, TIDE_READY, NULL);
    if (status != TIDE_OK)
        snprintf(e->report->text, sizeof e->report->text, "%s", tide_last_error());
    tide_comm_destroy(comm);
    return status;
}

typedef struct job {
    const trouble *t;
    report *reports;
} job;

static void rank_main(const processes_rank *rank)
{
    const job *j = rank->context;
    report *r = &j->reports[rank->rank];
    exchanger e = {NULL, r, (int)rank->rank == j->t->victim ? j->t->at : NEVER};
    belongings before = belongings_now();
    int status = tide_bootstrap_local(rank->path, rank->rank, RANKS, 20000, &e.bootstrap);

    if (j->t->timer_us)
        start_timer(j->t->timer_us);
    r->status = status == TIDE_OK ? set_up(&e, (int)rank->rank, j->t) : status;
    tide_bootstrap_destroy(e.bootstrap);
    belongings_left(&before, r->kept);
    r->ended = 1;
}

/* Seconds until the last rank has ended; a rank that has not after half a minute is killed and has not `ended`. */
static double run(const trouble *t, report *reports)
{
    job j = {t, reports};
    int how[RANKS];
    double seconds;

    memset(reports, 0, RANKS * sizeof *reports);
    seconds = processes_run(RANKS, rank_main, &j, 0, 30, how);
    assert_true(seconds >= 0.0);
    return seconds;
}

static report *shared_reports(void)
{
    report *r = processes_shared(RANKS * sizeof *r);
    assert_non_null(r);
    return r;
}

static void test_a_rank_dies_between_exchanges(void **state)
{
    report *r = shared_reports();
    int at, deaths = 0;
    (void)state;
    for (int victim = 0; victim < 2; victim++) {
        for (at = 0; at < NEVER; at++) {
            trouble t = {.victim = victim, .at = at, .limit_rank = -1, .rows = 10};
            double seconds = run(&t, r);
            if (r[victim].ended)
                break; /* it has set up, used and destroyed everything */
            deaths++;
            for (int i = 0; i < RANKS; i++) {
                if (i == victim)
                    continue;
                if (!r[i].ended || seconds > 10.0 || r[i].kept[0])
                    print_error("victim %d after %d: rank %d: %s in %.1f s, kept %s\n", victim, at, i, r[i].text,
                                seconds, r[i].kept);
                assert_true(r[i].ended);
                assert_true(seconds < 10.0);
                assert_string_equal(r[i].kept, "");
            }
        }
        assert_int_equal(r[victim].status, TIDE_OK);
    }
    assert_true(deaths > 20);
    processes_unshare(r, RANKS * sizeof *r);
}

static void test_the_lost_rank_is_named(void **state)
{
    report *r = shared_reports();
    trouble t = {.victim = 1, .at = 3, .limit_rank = -1, .rows = 10};
    (void)state;
    run(&t, r);
    for (int i = 0; i < RANKS; i += 2) {
        assert_true(r[i].ended);
        assert_int_not_equal(r[i].status, TIDE_OK);
        assert_non_null(strstr(r[i].text, "rank 1"));
    }
    processes_unshare(r, RANKS * sizeof *r);
}

static void test_signals_do_not_disturb(void **state)
{
    report *r = shared_reports();
    trouble t = {.victim = -1, .limit_rank = -1, .timer_us = 200, .rows = 200000};
    (void)state;
    for (int round = 0; round < 3; round++) {
        run(&t, r);
        for (int i = 0; i < RANKS; i++) {
            if (r[i].status != TIDE_OK)
                print_error("rank %d: %s\n", i, r[i].text);
            assert_true(r[i].ended);
            assert_int_equal(r[i].status, TIDE_OK);
            assert_string_equal(r[i].kept, "");
        }
    }
    processes_unshare(r, RANKS * sizeof *r);
}

/* One rank gets a descriptor more each time, until it has enough: all ranks return its error, and soon. */
static void test_few_descriptors(void **state)
{
    report *r = shared_reports();
    int refused = 0;
    (void)state;
    for (rlim_t spare = 1;; spare++) {
        trouble t = {.victim = -1, .limit_rank = 1, .spare_fds = spare, .rows = 10};
        double seconds = run(&t, r);
        assert_true(spare < 64);
        for (int i = 0; i < RANKS; i++) {
            if (!r[i].ended || seconds > 10.0 || r[i].status != r[1].status || r[i].kept[0])
                print_error("%d descriptors: rank %d: %d (%s) in %.1f s\n", (int)spare, i, r[i].status, r[i].text,
                            seconds);
            assert_true(r[i].ended);
            assert_true(seconds < 10.0);
            assert_int_equal(r[i].status, r[1].status);
            assert_string_equal(r[i].kept, "");
        }
        if (r[1].status == TIDE_OK)
            break;
        assert_int_equal(r[1].status, TIDE_ERR_SYSTEM);
        refused++;
    }
    assert_true(refused > 3);
    processes_unshare(r, RANKS * sizeof *r);
}

static void test_little_address_space(void **state)
{
    report *r = shared_reports();
    int refused = 0;
    (void)state;
    if (mapped_bytes() > (rlim_t)1 << 40)
        skip(); /* a sanitizer's shadow: the limit would hit that */
    for (rlim_t spare = 1 << 18;; spare += spare / 2) {
        trouble t = {.victim = -1, .limit_rank = 1, .spare_bytes = spare, .rows = 20000};
        double seconds = run(&t, r);
        assert_true(spare < (rlim_t)1 << 34);
        for (int i = 0; i < RANKS; i++) {
            if (!r[i].ended || seconds > 10.0 || r[i].status != r[1].status)
                print_error("%ld bytes: rank %d: %d (%s) in %.1f s\n", (long)spare, i, r[i].status, r[i].text, seconds);
            assert_true(r[i].ended);
            assert_true(seconds < 10.0);
            assert_int_equal(r[i].status, r[1].status);
            assert_string_equal(r[i].kept, "");
        }
        if (r[1].status == TIDE_OK)
            break;
        refused++;
    }
    assert_true(refused > 2);
    processes_unshare(r, RANKS * sizeof *r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_rank_dies_between_exchanges),
        cmocka_unit_test(test_the_lost_rank_is_named),
        cmocka_unit_test(test_signals_do_not_disturb),
        cmocka_unit_test(test_few_descriptors),
        cmocka_unit_test(test_little_address_space),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
