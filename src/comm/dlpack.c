/* dlpack.c - arena memory as DLPack tensors that hold the arena. */
#include "comm/comm.h"
#include "comm/dlpack.h"

typedef struct held_tensor {
    DLManagedTensor managed;
    int64_t shape[1];
    engine_view *view;
} held_tensor;

/* Any thread, with or without the communicator, also while the process exits. A forked child owns no arena: the view is
 * the parent's, and its lock may have been held at the fork. */
static void delete_held(DLManagedTensor *self)
{
    held_tensor *held = self->manager_ctx;
    if (!atomic_load_explicit(&fab_forked_flag, memory_order_relaxed))
        engine_view_drop(held->view);
    tide_free(held);
}

static DLDataType dlpack_dtype(int dtype)
{
    switch (dtype) {
    case TIDE_F32:
        return (DLDataType){DLPACK_FLOAT, 32, 1};
    case TIDE_F16:
        return (DLDataType){DLPACK_FLOAT, 16, 1};
    case TIDE_BF16:
        return (DLDataType){DLPACK_BFLOAT, 16, 1};
    default:
        return (DLDataType){DLPACK_UINT, 8, 1};
    }
}

int tide_group_dlpack(tide_group *group, int kind, uint32_t index, void **out)
{
    tide_tensor tensor = {.size = sizeof tensor};
    const tide_comm *comm;
    held_tensor *held;
    int status;

    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected a place for a DLManagedTensor pointer");
    status = tide_group_tensor(group, kind, index, &tensor);
    if (status != TIDE_OK)
        return status;
    held = tide_calloc(1, sizeof *held);
    if (!held)
        return TIDE_ERR_MEMORY;
    held->view = engine_view_take(group->set->engine);
    if (!held->view) {
        tide_free(held);
        return TIDE_ERR_MEMORY;
    }
    comm = group->set->comm;
    held->shape[0] = (int64_t)(tensor.dtype == TIDE_OPAQUE ? tensor.bytes : tensor.bytes / tensor.item_size);
    held->managed.dl_tensor = (DLTensor){.data = tensor.data,
                                         .device = comm->fabric != TIDE_FABRIC_HOST
                                                       ? (DLDevice){DLPACK_CUDA, comm->open.device}
                                                       : (DLDevice){DLPACK_CPU, 0},
                                         .ndim = 1,
                                         .dtype = dlpack_dtype(tensor.dtype),
                                         .shape = held->shape};
    held->managed.manager_ctx = held;
    held->managed.deleter = delete_held;
    *out = &held->managed;
    return TIDE_OK;
}
