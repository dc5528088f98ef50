#!/bin/sh
# gpu.sh - everything that needs GPUs, part by part, each with a time limit of its own.
#
# usage: scripts/gpu.sh [PART...]      without PART: all of them, in this order
#   build          the library and the command, kernels included where nvcc is found
#   info           tide info
#   driver-rules   what the driver must do, asked of the real one
#   nccl-rules     what NCCL must do, asked of that of $NCCL_DIR/env.sh (.nccl) if there, else of the one that is found
#   kernels        every kernel against its twin in C
#   check          tide check --fabric cuda
#   lifetime       10,000 calls of two groups in the same slots; then with too few hardware queues, whatever comes of it
#   calibrate      tide calibrate --fabric cuda: the log is a machine file
#   tests          tests/gpu: FSDP2 on TIDE against stock FSDP2
#   tests-nccl     the same on the NCCL fabric, and with four ranks, which share GPUs; with the NCCL of $NCCL_DIR/env.sh (.nccl)
#   ops overlap train   the benches; their numbers also as JSON
#   rails          bench/ops.py, then a training step, with a rank a node: peer copies and NCCL; with the NCCL of $NCCL_DIR/env.sh (.nccl)
#   rivals         bench/ops.py: NCCL on windows and symmetric memory; with the NCCL of $NCCL_DIR/env.sh (.nccl) if there
#   demo           make demo
# Environment: OUT (folder of logs, default gpu-out), PYTHON, LIMIT_<PART> (seconds, '-' as '_').
#
# A part that fails does not stop the next. Ends with a line a part; exit code 1 when one has failed.
set -u
cd "$(dirname -- "$0")/.."
root=$(pwd)
out=${OUT:-$root/gpu-out}
mkdir -p "$out"
python=${PYTHON:-python3}
# A hardware queue for every stream; no multicast, in nobody's library: a host's GPUs are shared.
export CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 PYTHON="$python" TIDE_BUILD="${TIDE_BUILD:-$root/build}"
export PYTHONPATH="$root/python${PYTHONPATH:+:$PYTHONPATH}"
for nvcc in /usr/local/cuda/bin /opt/cuda/bin; do
    command -v nvcc >/dev/null || { [ -x "$nvcc/nvcc" ] && PATH=$PATH:$nvcc; }
done
tide=$TIDE_BUILD/tide
summary=
failed=0
began=$(date +%s)

limit_of() {
    eval "given=\${LIMIT_$(echo "$1" | tr '[:lower:]-' '[:upper:]_'):-}"
    if [ -n "$given" ]; then echo "$given"; return; fi
    case $1 in
    build) echo 200 ;; info) echo 20 ;; driver-rules) echo 60 ;; nccl-rules) echo 150 ;; kernels) echo 100 ;; check) echo 190 ;; lifetime) echo 240 ;;
    calibrate) echo 120 ;; tests) echo 300 ;; ops) echo 250 ;; rivals) echo 150 ;; rails) echo 380 ;; overlap) echo 200 ;; train) echo 420 ;; demo) echo 240 ;;
    esac
}

part() { # name, command...
    name=$1
    shift
    start=$(date +%s)
    limit=$(limit_of "$name")
    echo "==== $name (limit $limit s): $*"
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    case $code in
    0) verdict=ok ;;
    124 | 137) verdict="TIME LIMIT" failed=1 ;;
    *) verdict="FAILED ($code)" failed=1 ;;
    esac
    took=$(($(date +%s) - start))
    tail -n 3 "$out/$name.log" | cut -c1-200
    line=$(printf '%-13s %-12s %4s s  %s' "$name" "$verdict" "$took" "$(grep -v '^ *$' "$out/$name.log" | tail -n 1 | cut -c1-150)")
    summary="$summary
$line"
    echo "==== $name: $verdict, $took s"
}

run() {
    case $1 in
    build) part build make -j"$(getconf _NPROCESSORS_ONLN)" lib cli ;;
    info) part info "$tide" info ;;
    driver-rules) part driver-rules "$tide" driver-rules ;;
    nccl-rules) part nccl-rules sh -c '
        [ ! -f "${NCCL_DIR:-.nccl}/env.sh" ] || . "${NCCL_DIR:-.nccl}/env.sh"
        exec "$0" nccl-rules' "$tide" ;;
    kernels) part kernels "$tide" kernels ;;
    check) part check sh -c '
        code=0
        for how in "--threads --calls 100" "--procs --calls 100" "--procs --model wan2.2-t2v-a14b --local 2 --calls 4" \
            "--procs --model wan2.2-t2v-a14b --nodes 2 --local 1 --calls 4"; do
            echo "---- check --fabric cuda $how"
            timeout -k 5 45 "$0" check --fabric cuda $how || code=1
        done
        exit $code' "$tide" ;;
    lifetime) part lifetime sh -c '
        code=0
        for how in "--local 2" "--nodes 2 --local 1"; do
            echo "---- check --fabric cuda --lifetime $how"
            timeout -k 5 90 "$0" check --fabric cuda --lifetime $how || code=1
        done
        echo "---- the same with 8 hardware queues, unchecked"
        CUDA_DEVICE_MAX_CONNECTIONS=8 TIDE_CUDA_CONNECTIONS_UNCHECKED=1 \
            timeout -k 5 50 "$0" check --fabric cuda --lifetime --local 2 --deadline-ms 4000 || echo "ends with $?"
        exit $code' "$tide" ;;
    calibrate) part calibrate "$tide" calibrate --fabric cuda ;;
    tests) part tests "$python" -m pytest -v -s --tb=no -rs -p no:cacheprovider --maxfail=12 tests/gpu ;;
    tests-nccl) part tests-nccl sh -c '
        [ ! -f "${NCCL_DIR:-.nccl}/env.sh" ] || . "${NCCL_DIR:-.nccl}/env.sh"
        export TIDE_FABRIC=nccl NCCL_MULTI_RANK_GPU_ENABLE=1
        exec "$0" -m pytest -v -s --tb=no -rs -p no:cacheprovider --maxfail=12 tests/gpu/test_meshes_gpu.py tests/gpu/test_rows_gpu.py tests/gpu/test_gpu.py' "$python" ;;
    ops) part ops "$python" bench/ops.py --parts ag,rs,frontier --out "$out/ops.json" ;;
    rails) part rails sh -c '
        [ ! -f "${NCCL_DIR:-.nccl}/env.sh" ] || . "${NCCL_DIR:-.nccl}/env.sh"
        "$0" bench/ops.py --parts rails --limit 100 --out "$1/rails.json" || code=1
        "$0" bench/train.py --models llama-3.1-70b,qwen3-30b-a3b,wan2.2-t2v-a14b --variants /node_size=1,c_sum=96,c_land=96/node_size=1,c_sum=96,c_land=96,fabric=nccl --limit 90 --out "$1/rails-train.json" || code=1
        exit ${code:-0}' "$python" "$out" ;;
    rivals) part rivals sh -c '
        [ ! -f "${NCCL_DIR:-.nccl}/env.sh" ] || . "${NCCL_DIR:-.nccl}/env.sh"
        exec "$0" bench/ops.py --parts rivals --out "$1"' "$python" "$out/rivals.json" ;;
    overlap) part overlap "$python" bench/overlap.py --out "$out/overlap.json" ;;
    train) part train "$python" bench/train.py --profiles --out "$out/train.json" ;;
    demo) part demo make demo ;;
    *) echo "gpu.sh: '$1' is no part" >&2; exit 2 ;;
    esac
}

[ $# -gt 0 ] || set -- build info driver-rules nccl-rules kernels check lifetime calibrate tests tests-nccl ops rails rivals overlap train demo
for name in "$@"; do run "$name"; done
echo
echo "==== gpu.sh: $(($(date +%s) - began)) s$summary"
# Some machines give back a few files only.
if [ "$(find "$out" -maxdepth 1 -type f | wc -l)" -gt 8 ]; then
    (cd "$out" && tar czf gpu-logs.tgz ./*.log && rm -f ./*.log)
fi
exit $failed
