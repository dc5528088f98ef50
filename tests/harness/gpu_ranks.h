/*
 * gpu_ranks.h - ranks as threads on fake GPUs: each opens a communicator, creates two small layers, gathers and scatters them
 * and looks at every element; or does what a test wants of it. What a rank was told stays with the job.
 */
#ifndef HARNESS_GPU_RANKS_H
#define HARNESS_GPU_RANKS_H

#include "../fakes/fake_cuda.h"
#include "base/base.h"
#include "small.h"

enum { GPU_MAX_RANKS = 32, GPU_LAYERS = 2 };

typedef struct gpu_job gpu_job;
typedef struct gpu gpu;

/* What a rank's program has besides the library: a context, a stream, memory. */
struct gpu {
    const cuda_driver *driver;
    cu_dev device;
    cu_context context;
    int retained, pushed;
    cu_stream own;
    void *stream;
    cu_ptr blocks[256];
    int n_blocks;
};

struct gpu_job {
    uint32_t n_ranks, node_size;
    bool machines;    /* each node is pretended to be a machine of its own */
    int fabric;       /* tide_fabric */
    int calls;        /* rounds of gathers and reduce-scatters */
    int caller;       /* the caller's stream: 0 one of its own, 1 the legacy one, 2 the thread's */
    tide_options options;
    int (*act)(gpu_job *j, uint32_t rank, gpu *g, small_layer *layers, tide_group **groups); /* NULL: rounds */
    const cuda_driver *driver;
    int status[GPU_MAX_RANKS];  /* what a rank was told */
    char text[GPU_MAX_RANKS][512];
    tide_failure failure[GPU_MAX_RANKS];
    int wrong[GPU_MAX_RANKS];   /* wrong bytes: never right */
    char path[GPU_MAX_RANKS][64], reason[GPU_MAX_RANKS][512]; /* of the first group; "": there was none */
    tide_comm *comm[GPU_MAX_RANKS];
    gpu gpus[GPU_MAX_RANKS];
};

/* Two rounds, a deadline of 20 s, on the CUDA fabric. */
gpu_job gpu_job_of(uint32_t n_ranks, uint32_t node_size);
/* The ranks on a driver that has been started; GPUs are dealt out rank by rank, on the NCCL fabric node by node. */
int gpu_ranks_run(gpu_job *j, const cuda_driver *driver);
/* What the ranks' programs had. Freeing memory waits for the whole GPU. */
void gpu_ranks_close(gpu_job *j);

/* For `act`. Keeps the first thing that a rank was told; returns its status. */
int gpu_tell(gpu_job *j, uint32_t rank, int status);
int gpu_adopt(gpu *g, const small_layer *s, tide_group *group);
/* All layers are gathered and scattered, several calls under way at once, then looked at. */
int gpu_round(gpu_job *j, uint32_t rank, gpu *g, small_layer *layers, tide_group **groups, int call);
/* Gathers one adopted layer and waits for all of it. */
int gpu_gather(tide_comm *comm, tide_group *group, void *stream);

#endif
