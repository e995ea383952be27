"""The Lorentz centroid of experts' points, in plain torch: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyptree.ops.rounding import wide


def merge(shared: Sequence[Tensor], routed: Tensor, weight: Tensor, c: float = 1.0) -> Tensor:
    """The Lorentz centroid of the points of experts, shared ones with weight 1: gives its space components (T, n).

    With ``Y = sum y_i + sum g_j z_j`` in the ambient space it is ``Y / sqrt(-c <Y, Y>_L)``. The exact bound
    ``-<Y, Y>_L >= (sum of weights)^2 / c`` holds also where rounding would break it. In float32 at least.

    Args:
        shared: (T, n) each. routed: (T, k, n) points. weight: (T, k), not negative.
    """
    mass = weight.sum(-1, keepdim=True) + len(shared)  # (T, 1)
    ones = [torch.ones_like(mass)] * len(shared)
    space = time = torch.zeros_like(mass)
    # One after another: a compiler makes one pass over all rows of this.
    for g, point in zip([*ones, *weight[..., None].unbind(1)], [*shared, *routed.unbind(1)], strict=True):
        point = wide(point)
        space = space + g * point
        time = time + g * torch.sqrt(point.square().sum(-1, keepdim=True) + 1 / c)
    q = torch.maximum(time * time - space.square().sum(-1, keepdim=True), mass * mass / c)
    return space * (torch.rsqrt(q) / c**0.5)


def merge_points(
    shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float = 1.0
) -> Tensor:
    """(s, T, M), (T k, M), (T, k) -> (T, n); see ``ops.merge_points.merge_points``."""
    points = routed[:, :n].index_select(0, inverse).unflatten(0, weight.shape)  # (T, k, n)
    others = [] if shared is None else list(shared[..., :n].unbind(0))
    return merge(others, points, weight, c).to(routed.dtype)
