/*
 * cli.h - the command line: one file a command, one table of commands (main.c), one table of flags (args.c).
 *
 * Every command has the signature int run(const cli *c) and returns an exit code: CLI_OK, CLI_WRONG (a check failed) or
 * CLI_BAD (bad input, after exactly one line on stderr from cli_fail).
 */
#ifndef TIDE_CLI_H
#define TIDE_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "plan/machine.h"
#include "tide/tide.h"

enum cli_exit { CLI_OK = 0, CLI_WRONG = 1, CLI_BAD = 2, CLI_NO_GPU = 3 };

/* A flag says which commands take it by these bits. CMD_SHAPED: commands about groups of parameters on a topology. */
enum cli_bit {
    CMD_PLAN = 1,
    CMD_CHECK = 2,
    CMD_BENCH = 4,
    CMD_INFO = 8,
    CMD_HELP = 16,
    CMD_VERIFY = 32,
    CMD_KERNELS = 64,
    CMD_DRIVER_RULES = 128,
    CMD_SIMULATE = 256,
    CMD_CALIBRATE = 512,
    CMD_NCCL_RULES = 1024
};
#define CMD_SHAPED (CMD_PLAN | CMD_CHECK | CMD_BENCH | CMD_VERIFY | CMD_SIMULATE)
#define CMD_RUNS (CMD_CHECK | CMD_BENCH) /* commands that start ranks */

/* Several words of a flag, in argv. */
typedef struct cli_words { char **first; int64_t n; } cli_words;

typedef struct cli cli;
typedef struct cli_command {
    const char *name;
    uint32_t bit;
    int (*run)(const cli *c);
    const char *operands; /* "ag|rs", or "" */
    const char *summary;  /* NULL: a tool for working on TIDE, not in the list of commands */
    const char *text; /* what `tide help NAME` says before the flags */
} cli_command;
extern const cli_command cli_commands[];
extern const size_t cli_n_commands;
const cli_command *cli_find_command(const char *name); /* NULL when there is none */

#define CLI_DEFAULT_MODEL "llama-3.1-70b"
#define CLI_MAX_KNOBS 64
struct cli {
    const cli_command *command;
    const char *operand; /* NULL when not given */
    bool help;
    int64_t nodes, local; /* 0: not given */
    const char *model, *shapes, *dtype, *shard_dtype, *grad_dtype, *input, *landing, *fabric; /* NULL: not given */
    int64_t groups, calls, gpus; /* 0: not given */
    int64_t rank, seed;
    bool threads, procs, json, ops, explain, models, audit, mutate, lifetime, timed, quick;
    int64_t min_bytes, max_bytes, factor, params; /* 0: not given */
    int64_t iters, warmup, check;
    int64_t mutate_rank; /* -1: all ranks */
    const char *machine, *ranks, *trace, *plot, *nic, *nvlink; /* NULL: not given */
    int64_t shard, layers, tokens; /* 0: not given */
    const char *flops, *compare;
    cli_words sweep;
    tide_options options;
    bool knob_given[CLI_MAX_KNOBS]; /* by index in the knob table */
};

/* args.c */
/* Fills *c from the words after the program's name. CLI_OK or CLI_BAD. */
int cli_parse(cli *c, int argc, char **argv);
/* Prints "tide COMMAND: ..." as one line on stderr and returns CLI_BAD. Unprintable bytes become '?'. */
int cli_fail(const cli *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* CLI_BAD, with `why`, for the first of the flags (a NULL-terminated list, of those whose zero means "not given") that
 * was given: a flag that would be without effect is an error. */
int cli_refuse_given(const cli *c, const char *const *names, const char *why);
/* The library's last error in the same form. */
int cli_fail_library(const cli *c);
bool cli_knob_given(const cli *c, const char *name);
void cli_print_flags(FILE *f, uint32_t command_bit);
/* A knob's spelling as a flag: underscores become dashes. */
void cli_knob_flag(const char *knob, char *out, size_t bytes);
/* Whole decimal number; suffix K, M or G (powers of 1024) when `sizes`. */
bool cli_number(const char *text, bool sizes, int64_t *out);

/* main.c: a tide_write_fn whose context is a FILE. */
int cli_write(void *file, const char *text, size_t bytes);

/* shapes.c: a group of parameters, from a model, from a file, or made up by a command */
typedef struct cli_shapes {
    char *name;
    uint32_t n_params, capacity;
    tide_param *params; /* names owned */
    int dtype;
    uint32_t item_size; /* of an opaque dtype, else 0 */
} cli_shapes;
void cli_shapes_clear(cli_shapes *s);
/* Appends a parameter; dims has ndim entries. False when out of memory. */
bool cli_shapes_add(cli_shapes *s, const char *name, int ndim, const int64_t *dims, int shard_dim);
/* From --model or --shapes; n_params is 0 when neither was given. CLI_OK or CLI_BAD. */
int cli_shapes_load(const cli *c, cli_shapes *out);
/* Description of the group under the flags --shard-dtype, --grad-dtype, --input, --landing. `s` must outlive *out. */
int cli_shapes_desc(const cli *c, const cli_shapes *s, tide_group_desc *out);
/* TIDE_F32.. of "fp32", "float32", ...; -1 when unknown. "opaqueN" gives TIDE_OPAQUE and N. */
int cli_dtype(const char *text, uint32_t *item_size);
#define CLI_DTYPES "fp32, bf16, fp16, opaqueN"

/* models.c */
typedef struct cli_model {
    const char *name, *source;
    void (*add)(cli_shapes *s, bool *ok);
    uint32_t layers;
    double idle;          /* parameters of a layer that a token does not meet */
    double ring_slowdown; /* of its compute beside a resident ring kernel; 0: as many SMs as that takes */
} cli_model;
extern const cli_model cli_models[];
extern const size_t cli_n_models;

/* machine.c: the path of what lies beside the program; false when it does not fit. */
bool cli_beside_program(const char *relative, char *path, size_t room);
/* machine.c: machine files. A name without '/' that is no file here is looked for among those that are installed. Under
 * --machine (NULL: `dflt`), --nic and --nvlink. CLI_OK or CLI_BAD. */
int cli_machine_load(const cli *c, const char *dflt, plan_machine *out);
/* The knobs that a machine of GPUs implies, where they are not given: target, multicast. */
void cli_machine_knobs(cli *c, const plan_machine *m);
/* explain.c: what follows `tide plan --explain`. */
int cli_explain(const cli *c, const plan_machine *m, const tide_topology *topology, const tide_group_desc *descs,
                uint32_t n_groups, const tide_plan *plan);
/* step.c: what follows `tide simulate step`. */
int cli_step(const cli *c, const plan_machine *m, const tide_topology *topology, tide_text *trace, FILE *sweep_data);
/* plot.c: a trace cannot be written; CLI_BAD. */
int cli_fail_trace(const cli *c);
/* plot.c: --plot. A file for a trace or the JSON of a sweep, and the drawing of it. CLI_OK or CLI_BAD. */
int cli_plot_open(const cli *c, FILE **data);
int cli_plot_draw(const cli *c, FILE *data);

/* plan.c, verify.c, audit.c, check.c, bench.c, info.c, help.c */
int cli_plan(const cli *c);
int cli_check(const cli *c);
int cli_bench(const cli *c);
int cli_verify(const cli *c);
int cli_audit(const cli *c);
int cli_simulate(const cli *c);
int cli_calibrate(const cli *c);
int cli_info(const cli *c);
int cli_driver_rules(const cli *c);
int cli_nccl_rules(const cli *c);
int cli_kernels(const cli *c);
int cli_help(const cli *c);
int cli_help_command(FILE *f, const cli_command *command);

#endif
