"""What every space needs for sets of points: weights, and distance matrices with every digit and derivative."""

from typing import Any

import torch
from torch import Tensor

from .numerics import Scalar, strict_matmul


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


class _Steps(torch.autograd.Function):
    """``sum_j g_ij (x_i - y_j) / d_ij``, summed from differences; its own backward is made of matrix products."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, y: Tensor, d: Tensor) -> Tensor:
        return torch.ops.aten._cdist_backward(grad.contiguous(), x.contiguous(), y.contiguous(), 2.0, d.contiguous())

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
