"""The end of a clustering mixer: what its two levels give, normed and projected, added to the map it came from.

``project_levels`` is the door, ``reference`` holds the definition, ``triton`` the kernels behind the products.
The norm is a part of the projection, ``proj(norm(x)) = times (x @ weight.T) + shift``: the map is read once, and what
the patches of a window share is multiplied once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator
from hyptree.ops.derivatives import grads_with_graph, in_transform, is_plain_call, wants_graph
from hyptree.ops.fold_norm import fold_norm, fold_norm_grad
from hyptree.ops.project_levels import reference
from hyptree.ops.rounding import gemm_dtype
from hyptree.ops.windows import Windows

__all__ = ["project_levels", "reference"]

MAX_CHANNELS = 2048
"""Channels that a program of the sums over windows holds at once."""


def project_levels(
    own: Tensor, shared: Tensor | None, sums: Sequence[Tensor], windows: Windows, norm: Any, proj: nn.Linear,
    factor: Tensor | None = None, residual: Tensor | None = None, *, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``residual + factor * proj(norm([shared, own]))`` with the weights of bare layers.

    Args:
        own: (B, H, W, l), contiguous. shared: (B, rows, columns, k) what the patches of a window share, or None.
        sums: (B, 2) sums of both over the map and of their squares, in one tensor or two that are added; not needed
            without a norm.
        norm: a MapNorm of k + l, or an identity. proj: from k + l to n. factor: (n,) or None. residual: (B, H, W, n).

    Returns:
        (B, H, W, n). Within autocast without a residual it may be float32 with a factor.
    """
    first = more = scale = offset = None
    eps = 0.0
    if type(norm) is not nn.Identity:
        scale, offset, eps = norm.weight, norm.bias, norm.eps
        first, more = sums[0], sums[1] if len(sums) > 1 else None
    layout = (windows, windows.size[0] * windows.size[1] * proj.in_features, eps)
    weights = (first, more, proj.weight, proj.bias, scale, offset, factor)
    if backend == "torch" or choose("auto", own, None) == "torch" or not _fits(own, proj):
        arguments: Any = (own, shared, *weights, *layout)
        y = reference.project_levels(*arguments)
        return y if residual is None else residual + y
    dtype = gemm_dtype(own)
    out_dtype = dtype if factor is None else torch.promote_types(dtype, factor.dtype)
    if residual is not None:
        out_dtype = torch.promote_types(out_dtype, residual.dtype)
    shared = None if shared is None else shared.to(dtype).contiguous()
    inputs = (own.to(dtype).contiguous(), shared, *weights, residual)
    return run_kernels(*inputs, *layout, out_dtype)


def run_kernels(*inputs: Any) -> Tensor:
    """What the kernels make of :func:`_forward`'s arguments, maps in the dtype of the products."""
    out: Tensor = _forward(*inputs)[0] if is_plain_call(*inputs[:10]) else _ProjectLevels.apply(*inputs)
    return out


def _fits(own: Tensor, proj: nn.Linear) -> bool:
    """Whether the kernels run; a compiler fuses the definition by itself, and float16 leaves its range by a factor."""
    dtype = gemm_dtype(own)
    is_plain = dtype == torch.float16 or dtype not in KERNEL_DTYPES or needs_operator(own) or in_transform()
    return not is_plain and proj.out_features <= MAX_CHANNELS


def _forward(
    own: Tensor, shared: Tensor | None, sums: Tensor | None, more: Tensor | None, weight: Tensor, bias: Tensor | None,
    scale: Tensor | None, offset: Tensor | None, factor: Tensor | None, residual: Tensor | None, windows: Windows,
    count: int, eps: float, out_dtype: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """The result, both products, the weight as it was multiplied, and the sums of its rows."""
    from hyptree.ops.project_levels import triton

    left = 0 if shared is None else shared.shape[-1]
    folded, row_sums, shift = fold_norm(weight, bias, scale, offset, factor, own.dtype)
    y = own @ folded[:, left:].t()
    z = None if shared is None else shared @ folded[:, :left].t()
    norm = None if sums is None else (sums, more, row_sums, count, eps)
    held = None if residual is None else residual.contiguous()
    return triton.forward(y, z, windows, norm, shift, held, out_dtype), y, z, folded, row_sums


class _ProjectLevels(torch.autograd.Function):
    """Keeps the products, which are as wide as the map, beside what they were made of."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, *kept = _forward(*inputs)
        ctx.save_for_backward(*inputs[:9], *kept)
        ctx.layout, ctx.residual_dtype = inputs[10:13], None if inputs[9] is None else inputs[9].dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from hyptree.ops.project_levels import triton

        own, shared, sums, more, *weights, y, z, folded, row_sums = ctx.saved_tensors
        needed, (windows, count, eps) = ctx.needs_input_grad, ctx.layout
        to_residual = grad.to(ctx.residual_dtype) if needed[9] else None
        rest = (to_residual, None, None, None, None)
        if wants_graph():

            def definition(*inputs: Any) -> Tensor:
                return reference.project_levels(*inputs, *ctx.layout)

            return *grads_with_graph(definition, (own, shared, sums, more, *weights), needed[:9], grad), *rest
        norm = None if sums is None else (sums, more, row_sums, count, eps)
        to_y, to_z, to_sums, (to_shift, to_row_sums) = triton.backward(y, z, windows, norm, grad.contiguous())
        left, rows = 0 if shared is None else shared.shape[-1], to_y.flatten(0, 2)
        to_shared: Tensor | None = None
        to_weights: tuple[Tensor | None, ...] = (None,) * 5
        to_own = (rows @ folded[:, left:]).view(own.shape) if needed[0] else None
        if to_z is not None and needed[1]:
            to_shared = (to_z.flatten(0, 2) @ folded[:, :left]).view(shared.shape)
        if any(needed[4:9]):
            to_folded = torch.empty_like(folded)
            torch.mm(rows.t(), own.flatten(0, 2), out=to_folded[:, left:])
            if to_z is not None:
                torch.mm(to_z.flatten(0, 2).t(), shared.flatten(0, 2), out=to_folded[:, :left])
            inputs = (*weights, to_folded, None if norm is None else to_row_sums, to_shift)
            to_weights = fold_norm_grad(*inputs)
        return to_own, to_shared, to_sums, None if more is None else to_sums, *to_weights, *rest
