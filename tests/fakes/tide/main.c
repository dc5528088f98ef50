/*
 * main.c - the command line over the fake driver and the fake NCCL: `tide-fake check --fabric cuda ...` needs no GPU.
 *
 * Environment: FAKE_SEED of the scheduler (default 1), FAKE_DEVICES (2), FAKE_CONNECTIONS (32), FAKE_BATCH=0 a driver
 * without batched copies, FAKE_PEER_WORDS=0 one that writes no word of a peer, FAKE_MULTICAST=1 devices that have multicast.
 * Of NCCL, whose ranks are threads (--threads): FAKE_NCCL=0 there is none of this kind; FAKE_NCCL_VERSION (23102),
 * FAKE_NCCL_DELAY (0) of puts in steps, FAKE_NCCL_WINDOWS=0 windows are NULL, FAKE_NCCL_RMA=0 no one-sided calls,
 * FAKE_NCCL_SHARED_DEVICES=1 ranks of a communicator on one device, FAKE_NCCL_ABORT=1 aborting frees streams. Faults: FAKE_NCCL_FAIL and FAKE_NCCL_HANG, "N" or
 * "ncclFUNCTION:N"; FAKE_NCCL_LOSE_COMPLETION, FAKE_NCCL_LOSE_SIGNAL, FAKE_NCCL_ASYNC_ERROR, each N.
 * Whatever is left behind or complained of makes the exit code 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../fake_nccl.h"

int tide_main(int argc, char **argv); /* of src/cli/main.c */

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

/* "N" or "FUNCTION:N"; 0 when it is not given. *function points into the environment's copy. */
static uint64_t fault(const char *name, char **function)
{
    char *text = getenv(name), *colon = text ? strchr(text, ':') : NULL;
    *function = colon ? strndup(text, (size_t)(colon - text)) : NULL;
    return text ? strtoull(colon ? colon + 1 : text, NULL, 10) : 0;
}

static void nccl_start(char *functions[2])
{
    fake_nccl_options o = FAKE_NCCL_OPTIONS;

    o.version = (int)setting("FAKE_NCCL_VERSION", (uint64_t)o.version);
    o.delay = (uint32_t)setting("FAKE_NCCL_DELAY", o.delay);
    o.null_windows = setting("FAKE_NCCL_WINDOWS", 1) == 0;
    o.no_host_rma = setting("FAKE_NCCL_RMA", 1) == 0;
    o.shared_devices = setting("FAKE_NCCL_SHARED_DEVICES", 0) != 0;
    o.abort_releases = setting("FAKE_NCCL_ABORT", 0) != 0;
    nccl_library_fake(fake_nccl_start(&o));
    uint64_t fail = fault("FAKE_NCCL_FAIL", &functions[0]), hang = fault("FAKE_NCCL_HANG", &functions[1]);
    fake_nccl_fail(functions[0], fail, NCCL_SYSTEM_ERROR);
    fake_nccl_hang(functions[1], hang);
    fake_nccl_lose_completion(setting("FAKE_NCCL_LOSE_COMPLETION", 0));
    fake_nccl_lose_signal(setting("FAKE_NCCL_LOSE_SIGNAL", 0));
    fake_nccl_async_error(setting("FAKE_NCCL_ASYNC_ERROR", 0), NCCL_REMOTE_ERROR);
}

int main(int argc, char **argv)
{
    const bool nccl = setting("FAKE_NCCL", 1) != 0;
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    char *functions[2] = {NULL, NULL};
    int code, left = 0;

    o.seed = setting("FAKE_SEED", o.seed);
    o.devices = (int)setting("FAKE_DEVICES", (uint64_t)o.devices);
    o.connections = (int)setting("FAKE_CONNECTIONS", (uint64_t)o.connections);
    o.no_batch = setting("FAKE_BATCH", 1) == 0;
    o.no_peer_words = setting("FAKE_PEER_WORDS", 1) == 0;
    o.multicast = setting("FAKE_MULTICAST", 0) == 1;
    if (o.devices < 0 || o.devices > FAKE_MAX_DEVICES || o.connections < 1 || o.connections > FAKE_MAX_CONNECTIONS) {
        fprintf(stderr, "FAKE_DEVICES is at most %d, FAKE_CONNECTIONS in 1..%d\n", FAKE_MAX_DEVICES, FAKE_MAX_CONNECTIONS);
        return 2;
    }
    cuda_driver_fake(fake_cuda_start(&o));
    if (nccl)
        nccl_start(functions);
    code = tide_main(argc, argv);
    nccl_library_fake(NULL);
    cuda_driver_fake(NULL);
    left = nccl ? fake_nccl_stop() : 0;
    left += fake_cuda_stop();
    free(functions[0]);
    free(functions[1]);
    return code ? code : left != 0;
}
