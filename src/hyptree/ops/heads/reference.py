"""Queries, keys and values of attention with their time columns, in plain torch: the definition."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry.core.numerics import sqnorm
from hyptree.ops.rounding import rounded, wide


class Heads(NamedTuple):
    """What heads are like: rows ``[space, time, 0, ...]`` of one width.

    Attributes:
        num_heads: H. width: columns of a row. key_dim, value_dim: space components of queries and keys, of values.
        score_scale: factor on the scores. value_scale: factor on the values. c: curvature -c.
        interleaved: component 2l turns with 2l + 1, else l with l + turned/2.
        shared_dim: first components of a key that all heads share, 0 if each has its own.
        split: carry times of queries and keys in three columns, as sums of two numbers of half precision.
    """

    num_heads: int
    width: int
    key_dim: int
    value_dim: int
    score_scale: float = 1.0
    value_scale: float = 1.0
    c: float = 1.0
    interleaved: bool = True
    shared_dim: int = 0
    split: bool = False


def lift_heads(
    rows: Tensor, queries: Tensor | None, shared: Tensor | None, cos: Tensor, sin: Tensor, log_tau: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries times ``2/tau``, keys and values, (B, N, H, width) each; see ``ops.heads.lift_heads``."""
    dtype, d, over_c = rows.dtype, heads.key_dim, 1 / heads.c
    parts = rows.unflatten(-1, (3 if queries is None else 2, heads.num_heads, -1)).unbind(-3)
    query, key, value = parts if queries is None else (queries, *parts)
    cos, sin = (table[:, :, None] for table in (cos, sin))
    factor = score_factor(log_tau, heads)
    query = rounded(rotate(wide(query[..., :d]), cos, sin, heads.interleaved) * factor, dtype)
    if shared is None:
        key = rounded(rotate(wide(key[..., :d]), cos, sin, heads.interleaved), dtype)
    else:
        shared = rotate(wide(shared[..., None, : heads.shared_dim]), cos, sin, heads.interleaved)
        shared = rounded(shared, dtype).expand(*key.shape[:-1], -1)
        key = torch.cat([shared, wide(key[..., heads.shared_dim : d])], -1)
    value = rounded(wide(value[..., : heads.value_dim]) * heads.value_scale, dtype)
    # a scaled point is a point of another curvature, and its time is scaled with it
    time = -torch.sqrt(sqnorm(query) + factor * factor * over_c)
    excess, value_excess = (excess_of(sqnorm(point), over_c) for point in (key, value))
    times = [[time], [excess], [value_excess]]
    if heads.split:  # -t_q e_k = -(qh + ql)(kh + kl), but for ql kl
        (qh, ql), (kh, kl) = ((high, x - high) for x in (time, excess) for high in (rounded(x, dtype),))
        times = [[qh, qh, ql], [kh, kl, kh], [value_excess]]
    full = (
        torch.cat([x.to(dtype) for x in (point, *columns)], -1)
        for point, columns in zip((query, key, value), times, strict=True)
    )
    q, k, v = (F.pad(x, (0, heads.width - x.shape[-1])) for x in full)
    return q, k, v


def score_factor(log_tau: Tensor, heads: Heads) -> Tensor:
    """``2/tau``, with whatever else scales the scores."""
    return 2 * heads.score_scale * torch.exp(-wide(log_tau))


def excess_of(square: Tensor, over_c: float) -> Tensor:
    """``t - 1/s`` of points with squared norms ``square``, without cancellation; ``over_c`` is 1/c."""
    return square / (torch.sqrt(square + over_c) + math.sqrt(over_c))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """``x`` with its first components turned, the others as they are: (..., d) -> (..., d), float32 at least.

    Args:
        x: (..., d), d at least the number of turned components.
        cos, sin: cosines and signed sines, (..., turned), which broadcast against ``x``; see ``lm.rotary.HelmRotary``.
        interleaved: component 2l turns with 2l + 1, else l with l + turned/2.
    """
    turned = cos.shape[-1]
    first = x[..., :turned]
    partner = first.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else first.roll(turned // 2, -1)
    return torch.cat([first * cos + partner * sin, x[..., turned:]], -1)
