#!/usr/bin/env bash
# Everything that is timed against a target, in one go: what compiles for minutes gets ready at the same time, and each is timed alone.
source "$(dirname "$0")/common.sh"
turns=$(mktemp -d)/turns
quick=()
[ -n "$QUICK" ] && quick=(--quick)
parallel=(one_billion small small_head experts decode deit resnet adapters)

timed() { # NAME BENCHMARK FLAGS...
    local name=$1 benchmark=$2
    shift 2
    HYPTREE_TURNS=$turns:${#parallel[@]} "${HYPTREE[@]}" bench "$benchmark" --device "$DEVICE" --out "$OUT/$name.jsonl" "$@" "${quick[@]}" > "$OUT/$name.txt" 2>&1
}

one_billion() { timed one_billion helm --sections step --presets helm-d-1b-aligned --vocab 128256 --modes compiled --profile; }
small() { timed small helm --sections step --presets helm-d-115m-aligned --vocab 8192 --modes graphs; }
small_head() { timed small_head helm --sections step --presets helm-d-115m-aligned --vocab 128256 --modes graphs; }
experts() { timed experts helm --sections step --presets helm-mice-120m-aligned --modes graphs; }
decode() { timed decode helm --sections decode --presets helm-mice-120m-aligned --modes graphs; }
himapper() { timed "$1" himapper --models "$2" --modes graphs --passes inference --tables speed; }
deit() { himapper deit deit_small_patch16_224; }
resnet() { himapper resnet resnet50; }
adapters() { timed adapters vlm; }

together() {
    local pids=() name code=0
    for name in "${parallel[@]}"; do
        "$name" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=1; done
    for name in "${parallel[@]}"; do
        echo "-- $name"
        grep -E '^\||MISSED|met$|rror' "$OUT/$name.txt" | head -n 60
    done
    return $code
}

TAIL=${TAIL:-400}
step together together
finish
