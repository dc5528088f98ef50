"""Two ranks on two GPUs, a process each, for the whole session. Without them everything here is skipped."""

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


def why_not():
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if torch.cuda.device_count() < 2:
        return f"{torch.cuda.device_count()} GPU, 2 needed"
    return None


def pytest_collection_modifyitems(items):
    if reason := why_not():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report):
    """A failure is told at once: whoever limits the time of the run still sees it."""
    if report.failed:
        print(f"\nFAILED {report.nodeid}\n" + "\n".join(str(report.longrepr).splitlines()[-40:]), flush=True)


@pytest.fixture(scope="session")
def pool():
    with Pool(2, limit_s=LIMIT_S, device="cuda") as ranks:
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
