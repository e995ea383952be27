"""A backbone that costs nothing, for tests of what stands on backbones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models._features import FeatureInfo
from torch import Tensor, nn


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class ToyBackbone(nn.Module):
    """Average pools of growing stride: fast, and its maps have sizes that do not divide."""

    def __init__(self, strides: tuple[int, ...] = (4, 8, 16, 32), widths: tuple[int, ...] = (3, 3, 3, 3)):
        super().__init__()
        info = [
            {"num_chs": c, "reduction": s, "module": f"s{i}"}
            for i, (s, c) in enumerate(zip(strides, widths, strict=True))
        ]
        self.feature_info = FeatureInfo(info, tuple(range(len(info))))
        self.strides = strides
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [F.avg_pool2d(x + self.shift, s, ceil_mode=True) for s in self.strides]
