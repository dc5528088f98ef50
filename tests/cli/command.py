"""The command under test: build/tide, or $TIDE_BUILD/tide."""

import json
import os
import pathlib

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
