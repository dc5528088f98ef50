"""A rank that dies, a rank that is late: every other rank gets an exception that says who, whom it waited for, where
and in which call."""

import json
import os
import pathlib
import signal
import time

import pytest
import torch.distributed as dist

import tide.fsdp2
import training as t
from pool import Pool, RankError


@pytest.fixture
def ranks():
    """A pool of its own: these tests leave none behind."""
    with Pool(4) as pool:
        yield pool


def survive(folder, node_size, victim, how, where, options):
    """Trains until `victim` is gone or late, and writes down what this rank was told, and how long that took."""
    rank = dist.get_rank()
    model = t.shard(t.fill(t.Net()), mp_policy=t.MIXED)
    tide.fsdp2.install(model, node_size=node_size, options=options)
    t.plain_step(model, 0)
    if rank == victim:

        def leave(*_):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4)

        block = model.blocks[1]
        if where == "forward":
            block.register_forward_pre_hook(leave)
        else:
            block.up.register_full_backward_hook(leave)
    start = time.monotonic()
    try:
        for k in range(1, 3):
            t.plain_step(model, k)
        told = None
    except tide.fsdp2.TideError as error:
        told = {key: getattr(error, key) for key in ("name", "rank", "peer", "phase", "call")} | {"text": str(error)}
    again = None
    if told:
        with pytest.raises(tide.fsdp2.TideError) as repeated:
            model.blocks[0].unshard()
            model.blocks[1].unshard()
            model.blocks[2].unshard()
        again = repeated.value.name
        tide.fsdp2.uninstall(model, force=True)  # waits for nobody
    pathlib.Path(folder, str(rank)).write_text(
        json.dumps({"told": told, "s": time.monotonic() - start, "again": again})
    )


def stories(folder, but=None):
    return {rank: json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(4) if rank != but}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("node_size", [4, 2, 1], ids=["1x4", "2x2", "4x1"])
def test_a_rank_that_dies(ranks, tmp_path, node_size, where):
    with pytest.raises(RankError, match="rank 2 of 4: died with exit code -9"):
        ranks.grace_s = 20
        ranks.run(survive, str(tmp_path), node_size, 2, "dies", where, {})
    for rank, story in stories(tmp_path, but=2).items():
        told = story["told"]
        assert told and told["name"] == story["again"] == "TIDE_ERR_PEER_DEAD", (rank, story)
        assert told["peer"] == 2 and told["call"] > 0 and told["phase"], (rank, story)
        assert told["text"].startswith(("blocks.", "(root)")), told["text"]


@pytest.mark.parametrize("node_size", [4, 2], ids=["1x4", "2x2"])
def test_a_rank_that_is_late(ranks, tmp_path, node_size):
    ranks.run(survive, str(tmp_path), node_size, 3, "late", "forward", {"deadline_ms": 1500})
    for rank, story in stories(tmp_path).items():
        told = story["told"]
        assert told and told["name"] == story["again"] == "TIDE_ERR_DEADLINE", (rank, story)
        assert told["call"] > 0 and told["phase"], (rank, story)
    assert any(story["told"]["peer"] == 3 for story in stories(tmp_path).values())
