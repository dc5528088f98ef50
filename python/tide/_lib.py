"""libtide.so through ctypes: the structs and prototypes of include/tide/tide.h, nothing more.

The library is looked for in $TIDE_LIB (a file), inside the package, and in build/ of the source tree (or $TIDE_BUILD).
Knobs and errors are read from the library's own tables, so that this file cannot disagree with them.
"""

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

MAX_PARAMS, MAX_DIMS, MAX_NODES, MAX_LOCAL = 4096, 8, 1024, 64
F32, BF16, F16, OPAQUE, NONE = range(5)
LANDING_RING, LANDING_PRIVATE = 0, 1
INPUT_ADOPTED, INPUT_ARGUMENT = 0, 1
TENSOR_PARAM, TENSOR_SHARD = 0, 1
READY, READ_DONE, DONE = 0, 1, 2
FABRIC_HOST, FABRIC_CUDA, FABRIC_NCCL = 0, 1, 2
AUTO = -1


def _find():
    here = Path(__file__).resolve().parent
    if named := os.environ.get("TIDE_LIB"):
        return [Path(named)]
    return [here / "libtide.so", Path(os.environ.get("TIDE_BUILD", here.parents[1] / "build")) / "libtide.so"]


def _load():
    tried = _find()
    for path in tried:
        if path.exists():
            return ctypes.CDLL(str(path))
    raise ImportError(
        "libtide.so not found; looked at " + ", ".join(map(str, tried)) + " (run `make`, or set TIDE_LIB)"
    )


lib = _load()


class ErrorInfo(Structure):
    _fields_ = [("code", c_int), ("name", c_char_p), ("message", c_char_p), ("affected", c_char_p)]


class KnobInfo(Structure):
    _fields_ = [("name", c_char_p), ("dflt", c_int64), ("minimum", c_int64), ("maximum", c_int64), ("help", c_char_p)]


lib.tide_version.restype = c_char_p
lib.tide_last_error.restype = c_char_p
lib.tide_error_describe.argtypes = [c_int, POINTER(ErrorInfo)]
lib.tide_knob_describe.argtypes = [c_size_t, POINTER(KnobInfo)]


def _knobs():
    rows, info = {}, KnobInfo()
    while lib.tide_knob_describe(len(rows), byref(info)) == 0:
        rows[info.name.decode()] = (info.dflt, info.minimum, info.maximum, info.help.decode())
    return rows


KNOBS = _knobs()


class Options(Structure):
    """tide_options: every knob at its default."""

    _fields_ = [("size", c_size_t)] + [(name, c_int64) for name in KNOBS]

    def __init__(self):
        super().__init__(ctypes.sizeof(Options), *(row[0] for row in KNOBS.values()))


class _Sized(Structure):
    """A struct that begins with its size, the rest zero."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(type(self)), **fields)


class Param(Structure):
    _fields_ = [("name", c_char_p), ("ndim", c_int), ("shard_dim", c_int), ("dims", c_int64 * MAX_DIMS)]


class GroupDesc(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("n_params", c_uint32),
        ("params", POINTER(Param)),
        ("dtype", c_int),
        ("item_size", c_uint32),
        ("shard_dtype", c_int),
        ("grad_dtype", c_int),
        ("input", c_int),
        ("landing", c_int),
    ]


ALLGATHER = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t)
LOG = CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class CommDesc(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_uint32),
        ("n_ranks", c_uint32),
        ("node_size", c_uint32),
        ("fabric", c_int),
        ("device", c_int),
        ("allgather", ALLGATHER),
        ("allgather_context", c_void_p),
        ("options", POINTER(Options)),
    ]


class CommInfo(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_uint32),
        ("n_ranks", c_uint32),
        ("nodes", c_uint32),
        ("local", c_uint32),
        ("fabric", c_int),
        ("multicast", c_int),
        ("calls", c_uint64),
        ("arena_bytes", c_uint64),
        ("live_views", c_uint64),
    ]


class GroupPath(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("path", c_char_p),
        ("reason", c_char_p),
        ("digest", c_uint64),
        ("all_gathers", c_uint64),
        ("reduce_scatters", c_uint64),
        ("all_gather_bytes", c_uint64),
        ("reduce_scatter_bytes", c_uint64),
    ]


class Tensor(_Sized):
    _fields_ = [("size", c_size_t), ("data", c_void_p), ("bytes", c_uint64), ("dtype", c_int), ("item_size", c_uint32)]


class ReduceScatterArgs(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("grads", POINTER(c_void_p)),
        ("out", c_void_p),
        ("grad_dtype", c_int),
        ("accumulate", c_int),
        ("alpha", c_float),
        ("mode", c_int),
    ]


class Failure(_Sized):
    _fields_ = [
        ("size", c_size_t),
        ("code", c_int),
        ("rank", c_uint32),
        ("peer", c_int64),
        ("call", c_uint64),
        ("phase", c_char * 32),
        ("text", c_char * 256),
    ]


def _prototypes():
    comm, group, stream = c_void_p, c_void_p, c_void_p
    for name, arguments in {
        "tide_options_set": [POINTER(Options), c_char_p, c_int64],
        "tide_bootstrap_local": [c_char_p, c_uint32, c_uint32, c_int64, POINTER(c_void_p)],
        "tide_comm_create": [POINTER(CommDesc), POINTER(comm)],
        "tide_comm_get_info": [comm, POINTER(CommInfo)],
        "tide_groups_create": [comm, POINTER(GroupDesc), c_uint32, POINTER(group)],
        "tide_group_get_path": [group, POINTER(GroupPath)],
        "tide_group_tensor": [group, c_int, c_uint32, POINTER(Tensor)],
        "tide_group_dlpack": [group, c_int, c_uint32, POINTER(c_void_p)],
        "tide_shard_adopt": [group, c_uint32, c_void_p, c_uint64, c_void_p],
        "tide_group_output_elements": [group, POINTER(c_uint8), POINTER(c_uint64)],
        "tide_all_gather": [group, POINTER(c_void_p), stream],
        "tide_slot_release": [group, stream],
        "tide_grads_stash": [group, POINTER(ReduceScatterArgs), stream],
        "tide_reduce_scatter_read": [group, POINTER(ReduceScatterArgs), stream],
        "tide_reduce_scatter_net": [group, stream],
        "tide_reduce_scatter": [group, POINTER(ReduceScatterArgs), stream],
        "tide_wait": [group, c_int, stream],
        "tide_comm_check": [comm, POINTER(Failure)],
        "tide_comm_sync": [comm],
        "tide_comm_abort": [comm],
        "tide_comm_destroy": [comm],
    }.items():
        getattr(lib, name).argtypes = arguments
        getattr(lib, name).restype = c_int
    lib.tide_bootstrap_destroy.argtypes = [c_void_p]
    lib.tide_bootstrap_destroy.restype = None
    lib.tide_host_identity.argtypes = []
    lib.tide_host_identity.restype = c_uint64
    lib.tide_torch_offer.argtypes = [c_void_p]
    lib.tide_torch_offer.restype = None
    lib.tide_log_set.argtypes = [LOG, c_void_p]
    lib.tide_log_set.restype = None


_prototypes()


class TideError(RuntimeError):
    """A failed call. `name` is the header's ("TIDE_ERR_DEADLINE"); rank, peer, phase and call are set after a failure
    of the communicator (peer -1, call 0: unknown)."""

    def __init__(self, text, code, rank=None, peer=None, phase=None, call=None):
        super().__init__(text)
        self.code, self.rank, self.peer, self.phase, self.call = code, rank, peer, phase, call

    @property
    def name(self):
        info = ErrorInfo()
        return info.name.decode() if lib.tide_error_describe(self.code, byref(info)) == 0 else "unknown"

    def __reduce__(self):
        return TideError, (str(self), self.code, self.rank, self.peer, self.phase, self.call)


def code_of(name):
    """The code of "TIDE_ERR_STATE" and its like, from the library's table."""
    info = ErrorInfo()
    for code in range(0, -64, -1):
        if lib.tide_error_describe(code, byref(info)) == 0 and info.name.decode() == name:
            return code
    raise KeyError(name)
