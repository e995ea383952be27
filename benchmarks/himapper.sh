#!/usr/bin/env bash
# Hi-Mapper: what each of its parts is worth (docs/himapper.md, docs/RESULTS.md).
source "$(dirname "$0")/common.sh"
few=()
[ -n "$QUICK" ] && few=(schedule.steps=2 schedule.warmup=0 data.workers=0)

arms() { # TABLE DATA
    "${RAMIFY[@]}" compare "recipes/$1.yaml" --out "$OUT/$1" --jobs "${JOBS:-4}" --overrides "data.root=$DATA/$2" \
        "model.weights=$DATA/weights/tf_efficientnet_lite0_fp16.safetensors" "run.device=$DEVICE" data.cache=true data.workers=2 "${few[@]}"
}

share_gpu
step pets arms himapper_arms_pets oxford-pets/oxford_pets_128.npz
step tiny_imagenet arms himapper_arms tiny-imagenet-wordnet/tiny_imagenet_64.npz
finish
