#!/usr/bin/env bash
# All that tests know of the GPU transports, on a machine with two GPUs: about 7 minutes.
#
#   bash tests/transports/gpu_all.sh FOLDER [LIBNCCL]
#
# FOLDER gets summary.txt, one junit file and one log per part and kind, packed in results.tar.gz
# after every part (3 files in all, with the bench's), so a limit from outside loses the part that
# runs and nothing else. LIBNCCL is a libnccl.so.2 of 2.30 or newer, for put.
#
# PARTS picks among (the seconds are limits):
#   smoke     150  each kind by itself: 24 messages a channel, rates, abort
#   contract  150  what every transport promises, and what runs on the GPU; the kinds side by side
#   faults    180  dead, silent and disagreeing peers, abort, close; the kinds side by side
#   stress    240  10,000 random transfers beside load, one kind after the other
#   trace     120  no wait of the host inside a step of the executor
#   bench     115  rates and slow-downs (not run unless named)
# KINDS="nccl put copy_engine" and SELECT (pytest's -k) pick what of them.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
library=${2:-}
cd "$(dirname "$0")/../.."
parts=${PARTS:-smoke contract faults stress trace}
read -ra kinds <<<"${KINDS:-copy_engine put nccl}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export CUDA_DEVICE_MAX_CONNECTIONS=32
with_library=()
if [ -n "$library" ]; then
    export PPRUNTIME_NCCL_LIBRARY="$library"
    with_library=(--nccl-library "$library")
fi
logs=$(mktemp -d)
summary="$out/summary.txt"
: >"$summary"

wanted() { [[ " $parts " == *" $1 "* ]]; }

limited() { # NAME SECONDS COMMAND...: runs it, its output to NAME.log, a line to the summary
    local name=$1 seconds=$2 start=$SECONDS code verdict
    shift 2
    timeout --signal=INT --kill-after=8 "$seconds" "$@" >"$logs/$name.log" 2>&1
    code=$?
    verdict=PASS
    ((code == 0)) || verdict=FAIL
    # pytest found no test, or skipped them all
    if ((code == 5)) || grep -qE "^=+ [0-9]+ skipped" "$logs/$name.log"; then verdict=EMPTY; fi
    ((code == 124 || code == 137)) && verdict="OUT OF TIME"
    printf '%-12s %-20s exit %-4s %4s s of %-4s %s\n' "$verdict" "$name" "$code" \
        "$((SECONDS - start))" "$seconds" \
        "$(grep -hE "(passed|failed|skipped|error).* in [0-9.]+s" "$logs/$name.log" | tail -1)" >>"$summary"
}

tests() { # NAME SECONDS KIND FILES...: those of the files' tests that bear the kind
    local name=$1 seconds=$2 kind=$3
    shift 3
    limited "$name-$kind" "$seconds" python3 -m pytest -v -m "gpu or multi_gpu" "$@" \
        -k "over_$kind${SELECT:+ and ($SELECT)}" --timeout=100 --tb=short --durations=12 \
        --junitxml="$logs/$name-$kind.xml" -p no:cacheprovider -p no:benchmark -p no:xdist
}

pack() { tar -C "$logs" -czf "$out/results.tar.gz" .; }

here=tests/transports
if wanted smoke; then
    limited smoke 150 python3 $here/gpu_smoke.py "${with_library[@]}" --logs "$logs" \
        --kinds "$(IFS=,; echo "${kinds[*]}")"
    pack
fi
if wanted contract; then
    for kind in "${kinds[@]}"; do
        SELECT="not killed and not silent and not nothing and not abort and not gone${SELECT:+ and ($SELECT)}" \
            tests contract 150 "$kind" $here/test_transport_contract.py \
            $here/test_gpu_transports.py &
    done
    wait
    pack
fi
if wanted faults; then
    for kind in "${kinds[@]}"; do
        SELECT="(killed or nothing or abort or gone)${SELECT:+ and ($SELECT)}" \
            tests faults 180 "$kind" $here/test_gpu_transports.py &
    done
    wait
    limited faults-queue 40 python3 -m pytest -v -k single_hardware_queue --timeout=35 \
        --junitxml="$logs/faults-queue.xml" -p no:cacheprovider $here/test_gpu_transports.py
    pack
fi
if wanted stress; then
    for kind in "${kinds[@]}"; do
        tests stress 80 "$kind" $here/test_transport_stress.py -s
        pack
    done
fi
if wanted trace; then
    for kind in "${kinds[@]}"; do
        tests trace 110 "$kind" tests/runtime/test_step_trace.py &
    done
    wait
    pack
fi
if wanted bench; then
    limited bench 115 python3 -m ppruntime.launch.bench_transports --out "$out/transports.json" \
        "${with_library[@]}"
    pack
fi

{
    grep -hE "^(PASS|FAIL) " "$logs/smoke.log"
    grep -hE "^(FAILED|ERROR) " "$logs"/*.log | cut -c1-220
    grep -hE "messages in [0-9.]+ s" "$logs"/*.log
    grep -hE "(335\.54 MB|bar [0-9.]+\)|left out)" "$logs/bench.log"
} 2>/dev/null >>"$summary"
cat "$summary"
! grep -qE "^(FAIL|OUT|EMPTY)" "$summary"
