#!/usr/bin/env bash
# Every kernel beside its definition, its rival and its bytes; HCFormer beside Swin and ConvNeXt (docs/BENCHMARKS.md).
source "$(dirname "$0")/common.sh"
quick=()
[ -n "$QUICK" ] && quick=(--quick)

measure() { # BENCHMARK FLAGS...
    "${HYPTREE[@]}" bench "$1" --device "$DEVICE" --out "$OUT/$1.jsonl" "${@:2}"
}

step kernels measure kernels --time-limit 200 "${quick[@]}"
step hcformer measure hcformer --tables throughput --time-limit 240 "${quick[@]}"
step pairwise measure geometry --ops pairwise "${quick[@]}"
finish
