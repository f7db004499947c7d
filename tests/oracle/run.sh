#!/usr/bin/env bash
# Compares our models with implementations by others: same weights, then loss, logits and every gradient.
#
#   tests/oracle/run.sh [nemo] [hf]          default: both; exits non-zero if a bound is missed
#   tests/oracle/run.sh --setup [nemo] [hf]  only builds the environments
#
# Each side has a virtual environment of its own, since the two need different versions of one package:
#   .venv-oracle-nemo  nemo-automodel 0.7.0, V4.1   (no torchvision: it would bring another torch)
#   .venv-oracle-hf    transformers 5.24.0, V4
# PYTHON names the interpreter that builds them (default python3; 3.11 or later).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly TORCH=torch==2.13.0
readonly OURS=(msgspec "numpy<2.4") # what ppruntime.models imports besides torch

# build NAME PACKAGES...: makes .venv-oracle-NAME once; a half-built one is made again.
build() {
  local venv=".venv-oracle-$1" && shift
  local wanted="$*"
  if [[ -f $venv/.complete && $(<"$venv/.complete") == "$wanted" ]]; then return; fi
  echo "building $venv: $wanted"
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet "$@"
}

# seal NAME PACKAGES...: marks the environment as complete, for just this list of packages.
seal() {
  local venv=".venv-oracle-$1" && shift
  echo "$*" >"$venv/.complete"
}

prepare_nemo() {
  local packages=("$TORCH" transformers==5.18.0 pillow "${OURS[@]}")
  build nemo "${packages[@]}"
  if [[ ! -f .venv-oracle-nemo/.complete ]]; then
    # Its own requirements ask for CUDA packages that a CPU comparison never imports.
    .venv-oracle-nemo/bin/python -m pip install --quiet --no-deps nemo-automodel==0.7.0
  fi
  seal nemo "${packages[@]}"
}

prepare_hf() {
  local packages=("$TORCH" transformers==5.24.0 "${OURS[@]}")
  build hf "${packages[@]}"
  seal hf "${packages[@]}"
}

setup_only=false
if [[ ${1:-} == --setup ]]; then
  setup_only=true
  shift
fi
sides=("$@")
if ((${#sides[@]} == 0)); then sides=(nemo hf); fi

# One thread: on a busy small machine two threads made the same step sixty times slower.
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
failed=()
for side in "${sides[@]}"; do
  case $side in
  nemo | hf) "prepare_$side" ;;
  *)
    echo "run.sh: there is no side '$side'; choose from: nemo, hf" >&2
    exit 2
    ;;
  esac
  if $setup_only; then continue; fi
  ".venv-oracle-$side/bin/python" "tests/oracle/compare_$side.py" || failed+=("$side")
done
if ((${#failed[@]} > 0)); then
  echo "run.sh: comparison failed: ${failed[*]}" >&2
  exit 1
fi
