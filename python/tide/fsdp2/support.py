"""What keeps a parameter group on stock FSDP2: one sentence, or None. docs/support.md has a row, and a test, for each
of them."""

import functools
import inspect
import os

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as param_module
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module
from torch.distributed.fsdp._fully_shard._fsdp_api import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from tide import _lib

DTYPES = {torch.float32: _lib.F32, torch.bfloat16: _lib.BF16, torch.float16: _lib.F16}

# Read when this module is imported, before anything of TIDE replaces them.
STOCK = {
    name: getattr(group_module, name)
    for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
}
STOCK["foreach_reduce_scatter_copy_in"] = getattr(collectives, "foreach_reduce_scatter_copy_in", None)

SIGNATURES = {
    "foreach_all_gather": "fsdp_params group async_op all_gather_copy_in_stream all_gather_stream device "
    "all_gather_comm",
    "foreach_all_gather_copy_out": "all_gather_result fsdp_params group",
    "foreach_reduce": "fsdp_params unsharded_grads reduce_scatter_group reduce_scatter_stream reduce_scatter_comm "
    "orig_dtype reduce_dtype device gradient_divide_factor all_reduce_group all_reduce_stream all_reduce_grads "
    "partial_reduce_output all_reduce_hook force_sum_reduction_for_comms",
    "foreach_reduce_scatter_copy_in": "unsharded_grads reduce_scatter_input world_size",
}
_METHODS = {
    param_module.FSDPParam: (
        "init_all_gather_outputs",
        "alloc_all_gather_outputs",
        "free_unsharded_param",
        "init_unsharded_param",
        "reset_sharded_param",
        "to_sharded_dtensor",
    ),
    group_module.FSDPParamGroup: (
        "_to_sharded",
        "finalize_backward",
        "post_backward",
        "unshard",
        "wait_for_unshard",
        "reshard",
    ),
}


def signature_of(function):
    return " ".join(inspect.signature(function).parameters)


@functools.cache
def torch_reason():
    """Why this torch's FSDP2 cannot be served at all: TIDE replaces three functions, whose contracts it must know."""
    for name, expected in SIGNATURES.items():
        if STOCK[name] is None:
            return f"torch {torch.__version__}: FSDP2 has no {name}"
        if (found := signature_of(STOCK[name])) != expected:
            return f"torch {torch.__version__}: {name}({found.replace(' ', ', ')}) is not a signature that TIDE knows"
    for cls, methods in _METHODS.items():
        for method in methods:
            if not hasattr(cls, method):
                return f"torch {torch.__version__}: {cls.__name__} has no {method}"
    return None


def groups_of(state):
    """The parameter groups of an FSDPState; up to torch 2.11 there is at most one."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def gather_dtype(group, fsdp_param):
    """Dtype of the unsharded parameter, as FSDPParam.init_dtype_attrs will decide at the first forward."""
    own = fsdp_param.sharded_param.dtype
    cast = group.mp_policy.param_dtype
    return cast if cast is not None and own.is_floating_point else own


def reduce_dtype(group, grad_dtype):
    policy = group.mp_policy
    return (
        grad_dtype if policy.reduce_dtype is None or policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
    )


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _cuda_has_started():
    """Whether this process has a context on any GPU: torch.cuda.set_device alone makes one."""
    if torch.cuda.is_initialized():
        return True
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    try:
        return has_context is not None and any(has_context(i) for i in range(torch.cuda.device_count()))
    except RuntimeError:  # the driver has not even been asked to start
        return False


def ask_for_connections():
    """CUDA reads the variable when it starts. Unset, it gives 8 hardware queues, and a stream that waits for a peer
    holds up whatever shares its queue. Returns why it is too late; None when it is not."""
    if CONNECTIONS in os.environ:
        return None
    if _cuda_has_started():
        return f"{CONNECTIONS} is unset and CUDA has started: set it to 32, or import tide.fsdp2 before CUDA is used"
    os.environ[CONNECTIONS] = "32"
    return None


_too_late = ask_for_connections()


def device_reason(kind):
    """What keeps this kind of device from a fabric, seen without opening it. Comm creation has the rest: no peer access,
    too few hardware queues."""
    if kind not in ("cpu", "cuda"):
        return f"device {kind}: there is a fabric for cpu and for cuda"
    if kind == "cuda" and torch.version.cuda is None:
        return "device cuda of a torch built without CUDA"
    return _too_late if kind == "cuda" else None


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def group_reason(group):
    """Why this FSDPParamGroup stays on stock FSDP2, seen from this rank alone."""
    if reason := torch_reason():
        return reason
    mesh_info = group.mesh_info
    if not isinstance(mesh_info, FSDPMeshInfo):
        return "replicated parameters: there is no shard group"
    if mesh_info.shard_mesh_size == 1:
        return "shard size 1: nothing to communicate"
    offload = isinstance(group.offload_policy, CPUOffloadPolicy)
    if offload and (group.device.type != "cpu" or group.offload_policy.pin_memory):
        return f"CPU offload on an accelerator ({group.device.type})"
    if reason := device_reason(group.device.type):
        return reason
    if group._use_post_forward_mesh:
        size = group.post_forward_mesh_info.shard_mesh_size
        return f"reshard_after_forward={size}: resharding to a smaller mesh is not built"
    for role in ("all_gather", "reduce_scatter"):
        comm, default = getattr(group, f"_{role}_comm"), getattr(collectives, "Default" + role.title().replace("_", ""))
        if type(comm) is not default:
            return f"custom {role}: {type(comm).__name__}"
    if len(group.fsdp_params) > _lib.MAX_PARAMS:
        return f"{len(group.fsdp_params)} parameters, at most {_lib.MAX_PARAMS}"
    for p in group.fsdp_params:
        name, local = p._module_info.param_name, p._sharded_local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            return f"{name}: tensor extension {type(local).__name__} (fsdp_pre_all_gather)"
        if type(local) is not torch.Tensor:
            return f"{name}: tensor subclass {type(local).__name__}"
        if getattr(p.mesh_info, "is_spmd_mesh", False):
            return f"{name}: a DTensor on an SPMD mesh (dp_mesh_dims)"
        if p._orig_size.numel() == 0:
            return f"{name}: no elements"
        if len(p._orig_size) > _lib.MAX_DIMS:
            return f"{name}: {len(p._orig_size)} dimensions, at most {_lib.MAX_DIMS}"
    gathered = sorted({_name(gather_dtype(group, p)) for p in group.fsdp_params})
    shards = sorted({_name(p.sharded_param.dtype) for p in group.fsdp_params})
    if len(gathered) > 1 or len(shards) > 1:
        return f"several dtypes in a group: {', '.join(gathered if len(gathered) > 1 else shards)}"
    for dtype in {gather_dtype(group, group.fsdp_params[0]), group.fsdp_params[0].sharded_param.dtype}:
        if dtype not in DTYPES:
            return f"dtype {_name(dtype)}: TIDE adds float32, bfloat16 and float16"
    reduced = reduce_dtype(group, gather_dtype(group, group.fsdp_params[0]))
    if reduced not in (torch.float32, torch.bfloat16):
        return f"reduce dtype {_name(reduced)}: stock FSDP2 divides before and after, in {_name(reduced)}"
    return None
