#!/bin/sh
# fuzz.sh - gives each fuzz target its share of SECONDS of a core (default 60 in all) with clang's libFuzzer and ASan + UBSan.
#
# Begins with tests/fuzz/corpus; what is new stays in build-fuzz/corpus, a finding in build-fuzz. Environment: MAKE.
set -eu
cd "$(dirname -- "$0")/.."
make=${MAKE:-make}
seconds=${SECONDS_IN_ALL:-60}
jobs=$(getconf _NPROCESSORS_ONLN)
build=build-fuzz
unset MAKEFLAGS MFLAGS MAKELEVEL
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
share=$((seconds / $#))
[ $share -gt 0 ] || share=1

# A target takes one core: each core has a lane of its own, with every jobs-th target.
lane() { # number of the lane, targets...
    at=-$1
    shift
    for folder; do
        at=$((at + 1))
        [ $(((at + jobs - 1) % jobs)) = 0 ] || continue
        name=$(basename "$folder")
        mkdir -p $build/corpus/"$name"
        # The targets say what they refuse on stderr, which is not news.
        $build/tests/fuzz_"$name" -close_fd_mask=2 -max_total_time=$share -timeout=20 -rss_limit_mb=4096 \
            -print_final_stats=1 -artifact_prefix=$build/"$name"- $build/corpus/"$name" "$folder" >"$scratch/$name" 2>&1 || {
            tail -n 40 "$scratch/$name"
            echo "fuzz: $name has found something"
            return 1
        }
        echo "== $name, ${share}s
$(grep -E "number_of_executed_units|average_exec_per_sec|new_units_added" "$scratch/$name")"
    done
}
lanes= code=0 i=0
while [ $i -lt "$jobs" ]; do
    lane $i "$@" &
    lanes="$lanes $!"
    i=$((i + 1))
done
for i in $lanes; do wait "$i" || code=1; done
[ $code = 0 ] || exit 1
echo "fuzz: ok"
