"""Builds libtide.so with the C compiler, through make, and ships it inside the package: no torch, no Python headers needed."""
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
HEADER = (ROOT / "include" / "tide" / "tide.h").read_text()
VERSION = ".".join(re.search(rf"define TIDE_VERSION_{part} (\d+)", HEADER).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        subprocess.run(["make", f"-j{os.cpu_count() or 1}", "lib", "BUILD=build/pip"], cwd=ROOT, check=True)
        package = ROOT / "python" / "tide" if self.editable_mode else Path(self.build_lib) / "tide"
        shutil.copy2(ROOT / "build" / "pip" / "libtide.so", package / "libtide.so")

    def get_outputs(self, include_bytecode=True):
        return super().get_outputs(include_bytecode) + [str(Path(self.build_lib) / "tide" / "libtide.so")]


class PlatformWheel(bdist_wheel):
    """One wheel serves every Python 3 of a platform: the library is reached through ctypes."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(version=VERSION, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
