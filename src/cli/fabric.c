/* fabric.c - the fabrics that a command can run ranks on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cuda.h"
#include "comm/comm.h"

/* ---- host: a stream is the calling thread, device memory is memory ------------------------- */

static int host_open(cli_device *d, uint32_t rank, uint32_t n_ranks)
{
    (void)d;
    (void)rank;
    (void)n_ranks;
    return TIDE_OK;
}

static void host_close(cli_device *d)
{
    (void)d;
}

static void *host_alloc(cli_device *d, size_t bytes)
{
    enum { LINE = 64 };

    (void)d;
    return bytes > SIZE_MAX - LINE ? NULL : aligned_alloc(LINE, (bytes / LINE + 1) * LINE);
}

static void host_release(cli_device *d, void *p)
{
    (void)d;
    free(p);
}

static int host_copy(cli_device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    memcpy(to, from, bytes);
    return TIDE_OK;
}

static int host_finish(cli_device *d)
{
    (void)d;
    return TIDE_OK;
}

static void host_trouble(tide_comm *comm, const cli_trouble *t)
{
    fab_inject inject = {.seed = t->seed, .delay_us = t->rail_delay_us};

    if (t->shuffle_streams)
        fab_host_set_seed(comm->device, t->seed + comm->open.rank);
    if (t->rail_delay_us)
        fab_host_inject(comm->device, &inject);
}

/* ---- the table ----------------------------------------------------------------------------- */

const cli_fabric cli_fabrics[] = {
    {"host", TIDE_FABRIC_HOST, true, false, host_open, host_close, host_alloc, host_release, host_copy, host_copy,
     host_finish, host_trouble, NULL, NULL, NULL},
    {"cuda", TIDE_FABRIC_CUDA, false, false, cli_cuda_open, cli_cuda_close, cli_cuda_alloc, cli_cuda_release,
     cli_cuda_copy_in, cli_cuda_copy_out, cli_cuda_finish, NULL, cli_cuda_keep, cli_cuda_fits,
     &cli_cuda_timer},
    {"nccl", TIDE_FABRIC_NCCL, false, true, cli_nccl_open, cli_cuda_close, cli_cuda_alloc, cli_cuda_release,
     cli_cuda_copy_in, cli_cuda_copy_out, cli_cuda_finish, NULL, cli_cuda_keep, cli_nccl_fits,
     &cli_cuda_timer},
};
const size_t cli_n_fabrics = sizeof cli_fabrics / sizeof cli_fabrics[0];

const cli_fabric *cli_find_fabric(const char *name)
{
    for (size_t i = 0; i < cli_n_fabrics; i++)
        if (strcmp(cli_fabrics[i].name, name) == 0)
            return &cli_fabrics[i];
    return NULL;
}

int cli_fail_fabric(const cli *c)
{
    char names[64] = "";

    for (size_t i = 0; i < cli_n_fabrics; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s",
                 i == 0                   ? ""
                 : i + 1 == cli_n_fabrics ? " or "
                                          : ", ",
                 cli_fabrics[i].name);
    return cli_fail(c, "--fabric: '%s' is not built in, expected %s", c->fabric, names);
}
