# What the scripts share: where things are, and a step that says how long it took. Sourced, not run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra HYPTREE <<< "${HYPTREE:-hyptree}"
OUT=${OUT:-runs/benchmarks}
DATA=${DATA:-${HYPTREE_DATA:-data}}
QUICK=${QUICK:-}
DEVICE=${DEVICE:-$([ -n "$QUICK" ] && echo cpu || echo cuda)}
[ -n "$QUICK" ] && JOBS=${JOBS:-1}  # a small machine has memory for one run
FAILED=()
mkdir -p "$OUT"

# step NAME COMMAND...: runs it unless it is done or ONLY names others; a failure is noted and the rest goes on.
step() {
    local name=$1 start=$SECONDS
    shift
    if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]]; then return 0; fi
    if [ -e "$OUT/$name.done" ]; then echo "== $name: done before, $OUT/$name.txt"; return 0; fi
    echo "== $name"
    if "$@" > "$OUT/$name.txt" 2>&1; then
        touch "$OUT/$name.done"
        echo "== $name: $((SECONDS - start)) s"
    else
        FAILED+=("$name")
        echo "== $name: FAILED after $((SECONDS - start)) s"
    fi
    tail -n "${TAIL:-40}" "$OUT/$name.txt"
}

# share_gpu: from here on processes run on the GPU side by side instead of in turns (CUDA's MPS), where that is installed.
share_gpu() {
    [ "$DEVICE" = cuda ] && command -v nvidia-cuda-mps-control > /dev/null || return 0
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/hyptree-mps CUDA_MPS_LOG_DIRECTORY=/tmp/hyptree-mps
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
    echo get_server_list | nvidia-cuda-mps-control > /dev/null 2>&1 || nvidia-cuda-mps-control -d
}

# The last line of every script: its exit code says whether all went well.
finish() {
    if [ ${#FAILED[@]} -gt 0 ]; then
        echo "failed: ${FAILED[*]}; see $OUT/NAME.txt" >&2
        exit 1
    fi
}
