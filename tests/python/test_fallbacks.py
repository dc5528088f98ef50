"""docs/support.md, the rows that stay on stock FSDP2: the reason, alike on all ranks, and a step that is right."""

import os

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:
    DataParallelMeshDims = None
from torch.distributed.tensor import Shard, distribute_module

import tide.fsdp2
import training as t
from tide.fsdp2 import support


def reports(build, node_size, steps=2, integers=True, install=None, on_tide=()):
    """Installs, trains as stock does, and gives [(module, path, reason)]. on_tide: modules that are, all the same."""
    kwargs = install or {}
    stock = build()
    expected = [t.plain_step(stock, k, integers) for k in range(steps)]
    model = build()
    tide.fsdp2.install(model, node_size=node_size, **kwargs)
    t.same([t.plain_step(model, k, integers) for k in range(steps)], expected)
    found = tide.fsdp2.report(model)
    assert [g.module for g in found if g.on_tide] == list(on_tide), found
    assert all(
        g.all_gathers >= steps and g.reduce_scatters >= steps for g in found if g.reason[:12] != "shard size 1"
    ), found
    tide.fsdp2.uninstall(model)
    t.same(t.plain_step(model, steps, integers), t.plain_step(stock, steps, integers))
    return [(g.module, g.path, g.reason) for g in found]


def alike(pool, function, *args):
    """The reports of all ranks, which must be one."""
    first, *others = pool.run(function, *args)
    assert all(other == first for other in others), (first, others)
    return first


ALL = ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def expect(found, reason, modules=ALL):
    rows = [row for row in found if row[0] in modules]
    assert len(rows) == len(modules)
    for module, path, given in rows:
        assert path == "stock" and reason in given, (module, path, given)


# ---- rows ----------------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """An all-gather extension that changes nothing."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data):
        self.data_ = data

    def fsdp_pre_all_gather(self, mesh):
        return (self.data_,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return outputs[0], (outputs[0],)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        unwrap = lambda x: x.data_ if isinstance(x, Wrapped) else x  # noqa: E731
        out = func(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))
        if func._schema.name in ("aten::copy_", "aten::add_", "aten::sub_", "aten::clamp_"):
            return args[0]
        return torch.utils._pytree.tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, out)


def extension(node_size):
    model = t.fill(t.Net())
    model.blocks[1].up.weight = nn.Parameter(Wrapped(torch.zeros(t.HIDDEN, t.DIM)))
    t.shard(model)
    return [(g.module, g.path, g.reason) for g in tide.fsdp2.install(model, node_size=node_size)], tide.fsdp2.uninstall(
        model
    )


def test_tensor_extension(pool, node_size):
    found, _ = alike(pool, extension, node_size)
    expect(found, "weight: tensor extension Wrapped (fsdp_pre_all_gather)", ["blocks.1"])
    assert all(path.startswith("tide") for module, path, _ in found if module != "blocks.1")


class Accelerator:
    """A group that says it is on an accelerator, which this machine may not have."""

    def __init__(self, group, **changes):
        self.__dict__.update(group=group, **changes)

    def __getattr__(self, name):
        return getattr(self.group, name)


def offload_on_accelerator():
    model = t.shard(t.fill(t.Net()), offload_policy=CPUOffloadPolicy(pin_memory=False))
    group = model._get_fsdp_state()._fsdp_param_group
    return (
        support.group_reason(Accelerator(group, device=torch.device("cuda"))),
        support.group_reason(Accelerator(group, offload_policy=CPUOffloadPolicy(pin_memory=True))),
        support.group_reason(
            Accelerator(t.shard(t.fill(t.Net()))._get_fsdp_state()._fsdp_param_group, device=torch.device("xpu"))
        ),
        support.group_reason(Accelerator(group, mesh_info=None)),
        support.group_reason(group),
    )


def test_cpu_offload_on_an_accelerator(pool):
    offload, pinned, device, replicated, here = alike(pool, offload_on_accelerator)
    assert offload == "CPU offload on an accelerator (cuda)"
    assert pinned == "CPU offload on an accelerator (cpu)"
    assert device == "device xpu: there is a fabric for cpu and for cuda"
    assert replicated == "replicated parameters: there is no shard group"
    assert here is None  # to a CPU there is nothing to offload


def offload_on_cpu(node_size):
    t.run_both(
        lambda: t.shard(t.fill(t.Net()), mp_policy=t.MIXED, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        node_size,
    )


def test_cpu_offload_on_cpu_ranks(pool, node_size):
    pool.run(offload_on_cpu, node_size)


def shard_size_1(node_size):
    return reports(lambda: t.shard(t.fill(t.Net()), mesh=t.mesh(4, 1, names=("replicate", "shard"))), node_size)


def test_shard_size_1(pool, node_size):
    expect(alike(pool, shard_size_1, node_size), "shard size 1: nothing to communicate")


def fp16_reduction(node_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    return reports(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size)


def test_fp16_reduction(pool, node_size):
    expect(alike(pool, fp16_reduction, node_size), "reduce dtype float16")


def integer_reshard(node_size):
    def build():
        model = t.fill(t.Net())
        for k, block in enumerate(model.blocks):
            fully_shard(block, mesh=t.mesh(), reshard_after_forward=2 if k < 2 else True)
        return fully_shard(model, mesh=t.mesh())

    return reports(build, node_size, on_tide=["(root)", "blocks.2"])


def test_integer_reshard_after_forward(pool, node_size):
    expect(alike(pool, integer_reshard, node_size), "reshard_after_forward=2", ["blocks.0", "blocks.1"])


class OwnAllGather(DefaultAllGather):
    pass


class OwnReduceScatter(DefaultReduceScatter):
    pass


def custom_comms(node_size):
    def build():
        model = t.shard(t.fill(t.Net()))
        model.blocks[0].set_custom_all_gather(OwnAllGather())
        model.blocks[1].set_custom_reduce_scatter(OwnReduceScatter())
        return model

    return reports(build, node_size, on_tide=["(root)", "blocks.2"])


def test_custom_communication(pool, node_size):
    found = alike(pool, custom_comms, node_size)
    expect(found, "custom all_gather: OwnAllGather", ["blocks.0"])
    expect(found, "custom reduce_scatter: OwnReduceScatter", ["blocks.1"])


def several_dtypes(node_size):
    def build():
        model = t.fill(t.Net())
        model.blocks[0].up.to(torch.bfloat16).requires_grad_(False)
        model.blocks[0].forward = lambda x, block=model.blocks[0]: (
            x + block.down(torch.relu(block.up(x.bfloat16()).float()))
        )
        return t.shard(model)

    return reports(build, node_size, on_tide=["(root)", "blocks.1", "blocks.2"])


def test_several_dtypes_in_a_group(pool, node_size):
    expect(alike(pool, several_dtypes, node_size), "several dtypes in a group: bfloat16, float32", ["blocks.0"])


def fp64(node_size):
    def build():
        model = t.shard(t.fill(t.Net()).double())
        model.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        return model

    return reports(build, node_size)


def test_fp64(pool, node_size):
    expect(alike(pool, fp64, node_size), "dtype float64")


def too_many(node_size):
    model = nn.Module()
    model.scales = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(4097))
    model.forward = lambda x: sum(x * p for p in model.scales)
    fully_shard(model, mesh=t.mesh())
    return [(g.module, g.path, g.reason) for g in tide.fsdp2.install(model, node_size=node_size)], tide.fsdp2.uninstall(
        model
    )


def test_more_than_4096_parameters(pool):
    found, _ = alike(pool, too_many, 4)
    expect(found, "4097 parameters, at most 4096", ["(root)"])


def empty(node_size):
    def build():
        model = t.fill(t.Net())
        model.blocks[2].nothing = nn.Parameter(torch.zeros(0, 3))
        return t.shard(model)

    return reports(build, node_size, on_tide=["(root)", "blocks.0", "blocks.1"])


def test_parameters_without_elements(pool):
    expect(alike(pool, empty, 2), "nothing: no elements", ["blocks.2"])


def spmd(node_size):
    whole = t.mesh(4, names=("dp",))
    model = distribute_module(t.fill(t.Net()), whole)
    dims = DataParallelMeshDims(shard="dp")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=whole, dp_mesh_dims=dims)
    found = tide.fsdp2.install(model, node_size=node_size)
    tide.fsdp2.uninstall(model)
    return [(g.module, g.path, g.reason) for g in found]


@pytest.mark.skipif(DataParallelMeshDims is None, reason="this torch has no SPMD meshes")
def test_spmd_mesh(pool):
    expect(alike(pool, spmd, 2), "a DTensor on an SPMD mesh")


# ---- agreement and refusal -------------------------------------------------------------------------------------------


def one_rank_disabled(node_size, rank):
    if torch.distributed.get_rank() == rank:
        os.environ["TIDE_DISABLE"] = "1"
    try:
        return reports(lambda: t.shard(t.fill(t.Net())), node_size)
    finally:
        os.environ.pop("TIDE_DISABLE", None)


def test_a_reason_of_one_rank_holds_for_all(pool, node_size):
    expect(alike(pool, one_rank_disabled, node_size, 2), "rank 2: TIDE_DISABLE is set")


def disabled(node_size):
    os.environ["TIDE_DISABLE"] = "1"
    try:
        return reports(lambda: t.shard(t.fill(t.Net())), node_size)
    finally:
        del os.environ["TIDE_DISABLE"]


def test_disable(pool):
    expect(alike(pool, disabled, 4), "TIDE_DISABLE is set")


def hsdp_one_replica(rank):
    """A reason in one replica keeps the other one on stock too."""
    if torch.distributed.get_rank() == rank:
        os.environ["TIDE_DISABLE"] = "1"
    try:
        return reports(lambda: t.shard(t.fill(t.Net()), mesh=t.mesh(2, 2, names=("replicate", "shard"))), 4)
    finally:
        os.environ.pop("TIDE_DISABLE", None)


def test_replicas_of_hsdp_agree(pool):
    for found in pool.run(hsdp_one_replica, 3):
        expect(found, "TIDE_DISABLE is set")


def strict():
    model = t.shard(t.fill(t.Net()), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
    with pytest.raises(tide.fsdp2.TideError) as error:
        tide.fsdp2.install(model, strict=True)
    with pytest.raises(tide.fsdp2.TideError):
        tide.fsdp2.report(model)  # nothing is installed
    stock = t.shard(t.fill(t.Net()), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
    t.same(t.plain_step(model, 0), t.plain_step(stock, 0))
    return str(error.value), error.value.name


def test_strict(pool):
    text, name = alike(pool, strict)
    assert name == "TIDE_ERR_UNSUPPORTED"
    assert "(root): reduce dtype float16" in text and "blocks.2: reduce dtype float16" in text


def other_model():
    """Rank 1 has a wider block: FSDP2 would hang or mix up bytes; installation says so."""
    model = t.Net(block=lambda: t.Block(hidden=19 if torch.distributed.get_rank() == 1 else 18))
    for block in model.blocks:
        fully_shard(block, mesh=t.mesh())
    with pytest.raises(tide.fsdp2.TideError) as error:
        tide.fsdp2.install(model)
    return str(error.value), error.value.name


def test_different_models_are_refused(pool):
    text, name = alike(pool, other_model)
    assert name == "TIDE_ERR_MISMATCH" and "rank 1" in text and "blocks.0" in text, text


def other_options():
    with pytest.raises(tide.fsdp2.TideError) as error:
        tide.fsdp2.install(t.shard(t.fill(t.Net())), options={"n_stg": 3 if torch.distributed.get_rank() == 1 else 2})
    return str(error.value), error.value.name


def test_different_options_are_refused(pool):
    text, name = alike(pool, other_options)
    assert name == "TIDE_ERR_MISMATCH" and "n_stg" in text and "rank 1" in text, text


def unknown_torch(monkeypatch_name):
    stock = dict(support.STOCK)
    support.torch_reason.cache_clear()
    support.STOCK[monkeypatch_name] = lambda fsdp_params, group, something_new: None
    try:
        return support.torch_reason()
    finally:
        support.STOCK.update(stock)
        support.torch_reason.cache_clear()


@pytest.mark.parametrize("name", support.SIGNATURES)
def test_unknown_signatures(name):
    reason = unknown_torch(name)
    assert name in reason and "something_new" in reason and torch.__version__ in reason
    assert support.torch_reason() is None


def uneven_shard_1():
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        fully_shard(nn.Linear(6, 4), mesh=t.mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


def test_uneven_shard_1(pool):
    pool.run(uneven_shard_1)
