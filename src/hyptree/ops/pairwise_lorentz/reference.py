"""Distances between two sets of points, their softmax and the nearest one in plain torch: the definitions."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.geometry.core.numerics import Scalar

Mode = Literal["exact", "matmul"]


def points(v: Tensor, c: Scalar, tangent: bool, space: ModuleType = lorentz) -> Tensor:
    """``v`` itself, or the points that tangent vectors at the origin lead to."""
    points: Tensor = space.expmap0(v, c) if tangent else v
    return points


def pairwise_dist(
    x: Tensor, y: Tensor, c: Scalar, mode: Mode, tangent: bool, space: ModuleType = lorentz
) -> Tensor:  # fmt: skip
    """(..., N, n), (..., M, n) -> (..., N, M)."""
    first = points(x, c, tangent, space)
    distances: Tensor = space.pairwise_dist(first, first if y is x else points(y, c, tangent, space), c, mode=mode)
    return distances


def distance_softmax(
    x: Tensor, y: Tensor, c: Scalar, temperature: Scalar, tangent: bool, space: ModuleType = lorentz
) -> Tensor:  # fmt: skip
    """``softmax(-d / temperature)`` over the points of ``y``: (..., N, M)."""
    return torch.softmax(-pairwise_dist(x, y, c, "matmul", tangent, space) / temperature, -1)


def nearest(
    x: Tensor, y: Tensor, c: Scalar, tangent: bool, space: ModuleType = lorentz
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Index of the nearest of ``y`` for each of ``x`` and its distance; a point that is NaN is nearest to none."""
    d = pairwise_dist(x, y, c, "exact", tangent, space)
    index = torch.where(d.isnan(), torch.inf, d).argmin(-1)
    return index, d.gather(-1, index.unsqueeze(-1)).squeeze(-1)
