/*
 * fake_cuda.h - a CUDA driver without GPUs, to be put under the function table (cuda_driver_fake).
 *
 * Devices, contexts, memory, streams, events and modules behave as the driver's; memory of a device is host memory,
 * kernels are C functions found by name. Streams are in-order queues; a worker thread runs one step at a time of one
 * that can run, chosen by a seeded generator, so that any order that the driver may choose can come: batches are
 * shuffled and cut into pieces, pieces of several streams interleave. Streams share `connections` hardware queues a
 * device: whoever is behind a blocked operation of another stream in its queue is blocked too. Nothing sleeps to pass
 * time.
 *
 * It refuses what the driver refuses, each rule of which has a contract test that also runs on a real driver (`tide
 * driver-rules`), but those of multicast, which are the driver's documentation. What the driver would let pass, or make undefined, but this project forbids is kept as a complaint:
 * work on the legacy stream, pageable memory in an asynchronous copy, memory freed under queued work, a kernel that
 * would touch memory that is not there, overlapping copies in a batch, a context given up with objects in it.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fabric/cuda/driver.h"

enum { FAKE_MAX_DEVICES = 8, FAKE_MAX_CONNECTIONS = 64 };

typedef struct fake_cuda_options {
    int devices;
    int connections; /* hardware queues a device; 1..64: a GPU has 32 at most, more let many ranks share one */
    uint64_t seed;
    int version;
    uint64_t granularity; /* of MemCreate */
    bool no_peers;        /* no device can access another's memory */
    bool no_batch;        /* a driver without cuMemcpyBatchAsync */
    int attribute, value; /* an attribute that all devices answer otherwise; 0: none */
    bool no_peer_words;   /* stream operations reach no other device's memory */
    bool multicast;       /* devices that have it */
    uint64_t multicast_granularity; /* the least; the recommended one is four times that */
    bool multicast_deaf;  /* what is written to all does not come to the last device */
} fake_cuda_options;
#define FAKE_CUDA_OPTIONS ((fake_cuda_options){2, 32, 1, 13000, 65536, false, false, 0, 0, false, false, 131072, false})

/* A new driver, as if the process had just started; the table is good until stop. Kernels stay registered. */
const cuda_driver *fake_cuda_start(const fake_cuda_options *options);
/* Ends it. Returns the number of leaks and complaints, after a line on stderr for each. */
int fake_cuda_stop(void);

/* What is alive: handles, reservations, mappings, allocations, host allocations, streams, events, modules, retained
 * contexts. */
int fake_cuda_leaks(char *text, size_t bytes); /* text may be NULL: "2 events, 1 mapping" */
/* Complaints so far; text: the first. */
int fake_cuda_complaints(char *text, size_t bytes);
void fake_cuda_forgive(void); /* forgets them */
/* Streams that are blocked, and by what. */
int fake_cuda_blocked(char *text, size_t bytes);

/* ---- faults ---- */

/* From now on the n-th call (1: next) fails with `result`, which `function` ("cuMemMap"; NULL: any) says; n = 0: none.
 * A call that gives something back does so nevertheless, as the driver does. Calls that cannot fail do not count. */
void fake_cuda_fail(const char *function, uint64_t n, cu_result result);
/* The n-th allocation (memory, reservation, stream, event, module) is out of memory; 0: none. */
void fake_cuda_oom(uint64_t n);
bool fake_cuda_failed(void);      /* the fault of either kind has come */
const char *fake_cuda_fault(void); /* to which function; "": not yet */
uint64_t fake_cuda_calls(void);   /* that counted, since start */
uint64_t fake_cuda_multicasts(void); /* how often somebody wanted to create a multicast object, since start */
/* The n-th stream created (1: first since start) stands still from now on; 0: all go on. */
void fake_cuda_stall(uint64_t n);
/* From now on streams share so many hardware queues; what waits behind another stream's operation may go free. */
void fake_cuda_connections(int n);
/* The stream is being captured into a graph, or no more. */
void fake_cuda_capture(cu_stream stream, bool on);

/* ---- kernels ---- */

/* Told of every range that a launch would touch; the launch is refused when one is not there. */
typedef struct fake_touch fake_touch;
void fake_cuda_touch(fake_touch *t, uint64_t address, uint64_t bytes);
/* `args`: a copy of the one struct. ranges may be NULL. Replaces an earlier kernel of this name. */
void fake_cuda_kernel(const char *name, size_t args_bytes, void (*run)(const void *args),
                      void (*ranges)(const void *args, fake_touch *t));

#endif
