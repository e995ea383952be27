"""The Poincaré ball as pure functions.

Points are vectors of the ball of radius ``1/s``, ``s = sqrt(c)``, curvature ``-c``. The ball is the model people draw
and the one most papers write; beyond hyperbolic radius 10 float32 cannot tell its points apart well (docs/geometry.md),
so compute in the Lorentz model where you can choose. ``1 - c|x|^2`` is summed in float64 whatever the dtype, and the
Möbius sum is written so that no two terms of its denominator cancel.

A row outside the ball is not a point. It is moved to the largest radius its dtype can hold (``s|x| = 1 - 4 eps``) so
that it cannot poison others; with ``HYPTREE_DEBUG=1`` it raises.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from hyptree.geometry import lorentz, row_forms
from hyptree.geometry.core import debug
from hyptree.geometry.core.numerics import (
    Scalar,
    asinh,
    asinhc,
    atanh,
    atanhc,
    ball_gap,
    ball_limit,
    cap_norm,
    dot,
    root,
    safe_norm,
    safe_sqrt,
    sqnorm,
    strict_matmul,
    tanhc,
    transverse_norm,
    unit,
    wide,
)
from hyptree.geometry.core.registry import geometric
from hyptree.geometry.sets import accurate_cdist, require_shared_curvature


def _inside(x: Tensor, c: Scalar, name: str) -> Tensor:
    """``x`` with rows outside the ball moved to its largest representable radius."""
    s = root(c)
    if debug.is_enabled():
        outside = s * safe_norm(x) >= 1
        debug.require_unsaturated(
            name, outside, "points of the Poincaré ball satisfy sqrt(c) |x| < 1: use expmap0 to map into it"
        )
    return cap_norm(x, ball_limit(x.dtype) / s)


@geometric("scalar")
def conformal_factor(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """``2 / (1 - c|x|^2)``: how much longer a small step at ``x`` is than it looks."""
    return (2 / ball_gap(_inside(x, c, "poincare.conformal_factor"), c)).squeeze(-1)


@geometric("scalar")
def inner(x: Tensor, u: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian inner product at ``x``: the Euclidean one times the squared conformal factor."""
    factor = 2 / ball_gap(_inside(x, c, "poincare.inner"), c)
    return (factor.square() * dot(u, v)).squeeze(-1)


@geometric("scalar")
def norm(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian length of the tangent vector ``v`` at ``x``."""
    return (2 * safe_norm(v) / ball_gap(_inside(x, c, "poincare.norm"), c)).squeeze(-1)


# --------------------------------------------------------------------------------------------- exponential, logarithm


@geometric("ball", form=row_forms.poincare_expmap0)
def expmap0(v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Exponential map at the origin, ``tanh(s|v|) v / (s|v|)``.

    This is the map of the literature: the conformal factor at the origin is 2, so ``v`` lands at hyperbolic distance
    ``2|v|``, while ``lorentz.expmap0`` sends it to ``|v|``.
    """
    wide_v = wide(v)  # near the boundary the last digit of x is the first of its distance to it
    x = (tanhc(root(wide(c)) * safe_norm(wide_v)) * wide_v).to(v.dtype)
    longest = ball_limit(v.dtype) / root(c)
    if debug.is_enabled():
        debug.require_unsaturated("poincare.expmap0", safe_norm(x) > longest, "shorten the vector or use Lorentz")
    return cap_norm(x, longest)


@geometric("tangent", form=row_forms.poincare_logmap0)
def logmap0(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Logarithmic map at the origin, ``atanh(s|x|) x / (s|x|)``, the inverse of ``expmap0``."""
    x = _inside(x, c, "poincare.logmap0")
    return atanhc(root(c) * safe_norm(x), ball_gap(x, c)) * x


@geometric("scalar")
def dist0(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Distance to the origin, ``2 atanh(s|x|) / s``."""
    s = root(c)
    x = _inside(x, c, "poincare.dist0")
    return (2 * atanh(s * safe_norm(x), ball_gap(x, c)) / s).squeeze(-1)


def _add(x: Tensor, y: Tensor, c: Scalar) -> Tensor:
    """Möbius sum of points inside the ball."""
    q, gx, gy = x + y, ball_gap(x, c), ball_gap(y, c)
    cq = c * sqnorm(q)
    total = (gx * q + cq * x) / (gx * gy + cq)
    return cap_norm(total, ball_limit(x.dtype) / root(c))


@geometric("ball", form=row_forms.poincare_mobius_add)
def mobius_add(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Möbius sum ``x (+) y``: the translation that takes the origin to ``x``, applied to ``y``."""
    return _add(_inside(x, c, "poincare.mobius_add"), _inside(y, c, "poincare.mobius_add"), c)


@geometric("ball", form=row_forms.poincare_expmap)
def expmap(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Point reached from ``x`` along the geodesic with initial velocity ``v``."""
    x = _inside(x, c, "poincare.expmap")
    s = root(c)
    # |half| and its tanh apart: near the boundary v is tiny while the conformal factor is huge.
    half = v / ball_gap(x, c)
    step = cap_norm(tanhc(s * safe_norm(half)) * half, ball_limit(x.dtype) / s)
    return _add(x, step, c)


@geometric("tangent", form=row_forms.poincare_logmap)
def logmap(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Tangent vector at ``x`` that points to ``y``; its Riemannian length is their distance."""
    x, y = _inside(x, c, "poincare.logmap"), _inside(y, c, "poincare.logmap")
    w = _add(-x, y, c)
    return ball_gap(x, c) * atanhc(root(c) * safe_norm(w), ball_gap(w, c)) * w


@geometric("ball", free=("tau",))
def geodesic(x: Tensor, y: Tensor, tau: Scalar, c: Scalar = 1.0) -> Tensor:
    """Point at the fraction ``tau`` (float, or tensor with a trailing 1) of the way from ``x`` to ``y``."""
    return expmap(x, tau * logmap(x, y, c), c)


@geometric("ball")
def midpoint(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """The point halfway between ``x`` and ``y``."""
    return lorentz.to_poincare(lorentz.midpoint(lorentz.from_poincare(x, c), lorentz.from_poincare(y, c), c), c)


# ---------------------------------------------------------------------------------------------------------- distances


@geometric("scalar", form=row_forms.poincare_dist)
def dist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Hyperbolic distance, ``(2/s) asinh(s|x-y| / sqrt((1-c|x|^2)(1-c|y|^2)))``; symmetric bit for bit."""
    x, y = _inside(x, c, "poincare.dist"), _inside(y, c, "poincare.dist")
    s = root(c)
    return (2 * asinh(s * safe_norm(x - y) / torch.sqrt(ball_gap(x, c) * ball_gap(y, c))) / s).squeeze(-1)


@geometric("scalar")
def sqdist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Squared hyperbolic distance, smooth at ``x = y``."""
    x, y = _inside(x, c, "poincare.sqdist"), _inside(y, c, "poincare.sqdist")
    w2 = c * sqnorm(x - y) / (ball_gap(x, c) * ball_gap(y, c))
    return (4 / c * asinhc(safe_sqrt(w2)).square() * w2).squeeze(-1)


@geometric("scalar")
def pairwise_dist(
    x: Tensor,
    y: Tensor,
    c: Scalar = 1.0,
    *,
    mode: Literal["exact", "matmul"] = "exact",
    allow_low_precision: bool = False,
) -> Tensor:
    """Distances between all points of two sets: (..., N, n), (..., M, n) -> (..., N, M). Modes as in ``lorentz``."""
    require_shared_curvature("poincare.pairwise_dist", c)
    if mode == "matmul":
        lifted_x = lorentz.from_poincare(x, c)
        lifted_y = lifted_x if y is x else lorentz.from_poincare(y, c)
        return lorentz.pairwise_dist(lifted_x, lifted_y, c, mode=mode, allow_low_precision=allow_low_precision)
    if mode != "exact":
        raise ValueError(f"poincare.pairwise_dist: mode must be 'exact' or 'matmul', got {mode!r}")
    x, y = _inside(x, c, "poincare.pairwise_dist"), _inside(y, c, "poincare.pairwise_dist")
    s = root(c)
    scale = torch.rsqrt(ball_gap(x, c)) * torch.rsqrt(ball_gap(y, c)).mT
    return asinh(s * accurate_cdist(x, y) * scale) * (2 / s)


# ---------------------------------------------------------------------------------------- Möbius algebra and transport


@geometric("ball", free=("M",))
def mobius_matvec(M: Tensor, x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Matrix ``M`` (m, n) applied in the tangent space of the origin: (..., n) -> (..., m)."""
    if M.dim() != 2 or M.shape[-1] != x.shape[-1]:
        raise ValueError(f"poincare.mobius_matvec: expected M (m, {x.shape[-1]}), got {tuple(M.shape)}")
    s = root(c)
    x = _inside(x, c, "poincare.mobius_matvec")
    y = strict_matmul(x.reshape(-1, x.shape[-1]), M.mT).reshape(*x.shape[:-1], M.shape[0])
    # tanh(|y|/|x| atanh(s|x|)) y/(s|y|), written with ratios that have limits: y itself for |x| -> 0 or |y| -> 0.
    stretch = atanhc(s * safe_norm(x), ball_gap(x, c))
    return cap_norm(tanhc(s * safe_norm(y) * stretch) * stretch * y, ball_limit(x.dtype) / s)


@geometric("ball", free=("r",))
def mobius_scalar_mul(r: Scalar, x: Tensor, c: Scalar = 1.0) -> Tensor:
    """``x`` moved to ``r`` times its distance from the origin, ``tanh(r atanh(s|x|)) x / (s|x|)``."""
    s = root(c)
    x = _inside(x, c, "poincare.mobius_scalar_mul")
    v = r * (atanhc(s * safe_norm(x), ball_gap(x, c)) * x)
    return cap_norm(tanhc(s * safe_norm(v)) * v, ball_limit(x.dtype) / s)


def _gyrate(a: Tensor, b: Tensor, v: Tensor, c: Scalar) -> Tensor:
    """``gyr[a, b] v``; every correction carries a factor ``a + b``, so nothing cancels where ``b`` nears ``-a``."""
    q, ga, gb = a + b, ball_gap(a, c), ball_gap(b, c)
    qv, bv = dot(q, v), dot(b, v)
    cq = c * sqnorm(q)
    correction = (cq * bv + qv * gb) * a + (ga * bv - qv) * q
    return v + (2 * c / (ga * gb + cq)) * correction


@geometric("tangent")
def gyration(x: Tensor, y: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """``gyr[x, y] v``: the rotation by which Möbius addition fails to be associative."""
    return _gyrate(_inside(x, c, "poincare.gyration"), _inside(y, c, "poincare.gyration"), v, c)


@geometric("tangent")
def transport(x: Tensor, y: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from ``x`` to ``y`` along their geodesic; keeps lengths and angles."""
    x, y = _inside(x, c, "poincare.transport"), _inside(y, c, "poincare.transport")
    return (ball_gap(y, c) / ball_gap(x, c)) * _gyrate(y, -x, v, c)


@geometric("tangent")
def transport_from_origin(y: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from the origin to ``y``, a change of length alone."""
    return ball_gap(_inside(y, c, "poincare.transport_from_origin"), c) * v


@geometric("tangent")
def transport_to_origin(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from ``x`` to the origin, a change of length alone."""
    return v / ball_gap(_inside(x, c, "poincare.transport_to_origin"), c)


@geometric("tangent")
def egrad2rgrad(x: Tensor, g: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian gradient ``(1 - c|x|^2)^2 / 4 g`` from the Euclidean gradient ``g``."""
    return (ball_gap(_inside(x, c, "poincare.egrad2rgrad"), c).square() / 4) * g


@geometric("ball", free=("weights",))
def centroid(x: Tensor, weights: Tensor | None = None, c: Scalar = 1.0) -> Tensor:
    """Weighted centroid over the second-last axis, the Lorentz centroid seen in the ball: (..., N, n) -> (..., n)."""
    mean = lorentz.centroid(lorentz.from_poincare(x, c), weights, c)
    c_out = c.squeeze(-2) if isinstance(c, Tensor) and c.dim() >= 2 else c
    return lorentz.to_poincare(mean, c_out)


# --------------------------------------------------------------------------------------------------- entailment cones


def _wide_gap(x: Tensor, c: Scalar) -> Tensor:
    """``1 - c|x|^2`` (..., 1) in float64, not rounded back: narrower points need no more care than that."""
    return ball_gap(x, c) if x.dtype == torch.float64 else 1 - wide(c) * sqnorm(wide(x))


@geometric("scalar")
def exterior_angle(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Angle at ``x`` between the ray from the origin and the geodesic to ``y``; as ``lorentz.exterior_angle``."""
    dtype = x.dtype
    x, y = _inside(x, c, "poincare.exterior_angle"), _inside(y, c, "poincare.exterior_angle")
    gap = _wide_gap(x, c)
    x, y = wide(x), wide(y)
    r = safe_norm(x)
    xh, q = unit(x, r), y - x
    # The ball is conformal: angles at x are angles of (-x) (+) y, here without its positive denominator. Its part
    # across the ray is that of y, or of q: the shorter of the two loses fewer digits.
    from_y = sqnorm(y) < sqnorm(q)
    nearer = torch.where(from_y, y, q)
    across = nearer - xh * dot(xh, nearer)
    along = gap * dot(xh, q) - wide(c) * sqnorm(q) * r
    transverse = gap * transverse_norm(across, safe_norm(nearer.detach()))
    ok = (r != 0) & ((along != 0) | (transverse != 0))
    angle = torch.atan2(torch.where(ok, transverse, 0.0), torch.where(ok, along, 1.0))
    return torch.where(r != 0, angle, math.pi / 2).squeeze(-1).to(dtype)


@geometric("scalar")
def half_aperture(x: Tensor, c: Scalar = 1.0, *, K: float = 0.1) -> Tensor:
    """Half aperture of the entailment cone at ``x``, ``asin(K (1 - c|x|^2) / (s|x|))``, at most ``pi/2``.

    In float64 whatever the dtype: where the cone opens to a half space, the slope of ``asin`` is unbounded.
    """
    dtype = x.dtype
    x = _inside(x, c, "poincare.half_aperture")
    z, gap = root(wide(c)) * safe_norm(wide(x)), _wide_gap(x, c)
    ok = ~(z <= K * gap)
    angle = torch.asin(K * torch.where(ok, gap, 0.5) / torch.where(ok, z, K))
    return torch.where(ok, angle, math.pi / 2).squeeze(-1).to(dtype)


@geometric("scalar")
def cone_energy(x: Tensor, y: Tensor, c: Scalar = 1.0, *, K: float = 0.1, eta: float = 1.0) -> Tensor:
    """How far ``y`` lies outside the cone of ``x``: ``relu(exterior_angle(x, y) - eta * half_aperture(x))``."""
    return torch.relu(exterior_angle(x, y, c) - eta * half_aperture(x, c, K=K))


# ------------------------------------------------------------------------------------------------------- other models


@geometric("point", form=row_forms.poincare_to_lorentz)
def to_lorentz(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Space components of the same point on the hyperboloid."""
    return lorentz.from_poincare(_inside(x, c, "poincare.to_lorentz"), c)


@geometric("ball")
def from_lorentz(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Poincaré point of a Lorentz point given by its space components."""
    return lorentz.to_poincare(x, c)


@geometric("ball")
def to_klein(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """The same point in the Klein model, ``2x / (1 + c|x|^2)``."""
    x = _inside(x, c, "poincare.to_klein")
    return cap_norm(2 * x / (1 + c * sqnorm(x)), ball_limit(x.dtype) / root(c))


@geometric("ball")
def from_klein(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Poincaré point of a Klein point, ``x / (1 + sqrt(1 - c|x|^2))``."""
    x = cap_norm(x, ball_limit(x.dtype) / root(c))
    return x / (1 + torch.sqrt(ball_gap(x, c)))


@geometric("scalar")
def saturation(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Fraction of rows at the limit that the dtype can hold, a number to log during training."""
    return (root(c) * safe_norm(x) >= 1 - 8 * torch.finfo(x.dtype).eps).to(x.dtype).mean()
