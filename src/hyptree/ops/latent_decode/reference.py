"""Attention of one token per sequence to cached latents, in plain torch: the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyptree.ops.centroid.reference import centroid
from hyptree.ops.heads.reference import Heads, rotate, score_factor
from hyptree.ops.rounding import rounded, wide

HALF = (torch.bfloat16, torch.float16)


def unpack_times(times: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Excess of the times of keys and of values, two (B, M, H) in float32 at least, from what a cache holds."""
    excess = wide(times[..., : 2 * num_heads])
    if times.dtype in HALF:
        excess = excess + wide(times[..., 2 * num_heads : 4 * num_heads])
    key_excess, value_excess = excess.split(num_heads, -1)
    return key_excess, value_excess


def absorb_token(
    queries: Tensor, latent: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, log_tau: Tensor, gain: Tensor,
    up: Tensor, heads: Heads, eps: float, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Absorbed queries, their times, and what is cached of the token; see ``ops.latent_decode.absorb_token``."""
    dtype, rank, num_heads, over_c = queries.dtype, gain.shape[0], heads.num_heads, 1 / heads.c
    x = wide(latent[:, :rank])
    point = rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype), dtype)
    time = torch.sqrt(point.square().sum(-1, keepdim=True) + over_c)
    lifted = torch.cat([point, time, torch.ones_like(time)][: 2 + int(bias)], -1).to(dtype)  # (B, L)
    shared = rounded(rotate(wide(shared[:, : heads.shared_dim]), cos, sin, heads.interleaved), dtype)
    factor = score_factor(log_tau, heads).to(x.dtype)
    is_space = torch.arange(heads.width, device=queries.device) < heads.key_dim
    query = rotate(torch.where(is_space, wide(queries), 0.0), cos[:, None], sin[:, None], heads.interleaved)
    query = rounded(query * factor, dtype)
    query_time = torch.sqrt(query.square().sum(-1) + factor * factor / heads.c)
    maps = wide(up[:, : lifted.shape[-1]].unflatten(0, (2, num_heads, heads.width)))
    both = rounded(torch.einsum("phwl,bl->pbhw", maps, wide(lifted)), dtype)
    key, value = both[0], rounded(both[1] * heads.value_scale, dtype)
    squares = torch.cat([key.square().sum(-1) + shared.square().sum(-1, keepdim=True), value.square().sum(-1)], -1)
    excess = squares / (torch.sqrt(squares + over_c) + math.sqrt(over_c))  # (B, 2H)
    high = rounded(excess, dtype)
    times = torch.cat([high, excess - high], -1) if dtype in HALF else excess
    to_latent = torch.einsum("bhw,hwl->bhl", query, maps[0])
    absorbed = torch.cat([to_latent, query[..., : heads.shared_dim]], -1)
    return absorbed.to(dtype), query_time, torch.cat([wide(lifted), shared], -1).to(dtype), times.to(dtype)


def latent_decode(
    queries: Tensor, time: Tensor, keys: Tensor, times: Tensor, up_value: Tensor, mask: Tensor | None,
    value_scale: float, width: int, c: float,
) -> Tensor:  # fmt: skip
    """Centroids ``[s, t, 0, ...]`` (B, H, width); see ``ops.latent_decode.latent_decode``. A mask may also be added."""
    key_excess, value_excess = unpack_times(times, queries.shape[1])
    scores = _wide_product(queries, keys.mT) - time.unsqueeze(-1) * key_excess.mT  # (B, H, M)
    if mask is not None:
        mask = mask[:, None, : keys.shape[1]]
        lowest = torch.finfo(scores.dtype).min  # a row without keys stays finite
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    weights = scores.softmax(-1)
    mean = torch.bmm(weights.to(keys.dtype), keys[..., : up_value.shape[-1]])  # (B, H, L), the mean of lifted latents
    value = torch.bmm(mean.transpose(0, 1), up_value.mT).transpose(0, 1)  # (B, H, D)
    excess = (weights * value_excess.mT).sum(-1, keepdim=True)
    return centroid(torch.cat([wide(value) * value_scale, excess], -1), up_value.shape[1], width, c).to(keys.dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of batches of matrices, not rounded to half precision in the end."""
    if a.dtype not in HALF:
        return torch.bmm(a, b)
    needs_gradient = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.is_cuda and not needs_gradient:
        return torch.bmm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return torch.bmm(a.float(), b.float())
