#!/usr/bin/env bash
# All that is known about the GPU transports on a machine with two GPUs, in six minutes at most:
# first look, tests, bench. Each part has its own limit, so one that hangs costs no other.
#
#   bash tests/transports/gpu_all.sh FOLDER [LIBNCCL]
#
# FOLDER gets every log and the bench's JSON (6 files); LIBNCCL is a libnccl.so.2 of 2.30 or newer,
# for put.
# PARTS="smoke tests bench" picks parts, KINDS="nccl put copy_engine" and SELECT (pytest's -k) what
# of them, JOBS the number of tests at a time (2 GPUs are shared; 1 for clean times).
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
library=${2:-}
cd "$(dirname "$0")/../.."
parts=${PARTS:-smoke tests bench}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export CUDA_DEVICE_MAX_CONNECTIONS=32
with_library=()
if [ -n "$library" ]; then
    export PPRUNTIME_NCCL_LIBRARY="$library"
    with_library=(--nccl-library "$library")
fi
summary="$out/summary.txt"
: >"$summary"

part() { # NAME SECONDS COMMAND...: runs it, its output to NAME.log
    local name=$1 seconds=$2 start=$SECONDS code verdict
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    timeout --signal=INT --kill-after=8 "$seconds" "$@" >"$out/$name.log" 2>&1
    code=$?
    verdict=PASS
    ((code == 0)) || verdict=FAIL
    ((code == 124 || code == 137)) && verdict="OUT OF TIME"
    printf '%-12s %-6s exit %-4s %4s s of %s\n' \
        "$verdict" "$name" "$code" "$((SECONDS - start))" "$seconds" >>"$summary"
}

logs=$(mktemp -d)
part smoke 85 python3 tests/transports/gpu_smoke.py "${with_library[@]}" --logs "$logs" \
    ${KINDS:+--kinds "${KINDS// /,}"}
tar -C "$logs" -czf "$out/smoke_logs.tar.gz" . 2>/dev/null
jobs=${JOBS:-3}
spread=()
if ((jobs > 1)) && python3 -c "import xdist" 2>/dev/null; then spread=(-n "$jobs"); fi
part tests 150 python3 -m pytest -v -m "gpu or multi_gpu" tests/transports "${spread[@]}" \
    --timeout=100 --tb=short --durations=12 -p no:cacheprovider -p no:benchmark \
    ${SELECT:+-k "$SELECT"}
part bench 115 python3 -m ppruntime.launch.bench_transports --out "$out/transports.json" \
    "${with_library[@]}"

{
    grep -hE "^(PASS|FAIL) " "$out/smoke.log"
    grep -hE "^(FAILED|ERROR) |(passed|failed).* in [0-9.]+s" "$out/tests.log" | cut -c1-220
    grep -hE "(335\.54 MB|bar [0-9.]+\)|left out)" "$out/bench.log"
} 2>/dev/null >>"$summary"
cat "$summary"
! grep -qE "^(FAIL|OUT)" "$summary"
