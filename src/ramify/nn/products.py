"""Matrix products with what stands around them: factors of the result inside the weight, an activation not kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import gemm_dtype


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


def keeps_gelu(x: Tensor) -> bool:
    """Whether ``gelu(x)`` is kept: on a CPU, where memory is plenty and GELU a twentieth of a step, and by compilers,
    which choose by themselves."""
    return x.device.type == "cpu" or torch.compiler.is_compiling()


def gelu_linear(x: Tensor, linear: nn.Linear, factor: Tensor | None = None) -> Tensor:
    """``factor * linear(gelu(x))``; on a GPU without keeping ``gelu(x)`` for the backward pass.

    It is as large as ``x``, which is kept, and takes one pass to find again.
    """
    if not torch.is_grad_enabled() or keeps_gelu(x):
        return scaled_linear(F.gelu(x), linear.weight, linear.bias, factor)
    dtype = gemm_dtype(x)
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if factor is not None and dtype != torch.float16:
        weight, bias, factor = weight * factor.unsqueeze(1), None if bias is None else bias * factor, None
    y: Tensor = _GeluLinear.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return y if factor is None else y * factor


class _GeluLinear(torch.autograd.Function):
    """All in one dtype, so that autocast has nothing to do inside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, to_x, to_weight, to_bias = grad.flatten(0, -2), None, None, None
        if ctx.needs_input_grad[0]:
            to_x = torch.ops.aten.gelu_backward(grad @ weight, x)
        if ctx.needs_input_grad[1]:
            to_weight = rows.mT @ F.gelu(x).flatten(0, -2)
        if ctx.needs_input_grad[2]:
            to_bias = rows.sum(0)
        return to_x, to_weight, to_bias
