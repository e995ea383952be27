"""Centroids of attention from mean values and mean excess, in plain torch: the definition."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import wide


def centroid_space(mean: Tensor, d: int, c: float = 1.0) -> Tensor:
    """Space components of centroids from rows ``[m, e, ...]``: (..., at least d + 1) -> (..., d), in their dtype."""
    space, excess = wide(mean[..., :d]), wide(mean[..., d : d + 1])
    # m_t^2 - |m|^2 - 1/c, never negative but for rounding
    gap = excess * (excess + 2 / math.sqrt(c)) - space.square().sum(-1, keepdim=True)
    return (space * torch.rsqrt(1 + c * gap.clamp(min=0.0))).to(mean.dtype)


def centroid(mean: Tensor, d: int, width: int, c: float = 1.0) -> Tensor:
    """``[s, t, 0, ...]`` (..., width) from rows ``[m, e, ...]``; see ``ops.centroid.centroid``."""
    point = centroid_space(mean, d, c)
    time = torch.sqrt(wide(point).square().sum(-1, keepdim=True) + 1 / c)
    return F.pad(torch.cat([point, time.to(point.dtype)], -1), (0, width - d - 1))
