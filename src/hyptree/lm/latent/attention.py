"""Latent attention of HELM-MICE (HMLA): keys and values of all heads come from one small latent point per token.

The cache keeps the latent, the shared rotated key and two times per head (:mod:`latent_cache`). A step with one token
never rebuilds keys and values: for a lifted latent z the product ``q_n.(W_K z)`` is ``(W_K^T q_n).z``, and the mean of
``W_V z`` is ``W_V`` of the mean of z. What does not follow from means are the times, and those are cached. Longer
queries rebuild.

A head's row is ``[rotated, rest, time, 0, ...]``: what turns with the position comes first, and rows leave their
product with room for the time, so that none changes its length and a compiler makes one kernel of what happens to it.

Scores are ``(2/tau)(q.k - t_q t_k)``. As in :mod:`hyptree.nn.attention`, keys and values carry the excess
``e = t - 1/s`` of their time over the origin's: the difference is constant in a row, and nothing large is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.ambient import AmbientLinear, aligned, lift_padded, padded_width
from hyptree.lm.attention import excess_of
from hyptree.lm.latent.cache import LatentState, pack, unpack
from hyptree.lm.latent.scores import (
    Queries,
    Sizes,
    attend,
    attend_absorbed,
    attend_columns,
    key_value_columns,
    visible_keys,
)
from hyptree.lm.rotary import score_scale
from hyptree.ops import pack_weight
from hyptree.ops.bare import is_bare, readable
from hyptree.ops.centroid import centroid_linear
from hyptree.ops.heads import Heads, lift_heads
from hyptree.ops.heads.reference import rotate
from hyptree.ops.latent_decode import absorb_token, latent_decode
from hyptree.ops.latent_decode import fits as decode_fits
from hyptree.ops.rounding import rounded, wide

if TYPE_CHECKING:
    from transformers import Cache

    from hyptree.lm.config import HelmConfig


class Block(NamedTuple):
    """Outputs of a :class:`BlockLinear` that belong together: in every group ``rows`` behind ``start`` zeros."""

    groups: int
    rows: int
    width: int
    start: int = 0


@readable
class BlockLinear(AmbientLinear):
    """Several linear maps of the same points in one product; in that of its ``matrix`` each output has a row with room.

    Args:
        in_features: n. blocks: what comes out, in this order. bias: learn one.
        drawn: how many of the outputs each of the matrices had that were put together; drawn as if alone.

    """

    def __init__(
        self, in_features: int, blocks: Sequence[Block], bias: bool, c: float, drawn: Sequence[int] | None = None
    ):
        self.blocks = tuple(blocks)
        self.sizes = [block.groups * block.rows for block in blocks]
        self.drawn = list(drawn or [sum(self.sizes)])
        super().__init__(in_features, sum(self.sizes), bias, c)

    def reset_parameters(self) -> None:
        """Draw as Xavier uniform with gain sqrt(2) does, times ``gain_factors``; the bias is 0."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for parameter, gain in ((self.weight, self.gain_factors.weight), (self.weight_time, self.gain_factors.time)):
            if not getattr(parameter, "_is_hf_initialized", False):  # transformers marks what came from a file
                for rows in parameter.split(self.drawn):
                    bound = gain * math.sqrt(12 / (rows.shape[0] + self.in_features + 1))
                    nn.init.uniform_(rows, -bound, bound)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """That of :class:`AmbientLinear`, with the rows of each block in their place."""

        def make() -> Tensor:
            full = pack_weight.pack_weight(self.weight, self.weight_time, self.bias, self.layout, dtype)
            return padded_blocks(full.mT, self.blocks).mT.contiguous()

        return self._weight_cache.get(dtype, make)


def padded_blocks(product: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Outputs of a :class:`BlockLinear` side by side with room in their rows: (..., m) -> (..., groups width ...)."""
    parts = []
    for block, part in zip(blocks, product.split([block.groups * block.rows for block in blocks], -1), strict=True):
        room = (block.start, block.width - block.start - block.rows)
        parts.append(F.pad(part.unflatten(-1, (block.groups, block.rows)), room).flatten(-2))
    return torch.cat(parts, -1)


def split_blocks(product: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, ...]:
    """One (..., groups, width) per block, from a product with room or without."""
    if product.shape[-1] == sum(block.groups * block.rows for block in blocks):
        product = padded_blocks(product, blocks)
    parts = product.split([block.groups * block.width for block in blocks], -1)
    return tuple(part.unflatten(-1, (block.groups, block.width)) for block, part in zip(blocks, parts, strict=True))


def apply_lifted(layer: Any, lifted: Tensor, rank: int) -> Tensor:
    """``layer`` of lifted points with ``rank`` space components."""
    if is_bare(layer):
        return F.linear(lifted, layer.matrix(lifted.dtype))
    out: Tensor = layer(lifted[..., :rank])
    return out


class _Heads(NamedTuple):
    """Keys and values of all heads, rounded but held in float32 at least, and the excess of their times."""

    space: Tensor  # (B, N, 2, H, width): keys [rotated, rest, 0, ...] and values [v, 0, ...]
    excess: Tensor  # (B, N, 2, H, 1)


class LatentAttention(nn.Module):
    """Causal attention between Lorentz points whose keys and values are made from a latent of r components.

    Args:
        config: sizes of the heads (``qk_nope_head_dim`` d_n, ``qk_rope_head_dim`` d_r, ``v_head_dim`` d_v) and of the
            latents (``kv_lora_rank`` r, ``q_lora_rank``), ``cache_mode``, ``time_columns``, ``value_scale``.
        layer_idx: which layer of the cache is ours.

    Shape:
        rows (B, N, m), what :attr:`down` makes of the stream's normed points -> (B, N, n), space components of the
        points that go into the residual, and the weights (B, H, N, M), or None where they are not built.
    """

    def __init__(self, config: HelmConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.num_heads = config, layer_idx, config.num_attention_heads
        nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        key_dim, value_dim = nope_dim + self.rope_dim, config.v_head_dim
        self.rank, self.query_rank = config.kv_lora_rank, config.q_lora_rank
        self.c, bias, heads = float(config.curvature), config.attention_bias, config.num_attention_heads
        self.value_scale, self.score_scale = float(config.value_scale or 1.0), score_scale(config)
        split = config.time_columns == "split"
        self.sizes = Sizes(key_dim, value_dim, self.c, split)
        self.key_width, self.value_width = aligned(key_dim + (3 if split else 1)), aligned(value_dim + 1)
        width = max(self.key_width, self.value_width)  # fused attention wants one for both
        self.heads = Heads(
            heads, width, key_dim, value_dim, self.score_scale, self.value_scale, self.c,
            interleaved=config.rope_pairing == "interleaved", shared_dim=self.rope_dim,
        )  # fmt: skip
        self.latent_width = self.rank + 1 + int(bias)  # of a lifted latent, without its padding
        queries = Block(heads, key_dim, width)
        latents = [Block(1, self.rank, padded_width(self.rank, bias)), Block(1, self.rope_dim, aligned(self.rope_dim))]
        # One product for all that reads the stream: the queries (or their latent), the latent, the shared rotated key.
        first = Block(1, self.query_rank, padded_width(self.query_rank, bias)) if self.query_rank else queries
        drawn = [first.groups * first.rows, self.rank + self.rope_dim]
        self.down_blocks, self.q_blocks = [first, *latents], [queries]
        self.down = BlockLinear(config.hidden_size, self.down_blocks, bias, self.c, drawn)
        self.kv_gain = nn.Parameter(torch.empty(self.rank))
        self.kv_blocks = [Block(heads, nope_dim, width, start=self.rope_dim), Block(heads, value_dim, width)]
        self.kv_up = BlockLinear(self.rank, self.kv_blocks, bias, self.c)
        if self.query_rank:
            self.q_gain = nn.Parameter(torch.empty(self.query_rank))
            self.q_up = BlockLinear(self.query_rank, self.q_blocks, bias, self.c)
        self.o_proj = AmbientLinear(
            heads * value_dim, config.hidden_size, bias, self.c, points=heads, point_width=self.value_width
        )
        self.log_tau = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the temperature to ``sqrt(H (d_n + d_r + 1))`` and the gains to 1; the projections draw themselves."""
        nn.init.constant_(self.log_tau, 0.5 * math.log(self.num_heads * (self.sizes.key_dim + 1)))
        nn.init.ones_(self.kv_gain)
        if self.query_rank:
            nn.init.ones_(self.q_gain)

    def forward(
        self,
        rows: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = rows.dtype
        if past_key_values is None and self._implementation == "sdpa" and self.rope_dim and not self.sizes.split:
            return self._output(self._attend_fused(rows, position_embeddings, attention_mask), dtype), None
        is_step = rows.shape[1] == 1 and not output_attentions
        if past_key_values is not None and is_step and self._decodes(rows, position_embeddings, attention_mask):
            points = self._decode(rows, position_embeddings, attention_mask, past_key_values)
            points = points[..., : self.sizes.value_dim].flatten(-2)
            return cast(Tensor, self.o_proj(points.unsqueeze(1))), None
        q, latent, rotated = self._project(rows, position_embeddings)
        heads = self._heads(latent, rotated)
        if past_key_values is None:
            mean, weights = self._attend(q, *self._columns(heads, dtype), attention_mask, 0)
        elif self.config.cache_mode == "full":
            mean, weights = self._with_full_cache(q, heads, attention_mask, past_key_values, dtype)
        else:
            mean, weights = self._with_latent_cache(q, latent, rotated, heads, attention_mask, past_key_values)
        return self._output(mean, dtype), weights

    def _attend_fused(self, lifted: Tensor, tables: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """Attention of tokens to themselves from one kernel's queries, keys and values: (B, H, N, width)."""
        q, latent, rotated = self._down(lifted)
        up = torch.cat([x.flatten(-2) for x in self._up_rows(latent)], -1)
        lifted_heads = lift_heads(up, *tables, self.log_tau, self.heads, queries=q, shared=rotated[:, :, 0])
        q, k, v = (x.transpose(1, 2) for x in lifted_heads)
        mask, is_causal = visible_keys(mask, 0, q.shape[2], k.shape[2], k.device)
        return attend_columns(q, k, v, mask, is_causal)

    def _project(self, lifted: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Queries, Tensor, Tensor]:
        """Queries, the lifted latent (B, N, width), the shared rotated key (B, N, 1, d_r) in the latent's dtype."""
        q, latent, rotated = self._down(lifted)
        cos, sin = (table.unsqueeze(-2).to(wide(q).dtype) for table in position_embeddings)  # (B, N, 1, turned)
        q, rotated = (rotate(wide(x), cos, sin, self.heads.interleaved) for x in (q, rotated))
        # A scaled point is a point of another curvature, and its time is scaled with it.
        factor = 2 * self.score_scale * torch.exp(-wide(self.log_tau)).to(q.dtype)
        q = rounded(q * factor, lifted.dtype)
        queries = Queries(q, torch.sqrt(sqnorm(q) + factor * factor / self.c))
        return queries, latent, rotated[..., : self.rope_dim].to(lifted.dtype)

    def _down(self, lifted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of queries (B, N, H, width), the lifted latent (B, N, width), the shared key before it turns."""
        q, latent, rotated = self._rows(lifted)
        return q, self._normed(latent, self.kv_gain)[:, :, 0], rotated

    def _rows(self, lifted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of queries (B, N, H, width), of the latent before its norm, and of the shared key before it turns."""
        q, latent, rotated = split_blocks(lifted, self.down_blocks)
        if self.query_rank:
            normed = self._normed(q, self.q_gain)[:, :, 0]
            (q,) = split_blocks(apply_lifted(self.q_up, normed, self.query_rank), self.q_blocks)
        return q, latent, rotated

    def _up_rows(self, latent: Tensor) -> tuple[Tensor, ...]:
        """Rows of keys and of values (B, N, H, width) of lifted latents."""
        return split_blocks(apply_lifted(self.kv_up, latent, self.rank), self.kv_blocks)

    def _normed(self, latent: Tensor, gain: Tensor) -> Tensor:
        """RMS norm of rows whose first components are a latent, lifted: (..., width) -> (..., width)."""
        x, rank = wide(latent), gain.shape[0]
        scale = torch.rsqrt(sqnorm(x) / rank + self.config.rms_norm_eps)
        gain = F.pad(gain.to(x.dtype), (0, x.shape[-1] - rank))
        return lift_padded(x * scale * gain, rank, latent.dtype, self.c, bias=self.config.attention_bias)

    def _heads(self, latent: Tensor, rotated: Tensor) -> _Heads:
        """Keys and values from lifted latents (B, N, width) and rotated keys (B, N, 1, d_r).

        Both in one expression, because a compiler then makes one kernel of it.
        """
        up = torch.stack(self._up_rows(latent), 2)
        is_key = torch.arange(2, device=up.device)[:, None, None] == 0
        rotated = F.pad(wide(rotated), (0, up.shape[-1] - self.rope_dim)).unsqueeze(-2)
        space = torch.where(is_key, wide(up) + rotated, rounded(wide(up) * self.value_scale, up.dtype))
        return _Heads(space, excess_of(sqnorm(space), 1 / self.c))

    def _columns(self, heads: _Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values as attention reads them, two (B, H, N, width)."""
        return key_value_columns(heads.space, heads.excess, self.sizes, dtype)

    @property
    def _implementation(self) -> str:
        return self.config._attn_implementation or "sdpa"

    def _attend(self, q: Queries, k: Tensor, v: Tensor, mask: Any, past: int | Tensor) -> tuple[Tensor, Tensor | None]:
        return attend(self._implementation, q, k, v, self.sizes, mask, past)

    def _with_full_cache(
        self, q: Queries, heads: _Heads, mask: Any, cache: Cache, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with a cache of the keys and values of all heads."""
        past, num_new = self._past(cache), q.space.shape[1]
        k, v = self._columns(heads, dtype)
        cached = cache.update(k[..., : self.key_width], v[..., : self.value_width], self.layer_idx)
        if not _is_first(past, num_new):
            k, v = cached
        return self._attend(q, k, v, mask, past)

    def _decodes(self, lifted: Tensor, tables: tuple[Tensor, Tensor], mask: Any) -> bool:
        """Whether kernels go from one new token per sequence and cached latents to centroids."""
        if self.config.cache_mode == "full" or self._implementation != "sdpa":
            return False
        if torch.is_grad_enabled() or tables[0].dtype != torch.float32 or not tables[0].shape[-1]:
            return False
        if not is_bare(self.kv_up):  # an adapter's layer is more than its matrix
            return False
        if mask is not None and not (isinstance(mask, Tensor) and mask.shape[1:3] == (1, 1)):
            return False
        maps = (self.num_heads, self.sizes.value_dim, self.latent_width)
        return decode_fits(lifted, maps, None if mask is None else mask[:, 0, 0])

    def _decode(self, lifted: Tensor, tables: tuple[Tensor, Tensor], mask: Any, cache: Cache) -> Tensor:
        """Centroids (B, H, width) of all that is cached for one new token; keys and values of heads are not made."""
        past, up = self._past(cache), self.kv_up.matrix(lifted.dtype)
        q, latent, rotated = self._rows(lifted)
        queries, time, keys, times = absorb_token(
            q[:, 0], latent[:, 0, 0], rotated[:, 0, 0], tables[0][:, 0], tables[1][:, 0], self.log_tau, self.kv_gain,
            up, self.heads, eps=self.config.rms_norm_eps, bias=self.config.attention_bias,
        )  # fmt: skip
        cached = cache.update(keys[:, None, None], times[:, None, None], self.layer_idx)
        keys, times = (x.squeeze(1) for x in cached)
        mask, _ = visible_keys(mask, past, 1, keys.shape[1], keys.device)
        return latent_decode(
            queries, time, keys, times, self._up(up)[1], None if mask is None else mask[:, 0, 0],
            value_scale=self.value_scale, width=self.value_width, c=self.c,
        )  # fmt: skip

    def _with_latent_cache(
        self, q: Queries, latent: Tensor, rotated: Tensor, heads: _Heads, mask: Any, cache: Cache
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with a cache of latents: absorbed for one token, rebuilt for more."""
        past, num_new = self._past(cache), q.space.shape[1]
        keys = torch.cat([latent[..., : self.latent_width], rotated[:, :, 0]], -1)
        new = LatentState(keys, *heads.excess[..., 0].unbind(2))
        cached = cache.update(*pack(new), self.layer_idx)
        if not _is_first(past, num_new):
            state = unpack(*cached, self.num_heads)
            if num_new == 1 and is_bare(self.kv_up):
                up_key, up_value = self._up(self.kv_up.matrix(latent.dtype))
                return attend_absorbed(q, state, up_key, up_value, self.rope_dim, self.value_scale, mask, past)
            latents, rotated = state.keys.split((self.latent_width, self.rope_dim), -1)
            latents = F.pad(latents, (0, latent.shape[-1] - self.latent_width))
            heads = self._heads(latents, rotated.unsqueeze(-2))
        return self._attend(q, *self._columns(heads, latent.dtype), mask, past)

    def _up(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The maps from lifted latents to rows of keys (H, width, r + 2) and to values (H, d_v, r + 2)."""
        parts = matrix[:, : self.latent_width].chunk(2)
        key, value = (part.unflatten(0, (self.num_heads, -1)) for part in parts)
        return key, value[:, : self.sizes.value_dim]

    def _past(self, cache: Cache) -> int | Tensor:
        """How many tokens the cache holds; a tensor once a static cache is in use, which must not be read back."""
        past: int | Tensor = cache.get_seq_length(self.layer_idx)
        return past.clone() if isinstance(past, Tensor) else past  # the cache counts on in its own tensor

    def _output(self, mean: Tensor, dtype: torch.dtype) -> Tensor:
        """The output projection of the centroids: means (B, H, N, width) -> (B, N, n)."""
        return centroid_linear(mean.to(dtype), self.o_proj, self.sizes.value_dim, self.c)


def _is_first(past: int | Tensor, num_new: int) -> bool:
    """Whether these are several tokens for an empty cache, so that their own keys and values are all there are."""
    return num_new > 1 and isinstance(past, int) and past == 0
