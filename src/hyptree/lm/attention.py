"""Causal attention between Lorentz points, one head a point of its own, on one ``scaled_dot_product_attention``.

The weight of key j for query i is ``softmax_j((2/c + 2<q_i, k_j>_L)/tau)``, the output of a head the centroid of the
values. A row may be shifted, so the key carries the excess ``e = t - 1/s`` of its time over the origin's in place of t,
and so does the value (see :mod:`hyptree.nn.attention`). Queries, keys and values leave their projection in rows with
room for the time, and are turned, scaled and lifted by one kernel; the centroids go, times included, into the output
projection.
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
from hyptree.lm.ambient import AmbientLinear, aligned, rounded
from hyptree.lm.fused.attention import centroid_product, lifted_heads
from hyptree.lm.rotary import rotate, score_scale
from hyptree.ops.centroid import fits as centroid_fits
from hyptree.ops.heads import Heads
from hyptree.ops.heads import fits as heads_fit
from hyptree.ops.rounding import wide

if TYPE_CHECKING:
    from transformers import Cache

    from hyptree.lm.config import HelmConfig


def excess_of(square: Tensor, over_c: float | Tensor) -> Tensor:
    """``t - 1/s`` of points with squared norms ``square``, without cancellation; ``over_c`` is 1/c."""
    origin = over_c.sqrt() if isinstance(over_c, Tensor) else math.sqrt(over_c)
    return square / (torch.sqrt(square + over_c) + origin)


class HelmAttention(nn.Module):
    """Attention of HELM-D: fused projection to queries, keys and values, HOPE, attention, output projection.

    Args:
        config: ``hidden_size``, ``num_attention_heads`` H, ``head_dim`` d, ``curvature``, ``time_columns``,
            ``value_scale``, ``rope_pairing``, ``attention_bias``; ``attn_implementation`` "sdpa", "flex_attention" or
            "eager", which is the definition, term by term.
        layer_idx: which layer of the cache is ours.

    Shape:
        lifted (B, N, width) -> (B, N, n), space components of the points that go into the residual.
    """

    def __init__(self, config: HelmConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, int(config.head_dim or 0)
        self.c, self.score_scale = float(config.curvature), score_scale(config)
        self.value_scale = float(config.value_scale or 1.0)
        self.num_time_columns = 3 if config.time_columns == "split" else 1
        self.row_width = aligned(self.head_dim + self.num_time_columns)
        self.heads = Heads(
            self.num_heads, self.row_width, self.head_dim, self.head_dim, self.score_scale, self.value_scale, self.c,
            interleaved=config.rope_pairing == "interleaved",
        )  # fmt: skip
        heads = 3 * self.num_heads
        self.qkv_proj = AmbientLinear(
            config.hidden_size,
            heads * self.head_dim,
            config.attention_bias,
            row_groups=(heads, self.head_dim, self.row_width),
            fused=3,
        )
        self.o_proj = AmbientLinear(
            self.num_heads * self.head_dim,
            config.hidden_size,
            config.attention_bias,
            points=self.num_heads,
            point_width=self.row_width,
        )
        self.log_tau = nn.Parameter(torch.empty(1))  # (1,) and not (): fully_shard takes no parameter without an axis
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the temperature to ``sqrt(H d)``; the projections draw themselves."""
        nn.init.constant_(self.log_tau, 0.5 * math.log(self.num_heads * self.head_dim))

    def forward(
        self,
        lifted: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        qkv: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attend; ``qkv`` is the projection of the lifted rows where it has been made already."""
        qkv = self.qkv_proj(lifted) if qkv is None else qkv
        attend = ATTENTION.get(self.config._attn_implementation or "sdpa", _sdpa)
        factor = None
        if attend is _sdpa and self._has_kernel(qkv, position_embeddings):
            q, k, v = lifted_heads(qkv, position_embeddings, self.log_tau, self.heads)
        else:
            q, k, v, factor = self._lifted_heads(qkv, position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        mean, weights = attend(self, q, k, v, attention_mask, factor)
        if attend is _sdpa and type(self.o_proj) is AmbientLinear and centroid_fits(mean):
            out = centroid_product(mean, self.o_proj, self.head_dim, self.c)
        else:
            out = self.o_proj(self._centroids(mean.transpose(1, 2)).flatten(-2))
        return (out, weights) if output_attentions else out

    def _has_kernel(self, qkv: Tensor, tables: tuple[Tensor, Tensor]) -> bool:
        """Whether one kernel makes queries, keys and values; it knows one time column."""
        return self.num_time_columns == 1 and heads_fit(qkv, tables[0], self.heads)

    def _lifted_heads(
        self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries times ``2/tau``, keys and values with their time columns: three (B, H, N, width) and ``2/tau``.

        All three in one expression, because a compiler then makes one kernel of it.
        """
        d, dtype = self.head_dim, qkv.dtype
        heads = qkv.unflatten(-1, (3, self.num_heads, self.row_width))  # (B, N, 3, H, width)
        part = torch.arange(3, device=qkv.device)[:, None, None]
        cos, sin = (table[:, :, None, None] for table in position_embeddings)  # (B, N, 1, 1, turned)
        turned = torch.where(part < 2, rotate(heads, cos, sin, self.config.rope_pairing), wide(heads))
        factor = 2 * self.score_scale * torch.exp(-wide(self.log_tau)).to(turned.dtype)
        one = torch.ones_like(factor)  # two numbers in a `where` would be float32
        scale = torch.where(part == 0, factor, torch.where(part == 1, one, one * self.value_scale))
        point = rounded(turned * scale, dtype)
        # a scaled point is a point of another curvature, and its time is scaled with it
        square, over_c = sqnorm(point), torch.where(part == 0, factor * factor, one) / self.c
        excess = excess_of(square, over_c)
        time = torch.where(part == 0, -torch.sqrt(square + over_c), excess)
        column = torch.arange(self.row_width, device=qkv.device)
        if self.num_time_columns == 1:
            full = torch.where(column == d, time, point)
        else:  # -t_q e_k = -(qh + ql)(kh + kl), but for ql kl: q (qh, qh, ql), k (kh, kl, kh), v (e, 0, 0)
            high = rounded(time, dtype)
            low = time - high
            second = torch.where(part == 0, high, torch.where(part == 1, low, 0.0))
            third = torch.where(part == 0, low, torch.where(part == 1, high, 0.0))
            full = torch.where(column == d, high, point)
            full = torch.where(column == d + 1, second, torch.where(column == d + 2, third, full))
        q, k, v = full.to(dtype).transpose(1, 3).unbind(2)  # each (B, H, N, width)
        return q, k, v, factor

    def _centroids(self, mean: Tensor) -> Tensor:
        """Points in the direction of mean values with mean excess, with their times: (..., width) -> (..., width)."""
        d, dtype, column = self.head_dim, mean.dtype, torch.arange(self.row_width, device=mean.device)
        space, excess = torch.where(column < d, wide(mean), 0.0), wide(mean[..., d : d + 1])
        # m_t^2 - |m|^2 - 1/c, never negative but for rounding
        gap = excess * (excess + 2 / math.sqrt(self.c)) - sqnorm(space)
        point = rounded(space * torch.rsqrt(1 + self.c * gap.clamp(min=0.0)), dtype)
        return torch.where(column == d, torch.sqrt(sqnorm(point) + 1 / self.c), point).to(dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, layer_idx={self.layer_idx}"


def _sdpa(
    layer: HelmAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None
) -> tuple[Tensor, None]:
    """One call of the fused kernels; without a mask the order is causal."""
    is_causal = False
    if mask is not None:
        mask = mask[..., : k.shape[2]]
    elif q.shape[2] > 1:  # a branch, because a traced length makes no plain truth value
        is_causal = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=1.0), None


def _eager(
    layer: HelmAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: scores ``(2/c + 2<q, k>_L)/tau`` of all pairs from full times, softmax, ambient mean."""
    d, c = layer.head_dim, layer.c
    q_s, k_s, v_s = (wide(x[..., :d]) for x in (q, k, v))
    q_t = torch.sqrt(sqnorm(q_s) + factor * factor / c)  # of the query times 2/tau
    k_t, v_t = (torch.sqrt(sqnorm(x) + 1 / c) for x in (k_s, v_s))
    scores = factor / c + q_s @ k_s.mT - q_t @ k_t.mT  # (B, H, N, M)
    num_queries, num_keys = scores.shape[-2:]
    if mask is None:
        past = num_keys - num_queries
        place = torch.arange(num_keys, device=q.device)
        scores = scores.masked_fill(place > past + place[:num_queries, None], -math.inf)
    else:
        mask = mask[..., :num_keys]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    space, time = weights @ v_s, weights @ v_t
    mean = F.pad(torch.cat([space, time - 1 / math.sqrt(c)], -1), (0, layer.row_width - d - 1))
    return mean.to(v.dtype), weights


def _flex(layer: HelmAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, factor: Tensor) -> tuple[Tensor, None]:
    """FlexAttention: block masks for packed documents, and the product of times in float32 in any model."""
    d, over_c = layer.head_dim, 1 / layer.c
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
