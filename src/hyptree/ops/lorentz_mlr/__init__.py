"""Logits of Lorentz hyperplanes: what follows the matrix product of a classifier, in one pass, forward and backward.

``mlr_logits`` is the operation, ``reference`` its definition, ``triton`` the kernels. Second derivatives are
those of the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar
from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.derivatives import grads_with_graph, in_transform, wants_graph
from hyptree.ops.lorentz_mlr import reference
from hyptree.ops.rounding import wide

__all__ = ["fits", "mlr_logits", "reference"]

MAX_CLASSES = 65535 * 256
"""More columns than this have more tiles than a launch can count."""


def fits(x: Tensor, classes: int, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    return not in_transform() and rows_fit(backend, x, classes, MAX_CLASSES)


def mlr_logits(
    product: Tensor, x: Tensor, time_column: Tensor, scale: Tensor, c: Scalar = 1.0, *, backend: str = "auto"
) -> Tensor:
    """``scale asinh(product + t time_column)`` with the time ``t`` of each point: (..., K) in float32 at least.

    Args:
        product: (..., K). x: (..., n) Lorentz points. time_column: (K,). scale: (K,).
        c: curvature -c, a number or a tensor of one value.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).
    """
    if product.dtype != x.dtype or not fits(x, product.shape[-1], backend):
        return reference.mlr_logits(product, x, time_column, scale, c)
    K, n = product.shape[-1], x.shape[-1]
    over_c = 1 / c.float().reshape(1) if isinstance(c, Tensor) else None
    logits: Tensor = _Logits.apply(
        product.reshape(-1, K).contiguous(), x.reshape(-1, n).contiguous(), time_column.float().contiguous(),
        scale.float().contiguous(), over_c, 1.0 if isinstance(c, Tensor) else float(c),
    )  # fmt: skip
    return logits.view(product.shape)


def _forward(
    product: Tensor, x: Tensor, time_column: Tensor, scale: Tensor, over_c: Tensor | None, c: float
) -> tuple[Tensor, Tensor]:
    from hyptree.ops.lorentz_mlr import triton

    return triton.forward(product, x, time_column, scale, over_c, c)


def _backward(
    product: Tensor, times: Tensor, time_column: Tensor, scale: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from hyptree.ops.lorentz_mlr import triton

    return triton.backward(product, times, time_column, scale, grad)


_forward_operator = operator("mlr_logits", _forward)
_backward_operator = operator("mlr_logits_grad", _backward)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Tensor, x: Tensor, time_column: Tensor, scale: Tensor, over_c: Tensor | None, c: float
    ) -> Tensor:
        run = _forward_operator if needs_operator(x) else _forward
        logits, times = run(product, x, time_column, scale, over_c, c)
        ctx.save_for_backward(product, x, times, time_column, scale, over_c)
        ctx.c = c
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, x, times, time_column, scale, over_c = ctx.saved_tensors
        if wants_graph():

            def plain(product: Tensor, x: Tensor, time: Tensor, scale: Tensor, over_c: Tensor | None) -> Tensor:
                return reference.mlr_logits(product, x, time, scale, ctx.c if over_c is None else 1 / over_c)

            inputs = product, x, time_column, scale, over_c
            return *grads_with_graph(plain, inputs, ctx.needs_input_grad[:5], grad), None
        run = _backward_operator if needs_operator(x) else _backward
        to_product, row_sums, column_sums = run(product, times, time_column, scale, grad.contiguous())
        slope = row_sums.sum(0) / times
        to_x = (slope.unsqueeze(-1) * wide(x)).to(x.dtype)
        to_time, to_scale = column_sums.sum(0).chunk(2)
        return to_product, to_x, to_time, to_scale, (None if over_c is None else slope.sum().reshape(1) / 2), None
