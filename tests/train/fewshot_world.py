"""A CLIP of two blocks with weights that no library draws, which reads the classes of the built-in world."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hyptree.data.world import World

SPECIAL = ["<pad>", "<bos>", "<unk>", "<eos>"]


def save_world_clip(folder: Path, seed: int = 0) -> Path:
    """A folder of transformers; every weight is a function of its name's place and the seed alone."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    classes = World("val", 1, size=32).classes
    words = sorted({word for name in classes for word in name.replace("_", " ").split()})
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "a", "photo", "of", ".", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=tower | text | {"eos_token_id": 3},
        vision_config=tower | {"patch_size": 8, "image_size": 32},
        projection_dim=24,
    )
    model = transformers.CLIPModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            size = 0.5 if "embedding" in name else p.shape[-1] ** -0.5 if p.dim() > 1 else 0.0
            p.copy_(torch.randn(p.shape, generator=generator) * size)
            if "norm" in name and name.endswith("weight"):
                p.fill_(1.0)
        model.logit_scale.fill_(3.0)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["projection_dim"] == 24
    return folder
