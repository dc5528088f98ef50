"""What the GPU benches share: ranks as processes, one GPU each; times; the work of stock FSDP2 and of TIDE on the same
tensors.

A part of a bench is a function part(ranks, **arguments) that every rank runs in processes of its own: one that fails,
hangs or kills a process ends alone, within its limit, with what it had found until then.
"""

import contextlib
import json
import multiprocessing as mp
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection

ROOT = pathlib.Path(__file__).resolve().parents[1]
# One hardware queue a stream; no multicast, in anybody's library: a machine's GPUs are shared with others.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
MIB = 1 << 20
GRACE_S = 15  # for the other ranks, once one has failed


def prepare_environment():
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    os.environ.setdefault("TIDE_DEADLINE_MS", "20000")  # what hangs ends with a name
    os.environ.setdefault("TIDE_BUILD", str(ROOT / "build"))
    if str(ROOT / "python") not in sys.path:
        sys.path.insert(0, str(ROOT / "python"))


def why_not(n_gpus=2):
    """Why the benches cannot run here; None when they can."""
    try:
        import torch
    except ImportError as error:
        return f"torch: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if torch.cuda.device_count() < n_gpus:
        return f"{torch.cuda.device_count()} GPU, {n_gpus} needed"
    return None


def run_part(part, limit_s, size=2, **arguments):
    """(what rank 0 emitted, None or what went wrong)."""
    context = mp.get_context("spawn")
    found, problems, pipes, processes = [], [], {}, []
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="tide-bench-") as folder:
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(there, rank, size, f"{folder}/store", limit_s, part, arguments)
            )
            process.start()
            there.close()
            processes.append(process)
            pipes[here] = rank
        while pipes:
            ready = connection.wait(list(pipes), max(0.0, until - time.monotonic()))
            if not ready:
                problems.append(f"time limit: ranks {sorted(pipes.values())} had not ended")
                break
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    kind, what = pipe.recv()
                except EOFError:
                    del pipes[pipe]
                    processes[rank].join(5)
                    if processes[rank].exitcode != 0:
                        problems.append(f"rank {rank} ended with exit code {processes[rank].exitcode}")
                        until = min(until, time.monotonic() + GRACE_S)
                    continue
                if kind == "say":
                    print(what, flush=True)
                elif kind == "emit":
                    found.append(what)
                else:
                    problems.append(f"rank {rank}:\n{what}")
                    until = min(until, time.monotonic() + GRACE_S)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(20)
    return found, "\n".join(problems) or None


class Ranks:
    """What a part is given: who it is, and what it tells the parent."""

    def __init__(self, pipe, rank, size, device, host_group):
        self.pipe, self.rank, self.size, self.device, self.host = pipe, rank, size, device, host_group
        self._token, self._told = None, set()

    def say(self, text):
        if self.rank == 0:
            self.pipe.send(("say", text))

    def emit(self, what):
        if self.rank == 0:
            self.pipe.send(("emit", what))

    def barrier(self):
        import torch.distributed as dist

        dist.barrier(group=self.host)

    def align(self):
        """Enqueued: this point of the current stream is reached by all ranks at about the same time."""
        import torch
        import torch.distributed as dist

        if self._token is None:
            self._token = torch.zeros(1, device=self.device)
        dist.all_reduce(self._token)

    def everyone(self, value):
        """Every rank's value, in rank order."""
        import torch.distributed as dist

        out = [None] * self.size
        dist.all_gather_object(out, value, group=self.host)
        return out

    @contextlib.contextmanager
    def guarded(self, what):
        """What fails alike on all ranks is printed, and the part goes on. (What fails on one rank alone ends in the
        time limit of the part.)"""
        try:
            yield
        except Exception:
            text = traceback.format_exc()
            last = text.strip().splitlines()[-1]
            self.say(f"FAILED {what}: {last}" if last in self._told else f"FAILED {what}\n{text}")
            self._told.add(last)
            self.emit({"failed": what, "text": last})

    def comm(self, options=None, node_size=0, fabric="cuda"):
        """A communicator over all ranks."""
        import torch
        import torch.distributed as dist

        from tide import comm as tide_comm

        def exchange(data):
            given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            out = [torch.empty_like(given) for _ in range(self.size)]
            dist.all_gather(out, given, group=self.host)
            return b"".join(t.numpy().tobytes() for t in out)

        return tide_comm.Comm(
            self.rank,
            self.size,
            exchange,
            node_size=node_size,
            options=options,
            fabric={"cuda": tide_comm.FABRIC_CUDA, "nccl": tide_comm.FABRIC_NCCL}[fabric],
            device=self.device.index,
        )


def _rank_main(pipe, rank, size, store, limit_s, part, arguments):
    import faulthandler

    faulthandler.enable()
    faulthandler.dump_traceback_later(max(5.0, limit_s - 4), exit=False)
    code = 0
    try:
        prepare_environment()
        import torch
        import torch.distributed as dist

        import warnings

        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=max(30, int(limit_s))),
            device_id=device,
        )
        ranks = Ranks(pipe, rank, size, device, dist.new_group(backend="gloo"))
        part(ranks, **arguments)
        torch.cuda.synchronize()
        ranks.barrier()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        code = 1
    pipe.close()
    sys.stdout.flush()
    os._exit(code)  # teardown of CUDA and NCCL belongs to no measurement


# ---- shapes ----------------------------------------------------------------------------------------------------------


def shapes_like(total, n_params, ranks=2):
    """Dims of n_params parameters with `total` elements in all: as in blocks of a transformer, four square matrices an
    attention, wide ones for the MLP, the rest vectors. The last matrix takes up the difference. Rows divide by the
    ranks."""
    attentions = 2 if n_params >= 24 else 1
    matrices = 4 * attentions + 3
    vectors = n_params - matrices
    h = max(16, int((total / (4 * attentions + 8.1)) ** 0.5) // 16 * 16)
    f = max(16, int(2.7 * h) // 16 * 16)
    dims = [(h, h)] * (4 * attentions) + [(f, h), (f, h)] + [(h,)] * vectors
    rest = total - sum(_numel(d) for d in dims)
    rows = max(ranks, rest // h // ranks * ranks)
    dims.append((rows, h))
    half = len(dims) // 2
    return dims[half:] + dims[:half]  # vectors between matrices, as modules register them


def equal_shapes(total, n_params, ranks=2):
    columns = 64
    rows = max(ranks, total // n_params // columns // ranks * ranks)
    return [(rows, columns)] * n_params


def _numel(dims):
    n = 1
    for d in dims:
        n *= d
    return n


SHAPES = {"mixed": shapes_like, "equal": equal_shapes}


# ---- the two collectives, stock and TIDE ----------------------------------------------------------------------------


class AllGather:
    """bf16 shards of one group. `stock` is what FSDP2 does with them: its copy-in, NCCL, split_with_sizes_copy into one
    tensor a parameter; `bare` the NCCL call of it alone."""

    def __init__(self, ranks, shard_bytes, shape="mixed", n_params=30, comm=None):
        import torch
        import torch.distributed as dist
        import torch.distributed.fsdp._fully_shard._fsdp_collectives  # noqa: F401  registers torch.ops.fsdp

        n, device = ranks.size, ranks.device
        self.dims = SHAPES[shape](shard_bytes // 2 * n, n_params, n)
        torch.manual_seed(1000 + ranks.rank)
        self.shards = [torch.randn(_numel(d) // n, device=device).bfloat16() for d in self.dims]
        self.splits = [s.numel() for s in self.shards]
        self.elements = sum(self.splits)
        self.bytes = 2 * self.elements
        self.rank, self.n = ranks.rank, n
        self.gathered = [torch.empty(n * s, dtype=torch.bfloat16, device=device) for s in self.splits]
        self.out = [g.view(n, -1) for g in self.gathered]
        self.device, self.all_gather_into = device, getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self.fixed = torch.empty(n * self.elements, dtype=torch.bfloat16, device=device)
        self.group = None
        if comm is not None:
            self.group = make_group(comm, self.dims, f"ag{self.bytes}")
            for i, s in enumerate(self.shards):
                self.group.adopt(i, s.data_ptr(), 2 * s.numel(), current_stream())

    def stock(self):
        import torch

        buffer = torch.empty(self.n * self.elements, dtype=torch.bfloat16, device=self.device)
        mine, buffer = torch.ops.fsdp.all_gather_copy_in(self.shards, buffer, self.splits, self.elements, self.rank)
        self.all_gather_into(buffer, mine)
        torch.ops.fsdp.split_with_sizes_copy(buffer.view(self.n, -1), self.splits, dim=1, out=self.out)

    def bare(self):
        self.all_gather_into(self.fixed, self.fixed.narrow(0, self.rank * self.elements, self.elements))

    def tide(self):
        from tide import comm as c

        stream = current_stream()
        self.group.all_gather(None, stream)
        self.group.wait(c.READY, stream)

    def release(self):
        self.group.release(current_stream())

    def compare(self):
        """None, or where TIDE's landing differs from stock's tensors."""
        import torch

        from tide import comm as c

        self.stock()
        self.tide()
        problem = None
        for i, expected in enumerate(self.gathered):
            landed = torch.utils.dlpack.from_dlpack(self.group.dlpack(c.TENSOR_PARAM, i))[: expected.numel()]
            if not torch.equal(landed.view(torch.int16), expected.view(torch.int16)):
                where = (landed.view(torch.int16) != expected.view(torch.int16)).nonzero()
                problem = f"parameter {i} {self.dims[i]}: {len(where)} elements, from {where[0].item()} on"
                break
        self.release()
        return problem


class ReduceScatter:
    """bf16 gradients to a packed fp32 output, averaged. `stock`: chunk_cat into an fp32 buffer, NCCL in fp32; `bare` the
    NCCL call of it alone."""

    def __init__(self, ranks, out_bytes, shape="mixed", n_params=16, comm=None):
        import torch
        import torch.distributed as dist
        import torch.distributed.fsdp._fully_shard._fsdp_collectives  # noqa: F401

        n, device = ranks.size, ranks.device
        self.dims = SHAPES[shape](out_bytes // 4 * n, n_params, n)
        torch.manual_seed(2000 + ranks.rank)
        self.grads = [torch.randn(d, device=device).bfloat16() for d in self.dims]
        self.elements = sum(_numel(d) for d in self.dims) // n
        self.bytes = 4 * self.elements
        self.n, self.device, self.average = n, device, dist.ReduceOp.AVG
        self.reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        self.sums = torch.empty(self.elements, device=device)
        self.tide_sums = torch.empty(self.elements, device=device)
        self.fixed = torch.randn(n * self.elements, device=device)
        self.pointers = [g.data_ptr() for g in self.grads]
        self.group = make_group(comm, self.dims, f"rs{self.bytes}") if comm is not None else None

    def stock(self):
        import torch

        buffer = torch.empty(self.n * self.elements, device=self.device)
        torch.ops.fsdp.chunk_cat(self.grads, dim=0, num_chunks=self.n, out=buffer.view(self.n, -1))
        self.reduce_scatter_into(self.sums, buffer, op=self.average)

    def bare(self):
        self.reduce_scatter_into(self.sums, self.fixed, op=self.average)

    def tide(self):
        from tide import comm as c

        stream = current_stream()
        self.group.reduce_scatter(self.pointers, self.tide_sums.data_ptr(), c.BF16, alpha=1 / self.n, stream=stream)
        self.group.wait(c.DONE, stream)

    def release(self):
        pass

    def compare(self):
        import torch

        self.stock()
        self.tide_sums.fill_(float("nan"))
        self.tide()
        if torch.equal(self.tide_sums, self.sums):
            return None
        difference = (self.tide_sums - self.sums).abs().nan_to_num(float("inf")).max().item()
        if difference <= 1e-5 * max(1.0, self.sums.abs().max().item()):
            return None
        return f"largest difference {difference}"


def make_group(comm, dims, name):
    from tide import comm as c

    spec = c.GroupSpec(
        name, [c.ParamSpec(f"p{i}", d) for i, d in enumerate(dims)], dtype=c.BF16, landing=c.LANDING_PRIVATE
    )
    return comm.create_groups([spec])[0]


def current_stream():
    import torch

    return torch.cuda.current_stream().cuda_stream


# ---- clocks ----------------------------------------------------------------------------------------------------------


class Clocks:
    """This rank's GPU from start() to stop(), as nvidia-smi sees it every 50 ms: whether two sides of a comparison ran at
    one clock. Without nvidia-smi there is nothing to tell."""

    def __init__(self, ranks):
        import torch

        self.ranks, self.samples, self.process = ranks, [], None
        command = shutil.which("nvidia-smi")
        uuid = getattr(torch.cuda.get_device_properties(ranks.device), "uuid", None)
        if command is None or uuid is None:
            return
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        self.process = subprocess.Popen(
            [command, f"--id=GPU-{uuid}", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                mhz, watt = map(float, line.split(","))
                self.samples.append((time.monotonic(), mhz, watt))

    def start(self):
        self.begin = time.monotonic()

    def stop(self):
        """{"sm_mhz": its mean, "watt": the same} of the rank whose clock was lowest; {} where nobody has looked."""
        end, mine = time.monotonic(), None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.thread.join(5)
            inside = [x for x in self.samples if self.begin <= x[0] <= end]
            if inside:
                mine = tuple(statistics.fmean(x[i] for x in inside) for i in (1, 2))
        seen = [x for x in self.ranks.everyone(mine) if x is not None]
        return dict(zip(("sm_mhz", "watt"), min(seen))) if seen else {}


# ---- time ------------------------------------------------------------------------------------------------------------


def timed(ranks, f, repeats, after=None, warm_up=3):
    """({"ms": [slowest rank's GPU time], "host_us": [slowest rank's time to enqueue]}).

    Before each repetition the GPU sleeps while the host enqueues it, so that the GPU's time has no host in it; then the
    ranks' streams meet."""
    import torch

    for _ in range(warm_up):
        f()
        if after:
            after()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    f()
    host = time.perf_counter() - begin
    if after:
        after()
    torch.cuda.synchronize()
    host = max(ranks.everyone(host))
    cycles = int(min(20e-3, 2 * host + 300e-6) * 1.9e9)
    ms, host_us = [], []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        ranks.barrier()
        torch.cuda._sleep(cycles)
        ranks.align()
        start.record()
        begin = time.perf_counter()
        f()
        host_us.append((time.perf_counter() - begin) * 1e6)
        end.record()
        if after:
            after()
        torch.cuda.synchronize()
        ms.append(start.elapsed_time(end))
    return {
        "ms": [max(x) for x in zip(*ranks.everyone(ms))],
        "host_us": [max(x) for x in zip(*ranks.everyone(host_us))],
    }


def spread(samples):
    """(median, first quartile, third quartile)."""
    if len(samples) < 2:
        return (samples[0],) * 3
    q = statistics.quantiles(samples, n=4)
    return statistics.median(samples), q[0], q[2]


def gpu_events(f):
    """What ran on this rank's GPU during f(): the profiler's kernels and copies, as chrome traces have them."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        f()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="tide-trace-") as folder:
        path = f"{folder}/trace.json"
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def sm_time(ranks, f, after=None, calls=3, sms=132):
    """SM milliseconds of one call by this rank's kernels: CTAs, at most one an SM, times their duration; and the kernels'
    milliseconds. The ranks' streams meet before each call, so that no kernel's time is that of waiting for a peer to
    come. None when the profiler gives nothing."""
    import torch

    def several():
        for _ in range(calls):
            torch.cuda._sleep(4_000_000)
            ranks.align()
            f()
            if after:
                after()
            torch.cuda.synchronize()
            ranks.barrier()

    f()
    if after:
        after()
    torch.cuda.synchronize()
    ranks.barrier()
    total, kernels, events = 0.0, {}, gpu_events(several)
    for event in events:
        if event["cat"] == "kernel" and "spin_kernel" not in event["name"] and "AllReduce" not in event["name"]:
            grid = event["args"].get("grid", [1, 1, 1])
            ctas = grid[0] * grid[1] * grid[2]
            total += min(ctas, sms) * event["dur"] / 1e3 / calls
            key = f"{event['name'][:60]} x{ctas}"
            kernels[key] = kernels.get(key, 0.0) + event["dur"] / 1e3 / calls
    return (total, kernels) if events else (None, kernels)


def where_time_goes(f, top=8):
    """A profile of f() in words: of the stream that computes (the one with most kernel time), its busy milliseconds and
    its gaps, the longest with their neighbours; of every stream, the busy time by kind."""
    events = [e for e in gpu_events(f) if e.get("args", {}).get("stream") is not None]
    if not events:
        return ["the profiler gives nothing"]
    streams = {}
    for event in events:
        streams.setdefault(event["args"]["stream"], []).append(event)

    def busy(some):
        total = end = 0.0
        for e in sorted(some, key=lambda e: e["ts"]):
            begin, stop = e["ts"], e["ts"] + e["dur"]
            if stop > end:
                total += stop - max(begin, end)
                end = stop
        return total / 1e3

    kernels_of = {s: [e for e in es if e["cat"] == "kernel"] for s, es in streams.items()}
    compute = max(streams, key=lambda s: busy(kernels_of[s]))
    line = sorted(streams[compute], key=lambda e: e["ts"])
    gaps, end = [], line[0]["ts"] + line[0]["dur"]
    for before, event in zip(line, line[1:]):
        if event["ts"] > end:
            gaps.append(((event["ts"] - end) / 1e3, before["name"][:50], event["name"][:50]))
        end = max(end, event["ts"] + event["dur"])
    span = (end - line[0]["ts"]) / 1e3
    text = [
        f"compute stream {compute}: {span:.1f} ms, busy {busy(line):.1f}, {len(line)} events, gaps "
        f"{sum(g[0] for g in gaps):.1f} ms, of them {sum(g[0] for g in gaps if g[0] > 0.05):.1f} in gaps over 0.05 ms"
    ]
    text += [f"  gap {g[0]:7.3f} ms after {g[1]} before {g[2]}" for g in sorted(gaps, reverse=True)[:top]]
    by_name = {}
    for e in line:
        entry = by_name.setdefault(e["name"][:80], [0.0, 0])
        entry[0] += e["dur"] / 1e3
        entry[1] += 1
    for name, (ms, n) in sorted(by_name.items(), key=lambda item: -item[1][0])[: 2 * top]:
        text.append(f"  {ms:8.2f} ms {n:5} x {name}")
    for stream, its in sorted(streams.items(), key=lambda item: -busy(item[1])):
        if stream != compute:
            kinds = {}
            for e in its:
                kinds.setdefault(e["name"][:44], []).append(e)
            most = sorted(kinds.items(), key=lambda item: -busy(item[1]))[:3]
            words = ", ".join(f"{name} {busy(es):.2f} ms x{len(es)}" for name, es in most)
            text.append(f"  stream {stream}: busy {busy(its):.2f} ms: {words}")
    return text[: 6 * top]


# ---- the report ------------------------------------------------------------------------------------------------------


def machine():
    import torch

    nccl = "unknown"
    with contextlib.suppress(Exception):
        import ctypes

        version = ctypes.c_int()
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0:
            v = version.value
            nccl = f"{v // 10000}.{v // 100 % 100}.{v % 100}"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def write(path, document):
    if path:
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
        print(f"written: {path}")
