/*
 * The fake NCCL keeps the rules that a real one keeps (the same checks run there: `tide nccl-rules`), in every mood of the
 * scheduler; and a rule that is broken is found.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../fakes/fake_nccl.h"
#include "cli/rules_nccl.h"

enum { SOON_MS = 5, RULES = 39, ALONE = 33 /* that want a communicator of two */ };

typedef struct seen {
    rules_count count;
    bool spoiled;
    char text[16384];
} seen;

static bool lost; /* the first signal is */

static void run(seen *s, const fake_cuda_options *c, const fake_nccl_options *o)
{
    const cuda_driver *d = fake_cuda_start(c);
    FILE *out = tmpfile();
    size_t n;

    assert_non_null(out);
    const nccl_library *library = fake_nccl_start(o);
    fake_nccl_lose_signal(lost);
    s->count = nccl_rules_run(library, d, NULL, SOON_MS, out, &s->spoiled);
    rewind(out);
    n = fread(s->text, 1, sizeof s->text - 1, out);
    s->text[n] = '\0';
    fclose(out);
}

static void test_kept(void **state)
{
    static seen s;
    (void)state;
    for (uint64_t seed = 0; seed < 9; seed++) {
        fake_cuda_options c = FAKE_CUDA_OPTIONS;
        fake_nccl_options o = FAKE_NCCL_OPTIONS;
        char complaint[256];
        c.seed = seed;
        c.devices = seed == 7 || seed == 8 ? 1 : seed == 6 ? 4 : 2;
        o.delay = seed % 3 * 5;
        o.shared_devices = seed == 7;
        o.abort_releases = seed % 2;
        run(&s, &c, &o);
        if (s.count.failed || s.spoiled || s.count.not_run != (seed == 8 ? ALONE : 0))
            fputs(s.text, stderr);
        assert_int_equal(s.count.failed, 0);
        assert_false(s.spoiled);
        assert_int_equal(s.count.ok + s.count.not_run, RULES);
        assert_int_equal(s.count.not_run, seed == 8 ? ALONE : 0);
        if (fake_cuda_complaints(complaint, sizeof complaint))
            fprintf(stderr, "%s\n", complaint);
        assert_int_equal(fake_cuda_complaints(NULL, 0), 0);
        assert_int_equal(fake_nccl_stop(), 0);
        assert_int_equal(fake_cuda_stop(), 0);
    }
}

/* An NCCL that is less fails the rules that are about it; a signal that is lost fails one, and the next ones go on. */
static void test_broken(void **state)
{
    static const char *const says[] = {
        "FAILED   memory of cuMemCreate with POSIX handles has a window: NULL for memory with POSIX handles",
        "FAILED   properties: one-sided calls from the host: ", "FAILED   version 2.31.2 or newer: ",
        "FAILED   signals before the first window want rmaEagerInit: "};
    static seen s;

    (void)state;
    for (int i = 0; i < 4; i++) {
        fake_cuda_options c = FAKE_CUDA_OPTIONS;
        fake_nccl_options o = FAKE_NCCL_OPTIONS;
        o.null_windows = i == 0;
        o.no_host_rma = i == 1;
        o.version = i == 2 ? 23101 : o.version;
        lost = o.abort_releases = i == 3; /* else a stream would stand for good */
        run(&s, &c, &o);
        if (!strstr(s.text, says[i]) || s.spoiled)
            fputs(s.text, stderr);
        assert_non_null(strstr(s.text, says[i]));
        assert_false(s.spoiled);
        assert_int_equal(s.count.ok + s.count.failed + s.count.not_run, RULES);
        if (lost)
            assert_int_equal(s.count.failed, 1);
        assert_int_equal(fake_nccl_stop(), 0);
        assert_int_equal(fake_cuda_stop(), 0);
    }
    lost = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kept), cmocka_unit_test(test_broken)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
