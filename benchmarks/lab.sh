#!/usr/bin/env bash
# Superposition: exponents with more active features, in curved space, from biases that start at zero, and of weak models (docs/lab.md).
source "$(dirname "$0")/common.sh"
small=()
[ -n "$QUICK" ] && small=(--m 4 6 9 --steps 20 --batch 32 --eval-samples 256)

sweep() { # FOLDER FLAGS...; --resume goes on with what a stop has left
    local folder=$OUT/$1
    shift
    local resume=()
    [ -d "$folder" ] && resume=(--resume)
    "${HYPTREE[@]}" lab sweep --device "$DEVICE" --out "$folder" --checkpoint-seconds 30 "$@" "${small[@]}" "${resume[@]}"
}

step density sweep density --preset paper-density --gamma -1 -0.556
step curvature sweep curvature --preset curvature-grid --seeds 1
# The two exponents that stay below the published ones with normal biases (docs/lab.md).
step zero_bias sweep zero_bias --preset paper-grid --alpha 1.875 2 --gamma -1 --seeds 7 --bias-init zero
# What biases at zero do to the others, which agree with normal ones already.
step zero_bias_alphas sweep zero_bias_alphas --preset paper-grid --gamma -1 --bias-init zero
# The weak exponent whose published point lies above ours, with seven starts (docs/lab.md).
step weak sweep weak --preset paper-grid --alpha 1.5 --gamma 0.3333333333333333 0.5555555555555556 --seeds 7
finish
