#!/usr/bin/env bash
# Hi-Mapper: what each of its parts is worth (docs/himapper.md, docs/RESULTS.md).
source "$(dirname "$0")/common.sh"
few=()
[ -n "$QUICK" ] && few=(schedule.steps=2 schedule.warmup=0 data.num_train=64 data.num_val=32 data.batch_size=8 data.eval_batch_size=32 run.precision=fp32)

arms() { # TABLE DATA
    "${HYPTREE[@]}" compare "recipes/$1.yaml" --out "$OUT/$1" --jobs "${JOBS:-6}" --overrides "data.root=$DATA/$2" \
        "model.weights=$DATA/weights/tf_efficientnet_lite0_fp16.safetensors" "run.device=$DEVICE" "${few[@]}"
}

share_gpu
step pets arms himapper_arms_pets oxford-pets/oxford_pets_128.npz
step tiny_imagenet arms himapper_arms tiny-imagenet-wordnet/tiny_imagenet_64.npz
finish
