/* explain.c - `tide plan --explain`: why each knob has its value, and what others would cost in time and memory. */
#include <math.h>
#include <string.h>

#include "cli/cli.h"
#include "schedule/simulate.h"

typedef struct scene {
    const cli *c;
    const plan_machine *m;
    const tide_topology *topology;
    const tide_group_desc *descs;
    uint32_t n_groups;
    const tide_plan *plan;
    tide_options options; /* resolved, but for those of a knob's choice */
    double ag, rs;        /* seconds of group 0; 0: none */
    uint64_t bytes;
} scene;

static double price_call(const tide_plan *plan, const plan_machine *m, int kind)
{
    const simulate_call call = {kind, 0};
    const simulate_step steps[2] = {{kind == SCHEDULE_AG ? SIMULATE_AG : SIMULATE_READ, 0}, {SIMULATE_NET, 0}};
    double seconds = 0;
    simulate_result r = {.call_seconds = &seconds};
    const simulate_input in = {.plan = plan, .machine = m, .calls = &call, .n_calls = 1, .steps = steps,
                               .n_steps = kind == SCHEDULE_AG ? 1 : 2};
    return simulate_run(&in, &r, NULL) == TIDE_OK ? seconds : -1;
}

static bool measure(const scene *s, const tide_plan *plan, double *ag, double *rs, uint64_t *bytes)
{
    tide_bytes b = TIDE_BYTES_INIT;
    bool reduces = plan->groups[0].geo.grad_dtype != TIDE_NONE;
    *ag = price_call(plan, s->m, SCHEDULE_AG);
    *rs = reduces ? price_call(plan, s->m, SCHEDULE_RS) : 0;
    if (*ag < 0 || *rs < 0 || tide_plan_bytes(plan, 0, &b) != TIDE_OK)
        return false;
    *bytes = b.total;
    return true;
}

/* The plan with one knob changed, and with what follows from it left to the plan again. */
static void alternative(const scene *s, const char *knob, int64_t value)
{
    static const char *const follow[] = {"n_par", "n_out", "k"};
    tide_options o = s->options;
    tide_plan *plan = NULL;
    double ag, rs;
    uint64_t bytes;

    for (size_t i = 0; i < sizeof follow / sizeof follow[0]; i++)
        if (strcmp(follow[i], knob) != 0 && !cli_knob_given(s->c, follow[i]))
            tide_options_set(&o, follow[i], TIDE_AUTO);
    printf("      %s %lld: ", knob, (long long)value);
    if (tide_options_set(&o, knob, value) != TIDE_OK ||
        plan_machine_create(s->m, s->topology, s->descs, s->n_groups, &o, &plan) != TIDE_OK ||
        !measure(s, plan, &ag, &rs, &bytes)) {
        printf("not possible: %s\n", tide_last_error());
    } else {
        printf("all_gather %+.1f %%", 100 * (ag / s->ag - 1));
        if (s->rs > 0)
            printf(", reduce_scatter %+.1f %%", 100 * (rs / s->rs - 1));
        printf(", memory %+.2f MiB\n", ((double)bytes - (double)s->bytes) / 1048576);
    }
    tide_plan_destroy(plan);
}

static void neighbours(const scene *s, const char *knob, int64_t value, int64_t lo, int64_t hi)
{
    if (value / 2 >= lo)
        alternative(s, knob, value / 2);
    if (value * 2 <= hi)
        alternative(s, knob, value * 2);
}

static const char *by(const scene *s, const char *knob, const char *otherwise)
{
    return cli_knob_given(s->c, knob) ? "as given" : otherwise;
}

/* ---- the solver's three ------------------------------------------------------------------------------- */

static void explain_solver(const scene *s)
{
    const tide_options *o = &s->plan->options;
    const plan_machine *m = s->m;
    const geo_group *g = &s->plan->groups[0].geo;
    uint32_t nodes = s->plan->topology.nodes, local = s->plan->topology.local;
    double s32 = (double)g->elements * sizeof(float), wire = plan_wire_bytes(local, s32, tide_dtype_bytes(g->grad_dtype));
    double t_nic = (nodes - 1) * wire / m->nic_rate;
    double item = tide_dtype_bytes(g->grad_dtype), traffic = local * item / 4 + 1;

    if (nodes == 1) {
        printf("  c_sum %lld: %s\n", (long long)o->c_sum,
               by(s, "c_sum", "so many CTAs add half as fast again as the peers' pushes come in through the port: a sum also starts and waits"));
        neighbours(s, "c_sum", o->c_sum, 1, 148);
        printf("  k, c_land, w_wave, n_par, n_out: one node has no rail, no waves and no landing\n");
        return;
    }
    printf("  the rail needs %.3f ms for %u blocks of %.2f MiB at %.4g GB/s\n", t_nic * 1e3, nodes - 1, wire / 1048576,
           m->nic_rate / 1e9);
    printf("  k %lld: %s", (long long)o->k, by(s, "k", "from min(2, M - 1), doubled while the rounds' waits exceed 10 % of"));
    if (!cli_knob_given(s->c, "k"))
        printf(" the rail's time and fewer rounds follow; %u rounds x %.3f ms = %.3f ms %s %.3f ms%s",
               s->plan->rs.n_rounds, m->round_wait * 1e3, s->plan->rs.n_rounds * m->round_wait * 1e3,
               s->plan->rs.n_rounds * m->round_wait <= 0.1 * t_nic ? "<=" : ">", 0.1 * t_nic * 1e3,
               o->k == 4 ? "; 4 is the most" : o->k == nodes - 1 ? "; all nodes are in one round" : "");
    printf("\n");
    neighbours(s, "k", o->k, 1, nodes - 1);
    printf("  c_sum %lld: %s", (long long)o->c_sum,
           by(s, "c_sum", local == 1 ? "one rank a node adds nothing before it sends" : "1.5 x"));
    if (!cli_knob_given(s->c, "c_sum") && local > 1)
        printf(" %.4g bytes a byte of output x %.4g GB/s / %.4g GB/s a CTA = %.2f, rounded up", traffic,
               m->nic_rate / 1e9, m->sum_cta_rate / 1e9, 1.5 * traffic * m->nic_rate / m->sum_cta_rate);
    printf("\n");
    if (local > 1)
        neighbours(s, "c_sum", o->c_sum, 1, 148);
    printf("  c_land %lld: %s", (long long)o->c_land, by(s, "c_land", "the last wave lands in 5 % of the rail's time with"));
    if (!cli_knob_given(s->c, "c_land")) {
        double wanted = ceil(s32 / (double)o->n_part / (0.05 * t_nic * m->land_cta_rate));
        double cap = floor(m->land_rate_cap / m->land_cta_rate);
        printf(" %.0f CTAs; the fabric feeds %.0f (%.4g / %.4g GB/s): the %s binds", wanted, cap,
               m->land_rate_cap / 1e9, m->land_cta_rate / 1e9, wanted <= cap ? "tail" : "fabric");
    }
    printf("\n");
    neighbours(s, "c_land", o->c_land, 1, 148);
}

/* ---- waves, memory, chunks, path ------------------------------------------------------------------------- */

static void explain_waves(const scene *s)
{
    const tide_options *o = &s->plan->options;
    const plan_rs *rs = &s->plan->rs;
    double stride = (double)s->plan->map.block_stride / 1048576;

    if (rs->local == 1) {
        printf("  w_wave %lld: %s: %u waves of at most so many contributors, each in an inbox block of its own\n",
               (long long)o->w_wave, by(s, "w_wave", "eight sources a sum"), rs->n_waves);
        neighbours(s, "w_wave", o->w_wave, 1, 64);
    } else {
        printf("  w_wave %lld: %s: %u waves of at most so many contributors, each on a GPU of its own\n",
               (long long)o->w_wave, by(s, "w_wave", "the GPUs of a node"), rs->n_waves);
        neighbours(s, "w_wave", o->w_wave, 1, s->plan->topology.local);
    }
    printf("  n_par %u: %s; a generation is %.2f MiB\n", rs->n_par,
           by(s, "n_par", rs->n_par == 1 ? "a single wave needs one inbox generation"
                                         : "waves land while the next one arrives"),
           stride * rs->n_inbox);
    if (rs->n_par == 1)
        alternative(s, "n_par", 2);
    printf("  n_out %u of %u blocks: %s; a block in both banks is %.2f MiB\n", rs->n_out, rs->n_blocks,
           by(s, "n_out", rs->n_out == rs->n_blocks
                              ? "full: reading the gradients never waits for the rail"
                              : "what two consecutive rounds send: gradients are copied away already (mode 1)"),
           2 * stride);
    if (plan_rs_partial_outbox(rs) < rs->n_out)
        alternative(s, "n_out", plan_rs_partial_outbox(rs));
}

static void explain_chunk(const scene *s)
{
    const tide_options *o = &s->plan->options;
    const plan_cut *cut = &s->plan->groups[0].cut;

    printf("  chunk %lld: %s; %u a block, staging %.2f MiB\n", (long long)o->chunk,
           by(s, "chunk", o->target == 1 ? "a staging slot that stays in the second-level cache (GPU)"
                                         : "a chunk that stays in the second-level cache (CPU)"),
           cut->n_chunks, (double)s->plan->map.region[REGION_STAGING].bytes / 1048576);
    for (int64_t factor = 4; factor <= 16; factor *= 4)
        if (o->chunk * factor < (int64_t)cut->part * 2)
            alternative(s, "chunk", o->chunk * factor);
    if (o->chunk / 4 >= 16)
        alternative(s, "chunk", o->chunk / 4);
}

int cli_explain(const cli *c, const plan_machine *m, const tide_topology *topology, const tide_group_desc *descs,
                uint32_t n_groups, const tide_plan *plan)
{
    scene s = {.c = c, .m = m, .topology = topology, .descs = descs, .n_groups = n_groups, .plan = plan,
               .options = plan->options};

    if (!measure(&s, plan, &s.ag, &s.rs, &s.bytes))
        return cli_fail_library(c);
    printf("\nwhy these knobs, for machine %s (times are simulated, %u ranks alike; memory is exact)\n", m->name,
           topology->nodes * topology->local);
    printf("  as planned: all_gather %.3f ms, reduce_scatter %.3f ms, memory of a rank %.2f MiB\n", s.ag * 1e3,
           s.rs * 1e3, (double)s.bytes / 1048576);
    printf("  path: %s; --multicast %lld\n",
           plan->options.multicast ? "one write serves a node, the switch folds a landing" : "one write a GPU",
           (long long)plan->options.multicast);
    alternative(&s, "multicast", !plan->options.multicast);
    if (plan->groups[0].geo.grad_dtype == TIDE_NONE)
        return CLI_OK;
    explain_solver(&s);
    if (topology->nodes > 1)
        explain_waves(&s);
    if (topology->local > 1)
        explain_chunk(&s);
    return CLI_OK;
}
