/*
 * The other way round: what verify says about a mutant, the interpreter finds true. It executes the op lists of all
 * ranks with real bytes in a random but seeded order. Of each kind of mutant and class of report some seed gives wrong
 * bytes or a stuck wait; an equivalent mutant, and the plan itself, never does.
 *
 * usage: test_mutants [SEEDS]   orders tried for a reported mutant (default 12) and for each equivalent one (a quarter
 * of it)
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/contract.h"
#include "../harness/interp.h"
#include "schedule/proof.h"

static uint32_t n_seeds = 12;

enum { SAMPLES = 8 };

/* Buffers of one call on one rank. */
typedef struct buffers {
    struct world *w;
    uint32_t call, rank;
    void **args;
} buffers;

typedef struct world {
    tide_plan *plan;
    proof p;
    interp *t;
    const proof_case *c;
    buffers *buffers; /* by call * n_ranks + rank */
} world;

static int give_inputs(void *context, uint32_t rank)
{
    const buffers *b = context;
    contract_give(b->w->c->calls[b->call].contract, b->call, rank, b->args,
                  interp_memory(b->w->t, REGION_RESIDENT, 0, rank));
    return 0;
}

static int take_inputs(void *context, uint32_t rank)
{
    const buffers *b = context;
    (void)rank;
    contract_take(b->w->c->calls[b->call].contract, b->args);
    return 0;
}

static int check_landing(void *context, uint32_t rank)
{
    const buffers *b = context;
    const verify_contract *c = b->w->c->calls[b->call].contract;
    uint64_t wrong;
    if (!contract_landing_right(c, b->call, interp_memory(b->w->t, REGION_LANDING, c->slot, rank), &wrong))
        return interp_fail(b->w->t, "call %u rank %u: landing byte %llu is wrong", b->call, rank,
                           (unsigned long long)wrong);
    return 0;
}

static int spoil_landing(void *context, uint32_t rank)
{
    const buffers *b = context;
    uint32_t slot = b->w->c->calls[b->call].contract->slot;
    int status = check_landing(context, rank);
    memset(interp_memory(b->w->t, REGION_LANDING, slot, rank), 0xee,
           b->w->plan->map.region[REGION_LANDING].banks[slot].bytes);
    return status;
}

static int check_output(void *context, uint32_t rank)
{
    const buffers *b = context;
    const verify_call *call = &b->w->c->calls[b->call];
    const verify_contract *c = call->contract;
    uint64_t wrong;
    if (!contract_output_right(c, call->source, b->w->p.n_ranks, rank, b->args[c->n_inputs], &wrong))
        return interp_fail(b->w->t, "call %u rank %u: output element %llu is wrong", b->call, rank,
                           (unsigned long long)wrong);
    return 0;
}

/* Enqueues a step on a rank, with what its caller does before and after. */
static void enqueue(world *w, const verify_step *step, uint32_t rank)
{
    const verify_call *call = &w->c->calls[step->call];
    const verify_contract *c = call->contract;
    buffers *b = &w->buffers[step->call * w->p.n_ranks + rank];
    const schedule *s = call->by_rank[rank];
    interp_args args = {b->args, 1.0f, 0};

    switch (step->part) {
    case VERIFY_PART_AG:
        interp_consume(w->t, rank, -1, 0, give_inputs, b);
        interp_enqueue(w->t, s, INTERP_ALL, &args);
        break;
    case VERIFY_PART_USE:
        interp_consume(w->t, rank, EVENT_READY, c->group, check_landing, b);
        break;
    case VERIFY_PART_RELEASE:
        interp_consume(w->t, rank, EVENT_READY, c->group, spoil_landing, b);
        interp_consume(w->t, rank, -1, 0, take_inputs, b);
        interp_free_slot(w->t, rank, c->slot);
        break;
    case VERIFY_PART_STASH:
        interp_consume(w->t, rank, -1, 0, give_inputs, b);
        interp_enqueue(w->t, s, INTERP_STASH, &args);
        break;
    case VERIFY_PART_READ:
        if (call->source == step->call)
            interp_consume(w->t, rank, -1, 0, give_inputs, b);
        interp_enqueue(w->t, s, INTERP_READ, &args);
        break;
    default:
        interp_enqueue(w->t, s, INTERP_NET, NULL);
        interp_consume(w->t, rank, EVENT_READ_DONE, c->group, take_inputs, b);
        interp_consume(w->t, rank, EVENT_DONE, c->group, check_output, b);
    }
}

/* Runs the case with the op lists as they are now: 0 when every byte came out right. The error stays with w->t. */
static int execute(world *w, const proof_case *c, uint64_t seed)
{
    uint32_t n = c->n_calls * w->p.n_ranks;
    int status;
    w->c = c;
    w->t = interp_create(w->plan, seed);
    w->buffers = calloc(n, sizeof *w->buffers);
    assert_true(w->t && w->buffers);
    for (uint32_t i = 0; i < n; i++) {
        const verify_contract *k = c->calls[i / w->p.n_ranks].contract;
        buffers *b = &w->buffers[i];
        *b = (buffers){w, i / w->p.n_ranks, i % w->p.n_ranks, contract_buffers(k)};
        assert_non_null(b->args);
    }
    for (uint32_t k = 0; k < c->n_steps; k++)
        for (uint32_t rank = 0; rank < w->p.n_ranks; rank++)
            enqueue(w, &c->steps[k], rank);
    status = interp_run(w->t);
    for (uint32_t i = 0; i < n; i++)
        contract_buffers_free(c->calls[i / w->p.n_ranks].contract, w->buffers[i].args);
    free(w->buffers);
    return status;
}

/* What was seen of the mutants of one kind whose first report is of one class. */
typedef struct cell { uint32_t tried, shown; } cell;
typedef struct tally {
    world *w;
    cell cells[MUTATE_KIND_COUNT][VERIFY_CLASS_COUNT];
    uint32_t equivalent, seen;
} tally;

static void visit(void *context, const proof_case *c, int mutation, int verdict, const verify_result *first)
{
    tally *t = context;
    cell *cell;
    int class = 0;
    if (verdict == MUTANT_EQUIVALENT) {
        t->equivalent++;
        for (uint64_t seed = 1; seed <= 1 + n_seeds / 4; seed++) {
            if (execute(t->w, c, seed) != 0)
                fail_msg("an equivalent mutant (%s): seed %llu: %s", mutation_name(mutation), (unsigned long long)seed,
                         interp_error(t->w->t));
            interp_destroy(t->w->t);
        }
        return;
    }
    assert_int_equal(verdict, MUTANT_REPORTED);
    while (!first->by_class[class])
        class++;
    cell = &t->cells[mutation][class];
    /* malformed ops are refused before they run; of the others a few, spread over the list */
    if (class == VERIFY_FORM || class == VERIFY_BOUNDS || cell->tried >= SAMPLES || t->seen++ % 3)
        return;
    cell->tried++;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        int status = execute(t->w, c, seed);
        interp_destroy(t->w->t);
        if (status != 0) {
            cell->shown++;
            return;
        }
    }
}

static void mutants_of(uint32_t nodes, uint32_t local, int order, const char *const (*knobs)[2], tally *sum)
{
    mutate_options mutate = {.only_rank = -1, .seed = 1, .visit = visit};
    mutate_result result = {0};
    proof_case c;
    world w = {0};
    tally t = {.w = &w};

    w.plan = contract_plan(nodes, local, knobs);
    if (!w.plan)
        fail_msg("%s", tide_last_error());
    assert_int_equal(proof_create(w.plan, &w.p), TIDE_OK);
    assert_int_equal(proof_case_create(&w.p, order, 2, 1, &c), TIDE_OK);
    for (uint64_t seed = 1; seed <= 20 * n_seeds; seed++) {
        if (execute(&w, &c, seed) != 0)
            fail_msg("the plan itself: seed %llu: %s", (unsigned long long)seed, interp_error(w.t));
        interp_destroy(w.t);
    }
    proof_case_clear(&c);
    mutate.context = &t;
    if (mutate_case(&w.p, order, 2, &mutate, &result) != TIDE_OK)
        fail_msg("%s", tide_last_error());
    proof_clear(&w.p);
    tide_plan_destroy(w.plan);
    sum->equivalent += t.equivalent;
    for (int k = 0; k < MUTATE_KIND_COUNT; k++) {
        for (int i = 0; i < VERIFY_CLASS_COUNT; i++) {
            sum->cells[k][i].tried += t.cells[k][i].tried;
            sum->cells[k][i].shown += t.cells[k][i].shown;
        }
    }
}

static void reports_are_real(void **state)
{
    static const char *const one_node[][2] = {{"chunk", "16"}, {0}};
    static const char *const waves[][2] = {{"w_wave", "1"}, {"head_bytes", "32"}, {"n_ctx", "2"}, {0}};
    static const char *const reuse[][2] = {{"mode", "1"}, {"k", "1"}, {"chunk", "16"}, {0}};
    tally sum = {0};
    (void)state;
    mutants_of(1, 3, PROOF_TRAIN, one_node, &sum);
    mutants_of(2, 2, PROOF_TRAIN, waves, &sum);
    mutants_of(3, 1, PROOF_TRAIN_REUSE, reuse, &sum);
    printf("%-20s", "shown of tried");
    for (int i = 0; i < VERIFY_CLASS_COUNT; i++)
        printf("%11s", verify_class_name(i));
    printf("\n");
    for (int k = 0; k < MUTATE_KIND_COUNT; k++) {
        printf("%-20s", mutation_name(k));
        for (int i = 0; i < VERIFY_CLASS_COUNT; i++)
            printf("   %3u/%-4u", sum.cells[k][i].shown, sum.cells[k][i].tried);
        printf("\n");
        for (int i = 0; i < VERIFY_CLASS_COUNT; i++)
            assert_true(sum.cells[k][i].shown > 0 || sum.cells[k][i].tried == 0);
    }
    assert_true(sum.equivalent > 0);
    printf("%u equivalent mutants, each right in %u orders\n", sum.equivalent, 1 + n_seeds / 4);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(reports_are_real)};
    if (argc > 1)
        n_seeds = (uint32_t)strtoul(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
