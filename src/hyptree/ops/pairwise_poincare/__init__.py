"""Poincaré distances between all points of two sets: values, softmax, the nearest point; forward and backward.

A point of the ball is a direction and a radius as every other, so the kernels are those of
``hyptree.ops.pairwise_lorentz`` with another way from a stored row to its radius.
"""

from __future__ import annotations

from torch import Tensor

from hyptree.geometry import poincare
from hyptree.geometry.core.numerics import Scalar
from hyptree.ops import pairwise_lorentz as pairs
from hyptree.ops.pairwise_lorentz import fits
from hyptree.ops.pairwise_lorentz.reference import Mode

__all__ = ["distance_softmax", "fits", "nearest", "pairwise_dist"]


def pairwise_dist(
    x: Tensor, y: Tensor, c: Scalar = 1.0, *, mode: Mode = "exact", tangent: bool = False, backend: str = "auto"
) -> Tensor:
    """Distances between all points of the ball: (..., N, n), (..., M, n) -> (..., N, M), float32 at least.

    Arguments as for :func:`hyptree.ops.pairwise_lorentz.pairwise_dist`; a row outside the ball is moved into it.
    """
    return pairs.run_dist(poincare, "poincare.pairwise_dist", x, y, c, mode, tangent, backend)


def distance_softmax(
    x: Tensor, y: Tensor, c: Scalar = 1.0, *, temperature: float = 1.0, tangent: bool = False, backend: str = "auto"
) -> Tensor:
    """``softmax(-d / temperature)`` over the points of ``y``: (..., N, n), (..., M, n) -> (..., N, M) in float32."""
    return pairs.run_softmax(poincare, "poincare.distance_softmax", x, y, c, temperature, tangent, backend)


def nearest(
    x: Tensor, y: Tensor, c: Scalar = 1.0, *, tangent: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The nearest point of ``y`` for each of ``x``: its index (..., N) and distance (..., N); no gradient."""
    return pairs.run_nearest(poincare, "poincare.nearest", x, y, c, tangent, backend)
