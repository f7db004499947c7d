#!/usr/bin/env bash
# All tests that need GPUs but the transports' own (tests/transports/gpu_all.sh), in groups side by
# side: compiling and starting processes take most of their time. About 4 minutes on two GPUs.
#
#   bash tests/gpu_tests.sh FOLDER
#
# FOLDER gets a log per group, and `failed`: the groups that did not pass, ran out of their time or
# found no test. LIMIT is the seconds that a group may take (300).
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export CUDA_DEVICE_MAX_CONNECTIONS=32
gpus=$(python3 -c "import torch; print(torch.cuda.device_count())")
((gpus > 0)) || { echo "gpu_tests: there is no GPU" >&2; exit 2; }
failed=$out/failed
: >"$failed"

group() { # NAME GPUS FILES...: those of the files' tests that need a GPU
    local name=$1 devices=$2 start=$SECONDS code
    shift 2
    CUDA_VISIBLE_DEVICES=$devices timeout --signal=INT --kill-after=8 "${LIMIT:-300}" \
        python3 -m pytest -v -m "gpu or multi_gpu" "$@" --timeout=150 --tb=short --durations=8 \
        -p no:cacheprovider -p no:benchmark >"$out/$name.log" 2>&1
    code=$?
    ((code == 0)) || echo "$name" >>"$failed"
    printf '%-10s exit %-4s %4s s  %s\n' "$name" $code $((SECONDS - start)) \
        "$(grep -hE '(passed|failed|skipped|error).* in [0-9.]+' "$out/$name.log" | tail -1)"
    grep -hE '^(FAILED|ERROR) ' "$out/$name.log" | cut -c1-200
}

m=tests/models r=tests/runtime
last=$((gpus - 1))
group linears 0 $m/test_linear.py $m/test_fp8_linear.py $m/test_fp8_linear_rotated.py \
    $m/test_fp8_linear_gpu.py $m/test_kernel_grouped_gemm.py $m/test_kernel_moe_layout.py &
group fp8 0 $m/test_kernel_fp8_gpu.py $m/test_kernel_hopper_products_gpu.py \
    $m/test_kernel_fp8_quantize.py $m/test_kernel_fp8_experts.py &
group mega 0 $m/test_kernel_mega_moe.py $m/test_kernel_mega_moe_counts.py $m/test_mega_moe.py &
group small 0 $m/test_kernel_mhc.py $m/test_head.py $m/test_single_stream.py \
    $m/test_kernel_engram.py $m/test_shared_swiglu.py $m/test_norm.py $m/test_wide_linear.py \
    tests/bench/test_gpu_clock.py &
group attention $last $m/test_kernel_sparse_attention.py $m/test_kernel_indexer.py \
    $m/test_indexer_library.py $m/test_expert_products.py $m/test_v41_gpu.py &
group knobs $last $r/test_memory_knobs_gpu.py $r/test_memory_watch.py &
wait
if ((gpus > 1)); then
    group experts 0,1 -n 4 $r/test_expert_parallel_gpu.py &
    group fused 0,1 $r/test_mega_moe_gpu.py &
    group tables 0,1 $r/test_deep_ep_gpu.py $r/test_engram_gpu.py &
    wait
fi
[ ! -s "$failed" ]
