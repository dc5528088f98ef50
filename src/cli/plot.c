/* plot.c - drawings are Python's: the command writes what `python -m tide.plot` reads, and asks for it only here. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"

int cli_fail_trace(const cli *c)
{
    return cli_fail(c, "--%s: %s: %s", c->trace ? "trace" : "plot", c->trace ? c->trace : "a temporary file", strerror(errno));
}

int cli_plot_open(const cli *c, FILE **data)
{
    const char *dot = strrchr(c->plot, '.');

    if (!dot || (strcmp(dot, ".png") != 0 && strcmp(dot, ".svg") != 0))
        return cli_fail(c, "--plot: '%s', expected a name that ends in .png or .svg", c->plot);
    *data = tmpfile();
    return *data ? CLI_OK : cli_fail(c, "--plot: a temporary file: %s", strerror(errno));
}

/* In the child: data is its input, `said` its output and errors. */
static void become_python(const cli *c, FILE *data, int said)
{
    const char *python = getenv("PYTHON"), *old = getenv("PYTHONPATH");
    char path[PATH_MAX], paths[2 * PATH_MAX];
    char *words[] = {(char *)(python && python[0] ? python : "python3"), "-m", "tide.plot", "-", "-o", (char *)c->plot, NULL};

    if (cli_beside_program("../python", path, sizeof path) && access(path, R_OK) == 0) { /* a source tree */
        snprintf(paths, sizeof paths, "%s%s%s", path, old && old[0] ? ":" : "", old ? old : "");
        setenv("PYTHONPATH", paths, 1);
    }
    if (dup2(fileno(data), 0) == 0 && dup2(said, 1) == 1 && dup2(said, 2) == 2)
        execvp(words[0], words);
    dprintf(said, "%s: %s", words[0], strerror(errno));
    _exit(127);
}

/* The last line of what a program says is the one that says why. */
static void last_line(FILE *said, char *line, size_t room)
{
    char now[512];
    line[0] = '\0';
    while (fgets(now, sizeof now, said)) {
        now[strcspn(now, "\n")] = '\0';
        if (now[0])
            snprintf(line, room, "%s", now);
    }
}

int cli_plot_draw(const cli *c, FILE *data)
{
    int ends[2], status = 0;
    char line[512];
    pid_t child;
    FILE *said;

    if (fflush(data) != 0 || fseek(data, 0, SEEK_SET) != 0 || lseek(fileno(data), 0, SEEK_SET) != 0 || pipe(ends) != 0)
        return cli_fail(c, "--plot: %s", strerror(errno));
    fflush(stdout);
    child = fork();
    if (child == 0) {
        close(ends[0]);
        become_python(c, data, ends[1]);
    }
    close(ends[1]);
    said = child > 0 ? fdopen(ends[0], "r") : NULL;
    if (!said) {
        int cause = errno;
        close(ends[0]);
        return cli_fail(c, "--plot: starting python3: %s", strerror(cause));
    }
    last_line(said, line, sizeof line);
    fclose(said);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return cli_fail(c, "--plot: %s; drawing needs a Python with matplotlib: python3, or the one that PYTHON names",
                        line[0] ? line : "the Python was killed");
    return CLI_OK;
}
