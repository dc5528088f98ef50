/* nccl_rules.c - `tide nccl-rules`: holds the machine's NCCL to what the NCCL fabric relies on. */
#include <stdlib.h>

#include "cli/cli.h"
#include "cli/cuda.h"
#include "cli/rules_nccl.h"

enum { GRACE = 50 }; /* a put takes a thousandth of it */

int cli_nccl_rules(const cli *c)
{
    const cuda_driver *driver;
    const nccl_library *library;
    rules_count count;
    bool spoiled;
    int gpus;

    if (cli_cuda_count(&gpus) == TIDE_OK && gpus == 1) /* NCCL asks when its first communicator is made */
        setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
    if (cuda_driver_get(&driver) != TIDE_OK || nccl_library_get(&library) != TIDE_OK) {
        cli_fail_library(c);
        return CLI_NO_GPU;
    }
    count = nccl_rules_run(library, driver, c->operand, GRACE, stdout, &spoiled);
    if (spoiled) { /* what hangs would hold up the process' end as well */
        fflush(stdout);
        _exit(count.failed ? CLI_WRONG : CLI_OK);
    }
    return count.failed ? CLI_WRONG : CLI_OK;
}
