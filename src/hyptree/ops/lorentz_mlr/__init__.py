"""Logits of Lorentz hyperplanes. ``hyperplane_logits`` is the door: a classifier's matrix product and what follows.

``mlr_logits`` is what follows it, in one pass, forward and backward; ``reference`` is its definition, ``triton`` holds
the kernels. Second derivatives are those of the definition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, quick_asinh
from hyptree.ops.affine import affine
from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.derivatives import grads_with_graph, in_transform, wants_graph
from hyptree.ops.lorentz_mlr import reference
from hyptree.ops.rounding import wide

__all__ = ["hyperplane_logits", "mlr_logits", "reference"]

MAX_CLASSES = 65535 * 256
"""More columns than this have more tiles than a launch can count."""


_CHUNK = 64  # rows, which together stay in a cache


def hyperplane_logits(x: Tensor, matrix: Tensor, time_column: Tensor, scale: Tensor, c: Scalar = 1.0) -> Tensor:
    """``scale asinh(matrix x + t time_column)``, ``t`` the time of each point: (..., n) -> (..., K), float32 at least.

    Args:
        x: (..., n) Lorentz points in the dtype of the product. matrix: (K, n) in the same. time_column, scale: (K,).
        c: curvature -c, a number or a tensor of one value.
    """
    # Compiled code makes the logits in one pass too.
    if not torch.compiler.is_compiling() and _fits(x, matrix.shape[0]):
        return mlr_logits(F.linear(x, matrix), x, time_column, scale, c)
    logits: Tensor = _Scaled.apply(quick_asinh(affine(x, matrix, time_column, None, c)), scale)
    return logits


class _Scaled(torch.autograd.Function):
    """``values * scale``, (..., K) and (K,), whose gradient of the scale reads the result and not the values.

    A compiler would evaluate ``asinh`` again for them, and sum over all rows of a column before it goes to the next,
    which touches another page of memory at every step.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, scale: Tensor) -> Tensor:
        return values * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        scale, out = ctx.saved_tensors
        terms = (grad * out).reshape(-1, scale.shape[-1])
        chunks = terms.shape[0] // _CHUNK
        whole = chunks * _CHUNK
        sums = terms[:whole].unflatten(0, (chunks, _CHUNK)).sum(1).sum(0) + terms[whole:].sum(0)
        return grad * scale, sums / torch.where(scale == 0, 1.0, scale)


def _fits(x: Tensor, classes: int, backend: str = "auto") -> bool:
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
    if product.dtype != x.dtype or not _fits(x, product.shape[-1], backend):
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
