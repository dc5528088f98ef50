"""check_every=n: a group's n-th, 2n-th, ... call is done once more with stock FSDP2 code and compared.

A difference aborts the communicator, so that every rank stops, and names group, parameter and place.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from tide._lib import TideError, code_of
from tide.fsdp2 import support

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fail(binding, text):
    binding.group.comm.abort()
    raise TideError(f"check_every: {binding.name}: {text}", code_of("TIDE_ERR_INTERNAL"))


@torch.no_grad()
def all_gather(binding):
    """The landings, bit for bit."""
    g, params, n = binding.param_group, binding.params, binding.ranks
    stream = g.device_handle.current_stream()
    result = support.STOCK["foreach_all_gather"](
        params, g._all_gather_process_group, False, stream, stream, g.device, DefaultAllGather()
    )
    ranks = result.all_gather_output.view(n, -1)
    offset = 0
    for p, landing in zip(params, binding.landings):
        pieces = ranks.narrow(1, offset, landing.numel() // n)
        offset += landing.numel() // n
        dim = p.fsdp_placement.dim
        expected = (
            pieces.reshape(-1)
            if dim == 0
            else torch.cat([piece.view(p.padded_sharded_param_size) for piece in pieces], dim).reshape(-1)
        )
        bits = _BITS[landing.element_size()]
        if not torch.equal(landing.view(bits), expected.view(bits)):
            where = (landing.view(bits) != expected.view(bits)).nonzero()[0].item()
            _fail(
                binding,
                f"all_gather call {binding.counters.all_gathers}: {p._module_info.param_name}[{where}] is "
                f"{landing[where].item()}, stock has {expected[where].item()}",
            )


@torch.no_grad()
def reduce_scatter(binding, fsdp_params, grads, out, alpha, group):
    """The fp32 output, within 1e-5 of the packed stock sum relative to its largest element: the order of addition
    differs."""
    n = binding.ranks
    packed = []
    for p, grad in zip(fsdp_params, grads):
        dim = p.fsdp_placement.dim
        packed.append(torch.cat(torch.chunk(grad, n, dim), 0) if dim else grad)
    given = torch.empty(out.numel() * n, dtype=torch.float32, device=out.device)
    support.STOCK["foreach_reduce_scatter_copy_in"](packed, given, n)
    expected = torch.empty_like(out)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(expected, given, op=dist.ReduceOp.SUM, group=group)
    expected *= alpha
    finite = expected[expected.isfinite()]
    bound = 1e-5 * max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
    bad = ~torch.isclose(out, expected, rtol=0.0, atol=bound, equal_nan=True)
    if bad.any():
        where = bad.nonzero()[0].item()
        _fail(
            binding,
            f"reduce_scatter call {binding.counters.reduce_scatters}: output[{where}] is {out[where].item()}, "
            f"stock has {expected[where].item()}, allowed difference {bound:.3g}",
        )
