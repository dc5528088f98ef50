"""What only GPUs show: streams, the caching allocator, profiles, memory over many steps, dead peers, captures."""

import json
import os
import pathlib

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import training as t
import work
from pool import Pool, RankError

MODES = pytest.mark.parametrize("mode", [0, 1], ids=["in-place", "slot-reuse"])


@MODES
@pytest.mark.parametrize("policy", [t.MIXED, t.PURE], ids=["mixed", "fp32"])
def test_equal_to_stock_and_to_itself(pool, node_size, policy, mode):
    print("largest relative loss difference:", pool.run(work.equal_to_stock, node_size, policy, {"mode": mode}))


@MODES
def test_same_bits_with_slow_streams(pool, node_size, mode):
    pool.run(work.same_with_delays, node_size, mode)


@MODES
def test_same_bits_when_the_allocator_collects_garbage(own_pool, mode):
    if reason := own_pool.run(work.same_with_garbage_collection, mode)[0]:
        pytest.skip(reason)


@MODES
def test_no_growth_over_200_steps(pool, mode):
    print("allocated, reserved, free:", pool.run(work.no_growth, mode)[0])


def test_torch_counts_the_arenas(own_pool):
    for (before, during, after), arena, told, peak in own_pool.run(work.counted):
        assert told and arena <= during - before <= arena + (32 << 20), (before, during, arena)
        assert after <= before + (4 << 20), (before, after)
        assert peak >= during


@MODES
def test_no_host_synchronisation_in_a_step(pool, tmp_path, mode):
    for waits, ranges, launches in pool.run(work.profiled, str(tmp_path), mode):
        if launches == 0:
            pytest.skip("the profiler records no CUDA calls here")
        assert waits == []
        text = "\n".join(ranges)
        for what in ("all_gather blocks.0 call", "reduce_scatter blocks.0 call", "slot_release blocks.0 call"):
            if mode == 0 or what.startswith(("all", "red")):
                assert f"tide::{what}" in text, text


def test_a_rank_that_dies(own_pool, tmp_path, node_size):
    own_pool.grace_s = 30
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code -9"):
        own_pool.run(work.survive, str(tmp_path), node_size, "dies", {})
    story = json.loads(pathlib.Path(tmp_path, "0").read_text())
    told = story["told"]
    assert told and told["name"] == "TIDE_ERR_PEER_DEAD" and told["peer"] == 1 and told["phase"], story
    assert story["s"] < 20, story


def test_a_rank_that_is_late(own_pool, tmp_path, node_size):
    own_pool.run(work.survive, str(tmp_path), node_size, "late", {"deadline_ms": 1000})
    stories = [json.loads(pathlib.Path(tmp_path, str(rank)).read_text())["told"] for rank in range(2)]
    for told in stories:
        assert told and told["name"] == "TIDE_ERR_DEADLINE" and told["phase"] and told["call"], stories
    assert stories[0]["peer"] == 1, stories


def test_a_capture_is_refused(own_pool):
    for told in own_pool.run(work.captured):
        assert told and told[0][0] == "TIDE_ERR_UNSUPPORTED" and "captur" in told[0][1], told


def test_cpu_offload_falls_back(pool):
    for found, _ in pool.run(work.reasons, offload_policy=CPUOffloadPolicy()):
        assert {(path, reason) for _, path, reason in found} == {("stock", "CPU offload on an accelerator (cuda)")}


def test_too_few_connections_fall_back(pool):
    stock = pool.run(work.reasons)  # on TIDE here: the losses to compare with
    before = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    try:
        with Pool(2, limit_s=60, device="cuda") as few:
            results = few.run(work.reasons)
    finally:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = before or "32"
    for (found, losses), (_, expected) in zip(results, stock):
        assert {path for _, path, _ in found} == {"stock"}
        assert all("CONNECTIONS" in reason for _, _, reason in found), found
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
