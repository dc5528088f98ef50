#!/usr/bin/env python3
"""TIDE on the host fabric against stock FSDP2's steps and against memcpy between two barriers: four ranks, one run.

Stock's steps are those of torch.distributed.fsdp's foreach_all_gather, foreach_all_gather_copy_out and foreach_reduce
on CPU ranks: its own copy-in, gloo, split_with_sizes_copy; and chunk_cat, gloo. All methods take turns in every
repetition; a repetition's time is that of its slowest rank, from a barrier on. Results are compared with each other
before anything is timed.

tide: the default, one landing that the node shares; tide-unicast: a landing a rank (--multicast 0); memcpy-shared and
memcpy: the same two without any layout; plain-sum: a loop that adds all ranks' packed gradients. A shard of B bytes is
what a rank gives to the all-gather (bf16) or gets from the reduce-scatter (fp32, from bf16 gradients).

usage: host.py [--ranks 4] [--repeats N] [--params 8]
"""

import argparse
import ctypes
import mmap
import os
import pathlib
import statistics
import sys
import tempfile
import traceback
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("TIDE_BUILD", ROOT / "build")).resolve()
SHARDS = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
AG = ["stock", "tide", "tide-unicast", "memcpy-shared", "memcpy"]
RS = ["stock", "tide", "plain-sum"]
MAX_REPEATS = 200


def load():
    c = ctypes.CDLL(str(BUILD / "bench" / "libhost.so"))
    p, u32, u64, i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
    for name, result, *args in [
        ("host_now", ctypes.c_double),
        ("plain_wait", None, p, u32),
        ("plain_all_gather", None, p, u32, u32, p, u64, p, u32),
        ("plain_reduce_scatter", None, p, u32, u32, p, u64, p, ctypes.c_float),
        ("host_open", p, ctypes.c_char_p, u32, u32, u32, i64, i64, i64),
        ("host_path", ctypes.c_char_p, p),
        ("host_tensor", p, p, ctypes.c_int, u32),
        ("host_adopt", p, p, u32, p, u64),
        ("host_all_gather", p, p),
        ("host_release", p, p),
        ("host_reduce_scatter", p, p, ctypes.POINTER(p), p, ctypes.c_float),
        ("host_close", None, p),
    ]:
        f = getattr(c, name)
        f.restype, f.argtypes = result, args
    return c


class Shared:
    """Memory that all ranks map: a barrier, times, landings and gradients of the plain methods."""

    def __init__(self, ranks):
        self.barrier, self.times = 0, 64
        self.landings = self.times + 8 * ranks * MAX_REPEATS
        self.landings += -self.landings % 4096
        self.grads = self.landings + ranks * ranks * SHARDS[-1]
        self.map = mmap.mmap(-1, self.grads + ranks * ranks * SHARDS[-1] // 2)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def address(self, offset):
        return self.base + offset


def rank_main(rank, args, shared, store, out):
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=FutureWarning)  # the collectives that FSDP2 itself calls have new names
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # noqa: F401  registers torch.ops.fsdp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    n, c = args.ranks, load()
    barrier = shared.address(shared.barrier)

    def view(address, shape, dtype):
        count = 1
        for extent in shape:
            count *= extent
        size = count * torch.empty(0, dtype=dtype).element_size()
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)

    def timed(f, repeats):
        """Runs f `repeats` times, each from a barrier on, and leaves this rank's seconds in shared memory."""
        slot = [shared.address(shared.times) + 8 * (rank * MAX_REPEATS + i) for i in range(repeats)]
        for i in range(repeats):
            c.plain_wait(barrier, n)
            begin = c.host_now()
            f()
            ctypes.c_double.from_address(slot[i]).value = c.host_now() - begin

    def slowest(repeats):
        c.plain_wait(barrier, n)
        times = view(shared.address(shared.times), (n, MAX_REPEATS), torch.float64)[:, :repeats].amax(dim=0).tolist()
        c.plain_wait(barrier, n)
        return times

    for shard_bytes in SHARDS:
        params, columns = args.params, 64
        elements, sum_elements = shard_bytes // 2, shard_bytes // 4
        rows, sum_rows = elements // params // columns, sum_elements // params // columns  # of a rank
        each = rows * columns
        repeats = args.repeats or max(7, min(40, (64 << 20) // shard_bytes))
        generator = torch.Generator().manual_seed(rank + 1)
        shards = [torch.randn(rows, columns, generator=generator).bfloat16() for _ in range(params)]
        grads = [torch.randn(sum_rows * n, columns, generator=generator).bfloat16() for _ in range(params)]
        grads_array = (ctypes.c_void_p * params)(*[g.data_ptr() for g in grads])
        tide = {}
        for name, its_rows, multicast in (("tide", rows, -1), ("tide-unicast", rows, 0), ("sums", sum_rows, -1)):
            path = f"tide-bench-{os.getppid()}-{shard_bytes}-{name}".encode()
            tide[name] = c.host_open(path, rank, n, params, its_rows * n, columns, multicast)
            if not tide[name]:
                raise SystemExit(1)
        gatherers = [tide["tide"], tide["tide-unicast"]]
        for handle in gatherers:
            if not all(c.host_adopt(handle, i, s.data_ptr(), 2 * each) for i, s in enumerate(shards)):
                raise SystemExit(1)

        # Stock: an output buffer a call in rank-major order, then one tensor a parameter.
        splits = [each] * params
        gathered = [torch.empty(n * each, dtype=torch.bfloat16) for _ in range(params)]
        sums = torch.empty(sum_elements, dtype=torch.float32)

        def stock_all_gather():
            buffer = torch.empty(n * elements, dtype=torch.bfloat16)
            flat, buffer = torch.ops.fsdp.all_gather_copy_in(
                [s.view(-1) for s in shards], buffer, splits, elements, rank
            )
            dist.all_gather_into_tensor(buffer, flat)
            torch.ops.fsdp.split_with_sizes_copy(
                buffer.view(n, -1), splits, dim=1, out=[g.view(n, -1) for g in gathered]
            )

        def stock_reduce_scatter():
            buffer = torch.empty(n * sum_elements, dtype=torch.float32)
            torch.ops.fsdp.chunk_cat(grads, dim=0, num_chunks=n, out=buffer.view(n, -1))
            dist.reduce_scatter_tensor(sums, buffer, op=dist.ReduceOp.AVG)

        # Plain: one packed shard; rank-major landings and gradients in shared memory.
        packed = torch.cat([s.view(-1) for s in shards])
        mine = shared.address(shared.grads) + rank * n * 2 * sum_elements
        view(mine, (n, sum_elements), torch.bfloat16).copy_(torch.cat([g.view(n, -1) for g in grads], dim=1))
        landings = shared.address(shared.landings)
        plain_sums, tide_sums = torch.empty_like(sums), torch.empty_like(sums)

        def gather(handle):
            if not (c.host_all_gather(handle) and c.host_release(handle)):
                raise SystemExit(1)

        def scatter(handle):
            if not c.host_reduce_scatter(handle, grads_array, tide_sums.data_ptr(), 1 / n):
                raise SystemExit(1)

        methods = {
            "all_gather": {
                "stock": stock_all_gather,
                "tide": lambda: gather(tide["tide"]),
                "tide-unicast": lambda: gather(tide["tide-unicast"]),
                "memcpy-shared": lambda: c.plain_all_gather(
                    barrier, n, rank, packed.data_ptr(), shard_bytes, landings, 1
                ),
                "memcpy": lambda: c.plain_all_gather(barrier, n, rank, packed.data_ptr(), shard_bytes, landings, n),
            },
            "reduce_scatter": {
                "stock": stock_reduce_scatter,
                "tide": lambda: scatter(tide["sums"]),
                "plain-sum": lambda: c.plain_reduce_scatter(
                    barrier, n, rank, shared.address(shared.grads), sum_elements, plain_sums.data_ptr(), 1 / n
                ),
            },
        }

        # Same results before any timing.
        stock_all_gather()
        for handle in gatherers:
            if not c.host_all_gather(handle):
                raise SystemExit(1)
            for i, g in enumerate(gathered):
                assert torch.equal(
                    view(c.host_tensor(handle, 0, i), (n * each,), torch.bfloat16), g
                ), "all_gather differs from stock"
            c.plain_wait(barrier, n)
            c.host_release(handle)
        for f in methods["reduce_scatter"].values():
            f()
        scale = max(1.0, sums.abs().max().item())
        for other in (tide_sums, plain_sums):
            assert (other - sums).abs().max().item() <= 1e-5 * scale, "reduce_scatter differs from stock"

        result = {}
        for collective, table in methods.items():
            for f in table.values():
                timed(f, 2)
            samples = {name: [] for name in table}
            for _ in range(repeats):
                for name, f in table.items():
                    timed(f, 1)
                    samples[name] += slowest(1)
            result[collective] = samples
        if rank == 0:
            out.send((shard_bytes, repeats, {k: c.host_path(h).decode() for k, h in tide.items()}, result))
        for handle in tide.values():
            c.host_close(handle)
    dist.destroy_process_group()


def quartiles(samples):
    q = statistics.quantiles(samples, n=4)
    return statistics.median(samples), q[0], q[2]


def cell(samples):
    middle, low, high = (x * 1e3 for x in quartiles(samples))
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


def size(n):
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def report(results):
    """Two Markdown tables. A ratio compares like with like: one landing a node with one memcpy, one a rank with n."""
    lines = []
    for collective, names, ratios in (
        (
            "all_gather",
            AG,
            [("stock", "tide"), ("stock", "tide-unicast"), ("tide", "memcpy-shared"), ("tide-unicast", "memcpy")],
        ),
        ("reduce_scatter", RS, [("stock", "tide"), ("tide", "plain-sum")]),
    ):
        lines += [
            "",
            f"{collective}: milliseconds, median (quartiles)",
            "",
            "| shard | " + " | ".join(names + [f"{a} / {b}" for a, b in ratios]) + " |",
            "|---" * (len(names) + len(ratios) + 1) + "|",
        ]
        for shard, _, _, result in results:
            samples = result[collective]
            middle = {k: statistics.median(v) for k, v in samples.items()}
            lines.append(
                "| "
                + " | ".join(
                    [size(shard)]
                    + [cell(samples[k]) for k in names]
                    + [f"{middle[a] / middle[b]:.2f}" for a, b in ratios]
                )
                + " |"
            )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=0, help="default: by size, 7 to 40")
    parser.add_argument("--params", type=int, default=8)
    args = parser.parse_args()
    from multiprocessing import Pipe

    shared = Shared(args.ranks)
    receive, send = Pipe(duplex=False)
    store = tempfile.mktemp(prefix="tide-bench-")
    pids = []
    for rank in range(args.ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, args, shared, store, send)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    send.close()
    results = []
    try:
        while True:
            results.append(receive.recv())
            print(f"{size(results[-1][0])}: {results[-1][1]} repetitions, {results[-1][2]}", file=sys.stderr)
    except EOFError:
        pass
    failed = [r for r, pid in enumerate(pids) if os.waitpid(pid, 0)[1] != 0]
    if os.path.exists(store):
        os.unlink(store)
    if failed:
        print(f"host.py: ranks {failed} failed", file=sys.stderr)
        return 1
    print("\n".join(report(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
