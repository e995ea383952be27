"""What every space needs for sets of points: weights, and distance matrices with every digit and derivative."""

from typing import Any

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, strict_matmul


def require_shared_curvature(name: str, c: Scalar) -> None:
    """All points of a distance matrix share one curvature: a tensor ``c`` must end in two axes of size 1."""
    if isinstance(c, Tensor) and any(size != 1 for size in c.shape[-2:]):
        raise ValueError(f"{name}: expected one c per pair of sets, shape (..., 1, 1), got {tuple(c.shape)}")


def points_and_weights(name: str, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check shapes of a set of points and its weights; the weights come back as (..., N, 1)."""
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ValueError(f"{name}: expected at least one point in x (..., N, n), got shape {tuple(x.shape)}")
    if weights is None:
        return x, torch.ones_like(x[..., :1])
    if weights.dim() == 0 or weights.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"{name}: expected one weight per point, (..., {x.shape[-2]}), got weights of shape {tuple(weights.shape)}"
        )
    return x, weights.unsqueeze(-1)


def accurate_cdist(x: Tensor, y: Tensor) -> Tensor:
    """``|x_i - y_j|`` from differences, never from a matrix product: (..., N, n), (..., M, n) -> (..., N, M).

    As ``torch.cdist`` with ``compute_mode="donot_use_mm_for_euclid_dist"``, but differentiable twice. Coincident
    points have distance and gradient exactly zero.
    """
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return _Distance.apply(x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:]))


class _Distance(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, d = ctx.saved_tensors
        return _Steps.apply(grad, x, y, d), _Steps.apply(grad.mT, y, x, d.mT)


MOST_TERMS = 2**28
"""Terms ``g_ij (x_i - y_j) / d_ij`` of one call. Torch's CUDA kernel writes all of them to memory before it sums, and
counts them in 32 bits: from 2^31 on, as for (8, 2048, 2048, 128), it writes out of bounds."""


def _sum_steps(grad: Tensor, x: Tensor, y: Tensor, d: Tensor) -> Tensor:
    """``sum_j g_ij (x_i - y_j) / d_ij``, halved along batch, rows of x, rows of y until a call is small enough."""
    if d.numel() * x.shape[-1] <= MOST_TERMS or d.numel() == 1:
        return torch.ops.aten._cdist_backward(grad.contiguous(), x.contiguous(), y.contiguous(), 2.0, d.contiguous())
    if x.dim() > 3:  # batch axes as one
        flat = _sum_steps(*(t.reshape(-1, *t.shape[-2:]) for t in (grad, x, y, d)))
        return flat.view(x.shape)
    if x.dim() == 3 and x.shape[0] > 1:
        return torch.cat([_sum_steps(*part) for part in zip(*(t.chunk(2) for t in (grad, x, y, d)), strict=True)])
    if x.shape[-2] > 1:
        rows = zip(*(t.chunk(2, -2) for t in (grad, x, d)), strict=True)
        return torch.cat([_sum_steps(g, a, y, e) for g, a, e in rows], -2)
    columns = zip(grad.chunk(2, -1), y.chunk(2, -2), d.chunk(2, -1), strict=True)
    first, second = (_sum_steps(g, x, b, e) for g, b, e in columns)
    return first + second


class _Steps(torch.autograd.Function):
    """``sum_j g_ij (x_i - y_j) / d_ij``, summed from differences; its own backward is made of matrix products."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, y: Tensor, d: Tensor) -> Tensor:
        return _sum_steps(grad, x, y, d)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
        grad, x, y, d = ctx.saved_tensors
        ok = d > 0
        inverse = torch.where(ok, 1 / torch.where(ok, d, 1.0), 0.0)
        weight = grad * inverse
        step = ((cotangent * x).sum(-1, keepdim=True) - strict_matmul(cotangent, y.mT)) * inverse
        return step, weight.sum(-1, keepdim=True) * cotangent, -strict_matmul(weight.mT, cotangent), -step * weight

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        # Written out because torch's batching rule for its own operator is wrong where only `grad` is mapped.
        batched = [
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims, strict=True)
        ]
        return _Steps.apply(*batched), 0
