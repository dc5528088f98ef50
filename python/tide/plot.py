"""Draws what the library and the demo write as JSON: python -m tide.plot FILE.json [-o FILE.png]

{"schema": 1, "kind": "losses", "losses": {name: [loss, ...], ...}}   one curve a run, and its distance from the first
{"schema": 1, "kind": "step", "points": [...]}    tide simulate step --json: what is saved and live, over tokens and nodes
{"traceEvents": [...]}                            tide simulate --trace: the time line of one rank (--rank), a row a stream
"""

import argparse
import json
import sys
from pathlib import Path


def _axes(rows, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, 1, figsize=(8, 3 * rows + 1), sharex=True, layout="constrained")
    figure.suptitle(title)
    return figure, axes


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
    figure.savefig(path, dpi=120)


def step(document, path):
    """Above, the share of stock FSDP2's step that TIDE saves, a curve a number of GPUs; below, live bytes of both."""
    figure, (above, below) = _axes(2, f"a training step on machine {document['machine']}")
    points = [p for p in document["points"] if "stock" in p]
    if not points:
        raise ValueError("no point has stock FSDP2 beside TIDE: use --compare stock or --sweep")
    for gpus in sorted({p["gpus"] for p in points}):
        row = [p for p in points if p["gpus"] == gpus]
        tokens = [p["tokens"] for p in row]
        (line,) = above.plot(tokens, [100 * p["saved"] for p in row], "o-", label=f"{gpus} GPUs")
        for side, style in (("tide", "-"), ("stock", ":")):
            below.plot(tokens, [p[side]["live_bytes"] / 2**30 for p in row], style, color=line.get_color())
    above.set_ylabel("saved against stock, %")
    above.set_xscale("log", base=2)
    above.legend()
    below.set_ylabel("live in a layer's backward, GiB\n(dotted: stock)")
    below.set_xlabel("tokens a GPU")
    figure.savefig(path, dpi=120)


def trace(document, path, rank):
    """One bar an operation, one row a stream, coloured by what it does."""
    events = document["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name" and e["pid"] == rank}
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
    if not spans:
        raise ValueError(f"no operation of rank {rank}; there are {sorted({e['pid'] for e in events if e['ph'] == 'X'})}")
    figure, axes = _axes(1, f"rank {rank}")
    kinds = sorted({e["name"] for e in spans})
    for i, kind in enumerate(kinds):
        mine = [e for e in spans if e["name"] == kind]
        axes.barh(
            [names[e["tid"]] for e in mine],
            [e["dur"] / 1e3 for e in mine],
            left=[e["ts"] / 1e3 for e in mine],
            color=f"C{i}",
            label=kind,
        )
    axes.set_xlabel("ms")
    axes.legend(ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.savefig(path, dpi=120)


KINDS = {"losses": losses, "step": step}


def main():
    parser = argparse.ArgumentParser(prog="tide.plot", description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-o", "--out", help="default: FILE with .png; .svg works as well")
    parser.add_argument("--rank", type=int, default=0, help="of a trace (default 0)")
    options = parser.parse_args()
    document = json.loads(Path(options.file).read_text())
    out = options.out or str(Path(options.file).with_suffix(".png"))
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
    except ValueError as error:
        print(f"tide.plot: {options.file}: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
