"""Proportional attention, ``softmax(scale q k^T + log s)``: a token that stands for ``s`` patches counts ``s`` times.

``proportional_attention`` is the definition. Models come to the same numbers in one of two ways: ``log_size_mask`` is
``log s`` as an additive mask (B, 1, 1, N), for any attention that takes one; ``SizeMask`` makes it two channels more of
every key, for kernels that take no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.errors import UserError

# Mask rows of the fused CUDA kernels start at multiples of this many entries; others are copied on every call.
_ALIGN = 16


def log_size_mask(size: Tensor, dtype: torch.dtype) -> Tensor:
    """``log size`` as an additive attention mask: (B, N) -> (B, 1, 1, N); size 0 (padding) becomes -inf.

    The rows lie in memory as fused kernels want them, with unused entries behind each.
    """
    num_images, num_tokens = size.shape
    width = -(-num_tokens // _ALIGN) * _ALIGN
    log_size = size.to(torch.promote_types(size.dtype, dtype)).log().to(dtype)
    log_size = F.pad(log_size, (0, width - num_tokens))  # (B, width)
    return log_size[:, :num_tokens].view(num_images, 1, 1, num_tokens)


def proportional_attention(q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float | None = None) -> Tensor:
    """Attention in which every key counts as often as its size says, by the formula.

    Args:
        q, k, v: (B, H, M, d), (B, H, N, d), (B, H, N, d).
        size: (B, N) patches that each key stands for; 0 hides a key.
        scale: factor on ``q k^T``; ``d**-0.5`` unless given.

    Returns:
        (B, H, M, d).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * (q @ k.mT) + size.log().to(q.dtype)[:, None, None]  # (B, H, M, N)
    return logits.softmax(-1) @ v


def channel_attention(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """The same without a mask, for sizes from 1 on: ``q' = [q, 1]`` and ``k' = [k, log(s) / scale]``.

    Two channels hold the log sizes, the rounded value and the rest, because one number of a half-precision key would
    cost ``log s`` most of its digits. Zeros fill up to a multiple of 8, and values get as many, since flash kernels
    want the three alike.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    num_channels = v.shape[-1]
    extra = 8 + -q.shape[-1] % 8
    log_size = (size.log() / scale)[:, None, :, None]  # (B, 1, N, 1)
    coarse = log_size.to(k.dtype)
    rest = (log_size - coarse).to(k.dtype)
    size_channels = F.pad(torch.cat([coarse, rest], -1), (0, extra - 2)).expand(-1, k.shape[1], -1, -1)
    k = torch.cat([k, size_channels], -1)
    q = torch.cat([q, F.pad(q.new_ones(2), (0, extra - 2)).expand(*q.shape[:-1], extra)], -1)
    out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, extra)), dropout_p=dropout, scale=scale)
    return out[..., :num_channels]


class SizeMask:
    """Stands where an attention mask is expected and makes fused attention use further channels instead of a mask.

    ``F.scaled_dot_product_attention(q, k, v, attn_mask=SizeMask(size, dtype))`` asks this object how to compute; every
    other operation sees the ordinary additive mask. So attention modules that hand their mask on stay as they are.
    """

    def __init__(self, size: Tensor, dtype: torch.dtype):
        self.size = size
        self.dtype = dtype  # modules look whether a mask is boolean

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            q, k, v, *others = args
            names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            kwargs.update(zip(names, others, strict=False))
            if kwargs.get("is_causal") or kwargs.get("enable_gqa"):
                raise UserError("proportional attention with channels has no causal or grouped variant; use 'mask'")
            size = kwargs["attn_mask"].size
            return channel_attention(q, k, v, size, kwargs.get("scale"), kwargs.get("dropout_p", 0.0))
        return func(*[_as_mask(x) for x in args], **{name: _as_mask(x) for name, x in kwargs.items()})


def _as_mask(x: Any) -> Any:
    return log_size_mask(x.size, x.dtype) if isinstance(x, SizeMask) else x
