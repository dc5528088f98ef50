"""What makes the demo fail, and what it draws."""

import copy
import json
import os
import subprocess
import sys

import pytest

from tide.demo import __main__ as demo
from tide.demo.model import Transformer, batch_of, read_text
from tide.fsdp2 import GroupReport, Report

STEPS = demo.NEEDED_STEPS


def good():
    group = GroupReport("blocks.0", "tide host M=2 L=2", "why", 2 * STEPS, STEPS, "ring slot 0", "adopted", 1)
    losses = [3.0 - k / STEPS for k in range(STEPS)]
    return {
        "losses": [losses, list(losses), list(losses)],
        "fp64_error": [1e-8] * 3,
        "repeat_equal": True,
        "reports": [Report([copy.copy(group)]), Report([copy.copy(group)])],
    }


def failures(result, steps=STEPS):
    return [name for name, met, _ in demo.verdicts(result, steps) if met is False]


def test_all_is_well():
    assert failures(good()) == []
    assert [met for _, met, _ in demo.verdicts(good(), 20)][0] is None  # few steps: the loss bound does not apply


def spoil_loss(r):
    r["losses"] = [[2.5] * STEPS] * 3


def spoil_one_step(r):
    r["losses"][2][7] *= 1 + 2e-5


def spoil_gradients(r):
    r["fp64_error"][0] = 2e-5


def spoil_repeat(r):
    r["repeat_equal"] = False


def spoil_path(r):
    r["reports"][1][0].path = "stock"


def spoil_calls(r):
    r["reports"][0][0].reduce_scatters = STEPS - 1


@pytest.mark.parametrize(
    "spoil, name",
    [
        (spoil_loss, "below 2.4 nats"),
        (spoil_one_step, "losses within 1e-5"),
        (spoil_gradients, "within 1e-5 of fp64"),
        (spoil_repeat, "bitwise equal"),
        (spoil_path, "every group on TIDE"),
        (spoil_calls, "engine was called"),
    ],
)
def test_each_condition_can_fail(spoil, name):
    result = good()
    spoil(result)
    (failed,) = failures(result)
    assert name in failed


def test_model_and_text(tmp_path):
    assert 1.8e6 < sum(p.numel() for p in Transformer().parameters()) < 2.0e6
    (tmp_path / "a.txt").write_bytes(b"abc" * 100)
    data, what = read_text(tmp_path)
    assert data == b"abc" * 100 and str(tmp_path) in what
    with pytest.raises(SystemExit, match="has 0 bytes"):
        (tmp_path / "empty").mkdir()
        read_text(tmp_path / "empty")
    import torch

    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    inputs, targets = batch_of(text, 3, 1, 2)
    assert inputs.shape == (2, 64) and torch.equal(inputs[:, 1:], targets[:, :-1])


def test_plot(tmp_path):
    document = {"schema": 1, "kind": "losses", "losses": {"a": [3.0, 2.0], "b": [3.0, 2.00001]}}
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    plot = [sys.executable, "-m", "tide.plot", str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(plot, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG" and done.stdout.strip() == str(tmp_path / "x.png")
    file.write_text(json.dumps(document | {"schema": 2}))
    done = subprocess.run(plot, capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "schema 2" in done.stderr
