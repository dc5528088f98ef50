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

/* Memory of a second GPU: `near` is where the first one's work finds it, `far` its own. near is 0 where there is no such GPU. */
typedef struct kernels_peer {
    cu_dev device;
    cu_context context;
    cu_stream stream; /* the second GPU's */
    cu_handle handle;
    cu_ptr near, far;
    uint64_t bytes;
} kernels_peer;
/* CLI_OK, also where there is none; or CLI_BAD after a message. To be closed in any case. */
int kernels_peer_open(const cli *c, const gpu *g, uint64_t bytes, kernels_peer *out);
void kernels_peer_close(const gpu *g, kernels_peer *p);
/* Once the word at this offset has reached `value`, the peer's stream copies the first bytes of its memory to pinned memory.
 * Returns at once. */
int kernels_peer_await(const cli *c, const gpu *g, kernels_peer *p, uint64_t word, uint64_t value, void *to, uint64_t bytes);
/* Until that has come, or for 10 s. */
int kernels_peer_sync(const cli *c, const gpu *g, kernels_peer *p, bool *came);

/* Random numbers of a stream that a seed names. */
uint64_t kernels_random(uint64_t *state);
/* Random values of a dtype, some of them NaN, infinite or denormal. */
void kernels_fill(void *p, size_t bytes, int dtype, uint64_t *state);

int cli_kernels_bench(const cli *c, gpu *g);

#endif
