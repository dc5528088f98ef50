"""Runs build/tide (or $TIDE_BUILD/tide) as users do: words in, text and an exit code out."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIDE = pathlib.Path(os.environ.get("TIDE_BUILD", ROOT / "build")).resolve() / "tide"


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def last(self):
        return self.out.splitlines()[-1]


@pytest.fixture
def tide(tmp_path):
    """tide("plan", "--nodes", 2) -> Result; stdin as text."""

    def run(*words, stdin=None, timeout=120):
        done = subprocess.run(
            [str(TIDE), *map(str, words)], input=stdin, capture_output=True, text=True, timeout=timeout, cwd=tmp_path
        )
        return Result(done)

    return run
