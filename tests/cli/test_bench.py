"""tide bench: nccl-tests' columns."""

import pytest


def rows(result):
    return [line.split() for line in result.out.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("collective", ["ag", "rs"])
@pytest.mark.parametrize("ranks", ["--threads", "--procs"])
def test_columns(tide, collective, ranks):
    result = tide("bench", collective, ranks, "-b", "64K", "-e", "256K", "-n", 3, "-w", 1)
    assert result.code == 0 and result.err == ""
    table = rows(result)
    assert [int(r[0]) for r in table] == [65536, 131072, 262144]
    for r in table:
        assert len(r) == 13 and int(r[1]) * 2 * 4 == int(r[0])
        assert r[2:5] == ["bfloat16", "none" if collective == "ag" else "sum", "-1"]
        time, algbw, busbw, wrong = float(r[5]), float(r[6]), float(r[7]), r[8]
        assert wrong == "0" and time > 0
        assert algbw == pytest.approx(int(r[0]) / time / 1e3, abs=0.006 + 0.01 * algbw)
        assert busbw == pytest.approx(algbw * 3 / 4, abs=0.02)
        assert r[12] == ("0" if collective == "ag" else "N/A")
    assert "# Out of bounds values : 0 OK" in result.out and result.last.startswith("# Avg bus bandwidth    : ")


def test_json(tide):
    result = tide(
        "bench",
        "rs",
        "--nodes",
        2,
        "--local",
        2,
        "-b",
        "32K",
        "-e",
        "32K",
        "-n",
        2,
        "--grad-dtype",
        "fp32",
        "--dtype",
        "fp32",
        "--json",
    )
    bench = result.json
    assert result.code == 0 and bench["schema"] == 1 and bench["wrong"] == 0
    (row,) = bench["rows"]
    assert row["size"] == 32768 and row["count"] == 2048 and row["type"] == "float"
    assert row["out_of_place"]["wrong"] == 0 and 0 < row["out_of_place"]["time"] < 10


def test_given_shapes(tide, tmp_path):
    path = tmp_path / "s"
    path.write_text("w bf16 33 5\nb bf16 7\n")
    for collective in ("ag", "rs"):
        result = tide("bench", collective, "--nodes", 2, "--local", 2, "--shapes", path, "-n", 2)
        assert result.code == 0, result.err
        (row,) = rows(result)
        assert int(row[1]) == 9 * 5 + 2


def test_bad_words(tide):
    for words, line in [
        ("", "'': expected ag or rs"),
        ("xx", "'xx': expected ag or rs"),
        ("ag -b 0", "--minbytes: 0 is not in 1..1099511627776"),
        ("ag -b 2M -e 1M", "--minbytes: 2097152 is more than --maxbytes 1048576"),
        ("ag -n", "-n: needs a value"),
        ("ag --model llama-3.1-70b -b 1M", "--minbytes: excludes --model and --shapes, which say the size"),
        ("rs --dtype opaque2", "rs: opaque parameters have no gradients"),
    ]:
        result = tide("bench", *words.split())
        assert (result.code, result.err) == (2, f"tide bench: {line}\n")
