#!/usr/bin/env python3
"""What a collective costs the compute beside it: slowdown of a victim while all-gathers or reduce-scatters repeat, both
ranks, stock FSDP2 and TIDE in one run.

usage: overlap.py [--victims thin,square,elementwise] [--mib 128] [--out FILE] [--limit SECONDS]

thin         GEMM 256 x 8192 x 8192, bf16: one wave
square       GEMM 8192 x 8192 x 8192, bf16
elementwise  256 MiB read, 256 MiB written

Columns: the victim's slowdown; the collective's time alone and beside the victim; how much faster than stock it is there;
SM milliseconds of one call (CTAs times their duration, at most one CTA an SM).
"""

import argparse
import math
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import gpu  # noqa: E402
from gpu import MIB  # noqa: E402

VICTIMS = ("thin", "square", "elementwise")
C_SUM = [-1, 1, 2, 4, 8, 16, 32]
WINDOW_MS, ROUNDS = 12.0, 3


def victim(name, device):
    import torch

    if name == "elementwise":
        x, y = (torch.randn(64 * MIB, device=device) for _ in range(2))
        return lambda: torch.mul(x, 1.5, out=y)
    m = 256 if name == "thin" else 8192
    a = torch.randn(m, 8192, device=device).bfloat16()
    b = torch.randn(8192, 8192, device=device).bfloat16()
    out = torch.empty(m, 8192, device=device, dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=out)


def gpu_ms(f, times):
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(2e6 + 4e4 * times))
    start.record()
    for _ in range(times):
        f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def alone(ranks, f):
    """ms of one iteration, the slowest rank's; median of several windows."""
    gpu_ms(f, 5)
    one = max(ranks.everyone(gpu_ms(f, 10)))
    times = max(6, min(250, math.ceil(WINDOW_MS / one)))
    samples = []
    for _ in range(5):
        ranks.barrier()
        samples.append(gpu_ms(f, times))
    return max(ranks.everyone(gpu.spread(samples)[0])), times


def beside(ranks, f, times, f_ms, collective, collective_ms, side):
    """(ms of f, ms of the collective) while both run; None where the collectives ended first."""
    import torch

    calls = 4 + math.ceil(2.0 * times * f_ms / collective_ms)
    main = torch.cuda.current_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
    torch.cuda.synchronize()
    ranks.barrier()
    torch.cuda._sleep(int(3e6 + 3e4 * times))  # the host gets ahead
    ranks.align()
    side.wait_stream(main)

    def call(i):
        with torch.cuda.stream(side):
            collective()
            marks[i].record()

    call(0)
    main.wait_event(marks[0])  # the first is over: a collective is under way when the victim begins
    call(1)
    start.record()
    for _ in range(times):
        f()
    end.record()
    for i in range(2, calls):
        call(i)
    torch.cuda.synchronize()
    window = start.elapsed_time(end)
    done = [start.elapsed_time(mark) for mark in marks]
    inside = sum(0.0 < t <= window for t in done)
    mine = (window / times, window / inside if inside else window, done[-1] >= 0.98 * window)
    all_of_them = ranks.everyone(mine)
    return (
        max(x[0] for x in all_of_them),
        max(x[1] for x in all_of_them),
        all(x[2] for x in all_of_them),
    )


def overlap(ranks, victims, mib, until_s):
    import torch

    until = time.monotonic() + until_s
    side = torch.cuda.Stream(priority=-1)  # FSDP2's collectives have a high priority too
    base = {}
    functions = {}
    for name in victims:
        with ranks.guarded(f"victim {name}"):
            functions[name] = victim(name, ranks.device)
            base[name] = alone(ranks, functions[name])
            ranks.say(f"{name}: {base[name][0]:.4f} ms alone")
            ranks.emit({"kind": "victim", "victim": name, "ms": base[name][0]})

    stock_ms = {}
    head = f"{'collective':22} {'ms alone':>9} {'SM ms':>8}"
    ranks.say(head + "".join(f" | {v:>11} {'%':>7} {'coll. ms':>9} {'x stock':>7}" for v in base))

    def row(name, kind, collective, release=None):
        """Measures one collective beside every victim."""
        if max(ranks.everyone(time.monotonic())) > until:
            ranks.say(f"time: {name} not run")
            return

        def repeated():
            collective()
            if release:
                release()

        with ranks.guarded(name):
            times = gpu.timed(ranks, collective, 10, release)
            ms = gpu.spread(times["ms"])[0]
            sm = None
            with ranks.guarded(f"SM time of {name}"):
                sm, _ = gpu.sm_time(ranks, collective, release)
            line = f"{name:22} {ms:9.4f} {'-' if sm is None else f'{sm:8.2f}'}"
            for v, f in functions.items():
                f_ms, n = base[v]
                bare, rounds = [], []
                for _ in range(ROUNDS):  # in turn: a GPU that has been busy for long is slower
                    ranks.barrier()
                    bare.append(max(ranks.everyone(gpu_ms(f, n))))
                    rounds.append(beside(ranks, f, n, f_ms, repeated, ms, side))
                slow = gpu.spread([r[0] for r in rounds])[0]
                its = gpu.spread([r[1] for r in rounds])[0]
                outlasted = all(r[2] for r in rounds)
                percent = 100 * (slow / gpu.spread(bare)[0] - 1)
                stock_ms.setdefault((kind, v), its)
                speed = stock_ms[kind, v] / its
                line += f" | {slow:11.4f} {percent:6.1f}{' ' if outlasted else '!'} {its:9.4f} {speed:7.2f}"
                ranks.emit(
                    {
                        "kind": "overlap",
                        "collective": name,
                        "victim": v,
                        "mib": mib,
                        "alone_ms": ms,
                        "sm_ms": sm,
                        "victim_ms": slow,
                        "victim_alone_ms": gpu.spread(bare)[0],
                        "slowdown_percent": percent,
                        "beside_ms": its,
                        "times_faster_than_stock": speed,
                        "outlasted": outlasted,
                        "rounds": [list(r) for r in rounds],
                    }
                )
            ranks.say(line)

    work = None
    for kind, make in (("AG", gpu.AllGather), ("RS", gpu.ReduceScatter)):
        with ranks.guarded(f"stock {kind}"):
            work = make(ranks, mib * MIB)
            row(f"stock {kind}", kind, work.stock)
            row(f"NCCL {kind} alone", kind, work.bare)
        work = None
        torch.cuda.empty_cache()
        for c_sum in C_SUM if kind == "RS" else [-1]:
            name = f"TIDE {kind}" + ("" if kind == "AG" else " c_sum " + ("auto" if c_sum < 0 else str(c_sum)))
            with ranks.guarded(name):
                comm = ranks.comm({"c_sum": c_sum})
                work = make(ranks, mib * MIB, comm=comm)
                row(name, kind, work.tide, work.release)
                work = None
                torch.cuda.synchronize()
                comm.destroy()
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--mib", type=int, default=128, help="of an all-gather shard, of a reduce-scatter output")
    parser.add_argument("--limit", type=float, default=170, help="seconds")
    parser.add_argument("--out")
    options = parser.parse_args()
    victims = options.victims.split(",")
    if unknown := [v for v in victims if v not in VICTIMS]:
        parser.error(f"--victims: {unknown[0]!r}, expected {', '.join(VICTIMS)}")
    gpu.prepare_environment()
    if reason := gpu.why_not():
        print(f"overlap: not run: {reason}")
        return 0
    document = {"schema": 1, "kind": "overlap", "machine": gpu.machine()}
    print(f"overlap: {document['machine']}")
    rows, problem = gpu.run_part(
        overlap, options.limit, victims=victims, mib=options.mib, until_s=options.limit - 40
    )
    document |= {"rows": rows, "problem": problem}
    if problem:
        print(f"overlap: {problem}")
    gpu.write(options.out, document)
    failed = [r["failed"] for r in rows if "failed" in r]
    print(f"overlap: {len(rows)} rows, failed: {failed or 'none'}; '!': the collectives ended before the victim")
    return 1 if problem or failed else 0


if __name__ == "__main__":
    sys.exit(main())
