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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.ambient import AmbientLinear, aligned, padded_width
from hyptree.lm.attention import ATTENTION
from hyptree.lm.latent.cache import pack
from hyptree.lm.rotary import score_scale
from hyptree.ops import pack_weight
from hyptree.ops.bare import is_bare, readable, report_unfused
from hyptree.ops.centroid import centroid_linear
from hyptree.ops.heads import Heads, lift_heads
from hyptree.ops.heads.reference import excess_of
from hyptree.ops.latent_decode import absorb_token, latent_decode
from hyptree.ops.residual_norm import norm_linear
from hyptree.ops.residual_norm.reference import lift, rms_norm
from hyptree.ops.rounding import wide

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
            return pad_blocks(full.mT, self.blocks).mT.contiguous()

        return self._weight_cache.get(dtype, make)


def pad_blocks(product: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Outputs of a :class:`BlockLinear` side by side, with room in their rows as a product by its ``matrix`` has."""
    if product.shape[-1] == sum(block.groups * block.width for block in blocks):
        return product
    parts = []
    for block, part in zip(blocks, product.split([block.groups * block.rows for block in blocks], -1), strict=True):
        room = (block.start, block.width - block.start - block.rows)
        parts.append(F.pad(part.unflatten(-1, (block.groups, block.rows)), room).flatten(-2))
    return torch.cat(parts, -1)


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
        self.config, self.layer_idx = config, layer_idx
        nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        key_dim, value_dim = nope_dim + self.rope_dim, config.v_head_dim
        self.rank, self.query_rank, self.eps = config.kv_lora_rank, config.q_lora_rank, config.rms_norm_eps
        self.c, bias, heads = float(config.curvature), config.attention_bias, config.num_attention_heads
        split = config.time_columns == "split"
        self.key_width, self.value_width = aligned(key_dim + (3 if split else 1)), aligned(value_dim + 1)
        width = max(self.key_width, self.value_width)  # fused attention wants one for both
        self.heads = Heads(
            heads, width, key_dim, value_dim, score_scale(config), float(config.value_scale or 1.0), self.c,
            interleaved=config.rope_pairing == "interleaved", shared_dim=self.rope_dim, split=split,
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
        nn.init.constant_(self.log_tau, 0.5 * math.log(self.heads.num_heads * (self.heads.key_dim + 1)))
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
        cache: Any = past_key_values
        past: int | Tensor = 0
        widths = [block.groups * block.width for block in self.down_blocks]
        q, latent, shared = pad_blocks(rows, self.down_blocks).split(widths, -1)
        latent = latent[..., : self.rank]
        if self.query_rank:
            _, q = norm_linear(q[..., : self.query_rank], self.q_gain, self.q_up, eps=self.eps, c=self.c)
            q = pad_blocks(q, self.q_blocks)
        q = q.unflatten(-1, (self.heads.num_heads, -1))  # (B, N, H, width)
        kind = self.config._attn_implementation or "sdpa"
        if output_attentions and kind == "sdpa":
            kind = "eager"  # the fused kernels build no weights
        if cache is not None:
            past = cache.get_seq_length(self.layer_idx)
            past = past.clone() if isinstance(past, Tensor) else past  # the cache counts on in its own tensor
            is_step = q.shape[1] == 1 and kind == "sdpa" and self.config.cache_mode == "latent"
            if is_step and (attention_mask is None or attention_mask.shape[1:3] == (1, 1)):
                if is_bare(self.kv_up) and is_bare(self.o_proj):
                    return self._step(q, latent, shared, position_embeddings, attention_mask, cache, past), None
                report_unfused("latent_decode", self.o_proj if is_bare(self.kv_up) else self.kv_up)
        _, up = norm_linear(latent, self.kv_gain, self.kv_up, eps=self.eps, c=self.c)
        up = pad_blocks(up, self.kv_blocks)
        lifted = lift_heads(up, *position_embeddings, self.log_tau, self.heads, queries=q, shared=shared)
        q, k, v = (x.transpose(1, 2) for x in lifted)  # (B, H, N, width)
        if cache is not None:
            k, v = self._cached(latent, k, v, cache, past)
        mask = attention_mask
        if kind != "flex_attention" or not isinstance(mask, BlockMask) or mask.shape[-1] != k.shape[2]:
            kind = "sdpa" if kind == "flex_attention" else kind
            mask = visible_keys(mask, past, q.shape[2], k.shape[2], k.device)
        mean, weights = ATTENTION[kind](self, q[..., : k.shape[-1]], k, v, mask)
        return centroid_linear(mean, self.o_proj, self.heads.value_dim, self.c), weights

    def _cached(self, latent: Tensor, k: Tensor, v: Tensor, cache: Cache, past: int | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, behind those of the new ones in the cache: (B, H, M, width) each."""
        is_first = k.shape[2] > 1 and isinstance(past, int) and past == 0  # then the new ones are all there are
        if self.config.cache_mode == "full":
            old = cache.update(k[..., : self.key_width], v[..., : self.value_width], self.layer_idx)
            if is_first:
                return k, v
            if k.shape[2] == 1:  # the fused kernels want one width; for a single query none is worth a copied cache
                return old
            k, v = (F.pad(x, (0, self.heads.width - x.shape[-1])) for x in old)
            return k, v
        point = rms_norm(latent, self.kv_gain, self.eps)
        point = lift(point, k.dtype, self.latent_width, self.c, self.config.attention_bias)
        sizes = (k, self.heads.key_dim), (v, self.heads.value_dim)
        excess = [excess_of(sqnorm(wide(x[..., :d])), 1 / self.c).squeeze(-1).transpose(1, 2) for x, d in sizes]
        keys, _ = cache.update(*pack(torch.cat([point, k[:, 0, :, : self.rope_dim]], -1), *excess), self.layer_idx)
        if is_first:
            return k, v
        latents, shared = keys.squeeze(1).split((self.latent_width, self.rope_dim), -1)
        up = pad_blocks(self.kv_up(latents[..., : self.rank]), self.kv_blocks)
        still = torch.ones_like(shared[:1, :, : self.config.rotary_dim], dtype=wide(k).dtype)  # keys have turned
        anything = up.chunk(2, -1)[0].unflatten(-1, (self.heads.num_heads, -1))  # in the place of queries
        lifted = lift_heads(up, still, 0 * still, self.log_tau, self.heads, queries=anything, shared=shared)
        return lifted[1].transpose(1, 2), lifted[2].transpose(1, 2)

    def _step(
        self, q: Tensor, latent: Tensor, shared: Tensor, tables: tuple[Tensor, Tensor], mask: Any, cache: Cache,
        past: int | Tensor,
    ) -> Tensor:  # fmt: skip
        """One new token per sequence and cached latents: (B, 1, n). Keys and values of heads are never made."""
        up, heads = self.kv_up.matrix(q.dtype), self.heads
        queries, time, keys, times = absorb_token(
            q[:, 0], latent[:, 0], shared[:, 0], tables[0][:, 0], tables[1][:, 0], self.log_tau, self.kv_gain, up,
            heads, eps=self.eps, bias=self.config.attention_bias,
        )  # fmt: skip
        keys, times = (x.squeeze(1) for x in cache.update(keys[:, None, None], times[:, None, None], self.layer_idx))
        mask = visible_keys(mask, past, 1, keys.shape[1], keys.device)
        up_value = up.chunk(2)[1].unflatten(0, (heads.num_heads, -1))[:, : heads.value_dim, : self.latent_width]
        points = latent_decode(
            queries, time, keys, times, up_value, None if mask is None else mask[:, 0, 0],
            value_scale=heads.value_scale, width=self.value_width, c=self.c,
        )  # fmt: skip
        bias = None if self.o_proj.bias is None else self.o_proj.bias.to(points.dtype)
        return F.linear(points.flatten(-2)[:, None], self.o_proj.matrix(points.dtype), bias)  # they bring their times


def visible_keys(mask: Any, past: int | Tensor, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """The mask for the first ``num_keys`` keys; None where plain causal order says the same.

    Without a mask query i sees the keys up to ``past + i``. Reads no value of ``past`` when it is a tensor, as in a
    static cache, whose unused places are then masked.

    Args:
        mask: (B, 1 or H, N, >= num_keys), boolean (True: look) or added to the scores; a BlockMask; or None.
        past: tokens in the cache before the queries came.
    """
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], num_queries, num_keys, str(device))
    if mask is not None:
        out: Tensor = mask[..., :num_keys]
        return out
    if isinstance(past, int) and past + num_queries == num_keys and (past == 0 or num_queries == 1):
        return None
    last = past + torch.arange(num_queries, device=device)
    return (torch.arange(num_keys, device=device) <= last[:, None])[None, None]
