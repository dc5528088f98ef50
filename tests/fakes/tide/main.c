/*
 * main.c - the command line over the fake driver: `tide-fake check --fabric cuda ...` needs no GPU.
 *
 * Environment: FAKE_SEED of the scheduler (default 1), FAKE_DEVICES (2), FAKE_CONNECTIONS (32), FAKE_BATCH=0 a driver
 * without batched copies, FAKE_PEER_WORDS=0 one that writes no word of a peer. Whatever is left behind or complained of makes the exit code 1.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../fake_cuda.h"

int tide_main(int argc, char **argv); /* of src/cli/main.c */

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    fake_cuda_options o = FAKE_CUDA_OPTIONS;
    int code, left;

    o.seed = setting("FAKE_SEED", o.seed);
    o.devices = (int)setting("FAKE_DEVICES", (uint64_t)o.devices);
    o.connections = (int)setting("FAKE_CONNECTIONS", (uint64_t)o.connections);
    o.no_batch = setting("FAKE_BATCH", 1) == 0;
    o.no_peer_words = setting("FAKE_PEER_WORDS", 1) == 0;
    if (o.devices < 0 || o.devices > FAKE_MAX_DEVICES || o.connections < 1 || o.connections > FAKE_MAX_CONNECTIONS) {
        fprintf(stderr, "FAKE_DEVICES is at most %d, FAKE_CONNECTIONS in 1..%d\n", FAKE_MAX_DEVICES, FAKE_MAX_CONNECTIONS);
        return 2;
    }
    cuda_driver_fake(fake_cuda_start(&o));
    code = tide_main(argc, argv);
    cuda_driver_fake(NULL);
    left = fake_cuda_stop();
    return code ? code : left != 0;
}
