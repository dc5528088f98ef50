"""docs/support.md, the rows that are on TIDE: each equal to stock FSDP2, as 1 x 4, 2 x 2 and 4 x 1."""

import copy
import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import tide.fsdp2
import training as t
from tide.demo.meter import CopyMeter


# ---- precision -------------------------------------------------------------------------------------------------------


def one_linear(node_size, policy):
    def build():
        model = nn.Module()
        model.blocks = nn.ModuleList()
        model.only = nn.Linear(t.IN, t.OUT)
        model.forward = lambda x: model.only(x)
        return t.shard(t.fill(model), mp_policy=policy)

    t.run_both(build, node_size)


def test_one_linear(pool, node_size):
    pool.run(one_linear, node_size, t.PURE)
    pool.run(one_linear, node_size, t.MIXED)


def precision(node_size, policy, shards):
    report = t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size)
    assert {g.shards for g in report} == {shards}
    t.audited(lambda: t.shard(t.fill(t.Net(), False), mp_policy=policy), node_size)


def test_mixed_precision(pool, node_size):
    pool.run(precision, node_size, t.MIXED, "cast from float32")


def test_pure_fp32(pool, node_size):
    pool.run(precision, node_size, t.PURE, "adopted")


def ulp_bf16(x):
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(2.0**-126))) - 7)


def pure_bf16(node_size, policy, to, shards):
    def build():
        return t.shard(t.fill(t.Net(), False).to(to), mp_policy=policy)

    model = build()
    tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=1)
    for k in range(2):
        with t.Audit(model) as audit:
            t.loss_of(model(t.batch(k, False, dtype=to)), k, False).backward()
        for name, (_, _, got, expected) in audit.errors().items():
            far = (got.double() - expected).abs() > ulp_bf16(expected)
            assert not far.any(), f"{name}: {got[far]} {expected[far]}"
        t.sign_step(model)
    t.expect_on_tide(model, node_size)
    assert {g.shards for g in tide.fsdp2.report(model)} == {shards}
    tide.fsdp2.uninstall(model)


def test_pure_bf16(pool, node_size):
    pool.run(pure_bf16, node_size, t.PURE, torch.bfloat16, "adopted")


def test_bf16_reduction_of_fp32_shards(pool, node_size):
    pool.run(pure_bf16, node_size, MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.float32, "cast from float32")


def test_fp16_parameters_fp32_reduction(pool, node_size):
    pool.run(
        precision,
        node_size,
        MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
        "cast from float32",
    )


# ---- shapes ----------------------------------------------------------------------------------------------------------


class Few(nn.Module):
    """Rows 1, 2, 3, 5, 6: over 4 ranks some own none."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((t.IN, 1), (1, 2), (2, 3), (3, 5), (5, 6)))
        self.blocks = self.layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def few_rows(node_size, policy):
    t.run_both(lambda: t.shard(t.fill(Few()), mp_policy=policy), node_size)
    t.run_both(lambda: t.shard(t.fill(Few()), modules=[], mp_policy=policy), node_size)


def test_uneven_rows_and_ranks_without_rows(pool, node_size):
    pool.run(few_rows, node_size, t.PURE)
    pool.run(few_rows, node_size, t.MIXED)


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(n % 5 + 1)) for n in range(300))
        self.first = nn.Linear(t.IN, 5)

    def forward(self, x):
        x = self.first(x)
        return torch.cat([x[:, : p.numel()] * p for p in self.scales], 1)


def many(node_size, policy):
    t.run_both(lambda: t.shard(t.fill(Many()), mp_policy=policy), node_size)


def test_more_than_256_parameters(pool, node_size):
    pool.run(many, node_size, t.MIXED)


def along_dim_1(p):
    return Shard(1) if p.ndim == 2 and p.size(1) % 4 == 0 else Shard(0)


def shard_1(node_size, policy):
    def build():
        return t.shard(
            t.fill(t.Net(block=lambda: t.Block(hidden=16))), mp_policy=policy, shard_placement_fn=along_dim_1
        )

    t.run_both(build, node_size)
    t.audited(build, node_size)
    model = build()
    tide.fsdp2.install(model, node_size=node_size, strict=True)
    t.plain_step(model, 0)
    with CopyMeter() as meter:
        t.plain_step(model, 1)
    assert meter.bytes == 0, meter.bytes  # no cat, no pack, no copy-out
    tide.fsdp2.uninstall(model)
    with CopyMeter() as meter:
        t.plain_step(model, 2)
    assert meter.bytes > 0


def test_shard_1_without_a_copy(pool, node_size):
    pool.run(shard_1, node_size, t.PURE)
    pool.run(shard_1, node_size, t.MIXED)


# ---- schedules -------------------------------------------------------------------------------------------------------


def nested(node_size, policy):
    def build():
        model = t.fill(t.Net())
        return t.shard(model, [m for block in model.blocks for m in (block.down, block)], mp_policy=policy)

    landing = {g.module: g.landing for g in t.run_both(build, node_size)}
    assert landing["(root)"].startswith("private"), landing
    assert landing["blocks.0.down"] != landing["blocks.1.down"], landing


def test_nested_groups_and_root(pool, node_size):
    pool.run(nested, node_size, t.MIXED)


def over_several_modules(node_size, policy):
    """fully_shard([first, head]): held from the first of them to the last."""

    def build():
        model = t.fill(t.Net())
        return t.shard(model, [*model.blocks, [model.first, model.head]], mp_policy=policy)

    report = t.run_both(build, node_size)
    assert "first, head" in [g.module for g in report], report


def test_fully_shard_over_several_modules(pool, node_size):
    pool.run(over_several_modules, node_size, t.MIXED)


def no_reshard(node_size, policy):
    report = t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy, reshard_after_forward=False), node_size)
    assert all(g.landing.startswith("private") for g in report), report


def reshard(node_size, policy):
    report = t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy, reshard_after_forward=True), node_size)
    assert [g.landing for g in report[1:]] == ["ring slot 0", "ring slot 1", "ring slot 0"], report


def test_reshard_after_forward(pool, node_size):
    pool.run(reshard, node_size, t.MIXED)
    pool.run(no_reshard, node_size, t.MIXED)


def changed_reshard(node_size):
    """set_reshard_after_forward between steps: the next step has a plan of its own."""

    def step(model, k):
        model.set_reshard_after_forward(k == 1)
        return t.plain_step(model, k)

    report = t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=t.MIXED), node_size, step, check_calls=False)
    assert all(g.landing.startswith("private") for g in report), report


def test_reshard_after_forward_changed_between_steps(pool, node_size):
    pool.run(changed_reshard, node_size)


def prefetch(node_size, policy):
    def build():
        model = t.shard(t.fill(t.Net(6)), mp_policy=policy)
        chain = list(model.blocks)
        model.set_modules_to_forward_prefetch(chain[:2])
        for k, block in enumerate(chain):
            block.set_modules_to_forward_prefetch(chain[k + 1 : k + 3])
            block.set_modules_to_backward_prefetch(chain[max(0, k - 2) : k][::-1])
        return model

    report = t.run_both(build, node_size)
    assert {g.landing for g in report[1:]} == {"ring slot 0", "ring slot 1", "ring slot 2"}, report


def test_prefetch_two_deep(pool, node_size):
    pool.run(prefetch, node_size, t.MIXED)


def unshard_async(node_size, policy):
    def step(model, k):
        handles = [block.unshard(async_op=True) for block in model.blocks[:2]]
        handles[1].wait()
        return t.plain_step(model, k)

    def both_ways(model, k):
        model._set_unshard_async_op(True)
        return step(model, k)

    build = lambda: t.shard(t.fill(t.Net()), mp_policy=policy)  # noqa: E731
    t.run_both(build, node_size, step)
    t.run_both(build, node_size, both_ways)


def test_unshard_async(pool, node_size):
    pool.run(unshard_async, node_size, t.MIXED)


def accumulate(node_size, policy, sync, reshard):
    def step(model, k):
        losses = []
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(sync or last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(reshard or last)
            loss = t.loss_of(model(t.batch(10 * k + micro)), k)
            loss.backward()
            losses.append(loss.detach())
        found = t.gradients(model)
        t.sign_step(model)
        return losses, found

    t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size, step)


def test_gradient_accumulation(pool, node_size):
    for policy in (t.MIXED, t.PURE):
        pool.run(accumulate, node_size, policy, True, True)
        pool.run(accumulate, node_size, policy, False, True)
    pool.run(accumulate, node_size, t.MIXED, False, False)


class Checkpointed(t.Net):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def checkpointing(node_size, policy):
    t.run_both(lambda: t.shard(t.fill(Checkpointed()), mp_policy=policy), node_size)

    def inside():
        model = t.fill(t.Net())
        for k, block in enumerate(model.blocks):
            model.blocks[k] = checkpoint_wrapper(block)
        return t.shard(model, mp_policy=policy)

    t.run_both(inside, node_size)


def test_activation_checkpointing(pool, node_size):
    pool.run(checkpointing, node_size, t.MIXED)


def evaluate(node_size, policy):
    def step(model, k):
        with torch.no_grad():
            outs = [model(t.batch(100 + k)), model(t.batch(200 + k))]
        trained = t.plain_step(model, k)
        model.eval()
        with torch.no_grad():
            outs.append(model(t.batch(300 + k)))
        model.train()
        return outs, trained

    t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size, step)


def test_eval_under_no_grad_between_steps(pool, node_size):
    pool.run(evaluate, node_size, t.MIXED)


# ---- parameters ------------------------------------------------------------------------------------------------------


def frozen(node_size, policy):
    def build():
        model = t.fill(t.Net())
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return t.shard(model, mp_policy=policy)

    report = t.run_both(build, node_size, check_calls=False)
    assert [g.reduce_scatters > 0 for g in report] == [True, True, False, True], report
    assert all(g.all_gathers > 0 for g in report), report

    def thaw(model, k):
        model.blocks[0].up.weight.requires_grad_(k > 0)
        return t.plain_step(model, k)

    report = t.run_both(build, node_size, thaw, check_calls=False)
    assert [g.reduce_scatters for g in report] == [3, 3, 0, 3], report


def test_frozen_parameters(pool, node_size):
    pool.run(frozen, node_size, t.MIXED)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(t.IN, t.IN, bias=False)
        self.blocks = nn.ModuleList(t.Block(t.IN) for _ in range(2))
        self.head = nn.Linear(t.IN, t.IN)
        self.head.weight = self.first.weight

    forward = t.Net.forward


def test_shared_parameters(pool, node_size):
    pool.run(shared, node_size, t.MIXED)


def shared(node_size, policy):
    t.run_both(lambda: t.shard(t.fill(Tied()), mp_policy=policy), node_size)


class Choosy(t.Block):
    """`never` has no gradient; `sometimes` has one in every second step."""

    def __init__(self):
        super().__init__()
        self.never, self.sometimes, self.step = nn.Linear(t.DIM, t.DIM), nn.Linear(t.DIM, t.DIM), 0

    def forward(self, x):
        return super().forward(self.sometimes(x) if self.step % 2 else x)


def unused(node_size, policy, reduce_unused):
    def step(model, k):
        for block in model.blocks:
            block.step = k
            if hasattr(block, "set_reduce_scatter_unused_params"):
                block.set_reduce_scatter_unused_params(reduce_unused)
        return t.plain_step(model, k)

    t.run_both(lambda: t.shard(t.fill(t.Net(block=Choosy)), mp_policy=policy), node_size, step, steps=4)


def test_unused_parameters(pool, node_size):
    pool.run(unused, node_size, t.MIXED, False)
    pool.run(unused, node_size, t.MIXED, True)


# ---- reduction -------------------------------------------------------------------------------------------------------


def divide(node_size, policy):
    def build(force_sum, real=False):
        model = t.shard(t.fill(t.Net(), not real), mp_policy=policy)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(3.0)
                module.set_force_sum_reduction_for_comms(force_sum)
        return model

    t.run_both(lambda: build(True), node_size)
    t.audited(lambda: build(False, True), node_size, divide_by=3.0)  # PREMUL_SUM, which gloo does not have


def test_set_gradient_divide_factor(pool, node_size):
    pool.run(divide, node_size, t.MIXED)


def hsdp(node_size, policy):
    def build():
        return t.shard(t.fill(t.Net()), mesh=t.mesh(2, 2, names=("replicate", "shard")), mp_policy=policy)

    t.run_both(build, node_size, ranks=2)

    def without_all_reduce(model, k):
        losses = []
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            loss = t.loss_of(model(t.batch(10 * k + micro)), k)
            loss.backward()
            losses.append(loss.detach())
        found = t.gradients(model)
        t.sign_step(model)
        return losses, found

    t.run_both(build, node_size, without_all_reduce, ranks=2)


def test_hsdp_2x2(pool, node_size):
    pool.run(hsdp, node_size, t.MIXED)


def clip(node_size, policy):
    def step(model, k):
        loss = t.loss_of(model(t.batch(k)), k)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found = t.gradients(model)
        t.sign_step(model)
        return loss.detach(), norm.full_tensor(), found

    t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size, step)


def test_gradient_clipping(pool, node_size):
    pool.run(clip, node_size, t.MIXED)


def tensor_parallel(node_size, policy):
    """Parameters that are DTensors already: TP over pairs of ranks, FSDP2 across the pairs."""

    def build():
        both = t.mesh(2, 2, names=("dp", "tp"))
        model = t.fill(t.Net(block=lambda: t.Block(hidden=16)))
        for block in model.blocks:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return t.shard(model, mesh=both["dp"], mp_policy=policy)

    t.run_both(build, node_size, ranks=2, local=2 if node_size == 4 else 1)  # rank 0's partner is rank 2


def test_tensor_parallel_parameters(pool, node_size):
    pool.run(tensor_parallel, node_size, t.PURE)


# ---- state -----------------------------------------------------------------------------------------------------------


def adam_steps(model, optimizer, steps):
    for k in steps:
        t.loss_of(model(t.batch(k, False)), k, False).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_and_load(node_size, policy, folder):
    def build(on_tide):
        model = t.shard(t.fill(t.Net(), False), mp_policy=policy)
        if on_tide:
            tide.fsdp2.install(model, node_size=node_size, strict=True)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build(True)
    adam_steps(model, optimizer, range(2))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=folder)
    kept = copy.deepcopy(states["model"])
    saved = t.weights(model)
    adam_steps(model, optimizer, range(2, 4))
    further = t.weights(model)
    t.expect_on_tide(model, node_size)
    tide.fsdp2.uninstall(model)
    t.same({name: p._local_tensor for name, p in kept.items()}, saved, "a deepcopied state dict")
    for on_tide in (True, False):
        model, optimizer = build(on_tide)
        adam_steps(model, optimizer, range(7, 8))  # whatever; the checkpoint replaces it
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        t.same(t.weights(model), saved, "loaded")
        adam_steps(model, optimizer, range(2, 4))
        if on_tide:
            t.same(t.weights(model), further, "further steps")
            t.expect_on_tide(model, node_size)
            tide.fsdp2.uninstall(model)
        else:
            for name, w in t.weights(model).items():
                torch.testing.assert_close(w, further[name], rtol=1e-4, atol=1e-5)


def test_optimizer_and_distributed_checkpoint(pool, node_size, tmp_path):
    pool.run(save_and_load, node_size, t.MIXED, str(tmp_path / "mixed"))
    pool.run(save_and_load, node_size, t.PURE, str(tmp_path / "pure"))


def async_save(node_size, folder):
    model = t.shard(t.fill(t.Net()), mp_policy=t.PURE)
    tide.fsdp2.install(model, node_size=node_size, strict=True)
    t.plain_step(model, 0)
    saved = t.weights(model)
    pending = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)
    t.plain_step(model, 1)
    pending.result()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    t.same({name: p._local_tensor.clone() for name, p in state["model"].items()}, saved)
    t.plain_step(model, 2)
    t.expect_on_tide(model, node_size)
    tide.fsdp2.uninstall(model)


def test_async_checkpoint(pool, node_size, tmp_path):
    pool.run(async_save, node_size, str(tmp_path / "async"))


def assign(node_size, policy):
    def step(model, k):
        if k == 1:
            state = {name: nn.Parameter(-p.detach().clone()) for name, p in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        return t.plain_step(model, k)

    t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size, step)


def test_load_state_dict_assign(pool, node_size):
    pool.run(assign, node_size, t.MIXED)
    pool.run(assign, node_size, t.PURE)


def ema(node_size, policy):
    def build():
        model = t.shard(t.fill(t.Net()), mp_policy=policy)
        model.ema = None
        return model

    def step(model, k):
        if model.ema is None:
            model.ema = [p.detach().clone() for p in model.parameters()]
        trained = t.plain_step(model, k)
        with torch.no_grad():
            for average, p in zip(model.ema, model.parameters()):
                average.mul_(2).add_(p)
            live = [p.detach().clone() for p in model.parameters()]
            for p, average in zip(model.parameters(), model.ema):  # swap in
                p.copy_(average)
            out = model(t.batch(50 + k))
            model.reshard()
            for p, keep in zip(model.parameters(), live):  # swap out
                p.copy_(keep)
        return trained, out, [a._local_tensor.clone() for a in model.ema]

    t.run_both(build, node_size, step)


def test_ema_copy_and_swap(pool, node_size):
    pool.run(ema, node_size, t.MIXED)
    pool.run(ema, node_size, t.PURE)


# ---- programs --------------------------------------------------------------------------------------------------------


def compiled(node_size, policy, backend):
    def build():
        model = t.fill(t.Net())
        for block in model.blocks:
            block.compile(backend=backend)
        return t.shard(model, mp_policy=policy)

    torch._dynamo.reset()
    t.run_both(build, node_size)


def test_compiled_blocks(pool, node_size):
    pool.run(compiled, node_size, t.MIXED, "eager")
    pool.run(compiled, node_size, t.MIXED, "aot_eager")


def two_models(node_size, policy):
    def build(seed):
        return t.shard(t.fill(t.Net(2), seed=seed), mp_policy=policy)

    def steps(models):
        return [[t.plain_step(model, k) for model in models] for k in range(3)]

    models = [build(1), build(2)]
    stock = steps(models)
    models = [build(1), build(2)]
    for model in models:
        tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=2)
    t.same(steps(models), stock)
    for model in models:
        t.expect_on_tide(model, node_size)
        assert all(g.all_gathers >= 3 and g.reduce_scatters == 3 for g in tide.fsdp2.report(model))
    tide.fsdp2.uninstall(models[0])
    t.plain_step(models[0], 9)
    t.plain_step(models[1], 9)
    tide.fsdp2.uninstall(models[1])


def test_two_models_in_one_process(pool, node_size):
    pool.run(two_models, node_size, t.MIXED)


class Fragile(t.Block):
    broken = False

    def forward(self, x):
        if self.broken:
            raise ArithmeticError("as asked")
        return super().forward(x)


def interrupted(node_size, policy):
    def step(model, k):
        if k == 1:
            for victim, prefetched in ((1, False), (2, True)):
                if prefetched:
                    model.blocks[0].unshard(async_op=True)
                model.blocks[victim].broken = True
                try:
                    model(t.batch(k))
                    raise AssertionError("the block did not raise")
                except ArithmeticError:
                    pass
                model.blocks[victim].broken = False
                model.reset_iter_state()
        return t.plain_step(model, k)

    t.run_both(lambda: t.shard(t.fill(t.Net(4, Fragile)), mp_policy=policy), node_size, step)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
def test_exception_in_forward_then_going_on(pool, node_size):
    pool.run(interrupted, node_size, t.MIXED)


class Numbers(torch.utils.data.Dataset):
    """Touches what a forked worker inherits: the model's shards, report, and gives batches."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 3

    def __getitem__(self, k):
        gc.collect()
        return t.batch(k)


def forked_loader(node_size, policy):
    def step(model, k):
        loader = torch.utils.data.DataLoader(
            Numbers(model), batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        out = []
        for x in loader:
            loss = t.loss_of(model(x), k)
            loss.backward()
            out.append((loss.detach(), t.gradients(model)))
            t.sign_step(model)
        return out

    t.run_both(lambda: t.shard(t.fill(t.Net(2)), mp_policy=policy), node_size, step, steps=2)


def test_forked_data_loader(pool, node_size):
    pool.run(forked_loader, node_size, t.PURE)


def slot_reuse(node_size, policy):
    report = t.run_both(lambda: t.shard(t.fill(t.Net()), mp_policy=policy), node_size, install={"options": {"mode": 1}})
    assert all("unicast" in g.path for g in report), report


def test_slot_reuse(pool, node_size):
    pool.run(slot_reuse, node_size, t.MIXED)
    pool.run(slot_reuse, node_size, t.PURE)
