"""SwiGLU on space components with the lift of its result: what stands between the two products of a feed-forward part.

``swiglu_lift`` is the operation, ``swiglu_grad`` its gradient, which gives the lifted rows once more, so that whoever
multiplies them need not keep them. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose, needs_operator
from . import reference

__all__ = ["reference", "swiglu_grad", "swiglu_lift"]

MAX_WIDTH = 16384
"""Columns of a row that a kernel holds at once."""


def fits(both: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    misfit = None
    if both.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        misfit = f"{both.dtype}, the kernel takes float32, bfloat16 and float16"
    elif both.shape[-1] > 2 * MAX_WIDTH:
        misfit = f"rows of {both.shape[-1] // 2}, the kernel takes up to {MAX_WIDTH}"
    return choose(backend, both, misfit) == "triton"


def swiglu_lift(both: Tensor, hidden: int, c: float = 1.0, bias: bool = True, *, backend: str = "auto") -> Tensor:
    """``[h, t, 1, 0, ...]`` with ``h = silu(gate) * up`` a point and t its time; no gradient on its own.

    Args:
        both: (..., 2 w), gate and up; columns of each from ``hidden`` on are room for the time and the one.
        hidden: space components. c: curvature -c. bias: put a one behind the time.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (..., w) in the dtype of ``both``.
    """
    if not fits(both, backend):
        return reference.swiglu_lift(both, hidden, c, bias)
    width = both.shape[-1]
    run = _forward_operator if needs_operator(both) else _forward
    return run(both.reshape(both.numel() // width, width), hidden, c, bias).view(*both.shape[:-1], width // 2)


def swiglu_grad(
    both: Tensor, grad: Tensor, hidden: int, c: float = 1.0, bias: bool = True, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Gradient of ``both`` from that of the lifted rows (..., w), and the lifted rows (..., w) again."""
    if not fits(both, backend):
        with torch.enable_grad():
            leaf = both.detach().requires_grad_()
            lifted = reference.swiglu_lift(leaf, hidden, c, bias)
            (found,) = torch.autograd.grad(lifted, leaf, grad)
        return found, lifted.detach()
    run = _backward_operator if needs_operator(both) else _backward
    count = both.numel() // both.shape[-1]
    rows, grads = both.reshape(count, both.shape[-1]), grad.reshape(count, grad.shape[-1]).contiguous()
    found, lifted = run(rows, grads, hidden, c, bias)
    return found.view(both.shape), lifted.view(grad.shape)


def _forward(both: Tensor, hidden: int, c: float, bias: bool) -> Tensor:
    from . import triton

    return triton.forward(both.contiguous(), hidden, c, bias)


def _backward(both: Tensor, grad: Tensor, hidden: int, c: float, bias: bool) -> tuple[Tensor, Tensor]:
    from . import triton

    return triton.backward(both.contiguous(), grad, hidden, c, bias)


@torch.library.triton_op("ramify::swiglu_lift", mutates_args={})
def _forward_operator(both: Tensor, hidden: int, c: float, bias: bool) -> Tensor:
    from . import triton

    return triton.forward(both.contiguous(), hidden, c, bias, torch.library.wrap_triton)


@torch.library.triton_op("ramify::swiglu_grad", mutates_args={})
def _backward_operator(both: Tensor, grad: Tensor, hidden: int, c: float, bias: bool) -> tuple[Tensor, Tensor]:
    from . import triton

    return triton.backward(both.contiguous(), grad, hidden, c, bias, torch.library.wrap_triton)
