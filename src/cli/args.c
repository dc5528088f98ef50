/* args.c - one table of flags, one parser, errors of exactly one line. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

enum flag_kind { FLAG_BOOL, FLAG_NUMBER, FLAG_BYTES, FLAG_TEXT, FLAG_WORDS };

typedef struct flag {
    const char *name;
    char letter; /* nccl-tests' short form, or 0 */
    uint8_t kind;
    uint32_t commands;
    size_t offset; /* in cli: bool, int64_t, const char * or cli_words */
    int64_t lo, hi;
    const char *value, *help;
} flag;

#define AT(field) offsetof(cli, field)
static const flag flags[] = {
    {"nodes", 0, FLAG_NUMBER, CMD_SHAPED, AT(nodes), 1, TIDE_MAX_NODES, "M", "nodes (default 1)"},
    {"local", 0, FLAG_NUMBER, CMD_SHAPED, AT(local), 1, TIDE_MAX_LOCAL, "L", "ranks a node (default 4)"},
    {"model", 0, FLAG_TEXT, CMD_SHAPED, AT(model), 0, 0, "NAME",
     "one block of a model; `tide info --models` lists them"},
    {"shapes", 0, FLAG_TEXT, CMD_SHAPED, AT(shapes), 0, 0, "FILE",
     "a line a parameter: name dtype d0 d1 ... [shard=d]; # starts a comment; - reads standard input"},
    {"dtype", 0, FLAG_TEXT, CMD_SHAPED, AT(dtype), 0, 0, "T", "of the unsharded parameters of a model (default bf16)"},
    {"shard-dtype", 0, FLAG_TEXT, CMD_SHAPED, AT(shard_dtype), 0, 0, "T",
     "of the shards (default: as gathered; else cast)"},
    {"grad-dtype", 0, FLAG_TEXT, CMD_SHAPED, AT(grad_dtype), 0, 0, "T",
     "of the gradients, or none (default: as gathered; opaque: none)"},
    {"input", 0, FLAG_TEXT, CMD_PLAN | CMD_CHECK | CMD_VERIFY | CMD_SIMULATE, AT(input), 0, 0, "adopted|argument",
     "shards in the arena, or passed to each call (default: adopted without a cast)"},
    {"landing", 0, FLAG_TEXT, CMD_SHAPED, AT(landing), 0, 0, "ring|private", "where parameters land (default ring)"},
    {"groups", 0, FLAG_NUMBER, CMD_PLAN | CMD_CHECK | CMD_VERIFY, AT(groups), 1, 64, "G",
     "equal groups of these shapes (default 1)"},
    {"machine", 0, FLAG_TEXT, CMD_PLAN | CMD_SIMULATE, AT(machine), 0, 0, "FILE",
     "rates of a machine: a file, or the name of a shipped one (paper, h200-x2; default paper)"},
    {"nic", 0, FLAG_TEXT, CMD_PLAN | CMD_SIMULATE, AT(nic), 0, 0, "RATE", "what if: one rail, as 95GB/s"},
    {"nvlink", 0, FLAG_TEXT, CMD_PLAN | CMD_SIMULATE, AT(nvlink), 0, 0, "RATE", "what if: a GPU's port into its node"},
    {"gpus", 0, FLAG_NUMBER, CMD_SIMULATE, AT(gpus), 1, TIDE_MAX_NODES * TIDE_MAX_LOCAL, "N",
     "what if: so many GPUs in nodes of L (instead of --nodes)"},
    {"shard", 0, FLAG_BYTES, CMD_SIMULATE, AT(shard), 4, INT64_C(1) << 40, "BYTES",
     "equal parameters: bytes of a rank's shard (ag) or fp32 output (rs), instead of --model"},
    {"params", 0, FLAG_NUMBER, CMD_SIMULATE, AT(params), 1, TIDE_MAX_PARAMS, "P", "with --shard: how many (default 30)"},
    {"tokens", 0, FLAG_BYTES, CMD_SIMULATE, AT(tokens), 1, INT64_C(1) << 30, "T",
     "step: tokens a GPU (default 8K); K and M are powers of 1024"},
    {"layers", 0, FLAG_NUMBER, CMD_SIMULATE, AT(layers), 2, 1000, "N", "step: equal layers (default: the model's)"},
    {"flops", 0, FLAG_TEXT, CMD_SIMULATE, AT(flops), 0, 0, "RATE", "what if: matrix products of a GPU, as 900TFLOP/s"},
    {"compare", 0, FLAG_TEXT, CMD_SIMULATE, AT(compare), 0, 0, "stock",
     "step: stock FSDP2 as well, and from how many tokens on the difference is below 1 %"},
    {"sweep", 0, FLAG_WORDS, CMD_SIMULATE, AT(sweep), 0, 0, "RANGES",
     "step: a table over nodes=1..128 tokens=4K..32K, in powers of two, TIDE and stock"},
    {"ranks", 0, FLAG_TEXT, CMD_SIMULATE, AT(ranks), 0, 0, "all|one",
     "op lists of all ranks, or of --rank standing for all (default: all up to 64)"},
    {"trace", 0, FLAG_TEXT, CMD_SIMULATE, AT(trace), 0, 0, "FILE", "write a Chrome / Perfetto trace"},
    {"plot", 0, FLAG_TEXT, CMD_SIMULATE, AT(plot), 0, 0, "FILE",
     "draw a .png or .svg: time line of every rank and stream, memory over time; or the sweep (needs Python, matplotlib)"},
    {"rank", 0, FLAG_NUMBER, CMD_PLAN | CMD_SIMULATE, AT(rank), 0, TIDE_MAX_NODES * TIDE_MAX_LOCAL - 1, "R",
     "whose memory and ops (default 0)"},
    {"audit", 0, FLAG_BOOL, CMD_VERIFY, AT(audit), 0, 0, NULL,
     "every wave plan at L = 8 against a naive simulation of inbox blocks"},
    {"mutate", 0, FLAG_BOOL, CMD_VERIFY, AT(mutate), 0, 0, NULL, "break op lists in one place each: is it noticed?"},
    {"rank", 0, FLAG_NUMBER, CMD_VERIFY, AT(mutate_rank), 0, TIDE_MAX_NODES * TIDE_MAX_LOCAL - 1, "R",
     "with --mutate: break this rank's ops only (default: all ranks')"},
    {"params", 0, FLAG_NUMBER, CMD_VERIFY, AT(params), 1, TIDE_MAX_PARAMS, "P",
     "parameters to make up without --model and --shapes (default 30)"},
    {"seed", 0, FLAG_NUMBER, CMD_VERIFY, AT(seed), 0, INT64_MAX, "S", "of the random order of calls (default 1)"},
    {"ops", 0, FLAG_BOOL, CMD_PLAN, AT(ops), 0, 0, NULL, "print the op lists of that rank too"},
    {"explain", 0, FLAG_BOOL, CMD_PLAN, AT(explain), 0, 0, NULL,
     "for a machine of GPUs: why each knob has its value, and what others would cost"},
    {"threads", 0, FLAG_BOOL, CMD_RUNS, AT(threads), 0, 0, NULL, "ranks are threads of this process (default)"},
    {"procs", 0, FLAG_BOOL, CMD_RUNS, AT(procs), 0, 0, NULL, "ranks are processes"},
    {"fabric", 0, FLAG_TEXT, CMD_RUNS | CMD_CALIBRATE, AT(fabric), 0, 0, "NAME", "what carries the bytes (default host)"},
    {"lifetime", 0, FLAG_BOOL, CMD_CHECK, AT(lifetime), 0, 0, NULL,
     "two unequal groups that share a landing slot and staging, ranks that pause at random (default 10000 calls)"},
    {"gpus", 0, FLAG_NUMBER, CMD_RUNS, AT(gpus), 1, 64, "N", "GPUs to spread the ranks over (default: all there are)"},
    {"seed", 0, FLAG_NUMBER, CMD_CHECK, AT(seed), 0, INT64_MAX, "S", "of the first configuration (default 1)"},
    {"calls", 0, FLAG_NUMBER, CMD_CHECK, AT(calls), 1, 1000000000, "T",
     "collectives to run (default 1000; 20 of given shapes)"},
    {"minbytes", 'b', FLAG_BYTES, CMD_BENCH, AT(min_bytes), 1, INT64_C(1) << 40, "BYTES",
     "smallest size (default 256K)"},
    {"maxbytes", 'e', FLAG_BYTES, CMD_BENCH, AT(max_bytes), 1, INT64_C(1) << 40, "BYTES", "largest size (default 64M)"},
    {"stepfactor", 'f', FLAG_NUMBER, CMD_BENCH, AT(factor), 2, 1024, "F",
     "size ratio of neighbouring rows (default 2)"},
    {"iters", 'n', FLAG_NUMBER, CMD_BENCH, AT(iters), 1, 1000000, "N", "timed calls a row (default 20)"},
    {"warmup_iters", 'w', FLAG_NUMBER, CMD_BENCH, AT(warmup), 0, 1000000, "N", "calls before them (default 5)"},
    {"check", 'c', FLAG_NUMBER, CMD_BENCH, AT(check), 0, 1, "0|1", "compare the last call with the oracle (default 1)"},
    {"params", 0, FLAG_NUMBER, CMD_BENCH, AT(params), 1, TIDE_MAX_PARAMS, "P",
     "equal parameters that make up a size (default 8)"},
    {"bench", 0, FLAG_BOOL, CMD_KERNELS, AT(timed), 0, 0, NULL, "measure rates and launch costs"},
    {"quick", 0, FLAG_BOOL, CMD_KERNELS, AT(quick), 0, 0, NULL, "few small batches, as for a memory checker"},
    {"quick", 0, FLAG_BOOL, CMD_CALIBRATE, AT(quick), 0, 0, NULL, "few small calls: whether it runs; the values mean nothing"},
    {"seed", 0, FLAG_NUMBER, CMD_KERNELS, AT(seed), 0, INT64_MAX, "S", "of the random batches (default 1)"},
    {"models", 0, FLAG_BOOL, CMD_INFO, AT(models), 0, 0, NULL, "list the models and their parameters"},
    {"json", 0, FLAG_BOOL, CMD_SHAPED | CMD_INFO, AT(json), 0, 0, NULL, "one JSON object on standard output"},
    {"help", 'h', FLAG_BOOL, UINT32_MAX, AT(help), 0, 0, NULL, "describe the command"},
};
enum { N_FLAGS = sizeof flags / sizeof flags[0] };

int cli_fail(const cli *c, const char *format, ...)
{
    char line[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    for (char *p = line; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    if (c->command)
        fprintf(stderr, "tide %s: %s\n", c->command->name, line);
    else
        fprintf(stderr, "tide: %s\n", line);
    return CLI_BAD;
}

int cli_fail_library(const cli *c)
{
    return cli_fail(c, "%s", tide_last_error());
}

bool cli_number(const char *text, bool sizes, int64_t *out)
{
    char *end;
    long long value;
    int64_t unit = 1;

    if (*text == '\0' || strspn(text, "-0123456789") == 0)
        return false;
    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno || end == text)
        return false;
    if (sizes && *end) {
        unit = *end == 'K' ? INT64_C(1) << 10 : *end == 'M' ? INT64_C(1) << 20 : *end == 'G' ? INT64_C(1) << 30 : 0;
        end++;
    }
    return *end == '\0' && unit && !__builtin_mul_overflow((int64_t)value, unit, out);
}

void cli_knob_flag(const char *knob, char *out, size_t bytes)
{
    snprintf(out, bytes, "%s", knob);
    for (char *p = out; *p; p++)
        if (*p == '_')
            *p = '-';
}

static int set_knob(cli *c, size_t index, const tide_knob_info *knob, const char *name, const char *value)
{
    int64_t number = TIDE_AUTO;
    const char *expected = knob->dflt == TIDE_AUTO ? "auto or in" : "in";

    if (strcmp(value, "auto") != 0 || knob->dflt != TIDE_AUTO) {
        if (!cli_number(value, true, &number))
            return cli_fail(c, "--%s: '%s' is not a whole number", name, value);
        if (number < knob->minimum || number > knob->maximum)
            return cli_fail(c, "--%s: %s is not %s %lld..%lld", name, value, expected, (long long)knob->minimum,
                            (long long)knob->maximum);
    }
    if (tide_options_set(&c->options, knob->name, number) != TIDE_OK)
        return cli_fail_library(c);
    c->knob_given[index] = true;
    return CLI_OK;
}

static int set_flag(cli *c, const flag *f, const char *value)
{
    char *at = (char *)c + f->offset;

    switch (f->kind) {
    case FLAG_BOOL:
        *(bool *)at = true;
        return CLI_OK;
    case FLAG_TEXT:
        memcpy(at, &value, sizeof value);
        return CLI_OK;
    default: {
        int64_t number;
        if (!cli_number(value, f->kind == FLAG_BYTES, &number))
            return cli_fail(c, "--%s: '%s' is not a whole number", f->name, value);
        if (number < f->lo || number > f->hi)
            return cli_fail(c, "--%s: %s is not in %lld..%lld", f->name, value, (long long)f->lo, (long long)f->hi);
        memcpy(at, &number, sizeof number);
        return CLI_OK;
    }
    }
}

static const flag *find_flag(const cli *c, const char *name, size_t length, bool letter)
{
    for (size_t i = 0; i < N_FLAGS; i++) {
        if (!(flags[i].commands & c->command->bit))
            continue;
        if (letter ? length == 1 && flags[i].letter == *name
                   : strlen(flags[i].name) == length && strncmp(flags[i].name, name, length) == 0)
            return &flags[i];
    }
    return NULL;
}

/* Index of the knob with that flag spelling, or -1; commands without groups have no knobs. */
static int find_knob(const cli *c, const char *name, size_t length, tide_knob_info *knob)
{
    char spelling[64];

    if (!(c->command->bit & CMD_SHAPED))
        return -1;
    for (size_t i = 0; i < CLI_MAX_KNOBS && tide_knob_describe(i, knob) == TIDE_OK; i++) {
        cli_knob_flag(knob->name, spelling, sizeof spelling);
        if (strlen(spelling) == length && strncmp(spelling, name, length) == 0)
            return (int)i;
    }
    return -1;
}

/* One word that begins with '-'; takes the next word as its value when it needs one. */
static int parse_flag(cli *c, int argc, char **argv, int *i)
{
    const char *word = argv[*i], *value;
    char spelling[64];
    bool letter = word[1] != '-';
    const char *name = word + (letter ? 1 : 2), *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    tide_knob_info knob;
    const flag *f = find_flag(c, name, length, letter);
    int index = f || letter ? -1 : find_knob(c, name, length, &knob);

    if (!f && index < 0)
        return cli_fail(c, "%.*s: no such flag; see tide help %s", (int)(name - word + (ptrdiff_t)length), word,
                        c->command->name);
    if (f && f->kind == FLAG_BOOL) {
        if (equals)
            return cli_fail(c, "--%s: takes no value", f->name);
        return set_flag(c, f, NULL);
    }
    if (equals) {
        value = equals + 1;
    } else {
        if (*i + 1 >= argc)
            return cli_fail(c, "%s: needs a value", word);
        value = argv[++*i];
    }
    if (f && f->kind == FLAG_WORDS) { /* and what follows of the form key=value */
        cli_words words = {&argv[*i], 1};
        argv[*i] += value - argv[*i];
        while (*i + 1 < argc && argv[*i + 1][0] != '-' && strchr(argv[*i + 1], '=')) {
            words.n++;
            ++*i;
        }
        memcpy((char *)c + f->offset, &words, sizeof words);
        return CLI_OK;
    }
    if (f)
        return set_flag(c, f, value);
    snprintf(spelling, sizeof spelling, "%.*s", (int)length, name);
    return set_knob(c, (size_t)index, &knob, spelling, value);
}

int cli_parse(cli *c, int argc, char **argv)
{
    const tide_options defaults = TIDE_OPTIONS_INIT;

    memset(c, 0, sizeof *c);
    c->options = defaults;
    c->seed = 1;
    c->iters = 20;
    c->warmup = 5;
    c->check = 1;
    c->mutate_rank = -1;
    if (argc < 1)
        return cli_fail(c, "no command; try tide help");
    c->command = cli_find_command(strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0 ? "help" : argv[0]);
    if (!c->command)
        return cli_fail(c, "'%s': no such command; try tide help", argv[0]);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-' && argv[i][1]) {
            int code = parse_flag(c, argc, argv, &i);
            if (code != CLI_OK)
                return code;
        } else if (c->command->operands[0] && !c->operand) {
            c->operand = argv[i];
        } else {
            return cli_fail(c, "'%s': unexpected argument", argv[i]);
        }
    }
    if (c->threads && c->procs)
        return cli_fail(c, "--procs: excludes --threads");
    if (c->model && c->shapes)
        return cli_fail(c, "--shapes: excludes --model");
    return CLI_OK;
}

bool cli_knob_given(const cli *c, const char *name)
{
    tide_knob_info knob;
    for (size_t i = 0; i < CLI_MAX_KNOBS && tide_knob_describe(i, &knob) == TIDE_OK; i++)
        if (strcmp(knob.name, name) == 0)
            return c->knob_given[i];
    return false;
}

int cli_refuse_given(const cli *c, const char *const *names, const char *why)
{
    for (; *names; names++) {
        const flag *f = find_flag(c, *names, strlen(*names), false);
        int64_t number = 0;
        const char *text = NULL;

        if (f->kind == FLAG_TEXT || f->kind == FLAG_WORDS)
            memcpy(&text, (const char *)c + f->offset, sizeof text);
        else
            memcpy(&number, (const char *)c + f->offset, sizeof number);
        if (number || text)
            return cli_fail(c, "--%s: %s", *names, why);
    }
    return CLI_OK;
}

void cli_print_flags(FILE *f, uint32_t command_bit)
{
    char left[64], spelling[48];
    tide_knob_info knob;

    for (size_t i = 0; i < N_FLAGS; i++) {
        int n;
        if (!(flags[i].commands & command_bit))
            continue;
        n = flags[i].letter ? snprintf(left, sizeof left, "-%c, --%s", flags[i].letter, flags[i].name)
                            : snprintf(left, sizeof left, "--%s", flags[i].name);
        if (flags[i].value)
            snprintf(left + n, sizeof left - (size_t)n, " %s", flags[i].value);
        fprintf(f, "  %-26s %s\n", left, flags[i].help);
    }
    if (!(command_bit & CMD_SHAPED))
        return;
    fprintf(f, "\nknobs\n");
    for (size_t i = 0; tide_knob_describe(i, &knob) == TIDE_OK; i++) {
        cli_knob_flag(knob.name, spelling, sizeof spelling);
        snprintf(left, sizeof left, "--%s %lld..%lld", spelling, (long long)knob.minimum, (long long)knob.maximum);
        fprintf(f, "  %-26s %s", left, knob.help);
        if (knob.dflt == TIDE_AUTO)
            fprintf(f, " [auto]\n");
        else
            fprintf(f, " [%lld]\n", (long long)knob.dflt);
    }
}
