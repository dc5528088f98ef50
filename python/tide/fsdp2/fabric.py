"""Which fabric a shard group is for: where its parameters are, and on how many machines its ranks.

auto   CPU ranks: host. GPUs of one machine: cuda. GPUs of several: nccl.

Whether the fabric can be had is the library's answer, when the communicator is made: a refusal (no CUDA, no peer access,
NCCL missing or too old) leaves the groups on stock FSDP2 with its sentence.
"""

from tide import comm as tide_comm
from tide._lib import TideError, code_of, lib

FABRICS = {
    "host": (tide_comm.FABRIC_HOST, "cpu"),
    "cuda": (tide_comm.FABRIC_CUDA, "cuda"),
    "nccl": (tide_comm.FABRIC_NCCL, "cuda"),
}


def check(asked):
    if asked != "auto" and asked not in FABRICS:
        raise TideError(
            f"install: fabric: {asked!r}, expected one of 'auto', {', '.join(map(repr, FABRICS))}",
            code_of("TIDE_ERR_ARGUMENT"),
        )
    return asked


def machine():
    """The same number for processes of one machine."""
    return lib.tide_host_identity()


def misfit(asked, device_type):
    """Why parameters there cannot be on the fabric that was asked for; None when they can."""
    if asked != "auto" and FABRICS[asked][1] != device_type:
        return f"fabric {asked!r} was asked for: it is for {FABRICS[asked][1]}, the parameters are on {device_type}"
    return None


def choose(asked, device_type, machines):
    """machines: machine() of every rank of the shard group."""
    if asked == "auto":
        asked = "host" if device_type == "cpu" else "cuda" if len(set(machines)) == 1 else "nccl"
    return FABRICS[asked][0]
