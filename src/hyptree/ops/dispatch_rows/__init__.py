"""Dispatch of a mixture of experts: every lifted row copied to its experts' places; gradients are summed back.

``dispatch_rows`` is the operation, ``dispatch_rows_grad`` its gradient, which gives the copies once more, so that
whoever multiplies them need not keep them. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.dispatch_rows import reference

__all__ = ["dispatch_rows", "dispatch_rows_grad", "reference"]

MAX_WIDTH = 16384
"""Columns of a row that a kernel holds at once."""


def dispatch_rows(
    rows: Tensor, inverse: Tensor, copies: int, a: Tensor | None = None, chosen: Tensor | None = None, one: int = -1,
    *, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Every row copied to k places; with factors, column ``one`` of a copy is divided by the factor of its expert.

    Args:
        rows: (T, width). copies: k.
        inverse: (T k,) the places of the copies of a row, those of the first row first.
        a: (E,) float32, factors, or None. chosen: (T k,) the expert of each copy, needed with ``a``.
        one: a column, or -1 for none.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (T k, width) copies, and the factor of each (T k,) in the same order, or None.
    """
    if not rows_fit(backend, rows, rows.shape[-1], MAX_WIDTH):
        return reference.dispatch_rows(rows, inverse, copies, a, chosen, one)
    run = _dispatch_operator if needs_operator(rows) else _dispatch
    dispatched, factors = run(rows.contiguous(), inverse, copies, a, chosen, one)
    return dispatched, None if a is None else factors


def dispatch_rows_grad(
    rows: Tensor, grad: Tensor, inverse: Tensor, copies: int, factors: Tensor | None = None,
    to_factors: Tensor | None = None, one: int = -1, initial: Tensor | None = None, *, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """What the gradient of the copies (T k, width) says.

    Args:
        factors: as :func:`dispatch_rows` gave them. to_factors: (T k,) float32, what others say about their gradient.
        initial: (T, width), what others say about the gradient of ``rows``.

    Returns:
        Gradient of ``rows`` (T, width), the copies (T k, width) again, and the gradient of every factor (T k,) in the
        order of ``chosen``, or None. ``initial`` and ``to_factors`` are included.
    """
    if not rows_fit(backend, rows, rows.shape[-1], MAX_WIDTH):
        return reference.dispatch_rows_grad(rows, grad, inverse, copies, factors, to_factors, one, initial)
    run = _grad_operator if needs_operator(rows) else _grad
    settings = (inverse, copies, factors, to_factors, one, initial)
    grad_rows, dispatched, per_choice = run(rows.contiguous(), grad.contiguous(), *settings)
    return grad_rows, dispatched, None if factors is None else per_choice


def _dispatch(
    rows: Tensor, inverse: Tensor, copies: int, a: Tensor | None, chosen: Tensor | None, one: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.dispatch_rows import triton

    return triton.dispatch(rows, inverse, copies, a, chosen, one)


def _grad(
    rows: Tensor, grad: Tensor, inverse: Tensor, copies: int, factors: Tensor | None, to_factors: Tensor | None,
    one: int, initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.dispatch_rows import triton

    return triton.grad(rows, grad, inverse, copies, factors, to_factors, one, initial)


_dispatch_operator = operator("dispatch_rows", _dispatch)
_grad_operator = operator("dispatch_rows_grad", _grad)
