"""Ranks for the tests of the adapter: one pool of four processes for the whole session, three topologies over it."""

import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in (str(ROOT / "python"), str(pathlib.Path(__file__).parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import pytest  # noqa: E402

from pool import Pool  # noqa: E402

TOPOLOGIES = {"1x4": 4, "2x2": 2, "4x1": 1}  # nodes x local: ranks a node


@pytest.fixture(scope="session")
def pool():
    with Pool(4) as ranks:
        yield ranks


@pytest.fixture(params=TOPOLOGIES, scope="session")
def node_size(request):
    return TOPOLOGIES[request.param]
