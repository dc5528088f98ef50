/* plan.c - `tide plan`: what the library would do, without doing it. */
#include "cli/cli.h"

int cli_plan(const cli *c)
{
    cli with = *c;
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc descs[64];
    plan_machine machine;
    bool by_machine = c->machine || c->nic || c->nvlink || c->explain; /* else as the library plans */
    cli_shapes shapes;
    tide_plan *plan = NULL;
    uint32_t n_ranks, n_groups = c->groups ? (uint32_t)c->groups : 1;
    unsigned flags;
    int code;

    if (c->explain && c->json)
        return cli_fail(c, "--explain: not with --json");
    if (!c->model && !c->shapes)
        with.model = CLI_DEFAULT_MODEL;
    topology.nodes = c->nodes ? (uint32_t)c->nodes : 1;
    topology.local = c->local ? (uint32_t)c->local : 4;
    n_ranks = topology.nodes * topology.local;
    if (c->rank >= n_ranks)
        return cli_fail(c, "--rank: %lld is not in 0..%u", (long long)c->rank, n_ranks - 1);
    code = by_machine ? cli_machine_load(c, "paper", &machine) : CLI_OK;
    if (code != CLI_OK)
        return code;
    if (c->explain)
        cli_machine_knobs(&with, &machine);
    code = cli_shapes_load(&with, &shapes);
    if (code != CLI_OK)
        return code;
    code = cli_shapes_desc(&with, &shapes, &descs[0]);
    for (uint32_t i = 1; i < n_groups; i++)
        descs[i] = descs[0];
    if (code == CLI_OK && (by_machine ? plan_machine_create(&machine, &topology, descs, n_groups, &with.options, &plan)
                                     : tide_plan_create(&topology, descs, n_groups, &with.options, &plan)) != TIDE_OK)
        code = cli_fail_library(c);
    flags = (c->json ? TIDE_PRINT_JSON : 0) | (c->ops ? TIDE_PRINT_OPS : 0);
    if (code == CLI_OK && tide_plan_print(plan, (uint32_t)c->rank, flags, cli_write, stdout) != TIDE_OK)
        code = ferror(stdout) ? CLI_OK : cli_fail_library(c); /* main() reports standard output */
    if (code == CLI_OK && c->explain)
        code = cli_explain(c, &machine, &topology, descs, n_groups, plan);
    tide_plan_destroy(plan);
    cli_shapes_clear(&shapes);
    return code;
}
