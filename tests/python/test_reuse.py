"""The last groups of a forward keep what was gathered until their backward, unless somebody needs the landing or the
weights have changed; always equal to stock."""

import torch

import tide.fsdp2
import training as t


def reused(model):
    return tide.fsdp2.stats(model)["total"].reused


def build(n_blocks=4):
    return t.shard(t.fill(t.Net(n_blocks)), mp_policy=t.MIXED)


def counts(node_size):
    """Four blocks in two ring slots: the last two are gathered once a step, the others twice."""
    expected, model, found = build(), build(), []
    tide.fsdp2.install(model, node_size=node_size, strict=True, check_every=3)
    for k in range(3):
        t.same(t.plain_step(model, k), t.plain_step(expected, k), f"step {k}")
        found.append(reused(model))
    gathers = {g.module: g.all_gathers for g in tide.fsdp2.report(model)}
    tide.fsdp2.uninstall(model)
    return found, gathers


def test_the_last_blocks_are_gathered_once(pool, node_size):
    for found, gathers in pool.run(counts, node_size):
        assert found == [2, 4, 6]
        assert gathers == {"(root)": 3, "blocks.0": 6, "blocks.1": 6, "blocks.2": 3, "blocks.3": 3}


def by_local_tensor(p):
    p._local_tensor.neg_()


def by_dtensor(p):
    p.neg_()


def changed(node_size, poison, change):
    """Weights that change between forward and backward are gathered again; so is everything with poison, and after a
    forward whose backward never comes."""
    results = []
    for on_tide in (False, True):
        model, out = build(), []
        if on_tide:
            tide.fsdp2.install(model, node_size=node_size, strict=True, poison=poison)
        for k in range(3):
            with torch.no_grad():
                out.append(model(t.batch(50 + k)))
            loss = t.loss_of(model(t.batch(k)), k)
            if k == 1:
                with torch.no_grad():
                    for p in model.blocks.parameters():  # the root is unsharded still
                        change(p)
            loss.backward()
            out.append((loss.detach().clone(), t.gradients(model)))
            t.sign_step(model)
        results.append(out)
        if on_tide:
            found = reused(model)
            tide.fsdp2.uninstall(model)
    t.same(results[1], results[0])
    return found


def test_changed_weights_are_gathered_again(pool, node_size):
    assert pool.run(changed, node_size, False, by_local_tensor) == [4] * 4
    assert pool.run(changed, node_size, False, by_dtensor) == [4] * 4
    assert pool.run(changed, node_size, True, by_dtensor) == [0] * 4
