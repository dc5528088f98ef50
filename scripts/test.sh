#!/bin/sh
# test.sh - all that `make test` does, in the order in which it is cheapest to fail. pytest, whose ranks wait for each
# other half of the time, runs beside the C tests from the first build on; its output comes at the end.
#
# Environment: CC, PYTHON, MAKE, JOBS. Ends at the first failing section with its exit code.
set -eu
cd "$(dirname -- "$0")/.."
make=${MAKE:-make}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
unset MAKEFLAGS MFLAGS MAKELEVEL
quiet="-s -j$jobs KERNELS=build/kernels.fatbin"
scratch=$(mktemp -d)
pytest=
trap '[ -z "$pytest" ] || kill "$pytest" 2>/dev/null; rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
started=$(date +%s)
skipped=

heading() { printf '\n==== %s (%ss)\n' "$1" $(($(date +%s) - started)); }
skip() { printf '\n==== skipped: %s: %s\n' "$1" "$2"; skipped="$skipped
  $1: $2"; }
# Compiles and runs a small program with threads under the given compiler and flags.
works() {
    cat >"$scratch/t.c" <<'END'
#include <pthread.h>
static void *f(void *p) { return p; }
int main(void) { pthread_t t; return pthread_create(&t, 0, f, 0) || pthread_join(t, 0); }
END
    "$@" -pthread -o "$scratch/t" "$scratch/t.c" >/dev/null 2>&1 && "$scratch/t" >/dev/null 2>&1
}

heading "set-up"
compilers=
for cc in gcc clang; do
    if ! command -v $cc >/dev/null; then skip $cc "not installed"
    elif ! works $cc; then skip $cc "cannot compile and run a program with threads"
    else compilers="$compilers $cc"; echo "$cc: $($cc --version | head -n 1)"
    fi
done
[ -n "$compilers" ] || { echo "test.sh: neither gcc nor clang works here" >&2; exit 1; }
set -- $compilers
first=$1
cat >"$scratch/c.c" <<'END'
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
int main(void) { return 0; }
END
$first -o "$scratch/c" "$scratch/c.c" -lcmocka >/dev/null 2>&1 || {
    echo "test.sh: cmocka is missing: install libcmocka-dev (Debian), libcmocka-devel (Fedora) or cmocka (Arch)" >&2
    exit 1
}
command -v "${NVCC:-nvcc}" >/dev/null || skip "CUDA kernels" "no nvcc: the library is built without them"
printf '#include <barrier>\n' | "${CXX:-g++}" -std=c++20 -x c++ -E - >/dev/null 2>&1 ||
    skip "CUDA kernels on a CPU" "${CXX:-g++} is missing or has no C++20"
python=$(PYTHON=${PYTHON:-python3} sh scripts/python.sh)
echo "python: $python, $("$python" -c 'import sys, torch; print(sys.version.split()[0], "torch", torch.__version__)')"

heading "$first: build with -Wall -Wextra -Wpedantic -Werror"
$make $quiet CC=$first all
suites=; for d in tests/cli tests/python; do [ -d $d ] && suites="$suites $d"; done
TIDE_BUILD=$PWD/build PYTHONPATH=$PWD/python "$python" -m pytest -q -x --tb=short $suites >"$scratch/pytest" 2>&1 &
pytest=$!
$make $quiet CC=$first units benches
heading "$first: unit tests"
$make $quiet CC=$first unit

# The second compiler's code: what it could translate otherwise, arithmetic and the engine; a run of all takes a minute.
for cc in $compilers; do
    [ $cc != "$first" ] || continue
    some="geometry plan schedule fabric_host engine"
    heading "$cc: build with -Wall -Wextra -Wpedantic -Werror, unit tests: $some"
    $make $quiet CC=$cc BUILD=build-$cc CFLAGS=-O3 objects all benches
    $make $quiet CC=$cc BUILD=build-$cc CFLAGS=-O3 unit ONLY="$some"
done

# The CUDA fabric over the fake driver: random configurations, in several moods of its scheduler.
fake_gpus() { # build folder, calls
    for seed in 1 2 3 4; do
        FAKE_SEED=$seed FAKE_DEVICES=$((seed + 1)) \
            $1/tide-fake check --fabric cuda --seed $((seed * 1000000)) --calls $2 >"$scratch/check" ||
            { cat "$scratch/check"; exit 1; }
        tail -n 1 "$scratch/check"
    done
}
heading "GPUs that are not there: tide check --fabric cuda"
fake_gpus build 100

# A sanitizer runs with the first compiler whose run-time library works here: unit tests, then `calls` of tide check.
# -g1 has the lines of a report.
sanitized() { # name, build folder, flags, calls, which unit tests, which not
    name=$1 build=$2 flags=$3 calls=$4 some=$5 except=${6:-}
    for cc in $compilers; do
        if works $cc -g $flags; then
            heading "$cc, $name: unit tests${some:+: $some}${except:+ but $except}"
            $make $quiet CC=$cc BUILD=$build CFLAGS="-O1 -g1 -fno-omit-frame-pointer" TEST_OPT=-O0 SAN="$flags" \
                cli $build/tide-fake unit ONLY="$some" EXCEPT="$except"
            heading "$cc, $name: tide check"
            $build/tide check --seed 1000000 --calls $calls
            fake_gpus $build $((calls / 5))
            return
        fi
    done
    skip "$name" "no compiler here links and runs with $flags"
}
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
# Mutants run for real run the paths of the other tests again, and the rules of NCCL wait more than they do.
sanitized "ASan + UBSan" build-asan "-fsanitize=address,undefined -fno-sanitize-recover=all" 200 "" "mutants_real nccl_rules"
sanitized "TSan" build-tsan "-fsanitize=thread" 150 \
    "engine fabric_host comm_failures calls_walk bootstrap link nccl test_cuda. cuda_device faults" "nccl_rules nccl_layout"

heading "dependency directions"
python3 scripts/check_deps.py build || exit 1

heading "install, pkg-config and the example"
CC=$first sh tests/install_test.sh

heading "pytest"
code=0
wait "$pytest" || code=$?
pytest=
cat "$scratch/pytest"
[ $code = 0 ] || exit $code

heading "done"
[ -z "$skipped" ] || printf 'skipped:%s\n' "$skipped"
echo "test: ok"
