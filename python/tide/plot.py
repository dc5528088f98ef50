"""Draws what the library and the demo write as JSON: python -m tide.plot FILE.json [-o FILE.png]

{"schema": 1, "kind": "losses", "losses": {name: [loss, ...], ...}}   one curve a run, and its distance from the first
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


KINDS = {"losses": losses}


def main():
    parser = argparse.ArgumentParser(prog="tide.plot", description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("-o", "--out", help="default: FILE with .png")
    options = parser.parse_args()
    document = json.loads(Path(options.file).read_text())
    kind = document.get("kind")
    if document.get("schema") != 1 or kind not in KINDS:
        print(
            f"tide.plot: {options.file}: schema {document.get('schema')}, kind {kind!r}; expected schema 1 and one of "
            f"{', '.join(KINDS)}",
            file=sys.stderr,
        )
        return 2
    out = options.out or str(Path(options.file).with_suffix(".png"))
    KINDS[kind](document, out)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
