"""tide simulate and machine files as users meet them."""

import json

import pytest

from command import ROOT

PAPER = (ROOT / "machines" / "paper.txt").read_text()


def test_solver_of_the_paper(tide, tmp_path):
    """SPEC's vector: one bf16 parameter of 65536 x 8192 on 8 x 8."""
    path = tmp_path / "s"
    path.write_text("w bf16 65536 8192\n")
    words = ["plan", "--nodes", 8, "--local", 8, "--shapes", path, "--json"]
    plan = tide(*words, "--machine", "paper").json
    assert [plan[name] for name in ("k", "c_sum", "c_land")] == [4, 4, 4]
    assert plan == tide(*words).json  # the library's own rates are those of machines/paper.txt
    slow = tide(*words, "--machine", "paper", "--nic", "12GB/s").json
    assert slow["c_sum"] == 1 + int(1.5 * 5 * 12 / 99)
    fast = tide(*words, "--nic", "95GB/s").json
    assert fast["c_sum"] == 1 + int(1.5 * 5 * 95 / 99)


@pytest.mark.parametrize(
    "change, line",
    [
        (("nic_rate = 47.5 GB/s", "nic_rate = 47.5 Gb/s"), "unit 'Gb/s', expected B/s, KB/s, MB/s, GB/s or TB/s"),
        (("nic_rate = 47.5 GB/s", "nic_rate = -1 GB/s"), "-1, expected more than 0"),
        (("nic_rate", "nick_rate"), "'nick_rate': no such key; tide help calibrate lists them"),
        (("nic_rate = 47.5 GB/s", ""), "ends without nic_rate (one rail, each direction)"),
    ],
)
def test_bad_machine(tide, tmp_path, change, line):
    path = tmp_path / "m.txt"
    path.write_text(PAPER.replace(*change))
    number = [i for i, text in enumerate(PAPER.splitlines(), 1) if text.startswith("nic_rate")][0]
    for command in ("plan", "simulate"):
        result = tide(command, "--machine", path)
        assert (result.code, result.out) == (2, "")
        if "ends" in line:
            number = len(PAPER.splitlines())
        assert result.err.startswith(f"tide {command}: {path}:{number}: ") and result.err.endswith(line + "\n")
        assert result.err.count("\n") == 1


BAD = [
    ("--machine nowhere", "--machine: nowhere: No such file or directory, and no shipped machine has that name"),
    ("--nic 5", "--nic: unit '', expected B/s, KB/s, MB/s, GB/s or TB/s"),
    ("--nvlink -5GB/s", "--nvlink: -5, expected more than 0"),
    ("--gpus 12", "--gpus: 12 is not a multiple of 8 GPUs a node"),
    ("--gpus 8 --nodes 2", "--gpus: excludes --nodes"),
    ("--ranks some", "--ranks: 'some' is not one of all, one"),
    ("xs", "'xs' is not one of ag, rs"),
    ("--rank 8 --ranks one", "rank: 8 is not in 0..7"),
    ("--trace t", "--trace: needs ag or rs: a trace holds one call"),
    ("ag --trace /nowhere/t", "--trace: /nowhere/t: No such file or directory"),
]


@pytest.mark.parametrize("words, line", BAD, ids=[b[0] for b in BAD])
def test_bad_words(tide, words, line):
    result = tide("simulate", *words.split())
    assert result.code == 2 and result.err == f"tide simulate: {line}\n"


@pytest.mark.parametrize("machine", ["paper", "h200-x2"])
def test_output(tide, machine):
    words = ["simulate", "--machine", machine, "--nodes", 2, "--local", 2]
    document, text = tide(*words, "--json").json, tide(*words)
    assert (document["schema"], document["machine"], document["nodes"], document["local"]) == (1, machine, 2, 2)
    assert [call["collective"] for call in document["calls"]] == ["all_gather", "reduce_scatter"]
    for call in document["calls"]:
        assert call["bound_seconds"] <= call["seconds"] <= call["all_done_seconds"]
        path = call["critical_path"]
        total = path["host"] + path["signals"] + sum(row["seconds"] for row in path["work"])
        assert abs(total - call["all_done_seconds"]) < 1e-6 * total  # the path explains the whole time
        assert f"{call['collective']}: {call['seconds'] * 1e3:.3f} ms" in text.out and call["digest"] in text.out


def test_trace(tide, tmp_path):
    path = tmp_path / "trace.json"
    document = tide("simulate", "ag", "--nodes", 2, "--local", 2, "--trace", path, "--json").json
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    assert abs(max(e["ts"] + e["dur"] for e in spans) - document["calls"][0]["all_done_seconds"] * 1e6) < 1e-3
    by_stream = {}
    for e in spans:
        by_stream.setdefault((e["pid"], e["tid"]), []).append(e)
    for stream in by_stream.values():  # one operation at a time on a stream
        stream.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in zip(stream, stream[1:]))
