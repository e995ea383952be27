"""A CLIP of the world's words whose weights do not depend on any library's way of drawing fresh ones."""

from __future__ import annotations

from pathlib import Path

import torch

from hyptree.vlm.clip.world_clip import build_clip, preset
from hyptree.vlm.clip.world_text import world_tokenizer
from hyptree.vlm.encoders.pixels import PixelFormat
from hyptree.vlm.encoders.transformers import HfEncoder

PROBES = ["", "a vehicle", "a red truck", "a dog in a meadow at night"]


def save_golden_clip(folder: Path) -> str:
    """Write the CLIP; gives its name for a recipe."""
    tokenizer = world_tokenizer()
    clip = build_clip(preset("clip-world-tiny"), len(tokenizer))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(clip.named_parameters()):
            scale = 0.2 if parameter.dim() > 1 else 0.02
            centre = 1.0 if parameter.dim() == 1 and parameter.mean() == 1 else 0.0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
        clip.logit_scale.fill_(2.6)
    HfEncoder(clip, "golden", tokenizer, PixelFormat(32)).save(folder)
    return f"hf:{folder}"
