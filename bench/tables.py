#!/usr/bin/env python3
"""Markdown tables of what ops.py, overlap.py and train.py have written: tables.py FILE.json..."""

import json
import statistics
import sys

MIB, GIB = 1 << 20, 1 << 30
NAMES = {"ag": "all-gather, P = 30, bf16 shard", "rs": "reduce-scatter, P = 16, fp32 output"}


def median(samples):
    return statistics.median(samples)


def spread(samples):
    q = statistics.quantiles(samples, n=4)
    return f"{median(samples):.4f} ({q[0]:.3f}-{q[2]:.3f})"


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def size(n_bytes):
    return f"{round(n_bytes / MIB)} MiB"


def ops(document):
    rows = [r for r in document["rows"] if "failed" not in r]
    for kind, name in NAMES.items():
        of_kind = [r for r in rows if r["kind"] == kind]
        lines = []
        for r in of_kind:
            times = r["times"]
            ms = {k: median(t["ms"]) for k, t in times.items()}
            host = {k: f"{median(t['host_us']):.0f}" for k, t in times.items()}
            sm = {k: f"{v:.3g}" for k, v in r["sm_ms"].items() if isinstance(v, (int, float))}
            lines.append(
                [size(r["bytes"])]
                + [spread(times[k]["ms"]) if k in times else "-" for k in ("stock", "bare", "tide")]
                + [f"{ms[k] / ms['tide']:.2f}" if k in ms and "tide" in ms else "-" for k in ("stock", "bare")]
                + [f"{host.get('stock', '-')} / {host.get('tide', '-')}", f"{sm.get('stock', '-')} / {sm.get('tide', '-')}"]
            )
        if lines:
            table(
                [name, "stock, ms", "NCCL alone", "TIDE", "stock / TIDE", "NCCL / TIDE", "host, us", "SM ms"],
                lines,
            )
    frontier = {}
    for r in rows:
        if r["kind"] == "frontier" and "tide" in r["times"]:
            frontier.setdefault(r["c_sum"], {})[round(r["bytes"] / MIB)] = r
    sizes = sorted({s for its in frontier.values() for s in its})
    if frontier:
        lines = []
        for c_sum, its in frontier.items():
            cells = ["the plan's" if c_sum < 0 else str(c_sum)]
            for s in sizes:
                r = its.get(s)
                cells.append(f"{median(r['times']['tide']['ms']):.3f} / {r['sm_ms'].get('tide', 0):.3g}" if r else "-")
            lines.append(cells)
        table(["c_sum"] + [f"{s} MiB: ms / SM ms" for s in sizes], lines)
    rivals = {}
    for r in rows:
        if r["kind"] == "rival":
            rivals.setdefault((r["rival"], r["collective"]), {})[round(r["bytes"] / MIB)] = median(r["times"]["bare"]["ms"])
    sizes = sorted({s for its in rivals.values() for s in its})
    if rivals:
        table(
            ["bare, ms"] + [f"{s} MiB" for s in sizes],
            [
                [f"{name}, {'all-gather' if kind == 'ag' else 'reduce-scatter'}"]
                + [f"{its[s]:.4f}" if s in its else "-" for s in sizes]
                for (name, kind), its in rivals.items()
            ],
        )


    rails = {}
    for r in rows:
        if r["kind"] == "rail":
            rails.setdefault((r["collective"], round(r["bytes"] / MIB)), {})[r["side"]] = r["times"]
    if rails:
        sides = list(dict.fromkeys(side for its in rails.values() for side in its))
        table(
            ["ms (us to enqueue)"] + sides,
            [
                [f"{'all-gather' if kind == 'ag' else 'reduce-scatter'}, {s} MiB"]
                + [f"{median(its[k]['ms']):.3f} ({median(its[k]['host_us']):.0f})" if k in its else "-" for k in sides]
                for (kind, s), its in rails.items()
            ],
        )


def overlap(document):
    rows = [r for r in document["rows"] if r.get("kind") == "overlap"]
    victims = list(dict.fromkeys(r["victim"] for r in rows))
    base = {r["victim"]: r["ms"] for r in document["rows"] if r.get("kind") == "victim"}
    by_name = {}
    for r in rows:
        by_name.setdefault(r["collective"], {})[r["victim"]] = r
    lines = []
    for name, its in by_name.items():
        one = next(iter(its.values()))
        cells = [name, f"{one['alone_ms']:.3f}", "-" if one["sm_ms"] is None else f"{one['sm_ms']:.3g}"]
        for v in victims:
            r = its.get(v)
            cells.append(
                f"{r['slowdown_percent']:+.1f} % / {r['times_faster_than_stock']:.2f}{'' if r['outlasted'] else ' (!)'}"
                if r
                else "-"
            )
        lines.append(cells)
    table(
        ["collective", "alone, ms", "SM ms"] + [f"{v} ({base[v]:.3f} ms): slower by / x stock there" for v in victims],
        lines,
    )


def train(document):
    models = list(dict.fromkeys(r["model"] for r in document["rows"] if "model" in r))
    lines = []
    for model in models:
        rows = {r["kind"]: r for r in document["rows"] if r.get("model") == model and r["kind"] != "comparison"}
        losses = {r["label"]: r["loss_difference"] for r in document["rows"] if r.get("kind") == "comparison" and r["model"] == model}
        stock = rows.get("stock")
        for kind, r in rows.items():
            fb, step = median(r["fb_ms"]), median(r["step_ms"])
            against = "-" if stock is None or kind == "stock" else f"{100 * (fb / median(stock['fb_ms']) - 1):+.1f} %"
            lines.append(
                [
                    f"{model}, {r['tokens']:,} tokens",
                    kind,
                    f"{fb:.1f}",
                    against,
                    "-" if kind == "ceiling" else f"{step:.1f}",
                    f"{(r['peak_reserved'] + r.get('added_to_reserved', 0)) / GIB:.2f}",
                    f"{r['device_used'] / GIB:.2f}",
                    f"{losses[kind]:.1e}" if kind in losses else "-",
                    f"{r['sm_mhz']:.0f} / {r['watt']:.0f}" if "sm_mhz" in r else "-",
                ]
            )
    table(
        [
            "model",
            "",
            "forward + backward, ms",
            "against stock",
            "step, ms",
            "peak reserved, GiB",
            "device, GiB",
            "losses, relative to stock",
            "SM clock, MHz / W",
        ],
        lines,
    )


def main():
    for path in sys.argv[1:]:
        with open(path) as file:
            document = json.load(file)
        machine = document["machine"]
        print(f"{machine.get('date')}, {machine.get('gpus')}, torch {machine.get('torch')}, NCCL {machine.get('nccl')}\n")
        {"ops": ops, "overlap": overlap, "train": train}[document["kind"]](document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
