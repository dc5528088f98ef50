"""tide plan: what it says, and that bad knobs end with one line."""

import json

import pytest

MODELS = ["llama-3.1-70b", "qwen3-30b-a3b", "wan2.2-t2v-a14b"]
REGIONS = ["control", "landing", "resident", "stage", "staging", "outbox", "spare", "inbox"]

BAD = [
    ("--nodes 0", "--nodes: 0 is not in 1..1024"),
    ("--nodes 1025", "--nodes: 1025 is not in 1..1024"),
    ("--nodes=two", "--nodes: 'two' is not a whole number"),
    ("--nodes 99999999999999999999", "--nodes: '99999999999999999999' is not a whole number"),
    ("--nodes", "--nodes: needs a value"),
    ("--local 65", "--local: 65 is not in 1..64"),
    ("--model gpt-5", "--model: 'gpt-5' is not listed by tide info --models"),
    ("--model llama-3.1-70b --shapes x", "--shapes: excludes --model"),
    ("--k 0", "--k: 0 is not auto or in 1..1023"),
    ("--k=0", "--k: 0 is not auto or in 1..1023"),
    ("--n-stg 17", "--n-stg: 17 is not in 1..16"),
    ("--n-stg auto", "--n-stg: 'auto' is not a whole number"),
    ("--n_stg 2", "--n_stg: no such flag; see tide help plan"),
    ("--c-land 1x", "--c-land: '1x' is not a whole number"),
    ("--rank 4", "--rank: 4 is not in 0..3"),
    ("--dtype int8", "--dtype: 'int8' is not one of fp32, bf16, fp16, opaqueN"),
    ("--grad-dtype opaque2", "--grad-dtype: 'opaque2' is not one of fp32, bf16, fp16, none"),
    ("--shard-dtype x", "--shard-dtype: 'x' is not one of fp32, bf16, fp16"),
    (
        "--shard-dtype fp32 --input adopted",
        "--input: adopted shards have the dtype that is gathered; drop --shard-dtype",
    ),
    ("--input both", "--input: 'both' is not one of adopted, argument"),
    ("--landing here", "--landing: 'here' is not one of ring, private"),
    ("--seed 1", "--seed: no such flag; see tide help plan"),
    (
        "--nodes 9 --local 8 --w-wave 3",
        "w_wave: 3 with 9 nodes of 8: contributors 8 and 9 of wave 2 would share an inbox block; "
        "expected a divisor of 8",
    ),
    ("--nodes 8 --local 2 --n-out 1 --k 2", None),
]


@pytest.mark.parametrize("words, line", BAD, ids=[b[0] for b in BAD])
def test_bad_words(tide, words, line):
    result = tide("plan", *words.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1 and result.err.startswith("tide plan: ")
    if line:
        assert result.err == f"tide plan: {line}\n"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("nodes, local", [(1, 4), (2, 2), (5, 2), (8, 8), (4, 1)])
def test_models(tide, model, nodes, local):
    words = ["plan", "--model", model, "--nodes", nodes, "--local", local]
    text, plan = tide(*words), tide(*words, "--json").json
    assert (
        text.code == 0 and f"{nodes} nodes x {local} = {nodes * local} ranks" in text.out and plan["digest"] in text.out
    )
    assert plan["schema"] == 1 and (plan["nodes"], plan["local"]) == (nodes, local)
    assert plan["memory"]["total"] == sum(plan["memory"][r] for r in REGIONS)
    (group,) = plan["groups"]
    ranks = nodes * local
    for p in group["params"]:
        assert p["strips"] == 1 and (p["shard"] * ranks - p["elements"]) >= 0
        assert p["landing_offset"] % 256 == 0
    assert group["elements"] == sum(p["shard"] for p in group["params"])
    assert group["landing_bytes"] >= ranks * group["shard_bytes"] == 2 * ranks * group["elements"]
    assert sum(r["slots"] for r in plan["all_gather_rounds"]) == nodes - 1
    assert sum(sum(w["rounds"]) for w in plan["waves"]) == nodes - 1
    ag, rs = plan["schedules"]
    assert (ag["collective"], rs["collective"]) == ("all_gather", "reduce_scatter")
    assert ag["put_bytes"] == (nodes - 1) * group["shard_bytes"]
    if nodes > 1:  # each of L rails carries about E sums in fp32 to each other node; one rank a node bf16 gradients
        slack, item = 4 * local * local, 4 if local > 1 else 2
        assert abs(rs["put_bytes"] / item / (nodes - 1) - group["elements"]) <= slack


def test_paper_values(tide, tmp_path):
    """M = 5 gathers in rounds of 1, 2, 1 slots; for 32 MiB on 8 nodes the solver picks k = 4 and 4 + 4 CTAs."""
    assert [r["slots"] for r in tide("plan", "--nodes", 5, "--json").json["all_gather_rounds"]] == [1, 2, 1]
    path = tmp_path / "s"
    path.write_text(f"w bf16 {64 * (32 << 20) // 4}\n")
    plan = tide("plan", "--nodes", 8, "--local", 8, "--shapes", path, "--json").json
    assert [plan[name] for name in ("k", "c_sum", "c_land")] == [4, 4, 4]


def test_knobs_arrive(tide):
    knobs = {
        "mode": 1,
        "w_wave": 2,
        "k": 2,
        "n_par": 2,
        "n_part": 1,
        "n_out": 4,
        "n_stg": 3,
        "chunk": 4096,
        "c_sum": 16,
        "c_land": 4,
        "n_ctx": 2,
        "ring_slots": 3,
        "head_bytes": 1 << 20,
        "multicast": 0,
        "poison": 0,
        "deadline_ms": 1000,
        "rail_ring": 32,
    }
    words = [w for name, value in knobs.items() for w in (f"--{name.replace('_', '-')}", value)]
    plan = tide("plan", "--nodes", 8, "--local", 8, *words, "--json").json
    assert {name: plan[name] for name in knobs} == knobs
    assert len(plan["waves"]) == 4 and plan["blocks"] == 7
    assert tide("plan", "--head-bytes", "1M", "--k", "auto", "--json").json["head_bytes"] == 1 << 20


def test_ops(tide):
    words = ["plan", "--nodes", 2, "--local", 2, "--groups", 2]
    for rank in range(4):
        plan = tide(*words, "--ops", "--rank", rank, "--json").json
        assert [(o["group"], o["rank"]) for o in plan["op_lists"]] == [(0, rank), (0, rank), (1, rank), (1, rank)]
        for tally, ops in zip(plan["schedules"], plan["op_lists"]):
            assert sum(tally["ops"].values()) == sum(tally["streams"].values()) == len(ops["ops"])
    text = tide(*words, "--ops").out
    assert "ag.scatter" in text and "rs.land" in text
    assert "ag.scatter COPY" not in tide(*words).out


def test_json_is_one_object(tide):
    for words in (["plan", "--json"], ["plan", "--json", "--ops"], ["info", "--json"]):
        assert isinstance(json.loads(tide(*words).out), dict)
