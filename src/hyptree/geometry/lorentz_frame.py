"""How two points of the hyperboloid see each other, without cancellation: the numbers behind :mod:`lorentz`.

Points are space components, ``c`` broadcasts against (..., 1), and every function gives (..., 1) or (..., n). Dtypes
and checks are the business of the public functions.
"""

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import (
    Scalar,
    asinhc,
    dot,
    root,
    safe_hypot,
    safe_norm,
    safe_sqrt,
    sqnorm,
    unit,
    wide,
)


def time_of(x: Tensor, c: Scalar) -> Tensor:
    """Time component (..., 1)."""
    return torch.sqrt(1 / c + sqnorm(x))


def time_step(x: Tensor, y: Tensor, tx: Tensor, ty: Tensor) -> Tensor:
    """``t(y) - t(x)`` without cancellation."""
    return dot(y - x, x + y) / (tx + ty)


def tangent_sqnorm(x: Tensor, v: Tensor, c: Scalar, t: Tensor, r: Tensor, xh: Tensor, vr: Tensor) -> Tensor:
    """``|v|_x^2`` (..., 1): a sum of positive terms away from the origin, a smooth form close to it."""
    across = sqnorm(v - xh * vr) + vr.square() / (c * t.square())
    smooth = sqnorm(v) - (dot(x, v) / t).square()
    return torch.where(c * r.square() < 0.25, smooth, across)


def radial_frame(x: Tensor, y: Tensor, c: Scalar) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The step from ``x`` to ``y`` seen from ``x``, in float64.

    Far out a rounding of the direction of ``x`` in float32 is as long as the step itself, so this one decomposition is
    made in float64 whatever the dtype; the functions round their result back.

    Returns:
        Unit vector of ``x`` (..., n), or 0 at the origin; radial part ``N`` (..., 1); transverse part ``P`` (..., n);
        ``t_x`` (..., 1). They satisfy ``sinh(s d)/s = hypot(N, |P|)``.
    """
    x, y, c = wide(x), wide(y), wide(c)
    r = safe_norm(x)
    xh = unit(x, r)
    e = y - x
    er, yr = dot(xh, e), dot(xh, y)
    # y and y - x have the same transverse part; the shorter of the two loses fewer digits on the way to it.
    from_y = sqnorm(y) < sqnorm(e)
    across = torch.where(from_y, y, e) - xh * torch.where(from_y, yr, er)
    tx, ty = time_of(x, c), time_of(y, c)
    # N = s (t_x y_r - r t_y). On the same side of the origin the two products nearly cancel: multiply by the conjugate.
    same_side = yr > 0
    den = torch.where(same_side, tx * yr + r * ty, 1.0)
    conjugate = (er / c) * ((yr + r) / den) - r * (r / den) * sqnorm(across)
    along = root(c) * torch.where(same_side, conjugate, tx * yr - r * ty)
    return xh, along, across, tx


def _ordered(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The two points with the farther one first; ties are broken so that swapping the arguments changes nothing."""
    qx, qy = sqnorm(x), sqnorm(y)
    e = (y - x).detach()
    first_difference = e.gather(-1, (e != 0).to(torch.uint8).argmax(-1, keepdim=True)) if e.shape[-1] else qx
    swap = (qy > qx) | ((qx == qy) & (first_difference > 0))
    return torch.where(swap, y, x), torch.where(swap, x, y)


def has_wider(x: Tensor) -> bool:
    """Whether there is a wider dtype than that of ``x`` on its device."""
    return wide(x).dtype != x.dtype


def sinh_dist(x: Tensor, y: Tensor, c: Scalar) -> Tensor:
    """``sinh(s d)`` (..., 1) by the radial frame: for dtypes with no wider one."""
    # From the farther point, whose direction is the clearer one.
    _, along, across, _ = radial_frame(*_ordered(x, y), c)
    return root(c) * safe_hypot(along, safe_norm(across))


def sqsinh_half(x: Tensor, y: Tensor, c: Scalar) -> Tensor:
    """``sinh^2(s d / 2)`` (..., 1), in float64 if the device has it; the same bits if ``x`` and ``y`` change places."""
    if not has_wider(x):
        w = sinh_dist(x, y, c)
        return w * (w / (1 + torch.hypot(w, torch.ones_like(w)))) / 2
    x, y, c = wide(x), wide(y), wide(c)
    e, m = y - x, x + y
    e2, m2, em, xy = sqnorm(e), sqnorm(m), dot(e, m), dot(x, y)
    qx, qy = sqnorm(x), sqnorm(y)
    tt = torch.sqrt(1 / c + qx) * torch.sqrt(1 / c + qy)
    # |y - x|^2 - (t_y - t_x)^2 as a ratio of sums of positive terms; `across` is the part of e across m, so that the
    # second term is (2 |x ^ y|)^2. It is exact for points on one ray, however far out and however close.
    across = e - m * (em / torch.where(m2 > 0, m2, 1.0))
    # Far apart, on different sides or at very different radii, 2 (cosh(s d) - 1)/c does not cancel and is used instead.
    far = (c * tt > 1e4) & ((xy < 0) | (torch.minimum(qx, qy) * 1e12 < torch.maximum(qx, qy)))
    ratio = (4 * e2 / c + m2 * sqnorm(across)) / torch.where(far, 1.0, 2 / c + 2 * tt + 2 * xy)
    return torch.where(far, 2 * (tt - xy) - 2 / c, ratio) * (c / 4)


def asinhc_of_square(w2: Tensor) -> Tensor:
    """``asinh(w)/w`` as a smooth function of ``w^2``, for ``w^2 <= 1``."""
    ok = w2 > (1e-8 if w2.dtype == torch.float64 else 1e-4)
    w = torch.where(ok, w2, 1.0).sqrt()
    small = torch.where(ok, 0.0, w2)
    return torch.where(ok, torch.asinh(w) / w, 1 + small * (-1 / 6 + small * (3 / 40)))


def logmap_near_origin(x: Tensor, y: Tensor, c: Scalar) -> Tensor:
    """``logmap`` by the ambient formula, for ``c |x|^2 < 1/4``."""
    tx = time_of(x, c)
    small = c * sqnorm(y) < 4
    y_small = torch.where(small, y, 0.0)
    step = time_step(x, y_small, tx, time_of(y_small, c))
    chord = (c / 2) * (sqnorm(y_small - x) - step.square())
    cosh_minus_1 = torch.where(small, chord, c * (tx * time_of(y, c) - dot(x, y)) - 1)
    u = (y - x) - cosh_minus_1 * x
    return asinhc(root(c) * safe_sqrt(sqnorm(u) - (dot(x, u) / tx).square())) * u
