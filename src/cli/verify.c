/*
 * verify.c - `tide verify`: proves plans, audits the planner, and breaks op lists to prove the prover.
 *
 * Without flags about shapes it takes the list below: one row for each thing that a proof has to have met.
 */
#include <string.h>

#include "cli/cli.h"
#include "schedule/proof.h"

enum { DEFAULT_PARAMS = 30, MAX_GROUPS = 64, REPORTED_LINES = 20 };

typedef struct named_shape {
    const char *name;
    const char *model; /* NULL: made up, from groups and params */
    uint32_t nodes, local, groups, params, rows; /* rows: about so many in the largest parameter, a rank */
    const char *knobs[6][2];
} named_shape;

static const named_shape proved_shapes[] = {
    {"one node", NULL, 1, 8, 3, 8, 40, {{0}}},
    {"one node, multicast", NULL, 1, 8, 3, 8, 40, {{"multicast", "1"}, {"n_stg", "1"}}},
    {"M = 5, heads and tails", NULL, 5, 2, 3, 8, 40, {{"head_bytes", "4096"}, {"n_ctx", "2"}}},
    {"stale blocks, partial outbox",
     NULL,
     8,
     8,
     3,
     6,
     20,
     {{"w_wave", "2"}, {"k", "2"}, {"n_par", "2"}, {"n_out", "4"}, {"chunk", "256"}}},
    {"odd waves", NULL, 5, 2, 3, 6, 40, {{"w_wave", "2"}, {"chunk", "64"}}},
    {"three passes", NULL, 3, 4, 3, 6, 40, {{"n_part", "3"}, {"chunk", "64"}, {"w_wave", "2"}}},
    {"Slot-Reuse", NULL, 4, 4, 3, 6, 40, {{"mode", "1"}, {"w_wave", "2"}, {"chunk", "64"}}},
    {"one rank a node", NULL, 9, 1, 3, 6, 40, {{"w_wave", "3"}, {"n_part", "2"}, {"n_out", "6"}}},
    {"P = 30 at 8 x 8", NULL, 8, 8, 2, 30, 40, {{0}}},
    {"llama-3.1-70b at 8 x 8", "llama-3.1-70b", 8, 8, 1, 0, 0, {{0}}},
    {"qwen3-30b-a3b at 8 x 8", "qwen3-30b-a3b", 8, 8, 1, 0, 0, {{0}}},
    {"wan2.2-t2v-a14b at 8 x 8", "wan2.2-t2v-a14b", 8, 8, 1, 0, 0, {{0}}},
};
enum { N_PROVED = sizeof proved_shapes / sizeof proved_shapes[0] };

/* Mutated on one rank only: the second half of the list above is too long to run once for each op of all ranks. */
static const named_shape mutated_shapes[] = {
    {"M = 5 all-gather", NULL, 5, 2, 2, 6, 12, {{"head_bytes", "512"}, {"n_ctx", "2"}, {"chunk", "64"}}},
    {"stale blocks, partial outbox",
     NULL,
     8,
     8,
     1,
     5,
     4,
     {{"w_wave", "2"}, {"k", "2"}, {"n_par", "2"}, {"n_out", "4"}}},
    {"odd waves", NULL, 5, 2, 2, 6, 12, {{"w_wave", "2"}}},
    {"three passes", NULL, 3, 4, 2, 6, 12, {{"n_part", "3"}, {"w_wave", "2"}}},
};
enum { N_MUTATED = sizeof mutated_shapes / sizeof mutated_shapes[0] };

/* ---- plans from flags or names -------------------------------------------------------------------------------- */

/* Parameters of all sorts: matrices, vectors, a scalar, rows that do not divide, and one that is sharded by columns. */
static bool make_up(cli_shapes *s, uint32_t params, uint32_t n_ranks, uint32_t rows)
{
    static const int64_t columns[] = {8, 1, 24, 3, 16};
    for (uint32_t i = 0; i < params; i++) {
        int64_t dims[2] = {(int64_t)n_ranks * rows / (1 + i % 4) + i % 3, columns[i % 5]};
        char name[24];
        int ndim = i % 11 == 10 ? 0 : i % 5 == 1 ? 1 : 2;
        bool by_columns = ndim == 2 && i % 7 == 5;
        snprintf(name, sizeof name, "p%u", i);
        if (by_columns) {
            dims[0] = 6;
            dims[1] = n_ranks * 2;
        }
        if (!cli_shapes_add(s, name, ndim, dims, by_columns))
            return false;
    }
    s->dtype = TIDE_BF16;
    return true;
}

/* Groups of different sizes, inputs and landings from one list of parameters. */
static void vary(tide_group_desc *descs, uint32_t groups)
{
    for (uint32_t g = 1; g < groups; g++) {
        descs[g] = descs[0];
        descs[g].n_params = descs[0].n_params - g % descs[0].n_params;
        if (g % 2) {
            descs[g].input = TIDE_INPUT_ARGUMENT;
            descs[g].shard_dtype = TIDE_F32;
        }
        if (g % 3 == 2)
            descs[g].landing = TIDE_LANDING_PRIVATE;
    }
}

static int load_named(const cli *c, const named_shape *n, tide_plan **plan)
{
    cli with = *c;
    cli_shapes shapes = {0};
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc descs[MAX_GROUPS];
    int code = CLI_OK;

    topology.nodes = n->nodes;
    topology.local = n->local;
    with.model = n->model;
    for (int i = 0; i < 6 && n->knobs[i][0] && code == CLI_OK; i++) {
        int64_t value;
        if (!cli_number(n->knobs[i][1], false, &value) ||
            tide_options_set(&with.options, n->knobs[i][0], value) != TIDE_OK)
            code = cli_fail(c, "knob %s: %s", n->knobs[i][0], n->knobs[i][1]);
    }
    if (code == CLI_OK && n->model)
        code = cli_shapes_load(&with, &shapes);
    else if (code == CLI_OK && !make_up(&shapes, n->params, n->nodes * n->local, n->rows))
        code = cli_fail(c, "out of memory");
    if (code == CLI_OK)
        code = cli_shapes_desc(&with, &shapes, &descs[0]);
    if (code == CLI_OK) {
        vary(descs, n->groups);
        if (tide_plan_create(&topology, descs, n->groups, &with.options, plan) != TIDE_OK)
            code = cli_fail_library(c);
    }
    cli_shapes_clear(&shapes);
    return code;
}

static int load_flags(const cli *c, tide_plan **plan)
{
    cli_shapes shapes = {0};
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc descs[MAX_GROUPS];
    uint32_t groups = c->groups ? (uint32_t)c->groups : 1;
    int code;

    topology.nodes = c->nodes ? (uint32_t)c->nodes : 1;
    topology.local = c->local ? (uint32_t)c->local : 4;
    code = cli_shapes_load(c, &shapes);
    if (code != CLI_OK)
        return code;
    if (!c->model && !c->shapes &&
        !make_up(&shapes, c->params ? (uint32_t)c->params : DEFAULT_PARAMS, topology.nodes * topology.local, 40))
        code = cli_fail(c, "out of memory");
    if (code == CLI_OK)
        code = cli_shapes_desc(c, &shapes, &descs[0]);
    if (code == CLI_OK) {
        if (c->model || c->shapes)
            for (uint32_t i = 1; i < groups; i++)
                descs[i] = descs[0];
        else
            vary(descs, groups);
        if (tide_plan_create(&topology, descs, groups, &c->options, plan) != TIDE_OK)
            code = cli_fail_library(c);
    }
    cli_shapes_clear(&shapes);
    return code;
}

static bool by_flags(const cli *c)
{
    for (int i = 0; i < CLI_MAX_KNOBS; i++)
        if (c->knob_given[i])
            return true;
    return c->nodes || c->local || c->model || c->shapes || c->params || c->groups || c->dtype || c->shard_dtype ||
           c->grad_dtype || c->input || c->landing;
}

/* ---- proving ----------------------------------------------------------------------------------------------------- */

static int prove(const cli *c, const char *name, const tide_plan *plan, proof_result *sum)
{
    tide_text text = {cli_write, c->json ? stderr : stdout, TIDE_OK};
    const verify_options options = {.out = &text, .lines = REPORTED_LINES};
    proof_result r;

    if (proof_plan(plan, PROOF_ALL_ORDERS, (uint64_t)c->seed, &options, &r) != TIDE_OK)
        return cli_fail_library(c);
    if (!c->json && name)
        printf("%-30s %9llu ag ops %9llu rs ops %4llu calls in %llu orders, %llu violations\n", name,
               (unsigned long long)r.ag_ops, (unsigned long long)r.rs_ops, (unsigned long long)r.calls,
               (unsigned long long)r.cases, (unsigned long long)r.violations);
    sum->ag_ops += r.ag_ops;
    sum->rs_ops += r.rs_ops;
    sum->calls += r.calls;
    sum->groups += r.groups;
    sum->violations += r.violations;
    return CLI_OK;
}

static int cli_prove(const cli *c)
{
    proof_result sum = {0};
    tide_plan *plan = NULL;
    int code = CLI_OK;

    if (by_flags(c)) {
        code = load_flags(c, &plan);
        if (code == CLI_OK)
            code = prove(c, NULL, plan, &sum);
        tide_plan_destroy(plan);
    } else {
        for (int i = 0; i < N_PROVED && code == CLI_OK; i++) {
            plan = NULL;
            code = load_named(c, &proved_shapes[i], &plan);
            if (code == CLI_OK)
                code = prove(c, proved_shapes[i].name, plan, &sum);
            tide_plan_destroy(plan);
        }
    }
    if (code != CLI_OK)
        return code;
    if (c->json)
        printf("{\"schema\": 1, \"proved\": %s, \"ag_ops\": %llu, \"rs_ops\": %llu, \"calls\": %llu, \"groups\": %llu, "
               "\"violations\": %llu}\n",
               sum.violations ? "false" : "true", (unsigned long long)sum.ag_ops, (unsigned long long)sum.rs_ops,
               (unsigned long long)sum.calls, (unsigned long long)sum.groups, (unsigned long long)sum.violations);
    else if (sum.violations)
        printf("verify: %llu violations\n", (unsigned long long)sum.violations);
    else
        printf("verify: proved: %llu ag ops, %llu rs ops, %llu calls, %llu groups, 0 violations\n",
               (unsigned long long)sum.ag_ops, (unsigned long long)sum.rs_ops, (unsigned long long)sum.calls,
               (unsigned long long)sum.groups);
    return sum.violations ? CLI_WRONG : CLI_OK;
}

/* ---- mutation
 * --------------------------------------------------------------------------------------------------------- */

static int mutate(const cli *c, const char *name, const tide_plan *plan, int64_t rank, mutate_result *sum)
{
    tide_text text = {cli_write, stdout, TIDE_OK};
    const mutate_options options = {.only_rank = rank, .seed = (uint64_t)c->seed, .out = c->json ? NULL : &text};
    mutate_result before = *sum;
    proof p;
    int status = proof_create(plan, &p);

    if (status == TIDE_OK)
        status = mutate_case(&p, plan->options.mode ? PROOF_TRAIN_REUSE : PROOF_TRAIN, 2, &options, sum);
    proof_clear(&p);
    if (status != TIDE_OK)
        return cli_fail_library(c);
    if (!c->json)
        printf("%-30s %6llu mutants, %6llu reported, %5llu equivalent, %llu missed\n", name,
               (unsigned long long)(sum->mutants - before.mutants),
               (unsigned long long)(sum->reported - before.reported),
               (unsigned long long)(sum->equivalent - before.equivalent),
               (unsigned long long)(sum->missed - before.missed));
    fflush(stdout);
    return CLI_OK;
}

/* All ops of all ranks where that is quick. Knobs go round, so that each topology has another. */
static int mutate_small(const cli *c, mutate_result *sum)
{
    static const char *const knobs[][3][2] = {
        {{"chunk", "64"}},
        {{"n_part", "2"}, {"n_ctx", "2"}},
        {{"mode", "1"}, {"k", "1"}},
        {{"multicast", "1"}, {"head_bytes", "256"}},
        {{"w_wave", "1"}, {"n_stg", "1"}},
    };
    int code = CLI_OK, number = 0;
    for (uint32_t nodes = 1; nodes <= 8 && code == CLI_OK; nodes++) {
        for (uint32_t local = 1; nodes * local <= 8 && code == CLI_OK; local++) {
            named_shape n = {NULL, NULL, nodes, local, 2, 6, 8, {{0}}};
            char name[48];
            tide_plan *plan = NULL;
            memcpy(n.knobs, knobs[number++ % 5], sizeof knobs[0]);
            snprintf(name, sizeof name, "%u x %u, %s %s", nodes, local, n.knobs[0][0], n.knobs[0][1]);
            code = load_named(c, &n, &plan);
            if (code == CLI_OK)
                code = mutate(c, name, plan, -1, sum);
            tide_plan_destroy(plan);
        }
    }
    return code;
}

static int cli_mutate(const cli *c)
{
    mutate_result sum = {0};
    tide_plan *plan = NULL;
    int code = CLI_OK;

    if (by_flags(c)) {
        code = load_flags(c, &plan);
        if (code == CLI_OK && c->mutate_rank >= (int64_t)plan->topology.nodes * plan->topology.local)
            code = cli_fail(c, "--rank: %lld is not in 0..%u", (long long)c->mutate_rank,
                            plan->topology.nodes * plan->topology.local - 1);
        if (code == CLI_OK)
            code = mutate(c, "this plan", plan, c->mutate_rank, &sum);
        tide_plan_destroy(plan);
    } else {
        code = mutate_small(c, &sum);
        for (int i = 0; i < N_MUTATED && code == CLI_OK; i++) {
            plan = NULL;
            code = load_named(c, &mutated_shapes[i], &plan);
            if (code == CLI_OK)
                code = mutate(c, mutated_shapes[i].name, plan, 1, &sum);
            tide_plan_destroy(plan);
        }
    }
    if (code != CLI_OK)
        return code;
    for (int i = 0; i < MUTATE_KIND_COUNT && !c->json; i++)
        printf("%-30s %6llu reported, %5llu equivalent, %llu missed\n", mutation_name(i),
               (unsigned long long)sum.by_kind[i][0], (unsigned long long)sum.by_kind[i][1],
               (unsigned long long)sum.by_kind[i][2]);
    for (int i = 0; i < VERIFY_CLASS_COUNT && !c->json; i++)
        printf("first reported as %-12s %6llu\n", verify_class_name(i), (unsigned long long)sum.by_class[i]);
    if (c->json)
        printf("{\"schema\": 1, \"mutants\": %llu, \"reported\": %llu, \"equivalent\": %llu, \"missed\": %llu}\n",
               (unsigned long long)sum.mutants, (unsigned long long)sum.reported, (unsigned long long)sum.equivalent,
               (unsigned long long)sum.missed);
    else
        printf("mutate: %llu mutants, %llu reported, %llu equivalent, %llu missed\n", (unsigned long long)sum.mutants,
               (unsigned long long)sum.reported, (unsigned long long)sum.equivalent, (unsigned long long)sum.missed);
    return sum.missed ? CLI_WRONG : CLI_OK;
}

int cli_verify(const cli *c)
{
    static const char *const made_up_flags[] = {"params", NULL};
    if (c->audit && c->mutate)
        return cli_fail(c, "--audit: excludes --mutate");
    if (c->audit && by_flags(c))
        return cli_fail(c, "--audit: takes no flags about shapes and no knobs: it audits every plan at L = 8");
    if (c->mutate_rank >= 0 && !c->mutate)
        return cli_fail(c, "--rank: goes with --mutate");
    if (c->mutate_rank >= 0 && !by_flags(c))
        return cli_fail(c, "--rank: needs flags about shapes");
    if ((c->model || c->shapes) && cli_refuse_given(c, made_up_flags, "excludes --model and --shapes") != CLI_OK)
        return CLI_BAD;
    return c->audit ? cli_audit(c) : c->mutate ? cli_mutate(c) : cli_prove(c);
}
