#!/usr/bin/env python3
"""The README's two plots, docs/plots/*.svg: what docs/gpu.md's tables say, and what `tide simulate` says of larger machines.

    measured.svg    all-gather and reduce-scatter on two H200s: how many times faster than stock FSDP2 and than NCCL alone
    simulated.svg   a training step of three models on up to 1,024 GPUs of machines/paper.txt: what TIDE saves against stock

Each file carries the numbers that it shows. usage: plots.py [--check]; --check draws nothing and says whether those numbers
are still the ones of the tables and of the simulation, as far as one could see.
"""

import html
import json
import os
import re
import subprocess
import sys

from paper_tables import FIGURE_8, GPU_TABLES, ROOT, TIDE, gpu_rows

FOLDER = ROOT / "docs" / "plots"
# (model, tokens a GPU, most nodes): the points of the paper's Figure 8 that are shown beside the curves are these on 8 nodes.
# Qwen3's weights have 128 experts in dimension 0, which FSDP2 shards: more GPUs would gather padding.
CURVES = [
    ("qwen3-30b-a3b", 16384, 16),
    ("llama-3.1-70b", 8192, 128),
    ("wan2.2-t2v-a14b", 15600, 128),
    ("llama-3.1-70b", 32768, 128),
]


def measured():
    """{collective: [[MiB, stock ms, NCCL ms, TIDE ms], ...]} of docs/gpu.md."""
    return {name: gpu_rows(name) for name in GPU_TABLES}


def simulated():
    """{"model, tokens": [[GPUs, saved %], ...]}, and the paper's points at 64 GPUs under "paper"."""
    out = {"paper": [row[3] for curve in CURVES for row in FIGURE_8 if row[:2] == curve[:2]]}
    for model, tokens, nodes in CURVES:
        sweep = ["--sweep", f"nodes=1..{nodes}", f"tokens={tokens}"]
        words = ["simulate", "--machine", "paper", "--model", model, *sweep, "--json"]
        points = json.loads(subprocess.run([str(TIDE), *words], capture_output=True, text=True, check=True).stdout)["points"]
        out[f"{model}, {tokens:,} tokens"] = [[p["gpus"], round(100 * p["saved"], 2)] for p in points]
    return out


def draw_measured(axes, numbers):
    for color, (name, rows) in zip(("C0", "C3"), numbers.items()):
        mib = [row[0] for row in rows]
        axes.plot(mib, [stock / tide for _, stock, _, tide in rows], "o-", color=color, label=f"{name}, stock FSDP2 / TIDE")
        axes.plot(mib, [nccl / tide for _, _, nccl, tide in rows], "o:", color=color, label=f"{name}, NCCL alone / TIDE")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MiB a rank: bf16 shard (AG), fp32 output (RS)")
    axes.set_ylabel("time of the other side / TIDE's")
    axes.set_title("measured: one group on two H200s", fontsize=10)


def draw_simulated(axes, numbers):
    curves = [(name, points) for name, points in numbers.items() if name != "paper"]
    for i, ((name, points), paper) in enumerate(zip(curves, numbers["paper"])):
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", markersize=3, color=f"C{i}", label=name)
        axes.plot([64], [paper], "x", markersize=8, color=f"C{i}")
    axes.plot([], [], "x", markersize=8, color="grey", label="measured, in the paper")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs, nodes of 8")
    axes.set_ylabel("step time saved against stock FSDP2, %")
    axes.set_title("simulated: a training step on the paper's cluster", fontsize=10)


PLOTS = {"measured.svg": (measured, draw_measured), "simulated.svg": (simulated, draw_simulated)}


def draw(path, numbers, fill):
    sys.path.insert(0, str(ROOT / "python"))
    from tide.plot import pyplot

    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and searchable
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    fill(axes, numbers)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": json.dumps(numbers)})
    plt.close(figure)


def shown(path):
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.S) if path.exists() else None
    return json.loads(html.unescape(found.group(1))) if found else None


def flat(numbers):
    """All leaves with where they are."""
    if not isinstance(numbers, (dict, list)):
        return {(): numbers}
    pairs = numbers.items() if isinstance(numbers, dict) else enumerate(numbers)
    return {(key, *rest): value for key, inner in pairs for rest, value in flat(inner).items()}


def same(old, new):
    """Within 1 % or a fifth of a point: an operation more or less in a call does not show."""
    old, new = flat(old), flat(new)
    return old.keys() == new.keys() and all(abs(old[k] - new[k]) <= max(0.2, 0.01 * abs(new[k])) for k in new)


def main():
    stale = []
    for name, (read, fill) in PLOTS.items():
        path = FOLDER / name
        numbers = read()
        if sys.argv[1:] == ["--check"]:
            if not same(shown(path), numbers):
                stale.append(str(path.relative_to(ROOT)))
            continue
        FOLDER.mkdir(exist_ok=True)
        draw(path, numbers, fill)
        print(f"{path.relative_to(ROOT)}: {os.path.getsize(path)} bytes")
    if stale:
        sys.exit(f"plots: {', '.join(stale)}: not what the tables and the simulation say; make plots")


if __name__ == "__main__":
    main()
