"""One rank of the demo: the same training on stock FSDP2, on TIDE, and on TIDE again."""

import os
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide.fsdp2
from tide.demo import model as m
from tide.demo.meter import Audit, BufferMeter, CopyMeter

WINDOWS, LEARNING_RATE, WARM_UP = 12, 2e-3, 10  # windows of all ranks together
AUDITED, METERED = 0, 1  # steps in which something else than time is measured


def build(device):
    torch.manual_seed(0)
    model = m.Transformer()  # on the CPU, so that every device has the same weights
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def rate(step, steps):
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP, 1.3 * (steps - step) / steps)


def finished(device):
    """What was enqueued has run: from here on the host's clock counts."""
    if device == "cuda":
        torch.cuda.synchronize()


def train(text, steps, tell, node_size, device):
    """One training run; node_size None: stock FSDP2. Gives what the demo compares."""
    model = build(device)
    if node_size is not None:
        tide.fsdp2.install(model, node_size=node_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    result = {"losses": [], "step_s": []}
    for step in range(steps):
        windows = m.batch_of(text, step, dist.get_rank(), WINDOWS // dist.get_world_size())
        inputs, targets = (t.to(device) for t in windows)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        audit = Audit(model) if step == AUDITED else None
        copies, buffers = (CopyMeter(), BufferMeter(model)) if step == METERED else (None, None)
        for meter in (audit, buffers, copies):
            if meter:
                meter.__enter__()
        finished(device)
        start = time.perf_counter()
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        finished(device)
        took = time.perf_counter() - start
        for meter in (copies, buffers, audit):
            if meter:
                meter.__exit__()
        if audit:
            result["fp64_error"] = audit.worst()
            result["gradients"] = [p.grad._local_tensor.clone() for p in model.parameters()]
        if copies:
            result["copy_bytes"] = copies.bytes
            result["buffer_bytes"] = buffers.peak
            if (
                node_size is not None
            ):  # torch cannot see the cast that TIDE does on the way out; stock's is counted, so this one is
                result["copy_bytes"] += tide.fsdp2.stats(model)["last_step"].cast_bytes
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        finished(device)
        if step not in (AUDITED, METERED):
            result["step_s"].append(took + time.perf_counter() - start)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        result["losses"].append(mean.item() / dist.get_world_size())
        tell(step, result["losses"][-1])
    result["weights"] = [p._local_tensor.clone() for p in model.parameters()]
    if node_size is not None:
        result["report"] = tide.fsdp2.report(model)
        result["buffer_bytes"] = tide.fsdp2.stats(model)["arena_bytes"]
        tide.fsdp2.uninstall(model)
    return result


def largest(values):
    out = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(out, op=dist.ReduceOp.MAX)
    return out.tolist()


def equal_everywhere(a, b):
    same = torch.tensor([int(len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b)))])
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same.item())


def demo(text, steps, node_size, device, tell):
    """What the table needs, alike on all ranks."""
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    runs = [
        train(text, steps, lambda step, loss, n=n: tell(n, step, loss), size, device)
        for n, size in enumerate((None, node_size, node_size))
    ]
    stock, first, second = runs
    # By parameter: the largest difference of any rank over the largest gradient of any rank.
    differences = largest(
        [(a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(first["gradients"], stock["gradients"])]
    )
    sizes = largest([g.abs().max().item() if g.numel() else 0.0 for g in stock["gradients"]])
    summed = {}
    for name in ("copy_bytes", "buffer_bytes"):
        for run, who in ((stock, "stock"), (first, "tide")):
            total = torch.tensor([float(run[name])], dtype=torch.float64)
            dist.all_reduce(total)
            summed[f"{who}_{name}"] = int(total.item()) // dist.get_world_size()
    return {
        "losses": [run["losses"] for run in runs],
        "step_s": [sorted(run["step_s"])[len(run["step_s"]) // 2] if run["step_s"] else float("nan") for run in runs],
        "fp64_error": [run["fp64_error"] for run in runs],
        "gradient_difference": max(d / size for d, size in zip(differences, sizes) if size),
        "weight_difference": max(
            largest(
                [(a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(first["weights"], stock["weights"])]
            )
        ),
        "repeat_equal": first["losses"] == second["losses"] and equal_everywhere(first["weights"], second["weights"]),
        "reports": [first["report"], second["report"]],
        **summed,
    }


def use_gpu(rank):
    """The rank's own GPU, and arithmetic that gives the same bits twice."""
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for backend in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(False)


def rank_main(pipe, rank, size, store, text, steps, node_size, device):
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            use_gpu(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=300),
        )

        def tell(run, step, loss):
            if rank == 0:
                pipe.send(("progress", run, step, loss))

        pipe.send(("done", demo(text, steps, node_size, device, tell)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send(("failed", rank, traceback.format_exc()))
    pipe.close()
    os._exit(0)
