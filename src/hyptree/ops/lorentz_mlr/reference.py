"""Logits of hyperplanes from the product of points and normals, in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, asinh, sqnorm
from hyptree.ops.rounding import wide


def mlr_logits(product: Tensor, x: Tensor, time_column: Tensor, scale: Tensor, c: Scalar) -> Tensor:
    """``scale asinh(product + t time_column)`` with the times ``t`` (..., 1) of the points ``x``: -> (..., K)."""
    points = wide(x)
    t = torch.sqrt(1 / c + sqnorm(points))
    return scale * asinh(torch.addcmul(wide(product), t, time_column))
