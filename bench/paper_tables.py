#!/usr/bin/env python3
"""The paper's Tables 7 and 8, TIDE's columns, against `tide simulate` on machines/paper.txt.

Three constants of that file are not in the paper and are fitted here: on the 32 MiB rows only, to the medians, by the sum
of absolute logarithms of the ratios (the median of RS on 8 nodes is 23 % above its minimum; squares would follow it).
The 128 MiB rows test them. --fit fits anew and prints the values; without it the file is taken as it is. Also shown, in
no fit and in no error of the last line: other operator times that the paper states, and this project's own measurements on
two H200s (docs/gpu.md) against machines/h200-x2.txt. Every reduce-scatter uses 16 sum and
4 landing CTAs (Section 7.1) where nothing else is said. The paper does not state its chunks. On one node Table 8's buffers
exceed the output by 0.25 GiB at both sizes: two slots of seven chunks of 8 Mi bf16 elements; elsewhere 1 Mi is taken.

usage: paper_tables.py [--fit] [--json]
"""

import argparse
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIDE = pathlib.Path(os.environ.get("TIDE_BUILD", ROOT / "build")).resolve() / "tide"
MACHINE = ROOT / "machines" / "paper.txt"
MIB = 1 << 20

FITTED = ["copy_rate", "copy_descriptor", "signal_latency"]
UNITS = {"GB/s": 1e9, "us": 1e-6}

# (table, operator, parameters, nodes, MiB, median ms, minimum ms)
TABLES = [
    (7, "ag", 30, 1, 32, 0.38, 0.38),
    (7, "ag", 30, 2, 32, 1.12, 1.11),
    (7, "ag", 30, 4, 32, 2.60, 2.57),
    (7, "ag", 30, 8, 32, 5.86, 5.52),
    (7, "ag", 30, 1, 128, 1.41, 1.40),
    (7, "ag", 30, 2, 128, 4.20, 4.19),
    (7, "ag", 30, 4, 128, 9.80, 9.76),
    (7, "ag", 30, 8, 128, 21.41, 20.89),
    (8, "rs", 16, 1, 32, 0.42, 0.41),
    (8, "rs", 16, 2, 32, 2.12, 2.08),
    (8, "rs", 16, 4, 32, 3.75, 3.70),
    (8, "rs", 16, 8, 32, 8.12, 6.61),
    (8, "rs", 16, 1, 128, 1.33, 1.29),
    (8, "rs", 16, 2, 128, 7.68, 7.63),
    (8, "rs", 16, 4, 128, 13.99, 13.93),
    (8, "rs", 16, 8, 128, 25.59, 25.02),
]
# Tables of docs/gpu.md by their heads, and the calls as bench/ops.py makes them.
GPU_TABLES = {
    "AG": ("all-gather, P = 30, bf16 shard", "ag --params 30"),
    "RS": ("reduce-scatter, P = 16, fp32 output", "rs --params 16"),
}
OWN_SIZES = (32, 128, 512)
CTAS, CHUNK, NODE_CHUNK = ["--c-sum", "16", "--c-land", "4"], ["--chunk", "1M"], ["--chunk", "8M"]

# (what, words, ms)
OTHERS = [
    ("Section 4.1: RS, 6 nodes, 32 MiB, 4 sum CTAs", "rs --nodes 6 --shard 32M --params 16 --c-sum 4 --c-land 4", 4.81),
    ("Section 4.1: RS, 6 nodes, 32 MiB, 8 sum CTAs", "rs --nodes 6 --shard 32M --params 16 --c-sum 8 --c-land 4", 4.60),
    ("Table 4: RS, 8 nodes, 32 MiB, 16 + 4 CTAs", "rs --nodes 8 --shard 32M --params 16 --c-sum 16 --c-land 4", 6.96),
    ("Table 4: RS, 8 nodes, 32 MiB, 4 + 4 CTAs", "rs --nodes 8 --shard 32M --params 16 --c-sum 4 --c-land 4", 12.02),
    ("Table 6: AG, Llama-3.1 70B", "ag --nodes 8 --model llama-3.1-70b", 4.90),
    ("Table 6: RS, Llama-3.1 70B", "rs --nodes 8 --model llama-3.1-70b --c-sum 16 --c-land 4", 10.60),
    ("Table 6: AG, Wan2.2", "ag --nodes 8 --model wan2.2-t2v-a14b", 2.56),
    ("Table 6: RS, Wan2.2", "rs --nodes 8 --model wan2.2-t2v-a14b --c-sum 16 --c-land 4", 5.58),
]


# (model, tokens a GPU, stock's step s, saved by TIDE %)
FIGURE_8 = [
    ("llama-3.1-70b", 8192, 5.13, 16.2),
    ("llama-3.1-70b", 16384, 8.77, 6.1),
    ("llama-3.1-70b", 24576, 12.74, 4.0),
    ("llama-3.1-70b", 32768, 16.68, 3.1),
    ("wan2.2-t2v-a14b", 7800, 1.74, 7.4),
    ("wan2.2-t2v-a14b", 15600, 3.20, 2.8),
    ("wan2.2-t2v-a14b", 31200, 6.28, 1.4),
    ("qwen3-30b-a3b", 16384, 2.15, 27.1),
    ("qwen3-30b-a3b", 24576, 2.70, 21.4),
    ("qwen3-30b-a3b", 32768, 3.23, 17.3),
]


def run(words, machine, local=8):
    done = subprocess.run(
        [str(TIDE), "simulate", *words, "--local", str(local), "--machine", str(machine), "--json"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"paper_tables: {done.stderr.strip()}")
    return json.loads(done.stdout)


def simulate(words, machine):
    return run([*words, "--ranks", "one"], machine)["calls"][0]["seconds"] * 1e3


def step(model, tokens, tflops, machine):
    words = ["step", "--model", model, "--sweep", f"nodes=8 tokens={tokens}", "--flops", f"{tflops}TFLOP/s"]
    (point,) = run([*words, *CTAS, *CHUNK], machine)["points"]
    return point


def saving(model, tokens, stock_seconds, machine):
    """What TIDE saves when compute is as fast as makes the simulated stock step as long as the paper's: stock's column is
    used, the savings are not."""
    low, high = 10.0, 10000.0
    for _ in range(18):
        middle = math.sqrt(low * high)
        if step(model, tokens, middle, machine)["stock"]["seconds"] > stock_seconds:
            low = middle
        else:
            high = middle
    point = step(model, tokens, high, machine)
    return high, 100 * point["saved"], point["stock"]["seconds"]


def row_ms(row, machine):
    _, operator, params, nodes, size, _, _ = row
    words = [operator, "--nodes", str(nodes), "--shard", str(size * MIB), "--params", str(params), *CTAS]
    return simulate([*words, *(NODE_CHUNK if nodes == 1 else CHUNK)], machine)


def gpu_rows(name):
    """[[MiB, stock ms, NCCL ms, TIDE ms], ...] of one collective: medians on two H200s, from docs/gpu.md."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows = text[text.index(f"| {GPU_TABLES[name][0]} |") :].split("\n\n")[0].splitlines()[2:]
    return [[float(re.match(r"[\d.]+", cell.strip()).group()) for cell in row.split("|")[1:5]] for row in rows]


def own_rows():
    """(collective, MiB, measured ms, simulated ms) on two H200s."""
    out = []
    for name, (_, words) in GPU_TABLES.items():
        for mib, _, _, ms in gpu_rows(name):
            if mib in OWN_SIZES:
                document = run([*words.split(), "--shard", str(int(mib) * MIB), "--target", "1"], "h200-x2", local=2)
                out.append((name, int(mib), ms, document["calls"][0]["seconds"] * 1e3))
    return out


# Why what is furthest off is off, as far as it is understood.
MISFITS = """
What does not fit, and why
  RS, 2 nodes         The paper's takes 2.7 to 3 times its wire time, its 4 and 8 nodes 1.3 to 1.8. One block crosses the rail here, so
                      everything else is in series with it; the op list overlaps the own node's partial with the transfer.
  RS, 8 nodes, 32 MiB The paper's median is 23 % above its minimum; the simulation is 2 % above the minimum.
  AG, 2 and 4 nodes   Two signal latencies a round at 60 us each; the paper hides part of them.
  4 sum CTAs          Table 4 runs at a fixed low clock, Section 4.1 does not: the paper's own two figures for 4 CTAs (12.02 and
                      4.81 ms) cannot both come from one rate a CTA.
  Llama 8K, Qwen3     Stock's step also waits for copies of addresses and sizes behind activation transfers (paper 2.1), and its
                      gathers and reduce-scatters overlap less than here: that is not modelled, so TIDE saves less of it."""


def read_values(text):
    """Fitted keys as (value, unit)."""
    out = {}
    for line in text.splitlines():
        key, _, rest = line.split("#")[0].partition("=")
        if key.strip() in FITTED:
            value, unit = rest.split()
            out[key.strip()] = (float(value), unit)
    return out


def with_values(text, values):
    lines = []
    for line in text.splitlines():
        key = line.split("#")[0].partition("=")[0].strip()
        if key in values:
            value, unit = values[key]
            line = f"{key} = {value:.6g} {unit}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def fit():
    """Coordinate search on the logarithms of the constants, with steps that shrink."""
    text = MACHINE.read_text()
    values = read_values(text)
    rows = [row for row in TABLES if row[4] == 32]
    with tempfile.TemporaryDirectory() as folder:
        machine = pathlib.Path(folder) / "paper"

        def loss(candidate):
            machine.write_text(with_values(text, candidate))
            return sum(abs(math.log(row_ms(row, machine) / row[5])) for row in rows)

        best, step = loss(values), 1.5
        while step > 1.01:
            moved = False
            for key in FITTED:
                for factor in (step, 1 / step):
                    value, unit = values[key]
                    candidate = {**values, key: (value * factor, unit)}
                    now = loss(candidate)
                    if now < best * (1 - 1e-6):
                        best, values, moved = now, candidate, True
                        break
            if not moved:
                step = step**0.5
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the three constants on the 32 MiB rows first")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = MACHINE.read_text()
    values = fit() if options.fit else read_values(text)
    with tempfile.TemporaryDirectory() as folder:
        machine = pathlib.Path(folder) / "paper"
        machine.write_text(with_values(text, values))
        rows = [(row, row_ms(row, machine)) for row in TABLES]
        steps = [(row, *saving(*row[:3], machine)) for row in FIGURE_8]
        others = [(what, simulate([*words.split(), *CHUNK], machine), ms) for what, words, ms in OTHERS]
    own = own_rows()
    error = {size: [abs(ms / row[5] - 1) * 100 for row, ms in rows if row[4] == size] for size in (32, 128)}
    if options.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "kind": "paper_tables",
                    "fitted": {key: f"{v:.6g} {unit}" for key, (v, unit) in values.items()},
                    "rows": [
                        {"table": r[0], "nodes": r[3], "mib": r[4], "paper_ms": r[5], "paper_min_ms": r[6], "ms": ms}
                        for r, ms in rows
                    ],
                    "figure_8": [
                        {"model": r[0], "tokens": r[1], "paper_saved_percent": r[3], "tflops": f, "saved_percent": s}
                        for r, f, s, _ in steps
                    ],
                    "others": [{"what": what, "ms": ms, "paper_ms": paper} for what, ms, paper in others],
                    "h200_x2": [{"collective": c, "mib": mib, "measured_ms": m, "ms": ms} for c, mib, m, ms in own],
                }
            )
        )
        return
    for key, (value, unit) in values.items():
        print(f"fitted on the 32 MiB rows: {key} = {value:.4g} {unit}")
    print(f"\n{'':28}{'paper, min (median) ms':>24}{'simulated':>11}{'error':>9}")
    for row, ms in rows:
        name = f"Table {row[0]}: {row[1].upper()} {row[3]} nodes, {row[4]} MiB"
        print(f"{name:28}{f'{row[6]:.2f} ({row[5]:.2f})':>24}{ms:11.2f}{(ms / row[5] - 1) * 100:+8.1f} %")
    print("\ntwo H200s, measured (docs/gpu.md) and simulated (machines/h200-x2.txt); nothing fitted")
    for name, mib, ms, simulated in own:
        print(f"{f'{name}, {mib} MiB':28}{ms:24.3f}{simulated:11.3f}{(simulated / ms - 1) * 100:+8.1f} %")
    off = [abs(simulated / ms - 1) * 100 for _, _, ms, simulated in own]
    print(f"h200-x2: median error {statistics.median(off):.1f} %, worst {max(off):.1f} %")
    print("\nstated elsewhere in the paper; in no fit and in no error below")
    for what, ms, paper in others:
        print(f"{what:48}{paper:7.2f}{ms:8.2f}{(ms / paper - 1) * 100:+8.1f} %")
    print(f"\nFigure 8, 64 GPUs: saved against stock. {'paper':>14}{'simulated':>11}{'points':>8}   compute that makes stock's step")
    for row, tflops, percent, seconds in steps:
        fits = "" if abs(seconds / row[2] - 1) < 0.01 else f" (stock {seconds:.2f} s instead of {row[2]:.2f})"
        print(
            f"{row[0]:20}{row[1]:8} tokens{row[3]:17.1f} %{percent:9.1f} %{percent - row[3]:+8.1f}   "
            f"{tflops:.0f} TFLOP/s{fits}"
        )
    points = [abs(percent - row[3]) for row, _, percent, _ in steps]
    model, tokens = steps[points.index(max(points))][0][:2]
    print(f"figure 8: median {statistics.median(points):.1f} points, worst {max(points):.1f} ({model}, {tokens} tokens: see below)")
    print(MISFITS)
    for size, what in ((32, "fitted on"), (128, "test")):
        print(
            f"\n{size} MiB rows ({what}): median {statistics.median(error[size]):.1f} %, worst {max(error[size]):.1f} %",
            end="",
        )
    both = error[32] + error[128]
    print(f"\npaper tables: median error {statistics.median(both):.1f} %, worst {max(both):.1f} %")


if __name__ == "__main__":
    main()
