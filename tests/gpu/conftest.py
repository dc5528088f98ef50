"""Two ranks on two GPUs, a process each, for the whole session. Without them everything here is skipped.

NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and newer, in front of stock FSDP2's collectives too) lets ranks share a GPU: then one
GPU is enough, and the tests of four ranks run. TIDE_FABRIC=nccl runs everything on the NCCL fabric.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
for name, value in {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "4",
    "TIDE_DEADLINE_MS": "15000",  # what hangs ends with a name
}.items():
    os.environ.setdefault(name, value)
os.environ["TIDE_TEST_DEVICE"] = "cuda"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "python"), str(ROOT / "tests" / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
for folder in (ROOT / "python", ROOT / "tests" / "python", pathlib.Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pytest  # noqa: E402
import torch  # noqa: E402

from pool import Pool  # noqa: E402

LIMIT_S = 60  # a job


SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def why_not(ranks):
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if torch.cuda.device_count() < ranks and not SHARED:
        return f"{torch.cuda.device_count()} GPU, {ranks} needed, or NCCL_MULTI_RANK_GPU_ENABLE=1"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if reason := why_not(4 if "four" in item.fixturenames else 2):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report):
    """A failure is told at once: whoever limits the time of the run still sees it."""
    if report.failed:
        print(f"\nFAILED {report.nodeid}\n" + "\n".join(str(report.longrepr).splitlines()[-40:]), flush=True)


@pytest.fixture(scope="session")
def pool():
    with Pool(2, limit_s=LIMIT_S, device="cuda") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Pool(4, limit_s=LIMIT_S, device="cuda") as ranks:
        yield ranks


@pytest.fixture
def own_pool():
    """For tests that leave no rank behind in which others could go on."""
    with Pool(2, limit_s=LIMIT_S, device="cuda") as ranks:
        yield ranks


@pytest.fixture(params={"1x2": 2, "2x1": 1}.items(), ids=lambda topology: topology[0], scope="session")
def node_size(request):
    """Nodes x local: one node of two, two virtual nodes of one."""
    return request.param[1]
