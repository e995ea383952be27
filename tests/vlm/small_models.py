"""Tiny encoders on disk: a folder of transformers for each family, with a tokenizer of words, and one of open_clip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ["a", "red", "truck", "car", "vehicle", "road", "with", "three", "wheels", "on", "the", "at", "night"]


def word_tokenizer() -> Any:
    """Words to numbers, ``<bos> ... <eos>``, padded on the right.

    The end is no token 2: transformers takes a CLIP with that number for an old one and looks for the largest token.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def _towers(**image: Any) -> dict[str, Any]:
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 4 + len(WORDS), "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1}
    return {
        "text_config": common | text | {"eos_token_id": 3, "projection_size": 32},
        "vision_config": common | {"patch_size": 8} | image,
    }


def save_dual(folder: Path, family: str, seed: int = 0, tokenizer: bool = True) -> Path:
    """A folder of ``clip``, ``siglip`` or ``siglip2`` with random weights that count as trained ones."""
    import torch
    import transformers

    kind = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}[family]
    image = {"num_patches": 16} if family == "siglip2" else {"image_size": 32}
    extra = {"projection_dim": 24} if family == "clip" else {}
    config = getattr(transformers, f"{kind}Config")(**_towers(**image), **extra)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    if tokenizer:
        word_tokenizer().save_pretrained(folder)
    return folder


def save_bert(folder: Path, pooling: dict[str, Any] | None, seed: int = 0) -> Path:
    """A folder of a small BERT, as sentence encoders are kept."""
    import torch
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(BertConfig(vocab_size=4 + len(WORDS), max_position_embeddings=12, **sizes))
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def register_open_clip(folder: Path, name: str = "hyptree-test-tiny") -> str:
    """Makes open_clip know a tiny model; gives its name."""
    import open_clip

    config = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    return name
