"""The Lorentz centroid of what a token's experts say, read where the experts have left it.

``merge_points`` is the operation, ``merge_points_grad`` its gradient. ``reference`` holds the definition, ``triton``
the kernels, which go through the permutation themselves: sorted rows are read and their gradients written in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.merge_points import reference

__all__ = ["merge_points", "merge_points_grad", "reference"]

MAX_WIDTH = 16384
"""Columns of a row that a kernel holds at once."""


def merge_points(
    shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float = 1.0, *,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``Y / sqrt(-c <Y, Y>_L)`` with ``Y = sum y_i + sum g_j z_j``, its space components; no gradient on its own.

    The exact bound ``-<Y, Y>_L >= (sum of weights)^2 / c`` holds also where rounding would break it.

    Args:
        shared: (s, T, M) points y that all tokens have, or None. n: space components; columns behind them are padding.
        routed: (T k, M) points z, sorted in any way.
        weight: (T, k) float32, not negative. inverse: (T k,) the row of ``routed`` that each weight belongs to.
        c: curvature -c.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (T, n) in the dtype of ``routed``.
    """
    if not rows_fit(backend, routed, routed.shape[-1], MAX_WIDTH):
        return reference.merge_points(shared, routed, weight, inverse, n, c)
    run = _forward_operator if needs_operator(routed) else _forward
    return run(shared, routed.contiguous(), weight.contiguous(), inverse, n, c)


def merge_points_grad(
    shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, grad: Tensor, c: float = 1.0, *,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients of the shared and of the routed points, zero in their padding, and of the weights, from that of the
    centroids (T, n)."""
    if not rows_fit(backend, routed, routed.shape[-1], MAX_WIDTH):
        with torch.enable_grad():
            leaves = [leaf.detach().requires_grad_() for leaf in (routed, weight, shared) if leaf is not None]
            others = leaves[2] if shared is not None else None
            out = reference.merge_points(others, leaves[0], leaves[1], inverse, grad.shape[-1], c)
            to_routed, to_weight, *to_shared = torch.autograd.grad(out, leaves, grad)
        return to_shared[0] if to_shared else None, to_routed, to_weight
    run = _backward_operator if needs_operator(routed) else _backward
    grads = run(shared, routed.contiguous(), weight.contiguous(), inverse, grad.contiguous(), c)
    return None if shared is None else grads[0], grads[1], grads[2]


def _forward(shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float) -> Tensor:
    from hyptree.ops.merge_points import triton

    return triton.forward(shared, routed, weight, inverse, n, c)


def _backward(
    shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, grad: Tensor, c: float
) -> tuple[Tensor, Tensor, Tensor]:
    from hyptree.ops.merge_points import triton

    return triton.backward(shared, routed, weight, inverse, grad, c)


_forward_operator = operator("merge_points", _forward)
_backward_operator = operator("merge_points_grad", _backward)
