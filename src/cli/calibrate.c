/*
 * calibrate.c - `tide calibrate`: measures this machine and writes a machine file.
 *
 * Every rate and time is found from calls of the library, one call for each: the value with which the simulation takes as
 * long as the call did, with everything found before. What was not measured is left out, and said to be.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/oracle.h"
#include "cli/ranks.h"
#include "schedule/simulate.h"

enum { REPEATS = 21, WARMUP = 3, MANY = 256, TINY = 256, BIG = 4 << 20, CHECKED = 1 << 20, COPY_BYTES = 32 << 20 };

/* One measured call: equal parameters that give each rank `elements` bf16 items in all; many: neighbours differ by one item, so that
 * nothing merges. */
typedef struct probe {
    const char *what;
    uint32_t nodes, local, params;
    uint64_t elements;
    bool reduce;
    double *seconds, *enqueue; /* by rank and repeat: memory from ranks_alloc */
} probe;

static uint32_t ranks_of(const probe *p) { return p->nodes * p->local; }

static bool describe(const probe *p, cli_shapes *s, tide_group_desc *desc)
{
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    memset(s, 0, sizeof *s);
    s->dtype = TIDE_BF16;
    for (uint32_t i = 0; i < p->params; i++) {
        uint64_t each = p->elements / p->params + (p->params > 1 ? i % 2 : 0);
        int64_t dims[1] = {(int64_t)(each * ranks_of(p))};
        if (!cli_shapes_add(s, "p", 1, dims, 0))
            return false;
    }
    *desc = init;
    desc->n_params = s->n_params;
    desc->params = s->params;
    return true;
}

static tide_options knobs(void)
{
    tide_options o = TIDE_OPTIONS_INIT;
    o.multicast = 0; /* a copy a rank, as the model has it for machines without multicast */
    o.c_sum = o.c_land = 1;
    return o;
}

/* ---- measuring ---------------------------------------------------------------------------------------- */

static bool meet(const rank_start *start)
{
    char mine = 0, all[64];
    return start->n_ranks == 1 || start->allgather(start->allgather_context, &mine, all, 1) == 0;
}

static int timed_calls(const rank_start *start, const probe *p, tide_group *group, const tide_reduce_scatter_args *args)
{
    for (int i = 0; i < WARMUP + REPEATS; i++) {
        int64_t begin, enqueued, end;
        int status;
        if (!meet(start))
            return 1;
        begin = tide_now_ns();
        status = p->reduce ? tide_reduce_scatter(group, args, NULL) : tide_all_gather(group, NULL, NULL);
        enqueued = tide_now_ns();
        if (status != TIDE_OK || tide_wait(group, p->reduce ? TIDE_DONE : TIDE_READY, NULL) != TIDE_OK)
            return 1;
        end = tide_now_ns();
        if (!p->reduce && tide_slot_release(group, NULL) != TIDE_OK)
            return 1;
        if (i >= WARMUP) {
            uint32_t at = (uint32_t)(i - WARMUP) * start->n_ranks + start->rank;
            p->seconds[at] = (double)(end - begin) / 1e9;
            p->enqueue[at] = (double)(enqueued - begin) / 1e9;
        }
    }
    return 0;
}

static int probe_rank(const rank_start *start)
{
    const probe *p = start->job;
    tide_comm_desc cd = TIDE_COMM_DESC_INIT;
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    tide_options options = knobs();
    tide_group_desc desc;
    cli_shapes shapes;
    tide_comm *comm = NULL;
    tide_group *group = NULL;
    uint64_t whole = p->elements * ranks_of(p) + (uint64_t)p->params * ranks_of(p), outputs = 0;
    void *memory = calloc(whole, 2);
    const void **grads = NULL;
    int failed = 1;

    cd.rank = start->rank;
    cd.n_ranks = start->n_ranks;
    cd.node_size = p->local;
    cd.allgather = start->n_ranks > 1 ? start->allgather : NULL;
    cd.allgather_context = start->allgather_context;
    cd.options = &options;
    if (!describe(p, &shapes, &desc) || !memory || tide_comm_create(&cd, &comm) != TIDE_OK ||
        tide_groups_create(comm, &desc, 1, &group) != TIDE_OK ||
        tide_group_output_elements(group, NULL, &outputs) != TIDE_OK)
        goto out;
    grads = calloc(p->params, sizeof *grads);
    args.out = calloc(outputs + 1, sizeof *args.out);
    for (uint32_t i = 0; grads && i < p->params; i++) {
        grads[i] = memory;
        if (tide_shard_adopt(group, i, memory, 0, NULL) != TIDE_OK)
            goto out;
    }
    args.grads = grads;
    if (grads && args.out)
        failed = timed_calls(start, p, group, &args);
out:
    tide_comm_destroy(comm);
    cli_shapes_clear(&shapes);
    free(grads);
    free(args.out);
    free(memory);
    return failed;
}

/* The fastest repeat, each as slow as its slowest rank: what else ran on the machine is not the machine. */
static double fastest(const double *values, uint32_t n_ranks)
{
    double best = 1e9;
    for (int i = 0; i < REPEATS; i++) {
        double slowest = 0;
        for (uint32_t r = 0; r < n_ranks; r++)
            slowest = fmax(slowest, values[(uint32_t)i * n_ranks + r]);
        best = fmin(best, slowest);
    }
    return best;
}

static int measure(const cli *c, probe *p, double *seconds, double *enqueue)
{
    size_t bytes = sizeof(double) * REPEATS * ranks_of(p);
    char text[300] = "";
    int failed;

    p->seconds = ranks_alloc(bytes);
    p->enqueue = ranks_alloc(bytes);
    failed = !p->seconds || !p->enqueue || ranks_run(ranks_of(p), false, probe_rank, p, text, sizeof text) != 0;
    if (!failed) {
        *seconds = fastest(p->seconds, ranks_of(p));
        *enqueue = fastest(p->enqueue, ranks_of(p));
    }
    ranks_free(p->seconds, bytes);
    ranks_free(p->enqueue, bytes);
    return failed ? cli_fail(c, "%s: %s", p->what, *text ? text : tide_last_error()) : CLI_OK;
}

/* ---- finding values -------------------------------------------------------------------------------------- */

static int simulated(const cli *c, const probe *p, const plan_machine *m, double *seconds, uint32_t *ops, uint32_t *items)
{
    const simulate_call call = {p->reduce ? SCHEDULE_RS : SCHEDULE_AG, 0};
    const simulate_step steps[2] = {{p->reduce ? SIMULATE_READ : SIMULATE_AG, 0}, {SIMULATE_NET, 0}};
    simulate_result r = {.call_seconds = seconds};
    simulate_input in = {.machine = m, .calls = &call, .n_calls = 1, .steps = steps, .n_steps = p->reduce ? 2 : 1,
                         .every_rank = true};
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_options options = knobs();
    tide_group_desc desc;
    cli_shapes shapes;
    tide_plan *plan = NULL;
    schedule list = {0};
    bool ok;

    t.nodes = p->nodes;
    t.local = p->local;
    ok = describe(p, &shapes, &desc) && tide_plan_create(&t, &desc, 1, &options, &plan) == TIDE_OK;
    in.plan = plan;
    ok = ok && simulate_run(&in, &r, NULL) == TIDE_OK;
    if (ok && ops) {
        ok = schedule_build_call(plan, 0, 0, call.kind, &list) == TIDE_OK;
        *ops = list.n_ops;
        *items = list.n_runs + list.n_segments + list.n_puts + list.n_posts;
        schedule_clear(&list);
    }
    tide_plan_destroy(plan);
    cli_shapes_clear(&shapes);
    return ok ? CLI_OK : cli_fail_library(c);
}

enum { LEAST, MOST, STEPS = 60 };
static const double bounds[2][2] = {{1e-10, 1}, {1e6, 1e15}}; /* of times, of rates */

/* The value of one or two keys with which the simulation takes `seconds`. Rates make it shorter, times longer. */
static int solve(const cli *c, const probe *p, plan_machine *m, double seconds, double *key, double *also, bool rate)
{
    double low = bounds[rate][LEAST], high = bounds[rate][MOST];
    for (int i = 0; i < STEPS; i++) {
        double middle = sqrt(low * high), now;
        int code;
        *key = middle;
        if (also)
            *also = middle;
        code = simulated(c, p, m, &now, NULL, NULL);
        if (code != CLI_OK)
            return code;
        if ((now > seconds) == rate)
            low = middle;
        else
            high = middle;
    }
    return CLI_OK;
}

/* Copies of all cores at once. */
static int copy_rank(const rank_start *start)
{
    double *seconds = start->job;
    char *from = malloc(COPY_BYTES), *to = malloc(COPY_BYTES);
    int failed = !from || !to;

    if (!failed) {
        memset(from, (int)start->rank, COPY_BYTES);
        memset(to, ~(int)start->rank, COPY_BYTES);
        failed = !meet(start);
    }
    if (!failed) {
        seconds[start->rank] = 1e9;
        for (int i = 0; i < REPEATS; i++) {
            int64_t begin = tide_now_ns();
            memcpy(i % 2 ? from : to, i % 2 ? to : from, COPY_BYTES);
            seconds[start->rank] = fmin(seconds[start->rank], (double)(tide_now_ns() - begin) / 1e9);
        }
        failed = from[start->rank] != (char)start->rank; /* so that the copies are made */
    }
    free(from);
    free(to);
    return failed;
}

static int find_memory(const cli *c, plan_machine *m)
{
    enum { MOST_CORES = 64 };
    uint32_t cores = (uint32_t)fmin(m->sms, MOST_CORES);
    double seconds[MOST_CORES], slowest = 0;
    char text[300] = "";

    if (ranks_run(cores, false, copy_rank, seconds, text, sizeof text) != 0)
        return cli_fail(c, "memory: %s", text);
    for (uint32_t i = 0; i < cores; i++)
        slowest = fmax(slowest, seconds[i]);
    m->hbm_rate = 2.0 * COPY_BYTES * cores / slowest;
    return CLI_OK;
}

typedef struct unknown { probe p; size_t key, also; bool rate; } unknown;
#define KEY(name) offsetof(plan_machine, name)

/* The bound that a search without an answer has ended at, or 0. */
static double bounds_edge(bool rate, double value)
{
    double fastest = bounds[rate][rate ? MOST : LEAST];
    return fabs(log(value / fastest)) < 1e-3 ? value : 0;
}

static int find_all(const cli *c, plan_machine *m)
{
    enum { NONE = 0 }; /* offset of the name: no key */
    static const unknown unknowns[] = {
        {{"device_op, signal_latency", 1, 2, 1, TINY, false, NULL, NULL}, KEY(device_op), KEY(signal_latency), false},
        {{"local_copy_rate", 1, 1, 1, BIG, false, NULL, NULL}, KEY(local_copy_rate), NONE, true},
        {{"local_copy_descriptor", 1, 1, MANY, MANY * 16, false, NULL, NULL}, KEY(local_copy_descriptor), NONE, false},
        {{"copy_rate, nvlink_rate", 1, 2, 1, BIG, false, NULL, NULL}, KEY(copy_rate), KEY(nvlink_rate), true},
        {{"copy_descriptor", 1, 2, MANY, MANY * 16, false, NULL, NULL}, KEY(copy_descriptor), NONE, false},
        {{"sum_cta_rate", 1, 1, 1, BIG, true, NULL, NULL}, KEY(sum_cta_rate_in_situ), KEY(sum_cta_rate), true},
        {{"sum_cta_rate_in_situ", 1, 2, 1, BIG, true, NULL, NULL}, KEY(sum_cta_rate_in_situ), NONE, true},
        {{"nic_latency", 2, 1, 1, TINY, false, NULL, NULL}, KEY(nic_latency), NONE, false},
        {{"nic_rate", 2, 1, 1, BIG, false, NULL, NULL}, KEY(nic_rate), NONE, true},
        {{"round_wait", 2, 1, 1, TINY, true, NULL, NULL}, KEY(round_wait), NONE, false},
        {{"land_cta_rate", 2, 1, 1, BIG, true, NULL, NULL}, KEY(land_cta_rate), KEY(land_rate_cap), true},
    };
    for (size_t i = 0; i < sizeof unknowns / sizeof unknowns[0]; i++) {
        unknown u = unknowns[i];
        double seconds, enqueue, *key = (double *)((char *)m + u.key);
        double *also = u.also ? (double *)((char *)m + u.also) : NULL;
        int code = measure(c, &u.p, &seconds, &enqueue);
        if (code != CLI_OK)
            return code;
        if (i == 0) { /* the first call also says what enqueueing takes; its few items count with the operations */
            double unused;
            uint32_t ops, items;
            code = simulated(c, &u.p, m, &unused, &ops, &items);
            m->host_op = m->host_item = enqueue / (ops + items);
        }
        if (u.key == KEY(round_wait)) /* the solver's: a round of almost nothing */
            *key = seconds;
        else if (code == CLI_OK)
            code = solve(c, &u.p, m, seconds, key, also, u.rate);
        if (code == CLI_OK && *key == bounds_edge(u.rate, *key))
            printf("# %s: does not show beside the rest of its call\n", u.p.what);
        if (code != CLI_OK)
            return code;
    }
    return CLI_OK;
}

/* Sizes that nothing was found from. */
static int check(const cli *c, const plan_machine *m)
{
    for (int i = 0; i < 4; i++) {
        probe p = {"check", i / 2 + 1, 2 - (uint32_t)i / 2, 8, CHECKED, i % 2 != 0, NULL, NULL};
        double seconds, enqueue, expected;
        int code = measure(c, &p, &seconds, &enqueue);
        if (code == CLI_OK)
            code = simulated(c, &p, m, &expected, NULL, NULL);
        if (code != CLI_OK)
            return code;
        printf("# check: %s of %d MiB shards in bf16, %u x %u ranks: measured %.3f ms, simulated %.3f ms\n",
               p.reduce ? "reduce-scatter" : "all-gather", CHECKED * 2 >> 20, p.nodes, p.local, seconds * 1e3, expected * 1e3);
    }
    return CLI_OK;
}

int cli_calibrate(const cli *c)
{
    tide_text out = {cli_write, stdout, TIDE_OK};
    plan_machine m = {.name = ""};
    int code;

    unsetenv("TIDE_MACHINE"); /* calls are simulated with the built-in rates' plans */
    if (c->fabric && strcmp(c->fabric, "host") != 0)
        return cli_fail(c, "--fabric: '%s': calibrating other fabrics than host is not built", c->fabric);
    if (gethostname(m.name, sizeof m.name - 1) != 0 || !m.name[0])
        strcpy(m.name, "host");
    m.sms = (double)sysconf(_SC_NPROCESSORS_ONLN);
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) /* out of the way until found */
        if (plan_machine_keys[i].unit == UNIT_RATE && plan_machine_keys[i].required)
            *(double *)((char *)&m + plan_machine_keys[i].offset) = 1e15;
    code = find_memory(c, &m);
    if (code == CLI_OK)
        code = find_all(c, &m);
    if (code != CLI_OK)
        return code;
    printf("# tide calibrate, host fabric: ranks are threads, copy engines are threads that copy, rails are memory.\n"
           "# Fastest of %d calls; each value is that with which the simulation takes as long as the call did.\n",
           REPEATS);
    plan_machine_print(&m, &out);
    return check(c, &m);
}
