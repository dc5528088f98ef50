"""pip builds the library with make and ships it: a wheel from a copy of the sources, unpacked and loaded without
torch."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["include", "src", "python", "Makefile", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.py", "tide.pc.in"]


@pytest.mark.skipif(
    not importlib.util.find_spec("setuptools") or not importlib.util.find_spec("pip"),
    reason="setuptools or pip is not installed",
)
def test_wheel(tmp_path):
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(
                path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "libtide.so*")
            )
        else:
            shutil.copy2(path, source / name)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--no-cache-dir",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            wheels,
            source,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "CFLAGS": "-O0", "NVCC": "none"},  # whether it is built and found, not how fast it is
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("tide_fsdp-") and "-py3-none-linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert {"tide/libtide.so", "tide/__init__.py"} <= set(archive.namelist())
        archive.extractall(site)
    code = "import sys, tide; print(tide.__version__, tide._lib.lib._name); assert 'torch' not in sys.modules"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(site)}
    )
    assert run.returncode == 0, run.stderr
    version, library = run.stdout.split()
    assert wheel.name.split("-")[1] == version and Path(library) == site / "tide" / "libtide.so"
