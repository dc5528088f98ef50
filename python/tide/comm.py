"""Communicators and groups: thin objects over the C calls of the same names. No torch here; addresses are integers.

    comm = Comm(rank, size, allgather=exchange, node_size=2, options={"k": 2})
    groups = comm.create_groups([GroupSpec("block", [ParamSpec("w", (128, 64))], dtype=BF16)])
    groups[0].adopt(0, address, n_bytes)
    groups[0].all_gather(); groups[0].wait(READY)

`stream` is a CUstream as an integer on the CUDA and NCCL fabrics (0: the default stream); on the host fabric it is the calling
thread, and None. What each call demands of its caller (collective, local, what must stay alive until when) is written
in include/tide/tide.h.
"""

import ctypes
import os
from ctypes import byref, c_void_p
from dataclasses import dataclass, field

from tide import _lib
from tide._lib import (
    BF16,
    DONE,
    F16,
    F32,
    FABRIC_CUDA,
    FABRIC_HOST,
    FABRIC_NCCL,
    INPUT_ADOPTED,
    INPUT_ARGUMENT,
    LANDING_PRIVATE,
    LANDING_RING,
    NONE,
    OPAQUE,
    READ_DONE,
    READY,
    TENSOR_PARAM,
    TENSOR_SHARD,
    TideError,
    lib,
)

__all__ = [
    "BF16",
    "DONE",
    "F16",
    "F32",
    "FABRIC_CUDA",
    "FABRIC_HOST",
    "FABRIC_NCCL",
    "INPUT_ADOPTED",
    "INPUT_ARGUMENT",
    "LANDING_PRIVATE",
    "LANDING_RING",
    "NONE",
    "OPAQUE",
    "READ_DONE",
    "READY",
    "TENSOR_PARAM",
    "TENSOR_SHARD",
    "Bootstrap",
    "Comm",
    "Group",
    "GroupSpec",
    "ParamSpec",
    "TideError",
    "make_options",
]


@dataclass
class ParamSpec:
    name: str
    dims: tuple
    shard_dim: int = 0


@dataclass
class GroupSpec:
    name: str
    params: list = field(default_factory=list)
    dtype: int = BF16
    shard_dtype: int = None  # None: that of the parameters
    grad_dtype: int = None
    input: int = INPUT_ADOPTED
    landing: int = LANDING_RING
    item_size: int = 0  # of OPAQUE items


def make_options(knobs):
    """tide_options from {name: value}; a bad name or value is a TideError that names the bounds."""
    options = _lib.Options()
    for name, value in (knobs or {}).items():
        _check(lib.tide_options_set(byref(options), str(name).encode(), _fitting(name, value, ctypes.c_int64)))
    return options


def _fitting(what, value, kind):
    """The number, when the C type holds it: ctypes would cut it to the bits that fit."""
    value = int(value)
    if kind(value).value != value:
        raise TideError(f"{what}: {value} does not fit into {kind.__name__}", _lib.code_of("TIDE_ERR_ARGUMENT"))
    return value


def _check(status):
    if status != 0:
        raise TideError(lib.tide_last_error().decode(errors="replace"), status)


class Bootstrap:
    """The library's own exchange between ranks of one machine: pass it as a Comm's `allgather`."""

    def __init__(self, path, rank, size, timeout_ms=60000):
        self._handle = c_void_p()
        _check(lib.tide_bootstrap_local(path.encode(), rank, size, timeout_ms, byref(self._handle)))
        self.callback = ctypes.cast(lib.tide_bootstrap_allgather, _lib.ALLGATHER)
        self.context = self._handle

    def close(self):
        lib.tide_bootstrap_destroy(self._handle)
        self._handle = self.context = c_void_p()


class Comm:
    """One communicator. `allgather`: a Bootstrap, or a function bytes -> the bytes of all ranks in rank order."""

    def __init__(self, rank, size, allgather, node_size=0, options=None, fabric=_lib.FABRIC_HOST, device=0):
        self._handle = c_void_p()
        self._pid = os.getpid()
        self._error = None  # what the exchange raised, to be raised again once the C call has returned
        self.groups = []
        if isinstance(allgather, Bootstrap):
            self._callback, context = allgather.callback, allgather.context
        else:
            self._callback, context = _lib.ALLGATHER(self._exchange(allgather, size)), None
        gpus = {} if fabric == _lib.FABRIC_HOST else {"target": 1}  # chunks and CTAs are chosen for what runs the plan
        self._options = make_options({**gpus, **(options or {})})
        desc = _lib.CommDesc(
            rank=rank,
            n_ranks=size,
            node_size=node_size,
            fabric=fabric,
            device=device,
            allgather=self._callback,
            allgather_context=context,
            options=ctypes.pointer(self._options),
        )
        self._collective(lib.tide_comm_create(byref(desc), byref(self._handle)))

    def _exchange(self, allgather, size):
        def exchange(_context, given, out, n_bytes):
            try:
                result = allgather(ctypes.string_at(given, n_bytes))
                if len(result) != n_bytes * size:
                    raise ValueError(f"allgather returned {len(result)} bytes, expected {size} x {n_bytes}")
                ctypes.memmove(out, result, len(result))
                return 0
            except BaseException as error:  # a C frame is between here and the caller
                self._error = error
                return 1

        return exchange

    def _collective(self, status):
        error, self._error = self._error, None
        if error is not None:
            raise error
        _check(status)

    def check(self, status, *doing):
        """Raises the TideError of a failed call, with rank, peer, phase and call when the communicator has failed."""
        if status == 0:
            return
        where = "".join(f"{words}: " for words in doing)
        text = lib.tide_last_error().decode(errors="replace")
        failure = _lib.Failure()
        if self._handle and lib.tide_comm_check(self._handle, byref(failure)) != 0 and failure.code == status:
            raise TideError(
                where + failure.text.decode(errors="replace"),
                failure.code,
                failure.rank,
                failure.peer,
                failure.phase.decode(errors="replace"),
                failure.call,
            )
        raise TideError(where + text, status)

    @property
    def failed(self):
        return lib.tide_comm_check(self._handle, None) != 0

    @property
    def info(self):
        info = _lib.CommInfo()
        self.check(lib.tide_comm_get_info(self._handle, byref(info)))
        return info

    def create_groups(self, specs):
        """C  All or none."""
        keep, descs = [], (_lib.GroupDesc * len(specs))()
        for desc, spec in zip(descs, specs):
            params = (_lib.Param * len(spec.params))()
            for param, p in zip(params, spec.params):
                if len(p.dims) > _lib.MAX_DIMS:
                    raise TideError(
                        f"{spec.name}.{p.name}: {len(p.dims)} dimensions, at most {_lib.MAX_DIMS}",
                        _lib.code_of("TIDE_ERR_ARGUMENT"),
                    )
                where = f"{spec.name}.{p.name}"
                param.name, param.ndim = p.name.encode(), len(p.dims)
                param.shard_dim = _fitting(f"{where} shard_dim", p.shard_dim, ctypes.c_int)
                param.dims[: len(p.dims)] = [_fitting(f"{where} dims", d, ctypes.c_int64) for d in p.dims]
            keep.append(params)
            desc.size, desc.name = ctypes.sizeof(_lib.GroupDesc), spec.name.encode()
            desc.n_params, desc.params = len(params), params
            dtypes = {"dtype": spec.dtype, "shard_dtype": spec.shard_dtype, "grad_dtype": spec.grad_dtype}
            for what, value in dtypes.items():
                value = spec.dtype if value is None else value
                setattr(desc, what, _fitting(f"{spec.name} {what}", value, ctypes.c_int))
            desc.item_size = _fitting(f"{spec.name} item_size", spec.item_size, ctypes.c_uint32)
            desc.input = _fitting(f"{spec.name} input", spec.input, ctypes.c_int)
            desc.landing = _fitting(f"{spec.name} landing", spec.landing, ctypes.c_int)
        handles = (c_void_p * len(specs))()
        self._collective(lib.tide_groups_create(self._handle, descs, len(specs), handles))
        made = [Group(self, handle, spec) for handle, spec in zip(handles, specs)]
        self.groups += made
        return made

    def sync(self):
        self.check(lib.tide_comm_sync(self._handle), "sync")

    def abort(self):
        self.check(lib.tide_comm_abort(self._handle), "abort")

    def destroy(self):
        """C  unless the communicator has failed. Nothing happens in a forked child or at a second call."""
        if self._handle and os.getpid() == self._pid:
            handle, self._handle = self._handle, c_void_p()
            self._collective(lib.tide_comm_destroy(handle))


class Group:
    """One parameter group. Handles belong to the communicator."""

    def __init__(self, comm, handle, spec):
        self.comm, self.spec, self.n_params = comm, spec, len(spec.params)
        self._handle = c_void_p(handle)
        self._shards = (c_void_p * self.n_params)()
        self._args = _lib.ReduceScatterArgs()
        self._grads = (c_void_p * self.n_params)()
        self._args.grads = self._grads

    def tensor(self, kind, index):
        """(address, bytes) of an unsharded parameter (TENSOR_PARAM) or of an adopted shard (TENSOR_SHARD)."""
        tensor = _lib.Tensor()
        self.comm.check(lib.tide_group_tensor(self._handle, kind, index, byref(tensor)))
        return tensor.data, tensor.bytes

    def dlpack(self, kind, index):
        """A PyCapsule "dltensor": the memory as a 1-D tensor of its own, which keeps the arena alive."""
        managed = c_void_p()
        self.comm.check(lib.tide_group_dlpack(self._handle, kind, index, byref(managed)))
        return _capsule_new(managed, _CAPSULE_NAME, None)

    def adopt(self, index, address, n_bytes, stream=None):
        self.comm.check(
            lib.tide_shard_adopt(self._handle, index, address, n_bytes, stream), self.spec.name, "shard_adopt"
        )

    def all_gather(self, shards=None, stream=None):
        """E  shards: addresses of the padded shards for INPUT_ARGUMENT."""
        if shards is not None:
            self._shards[:] = shards
        self.comm.check(
            lib.tide_all_gather(self._handle, None if shards is None else self._shards, stream),
            self.spec.name,
            "all_gather",
        )

    def release(self, stream=None):
        self.comm.check(lib.tide_slot_release(self._handle, stream), self.spec.name, "slot_release")

    def _fill(self, grads, out, dtype, alpha, accumulate, mode):
        self._grads[:] = grads
        args = self._args
        args.out, args.grad_dtype, args.alpha, args.accumulate, args.mode = out, dtype, alpha, accumulate, mode
        return byref(args)

    def reduce_scatter(self, grads, out, dtype, alpha=1.0, accumulate=0, mode=0, stream=None):
        """E  grads: an address a parameter, None where it has no gradient."""
        args = self._fill(grads, out, dtype, alpha, accumulate, mode)
        self.comm.check(lib.tide_reduce_scatter(self._handle, args, stream), self.spec.name, "reduce_scatter")

    def stash(self, grads, dtype, stream=None):
        args = self._fill(grads, None, dtype, 1.0, 0, 1)
        self.comm.check(lib.tide_grads_stash(self._handle, args, stream), self.spec.name, "grads_stash")

    def output_elements(self, present=None):
        flags = None if present is None else (ctypes.c_uint8 * self.n_params)(*present)
        elements = ctypes.c_uint64()
        self.comm.check(lib.tide_group_output_elements(self._handle, flags, byref(elements)))
        return elements.value

    def wait(self, event, stream=None):
        self.comm.check(
            lib.tide_wait(self._handle, event, stream),
            self.spec.name,
            ("all_gather", "reduce_scatter reads", "reduce_scatter")[event],
        )

    @property
    def path(self):
        path = _lib.GroupPath()
        self.comm.check(lib.tide_group_get_path(self._handle, byref(path)))
        return path


_CAPSULE_NAME = ctypes.c_char_p(b"dltensor")  # the capsule keeps a pointer to it
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]
_capsule_new.restype = ctypes.py_object
