/* kernels.h - what `tide kernels` and `tide kernels --bench` share: one GPU with the library's kernels in it. */
#ifndef TIDE_CLI_KERNELS_H
#define TIDE_CLI_KERNELS_H

#include "cli/cli.h"
#include "fabric/cuda/launch.h"

typedef struct gpu {
    const cuda_driver *driver;
    cu_context context;
    cuda_kernels *kernels;
    cu_stream stream;
    int device, n_sms, l2_bytes;
    char name[96];
} gpu;

/* Memory of the GPU. CLI_OK, or CLI_BAD after a message. */
int kernels_alloc(const cli *c, const gpu *g, size_t bytes, cu_ptr *out);
/* Pinned memory of the host, freed with MemFreeHost. */
int kernels_alloc_host(const cli *c, const gpu *g, size_t bytes, void *out);
/* CLI_OK, or CLI_BAD with "what: CUDA_ERROR_..." on standard error. */
int kernels_check(const cli *c, const gpu *g, cu_result result, const char *what);

/* Random numbers of a stream that a seed names. */
uint64_t kernels_random(uint64_t *state);
/* Random values of a dtype, some of them NaN, infinite or denormal. */
void kernels_fill(void *p, size_t bytes, int dtype, uint64_t *state);

int cli_kernels_bench(const cli *c, gpu *g);

#endif
