"""Linear layers with what stands around them: a factor inside the weight, a bias whose gradient is a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.rows import LONGEST, is_eager, is_ordinary, plain_gradients, row_plan
from hyptree.ops.backend import choose
from hyptree.ops.bare import is_bare
from hyptree.ops.derivatives import FIRST_ONLY, in_transform, wants_graph
from hyptree.ops.rounding import gemm_dtype

_HALF = (torch.bfloat16, torch.float16)


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None) -> Tensor:
    """``factor * (x @ weight.T + bias)`` with the factor of each output in the weight, which is the smaller tensor.

    Neither the product nor its gradient is multiplied again. In float16 it is: a weight times a small factor would
    leave its range.
    """
    if factor is None:
        return F.linear(x, weight, bias)
    if gemm_dtype(x) == torch.float16:
        return F.linear(x, weight, bias) * factor
    return F.linear(x, weight * factor.unsqueeze(1), None if bias is None else bias * factor)


def linear(x: Tensor, layer: Any) -> Tensor:
    """``layer(x)``; on a GPU, in half precision, the gradient of a bare layer's bias is a product too."""
    if not _sums_by_product(x) or not torch.is_grad_enabled() or in_transform():
        return layer(x)
    if not is_bare(layer, nn.Linear) or layer.bias is None:
        return layer(x)
    y: Tensor = _Linear.apply(x, layer.weight, layer.bias, gemm_dtype(x))
    return y


def _sums_by_product(x: Tensor) -> bool:
    """Whether rows of a product of ``x`` are added up by a product with ones: half precision on a GPU, uncompiled."""
    is_half = x.is_cuda and gemm_dtype(x) in _HALF
    return is_half and not torch.compiler.is_compiling() and choose("auto", x, None) == "triton"


class _Linear(torch.autograd.Function):
    """Casts to the dtype of the product and, in the gradients, back are parts of it. Where there are any, there is no
    second derivative: the map would have to be kept as it was.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        low, low_weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(low, low_weight)
        ctx.dtypes, ctx.is_cast = (x.dtype, weight.dtype, bias.dtype), low is not x or low_weight is not weight
        return F.linear(low, low_weight, bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_cast and wants_graph():
            raise RuntimeError(FIRST_ONLY)
        low, low_weight = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad, grad.reshape(-1, grad.shape[-1])
        of_x, of_weight, of_bias = ctx.dtypes
        return (
            _product(rows, low_weight, of_x).view(low.shape) if needed[0] else None,
            _product(rows.mT, low.reshape(-1, low.shape[-1]), of_weight) if needed[1] else None,
            (rows.sum(0) if wants_graph() else sum_rows(rows)).to(of_bias) if needed[2] else None,
            None,
        )


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """``x @ y`` in ``dtype``; a GPU writes float32 of factors in half precision at once."""
    if x.is_cuda and x.dtype in _HALF and dtype == torch.float32 and not wants_graph():
        return torch.mm(x, y, out_dtype=dtype)
    return (x @ y).to(dtype)


def sum_rows(x: Tensor) -> Tensor:
    """The sum (n,) of the rows of ``x`` (R, n), which is the gradient of a bias: added up in float32 at least.

    In half precision on a GPU a product with a row of ones: about twice the time of reading (30 microseconds for 401408
    rows of 64 on an H200), where torch's sum takes three times. Its result is float32, so that a product cut along the
    rows adds up its parts in float32 as well. The ones are written each time: 2 bytes beside the 2 n of a row, and
    nothing that a CUDA graph would have to keep.
    """
    if x.is_cuda and x.dtype in _HALF:
        return torch.mm(x.new_ones(1, x.shape[0]), x, out_dtype=torch.float32)[0]
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def product_then(tail: Callable[..., Tensor], x: Tensor, weight: Tensor, *rest: Any) -> Tensor | None:
    """``tail(x @ weight.T, x, *rest)`` on a GPU with the tail in one kernel each way, or None where that does not fit.

    Args:
        tail: a function of rows, see ``geometry.core.rows.by_kernels``.
    """
    if not is_eager() or not all(map(is_ordinary, (x, weight, *rest))) or max(weight.shape) > LONGEST:
        return None
    out: Tensor = _ProductThen.apply(tail, x, weight, *rest)
    return out


class _ProductThen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tail: Callable[..., Tensor], x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        product = F.linear(x, weight)
        ctx.tail, ctx.numbers = tail, [None if isinstance(y, Tensor) else y for y in rest]
        ctx.save_for_backward(product, x, weight, *[y for y in rest if isinstance(y, Tensor)])
        rows = product, x, *rest
        plan = row_plan(tail, *rows)
        return tail(*rows) if plan is None else plan.forward(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, x, weight, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        rest = [next(saved) if y is None else y for y in ctx.numbers]
        needed = ctx.needs_input_grad[1:]
        plan = None if torch.is_grad_enabled() or not is_ordinary(grad) else row_plan(ctx.tail, product, x, *rest)
        if plan is None:

            def plain(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
                return ctx.tail(F.linear(x, weight), x, *rest)

            return None, *plain_gradients(plain, (x, weight, *rest), (grad,), needed)
        needs_product = needed[0] or needed[1]
        slope, to_x, *to_rest = plan.backward((product, x, *rest), (grad,), (needs_product, needed[0], *needed[2:]))
        if needed[0]:
            to_x.view(-1, x.shape[-1]).addmm_(slope.reshape(-1, weight.shape[0]), weight)
        to_weight = slope.reshape(-1, weight.shape[0]).mT @ x.reshape(-1, x.shape[-1]) if needed[1] else None
        return None, to_x, to_weight, *to_rest
