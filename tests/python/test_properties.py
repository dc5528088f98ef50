"""The ctypes layer under hypothesis: any description is planned or refused with a reason, and what runs is right."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tide import comm as c
from tide._lib import KNOBS, TideError
from test_comm import gather, shard_of

SETTINGS = dict(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
INT64 = st.integers(-(2**63), 2**63 - 1)
ANY_INT = st.one_of(st.integers(-3, 40), INT64, st.integers(-(2**80), 2**80))


@settings(max_examples=100, **SETTINGS)
@given(st.sampled_from(sorted(KNOBS)), ANY_INT)
@example("n_stg", 2**64 + 3)
@example("chunk", -(2**63))
def test_a_knob_is_set_or_refused(name, value):
    low, high = KNOBS[name][1:3]
    allowed = low <= value <= high or value == -1  # TIDE_AUTO
    try:
        options = c.make_options({name: value})
    except TideError as error:
        assert error.name == "TIDE_ERR_ARGUMENT" and name in str(error)
        assert not allowed
    else:
        assert getattr(options, name) == value and allowed


PARAM = st.builds(
    c.ParamSpec,
    st.text(max_size=6),
    st.lists(st.one_of(st.integers(0, 9), ANY_INT), max_size=10).map(tuple),
    st.one_of(st.just(0), st.integers(-2, 9), ANY_INT),
)
SPEC = st.builds(
    c.GroupSpec,
    st.text(max_size=6),
    st.lists(PARAM, max_size=4),
    dtype=st.one_of(st.integers(0, 4), ANY_INT),
    shard_dtype=st.one_of(st.none(), st.integers(-1, 5)),
    grad_dtype=st.one_of(st.none(), st.integers(-1, 5)),
    input=st.integers(-1, 2),
    landing=st.integers(-1, 2),
    item_size=st.one_of(st.just(0), st.integers(0, 20), ANY_INT),
)


@settings(max_examples=60, **SETTINGS)
@given(st.lists(SPEC, max_size=3))
def test_any_description_is_taken_or_refused(specs):
    """Nothing is read wrongly on the way: what is taken has the bytes that the description says."""
    total = sum(np.prod([float(max(d, 1)) for d in p.dims]) for s in specs for p in s.params)
    if total < 2**63 and total > 2**24:
        return  # would be allocated for real
    comm = c.Comm(0, 1, lambda data: data)
    try:
        groups = comm.create_groups(specs)
    except TideError as error:
        assert error.name in ("TIDE_ERR_ARGUMENT", "TIDE_ERR_UNSUPPORTED") and str(error)
    else:
        for group, spec in zip(groups, specs):
            size = {c.F32: 4, c.BF16: 2, c.F16: 2}.get(spec.dtype, spec.item_size)
            for i, p in enumerate(spec.params):
                assert group.tensor(c.TENSOR_PARAM, i)[1] == size * int(np.prod(p.dims, dtype=np.int64))
    finally:
        comm.destroy()


class Meeting:
    """An exchange between threads."""

    def __init__(self, size):
        self.parts, self.barrier = [None] * size, threading.Barrier(size, timeout=60)

    def of(self, rank):
        def exchange(data):
            self.parts[rank] = data
            self.barrier.wait()
            everything = b"".join(self.parts)
            self.barrier.wait()
            return everything

        return exchange


def train_step(meeting, rank, nodes, local, shapes, knobs, seed):
    ranks = nodes * local
    rng = np.random.default_rng(seed)
    full = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    grads = [rng.integers(-50, 50, (ranks, *s)).astype(np.float32) for s in shapes]
    comm = c.Comm(rank, ranks, meeting.of(rank), node_size=local, options={"deadline_ms": 60000, **knobs})
    (group,) = comm.create_groups([c.GroupSpec("g", [c.ParamSpec(f"p{i}", s) for i, s in enumerate(shapes)], c.F32)])
    gather(group, full, rank, ranks)
    own = [np.ascontiguousarray(g[rank]) for g in grads]
    out = np.full(group.output_elements(), np.nan, np.float32)
    group.reduce_scatter([g.ctypes.data for g in own], out.ctypes.data, c.F32, alpha=0.25)
    group.wait(c.DONE)
    np.testing.assert_array_equal(out, np.concatenate([shard_of(0.25 * g.sum(0), rank, ranks).ravel() for g in grads]))
    comm.destroy()


@settings(max_examples=15, **SETTINGS)
@given(
    st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (4, 1), (1, 4)]),
    st.lists(st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "chunk": st.integers(16, 80),
            "n_part": st.integers(1, 3),
            "n_stg": st.integers(1, 3),
            "mode": st.integers(0, 1),
            "multicast": st.just(0),
            "head_bytes": st.integers(16, 400),
        },
    ),
    st.integers(0, 2**31),
)
@example((2, 2), [(0, 5), (5, 0), (0,)], {}, 1)  # nothing to move at all
def test_what_runs_is_right(topology, shapes, knobs, seed):
    ranks = topology[0] * topology[1]
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        for done in [pool.submit(train_step, meeting, r, *topology, shapes, knobs, seed) for r in range(ranks)]:
            done.result()


@pytest.mark.parametrize("where", ["dims", "shard_dim", "dtype", "item_size"])
def test_a_number_that_does_not_fit_is_refused(where):
    """ctypes would cut it to the bits that fit, and the library would see another one."""
    far = 2**64 + 4
    param = c.ParamSpec("p", (far,) if where == "dims" else (4,), far - 4 if where == "shard_dim" else 0)
    spec = c.GroupSpec("g", [param], dtype=far - 4 if where == "dtype" else c.F32)
    spec.item_size = far - 4 if where == "item_size" else 0
    comm = c.Comm(0, 1, lambda data: data)
    with pytest.raises(TideError) as error:
        comm.create_groups([spec])
    assert error.value.name == "TIDE_ERR_ARGUMENT" and where in str(error.value)
    comm.destroy()
