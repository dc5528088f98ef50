/* driver_rules.c - `tide driver-rules`: holds the machine's CUDA driver to what the CUDA fabric relies on. */
#include "cli/cli.h"
#include "cli/rules.h"

int cli_driver_rules(const cli *c)
{
    const cuda_driver *driver;
    rules_count count;

    if (cuda_driver_get(&driver) != TIDE_OK) {
        cli_fail_library(c);
        return CLI_NO_GPU;
    }
    count = rules_run(driver, stdout);
    return count.failed ? CLI_WRONG : CLI_OK;
}
