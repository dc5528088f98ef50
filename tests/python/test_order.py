"""The step that installation plays through is the step that FSDP2 takes, and rings chosen from it are safe."""

import random

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import tide.fsdp2
import training as t
from tide.fsdp2 import order
from tide.fsdp2.binding import Binding
from tide.fsdp2.session import installations


def trace(model, step):
    """("gather" | "release", module) as the adapter is really asked."""
    seen = []
    gather, release = Binding.all_gather, Binding.release

    def all_gather(self, *stream):
        seen.append(("gather", self.name))
        return gather(self, *stream)

    def released(self):
        if self.held and self.slot.keeper is not self:
            seen.append(("release", self.name))
        return release(self)

    Binding.all_gather, Binding.release = all_gather, released
    try:
        t.plain_step(model, step)
    finally:
        Binding.all_gather, Binding.release = gather, release
    return seen


class Nest(nn.Module):
    """x + f(...(x)): modules inside modules, so that groups are held while others come and go."""

    def __init__(self, depth, rng):
        super().__init__()
        self.own = nn.Linear(t.DIM, t.DIM)
        self.inner = nn.ModuleList(Nest(depth - 1, rng) for _ in range(rng.randint(0, 2) if depth else 0))

    def forward(self, x):
        h = self.own(x)
        for module in self.inner:
            h = module(h)
        return x + h.clamp(-2, 2)


def random_model(seed):
    """Shapes of nesting, prefetch lists and reshard flags from `seed`, the same on all ranks."""
    rng = random.Random(seed)
    model = t.fill(t.Net(rng.randint(1, 4), block=lambda: Nest(rng.randint(0, 2), rng)))
    nests = [m for m in model.modules() if isinstance(m, Nest)]
    sharded = [m for m in nests if m in list(model.blocks) or rng.random() < 0.6]
    policy = rng.choice((t.MIXED, t.PURE))
    for module in reversed(sharded):
        fully_shard(module, mesh=t.mesh(), mp_policy=policy, reshard_after_forward=rng.random() < 0.85)
    fully_shard(model, mesh=t.mesh(), mp_policy=policy)
    if rng.random() < 0.5:
        for k, module in enumerate(sharded):
            if rng.random() < 0.7:
                module.set_modules_to_forward_prefetch(sharded[k + 1 : k + 1 + rng.randint(1, 2)])
            if rng.random() < 0.7:
                module.set_modules_to_backward_prefetch(sharded[max(0, k - rng.randint(1, 2)) : k][::-1])
    return model


def as_played(seed):
    model = random_model(seed)
    tide.fsdp2.install(model, strict=True)
    installation = installations[model]
    names = {b.param_group: b.name for b in installation.bindings}
    played = [
        (what, names[group])
        for what, group in order.play_step(installation.roots, order.units_by_group(installation.units))
    ]
    for step in range(2):
        assert trace(model, step) == played, (seed, step)
    tide.fsdp2.uninstall(model)


def test_played_steps_are_the_steps_taken(pool):
    for seed in range(12):
        pool.run(as_played, seed)


def random_models(node_size, seeds):
    for seed in seeds:
        stock = random_model(seed)
        expected = [t.plain_step(stock, k) for k in range(2)]
        model = random_model(seed)
        report = tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=3)
        try:
            t.same([t.plain_step(model, k) for k in range(2)], expected, f"seed {seed}")
        except BaseException as error:
            raise AssertionError(f"seed {seed}, rank {dist.get_rank()}\n{report}") from error
        tide.fsdp2.uninstall(model)


def test_random_models_equal_stock(pool, node_size):
    pool.run(random_models, node_size, range(100, 110))
