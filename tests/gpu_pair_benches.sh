#!/usr/bin/env bash
# All benches and validations of two GPUs, one after another: about 28 minutes.
#
#   bash tests/gpu_pair_benches.sh FOLDER LIBNCCL
#
# FOLDER gets their records, by the names that docs/bench has them under, a log each, and `failed`.
# LIBNCCL is a libnccl.so.2 of 2.30 or newer. ONLY="memory-2-gpus validation-run" runs those of these
# names; a name's limit of seconds stands beside it, LIMIT is one for all.
set -uo pipefail
. "$(dirname "$0")/on_gpus.sh"
export OMP_NUM_THREADS=4
library=${2:?a libnccl.so.2 of 2.30 or newer}
((gpus > 1)) || { echo "$(basename "$0"): there is one GPU only" >&2; exit 2; }

cli=(python3 -m ppruntime.launch.cli)
ranks=(torchrun --standalone --nproc-per-node 2 -m ppruntime.launch.cli)
model=(launch/configs/v41-proxy-8.toml launch/configs/on_top/fast.toml moe.compute.backend=triton)
bf16=("${model[@]}" kernels.linear=reference ac.mode=none)
ordered=("${bf16[@]}" kernels.attention=triton kernels.attention_deterministic=true)
put=(pp.transport=put pp.nccl_library="$library")

run() { # NAME SECONDS COMMAND...
    local name=$1 LIMIT_SECONDS=$2
    shift 2
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
    on_gpus 0,1 "$name" "$@" --out "$out/$name.json"
    grep -hE '^ *(met|MISSED)' "$out/$name.log"
}

pipeline() { # NAME SECONDS ARGUMENTS...
    local name=$1 seconds=$2
    shift 2
    run "$name" "$seconds" "${cli[@]}" bench pipeline --nccl-library "$library" \
        --limit-seconds $((seconds - 40)) "$@"
}

run moe-ep2 230 "${cli[@]}" bench moe --ranks 2 --repetitions 6
run moe-pairs 150 "${cli[@]}" bench moe --ranks 2 --pairs
run validation-run 90 "${ranks[@]}" validate-run "${bf16[@]}" "${put[@]}" pp.schedule=1f1b_w \
    train.num_micro_batches=24 pp.gemm_sms=120 --steps 3 \
    optim.type=sign_sgd optim.clip_norm=default \
    --predictions "$out/validation-run-predictions.jsonl" --calibrate-with \
    "train.num_micro_batches=12 pp.schedule=1f1b pp.transport=copy_engine pp.nccl_library=default"
run memory-2-gpus 290 "${cli[@]}" bench memory --layouts pp2,dp2 --limit-seconds 250
run memory-one-in-two 120 "${cli[@]}" bench memory --layouts pp2 --tokens 8192 --limit-seconds 80 \
    --only "offload, paced, one in two" train.num_micro_batches=24
run memory-weight-grads 110 "${cli[@]}" bench memory --layouts pp2 --tokens 8192 \
    --limit-seconds 80 --only "weight gradients apart" --only "weight gradients of two" \
    --only "weight gradients apart, of two" launch/configs/v41-proxy-8.toml kernels.linear=auto
pipeline pipeline-pairs 150 --steps 2 --orders dualpipe_v --more-micro-batches= --no-torch \
    --transports copy_engine,copy_engine+pairs,copy_engine+pairs:66:66,copy_engine+pairs:88:44 \
    "${ordered[@]}"
pipeline pipeline-pairs-mega 120 --steps 2 --orders dualpipe_v --more-micro-batches= --no-torch \
    --transports local,local+pairs:66:66,local+pairs:88:44 \
    "${ordered[@]}" pp.size=1 parallel.ep=2 moe.dispatch.type=mega_moe
pipeline pipeline-pairs-deep-ep 120 --steps 2 --orders dualpipe_v --more-micro-batches= --no-torch \
    --transports local,local+pairs,local+pairs:88:44 "${ordered[@]}" pp.size=1 parallel.ep=2 \
    moe.dispatch.type=deep_ep moe.dispatch.fp8=true moe.compute.backend=deep_gemm
pipeline pipeline-fp8 150 --steps 2 --micro-batches 8 --more-micro-batches= --no-torch --no-none \
    --orders 1f1b,1f1b_w --fused-wgrads 1,2 --transports copy_engine "${model[@]}" ac.mode=none \
    kernels.attention=triton kernels.attention_deterministic=true
pipeline pipeline 460 --steps 2 --transports copy_engine,put,nccl/4 "${bf16[@]}" pp.gemm_sms=120
pipeline pipeline-torch 200 --steps 1 --orders 1f1b,dualpipe_v --more-micro-batches= \
    --transports copy_engine,nccl@0,nccl/4@0,nccl/4 "${bf16[@]}" pp.gemm_sms=120
pipeline pipeline-infiniband 180 --steps 1 --micro-batches 8 --stand-in --orders 1f1b,1f1b_w \
    --transports copy_engine,put "${bf16[@]}"
run calibration 200 "${cli[@]}" calibrate "${model[@]}" pp.size=1 --modes none
run calibration 60 "${ranks[@]}" calibrate "${model[@]}" pp.size=2 "${put[@]}"  # adds messages
run calibration-put 150 "${ranks[@]}" calibrate "${model[@]}" pp.size=2 "${put[@]}" --in-flight \
    --modes none --idle "$out/calibration.json"
run calibration 140 "${ranks[@]}" calibrate "${model[@]}" pp.size=1 parallel.dp=2 \
    train.num_micro_batches=1 --per-step
for stages in 0-1 2-3 4-5 6-7; do # each on what the ones before sent
    run calibration-emulated 60 "${ranks[@]}" emulate "${model[@]}" "${put[@]}" pp.size=8 \
        pp.schedule=1f1b_w train.num_micro_batches=40 ac.mode=full --stages "$stages" --steps 5 \
        --costs 0.009,0.02,0.007 --hop-s 0.001 --boundaries "$out/boundaries"
done
[ ! -s "$out/failed" ]
