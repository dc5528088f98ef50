/* machine.c - finds and reads machine files; parsing them is plan/machine.c's. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"

/* Beside the program: of a build folder in the source tree, and of an installation. */
static const char *const folders[] = {"../machines", "../share/tide/machines"};

bool cli_beside_program(const char *relative, char *path, size_t room)
{
    char program[PATH_MAX], *slash;
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);

    if (n <= 0)
        return false;
    program[n] = '\0';
    slash = strrchr(program, '/');
    if (!slash)
        return false;
    *slash = '\0';
    return snprintf(path, room, "%s/%s", program, relative) < (int)room;
}

static FILE *open_shipped(const char *name)
{
    char relative[128], path[PATH_MAX];

    if (strchr(name, '/'))
        return NULL;
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        FILE *f;
        snprintf(relative, sizeof relative, "%s/%.64s.txt", folders[i], name);
        f = cli_beside_program(relative, path, sizeof path) ? fopen(path, "r") : NULL;
        if (f)
            return f;
    }
    return NULL;
}

static int override(const cli *c, plan_machine *m)
{
    if (c->nic && plan_machine_set(m, "--nic", "nic_rate", c->nic) != TIDE_OK)
        return cli_fail_library(c);
    if (c->nvlink && plan_machine_set(m, "--nvlink", "nvlink_rate", c->nvlink) != TIDE_OK)
        return cli_fail_library(c);
    if (c->flops && plan_machine_set(m, "--flops", "flops", c->flops) != TIDE_OK)
        return cli_fail_library(c);
    return CLI_OK;
}

int cli_machine_load(const cli *c, const char *dflt, plan_machine *out)
{
    const char *name = c->machine ? c->machine : dflt;
    FILE *f = fopen(name, "r");
    int code = CLI_OK, cause = errno;
    char *text = NULL;
    size_t n;

    if (!f)
        f = open_shipped(name);
    if (!f)
        return cli_fail(c, "--machine: %s: %s, and no shipped machine has that name", name, strerror(cause));
    if (tide_read_text(f, "--machine", name, PLAN_MACHINE_BYTES, &text, &n) != TIDE_OK ||
        plan_machine_parse(name, text, n, out) != TIDE_OK)
        code = cli_fail_library(c);
    tide_free(text);
    fclose(f);
    return code == CLI_OK ? override(c, out) : code;
}

void cli_machine_knobs(cli *c, const plan_machine *m)
{
    if (!cli_knob_given(c, "target"))
        c->options.target = 1;
    if (!cli_knob_given(c, "multicast"))
        c->options.multicast = m->multicast > 0;
}
