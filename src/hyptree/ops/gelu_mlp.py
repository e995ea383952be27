"""A norm, a linear layer, GELU, another linear layer and a factor: ``gelu_mlp`` is the door.

On a GPU the norm's factors are inside the first product, that of the end inside the second, and of the wide maps
between them only the one before GELU is kept: as large as all else together, GELU takes one pass to find again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.backend import on_host
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.derivatives import grads_with_graph, in_transform, wants_graph
from hyptree.ops.gelu_grad import gelu_grad
from hyptree.ops.linear import scaled_linear, sum_rows
from hyptree.ops.map_norm import MapNorm, map_norm
from hyptree.ops.rounding import gemm_dtype


def gelu_mlp(x: Tensor, norm: Any, first: Any, last: Any, factor: Tensor | None = None) -> Tensor:
    """``factor * last(gelu(first(norm(x))))`` with the exact GELU: (B, ..., n) -> (B, ..., m).

    Args:
        norm: a MapNorm, or any other layer, which is called.
        first, last: linear layers; weights of bare ones may be read. factor: (m,) of the result, inside the last one.
    """
    if called := [layer for layer in (first, last) if not is_bare(layer, nn.Linear)]:
        report_unfused("gelu_mlp", called[0])
        out: Tensor = last(F.gelu(first(norm(x))))
        return out if factor is None else out * factor
    weight, bias, is_plain = first.weight, first.bias, on_host(x)
    if is_plain or not is_bare(norm, MapNorm):
        x = norm(x)
    else:  # passes over small tensors, not over the map
        offset = (weight * norm.bias).sum(1)
        bias = offset if bias is None else bias + offset
        x, weight = map_norm(x, norm.eps, gemm_dtype(x)), weight * norm.weight
    # A CPU has memory, and GELU is a twentieth of its time; a compiler chooses by itself what to keep.
    if is_plain or torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_transform():
        return scaled_linear(F.gelu(F.linear(x, weight, bias)), last.weight, last.bias, factor)
    dtype, last_weight, last_bias = gemm_dtype(x), last.weight, last.bias
    if factor is not None and dtype != torch.float16:  # whose range small weights would leave
        last_weight, last_bias = last_weight * factor.unsqueeze(1), None if last_bias is None else last_bias * factor
        factor = None
    y: Tensor = _GeluMlp.apply(x.to(dtype), weight.to(dtype), bias, last_weight.to(dtype), last_bias)
    return y if factor is None else y * factor


class _GeluMlp(torch.autograd.Function):
    """Keeps ``x`` and the hidden map before GELU. The backward pass reads that and its gradient once, for GELU again,
    for the gradient through it and for that of ``bias``, whose terms are added in float32.

    Map and weights are in one dtype; biases in any, which is that of their gradients.
    """

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
            sum_rows(rows).to(last_bias.dtype) if needed[4] else None,
        )


def _plain_mlp(x: Tensor, weight: Tensor, bias: Tensor | None, last_weight: Tensor, last_bias: Tensor | None) -> Tensor:
    """What :class:`_GeluMlp` computes, for derivatives of its derivatives."""
    return F.linear(F.gelu(F.linear(x, weight, _as(bias, x.dtype))), last_weight, _as(last_bias, x.dtype))


def _as(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)
