"""Centroids of attention with their times, from mean values and mean excess: what the output projection reads.

``centroid_linear`` is the door. ``centroid`` is its kernel, ``centroid_grad`` the gradient, which gives the centroids
once more, so that whoever multiplies them need not keep them. ``reference`` holds the definition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.centroid import reference
from hyptree.ops.derivatives import first_derivative

__all__ = ["centroid", "centroid_grad", "centroid_linear", "reference"]

MAX_WIDTH = 1024
"""Columns of a head that a kernel holds at once."""


def centroid_linear(mean: Tensor, layer: Any, d: int, c: float = 1.0) -> Tensor:
    """``layer`` of the centroids of all heads: means (B, H, N, at least d + 1) -> (B, N, n). First derivatives only.

    The centroids are not kept: the backward kernel makes them again from the means, which attention keeps as well.

    Args:
        mean: rows ``[m, e, ...]`` of attention, see :func:`centroid`.
        layer: a linear map of H points side by side; a bare one may be read by its ``matrix``.
        d: space components of a head. c: curvature -c.
    """
    mean = mean.transpose(1, 2)
    if rows_fit("auto", mean, mean.shape[-1], MAX_WIDTH):
        if is_bare(layer):
            bias = None if layer.bias is None else layer.bias.to(mean.dtype)
            out: Tensor = _CentroidLinear.apply(mean, layer.matrix(mean.dtype), bias, d, c)
            return out
        report_unfused("centroid_linear", layer)
    out = layer(reference.centroid_space(mean, d, c).flatten(-2))
    return out


class _CentroidLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, matrix: Tensor, bias: Tensor | None, d: int, c: float) -> Tensor:
        ctx.settings = (d, c)
        ctx.save_for_backward(mean, matrix)
        points = centroid(mean, d, matrix.shape[1] // mean.shape[-2], c)
        return F.linear(points.flatten(-2), matrix, bias)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, matrix = ctx.saved_tensors
        to_mean, points = centroid_grad(mean, (grad @ matrix).unflatten(-1, (mean.shape[-2], -1)), *ctx.settings)
        to_matrix = grad.flatten(0, -2).mT @ points.flatten(-2).flatten(0, -2) if ctx.needs_input_grad[1] else None
        return to_mean, to_matrix, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None, None, None


def centroid(mean: Tensor, d: int, width: int, c: float = 1.0, *, backend: str = "auto") -> Tensor:
    """``[s, t, 0, ...]``, points in the direction of mean values; no gradient on its own.

    A mean of points has space components m and a time ``1/sqrt(c) + e``; ``-<m, m>_L = 1/c + gap`` with
    ``gap = e (e + 2/sqrt(c)) - |m|^2 >= 0``, so the centroid is ``s = m / sqrt(1 + c gap)``.

    Args:
        mean: (..., at least d + 1), rows ``[m, e, ...]``. d: space components. width: columns of the result.
        c: curvature -c.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (..., width) in the dtype of ``mean``.
    """
    if not rows_fit(backend, mean, mean.shape[-1], MAX_WIDTH):
        return reference.centroid(mean, d, width, c)
    run = _forward_operator if needs_operator(mean) else _forward
    return run(_rows(mean), d, width, c).view(*mean.shape[:-1], width)


def centroid_grad(mean: Tensor, grad: Tensor, d: int, c: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gradient of ``mean`` from that of the centroids (..., width), and these again (..., width), by kernels."""
    run = _backward_operator if needs_operator(mean) else _backward
    grad_mean, points = run(_rows(mean), _rows(grad), d, c)
    return grad_mean.view(mean.shape), points.view(grad.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.numel() // x.shape[-1], x.shape[-1]).contiguous()


def _forward(mean: Tensor, d: int, width: int, c: float) -> Tensor:
    from hyptree.ops.centroid import triton

    return triton.forward(mean, d, width, c)


def _backward(mean: Tensor, grad: Tensor, d: int, c: float) -> tuple[Tensor, Tensor]:
    from hyptree.ops.centroid import triton

    return triton.backward(mean, grad, d, c)


_forward_operator = operator("centroid", _forward)
_backward_operator = operator("centroid_grad", _backward)
