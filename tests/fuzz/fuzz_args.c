/* fuzz_args.c - the command line: one word a line of the input. */
#include <string.h>

#include "cli/cli.h"
#include "fuzz.h"

enum { MAX_WORDS = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1), *words[MAX_WORDS], *rest = text;
    tide_knob_info knob;
    int n = 0;
    cli c;

    HOLDS(text);
    memcpy(text, data, size);
    text[size] = '\0';
    while (rest && n < MAX_WORDS)
        words[n++] = strsep(&rest, "\n");
    if (cli_parse(&c, n, words) == CLI_OK) {
        const int64_t *values = (const int64_t *)(const void *)((const char *)&c.options + sizeof(size_t));
        HOLDS(c.command);
        HOLDS(!c.model || !c.shapes);
        HOLDS(c.nodes >= 0 && c.nodes <= TIDE_MAX_NODES && c.local >= 0 && c.local <= TIDE_MAX_LOCAL);
        for (size_t i = 0; tide_knob_describe(i, &knob) == TIDE_OK; i++)
            HOLDS((values[i] >= knob.minimum && values[i] <= knob.maximum) || values[i] == knob.dflt);
    }
    free(text);
    return 0;
}
