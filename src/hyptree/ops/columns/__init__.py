"""Weight, time column and bias of a linear map as one aligned matrix, and the gradient's way back.

``join`` is the operation, with a gradient; ``reference`` holds its definition, ``triton`` the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.columns import reference
from hyptree.ops.columns.layout import Layout

__all__ = ["Layout", "join", "reference"]


def join(
    weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype, *, backend: str = "auto"
) -> Tensor:
    """The matrix that multiplies lifted rows ``[s, t, 1, 0, ...]``, zeros in all its padding; differentiable once.

    Args:
        weight: (m, points size). time: (m,) or (m, points). bias: (m,), only with one point.
        layout: groups of rows and points of columns.
        dtype: of the result. backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (groups padded_rows, points point_width)
    """
    misfit = None
    if weight.dtype not in KERNEL_DTYPES or dtype not in KERNEL_DTYPES:
        misfit = f"{weight.dtype} to {dtype}, the kernel takes float32, bfloat16 and float16"
    if choose(backend, weight, misfit) == "torch":
        return reference.join(weight, time, bias, layout, dtype)
    joined: Tensor = _Join.apply(weight, time, bias, layout, dtype)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype
    ) -> Tensor:
        ctx.layout, ctx.size, ctx.dtype = layout, weight.shape[1] // layout.points, weight.dtype
        ctx.time_shape, ctx.has_bias = time.shape, bias is not None
        run = _join_operator if needs_operator(weight) else _join
        return run(weight.contiguous(), time.contiguous(), bias, list(layout), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = _split_operator if needs_operator(grad) else _split
        weight, time, bias = run(grad.contiguous(), list(ctx.layout), ctx.size, ctx.has_bias, ctx.dtype)
        return weight, time.view(ctx.time_shape), bias if ctx.has_bias else None, None, None


def _join(weight: Tensor, time: Tensor, bias: Tensor | None, layout: list[int], dtype: torch.dtype) -> Tensor:
    from hyptree.ops.columns import triton

    return triton.join(weight, time, bias, Layout(*layout), dtype)


def _split(
    matrix: Tensor, layout: list[int], size: int, has_bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from hyptree.ops.columns import triton

    return triton.split(matrix, Layout(*layout), size, has_bias, dtype)


_join_operator = operator("join_columns", _join)
_split_operator = operator("split_columns", _split)
