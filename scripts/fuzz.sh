#!/bin/sh
# fuzz.sh - mutated inputs for the fuzz targets with clang's libFuzzer, ASan and UBSan: SECONDS (default 60) in all, the
# sum over the targets, which run as many at a time as there are cores. 0: the corpus only.
#
# Each core's lane gets an equal part of SECONDS, and so do a lane's targets, at least a second. Begins with
# tests/fuzz/corpus; what is new stays in build-fuzz/corpus. A finding is an error: it is kept in build-fuzz/found, run
# once more for its report, and printed. Environment: SECONDS_IN_ALL, MAKE.
set -eu
cd "$(dirname -- "$0")/.."
make=${MAKE:-make}
seconds=${SECONDS_IN_ALL:-60}
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
build=build-fuzz
unset MAKEFLAGS MFLAGS MAKELEVEL
case $seconds in '' | *[!0-9]*) echo "fuzz: SECONDS: '$seconds', expected a number" >&2; exit 2 ;; esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d == 0 && n < 0; }' >"$scratch/t.c"
if ! clang -fsanitize=fuzzer,address -o "$scratch/t" "$scratch/t.c" 2>/dev/null; then
    echo "fuzz: skipped: no clang with libFuzzer here; make unit replays tests/fuzz/corpus"
    exit 0
fi
$make -s -j"$jobs" CC=clang BUILD=$build CFLAGS="-O1 -g1 -fno-omit-frame-pointer" \
    SAN="-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all" MAIN=-fsanitize=fuzzer NVCC=none fuzzers
set -- tests/fuzz/corpus/*
[ "$jobs" -le $# ] || jobs=$#
mkdir -p $build/found

fuzz() { # target, seconds
    name=$1 log=$scratch/$1 limit=-max_total_time=$2
    [ "$2" -gt 0 ] || limit=-runs=0
    mkdir -p $build/corpus/"$name"
    # The targets say what they refuse on stderr, which is not news.
    if $build/tests/fuzz_"$name" -close_fd_mask=2 "$limit" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
        -artifact_prefix=$build/found/"$name"- $build/corpus/"$name" tests/fuzz/corpus/"$name" >"$log" 2>&1; then
        echo "== $name, ${2}s: $(awk '/number_of_executed_units/ {n = $2} /new_units_added/ {new = $2}
            END {print n " inputs, " new " kept"}' "$log")"
        return 0
    fi
    found=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    if [ -z "$found" ] || $build/tests/fuzz_"$name" -timeout=20 -rss_limit_mb=4096 "$found" >"$log.again" 2>&1; then
        tail -n 60 "$log" >"$log.again" # not shown by this input alone
    fi
    {
        echo "== $name FAILED"
        head -n 60 "$log.again"
        [ -z "$found" ] || echo "fuzz: the input:
  mkdir -p $build/found; echo $(base64 <"$found" | tr -d '\n') | base64 -d >$found
fuzz: again:
  make fuzz SECONDS=0; $build/tests/fuzz_$name $found
fuzz: once mended, keep it:
  cp $found tests/fuzz/corpus/$name/"
    } >"$log.report"
    cat "$log.report"
    return 1
}

lane() { # its number, targets...
    number=$1 mine=$(((($# - 2 - $1) / jobs) + 1)) at=-1 code=0
    share=$((seconds / jobs / mine))
    [ "$share" -gt 0 ] || share=$((seconds > 0))
    shift
    for folder; do
        at=$((at + 1))
        [ $((at % jobs)) = "$number" ] || continue
        fuzz "$(basename "$folder")" $share || code=1
    done
    return $code
}
lanes= code=0 i=0
while [ $i -lt "$jobs" ]; do
    lane $i "$@" &
    lanes="$lanes $!"
    i=$((i + 1))
done
for i in $lanes; do wait "$i" || code=1; done
[ $code = 0 ] || { echo "fuzz: FAILED"; exit 1; }
echo "fuzz: ok"
