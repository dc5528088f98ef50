"""Meshes of two dimensions on GPUs, four ranks: the functions of the CPU's tests, each equal to stock FSDP2 with NCCL."""

import pytest

import test_meshes as meshes
import test_rows as rows
import training as t


@pytest.fixture(params={"1x4": 4, "2x2": 2, "4x1": 1}.items(), ids=lambda topology: topology[0], scope="module")
def nodes_of(request):
    return request.param[1]


@pytest.mark.parametrize("across", [False, True], ids=["in-a-node", "across"])
def test_hsdp(four, nodes_of, across):
    four.run(meshes.hsdp, nodes_of, across, t.MIXED, {})
    four.run(meshes.hsdp, nodes_of, across, t.PURE, {"options": {"mode": 1}})


def test_hsdp_without_all_reduce(four, nodes_of):
    four.run(rows.hsdp, nodes_of, t.MIXED)


@pytest.mark.parametrize("expert_dim", [0, 1], ids=["by-expert", "by-row"])
def test_experts(four, nodes_of, expert_dim):
    four.run(meshes.experts, nodes_of, t.MIXED, expert_dim, {})


def test_gradients_of_experts(four, nodes_of):
    four.run(meshes.real_gradients, nodes_of)


def test_tensor_parallel_parameters(four, nodes_of):
    four.run(rows.tensor_parallel, nodes_of, t.PURE)
