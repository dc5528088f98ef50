#!/usr/bin/env python3
"""All-gather and reduce-scatter of one parameter group on GPUs: stock FSDP2 (its copies and NCCL), the NCCL call alone,
and TIDE through the C ABI, on the same tensors in one run. Medians of 30 with quartiles, GPU time of the slowest rank.

usage: ops.py [--parts ag,rs,frontier,rails,rivals] [--out FILE] [--repeats 30] [--limit SECONDS a part] [--shape mixed|equal]

ag        P = 30 bf16 parameters, shards of 1 to 512 MiB
rs        P = 16 bf16 gradients, fp32 outputs of 1 to 512 MiB
frontier  reduce-scatter over c_sum, the number of CTAs that add
rails     both with a rank a node (M = 2, L = 1): over copies between the GPUs, and over NCCL's one-sided transfers (2.31.2 or newer)
rivals    NCCL on registered windows (default and zero-CTA policy) and PyTorch's symmetric memory, without FSDP2's copies

Columns as nccl-tests prints them (size of the unsharded side, algbw, busbw in GB/s), then: ratios of time, the host's
time to enqueue, SM milliseconds (CTAs times their duration, at most one CTA an SM).
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import gpu  # noqa: E402
from gpu import MIB  # noqa: E402

SIZES = [1, 2, 4, 8, 32, 128, 512]
FRONTIER_SIZES = [32, 128, 512]
C_SUM = [-1, 1, 2, 4, 8, 16, 32, 64, 96, 132]
KINDS = {"ag": (gpu.AllGather, 30), "rs": (gpu.ReduceScatter, 16)}
HEADER = (
    f"{'':3} {'size':>12} {'shard':>8} {'stock ms':>20} {'algbw':>7} {'busbw':>7} {'NCCL ms':>9} {'TIDE ms':>20} "
    f"{'algbw':>7} {'busbw':>7} {'stock/T':>8} {'NCCL/T':>7} {'host us s/T':>13} {'SM ms s/T':>15} check"
)


def cell(samples):
    middle, low, high = gpu.spread(samples)
    return f"{middle:.4f} ({low:.3f}-{high:.3f})"


def number(x, digits=3):
    return "-" if x is None else f"{x:.{digits}g}"


def print_row(ranks, row):
    median = {k: gpu.spread(v["ms"])[0] for k, v in row["times"].items()}
    whole = row["bytes"] * ranks.size
    busy = (ranks.size - 1) / ranks.size

    def bandwidth(side):
        if side not in median:
            return f"{'-':>7} {'-':>7}"
        speed = whole / median[side] / 1e6
        return f"{speed:7.1f} {speed * busy:7.1f}"

    def ratio(a):
        return f"{median[a] / median['tide']:.2f}" if a in median and "tide" in median else "-"

    host = "/".join(
        f"{gpu.spread(row['times'][k]['host_us'])[0]:.0f}" if k in row["times"] else "-" for k in ("stock", "tide")
    )
    sm = "/".join(number(row["sm_ms"].get(k)) for k in ("stock", "tide"))
    cells = {k: cell(v["ms"]) for k, v in row["times"].items()}
    ranks.say(
        f"{row['kind']:3} {whole:12} {row['bytes'] / MIB:7.4g}M {cells.get('stock', '-'):>20} {bandwidth('stock')} "
        f"{number(median.get('bare'), 4):>9} {cells.get('tide', '-'):>20} {bandwidth('tide')} {ratio('stock'):>8} "
        f"{ratio('bare'):>7} {host:>13} {sm:>15} {row['check']}"
    )


def measure(ranks, work, methods, repeats):
    """Each method's times; one that fails is left out."""
    times, sm = {}, {}
    for name in methods:
        with ranks.guarded(f"{name} {work.bytes}"):
            after = work.release if name == "tide" else None
            times[name] = gpu.timed(ranks, getattr(work, name), repeats, after)
    for name in methods:
        if name in times:
            with ranks.guarded(f"SM time of {name} {work.bytes}"):
                sm[name], kernels = gpu.sm_time(ranks, getattr(work, name), work.release if name == "tide" else None)
                sm[name + " kernels"] = kernels
    return times, sm


def collective(ranks, kind, shape, repeats, sizes, until_s):
    import torch

    until = time.monotonic() + until_s
    make, n_params = KINDS[kind]
    ranks.say(f"\n{kind}: P = {n_params}, {shape} shapes")
    ranks.say(HEADER)
    path = None
    for mib in sizes:
        if max(ranks.everyone(time.monotonic())) > until:
            ranks.say(f"time: {mib} MiB and larger not run")
            break
        work = comm = None
        with ranks.guarded(f"{kind} {mib} MiB on TIDE"):
            comm = ranks.comm()  # one a row: groups that are never called have streams too
            work = make(ranks, mib * MIB, shape, n_params, comm)
            if work.group is not None and path is None:
                path = f"{work.group.path.path.decode()} ({work.group.path.reason.decode()})"
                ranks.say(f"    {path}")
        if work is None:
            with ranks.guarded(f"{kind} {mib} MiB"):
                work = make(ranks, mib * MIB, shape, n_params, None)
        if work is None:
            continue
        check = "-"
        if work.group is not None:
            with ranks.guarded(f"comparison at {mib} MiB"):
                check = "FAILED"
                problems = ranks.everyone(work.compare())
                check = "; ".join(f"rank {r}: {p}" for r, p in enumerate(problems) if p) or "ok"
        methods = ["stock", "bare"] + (["tide"] if work.group is not None and check != "FAILED" else [])
        times, sm = measure(ranks, work, methods, repeats)
        row = {
            "kind": kind,
            "shape": shape,
            "params": n_params,
            "bytes": work.bytes,
            "times": times,
            "sm_ms": sm,
            "check": check,
            "path": path,
        }
        ranks.emit(row)
        print_row(ranks, row)
        del work
        if comm is not None:
            with ranks.guarded("the communicator's end"):
                comm.destroy()
        torch.cuda.empty_cache()


def frontier(ranks, shape, repeats, until_s):
    import torch

    until = time.monotonic() + until_s
    ranks.say("\nrs over c_sum (-1: the plan decides), ms and SM ms")
    ranks.say(f"{'c_sum':>6} " + " ".join(f"{m:>7} MiB {'SM ms':>9}" for m in FRONTIER_SIZES))
    for c_sum in C_SUM:
        if max(ranks.everyone(time.monotonic())) > until:
            ranks.say(f"time: c_sum {c_sum} and more not run")
            break
        line = f"{c_sum:6} "
        with ranks.guarded(f"c_sum {c_sum}"):
            for mib in FRONTIER_SIZES:
                comm = ranks.comm({"c_sum": c_sum})
                work = gpu.ReduceScatter(ranks, mib * MIB, shape, 16, comm)
                times, sm = measure(ranks, work, ["tide"], repeats)
                row = {
                    "kind": "frontier",
                    "c_sum": c_sum,
                    "bytes": work.bytes,
                    "times": times,
                    "sm_ms": sm,
                    "reason": work.group.path.reason.decode(),
                }
                ranks.emit(row)
                line += (
                    f"{gpu.spread(times['tide']['ms'])[0] if 'tide' in times else float('nan'):11.4f} "
                    f"{number(sm.get('tide')):>9} "
                )
                del work
                comm.destroy()
                torch.cuda.empty_cache()
        ranks.say(line)


# What the plan takes a rail to be is a network an eighth as fast as these: a sum and a landing of few CTAs would do for it.
NVLINK = {"node_size": 1, "options": {"c_sum": 96, "c_land": 96}}
RAILS = {
    "M=1 L=2 cuda": {},
    "M=2 L=1 cuda": NVLINK,
    "M=2 L=1 nccl": NVLINK | {"fabric": "nccl"},
}


def rails(ranks, shape, repeats, sizes, until_s):
    import torch

    until = time.monotonic() + until_s
    ranks.say("\nrails: ms, host us to enqueue, stock / TIDE; M=2: two nodes of one GPU each, on one machine")
    for kind, (make, n_params) in KINDS.items():
        for mib in sizes:
            if max(ranks.everyone(time.monotonic())) > until:
                ranks.say(f"time: {kind} {mib} MiB and larger not run")
                break
            medians = {}

            def line(name, work, method, after=None):
                times = gpu.timed(ranks, getattr(work, method), repeats, after)
                medians[name] = gpu.spread(times["ms"])[0]
                ranks.emit({"kind": "rail", "collective": kind, "side": name, "bytes": work.bytes, "times": times})
                ranks.say(
                    f"{kind} {mib:5} MiB {name:13} {cell(times['ms']):>22} ms  {gpu.spread(times['host_us'])[0]:6.0f} us  "
                    f"{medians['stock'] / medians[name]:5.2f}"
                )

            for name, where in {"stock": None, **RAILS}.items():
                with ranks.guarded(f"{kind} {mib} MiB {name}"):
                    comm = None if where is None else ranks.comm(**where)
                    work = make(ranks, mib * MIB, shape, n_params, comm)
                    if where is None:
                        line(name, work, "stock")
                    else:
                        problems = [p for p in ranks.everyone(work.compare()) if p]
                        if problems:
                            raise RuntimeError(problems[0])
                        line(name, work, "tide", work.release)
                    work = None
                    torch.cuda.synchronize()
                    if comm is not None:
                        comm.destroy()
                torch.cuda.empty_cache()


class Windows:
    """NCCL on symmetric windows, bare: buffers from its own allocator, registered."""

    def __init__(self, ranks, zero_cta):
        import torch
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        if zero_cta:
            options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        self.pg = dist.new_group(backend="nccl", pg_options=options, device_id=ranks.device)
        self.ranks, self.token = ranks, torch.zeros(1, device=ranks.device)
        dist.all_reduce(self.token, group=self.pg)  # the communicator exists from here on
        torch.cuda.synchronize()
        self.backend = self.pg._get_backend(ranks.device)
        self.pool = torch.cuda.MemPool(self.backend.mem_allocator)
        self.registered = False

    def empty(self, *elements_and_dtypes):
        import torch

        with torch.cuda.use_mem_pool(self.pool):
            out = [torch.empty(n, dtype=dtype, device=self.ranks.device) for n, dtype in elements_and_dtypes]
        self.backend.register_mem_pool(self.pool, symm=True)
        self.registered = True
        return out

    def forget(self):
        if self.registered:
            self.backend.deregister_mem_pool(self.pool)


def rival_rows(ranks, name, make, repeats, sizes):
    """make(kind, bytes) -> (bytes really, a function)."""
    for kind in ("ag", "rs"):
        for mib in sizes:
            with ranks.guarded(f"{name} {kind} {mib} MiB"):
                n_bytes, f = make(kind, mib * MIB)
                times = gpu.timed(ranks, f, repeats)
                row = {"kind": "rival", "rival": name, "collective": kind, "bytes": n_bytes, "times": {"bare": times}}
                with ranks.guarded(f"SM time of {name}"):
                    row["sm_ms"], row["kernels"] = gpu.sm_time(ranks, f)
                ranks.emit(row)
                ranks.say(
                    f"{name:24} {kind} {mib:5} MiB {cell(times['ms']):>22} ms  "
                    f"{n_bytes * ranks.size / gpu.spread(times['ms'])[0] / 1e6:7.1f} GB/s  "
                    f"SM ms {number(row.get('sm_ms'))}  {', '.join(sorted(row.get('kernels', {})))[:110]}"
                )


def nccl_windows(ranks, zero_cta, repeats, sizes):
    import torch
    import torch.distributed as dist

    name = "NCCL windows, zero CTA" if zero_cta else "NCCL windows"
    windows = Windows(ranks, zero_cta)
    n = ranks.size
    largest = max(sizes) * MIB
    gathered, given, out = windows.empty(
        (n * largest // 2, torch.bfloat16), (n * largest // 4, torch.float32), (largest // 4, torch.float32)
    )
    gathered.normal_()
    given.normal_()

    def make(kind, n_bytes):
        if kind == "ag":
            s = n_bytes // 2
            whole = gathered.narrow(0, 0, n * s)
            mine = whole.narrow(0, ranks.rank * s, s)
            return n_bytes, lambda: dist.all_gather_into_tensor(whole, mine, group=windows.pg)
        if zero_cta:
            raise RuntimeError("the zero-CTA policy has no reduce-scatter")
        e = n_bytes // 4
        return n_bytes, lambda: dist.reduce_scatter_tensor(
            out.narrow(0, 0, e), given.narrow(0, 0, n * e), op=dist.ReduceOp.SUM, group=windows.pg
        )

    rival_rows(ranks, name, make, repeats, sizes)


def symmetric_memory(ranks, repeats, sizes):
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    n, group = ranks.size, dist.group.WORLD.group_name
    if hasattr(symm_mem, "enable_symm_mem_for_group"):
        symm_mem.enable_symm_mem_for_group(group)
    largest = max(sizes) * MIB
    mine = symm_mem.empty(largest // 2, dtype=torch.bfloat16, device=ranks.device)
    given = symm_mem.empty(n * largest // 4, dtype=torch.float32, device=ranks.device)
    mine.normal_()
    given.normal_()
    for tensor in (mine, given):
        symm_mem.rendezvous(tensor, group=group)
    wait = torch.ops._c10d_functional.wait_tensor

    def make(kind, n_bytes):
        if kind == "ag":
            shard = mine[: n_bytes // 2]
            return n_bytes, lambda: wait(torch.ops.symm_mem._low_contention_all_gather(shard, group))
        grads = given[: n * n_bytes // 4]
        return n_bytes, lambda: wait(torch.ops.symm_mem._low_contention_reduce_scatter(grads, "avg", group))

    rival_rows(ranks, "torch symm_mem", make, repeats, sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="ag,rs,frontier,rails,rivals")
    parser.add_argument("--shape", default="mixed", choices=gpu.SHAPES)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="MiB")
    parser.add_argument("--limit", type=float, default=110, help="seconds a part")
    parser.add_argument("--out")
    options = parser.parse_args()
    gpu.prepare_environment()
    if reason := gpu.why_not():
        print(f"ops: not run: {reason}")
        return 0
    sizes = [int(s) for s in options.sizes.split(",")]
    rows, problems = [], []
    document = {"schema": 1, "kind": "ops", "machine": gpu.machine(), "rows": rows, "problems": problems}
    print(f"ops: {document['machine']}")

    def part(name, function, **arguments):
        begin = time.monotonic()
        found, problem = gpu.run_part(function, options.limit, repeats=options.repeats, **arguments)
        rows.extend(found)
        if problem:
            problems.append({"part": name, "text": problem})
            print(f"ops: part {name}: {problem}", flush=True)
        print(f"ops: part {name}: {len(found)} rows in {time.monotonic() - begin:.0f} s", flush=True)
        gpu.write(options.out, document)

    soon = options.limit - 30
    for name in options.parts.split(","):
        if name in KINDS:
            part(name, collective, kind=name, shape=options.shape, sizes=sizes, until_s=soon)
        elif name == "frontier":
            part(name, frontier, shape=options.shape, until_s=soon)
        elif name == "rails":
            part(name, rails, shape=options.shape, sizes=[s for s in sizes if s >= 32], until_s=soon)
        elif name == "rivals":
            few = [s for s in sizes if s in (1, 8, 32, 128, 512)]
            part("windows", nccl_windows, zero_cta=False, sizes=few)
            part("windows, zero CTA", nccl_windows, zero_cta=True, sizes=few)
            part("symm_mem", symmetric_memory, sizes=few)
        else:
            parser.error(f"--parts: {name!r}, expected ag, rs, frontier, rails or rivals")
    failed = [r["failed"] for r in rows if "failed" in r]
    wrong = [r for r in rows if r.get("check", "ok") not in ("ok", "-")]
    print(f"ops: {len(rows)} rows, {len(problems)} parts ended early, failed: {failed or 'none'}, wrong: {len(wrong)}")
    return 1 if problems or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
