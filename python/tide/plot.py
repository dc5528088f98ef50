"""Draws what the library and the demo write as JSON: python -m tide.plot FILE.json [-o FILE.png|svg]

{"schema": 1, "kind": "losses", "losses": {name: [loss, ...], ...}}   one curve a run, and its distance from the first
{"schema": 1, "kind": "step", "points": [...]}    tide simulate step --json: what is saved and live, over tokens and nodes
{"traceEvents": [...]}                            tide simulate --trace: time line, a row a stream, and memory over time

FILE - is standard input; `tide simulate --plot FILE` hands its data over in that way.
"""

import argparse
import json
import sys
from pathlib import Path


def pyplot():
    """matplotlib, drawing into files; the same figure gives the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tide"
    import matplotlib.pyplot as plt

    return plt


def _axes(rows, title):
    figure, axes = pyplot().subplots(rows, 1, figsize=(8, 3 * rows + 1), sharex=True, layout="constrained")
    figure.suptitle(title)
    return figure, axes


def save(figure, path):
    """A .png or .svg, without the time of day."""
    figure.savefig(path, dpi=120, metadata={"Date": None} if str(path).endswith(".svg") else {})


def losses(document, path):
    """Loss curves above; below, each run's relative difference to the first one, on a logarithmic axis."""
    figure, (above, below) = _axes(2, document.get("title", "loss"))
    names = list(document["losses"])
    reference = document["losses"][names[0]]
    steps = range(1, len(reference) + 1)
    for name, style in zip(names, ("-", "--", ":") * len(names)):
        values = document["losses"][name]
        above.plot(steps, values, style, label=name)
        if name != names[0]:
            below.plot(steps, [max(abs(a - b) / abs(b), 1e-9) for a, b in zip(values, reference)], style, label=name)
    above.set_ylabel("loss, nats a byte")
    above.legend()
    below.axhline(1e-5, color="grey", linewidth=0.8)
    below.set_yscale("log")
    below.set_ylim(5e-10, 1e-4)
    below.set_ylabel(f"difference to {names[0]}\n(none: 1e-9)")
    below.set_xlabel("step")
    below.legend()
    save(figure, path)


def _thousands(value, _=None):
    """4096: 4K."""
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"


def step(document, path):
    """Above, the share of stock FSDP2's step that TIDE saves; below, live bytes of both. Over tokens, a curve a number of GPUs;
    over GPUs where there is one number of tokens."""
    points = [p for p in document["points"] if "stock" in p]
    if not points:
        raise ValueError("no point has stock FSDP2 beside TIDE: use --compare stock or --sweep")
    over, curve = "tokens", "gpus"
    if len({p["tokens"] for p in points}) == 1 and len({p["gpus"] for p in points}) > 1:
        over, curve = curve, over
    figure, (above, below) = _axes(2, f"a training step of {document.get('model') or 'a model'} on machine {document['machine']}")
    for value in sorted({p[curve] for p in points}):
        row = [p for p in points if p[curve] == value]
        x = [p[over] for p in row]
        label = f"{value} GPUs" if curve == "gpus" else f"{_thousands(value)} tokens a GPU"
        (line,) = above.plot(x, [100 * p["saved"] for p in row], "o-", label=label)
        for side, style in (("tide", "-"), ("stock", ":")):
            below.plot(x, [p[side]["live_bytes"] / 2**30 for p in row], style, color=line.get_color())
    above.set_ylabel("saved against stock, %")
    above.set_xscale("log", base=2)
    above.legend(fontsize=8)
    below.set_ylim(bottom=0)
    below.set_ylabel("live in a layer's backward, GiB\n(dotted: stock)")
    below.xaxis.set_major_formatter(_thousands if over == "tokens" else "{x:g}")
    below.set_xlabel("tokens a GPU" if over == "tokens" else "GPUs")
    save(figure, path)


def _rows(events, rank):
    """{(rank, stream): row} in order, streams by their numbers, and the names of the rows."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    keys = sorted(key for key in names if rank is None or key[0] == rank)
    return {key: row for row, key in enumerate(keys)}, [(key[0], names[key]) for key in keys]


def _time_line(axes, events, rank):
    """One bar an operation, one row a stream of a rank, coloured by what it does."""
    from matplotlib.collections import PolyCollection

    rows, labels = _rows(events, rank)
    spans = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in rows]
    if not spans:
        ranks = sorted({e["pid"] for e in events if e["ph"] == "X"})
        raise ValueError(f"no operation of rank {rank}; there are {ranks}")
    for i, kind in enumerate(sorted({e["name"] for e in spans})):
        boxes = []
        for e in spans:
            if e["name"] == kind:
                y, left, right = rows[e["pid"], e["tid"]], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3
                boxes.append([(left, y - 0.4), (right, y - 0.4), (right, y + 0.4), (left, y + 0.4)])
        axes.add_collection(PolyCollection(boxes, facecolors=f"C{i}", edgecolors=f"C{i}", linewidths=0.2, label=kind))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, max(e["ts"] + e["dur"] for e in spans) / 1e3)
    if len({r for r, _ in labels}) == 1 or len(labels) <= MANY_ROWS:
        one = len({r for r, _ in labels}) == 1
        axes.set_yticks(range(len(labels)), [name if one else f"{r} {name}" for r, name in labels], fontsize=7)
    else:
        first = {}
        for row, (r, _) in enumerate(labels):
            first.setdefault(r, row)
        axes.set_yticks(list(first.values()), [f"rank {r}" for r in first], fontsize=5)
    axes.legend(ncols=8, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _memory(axes, events, rank):
    """What holds data on one rank, region upon region."""
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == rank]
    ms = [e["ts"] / 1e3 for e in counters]
    regions = [k for k in counters[0]["args"] if any(e["args"][k] for e in counters)] if counters else []
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1e3
    levels = [[e["args"][k] / 2**20 for e in counters] for k in regions]
    if regions:
        axes.stackplot([0, *ms, end], [[0, *row, row[-1]] for row in levels], labels=regions, step="post", linewidth=0)
        axes.legend(ncols=8, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"in use on rank {rank}, MiB")
    axes.set_xlabel("ms")


MANY_ROWS = 60


def trace(document, path, rank):
    """The time line of every rank and stream, and below the memory in use over time."""
    events = document["traceEvents"]
    rows = len(_rows(events, rank)[0])
    height = min(max(rows * 0.16, 1.5), 24)
    figure, (above, below) = pyplot().subplots(
        2, 1, figsize=(10, height + 3), height_ratios=(height, 2), sharex=True, layout="constrained"
    )
    _time_line(above, events, rank)
    _memory(below, events, min(e["pid"] for e in events) if rank is None else rank)
    save(figure, path)


KINDS = {"losses": losses, "step": step}


def main():
    parser = argparse.ArgumentParser(prog="tide.plot", description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-o", "--out", help="default: FILE with .png; .svg works as well")
    parser.add_argument("--rank", type=int, help="of a trace: this one alone (default: all)")
    options = parser.parse_args()
    document = json.load(sys.stdin) if options.file == "-" else json.loads(Path(options.file).read_text())
    out = options.out or str(Path("plot" if options.file == "-" else options.file).with_suffix(".png"))
    kind = document.get("kind")
    if "traceEvents" not in document and (document.get("schema") != 1 or kind not in KINDS):
        print(
            f"tide.plot: {options.file}: schema {document.get('schema')}, kind {kind!r}; expected a trace, or schema 1 and "
            f"one of {', '.join(KINDS)}",
            file=sys.stderr,
        )
        return 2
    try:
        if "traceEvents" in document:
            trace(document, out, options.rank)
        else:
            KINDS[kind](document, out)
    except (ValueError, OSError, ImportError) as error:
        print(f"tide.plot: {options.file}: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
