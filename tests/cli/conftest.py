"""Runs build/tide (or $TIDE_BUILD/tide) as users do: words in, text and an exit code out."""

import subprocess

import pytest
from command import TIDE, Result


@pytest.fixture
def tide(tmp_path):
    """tide("plan", "--nodes", 2) -> Result; stdin as text."""

    def run(*words, stdin=None, timeout=120):
        done = subprocess.run(
            [str(TIDE), *map(str, words)], input=stdin, capture_output=True, text=True, timeout=timeout, cwd=tmp_path
        )
        return Result(done)

    return run
