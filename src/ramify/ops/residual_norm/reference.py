"""Lorentz residual, RMS norm and lift in plain torch: the definition."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rounding import rounded, wide


def residual(x: Tensor, y: Tensor, raw_weight: Tensor, gain: float = 1.0, c: float = 1.0) -> Tensor:
    """The weighted centroid of x and y, its space components times ``gain``; see ``ops.residual_norm.residual_norm``.

    As both are points, ``-<a, a>_L = (1 + w^2)/c + 2 w g`` for ``a = x + w y``, with ``g = t_x t_y - x.y >= 1/c``: the
    bound holds exactly, and the large squares of a far x do not enter.
    """
    to, x = x.dtype, wide(x)
    y = wide(y).to(x.dtype)
    w = F.softplus(raw_weight.to(x.dtype))
    g = _time(x, c) * _time(y, c) - (x * y).sum(-1, keepdim=True)
    q = (1 + w * w) / c + 2 * w * g.clamp(min=1 / c)
    return (gain / math.sqrt(c) * torch.rsqrt(q) * (x + w * y)).to(to)


def norm_lift(
    x: Tensor, norm_gain: Tensor, eps: float, dtype: torch.dtype, width: int, c: float = 1.0, bias: bool = True
) -> Tensor:
    """``[s, t, 1, 0, ...]`` (..., width) in ``dtype`` for ``s`` the RMS norm of ``x``, rounded to its dtype first."""
    n, stored = x.shape[-1], x.dtype
    x = wide(x)
    s = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_gain.to(x.dtype)
    s = rounded(rounded(s, stored), dtype)
    parts = [s, _time(s, c)] + ([torch.ones_like(s[..., :1])] if bias else [])
    lifted = torch.cat([part.to(dtype) for part in parts], -1)
    return F.pad(lifted, (0, width - n - 1 - int(bias)))


def _time(x: Tensor, c: float) -> Tensor:
    return torch.sqrt(x.square().sum(-1, keepdim=True) + 1 / c)
