/*
 * mpi.c - ranks that mpirun started: MPI_Allgather introduces them to each other, then one all-gather and one
 * reduce-scatter, every element checked.
 *
 *     mpicc mpi.c $(pkg-config --cflags --libs tide) -o mpi
 *     mpirun -n 4 ./mpi [ranks a node]
 *
 * Machines are nodes unless the argument says otherwise. On GPUs set desc.fabric to TIDE_FABRIC_CUDA (one machine; compare
 * tide_host_identity()) or TIDE_FABRIC_NCCL (several) and desc.device to the rank's number on its machine; shards, gradients
 * and outputs are device memory then, and the last argument of the calls is a CUstream.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <tide/tide.h>

enum { ROWS = 10, COLUMNS = 3 };

/* The library calls it in tide_comm_create and tide_groups_create, from the thread that is in them. */
static int introduce(void *context, const void *in, void *out, size_t bytes)
{
    return MPI_Allgather(in, (int)bytes, MPI_BYTE, out, (int)bytes, MPI_BYTE, *(MPI_Comm *)context);
}

static void must(int status, const char *what)
{
    if (status == TIDE_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, tide_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static int run(MPI_Comm world, uint32_t rank, uint32_t ranks, uint32_t node_size)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    const tide_param weight = {"weight", 2, 0, {ROWS, COLUMNS}};
    tide_group_desc layer = TIDE_GROUP_DESC_INIT;
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    tide_group_path path = {.size = sizeof path};
    tide_tensor whole = {.size = sizeof whole};
    tide_comm *comm;
    tide_group *group;
    uint32_t rows = (ROWS + ranks - 1) / ranks, shard = rows * COLUMNS, first = rank * shard; /* the last may own less */
    float *mine = calloc(shard, sizeof *mine), *out = calloc(shard, sizeof *out), grad[ROWS * COLUMNS];
    const void *grads[1] = {grad};
    int wrong = 0;

    desc.rank = rank, desc.n_ranks = ranks, desc.node_size = node_size;
    desc.allgather = introduce, desc.allgather_context = &world;
    must(tide_comm_create(&desc, &comm), "communicator");
    layer.name = "layer", layer.n_params = 1, layer.params = &weight;
    layer.dtype = layer.shard_dtype = layer.grad_dtype = TIDE_F32;
    must(tide_groups_create(comm, &layer, 1, &group), "group");
    must(tide_group_get_path(group, &path), "path");
    if (rank == 0)
        printf("%s: %s\n", path.path, path.reason);

    for (uint32_t i = 0; i < shard && first + i < ROWS * COLUMNS; i++)
        mine[i] = (float)(first + i);
    must(tide_shard_adopt(group, 0, mine, shard * sizeof *mine, NULL), "adopt");
    must(tide_all_gather(group, NULL, NULL), "all_gather");
    must(tide_wait(group, TIDE_READY, NULL), "ready");
    must(tide_group_tensor(group, TIDE_TENSOR_PARAM, 0, &whole), "tensor");
    for (uint32_t i = 0; i < ROWS * COLUMNS; i++) {
        wrong += ((float *)whole.data)[i] != (float)i;
        grad[i] = (float)((rank + 1) * i);
    }
    must(tide_slot_release(group, NULL), "release");

    args.grads = grads, args.out = out, args.grad_dtype = TIDE_F32;
    must(tide_reduce_scatter(group, &args, NULL), "reduce_scatter");
    must(tide_wait(group, TIDE_DONE, NULL), "done");
    for (uint32_t i = 0; i < shard && first + i < ROWS * COLUMNS; i++)
        wrong += out[i] != (float)(ranks * (ranks + 1) / 2 * (first + i));
    must(tide_comm_destroy(comm), "destroy");
    free(mine);
    free(out);
    return wrong;
}

int main(int argc, char **argv)
{
    MPI_Comm world;
    int rank, ranks, wrong, total = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_dup(MPI_COMM_WORLD, &world); /* set-up never meets the program's own messages */
    MPI_Comm_rank(world, &rank);
    MPI_Comm_size(world, &ranks);
    wrong = run(world, (uint32_t)rank, (uint32_t)ranks, argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0);
    MPI_Allreduce(&wrong, &total, 1, MPI_INT, MPI_SUM, world);
    if (rank == 0)
        puts(total ? "mpi: failed" : "mpi: ok");
    MPI_Comm_free(&world);
    MPI_Finalize();
    return total != 0;
}
