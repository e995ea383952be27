"""A norm, a linear layer, GELU, another linear layer and a factor: ``gelu_mlp`` is the door.

On a GPU the norm's factors are inside the first product, that of the end inside the second, and of the wide maps
between them only the one before GELU is kept: as large as all else together, GELU takes one pass to find again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, on_host
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.derivatives import grads_with_graph, in_transform, is_plain_call, wants_graph
from hyptree.ops.fold_norm import fold_norm, fold_norm_grad
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
    is_plain, scale, offset = on_host(x), None, None
    if is_plain or not is_bare(norm, MapNorm):
        x = norm(x)
    else:
        x, scale, offset = map_norm(x, norm.eps, gemm_dtype(x)), norm.weight, norm.bias
    weights = (first.weight, first.bias, scale, offset, last.weight, last.bias, factor)
    # A CPU has memory, and GELU is a twentieth of its time; a compiler chooses by itself what to keep.
    if is_plain or not _fits(x):
        return _plain_mlp(x, *weights)
    rows = x.to(gemm_dtype(x))
    outside = factor if rows.dtype == torch.float16 else None  # whose range small weights would leave
    inputs = (rows, *weights[:-1], None if outside is not None else factor)
    y: Tensor = _forward(*inputs)[0] if is_plain_call(*inputs) else _GeluMlp.apply(*inputs)
    return y if outside is None else y * outside


def _fits(x: Tensor) -> bool:
    """Whether the kernels run; a compiler or a transform of functions sees the definition."""
    if gemm_dtype(x) not in KERNEL_DTYPES or needs_operator(x) or in_transform():
        return False
    return choose("auto", x, None) == "triton"


def _plain_mlp(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, last_weight: Tensor,
    last_bias: Tensor | None, factor: Tensor | None,
) -> Tensor:  # fmt: skip
    """The definition, of ``x`` before the factors of its norm; passes over small tensors in place of the map."""
    if scale is not None and offset is not None:
        moved = (weight * offset).sum(1)
        bias = moved if bias is None else bias + moved
        weight = weight * scale
    return scaled_linear(F.gelu(F.linear(x, weight, bias)), last_weight, last_bias, factor)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, last_weight: Tensor,
    last_bias: Tensor | None, factor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, the hidden map before GELU, and both weights as they were multiplied."""
    first, _, shift = fold_norm(weight, bias, scale, offset, None, x.dtype, wants_sums=False)
    hidden = F.linear(x, first, shift)
    last, _, shift = fold_norm(last_weight, last_bias, None, None, factor, x.dtype, wants_sums=False)
    return F.linear(F.gelu(hidden), last, shift), hidden, first, last


class _GeluMlp(torch.autograd.Function):
    """Keeps ``x`` and the hidden map before GELU. The backward pass reads that and its gradient once, for GELU again,
    for the gradient through it and for that of the first bias, whose terms are added in float32.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, *kept = _forward(*inputs)
        ctx.save_for_backward(*inputs, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, scale, offset, last_weight, last_bias, factor, hidden, first, last = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if wants_graph():
            inputs = (x, weight, bias, scale, offset, last_weight, last_bias, factor)
            return grads_with_graph(_plain_mlp, inputs, needed, grad)
        rows = grad.reshape(-1, grad.shape[-1])
        # written over: nobody else knows this gradient
        to_hidden, gelu, to_shift = gelu_grad(hidden.reshape(-1, hidden.shape[-1]), rows @ last, overwrite=True)
        to_x = (to_hidden @ first).view(x.shape) if needed[0] else None
        to_first: tuple[Tensor | None, ...] = (None,) * 5
        to_last = to_first
        if any(needed[1:5]):
            to_weight = to_hidden.mT @ x.reshape(-1, x.shape[-1])
            to_first = fold_norm_grad(weight, bias, scale, offset, None, to_weight, None, to_shift)
        if any(needed[5:]):
            to_last = fold_norm_grad(last_weight, last_bias, None, None, factor, rows.mT @ gelu, None, sum_rows(rows))
        return to_x, *to_first[:4], to_last[0], to_last[1], to_last[4]
