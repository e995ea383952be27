"""Small timm models of every kind that can be reduced, with weights large enough that tokens differ."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn

NUM_PATCHES = 36
IMAGE = 24
LAYERS = (1, 2)
"""Blocks that reduce in these tests; the models have four."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "deit": ("deit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True}),
    "registers_avg": ("vit_medium_patch16_reg4_gap_256", {}),
    "avg": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
    "avg_with_class": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "max": ("vit_tiny_patch16_224", {"global_pool": "max"}),
    "attention_pool": ("vit_base_patch16_siglip_224", {}),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "clip": ("vit_base_patch16_clip_224", {}),
    "dinov2": ("vit_small_patch14_dinov2", {}),
}


def small_model(kind: str = "vit", **changes: Any) -> nn.Module:
    """A fresh model in evaluation mode, always with the same weights. ``changes`` go to timm's constructor."""
    name, options = KINDS[kind]
    size = {"img_size": IMAGE, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 7}
    # The initial weights would be overwritten; drawing them is what takes time.
    model = timm.create_model(name, **{**size, "weight_init": "skip", **options, **changes})
    generator = torch.Generator().manual_seed(len(kind))
    for key, weight in model.named_parameters():
        is_scale = weight.ndim == 1 and key.endswith("weight")
        centre = 1.0 if is_scale else 0.3 if key.endswith("gamma") else 0.0
        weight.data = centre + 0.15 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def images(num: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random pictures of the right size."""
    return torch.randn(num, 3, IMAGE, IMAGE, dtype=dtype)


def hooks_of(model: nn.Module) -> list[str]:
    """Names of the modules that have a hook."""
    return [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
