"""What stands between two branches joined with the product that follows, so that a GPU reads every row once.

Each function is a kernel of :mod:`hyptree.ops` and a matrix product with a gradient of their own. The lifted rows,
which only the product reads, are not kept: the backward kernel makes them again while it reads the same bytes anyway.
First derivatives only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.nn.precision import gemm_dtype
from hyptree.ops.residual_norm import fits as _fits
from hyptree.ops.residual_norm import residual_norm, residual_norm_grad
from hyptree.ops.swiglu import swiglu_grad, swiglu_lift

if TYPE_CHECKING:
    from hyptree.lm.ambient import AmbientLinear


def fits(x: Tensor) -> bool:
    """Whether the kernels take this stream; elsewhere plain torch says the same."""
    return _fits(x)


def _grad_of_weight(needed: bool, grad: Tensor, rows: Tensor | None) -> Tensor | None:
    """Gradient of the weight of ``rows @ weight.T``, if there is one and somebody asks."""
    if not needed or rows is None:
        return None
    return grad.reshape(-1, grad.shape[-1]).mT @ rows.reshape(-1, rows.shape[-1])


class _NormProduct(torch.autograd.Function):
    """RMS norm, lift, product (if there is a ``weight``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm_gain: Tensor, weight: Tensor | None, settings: dict[str, Any]) -> Tensor:
        _, lifted = residual_norm(x, None, None, norm_gain, **settings)
        assert lifted is not None
        ctx.settings = settings
        ctx.save_for_backward(x, norm_gain, weight)
        return lifted if weight is None else F.linear(lifted, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_gain, weight = ctx.saved_tensors
        grad_lifted = grad if weight is None else grad @ weight
        grads = residual_norm_grad(x, None, None, norm_gain, None, grad_lifted, **ctx.settings)
        return grads[0], grads[3], _grad_of_weight(ctx.needs_input_grad[2], grad, grads[4]), None


class _ResidualNormProduct(torch.autograd.Function):
    """Residual, RMS norm, lift, product (if there is a ``weight``); gives the stream as well."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, raw_weight: Tensor, norm_gain: Tensor, weight: Tensor | None,
        settings: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        joined, lifted = residual_norm(x, y, raw_weight, norm_gain, **settings)
        assert joined is not None
        assert lifted is not None
        ctx.settings = settings
        ctx.save_for_backward(x, y, raw_weight, norm_gain, weight)
        return joined, lifted if weight is None else F.linear(lifted, weight)

    @staticmethod
    def backward(ctx: Any, grad_joined: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, raw_weight, norm_gain, weight = ctx.saved_tensors
        grad_lifted = grad if weight is None else grad @ weight
        grads = residual_norm_grad(x, y, raw_weight, norm_gain, grad_joined, grad_lifted, **ctx.settings)
        return *grads[:4], _grad_of_weight(ctx.needs_input_grad[4], grad, grads[4]), None


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, raw_weight: Tensor, settings: dict[str, Any]) -> Tensor:
        joined, _ = residual_norm(x, y, raw_weight, None, **settings)
        assert joined is not None
        ctx.settings = settings
        ctx.save_for_backward(x, y, raw_weight)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, raw_weight = ctx.saved_tensors
        return *residual_norm_grad(x, y, raw_weight, None, grad, None, **ctx.settings)[:3], None


class _SwigluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, hidden: int, c: float, bias: bool) -> Tensor:
        ctx.settings = (hidden, c, bias)
        ctx.save_for_backward(both, weight)
        return F.linear(swiglu_lift(both, hidden, c, bias), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, weight = ctx.saved_tensors
        grad_both, lifted = swiglu_grad(both, grad @ weight, *ctx.settings)
        return grad_both, _grad_of_weight(ctx.needs_input_grad[1], grad, lifted), None, None, None


def norm_product(
    x: Tensor, norm_gain: Tensor, layer: AmbientLinear | None, *, y: Tensor | None = None,
    raw_weight: Tensor | None = None, gain: float = 1.0, eps: float = 1e-6, c: float = 1.0, width: int,
    bias: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream after the residual with ``y``, and ``layer`` of its lifted norm (the lifted rows without a layer).

    Args:
        x: (..., n) stream. norm_gain: (n,). layer: reads lifted rows of ``width`` columns.
        y: (..., n) output of a branch, or None: then the stream stays. raw_weight: (1,), see ``ambient.residual``.
    """
    dtype = gemm_dtype(x)
    settings = {"dtype": dtype, "width": width, "gain": gain, "eps": eps, "c": c, "bias": bias}
    weight = None if layer is None else layer.matrices(dtype)[0]
    if y is None:
        return x, _NormProduct.apply(x, norm_gain, weight, settings)
    joined, out = _ResidualNormProduct.apply(x, y, raw_weight, norm_gain, weight, settings)
    return joined, out


def join(x: Tensor, y: Tensor, raw_weight: Tensor, gain: float = 1.0, c: float = 1.0) -> Tensor:
    """The Lorentz residual; see ``ambient.residual``."""
    settings = {"dtype": x.dtype, "width": 0, "gain": gain, "eps": 0.0, "c": c, "bias": False}
    joined: Tensor = _Residual.apply(x, y, raw_weight, settings)
    return joined


def swiglu_product(both: Tensor, layer: AmbientLinear, hidden: int, c: float, bias: bool) -> Tensor:
    """``layer`` of the lifted ``silu(gate) * up``: (..., 2 w) -> (..., n)."""
    out: Tensor = _SwigluProduct.apply(both, layer.matrices(both.dtype)[0], hidden, c, bias)
    return out
