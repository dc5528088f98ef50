"""tide.comm alone, without torch's process groups: the C calls through ctypes, against numpy."""

import ctypes
import os

import numpy as np
import pytest

from tide import comm as c
from tide._lib import KNOBS, TideError, code_of

DIMS = [(13, 5), (8, 6), (3,)]


def shard_of(full, rank, ranks):
    """The padded shard of dimension 0."""
    rows = -(-full.shape[0] // ranks)
    out = np.zeros((rows, *full.shape[1:]), full.dtype)
    mine = full[rank * rows : (rank + 1) * rows]
    out[: len(mine)] = mine
    return out


def array_at(address, n_bytes, dtype):
    return np.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype)


def gather(group, full, rank, ranks):
    """Adopts this rank's shards of the fp32 arrays `full`, gathers, and finds the arrays where they land."""
    for i, whole in enumerate(full):
        shard = shard_of(whole, rank, ranks)
        group.adopt(i, shard.ctypes.data, shard.nbytes)
    group.all_gather()
    group.wait(c.READY)
    for i, whole in enumerate(full):
        landed = array_at(*group.tensor(c.TENSOR_PARAM, i), np.float32)[: whole.size]
        np.testing.assert_array_equal(landed.reshape(whole.shape), whole)
    group.release()


def gather_and_scatter(path, rank, ranks, node_size):
    bootstrap = c.Bootstrap(path, rank, ranks)
    comm = c.Comm(rank, ranks, bootstrap, node_size=node_size, options={"deadline_ms": 60000})
    assert (comm.info.nodes, comm.info.local) == (ranks // node_size, node_size)
    specs = [c.GroupSpec(f"g{k}", [c.ParamSpec(f"p{i}", d) for i, d in enumerate(DIMS)], dtype=c.F32) for k in range(2)]
    groups = comm.create_groups(specs)
    for k, group in enumerate(groups):
        rng = np.random.default_rng(k)
        full = [rng.standard_normal(d).astype(np.float32) for d in DIMS]
        gather(group, full, rank, ranks)
        grads = [
            np.stack([np.random.default_rng(100 * k + 10 * i + r).integers(-9, 9, d) for r in range(ranks)]).astype(
                np.float32
            )
            for i, d in enumerate(DIMS)
        ]
        out = np.full(group.output_elements(), 2.0, np.float32)
        own = [np.ascontiguousarray(g[rank]) for g in grads]
        group.reduce_scatter([g.ctypes.data for g in own], out.ctypes.data, c.F32, alpha=0.5, accumulate=1)
        group.wait(c.DONE)
        expected = np.concatenate([2.0 + 0.5 * shard_of(g.sum(0), rank, ranks).ravel() for g in grads])
        np.testing.assert_array_equal(out, expected)
        out = np.zeros(group.output_elements([1, 0, 1]), np.float32)
        group.reduce_scatter([own[0].ctypes.data, None, own[2].ctypes.data], out.ctypes.data, c.F32)
        group.wait(c.DONE)
        np.testing.assert_array_equal(
            out, np.concatenate([shard_of(grads[i].sum(0), rank, ranks).ravel() for i in (0, 2)])
        )
        assert (group.path.all_gathers, group.path.reduce_scatters) == (1, 2)
    comm.sync()
    comm.destroy()
    comm.destroy()  # nothing
    bootstrap.close()


def on_rank(function, path, *args):
    import torch.distributed as dist

    return function(path, dist.get_rank(), dist.get_world_size(), *args)


def test_gather_and_scatter(pool, node_size):
    pool.run(on_rank, gather_and_scatter, f"tide-test-{os.getpid()}-{node_size}", node_size)


def exchange_fails(path, rank, ranks):
    """What the exchange raises comes out of the call that needed it."""

    def exchange(data):
        raise ConnectionError("no network today")

    with pytest.raises(ConnectionError, match="no network today"):
        c.Comm(rank, ranks, exchange)
    with pytest.raises(ValueError, match="returned 3 bytes"):
        c.Comm(rank, ranks, lambda data: b"abc")


def test_a_failing_exchange(pool):
    pool.run(on_rank, exchange_fails, "")


def test_alone():
    """N = 1 is a communicator too."""
    comm = c.Comm(0, 1, lambda data: data)
    (group,) = comm.create_groups([c.GroupSpec("only", [c.ParamSpec("w", (4, 2))], dtype=c.F32)])
    given = np.arange(8, dtype=np.float32)
    group.adopt(0, given.ctypes.data, given.nbytes)
    group.all_gather()
    group.wait(c.READY)
    np.testing.assert_array_equal(array_at(*group.tensor(c.TENSOR_PARAM, 0), np.float32), given)
    with pytest.raises(TideError) as error:
        group.all_gather()
    assert error.value.name == "TIDE_ERR_STATE" and "only" in str(error.value)
    comm.destroy()


def test_options():
    assert KNOBS["n_stg"][:3] == (2, 1, 16)
    assert c.make_options({"n_stg": 3}).n_stg == 3
    for bad in ({"n_stg": 0}, {"nonsense": 1}):
        with pytest.raises(TideError) as error:
            c.make_options(bad)
        assert error.value.code == code_of("TIDE_ERR_ARGUMENT") and next(iter(bad)) in str(error.value)


def test_version():
    import tide

    assert tide.__version__.count(".") == 2
