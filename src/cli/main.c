/* main.c - the table of commands, and the way in and out. */
#include <errno.h>
#include <string.h>

#include "cli/cli.h"

const cli_command cli_commands[] = {
    {"info", CMD_INFO, cli_info, "", "version, build, fabrics, knobs, models",
     "Says what this build is and what it can run on here."},
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
