/* check.c - `tide check`: runs configurations drawn from seeds, counts what was covered and what was wrong. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/check.h"

/* The default number of calls of drawn configurations is that in which every bucket of the histogram gets ENOUGH. */
enum { DEFAULT_CALLS = 6000, DEFAULT_MODEL_CALLS = 20, DEFAULT_LIFETIME = 10000, ENOUGH = 100, MAX_LEFT_OUT = 100, TELL_SECONDS = 15 };

/* ---- running and counting ---------------------------------------------------------------- */

/* How many collectives ran under what. */
enum {
    BY_NODES, BY_LOCAL, BY_WAVES, BY_PASSES, BY_OUTBOX, BY_STALE, BY_MASK, BY_MODE, BY_VALUES, BY_PROCS, BY_ORDER,
    BY_DELAY, BY_SLOW, BY_AGAIN, BY_KINDS
};
static const uint8_t no_yes[] = {0, 1, CHECK_END}, values[] = {0, 1, 2, 3, CHECK_END};
static const uint8_t waves[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, CHECK_END}, passes[] = {1, 2, 3, 4, CHECK_END};
static const struct {
    const char *name;
    const uint8_t *buckets; /* those that a long run fills */
} rows[BY_KINDS] = {
    {"nodes", check_nodes},
    {"local", check_local},
    {"waves", waves},
    {"passes", passes},
    {"partial_outbox", no_yes},
    {"stale_blocks", no_yes},
    {"masks", no_yes},
    {"slot_reuse", no_yes},
    {"values", values}, /* enum oracle_values */
    {"processes", no_yes},
    {"stream_order", no_yes},
    {"rail_delay", no_yes},
    {"slow_rank", no_yes},
    {"run_again", no_yes},
};
typedef struct tally {
    uint64_t calls, gathers, wrong, configs, left_out;
    uint64_t results; /* digest over the results of all calls */
    uint64_t by[BY_KINDS][TIDE_MAX_NODES + 1];
} tally;

static void count_config(tally *t, const check_config *config, const check_shared *shared)
{
    uint32_t n = config->topology.nodes * config->topology.local;
    const check_run *run = &config->runs[0];

    t->configs++;
    for (size_t i = 0; i < (size_t)config->n_calls * n; i++)
        t->results = oracle_mix(t->results, shared->results[i], i, config->seed, 0);
    for (uint32_t i = 0; i < config->n_calls; i++) {
        const check_call *call = &config->calls[i];
        t->calls++;
        t->gathers += !call->reduce;
        t->wrong += shared->wrong[i] != 0;
        t->by[BY_NODES][config->topology.nodes]++;
        t->by[BY_LOCAL][config->topology.local]++;
        t->by[BY_PROCS][run->procs]++;
        t->by[BY_ORDER][run->trouble.shuffle_streams]++;
        t->by[BY_DELAY][run->trouble.rail_delay_us > 0 && config->topology.nodes > 1]++;
        t->by[BY_SLOW][run->slow >= 0]++;
        t->by[BY_AGAIN][config->n_runs > 1]++;
        if (!call->reduce)
            continue;
        t->by[BY_WAVES][config->n_waves]++;
        t->by[BY_PASSES][config->n_part]++;
        t->by[BY_OUTBOX][config->partial]++;
        t->by[BY_STALE][config->stale]++;
        t->by[BY_MASK][call->subset]++;
        t->by[BY_MODE][call->mode]++;
        t->by[BY_VALUES][call->kind]++;
    }
}

/* Which run it was, when there are two: what is different from the first. */
static void describe_run(const check_config *config, const check_run *run, char *text, size_t bytes)
{
    const tide_options *first = &config->runs[0].options;
    size_t n;

    text[0] = '\0';
    if (run == &config->runs[0])
        return;
    n = (size_t)snprintf(text, bytes, "again on %s%s", run->fabric->name, run->in_place ? ", in place" : "");
#define TIDE_X(name, dflt, lo, hi, help)                                                                       \
    if (run->options.name != first->name && n < bytes)                                                         \
        n += (size_t)snprintf(text + n, bytes - n, ", %s %lld", #name, (long long)run->options.name);
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
    if (n < bytes)
        snprintf(text + n, bytes - n, ": ");
}

/* CLI_WRONG: something was wrong, with its first sentence in `text`. */
static int run_once(check_config *config, const check_run *run, check_shared *shared, char *text, size_t text_bytes)
{
    uint32_t n = config->topology.nodes * config->topology.local;
    const check_report *first = NULL;
    char what[400], which[200];
    int result;

    config->run = run;
    config->shared = shared;
    memset(shared->reports, 0, n * sizeof *shared->reports);
    result = ranks_run(n, run->procs, check_rank, config, what, sizeof what);
    config->shared = NULL;
    for (uint32_t r = 0; r < n; r++)
        if (shared->reports[r].text[0] && (!first || shared->reports[r].when < first->when))
            first = &shared->reports[r];
    if (first && !what[0])
        snprintf(what, sizeof what, "%s", first->text);
    if (result && !what[0])
        snprintf(what, sizeof what, "a rank ended with %d", result);
    if (result) { /* whatever came after the failure was never compared */
        bool any = false;
        for (uint32_t i = 0; i < config->n_calls; i++)
            any = any || shared->wrong[i];
        for (uint32_t i = 0, failed = !any; i < config->n_calls; i++)
            shared->wrong[i] = failed = failed || shared->wrong[i];
    }
    if (!what[0])
        return CLI_OK;
    describe_run(config, run, which, sizeof which);
    snprintf(text, text_bytes, "%s%s", which, what);
    return CLI_WRONG;
}

/* Both runs gave every rank the same bytes. */
static int compare_runs(const check_config *config, const check_shared *a, const check_shared *b, char *text,
                        size_t text_bytes)
{
    uint32_t n = config->topology.nodes * config->topology.local;
    int code = CLI_OK;
    char which[200];

    for (uint32_t i = 0; i < config->n_calls; i++) {
        for (uint32_t r = 0; r < n; r++) {
            if (a->results[(size_t)i * n + r] == b->results[(size_t)i * n + r])
                continue;
            a->wrong[i] = 1;
            if (code == CLI_OK) {
                describe_run(config, &config->runs[1], which, sizeof which);
                snprintf(text, text_bytes, "%srank %u: call %u (%s of group %u): other bytes than in the first run",
                         which, r, i + 1, config->calls[i].reduce ? "reduce_scatter" : "all_gather",
                         config->calls[i].group);
            }
            code = CLI_WRONG;
        }
    }
    return code;
}

/* CLI_WRONG: something was wrong, with its first sentence in `text`. */
static int run_config(const cli *c, check_config *config, tally *t, char *text, size_t text_bytes)
{
    uint32_t n = config->topology.nodes * config->topology.local;
    size_t report_bytes = n * sizeof(check_report), wrong_bytes = config->n_calls;
    size_t result_bytes = (size_t)n * config->n_calls * sizeof(uint64_t);
    check_shared shared = {ranks_alloc(report_bytes), ranks_alloc(wrong_bytes), ranks_alloc(result_bytes)};
    check_shared again = {shared.reports, shared.wrong, ranks_alloc(result_bytes)};
    int code = CLI_OK;

    if (!shared.reports || !shared.wrong || !shared.results || !again.results) {
        code = cli_fail(c, "out of memory");
        goto out;
    }
    code = run_once(config, &config->runs[0], &shared, text, text_bytes);
    if (code == CLI_OK && config->n_runs > 1)
        code = run_once(config, &config->runs[1], &again, text, text_bytes);
    if (code == CLI_OK && config->n_runs > 1)
        code = compare_runs(config, &shared, &again, text, text_bytes);
    count_config(t, config, &shared);
out:
    ranks_free(again.results, result_bytes);
    ranks_free(shared.results, result_bytes);
    ranks_free(shared.wrong, wrong_bytes);
    ranks_free(shared.reports, report_bytes);
    return code;
}

/* ---- saying it --------------------------------------------------------------------------- */

/* Calls `say` for each bucket that a long run fills and this one has not. Their number. */
static uint32_t each_short(const tally *t,
                           void (*say)(const char *row, uint32_t bucket, uint64_t count, uint32_t index))
{
    uint32_t n = 0;

    for (int k = 0; k < BY_KINDS; k++)
        for (const uint8_t *v = rows[k].buckets; *v != CHECK_END; v++)
            if (t->by[k][*v] < ENOUGH)
                say(rows[k].name, *v, t->by[k][*v], n++);
    return n;
}

static void say_short(const char *row, uint32_t bucket, uint64_t count, uint32_t index)
{
    printf("%s%s %u:%llu", index ? ", " : "", row, bucket, (unsigned long long)count);
}

static void say_short_json(const char *row, uint32_t bucket, uint64_t count, uint32_t index)
{
    printf("%s{\"row\": \"%s\", \"bucket\": %u, \"calls\": %llu}", index ? ", " : "", row, bucket,
           (unsigned long long)count);
}

static void print_tally(const tally *t, bool drawn)
{
    printf("%llu configurations: %llu all_gather, %llu reduce_scatter\n", (unsigned long long)t->configs,
           (unsigned long long)t->gathers, (unsigned long long)(t->calls - t->gathers));
    for (int k = 0; k < BY_KINDS; k++) {
        printf("  %-15s", rows[k].name);
        for (uint32_t v = 0; v <= TIDE_MAX_NODES; v++)
            if (t->by[k][v])
                printf(" %u:%llu", v, (unsigned long long)t->by[k][v]);
        printf("\n");
    }
    if (drawn) {
        printf("  below %-9d ", ENOUGH);
        printf("%s\n", each_short(t, say_short) ? "" : "none");
    }
    printf("  %-15s 0x%016llx\n", "results", (unsigned long long)t->results);
    if (t->left_out)
        printf("  %-15s %llu configurations: more ranks a GPU than it has hardware queues for\n", "left out",
               (unsigned long long)t->left_out);
}

static void print_tally_json(const cli *c, const tally *t, bool drawn)
{
    printf("{\"schema\": 1, \"seed\": %lld, \"calls\": %llu, \"wrong\": %llu, \"configurations\": %llu, "
           "\"all_gathers\": %llu, \"reduce_scatters\": %llu, \"left_out\": %llu, \"results\": \"0x%016llx\", \"histogram\": {",
           (long long)c->seed, (unsigned long long)t->calls, (unsigned long long)t->wrong,
           (unsigned long long)t->configs, (unsigned long long)t->gathers, (unsigned long long)(t->calls - t->gathers),
           (unsigned long long)t->left_out, (unsigned long long)t->results);
    for (int k = 0; k < BY_KINDS; k++) {
        bool first = true;
        printf("%s\"%s\": {", k ? ", " : "", rows[k].name);
        for (uint32_t v = 0; v <= TIDE_MAX_NODES; v++) {
            if (!t->by[k][v])
                continue;
            printf("%s\"%u\": %llu", first ? "" : ", ", v, (unsigned long long)t->by[k][v]);
            first = false;
        }
        printf("}");
    }
    printf("}, \"enough\": %d, \"below\": [", ENOUGH);
    if (drawn)
        each_short(t, say_short_json);
    printf("]}\n");
}

/* Everything is drawn: then a long run fills every bucket. */
static bool all_drawn(const cli *c)
{
    bool drawn = !c->lifetime && !c->model && !c->shapes && !c->nodes && !c->local && !c->threads && !c->procs && !c->fabric;

    for (size_t i = 0; i < CLI_MAX_KNOBS; i++)
        drawn = drawn && !c->knob_given[i];
    return drawn;
}

static time_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec;
}

/* A topology that the command line fixes is tried all the same, so that the library says what it lacks. */
static bool fits(const check_config *config)
{
    const check_run *run = &config->runs[config->n_runs - 1];
    return run->procs || !run->fabric->fits || run->fabric->fits(&config->topology, run->gpus);
}

int cli_check(const cli *c)
{
    bool given = c->model || c->shapes;
    uint64_t want = c->calls      ? (uint64_t)c->calls
                    : given       ? DEFAULT_MODEL_CALLS
                    : c->lifetime ? DEFAULT_LIFETIME
                                  : DEFAULT_CALLS, done = 0;
    uint64_t seed = (uint64_t)c->seed;
    static const char *const shape_flags[] = {"dtype",   "shard-dtype", "grad-dtype", "input",
                                              "landing", "groups",      NULL};
    const cli_fabric *fabric = c->fabric ? cli_find_fabric(c->fabric) : &cli_fabrics[0];
    uint32_t left_out_in_a_row = 0;
    time_t told = now();
    tally *t;
    int code = CLI_OK;

    unsetenv("TIDE_MACHINE"); /* configurations are drawn, planned and replayed by seed alone */
    if (given && c->lifetime)
        return cli_fail(c, "--lifetime: has groups of its own, expected no --model or --shapes");
    if (!given && cli_refuse_given(c, shape_flags, "is drawn at random without --model or --shapes") != CLI_OK)
        return CLI_BAD;
    if (!fabric)
        return cli_fail_fabric(c);
    t = calloc(1, sizeof *t);
    if (!t)
        return cli_fail(c, "out of memory");
    if (fabric->keep && !c->procs) /* processes are forked: then nothing may have been started here */
        fabric->keep(true);
    while (done < want && code != CLI_BAD) {
        check_config config;
        char text[640];
        uint64_t left = want - done;
        int one = check_draw(c, fabric, seed, left < UINT32_MAX / 2 ? (uint32_t)left : UINT32_MAX / 2, &config);

        if (one == CLI_OK && !given && !c->lifetime && !fits(&config) && left_out_in_a_row++ < MAX_LEFT_OUT) {
            t->left_out++;
            check_clear(&config);
            seed++;
            continue;
        }
        left_out_in_a_row = 0;
        if (one == CLI_OK)
            one = run_config(c, &config, t, text, sizeof text);
        if (one == CLI_WRONG)
            fprintf(c->json ? stderr : stdout, "seed %llu (%u nodes x %u, %u calls): %s\n", (unsigned long long)seed,
                    config.topology.nodes, config.topology.local, config.n_calls, text);
        if (one > code)
            code = one;
        done += config.n_calls;
        check_clear(&config);
        seed++;
        if (fabric != &cli_fabrics[0] && now() - told >= TELL_SECONDS && done < want) {
            told = now();
            fprintf(stderr, "check: %llu of %llu calls, %llu wrong\n", (unsigned long long)done,
                    (unsigned long long)want, (unsigned long long)t->wrong);
        }
    }
    if (fabric->keep && !c->procs)
        fabric->keep(false);
    if (code != CLI_BAD && c->json) {
        print_tally_json(c, t, all_drawn(c));
    } else if (code != CLI_BAD) {
        print_tally(t, all_drawn(c));
        printf("check: %llu calls, %llu wrong\n", (unsigned long long)t->calls, (unsigned long long)t->wrong);
    }
    free(t);
    return code;
}
