"""SwiGLU on space components with the lift of its result: what stands between the two products of a feed-forward part.

``swiglu_lift`` is the operation, ``swiglu_grad`` its gradient, which gives the lifted rows once more, so that whoever
multiplies them need not keep them. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.swiglu import reference

__all__ = ["reference", "swiglu_grad", "swiglu_lift"]

MAX_WIDTH = 16384
"""Columns of a row that a kernel holds at once."""


def fits(both: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    return rows_fit(backend, both, both.shape[-1] // 2, MAX_WIDTH)


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
    if not fits(both, backend):
        return reference.swiglu_lift(both, hidden, c, bias, a)
    width = both.shape[-1]
    run = _forward_operator if needs_operator(both) else _forward
    rows, factors = both.reshape(both.numel() // width, width), None if a is None else a.reshape(-1)
    return run(rows, factors, hidden, c, bias).view(*both.shape[:-1], width // 2)


@overload
def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float = ..., bias: bool = ..., a: None = ..., *, backend: str = ...
) -> tuple[Tensor, Tensor]: ...


@overload
def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float, bias: bool, a: Tensor, *, backend: str = ...
) -> tuple[Tensor, Tensor, Tensor]: ...


def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float = 1.0, bias: bool = True, a: Tensor | None = None, *,
    backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradient of ``both`` from that of the lifted rows (..., w), the lifted rows (..., w) again, and with factors
    their gradient (...)."""
    if not fits(both, backend):
        with torch.enable_grad():
            leaves = [leaf.detach().requires_grad_() for leaf in (both, a) if leaf is not None]
            lifted = reference.swiglu_lift(leaves[0], hidden, c, bias, *leaves[1:])
            grad_both, *to_factor = torch.autograd.grad(lifted, leaves, grad)
        return grad_both, lifted.detach(), *to_factor
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
