"""What ranks do in the tests: models with small-integer data, so that sums are exact in any order, and a stock run
beside a TIDE run.

Integer data: weights in {-1, 0, 1}, inputs in {-2 .. 2}, a step moves some by the sign of their gradient. Every partial
sum is then an integer below 2^22, so stock and TIDE must agree bit for bit whatever order they add in. Real data: each
side is compared with fp64.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide.fsdp2
from tide.demo.meter import Audit

DEVICE = os.environ.get("TIDE_TEST_DEVICE", "cpu")
FABRIC = os.environ.get("TIDE_FABRIC") or {"cpu": "host", "cuda": "cuda"}[DEVICE]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PURE = MixedPrecisionPolicy()
IN, DIM, HIDDEN, OUT = (
    7,
    12,
    18,
    3,
)  # over 4 ranks: uneven rows (7 x 12 is even, 18 is not), a bias of 3: rank 3 has no row


class Block(nn.Module):
    def __init__(self, dim=DIM, hidden=HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Root: first and head. Each block is a group."""

    def __init__(self, n_blocks=3, block=Block):
        super().__init__()
        self.first = nn.Linear(IN, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(n_blocks))
        self.head = nn.Linear(DIM, OUT)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mesh(*shape, names=None):
    return init_device_mesh(DEVICE, shape or (dist.get_world_size(),), mesh_dim_names=names)


def fill(model, integers=True, seed=1):
    """The same weights on every rank and in every run."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if integers:
                p.copy_(
                    torch.randint(-1, 2, p.shape, generator=generator)
                    * (torch.rand(p.shape, generator=generator) < 0.3)
                )
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def shard(model, modules=None, **options):
    """fully_shard on each of `modules` (default: the blocks), then on the root."""
    options.setdefault("mesh", mesh())
    for module in model.blocks if modules is None else modules:
        fully_shard(module, **options)
    if isinstance(options.get("reshard_after_forward"), bool):
        options.pop("reshard_after_forward")
    fully_shard(model, **options)
    return model


def batch(step, integers=True, n=5, width=IN, dtype=torch.float32):
    """Each rank its own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if integers:
        return torch.randint(-2, 3, (n, width), generator=generator).to(DEVICE, dtype)
    return torch.randn(n, width, generator=generator).to(DEVICE, dtype)


def loss_of(out, step, integers=True):
    generator = torch.Generator().manual_seed(77 + step)
    if integers:
        return (out.float() * torch.randint(-2, 3, out.shape, generator=generator).to(DEVICE)).sum()
    return (out.float() - torch.randn(out.shape, generator=generator).to(DEVICE)).square().mean()


def gradients(model):
    return {name: None if p.grad is None else p.grad._local_tensor.clone() for name, p in model.named_parameters()}


def weights(model):
    for module in model.modules():
        if hasattr(module, "reshard"):  # the root is still unsharded after an evaluation
            module.reshard()
    return {name: p._local_tensor.clone() for name, p in model.named_parameters()}


def sign_step(model):
    """Every fourth weight moves by one, within {-1, 0, 1}."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                move = p.grad._local_tensor.sign().reshape(-1)
                move *= torch.arange(move.numel(), device=DEVICE) % 4 == 0
                p._local_tensor.sub_(move.view_as(p._local_tensor)).clamp_(-1, 1)
                p.grad = None


def plain_step(model, step, integers=True):
    """One forward and backward; gives (loss, gradients) and moves the weights."""
    loss = loss_of(model(batch(step, integers)), step, integers)
    loss.backward()
    found = gradients(model)
    sign_step(model)
    return [loss.detach().clone()], found


def same(a, b, what=""):
    """Bitwise, through any nesting."""
    assert type(a) is type(b), f"{what}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        assert torch.equal(a, b), f"{what}: {a} and {b}, difference {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{what}: {a.keys()} and {b.keys()}"
        for key in a:
            same(a[key], b[key], f"{what}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{what}: {len(a)} and {len(b)}"
        for k, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{what}[{k}]")
    else:
        assert a == b, f"{what}: {a} and {b}"


def expect_on_tide(model, node_size, ranks=None, local=None):
    """Every group is on TIDE, on the path that this topology means. {module: calls that its engine has enqueued}"""
    report = tide.fsdp2.report(model)
    ranks = ranks or dist.get_world_size()
    local = local or min(node_size, ranks)
    for g in report:
        assert g.path.startswith(f"tide {FABRIC} M={ranks // local} L={local} "), f"{g.module}: {g.path}: {g.reason}"
        assert g.reason and g.digest
    return {g.module: (g.all_gathers, g.reduce_scatters) for g in report}


_stock_runs = {}


def _identity(function):
    """What a function does, as far as a test can tell: its code and what it closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return (
        function.__code__.co_filename,
        function.__code__.co_firstlineno,
        tuple(_identity(c) if hasattr(c, "__code__") else repr(c) for c in cells),
    )


def stock_run(build, step, steps):
    """Results and weights of stock FSDP2; kept, since they do not depend on the topology that TIDE will have."""
    key = _identity(build), _identity(step), steps
    if key not in _stock_runs:
        model = build()
        _stock_runs[key] = [step(model, k) for k in range(steps)], weights(model)
    return _stock_runs[key]


def run_both(build, node_size, step=plain_step, steps=3, ranks=None, local=None, check_calls=True, install=None):
    """Stock, then TIDE, from the same weights; everything that `step` returns must be equal. Gives the report after
    the run."""
    stock, stock_weights = stock_run(build, step, steps)
    model = build()
    tide.fsdp2.install(model, node_size=node_size, strict=True, **{"check_every": 2, **(install or {})})
    before = expect_on_tide(model, node_size, ranks, local)
    for k in range(steps):
        same(step(model, k), stock[k], f"step {k}")
        after = expect_on_tide(model, node_size, ranks, local)
        if check_calls:
            for name in after:
                assert after[name][0] > before[name][0], (
                    f"{name}: no all-gather in step {k}: {before[name]} {after[name]}"
                )
                assert after[name][1] > before[name][1], (
                    f"{name}: no reduce-scatter in step {k}: {before[name]} {after[name]}"
                )
        before = after
    same(weights(model), stock_weights, "weights")
    report = copy.deepcopy(tide.fsdp2.report(model))
    tide.fsdp2.uninstall(model)
    same(weights(model), stock_weights, "weights after uninstall")
    return report


def audited(build, node_size, bound=1e-5, steps=2, divide_by=None):
    """Real data on TIDE: the gradients of every step within `bound` of fp64."""
    model = build()
    tide.fsdp2.install(model, node_size=node_size, strict=True)
    for k in range(steps):
        with Audit(model) as audit:
            loss_of(model(batch(k, False)), k, False).backward()
        worst = audit.worst(divide_by)
        assert audit.local and worst <= bound, f"step {k}: {worst}"
        sign_step(model)
    expect_on_tide(model, node_size)
    tide.fsdp2.uninstall(model)
