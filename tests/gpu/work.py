"""What ranks do in the tests of this folder: a model large enough that its copies take time, trained on real values."""

import contextlib
import json
import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import tide.comm
import tide.fsdp2
import training as t

WIDTH, BLOCKS, ROWS = 512, 6, 256


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks of unequal size, so that ring slots serve groups of different layouts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH * (1 + k % 3)) for k in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(policy=t.MIXED, **options):
    torch.manual_seed(0)
    return t.shard(Net(), mp_policy=policy, **options)


def data(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator).cuda()


def train(model, steps, each=None):
    """Losses and weights; AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = torch.zeros(steps, device="cuda")  # a list of them would grow with the steps
    for k in range(steps):
        loss = model(data(k)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[k] = loss.detach()
        del loss
        if each:
            each(k)
    return losses.tolist(), {name: p._local_tensor.clone() for name, p in model.named_parameters()}


def on_tide(steps, policy=t.MIXED, each=None, around=contextlib.nullcontext, **install):
    model = build(policy)
    tide.fsdp2.install(model, strict=True, **install)
    with around():
        result = train(model, steps, each)
        torch.cuda.synchronize()
    report = tide.fsdp2.report(model)
    assert all(g.path.startswith(f"tide {t.FABRIC} ") and g.all_gathers >= steps for g in report), str(report)
    tide.fsdp2.uninstall(model)
    return result


def equal_to_stock(node_size, policy, options):
    stock_losses, stock_weights = train(build(policy), 12)
    losses, weights = on_tide(12, policy, node_size=node_size, options=options)
    again = on_tide(12, policy, node_size=node_size, options=options)
    assert losses == again[0]
    t.same(weights, again[1], "two runs on TIDE")
    worst = max(abs(a - b) / abs(a) for a, b in zip(stock_losses, losses))
    assert worst <= 1e-5, (stock_losses, losses)
    for name, w in weights.items():
        torch.testing.assert_close(w, stock_weights[name], rtol=1e-3, atol=2e-4)
    return worst


# ---- time turned against us ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def delays(where, seed=0):
    """GPU sleeps of random length on every stream that calls are made on: before ("late", the data is late) or behind
    ("slow", the consumer is slow); other ones on each rank."""
    generator = torch.Generator().manual_seed(97 * seed + dist.get_rank())
    calls = {name: getattr(tide.comm.Group, name) for name in ("all_gather", "reduce_scatter", "release", "stash", "wait")}

    def sleep(stream):
        cycles = int(torch.randint(0, 3, (1,), generator=generator)) * 300_000
        on = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
        with torch.cuda.stream(on):
            torch.cuda._sleep(cycles)

    def delayed(function):
        def call(group, *args, stream=None, **kwargs):
            if stream is None and args and function.__name__ in ("all_gather", "release", "stash", "wait"):
                *args, stream = args  # given by position
            if where == "late":
                sleep(stream)
            function(group, *args, stream=stream, **kwargs)
            if where == "slow":
                sleep(stream)

        return call

    for name, function in calls.items():
        setattr(tide.comm.Group, name, delayed(function))
    try:
        yield
    finally:
        for name, function in calls.items():
            setattr(tide.comm.Group, name, function)


def same_with_delays(node_size, mode):
    steps = 6
    expected = on_tide(steps, node_size=node_size, options={"mode": mode})
    for seed, where in enumerate(("late", "slow", "late", "slow")):
        got = on_tide(
            steps, node_size=node_size, options={"mode": mode}, around=lambda w=where, s=seed: delays(w, s)
        )
        assert got[0] == expected[0], (where, seed, got[0], expected[0])
        t.same(got[1], expected[1], f"{where}, seed {seed}")


def same_with_garbage_collection(mode):
    expected = on_tide(6, options={"mode": mode})
    setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch.cuda.memory, "_set_allocator_settings", None
    )
    if setting is None:
        return "this torch's allocator takes no settings at run time"
    setting("garbage_collection_threshold:0.2,max_split_size_mb:32")
    waste = []

    def churn(k):
        waste.append(torch.empty((k % 5 + 1) << 20, device="cuda"))
        if len(waste) > 2:
            waste.pop(0)
        if k % 2:
            torch.cuda.empty_cache()

    t.same(on_tide(6, options={"mode": mode}, each=churn), expected, "garbage collection")
    return None


def no_growth(mode):
    seen = []

    def look(k):
        if k in (20, 110, 219):
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), free))

    on_tide(220, each=look, options={"mode": mode})
    (allocated, reserved, free), *later = seen
    for other in later:
        assert other[0] <= allocated and other[1] <= reserved, seen
        assert other[2] >= free - (2 << 20), seen
    return seen


def counted():
    """Torch's reserved memory before, with and after an installation that counts its arenas; and those."""
    os.environ["TIDE_TORCH_MEMORY"] = "1"
    try:
        model = build()
        train(model, 1)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        seen = [torch.cuda.memory_reserved()]
        torch.cuda.reset_peak_memory_stats()
        tide.fsdp2.install(model, strict=True)
        stats = tide.fsdp2.stats(model)
        seen.append(torch.cuda.memory_reserved())
        train(model, 3)
        torch.cuda.synchronize()
        tide.fsdp2.uninstall(model)
        torch.cuda.empty_cache()
        seen.append(torch.cuda.memory_reserved())
        return seen, stats["arena_bytes"], stats["arena_in_torch"], torch.cuda.max_memory_reserved()
    finally:
        del os.environ["TIDE_TORCH_MEMORY"]


def profiled(folder, mode):
    """A step's calls into CUDA that make the host wait; and the ranges of our calls in the profile."""
    model = build()
    tide.fsdp2.install(model, strict=True, options={"mode": mode})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs = [data(k) for k in range(2)]

    def step(k):
        model(inputs[k % 2]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for k in range(4):
        step(k)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("the steps"):
            for k in range(3):
                step(k)
        torch.cuda.synchronize()
    path = f"{folder}/trace-{dist.get_rank()}.json"
    profile.export_chrome_trace(path)
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    tide.fsdp2.uninstall(model)
    ours = next(e for e in events if e.get("name") == "the steps" and e.get("cat") == "user_annotation")
    begin, end = ours["ts"], ours["ts"] + ours["dur"]
    waits = sorted(
        {
            e["name"]
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and "ynchronize" in e["name"] and begin <= e["ts"] <= end
        }
    )
    ranges = sorted({e["name"] for e in events if str(e.get("name", "")).startswith("tide::")})
    launches = sum(e.get("cat") in ("cuda_runtime", "cuda_driver") for e in events)
    return waits, ranges, launches


# ---- ends ------------------------------------------------------------------------------------------------------------


def survive(folder, node_size, how, options):
    """Trains until the other rank is gone or late, and writes down what this rank was told."""
    rank = dist.get_rank()
    model = build()
    tide.fsdp2.install(model, node_size=node_size, strict=True, options=options)
    told, start = None, time.monotonic()
    try:
        for k in range(200):
            loss = model(data(k)).float().square().mean()
            if k == 3:
                start = time.monotonic()
                if rank == 1 and how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 1:
                    time.sleep(4)
            loss.backward()
            torch.cuda.current_stream().synchronize()  # not the whole GPU: a stream may stand in NCCL for good
            time.sleep(0.01)
    except tide.fsdp2.TideError as error:
        told = {key: getattr(error, key) for key in ("name", "rank", "peer", "phase", "call")} | {"text": str(error)}
    pathlib.Path(folder, str(rank)).write_text(json.dumps({"told": told, "s": time.monotonic() - start}))


def captured():
    """A forward in a CUDA graph's capture: what its first call says."""
    model = build()
    tide.fsdp2.install(model, strict=True)
    train(model, 2)
    x, told = data(0), []
    torch.cuda.synchronize()
    try:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                model(x)
            except tide.fsdp2.TideError as error:
                told.append((error.name, str(error)))
    except Exception as error:  # the capture itself is of no use any more
        told.append(("capture", str(error).splitlines()[0]))
    return told


def reasons(**options):
    model = build(**options)
    tide.fsdp2.install(model)
    found = [(g.module, g.path, g.reason) for g in tide.fsdp2.report(model)]
    losses, _ = train(model, 2)
    tide.fsdp2.uninstall(model)
    return found, losses
