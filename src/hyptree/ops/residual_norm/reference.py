"""Lorentz residual, RMS norm and lift in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, sqnorm
from hyptree.ops.rounding import rounded, wide


def residual(x: Tensor, y: Tensor, raw_weight: Tensor, gain: float = 1.0, c: Scalar = 1.0) -> Tensor:
    """The Lorentz residual: the weighted centroid of x and y, its space components times ``gain``.

    With ``w = softplus(raw_weight)`` and ``a = x + w y`` the result is ``gain a / sqrt(-c <a, a>_L)``. As both are
    points, ``-<a, a>_L = (1 + w^2)/c + 2 w g`` with ``g = t_x t_y - x.y >= 1/c``: the bound holds exactly, and the
    large squares of a far x do not enter. The stream settles at a norm near ``gain^2 / (2 |y|)``.

    Args:
        x, y: (..., n) points; y may have a lower precision. raw_weight: () or (1,).

    Returns:
        (..., n) in the dtype of ``x``.
    """
    to, x = x.dtype, wide(x)
    y = wide(y).to(x.dtype)
    c = c.to(x.dtype) if isinstance(c, Tensor) else c
    w = F.softplus(raw_weight.to(x.dtype))
    g = torch.sqrt(sqnorm(x) + 1 / c) * torch.sqrt(sqnorm(y) + 1 / c) - (x * y).sum(-1, keepdim=True)
    q = (1 + w * w) / c + 2 * w * g.clamp(min=1 / c)
    return (gain / c**0.5 * torch.rsqrt(q) * (x + w * y)).to(to)


def rms_norm(s: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """``gain s / sqrt(mean(s^2) + eps)`` in float32 at least, then the dtype of ``s``: (..., n) -> (..., n)."""
    x = wide(s)
    return (x * torch.rsqrt(sqnorm(x) / s.shape[-1] + eps) * gain.to(x.dtype)).to(s.dtype)


def lift(s: Tensor, dtype: torch.dtype, width: int, c: Scalar = 1.0, bias: bool = True) -> Tensor:
    """``[s, t, 1, 0, ...]`` (..., width) in ``dtype``, the time that of ``s`` rounded to it."""
    s = rounded(s, dtype)
    parts = [s, torch.sqrt(sqnorm(s) + 1 / c)] + ([torch.ones_like(s[..., :1])] if bias else [])
    lifted = torch.cat([part.to(dtype) for part in parts], -1)
    return F.pad(lifted, (0, width - lifted.shape[-1]))


def aligned(width: int) -> int:
    """``width`` rounded up to a multiple of 8: 16 bytes of bfloat16, what fast matrix products read at once."""
    return -(-width // 8) * 8


def padded_width(n: int, bias: bool = True) -> int:
    """Columns of a lifted point with n space components: n, the time, the one for the bias, zeros up to 8 k."""
    return aligned(n + 1 + int(bias))
