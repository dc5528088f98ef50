/* bench.c - `tide bench ag|rs`: times calls and prints nccl-tests' columns. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/fabric.h"
#include "cli/oracle.h"
#include "cli/ranks.h"

enum { OUT_OF_PLACE, IN_PLACE };
enum { DEFAULT_MIN = 256 << 10, DEFAULT_MAX = 64 << 20, DEFAULT_FACTOR = 2, DEFAULT_PARAMS = 8 };

/* One row of the table. Ranks write their own entries of `seconds`, `wrong` and `errors`: memory from ranks_alloc. */
typedef struct bench_error { char text[256]; } bench_error;
typedef struct bench_row {
    const cli *c;
    const cli_fabric *fabric;
    bool reduce;
    tide_topology topology;
    cli_shapes shapes;
    tide_group_desc desc; /* input is set by place */
    int place;
    double *seconds;      /* a call */
    uint64_t *wrong;
    bench_error *errors;
} bench_row;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Small integers, so that sums are exact and cheap to know. */
static float grad_value(uint32_t rank, uint32_t param, uint64_t x)
{
    return (float)((int)((x * 7 + param * 5 + rank * 3) % 17) - 8);
}

static unsigned char shard_byte(uint32_t param, uint64_t full, uint32_t byte)
{
    return (unsigned char)(full * 31 + full / 251 + param * 13 + byte * 101);
}

typedef struct bench_rank {
    const rank_start *start;
    bench_row *row;
    cli_device device;
    tide_comm *comm;
    tide_group *group;
    void **inputs; /* shards or gradients, in the device's memory, as is the output */
    float *out;
} bench_rank;

static bool fail(bench_rank *b, const char *what)
{
    snprintf(b->row->errors[b->start->rank].text, sizeof(bench_error), "rank %u: %s: %s", b->start->rank, what,
             tide_last_error());
    return false;
}

static bool out_of_memory(bench_rank *b)
{
    snprintf(b->row->errors[b->start->rank].text, sizeof(bench_error), "rank %u: out of memory", b->start->rank);
    return false;
}

static uint64_t output_elements(const bench_row *row, uint32_t n_ranks)
{
    uint64_t n = 0;
    for (uint32_t p = 0; p < row->shapes.n_params; p++)
        n += oracle_shard(&row->shapes.params[p], n_ranks);
    return n;
}

/* One shard or gradient, on the host. */
static void fill_input(const bench_rank *b, uint32_t p, char *to, uint64_t count, uint32_t item)
{
    const bench_row *row = b->row;

    for (uint64_t i = 0; i < count; i++) {
        char *at = to + i * item;
        uint64_t full = row->reduce ? i : oracle_locate(&row->shapes.params[p], b->start->n_ranks, b->start->rank, i);
        if (row->reduce)
            oracle_store(row->desc.grad_dtype, at, grad_value(b->start->rank, p, i));
        else if (row->desc.shard_dtype != row->desc.dtype)
            oracle_store(row->desc.shard_dtype, at, grad_value(0, p, full));
        else
            for (uint32_t k = 0; k < item; k++)
                at[k] = (char)shard_byte(p, full, k);
    }
}

static bool make_input(bench_rank *b, uint32_t p)
{
    const bench_row *row = b->row;
    const tide_param *param = &row->shapes.params[p];
    uint32_t item = row->reduce ? oracle_item(row->desc.grad_dtype, 0)
                                : oracle_item(row->desc.shard_dtype, row->shapes.item_size);
    uint64_t count = row->reduce ? oracle_whole(param) : oracle_shard(param, b->start->n_ranks);
    char *host = malloc(count * item + 1);
    bool ok = host && (b->inputs[p] = row->fabric->alloc(&b->device, count * item + 1));

    if (ok)
        fill_input(b, p, host, count, item);
    ok = ok ? row->fabric->copy_in(&b->device, b->inputs[p], host, count * item) == TIDE_OK ||
                  fail(b, "copy to the device")
            : out_of_memory(b);
    free(host);
    if (ok && !row->reduce && row->place == IN_PLACE &&
        tide_shard_adopt(b->group, p, b->inputs[p], count * item, b->device.stream) != TIDE_OK)
        return fail(b, "shard_adopt");
    return ok;
}

static bool make_inputs(bench_rank *b)
{
    const bench_row *row = b->row;
    uint64_t elements = output_elements(row, b->start->n_ranks);

    b->inputs = calloc(row->shapes.n_params, sizeof *b->inputs);
    if (!b->inputs)
        return out_of_memory(b);
    for (uint32_t p = 0; p < row->shapes.n_params; p++)
        if (!make_input(b, p))
            return false;
    if (!row->reduce)
        return true;
    b->out = row->fabric->alloc(&b->device, (elements ? elements : 1) * sizeof *b->out);
    return b->out ? true : out_of_memory(b);
}

/* One call from inputs to outputs. The landing stays held after an all-gather until `release`. */
static bool one_call(bench_rank *b, bool release)
{
    const bench_row *row = b->row;

    if (row->reduce) {
        tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
        args.grads = (const void *const *)b->inputs;
        args.out = b->out;
        args.grad_dtype = row->desc.grad_dtype;
        if (tide_reduce_scatter(b->group, &args, b->device.stream) != TIDE_OK)
            return fail(b, "reduce_scatter");
        return tide_wait(b->group, TIDE_DONE, b->device.stream) == TIDE_OK || fail(b, "wait DONE");
    }
    if (tide_all_gather(b->group, row->place == IN_PLACE ? NULL : (const void *const *)b->inputs,
                        b->device.stream) != TIDE_OK)
        return fail(b, "all_gather");
    if (tide_wait(b->group, TIDE_READY, b->device.stream) != TIDE_OK)
        return fail(b, "wait READY");
    return !release || tide_slot_release(b->group, b->device.stream) == TIDE_OK || fail(b, "slot_release");
}

/* Bytes of the device, on the host; to be freed. NULL after saying why. */
static void *bring(bench_rank *b, const void *from, size_t bytes)
{
    void *to = malloc(bytes ? bytes : 1);

    if (!to)
        out_of_memory(b);
    else if (b->row->fabric->copy_out(&b->device, to, from, bytes) != TIDE_OK)
        fail(b, "copy from the device");
    else
        return to;
    free(to);
    return NULL;
}

static bool count_wrong_sums(bench_rank *b, uint64_t *wrong)
{
    const bench_row *row = b->row;
    uint32_t n = b->start->n_ranks;
    float *got = bring(b, b->out, output_elements(row, n) * sizeof *got);
    uint64_t e = 0;

    for (uint32_t p = 0; got && p < row->shapes.n_params; p++) {
        uint64_t shard = oracle_shard(&row->shapes.params[p], n), whole = oracle_whole(&row->shapes.params[p]);
        for (uint64_t i = 0; i < shard; i++, e++) {
            uint64_t x = oracle_locate(&row->shapes.params[p], n, b->start->rank, i);
            float sum = 0;
            for (uint32_t u = 0; u < n && x < whole; u++)
                sum += grad_value(u, p, x);
            *wrong += got[e] != sum;
        }
    }
    free(got);
    return got != NULL;
}

static uint64_t wrong_items(const bench_row *row, uint32_t p, uint64_t count, const unsigned char *got)
{
    uint32_t item = oracle_item(row->desc.dtype, row->shapes.item_size);
    bool cast = row->desc.shard_dtype != row->desc.dtype;
    uint64_t wrong = 0;

    for (uint64_t x = 0; x < count; x++, got += item) {
        unsigned char expected[4];
        bool same = true;
        if (cast) {
            oracle_store(row->desc.dtype, expected, grad_value(0, p, x));
            same = memcmp(got, expected, item) == 0;
        }
        for (uint32_t k = 0; k < item && !cast; k++)
            same = same && got[k] == shard_byte(p, x, k);
        wrong += !same;
    }
    return wrong;
}

static bool count_wrong_bytes(bench_rank *b, uint64_t *wrong)
{
    const bench_row *row = b->row;
    uint32_t n = b->start->n_ranks;

    for (uint32_t p = 0; p < row->shapes.n_params; p++) {
        tide_tensor t = {.size = sizeof t};
        unsigned char *got;
        if (tide_group_tensor(b->group, TIDE_TENSOR_PARAM, p, &t) != TIDE_OK)
            return fail(b, "group_tensor");
        if (!(got = bring(b, t.data, t.bytes)))
            return false;
        *wrong += wrong_items(row, p, oracle_shard(&row->shapes.params[p], n) * n, got);
        free(got);
    }
    return true;
}

/* Calls are enqueued one behind the other; the host fabric's are done when they return. */
static bool run_calls(bench_rank *b, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (!one_call(b, true))
            return false;
    return b->row->fabric->finish(&b->device) == TIDE_OK || fail(b, "finish");
}

static bool measure(bench_rank *b)
{
    bench_row *row = b->row;
    const cli *c = row->c;
    char byte = 0, *bytes = malloc(b->start->n_ranks);
    double begin;
    bool ok;

    if (!bytes)
        return out_of_memory(b);
    if (!run_calls(b, c->warmup))
        goto fail;
    if (b->start->allgather(b->start->allgather_context, &byte, bytes, 1) != 0) /* all begin together */
        goto fail;
    begin = now();
    if (!run_calls(b, c->iters))
        goto fail;
    row->seconds[b->start->rank] = (now() - begin) / (double)c->iters;
    ok = one_call(b, false);
    if (ok && c->check) {
        uint64_t *wrong = &row->wrong[b->start->rank];
        ok = row->reduce ? count_wrong_sums(b, wrong) : count_wrong_bytes(b, wrong);
    }
    free(bytes);
    return ok;
fail:
    free(bytes);
    return false;
}

static int bench_rank_main(const rank_start *start)
{
    bench_row *row = start->job;
    bench_rank b = {.start = start, .row = row};
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    bool ok = true;

    b.device.fabric = row->fabric;
    b.device.gpus = (int)row->c->gpus;
    b.device.local = row->topology.local;
    if (row->fabric->open(&b.device, start->rank, start->n_ranks) != TIDE_OK) {
        fail(&b, "open the device");
        return 1;
    }
    desc.fabric = row->fabric->number;
    desc.device = b.device.ordinal;
    desc.rank = start->rank;
    desc.n_ranks = start->n_ranks;
    desc.node_size = row->topology.local;
    desc.allgather = start->allgather;
    desc.allgather_context = start->allgather_context;
    desc.options = &row->c->options;
    if (tide_comm_create(&desc, &b.comm) != TIDE_OK)
        ok = fail(&b, "comm_create");
    if (ok && tide_groups_create(b.comm, &row->desc, 1, &b.group) != TIDE_OK)
        ok = fail(&b, "groups_create");
    ok = ok && make_inputs(&b) && measure(&b);
    if (ok && tide_comm_sync(b.comm) != TIDE_OK)
        ok = fail(&b, "comm_sync");
    if (!ok && b.comm)
        tide_comm_abort(b.comm);
    tide_comm_destroy(b.comm);
    for (uint32_t p = 0; b.inputs && p < row->shapes.n_params; p++)
        row->fabric->release(&b.device, b.inputs[p]);
    free(b.inputs);
    row->fabric->release(&b.device, b.out);
    row->fabric->close(&b.device);
    return ok ? 0 : 1;
}

/* ---- the table --------------------------------------------------------------------------- */

typedef struct bench_result { double seconds; uint64_t wrong; } bench_result;

static int run_place(const cli *c, bench_row *row, int place, bench_result *out)
{
    uint32_t n = row->topology.nodes * row->topology.local;
    char text[256];
    int result, code = CLI_OK;

    row->place = place;
    if (!row->reduce)
        row->desc.input = place == IN_PLACE ? TIDE_INPUT_ADOPTED : TIDE_INPUT_ARGUMENT;
    memset(out, 0, sizeof *out);
    row->seconds = ranks_alloc(n * sizeof *row->seconds);
    row->wrong = ranks_alloc(n * sizeof *row->wrong);
    row->errors = ranks_alloc(n * sizeof *row->errors);
    if (!row->seconds || !row->wrong || !row->errors) {
        code = cli_fail(c, "out of memory");
        goto out;
    }
    result = ranks_run(n, c->procs, bench_rank_main, row, text, sizeof text);
    for (uint32_t r = 0; r < n; r++) {
        if (!text[0] && row->errors[r].text[0])
            snprintf(text, sizeof text, "%s", row->errors[r].text);
        if (row->seconds[r] > out->seconds) /* a call takes as long as on its slowest rank */
            out->seconds = row->seconds[r];
        out->wrong += row->wrong[r];
    }
    if (result) {
        cli_fail(c, "%s", text[0] ? text : "a rank failed");
        code = CLI_WRONG;
    }
out:
    ranks_free(row->seconds, n * sizeof *row->seconds);
    ranks_free(row->wrong, n * sizeof *row->wrong);
    ranks_free(row->errors, n * sizeof *row->errors);
    return code;
}

static const char *type_name(int dtype)
{
    return dtype == TIDE_F32 ? "float" : dtype == TIDE_F16 ? "half" : dtype == TIDE_BF16 ? "bfloat16" : "uint8";
}

static void print_header(const cli *c, const bench_row *row)
{
    printf("# tide %s %s: %u nodes x %u, ranks as %s, %s fabric, warmup iters: %lld iters: %lld validation: %lld\n"
           "#\n",
           tide_version(), row->reduce ? "reduce_scatter" : "all_gather", row->topology.nodes, row->topology.local,
           c->procs ? "processes" : "threads", row->fabric->name, (long long)c->warmup, (long long)c->iters, (long long)c->check);
    printf("# %58s %39s\n", "out-of-place", "in-place");
    printf("#%11s %12s %9s %7s %5s %8s %7s %7s %6s %8s %7s %7s %6s\n", "size", "count", "type", "redop", "root", "time",
           "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong");
    printf("#%11s %12s %9s %7s %5s %8s %7s %7s %6s %8s %7s %7s %6s\n", "(B)", "(elements)", "", "", "", "(us)",
           "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "");
}

static void print_place(const cli *c, const bench_result *r, uint64_t size, uint32_t n)
{
    double algbw = (double)size / r->seconds / 1e9;

    if (r->seconds >= 1e-2)
        printf(" %8.0f", r->seconds * 1e6);
    else
        printf(" %8.2f", r->seconds * 1e6);
    printf(" %7.2f %7.2f", algbw, algbw * (n - 1) / n);
    if (c->check)
        printf(" %6llu", (unsigned long long)r->wrong);
    else
        printf(" %6s", "N/A");
}

static void print_json_place(const char *name, const bench_result *r, uint64_t size, uint32_t n)
{
    double algbw = (double)size / r->seconds;

    printf(", \"%s\": {\"time\": %.9f, \"algbw\": %.0f, \"busbw\": %.0f, \"wrong\": %llu}", name, r->seconds, algbw,
           algbw * (n - 1) / n, (unsigned long long)r->wrong);
}

typedef struct bench_total { double busbw; uint64_t places, wrong, rows; } bench_total;

static void add_place(bench_total *total, const bench_result *r, uint64_t size, uint32_t n)
{
    total->busbw += (double)size / r->seconds / 1e9 * (n - 1) / n;
    total->wrong += r->wrong;
    total->places++;
}

/* What the planner refuses is bad input; what fails later is a failure. */
static int check_row(const cli *c, const bench_row *row)
{
    tide_plan *plan = NULL;
    int status = tide_plan_create(&row->topology, &row->desc, 1, &c->options, &plan);

    tide_plan_destroy(plan);
    return status == TIDE_OK ? CLI_OK : cli_fail_library(c);
}

static int run_row(const cli *c, bench_row *row, bench_total *total)
{
    uint32_t n = row->topology.nodes * row->topology.local;
    int dtype = row->reduce ? row->desc.grad_dtype : row->desc.dtype;
    uint64_t count = output_elements(row, n), size = count * n * oracle_item(dtype, row->shapes.item_size);
    bool in_place = !row->reduce && row->desc.shard_dtype == row->desc.dtype;
    bench_result out, in;
    int code = check_row(c, row);

    if (code == CLI_OK)
        code = run_place(c, row, OUT_OF_PLACE, &out);
    if (code == CLI_OK && in_place)
        code = run_place(c, row, IN_PLACE, &in);
    if (code != CLI_OK)
        return code;
    add_place(total, &out, size, n);
    if (in_place)
        add_place(total, &in, size, n);
    if (c->json) {
        printf("%s{\"size\": %llu, \"count\": %llu, \"type\": \"%s\"", total->rows++ ? ", " : "",
               (unsigned long long)size, (unsigned long long)count, type_name(dtype));
        print_json_place("out_of_place", &out, size, n);
        if (in_place)
            print_json_place("in_place", &in, size, n);
        printf("}");
    } else {
        printf("%12llu %12llu %9s %7s %5d", (unsigned long long)size, (unsigned long long)count, type_name(dtype),
               row->reduce ? "sum" : "none", -1);
        print_place(c, &out, size, n);
        if (in_place)
            print_place(c, &in, size, n);
        else
            printf(" %8s %7s %7s %6s", "N/A", "N/A", "N/A", "N/A");
        printf("\n");
    }
    fflush(stdout);
    return CLI_OK;
}

/* `params` equal parameters that make up about `size` bytes, rounded as nccl-tests does: down to 16 items a rank. */
static bool shapes_of_size(const cli *c, uint64_t size, uint32_t n, uint32_t item, cli_shapes *s)
{
    int64_t params = c->params ? c->params : DEFAULT_PARAMS;
    uint64_t count = size / item / n / (uint64_t)params / 16 * 16;
    char name[32];

    for (int64_t p = 0; p < params; p++) {
        const int64_t dims[1] = {(int64_t)((count ? count : 1) * n)};
        snprintf(name, sizeof name, "p%lld", (long long)p);
        if (!cli_shapes_add(s, name, 1, dims, 0))
            return false;
    }
    return true;
}

static int set_row(const cli *c, bench_row *row)
{
    int code = cli_shapes_desc(c, &row->shapes, &row->desc);

    if (code == CLI_OK && row->reduce && row->desc.grad_dtype == TIDE_NONE)
        return cli_fail(c, "rs: these parameters have no gradients");
    return code;
}

int cli_bench(const cli *c)
{
    bench_row row = {.c = c, .topology = TIDE_TOPOLOGY_INIT};
    static const char *const size_flags[] = {"minbytes", "maxbytes", "stepfactor", "params", NULL};
    int64_t smallest = c->min_bytes ? c->min_bytes : DEFAULT_MIN, largest = c->max_bytes ? c->max_bytes : DEFAULT_MAX;
    bool given = c->model || c->shapes;
    bench_total total = {0};
    int code;

    row.fabric = c->fabric ? cli_find_fabric(c->fabric) : &cli_fabrics[0];
    if (!row.fabric)
        return cli_fail_fabric(c);
    if (!c->operand || (strcmp(c->operand, "ag") != 0 && strcmp(c->operand, "rs") != 0))
        return cli_fail(c, "'%s': expected ag or rs", c->operand ? c->operand : "");
    if (given && cli_refuse_given(c, size_flags, "excludes --model and --shapes, which say the size") != CLI_OK)
        return CLI_BAD;
    if (smallest > largest)
        return cli_fail(c, "--minbytes: %lld is more than --maxbytes %lld", (long long)smallest, (long long)largest);
    row.reduce = c->operand[0] == 'r';
    row.topology.nodes = c->nodes ? (uint32_t)c->nodes : 1;
    row.topology.local = c->local ? (uint32_t)c->local : 4;
    if (row.fabric->keep && !c->procs)
        row.fabric->keep(true);
    code = cli_shapes_load(c, &row.shapes);
    if (code == CLI_OK && row.reduce && row.shapes.dtype == TIDE_OPAQUE)
        code = cli_fail(c, "rs: opaque parameters have no gradients");
    if (code == CLI_OK && given)
        code = set_row(c, &row);
    if (code != CLI_OK)
        goto out;
    if (c->json)
        printf("{\"schema\": 1, \"collective\": \"%s\", \"fabric\": \"%s\", \"nodes\": %u, \"local\": %u, \"procs\": %s, \"rows\": [",
               row.reduce ? "reduce_scatter" : "all_gather", row.fabric->name, row.topology.nodes, row.topology.local,
               c->procs ? "true" : "false");
    else
        print_header(c, &row);
    if (given) {
        code = run_row(c, &row, &total);
    } else {
        uint32_t n = row.topology.nodes * row.topology.local;
        const cli_shapes empty = row.shapes;
        int64_t factor = c->factor ? c->factor : DEFAULT_FACTOR;
        for (int64_t size = smallest; code == CLI_OK && size <= largest; size *= factor) {
            row.shapes = empty;
            if (!shapes_of_size(c, (uint64_t)size, n, oracle_item(empty.dtype, empty.item_size), &row.shapes))
                code = cli_fail(c, "out of memory");
            if (code == CLI_OK)
                code = set_row(c, &row);
            if (code == CLI_OK)
                code = run_row(c, &row, &total);
            cli_shapes_clear(&row.shapes);
        }
    }
    if (code != CLI_OK)
        goto out;
    if (c->json)
        printf("], \"wrong\": %llu, \"busbw\": %.0f}\n", (unsigned long long)total.wrong,
               total.busbw / (double)total.places * 1e9);
    else
        printf("# Out of bounds values : %llu %s\n# Avg bus bandwidth    : %g\n", (unsigned long long)total.wrong,
               total.wrong ? "FAILED" : "OK", total.busbw / (double)total.places);
    code = total.wrong ? CLI_WRONG : CLI_OK;
out:
    if (row.fabric->keep && !c->procs)
        row.fabric->keep(false);
    cli_shapes_clear(&row.shapes);
    return code;
}
