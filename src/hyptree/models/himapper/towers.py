"""Vision models of transformers as backbones of a Hi-Mapper. Nothing of transformers is imported here."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.models.himapper.backbone import Features, Reader, grid_by_shape, grid_of_patches, kind_of, map_tokens
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


class TransformersReader(Reader):
    """A vision model of transformers, with its classifier or without."""

    def __init__(self, channels: int, pooled_channels: int, tower: str, pooling: str):
        super().__init__(channels, pooled_channels)
        self.tower, self.pooling = tower, pooling

    @classmethod
    def of(cls, backbone: nn.Module, channels: int | None, pooled_channels: int | None) -> TransformersReader:
        """The reader of one model."""
        config: Any = backbone.config
        vision = getattr(config, "vision_config", None) or config
        if vision is config and getattr(backbone, "main_input_name", "") != "pixel_values":
            raise ValueError(f"{kind_of(backbone)} takes no pictures (pixel_values); give a vision model")
        classifier = getattr(backbone, "classifier", None)
        names = (str(backbone.base_model_prefix), "vision_model") if classifier is not None else ("vision_model",)
        tower = next((name for name in names if isinstance(getattr(backbone, name, None), nn.Module)), "")
        kinds = {str(config.model_type), str(vision.model_type)}
        pooling = next((how for how, known in POOLINGS.items() if kinds & set(known)), None)
        has_two = any(hasattr(backbone, name) for name in ("distillation_classifier", "classifier_distill"))
        if has_two or (classifier is not None and pooling is None):
            raise ValueError(
                f"{kind_of(backbone)}: how a {config.model_type} comes to its logits is not known; pass feature_fn="
            )
        linear = [m for m in classifier.modules() if isinstance(m, nn.Linear)] if classifier is not None else []
        own = _hidden_size(vision)
        pooled = pooled_channels or (linear[0].in_features if linear else own)
        # A pooler or a mean keeps the channels, and the classifier knows best how many.
        width = channels or (pooled if linear and pooling != "first_and_mean" else own)
        if width is None or pooled is None:
            raise ValueError(
                f"{kind_of(backbone)} does not say how many channels it has; pass channels=, pooled_channels="
            )
        return cls(width, pooled, tower, pooling if classifier is not None and pooling is not None else "bare")

    def plain(self, backbone: nn.Module, x: Tensor) -> Tensor:
        if self.pooling == "bare":
            return self._features(backbone, x).pooled
        return backbone(pixel_values=x).logits

    def read(self, backbone: nn.Module, x: Tensor) -> Features:
        features = self._features(backbone, x)
        classifier = getattr(backbone, "classifier", None)
        if isinstance(classifier, nn.Module):
            dropout = getattr(backbone, "dropout", None)
            before = dropout if isinstance(dropout, nn.Dropout) else nn.Identity()
            features.classify = lambda v, delta: classifier(before(v))
        else:
            features.classify = lambda v, delta: v
        return features

    def _called(self, backbone: nn.Module, x: Tensor) -> Any:
        """What the tower gives, inside a call of the backbone where anything stands around that."""
        if not self.tower:
            return backbone(pixel_values=x)
        tower = backbone.get_submodule(self.tower)
        if is_free(backbone):
            return tower(pixel_values=x)
        given: list[Any] = []
        handle = tower.register_forward_hook(lambda module, args, out: given.append(out))
        try:
            backbone(pixel_values=x)
        finally:
            handle.remove()
        return given[0]

    def _features(self, backbone: nn.Module, x: Tensor) -> Features:
        out = self._called(backbone, x)
        name, f = kind_of(backbone), getattr(out, "last_hidden_state", None)
        if not isinstance(f, Tensor):
            raise TypeError(
                f"{name} gives {type(out).__name__}, expected last_hidden_state with one map or row of tokens; "
                "pass feature_fn= to say what to read"
            )
        if f.dim() == 4:
            tokens, grid = map_tokens(backbone, f, self.channels)
        else:
            tokens, grid = _patch_tokens(backbone, f, x)
        pooler: Tensor | None = getattr(out, "pooler_output", None)
        if pooler is not None and self.pooling in ("pooler", "bare"):
            pooled = pooler.flatten(1)
        elif self.pooling == "all":
            pooled = f.mean(1)
        elif self.pooling == "mean" or f.dim() == 4:
            pooled = tokens.mean(1)
        else:
            pooled = f[:, 0]
            if self.pooling == "first_and_mean":
                pooled = torch.cat([pooled, tokens.mean(1)], -1)
        return Features(tokens, grid, pooled)


def _patch_tokens(backbone: nn.Module, f: Tensor, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    config: Any = backbone.config
    config = getattr(config, "vision_config", None) or config
    grid = grid_of_patches(getattr(config, "patch_size", None), x)
    if grid is not None:
        num_prefix = f.shape[1] - math.prod(grid)
        # Class token, distillation token, registers; a pyramid has fewer tokens than patches.
        if 0 <= num_prefix <= 2 + int(getattr(config, "num_register_tokens", 0) or 0):
            return f[:, num_prefix:], grid
    for num_prefix in (0, 1):
        by_shape = grid_by_shape(f.shape[1] - num_prefix, x)
        if by_shape is not None:
            return f[:, num_prefix:], by_shape
    raise ValueError(
        f"{kind_of(backbone)} has no spatial features: {f.shape[1]} tokens of a {tuple(x.shape[-2:])} picture fill no "
        "grid; pass feature_fn="
    )


def _hidden_size(config: Any) -> int | None:
    size = getattr(config, "hidden_size", None)
    if size is None:
        sizes = getattr(config, "neck_hidden_sizes", None) or getattr(config, "hidden_sizes", None)
        size = sizes[-1] if sizes else getattr(config, "hidden_dim", None)
    return size
