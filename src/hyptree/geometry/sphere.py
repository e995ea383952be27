"""The sphere of positive curvature ``+c`` under the same names.

Points are ambient vectors of length ``1/s``; a sphere of dimension n has n + 1 of them on the last axis. The origin is
the pole ``(1/s, 0, ..., 0)``, and tangent vectors at the pole have first component 0 (what is passed there is ignored),
so that all functions keep the shape. Angles come from ``atan2`` of chords: right for tiny and for nearly opposite ones.
"""

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, dot, root, safe_norm, sqnorm, strict_matmul, unit
from hyptree.geometry.core.registry import geometric
from hyptree.geometry.sets import accurate_cdist, points_and_weights, require_shared_curvature


def _sinc(z: Tensor) -> Tensor:
    """``sin(z)/z`` with ``sin(0)/0 = 1`` and all derivatives."""
    return torch.sinc(z / torch.pi)


@geometric("point")
def project(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Nearest point of the sphere, ``x / (s|x|)``; the pole for a zero row."""
    r = safe_norm(x)
    pole = _pole(x, c)
    return torch.where(r != 0, unit(x, r) / root(c), pole)


@geometric("tangent")
def project_tangent(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Part of ``v`` that is tangent at ``x``."""
    return v - (c * dot(x, v)) * x


def _pole(x: Tensor, c: Scalar) -> Tensor:
    first = torch.zeros_like(x)
    return torch.cat([torch.ones_like(x[..., :1]) / root(c), first[..., 1:]], -1)


@geometric("scalar")
def inner(x: Tensor, u: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Inner product of two tangent vectors, that of the ambient space."""
    return (dot(u, v) + 0 * x[..., :1]).squeeze(-1)


@geometric("scalar")
def norm(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Length of a tangent vector."""
    return (safe_norm(v) + 0 * x[..., :1]).squeeze(-1)


@geometric("point")
def expmap(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Point reached from ``x`` along the great circle with initial velocity ``v``."""
    z = root(c) * safe_norm(v)
    return torch.cos(z) * x + _sinc(z) * v


@geometric("point")
def expmap0(v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Exponential map at the pole; the first component of ``v`` is ignored."""
    flat = torch.cat([torch.zeros_like(v[..., :1]), v[..., 1:]], -1)
    return expmap(_pole(v, c), flat, c)


def _angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle in [0, pi] between two points of one sphere (..., 1), zero gradient where they meet or oppose."""
    near, far = safe_norm(x - y), safe_norm(x + y)
    ok = (near != 0) | (far != 0)
    return 2 * torch.atan2(torch.where(ok, near, 0.0), torch.where(ok, far, 1.0))


@geometric("scalar")
def dist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Length of the shorter great arc, ``(2/s) atan2(|x-y|, |x+y|)``."""
    return (_angle(x, y) / root(c)).squeeze(-1)


@geometric("scalar")
def sqdist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Squared length of the shorter great arc."""
    return (_angle(x, y).square() / c).squeeze(-1)


@geometric("scalar")
def dist0(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Distance to the pole."""
    return dist(x, _pole(x, c), c)


@geometric("tangent")
def logmap(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Tangent vector at ``x`` that points to ``y``; zero for the antipode, where no direction is shortest."""
    e = y - x
    u = e - (c * dot(x, e)) * x
    length = safe_norm(u)
    angle = _angle(x, y)
    tiny = length * root(c) < 1e-6
    # angle / |u| has the limit 1/s^-1 at y = x; there the direction is e itself.
    stretch = torch.where(tiny, 1.0, angle / (root(c) * torch.where(tiny, 1.0, length)))
    return torch.where(tiny & (dot(x, y) < 0), 0.0, stretch * u)


@geometric("tangent")
def logmap0(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Logarithmic map at the pole."""
    return logmap(_pole(x, c), x, c)


@geometric("point", free=("tau",))
def geodesic(x: Tensor, y: Tensor, tau: Scalar, c: Scalar = 1.0) -> Tensor:
    """Point at the fraction ``tau`` of the shorter arc from ``x`` to ``y``."""
    return expmap(x, tau * logmap(x, y, c), c)


@geometric("tangent")
def transport(x: Tensor, y: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from ``x`` to ``y`` along the shorter arc; ``v`` itself if they are antipodes."""
    total = sqnorm(x + y)
    ok = total != 0
    return v - torch.where(ok, 2 * dot(y, v) / torch.where(ok, total, 1.0), 0.0) * (x + y)


@geometric("tangent")
def egrad2rgrad(x: Tensor, g: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian gradient: the tangent part of the Euclidean gradient."""
    return g - (c * dot(x, g)) * x


@geometric("point", free=("weights",))
def centroid(x: Tensor, weights: Tensor | None = None, c: Scalar = 1.0) -> Tensor:
    """Normalised weighted mean over the second-last axis, the pole if it vanishes: (..., N, n) -> (..., n)."""
    x, w = points_and_weights("sphere.centroid", x, weights)
    mean = (w * x).sum(-2, keepdim=True)
    r = safe_norm(mean)
    return torch.where(r != 0, unit(mean, r) / root(c), _pole(mean, c)).squeeze(-2)


@geometric("scalar")
def pairwise_dist(x: Tensor, y: Tensor, c: Scalar = 1.0, *, mode: str = "exact") -> Tensor:
    """Distances between all points of two sets: (..., N, n), (..., M, n) -> (..., N, M)."""
    require_shared_curvature("sphere.pairwise_dist", c)
    s = root(c)
    if mode == "exact":
        near, far = accurate_cdist(x, y), accurate_cdist(x, -y)
    elif mode == "matmul":
        # Half-angle chords from the cosine; sqrt(eps) of error for points that nearly coincide or oppose.
        cosine = c * strict_matmul(x, y.mT)
        near, far = _half_chord(1 - cosine), _half_chord(1 + cosine)
    else:
        raise ValueError(f"sphere.pairwise_dist: mode must be 'exact' or 'matmul', got {mode!r}")
    return 2 * torch.atan2(near, far) / s


def _half_chord(q: Tensor) -> Tensor:
    ok = ~(q <= 0)
    return torch.where(ok, torch.where(ok, q, 1.0).sqrt(), 0.0)
