# What gpu_tests.sh and gpu_benches.sh begin with, to be sourced: FOLDER is their first argument.
#
# Gives `out`, the folder, `gpus`, how many there are, and `last`, the last one's number; makes the
# file $out/failed, whose lines are the names of what failed. The working directory is the
# repository. LIMIT is the seconds that one command may take, LIMIT_SECONDS where it is not set.
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=32
gpus=$(python3 -c "import torch; print(torch.cuda.device_count())")
((gpus > 0)) || { echo "$(basename "$0"): there is no GPU" >&2; exit 2; }
last=$((gpus - 1))
: >"$out/failed"

on_gpus() { # GPUS NAME COMMAND...: runs it with a log of that name; its exit code and seconds in a line
    local devices=$1 name=$2 start=$SECONDS code
    shift 2
    CUDA_VISIBLE_DEVICES=$devices timeout --signal=INT --kill-after=8 \
        "${LIMIT:-$LIMIT_SECONDS}" "$@" >"$out/$name.log" 2>&1
    code=$?
    ((code == 0)) || echo "$name" >>"$out/failed"
    printf '%-18s exit %-4s %4s s  %s\n' "$name" $code $((SECONDS - start)) \
        "$(grep -hE '(passed|failed|skipped|error).* in [0-9.]+' "$out/$name.log" | tail -1)"
    return $code
}
