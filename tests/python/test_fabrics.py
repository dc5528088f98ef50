"""Which fabric a shard group is put on, what becomes of it when the library refuses, and how ranks find each other."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import tide.fsdp2
import training as t
from tide import comm as tide_comm
from tide._lib import TideError, code_of
from tide.fsdp2 import exchange, fabric, session, support

HOST, CUDA, NCCL = tide_comm.FABRIC_HOST, tide_comm.FABRIC_CUDA, tide_comm.FABRIC_NCCL


def net(**options):
    return t.shard(t.fill(t.Net()), **options)


def rows(model):
    return [(g.module, g.path, g.reason) for g in tide.fsdp2.report(model)]


# ---- choice ----------------------------------------------------------------------------------------------------------


def test_choice():
    here, both = [7, 7, 7, 7], [7, 7, 8, 8]
    assert [fabric.choose("auto", kind, where) for kind in ("cpu", "cuda") for where in (here, both)] == [
        HOST,
        HOST,  # which the library refuses, in words
        CUDA,
        NCCL,
    ]
    assert [fabric.choose(name, "cuda", here) for name in ("cuda", "nccl")] == [CUDA, NCCL]
    assert fabric.misfit("auto", "cpu") is fabric.misfit("host", "cpu") is fabric.misfit("nccl", "cuda") is None
    assert fabric.machine() == fabric.machine() != 0


def asked_for(name):
    """On CPU ranks."""
    model = net()
    with pytest.raises(TideError) as error:
        tide.fsdp2.install(model, fabric=name, strict=True)
    tide.fsdp2.install(model, fabric=name)
    found = rows(model)
    t.plain_step(model, 0)
    tide.fsdp2.uninstall(model)
    os.environ["TIDE_FABRIC"] = name
    try:
        tide.fsdp2.install(model)
        assert rows(model) == found
        tide.fsdp2.uninstall(model)
        tide.fsdp2.install(model, fabric="host")  # the argument goes before the environment
        assert all(path.startswith("tide host") for _, path, _ in rows(model))
        tide.fsdp2.uninstall(model)
    finally:
        del os.environ["TIDE_FABRIC"]
    return error.value.name, str(error.value), found


def test_a_fabric_that_does_not_fit(pool):
    name, text, found = pool.run(asked_for, "nccl")[0]
    reason = "fabric 'nccl' was asked for: it is for cuda, the parameters are on cpu"
    assert name == "TIDE_ERR_UNSUPPORTED" and f"blocks.2: {reason}" in text
    assert [row[1:] for row in found] == [("stock", reason)] * 4


def asked_differently():
    names = []
    for name in ("ring", "host" if dist.get_rank() == 3 else "auto"):
        with pytest.raises(TideError) as error:
            tide.fsdp2.install(net(), fabric=name)
        names.append((error.value.name, str(error.value)))
    return names


def test_fabrics_that_are_refused(pool):
    for (name, text), (other_name, other) in pool.run(asked_differently):
        assert name == "TIDE_ERR_ARGUMENT" and text.startswith("install: fabric: 'ring', expected one of 'auto', 'host'")
        assert other_name == "TIDE_ERR_MISMATCH"
        assert other == "install: fabric: 'host' on rank 3, 'auto' on rank 0"


def several_machines(asked, too_old):
    """Groups that say they are on GPUs, ranks that say they are on two machines, and a library whose NCCL is too old or
    misses a rank."""
    opened = []

    class Comm(tide_comm.Comm):
        def __init__(self, rank, size, allgather, *, fabric, **options):
            opened.append(fabric)
            text = "NCCL: version 2.28.9, expected at least 2.31.2"
            raise TideError(text if rank == too_old else f"rank {too_old}: {text}", code_of("TIDE_ERR_UNSUPPORTED"))

    model = net()
    groups = [g for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in support.groups_of(m._get_fsdp_state())]
    before = fabric.machine, tide_comm.Comm, support.device_reason
    fabric.machine, tide_comm.Comm, support.device_reason = lambda: dist.get_rank() // 2, Comm, lambda kind: None
    for group in groups:
        group.device = torch.device("cuda", 0)
    try:
        tide.fsdp2.install(model, fabric=asked)
    finally:
        fabric.machine, tide_comm.Comm, support.device_reason = before
        for group in groups:
            group.device = torch.device("cpu")
    found = rows(model)
    t.same(t.plain_step(model, 0), t.plain_step(net(), 0))
    tide.fsdp2.uninstall(model)
    return opened, found


def test_gpus_of_several_machines(pool):
    for asked, expected in ((None, NCCL), ("cuda", CUDA)):
        for opened, found in pool.run(several_machines, asked, 2):
            assert opened == [expected]
            assert [row[1:] for row in found] == [
                ("stock", "rank 2: NCCL: version 2.28.9, expected at least 2.31.2")
            ] * 4


# ---- refusals of single groups ---------------------------------------------------------------------------------------


def too_many_puts(node_size):
    """The reduce-scatter of a block goes out in more passes than the rail holds messages; the root is too small for so many."""
    install = {"node_size": node_size, "options": {"n_part": 16, "rail_ring": 16}}
    stock, model = (t.shard(t.fill(t.Net(2)), mp_policy=t.MIXED) for _ in range(2))
    if node_size == 2:
        with pytest.raises(TideError, match="blocks.1: .*more than 16 puts and signals"):
            tide.fsdp2.install(model, strict=True, **install)
    tide.fsdp2.install(model, **install)
    found = rows(model)
    for k in range(2):
        t.same(t.plain_step(model, k), t.plain_step(stock, k))
    tide.fsdp2.uninstall(model)
    return found


def test_too_many_puts_a_peer(pool):
    first, *others = pool.run(too_many_puts, 2)
    assert all(other == first for other in others), (first, others)
    stock = {module: reason for module, path, reason in first if path == "stock"}
    assert sorted(stock) == ["blocks.0", "blocks.1"], first
    assert "its reduce-scatter has more than 16 puts and signals to rank" in stock["blocks.0"]
    assert "expected fewer passes (n_part 16)" in stock["blocks.0"]
    assert all(path.startswith("tide") for _, path, _ in pool.run(too_many_puts, 4)[0])  # one node has no rail


def test_one_sentence_for_all():
    one = session._one_reason
    assert one([4, 5, 6], ["a", "a", "a"]) == "a"
    assert one([4, 5, 6], [None, None, None]) is None
    assert one([4, 5, 6], [None, "a", None]) == "rank 5: a"
    assert one([4, 5, 6], ["a", "b", None]) == "rank 4: a; rank 5: b"
    assert one([4, 5, 6], ["rank 1: a", "a", "rank 1: a"]) == "rank 5: a"  # as the library tells it


# ---- how ranks find each other ---------------------------------------------------------------------------------------


def test_exchange_through_a_store():
    store, results = dist.HashStore(), [None] * 3

    def rank(r):
        results[r] = [exchange.through_store(store, call, r, [5, 6, 9], f"{call}.{r}".encode() * r) for call in (1, 2, 3)]

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results:
        assert found == [[f"{call}.{r}".encode() * r for r in range(3)] for call in (1, 2, 3)]
    assert store.num_keys() == 1  # what was published last
    store.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(TideError, match="rank 6 did not come") as error:
        exchange.through_store(store, 4, 0, [5, 6, 9], b"")
    assert error.value.name == "TIDE_ERR_DEADLINE"


def without_gloo(node_size):
    """As with a process group of NCCL alone: nothing but its store."""
    assert exchange.serves_cpu(dist.group.WORLD)
    before = exchange.serves_cpu, dist.all_gather, dist.all_gather_object

    def not_now(*args, **kwargs):
        raise AssertionError("a collective of the process group at installation")

    exchange.serves_cpu, dist.all_gather, dist.all_gather_object = lambda pg: False, not_now, not_now
    try:
        model = t.shard(t.fill(t.Net()), mesh=t.mesh(2, 2, names=("replicate", "shard")))
        tide.fsdp2.install(model, node_size=node_size, strict=True)
    finally:
        exchange.serves_cpu, dist.all_gather, dist.all_gather_object = before
    t.same(t.plain_step(model, 0), t.plain_step(t.shard(t.fill(t.Net()), mesh=t.mesh(2, 2, names=("r", "s"))), 0))
    tide.fsdp2.uninstall(model)


def test_install_without_gloo(pool):
    pool.run(without_gloo, 1)
