"""Lorentz residual, RMS norm and lift: what stands between two branches of a hyperbolic transformer.

``residual_norm`` is the operation, ``residual_norm_grad`` its gradient, which gives the lifted rows once more, so that
whoever multiplies them need not keep them. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.residual_norm import reference

__all__ = ["fits", "reference", "residual_norm", "residual_norm_grad"]

MAX_WIDTH = 8192
"""Columns of a row that a kernel holds at once."""


def fits(x: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    return rows_fit(backend, x, x.shape[-1], MAX_WIDTH)


def residual_norm(
    x: Tensor, y: Tensor | None, raw_weight: Tensor | None, norm_gain: Tensor | None, *, dtype: torch.dtype, width: int,
    gain: float = 1.0, eps: float = 1e-6, c: float = 1.0, bias: bool = True, backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The Lorentz residual of x and y, then RMS norm and lift; each part may be left out. No gradient on its own.

    With ``w = softplus(raw_weight)`` and ``a = x + w y`` the residual is ``gain a / sqrt(-c <a, a>_L)``; the lifted row
    ``[s, t, 1, 0, ...]`` holds the normed point and its time.

    Args:
        x: (..., n) points. y: (..., n) points, or None for no residual. raw_weight: (1,), with ``y``.
        norm_gain: (n,), or None for neither norm nor lift.
        dtype: of the lifted rows. width: columns of them. gain: factor on the residual. eps: of the norm.
        c: curvature -c. bias: put a one behind the time.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        The residual (..., n) in the dtype of ``x`` and the lifted rows (..., width); None for what was left out.
    """
    n, count = x.shape[-1], x.numel() // x.shape[-1]
    if not fits(x, backend):
        point = x if y is None or raw_weight is None else reference.residual(x, y, raw_weight, gain, c)
        lifted = None if norm_gain is None else reference.norm_lift(point, norm_gain, eps, dtype, width, c, bias)
        return (None if y is None else point), lifted
    rows = x.reshape(count, n).contiguous()
    other = None if y is None else y.reshape(count, n).contiguous()
    run = _forward_operator if needs_operator(x) else _forward
    joined, lifted = run(rows, other, raw_weight, norm_gain, dtype, width, gain, eps, c, bias)
    return (
        None if y is None else joined.view(x.shape),
        None if norm_gain is None else lifted.view(*x.shape[:-1], width),
    )


def residual_norm_grad(
    x: Tensor, y: Tensor | None, raw_weight: Tensor | None, norm_gain: Tensor | None, grad_joined: Tensor | None,
    grad_lifted: Tensor | None, *, dtype: torch.dtype, width: int, gain: float = 1.0, eps: float = 1e-6, c: float = 1.0,
    bias: bool = True, backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, y, raw_weight and norm_gain, and the lifted rows again; None for what was left out.

    Args:
        grad_joined: (..., n) gradient of the residual (of ``x`` on its way past the norm, without ``y``), or None.
        grad_lifted: (..., width), given if and only if there is a ``norm_gain``.
    """
    count = x.numel() // x.shape[-1]
    if not fits(x, backend):
        return _plain_grad(x, y, raw_weight, norm_gain, grad_joined, grad_lifted, dtype, width, gain, eps, c, bias)
    rows = [None if part is None else part.reshape(count, part.shape[-1]).contiguous() for part in (x, y)]
    grads = [
        None if part is None else part.reshape(count, part.shape[-1]).contiguous()
        for part in (grad_joined, grad_lifted)
    ]
    run = _backward_operator if needs_operator(x) else _backward
    assert rows[0] is not None
    grad_x, grad_y, parts, lifted = run(
        rows[0], rows[1], raw_weight, norm_gain, grads[0], grads[1], dtype, width, gain, eps, c, bias
    )
    sums = parts.sum(0)
    return (
        grad_x.view(x.shape),
        None if y is None else grad_y.view(x.shape),
        None if y is None or raw_weight is None else sums[-1].to(raw_weight.dtype).view(raw_weight.shape),
        None if norm_gain is None else sums[: norm_gain.numel()].to(norm_gain.dtype),
        None if norm_gain is None else lifted.view(*x.shape[:-1], width),
    )


def _plain_grad(
    x: Tensor, y: Tensor | None, raw_weight: Tensor | None, norm_gain: Tensor | None, grad_joined: Tensor | None,
    grad_lifted: Tensor | None, dtype: torch.dtype, width: int, gain: float, eps: float, c: float, bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The same by autograd through the definition."""
    leaves = [None if part is None else part.detach().requires_grad_() for part in (x, y, raw_weight, norm_gain)]
    with torch.enable_grad():
        point, y_leaf, raw_leaf, gain_leaf = leaves
        assert point is not None
        lifted = None
        if y_leaf is not None and raw_leaf is not None:
            point = reference.residual(point, y_leaf, raw_leaf, gain, c)
        if gain_leaf is not None:
            lifted = reference.norm_lift(point, gain_leaf, eps, dtype, width, c, bias)
        pairs = [
            (out, g) for out, g in ((point, grad_joined), (lifted, grad_lifted)) if out is not None and g is not None
        ]
        wanted = [leaf for leaf in leaves if leaf is not None]
        of_wanted = iter(
            torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        )
    grads = [None if leaf is None else next(of_wanted) for leaf in leaves]
    assert grads[0] is not None
    return grads[0], grads[1], grads[2], grads[3], None if lifted is None else lifted.detach()


def _forward(
    x: Tensor, y: Tensor | None, raw: Tensor | None, gamma: Tensor | None, dtype: torch.dtype, width: int, gain: float,
    eps: float, c: float, bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.residual_norm import triton

    return triton.forward(x, y, raw, gamma, dtype, width, gain, eps, c, bias)


def _backward(
    x: Tensor, y: Tensor | None, raw: Tensor | None, gamma: Tensor | None, grad_joined: Tensor | None,
    grad_lifted: Tensor | None, dtype: torch.dtype, width: int, gain: float, eps: float, c: float, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.residual_norm import triton

    return triton.backward(x, y, raw, gamma, grad_joined, grad_lifted, dtype, width, gain, eps, c, bias)


_forward_operator = operator("residual_norm", _forward)
_backward_operator = operator("residual_norm_grad", _backward)
