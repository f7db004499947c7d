#!/usr/bin/env bash
# All benches of one GPU, on as many GPUs as there are: about 12 minutes on one, 7 on two.
#
#   bash tests/gpu_benches.sh FOLDER
#
# FOLDER gets their records, by the names that docs/bench has them under, a log each, and `failed`.
# LIMIT is the seconds that a bench may take (400). What needs two GPUs at once is in docs/gpu-runs.md.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8
export CUDA_DEVICE_MAX_CONNECTIONS=32
gpus=$(python3 -c "import torch; print(torch.cuda.device_count())")
((gpus > 0)) || { echo "gpu_benches: there is no GPU" >&2; exit 2; }
failed=$out/failed
: >"$failed"

bench() { # GPU RECORD COMMAND...
    local gpu=$1 record=$2 start=$SECONDS code
    shift 2
    CUDA_VISIBLE_DEVICES=$gpu timeout --signal=INT --kill-after=8 "${LIMIT:-400}" \
        python3 -m ppruntime.launch.cli bench "$@" --out "$out/$record.json" >"$out/$record.log" 2>&1
    code=$?
    ((code == 0)) || echo "$record" >>"$failed"
    printf '%-18s exit %-4s %4s s\n' "$record" $code $((SECONDS - start))
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
    bench "$1" memory memory
}

layers 0 &
((gpus > 1)) || wait
rest $((gpus - 1)) &
wait
[ ! -s "$failed" ]
