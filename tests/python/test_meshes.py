"""Meshes of more than one dimension: HSDP, and experts whose shards go over other ranks than those of the dense
parameters. Always equal to stock FSDP2 on the same mesh."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tide.fsdp2
import training as t
from tide.fsdp2 import session

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


# ---- HSDP ------------------------------------------------------------------------------------------------------------


def hsdp_mesh(across):
    """across: replicas are neighbours, shard groups {0, 2} and {1, 3}; else shard groups are {0, 1} and {2, 3}."""
    ranks = [[0, 2], [1, 3]] if across else [[0, 1], [2, 3]]
    return DeviceMesh(t.DEVICE, ranks, mesh_dim_names=("replicate", "shard"))


def hsdp(node_size, across, policy, install, audit=True):
    local = 2 if node_size == 4 or (node_size == 2 and not across) else 1

    def build(integers=True):
        model = t.fill(t.Net(), integers)
        modules = [m for block in model.blocks for m in (block.down, block)]
        return t.shard(model, modules, mesh=hsdp_mesh(across), mp_policy=policy)

    report = t.run_both(build, node_size, ranks=2, local=local, install=install)
    if not audit:
        return report[0].path
    replicas, model = hsdp_mesh(across)["replicate"].get_group(), build(False)
    tide.fsdp2.install(model, node_size=node_size, strict=True, **install)
    for k in range(2):
        with t.Audit(model) as audited:
            t.loss_of(model(t.batch(k, False)), k, False).backward()
        worst = audited.worst()
        assert audited.local and worst <= 1e-5, (policy, k, worst)
        for grad in t.gradients(model).values():  # the replicas hold the same
            both = [torch.empty_like(grad) for _ in range(2)]
            dist.all_gather(both, grad.contiguous(), group=replicas)
            t.same(both[0], both[1])
        t.sign_step(model)
    tide.fsdp2.uninstall(model)
    return report[0].path


@pytest.mark.parametrize("across", [False, True], ids=["in-a-node", "across"])
def test_hsdp(pool, node_size, across):
    pool.run(hsdp, node_size, across, t.MIXED, {})
    if node_size == 2:
        pool.run(hsdp, node_size, across, t.PURE, {"options": {"mode": 1}})
        pool.run(hsdp, node_size, across, BF16, {}, False)  # rounded once more by the all-reduce


# ---- experts ---------------------------------------------------------------------------------------------------------


class Gathered(torch.autograd.Function):
    """Everyone's tokens; gradients of a token are added."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(out, x.contiguous(), group=group)
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class Combined(torch.autograd.Function):
    """The sum of what all ranks have made of a token, for the rank that has the token."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx, grad):
        out = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(out, grad.contiguous(), group=ctx.group)
        return torch.cat(out), None


class Experts(nn.Module):
    def __init__(self, n_experts, dim, hidden):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.zeros(n_experts, *size)) for size in ((dim, hidden), (hidden, dim))
        )

    def forward(self, x, weight):
        """x: tokens; weight: of each token for each expert here."""
        up, down = (p.to_local() if hasattr(p, "to_local") else p for p in (self.up, self.down))
        return torch.einsum("teh,ehd,te->td", torch.relu(torch.einsum("td,edh->teh", x, up)), down, weight)


class Moe(nn.Module):
    """x + the expert that the router prefers, times its score."""

    N_EXPERTS = 4

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(t.DIM, self.N_EXPERTS, bias=False)
        self.experts = Experts(self.N_EXPERTS, t.DIM, 6)
        self.ep = None

    def forward(self, x):
        scores = self.router(x).clamp(-2, 2)
        weight = scores * nn.functional.one_hot(scores.argmax(1), self.N_EXPERTS)
        tokens, weight = Gathered.apply(x, self.ep), Gathered.apply(weight, self.ep)
        mine = weight.chunk(self.ep.size(), 1)[self.ep.rank()]
        return x + Combined.apply(self.experts(tokens, mine), self.ep).clamp(-2, 2)


def moe_mesh(n_ep):
    """(mesh of the dense parameters, that of the experts' shards, that of the experts)."""
    whole = init_device_mesh(t.DEVICE, (4 // n_ep, n_ep), mesh_dim_names=("dp_shard_mod_ep", "dp_shard_in_ep"))
    return whole["dp_shard_mod_ep", "dp_shard_in_ep"]._flatten("dp"), whole["dp_shard_mod_ep"], whole["dp_shard_in_ep"]


def moe(policy, n_ep, integers=True, expert_dim=0):
    """Experts are spread over the ranks of `ep`, and each is sharded over the ranks that hold the same ones."""
    dense, shards, ep = moe_mesh(n_ep)
    model = t.fill(t.Net(2, block=Moe), integers)
    for block in model.blocks:
        block.ep = ep.get_group()
        for name, p in list(block.experts.named_parameters()):
            setattr(block.experts, name, nn.Parameter(distribute_tensor(p.detach(), ep, [Shard(0)])))
        fully_shard(
            block.experts, mesh=shards, mp_policy=policy, shard_placement_fn=lambda p: Shard(expert_dim)
        )
        block.experts.set_gradient_divide_factor(4.0)  # their gradients come from the tokens of all four
        block.experts.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        fully_shard(block, mesh=dense, mp_policy=policy)
    return fully_shard(model, mesh=dense, mp_policy=policy)


def trained(model, integers=True, steps=3):
    return [t.plain_step(model, k, integers) for k in range(steps)], t.weights(model)


def experts(node_size, policy, expert_dim, install):
    stock, model = (moe(policy, 2, expert_dim=expert_dim) for _ in range(2))
    tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=2, **install)
    t.same(trained(model), trained(stock))
    report = {g.module: g for g in tide.fsdp2.report(model)}
    assert sorted(report) == ["(root)", "blocks.0", "blocks.0.experts", "blocks.1", "blocks.1.experts"]
    dense, pairs = f"M={4 // node_size} L={node_size} ", "M=1 L=2 " if node_size == 4 else "M=2 L=1 "
    for name, g in report.items():
        assert (pairs if "experts" in name else dense) in g.path and g.all_gathers and g.reduce_scatters, report
    assert len({g.digest for g in report.values()}) == 2  # a communicator, and a plan, for each set of ranks
    tide.fsdp2.uninstall(model)
    t.same(t.plain_step(model, 3), t.plain_step(stock, 3))


def test_experts(pool, node_size):
    pool.run(experts, node_size, t.MIXED, 0, {})
    if node_size < 4:
        pool.run(experts, node_size, t.PURE, 0, {"options": {"mode": 1}})
        pool.run(experts, node_size, t.MIXED, 1, {})  # by row


def real_gradients(node_size):
    """Real values: gradients against fp64, the experts' divided by all four ranks too."""
    model = moe(t.MIXED, 2, False)
    tide.fsdp2.install(model, node_size=node_size, strict=True)
    with t.Audit(model) as audit:
        t.loss_of(model(t.batch(0, False)), 0, False).backward()
    errors = audit.errors(4.0)
    assert len(errors) == 4 + 2 * 3
    for name, (error, largest, _, _) in errors.items():
        assert error <= 1e-5 * max(largest, 1e-3), (name, error, largest)
    tide.fsdp2.uninstall(model)


def test_gradients_of_experts(pool, node_size):
    pool.run(real_gradients, node_size)


def every_expert_on_one_rank():
    """As many ranks as share the experts: no shard group is left for them, the dense parameters stay on TIDE."""
    stock = trained(moe(t.PURE, 4))
    model = moe(t.PURE, 4)
    tide.fsdp2.install(model, node_size=2)
    t.same(trained(model), stock)
    found = {g.module: (g.path.split()[0], g.reason) for g in tide.fsdp2.report(model)}
    tide.fsdp2.uninstall(model)
    for name, (path, reason) in found.items():
        assert path == ("stock" if "experts" in name else "tide"), found
        assert ("experts" in name) == (reason == "shard size 1: nothing to communicate"), found


def test_experts_without_a_shard_group(pool):
    pool.run(every_expert_on_one_rank)


# ---- which ranks form a node -----------------------------------------------------------------------------------------


def test_nodes_of_a_shard_group():
    local = session._local_size
    assert local([0, 1, 2, 3], 0) == (0, None)
    assert local([0, 1, 2, 3], 2) == (2, None)
    assert local([0, 4, 8, 12], 4) == (1, None)  # modulo placement: one on each node
    assert local([1, 3, 5, 7], 4) == (2, None)
    size, why = local([0, 4, 1, 5], 4)
    assert size == 1 and why.startswith("ranks are not node-major: ranks 0 and 1 share node 0, rank 4"), why
    size, why = local([0, 1, 4], 4)
    assert size == 1 and why == "nodes hold different numbers of its ranks: 2, 1"


def uneven_nodes():
    """Ranks 1, 2 and 3 shard; nodes of two hold one and two of them."""
    mesh = DeviceMesh(t.DEVICE, [1, 2, 3])
    if dist.get_rank() == 0:
        return None
    model = t.shard(t.fill(t.Net()), mesh=mesh)
    tide.fsdp2.install(model, node_size=2, strict=True)
    t.plain_step(model, 0)
    found = [(g.path, g.reason) for g in tide.fsdp2.report(model)]
    tide.fsdp2.uninstall(model)
    return found


def test_uneven_nodes_say_why(pool):
    for found in pool.run(uneven_nodes)[1:]:
        for path, reason in found:
            assert " M=3 L=1 " in path and "nodes hold different numbers of its ranks: 1, 2" in reason, (path, reason)
