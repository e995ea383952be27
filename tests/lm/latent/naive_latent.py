"""Latent attention as its formulas say it: ambient points, one token pair at a time, float64, nothing fused."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hyptree.lm.ambient import AmbientLinear
from hyptree.lm.config import HelmConfig
from hyptree.lm.latent.attention import LatentAttention
from hyptree.lm.rotary import HelmRotary


class Traced(NamedTuple):
    """The result, and the ambient points (..., 1 + d) that were met on the way."""

    out: Tensor
    points: dict[str, Tensor]


def ambient(s: Tensor, c: float) -> Tensor:
    """``[t, s]``."""
    return torch.cat([torch.sqrt((s * s).sum(-1, keepdim=True) + 1 / c), s], -1)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Lorentz product of ambient points."""
    return (x[..., 1:] * y[..., 1:]).sum(-1) - x[..., 0] * y[..., 0]


def linear(layer: AmbientLinear, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """``W [t; s] + b`` for ambient x."""
    out = x[..., 1:] @ layer.weight[rows].T + x[..., :1] * layer.weight_time[rows]
    return out if layer.bias is None else out + layer.bias[rows]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def turn(x: Tensor, position: int, config: HelmConfig) -> Tensor:
    """(..., d_r) turned pair by pair."""
    x, size = x.clone(), config.rotary_dim
    frequency = HelmRotary(config).inv_freq.tolist()  # float32 by definition, as in every rotary model
    for pair in range(size // 2):
        a, b = (2 * pair, 2 * pair + 1) if config.rope_pairing == "interleaved" else (pair, pair + size // 2)
        angle = position * frequency[pair]
        first, second = x[..., a].clone(), x[..., b].clone()
        x[..., a] = math.cos(angle) * first - math.sin(angle) * second
        x[..., b] = math.sin(angle) * first + math.cos(angle) * second
    return x


def naive_latent_attention(layer: LatentAttention, s: Tensor, positions: Tensor, allowed: Tensor) -> Traced:
    """What ``layer`` gives for points s (B, N, n) at positions (B, N); ``allowed[b, i, j]``: query i sees key j."""
    config, c, heads = layer.config, layer.c, layer.num_heads
    nope, rope, value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    num_query, rank = config.q_lora_rank or heads * (nope + rope), config.kv_lora_rank
    x = ambient(s, c)
    q = linear(layer.down, x, slice(0, num_query))
    if config.q_lora_rank:
        q = linear(layer.q_up, ambient(rms_norm(q, layer.q_gain, config.rms_norm_eps), c))
    latent = linear(layer.down, x, slice(num_query, num_query + rank))
    shared = linear(layer.down, x, slice(num_query + rank, None))
    z = ambient(rms_norm(latent, layer.kv_gain, config.rms_norm_eps), c)
    k_nope, value = linear(layer.kv_up, z).split((heads * nope, heads * value_dim), -1)
    k_nope, value = k_nope.unflatten(-1, (heads, nope)), value.unflatten(-1, (heads, value_dim))
    q = q.unflatten(-1, (heads, nope + rope))
    q_rope, k_rope = torch.zeros_like(q[..., :rope]), torch.zeros_like(shared)
    for b, i in torch.cartesian_prod(torch.arange(s.shape[0]), torch.arange(s.shape[1])).tolist():
        q_rope[b, i] = turn(q[b, i, :, :rope], int(positions[b, i]), config)
        k_rope[b, i] = turn(shared[b, i], int(positions[b, i]), config)
    q = ambient(torch.cat([q_rope, q[..., rope:]], -1), c)
    k = ambient(torch.cat([k_rope[:, :, None].expand(-1, -1, heads, -1), k_nope], -1), c)
    v = ambient(value * config.value_scale, c)
    scores = (2 / c + 2 * inner(q[:, :, None], k[:, None])) / layer.log_tau.exp()  # (B, N, N, H)
    weights = scores.masked_fill(~allowed[..., None], -torch.inf).softmax(2)
    mean = torch.einsum("bijh,bjhd->bihd", weights, v)
    centroid = mean / torch.sqrt(-c * inner(mean, mean))[..., None]
    weight = layer.o_proj.weight.unflatten(-1, (heads, value_dim))
    out = torch.einsum("bihd,nhd->bin", centroid[..., 1:], weight) + centroid[..., 0] @ layer.o_proj.weight_time.T
    if layer.o_proj.bias is not None:
        out = out + layer.o_proj.bias
    return Traced(out, {"q": q, "k": k, "v": v, "latent": z, "centroid": centroid})
