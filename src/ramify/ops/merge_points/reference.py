"""The Lorentz centroid of experts' points, in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounding import wide


def merge_points(
    shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float = 1.0
) -> Tensor:
    """(s, T, M), (T k, M), (T, k) -> (T, n); see ``ops.merge_points.merge_points``."""
    points = wide(routed[:, :n]).index_select(0, inverse).unflatten(0, weight.shape)  # (T, k, n)
    if shared is not None:
        points = torch.cat([wide(shared[..., :n]).transpose(0, 1), points], 1)
        weight = torch.cat([weight.new_ones(weight.shape[0], shared.shape[0]), weight], 1)
    time = torch.sqrt(points.square().sum(-1) + 1 / c)
    total, total_time = (weight[..., None] * points).sum(1), (weight * time).sum(1, keepdim=True)
    bound = weight.sum(1, keepdim=True).square() / c
    q = torch.maximum(total_time.square() - total.square().sum(-1, keepdim=True), bound)
    return (total * (torch.rsqrt(q) / c**0.5)).to(routed.dtype)
