#!/usr/bin/env bash
# A CLIP of our own with three seeds, then everything that attaches to it, seed by seed (docs/RESULTS.md).
source "$(dirname "$0")/common.sh"
clips=$OUT/clip shots=() few=() radial=() chains=()
if [ -n "$QUICK" ]; then
    few=(schedule.steps=2 schedule.warmup=0 data.num_train=600 data.num_val=40)
    shots=(schedule.steps=2 schedule.warmup=0 data.num_train=400 data.num_val=60 fewshot.shots=1) radial=(--data.num_train 40) chains=(--limit 40)
fi

clip() { "${HYPTREE[@]}" compare recipes/compare_clip.yaml --out "$clips" --jobs "${JOBS:-6}" --overrides "run.device=$DEVICE" "${few[@]}"; }

openvocab() {
    "${HYPTREE[@]}" compare recipes/compare_openvocab.yaml --out "$OUT/openvocab" --jobs "${JOBS:-6}" --overrides "run.device=$DEVICE" \
        "model.name=hf:$clips/clip/seed{seed}" "${few[@]}"
}

each_seed() { # COMMAND: runs `COMMAND SEED` for three seeds at once
    local pids=() code=0
    for seed in 0 1 2; do
        "$1" "$seed" > "$OUT/$1-$seed.txt" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=1; done
    for seed in 0 1 2; do tail -n 25 "$OUT/$1-$seed.txt"; done
    return $code
}

fewshot() {
    "${HYPTREE[@]}" compare recipes/compare_fewshot.yaml --out "$OUT/fewshot" --jobs "${JOBS:-6}" --overrides "run.device=$DEVICE" \
        "model.name=hf:$clips/clip/seed{seed}" "fewshot.cache=$OUT/features" "${shots[@]}"
}

radial() { # SEED
    local model=hf:$clips/clip/seed$1 run=$OUT/radial-$1 suites=(--suite world-text world-images --device "$DEVICE")
    "${HYPTREE[@]}" vlm eval-hierarchy --model "$model" "${suites[@]}" --out "$OUT/order-$1" "${chains[@]}" &&
        rm -rf "$run" && "${HYPTREE[@]}" train recipes/radial_world.yaml --model.name "$model" --data.num_train 2000 --data.seed "$1" \
            --run.seed "$1" --run.device "$DEVICE" --out "$run" "${radial[@]}" &&
        "${HYPTREE[@]}" vlm eval-hierarchy --model "$run" "${suites[@]}" --out "$OUT/order-radial-$1" "${chains[@]}"
}

share_gpu
step clip clip
step openvocab openvocab
step fewshot fewshot
step radial each_seed radial
finish
