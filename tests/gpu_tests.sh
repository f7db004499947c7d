#!/usr/bin/env bash
# All tests that need GPUs but the transports' own (tests/transports/gpu_all.sh), in groups side by
# side: compiling and starting processes take most of their time. About 4 minutes on two GPUs.
#
#   bash tests/gpu_tests.sh FOLDER
#
# FOLDER gets a log per group, and `failed`: the groups that did not pass, ran out of their time or
# found no test. LIMIT is the seconds that a group may take (300); one that takes longer says in which
# test it was. ONLY="fused tables" runs the groups of these names.
set -uo pipefail
LIMIT_SECONDS=300
. "$(dirname "$0")/on_gpus.sh"
export OMP_NUM_THREADS=4

group() { # NAME GPUS FILES...: those of the files' tests that need a GPU
    local name=$1 devices=$2 log=$out/$1.log
    shift 2
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
    on_gpus "$devices" "$name" python3 -m pytest -v -m "gpu or multi_gpu" "$@" --timeout=120 \
        --tb=short --durations=8 -p no:cacheprovider -p no:benchmark
    case $? in 124 | 137) unfinished "$log" | sed 's/^/OUT OF TIME in /' ;; esac
    grep -hE '^(FAILED|ERROR) ' "$log" | cut -c1-200
}

unfinished() { # LOG: the tests that began and did not end
    grep -hE '^tests/.*::' "$1" | grep -vE ' (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)( |$)'
}

m=tests/models r=tests/runtime
group linears 0 $m/test_linear.py $m/test_fp8_linear.py $m/test_fp8_linear_rotated.py \
    $m/test_fp8_linear_gpu.py $m/test_kernel_grouped_gemm.py $m/test_kernel_moe_layout.py &
group fp8 0 $m/test_kernel_fp8_gpu.py $m/test_kernel_hopper_products_gpu.py \
    $m/test_kernel_fp8_quantize.py $m/test_kernel_fp8_experts.py &
group mega 0 $m/test_kernel_mega_moe.py $m/test_kernel_mega_moe_counts.py $m/test_mega_moe.py &
group soak-played $last $m/test_mega_moe_soak.py &
group small 0 $m/test_kernel_mhc.py $m/test_head.py $m/test_single_stream.py \
    $m/test_kernel_engram.py $m/test_kernel_routing.py $m/test_shared_swiglu.py $m/test_norm.py $m/test_wide_linear.py \
    tests/bench/test_gpu_clock.py &
group attention $last $m/test_kernel_sparse_attention.py $m/test_kernel_indexer.py \
    $m/test_indexer_library.py $m/test_expert_products.py $m/test_v41_gpu.py &
group lanes $last $r/test_overlap_gpu.py -k "not two_gpus" &
group knobs $last $r/test_memory_knobs_gpu.py $r/test_memory_watch.py $r/test_device_room.py -k "not 200_steps" &
group optim $last $r/test_muon_gpu.py -k "not two_gpus" &
group compiled $last $r/test_compiled_gpu.py &
group leaks $last $r/test_memory_knobs_gpu.py -k 200_steps &
wait
if ((gpus > 1)); then
    # Each group has one pair of processes; a file in two groups has two.
    group experts 0,1 $r/test_expert_parallel_gpu.py -k "not triton" &
    group experts-triton 0,1 $r/test_expert_parallel_gpu.py -k triton &
    group fused 0,1 $r/test_mega_moe_gpu.py -k "not trains" &
    group fused-runs 0,1 $r/test_mega_moe_gpu.py -k trains &
    group soak 0,1 $r/test_mega_moe_soak_gpu.py &
    group tables 0,1 $r/test_deep_ep_gpu.py $r/test_engram_gpu.py &
    group knobs-over 0,1 $r/test_memory_knobs_gpu.py -k over_two_gpus &
    group muon 0,1 $r/test_muon_gpu.py -k "two_gpus" &
    group pairs 0,1 $r/test_overlap_gpu.py -k "pipeline_over_two_gpus" &
    group pairs-experts 0,1 $r/test_overlap_gpu.py -k "experts_over_two_gpus" &
    wait
fi
[ ! -s "$out/failed" ]
