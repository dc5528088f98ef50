#!/bin/sh
# python.sh - prints the path of a Python that can run the tests and the demo.
#
# That is $PYTHON when it has torch >= 2.11 and the test packages; else .venv beside the Makefile, made on first use.
set -eu
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
base=${PYTHON:-python3}
venv=$root/.venv

usable() {
    "$1" - 2>/dev/null <<'END'
import sys
import hypothesis, matplotlib, numpy, pytest, torch
sys.exit(tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11))
END
}

if command -v "$base" >/dev/null && usable "$base"; then
    command -v "$base"
    exit 0
fi
if [ ! -x "$venv/bin/python" ] || ! usable "$venv/bin/python"; then
    command -v "$base" >/dev/null || { echo "python.sh: '$base' not found; set PYTHON" >&2; exit 1; }
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "python.sh: '$base' is older than Python 3.10; set PYTHON" >&2; exit 1; }
    echo "python.sh: '$base' lacks torch >= 2.11 or a test package; setting up $venv" >&2
    "$base" -m venv "$venv" ||
        { echo "python.sh: python -m venv failed (Debian: apt install python3-venv)" >&2; exit 1; }
    # The CPU wheel where an index offers it: it is a tenth of the size of the default one.
    pip() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2; }
    pip "torch==2.13.0+cpu" 2>/dev/null ||
        pip --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu \
            "torch==2.13.0+cpu" 2>/dev/null ||
        pip "torch==2.13.0"
    pip numpy pytest hypothesis matplotlib
    usable "$venv/bin/python" ||
        { echo "python.sh: $venv is not usable after set-up; remove it and try again" >&2; exit 1; }
fi
echo "$venv/bin/python"
