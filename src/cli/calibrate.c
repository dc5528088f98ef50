/*
 * calibrate.c - `tide calibrate`: measures this machine and writes a machine file.
 *
 * Every rate and time is found from calls of the library, one call for each: the value with which the simulation takes as
 * long as the call did, with everything found before. What was not measured is left out, and said to be.
 *
 * On the host a call's time begins when the host begins to enqueue it. A fabric with a timer runs calls that wait until all
 * ranks have enqueued them: their time is the device's alone, and the host's is measured beside it.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/fabric.h"
#include "cli/ranks.h"
#include "schedule/simulate.h"

enum { WARMUP = 3, MANY_PARAMS = 256, MOST_REPEATS = 21, FEW_REPEATS = 3, LAND_CTAS = 16 };

/* What the calls of a run move: items of two bytes a rank; `copy`: bytes of plain copies. */
enum { TINY, MANY, BIG, CHECKED, SIZE_COUNT };
typedef struct sizes { uint64_t items[SIZE_COUNT], copy; int repeats; } sizes;
static const sizes host_sizes = {{256, MANY_PARAMS * 16, 4 << 20, 1 << 20}, 32 << 20, MOST_REPEATS};
static const sizes device_sizes = {{256, MANY_PARAMS * 16, 128 << 20, 16 << 20}, 512 << 20, MOST_REPEATS};
static const sizes quick_sizes = {{256, MANY_PARAMS * 16, 64 << 10, 16 << 10}, 1 << 20, FEW_REPEATS};

typedef struct run {
    const cli *c;
    const cli_fabric *fabric;
    const sizes *sizes;
    plan_machine m;
} run;

/* One measured call: equal parameters that give each rank a size of items in all; many: neighbours differ by one item, so that
 * nothing merges. */
typedef struct probe {
    const char *what;
    uint32_t nodes, local;
    int size;
    bool reduce;
    uint32_t c_land;
    const run *run;
    double *seconds, *enqueue; /* by repeat and rank */
    void *gate;                /* of the timer */
    atomic_flag told;          /* `error` is the first rank's that failed */
    char error[300];
} probe;

static uint32_t ranks_of(const probe *p) { return p->nodes * p->local; }
static uint32_t params_of(const probe *p) { return p->size == MANY ? MANY_PARAMS : 1; }

static bool describe(const probe *p, cli_shapes *s, tide_group_desc *desc)
{
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    memset(s, 0, sizeof *s);
    s->dtype = TIDE_BF16;
    for (uint32_t i = 0; i < params_of(p); i++) {
        uint64_t each = p->run->sizes->items[p->size] / params_of(p) + (params_of(p) > 1 ? i % 2 : 0);
        int64_t dims[1] = {(int64_t)(each * ranks_of(p))};
        if (!cli_shapes_add(s, "p", 1, dims, 0))
            return false;
    }
    *desc = init;
    desc->n_params = s->n_params;
    desc->params = s->params;
    return true;
}

static tide_options knobs(const probe *p)
{
    tide_options o = TIDE_OPTIONS_INIT;
    o.multicast = 0; /* a copy a rank, as the model has it for machines without multicast */
    o.c_sum = 1;
    o.c_land = p->c_land;
    o.target = p->run->fabric->timer != NULL;
    return o;
}

/* ---- measuring ---------------------------------------------------------------------------------------- */

static bool meet(const rank_start *start)
{
    char mine = 0, all[64];
    return start->n_ranks == 1 || start->allgather(start->allgather_context, &mine, all, 1) == 0;
}

/* A driver may load code at its first use and wait for the device then: nothing may be held by the gate before all has run once. */
static uint32_t turn_of(int call) { return call < WARMUP ? 0 : (uint32_t)(call - WARMUP) + 1; }

static int one_call(const rank_start *start, const probe *p, cli_device *d, tide_group *group,
                    const tide_reduce_scatter_args *args, uint32_t turn, double *seconds, double *enqueue)
{
    const cli_timer *timer = p->run->fabric->timer;
    int64_t begin, enqueued;
    int status = timer ? timer->begin(d, p->gate, turn) : TIDE_OK;

    if (status != TIDE_OK || !meet(start))
        return 1;
    begin = tide_now_ns();
    status = p->reduce ? tide_reduce_scatter(group, args, d->stream) : tide_all_gather(group, NULL, d->stream);
    enqueued = tide_now_ns();
    if (status == TIDE_OK)
        status = tide_wait(group, p->reduce ? TIDE_DONE : TIDE_READY, d->stream);
    if (status != TIDE_OK)
        return 1;
    *seconds = (double)(tide_now_ns() - begin) / 1e9;
    *enqueue = (double)(enqueued - begin) / 1e9;
    if (timer) {
        if (!meet(start))
            return 1;
        if (start->rank == 0)
            timer->open(p->gate, turn);
        if (timer->end(d, seconds) != TIDE_OK)
            return 1;
    }
    return !p->reduce && tide_slot_release(group, d->stream) != TIDE_OK;
}

static int timed_calls(const rank_start *start, const probe *p, cli_device *d, tide_group *group,
                       const tide_reduce_scatter_args *args)
{
    int failed = 0;

    for (int i = 0; i < WARMUP + p->run->sizes->repeats && !failed; i++) {
        double seconds, enqueue;
        failed = one_call(start, p, d, group, args, turn_of(i), &seconds, &enqueue);
        if (!failed && i >= WARMUP) {
            uint32_t at = (uint32_t)(i - WARMUP) * start->n_ranks + start->rank;
            p->seconds[at] = seconds;
            p->enqueue[at] = enqueue;
        }
    }
    return failed;
}

/* Zeros in the device's memory. */
static void *zeros(const cli_fabric *fabric, cli_device *d, uint64_t bytes)
{
    enum { PIECE = 1 << 20 };
    static char piece[PIECE]; /* never written */
    char *to = fabric->alloc(d, bytes + 1);
    bool ok = to != NULL;

    for (uint64_t at = 0; ok && at < bytes; at += PIECE)
        ok = fabric->copy_in(d, to + at, piece, tide_min_u64(PIECE, bytes - at)) == TIDE_OK;
    if (!ok)
        fabric->release(d, to);
    return ok ? to : NULL;
}

static void tell(probe *p)
{
    if (!atomic_flag_test_and_set(&p->told))
        snprintf(p->error, sizeof p->error, "%s", tide_last_error());
}

typedef struct memories { void *in; const void **grads; float *out; } memories;

static bool make_memory(const probe *p, cli_device *d, tide_group *group, memories *m)
{
    const cli_fabric *fabric = p->run->fabric;
    uint64_t outputs = 0, whole = (p->run->sizes->items[p->size] + params_of(p)) * ranks_of(p);

    m->in = zeros(fabric, d, whole * 2);
    m->grads = calloc(params_of(p), sizeof *m->grads);
    if (!m->in || !m->grads || tide_group_output_elements(group, NULL, &outputs) != TIDE_OK)
        return false;
    m->out = zeros(fabric, d, outputs * sizeof *m->out);
    for (uint32_t i = 0; i < params_of(p); i++) {
        m->grads[i] = m->in;
        if (tide_shard_adopt(group, i, m->in, 0, d->stream) != TIDE_OK)
            return false;
    }
    return m->out != NULL;
}

static int probe_rank(const rank_start *start)
{
    probe *p = start->job;
    const cli_fabric *fabric = p->run->fabric;
    cli_device d = {.fabric = fabric, .local = p->local};
    tide_comm_desc cd = TIDE_COMM_DESC_INIT;
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    tide_options options = knobs(p);
    tide_group_desc desc;
    cli_shapes shapes;
    tide_comm *comm = NULL;
    tide_group *group = NULL;
    memories memory = {NULL, NULL, NULL};
    int failed = 1;

    if (fabric->open(&d, start->rank, start->n_ranks) != TIDE_OK) {
        tell(p);
        return 1;
    }
    cd.rank = start->rank;
    cd.n_ranks = start->n_ranks;
    cd.node_size = p->local;
    cd.fabric = fabric->number;
    cd.device = d.ordinal;
    cd.allgather = start->n_ranks > 1 ? start->allgather : NULL;
    cd.allgather_context = start->allgather_context;
    cd.options = &options;
    if (describe(p, &shapes, &desc) &&
        (start->rank != 0 || !fabric->timer || fabric->timer->gate(&d, &p->gate) == TIDE_OK) &&
        tide_comm_create(&cd, &comm) == TIDE_OK && tide_groups_create(comm, &desc, 1, &group) == TIDE_OK &&
        make_memory(p, &d, group, &memory)) {
        args.grads = memory.grads;
        args.out = memory.out;
        failed = timed_calls(start, p, &d, group, &args);
    }
    if (failed) {
        tell(p);
        if (p->gate)
            fabric->timer->open(p->gate, INT32_MAX); /* nothing stays behind it */
        if (comm)
            tide_comm_abort(comm);
    }
    tide_comm_destroy(comm);
    cli_shapes_clear(&shapes);
    fabric->release(&d, memory.in);
    fabric->release(&d, memory.out);
    free(memory.grads);
    fabric->close(&d);
    return failed;
}

/* The fastest repeat, each as slow as its slowest rank: what else ran on the machine is not the machine. */
static double fastest(const double *values, uint32_t n_ranks, int repeats)
{
    double best = 1e9;
    for (int i = 0; i < repeats; i++) {
        double slowest = 0;
        for (uint32_t r = 0; r < n_ranks; r++)
            slowest = fmax(slowest, values[(uint32_t)i * n_ranks + r]);
        best = fmin(best, slowest);
    }
    return best;
}

static int measure(const run *r, probe *p, double *seconds, double *enqueue)
{
    char text[300] = "";
    int code = CLI_OK;

    p->run = r;
    p->gate = NULL;
    atomic_flag_clear(&p->told);
    p->seconds = calloc((size_t)r->sizes->repeats * ranks_of(p), sizeof *p->seconds);
    p->enqueue = calloc((size_t)r->sizes->repeats * ranks_of(p), sizeof *p->enqueue);
    if (!p->seconds || !p->enqueue)
        code = cli_fail(r->c, "out of memory");
    else if (ranks_run(ranks_of(p), false, probe_rank, p, text, sizeof text) != 0)
        code = cli_fail(r->c, "%s: %s", p->what, p->error[0] ? p->error : text);
    if (code == CLI_OK) {
        *seconds = fastest(p->seconds, ranks_of(p), r->sizes->repeats);
        *enqueue = fastest(p->enqueue, ranks_of(p), r->sizes->repeats);
    }
    free(p->seconds);
    free(p->enqueue);
    return code;
}

/* ---- finding values -------------------------------------------------------------------------------------- */

typedef struct simulated { double seconds; uint32_t ops, items; } simulated;

static int simulate(const run *r, const probe *p, simulated *out)
{
    const simulate_call call = {p->reduce ? SCHEDULE_RS : SCHEDULE_AG, 0};
    const simulate_step steps[2] = {{p->reduce ? SIMULATE_READ : SIMULATE_AG, 0}, {SIMULATE_NET, 0}};
    simulate_result result = {.call_seconds = &out->seconds};
    simulate_input in = {.machine = &r->m, .calls = &call, .n_calls = 1, .steps = steps, .n_steps = p->reduce ? 2 : 1,
                         .every_rank = true};
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_options options = knobs(p);
    tide_group_desc desc;
    cli_shapes shapes;
    tide_plan *plan = NULL;
    schedule list = {0};
    bool ok;

    t.nodes = p->nodes;
    t.local = p->local;
    ok = describe(p, &shapes, &desc) && tide_plan_create(&t, &desc, 1, &options, &plan) == TIDE_OK;
    in.plan = plan;
    ok = ok && simulate_run(&in, &result, NULL) == TIDE_OK && schedule_build_call(plan, 0, 0, call.kind, &list) == TIDE_OK;
    out->ops = list.n_ops;
    out->items = list.n_runs + list.n_segments + list.n_puts + list.n_posts;
    schedule_clear(&list);
    tide_plan_destroy(plan);
    cli_shapes_clear(&shapes);
    return ok ? CLI_OK : cli_fail_library(r->c);
}

enum { LEAST, MOST, STEPS = 60 };
static const double bounds[2][2] = {{1e-10, 1}, {1e6, 1e15}}; /* of times, of rates */

/* The value of one or two keys with which the simulation takes `seconds`. Rates make it shorter, times longer. */
static int solve(run *r, const probe *p, double seconds, size_t key, size_t also, bool rate)
{
    double low = bounds[rate][LEAST], high = bounds[rate][MOST];
    for (int i = 0; i < STEPS; i++) {
        double middle = sqrt(low * high);
        simulated now;
        int code;
        *(double *)((char *)&r->m + key) = middle;
        if (also)
            *(double *)((char *)&r->m + also) = middle;
        code = simulate(r, p, &now);
        if (code != CLI_OK)
            return code;
        if ((now.seconds > seconds) == rate)
            low = middle;
        else
            high = middle;
    }
    return CLI_OK;
}

/* ---- memory ------------------------------------------------------------------------------------------------ */

/* Copies of all cores at once. */
static int copy_rank(const rank_start *start)
{
    const probe *p = start->job;
    uint64_t bytes = p->run->sizes->copy;
    char *from = malloc(bytes), *to = malloc(bytes);
    int failed = !from || !to;

    if (!failed) {
        memset(from, (int)start->rank, bytes);
        memset(to, ~(int)start->rank, bytes);
        failed = !meet(start);
    }
    if (!failed) {
        p->seconds[start->rank] = 1e9;
        for (int i = 0; i < p->run->sizes->repeats; i++) {
            int64_t begin = tide_now_ns();
            memcpy(i % 2 ? from : to, i % 2 ? to : from, bytes);
            p->seconds[start->rank] = fmin(p->seconds[start->rank], (double)(tide_now_ns() - begin) / 1e9);
        }
        failed = from[start->rank] != (char)start->rank; /* so that the copies are made */
    }
    free(from);
    free(to);
    return failed;
}

static int find_host_memory(run *r)
{
    enum { MOST_CORES = 64 };
    double seconds[MOST_CORES], slowest = 0;
    probe p = {.run = r, .seconds = seconds};
    uint32_t cores;
    char text[300] = "";

    r->m.sms = (double)sysconf(_SC_NPROCESSORS_ONLN);
    cores = (uint32_t)fmin(r->m.sms, MOST_CORES);
    if (ranks_run(cores, false, copy_rank, &p, text, sizeof text) != 0)
        return cli_fail(r->c, "memory: %s", text);
    for (uint32_t i = 0; i < cores; i++)
        slowest = fmax(slowest, seconds[i]);
    r->m.hbm_rate = 2.0 * (double)r->sizes->copy * cores / slowest;
    return CLI_OK;
}

/* One copy within a device. */
static int find_device_memory(run *r)
{
    const cli_timer *timer = r->fabric->timer;
    cli_device d = {.fabric = r->fabric, .local = 1};
    uint64_t bytes = r->sizes->copy;
    void *from = NULL, *to = NULL, *gate = NULL;
    double best = 1e9;
    int status = r->fabric->open(&d, 0, 1), code;

    if (status != TIDE_OK)
        return cli_fail_library(r->c);
    if (timer->devices(&d) < 2)
        code = cli_fail(r->c, "--fabric: '%s': copies to a peer need two devices, there is one", r->fabric->name);
    else if (!(from = zeros(r->fabric, &d, bytes)) || !(to = zeros(r->fabric, &d, bytes)))
        code = cli_fail(r->c, "memory: two areas of %llu bytes: out of memory", (unsigned long long)bytes);
    else {
        status = timer->gate(&d, &gate);
        for (int i = 0; i < WARMUP + r->sizes->repeats && status == TIDE_OK; i++) {
            double seconds;
            status = timer->begin(&d, gate, turn_of(i));
            if (status == TIDE_OK)
                status = timer->copy(&d, to, from, bytes);
            timer->open(gate, turn_of(i));
            if (status == TIDE_OK)
                status = timer->end(&d, &seconds);
            if (status == TIDE_OK)
                best = fmin(best, seconds);
        }
        code = status == TIDE_OK ? CLI_OK : cli_fail_library(r->c);
    }
    r->m.sms = timer->sms(&d);
    r->m.hbm_rate = 2.0 * (double)bytes / best;
    r->fabric->release(&d, from);
    r->fabric->release(&d, to);
    r->fabric->close(&d);
    return code;
}

/* ---- everything -------------------------------------------------------------------------------------------- */

enum { EVERYWHERE, ON_HOST, ON_DEVICES };
typedef struct unknown { probe p; size_t key, also; bool rate; int where; } unknown;
#define KEY(name) offsetof(plan_machine, name)
#define CALL(name, m, l, items, reduces, ctas) \
    {.what = name, .nodes = m, .local = l, .size = items, .reduce = reduces, .c_land = ctas}

/* The bound that a search without an answer has ended at, or 0. */
static double bounds_edge(bool rate, double value)
{
    double fastest_tried = bounds[rate][rate ? MOST : LEAST];
    return fabs(log(value / fastest_tried)) < 1e-3 ? value : 0;
}

/* Enqueueing: `few` is a call of few items, `many` one of many. */
typedef struct enqueueing { double seconds; simulated list; } enqueueing;

static void find_host_times(run *r, const enqueueing *few, const enqueueing *many)
{
    double a = few->list.ops, b = few->list.items, c = many->list.ops, d = many->list.items, det = a * d - b * c;
    double op = (few->seconds * d - many->seconds * b) / det, item = (many->seconds * a - few->seconds * c) / det;
    bool apart = fabs(det) > 0 && op >= 0 && item >= 0;

    r->m.host_op = apart ? op : few->seconds / (a + b);
    r->m.host_item = apart ? item : few->seconds / (a + b);
}

static int find_all(run *r, enqueueing host[2])
{
    enum { GATHER, REDUCE, NONE = 0 /* offset of the name: no key */ };
    static const unknown unknowns[] = {
        {CALL("device_op, signal_latency", 1, 2, TINY, GATHER, 1), KEY(device_op), KEY(signal_latency), false, EVERYWHERE},
        {CALL("local_copy_rate", 1, 1, BIG, GATHER, 1), KEY(local_copy_rate), NONE, true, EVERYWHERE},
        {CALL("local_copy_descriptor", 1, 1, MANY, GATHER, 1), KEY(local_copy_descriptor), NONE, false, EVERYWHERE},
        {CALL("copy_rate, nvlink_rate", 1, 2, BIG, GATHER, 1), KEY(copy_rate), KEY(nvlink_rate), true, EVERYWHERE},
        {CALL("copy_descriptor", 1, 2, MANY, GATHER, 1), KEY(copy_descriptor), NONE, false, EVERYWHERE},
        {CALL("sum_cta_rate", 1, 1, BIG, REDUCE, 1), KEY(sum_cta_rate_in_situ), KEY(sum_cta_rate), true, EVERYWHERE},
        {CALL("sum_cta_rate_in_situ", 1, 2, BIG, REDUCE, 1), KEY(sum_cta_rate_in_situ), NONE, true, EVERYWHERE},
        {CALL("nic_latency", 2, 1, TINY, GATHER, 1), KEY(nic_latency), NONE, false, EVERYWHERE},
        {CALL("nic_rate", 2, 1, BIG, GATHER, 1), KEY(nic_rate), NONE, true, EVERYWHERE},
        {CALL("round_wait", 2, 1, TINY, REDUCE, 1), KEY(round_wait), NONE, false, EVERYWHERE},
        {CALL("land_cta_rate", 2, 1, BIG, REDUCE, 1), KEY(land_cta_rate), KEY(land_rate_cap), true, ON_HOST},
        {CALL("land_cta_rate", 2, 1, BIG, REDUCE, 1), KEY(land_cta_rate), NONE, true, ON_DEVICES},
        {CALL("land_rate_cap", 2, 1, BIG, REDUCE, LAND_CTAS), KEY(land_rate_cap), NONE, true, ON_DEVICES},
    };
    int elsewhere = r->fabric->timer ? ON_HOST : ON_DEVICES;

    for (size_t i = 0; i < sizeof unknowns / sizeof unknowns[0]; i++) {
        unknown u = unknowns[i];
        double enqueue, seconds, *key = (double *)((char *)&r->m + u.key);
        simulated list;
        int code;

        if (u.where == elsewhere)
            continue;
        code = measure(r, &u.p, &seconds, &enqueue);
        if (code == CLI_OK)
            code = simulate(r, &u.p, &list);
        if (code != CLI_OK)
            return code;
        if (u.key == KEY(device_op))
            host[0] = (enqueueing){enqueue, list};
        if (u.key == KEY(copy_descriptor))
            host[1] = (enqueueing){enqueue, list};
        if (i == 0 && !r->fabric->timer) /* part of the calls' times: its few items count with the operations */
            find_host_times(r, &host[0], &host[0]);
        if (u.key == KEY(round_wait)) /* the solver's: a round of almost nothing */
            *key = seconds;
        else
            code = solve(r, &u.p, seconds, u.key, u.also, u.rate);
        if (code == CLI_OK && *key == bounds_edge(u.rate, *key)) {
            if (u.key == KEY(local_copy_rate)) { /* memory is what limits such a copy: each byte is read and written */
                *key = r->m.hbm_rate / 2;
                printf("# %s: as fast as memory, half of hbm_rate\n", u.p.what);
            } else
                printf("# %s: does not show beside the rest of its call\n", u.p.what);
        }
        if (code != CLI_OK)
            return code;
    }
    return CLI_OK;
}

/* Sizes that nothing was found from. */
static int check(const run *r)
{
    for (int i = 0; i < 4; i++) {
        probe p = CALL("check", (uint32_t)i / 2 + 1, 2 - (uint32_t)i / 2, CHECKED, i % 2 != 0, 1);
        double seconds, enqueue;
        simulated expected;
        int code = measure(r, &p, &seconds, &enqueue);
        if (code == CLI_OK)
            code = simulate(r, &p, &expected);
        if (code != CLI_OK)
            return code;
        printf("# check: %s of %.4g MiB shards in bf16, %u x %u ranks: measured %.3f ms, simulated %.3f ms\n",
               p.reduce ? "reduce-scatter" : "all-gather", (double)r->sizes->items[CHECKED] * 2 / 1048576, p.nodes, p.local,
               seconds * 1e3, expected.seconds * 1e3);
    }
    return CLI_OK;
}

static const char *const explained[2] = {
    "# tide calibrate, %s fabric: ranks are threads, copy engines are threads that copy, rails are memory.\n",
    "# tide calibrate, %s fabric: times of the devices, which begin when all ranks have enqueued. What a rail is says the fabric:\n"
    "# on cuda copies between the devices, so nic_rate, nic_latency and round_wait are not a network's.\n"};

int cli_calibrate(const cli *c)
{
    tide_text out = {cli_write, stdout, TIDE_OK};
    run r = {.c = c, .fabric = c->fabric ? cli_find_fabric(c->fabric) : &cli_fabrics[0]};
    plan_machine *m = &r.m;
    enqueueing host[2] = {{0}};
    int code;

    unsetenv("TIDE_MACHINE"); /* calls are simulated with the built-in rates' plans */
    if (!r.fabric)
        return cli_fail_fabric(c);
    r.sizes = c->quick ? &quick_sizes : r.fabric->timer ? &device_sizes : &host_sizes;
    if (gethostname(m->name, sizeof m->name - 1) != 0 || !m->name[0])
        strcpy(m->name, "host");
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) /* out of the way until found */
        if (plan_machine_keys[i].unit == UNIT_RATE && plan_machine_keys[i].required)
            *(double *)((char *)m + plan_machine_keys[i].offset) = 1e15;
    if (r.fabric->keep)
        r.fabric->keep(true);
    code = r.fabric->timer ? find_device_memory(&r) : find_host_memory(&r);
    if (code == CLI_OK)
        code = find_all(&r, host);
    if (code == CLI_OK) {
        run with_host = r;
        if (r.fabric->timer)
            find_host_times(&with_host, &host[0], &host[1]);
        printf(explained[r.fabric->timer != NULL], r.fabric->name);
        printf("# Fastest of %d calls; each value is that with which the simulation takes as long as the call did.\n%s",
               r.sizes->repeats, c->quick ? "# --quick: calls so small that the values mean nothing.\n" : "");
        plan_machine_print(&with_host.m, &out);
        code = check(&r);
    }
    if (r.fabric->keep)
        r.fabric->keep(false);
    return code;
}
