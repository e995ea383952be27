"""Latent attention of HELM-MICE (HMLA): keys and values of all heads come from one small latent point per token.

The cache keeps the latent, the shared rotated key and two times per head (:mod:`latent_cache`). A step with one token
never rebuilds keys and values: for a lifted latent z the product ``q_n.(W_K z)`` is ``(W_K^T q_n).z``, and the mean of
``W_V z`` is ``W_V`` of the mean of z. What does not follow from means are the times, and those are cached. Longer
queries rebuild.

Scores are ``(2/tau)(q.k - t_q t_k)``. As in :mod:`ramify.nn.attention`, keys and values carry the excess
``e = t - 1/s`` of their time over the origin's: the difference is constant in a row, and nothing large is rounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..geometry.numerics import sqnorm
from ..nn.attention import _normalise
from ..nn.common import wide
from .ambient import AmbientLinear, aligned, lift, rms_norm, rounded
from .latent_cache import LatentState, is_half, pack, split_high_low, unpack
from .rotary import rotate, score_scale

if TYPE_CHECKING:
    from transformers import Cache

    from .config import HelmConfig


class _Heads(NamedTuple):
    """Keys and values of all heads, in the dtype of the matrix product, and the excess of their times."""

    nope: Tensor  # (B, N, H, d_n)
    rotated: Tensor  # (B, N, 1, d_r), the same for all heads
    value: Tensor  # (B, N, H, d_v)
    key_excess: Tensor  # (B, N, H, 1), float32 at least
    value_excess: Tensor  # (B, N, H, 1)


class LatentAttention(nn.Module):
    """Causal attention between Lorentz points whose keys and values are made from a latent of r components.

    Args:
        config: sizes of the heads (``qk_nope_head_dim`` d_n, ``qk_rope_head_dim`` d_r, ``v_head_dim`` d_v) and of the
            latents (``kv_lora_rank`` r, ``q_lora_rank``), ``cache_mode``, ``time_columns``, ``value_scale``.
        layer_idx: which layer of the cache is ours.

    Shape:
        lifted (B, N, width) -> (B, N, n), space components of the points that go into the residual.
    """

    def __init__(self, config: HelmConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.num_heads = config, layer_idx, config.num_attention_heads
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim, self.key_dim = config.v_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
        self.rank, self.query_rank = config.kv_lora_rank, config.q_lora_rank
        self.latent_width = self.rank + 1 + int(config.attention_bias)  # of a lifted latent, without its padding
        self.value_scale, self.score_scale = float(config.value_scale or 1.0), score_scale(config)
        self.c, bias, heads = float(config.curvature), config.attention_bias, config.num_attention_heads
        # One matrix for all that reads the stream: the queries (or their latent), the latent, the shared rotated key.
        self.down_rows = (self.query_rank or heads * self.key_dim, self.rank, self.rope_dim)
        self.down = _aligned_linear(config.hidden_size, sum(self.down_rows), bias)
        self.kv_gain = nn.Parameter(torch.empty(self.rank))
        self.kv_up = _aligned_linear(self.rank, heads * (self.nope_dim + self.value_dim), bias)
        if self.query_rank:
            self.q_gain = nn.Parameter(torch.empty(self.query_rank))
            self.q_up = _aligned_linear(self.query_rank, heads * self.key_dim, bias)
        self.o_proj = AmbientLinear(heads * self.value_dim, config.hidden_size, bias, points=heads)
        self.tau = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set temperature and gains, draw the pieces of the first projection as if each were alone."""
        nn.init.constant_(self.tau, math.sqrt(self.num_heads * (self.key_dim + 1)))
        nn.init.ones_(self.kv_gain)
        if self.query_rank:
            nn.init.ones_(self.q_gain)
        pieces = zip(self.down.weight.split(self.down_rows), self.down.weight_time.split(self.down_rows), strict=True)
        for weight, time in pieces:
            bound = math.sqrt(12.0 / (weight.shape[0] + weight.shape[1] + 1))  # Xavier, gain sqrt(2)
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(time, -bound, bound)

    def forward(
        self,
        lifted: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        q, latent, rotated = self._project(lifted, position_embeddings)
        heads = self._heads(latent, rotated)
        if past_key_values is None:
            mean = self._attend(q, self._keys(heads), self._values(heads), attention_mask, 0)
        elif self.config.cache_mode == "full":
            mean = self._with_full_cache(q, heads, attention_mask, past_key_values)
        else:
            mean = self._with_latent_cache(q, latent, heads, attention_mask, past_key_values)
        space, excess = wide(mean).split((self.value_dim, 1), -1)  # (B, H, N, ...)
        points = _normalise(space, excess, self.c).to(lifted.dtype).transpose(1, 2)
        return self.o_proj(lift(points, self.c, self.o_proj.point_width, bias=False).flatten(-2))

    def _project(self, lifted: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, N, H, d_n + d_r), the lifted latent (B, N, width), the shared rotated key (B, N, 1, d_r)."""
        q, latent, rotated = _product(self.down, lifted).split(self.down_rows, -1)
        latent = self._normed(latent, self.kv_gain)
        if self.query_rank:
            q = _product(self.q_up, self._normed(q, self.q_gain))
        nope, rope = q.unflatten(-1, (self.num_heads, self.key_dim)).split((self.nope_dim, self.rope_dim), -1)
        cos, sin = (table.unsqueeze(-2).to(wide(q).dtype) for table in position_embeddings)  # (B, N, 1, turned)
        rope, rotated = (rotate(x, cos, sin, self.config.rope_pairing) for x in (rope, rotated.unsqueeze(-2)))
        return torch.cat([nope, rope.to(nope.dtype)], -1), latent, rotated

    def _normed(self, latent: Tensor, gain: Tensor) -> Tensor:
        normed = rms_norm(latent, gain, self.config.rms_norm_eps)
        return lift(normed, self.c, bias=self.kv_up.bias is not None)

    def _heads(self, latent: Tensor, rotated: Tensor) -> _Heads:
        """Keys and values from lifted latents (B, N, width) and rotated keys (B, N, 1, d_r)."""
        up = _product(self.kv_up, latent).unflatten(-1, (self.num_heads, -1))
        nope, value = up.split((self.nope_dim, self.value_dim), -1)
        value, rotated = rounded(wide(value) * self.value_scale, up.dtype), rotated.to(up.dtype)
        key_excess = _excess(sqnorm(wide(nope)) + sqnorm(wide(rotated)), self.c)
        return _Heads(nope, rotated, value.to(up.dtype), key_excess, _excess(sqnorm(value), self.c))

    def _keys(self, heads: _Heads) -> Tensor:
        """``[k, -e, 0, ...]`` as (B, H, N, key width), or ``[k, -e_high, -e_low, -e_high, 0, ...]``."""
        nope, dtype = heads.nope, heads.nope.dtype
        times = [(-heads.key_excess).to(dtype)]
        if self.config.time_columns == "split":
            high, low = split_high_low(-heads.key_excess, dtype)
            times = [high, low, high]
        return _side_by_side([nope, heads.rotated.expand(*nope.shape[:-1], -1), *times])

    def _values(self, heads: _Heads) -> Tensor:
        """``[v, e, 0, ...]`` as (B, H, N, value width)."""
        return _side_by_side([heads.value, heads.value_excess.to(heads.value.dtype)])

    def _queries(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """``(2/tau) [q, t, 0, ...]`` as (B, H, N, key width), or ``(2/tau) [q, t_high, t_high, t_low, 0, ...]``."""
        q, time = self._query(q, dtype)
        times = [time.to(dtype)]
        if self.config.time_columns == "split":
            high, low = split_high_low(time, dtype)
            times = [high, high, low]
        return _side_by_side([q.to(dtype), *times])

    def _query(self, q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(2/tau) q`` rounded to ``dtype``, and ``(2/tau) t_q`` of the rounded point; both float32 at least."""
        factor = 2 * self.score_scale / wide(self.tau)
        q = rounded(wide(q) * factor, dtype)
        return q, torch.sqrt(sqnorm(q) + factor * factor / self.c)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: int | Tensor) -> Tensor:
        """Mean values (B, H, N, d_v + 1), the last column the mean excess, by one fused attention."""
        q = self._queries(q, k.dtype)
        mask, is_causal = visible_keys(mask, past, q.shape[-2], k.shape[-2], q.device)
        if q.shape[-2] > 1:  # the fused kernels want one width; for a single query no kernel is worth a copied cache
            width = max(k.shape[-1], v.shape[-1])
            q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        mean = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=1.0)
        return mean[..., : self.value_dim + 1]

    def _past(self, cache: Cache) -> int | Tensor:
        """How many tokens the cache holds; a tensor once a static cache is in use, which must not be read back."""
        past: int | Tensor = cache.get_seq_length(self.layer_idx)
        return past.clone() if isinstance(past, Tensor) else past  # the cache counts on in its own tensor

    def _with_full_cache(self, q: Tensor, heads: _Heads, mask: Tensor | None, cache: Cache) -> Tensor:
        """Attention with a cache of the keys and values of all heads."""
        past = self._past(cache)
        k, v = self._keys(heads), self._values(heads)
        cached = cache.update(k, v, self.layer_idx)
        if not _is_first(past, q.shape[1]):
            k, v = cached
        return self._attend(q, k, v, mask, past)

    def _with_latent_cache(self, q: Tensor, latent: Tensor, heads: _Heads, mask: Tensor | None, cache: Cache) -> Tensor:
        """Attention with a cache of latents: absorbed for one token, rebuilt for more."""
        past = self._past(cache)
        keys = torch.cat([latent[..., : self.latent_width], heads.rotated[:, :, 0]], -1)
        new = LatentState(keys, heads.key_excess[..., 0], heads.value_excess[..., 0])
        cached = cache.update(*pack(new), self.layer_idx)
        if not _is_first(past, q.shape[1]):
            state = unpack(*cached, self.num_heads)
            if q.shape[1] == 1:
                return self._absorbed(q[:, 0], state, mask, past)
            latent, rotated = state.keys.split((self.latent_width, self.rope_dim), -1)
            heads = self._heads(F.pad(latent, (0, self.kv_up.width - self.latent_width)), rotated.unsqueeze(-2))
        return self._attend(q, self._keys(heads), self._values(heads), mask, past)

    def _absorbed(self, q: Tensor, state: LatentState, mask: Tensor | None, past: int | Tensor) -> Tensor:
        """:meth:`_attend` for one query per sequence (B, H, d_n + d_r) on the cache itself: (B, H, 1, d_v + 1).

        One attention with a single key head whose rows of queries are the heads. It is written as products because
        the latent and its times lie in two slots: fused attention would have to copy the whole cache into one block,
        and would read it with one thread block per sequence, where products share the keys among many.
        """
        dtype, width = state.keys.dtype, self.latent_width
        up = self.kv_up.matrices(dtype)[0][: self.kv_up.out_features, :width].unflatten(0, (self.num_heads, -1))
        up_key, up_value = up.split((self.nope_dim, self.value_dim), 1)  # (H, d_n, r + 2), (H, d_v, r + 2)
        q, time = self._query(q, dtype)
        nope, rope = q.to(dtype).split((self.nope_dim, self.rope_dim), -1)
        nope = torch.bmm(nope.transpose(0, 1), up_key).transpose(0, 1)  # (B, H, r + 2), a query to lifted latents
        scores = _wide_product(torch.cat([nope, rope], -1), state.keys.mT) - time * state.key_excess.mT  # (B, H, M)
        mask, _ = visible_keys(mask, past, 1, scores.shape[-1], q.device)
        if mask is not None:
            mask = mask[:, :, 0]  # (B, 1 or H, M)
            lowest = torch.finfo(scores.dtype).min
            scores = torch.where(mask, scores, lowest) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1)
        mean = torch.bmm(weights.to(dtype), state.keys[..., :width])  # (B, H, r + 2), the mean of lifted latents
        value = torch.bmm(mean.transpose(0, 1), up_value.mT).transpose(0, 1)  # (B, H, d_v)
        excess = (weights * state.value_excess.mT).sum(-1, keepdim=True)
        return torch.cat([wide(value) * self.value_scale, excess], -1).unsqueeze(2)


def visible_keys(
    mask: Tensor | None, past: int | Tensor, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The mask for ``num_keys`` keys, and whether the kernel's own causal order is meant in its place.

    Without a mask query i sees the keys up to ``past + i``. Reads no value of ``past`` when it is a tensor, as in a
    static cache, whose unused places are then masked.

    Args:
        mask: (B, 1 or H, N, >= num_keys), boolean (True: look) or added to the scores; or None.
        past: tokens in the cache before the queries came.
    """
    if mask is not None:
        return mask[..., :num_keys], False
    if isinstance(past, int) and past + num_queries == num_keys:
        if num_queries == 1:
            return None, False
        if past == 0:
            return None, True
    last = past + torch.arange(num_queries, device=device)
    return (torch.arange(num_keys, device=device) <= last[:, None])[None, None], False


def _is_first(past: int | Tensor, num_new: int) -> bool:
    """Whether these are several tokens for an empty cache, so that their own keys and values are all there are."""
    return num_new > 1 and isinstance(past, int) and past == 0


def _aligned_linear(in_features: int, out_features: int, bias: bool) -> AmbientLinear:
    """A linear map that writes rows of an aligned width; :func:`_product` cuts them."""
    return AmbientLinear(in_features, out_features, bias, row_groups=(1, out_features, aligned(out_features)))


def _product(linear: AmbientLinear, lifted: Tensor) -> Tensor:
    product: Tensor = linear(lifted)
    return product[..., : linear.out_features]


def _excess(square: Tensor, c: float) -> Tensor:
    """``t - 1/s`` of points with squared norms ``square``, without cancellation."""
    return square / (torch.sqrt(square + 1 / c) + 1 / math.sqrt(c))


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """(B, N, H, ...) parts in one row, zeros up to an aligned width: (B, H, N, width)."""
    width = sum(part.shape[-1] for part in parts)
    row = torch.cat(parts, -1)
    return F.pad(row, (0, aligned(width) - width)).transpose(1, 2)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of batches of matrices, not rounded to half precision in the end."""
    if not is_half(a.dtype):
        return torch.bmm(a, b)
    needs_gradient = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.is_cuda and not needs_gradient:
        return torch.bmm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return torch.bmm(a.float(), b.float())
