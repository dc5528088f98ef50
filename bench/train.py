#!/usr/bin/env python3
"""Training steps of FSDP2 on two GPUs: stock, on TIDE, and the same step without any communication (weights kept
gathered), on blocks with the real dimensions of three models. bf16 compute, fp32 shards, fp32 reduction, AdamW.

usage: train.py [--models llama-3.1-70b,qwen3-30b-a3b,wan2.2-t2v-a14b] [--steps 10] [--limit SECONDS a model]
                [--variants /c_sum=16/mode=1] [--out FILE] [--blocks N] [--tokens N] [--profiles]

Times are medians of GPU time, the slowest rank's: forward and backward, and the whole step with the optimizer. Peak
reserved is torch's plus the arenas of TIDE, which torch's counters do not hold; device: all that is in use on the GPU
after the steps (NCCL's and TIDE's own included). Losses are compared step by step from equal weights.
"""

import argparse
import gc
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import gpu  # noqa: E402

GIB = 1 << 30
WARM_UP = 3
LEARNING_RATE = 1e-5
PLACES = ("node_size", "fabric")  # of a variant: no knobs


def batch(size, tokens, step, ranks):
    """(input, target): bf16 activations of ordinary size, each rank and step its own."""
    import torch

    generator = torch.Generator(device=ranks.device).manual_seed(10_000 * step + ranks.rank)
    shape = (1, tokens, size.width)
    return tuple(torch.randn(shape, generator=generator, device=ranks.device).bfloat16() for _ in range(2))


def loss_of(model, data):
    inputs, target = data
    return (model(inputs).float() - target.float()).square().mean()


def steps(ranks, model, size, tokens, n, optimizer):
    """Runs n steps; {"fb_ms", "step_ms", "losses", memory}."""
    import torch

    ms, losses, marks = {"fb_ms": [], "step_ms": [], "host_ms": []}, [], []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    data = [batch(size, tokens, k, ranks) for k in range(2)]  # two batches in turn

    def step(k, marks):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        loss = loss_of(model, data[k % 2])
        loss.backward()
        events[1].record()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.zero_grad()
        events[2].record()
        marks.append(events)
        return loss.detach()

    clocks = gpu.Clocks(ranks)
    for k in range(n):
        if k == WARM_UP:
            torch.cuda.synchronize()
            ranks.barrier()
            clocks.start()
        begin = time.perf_counter()
        losses.append(step(k, marks))
        if k >= WARM_UP:
            ms["host_ms"].append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    clock = clocks.stop()
    for events in marks[WARM_UP:]:
        ms["fb_ms"].append(events[0].elapsed_time(events[1]))
        ms["step_ms"].append(events[0].elapsed_time(events[2]))
    # From the beginning of one step to that of the next: what a step really takes.
    ms["period_ms"] = [a[0].elapsed_time(b[0]) for a, b in zip(marks[WARM_UP:], marks[WARM_UP + 1 :])]
    free, total = torch.cuda.mem_get_info()
    result = {name: [max(x) for x in zip(*ranks.everyone(values))] for name, values in ms.items()}
    result |= clock
    result["losses"] = torch.stack(losses).tolist()
    result["peak_reserved"] = max(ranks.everyone(torch.cuda.max_memory_reserved()))
    result["peak_allocated"] = max(ranks.everyone(torch.cuda.max_memory_allocated()))
    result["device_used"] = max(ranks.everyone(total - free))
    ranks.barrier()
    result["profile"] = gpu.where_time_goes(lambda: step(n, []))
    return result


def sharded(ranks, size, n_blocks):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from models import Stack

    with torch.device("meta"):
        model = Stack(size, n_blocks)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=ranks.device)
    return model


def adamw(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def clean():
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def summary(result, arena=0):
    middle = {name: gpu.spread(result[name])[0] for name in ("fb_ms", "step_ms", "period_ms") if result[name]}
    clock = f", SM clock {result['sm_mhz']:.0f} MHz, {result['watt']:.0f} W" if "sm_mhz" in result else ""
    return (
        f"forward+backward {middle['fb_ms']:8.1f} ms, step {middle['step_ms']:8.1f} ms, "
        f"host {gpu.spread(result['host_ms'])[0]:.0f} ms, "
        f"peak reserved {(result['peak_reserved'] + arena) / GIB:6.2f} GiB, device {result['device_used'] / GIB:6.2f} GiB"
        f"{clock}"
    )


def train(ranks, name, n_steps, variants, n_blocks, tokens, profiles):
    import torch

    from models import SIZES, Stack, fill

    size = SIZES[name]
    tokens = tokens or size.tokens
    n = WARM_UP + n_steps
    found = {}

    def note(kind, result, **more):
        found[kind] = result
        ranks.emit({"kind": kind, "model": name, "tokens": tokens, "checkpointed": size.checkpointed, **result, **more})
        if profiles:
            ranks.say("\n".join(f"    {line}" for line in result["profile"]))

    with ranks.guarded(f"{name}: ceiling"):
        with torch.device("meta"):
            model = Stack(size, n_blocks).to(torch.bfloat16)
        model.to_empty(device=ranks.device)
        fill(model, 1)
        result = steps(ranks, model, size, tokens, n, None)
        note("ceiling", result)
        ranks.say(f"{name}: ceiling {summary(result)} (no communication, no optimizer)")
    model = result = None
    clean()

    with ranks.guarded(f"{name}: the model"):
        model = sharded(ranks, size, n_blocks)
    if model is None:
        return
    with ranks.guarded(f"{name}: stock"):
        fill(model, 100 + ranks.rank)
        optimizer = adamw(model)
        result = steps(ranks, model, size, tokens, n, optimizer)
        note("stock", result)
        ranks.say(f"{name}: stock   {summary(result)}")
    model.zero_grad()
    optimizer = None
    clean()

    import tide.fsdp2

    for more in variants:
        label = "tide" + "".join(f" {knob}={value}" for knob, value in more.items())
        with ranks.guarded(f"{name}: {label}"):
            fill(model, 100 + ranks.rank)
            knobs = {k: v for k, v in more.items() if k not in PLACES}
            tide.fsdp2.install(model, options=knobs, **{k: v for k, v in more.items() if k in PLACES})
            report = tide.fsdp2.report(model)
            off = [f"{g.module}: {g.reason}" for g in report if not g.on_tide]
            ranks.say(f"{name}: {label}: {report[0].path}; on stock: {off[:2] or 'none'}; {report[0].reason}")
            optimizer = adamw(model)
            result = steps(ranks, model, size, tokens, n, optimizer)
            stats = tide.fsdp2.stats(model)
            arena = 0 if stats.get("arena_in_torch") else stats["arena_bytes"]
            note(label, result, arena_bytes=stats["arena_bytes"], added_to_reserved=arena, off=off)
            ranks.say(f"{name}: {label} {summary(result, arena)} (arenas {stats['arena_bytes'] / GIB:.2f})")
            optimizer = None
            tide.fsdp2.uninstall(model, force=True)
        model.zero_grad()
        optimizer = None
        clean()
        if "stock" in found and label in found:
            compare(ranks, name, label, found)


def compare(ranks, name, label, found):
    middle = {kind: {k: gpu.spread(r[k])[0] for k in ("fb_ms", "step_ms")} for kind, r in found.items()}
    stock, tide = found["stock"]["losses"], found[label]["losses"]
    difference = max(abs(a - b) / abs(a) for a, b in zip(stock, tide))
    less = {k: 100 * (1 - middle[label][k] / middle["stock"][k]) for k in ("fb_ms", "step_ms")}
    text = f"{name}: {label}: forward+backward {less['fb_ms']:.1f} % less than stock, step {less['step_ms']:.1f} % less"
    if "ceiling" in found:
        gap = middle["stock"]["fb_ms"] - middle["ceiling"]["fb_ms"]
        text += f", {100 * (middle['stock']['fb_ms'] - middle[label]['fb_ms']) / gap:.0f} % of the gap to the ceiling"
    ranks.say(f"{text}; largest relative loss difference {difference:.1e} over {len(stock)} steps")
    ranks.emit(
        {"kind": "comparison", "model": name, "label": label, "percent_less": less, "loss_difference": difference}
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.1-70b,qwen3-30b-a3b,wan2.2-t2v-a14b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--blocks", type=int, help="default: 6 of Llama, 8 of the others")
    parser.add_argument("--tokens", type=int, help="a GPU; default: 8,192 / 16,384 / 15,600")
    parser.add_argument(
        "--variants",
        default="/c_sum=16/c_sum=4/mode=1",
        help="runs of TIDE with other knobs, or node_size=N, fabric=NAME: name=value,... each, / between them",
    )
    parser.add_argument("--limit", type=float, default=135, help="seconds a model")
    parser.add_argument("--profiles", action="store_true", help="print where each side's step spends its time")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps: {options.steps}, expected 2 or more")
    variants = [
        {k: v if k == "fabric" else int(v) for k, v in (pair.split("=") for pair in run.split(",") if pair)}
        for run in options.variants.split("/")
    ]
    gpu.prepare_environment()
    if reason := gpu.why_not():
        print(f"train: not run: {reason}")
        return 0
    rows, problems = [], []
    document = {"schema": 1, "kind": "train", "machine": gpu.machine(), "rows": rows, "problems": problems}
    print(f"train: {document['machine']}")
    for name in options.models.split(","):
        begin = time.monotonic()
        found, problem = gpu.run_part(
            train,
            options.limit,
            name=name,
            n_steps=options.steps,
            variants=variants,
            n_blocks=options.blocks,
            tokens=options.tokens,
            profiles=options.profiles,
        )
        rows.extend(found)
        if problem:
            problems.append({"model": name, "text": problem})
            print(f"train: {name}: {problem}")
        print(f"train: {name}: {time.monotonic() - begin:.0f} s", flush=True)
        gpu.write(options.out, document)
    failed = [r["failed"] for r in rows if "failed" in r]
    print(f"train: {len(rows)} rows, {len(problems)} models ended early, failed: {failed or 'none'}")
    return 1 if problems or failed else 0


if __name__ == "__main__":
    sys.exit(main())
