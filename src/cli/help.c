/* help.c - `tide help`. */
#include "cli/cli.h"

int cli_help_command(FILE *f, const cli_command *command)
{
    fprintf(f, "usage: tide %s%s%s [flags]\n\n%s\n\nflags\n", command->name, *command->operands ? " " : "",
            command->operands, command->text);
    cli_print_flags(f, command->bit);
    return CLI_OK;
}

int cli_help(const cli *c)
{
    if (c->operand) {
        const cli_command *command = cli_find_command(c->operand);
        if (!command)
            return cli_fail(c, "'%s': no such command", c->operand);
        return cli_help_command(stdout, command);
    }
    printf("tide %s - zero-copy, layout-aware all-gather and reduce-scatter for FSDP2\n\n"
           "usage: tide COMMAND [flags]\n\n",
           tide_version());
    for (size_t i = 0; i < cli_n_commands; i++)
        if (cli_commands[i].summary)
            printf("  %-9s %s\n", cli_commands[i].name, cli_commands[i].summary);
    printf("\ntide help COMMAND describes one.\n"
           "Exit status: 0 fine, 1 a check failed, 2 bad input (one line on standard error).\n");
    return CLI_OK;
}
