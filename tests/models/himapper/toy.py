"""A backbone that costs nothing and answers as timm's do."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.models import HiMapper


class ToyBackbone(nn.Module):
    """Two convolutions, a mean, a classifier."""

    def __init__(self, channels: int = 24, classes: int = 5, in_chans: int = 3):
        super().__init__()
        self.num_features = channels
        self.stem = nn.Conv2d(in_chans, channels, 4, 4)
        self.body = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels, classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        return x + F.gelu(self.body(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean((2, 3))
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def mapper(backbone: nn.Module | None = None, **options) -> HiMapper:
    """A small Hi-Mapper, whose last layer is not zero: what it reads matters, unlike at the start."""
    model = HiMapper(backbone or ToyBackbone(), **{"num_leaves": 8, "depth": 3, "width": 16, **options})
    nn.init.normal_(model.encode.out_proj.weight, std=0.3)
    return model
