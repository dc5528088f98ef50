"""What the adapter does differently on GPUs, as far as a machine without any can tell: where FSDP2 keeps the gradients,
which event it waits for, and what becomes of groups whose fabric cannot be opened. tests/gpu has the rest."""

import ctypes
import os
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

import tide.fsdp2
import training as t
from tide._lib import lib
from tide.fsdp2 import session, support
from tide.fsdp2.session import installations

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA fabric can be opened here")


class Stream:
    """Records what is asked of it."""

    cuda_stream = None  # what the host fabric takes

    def __init__(self):
        self.asked = []

    def record_event(self):
        self.asked.append("record_event")
        return "READ_DONE"

    def wait_stream(self, stream):
        self.asked.append("wait_stream")


def streams(node_size, mode):
    """A step with the code for CUDA over the host fabric."""
    build = lambda: t.shard(t.fill(t.Net()), mp_policy=t.MIXED)  # noqa: E731
    expected = t.plain_step(build(), 0)
    model = build()
    tide.fsdp2.install(model, node_size=node_size, strict=True, options={"mode": mode})
    stream, kept = Stream(), []
    before, reduce = torch.cuda.current_stream, group_module.foreach_reduce

    def watched(*args, **kwargs):
        result = reduce(*args, **kwargs)
        kept.append(result[:2])
        return result

    torch.cuda.current_stream = lambda device=None: stream
    torch.cpu.Stream.cuda_stream = None
    group_module.foreach_reduce = watched
    try:
        for binding in installations[model].bindings:
            binding.on_cuda = True
        t.same(t.plain_step(model, 0), expected)
    finally:
        group_module.foreach_reduce = reduce
        torch.cuda.current_stream = before
        del torch.cpu.Stream.cuda_stream
    assert len(kept) == 4
    for (_, grads), event in kept:
        if mode == 0:
            assert event == "READ_DONE" and grads and all(isinstance(g, torch.Tensor) for g in grads)
        else:
            assert grads is None  # stashed and let go
    # One a reduce-scatter, and one where the landing outlives the forward.
    lasting = sum(binding.resharded is not None for binding in installations[model].bindings)
    assert stream.asked.count("record_event") == (4 if mode == 0 else 0) + lasting
    for binding in installations[model].bindings:
        binding.on_cuda = False
    tide.fsdp2.uninstall(model)


@pytest.mark.parametrize("mode", [0, 1], ids=["in-place", "slot-reuse"])
def test_who_keeps_the_gradients(pool, node_size, mode):
    pool.run(streams, node_size, mode)


def refused(which, strict):
    """Groups that say they are on a GPU: the communicator that they would need cannot be made."""
    model = t.shard(t.fill(t.Net()), mp_policy=t.MIXED)
    groups = [g for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in support.groups_of(m._get_fsdp_state())]
    for group in groups[which:]:
        group.device = torch.device("cuda", 0)
    try:
        tide.fsdp2.install(model, strict=strict)
    except tide.fsdp2.TideError as error:
        return error.name, str(error)
    finally:
        for group in groups:
            group.device = torch.device("cpu")
    rows = [(g.module, g.path, g.reason) for g in tide.fsdp2.report(model)]
    t.plain_step(model, 0)
    tide.fsdp2.uninstall(model)
    return rows


@no_gpu
def test_a_fabric_that_cannot_be_opened(pool):
    results = pool.run(refused, 0, False)
    assert all(rows == results[0] for rows in results)
    assert {path for _, path, _ in results[0]} == {"stock"}
    assert all("CUDA" in reason for _, _, reason in results[0]), results[0]
    mixed = pool.run(refused, 2, False)[0]
    assert [path.split()[0] for _, path, _ in mixed] == ["tide", "tide", "stock", "stock"], mixed
    name, text = pool.run(refused, 2, True)[0]
    assert name == "TIDE_ERR_UNSUPPORTED" and "blocks.1" in text and "CUDA" in text


def test_a_failure_waits_for_no_stream_of_the_library(monkeypatch):
    """One of them may stand in NCCL for good, and the whole GPU with it."""
    waited = []

    class Named:
        def __init__(self, name):
            self.synchronize = lambda: waited.append(name)

    class Group:
        device = torch.device("cuda", 0)
        comm_ctx = types.SimpleNamespace(
            all_gather_stream=Named("all-gather"), reduce_scatter_stream=Named("reduce-scatter"), all_gather_state=None
        )

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    computing = Named("computing")
    session._settle([Group, Group], False)
    assert waited == [torch.device("cuda", 0)]
    waited.clear()
    session._settle([Group, Group], True)
    assert waited == ["computing", "all-gather", "reduce-scatter"]


# One process a case, forked from one that has imported torch.
CONNECTIONS = """
import os, torch, torch.distributed.fsdp
for setting, started in ((None, False), ("16", False), (None, True), ("16", True)):
    child = os.fork()
    if child == 0:
        os.environ.pop(NAME, None)
        if setting:
            os.environ[NAME] = setting
        torch.cuda.is_initialized = lambda: started
        from tide.fsdp2 import support
        print(os.environ.get(NAME), support._too_late, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_connections():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = CONNECTIONS.replace("NAME", repr(support.CONNECTIONS))
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    fresh, given, late, given_late = out.splitlines()
    assert fresh.startswith("32 None") and given.startswith("16 None") and given_late.startswith("16 None")
    assert late.startswith("None CUDA_DEVICE_MAX_CONNECTIONS is unset and CUDA has started")


def test_what_is_offered_to_torch_is_given_once():
    alloc = lib.tide_torch_alloc
    alloc.argtypes, alloc.restype = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    given = []
    lib.tide_torch_offer(4096)
    other = threading.Thread(target=lambda: given.append(alloc(1, 0, None)))  # an offer is the thread's own
    other.start()
    other.join()
    given += [alloc(1, 0, None), alloc(1, 0, None)]
    assert given == [None, 4096, None]
