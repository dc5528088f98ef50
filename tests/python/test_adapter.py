"""The adapter's own calls: install, report, stats, uninstall, checks, poison, errors."""

import gc

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

import tide.fsdp2
import training as t
from tide.fsdp2 import support


def net(**options):
    return t.shard(t.fill(t.Net()), **{"mp_policy": t.MIXED, **options})


def after_stock_steps(node_size):
    """Installed and uninstalled in the middle of training, twice."""
    stock = net()
    expected = [t.plain_step(stock, k) for k in range(6)]
    model = net()
    found = [t.plain_step(model, 0)]
    for first in (1, 4):
        tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=1)
        found += [t.plain_step(model, k) for k in (first, first + 1) if k < 6]
        t.expect_on_tide(model, node_size)
        tide.fsdp2.uninstall(model)
        found += [t.plain_step(model, first + 2)] if first == 1 else []
    t.same(found, expected)
    originals = (
        group_module.foreach_all_gather,
        group_module.foreach_all_gather_copy_out,
        group_module.foreach_reduce,
        collectives.foreach_reduce_scatter_copy_in,
    )
    assert originals == tuple(support.STOCK[name] for name in support.SIGNATURES)


def test_in_the_middle_of_training(pool, node_size):
    pool.run(after_stock_steps, node_size)


def on_meta(node_size):
    """fully_shard and install on the meta device; weights come afterwards."""
    with torch.device("meta"):
        model = t.Net()
    t.shard(model)
    tide.fsdp2.install(model, node_size=node_size, strict=True)
    model.to_empty(device="cpu")
    stock = t.shard(t.fill(t.Net()))
    with torch.no_grad():
        for p, q in zip(model.parameters(), stock.parameters()):
            p.copy_(q)
    t.same([t.plain_step(model, k) for k in range(2)], [t.plain_step(stock, k) for k in range(2)])
    assert {g.shards for g in tide.fsdp2.report(model)} == {"adopted"}
    t.expect_on_tide(model, node_size)
    tide.fsdp2.uninstall(model)


def test_meta_device(pool, node_size):
    pool.run(on_meta, node_size)


def shards_are_tensors(node_size):
    """An adopted shard and an unsharded parameter have storages of their own, at offset 0, inside the arena."""
    model = net(mp_policy=t.PURE)
    before = t.weights(model)
    tide.fsdp2.install(model, node_size=node_size)
    t.same(t.weights(model), before)
    arena = tide.fsdp2.stats(model)
    assert arena["total"].adopted == len(list(model.parameters())) and arena["live_views"] >= 2 * arena["total"].adopted
    seen = set()
    for p in model.parameters():
        local = p._local_tensor
        assert local.storage_offset() == 0 and local.is_contiguous()
        seen.add(local.untyped_storage().data_ptr())
    assert len(seen) == len(list(model.parameters()))
    model.blocks[0].unshard()
    for p in model.blocks[0].parameters():
        assert p.storage_offset() == 0 and p.untyped_storage().data_ptr() == p.data_ptr()
    model.blocks[0].reshard()
    kept = model.state_dict()
    tide.fsdp2.uninstall(model)
    t.same({name: p._local_tensor for name, p in kept.items()}, before)  # a state dict outlives the communicator
    t.same(t.weights(model), before)


def test_tensors_over_the_arena(pool, node_size):
    pool.run(shards_are_tensors, node_size)


def assigned(node_size):
    """load_state_dict(assign=True) puts other memory under the parameters; the next all-gather moves it into the arena,
    which is what a network has registered."""
    stock, model = (net(mp_policy=t.PURE, mesh=t.mesh(2, 2, names=("replicate", "shard"))) for _ in range(2))
    tide.fsdp2.install(model, node_size=node_size, strict=True)
    arena = {name: p._local_tensor.data_ptr() for name, p in model.named_parameters()}
    for step in range(3):
        for m in (stock, model):
            state = {name: nn.Parameter(-p.detach().clone()) for name, p in m.state_dict().items()}
            m.load_state_dict(state, assign=True)
        assert all(p._local_tensor.data_ptr() != arena[name] for name, p in model.named_parameters())
        t.same(t.plain_step(model, step), t.plain_step(stock, step))
        assert {name: p._local_tensor.data_ptr() for name, p in model.named_parameters()} == arena
        assert tide.fsdp2.stats(model)["total"].adopted == (step + 2) * len(arena)
    assert all(g.shards == "adopted" for g in tide.fsdp2.report(model))
    tide.fsdp2.uninstall(model)


def test_assigned_shards_move_into_the_arena(pool):
    pool.run(assigned, 1)


def counted():
    model = net()
    report = tide.fsdp2.install(model, node_size=2)
    assert [g.module for g in report] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert all(g.all_gathers == g.reduce_scatters == 0 for g in report)
    text = str(report)
    assert text.splitlines()[0].split()[:4] == ["module", "path", "AG", "RS"] and len(text.splitlines()) == 5
    for k in range(2):
        t.plain_step(model, k)
    stats = tide.fsdp2.stats(model)
    report = tide.fsdp2.report(model)
    assert stats["steps"] == 2
    assert stats["total"].all_gathers == sum(g.all_gathers for g in report)
    assert stats["total"].reduce_scatters == sum(g.reduce_scatters for g in report) == 8
    assert stats["last_step"].reduce_scatters == 4
    assert stats["last_step"].all_gathers * 2 == stats["total"].all_gathers
    shards = sum(
        p._sharded_param_data.numel()
        for b in model.modules()
        if hasattr(b, "_get_fsdp_state")
        for g in support.groups_of(b._get_fsdp_state())
        for p in g.fsdp_params
    )
    assert stats["last_step"].cast_bytes < 2 * 2 * shards  # each group is gathered at most twice, in bf16
    assert stats["total"].copy_bytes == 0 and stats["arena_bytes"] > 0
    assert len({g.digest for g in report}) == 1
    tide.fsdp2.uninstall(model)
    return [g.digest for g in report]


def test_report_and_stats(pool):
    digests = pool.run(counted)
    assert all(d == digests[0] for d in digests)


def refused():
    model = net()
    for call in (tide.fsdp2.report, tide.fsdp2.stats, tide.fsdp2.uninstall):
        with pytest.raises(tide.fsdp2.TideError, match="not installed"):
            call(model)
    for bad, text in (
        ({"options": {"no_such": 1}}, "no_such"),
        ({"options": {"n_stg": 99}}, "n_stg"),
        ({"private": ["blocks.7"]}, "blocks.7"),
    ):
        with pytest.raises(tide.fsdp2.TideError, match=text):
            tide.fsdp2.install(model, **bad)
    with pytest.raises(tide.fsdp2.TideError, match="no fully_shard"):
        tide.fsdp2.install(nn.Linear(2, 2))
    tide.fsdp2.install(model)
    with pytest.raises(tide.fsdp2.TideError, match="already"):
        tide.fsdp2.install(model)
    model.set_requires_gradient_sync(False)
    t.loss_of(model(t.batch(0)), 0).backward()
    with pytest.raises(tide.fsdp2.TideError, match="between steps"):
        tide.fsdp2.uninstall(model)
    model.set_requires_gradient_sync(True)
    t.plain_step(model, 1)
    tide.fsdp2.uninstall(model)


def test_refusals(pool):
    pool.run(refused)


def too_many_at_once():
    """Three blocks unsharded by hand want three landings; the ring has two."""
    model = net()
    tide.fsdp2.install(model)
    model.blocks[0].unshard()
    model.blocks[1].unshard()
    with pytest.raises(tide.fsdp2.TideError) as error:
        model.blocks[2].unshard()
    assert error.value.name == "TIDE_ERR_STATE"
    text = str(error.value)
    assert "blocks.2" in text and "blocks.0" in text and "private" in text and "ring_slots" in text, text
    for block in model.blocks:
        block.reshard()
    expected = t.plain_step(net(), 0)
    t.same(t.plain_step(model, 0), expected)  # nothing was harmed
    tide.fsdp2.uninstall(model)
    for install in ({"options": {"ring_slots": 3}}, {"private": ["blocks.2"]}):
        model = net()
        tide.fsdp2.install(model, **install)
        for block in model.blocks:
            block.unshard()
        t.same(t.plain_step(model, 0), expected)
        tide.fsdp2.uninstall(model)


def test_landing_still_held(pool):
    pool.run(too_many_at_once)


class Backwards(t.Net):
    """Runs its blocks in another order than that of their registration."""

    def forward(self, x):
        x = self.first(x)
        for k in (0, 2, 1):
            x = self.blocks[k](x)
        return self.head(x)


def other_order():
    build = lambda: t.shard(t.fill(Backwards()), mp_policy=t.MIXED)  # noqa: E731
    expected = t.plain_step(build(), 0)
    model = build()
    tide.fsdp2.install(model)
    with pytest.raises(tide.fsdp2.TideError) as error:
        t.plain_step(model, 0)
    assert "blocks.0" in str(error.value) and "blocks.2" in str(error.value), str(error.value)
    model.reset_iter_state()
    with pytest.raises(tide.fsdp2.TideError, match="not been reduced"):
        tide.fsdp2.uninstall(model)
    tide.fsdp2.uninstall(model, force=True)
    for p in model.parameters():
        p.grad = None
    tide.fsdp2.install(model, private=["blocks.2"])
    t.same(t.plain_step(model, 0), expected)
    tide.fsdp2.uninstall(model)


def test_order_of_execution_is_not_that_of_registration(pool):
    pool.run(other_order)


def poisoned(node_size):
    """A weight used after its reshard is NaN, not stale."""
    model = net()
    tide.fsdp2.install(model, node_size=node_size, poison=True, strict=True)
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    assert weight.isfinite().all()
    model.blocks[0].reshard()
    assert weight.isnan().all()
    t.same(t.plain_step(model, 0), t.plain_step(net(), 0))
    tide.fsdp2.uninstall(model)


def test_poison(pool, node_size):
    pool.run(poisoned, node_size)


def corrupted(what):
    """check_every finds a wrong byte in a landing, or a wrong gradient; every rank stops."""
    model = net(mp_policy=t.PURE)
    tide.fsdp2.install(model, check_every=1, node_size=2)
    t.plain_step(model, 0)
    binding = model.blocks[1]._get_fsdp_state()._fsdp_param_group.fsdp_params[0]._tide[0]
    group = binding.group
    if what == "landing":
        wait = group.wait

        def spoil(event, *stream):
            wait(event, *stream)
            if event == 0 and torch.distributed.get_rank() == 2:
                binding.landings[0][3] += 1

        group.wait = spoil
    else:
        reduce_scatter = group.reduce_scatter
        group.reduce_scatter = lambda *args, alpha, **kwargs: reduce_scatter(*args, alpha=alpha * 1.001, **kwargs)
    with pytest.raises(tide.fsdp2.TideError) as error:
        t.plain_step(model, 1)
        t.plain_step(model, 2)
    text = str(error.value)
    assert error.value.name in ("TIDE_ERR_INTERNAL", "TIDE_ERR_ABORTED"), text
    with pytest.raises(tide.fsdp2.TideError):  # and goes on saying so
        binding.group.all_gather()
    return text, error.value.name


@pytest.mark.parametrize("what", ["landing", "gradient"])
def test_check_every_finds_corruption(pool, what):
    found = pool.run(corrupted, what)
    texts = [text for text, name in found if name == "TIDE_ERR_INTERNAL"]
    assert texts and all("check_every: blocks.1" in text for text in texts), found
    pool.stop(kill=True)  # stock collectives of the check may be half done


def views_are_freed():
    """Nothing of an installation stays: arenas go with the last view."""
    model = net(mp_policy=t.PURE)
    tide.fsdp2.install(model)
    t.plain_step(model, 0)
    maps = sum("memfd:" in line for line in open("/proc/self/maps"))
    assert maps > 0
    tide.fsdp2.uninstall(model)
    gc.collect()
    assert sum("memfd:" in line for line in open("/proc/self/maps")) == 0
    t.plain_step(model, 1)


def test_nothing_stays_mapped(pool):
    pool.run(views_are_freed)


def per_parameter_meshes(node_size):
    """Several groups in one module: fully_shard with a mesh for some parameters."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    def build():
        whole, pairs = t.mesh(), t.mesh(2, 2, names=("other", "pair"))["pair"]
        all_ranks, two = FSDPMeshInfo(whole, shard_mesh_dim=0), FSDPMeshInfo(pairs, shard_mesh_dim=0)
        model = t.fill(t.Net())

        def placement(p):
            return ShardPlacementResult(Shard(0), two if p.ndim == 1 else all_ranks)

        for block in model.blocks:
            fully_shard(block, mesh=whole, mp_policy=t.MIXED, shard_placement_fn=placement)
        return fully_shard(model, mesh=whole, mp_policy=t.MIXED)

    stock, model = build(), build()
    report = tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=1)
    assert [g.module for g in report][1:3] == ["blocks.0 [group 0]", "blocks.0 [group 1]"]
    t.same([t.plain_step(model, k) for k in range(3)], [t.plain_step(stock, k) for k in range(3)])
    assert all(g.all_gathers >= 3 and g.reduce_scatters == 3 for g in tide.fsdp2.report(model))
    tide.fsdp2.uninstall(model)


def test_several_groups_in_a_module(pool, node_size):
    pool.run(per_parameter_meshes, node_size)
