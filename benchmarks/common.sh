# What the scripts share: where things are, and a step that says how long it took. Sourced, not run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra RAMIFY <<< "${RAMIFY:-ramify}"
OUT=${OUT:-runs/benchmarks}
DATA=${DATA:-../shared/data}
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

# The last line of every script: its exit code says whether all went well.
finish() {
    if [ ${#FAILED[@]} -gt 0 ]; then
        echo "failed: ${FAILED[*]}; see $OUT/NAME.txt" >&2
        exit 1
    fi
}
