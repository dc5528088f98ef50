/* cuda.h - GPUs as a command sees them. */
#ifndef TIDE_CLI_CUDA_H
#define TIDE_CLI_CUDA_H

#include "base/base.h"
#include "cli/fabric.h"

/* The verbs of cli_fabric. */
int cli_cuda_open(cli_device *d, uint32_t rank, uint32_t n_ranks);
int cli_nccl_open(cli_device *d, uint32_t rank, uint32_t n_ranks);
void cli_cuda_close(cli_device *d);
void *cli_cuda_alloc(cli_device *d, size_t bytes);
void cli_cuda_release(cli_device *d, void *p);
int cli_cuda_copy_in(cli_device *d, void *to, const void *host, size_t bytes);
int cli_cuda_copy_out(cli_device *d, void *host, const void *from, size_t bytes);
int cli_cuda_finish(cli_device *d);
extern const cli_timer cli_cuda_timer;
void cli_cuda_keep(bool on);
bool cli_cuda_fits(const tide_topology *t, int gpus);
bool cli_nccl_fits(const tide_topology *t, int gpus);
int cli_cuda_count(int *count); /* TIDE_OK, or why there is no driver */
/* Whether the fabric can be used here, and why or why not, for `tide info`. */
void cli_cuda_probe(bool *usable, char *why, size_t room);
void cli_nccl_probe(bool *usable, char *why, size_t room);
/* Devices and who can access whom, when there is a driver. */
void cli_cuda_describe(tide_text *t, bool json);

#endif
