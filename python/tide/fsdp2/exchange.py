"""How the ranks of a process group tell each other a few bytes at installation: over the group itself where it serves CPU
tensors (gloo), else through the store that it was made with. A group of NCCL alone is asked for nothing: its first
collective would make a communicator that the steps do not need, and would wait without saying for whom.
"""

import pickle
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tide._lib import TideError, code_of

_calls = weakref.WeakKeyDictionary()  # process group -> exchanges through its store so far


def serves_cpu(process_group):
    try:
        process_group._get_backend(torch.device("cpu"))
        return True
    except RuntimeError:  # torch's answer when there is none
        return False


def of_bytes(process_group):
    """The all-gather that tide.comm.Comm takes: bytes of equal length on all ranks -> those of all, in rank order."""

    def over_group(data):
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out = [torch.empty_like(given) for _ in range(process_group.size())]
        dist.all_gather(out, given, group=process_group)
        return b"".join(t.numpy().tobytes() for t in out)

    def over_store(data):
        return b"".join(_next_through_store(process_group, data))

    return over_group if serves_cpu(process_group) else over_store


def of_objects(process_group, mine):
    """C  [object of each rank, in rank order]"""
    if not serves_cpu(process_group):
        return [pickle.loads(data) for data in _next_through_store(process_group, pickle.dumps(mine))]
    out = [None] * process_group.size()
    dist.all_gather_object(out, mine, group=process_group)
    return out


def _next_through_store(process_group, data):
    ranks = dist.get_process_group_ranks(process_group)
    store = dist.PrefixStore(f"tide/{ranks[0]}", distributed_c10d._get_process_group_store(process_group))
    call = _calls[process_group] = _calls.get(process_group, 0) + 1
    return through_store(store, call, process_group.rank(), ranks, data)


def through_store(store, call, rank, ranks, data):
    """C  Each rank's bytes. The first rank collects and publishes, so that a job of N ranks costs the store about 3 N
    requests. call: 1, 2, ... of this store. What the last exchange published is dropped as soon as all have come to this
    one."""
    store.set(f"{call}/{rank}", data)
    if rank == 0:
        given = [_get(store, f"{call}/{r}", ranks[r]) for r in range(len(ranks))]
        store.set(f"{call}", pickle.dumps(given))
        for r in range(len(ranks)):
            store.delete_key(f"{call}/{r}")
        store.delete_key(f"{call - 1}")
    return pickle.loads(_get(store, f"{call}", ranks[0]))


def _get(store, key, rank):
    try:
        return store.get(key)
    except RuntimeError as error:
        raise TideError(
            f"install: rank {rank} did not come to the exchange through the store: {error}", code_of("TIDE_ERR_DEADLINE")
        ) from error
