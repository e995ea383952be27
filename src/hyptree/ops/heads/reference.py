"""Queries, keys and values of attention with their time columns, in plain torch: the definition and its gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import rounded, wide


class Heads(NamedTuple):
    """What heads are like: rows ``[space, time, 0, ...]`` of one width.

    Attributes:
        num_heads: H. width: columns of a row. key_dim, value_dim: space components of queries and keys, of values.
        score_scale: factor on the scores. value_scale: factor on the values. c: curvature -c.
        interleaved: component 2l turns with 2l + 1, else l with l + turned/2.
        shared_dim: first components of a key that all heads share, 0 if each has its own.
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


def lift_heads(
    rows: Tensor, queries: Tensor | None, shared: Tensor | None, cos: Tensor, sin: Tensor, log_tau: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries times ``2/tau``, keys and values, (B, N, H, width) each; see ``ops.heads.lift_heads``."""
    dtype, c, parts = rows.dtype, heads.c, rows.unflatten(-1, (-1, heads.num_heads, heads.width)).unbind(-3)
    query, key, value = parts if queries is None else (queries, *parts)
    cos, sin = (table[:, :, None] for table in (cos, sin))
    factor = _factor(log_tau, heads)
    column = torch.arange(heads.width, device=rows.device)
    query, key = (torch.where(column < heads.key_dim, wide(x), 0.0) for x in (query, key))
    query = rounded(_turned(query, cos, sin, heads.interleaved) * factor, dtype)
    if shared is None:
        key = rounded(_turned(key, cos, sin, heads.interleaved), dtype)
    else:
        shared = wide(shared[..., None, : heads.shared_dim])
        shared = rounded(_turned(shared, cos, sin, heads.interleaved), dtype)
        key = torch.where(column < heads.shared_dim, F.pad(shared, (0, heads.width - heads.shared_dim)), key)
    value = rounded(torch.where(column < heads.value_dim, wide(value), 0.0) * heads.value_scale, dtype)
    # a scaled point is a point of another curvature, and its time is scaled with it
    query_time = -_time(query, factor * factor / c)
    full = [torch.where(column == heads.key_dim, query_time, query)]
    for point, d in ((key, heads.key_dim), (value, heads.value_dim)):
        excess = point.square().sum(-1, keepdim=True) / (_time(point, 1 / c) + 1 / math.sqrt(c))
        full.append(torch.where(column == d, excess, point))
    q, k, v = (x.to(dtype) for x in full)
    return q, k, v


def lift_heads_grad(
    lifted: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    log_tau: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of rows, queries, shared and log_tau from (B, N, H, width) results and their gradients."""
    dtype, column = lifted[0].dtype, torch.arange(heads.width, device=cos.device)
    cos, sin = (table[:, :, None] for table in (cos, sin))
    factor = _factor(log_tau, heads)
    dims = (heads.key_dim, heads.key_dim, heads.value_dim)
    to_parts = []
    for part, (x, grad, d) in enumerate(zip(lifted, grads, dims, strict=True)):
        point, to_point = (torch.where(column < d, wide(one), 0.0) for one in (x, grad))
        to_time, time = (
            wide(grad[..., d : d + 1]),
            _time(point, factor * factor / heads.c if part == 0 else 1 / heads.c),
        )
        if part == 0:  # a query and its time are both proportional to 2/tau
            to_tau = (to_time * time).sum() - (to_point * point).sum()
            to_time = -to_time
        to_parts.append(to_point + to_time / time * point)
    query = _turned_back(to_parts[0] * factor, cos, sin, heads.interleaved).to(dtype)
    value, key = (to_parts[2] * heads.value_scale).to(dtype), to_parts[1]
    to_tau = to_tau.to(log_tau.dtype).reshape(log_tau.shape)
    if not heads.shared_dim:
        key = _turned_back(key, cos, sin, heads.interleaved).to(dtype)
        return torch.stack([query, key, value], 2).flatten(-3), None, None, to_tau
    shared = _turned_back(key[..., : heads.shared_dim].sum(2, keepdim=True), cos, sin, heads.interleaved)
    key = torch.where(column < heads.shared_dim, 0.0, key).to(dtype)
    return torch.stack([key, value], 2).flatten(-3), query, shared[:, :, 0].to(dtype), to_tau


def _factor(log_tau: Tensor, heads: Heads) -> Tensor:
    """``2/tau``, with whatever else scales the scores."""
    return 2 * heads.score_scale * torch.exp(-wide(log_tau))


def _time(point: Tensor, over_c: float | Tensor) -> Tensor:
    return torch.sqrt(point.square().sum(-1, keepdim=True) + over_c)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` with its first components turned, cosines and signed sines given."""
    turned = cos.shape[-1]
    first = x[..., :turned]
    return torch.cat([first * cos + _partner(first, interleaved) * sin, x[..., turned:]], -1)


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The transpose of :func:`_turned`."""
    turned = cos.shape[-1]
    first = x[..., :turned]
    return torch.cat([first * cos + _partner(first * sin, interleaved), x[..., turned:]], -1)


def _partner(x: Tensor, interleaved: bool) -> Tensor:
    """In the place of each component the other one of its pair."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)
