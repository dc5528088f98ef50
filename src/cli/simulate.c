/* simulate.c - `tide simulate`: what a call would take on a machine that one does not have. */
#include <string.h>

#include "cli/cli.h"
#include "schedule/simulate.h"

enum { DEFAULT_PARAMS = 30, ALL_RANKS_UP_TO = 64 };

static const char *const collective[] = {"all_gather", "reduce_scatter"};

/* Equal parameters that give each rank `bytes` of `item` bytes. */
static int equal_params(const cli *c, uint32_t n_ranks, uint32_t item, cli_shapes *s)
{
    int64_t params = c->params ? c->params : DEFAULT_PARAMS, elements = c->shard / item;
    memset(s, 0, sizeof *s);
    s->dtype = TIDE_BF16;
    for (int64_t i = 0; i < params; i++) {
        int64_t dims[1] = {(elements / params + (i < elements % params)) * (int64_t)n_ranks};
        char name[24];
        snprintf(name, sizeof name, "p%lld", (long long)i);
        if (!cli_shapes_add(s, name, 1, dims, 0))
            return cli_fail(c, "out of memory");
    }
    return CLI_OK;
}

static int make_plan(const cli *c, const plan_machine *m, int kind, const tide_topology *topology, tide_plan **plan)
{
    cli with = *c;
    cli_shapes shapes = {0};
    tide_group_desc desc;
    int code;

    cli_machine_knobs(&with, m);
    if (!c->model && !c->shapes && !c->shard)
        with.model = CLI_DEFAULT_MODEL;
    code = c->shard ? equal_params(c, topology->nodes * topology->local, kind == SCHEDULE_AG ? 2 : 4, &shapes)
                    : cli_shapes_load(&with, &shapes);
    if (code == CLI_OK)
        code = cli_shapes_desc(&with, &shapes, &desc);
    if (code == CLI_OK && plan_machine_create(m, topology, &desc, 1, &with.options, plan) != TIDE_OK)
        code = cli_fail_library(c);
    cli_shapes_clear(&shapes);
    return code;
}

/* ---- output --------------------------------------------------------------------------------------- */

static void text_path(const simulate_path *p, double total)
{
    static const char *const kinds[OP_KIND_COUNT] = {"COPY", "REDUCE", "PUT", "SIGNAL", "WAIT", "RECORD", "JOIN"};
    printf("  critical path, %u operations\n", p->n_ops);
    for (int phase = 0; phase < PHASE_COUNT; phase++)
        for (int k = 0; k < OP_KIND_COUNT; k++)
            if (p->work[phase][k] > 0)
                printf("    %-22s %-7s %10.3f ms %5.1f %%\n", op_phase_name(phase), kinds[k],
                       p->work[phase][k] * 1e3, 100 * p->work[phase][k] / total);
    printf("    %-30s %10.3f ms %5.1f %%\n", "signals and arrivals under way", p->signal * 1e3, 100 * p->signal / total);
    printf("    %-30s %10.3f ms %5.1f %%\n", "host, before the first of them", p->host * 1e3, 100 * p->host / total);
}

static void text_result(int kind, const simulate_result *r, const tide_plan *plan)
{
    tide_bytes b = TIDE_BYTES_INIT;
    tide_plan_bytes(plan, 0, &b);
    printf("%s: %.3f ms; %u rank%s, %llu operations at %llu moments, digest %016llx\n", collective[kind], r->call_seconds[0] * 1e3,
           r->ranks, r->ranks == 1 ? " for all" : "s", (unsigned long long)r->ops, (unsigned long long)r->events,
           (unsigned long long)r->digest);
    printf("  no single resource needs more than %.3f ms\n  busy", r->bound * 1e3);
    for (int k = 0; k < SIMULATE_RESOURCE_COUNT; k++)
        if (r->resource[k].busy >= 0.0005)
            printf("  %s %.1f %%", simulate_resource_name(k), 100 * r->resource[k].busy);
    printf("\n  MiB");
    for (int k = 0; k < SIMULATE_RESOURCE_COUNT; k++)
        if (r->resource[k].units > 0 && strcmp(simulate_resource_unit(k), "B") == 0)
            printf("  %s %.3f", simulate_resource_name(k), r->resource[k].units / 1048576);
    printf("\n");
    text_path(&r->path, r->seconds);
    printf("  memory of rank 0: %.3f MiB (landing %.3f, resident %.3f, stage %.3f, staging %.3f, outbox %.3f, spare %.3f,"
           " inbox %.3f)\n",
           (double)b.total / 1048576, (double)b.landing / 1048576, (double)b.resident / 1048576,
           (double)b.stage / 1048576, (double)b.staging / 1048576, (double)b.outbox / 1048576,
           (double)b.spare / 1048576, (double)b.inbox / 1048576);
}

static void json_result(int kind, const simulate_result *r, const tide_plan *plan)
{
    static const char *const kinds[OP_KIND_COUNT] = {"copy", "reduce", "put", "signal", "wait", "record", "join"};
    tide_bytes b = TIDE_BYTES_INIT;
    tide_plan_bytes(plan, 0, &b);
    printf("{\"collective\": \"%s\", \"seconds\": %.9g, \"all_done_seconds\": %.9g, \"bound_seconds\": %.9g, "
           "\"ranks_simulated\": %u, \"ops\": %llu, \"digest\": \"%016llx\", \"memory_bytes\": %llu, \"resources\": {",
           collective[kind], r->call_seconds[0], r->seconds, r->bound, r->ranks, (unsigned long long)r->ops,
           (unsigned long long)r->digest, (unsigned long long)b.total);
    for (int k = 0; k < SIMULATE_RESOURCE_COUNT; k++)
        printf("%s\"%s\": {\"busy\": %.6g, \"units\": %.9g, \"unit\": \"%s\"}", k ? ", " : "",
               simulate_resource_name(k), r->resource[k].busy, r->resource[k].units, simulate_resource_unit(k));
    printf("}, \"critical_path\": {\"ops\": %u, \"host\": %.9g, \"signals\": %.9g, \"work\": [", r->path.n_ops,
           r->path.host, r->path.signal);
    for (int phase = 0, n = 0; phase < PHASE_COUNT; phase++)
        for (int k = 0; k < OP_KIND_COUNT; k++)
            if (r->path.work[phase][k] > 0)
                printf("%s{\"phase\": \"%s\", \"op\": \"%s\", \"seconds\": %.9g}", n++ ? ", " : "",
                       op_phase_name(phase), kinds[k], r->path.work[phase][k]);
    printf("]}}");
}

/* ---- one call ------------------------------------------------------------------------------------------ */

static int price(const cli *c, const plan_machine *m, int kind, const tide_topology *topology, FILE *trace)
{
    uint32_t n_ranks = topology->nodes * topology->local;
    tide_plan *plan = NULL;
    simulate_call call = {kind, 0};
    const simulate_step steps[2] = {{kind == SCHEDULE_AG ? SIMULATE_AG : SIMULATE_READ, 0}, {SIMULATE_NET, 0}};
    double seconds = 0;
    simulate_result result = {.call_seconds = &seconds};
    simulate_input input = {.machine = m, .calls = &call, .n_calls = 1, .steps = steps, .rank = (uint32_t)c->rank};
    tide_text out = {cli_write, trace, TIDE_OK};
    int code = make_plan(c, m, kind, topology, &plan);

    input.plan = plan;
    input.n_steps = kind == SCHEDULE_AG ? 1 : 2;
    input.every_rank = c->ranks ? strcmp(c->ranks, "all") == 0 : n_ranks <= ALL_RANKS_UP_TO;
    if (code == CLI_OK && simulate_run(&input, &result, trace ? &out : NULL) != TIDE_OK)
        code = trace && ferror(trace) ? cli_fail_trace(c) : cli_fail_library(c);
    if (code == CLI_OK)
        (c->json ? json_result : text_result)(kind, &result, plan);
    tide_plan_destroy(plan);
    return code;
}

static const char *const only_for_step[] = {"tokens", "layers", "compare", "sweep", NULL};
static const char *const not_for_step[] = {"shard", "params", "ranks", NULL};

static int calls(const cli *c, const plan_machine *machine, const tide_topology *topology, FILE *trace)
{
    int first = SCHEDULE_AG, last = SCHEDULE_RS, code = CLI_OK;

    if (c->operand)
        first = last = strcmp(c->operand, "ag") == 0 ? SCHEDULE_AG : SCHEDULE_RS;
    if (c->json)
        printf("{\"schema\": 1, \"kind\": \"simulation\", \"machine\": \"%s\", \"nodes\": %u, \"local\": %u, \"calls\": [",
               machine->name, topology->nodes, topology->local);
    else
        printf("machine %s, %u nodes x %u\n", machine->name, topology->nodes, topology->local);
    for (int kind = first; kind <= last && code == CLI_OK; kind++) {
        if (kind > first)
            printf(c->json ? ", " : "\n");
        code = price(c, machine, kind, topology, trace);
    }
    if (c->json)
        printf("]}\n");
    return code;
}

static int topology_of(const cli *c, tide_topology *out)
{
    out->local = c->local ? (uint32_t)c->local : 8;
    out->nodes = c->nodes ? (uint32_t)c->nodes : 1;
    if (c->gpus && (c->gpus % out->local != 0 || c->nodes))
        return c->nodes ? cli_fail(c, "--gpus: excludes --nodes")
                        : cli_fail(c, "--gpus: %lld is not a multiple of %u GPUs a node", (long long)c->gpus, out->local);
    if (c->gpus)
        out->nodes = (uint32_t)c->gpus / out->local;
    return CLI_OK;
}

/* What --trace and --plot want written: the trace, and what is drawn; the same file where a trace is drawn. */
typedef struct wanted { FILE *trace, *drawn; } wanted;

static int open_wanted(const cli *c, wanted *w)
{
    int code = CLI_OK;

    if ((c->trace || c->plot) && !c->operand && !c->sweep.n && !c->compare)
        return cli_fail(c, "--%s: needs ag, rs or step: it holds one of them", c->trace ? "trace" : "plot");
    if (c->trace && c->sweep.n)
        return cli_fail(c, "--trace: not with --sweep");
    if (c->plot)
        code = cli_plot_open(c, &w->drawn);
    if (code != CLI_OK || c->sweep.n)
        return code;
    if (!c->trace) {
        w->trace = w->drawn;
        return CLI_OK;
    }
    w->trace = fopen(c->trace, c->plot ? "w+" : "w");
    if (!w->trace)
        code = cli_fail_trace(c);
    else if (w->drawn) {
        fclose(w->drawn);
        w->drawn = w->trace;
    }
    return code;
}

static int close_wanted(const cli *c, wanted *w, int code)
{
    if (w->drawn && code == CLI_OK)
        code = cli_plot_draw(c, w->drawn);
    if (w->drawn && w->drawn != w->trace)
        fclose(w->drawn);
    if (w->trace && fclose(w->trace) != 0 && code == CLI_OK)
        code = cli_fail_trace(c);
    return code;
}

int cli_simulate(const cli *c)
{
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    plan_machine machine;
    wanted w = {NULL, NULL};
    /* there is nothing else to sweep or to compare */
    bool step = c->operand ? strcmp(c->operand, "step") == 0 : c->sweep.n > 0 || c->compare;
    int code = cli_machine_load(c, "paper", &machine);

    if (code != CLI_OK)
        return code;
    if (c->operand && strcmp(c->operand, "ag") != 0 && strcmp(c->operand, "rs") != 0 && !step)
        return cli_fail(c, "'%s' is not one of ag, rs, step", c->operand);
    if (c->ranks && strcmp(c->ranks, "all") != 0 && strcmp(c->ranks, "one") != 0)
        return cli_fail(c, "--ranks: '%s' is not one of all, one", c->ranks);
    code = topology_of(c, &topology);
    if (code == CLI_OK)
        code = step ? cli_refuse_given(c, not_for_step, "not with step")
                    : cli_refuse_given(c, only_for_step, "only with step");
    if (code == CLI_OK)
        code = open_wanted(c, &w);
    if (code == CLI_OK && step) {
        tide_text text = {cli_write, w.trace, TIDE_OK};
        code = cli_step(c, &machine, &topology, w.trace ? &text : NULL, c->sweep.n ? w.drawn : NULL);
    } else if (code == CLI_OK) {
        code = calls(c, &machine, &topology, w.trace);
    }
    return close_wanted(c, &w, code);
}
