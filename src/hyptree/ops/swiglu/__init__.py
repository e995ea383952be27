"""SwiGLU on space components with the lift of its result: what stands between the two products of a feed-forward part.

``swiglu_linear`` is the door. ``swiglu_lift`` is its kernel, ``swiglu_grad`` the gradient, which gives the lifted rows
once more, so that whoever multiplies them need not keep them. ``reference`` holds the definition.
"""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.derivatives import first_derivative
from hyptree.ops.rounding import wide
from hyptree.ops.swiglu import reference

__all__ = ["reference", "swiglu_grad", "swiglu_lift", "swiglu_linear"]

MAX_WIDTH = 16384
"""Columns of a row that a kernel holds at once."""


def swiglu_linear(both: Tensor, layer: Any, hidden: int, c: float = 1.0) -> Tensor:
    """``layer`` of the points ``silu(gate) * up``: (..., 2 w) -> (..., n). First derivatives only.

    Args:
        both: gate and up; columns of each from ``hidden`` on are padding.
        layer: a linear map of points, ``W [t; s] + b``; a bare one may be read by its ``matrix``.
        hidden: space components. c: curvature -c.
    """
    halves = both.unflatten(-1, (2, -1))
    if rows_fit("auto", both, hidden, MAX_WIDTH):
        if is_bare(layer):
            matrix = layer.matrix(both.dtype)
            if halves.shape[-1] < matrix.shape[1]:  # a product without room for the time
                both = F.pad(halves, (0, matrix.shape[1] - halves.shape[-1])).flatten(-2)
            out: Tensor = _SwigluLinear.apply(both, matrix, hidden, c)
            return out
        report_unfused("swiglu_linear", layer)
    gate, up = halves[..., :hidden].unbind(-2)
    out = layer((F.silu(wide(gate)) * wide(up)).to(both.dtype))
    return out


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, matrix: Tensor, hidden: int, c: float) -> Tensor:
        ctx.settings = (hidden, c)
        ctx.save_for_backward(both, matrix)
        return F.linear(swiglu_lift(both, hidden, c), matrix)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, matrix = ctx.saved_tensors
        grad_both, lifted = swiglu_grad(both, grad @ matrix, *ctx.settings)
        grad_matrix = grad.flatten(0, -2).mT @ lifted.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_both, grad_matrix, None, None


def swiglu_lift(
    both: Tensor, hidden: int, c: float = 1.0, bias: bool = True, a: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """``[h, t, 1, 0, ...]`` with ``h = silu(gate) * up`` a point and t its time; no gradient on its own.

    Args:
        both: (..., 2 w), gate and up; columns of each from ``hidden`` on are room for the time and the one.
        hidden: space components. c: curvature -c. bias: put a one behind the time.
        a: (...) float32, a factor of each row: ``h = silu(a gate) * up``, and the one is ``1 / a`` (what is left of an
            expert's own curvature).
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (..., w) in the dtype of ``both``.
    """
    if not rows_fit(backend, both, both.shape[-1] // 2, MAX_WIDTH):
        return reference.swiglu_lift(both, hidden, c, bias, a)
    width = both.shape[-1]
    run = _forward_operator if needs_operator(both) else _forward
    rows, factors = both.reshape(both.numel() // width, width), None if a is None else a.reshape(-1)
    return run(rows, factors, hidden, c, bias).view(*both.shape[:-1], width // 2)


@overload
def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float = ..., bias: bool = ..., a: None = ...
) -> tuple[Tensor, Tensor]: ...


@overload
def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float, bias: bool, a: Tensor
) -> tuple[Tensor, Tensor, Tensor]: ...


def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float = 1.0, bias: bool = True, a: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradient of ``both`` from that of the lifted rows (..., w), the lifted rows (..., w) again, and with factors
    their gradient (...), by kernels."""
    run = _backward_operator if needs_operator(both) else _backward
    count = both.numel() // both.shape[-1]
    rows, grads = both.reshape(count, both.shape[-1]), grad.reshape(count, grad.shape[-1]).contiguous()
    grad_both, lifted, to_factors = run(rows, None if a is None else a.reshape(-1), grads, hidden, c, bias)
    pair = grad_both.view(both.shape), lifted.view(grad.shape)
    return pair if a is None else (*pair, to_factors.view(a.shape))


def _forward(both: Tensor, factors: Tensor | None, hidden: int, c: float, bias: bool) -> Tensor:
    from hyptree.ops.swiglu import triton

    return triton.forward(both.contiguous(), factors, hidden, c, bias)


def _backward(
    both: Tensor, factors: Tensor | None, grad: Tensor, hidden: int, c: float, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from hyptree.ops.swiglu import triton

    return triton.backward(both.contiguous(), factors, grad, hidden, c, bias)


_forward_operator = operator("swiglu_lift", _forward)
_backward_operator = operator("swiglu_grad", _backward)
