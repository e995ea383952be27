"""Distances between all points of two sets on the hyperboloid: no (N, M, n) tensor, no transcendental function per row.

Two ways to the same numbers. ``exact_distances`` compares directions by differences and is right for points that nearly
coincide; ``matmul_distances`` costs one matrix product and about ten operations per pair.
"""

from typing import Any

import torch
from torch import Tensor

from .numerics import (
    Scalar,
    asinh,
    quick_log1p,
    root,
    safe_hypot,
    safe_norm,
    safe_sqrt,
    strict_matmul,
    unit,
    wide,
)
from .sets import accurate_cdist


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
    s = root(c)
    n = x.shape[-1]
    # Each point is laid out once as [x, t, growth, decay, origin?]: the product reads the first n + 1 entries in place,
    # and a compiler is not tempted to recompute the others for every pair.
    left = torch.cat(_lifted(x, s), -1)  # (..., N, n + 4)
    right = torch.cat([part.mT for part in _lifted(-y, s)], -2)  # (..., n + 4, M), rows of it are read contiguously
    product = strict_matmul(left[..., : n + 1], right[..., : n + 1, :], allow_low_precision)
    (px, gx, ox), (py, gy, oy) = left[..., n + 1 :].split(1, -1), right[..., n + 1 :, :].split(1, -2)
    # cosh(s d) - 1 is at least cosh(a - b) - 1, which points on one ray reach: this removes most of the error that the
    # product has for close points. An origin is on every ray, so there the bound is the value, to the last digit.
    bound = (px - py).square() * (gx * gy)
    reached = ox + oy > 0
    if x is y:
        reached = reached | torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
    return _ArcCosh.apply(_Raise.apply(product - 1, bound.detach(), reached)) * (1 / s)


def _lifted(x: Tensor, s: Scalar) -> list[Tensor]:
    """``s x``, ``s t``, ``e^a - 1``, ``e^-a / sqrt(2)`` and a 1 where ``x`` is the origin, all on the last axis."""
    r, growth, decay = _growth(x, s)
    return [s * x, torch.sqrt(1 + r.square()), growth.detach(), decay.detach() * 0.5**0.5, (r == 0).to(x.dtype)]


class _Raise(torch.autograd.Function):
    """``z`` raised to a lower bound that touches it from below: value of the bound where it is reached, slope of ``z``.

    The two have the same gradient where they meet, and that of the bound would cost four more passes over all pairs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, bound: Tensor, reached: Tensor) -> Tensor:
        return torch.where(reached, bound, torch.maximum(z, bound))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _ArcCosh(torch.autograd.Function):
    """``acosh(1 + z)`` for ``z >= 0`` by one root and one logarithm; the gradient at 0 is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        # z^2 might overflow. Beyond 1e18 the root is z, so the excess is added without one; a mask would cost more.
        near = z.clamp_max(1e18)
        return quick_log1p(z + (z - near) + torch.sqrt(near * (near + 2)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        far, zero = z > 1e8, z <= 0
        near = torch.where(far | zero, 1.0, z)
        slope = torch.where(far, 1 / (1 + z), torch.rsqrt(near * (near + 2)))
        return grad * torch.where(zero, 0.0, slope)
