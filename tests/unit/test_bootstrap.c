/* test_bootstrap.c - tide_bootstrap_local: gathers, late and missing ranks, contradictions, strangers, deaths, forks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

enum { MAX_RANKS = 8 };

/* One rank of a test: what it passes to tide_bootstrap_local, what it then does, and what came of it. */
typedef struct ranked {
    char path[64];
    uint32_t rank, n_ranks;
    int64_t timeout_ms;
    int delay_ms;
    size_t bytes;   /* of each all-gather */
    int gathers;    /* how many before it leaves */
    int status;     /* first failure */
    bool wrong;     /* a byte was wrong */
    char text[256]; /* of the failure */
} ranked;

static void pause_ms(int ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

static unsigned char byte_of(uint32_t rank, int round, size_t i)
{
    return (unsigned char)(rank * 37 + (uint32_t)round * 11 + (uint32_t)i * 7 + (uint32_t)(i >> 8));
}

static void *run(void *context)
{
    ranked *r = context;
    tide_bootstrap *b = NULL;
    unsigned char *in = malloc(r->bytes + 1), *out = malloc(r->bytes * r->n_ranks + 1);

    pause_ms(r->delay_ms);
    r->status = tide_bootstrap_local(r->path, r->rank, r->n_ranks, r->timeout_ms, &b);
    for (int round = 0; r->status == TIDE_OK && round < r->gathers; round++) {
        for (size_t i = 0; i < r->bytes; i++)
            in[i] = byte_of(r->rank, round, i);
        memset(out, 0xee, r->bytes * r->n_ranks);
        r->status = tide_bootstrap_allgather(b, in, out, r->bytes);
        for (uint32_t u = 0; r->status == TIDE_OK && u < r->n_ranks; u++) {
            for (size_t i = 0; i < r->bytes; i++)
                r->wrong |= out[u * r->bytes + i] != byte_of(u, round, i);
        }
    }
    if (r->status != TIDE_OK)
        snprintf(r->text, sizeof r->text, "%s", tide_last_error());
    tide_bootstrap_destroy(b);
    free(in);
    free(out);
    return NULL;
}

static void fill(ranked *r, uint32_t n, int64_t timeout_ms, size_t bytes, int gathers)
{
    static int serial;
    ++serial;
    for (uint32_t i = 0; i < n; i++) {
        r[i] = (ranked){.rank = i, .n_ranks = n, .timeout_ms = timeout_ms, .bytes = bytes, .gathers = gathers};
        snprintf(r[i].path, sizeof r[i].path, "tide-test-bootstrap-%ld-%d", (long)getpid(), serial);
    }
}

static void run_all(ranked *r, uint32_t n)
{
    pthread_t threads[MAX_RANKS];
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run, &r[i]), 0);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
}

static void test_gathers(void **state)
{
    static const size_t sizes[] = {1, 0, 13, 4096, (1 << 18) + 1}; /* the last is more than a socket holds */
    (void)state;
    for (uint32_t n = 1; n <= MAX_RANKS; n += n < 4 ? 1 : 4) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            ranked r[MAX_RANKS];
            fill(r, n, 20000, sizes[s], 3);
            run_all(r, n);
            for (uint32_t i = 0; i < n; i++) {
                assert_int_equal(r[i].status, TIDE_OK);
                assert_false(r[i].wrong);
            }
        }
    }
}

static void test_rank_0_comes_late(void **state)
{
    ranked r[3];
    (void)state;
    fill(r, 3, 20000, 8, 1);
    r[0].delay_ms = 100;
    run_all(r, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(r[i].status, TIDE_OK);
}

static void test_missing_rank_is_named(void **state)
{
    ranked r[3];
    (void)state;
    fill(r, 3, 300, 8, 1);
    run_all(r, 2); /* rank 2 never comes */
    assert_int_equal(r[0].status, TIDE_ERR_DEADLINE);
    assert_string_equal(r[0].text, "bootstrap: 2 of 3 ranks came within 300 ms; rank 2 is missing");
    assert_int_equal(r[1].status, TIDE_ERR_DEADLINE);
    fill(r, 3, 200, 8, 1);
    run_all(r + 1, 2); /* rank 0 never comes */
    for (int i = 1; i < 3; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_DEADLINE);
        assert_non_null(strstr(r[i].text, "found no rank 0"));
    }
}

static void test_contradictions(void **state)
{
    ranked r[3];
    (void)state;
    fill(r, 3, 5000, 8, 1);
    r[2].rank = 1;
    run_all(r, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_MISMATCH);
        assert_string_equal(r[i].text, "bootstrap: rank: two processes say that they are rank 1");
    }
    fill(r, 2, 5000, 8, 1);
    r[1].n_ranks = 5;
    run_all(r, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_MISMATCH);
        assert_string_equal(r[i].text, "bootstrap: n_ranks: 5 on rank 1, 2 on rank 0");
    }
    fill(r, 3, 5000, 8, 1);
    r[1].bytes = 9;
    run_all(r, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_MISMATCH);
        assert_string_equal(r[i].text, "bootstrap: bytes: 9 on rank 1, 8 on rank 0");
    }
}

/* Ranks that leave after fewer gathers: the others learn it at once, from rank 0, in the same words. */
static void test_a_rank_that_goes_is_noticed(void **state)
{
    ranked r[4];
    int64_t start;
    (void)state;
    fill(r, 4, 20000, 64, 3);
    r[2].gathers = 1;
    start = tide_now_ns();
    run_all(r, 4);
    assert_true(tide_now_ns() - start < INT64_C(5) * 1000000000);
    assert_int_equal(r[2].status, TIDE_OK);
    for (int i = 0; i < 4; i++) {
        if (i == 2)
            continue;
        assert_int_equal(r[i].status, TIDE_ERR_PEER_DEAD);
        assert_string_equal(r[i].text, "bootstrap: rank 2 has closed its connection");
    }
    fill(r, 3, 20000, 64, 2);
    r[0].gathers = 1;
    run_all(r, 3);
    for (int i = 1; i < 3; i++) {
        assert_int_equal(r[i].status, TIDE_ERR_PEER_DEAD);
        assert_string_equal(r[i].text, "bootstrap: rank 0 has closed its connection");
    }
}

static int connect_raw(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(a.sun_path + 1, path, strlen(path));
    for (int i = 0; i < 500; i++) {
        if (connect(fd, (struct sockaddr *)&a,
                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(path))) == 0)
            return fd;
        pause_ms(2);
    }
    close(fd);
    return -1;
}

static void test_strangers_are_waited_past(void **state)
{
    ranked r[2];
    pthread_t threads[2];
    int silent, noisy;
    (void)state;
    fill(r, 2, 20000, 8, 2);
    assert_int_equal(pthread_create(&threads[0], NULL, run, &r[0]), 0);
    silent = connect_raw(r[0].path);
    noisy = connect_raw(r[0].path);
    assert_true(silent >= 0 && noisy >= 0);
    assert_int_equal(write(noisy, "GET / HTTP/1.1\r\n\r\n", 18), 18);
    assert_int_equal(pthread_create(&threads[1], NULL, run, &r[1]), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(r[i].status, TIDE_OK);
        assert_false(r[i].wrong);
    }
    close(silent);
    close(noisy);
}

static void test_another_user_is_refused(void **state)
{
    ranked r[2];
    pthread_t thread;
    pid_t child;
    int code;
    (void)state;
    if (geteuid() != 0)
        skip(); /* only root can become somebody else */
    fill(r, 2, 1000, 8, 1);
    child = fork();
    if (child == 0) {
        if (setuid(65534) != 0)
            _exit(9);
        run(&r[1]);
        _exit(r[1].status == TIDE_OK ? 1 : 0);
    }
    assert_int_equal(pthread_create(&thread, NULL, run, &r[0]), 0);
    pthread_join(thread, NULL);
    assert_int_equal(r[0].status, TIDE_ERR_DEADLINE);
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code));
    assert_int_equal(WEXITSTATUS(code), 0);
}

static void test_processes(void **state)
{
    ranked r[4];
    pid_t children[4];
    (void)state;
    fill(r, 4, 20000, 1000, 2);
    for (int i = 0; i < 4; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            run(&r[i]);
            _exit(r[i].status == TIDE_OK && !r[i].wrong ? 0 : 1);
        }
    }
    for (int i = 0; i < 4; i++) {
        int code;
        assert_int_equal(waitpid(children[i], &code, 0), children[i]);
        assert_true(WIFEXITED(code));
        assert_int_equal(WEXITSTATUS(code), 0);
    }
}

static void test_forked_child_is_refused(void **state)
{
    tide_bootstrap *b;
    pid_t child;
    int code, in = 1, out;
    (void)state;
    assert_int_equal(tide_bootstrap_local("tide-test-alone", 0, 1, 1000, &b), TIDE_OK);
    child = fork();
    if (child == 0)
        _exit(tide_bootstrap_allgather(b, &in, &out, sizeof in) == TIDE_ERR_FORKED ? 0 : 1);
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
    assert_int_equal(tide_bootstrap_allgather(b, &in, &out, sizeof in), TIDE_OK);
    assert_int_equal(out, 1);
    tide_bootstrap_destroy(b);
}

static void test_arguments(void **state)
{
    char longest[91] = {0}, too_long[92] = {0};
    tide_bootstrap *b = NULL;
    int in = 1, out = 0;
    (void)state;
    memset(longest, 'x', 90);
    memset(too_long, 'x', 91);
#define BAD(call, message)                                                                                             \
    assert_int_equal(call, TIDE_ERR_ARGUMENT);                                                                         \
    assert_string_equal(tide_last_error(), message);                                                                   \
    assert_null(b)
    BAD(tide_bootstrap_local(NULL, 0, 1, 1, &b), "path: NULL, expected 1 to 90 bytes");
    BAD(tide_bootstrap_local("", 0, 1, 1, &b), "path: empty, expected 1 to 90 bytes");
    BAD(tide_bootstrap_local(too_long, 0, 1, 1, &b), "path: too long, expected 1 to 90 bytes");
    BAD(tide_bootstrap_local("a", 0, 0, 1, &b), "n_ranks: 0 is not in 1..65536");
    BAD(tide_bootstrap_local("a", 4, 4, 1, &b), "rank: 4 is not in 0..3");
    BAD(tide_bootstrap_local("a", 0, 4, 0, &b), "timeout_ms: 0, expected a positive number of milliseconds");
    BAD(tide_bootstrap_local("a", 0, 4, 1, NULL), "out: NULL, expected a place for the bootstrap");
    BAD(tide_bootstrap_allgather(NULL, &in, &out, 4), "bootstrap: NULL, expected one from tide_bootstrap_local");
    assert_int_equal(tide_bootstrap_local(longest, 0, 1, 1000, &b), TIDE_OK);
    assert_int_equal(tide_bootstrap_allgather(b, NULL, &out, 4), TIDE_ERR_ARGUMENT);
    assert_int_equal(tide_bootstrap_allgather(b, &in, NULL, 4), TIDE_ERR_ARGUMENT);
    assert_int_equal(tide_bootstrap_allgather(b, &in, &out, 4), TIDE_OK); /* bad arguments changed nothing */
    tide_bootstrap_destroy(b);
    tide_bootstrap_destroy(NULL);
}

static void test_a_taken_path(void **state)
{
    ranked r[2];
    pthread_t thread;
    tide_bootstrap *b = NULL;
    int listening;
    (void)state;
    fill(r, 2, 20000, 8, 1);
    assert_int_equal(pthread_create(&thread, NULL, run, &r[0]), 0);
    listening = connect_raw(r[0].path);
    assert_int_equal(tide_bootstrap_local(r[0].path, 0, 2, 1000, &b), TIDE_ERR_SYSTEM);
    assert_non_null(strstr(tide_last_error(), r[0].path));
    close(listening);
    run(&r[1]);
    pthread_join(thread, NULL);
    assert_int_equal(r[0].status, TIDE_OK);
    assert_int_equal(r[1].status, TIDE_OK);
}

static void test_out_of_memory(void **state)
{
    tide_bootstrap *b = NULL;
    uint64_t live = tide_alloc_live();
    int n = 1, status;
    (void)state;
    do {
        tide_alloc_fail_at((uint64_t)n);
        status = tide_bootstrap_local("tide-test-memory", 0, 1, 1000, &b);
        tide_alloc_fail_at(0);
        if (status != TIDE_OK) {
            assert_int_equal(status, TIDE_ERR_MEMORY);
            assert_int_equal(tide_alloc_live(), live);
        }
    } while (status != TIDE_OK && ++n < 10);
    assert_int_equal(status, TIDE_OK);
    assert_int_equal(n, 3);
    tide_bootstrap_destroy(b);
    assert_int_equal(tide_alloc_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gathers),
        cmocka_unit_test(test_rank_0_comes_late),
        cmocka_unit_test(test_missing_rank_is_named),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_a_rank_that_goes_is_noticed),
        cmocka_unit_test(test_strangers_are_waited_past),
        cmocka_unit_test(test_another_user_is_refused),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_forked_child_is_refused),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_a_taken_path),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
