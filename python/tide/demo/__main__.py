"""make demo: trains a small transformer on stock FSDP2 and on TIDE, compares the two, and ends with `demo: ok` or
says what is wrong."""

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

# (device, ranks, ranks a node): two virtual nodes of CPU ranks, or one node of two GPUs where there are two.
ON_CPU, ON_GPUS = ("cpu", 4, 2), ("cuda", 2, 2)
NAMES = ("stock FSDP2", "TIDE", "TIDE again")
LAST, LOSS_BOUND, NEEDED_STEPS = 20, 2.4, 200


def place():
    """Where the demo runs. Only asks how many GPUs there are: the ranks are who start CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    return ON_GPUS if torch.cuda.is_available() and torch.cuda.device_count() >= 2 else ON_CPU


def run_ranks(text, steps, where, show):
    device, n_ranks, node_size = where
    from tide.demo.train import rank_main

    context = mp.get_context("spawn")
    processes, pipes, results = [], {}, {}
    with tempfile.TemporaryDirectory(prefix="tide-demo-") as folder:
        for rank in range(n_ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(there, rank, n_ranks, f"{folder}/store", text, steps, node_size, device)
            )
            process.start()
            there.close()
            processes.append(process)
            pipes[here] = rank
        try:
            while pipes:
                for pipe in connection.wait(list(pipes)):
                    try:
                        kind, *what = pipe.recv()
                    except EOFError:
                        rank = pipes.pop(pipe)
                        if rank not in results:
                            processes[rank].join(5)
                            raise SystemExit(f"demo: rank {rank} died with exit code {processes[rank].exitcode}")
                        continue
                    if kind == "progress":
                        show(*what)
                    elif kind == "failed":
                        raise SystemExit(f"demo: rank {what[0]} failed:\n{what[1]}")
                    else:
                        results[pipes[pipe]] = what[0]
        finally:
            for process in processes:
                if process.is_alive() and len(results) < n_ranks:
                    process.kill()
                process.join()
    return results[0]


class Progress:
    def __init__(self, steps):
        self.steps, self.run, self.live = steps, None, sys.stdout.isatty()

    def __call__(self, run, step, loss):
        if run != self.run:
            self.run, self.start = run, time.monotonic()
        last = step == self.steps - 1
        took = time.monotonic() - self.start
        line = f"{NAMES[run]:12}  step {step + 1:4} of {self.steps}  loss {loss:.4f}  {took:5.1f} s"
        if self.live:
            print(f"\r{line}", end="\n" if last else "", flush=True)
        elif last or (step + 1) % 50 == 0:
            print(line, flush=True)


def mean_of_last(losses):
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def relative_difference(losses, reference):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference))


def table(result):
    stock, tide, again = result["losses"]
    step = result["step_s"]

    def row(name, *cells):
        print(f"  {name:44}" + "".join(f"{cell:>16}" for cell in cells))

    print()
    row("", *NAMES)
    row("first loss", *(f"{losses[0]:.6f}" for losses in result["losses"]))
    row(f"last loss (mean of {len(stock[-LAST:])})", *(f"{mean_of_last(losses):.6f}" for losses in result["losses"]))
    row(
        "largest relative loss difference to stock",
        "-",
        *(f"{relative_difference(x, stock):.1e}" for x in (tide, again)),
    )
    row("first gradients, difference to fp64", *(f"{error:.1e}" for error in result["fp64_error"]))
    row("first gradients, difference to stock", "-", f"{result['gradient_difference']:.1e}", "")
    row("last weights, largest difference to stock", "-", f"{result['weight_difference']:.1e}", "")
    row("bitwise equal to the other TIDE run", "-", *[("yes" if result["repeat_equal"] else "no")] * 2)
    row("median step, ms", *(f"{s * 1e3:.1f}" for s in step))
    row("speed against stock", "1.00", *(f"{step[0] / s:.2f}" for s in step[1:]))
    row(
        "layout copies and casts, MB a step and rank",
        *(f"{result[k + '_copy_bytes'] / 1e6:.2f}" for k in ("stock", "tide")),
        "",
    )
    row(
        "communication buffers, MB a rank", *(f"{result[k + '_buffer_bytes'] / 1e6:.2f}" for k in ("stock", "tide")), ""
    )
    print("\n  groups of the first TIDE run\n")
    print("\n".join("  " + line for line in str(result["reports"][0]).splitlines()))
    print()


def verdicts(result, steps):
    """(name, met or None when not applicable, what was found)."""
    stock, tide, again = result["losses"]
    mean = mean_of_last(tide)
    if steps >= NEEDED_STEPS:
        yield f"mean of the last {LAST} losses below {LOSS_BOUND} nats", mean < LOSS_BOUND, f"{mean:.4f}"
    else:
        yield (
            f"mean of the last {LAST} losses below {LOSS_BOUND} nats",
            None,
            f"not applicable to {steps} steps; {mean:.4f}",
        )
    worst = max(relative_difference(tide, stock), relative_difference(again, stock))
    yield "losses within 1e-5 of stock at every step", worst <= 1e-5, f"{worst:.1e}"
    error = max(result["fp64_error"])
    yield "first gradients within 1e-5 of fp64, stock and TIDE", error <= 1e-5, f"{error:.1e}"
    yield "the two TIDE runs are bitwise equal", result["repeat_equal"], "yes" if result["repeat_equal"] else "no"
    groups = [g for report in result["reports"] for g in report]
    off = [f"{g.module}: {g.reason}" for g in groups if not g.on_tide]
    yield "every group on TIDE", not off, "; ".join(off) or f"{len(groups) // 2} groups"
    idle = [g.module for g in groups if g.all_gathers < steps or g.reduce_scatters < steps]
    fewest = min(g.all_gathers for g in groups), min(g.reduce_scatters for g in groups)
    found = "; ".join(idle) or f"at least {fewest[0]} all-gathers, {fewest[1]} reduce-scatters"
    yield "the engine was called for every group in every step", not idle, found


def main():
    parser = argparse.ArgumentParser(prog="tide.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=NEEDED_STEPS)
    parser.add_argument("--text", help="a file or a folder to learn from; default: the standard library's sources")
    parser.add_argument("--out", default="demo-out", help="folder for losses.png and demo.json")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps: {options.steps}, expected 2 or more")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    from tide import plot
    from tide.demo.model import read_text

    text, what = read_text(options.text)
    where = device, n_ranks, node_size = place()
    nodes = f"{n_ranks // node_size} virtual nodes x {node_size}" if n_ranks > node_size else "one node"
    print(f"demo: {n_ranks} {device} ranks as {nodes}; text: {what}", flush=True)
    result = run_ranks(text, options.steps, where, Progress(options.steps))
    table(result)

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "kind": "losses",
        "title": "the same training on stock FSDP2 and on TIDE",
        "losses": dict(zip(NAMES, result["losses"])),
        "step_s": dict(zip(NAMES, result["step_s"])),
    }
    (out / "demo.json").write_text(json.dumps(document))
    plot.losses(document, out / "losses.png")
    print(f"  plot: {out / 'losses.png'}\n")

    failed = []
    for name, met, found in verdicts(result, options.steps):
        print(f"  {'ok  ' if met else 'n/a ' if met is None else 'FAIL'}  {name}: {found}")
        if met is False:
            failed.append(name)
    took = time.monotonic() - started
    if failed:
        print(f"demo: failed: {'; '.join(failed)} ({took:.0f} s)")
        return 1
    print(f"demo: ok, {options.steps} steps three times in {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
