"""Lorentz residual, RMS norm and lift: what stands between two branches of a hyperbolic transformer.

``norm_linear`` and ``join`` are the doors. ``residual_norm`` is their kernel and ``residual_norm_grad`` its gradient,
which gives the lifted rows once more, so that the product need not keep them. ``reference`` holds the definition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.derivatives import first_derivative
from hyptree.ops.residual_norm import reference
from hyptree.ops.rounding import gemm_dtype

__all__ = ["join", "norm_linear", "reference", "residual_norm", "residual_norm_grad"]

MAX_WIDTH = 8192
"""Columns of a row that a kernel holds at once."""


def norm_linear(
    x: Tensor, norm_gain: Tensor, layer: Any, *, residual: tuple[Tensor, Tensor, float] | None = None,
    eps: float = 1e-6, c: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream, joined with a branch if there is one, and ``layer`` of its RMS norm. First derivatives only.

    Args:
        x: (..., n) points, the stream. norm_gain: (n,).
        layer: a linear map of points, ``W [t; s] + b``. A bare one may be read by its ``matrix``, and then the product
            has the padded columns of that. None: no product but the normed points, perhaps as lifted rows
            ``[s, t, 1, 0, ...]``.
        residual: output (..., n) of a branch, raw weight (1,) and gain, see ``reference.residual``.
        eps: of the norm. c: curvature -c.
    """
    if rows_fit("auto", x, x.shape[-1], MAX_WIDTH):
        dtype, has_matrix = gemm_dtype(x), layer is not None and is_bare(layer)
        matrix = layer.matrix(dtype) if has_matrix else None
        width = reference.padded_width(x.shape[-1]) if matrix is None else matrix.shape[1]
        y, raw_weight, gain = residual or (None, None, 1.0)
        settings = {"dtype": dtype, "width": width, "gain": gain, "eps": eps, "c": c}
        *joined, out = _ResidualNormProduct.apply(x, y, raw_weight, norm_gain, matrix, settings)
        if layer is not None and not has_matrix:
            report_unfused("norm_linear", layer)
            out = layer(out[..., : x.shape[-1]])
        return (joined[0] if joined else x), out
    if residual is not None:
        x = reference.residual(x, *residual, c)
    s = reference.rms_norm(x, norm_gain, eps)
    return x, s.to(gemm_dtype(s)) if layer is None else layer(s)


def join(x: Tensor, y: Tensor, raw_weight: Tensor, gain: float = 1.0, c: float = 1.0) -> Tensor:
    """The stream (..., n) joined with the output of a branch; see ``reference.residual``. First derivatives only."""
    if not rows_fit("auto", x, x.shape[-1], MAX_WIDTH):
        return reference.residual(x, y, raw_weight, gain, c)
    settings = {"dtype": x.dtype, "width": 0, "gain": gain, "c": c}
    (joined,) = _ResidualNormProduct.apply(x, y, raw_weight, None, None, settings)
    return joined


class _ResidualNormProduct(torch.autograd.Function):
    """Residual (with ``y``), RMS norm and lift (with ``norm_gain``), product (with ``matrix``): one or two results."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, raw_weight: Tensor | None, norm_gain: Tensor | None,
        matrix: Tensor | None, settings: dict[str, Any],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        joined, lifted = residual_norm(x, y, raw_weight, norm_gain, **settings)
        ctx.settings = settings
        ctx.save_for_backward(x, y, raw_weight, norm_gain, matrix)
        out = lifted if lifted is None or matrix is None else F.linear(lifted, matrix)
        return tuple(result for result in (joined, out) if result is not None)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, raw_weight, norm_gain, matrix = ctx.saved_tensors
        grad_joined = None if y is None else grads[0]
        grad_lifted = grad = None if norm_gain is None else grads[-1]
        if grad is not None and matrix is not None:
            grad_lifted = grad @ matrix
        *inner, lifted = residual_norm_grad(x, y, raw_weight, norm_gain, grad_joined, grad_lifted, **ctx.settings)
        grad_matrix = None
        if ctx.needs_input_grad[4] and grad is not None and lifted is not None:
            grad_matrix = grad.flatten(0, -2).mT @ lifted.flatten(0, -2)
        return *inner, grad_matrix, None


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
    if not rows_fit(backend, x, n, MAX_WIDTH):
        point = x if y is None or raw_weight is None else reference.residual(x, y, raw_weight, gain, c)
        if norm_gain is None:
            return point, None
        lifted = reference.lift(reference.rms_norm(point, norm_gain, eps), dtype, width, c, bias)
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
    bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, y, raw_weight and norm_gain, and the lifted rows again, by kernels; None for what was left out.

    Args:
        grad_joined: (..., n) gradient of the residual (of ``x`` on its way past the norm, without ``y``), or None.
        grad_lifted: (..., width), given if and only if there is a ``norm_gain``.
    """
    count = x.numel() // x.shape[-1]
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
