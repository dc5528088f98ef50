/*
 * The other way round, for real: what verify says about a plan or a mutant, the engine and the host fabric find true,
 * with ranks as threads, a seeded choice among streams, delays on the rail and callers that pause. Of each kind of
 * mutant and class of report some seed gives wrong bytes, a stuck wait, or a call that is refused or fails for a wrong
 * tag; the plans themselves never do.
 *
 * usage: test_mutants_real [SEEDS [TRIES]]   SEEDS: runs of each plan (default 3400); TRIES: of a reported mutant
 * (default 24)
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "../harness/contract.h"
#include "../harness/sanitized.h"
#include "../harness/threads.h"
#include "engine/engine.h"
#include "schedule/proof.h"

static uint32_t n_seeds = SANITIZED ? 100 : 3400, n_tries = 24;

enum {
    MAX_RANKS = 4,
    SAMPLES = 8,          /* mutants of a cell that are tried until one has shown */
    FRESH_EVERY = 50,     /* runs of a plan on one engine */
    REPEATS = 3,          /* of a mutant's case on one engine: signals left over show in the next */
    PLAN_DEADLINE_MS = 60000,
    MUTANT_DEADLINE_MS = 300
};

/* How a run ended, the worse the larger. */
enum outcome { RIGHT, ENDED, REFUSED, MISMATCH, STUCK, WRONG, OUTCOME_COUNT };
static const char *const outcome_names[OUTCOME_COUNT] = {"right", "ended", "refused", "mismatch", "stuck", "wrong"};

/* One engine's life: the case `repeats` times, each with a seed of its own. */
typedef struct trial {
    const proof *p;
    const proof_case *c;
    int64_t deadline_ms;
    uint64_t seed;
    uint32_t repeats;
    int outcome[MAX_RANKS];
    char text[MAX_RANKS][288];
} trial;

typedef struct rank_run {
    trial *t;
    uint32_t rank;
    fab_device *device;
    engine *e;
    engine_program **programs; /* by call */
    void ***buffers;           /* by call */
    bool *open;                /* by call: inputs and output not looked at yet */
    uint64_t random;
    uint32_t first_key;        /* of this repeat's calls */
} rank_run;

static uint64_t roll(rank_run *r, uint64_t n)
{
    r->random ^= r->random << 13;
    r->random ^= r->random >> 7;
    r->random ^= r->random << 17;
    return (r->random >> 11) % n;
}

static int ended(rank_run *r, int outcome, const char *what)
{
    trial *t = r->t;
    t->outcome[r->rank] = outcome;
    snprintf(t->text[r->rank], sizeof t->text[r->rank], "rank %u: %s", r->rank, what);
    return 1;
}

/* A failed call of the engine: what kind of end that is. */
static int failed(rank_run *r, int status)
{
    int outcome = status == TIDE_ERR_DEADLINE ? STUCK : status == TIDE_ERR_MISMATCH ? MISMATCH : ENDED;
    tide_failure f = TIDE_FAILURE_INIT;
    engine_failure(r->device, &f);
    return ended(r, outcome, f.code ? f.text : tide_last_error());
}

static int wrong(rank_run *r, uint32_t call, const char *what, uint64_t at)
{
    char text[120];
    snprintf(text, sizeof text, "call %u: %s %llu is wrong", call, what, (unsigned long long)at);
    ended(r, WRONG, text);
    engine_abort(r->device); /* the others need not wait for this rank */
    return 1;
}

static const verify_contract *contract(const rank_run *r, uint32_t call)
{
    return r->t->c->calls[call].contract;
}

static int look_at_landing(rank_run *r, uint32_t call, bool last)
{
    const verify_contract *c = contract(r, call);
    uint8_t *landing = engine_address(r->e, REGION_LANDING, c->slot, 0);
    uint64_t at;
    int status = engine_wait(r->e, c->group, EVENT_READY, NULL);
    if (status != TIDE_OK)
        return failed(r, status);
    if (!contract_landing_right(c, r->first_key + call, landing, &at))
        return wrong(r, call, "landing byte", at);
    if (last) {
        memset(landing, 0xee, r->t->p->plan->map.region[REGION_LANDING].banks[c->slot].bytes);
        contract_take(c, r->buffers[call]);
    }
    return 0;
}

/* A reduce-scatter's gradients may be overwritten once read; its output is complete once done. */
static int look_at_output(rank_run *r, uint32_t call)
{
    const verify_contract *c = contract(r, call);
    uint64_t at;
    int status = engine_wait(r->e, c->group, EVENT_READ_DONE, NULL);
    if (status == TIDE_OK) {
        contract_take(c, r->buffers[call]);
        status = engine_wait(r->e, c->group, EVENT_DONE, NULL);
    }
    if (status != TIDE_OK)
        return failed(r, status);
    r->open[call] = false;
    if (!contract_output_right(c, r->first_key + r->t->c->calls[call].source, r->t->p->n_ranks, r->rank,
                               r->buffers[call][c->n_inputs], &at))
        return wrong(r, call, "output element", at);
    return 0;
}

static int enqueue(rank_run *r, uint32_t call, int part, bool inputs)
{
    const verify_call *v = &r->t->c->calls[call];
    const schedule *s = v->by_rank[r->rank];
    engine_args args = {(const void *const *)r->buffers[call], s->n_args, 1.0f, 0, r->first_key + call + 1};
    int status;
    if (inputs)
        contract_give(v->contract, r->first_key + call, r->rank, r->buffers[call],
                      engine_address(r->e, REGION_RESIDENT, 0, 0));
    status = engine_run(r->e, r->programs[call], part, &args, NULL);
    return status == TIDE_OK ? 0 : failed(r, status);
}

static int do_step(rank_run *r, const verify_step *step)
{
    const verify_contract *c = contract(r, step->call);
    int bad;

    if (roll(r, 16) == 0) {
        struct timespec pause = {0, (long)roll(r, 200000)};
        nanosleep(&pause, NULL);
    }
    switch (step->part) {
    case VERIFY_PART_AG:
        return enqueue(r, step->call, ENGINE_ALL, true);
    case VERIFY_PART_USE:
        return look_at_landing(r, step->call, false);
    case VERIFY_PART_RELEASE:
        bad = look_at_landing(r, step->call, true);
        return bad ? bad : engine_free_slot(r->e, c->slot, NULL) == TIDE_OK ? 0 : failed(r, TIDE_ERR_INTERNAL);
    case VERIFY_PART_STASH:
        return enqueue(r, step->call, ENGINE_ALL, true);
    case VERIFY_PART_READ:
        return enqueue(r, step->call, ENGINE_READ, r->t->c->calls[step->call].source == step->call);
    default:
        bad = enqueue(r, step->call, ENGINE_NET, false);
        r->open[step->call] = true;
        return bad ? bad : roll(r, 2) ? look_at_output(r, step->call) : 0;
    }
}

static int open_rank(rank_run *r, threads_rank *thread)
{
    trial *t = r->t;
    const tide_plan *plan = t->p->plan;
    tide_options options = TIDE_OPTIONS_INIT;
    fab_open open = {.rank = r->rank, .n_ranks = t->p->n_ranks, .node_size = plan->topology.local,
                     .allgather = threads_allgather, .allgather_context = thread, .options = &options};
    int status;

    options.deadline_ms = t->deadline_ms;
    status = fab_host_open(&open, &r->device);
    if (status != TIDE_OK)
        return status;
    if (t->seed % 3 == 0) {
        fab_inject inject = {.seed = t->seed, .delay_us = 1 + (uint32_t)(t->seed / 3 % 100)};
        fab_host_inject(r->device, &inject);
    }
    status = engine_create(r->device, plan, &r->e);
    if (status != TIDE_OK)
        return status;
    for (uint32_t i = 0; i < t->c->n_calls && status == TIDE_OK; i++) {
        r->buffers[i] = contract_buffers(contract(r, i));
        if (!r->buffers[i])
            status = TIDE_ERR_MEMORY;
        for (uint32_t k = 0; k < i && !r->programs[i]; k++)
            if (t->c->calls[k].by_rank == t->c->calls[i].by_rank)
                r->programs[i] = r->programs[k];
        if (status == TIDE_OK && !r->programs[i])
            status = engine_bind(r->e, t->c->calls[i].by_rank[r->rank], &r->programs[i]);
    }
    return r->device->verbs->agree(r->device, status);
}

static int run_rank(threads_rank *thread)
{
    trial *t = thread->context;
    uint32_t n_calls = t->c->n_calls;
    rank_run rank = {.t = t, .rank = thread->rank}, *r = &rank;
    int bad, status;

    r->programs = calloc(n_calls, sizeof *r->programs);
    r->buffers = calloc(n_calls, sizeof *r->buffers);
    r->open = calloc(n_calls, sizeof *r->open);
    bad = !r->programs || !r->buffers || !r->open;
    if (!bad && open_rank(r, thread) != TIDE_OK)
        bad = ended(r, REFUSED, tide_last_error());
    for (uint32_t i = 0; !bad && i < t->repeats; i++) {
        uint64_t seed = (t->seed + i) * UINT64_C(0x9e3779b97f4a7c15) + r->rank + 1;
        r->random = seed | 1;
        r->first_key = i * n_calls;
        fab_host_set_seed(r->device, seed | 1);
        for (uint32_t k = 0; !bad && k < t->c->n_steps; k++)
            bad = do_step(r, &t->c->steps[k]);
        for (uint32_t k = 0; !bad && k < n_calls; k++)
            bad = r->open[k] && look_at_output(r, k);
    }
    if (!bad && (status = engine_sync(r->e)) != TIDE_OK)
        bad = failed(r, status);
    engine_destroy(r->e);
    if (r->device)
        r->device->verbs->close(r->device);
    for (uint32_t i = 0; r->buffers && i < n_calls; i++)
        contract_buffers_free(contract(r, i), r->buffers[i]);
    free(r->open);
    free(r->buffers);
    free(r->programs);
    return bad;
}

/* The worst outcome of a rank. */
static int run_trial(trial *t, const char **text)
{
    int worst = RIGHT;
    memset(t->outcome, 0, sizeof t->outcome);
    assert_true(threads_run(t->p->n_ranks, run_rank, t) >= 0);
    for (uint32_t i = 0; i < t->p->n_ranks; i++) {
        if (t->outcome[i] <= worst)
            continue;
        worst = t->outcome[i];
        *text = t->text[i];
    }
    return worst;
}

/* ---- plans and their mutants --------------------------------------------------------------------- */

/* Mutants of one kind whose first report is of one class. */
typedef struct cell {
    uint32_t found, tried, shown[OUTCOME_COUNT];
} cell;
typedef struct tally {
    proof p;
    cell (*cells)[VERIFY_CLASS_COUNT];
    uint64_t seed, runs;
} tally;

static bool shown(const cell *c)
{
    return c->shown[REFUSED] + c->shown[MISMATCH] + c->shown[STUCK] + c->shown[WRONG] > 0;
}

static void visit(void *context, const proof_case *c, int mutation, int verdict, const verify_result *first)
{
    tally *t = context;
    trial trial = {.p = &t->p, .c = c, .deadline_ms = MUTANT_DEADLINE_MS, .repeats = REPEATS};
    const char *text;
    int class = 0, outcome = RIGHT;
    cell *cell;

    if (verdict != MUTANT_REPORTED)
        return;
    while (!first->by_class[class])
        class++;
    cell = &t->cells[mutation][class];
    /* Malformed ops are refused before they run; of the others a few are tried, spread over the list, until one has
     * shown. */
    if (class == VERIFY_FORM || class == VERIFY_BOUNDS || shown(cell) || cell->tried >= SAMPLES * 3 ||
        cell->found++ % 5)
        return;
    cell->tried++;
    for (uint32_t i = 0; i < n_tries && outcome < REFUSED; i++) {
        trial.seed = t->seed += REPEATS;
        outcome = run_trial(&trial, &text);
        t->runs++;
    }
    cell->shown[outcome]++;
}

static const char *const one_node[][2] = {{"chunk", "16"}, {0}};
static const char *const waves[][2] = {{"w_wave", "1"}, {"head_bytes", "32"}, {"n_ctx", "2"}, {0}};
static const char *const reuse[][2] = {{"mode", "1"}, {"k", "1"}, {"chunk", "16"}, {0}};
static const struct shape {
    uint32_t nodes, local;
    int order;
    const char *const (*knobs)[2];
} shapes[] = {{1, 3, PROOF_TRAIN, one_node}, {2, 2, PROOF_TRAIN, waves}, {3, 1, PROOF_TRAIN_REUSE, reuse}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void make(const struct shape *shape, tide_plan **plan, proof *p)
{
    *plan = contract_plan(shape->nodes, shape->local, shape->knobs);
    if (!*plan)
        fail_msg("%s", tide_last_error());
    assert_int_equal(proof_create(*plan, p), TIDE_OK);
}

static void plans_are_right(void **state)
{
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        tide_plan *plan;
        proof p;
        make(&shapes[i], &plan, &p);
        for (uint64_t seed = 1; seed <= n_seeds; seed += FRESH_EVERY) {
            uint64_t number = seed / FRESH_EVERY, left = n_seeds - seed + 1;
            int order = number % 2 ? PROOF_RANDOM : shapes[i].order;
            trial trial = {.p = &p, .deadline_ms = PLAN_DEADLINE_MS, .seed = seed};
            const char *text = "";
            verify_options verify = {.stop_after = 1};
            verify_result result;
            proof_case c;
            trial.repeats = left < FRESH_EVERY ? (uint32_t)left : FRESH_EVERY;
            assert_int_equal(proof_case_create(&p, order, order == PROOF_RANDOM ? 12 : 2, seed, &c), TIDE_OK);
            assert_int_equal(proof_case_verify(&p, &c, &verify, &result), TIDE_OK);
            assert_int_equal(result.violations, 0);
            trial.c = &c;
            if (run_trial(&trial, &text) != RIGHT)
                fail_msg("plan %d: seeds from %llu: %s", i, (unsigned long long)seed, text);
            proof_case_clear(&c);
        }
        proof_clear(&p);
        tide_plan_destroy(plan);
    }
    printf("%u seeds on each of %d plans, all right\n", n_seeds, SHAPES);
}

static void reports_are_real(void **state)
{
    cell cells[MUTATE_KIND_COUNT][VERIFY_CLASS_COUNT] = {0};
    tally t = {.cells = cells};
    bool all = true;

    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        mutate_options mutate = {.only_rank = -1, .seed = 1, .visit = visit, .context = &t};
        mutate_result result = {0};
        tide_plan *plan;
        make(&shapes[i], &plan, &t.p);
        if (mutate_case(&t.p, shapes[i].order, 2, &mutate, &result) != TIDE_OK)
            fail_msg("%s", tide_last_error());
        proof_clear(&t.p);
        tide_plan_destroy(plan);
    }
    printf("%-20s", "how it showed");
    for (int i = 0; i < VERIFY_CLASS_COUNT; i++)
        printf("%12s", verify_class_name(i));
    printf("\n");
    for (int k = 0; k < MUTATE_KIND_COUNT; k++) {
        printf("%-20s", mutation_name(k));
        for (int i = 0; i < VERIFY_CLASS_COUNT; i++) {
            const cell *c = &cells[k][i];
            const char *how = c->tried ? "not at all" : "-";
            for (int o = REFUSED; o < OUTCOME_COUNT; o++)
                if (c->shown[o])
                    how = outcome_names[o];
            printf("%9s%3u", how, c->tried);
            all = all && (c->tried == 0 || shown(c));
        }
        printf("\n");
    }
    printf("%llu runs of mutants\n", (unsigned long long)t.runs);
    assert_true(all);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(reports_are_real), cmocka_unit_test(plans_are_right)};
    if (argc > 1)
        n_seeds = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        n_tries = (uint32_t)strtoul(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
