"""What stands before and behind fused attention, as kernels of :mod:`hyptree.ops` with gradients of their own.

The projection is not kept: the gradient of queries, keys and values follows from themselves, which attention keeps.
Nor are the centroids, which only the output projection reads: the backward kernel makes them again from the means,
which attention keeps as well. First derivatives only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.lm.fused.branches import _grad_of_weight
from hyptree.ops.centroid import centroid, centroid_grad
from hyptree.ops.heads import Heads, lift_heads, lift_heads_grad

if TYPE_CHECKING:
    from hyptree.lm.ambient import AmbientLinear


class _LiftHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, queries: Tensor | None, shared: Tensor | None, cos: Tensor, sin: Tensor,
        log_tau: Tensor, heads: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.heads, ctx.shared_width = heads, 0 if shared is None else shared.shape[-1]
        q, k, v = lift_heads(rows, cos, sin, log_tau, Heads(*heads), queries=queries, shared=shared)
        ctx.save_for_backward(q, k, v, cos, sin, log_tau)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cos, sin, log_tau = ctx.saved_tensors
        grads, heads = (grad_q, grad_k, grad_v), Heads(*ctx.heads)
        inner_grads = lift_heads_grad((q, k, v), grads, cos, sin, log_tau, heads, shared_width=ctx.shared_width)
        return *inner_grads[:3], None, None, inner_grads[3], None


class _CentroidProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, weight: Tensor, bias: Tensor | None, d: int, width: int, c: float) -> Tensor:
        ctx.settings = (d, width, c)
        ctx.save_for_backward(mean, weight)
        return F.linear(centroid(mean, d, width, c).flatten(-2), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, weight = ctx.saved_tensors
        d, width, c = ctx.settings
        grad_points = (grad @ weight).unflatten(-1, (mean.shape[-2], width))
        grad_mean, points = centroid_grad(mean, grad_points, d, c)
        grad_weight = _grad_of_weight(ctx.needs_input_grad[1], grad, points.flatten(-2))
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_mean, grad_weight, grad_bias, None, None, None


def lifted_heads(
    rows: Tensor, tables: tuple[Tensor, Tensor], log_tau: Tensor, heads: Heads, *, queries: Tensor | None = None,
    shared: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values as fused attention reads them, (B, H, N, width) each; see ``ops.heads.lift_heads``."""
    q, k, v = _LiftHeads.apply(rows, queries, shared, *tables, log_tau, tuple(heads))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def centroid_product(mean: Tensor, layer: AmbientLinear, d: int, c: float) -> Tensor:
    """``layer`` of the centroids of all heads: means (B, H, N, at least d + 1) of attention -> (B, N, n)."""
    weight, bias = layer.matrices(mean.dtype)
    out: Tensor = _CentroidProduct.apply(mean.transpose(1, 2), weight, bias, d, layer.point_width, c)
    return out
