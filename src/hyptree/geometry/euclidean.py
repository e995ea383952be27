"""Flat space under the same names, so that every hyperbolic function has its Euclidean twin. There is no ``c``."""

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, dot, safe_norm, sqnorm
from hyptree.geometry.core.registry import geometric
from hyptree.geometry.sets import accurate_cdist, points_and_weights


@geometric("scalar")
def inner(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Inner product ``u.v``; ``x`` only lends its shape."""
    return (dot(u, v) + 0 * x[..., :1]).squeeze(-1)


@geometric("scalar")
def norm(x: Tensor, v: Tensor) -> Tensor:
    """Length of ``v``; ``x`` only lends its shape."""
    return (safe_norm(v) + 0 * x[..., :1]).squeeze(-1)


@geometric("point")
def expmap0(v: Tensor) -> Tensor:
    """``v`` itself."""
    return v


@geometric("tangent")
def logmap0(x: Tensor) -> Tensor:
    """``x`` itself."""
    return x


@geometric("point")
def expmap(x: Tensor, v: Tensor) -> Tensor:
    """``x + v``."""
    return x + v


@geometric("tangent")
def logmap(x: Tensor, y: Tensor) -> Tensor:
    """``y - x``."""
    return y - x


@geometric("scalar")
def dist0(x: Tensor) -> Tensor:
    """Norm of ``x``; zero gradient at 0."""
    return safe_norm(x).squeeze(-1)


@geometric("scalar")
def dist(x: Tensor, y: Tensor) -> Tensor:
    """``|x - y|``; zero gradient at ``x = y``."""
    return safe_norm(x - y).squeeze(-1)


@geometric("scalar")
def sqdist(x: Tensor, y: Tensor) -> Tensor:
    """``|x - y|^2``."""
    return sqnorm(x - y).squeeze(-1)


@geometric("scalar")
def pairwise_dist(x: Tensor, y: Tensor, *, mode: str = "exact") -> Tensor:
    """Distances between all points of two sets: (..., N, n), (..., M, n) -> (..., N, M)."""
    if mode == "exact":
        return accurate_cdist(x, y)
    if mode == "matmul":
        return torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")
    raise ValueError(f"euclidean.pairwise_dist: mode must be 'exact' or 'matmul', got {mode!r}")


@geometric("point", free=("weights",))
def centroid(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted mean over the second-last axis, the origin if all weights are 0: (..., N, n) -> (..., n)."""
    x, w = points_and_weights("euclidean.centroid", x, weights)
    total = w.sum(-2)
    some = total != 0
    return torch.where(some, (w * x).sum(-2) / torch.where(some, total, 1.0), 0.0)


@geometric("point", free=("tau",))
def geodesic(x: Tensor, y: Tensor, tau: Scalar) -> Tensor:
    """Point at the fraction ``tau`` of the straight way from ``x`` to ``y``."""
    return x + tau * (y - x)


@geometric("tangent")
def transport(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """``v`` itself; ``x`` and ``y`` only lend their shape."""
    return v + 0 * (x + y)


@geometric("tangent")
def egrad2rgrad(x: Tensor, g: Tensor) -> Tensor:
    """``g`` itself; ``x`` only lends its shape."""
    return g + 0 * x
