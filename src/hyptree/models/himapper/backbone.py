"""Reading a backbone: its last feature map as tokens, its global feature, and the classifier behind it.

timm models answer by their own interface, models of transformers by what their base model returns, everything else by
a hook. A reader holds no module, so that the backbone stays where it is and copies of a wrapper stay independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.bare import is_bare, is_free

Classify = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Features:
    """What a Hi-Mapper needs of one forward pass; a ``feature_fn(backbone, x)`` returns it.

    Attributes:
        tokens: (B, M, C) the last feature map, row by row, without class or register tokens.
        grid: (H, W) with ``H W = M``. pooled: (B, Cv) the global feature.
        classify: logits of the enriched global feature (B, Cv) and of what was added to it (B, Cv). None becomes the
            backbone's ``get_classifier()`` on the first of the two, or the feature itself if there is none.
        row: (B, P + M, C) where the tokens are the last M of a longer row: the same values, for who works token by
            token. Compiled code then makes the backbone's last norm and ours in one kernel, which a slice between them
            forbids.
    """

    tokens: Tensor
    grid: tuple[int, int]
    pooled: Tensor
    classify: Classify | None = None
    row: Tensor | None = None


@dataclass
class Reader:
    """How one kind of backbone is read: a backbone and pictures (B, 3, H, W) to features.

    Attributes:
        channels: C of the tokens. pooled_channels: Cv of the global feature.
        has_logits: whether calling the backbone gives logits; else its own answer is the global feature.
    """

    channels: int
    pooled_channels: int
    read: Callable[[nn.Module, Tensor], Features]
    has_logits: bool = True

    def plain(self, backbone: nn.Module, x: Tensor) -> Tensor:
        """What the backbone gives by itself."""
        if not self.has_logits:
            return self.read(backbone, x).pooled
        out = backbone(x)
        return getattr(out, "logits", out)

    def checked(self, backbone: nn.Module, x: Tensor) -> Features:
        """``read``, after a look at the shapes."""
        features, name = self.read(backbone, x), type(backbone).__name__
        if not isinstance(features, Features):
            raise TypeError(f"feature_fn returned {type(features).__name__}, expected hyptree.models.himapper.Features")
        if features.tokens.dim() != 3 or features.tokens.shape[1] != math.prod(features.grid):
            raise ValueError(
                f"{name}: tokens of shape {tuple(features.tokens.shape)} do not fill the grid {features.grid}, "
                "expected (B, H*W, C); correct feature_fn"
            )
        got = features.tokens.shape[-1], features.pooled.shape[-1]
        if got != (self.channels, self.pooled_channels) or features.pooled.dim() != 2:
            raise ValueError(
                f"{name}: tokens have {got[0]} channels and the global feature is {tuple(features.pooled.shape)}, "
                f"expected {self.channels} and (B, {self.pooled_channels}); pass channels={got[0]}, "
                f"pooled_channels={got[1]}"
            )
        row = features.tokens if features.row is None else features.row
        if row.dim() != 3 or row.shape[1] < features.tokens.shape[1] or row.shape[-1] != self.channels:
            raise ValueError(
                f"{name}: the row {tuple(row.shape)} does not end with the tokens {tuple(features.tokens.shape)}; "
                "correct or leave out row in feature_fn"
            )
        if features.classify is None:
            features.classify = partial(_apply_own, backbone)
        return features


def _apply_own(backbone: nn.Module, enriched: Tensor, delta: Tensor) -> Tensor:
    classifier = getattr(backbone, "get_classifier", None)
    return apply_classifier(classifier(), enriched) if callable(classifier) else enriched


def make_reader(
    backbone: nn.Module,
    feature_fn: Callable[[nn.Module, Tensor], Features] | None = None,
    channels: int | None = None,
    pooled_channels: int | None = None,
) -> Reader:
    """The reader of a backbone.

    Args:
        feature_fn: overrides the way a backbone is read.
        channels, pooled_channels: override what the backbone says about itself.
    """
    name = type(backbone).__name__
    is_timm = callable(getattr(backbone, "forward_features", None)) and callable(
        getattr(backbone, "forward_head", None)
    )
    if feature_fn is not None or is_timm:
        channels = channels or getattr(backbone, "num_features", None)
        if channels is None:
            raise ValueError(f"{name} does not say its num_features; pass channels= along with feature_fn")
        own = getattr(backbone, "head_hidden_size", None) or getattr(backbone, "num_features", None) or channels
        return Reader(channels, pooled_channels or own, feature_fn or partial(read_timm, channels))
    if hasattr(backbone, "config") and hasattr(backbone, "base_model_prefix"):
        from hyptree.models.himapper.towers import transformers_reader

        return transformers_reader(backbone, channels, pooled_channels)
    raise ValueError(
        f"{name} is neither a timm model with spatial features (forward_features, forward_head) nor a vision model of "
        "transformers; pass feature_fn=, which returns hyptree.models.himapper.Features"
    )


def read_timm(channels: int, backbone: nn.Module, x: Tensor) -> Features:
    """Any timm model whose ``forward_features`` gives one map or one row of tokens."""
    f, name = _forward_features(backbone, x), type(backbone).__name__
    if not isinstance(f, Tensor):
        raise TypeError(
            f"{name}: forward_features gives a {type(f).__name__}, expected one map or row of tokens; pass feature_fn= "
            "to say which of them to read"
        )
    pooled = backbone.forward_head(f, pre_logits=True).flatten(1)  # type: ignore[operator]
    row = None
    if f.dim() == 4:
        tokens, grid = map_tokens(backbone, f, channels, str(getattr(backbone, "output_fmt", "")))
    elif f.dim() == 3:
        embed, num_prefix = getattr(backbone, "patch_embed", None), int(getattr(backbone, "num_prefix_tokens", 0))
        grids = [getattr(embed, "grid_size", None), grid_of_patches(getattr(embed, "patch_size", None), x)]
        # CaiT and XCiT do not declare their class token.
        tokens, grid = row_tokens(backbone, f, x, grids, range(num_prefix, num_prefix + 2))
        row = f
    else:
        raise ValueError(
            f"{name} has no spatial features: forward_features gives {tuple(f.shape)}, expected a map (B, C, H, W) or "
            "tokens (B, M, C); take another backbone or pass feature_fn="
        )
    return Features(tokens, grid, pooled, partial(_logits, backbone, f), row)


def _forward_features(backbone: nn.Module, x: Tensor) -> Any:
    """``forward_features``, inside a call where anything stands around it: hooks, offloaded weights that come for one.

    A hook then sees features in place of logits.
    """
    if is_free(backbone):
        return backbone.forward_features(x)  # type: ignore[operator]
    backbone.forward_head = lambda f, *args, **options: f  # type: ignore[assignment]
    try:
        return backbone(x)
    finally:
        del backbone.forward_head


def _logits(backbone: nn.Module, f: Tensor, enriched: Tensor, delta: Tensor) -> Tensor:
    """The classifier on the enriched global feature, or what was added as each classifier there is maps it.

    The second form is for backbones whose logits are more than one classifier on the global feature: of a distilled
    DeiT two classifiers have a token each and are averaged, of a VOLO a second one looks at the patches. All are
    linear, so it is exact. LeViT's two have a norm in front and share the global feature.
    """
    classifier = backbone.get_classifier()  # type: ignore[operator]
    heads = list(classifier) if isinstance(classifier, tuple | list | nn.ModuleList) else [classifier]
    if len(heads) == 1 and getattr(backbone, "aux_head", None) is None:
        return apply_classifier(heads[0], enriched)
    if any(isinstance(module, _NORMS) for head in heads for module in head.modules()):
        return torch.stack([apply_classifier(head, enriched) for head in heads]).mean(0)
    logits = backbone.forward_head(f)  # type: ignore[operator]
    if isinstance(logits, tuple):  # one per head while distilling
        logits = torch.stack(logits).mean(0)
    nothing = torch.zeros_like(delta)
    added = [F.linear(delta, h.weight) if is_bare(h) else h(delta) - h(nothing) for h in heads]
    return logits + torch.stack(added).mean(0)


_NORMS = nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm


def apply_classifier(classifier: nn.Module, pooled: Tensor) -> Tensor:
    """(B, Cv) -> (B, classes), also where the classifier is a convolution or stands inside a head with its pooling."""
    inner = getattr(classifier, "fc", None)
    classifier = inner if isinstance(inner, nn.Module) else classifier
    if isinstance(classifier, nn.Conv2d):
        return classifier(pooled[:, :, None, None]).flatten(1)
    return classifier(pooled)


def map_tokens(backbone: nn.Module, f: Tensor, channels: int, fmt: str = "") -> tuple[Tensor, tuple[int, int]]:
    """A map as (B, M, C) tokens and its (H, W); channels last if ``fmt`` says NHWC or only the last axis fits."""
    last = fmt.endswith("NHWC") or (f.shape[1] != channels and f.shape[-1] == channels)
    if f.shape[-1 if last else 1] != channels:
        raise ValueError(
            f"{type(backbone).__name__}: no axis of the map {tuple(f.shape)} has the expected {channels} channels; "
            "pass channels= as it is"
        )
    # Channels are moved before places are joined: with f.flatten(2) first, compiled code would store the map of a
    # convolution, whose channels lie next to each other, in another order and read it across.
    f = f if last else f.permute(0, 2, 3, 1)
    return f.flatten(1, 2), (f.shape[1], f.shape[2])


def row_tokens(
    backbone: nn.Module, f: Tensor, x: Tensor, grids: Sequence[tuple[int, int] | None], prefixes: Sequence[int]
) -> tuple[Tensor, tuple[int, int]]:
    """A row of tokens without those in front that stand for no place, and the grid of the others.

    Args:
        grids: what the others may fill. prefixes: how many there may be in front; the first two are also tried where no
            grid fits, with a grid of the picture's proportions.
    """
    for num_prefix in prefixes:
        for grid in grids:
            if grid is not None and math.prod(grid) == f.shape[1] - num_prefix:
                return f[:, num_prefix:], (int(grid[0]), int(grid[1]))
    ratio = x.shape[-2] / x.shape[-1]
    for num_prefix in prefixes[:2]:
        count = f.shape[1] - num_prefix
        height, width = round(math.sqrt(count * ratio)), round(math.sqrt(count / ratio))
        if height * width == count > 1:
            return f[:, num_prefix:], (height, width)
    raise ValueError(
        f"{type(backbone).__name__} has no spatial features: {f.shape[1] - prefixes[0]} tokens of a "
        f"{tuple(x.shape[-2:])} picture fill no grid; take another backbone or pass feature_fn="
    )


def grid_of_patches(patch_size: Any, x: Tensor) -> tuple[int, int] | None:
    """How many patches a picture has along each axis."""
    if patch_size is None:
        return None
    h, w = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    return x.shape[-2] // int(h), x.shape[-1] // int(w)
