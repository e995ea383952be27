"""Semantic segmentation: the decoder of Semantic FPN (Kirillov et al. 2019) on a feature pyramid."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.models.decoders.pyramid import Checkpointed, Pyramid

NORM_GROUPS = 32


class SemanticFPN(nn.Module):
    """Class scores at the finest stride from a pyramid of feature maps.

    Level ``i`` (0 is the finest) goes through ``max(i, 1)`` times (3x3 convolution, group norm, ReLU), each followed by
    bilinear upsampling to the size of the next finer level; the levels are added and a 1x1 convolution classifies.
    Upsampling goes to the size of the map, not by two, so every input size works.

    Args:
        num_levels: of the pyramid.
        in_channels: of each of its maps.
        num_classes: scores per pixel.
        channels: width inside.
        dropout: share of channels set to zero before the classifier while training.

    Shape:
        ``num_levels`` maps (B, in_channels, H_i, W_i), finest first -> (B, num_classes, H_0, W_0).
    """

    def __init__(self, num_levels: int, in_channels: int, num_classes: int, channels: int = 128, dropout: float = 0.0):
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        if channels % NORM_GROUPS:
            raise ValueError(f"channels must be a multiple of {NORM_GROUPS} (groups of the norm), got {channels}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.chains = nn.ModuleList(
            nn.ModuleList(_conv_norm_relu(channels if step else in_channels, channels) for step in range(max(level, 1)))
            for level in range(num_levels)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        if len(levels) != len(self.chains):
            raise ValueError(f"expected {len(self.chains)} feature maps, got {len(levels)}")
        sizes = [level.shape[-2:] for level in levels]
        total: Tensor | None = None
        for i, (x, chain) in enumerate(zip(levels, self.chains, strict=True)):
            assert isinstance(chain, nn.ModuleList)
            for step, layer in enumerate(chain):
                x = _resize(layer(x), sizes[max(i - 1 - step, 0)])
            total = x if total is None else total + x
        assert total is not None
        return self.classifier(self.dropout(total))


class Segmenter(Checkpointed, nn.Module):
    """Scores of every pixel: a backbone, its pyramid and a Semantic FPN decoder.

    Args:
        backbone: gives features of several strides, see ``pyramid_backbone``.
        num_classes: semantic classes.
        pyramid_channels: width of the pyramid. channels: width of the decoder. dropout: before the classifier.

    Shape:
        images (B, 3, H, W) -> logits (B, num_classes, H, W), any H and W the backbone takes.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        *,
        pyramid_channels: int = 256,
        channels: int = 128,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_classes = num_classes
        self.pyramid = Pyramid(backbone, pyramid_channels)
        self.decoder = SemanticFPN(len(self.pyramid.strides), pyramid_channels, num_classes, channels, dropout)

    def forward(self, images: Tensor) -> Tensor:
        return _resize(self.decoder(self.pyramid(images)), images.shape[-2:])


def _conv_norm_relu(in_channels: int, channels: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.GroupNorm(NORM_GROUPS, channels), nn.ReLU(inplace=True))


def _resize(x: Tensor, size: Sequence[int]) -> Tensor:
    if x.shape[-2:] == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
