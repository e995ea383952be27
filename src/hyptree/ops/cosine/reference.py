"""Cosine distances in plain torch: the definition the kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import strict_matmul

SMALLEST_NORM = 1e-12


def wide_features(features: Tensor) -> Tensor:
    """Features in float32, or float64 if they are."""
    return features if features.dtype == torch.float64 else features.float()


@torch.no_grad()
def unit_features(features: Tensor) -> Tensor:
    """Features divided by their length, in float32 (float64 stays): (..., D) -> (..., D); zero features stay zero."""
    wide = features if features.dtype == torch.float64 else features.float()
    return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)


@torch.no_grad()
def cosine_distance(features: Tensor) -> Tensor:
    """``1 - cos`` of the angle between any two tokens, symmetric, in [0, 2], 0 on the diagonal: -> (..., N, N)."""
    unit = unit_features(features)
    cosine = strict_matmul(unit, unit.mT)
    # The larger of both cosines gives the smaller distance: rounding keeps order.
    D = (1 - torch.maximum(cosine, cosine.mT)).clamp_(0, 2)
    D.diagonal(dim1=-2, dim2=-1).zero_()
    return D
