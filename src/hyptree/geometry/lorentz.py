"""The Lorentz model as pure functions on space components.

A point of the hyperboloid ``-t^2 + |x|^2 = -1/c`` is stored as ``x`` (..., n) alone; the time component
``t = sqrt(1/c + |x|^2)`` is derived in float32 or float64 inside the function that needs it. So every stored vector is
a point, in bfloat16 too, and R^n is a global chart: nothing to project, nothing that drifts. A tangent vector at ``x``
is stored the same way; its time component is ``(x.v)/t``. Everywhere ``c > 0``, the curvature is ``-c`` and
``s = sqrt(c)``.

No ``acosh`` is used: distances come from the *radial frame*, which splits the step from ``x`` to ``y`` into a part
along ``x`` and a part across it, neither of which cancels.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from hyptree.geometry import row_forms
from hyptree.geometry.core import debug
from hyptree.geometry.core.numerics import (
    Scalar,
    asinh,
    asinhc,
    ball_gap,
    ball_limit,
    cap_norm,
    dot,
    lorentz_limit,
    root,
    safe_hypot,
    safe_norm,
    safe_sqrt,
    sinh,
    sinhc,
    sqnorm,
    strict_matmul,
    transverse_norm,
    unit,
    wide,
)
from hyptree.geometry.core.registry import geometric
from hyptree.geometry.lorentz_frame import (
    asinhc_of_square,
    has_wider,
    logmap_near_origin,
    radial_frame,
    sinh_dist,
    sqsinh_half,
    tangent_sqnorm,
    time_of,
    time_step,
)
from hyptree.geometry.lorentz_pairs import exact_distances, matmul_distances
from hyptree.geometry.sets import points_and_weights, require_shared_curvature

_SATURATED = "shorten the tangent vector, lower the learning rate, or clip gradients"


@geometric("scalar")
def time(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Time component ``sqrt(1/c + |x|^2)``: (..., n) -> (...)."""
    return time_of(x, c).squeeze(-1)


@geometric("scalar")
def minkowski(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Minkowski product ``<x,y>_L = x.y - t_x t_y`` of two points, at most ``-1/c``."""
    return (dot(x, y) - time_of(x, c) * time_of(y, c)).squeeze(-1)


@geometric("scalar")
def inner(x: Tensor, u: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian inner product ``u.v - (x.u)(x.v)/t^2`` of two tangent vectors at ``x``."""
    r = safe_norm(x)
    xh = unit(x, r)
    ur, vr = dot(xh, u), dot(xh, v)
    # Split along and across x: both parts of |v|^2 are then positive, even where t is huge.
    across = dot(u - xh * ur, v - xh * vr)
    return (across + ur * vr / (c * time_of(x, c).square())).squeeze(-1)


@geometric("scalar")
def norm(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian length of the tangent vector ``v`` at ``x``."""
    r = safe_norm(x)
    xh = unit(x, r)
    return safe_sqrt(tangent_sqnorm(x, v, c, time_of(x, c), r, xh, dot(xh, v))).squeeze(-1)


# --------------------------------------------------------------------------------------------- exponential, logarithm


@geometric("point", form=row_forms.lorentz_expmap0)
def expmap0(v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Exponential map at the origin, ``sinh(s|v|)/(s|v|) v``; ``|v|`` is the hyperbolic distance of the result.

    A tangent vector longer than the dtype can hold (``s|v| = 40`` in float32, 340 in float64) is rescaled to exactly
    that length: the result and its gradient stay finite. Nothing shorter is touched.
    """
    z = safe_sqrt(c * sqnorm(v))  # not s|v|: one rounding less, and sinh multiplies it by z
    limit = lorentz_limit(root(c), v.dtype)
    over = z > limit
    debug.require_unsaturated("lorentz.expmap0", over, _SATURATED)
    shrink = torch.where(over, limit / torch.where(over, z, 1.0), 1.0)
    return sinhc(z * shrink) * (v * shrink)


@geometric("tangent")
def logmap0(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Logarithmic map at the origin, ``asinh(s|x|)/(s|x|) x``."""
    return asinhc(root(c) * safe_norm(x)) * x


@geometric("scalar")
def dist0(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Distance to the origin, ``asinh(s|x|)/s``; the gradient at the origin is zero, not NaN."""
    s = root(c)
    return (asinh(s * safe_norm(x)) / s).squeeze(-1)


@geometric("point", form=row_forms.lorentz_expmap)
def expmap(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Point reached from ``x`` along the geodesic with initial velocity ``v``.

    Far from the origin and inward (``x.v < 0``) the textbook sum ``cosh(z) x + sinh(z)/z v`` cancels; there the radial
    part is taken from ``sinh(a +- z)`` instead. A result beyond the limit of the dtype is moved to it.
    """
    s = root(c)
    limit = lorentz_limit(s, x.dtype)
    t, r = time_of(x, c), safe_norm(x)
    xh = unit(x, r)
    vr = dot(xh, v)
    length = safe_sqrt(tangent_sqnorm(x, v, c, t, r, xh, vr))
    z = s * length
    a = asinh(s * r)

    # A step longer than radius + limit ends beyond the limit whatever its direction: shorten it to that.
    too_long = z > limit + a
    shrink = torch.where(too_long, (limit + a) / torch.where(too_long, z, 1.0), 1.0)
    z, v, vr, length = z * shrink, v * shrink, vr * shrink, length * shrink

    radial = (s * r > 3) & ((vr < 0) | (a + z > limit))
    near_z = torch.where(radial, 1.0, z)
    near = torch.cosh(near_z) * torch.where(radial, 0.0, x) + sinhc(near_z) * v

    # Cosine of the angle to the ray, and 1 -+ its absolute value: the small one from the sine, without cancellation.
    moving = radial & (length > 0)
    safe_length = torch.where(moving, length, 1.0)
    across = v - xh * vr
    k = torch.where(moving, vr, 0.0) / (s * t * safe_length)
    large = 1 + k.abs()
    small = sqnorm(torch.where(moving, across, 0.0) / safe_length) / large
    outward = k > 0
    out_arg = torch.where(radial, a + z, 0.0).clamp_max(2 * limit)
    in_arg = torch.where(radial, a - z, 0.0)
    one_plus_k, one_minus_k = torch.where(outward, large, small), torch.where(outward, small, large)
    yr = (torch.sinh(out_arg) * one_plus_k + torch.sinh(in_arg) * one_minus_k) / (2 * s)
    far = yr * xh + sinhc(torch.where(radial, z, 0.0).clamp_max(2 * limit)) * across

    y = torch.where(radial, far, near)
    longest = sinh(limit) / s
    if debug.is_enabled():
        debug.require_unsaturated("lorentz.expmap", safe_norm(y) > longest, _SATURATED)
    return cap_norm(y, longest)


@geometric("scalar", form=row_forms.lorentz_dist)
def dist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Hyperbolic distance, to the last digits for points that nearly coincide and for points far apart.

    Symmetric bit for bit; at ``x = y`` the value and the gradient are zero.
    """
    if not has_wider(x):
        return (asinh(sinh_dist(x, y, c)) / root(c)).squeeze(-1)
    half = safe_sqrt(sqsinh_half(x, y, c)).to(x.dtype)
    return (asinh(half) * (2 / root(c))).squeeze(-1)


@geometric("scalar")
def sqdist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Squared hyperbolic distance; smooth at ``x = y``, where its gradient vanishes as it should."""
    square = sqsinh_half(x, y, c).to(x.dtype)
    # Near 0 the square is not taken through a root, so that the second derivative at x = y is right as well.
    near = square < 1
    small = torch.where(near, square, 0.0)
    far = asinh(torch.where(near, 1.0, square).sqrt()).square()
    return (torch.where(near, asinhc_of_square(small).square() * small, far) * (4 / c)).squeeze(-1)


@geometric("scalar")
def lorentz_sqdist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Squared Lorentzian distance ``-2/c - 2<x,y>_L = (4/c) sinh^2(s d/2)``."""
    return (sqsinh_half(x, y, c) * (4 / c)).squeeze(-1).to(x.dtype)


@geometric("tangent", form=row_forms.lorentz_logmap)
def logmap(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Tangent vector at ``x`` that points to ``y``, as long as their distance."""
    s = root(wide(c))
    xh, along, across, tx = radial_frame(x, y, c)
    shorten = asinhc(s * safe_hypot(along, safe_norm(across)))
    far = ((s * shorten * along) * tx * xh + shorten * across).to(x.dtype)
    # Close to the origin the direction of x is ill-defined and its gradient with it; the ambient formula
    # u = (y - x) - (cosh(s d) - 1) x has no such trouble there, and no cancellation either.
    near = c * sqnorm(x) < 0.25
    return torch.where(near, logmap_near_origin(torch.where(near, x, 0.0), y, c), far)


@geometric("point", free=("tau",))
def geodesic(x: Tensor, y: Tensor, tau: Scalar, c: Scalar = 1.0) -> Tensor:
    """Point at the fraction ``tau`` (float, or tensor with a trailing 1) of the way from ``x`` to ``y``."""
    return expmap(x, tau * logmap(x, y, c), c)


# ------------------------------------------------------------------------------------------------ transport, isometry


@geometric("tangent", form=row_forms.lorentz_transport)
def transport(x: Tensor, y: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from ``x`` to ``y`` along their geodesic; keeps lengths and angles."""
    s = root(wide(c))
    xh, along, across, tx = radial_frame(x, y, c)
    w = s * safe_hypot(along, safe_norm(across))
    # <y, v>_L, which is zero for y = x, and cosh(s d): by the radial frame, or, where x has no clear direction and so
    # the frame no gradient, by differences.
    ty, at_origin = time_of(wide(y), c), c * sqnorm(x) < 0.25
    framed = along * dot(xh, v) / (s * tx) + dot(across, v)
    plain = dot(y - x, v) - (time_step(x, y, tx, ty) / tx) * dot(x, v)
    yv = torch.where(at_origin, plain, framed)
    cosh = torch.where(at_origin, c * (tx * ty - dot(wide(x), wide(y))), torch.hypot(w, torch.ones_like(w)))
    return v + (c * yv / (1 + cosh)).to(v.dtype) * (x + y)


@geometric("tangent")
def transport_from_origin(y: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from the origin to ``y``."""
    return v + (c * dot(y, v) / (1 + root(c) * time_of(y, c))) * y


@geometric("tangent")
def transport_to_origin(x: Tensor, v: Tensor, c: Scalar = 1.0) -> Tensor:
    """Parallel transport of ``v`` from ``x`` to the origin."""
    s, t = root(c), time_of(x, c)
    return v - (s * dot(x, v) / (t * (1 + s * t))) * x


@geometric("point")
def boost(p: Tensor, x: Tensor, c: Scalar = 1.0) -> Tensor:
    """The isometry (Lorentz boost) that takes the origin to ``p``, applied to ``x``; ``boost(-p, .)`` undoes it."""
    s = root(c)
    near = x + p * (s * time_of(x, c) + c * dot(p, x) / (1 + s * time_of(p, c)))
    # The boost undoes -p: x as seen from -p, whose frame does not cancel when x and p point in opposite directions.
    direction, along, across, _ = radial_frame(-p, x, c)
    return torch.where(c * sqnorm(p) < 0.25, near, (along * direction + across).to(x.dtype))


@geometric("tangent")
def egrad2rgrad(x: Tensor, g: Tensor, c: Scalar = 1.0) -> Tensor:
    """Riemannian gradient from the gradient of the space components: ``g + c (x.g) x``, the inverse metric."""
    return g + c * dot(x, g) * x


# -------------------------------------------------------------------------------------------------------------- means


@geometric("point", free=("weights",))
def centroid(x: Tensor, weights: Tensor | None = None, c: Scalar = 1.0) -> Tensor:
    """Weighted Lorentz centroid over the second-last axis: (..., N, n) -> (..., n).

    The normalised ambient mean, which minimises the weighted squared Lorentzian distances. The norm of the mean is
    summed from positive terms, and in float64, so a tight cluster far from the origin keeps its digits. (Attention,
    which cannot afford that, normalises with the exact lower bound instead: see ``hyptree.nn.lorentz_attention``.)

    Args:
        weights: (..., N), not negative; all ones if None. Only their ratios matter; if all are 0 the origin comes back.
    """
    narrow, w = points_and_weights("lorentz.centroid", x, weights)
    x, w = wide(narrow), wide(w)
    c = wide(c)
    t, r = time_of(x, c), safe_norm(x)
    m = (w * x).sum(-2, keepdim=True)
    mt = (w * t).sum(-2, keepdim=True)
    mr = safe_norm(m)
    spread = sqnorm(x - r * unit(m, mr)) / torch.where(r > 0, 2 * r, 1.0)
    gap = (w * (1 / (c * (t + r)) + spread)).sum(-2, keepdim=True)  # m_t - |m|, without the subtraction
    q = gap * (mt + mr)
    some = ~(q <= 0)
    mean = m / torch.sqrt(c * torch.where(some, q, 1.0))
    return torch.where(some, mean, 0.0).squeeze(-2).to(narrow.dtype)


@geometric("point", free=("a",))
def residual(x: Tensor, y: Tensor, a: Scalar = 1.0, c: Scalar = 1.0) -> Tensor:
    """Weighted centroid of ``x`` (weight 1) and ``y`` (weight ``a >= 0``): the residual connection."""
    q = (1 + a) ** 2 + 4 * a * sqsinh_half(x, y, c).to(x.dtype)
    return (x + a * y) / torch.sqrt(q)


@geometric("point")
def midpoint(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """The point halfway between ``x`` and ``y``."""
    return residual(x, y, 1.0, c)


# ----------------------------------------------------------------------------------------------------------- pairwise


@geometric("scalar")
def gram(x: Tensor, y: Tensor, c: Scalar = 1.0, *, allow_low_precision: bool = False) -> Tensor:
    """All ``-<x_i, y_j>_L`` by one matrix product: (..., N, n), (..., M, n) -> (..., N, M)."""
    require_shared_curvature("lorentz.gram", c)
    return time_of(x, c) * time_of(y, c).mT - strict_matmul(x, y.mT, allow_low_precision)


@geometric("scalar")
def pairwise_dist(
    x: Tensor,
    y: Tensor,
    c: Scalar = 1.0,
    *,
    mode: Literal["exact", "matmul"] = "exact",
    allow_low_precision: bool = False,
) -> Tensor:
    """Distances between all points of two sets: (..., N, n), (..., M, n) -> (..., N, M).

    Neither mode builds an (N, M, n) tensor.

    Args:
        mode: "exact" has the error of ``dist``, about ``eps cosh(s r)``. "matmul" costs one matrix product and a few
            operations per pair; its error grows to ``sqrt(eps) cosh(s r)`` for points that nearly coincide.
        allow_low_precision: let the product of "matmul" follow autocast and TF32.
    """
    require_shared_curvature("lorentz.pairwise_dist", c)
    if mode == "exact":
        return exact_distances(x, y, c)
    if mode == "matmul":
        return matmul_distances(x, y, c, allow_low_precision)
    raise ValueError(f"lorentz.pairwise_dist: mode must be 'exact' or 'matmul', got {mode!r}")


# --------------------------------------------------------------------------------------------------- entailment cones


@geometric("scalar")
def exterior_angle(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Angle at ``x`` between the ray that leaves the origin and the geodesic to ``y``, in [0, pi].

    Zero if ``y`` lies straight behind ``x``, ``pi`` towards the origin. At ``y = x`` it is 0 and at ``x = 0`` it is
    ``pi/2``, both with zero gradient; so is the gradient on the ray through ``x``, where the angle has a kink.
    """
    xh, along, across, _ = radial_frame(x, y, c)
    shorter = torch.minimum(sqnorm(wide(y)), sqnorm(wide(y) - wide(x)))  # what `across` is a part of
    transverse = transverse_norm(across, safe_sqrt(shorter.detach()))
    at_origin = (xh == 0).all(-1, keepdim=True)
    ok = ~at_origin & ((along != 0) | (transverse != 0))
    angle = torch.atan2(torch.where(ok, transverse, 0.0), torch.where(ok, along, 1.0))
    return torch.where(at_origin, math.pi / 2, angle).squeeze(-1).to(x.dtype)


@geometric("scalar")
def half_aperture(x: Tensor, c: Scalar = 1.0, *, K: float = 0.1) -> Tensor:
    """Half aperture of the entailment cone at ``x``, ``asin(2K / (s|x|))``; ``pi/2`` for ``s|x| <= 2K``."""
    z = root(wide(c)) * safe_norm(wide(x))  # float64: where the cone opens to a half space, asin has no bounded slope
    ok = ~(z <= 2 * K)
    return torch.where(ok, torch.asin(2 * K / torch.where(ok, z, 4 * K)), math.pi / 2).squeeze(-1).to(x.dtype)


@geometric("scalar")
def cone_energy(x: Tensor, y: Tensor, c: Scalar = 1.0, *, K: float = 0.1, eta: float = 1.0) -> Tensor:
    """How far ``y`` lies outside the cone of ``x``: ``relu(exterior_angle(x, y) - eta * half_aperture(x))``."""
    return torch.relu(exterior_angle(x, y, c) - eta * half_aperture(x, c, K=K))


# ------------------------------------------------------------------------------------------------------- other models


@geometric("point")
def to_ambient(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Ambient coordinates with the time component first: (..., n) -> (..., n + 1)."""
    return torch.cat([time_of(x, c), x], -1)


@geometric("point")
def from_ambient(x: Tensor, c: Scalar = 1.0, *, check: bool = False) -> Tensor:
    """Space components of ambient points with the time component first: (..., n + 1) -> (..., n).

    Args:
        check: raise unless every point satisfies ``-t^2 + |x|^2 = -1/c`` to the precision of its dtype.
    """
    if x.shape[-1] < 2:
        raise ValueError(f"lorentz.from_ambient: expected time and space components (..., n + 1), got {tuple(x.shape)}")
    t, space = x[..., :1], x[..., 1:]
    if check:
        expected = time_of(space, c)
        bad = ~((t - expected).abs() <= 64 * torch.finfo(x.dtype).eps * expected)
        if bool(bad.any()):
            raise debug.GeometryError(
                f"lorentz.from_ambient: not on the sheet -t^2 + |x|^2 = -1/c, {debug.first_bad_row(bad[..., 0])}; "
                "check the curvature convention (geoopt's k is our 1/c) and that time comes first"
            )
    return space.clone()


@geometric("ball", form=row_forms.lorentz_to_poincare)
def to_poincare(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """The same point in the Poincaré ball, ``x / (1 + s t)``."""
    return cap_norm(x / (1 + root(c) * time_of(x, c)), ball_limit(x.dtype) / root(c))


@geometric("point")
def from_poincare(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Lorentz point of a point of the Poincaré ball, ``2x / (1 - c|x|^2)``."""
    x = cap_norm(x, ball_limit(x.dtype) / root(c))
    return 2 * x / ball_gap(x, c)


@geometric("ball")
def to_klein(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """The same point in the Klein model, ``x / (s t)``."""
    return cap_norm(x / (root(c) * time_of(x, c)), ball_limit(x.dtype) / root(c))


@geometric("point")
def from_klein(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Lorentz point of a point of the Klein model, ``x / sqrt(1 - c|x|^2)``."""
    x = cap_norm(x, ball_limit(x.dtype) / root(c))
    return x / torch.sqrt(ball_gap(x, c))


@geometric("scalar")
def saturation(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Fraction of rows at the limit that the dtype can hold, a number to log during training."""
    s = root(c)
    return (asinh(s * safe_norm(x)) >= 0.999 * lorentz_limit(s, x.dtype)).to(x.dtype).mean()
