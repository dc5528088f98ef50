#!/bin/sh
# test_long.sh - the nightly amounts of what `make test` runs a little of, in parts, as many at a time as there are cores.
#
# usage: test_long.sh [PART...]. Prints a line a part, with its time and the last thing that it said (the rest is in
# $BUILD/long/PART.log), then `test-long: ok` or what failed. Environment: BUILD (`make test-long` builds it), JOBS.
set -eu
cd "$(dirname -- "$0")/.."
build=${BUILD:-build}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
logs=$build/long

# The longest first, so that no core is idle at the end.
parts="check mutants-real verify-mutate verify-random cuda-check mutants cuda verify kills link-size"
run() {
    case $1 in
    check) $build/tide check --calls 40000 ;;
    mutants-real) $build/tests/test_mutants_real 100000 200 ;; # seeds of each plan, tries of a mutant
    verify-mutate) $build/tide verify --mutate ;;
    verify-random) $build/tests/test_verify 20000 2001 ;;      # plans, the seed of the first
    cuda-check)                                                # the fake driver in several moods of its scheduler
        for seed in 1 2 3 4; do
            FAKE_SEED=$seed FAKE_DEVICES=$((seed + 1)) \
                $build/tide-fake check --fabric cuda --seed $((seed * 1000000)) --calls 2000 || return 1
        done ;;
    mutants) $build/tests/test_mutants 400 ;;                  # orders
    cuda) $build/tests/test_cuda 5000 ;;                       # worlds over the fake driver
    verify) $build/tide verify ;;
    kills) $build/tests/test_faults --kills 1000 2 ;;          # and their seed
    link-size) $build/tests/test_link_size 1000 ;;             # ranks
    *) echo "no such part; there are: $parts"; return 2 ;;
    esac
}

since() { echo $(($(date +%s) - $1))s; }
if [ "${1:-}" = --one ]; then # what xargs runs below
    begun=$(date +%s) how=
    run "$2" >"$logs/$2.log" 2>&1 || { how="FAILED: "; echo "$2" >>"$logs/failed"; }
    # cmocka's own lines begin with a bracket
    echo "== $2, $(since "$begun"): $how$(grep -v '^\[' "$logs/$2.log" | tail -n 1)"
    [ -z "$how" ] || tail -n 40 "$logs/$2.log"
    exit 0
fi

begun=$(date +%s)
[ $# -gt 0 ] || set -- $parts
rm -rf "$logs"
mkdir -p "$logs"
printf '%s\n' "$@" | xargs -P "$jobs" -I PART sh scripts/test_long.sh --one PART || echo "xargs ($?)" >>"$logs/failed"
took="$(since "$begun"), $jobs at a time"
if [ -e "$logs/failed" ]; then
    echo "test-long: FAILED: $(tr '\n' ' ' <"$logs/failed")($took; logs in $logs)"
    exit 1
fi
echo "test-long: ok, $# parts in $took"
