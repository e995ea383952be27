#!/usr/bin/env bash
# What a step of HELM costs beside its Euclidean twin, and decoding with the latent cache (docs/BENCHMARKS.md).
source "$(dirname "$0")/common.sh"

helm() {
    if [ -n "$QUICK" ]; then set -- "$1" --sections step decode --presets helm-d-pico --modes eager --repeats 2 --length 16 --context 16; fi
    local name=$1
    shift
    "${RAMIFY[@]}" bench helm --device "$DEVICE" --out "$OUT/$name.jsonl" "$@"
}

step one_billion helm one_billion --sections step --presets helm-d-1b-aligned --vocab 128256 --modes compiled --profile
step small helm small --sections step --presets helm-d-115m-aligned --vocab 8192 128256 --modes graphs
step experts helm experts --sections step --presets helm-mice-120m-aligned --modes graphs --profile
step decode helm decode --sections decode --presets helm-mice-120m-aligned --modes eager graphs
finish
