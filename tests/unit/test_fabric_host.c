/*
 * The host device below the engine: fast kernels against their naive twins, agreement, the exchange of descriptors,
 * streams and events.
 */
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "../harness/threads.h"
#include "fabric/host/host.h"

/* ---- kernels --------------------------------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;
static uint32_t draw(uint32_t bound)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 20) % bound;
}

/* Any finite value: which of two NaN a sum keeps is the compiler's business. */
static void fill(unsigned char *p, size_t bytes, int dtype)
{
    for (size_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)draw(256);
    for (size_t i = 0; dtype == TIDE_F32 && i + 4 <= bytes; i += 4)
        if ((p[i + 3] & 0x7f) == 0x7f && (p[i + 2] & 0x80))
            p[i + 3] = 0x3f;
    for (size_t i = 0; dtype != TIDE_F32 && i + 2 <= bytes; i += 2)
        if (((p[i + 1] << 8 | p[i]) & (dtype == TIDE_BF16 ? 0x7f80 : 0x7c00)) == (dtype == TIDE_BF16 ? 0x7f80 : 0x7c00))
            p[i + 1] = 0x3b;
}

static fab_ptr at(const void *p)
{
    return (fab_ptr){(uintptr_t)p, -1, 0};
}

enum { ROOM = 1 << 16 };

static void test_copy_kernels(void **state)
{
    enum { SMALL = 8192 };
    unsigned char *src = malloc(SMALL), *fast = malloc(SMALL), *naive = malloc(SMALL);
    const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16, TIDE_OPAQUE};
    (void)state;
    for (int round = 0; round < 1000; round++) {
        int from = dtypes[draw(4)], to = from == TIDE_OPAQUE ? from : dtypes[draw(3)];
        uint32_t width = draw(300), rows = 1 + draw(5), off = draw(16), off2 = draw(16);
        uint32_t src_item = from == TIDE_OPAQUE ? 1 : tide_dtype_bytes(from),
                 dst_item = to == TIDE_OPAQUE ? 1 : tide_dtype_bytes(to);
        fab_run run = {.src = at(src + off),
                       .width = width,
                       .rows = rows,
                       .src_pitch = width * src_item + draw(2) * draw(9),
                       .dst_pitch = width * dst_item + draw(2) * draw(9)};
        fab_copy copy = {.runs = &run, .n_runs = 1, .src_dtype = (uint8_t)from, .dst_dtype = (uint8_t)to};
        fill(src + off, SMALL - 16, from);
        fill(fast, SMALL, TIDE_OPAQUE);
        memcpy(naive, fast, SMALL);
        run.src.zero = draw(8) == 0;
        run.dst = at(fast + off2);
        host_run_copy(&copy, NULL);
        run.dst = at(naive + off2);
        host_naive_copy(&copy, NULL);
        assert_memory_equal(fast, naive, SMALL);
    }
    free(naive);
    free(fast);
    free(src);
}

/* Every fp16 and bf16 value widens exactly; every rounding case of narrowing, at the edges of the formats. */
static void test_formats(void **state)
{
    enum { N = 65536 };
    uint16_t *half = malloc(N * sizeof *half), *back = malloc(N * sizeof *back), *back2 = malloc(N * sizeof *back2);
    float *wide = malloc(N * sizeof *wide), *wide2 = malloc(N * sizeof *wide2);
    const int formats[] = {TIDE_BF16, TIDE_F16};
    (void)state;
    for (int f = 0; f < 2; f++) {
        fab_run widen = {.src = at(half), .dst = at(wide), .width = N, .rows = 1};
        fab_copy copy = {.runs = &widen, .n_runs = 1, .src_dtype = (uint8_t)formats[f], .dst_dtype = TIDE_F32};
        for (uint32_t i = 0; i < N; i++)
            half[i] = (uint16_t)i;
        host_run_copy(&copy, NULL);
        widen.dst = at(wide2);
        host_naive_copy(&copy, NULL);
        assert_memory_equal(wide, wide2, N * sizeof *wide);
        for (int step = -2; step <= 2; step++) { /* halves, and the floats on both sides of the middle of two */
            fab_run narrow = {.src = at(wide2), .dst = at(back), .width = N, .rows = 1};
            fab_copy cast = {.runs = &narrow, .n_runs = 1, .src_dtype = TIDE_F32, .dst_dtype = (uint8_t)formats[f]};
            for (uint32_t i = 0; i < N; i++) {
                uint32_t bits, half_step = formats[f] == TIDE_BF16 ? 0x8000 : 0x1000;
                memcpy(&bits, &wide[i], 4);
                bits += (step ? half_step : 0) + (uint32_t)(step == 2 ? 1 : step == -2 ? -1 : 0);
                memcpy(&wide2[i], &bits, 4);
            }
            host_run_copy(&cast, NULL);
            narrow.dst = at(back2);
            host_naive_copy(&cast, NULL);
            assert_memory_equal(back, back2, N * sizeof *back);
        }
    }
    free(wide2);
    free(wide);
    free(back2);
    free(back);
    free(half);
}

static void test_reduce_kernels(void **state)
{
    enum { MAX_SOURCES = 9 };
    unsigned char *pool[MAX_SOURCES], *fast = malloc(ROOM), *naive = malloc(ROOM);
    (void)state;
    for (int i = 0; i < MAX_SOURCES; i++)
        pool[i] = malloc(ROOM);
    for (int round = 0; round < 500; round++) {
        fab_source sources[MAX_SOURCES];
        fab_call call = {.alpha = (float)draw(7) / 3.0f - 1.0f, .accumulate = (int)draw(2)};
        uint32_t elems = draw(round % 10 ? 200 : 5000), rows = 1 + draw(3);
        fab_segment segment = {
            .dst_pitch = elems * 4 + draw(2) * 12, .elems = elems, .rows = rows, .n_sources = draw(MAX_SOURCES + 1)};
        fab_reduce reduce = {&segment, sources, 1, (int)draw(4), 0};
        uint32_t off = draw(16);
        size_t used;
        if (rows * (segment.dst_pitch + 16) > ROOM - 64)
            rows = segment.rows = 1;
        used = tide_min_u64(ROOM - 16, rows * (segment.dst_pitch + 16));
        for (uint32_t i = 0; i < segment.n_sources; i++) {
            uint32_t dtype = draw(3), start = draw(16);
            fill(pool[i] + start, used, (int)dtype);
            sources[i] = (fab_source){at(pool[i] + start), (elems + draw(3)) * tide_dtype_bytes((int)dtype), dtype, 0};
        }
        fill(fast + off, used, TIDE_F32);
        memcpy(naive, fast, off + used);
        segment.dst = at(fast + off);
        host_run_reduce(&reduce, &call);
        segment.dst = at(naive + off);
        host_naive_reduce(&reduce, &call);
        assert_memory_equal(fast, naive, off + used);
    }
    for (int i = 0; i < MAX_SOURCES; i++)
        free(pool[i]);
    free(naive);
    free(fast);
}

/* No contraction: alpha * sum is rounded before it is added. */
static void test_separate_multiply_and_add(void **state)
{
    float source = 1.0f + 0x1p-12f, out = -(1.0f + 0x1p-11f), zero = -0.0f;
    fab_source s = {at(&source), 4, TIDE_F32, 0};
    fab_segment g = {.dst = at(&out), .dst_pitch = 4, .elems = 1, .rows = 1, .n_sources = 1};
    fab_reduce r = {&g, &s, 1, FAB_BETA_ONE, 0};
    fab_call call = {.alpha = 1.0f + 0x1p-12f};
    (void)state;
    host_run_reduce(&r, &call);
    assert_true(out == 0.0f); /* (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; a fused one would leave 2^-24 */
    /* the first source starts the sum: -0 stays; 0 + -0 is +0 */
    s.at = at(&zero);
    r.beta = FAB_NOT_FINAL;
    host_run_reduce(&r, &call);
    assert_true(out == 0.0f && signbit(out));
    r.beta = FAB_BETA_ZERO;
    host_run_reduce(&r, &call);
    assert_true(out == 0.0f && !signbit(out));
    g.n_sources = 0;
    r.beta = FAB_NOT_FINAL;
    out = 5;
    host_run_reduce(&r, &call);
    assert_true(out == 0.0f && !signbit(out));
}

/* ---- agreement ------------------------------------------------------------------------------- */

static int agree_rank(threads_rank *rank)
{
    fab_open desc = {.rank = rank->rank,
                     .n_ranks = rank->n_ranks,
                     .node_size = 1,
                     .allgather = threads_allgather,
                     .allgather_context = rank};
    int wrong = fab_agree(&desc, TIDE_OK) != TIDE_OK, status = TIDE_OK;
    if (rank->rank == 2)
        status = tide_fail(TIDE_ERR_UNSUPPORTED, "chunk: 7 is odd");
    if (rank->rank == 3)
        status = tide_fail(TIDE_ERR_MEMORY, "no room");
    wrong |= fab_agree(&desc, status) != TIDE_ERR_UNSUPPORTED;
    wrong |= strstr(tide_last_error(), "chunk: 7 is odd") == NULL;
    wrong |= rank->rank != 2 && strstr(tide_last_error(), "rank 2") == NULL;
    return wrong;
}

static void test_agree(void **state)
{
    (void)state;
    assert_int_equal(threads_run(5, agree_rank, NULL), 0);
    assert_int_equal(threads_run(300, agree_rank, NULL), 0);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static int exchange_rank(threads_rank *rank)
{
    fab_open desc = {.rank = rank->rank,
                     .n_ranks = rank->n_ranks,
                     .node_size = 1,
                     .allgather = threads_allgather,
                     .allgather_context = rank};
    uint8_t peers[6];
    int fds[6], pipes[2], wrong = 0;
    int64_t pids[6] = {0};
    uint32_t got = 0;

    if (pipe(pipes) != 0)
        return 1;
    for (uint32_t r = 0; r < rank->n_ranks; r++)
        peers[r] = r != rank->rank && (r + rank->rank) % 2 == 0; /* ranks of one parity */
    wrong |= fab_handles_exchange(&desc, TIDE_OK, peers, pipes[1], fds, pids) != TIDE_OK;
    for (uint32_t r = 0; r < rank->n_ranks && !wrong; r++) {
        wrong |= (fds[r] >= 0) != (peers[r] != 0);
        wrong |=
            peers[r] && (pids[r] != getpid() || write(fds[r], &rank->rank, sizeof rank->rank) != sizeof rank->rank);
    }
    for (uint32_t r = 0; r < rank->n_ranks && !wrong; r++) { /* what each peer wrote into my pipe through its copy */
        uint32_t who;
        if (!peers[r])
            continue;
        wrong |= read(pipes[0], &who, sizeof who) != sizeof who || !peers[who];
        got |= 1u << who;
    }
    for (uint32_t r = 0; r < rank->n_ranks; r++) {
        wrong |= peers[r] && !(got & 1u << r);
        if (fds[r] >= 0)
            close(fds[r]);
    }
    /* one rank's failure is everybody's, and no descriptor is handed out */
    wrong |= fab_handles_exchange(&desc, rank->rank == 4 ? tide_fail(TIDE_ERR_STATE, "not now") : TIDE_OK, peers,
                                  pipes[1], fds, pids) != TIDE_ERR_STATE;
    for (uint32_t r = 0; r < rank->n_ranks; r++)
        wrong |= fds[r] != -1;
    close(pipes[0]);
    close(pipes[1]);
    return wrong;
}

static void test_handles(void **state)
{
    (void)state;
    assert_int_equal(threads_run(6, exchange_rank, NULL), 0);
}

/* ---- streams, events and calls of one rank --------------------------------------------------- */

typedef struct bench {
    threads_rank *rank;
    fab_device *d;
    fab_queue *q;
} bench;

static int open_one(threads_rank *rank, bench *b, uint32_t n_streams)
{
    fab_open desc = {.rank = rank->rank,
                     .n_ranks = rank->n_ranks,
                     .node_size = rank->n_ranks,
                     .allgather = threads_allgather,
                     .allgather_context = rank};
    b->rank = rank;
    b->q = NULL;
    return fab_host_open(&desc, &b->d) != TIDE_OK || b->d->verbs->queue_create(b->d, n_streams, &b->q) != TIDE_OK;
}

static void close_one(bench *b)
{
    b->d->verbs->queue_stop(b->q);
    b->d->verbs->queue_destroy(b->q);
    b->d->verbs->close(b->d);
}

/* A join sees the latest record enqueued before it; calls overlap up to the ring's depth and the enqueuer then sleeps;
 * records of one event from two streams and the caller complete in any order. */
static int events_rank(threads_rank *rank)
{
    enum { ROUNDS = 300 };
    bench b;
    fab_event *e[2];
    fab_calls *calls;
    uint32_t ops[3] = {4, 4, 4};
    uint64_t a = 0, c = 0, value = 0;
    fab_run to_c = {.src = at(&value), .dst = at(&c), .width = 8, .rows = 1},
            to_a = {.src = {0, 0, 0}, .dst = at(&a), .width = 8, .rows = 1};
    fab_copy copy_a = {.runs = &to_a, .n_runs = 1, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE},
             copy_c = {.runs = &to_c, .n_runs = 1, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE};
    fab_word word = {0};
    fab_post post = {&word, 0};
    fab_where where = {"test", 7};
    const fab_device_verbs *v;
    int wrong = open_one(rank, &b, 3);

    if (wrong)
        return 1;
    v = b.d->verbs;
    wrong |= v->event_create(b.q, &e[0]) != TIDE_OK || v->event_create(b.q, &e[1]) != TIDE_OK;
    wrong |= v->calls_create(b.q, 1, ops, &calls) != TIDE_OK;
    wrong |= v->caller_wait(b.q, e[0], NULL) != TIDE_OK; /* never recorded: no wait */
    for (uint64_t i = 1; i <= ROUNDS && !wrong; i++) {
        uint64_t source = i;
        const void *args[] = {&source};
        fab_call_desc desc = {args, 1, 0, 1.0f, i, 99};
        fab_call *call;
        v->caller_record(b.q, e[1], NULL);
        wrong |= v->call_begin(calls, &desc, &call) != TIDE_OK;
        v->wait(b.q, 0, call, &post, 1, i, 1, &where); /* until stream 1 signals */
        v->copy(b.q, 0, call, &copy_a);
        v->record(b.q, 0, e[0]);
        v->join(b.q, 1, e[1]);
        v->signal(b.q, 1, call, &post, 1, i);
        v->record(b.q, 1, e[1]);
        v->join(b.q, 2, e[0]);
        v->copy(b.q, 2, call, &copy_c);
        v->call_submit(call, 0);
        wrong |= v->caller_wait(b.q, e[0], NULL) != TIDE_OK;
        wrong |= a != i;
    }
    for (uint64_t i = ROUNDS + 1; i <= 2 * ROUNDS && !wrong;
         i++) { /* many calls under way: the enqueuer waits for room */
        static const uint64_t constant = 5;
        const void *args[] = {&constant};
        fab_call_desc desc = {args, 1, 0, 1.0f, i, 99};
        fab_call *call;
        wrong |= v->call_begin(calls, &desc, &call) != TIDE_OK;
        v->wait(b.q, 0, call, &post, 1, i, 1, &where);
        v->copy(b.q, 0, call, &copy_a);
        v->record(b.q, (uint32_t)i % 2 * 2, e[0]);
        v->signal(b.q, 1, call, &post, 1, i);
        v->call_submit(call, 0);
    }
    wrong |= v->caller_wait(b.q, e[0], NULL) != TIDE_OK;
    wrong |= v->sync(b.q) != TIDE_OK || a != 5;
    v->queue_stop(b.q);
    v->calls_destroy(calls);
    v->event_destroy(e[0]);
    v->event_destroy(e[1]);
    v->queue_destroy(b.q);
    v->close(b.d);
    return wrong;
}

static void test_events(void **state)
{
    (void)state;
    for (int workers = 1; workers <= 3; workers++) {
        char text[16];
        snprintf(text, sizeof text, "%d", workers);
        setenv("TIDE_HOST_WORKERS", text, 1);
        assert_int_equal(threads_run(1, events_rank, NULL), 0);
    }
    setenv("TIDE_HOST_WORKERS", "9", 1);
    assert_int_equal(threads_run(1, events_rank, NULL), 1);
    unsetenv("TIDE_HOST_WORKERS");
}

/* A held call that is never continued must not put the enqueuer to sleep for good. */
static int held_rank(threads_rank *rank)
{
    bench b;
    fab_calls *calls;
    uint32_t ops[1] = {1};
    int wrong = open_one(rank, &b, 1), status = TIDE_OK;
    fab_call_desc desc = {NULL, 0, 0, 1.0f, 1, 0};
    fab_call *call;
    if (wrong)
        return 1;
    wrong |= b.d->verbs->calls_create(b.q, 0, ops, &calls) != TIDE_OK;
    for (int i = 0; i < 100 && status == TIDE_OK; i++) {
        status = b.d->verbs->call_begin(calls, &desc, &call);
        if (status == TIDE_OK)
            b.d->verbs->call_submit(call, 1);
    }
    wrong |= status != TIDE_ERR_STATE;
    b.d->verbs->calls_destroy(calls);
    close_one(&b);
    return wrong;
}

static void test_held_calls(void **state)
{
    (void)state;
    assert_int_equal(threads_run(1, held_rank, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copy_kernels),
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_reduce_kernels),
        cmocka_unit_test(test_separate_multiply_and_add),
        cmocka_unit_test(test_agree),
        cmocka_unit_test(test_handles),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_held_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
