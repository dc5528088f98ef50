/*
 * test_link_size.c - the control link of as many ranks as the first argument says (64): threads of one process, each with
 * its connection and its link's thread. All pass barriers; then one ends without a goodbye, and all others hear of it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../harness/small.h"
#include "fabric/peers.h"

enum { BARRIERS = 5 };

typedef struct rank_state {
    _Atomic uint32_t passed, dead; /* futexes; dead: 1 + rank */
    int64_t met, barrier, heard;   /* ns: to connect, the longest barrier, when it heard of the death */
} rank_state;

typedef struct crowd {
    uint64_t *machines;
    rank_state *ranks;
    _Atomic int64_t died;
} crowd;

static uint32_t n_ranks = 64;

static void passed(void *context, uint32_t count)
{
    rank_state *s = context;
    atomic_store(&s->passed, count);
    fab_futex_wake(&s->passed);
}

static void gave_up(void *context, uint64_t set_up, uint64_t rails)
{
    (void)context;
    (void)set_up;
    (void)rails;
}

static void failed(void *context, const tide_failure *failure)
{
    (void)context;
    print_error("%s\n", failure->text);
}

static void died(void *context, uint32_t rank)
{
    rank_state *s = context;
    s->heard = tide_now_ns();
    atomic_store(&s->dead, rank + 1);
    fab_futex_wake(&s->dead);
}

static bool has_left(void *context, uint32_t rank)
{
    (void)context;
    (void)rank;
    return false;
}

static void where(void *context, uint64_t *call, uint64_t *op)
{
    (void)context;
    *call = *op = 0;
}

static const fab_link_hooks hooks = {passed, gave_up, failed, died, has_left, where};

/* true: in half a minute the word has become `value`. */
static bool becomes(_Atomic uint32_t *word, uint32_t value)
{
    int64_t end = tide_now_ns() + INT64_C(30000000000);
    for (uint32_t seen; (seen = atomic_load(word)) != value && tide_now_ns() < end;)
        fab_futex_wait(word, seen, 1000000000);
    return atomic_load(word) == value;
}

static int body(threads_rank *rank)
{
    crowd *c = rank->context;
    rank_state *s = &c->ranks[rank->rank];
    fab_open open = {.rank = rank->rank, .n_ranks = n_ranks, .node_size = 8, .machines = c->machines,
                     .allgather = threads_allgather, .allgather_context = rank};
    const fab_link_calls none = {0, 0};
    const uint32_t victim = n_ranks - 1;
    struct timespec rest = {n_ranks > 64, 50000000}; /* until the harness' own threads have come out of their all-gather */
    char one = 1, *all = malloc(n_ranks);
    int64_t begin = tide_now_ns();
    fab_link *l;

    CHECK(all && fab_link_meet(&open, TIDE_OK, &l) == TIDE_OK);
    s->met = tide_now_ns() - begin;
    CHECK(fab_link_start(l, &hooks, s) == TIDE_OK);
    for (uint32_t k = 1; k <= BARRIERS; k++) {
        CHECK(threads_allgather(rank, &one, all, 1) == 0);
        begin = tide_now_ns();
        fab_link_barrier(l, k, &none);
        CHECK(becomes(&s->passed, k));
        s->barrier = (int64_t)tide_max_u64((uint64_t)s->barrier, (uint64_t)(tide_now_ns() - begin));
    }
    CHECK(threads_allgather(rank, &one, all, 1) == 0);
    if (rank->rank == victim) {
        nanosleep(&rest, NULL);
        atomic_store(&c->died, tide_now_ns());
        fab_link_stop(l);
        fab_link_free(l);
    } else {
        CHECK(becomes(&s->dead, victim + 1));
    }
    CHECK(threads_allgather(rank, &one, all, 1) == 0);
    if (rank->rank != victim) {
        fab_link_leave(l);
        fab_link_stop(l);
        fab_link_free(l);
    }
    free(all);
    return 0;
}

static void test_a_crowd(void **state)
{
    crowd c = {.machines = calloc(n_ranks, sizeof *c.machines), .ranks = calloc(n_ranks, sizeof *c.ranks)};
    int64_t met = 0, barrier = 0, heard = 0;
    (void)state;
    assert_true(c.machines && c.ranks);
    for (uint32_t r = 0; r < n_ranks; r++)
        c.machines[r] = 1 + r / 8;
    assert_int_equal(threads_run(n_ranks, body, &c), 0);
    for (uint32_t r = 0; r + 1 < n_ranks; r++) {
        const rank_state *s = &c.ranks[r];
        met = s->met > met ? s->met : met;
        barrier = s->barrier > barrier ? s->barrier : barrier;
        heard = s->heard - c.died > heard ? s->heard - c.died : heard;
    }
    print_message("%u ranks: connected in %.3f s, a barrier in at most %.3f s, a death heard of by all in %.3f s\n", n_ranks,
                  (double)met / 1e9, (double)barrier / 1e9, (double)heard / 1e9);
    free(c.machines);
    free(c.ranks);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_crowd)};
    long n = argc > 1 ? strtol(argv[1], NULL, 10) : 64;
    if (n < 9 || n > TIDE_MAX_NODES * TIDE_MAX_LOCAL)
        return 2;
    n_ranks = (uint32_t)n;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
