#!/usr/bin/env bash
# All benches of one GPU, on as many GPUs as there are: about 12 minutes on one, 7 on two.
#
#   bash tests/gpu_benches.sh FOLDER
#
# FOLDER gets their records, by the names that docs/bench has them under, a log each, and `failed`.
# LIMIT is the seconds that a bench may take (400). What needs two GPUs at once is in docs/gpu-runs.md.
set -uo pipefail
LIMIT_SECONDS=400
. "$(dirname "$0")/on_gpus.sh"
export OMP_NUM_THREADS=8

bench() { # GPU RECORD COMMAND...
    local gpu=$1 record=$2
    shift 2
    on_gpus "$gpu" "$record" python3 -m ppruntime.launch.cli bench "$@" --out "$out/$record.json"
}

layers() {
    bench "$1" layers-halves layers --only halves --precision bf16 fp8
    bench "$1" layers-attention layers --only attention
    bench "$1" layers-moe layers --only moe
    bench "$1" layers-linears layers --only linears
    bench "$1" layer-parts layers --only parts
}

rest() {
    bench "$1" moe-experts moe
    bench "$1" memory memory --try-refused --limit-seconds 330
}

layers 0 &
((gpus > 1)) || wait
rest "$last" &
wait
[ ! -s "$out/failed" ]
