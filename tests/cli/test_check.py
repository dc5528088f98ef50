"""tide check: real calls against the naive oracle."""

import pytest


@pytest.mark.parametrize("ranks", ["--threads", "--procs"])
def test_random_configurations(tide, ranks):
    result = tide("check", ranks, "--seed", 7, "--calls", 400 if ranks == "--threads" else 100, timeout=300)
    assert result.err == "" and result.code == 0, result.out + result.err
    assert result.last == f"check: {400 if ranks == '--threads' else 100} calls, 0 wrong"


def results(tide, *words):
    result = tide("check", "--json", "--calls", 90, *words, timeout=300)
    assert result.code == 0, result.out + result.err
    return result.json["results"]


def test_results_say_what_the_bytes_were(tide):
    first = results(tide, "--seed", 3)
    assert first == results(tide, "--seed", 3, "--procs", "--fabric", "host")
    assert first != results(tide, "--seed", 4)


def test_histogram_says_what_is_missing(tide):
    result = tide("check", "--seed", 11, "--calls", 200, "--json", timeout=300)
    assert result.code == 0, result.out + result.err
    rows, below = result.json["histogram"], result.json["below"]
    assert sum(rows["nodes"].values()) == 200 and result.json["enough"] == 100
    for row in ("processes", "stream_order", "rail_delay", "slow_rank", "run_again"):
        assert set(rows[row]) == {"0", "1"}, row
    assert {"row": "nodes", "bucket": 12, "calls": rows["nodes"].get("12", 0)} in below
    assert all(rows[b["row"]].get(str(b["bucket"]), 0) == b["calls"] < 100 for b in below)
    assert tide("check", "--nodes", 2, "--calls", 20, "--json").json["below"] == []


def test_what_fails_names_its_seed(tide):
    """Nobody keeps a deadline of a millisecond with twelve ranks."""
    result = tide("check", "--nodes", 6, "--local", 2, "--seed", 3, "--calls", 60, "--deadline-ms", 1, timeout=300)
    assert result.code == 1 and result.out.startswith("seed 3 (6 nodes x 2, "), result.out
    assert " waited " in result.out and result.last.endswith(" wrong") and result.last != "check: 60 calls, 0 wrong"


@pytest.mark.parametrize("nodes, local", [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 8)])
def test_topologies(tide, nodes, local):
    result = tide("check", "--nodes", nodes, "--local", local, "--calls", 60, "--json", timeout=300)
    assert result.code == 0, result.out + result.err
    check = result.json
    assert (check["schema"], check["calls"], check["wrong"]) == (1, 60, 0)
    assert check["histogram"]["nodes"] == {str(nodes): 60} and check["histogram"]["local"] == {str(local): 60}


def test_given_shapes_and_knobs(tide, tmp_path):
    path = tmp_path / "s"
    path.write_text("w bf16 33 5\nb bf16 7\nt bf16 3 16 shard=1\n")
    for words in (
        ["--mode", 1],
        ["--w-wave", 1, "--k", 1],
        ["--n-part", 2, "--chunk", 16],
        ["--shard-dtype", "fp32", "--grad-dtype", "fp32"],
        ["--groups", 3, "--landing", "private"],
    ):
        result = tide("check", "--nodes", 4, "--local", 2, "--shapes", path, "--calls", 24, *words)
        assert result.code == 0, result.out + result.err
        assert result.last == "check: 24 calls, 0 wrong"


def test_bad_words(tide):
    for words, line in [
        ("--calls 0", "--calls: 0 is not in 1..1000000000"),
        ("--threads --procs", "--procs: excludes --threads"),
        ("--nodes 9 --local 8 --w-wave 3 --model llama-3.1-70b", None),
        ("x", "'x': unexpected argument"),
        ("--fabric x", "--fabric: 'x' is not built in, expected host, cuda or nccl"),
        ("--groups 2", "--groups: is drawn at random without --model or --shapes"),
        ("--grad-dtype fp32", "--grad-dtype: is drawn at random without --model or --shapes"),
    ]:
        result = tide("check", *words.split())
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), words
        if line:
            assert result.err == f"tide check: {line}\n"
