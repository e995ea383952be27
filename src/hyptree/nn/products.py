"""Matrix products with what stands around them: factors of the result inside the weight, an activation not kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.nn.precision import gemm_dtype
from hyptree.ops.derivatives import grads_with_graph, in_transform, wants_graph
from hyptree.ops.gelu_grad import fits, gelu_grad

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


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """``layer(x)``; on a GPU, in half precision, the gradient of a linear layer's bias is a product too."""
    is_known = type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
    if not is_known or layer.bias is None or not torch.is_grad_enabled() or not sums_by_product(x) or in_transform():
        return layer(x)  # adapters, quantised layers: they know their product
    dtype = gemm_dtype(x)
    y: Tensor = _Linear.apply(x.to(dtype), layer.weight.to(dtype), layer.bias)
    return y


def sums_by_product(x: Tensor) -> bool:
    """Whether rows of a product of ``x`` are added up by a product with ones: half precision on a GPU, uncompiled."""
    return x.is_cuda and gemm_dtype(x) in _HALF and not torch.compiler.is_compiling()


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
    weight, bias, factor = _scaled(linear, factor, dtype)
    y: Tensor = _GeluLinear.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return y if factor is None else y * factor


def has_gelu_mlp(x: Tensor) -> bool:
    """Whether :func:`gelu_mlp` has more to offer than its two products: a kernel for the backward pass between them."""
    return torch.is_grad_enabled() and not keeps_gelu(x) and not in_transform() and fits(x)


def gelu_mlp(x: Tensor, weight: Tensor, bias: Tensor | None, linear: nn.Linear, factor: Tensor | None = None) -> Tensor:
    """``factor * linear(gelu(x @ weight.T + bias))``, where :func:`has_gelu_mlp`.

    Keeps ``x`` and the hidden map before GELU. The backward pass reads that and its gradient once, for GELU again, for
    the gradient through it and for that of ``bias``, whose terms are added in float32.
    """
    dtype = gemm_dtype(x)
    last_weight, last_bias, factor = _scaled(linear, factor, dtype)
    y: Tensor = _GeluMlp.apply(x.to(dtype), weight.to(dtype), bias, last_weight.to(dtype), last_bias)
    return y if factor is None else y * factor


def _scaled(
    linear: nn.Linear, factor: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight and bias with the factor inside; it is given back where it has to stay outside."""
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if factor is None or dtype == torch.float16:
        return weight, bias, factor
    return weight * factor.unsqueeze(1), None if bias is None else bias * factor, None


class _Linear(torch.autograd.Function):
    """Map and weight in one dtype; the bias in any, which is that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = bias.dtype
        return F.linear(x, weight, bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed, rows = ctx.needs_input_grad, grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if needed[0] else None,
            rows.mT @ x.reshape(-1, x.shape[-1]) if needed[1] else None,
            (rows.sum(0) if wants_graph() else _sum_rows(rows)).to(ctx.bias_dtype) if needed[2] else None,
        )


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


class _GeluMlp(torch.autograd.Function):
    """Map and weights in one dtype; biases in any, which is that of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, last_weight: Tensor, last_bias: Tensor | None
    ) -> Tensor:
        hidden = F.linear(x, weight, _as(bias, x.dtype))
        ctx.save_for_backward(x, hidden, weight, bias, last_weight, last_bias)
        return F.linear(F.gelu(hidden), last_weight, _as(last_bias, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, weight, bias, last_weight, last_bias = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if wants_graph():
            return grads_with_graph(_plain_mlp, (x, weight, bias, last_weight, last_bias), needed, grad)
        rows = grad.reshape(-1, grad.shape[-1])
        # written over: nobody else knows this gradient
        to_hidden, gelu, sums = gelu_grad(hidden.reshape(-1, hidden.shape[-1]), rows @ last_weight, overwrite=True)
        return (
            (to_hidden @ weight).view(x.shape) if needed[0] else None,
            to_hidden.mT @ x.reshape(-1, x.shape[-1]) if needed[1] else None,
            _as(sums, bias.dtype) if needed[2] else None,
            rows.mT @ gelu if needed[3] else None,
            _sum_rows(rows).to(last_bias.dtype) if needed[4] else None,
        )


def _plain_mlp(x: Tensor, weight: Tensor, bias: Tensor | None, last_weight: Tensor, last_bias: Tensor | None) -> Tensor:
    """What :class:`_GeluMlp` computes, for derivatives of its derivatives."""
    return F.linear(F.gelu(F.linear(x, weight, _as(bias, x.dtype))), last_weight, _as(last_bias, x.dtype))


def _as(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _sum_rows(x: Tensor) -> Tensor:
    """The sum (n,) of the rows of ``x`` (R, n), which is the gradient of a bias: added up in float32 at least.

    In half precision on a GPU a product with a row of ones: about twice the time of reading (30 microseconds for 401408
    rows of 64 on an H200), where torch's sum takes three times. Its result is float32, so that a product cut along the
    rows adds up its parts in float32 as well. The ones are written each time: 2 bytes beside the 2 n of a row, and
    nothing that a CUDA graph would have to keep.
    """
    if x.is_cuda and x.dtype in _HALF:
        return torch.mm(x.new_ones(1, x.shape[0]), x, out_dtype=torch.float32)[0]
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
