"""Centroids of attention from mean values and mean excess, in plain torch: the definition."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import rounded, wide


def centroid(mean: Tensor, d: int, width: int, c: float = 1.0) -> Tensor:
    """``[s, t, 0, ...]`` (..., width) from rows ``[m, e, ...]``; see ``ops.centroid.centroid``."""
    dtype = mean.dtype
    mean = F.pad(mean, (0, width - mean.shape[-1]))  # a negative number cuts
    column = torch.arange(width, device=mean.device)
    space, excess = torch.where(column < d, wide(mean), 0.0), wide(mean[..., d : d + 1])
    # m_t^2 - |m|^2 - 1/c, never negative but for rounding
    gap = excess * (excess + 2 / math.sqrt(c)) - space.square().sum(-1, keepdim=True)
    point = rounded(space * torch.rsqrt(1 + c * gap.clamp(min=0.0)), dtype)
    time = torch.sqrt(point.square().sum(-1, keepdim=True) + 1 / c)
    return torch.where(column == d, time, point).to(dtype)
