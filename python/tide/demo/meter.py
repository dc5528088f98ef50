"""What FSDP2's communication costs beside the transport, measured in the same way whoever does the work.

CopyMeter   bytes that layout copies and casts write inside FSDP2's three communication functions
BufferMeter most bytes of communication buffers and unsharded parameters alive at once
Audit       gradients against an fp64 reduction of the ranks' own local gradients
"""

import contextlib
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module
from torch.utils._python_dispatch import TorchDispatchMode

from tide.fsdp2.support import groups_of


@contextlib.contextmanager
def _wrapped(module, name, wrap):
    """module.name = wrap(what it was), for a while."""
    before = getattr(module, name)
    setattr(module, name, wrap(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def _written(func, args, kwargs, result):
    """Bytes that one torch operation writes, for the operations that move data; else 0."""
    name = func._schema.name
    if name == "fsdp::all_gather_copy_in":
        return result[0].nbytes
    if name in ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat"):
        out = kwargs["out"]
        return sum(t.nbytes for t in out) if isinstance(out, (list, tuple)) else out.nbytes
    if name == "aten::_foreach_copy_":
        return sum(t.nbytes for t in args[0])
    if name in ("aten::copy_", "aten::cat", "aten::_to_copy", "aten::clone"):
        return result.nbytes
    return 0


class _Counting(TorchDispatchMode):
    def __init__(self, meter):
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.meter.bytes += _written(func, args, kwargs, result)
        return result


class CopyMeter:
    """with CopyMeter() as m: ...; m.bytes"""

    def __init__(self):
        self.bytes = 0

    def __enter__(self):
        def wrap(function):
            def counted(*args, **kwargs):
                with _Counting(self):
                    return function(*args, **kwargs)

            return counted

        self.stack = contextlib.ExitStack()
        for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
            self.stack.enter_context(_wrapped(group_module, name, wrap))
        return self

    def __exit__(self, *_):
        self.stack.close()


class BufferMeter:
    """with BufferMeter(model) as m: ...; m.peak"""

    def __init__(self, model):
        self.groups = [
            g for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in groups_of(m._get_fsdp_state())
        ]
        self.live = self.peak = 0

    def _alive(self, tensor):
        self.live += tensor.nbytes
        weakref.finalize(tensor, self._dead, tensor.nbytes)

    def _dead(self, n_bytes):
        self.live -= n_bytes

    def _sample(self):
        unsharded = sum(
            t.untyped_storage().nbytes() for g in self.groups for p in g.fsdp_params for t in p.all_gather_outputs
        )
        self.peak = max(self.peak, self.live + unsharded)

    def __enter__(self):
        def allocate(function):
            def metered(comm, size, *, dtype, device):
                tensor = function(comm, size, dtype=dtype, device=device)
                self._alive(tensor)
                self._sample()
                return tensor

            return metered

        def copy_in(function):
            def metered(grads, reduce_scatter_input, world_size):
                self._alive(reduce_scatter_input)
                self._sample()
                return function(grads, reduce_scatter_input, world_size)

            return metered

        def copy_out(function):
            def metered(*args, **kwargs):
                result = function(*args, **kwargs)
                self._sample()
                return result

            return metered

        self.stack = contextlib.ExitStack()
        self.stack.enter_context(_wrapped(collectives.DefaultAllGather, "allocate", allocate))
        self.stack.enter_context(_wrapped(collectives, "foreach_reduce_scatter_copy_in", copy_in))
        self.stack.enter_context(_wrapped(group_module, "foreach_all_gather_copy_out", copy_out))
        return self

    def __exit__(self, *_):
        self.stack.close()


class Audit:
    """with Audit(model) as a: forward, backward; a.worst()

    Every gradient that reaches foreach_reduce is kept; `worst` adds those of all ranks in fp64 and compares with the
    sharded gradients that came out: the largest of |got - expected| / max(1, largest |expected|), over all parameters
    and ranks.
    """

    def __init__(self, model):
        self.names = {p: name for name, p in model.named_parameters()}
        self.local = {}  # FSDPParam -> [gradient]

    def __enter__(self):
        def wrap(function):
            def kept(fsdp_params, unsharded_grads, reduce_scatter_group, *args, **kwargs):
                for p, grad in zip(fsdp_params, unsharded_grads):
                    self.local.setdefault(p, []).append(grad.detach().clone())
                return function(fsdp_params, unsharded_grads, reduce_scatter_group, *args, **kwargs)

            return kept

        self.stack = contextlib.ExitStack()
        self.stack.enter_context(_wrapped(group_module, "foreach_reduce", wrap))
        return self

    def __exit__(self, *_):
        self.stack.close()

    def errors(self, divide_by=None):
        """{parameter name: (largest |got - expected| here, largest |expected| anywhere, got, expected)}."""
        result = {}
        for p, grads in self.local.items():
            whole = sum(grad.double() for grad in grads)
            info = p.mesh_info
            dist.all_reduce(whole, group=info.shard_process_group)
            ranks = info.shard_mesh_size
            if getattr(info, "replicate_process_group", None) is not None:
                dist.all_reduce(whole, group=info.replicate_process_group)
                ranks *= info.replicate_mesh_size
            whole /= divide_by or ranks
            dim = p.fsdp_placement.dim
            size = -(-whole.size(dim) // info.shard_mesh_size)
            first = min(info.shard_mesh_rank * size, whole.size(dim))
            expected = whole.narrow(dim, first, min(size, whole.size(dim) - first))
            got = p.sharded_param.grad._local_tensor
            difference = (got.double() - expected).abs()
            result[self.names.get(p.sharded_param, p._module_info.param_name)] = (
                difference.max().item() if difference.numel() else 0.0,
                whole.abs().max().item(),
                got,
                expected,
            )
        return result

    def worst(self, divide_by=None):
        mine = max(
            (error / largest for error, largest, _, _ in self.errors(divide_by).values() if largest), default=0.0
        )
        out = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(out, op=dist.ReduceOp.MAX)
        return out.item()
