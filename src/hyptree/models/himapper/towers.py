"""Vision models of transformers as backbones of a Hi-Mapper. Nothing of transformers is imported here."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.models.himapper.backbone import Features, Reader, grid_of_patches, map_tokens, row_tokens
from hyptree.ops.bare import is_free

# What the classifier of each kind of model reads: its pooler's output, the first token, the mean of the patches, of all
# tokens, or the first token beside the mean of the patches.
POOLINGS = {
    "first": ("vit", "deit", "vit_msn"),
    "first_and_mean": ("dinov2", "dinov2_with_registers"),
    "mean": ("clip", "clip_vision_model", "pvt_v2"),
    "all": ("siglip", "siglip_vision_model", "levit", "ijepa"),
    "pooler": (
        *("swin", "swinv2", "resnet", "regnet", "convnext", "convnextv2", "beit", "data2vec-vision", "efficientnet"),
        *("mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "hiera", "focalnet"),
    ),
}


def transformers_reader(backbone: nn.Module, channels: int | None, pooled_channels: int | None) -> Reader:
    """The reader of a vision model of transformers, with its classifier or without."""
    config: Any = backbone.config
    vision, name = getattr(config, "vision_config", None) or config, type(backbone).__name__
    if vision is config and getattr(backbone, "main_input_name", "") != "pixel_values":
        raise ValueError(f"{name} takes no pictures (pixel_values); give a vision model")
    classifier = getattr(backbone, "classifier", None)
    names = (str(backbone.base_model_prefix), "vision_model") if classifier is not None else ("vision_model",)
    tower = next((name for name in names if isinstance(getattr(backbone, name, None), nn.Module)), "")
    kinds = {str(config.model_type), str(vision.model_type)}
    pooling = next((how for how, known in POOLINGS.items() if kinds & set(known)), None)
    has_two = any(hasattr(backbone, name) for name in ("distillation_classifier", "classifier_distill"))
    if has_two or (classifier is not None and pooling is None):
        raise ValueError(f"{name}: how a {config.model_type} comes to its logits is not known; pass feature_fn=")
    linear = [m for m in classifier.modules() if isinstance(m, nn.Linear)] if classifier is not None else []
    own = _hidden_size(vision)
    pooled = pooled_channels or (linear[0].in_features if linear else own)
    # A pooler or a mean keeps the channels, and the classifier knows best how many.
    width = channels or (pooled if linear and pooling != "first_and_mean" else own)
    if width is None or pooled is None:
        raise ValueError(f"{name} does not say how many channels it has; pass channels=, pooled_channels=")
    how = pooling if classifier is not None and pooling is not None else "bare"
    return Reader(width, pooled, partial(_read, width, tower, how), has_logits=how != "bare")


def _read(channels: int, tower: str, pooling: str, backbone: nn.Module, x: Tensor) -> Features:
    """Features of a tower, pooled as its classifier reads them, ``bare`` without one."""
    out, name = _called(backbone, tower, x), type(backbone).__name__
    f = getattr(out, "last_hidden_state", None)
    if not isinstance(f, Tensor):
        raise TypeError(
            f"{name} gives {type(out).__name__}, expected last_hidden_state with one map or row of tokens; pass "
            "feature_fn= to say what to read"
        )
    if f.dim() == 4:
        tokens, grid = map_tokens(backbone, f, channels)
    else:
        config: Any = backbone.config
        config = getattr(config, "vision_config", None) or config
        # Class token, distillation token, registers; a pyramid has fewer tokens than patches.
        most = 2 + int(getattr(config, "num_register_tokens", 0) or 0)
        grids = [grid_of_patches(getattr(config, "patch_size", None), x)]
        tokens, grid = row_tokens(backbone, f, x, grids, range(most + 1))
    pooler: Tensor | None = getattr(out, "pooler_output", None)
    if pooler is not None and pooling in ("pooler", "bare"):
        pooled = pooler.flatten(1)
    elif pooling == "all":
        pooled = f.mean(1)
    elif pooling == "mean" or f.dim() == 4:
        pooled = tokens.mean(1)
    else:
        pooled = f[:, 0]
        if pooling == "first_and_mean":
            pooled = torch.cat([pooled, tokens.mean(1)], -1)
    return Features(tokens, grid, pooled, partial(_classify, backbone))


def _called(backbone: nn.Module, tower: str, x: Tensor) -> Any:
    """What the tower gives, inside a call of the backbone where anything stands around that."""
    if not tower or is_free(backbone):
        return (backbone.get_submodule(tower) if tower else backbone)(pixel_values=x)
    outputs: list[Any] = []
    handle = backbone.get_submodule(tower).register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        backbone(pixel_values=x)
    finally:
        handle.remove()
    return outputs[0]


def _classify(backbone: Any, enriched: Tensor, delta: Tensor) -> Tensor:
    if not isinstance(getattr(backbone, "classifier", None), nn.Module):
        return enriched
    dropout = getattr(backbone, "dropout", None)
    return backbone.classifier(dropout(enriched) if isinstance(dropout, nn.Dropout) else enriched)


def _hidden_size(config: Any) -> int | None:
    size = getattr(config, "hidden_size", None)
    if size is None:
        sizes = getattr(config, "neck_hidden_sizes", None) or getattr(config, "hidden_sizes", None)
        size = sizes[-1] if sizes else getattr(config, "hidden_dim", None)
    return size
