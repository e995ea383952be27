"""Weight, time column and bias of a linear map as one aligned matrix, and the gradient's way back.

``pack_weight`` is the operation, with a gradient; ``reference`` holds its definition, ``triton`` the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.derivatives import first_derivative
from hyptree.ops.pack_weight import reference
from hyptree.ops.pack_weight.layout import Layout

__all__ = ["Layout", "pack_weight", "reference"]


def pack_weight(
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
    unsupported = None
    if weight.dtype not in KERNEL_DTYPES or dtype not in KERNEL_DTYPES:
        unsupported = f"{weight.dtype} to {dtype}, the kernel takes float32, bfloat16 and float16"
    if choose(backend, weight, unsupported) == "torch":
        return reference.pack_weight(weight, time, bias, layout, dtype)
    packed: Tensor = _PackWeight.apply(weight, time, bias, layout, dtype)
    return packed


class _PackWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype
    ) -> Tensor:
        ctx.layout, ctx.size, ctx.dtype = layout, weight.shape[1] // layout.points, weight.dtype
        ctx.time_shape, ctx.has_bias = time.shape, bias is not None
        run = _pack_operator if needs_operator(weight) else _pack
        return run(weight.contiguous(), time.contiguous(), bias, list(layout), dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = _unpack_operator if needs_operator(grad) else _unpack
        weight, time, bias = run(grad.contiguous(), list(ctx.layout), ctx.size, ctx.has_bias, ctx.dtype)
        return weight, time.view(ctx.time_shape), bias if ctx.has_bias else None, None, None


def _pack(weight: Tensor, time: Tensor, bias: Tensor | None, layout: list[int], dtype: torch.dtype) -> Tensor:
    from hyptree.ops.pack_weight import triton

    return triton.pack_weight(weight, time, bias, Layout(*layout), dtype)


def _unpack(
    matrix: Tensor, layout: list[int], size: int, has_bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from hyptree.ops.pack_weight import triton

    return triton.unpack_weight(matrix, Layout(*layout), size, has_bias, dtype)


_pack_operator = operator("pack_weight", _pack)
_unpack_operator = operator("unpack_weight", _unpack)
