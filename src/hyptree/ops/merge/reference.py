"""Sums over groups of tokens in a fixed order, the way back, and the mean that makes one token of each group.

Two linear maps that are each other's transpose: :func:`segment_sum` adds the tokens of a group, :func:`spread` hands
every token what its group holds. Neither uses atomic additions: the same input gives the same bits on every run, in the
gradient too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import strict_matmul

_ORDERED = frozenset({"cpu"})
"""Devices whose ``index_add_`` adds row after row; elsewhere it may use atomics, in an order that changes."""


def segment_sum(x: Tensor, labels: Tensor, k: int) -> Tensor:
    """Sum of the tokens of each group: (B, N, C), labels (B, N) in 0..k-1 -> (B, K, C); zero for an empty group.

    CPU adds rows in the order of the tokens. Elsewhere an indicator matrix (B, K, N) multiplies ``x``, with TF32 and
    autocast off: that costs ``2 K N C`` operations per image, but no sort, no atomics and no synchronisation.
    """
    batch, _, channels = x.shape
    if x.device.type in _ORDERED:
        row = (labels + k * torch.arange(batch, device=x.device).unsqueeze(-1)).flatten()  # (B * N,)
        return x.new_zeros(batch * k, channels).index_add(0, row, x.flatten(0, 1)).view(batch, k, channels)
    member = labels.unsqueeze(1) == torch.arange(k, device=labels.device).unsqueeze(-1)  # (B, K, N)
    return strict_matmul(member.to(x.dtype), x)


def spread(y: Tensor, labels: Tensor) -> Tensor:
    """What each token's group holds: (B, K, C), labels (B, N) -> (B, N, C); the gradient sums in a fixed order."""
    return _Spread.apply(y, labels)


def merge_mean(x: Tensor, size: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """One token per group, the mean weighted by size: ``s_C = sum s_i``, ``x_C = (sum s_i x_i) / s_C``.

    Args:
        x: (B, N, C) tokens of any floating dtype. size: (B, N) how many patches each token stands for, >= 0.
        labels: (B, N) int64 in 0..k-1. k: number of groups.

    Returns:
        (B, K, C) in the dtype of ``x``, summed in float32 (float64 for float64), differentiable in ``x``;
        (B, K) in the dtype of ``size``. A group without members, or whose sizes are all 0 (padding), is 0 with size 0.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = size.detach().to(wide).unsqueeze(-1)  # (B, N, 1)
    total = segment_sum(weight, labels, k)  # (B, K, 1)
    mean = segment_sum(x.to(wide) * weight, labels, k) / torch.where(total == 0, 1.0, total)
    return mean.to(x.dtype), total.squeeze(-1).to(size.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, labels: Tensor) -> Tensor:
        return y.gather(1, labels.unsqueeze(-1).expand(-1, -1, y.shape[2]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y, labels = inputs
        ctx.k = y.shape[1]
        ctx.save_for_backward(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        # A group may have very many tokens: half-precision gradients are added in float32, as the forward sums are.
        wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
        return segment_sum(wide, labels, ctx.k).to(grad.dtype), None
