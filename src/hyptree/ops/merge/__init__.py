"""Merging tokens: one token per cluster, the mean of its members weighted by their sizes.

``merge_mean`` is the operation; ``reference`` holds its definition, ``triton`` its kernels, which are registered as
``hyptree::merge_mean`` so that a compiled model holds them as one node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.ops.backend import choose, needs_operator, operator
from hyptree.ops.merge import reference

__all__ = ["merge_mean", "reference"]

MAX_TOKENS = 2048  # of the kernels


def merge_mean(
    x: Tensor, size: Tensor, labels: Tensor, k: int, *, num_prefix: int = 0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """One token per cluster: ``s_C = sum s_i`` and ``x_C = (sum s_i x_i) / s_C``, behind prefix tokens that stay.

    The order of summation is fixed, so the same input gives the same bits on every run. Differentiable in ``x``.

    Args:
        x: (B, num_prefix + N, C) tokens of any floating dtype; sums are float32 (float64 for float64).
        size: (B, num_prefix + N) float32, how many patches each token stands for; 0 in padding.
        labels: (B, N) int64 in 0..k-1.
        k: number of clusters.
        num_prefix: tokens in front that take no part and are handed on as they are.
        backend: "auto", "torch" or "triton" (CUDA, N <= 2048).

    Returns:
        (B, num_prefix + k, C) and (B, num_prefix + k). A cluster without weight is 0 with size 0.
    """
    unsupported = (
        f"{labels.shape[1]} tokens, the kernel takes up to {MAX_TOKENS}" if labels.shape[1] > MAX_TOKENS else None
    )
    if choose(backend, x, unsupported) == "triton":
        needs_gradient = torch.is_grad_enabled() and x.requires_grad
        run = _operator if needs_gradient or needs_operator(x) else _launch
        return run(x, size.detach().float().contiguous(), labels.contiguous(), k, num_prefix)
    merged, merged_size = reference.merge_mean(x[:, num_prefix:], size[:, num_prefix:], labels, k)
    if num_prefix == 0:
        return merged, merged_size
    return torch.cat([x[:, :num_prefix], merged], 1), torch.cat([size[:, :num_prefix].detach(), merged_size], 1)


def _launch(x: Tensor, size: Tensor, labels: Tensor, k: int, num_prefix: int) -> tuple[Tensor, Tensor]:
    from hyptree.ops.merge import triton

    return triton.merge_mean(x, size, labels, k, num_prefix)


def _spread(grad: Tensor, size: Tensor, labels: Tensor, out_size: Tensor, num_prefix: int) -> Tensor:
    from hyptree.ops.merge import triton

    return triton.spread(grad, size, labels, out_size, num_prefix)


_operator = operator("merge_mean", _launch)
_spread_operator = operator("merge_mean_backward", _spread)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, size, labels, _, ctx.num_prefix = inputs
    ctx.save_for_backward(size, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    size, labels, out_size = ctx.saved_tensors
    return _spread_operator(grad, size, labels, out_size, ctx.num_prefix), None, None, None, None


torch.library.register_autograd("hyptree::merge_mean", _backward, setup_context=_save)
