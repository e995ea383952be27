"""Distances between all points of two sets on the hyperboloid: no (N, M, n) tensor, no transcendental function per row.

Two ways to the same numbers. ``exact_distances`` compares directions by differences and is right for points that nearly
coincide; ``matmul_distances`` costs one matrix product and about ten operations per pair.
"""

from typing import Any

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import (
    Scalar,
    asinh,
    root,
    safe_hypot,
    safe_norm,
    safe_sqrt,
    sqnorm,
    strict_matmul,
    unit,
    wide,
)
from hyptree.geometry.sets import accurate_cdist


def _growth(x: Tensor, s: Scalar) -> tuple[Tensor, Tensor, Tensor]:
    """``s|x|``, ``e^a - 1`` and ``e^-a`` for the radius ``a = asinh(s|x|)``, without a transcendental function.

    They give ``2 sinh((a - b)/2) = (e^a - e^b) e^(-a/2) e^(-b/2)`` for all pairs by products alone.
    """
    r = s * safe_norm(x)
    st = torch.sqrt(1 + r.square())
    return r, r + r.square() / (1 + st), 1 / (st + r)


def exact_distances(x: Tensor, y: Tensor, c: Scalar) -> Tensor:
    """(..., N, n), (..., M, n) -> (..., N, M) with the error of a single distance."""
    s = root(c)
    (rx, px, gx), (ry, py, gy) = _growth(x, s), _growth(y, s)
    xh, yh = unit(x, safe_norm(x)), unit(y, safe_norm(y))
    # Unit vectors rounded to float32 would blur small angles: the directions alone are compared in float64.
    wide_x, wide_y = wide(x), wide(y)
    angle = accurate_cdist(unit(wide_x, safe_norm(wide_x)), unit(wide_y, safe_norm(wide_y))).to(x.dtype)
    radial = (px - py.mT) * (gx.sqrt() * gy.sqrt().mT) / 2  # sinh((a - b)/2)
    chord = angle * (safe_sqrt(rx) * safe_sqrt(ry).mT / 2)
    d = (asinh(wide(safe_hypot(radial, chord))) * (2 / root(wide(c)))).to(x.dtype)  # rounded once: s d may be 80
    # At the origin the direction is undefined and carries no gradient; the true one is -y/|y| (and the value 0 here).
    from_x = strict_matmul(torch.where(rx > 0, 0.0, x), yh.mT)
    return d - from_x - strict_matmul(xh, torch.where(ry > 0, 0.0, y).mT)


def matmul_distances(x: Tensor, y: Tensor, c: Scalar, allow_low_precision: bool) -> Tensor:
    """(..., N, n), (..., M, n) -> (..., N, M) by one product; the diagonal is exactly zero if ``x is y``."""
    if isinstance(c, Tensor):  # as points of curvature 1: the gradient of c is then a sum over rows, not over pairs
        scaled = root(c) * x
        return matmul_distances(scaled, scaled if y is x else root(c) * y, 1.0, allow_low_precision) / root(c)
    (cosh_x, *rows_x), (cosh_y, *rows_y) = _radial(x, c), _radial(y, c)
    # Laid out in memory, so that a compiler does not evaluate them again for every pair.
    a, on_x = torch.cat(rows_x, -1).split(1, -1)  # (..., N, 1)
    b, on_y = torch.cat([row.mT for row in rows_y], -2).split(1, -2)  # (..., 1, M)
    other = y.view_as(y) if y is x else y  # a compiler refuses the same tensor twice
    cosh = _CoshOfDistance.apply(x, other, cosh_x, cosh_y, on_x, on_y, c, allow_low_precision)
    diagonal = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device) if y is x else None
    return _Distance.apply(cosh, a, b, diagonal, c**-0.5)


def _radial(x: Tensor, c: float) -> tuple[Tensor, Tensor, Tensor]:
    """``cosh(a)`` of the radius ``a = asinh(s|x|)``; then, detached, ``a`` and that cosh but 0 at the origin."""
    square = c * sqnorm(x)
    cosh = torch.sqrt(1 + square)
    r = safe_sqrt(square.detach())
    return cosh, asinh(r), torch.where(r == 0, 0.0, cosh.detach())


class _CoshOfDistance(torch.autograd.Function):
    """``cosh(s d) = cosh_x cosh_y - c x.y`` of all pairs; a number below 1 where one of them is the origin.

    The points enter the product as they lie in memory. Their times join it on the way back, where the sums over all
    pairs that they need come with the product.

    Args:
        cosh_x, cosh_y: (..., N, 1) and (..., M, 1), for the gradient.
        on_x, on_y: the same for the value, but 0 at the origin: (..., N, 1) and (..., 1, M).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, y: Tensor, cosh_x: Tensor, cosh_y: Tensor, on_x: Tensor, on_y: Tensor, c: float, low: bool
    ) -> Tensor:
        return on_x * on_y - c * strict_matmul(x, y.mT, low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, _, _, ctx.c, ctx.low = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, cosh_x, cosh_y = ctx.saved_tensors
        to_x = strict_matmul(grad, torch.cat([-ctx.c * y, cosh_y], -1), ctx.low)
        to_y = strict_matmul(grad.mT, torch.cat([-ctx.c * x, cosh_x], -1), ctx.low)
        n = x.shape[-1]
        parts = to_x[..., :n], to_y[..., :n], to_x[..., n:], to_y[..., n:]
        sums = [part.sum_to_size(t.shape) for part, t in zip(parts, (x, y, cosh_x, cosh_y), strict=True)]
        return *sums, None, None, None, None


class _Distance(torch.autograd.Function):
    """``over_s`` times ``acosh(cosh)``, and at least the difference of the radii, which points on one ray reach.

    This bound is exact and removes most of the error that the product has for close points. It applies after the
    logarithm: so small distances need no care inside it, as where the bound is not reached the product has already lost
    the digits that ``log1p`` would keep. An origin is on every ray; there ``cosh`` is below 1 and the bound the value.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(cosh: Tensor, a: Tensor, b: Tensor, diagonal: Tensor | None, over_s: float) -> Tensor:
        cosh = cosh.clamp_min(1.0)
        # The square might overflow. Beyond 1e18 sinh is cosh, so the excess is added without one; a mask costs more.
        near = cosh.clamp_max(1e18)
        outer = torch.log(cosh + (cosh - near) + torch.sqrt((near - 1) * (near + 1)))
        inner = (a - b).abs()
        d = torch.maximum(outer, inner) * over_s
        return d if diagonal is None else torch.where(diagonal, inner, d)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.over_s = inputs[-1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The slope is ``over_s / sinh(s d)``, also where the bound is reached: there both have the same gradient."""
        (d,) = ctx.saved_tensors
        d = d * (1 / ctx.over_s)
        # 1 / sinh(d) by one division and, unlike torch.sinh, a cheap exponential. It has no digits for small distances.
        small, some = d < (0.02 if d.dtype == torch.float64 else 0.5), d != 0
        square, decay = d * d, torch.exp(-d)
        series = d + d * (square / 6) * (1 + square / 20 * (1 + square / 42))
        sinh = torch.where(small, torch.where(some, series, 1.0), 1 - decay * decay)
        slope = torch.where(small, 1.0, 2 * decay) / sinh
        return grad * torch.where(some, ctx.over_s * slope, 0.0), None, None, None, None
