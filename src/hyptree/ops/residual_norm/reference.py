"""Lorentz residual, RMS norm and lift in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, dot, root, sqnorm
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
    g = _time(x, c) * _time(y, c) - dot(x, y)
    q = (1 + w * w) / c + 2 * w * g.clamp(min=1 / c)
    return (gain / root(c) * torch.rsqrt(q) * (x + w * y)).to(to)


def rms_norm(s: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """``gain s / sqrt(mean(s^2) + eps)`` in float32 at least, then the dtype of ``s``: (..., n) -> (..., n)."""
    x = wide(s)
    return (x * torch.rsqrt(sqnorm(x) / s.shape[-1] + eps) * gain.to(x.dtype)).to(s.dtype)


def norm_lift(
    x: Tensor, norm_gain: Tensor, eps: float, dtype: torch.dtype, width: int, c: float = 1.0, bias: bool = True
) -> Tensor:
    """``[s, t, 1, 0, ...]`` (..., width) in ``dtype`` for ``s`` the RMS norm of ``x``, rounded to its dtype first."""
    n, s = x.shape[-1], rounded(rms_norm(x, norm_gain, eps), dtype)
    parts = [s, _time(s, c)] + ([torch.ones_like(s[..., :1])] if bias else [])
    lifted = torch.cat([part.to(dtype) for part in parts], -1)
    return F.pad(lifted, (0, width - n - 1 - int(bias)))


def _time(x: Tensor, c: Scalar) -> Tensor:
    return torch.sqrt(sqnorm(x) + 1 / c)
