#!/usr/bin/env bash
# HELM and a Llama of equal shape on 15 MB of Wikipedia: 2,000 steps, three seeds, all six at once (docs/RESULTS.md).
source "$(dirname "$0")/common.sh"
tiny=() text=wiki_train.txt.xz
[ -n "$QUICK" ] && text=wikitext2_valid.txt.xz tiny=(--schedule.steps 4 --schedule.warmup 1 --text.vocab-size 512 --text.block-length 32 --data.batch-size 2
    --run.precision fp32 --model.args "{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64}")

learn() { # helm|llama SEED
    "${HYPTREE[@]}" train "recipes/$1_wiki.yaml" --out "$OUT/wiki/$1-$2" --run.seed "$2" --run.device "$DEVICE" --run.compile false \
        --text.path "[$DATA/text/$text]" --text.val-path "[$DATA/text/wiki_valid.txt.xz]" "${tiny[@]}" \
        $([ -d "$OUT/wiki/$1-$2" ] && echo --resume)
}

all() {
    local pids=() code=0
    for seed in 0 1 2; do
        for model in helm llama; do
            learn "$model" "$seed" > "$OUT/wiki-$model-$seed.txt" 2>&1 &
            pids+=($!)
        done
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=1; done
    tail -n 3 "$OUT"/wiki-*.txt
    return $code
}

share_gpu
step wiki all
finish
