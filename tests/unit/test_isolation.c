/* test_isolation.c - who is not a rank, or belongs to another user, gets no memory and takes no rank's place.
 *
 * Becoming another user takes root; without it the tests that need one say so and are skipped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../harness/processes.h"
#include "fabric/fabric.h"

enum { NOBODY = 65534, INTRUDER = 99 };

static bool can_become_another(void)
{
    if (geteuid() == 0)
        return true;
    print_message("skipped: only root can become another user\n");
    return false;
}

/* In a child. The call itself: the C library's wants to tell threads that the child has not. */
static void become_nobody(void)
{
    if (syscall(SYS_setuid, NOBODY) != 0)
        _exit(9);
}

/* Runs fn in a child process, as nobody if asked to; its return value. */
static int in_child(int (*fn)(void *context), void *context, bool nobody)
{
    int how;
    pid_t child = fork();
    if (child == 0) {
        if (nobody)
            become_nobody();
        _exit(fn(context));
    }
    return child > 0 && waitpid(child, &how, 0) == child && WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

static int connect_to(const char *name, socklen_t bytes)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(a.sun_path, name, bytes);
    if (connect(s, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes)) == 0)
        return s;
    close(s);
    return -1;
}

/* ---- descriptors -------------------------------------------------------------------------------- */

/* What handles.c puts on the wire. */
typedef struct card {
    uint64_t token[2];
    uint32_t name_bytes;
    char name[20];
} card;
typedef struct parcel {
    uint64_t token[2];
    uint32_t rank, refused;
} parcel;

typedef struct intrusion {
    const char *what;
    bool nobody, wrong_token, short_parcel, no_descriptor;
    uint32_t rank; /* that it claims to be */
} intrusion;

typedef struct report {
    int status, wrong, tried;
    char text[256];
} report;

typedef struct exchange {
    const intrusion *intrusion;
    report *reports;
    tide_bootstrap *bootstrap;
    report *own;
    card cards[2];
} exchange;

static int memory_with(int value)
{
    int fd = memfd_create("test", MFD_CLOEXEC);
    return fd >= 0 && write(fd, &value, sizeof value) == sizeof value ? fd : -1;
}

/* Knocks at both ranks with a descriptor of its own. 0: both have been reached. */
static int intrude(void *context)
{
    const exchange *e = context;
    const intrusion *how = e->intrusion;
    int fd = memory_with(INTRUDER), reached = 0;

    for (int r = 0; r < 2; r++) {
        const card *to = &e->cards[r];
        parcel p = {{to->token[0] + how->wrong_token, to->token[1]}, how->rank, how->no_descriptor};
        struct iovec part = {&p, how->short_parcel ? sizeof p - 4 : sizeof p};
        union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control = {{0}};
        struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
        int s = connect_to(to->name, to->name_bytes);
        if (s < 0)
            continue;
        if (!how->no_descriptor) {
            m.msg_control = control.bytes;
            m.msg_controllen = sizeof control.bytes;
            CMSG_FIRSTHDR(&m)->cmsg_level = SOL_SOCKET;
            CMSG_FIRSTHDR(&m)->cmsg_type = SCM_RIGHTS;
            CMSG_FIRSTHDR(&m)->cmsg_len = CMSG_LEN(sizeof fd);
            memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), &fd, sizeof fd);
        }
        reached += sendmsg(s, &m, MSG_NOSIGNAL) > 0 || errno == EPIPE; /* it may have hung up */
        close(s);
    }
    return reached == 2 ? 0 : 1;
}

/* Rank 0 lets the intruder in between the cards and its own parcel: the best moment there is. */
static int gather_and_intrude(void *context, const void *in, void *out, size_t bytes)
{
    exchange *e = context;
    int status = tide_bootstrap_allgather(e->bootstrap, in, out, bytes);
    if (status == TIDE_OK && bytes == sizeof(card)) {
        memcpy(e->cards, out, sizeof e->cards);
        if (e->own == &e->reports[0])
            e->own->tried = in_child(intrude, e, e->intrusion->nobody) == 0;
    }
    return status;
}

static void exchange_rank(const processes_rank *rank)
{
    exchange e = *(const exchange *)rank->context;
    report *r = e.own = &e.reports[rank->rank];
    tide_options options = TIDE_OPTIONS_INIT;
    fab_open desc = {.rank = rank->rank, .n_ranks = 2, .node_size = 1, .allgather = gather_and_intrude,
                     .allgather_context = &e, .options = &options};
    uint8_t peers[2] = {rank->rank == 1, rank->rank == 0};
    int fds[2] = {-1, -1}, value = -1;
    int64_t pids[2] = {0};

    options.deadline_ms = 10000;
    r->status = tide_bootstrap_local(rank->path, rank->rank, 2, 20000, &e.bootstrap);
    if (r->status == TIDE_OK)
        r->status = fab_handles_exchange(&desc, TIDE_OK, peers, memory_with((int)rank->rank), fds, pids);
    snprintf(r->text, sizeof r->text, "%s", r->status == TIDE_OK ? "" : tide_last_error());
    if (r->status == TIDE_OK)
        r->wrong = pread(fds[1 - rank->rank], &value, sizeof value, 0) != sizeof value || value != 1 - (int)rank->rank ||
                   fds[rank->rank] >= 0;
    tide_bootstrap_destroy(e.bootstrap);
}

static void test_descriptors_of_strangers(void **state)
{
    static const intrusion intrusions[] = {
        {.what = "another user with the right token", .nobody = true, .rank = 1},
        {.what = "the same user with a wrong token", .wrong_token = true, .rank = 1},
        {.what = "a rank that does not exist", .rank = 7},
        {.what = "half a message", .short_parcel = true, .rank = 1},
        {.what = "a refusal with a wrong token", .wrong_token = true, .no_descriptor = true},
    };
    report *reports = processes_shared(2 * sizeof *reports);
    (void)state;
    assert_non_null(reports);
    for (size_t i = 0; i < sizeof intrusions / sizeof intrusions[0]; i++) {
        exchange e = {.intrusion = &intrusions[i], .reports = reports};
        int how[2];
        if (e.intrusion->nobody && !can_become_another())
            continue;
        memset(reports, 0, 2 * sizeof *reports);
        assert_true(processes_run(2, exchange_rank, &e, 0, 30, how) >= 0);
        for (int r = 0; r < 2; r++) {
            if (reports[r].status != TIDE_OK || reports[r].wrong)
                print_error("%s: rank %d: %s\n", e.intrusion->what, r, reports[r].text);
            assert_int_equal(how[r], 0);
            assert_int_equal(reports[r].status, TIDE_OK);
            assert_false(reports[r].wrong);
        }
        assert_true(reports[0].tried);
    }
    processes_unshare(reports, 2 * sizeof *reports);
}

/* Two processes of different users that an all-gather has brought together all the same. */
static int pair_allgather(void *context, const void *in, void *out, size_t bytes)
{
    const int *pair = context; /* own rank, socket */
    if (write(pair[1], in, bytes) != (ssize_t)bytes)
        return -1;
    memcpy((char *)out + (size_t)pair[0] * bytes, in, bytes);
    return recv(pair[1], (char *)out + (size_t)(1 - pair[0]) * bytes, bytes, MSG_WAITALL) == (ssize_t)bytes ? 0 : -1;
}

static void mixed_rank(const processes_rank *rank)
{
    const exchange *e = rank->context;
    const int *sockets = (const int *)(const void *)&e->cards[0];
    int pair[2] = {(int)rank->rank, sockets[rank->rank]};
    report *r = &e->reports[rank->rank];
    fab_open desc = {.rank = rank->rank, .n_ranks = 2, .node_size = 1, .allgather = pair_allgather,
                     .allgather_context = pair};
    uint8_t peers[2] = {rank->rank == 1, rank->rank == 0};
    int fds[2] = {-1, -1};
    int64_t pids[2] = {0};

    if (rank->rank == 1)
        become_nobody();
    r->status = fab_handles_exchange(&desc, TIDE_OK, peers, memory_with((int)rank->rank), fds, pids);
    snprintf(r->text, sizeof r->text, "%s", tide_last_error());
    r->wrong = fds[0] >= 0 || fds[1] >= 0;
}

static void test_no_descriptor_for_another_user(void **state)
{
    report *reports = processes_shared(2 * sizeof *reports);
    exchange e = {.reports = reports};
    int sockets[2], how[2];
    (void)state;
    if (!can_become_another())
        skip();
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    memcpy(&e.cards[0], sockets, sizeof sockets);
    assert_true(processes_run(2, mixed_rank, &e, 0, 30, how) >= 0);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(reports[r].status, TIDE_ERR_SYSTEM);
        assert_non_null(strstr(reports[r].text, "user 65534, expected user 0"));
        assert_false(reports[r].wrong);
    }
    close(sockets[0]);
    close(sockets[1]);
    processes_unshare(reports, 2 * sizeof *reports);
}

/* ---- an arena in use ---------------------------------------------------------------------------- */

/* Opens what the parent has open, through /proc; how many of it it could. */
static int attach(void *context)
{
    const pid_t *parent = context;
    int opened = 0;
    for (int fd = 0; fd < 256; fd++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)*parent, fd);
        opened += open(path, O_RDWR | O_CLOEXEC) >= 0;
    }
    return opened;
}

static int memories_open(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++) {
        char path[64], target[64] = {0};
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        n += readlink(path, target, sizeof target - 1) > 0 && strstr(target, "memfd:tide") != NULL;
    }
    return n;
}

static void test_an_arena_in_use(void **state)
{
    tide_param param = {"p", 2, 0, {10, 3}};
    tide_group_desc group = TIDE_GROUP_DESC_INIT;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    pid_t self = getpid();
    tide_comm *comm;
    tide_group *g;
    (void)state;
    if (!can_become_another())
        skip();
    group.n_params = 1;
    group.params = &param;
    assert_int_equal(tide_comm_create(&desc, &comm), TIDE_OK);
    assert_int_equal(tide_groups_create(comm, &group, 1, &g), TIDE_OK);
    assert_true(memories_open() >= 2); /* control page and arena: there is something to attach to */
    assert_int_equal(in_child(attach, &self, true), 0);
    assert_true(in_child(attach, &self, false) >= 2); /* the same user could: the kernel draws the line there */
    assert_int_equal(tide_comm_destroy(comm), TIDE_OK);
    assert_int_equal(memories_open(), 0);
}

/* ---- the bootstrap ------------------------------------------------------------------------------ */

typedef struct hello {
    uint32_t magic, version, rank, n_ranks;
} hello;

typedef struct join {
    const char *path;
    bool nobody;
    hello hello;
} join;

/* Says it is a rank, and waits for what rank 0 answers. 0: it is turned away without a word. */
static int join_raw(void *context)
{
    const join *j = context;
    char name[96] = {0}, answer[256];
    int s = -1;
    memcpy(name + 1, j->path, strlen(j->path));
    for (int i = 0; i < 500 && s < 0; i++) {
        struct timespec pause = {0, 2000000};
        s = connect_to(name, (socklen_t)(1 + strlen(j->path)));
        if (s < 0)
            nanosleep(&pause, NULL);
    }
    if (s < 0)
        return 2;
    if (send(s, &j->hello, sizeof j->hello, MSG_NOSIGNAL) < 0)
        return errno == EPIPE || errno == ECONNRESET ? 0 : 3;
    return recv(s, answer, sizeof answer, MSG_WAITALL) <= 0 ? 0 : 1;
}

static void join_rank(const processes_rank *rank)
{
    const exchange *e = rank->context;
    report *r = &e->reports[rank->rank];
    tide_bootstrap *b = NULL;
    char in = (char)('a' + rank->rank), out[3] = {0};

    if (rank->rank == 1) { /* the intruder is there first */
        join j = {rank->path, e->intrusion->nobody,
                  {0x45444954, TIDE_VERSION_MAJOR << 16 | TIDE_VERSION_MINOR << 8 | TIDE_VERSION_PATCH, 1, 2}};
        if (!j.nobody)
            j.hello.magic++;
        r->tried = in_child(join_raw, &j, j.nobody);
    }
    r->status = tide_bootstrap_local(rank->path, rank->rank, 2, 20000, &b);
    if (r->status == TIDE_OK)
        r->status = tide_bootstrap_allgather(b, &in, out, 1);
    r->wrong = strcmp(out, "ab") != 0;
    if (r->status == TIDE_OK && rank->rank == 1) { /* nobody can come later, either */
        char name[96] = {0};
        memcpy(name + 1, rank->path, strlen(rank->path));
        r->wrong |= connect_to(name, (socklen_t)(1 + strlen(rank->path))) >= 0;
    }
    tide_bootstrap_destroy(b);
}

static void test_strangers_at_the_bootstrap(void **state)
{
    static const intrusion intrusions[] = {{.what = "a process that does not speak the protocol"},
                                           {.what = "another user who says that it is rank 1", .nobody = true}};
    report *reports = processes_shared(2 * sizeof *reports);
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        exchange e = {.intrusion = &intrusions[i], .reports = reports};
        int how[2];
        if (e.intrusion->nobody && !can_become_another())
            continue;
        memset(reports, 0, 2 * sizeof *reports);
        assert_true(processes_run(2, join_rank, &e, 0, 30, how) >= 0);
        assert_int_equal(reports[1].tried, 0);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(how[r], 0);
            assert_int_equal(reports[r].status, TIDE_OK);
            assert_false(reports[r].wrong);
        }
    }
    processes_unshare(reports, 2 * sizeof *reports);
}

/* Another user has taken the path before rank 0: rank 1 does not say a word to it. */
static int squat(void *context)
{
    const int *pipes = context;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    static const char path[] = "tide-test-squatted";
    char heard;
    int s = socket(AF_UNIX, SOCK_STREAM, 0), guest;
    memcpy(a.sun_path + 1, path, sizeof path - 1);
    if (bind(s, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + sizeof path)) != 0 ||
        listen(s, 1) != 0 || write(pipes[1], "r", 1) != 1)
        return 2;
    guest = accept(s, NULL, NULL);
    return guest < 0 ? 3 : read(guest, &heard, 1) == 0 ? 0 : 1;
}

static void test_a_path_of_another_user(void **state)
{
    tide_bootstrap *b = NULL;
    int pipes[2], how;
    char ready;
    pid_t child;
    (void)state;
    if (!can_become_another())
        skip();
    assert_int_equal(pipe(pipes), 0);
    child = fork();
    if (child == 0) {
        become_nobody();
        _exit(squat(pipes));
    }
    assert_int_equal(read(pipes[0], &ready, 1), 1);
    assert_int_equal(tide_bootstrap_local("tide-test-squatted", 1, 2, 5000, &b), TIDE_ERR_SYSTEM);
    assert_string_equal(tide_last_error(), "bootstrap: path: 'tide-test-squatted' belongs to another user");
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
    close(pipes[0]);
    close(pipes[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_descriptors_of_strangers),
        cmocka_unit_test(test_no_descriptor_for_another_user),
        cmocka_unit_test(test_strangers_at_the_bootstrap),
        cmocka_unit_test(test_a_path_of_another_user),
        cmocka_unit_test(test_an_arena_in_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
