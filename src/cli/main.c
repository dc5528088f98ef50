/* main.c - the table of commands, and the way in and out. */
#include <errno.h>
#include <string.h>

#include "cli/cli.h"

#define TIDE_X(key, unit, required, help) "  " #key ": " help "\n"
#define KEY_LIST PLAN_MACHINE_KEYS(TIDE_X)
const cli_command cli_commands[] = {
    {"plan", CMD_PLAN, cli_plan, "", "what a call would do: rounds, waves, streams, memory, descriptors, ops",
     "Plans groups of parameters on M x L ranks and says what follows: where every byte lands, the rounds\n"
     "between nodes, waves and transfers, streams and counters, the memory of a rank, copies and puts. Starts\n"
     "nothing. Default: --model llama-3.1-70b."},
    {"simulate", CMD_SIMULATE, cli_simulate, "ag|rs|step", "how long it would take on a machine that you do not have",
     "Executes the op lists of all ranks, or of one that stands for all, in simulated time on the copy engines, SMs,\n"
     "memory, NVLink ports, rails and host of a machine file. Prints the time, what is busy, the critical path and\n"
     "the memory. Default: both collectives of --model llama-3.1-70b on --machine paper. step: a training step of\n"
     "FSDP2 with all layers, alone, against stock FSDP2 (--compare stock), or as a table (--sweep)."},
    {"calibrate", CMD_CALIBRATE, cli_calibrate, "", "measure this machine and write a machine file",
     "Times calls of the library on a fabric and prints the machine file with which the simulation takes as long,\n"
     "then two collectives that nothing was taken from, measured and simulated. Keys of a machine file:\n" KEY_LIST},
    {"verify", CMD_VERIFY, cli_verify, "", "proofs: no race, no deadlock, every byte once, every sum N-way",
     "Proves op lists of all ranks over several calls, in four orders: every access ordered, every wait with an\n"
     "earlier producer, every byte of every result from where it has to come. Without flags about shapes it takes a\n"
     "list of shapes that between them meet every mechanism. Last line: verify: proved: ... 0 violations, or\n"
     "verify: K violations (exit 1)."},
    {"check", CMD_CHECK, cli_check, "", "real calls, every byte against a naive oracle",
     "Runs all-gathers and reduce-scatters on a fabric and compares every byte with a naive oracle: gathered bytes\n"
     "bitwise, sums bitwise in the contract's order of additions and within 1e-5 of fp64. Without --model or\n"
     "--shapes, configurations are drawn from --seed on, seed by seed: nodes, ranks, shapes, dtypes, inputs,\n"
     "landings, subsets of gradients, modes, each knob that is not given, and what makes a run hard: streams in\n"
     "another order, delays on the rail, a slow rank, the same calls again with other knobs. What fails names its\n"
     "seed; --seed THAT --calls N replays it. Last line: check: T calls, W wrong."},
    {"bench", CMD_BENCH, cli_bench, "ag|rs", "times all-gather or reduce-scatter, in nccl-tests' columns",
     "Times calls on a fabric, from inputs to outputs, and prints nccl-tests' columns: size is that of the\n"
     "gathered or the scattered buffer, busbw = algbw * (n - 1) / n. Out-of-place: shards are arguments, copied by\n"
     "the call; in-place: they live in the arena. Rows step from --minbytes to --maxbytes, or are the one of\n"
     "--model or --shapes."},
    {"info", CMD_INFO, cli_info, "", "version, build, fabrics, knobs, models",
     "Says what this build is and what it can run on here."},
    {"driver-rules", CMD_DRIVER_RULES, cli_driver_rules, "", NULL,
     "Holds the CUDA driver of this machine to what the CUDA fabric relies on: a line a rule. Exit 1 when it does not\n"
     "keep one, 3 where there is no driver or no GPU. Part of the rules wants two GPUs."},
    {"nccl-rules", CMD_NCCL_RULES, cli_nccl_rules, "[WORD]", NULL,
     "Holds NCCL on the GPUs of this machine to what the NCCL fabric relies on: a line a rule, ranks as threads, a GPU each.\n"
     "WORD: only the rules whose names contain it. Exit 1 when it does not keep one, 3 where there is no NCCL, no driver or\n"
     "no GPU. What a rule says beside 'ok' is what was seen where either way will do."},
    {"kernels", CMD_KERNELS, cli_kernels, "", NULL,
     "Runs the CUDA kernels against their naive twins on random batches; --bench measures them instead. Exit 3 where\n"
     "there is no GPU to run on. docs/kernels.md says more."},
    {"help", CMD_HELP, cli_help, "COMMAND", "this text, or a command's", "Describes a command and its flags."},
};
const size_t cli_n_commands = sizeof cli_commands / sizeof cli_commands[0];

const cli_command *cli_find_command(const char *name)
{
    for (size_t i = 0; i < cli_n_commands; i++)
        if (strcmp(cli_commands[i].name, name) == 0)
            return &cli_commands[i];
    return NULL;
}

int cli_write(void *file, const char *text, size_t bytes)
{
    return fwrite(text, 1, bytes, file) != bytes;
}

int main(int argc, char **argv)
{
    cli c;
    int code = cli_parse(&c, argc - 1, argv + 1);

    if (code == CLI_OK)
        code = c.help ? cli_help_command(stdout, c.command) : c.command->run(&c);
    errno = 0;
    if ((fflush(stdout) != 0 || ferror(stdout)) && code != CLI_BAD)
        code = cli_fail(&c, "standard output: %s", errno ? strerror(errno) : "write failed");
    return code;
}
