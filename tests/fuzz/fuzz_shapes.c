/* fuzz_shapes.c - a shapes file, then the plan of what it says. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli/cli.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char *const words[] = {"plan"};
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_group_desc desc;
    tide_plan *plan;
    cli_shapes shapes;
    char path[40];
    cli c;
    int fd = memfd_create("shapes", MFD_CLOEXEC);

    HOLDS(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    HOLDS(cli_parse(&c, 1, (char **)words) == CLI_OK);
    c.shapes = path;
    if (cli_shapes_load(&c, &shapes) == CLI_OK) {
        HOLDS(shapes.n_params >= 1 && shapes.n_params <= TIDE_MAX_PARAMS);
        for (uint32_t i = 0; i < shapes.n_params; i++) {
            const tide_param *p = &shapes.params[i];
            HOLDS(p->name[0] && p->ndim >= 0 && p->ndim <= TIDE_MAX_DIMS);
            HOLDS(p->shard_dim >= 0 && p->shard_dim <= (p->ndim ? p->ndim - 1 : 0));
            for (int d = 0; d < p->ndim; d++)
                HOLDS(p->dims[d] >= 0);
        }
        HOLDS(cli_shapes_desc(&c, &shapes, &desc) == CLI_OK);
        topology.nodes = 2;
        topology.local = 2;
        if (tide_plan_create(&topology, &desc, 1, NULL, &plan) == TIDE_OK)
            tide_plan_destroy(plan);
        else
            HOLDS(tide_last_error()[0]);
        cli_shapes_clear(&shapes);
    }
    close(fd);
    return 0;
}
