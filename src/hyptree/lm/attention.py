"""Causal attention between Lorentz points, one head a point of its own, on one ``scaled_dot_product_attention``.

The weight of key j for query i is ``softmax_j((2/c + 2<q_i, k_j>_L)/tau)``, the output of a head the centroid of the
values. A row may be shifted, so the key carries the excess ``e = t - 1/s`` of its time over the origin's in place of t,
and so does the value (see :mod:`hyptree.nn.attention`). Queries, keys and values are turned, scaled and given their
times at once; the output projection reads the centroids.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.ambient import AmbientLinear, aligned
from hyptree.lm.rotary import score_scale
from hyptree.ops.centroid import centroid_linear
from hyptree.ops.heads import Heads, lift_heads
from hyptree.ops.heads.reference import excess_of, score_factor
from hyptree.ops.rounding import wide

if TYPE_CHECKING:
    from transformers import Cache

    from hyptree.lm.config import HelmConfig


class HelmAttention(nn.Module):
    """Attention of HELM-D: fused projection to queries, keys and values, HOPE, attention, output projection.

    Args:
        config: ``hidden_size``, ``num_attention_heads`` H, ``head_dim`` d, ``curvature``, ``time_columns``,
            ``value_scale``, ``rope_pairing``, ``attention_bias``; ``attn_implementation`` "sdpa", "flex_attention" or
            "eager", which is the definition, term by term.
        layer_idx: which layer of the cache is ours.

    Shape:
        qkv (B, N, 3 H d), what :attr:`qkv_proj` makes of the stream's normed points, or its product with padded columns
        -> (B, N, n), space components of the points that go into the residual, and the weights, if they are built.
    """

    def __init__(self, config: HelmConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        num_heads, d, c = config.num_attention_heads, int(config.head_dim or 0), float(config.curvature)
        split = config.time_columns == "split"
        width = aligned(d + (3 if split else 1))
        self.heads = Heads(
            num_heads, width, d, d, score_scale(config), float(config.value_scale or 1.0), c,
            interleaved=config.rope_pairing == "interleaved", split=split,
        )  # fmt: skip
        n, bias, groups = config.hidden_size, config.attention_bias, (3 * num_heads, d, width)
        self.qkv_proj = AmbientLinear(n, 3 * num_heads * d, bias, c, row_groups=groups, fused=3)
        self.o_proj = AmbientLinear(num_heads * d, n, bias, c, points=num_heads, point_width=width)
        self.log_tau = nn.Parameter(torch.empty(1))  # (1,) and not (): fully_shard takes no parameter without an axis
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the temperature to ``sqrt(H d)``; the projections draw themselves."""
        nn.init.constant_(self.log_tau, 0.5 * math.log(self.heads.num_heads * self.heads.key_dim))

    def forward(
        self,
        qkv: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            x.transpose(1, 2) for x in lift_heads(qkv, *position_embeddings, self.log_tau, self.heads)
        )  # (B, H, N, width)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        kind = self.config._attn_implementation or "sdpa"
        if output_attentions and kind == "sdpa":
            kind = "eager"  # the fused kernels build no weights
        mean, weights = ATTENTION[kind](self, q, k, v, attention_mask)
        return centroid_linear(mean, self.o_proj, self.heads.value_dim, self.heads.c), weights

    def extra_repr(self) -> str:
        return f"num_heads={self.heads.num_heads}, head_dim={self.heads.key_dim}, layer_idx={self.layer_idx}"


def _sdpa(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, None]:
    """One call of the fused kernels; without a mask the order is causal."""
    is_causal = False
    if mask is not None:
        mask = mask[..., : k.shape[2]]
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    elif q.shape[2] > 1:  # a branch, because a traced length makes no plain truth value
        is_causal = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=1.0), None


def _eager(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition: scores ``(2/c + 2<q, k>_L)/tau`` of all pairs from full times, softmax, ambient mean."""
    d, c, factor = layer.heads.key_dim, layer.heads.c, score_factor(layer.log_tau, layer.heads)
    q_s, k_s, v_s = wide(q[..., :d]), wide(k[..., :d]), wide(v[..., : layer.heads.value_dim])
    q_t = torch.sqrt(sqnorm(q_s) + factor * factor / c)  # of the query times 2/tau
    k_t, v_t = (torch.sqrt(sqnorm(x) + 1 / c) for x in (k_s, v_s))
    scores = factor / c + q_s @ k_s.mT - q_t @ k_t.mT  # (B, H, N, M)
    num_queries, num_keys = scores.shape[-2:]
    if mask is None:
        past = num_keys - num_queries
        place = torch.arange(num_keys, device=q.device)
        mask = place <= past + place[:num_queries, None]
    mask = mask[..., :num_keys]
    # The lowest finite score where nothing may be seen: a row without keys stays finite.
    lowest = torch.finfo(scores.dtype).min
    weights = (scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask).softmax(-1)
    space, time = weights @ v_s, weights @ v_t
    return torch.cat([space, time - 1 / math.sqrt(c)], -1).to(v.dtype), weights


def _flex(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, None]:
    """FlexAttention: block masks for packed documents, and the product of times in float32 in any model."""
    d, over_c, factor = layer.heads.key_dim, 1 / layer.heads.c, score_factor(layer.log_tau, layer.heads)
    q, k = q[..., :d], k[..., :d]
    q_time = torch.sqrt(sqnorm(wide(q)) + factor * factor * over_c).squeeze(-1)  # (B, H, N)
    k_excess = excess_of(sqnorm(wide(k)), over_c).squeeze(-1)
    block_mask, dense = mask, None
    if mask is None:
        block_mask = _causal_blocks(q.shape[2], k.shape[2], q.device)
    elif isinstance(mask, Tensor):
        block_mask, dense = None, mask

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score - q_time[b, h, i] * k_excess[b, h, j]
        if dense is None:
            return score
        return (
            torch.where(dense[b, 0, i, j], score, -math.inf) if dense.dtype == torch.bool else score + dense[b, 0, i, j]
        )

    out = _flex_function(q.device.type)(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=1.0)
    return out, None


@lru_cache(maxsize=8)
def _causal_blocks(num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """The blocks of plain causal order, for the last ``num_queries`` of ``num_keys`` tokens."""
    past = num_keys - num_queries

    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + past >= j

    return create_block_mask(is_seen, None, None, num_queries, num_keys, device=device)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _flex_function(device: str) -> Callable[..., Any]:
    """FlexAttention as it is inside a compiled model, compiled alone on a GPU, interpreted on a CPU."""
    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex() if device == "cuda" else _interpreted_flex


def _interpreted_flex(*arguments: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return flex_attention(*arguments, **settings)


ATTENTION: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "sdpa": _sdpa,
    "eager": _eager,
    "flex_attention": _flex,
}
"""What ``attn_implementation`` may name."""
