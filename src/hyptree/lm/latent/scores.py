"""Attention of Lorentz heads whose keys and values differ in size: fused, as defined, with FlexAttention, and absorbed.

All take queries that carry the factor ``2/tau``, and give the mean of the values and, behind it, of their excess, from
which the centroid follows. ``split`` carries each time as two numbers of half precision, because scores are small
differences of large products.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.attention import _flex_function, excess_of
from hyptree.lm.latent.cache import LatentState
from hyptree.ops.latent_decode.reference import attend as attend_latents
from hyptree.ops.rounding import rounded, wide


class Queries(NamedTuple):
    """Points times ``2/tau``, rounded to the dtype of the keys but held in float32 at least, and their times."""

    space: Tensor  # (B, N, H, width), 0 from key_dim on
    time: Tensor  # (B, N, H, 1), of the rounded points, times 2/tau too


class Sizes(NamedTuple):
    """Space components of keys and values, their curvature -c, and whether times take three columns or one."""

    key_dim: int
    value_dim: int
    c: float
    split: bool


def query_columns(q: Queries, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """``[q, -t, 0, ...]`` as (B, H, N, width), or ``[q, -t_high, -t_high, -t_low, 0, ...]``."""
    column = torch.arange(q.space.shape[-1], device=q.space.device) - sizes.key_dim
    if sizes.split:
        high = rounded(-q.time, dtype)
        times = torch.where(column < 2, high, -q.time - high)
    else:
        times = -q.time
    return torch.where(_is_time(column, sizes), times, q.space).to(dtype).transpose(1, 2)


def key_value_columns(space: Tensor, excess: Tensor, sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys ``[k, e, 0, ...]``, or ``[k, e_high, e_low, e_high, 0, ...]``, and values ``[v, e, 0, ...]``.

    Args:
        space: (B, N, 2, H, width), keys and values, 0 where the times go. excess: (B, N, 2, H, 1).

    Returns:
        two (B, H, N, width).
    """
    place = torch.arange(space.shape[-1], device=space.device)
    is_key = torch.arange(2, device=space.device)[:, None, None] == 0
    column = place - sizes.key_dim
    times = excess
    if sizes.split:
        high = rounded(excess, dtype)
        times = torch.where(is_key, torch.where(column == 1, excess - high, high), excess)
    is_time = torch.where(is_key, _is_time(column, sizes), place == sizes.value_dim)
    key, value = torch.where(is_time, times, space).to(dtype).transpose(1, 3).unbind(2)
    return key, value


def _is_time(column: Tensor, sizes: Sizes) -> Tensor:
    """Whether a column, counted from the first behind the space components, is one of a query's or key's times."""
    return (column >= 0) & (column < 3) if sizes.split else column == 0


def attend(
    implementation: str, q: Queries, k: Tensor, v: Tensor, sizes: Sizes, mask: Any, past: int | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Means of the values (B, H, N, at least d_v + 1), and the weights (B, H, N, M) where they are built.

    Args:
        implementation: "sdpa", "eager" or "flex_attention".
        k, v: (B, H, M, ...) with their columns, from :func:`key_value_columns`.
        mask: see :func:`visible_keys`. past: tokens that were there before the queries.
    """
    num_queries, num_keys = q.space.shape[1], k.shape[2]
    if isinstance(mask, BlockMask) and implementation == "flex_attention" and mask.shape[-1] == num_keys:
        return _flex(q, k, v, sizes, mask), None
    mask, is_causal = visible_keys(mask, past, num_queries, num_keys, k.device)
    if implementation == "eager":
        return _eager(q, k, v, sizes, mask, is_causal)
    columns = query_columns(q, sizes, k.dtype)
    if num_queries > 1:  # the fused kernels want one width; for a single query none is worth a copied cache
        width = max(k.shape[-1], v.shape[-1])
        k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (k, v))
    return attend_columns(columns[..., : k.shape[-1]], k, v, mask, is_causal), None


def attend_columns(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Means of the values (B, H, N, width) for queries, keys and values with their columns, in one fused call."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(k.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=1.0)


def _eager(
    q: Queries, k: Tensor, v: Tensor, sizes: Sizes, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The definition: all scores ``2<q, k>_L/tau`` from full times, softmax, ambient mean."""
    q_s, q_t = (x.transpose(1, 2) for x in (q.space[..., : sizes.key_dim], q.time))
    k_s, v_s = wide(k[..., : sizes.key_dim]), wide(v[..., : sizes.value_dim])
    k_t, v_t = (torch.sqrt(sqnorm(x) + 1 / sizes.c) for x in (k_s, v_s))
    if is_causal:
        mask = torch.ones(q_s.shape[2], k_s.shape[2], dtype=torch.bool, device=k.device).tril()[None, None]
    weights = _masked(q_s @ k_s.mT - q_t @ k_t.mT, mask).softmax(-1)
    return torch.cat([weights @ v_s, weights @ v_t - 1 / math.sqrt(sizes.c)], -1), weights


def _flex(q: Queries, k: Tensor, v: Tensor, sizes: Sizes, mask: BlockMask) -> Tensor:
    """FlexAttention: block masks, and the product of times in float32 whatever the heads are in."""
    k = k[..., : sizes.key_dim]
    space, time = (x.transpose(1, 2) for x in (q.space[..., : sizes.key_dim].to(k.dtype), q.time[..., 0]))
    excess = excess_of(sqnorm(wide(k)), 1 / sizes.c)[..., 0]  # (B, H, M)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - time[b, h, i] * excess[b, h, j]

    mean: Tensor = _flex_function(k.device.type)(space, k, v, score_mod=score_mod, block_mask=mask, scale=1.0)
    return mean


def attend_absorbed(
    q: Queries,
    state: LatentState,
    up_key: Tensor,
    up_value: Tensor,
    rope_dim: int,
    value_scale: float,
    mask: Any,
    past: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` for one query per sequence, on cached latents: keys and values of heads are never made.

    One attention with a single key head whose rows of queries are the heads. It is written as products because the
    latent and its times lie in two slots: fused attention would have to copy the whole cache into one block, and would
    read it with one thread block per sequence, where products share the keys among many. On a GPU without gradients
    :func:`hyptree.ops.latent_decode.latent_decode` says the same.

    Args:
        up_key, up_value: (H, width, r + 2) and (H, d_v, r + 2), the maps from lifted latents to the columns of keys,
            with zeros where the ``rope_dim`` rotated ones are, and to values before ``value_scale``.
    """
    space = q.space[:, 0].to(state.keys.dtype)  # (B, H, width)
    to_latent = torch.bmm(space.transpose(0, 1), up_key).transpose(0, 1)  # (B, H, r + 2), a query to lifted latents
    queries = torch.cat([to_latent, space[..., :rope_dim]], -1)
    mask, _ = visible_keys(mask, past, 1, state.keys.shape[1], state.keys.device)
    seen = None if mask is None else mask[:, :, 0]
    mean, weights = attend_latents(queries, q.time[:, 0], *state, up_value, value_scale, seen)
    return mean.unsqueeze(2), weights.unsqueeze(2)


def visible_keys(
    mask: Any, past: int | Tensor, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The mask for the first ``num_keys`` keys, and whether the kernel's own causal order is meant in its place.

    Without a mask query i sees the keys up to ``past + i``. Reads no value of ``past`` when it is a tensor, as in a
    static cache, whose unused places are then masked.

    Args:
        mask: (B, 1 or H, N, >= num_keys), boolean (True: look) or added to the scores; a BlockMask; or None.
        past: tokens in the cache before the queries came.
    """
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], num_queries, num_keys, str(device))
    if mask is not None:
        return mask[..., :num_keys], False
    if isinstance(past, int) and past + num_queries == num_keys:
        if num_queries == 1:
            return None, False
        if past == 0:
            return None, True
    last = past + torch.arange(num_queries, device=device)
    return (torch.arange(num_keys, device=device) <= last[:, None])[None, None], False


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The lowest finite score where nothing may be seen: a row without keys stays finite."""
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask.to(scores.dtype)
