#!/usr/bin/env bash
# Emulates stages of a deeper pipeline on several nodes: run this once on each node.
#
#   NODE_RANK=0 MASTER_ADDR=node0 launch/emulate_8_nodes.sh     # on the first node, and so on
#
# Eight nodes of eight GPUs run stages 0 to 7 of 16, one node a stage (pp.size = 16, dp x ep = 8).
# A second job with STAGES=8-15 and the same OUT and BOUNDARIES measures the other half, on what the
# first one handed on; a third with STAGES=0-7 CALIBRATION=$OUT has true delays and gradients.
set -euo pipefail

NODES=${NODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
RUN=${RUN:-launch/configs/v41-flash-pp16.toml}
STAGES=${STAGES:-0-7}
OUT=${OUT:-calibration.json}
BOUNDARIES=${BOUNDARIES:-boundaries}
HOP_S=${HOP_S:-0.0073} # 335 MB at 46 GB/s; measure it: ppruntime calibrate with pp.size=2
STEPS=${STEPS:-3}
PYTHON=${PYTHON:-python3}

if [[ -n "${CALIBRATION:-}" ]]; then
  absent=(--calibration "$CALIBRATION")
else
  absent=(--costs "${COSTS:-0.0416,0.0625,0.0347}")
fi

# shellcheck disable=SC2086 # OVERRIDES and OPTIONS are lists of words
exec "$PYTHON" -m torch.distributed.run \
  --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  -m ppruntime.launch.cli emulate "$RUN" ${OVERRIDES:-} \
  --stages "$STAGES" --out "$OUT" --boundaries "$BOUNDARIES" \
  --hop-s "$HOP_S" --steps "$STEPS" "${absent[@]}" ${OPTIONS:-}
