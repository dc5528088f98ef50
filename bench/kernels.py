"""Sums beside a matrix product: what the product loses, and what the sums move meanwhile.

A product of 256 x 8192 x 8192 in bf16 is one wave of CTAs on a GPU of 132 SMs and leaves a few of them free. It repeats on one
stream, sums of bf16 sources into fp32 repeat on another. Times are medians; both sides begin behind one gate, and whichever
is not measured lasts longer than the one that is. Needs one GPU.

usage: bench/kernels.py [--rounds N] [--only TEXT] [--out FILE]
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("TIDE_BUILD", ROOT / "build"))
PRODUCT = (256, 8192, 8192)
# slot bytes, warps, slots a warp
SHAPES = [
    (4096, 12, 2),
    (4096, 8, 2),
    (4096, 4, 2),
    (1024, 16, 2),
    (1024, 8, 3),
    (1024, 8, 2),
    (1024, 6, 2),
    (1024, 4, 4),
    (1024, 4, 2),
]
CTAS = (1, 2, 4, 8, 16, 32, 48, 64, 128)


def load():
    lib = ctypes.CDLL(str(BUILD / "bench" / "libkernels.so"))
    lib.kernels_error.restype = ctypes.c_char_p
    lib.kernels_open.restype = ctypes.c_void_p
    lib.kernels_close.argtypes = [ctypes.c_void_p]
    lib.kernels_shape.argtypes = [ctypes.c_void_p] + 3 * [ctypes.c_uint32]
    lib.kernels_shape.restype = None
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    lib.kernels_sum.argtypes = [ctypes.c_void_p, ctypes.c_void_p, u64, u64, u32, u64, u64, u32, u64]
    return lib


class Bench:
    def __init__(self, torch, rounds):
        self.torch, self.rounds = torch, rounds
        m, n, k = PRODUCT
        torch.cuda.init()
        self.a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        self.c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.elems = 16 << 20
        # Not a power of two apart: sources that begin in one bank of the memory each are slower than those of a real call.
        # Whole lines of 128 bytes apart: sums off them are in `tide kernels --bench`.
        self.apart = 2 * (self.elems + 75_904)
        self.src = torch.randn(8, self.apart // 2, device="cuda", dtype=torch.bfloat16)
        self.dst = torch.empty(self.elems, device="cuda")
        self.done = torch.zeros(64, device="cuda", dtype=torch.int32)
        self.main, self.side = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self.lib = load()
        self.kernels = self.lib.kernels_open()
        if not self.kernels:
            sys.exit(f"bench/kernels.py: {self.lib.kernels_error().decode()}")
        torch.cuda.synchronize()

    def products(self, n):
        with self.torch.cuda.stream(self.main):
            for _ in range(n):
                self.torch.matmul(self.a, self.b, out=self.c)

    def sums(self, n, ctas, n_sources, elems):
        windows = max(1, self.elems // elems)
        for i in range(n):
            at = i % windows * elems
            status = self.lib.kernels_sum(
                self.kernels, self.side.cuda_stream, self.src.data_ptr() + 2 * at, self.apart, n_sources,
                self.dst.data_ptr() + 4 * at, elems, ctas, self.done.data_ptr(),
            )
            if status != 0:
                sys.exit(f"bench/kernels.py: {self.lib.kernels_error().decode()}")

    def timed(self, measured, stream, other):
        """Median ms of `measured` on its stream while `other` (or None) runs on the other one."""
        torch, times = self.torch, []
        for round in range(self.rounds + 1):
            begin, end, gate = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000)  # both sides are enqueued before either begins
            gate.record()
            for s in (self.main, self.side):
                s.wait_event(gate)
            if other:
                other()
            begin.record(stream)
            measured()
            end.record(stream)
            torch.cuda.synchronize()
            if round:
                times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def describe_product(self):
        """Name, grid, registers and shared memory of the product's kernel, as the profiler has them."""
        with self.torch.profiler.profile(activities=[self.torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.products(3)
            self.torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.load(open(file.name))["traceEvents"]
        for event in events:
            if event.get("cat") == "kernel":
                args = event["args"]
                return {key: args.get(key) for key in ("grid", "block", "registers per thread", "shared memory")} | {
                    "name": event["name"]
                }
        return {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="shapes whose names contain this")
    parser.add_argument("--out", help="also as JSON")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"bench/kernels.py: torch: {error}")
    if not torch.cuda.is_available():
        sys.exit(f"bench/kernels.py: torch {torch.__version__} sees no GPU")
    bench = Bench(torch, arguments.rounds)
    product = bench.describe_product()
    n = 40
    alone = bench.timed(lambda: bench.products(n), bench.main, None) / n
    again = bench.timed(lambda: bench.products(n), bench.main, None) / n
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: product of {PRODUCT}: {alone * 1e3:.1f} us "
          f"(again {again * 1e3:.1f}); {product}")
    print("GB/s read and written by all CTAs beside the product (alone), and the product's loss in %")
    rows = []
    # Sources in memory; and in pieces of 1 Mi elements, as a chunked reduce-scatter makes them.
    for n_sources, elems in ((8, 16 << 20), (2, 16 << 20), (8, 1 << 20), (2, 1 << 20)):
        print(f"\n{n_sources} sources, {elems >> 20} Mi elements a launch\n{'CTAs':<14}" + "".join(f"{c:>20}" for c in CTAS))
        for slot, warps, slots in SHAPES:
            name = f"{slot}x{warps}x{slots}"
            if arguments.only not in name or (elems < 16 << 20 and name not in ("1024x8x2", "4096x12x2")):
                continue
            bench.lib.kernels_shape(bench.kernels, slot, warps, slots)
            line = f"{name:<14}"
            for ctas in CTAS:
                if slot * warps * slots > 32 << 10 and ctas > 16:
                    continue
                n_bytes = elems * (2 * n_sources + 4)
                each = bench.timed(lambda: bench.sums(2, ctas, n_sources, elems), bench.side, None) / 2
                lasting = int(1.6 * n * alone / each) + 2
                loss = bench.timed(
                    lambda: bench.products(n), bench.main, lambda: bench.sums(lasting, ctas, n_sources, elems)
                ) / n / alone - 1
                few = max(1, int(2 / each))
                beside = bench.timed(
                    lambda: bench.sums(few, ctas, n_sources, elems),
                    bench.side,
                    lambda: bench.products(int(few * each * 2 / alone) + 20),
                ) / few
                row = dict(shape=name, slot=slot, warps=warps, slots=slots, sources=n_sources, elems=elems, ctas=ctas,
                           alone=n_bytes / each / 1e6, beside=n_bytes / beside / 1e6, loss=100 * loss)
                rows.append(row)
                cell = f"{row['beside']:.0f} ({row['alone']:.0f}) {row['loss']:.1f}%"
                line += f"{cell:>20}"
            print(line, flush=True)
    bench.lib.kernels_close(bench.kernels)
    fine = [r for r in rows if r["loss"] <= 5]
    for n_sources in (8, 2):
        best = max((r for r in fine if r["sources"] == n_sources), key=lambda r: r["beside"], default=None)
        if best:
            print(f"most at 5 % or less, {n_sources} sources: {best['beside']:.0f} GB/s, {best['loss']:.1f} %: "
                  f"{best['ctas']} CTAs, {best['shape']}, {best['elems'] >> 20} Mi elements a launch")
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps({"product": product, "alone_us": alone * 1e3, "rows": rows}))


if __name__ == "__main__":
    main()
