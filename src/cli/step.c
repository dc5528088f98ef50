/* step.c - `tide simulate step`: a training step on TIDE and on stock FSDP2, one point, a break-even, or a table. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "schedule/step.h"

enum { DEFAULT_TOKENS = 8192, MAX_TOKENS = 1 << 26 };
static const double break_even_share = 0.01; /* of the stock step */

typedef struct point {
    uint32_t nodes;
    int64_t tokens;
    step_result tide, stock;
    bool compared;
} point;

static const char *name_of(const cli *c)
{
    return c->shapes ? c->shapes : c->model ? c->model : CLI_DEFAULT_MODEL;
}

static const cli_model *model_of(const cli *c)
{
    const char *name = c->model ? c->model : CLI_DEFAULT_MODEL;
    for (size_t i = 0; !c->shapes && i < cli_n_models; i++)
        if (strcmp(cli_models[i].name, name) == 0)
            return &cli_models[i];
    return NULL;
}

/* Two equal groups, so that neighbouring layers have different landings. */
static int make_plan(const cli *c, const plan_machine *m, uint32_t nodes, uint32_t local, tide_plan **plan)
{
    cli with = *c;
    cli_shapes shapes;
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc descs[2];
    int code;

    cli_machine_knobs(&with, m);
    if (!c->model && !c->shapes)
        with.model = CLI_DEFAULT_MODEL;
    topology.nodes = nodes;
    topology.local = local;
    code = cli_shapes_load(&with, &shapes);
    if (code != CLI_OK)
        return code;
    code = cli_shapes_desc(&with, &shapes, &descs[0]);
    descs[1] = descs[0];
    if (code == CLI_OK && plan_machine_create(m, &topology, descs, 2, &with.options, plan) != TIDE_OK)
        code = cli_fail_library(c);
    cli_shapes_clear(&shapes);
    return code;
}

/* Forward 2 FLOP a parameter and token that meet, backward twice that, and the forward once more (checkpointing). */
static step_model model_for(const cli *c, const plan_machine *m, const tide_plan *plan, int64_t tokens)
{
    const cli_model *known = model_of(c);
    const geo_group *g = &plan->groups[0].geo;
    double met = -(known ? known->idle : 0);
    step_model out = {.layers = c->layers ? (uint32_t)c->layers : known ? known->layers : 1};

    for (uint32_t i = 0; i < g->n_params; i++)
        met += (double)g->params[i].whole;
    out.forward = 2 * met * (double)tokens / m->flops;
    out.backward = 3 * out.forward;
    out.ring_slowdown = known ? known->ring_slowdown : 0;
    return out;
}

static int price(const cli *c, const plan_machine *m, uint32_t local, point *p, tide_text *trace)
{
    tide_plan *plan = NULL;
    step_model model;
    int code = make_plan(c, m, p->nodes, local, &plan);

    if (code != CLI_OK)
        return code;
    model = model_for(c, m, plan, p->tokens);
    if (step_tide(plan, m, &model, (uint32_t)c->rank, &p->tide, trace) != TIDE_OK ||
        (p->compared && step_stock(plan, m, &model, (uint32_t)c->rank, &p->stock, NULL) != TIDE_OK))
        code = trace && trace->status != TIDE_OK ? cli_fail_trace(c)
                                                 : cli_fail_library(c);
    tide_plan_destroy(plan);
    return code;
}

static double saved(const point *p) { return 1 - p->tide.seconds / p->stock.seconds; }

/* The fewest tokens from which on less than break_even_share is saved, to an eighth. 0: not up to MAX_TOKENS. */
static int find_break_even(const cli *c, const plan_machine *m, uint32_t local, uint32_t nodes, int64_t *tokens)
{
    int64_t low = 0, high = 0;
    int code = CLI_OK;

    for (int64_t t = 1024; t <= MAX_TOKENS && !high && code == CLI_OK; t *= 2) {
        point p = {.nodes = nodes, .tokens = t, .compared = true};
        code = price(c, m, local, &p, NULL);
        if (code == CLI_OK && saved(&p) < break_even_share)
            high = t;
        else
            low = t;
    }
    while (high && low && high - low > low / 8 && code == CLI_OK) {
        point p = {.nodes = nodes, .tokens = (low + high) / 2, .compared = true};
        code = price(c, m, local, &p, NULL);
        if (code == CLI_OK && saved(&p) < break_even_share)
            high = p.tokens;
        else
            low = p.tokens;
    }
    *tokens = high;
    return code;
}

/* ---- output ------------------------------------------------------------------------------------------------ */

static void json_side(FILE *f, const char *name, const step_result *r)
{
    fprintf(f,
            ", \"%s\": {\"seconds\": %.9g, \"compute_seconds\": %.9g, \"exposed_seconds\": %.9g, \"copies_seconds\": %.9g, "
            "\"live_bytes\": %llu}",
            name, r->seconds, r->compute, r->exposed, r->copies, (unsigned long long)r->live_bytes);
}

static void json_point(FILE *f, const point *p, uint32_t local)
{
    fprintf(f, "{\"nodes\": %u, \"gpus\": %u, \"tokens\": %lld", p->nodes, p->nodes * local, (long long)p->tokens);
    json_side(f, "tide", &p->tide);
    if (p->compared) {
        json_side(f, "stock", &p->stock);
        fprintf(f, ", \"saved\": %.6g", saved(p));
    }
    fprintf(f, "}");
}

static void json_begin(FILE *f, const char *machine, const char *what, uint32_t local)
{
    fprintf(f, "{\"schema\": 1, \"kind\": \"step\", \"machine\": \"%s\", \"model\": \"%s\", \"local\": %u, \"points\": [",
            machine, what, local);
}

static void json_end(FILE *f, int64_t break_even)
{
    fprintf(f, "], \"break_even_tokens\": %lld}\n", (long long)break_even);
}

static void text_side(const char *name, const step_result *r)
{
    printf("  %-6s %9.4f s: compute %.4f, exposed communication and contention %.4f", name, r->seconds, r->compute,
           r->exposed);
    if (r->copies > 0)
        printf(" (of it layout copies %.4f)", r->copies);
    printf("; live in a layer's backward %.2f GiB\n", (double)r->live_bytes / 1073741824);
}

/* ---- one point, or many ---------------------------------------------------------------------------------- */

static bool parse_range(const char *text, const char *key, int64_t lo, int64_t hi, int64_t out[2])
{
    char copy[64], *dots;
    size_t length = strlen(key);

    if (strncmp(text, key, length) != 0 || text[length] != '=' || strlen(text + length + 1) >= sizeof copy)
        return false;
    strcpy(copy, text + length + 1);
    dots = strstr(copy, "..");
    if (dots)
        *dots = '\0';
    return cli_number(copy, true, &out[0]) && cli_number(dots ? dots + 2 : copy, true, &out[1]) && out[0] >= lo &&
           out[0] <= out[1] && out[1] <= hi;
}

static int parse_sweep(const cli *c, int64_t nodes[2], int64_t tokens[2])
{
    int code = CLI_OK;

    for (int64_t i = 0; i < c->sweep.n && code == CLI_OK; i++) { /* a word may hold several, quoted in the shell */
        char *copy = strdup(c->sweep.first[i]), *rest = NULL;
        if (!copy)
            return cli_fail(c, "out of memory");
        for (char *word = strtok_r(copy, " ", &rest); word && code == CLI_OK; word = strtok_r(NULL, " ", &rest))
            if (!parse_range(word, "nodes", 1, TIDE_MAX_NODES, nodes) &&
                !parse_range(word, "tokens", 1, MAX_TOKENS, tokens))
                code = cli_fail(c, "--sweep: '%s', expected nodes=A..B (1..%d) or tokens=A..B", word, TIDE_MAX_NODES);
        free(copy);
    }
    return code;
}

/* A row a point; with --json, and in `data` if it is given, an object. */
static int sweep(const cli *c, const plan_machine *m, uint32_t local, int64_t nodes[2], int64_t tokens[2], FILE *data)
{
    FILE *const objects[2] = {c->json ? stdout : NULL, data};
    bool first = true;
    int code = CLI_OK;

    if (!c->json)
        printf("%6s %6s %8s %11s %11s %8s %10s %10s\n", "nodes", "GPUs", "tokens", "TIDE s", "stock s", "saved %",
               "TIDE GiB", "stock GiB");
    for (int64_t n = nodes[0]; n <= nodes[1] && code == CLI_OK; n *= 2) {
        for (int64_t t = tokens[0]; t <= tokens[1] && code == CLI_OK; t *= 2) {
            point p = {.nodes = (uint32_t)n, .tokens = t, .compared = true};
            code = price(c, m, local, &p, NULL);
            if (code != CLI_OK)
                break;
            for (int i = 0; i < 2; i++) {
                if (!objects[i])
                    continue;
                fprintf(objects[i], first ? "" : ", ");
                json_point(objects[i], &p, local);
            }
            if (!c->json) {
                printf("%6u %6u %8lld %11.4f %11.4f %8.2f %10.2f %10.2f\n", p.nodes, p.nodes * local, (long long)t,
                       p.tide.seconds, p.stock.seconds, 100 * saved(&p), (double)p.tide.live_bytes / 1073741824,
                       (double)p.stock.live_bytes / 1073741824);
                fflush(stdout);
            }
            first = false;
        }
    }
    return code;
}

static int one_point(const cli *c, const plan_machine *m, const tide_topology *t, int64_t tokens, tide_text *trace,
                     int64_t *break_even)
{
    point p = {.nodes = t->nodes, .tokens = tokens, .compared = c->compare != NULL};
    int64_t even = 0;
    int code = price(c, m, t->local, &p, trace);

    if (code == CLI_OK && p.compared)
        code = find_break_even(c, m, t->local, t->nodes, &even);
    if (code != CLI_OK)
        return code;
    *break_even = even;
    if (c->json) {
        json_point(stdout, &p, t->local);
        return CLI_OK;
    }
    printf("step of %s, %lld tokens a GPU\n", name_of(c), (long long)tokens);
    text_side("TIDE", &p.tide);
    if (!p.compared)
        return CLI_OK;
    text_side("stock", &p.stock);
    printf("  saved  %9.4f s, %.1f %%\n", p.stock.seconds - p.tide.seconds, 100 * saved(&p));
    if (even)
        printf("  from about %lld tokens a GPU on, TIDE saves less than %.0f %%\n", (long long)even,
               100 * break_even_share);
    else
        printf("  TIDE saves %.0f %% or more up to %d tokens a GPU\n", 100 * break_even_share, MAX_TOKENS);
    return CLI_OK;
}

int cli_step(const cli *c, const plan_machine *m, const tide_topology *topology, tide_text *trace, FILE *sweep_data)
{
    int64_t tokens[2] = {c->tokens ? c->tokens : DEFAULT_TOKENS, 0}, nodes[2] = {topology->nodes, topology->nodes};
    int64_t break_even = 0;
    int code = CLI_OK;

    if (!(m->flops > 0 && m->pack_rate > 0 && m->ring_rate > 0 && m->ring_ctas > 0))
        return cli_fail(c, "machine %s: a step needs flops, pack_rate, ring_rate and ring_ctas", m->name);
    tokens[1] = tokens[0];
    if (c->compare && strcmp(c->compare, "stock") != 0)
        return cli_fail(c, "--compare: '%s' is not stock", c->compare);
    if (c->shapes && !c->layers)
        return cli_fail(c, "--layers: needed with --shapes");
    if (c->sweep.n && (code = parse_sweep(c, nodes, tokens)) != CLI_OK)
        return code;
    if (c->json)
        json_begin(stdout, m->name, c->shapes ? "" : name_of(c), topology->local);
    else
        printf("machine %s\n", m->name);
    if (sweep_data)
        json_begin(sweep_data, m->name, c->shapes ? "" : name_of(c), topology->local);
    code = c->sweep.n ? sweep(c, m, topology->local, nodes, tokens, sweep_data)
                      : one_point(c, m, topology, tokens[0], trace, &break_even);
    if (sweep_data)
        json_end(sweep_data, 0);
    if (c->json)
        json_end(stdout, break_even);
    return code;
}
