"""One FSDPParamGroup on TIDE: its tensors over the arena, its shards, its calls.

unshard          all_gather   tide_all_gather, behind the library's own streams; prefetch just calls it earlier
wait_for_unshard wait         tide_wait(READY); the parameters are already at their address, nothing is copied out
reshard          release      tide_slot_release
post_backward    reduce       stock foreach_reduce around tide_reduce_scatter, which reads the gradients in place

Streams, on CUDA. Each call is made on the stream that FSDP2 uses for the same thing, so that what FSDP2 orders for its
own collectives (the optimizer before the first all-gather, set_post_optim_event) holds for ours:

all_gather       FSDP2's all-gather stream: it waits for the optimizer, not for the layer that is computing
wait, release    the stream that computes
stash            the stream that computes: the gradients' memory is its own, and may be freed when the call returns
reduce_scatter   FSDP2's reduce-scatter stream, which has waited for the gradients; the output is allocated there

In-Place gradients live until FSDP2's next post_backward on the computing stream, which waits for READ_DONE before it
lets them go: they take the place of stock's reduce-scatter input. On the host a stream is the calling thread.
"""

import contextlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import Shard

from tide import comm as tide_comm
from tide._lib import TideError, code_of
from tide.fsdp2 import check, support

STATE = code_of("TIDE_ERR_STATE")


@dataclass
class Counters:
    """Sums since installation; `stats()` gives them and their growth over the last step."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    # The host's time: on CUDA nothing waits in them.
    wait_gather_s: float = 0.0  # in tide_wait(READY)
    reduce_s: float = 0.0  # in tide_reduce_scatter and tide_wait(DONE)
    cast_bytes: int = 0  # shards that were cast on their way out
    copy_bytes: int = 0  # gradients that were not contiguous, bf16 outputs: what TIDE copies besides
    reused: int = 0  # all-gathers of a backward that the forward's served as well
    adopted: int = 0  # shards moved into the arena
    checks: int = 0  # comparisons with stock results

    def __sub__(self, other):
        return Counters(**{name: value - getattr(other, name) for name, value in vars(self).items()})

    def __add__(self, other):
        return Counters(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Stock:
    """A group that stays on stock FSDP2: only its calls are counted."""

    on_tide = False

    def __init__(self, name, reason):
        self.name, self.reason, self.counters = name, reason, Counters()


class Slot:
    """A landing, and whose gathered parameters it still holds though they have been resharded."""

    keeper = None


class Binding:
    on_tide = True

    def __init__(self, name, param_group, group, spec, private, check_every, mode, slot, lasting):
        self.name, self.param_group, self.params = name, param_group, param_group.fsdp_params
        self.group, self.spec, self.private = group, spec, private
        self.device, self.on_cuda = param_group.device, param_group.device.type == "cuda"
        self.check_every, self.mode = check_every, mode
        self.slot, self.lasting = slot, lasting
        self.resharded = self.gathered_from = None  # where the computing stream was; shards and versions
        self.counters = Counters()
        self.ranks = param_group.mesh_info.shard_mesh_size
        self.dtype = support.gather_dtype(param_group, self.params[0])
        self.shard_dtype = self.params[0].sharded_param.dtype
        self.adopts = spec.input == tide_comm.INPUT_ADOPTED
        self.held = self.ready = False
        self.in_call = None  # shards that a running all-gather reads
        self.shards = [None] * len(self.params)  # what we know to be in the arena
        self.landings = [self._tensor(tide_comm.TENSOR_PARAM, i) for i in range(len(self.params))]
        self.placeholder = torch.empty(0, dtype=self.dtype)
        self._attach()

    def _tensor(self, kind, index):
        """Torch's view of arena memory: a storage of its own that begins at offset 0 and cannot be resized."""
        return torch.utils.dlpack.from_dlpack(self.group.dlpack(kind, index))

    def stream(self):
        """The current stream as the library takes it."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.on_cuda else None

    # ---- putting ourselves between FSDP2 and its storages ------------------------------------------------------------

    def _attach(self):
        for index, (p, landing) in enumerate(zip(self.params, self.landings)):
            p._tide = (self, index)
            p.all_gather_outputs = [landing]  # init_all_gather_outputs then has nothing to do
            p.alloc_all_gather_outputs = p.free_unsharded_param = _nothing
            p.__dict__.pop("_unsharded_param", None)  # built again over the landing at the next unshard
        g = self.param_group
        g._to_sharded = self._to_sharded
        g.finalize_backward = self._finalize_backward
        if self.mode == 1:
            g.post_backward = self._post_backward

    def detach(self):
        """Stock FSDP2 again, with shards of its own. The communicator is not touched."""
        g = self.param_group
        for name in ("_to_sharded", "finalize_backward", "post_backward"):
            g.__dict__.pop(name, None)
        for p in self.params:
            for name in ("_tide", "alloc_all_gather_outputs", "free_unsharded_param", "_unsharded_param"):
                p.__dict__.pop(name, None)
            p.all_gather_outputs, p.unsharded_accumulated_grad = [], None
        if self.adopts:
            for p, shard in zip(self.params, self.shards):
                if shard is not None and p._sharded_param_data is shard:
                    _point_at(p, shard.clone())
        self.shards, self.landings = [None] * len(self.params), []

    def busy(self):
        """Why this group cannot be detached now."""
        for p in self.params:
            unsharded = getattr(p, "_unsharded_param", None)
            if p.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
                return f"{self.name}: {p._module_info.param_name} holds a gradient that has not been reduced"
        return None

    # ---- all-gather --------------------------------------------------------------------------------------------------

    def adopt(self):
        """Moves shards into the arena that are not there: at first, and after load_state_dict(assign=True) or
        Module._apply. On the current stream, whose memory the old ones are; says whether there were any."""
        before = self.counters.adopted
        for index, p in enumerate(self.params):
            data = p._sharded_param_data
            if data is self.shards[index] or data.is_meta:
                continue
            self._expect(p, data)
            shard = self._tensor(tide_comm.TENSOR_SHARD, index)
            self.group.adopt(index, data.data_ptr(), data.numel() * data.element_size(), self.stream())
            _point_at(p, shard)
            self.shards[index] = shard
            self.counters.adopted += 1
        return self.counters.adopted > before

    def _expect(self, p, data):
        if data.dtype != self.shard_dtype or data.numel() * self.ranks != self.landings[p._tide[1]].numel():
            raise TideError(
                f"{self.name}.{p._module_info.param_name}: its shard is now {data.numel()} x {data.dtype}, it was "
                f"{self.landings[p._tide[1]].numel() // self.ranks} x {self.shard_dtype} at installation: uninstall, "
                "then install again",
                STATE,
            )

    def all_gather(self, all_gather_stream):
        """all_gather_stream: FSDP2's choice for this call (the current one for unshard(async_op=True))."""
        with _range("all_gather", self.name, self.counters.all_gathers):
            return self._all_gather(all_gather_stream)

    # A landing that nobody else needs before the group's backward keeps what was gathered for the forward (`lasting`): the
    # reshard is noted, and the library is told of it only when another group comes for the landing after all, or the
    # same one with other weights.

    def _weights(self):
        """Which shards, and how often each has been written: a DTensor, its local tensor and that one's base count apart."""
        return [
            (id(data), data._version, p.sharded_param._version, p.sharded_param._local_tensor._version)
            for p, data in ((p, p._sharded_param_data) for p in self.params)
        ]

    def _keep(self):
        self.slot.keeper = self
        if self.on_cuda:
            self.resharded = torch.cuda.current_stream(self.device).record_event()

    def _give_back(self, all_gather_stream):
        self.slot.keeper, self.held = None, False
        if self.on_cuda:
            all_gather_stream.wait_event(self.resharded)
        self.group.release(all_gather_stream.cuda_stream if self.on_cuda else None)

    def _all_gather(self, all_gather_stream):
        keeper = self.slot.keeper
        if keeper is self:
            backward = self.param_group._training_state == TrainingState.PRE_BACKWARD
            if backward and self.gathered_from == self._weights():
                self.slot.keeper, self.ready = None, False
                self.counters.reused += 1
                return _gathered(self.placeholder)
        if keeper is not None:
            keeper._give_back(all_gather_stream)
        if self.lasting:
            self.gathered_from = self._weights()
        stream = all_gather_stream.cuda_stream if self.on_cuda else None
        if self.adopts:
            if self.adopt() and self.on_cuda:
                all_gather_stream.wait_stream(torch.cuda.current_stream(self.device))
            self._gather(stream)
        else:
            self.in_call = [p._sharded_param_data for p in self.params]
            for p, data in zip(self.params, self.in_call):
                if data.dtype != self.shard_dtype:
                    self._expect(p, data)
            self._gather(stream, [data.data_ptr() for data in self.in_call])
            if self.shard_dtype != self.dtype:
                self.counters.cast_bytes += sum(data.numel() for data in self.in_call) * self.dtype.itemsize
        self.held, self.ready = True, False
        self.counters.all_gathers += 1
        return _gathered(self.placeholder)

    def _gather(self, stream, shards=None):
        try:
            self.group.all_gather(shards, stream)
        except TideError as error:
            if error.code == STATE:
                error.args = (
                    f"{error} [{self.name} was gathered while another module still held its landing; name one of the "
                    "two in install(private=[...]), or give the ring more slots: install(options={'ring_slots': n})]",
                )
            raise

    def wait(self):
        start = time.perf_counter()
        with _range("all_gather wait", self.name, self.counters.all_gathers):
            self.group.wait(tide_comm.READY, self.stream())
        self.counters.wait_gather_s += time.perf_counter() - start
        self.ready, self.in_call = True, None
        if self.check_every and self.counters.all_gathers % self.check_every == 0:
            self.counters.checks += 1
            check.all_gather(self)

    def release(self):
        if self.held:
            keeping = self.slot.keeper is self
            if self.lasting and self.ready and not keeping:
                if self.param_group._training_state == TrainingState.FORWARD:
                    self._keep()
                    return
            if keeping:
                self.slot.keeper = None
            stream = self.stream()
            if not self.ready:  # a prefetch that nobody used: peers may still be writing
                self.group.wait(tide_comm.READY, stream)
            self.held, self.in_call = False, None
            with _range("slot_release", self.name, self.counters.all_gathers):
                self.group.release(stream)

    def _to_sharded(self):
        g = self.param_group
        type(g)._to_sharded(g)
        stashing = self.mode == 1 and g._training_state == TrainingState.POST_BACKWARD and g.reduce_grads
        if g._all_gather_result is None and not stashing:  # else a gather is still to be waited for
            self.release()

    def _finalize_backward(self):
        g = self.param_group
        type(g).finalize_backward(g)
        if g.is_sharded and g._all_gather_result is None:
            self.release()

    def _post_backward(self, *unused):
        g = self.param_group
        type(g).post_backward(g, *unused)
        if g.is_sharded and g._all_gather_result is None:  # Slot-Reuse without a gradient to reduce
            self.release()

    # ---- reduce-scatter ----------------------------------------------------------------------------------------------

    def reduce(self, fsdp_params, unsharded_grads, args, kwargs):
        """Stock foreach_reduce with our communication in it: divide factors, HSDP's all-reduce, hooks, views and
        accumulation stay FSDP2's own; packing and the reduce-scatter are ours."""
        given = dict(zip(_REDUCE_ARGUMENTS, args), **kwargs)
        comm = _ReduceScatter(self, fsdp_params, list(unsharded_grads), given["gradient_divide_factor"])
        unsharded_grads.clear()
        comm.prepare()
        result = comm.run(given)
        if not self.on_cuda:
            return result
        # (reduce_scatter_input, reduce_scatter_event, ...): what FSDP2 keeps, and what it waits for before it lets go
        return ((result[0], comm.grads), comm.read_done or result[1], *result[2:])


_REDUCE_ARGUMENTS = support.SIGNATURES["foreach_reduce"].split()[2:]


class _ReduceScatter(ReduceScatter):
    """The Comm that stock foreach_reduce meets in one call. Its input is a placeholder that nothing is written to."""

    current = None  # whose placeholder the next copy-in is for

    def __init__(self, binding, fsdp_params, grads, factor):
        self.binding, self.fsdp_params, self.grads, self.factor = binding, fsdp_params, grads, factor
        self.placeholder = self.read_done = None
        self.dtype, self.mode = support.DTYPES[grads[0].dtype], 0
        every = binding.check_every
        self.check = bool(every) and (binding.counters.reduce_scatters + 1) % every == 0

    def prepare(self):
        """On the stream of the backward: addresses of the gradients; in Slot-Reuse, their way into the landing."""
        b = self.binding
        self.pointers = [None] * b.group.n_params
        for i, (p, grad) in enumerate(zip(self.fsdp_params, self.grads)):
            if not grad.is_contiguous():
                grad = self.grads[i] = grad.contiguous()
                b.counters.copy_bytes += grad.nbytes
            self.pointers[p._tide[1]] = grad.data_ptr()
        if b.mode == 1 and b.held:
            if self.grads[0].element_size() <= b.dtype.itemsize:
                with _range("grads_stash", b.name, b.counters.reduce_scatters):
                    b.group.stash(self.pointers, self.dtype, b.stream())
                b.held, self.mode = False, 1
            else:
                b.release()

    def run(self, given):
        # Shard(d > 0): stock would chunk and cat the gradient along dim 0 first. It sees a parameter sharded along dim
        # 0 and an empty tensor of the size which that copy would have had.
        params, grads = [], []
        for p, grad in zip(self.fsdp_params, self.grads):
            if (dim := p.fsdp_placement.dim) != 0:
                size = list(grad.size())
                size[0], size[dim] = size[0] * self.binding.ranks, size[dim] // self.binding.ranks
                p, grad = _AlongDim0(p), grad.new_empty(1).expand(size)
            params.append(p)
            grads.append(grad)
        if self.mode == 1 and not self.check:
            grad = self.grads = None  # stashed: stock drops the last references when it has read their sizes
        _ReduceScatter.current = self
        try:
            return support.STOCK["foreach_reduce"](params, grads, **{**given, "reduce_scatter_comm": self})
        finally:
            _ReduceScatter.current = None

    def allocate(self, size, *, dtype, device):
        if self.placeholder is None:
            self.placeholder = torch.empty(1, dtype=dtype, device=device).expand(*size)
            return self.placeholder
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        b, counters = self.binding, self.binding.counters
        start = time.perf_counter()
        out = output_tensor
        if out.dtype != torch.float32:
            out = torch.empty_like(output_tensor, dtype=torch.float32)
            counters.copy_bytes += output_tensor.nbytes
        alpha = 1.0 if op == dist.ReduceOp.SUM else 1.0 / (b.ranks if op == dist.ReduceOp.AVG else self.factor)
        stream = b.stream()  # FSDP2's reduce-scatter stream
        with _range("reduce_scatter", b.name, counters.reduce_scatters):
            b.group.reduce_scatter(
                self.pointers, out.data_ptr(), self.dtype, alpha=alpha, mode=self.mode, stream=stream
            )
        if b.on_cuda and self.mode == 0:
            b.group.wait(tide_comm.READ_DONE, stream)
            self.read_done = torch.cuda.current_stream(b.device).record_event()
        with _range("reduce_scatter wait", b.name, counters.reduce_scatters):
            b.group.wait(tide_comm.DONE, stream)
        counters.reduce_s += time.perf_counter() - start
        counters.reduce_scatters += 1
        if self.check:
            counters.checks += 1
            check.reduce_scatter(b, self.fsdp_params, self.grads, out, alpha, group)
        if out is not output_tensor:
            output_tensor.copy_(out)
        if not b.on_cuda:
            self.grads = None


class _AlongDim0:
    """An FSDPParam of Shard(d > 0) as stock foreach_reduce sees it: everything but the placement is that of the
    parameter."""

    fsdp_placement = Shard(0)

    def __init__(self, fsdp_param):
        self._fsdp_param = fsdp_param

    def __getattr__(self, name):
        return getattr(self._fsdp_param, name)


def copy_in(unsharded_grads, reduce_scatter_input, world_size):
    """Replaces foreach_reduce_scatter_copy_in, which packs: there is nothing to pack for a placeholder."""
    comm = _ReduceScatter.current
    if comm is None or reduce_scatter_input is not comm.placeholder:
        support.STOCK["foreach_reduce_scatter_copy_in"](unsharded_grads, reduce_scatter_input, world_size)


def _range(what, group, calls):
    """A range in profiles (NVTX under torch.autograd.profiler.emit_nvtx); free without a profiler."""
    if not getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"tide::{what} {group} call {calls + 1}")


def _nothing():
    """FSDP2 neither allocates nor frees a landing."""


def _gathered(placeholder):
    """An AllGatherResult that is never waited for through torch: `wait` knows the group."""
    fields = dict.fromkeys(AllGatherResult._fields)
    fields["all_gather_output"] = placeholder
    return AllGatherResult(**fields)


@torch.no_grad()
def _point_at(fsdp_param, data):
    """Makes `data`, 1-D and padded, the sharded parameter's memory, as FSDPParam.reset_sharded_param would."""
    dim = fsdp_param.fsdp_placement.dim
    fsdp_param._sharded_param_data = data
    fsdp_param.sharded_param._local_tensor = data.view(fsdp_param.padded_sharded_param_size).narrow(
        dim, 0, fsdp_param.sharded_size[dim]
    )
