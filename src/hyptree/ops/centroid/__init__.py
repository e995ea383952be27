"""Centroids of attention with their times, from mean values and mean excess: what the output projection reads.

``centroid`` is the operation, ``centroid_grad`` its gradient, which gives the centroids once more, so that whoever
multiplies them need not keep them. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.centroid import reference

__all__ = ["centroid", "centroid_grad", "fits", "reference"]

MAX_WIDTH = 1024
"""Columns of a head that a kernel holds at once."""


def fits(mean: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    return rows_fit(backend, mean, mean.shape[-1], MAX_WIDTH)


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
    if not fits(mean, backend):
        return reference.centroid(mean, d, width, c)
    run = _forward_operator if needs_operator(mean) else _forward
    return run(_rows(mean), d, width, c).view(*mean.shape[:-1], width)


def centroid_grad(
    mean: Tensor, grad: Tensor, d: int, c: float = 1.0, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Gradient of ``mean`` from that of the centroids (..., width), and the centroids (..., width) again."""
    if not fits(mean, backend):
        with torch.enable_grad():
            leaf = mean.detach().requires_grad_()
            points = reference.centroid(leaf, d, grad.shape[-1], c)
            (grad_mean,) = torch.autograd.grad(points, leaf, grad)
        return grad_mean, points.detach()
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
