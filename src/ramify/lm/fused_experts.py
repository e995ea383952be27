"""What MICE does on a GPU: kernels of :mod:`ramify.ops` and products of experts with gradients of their own.

Rows sorted by expert, and the lifted hidden rows, are read by products alone. They are not kept: the backward gathers
or makes them again. The points of experts stay sorted; the kernel that merges them goes through the permutation.

Here the biases of an expert are not divided by its factor ``a``: the one that multiplies them is ``1 / a``, in the row
that is copied anyway, and the gradient of ``a`` comes row by row. First derivatives only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.merge_points import fits as merge_fits
from ..ops.merge_points import merge_points, merge_points_grad
from ..ops.swiglu import MAX_WIDTH, swiglu_grad, swiglu_lift
from .grouped import _outer, grouped_linear
from .routing import Order


class Sizes(NamedTuple):
    """What all experts of a stack have in common."""

    features: int
    hidden: int
    c: float
    bias: bool


def fits(rows: Tensor, inner: int) -> bool:
    """Whether the kernels take lifted rows like these, and hidden ones of ``inner`` columns."""
    return max(inner, rows.shape[-1]) <= MAX_WIDTH and merge_fits(rows)


def _ones(rows: Tensor, factors: Tensor | None, sizes: Sizes) -> Tensor | None:
    """What every column of every row is multiplied by: 1, but ``1 / a`` for the one; None if nothing changes."""
    if factors is None or not sizes.bias:
        return None
    column = torch.arange(rows.shape[-1], device=rows.device)
    return torch.where(column == sizes.features + 1, 1 / factors[:, None], 1.0)


def _sent(rows: Tensor, order: Tensor, copies: int, factors: Tensor | None, sizes: Sizes) -> Tensor:
    """The rows in the order of experts (S, width), their ones divided by ``a``."""
    sent = rows.index_select(0, order // copies)
    scale = _ones(rows, factors, sizes)
    return sent if scale is None else (sent * scale).to(rows.dtype)


def _brought(grad: Tensor, inverse: Tensor, copies: int, factors: Tensor | None, sizes: Sizes) -> Tensor:
    """The gradient of ``rows`` from that of :func:`_sent`."""
    scale = _ones(grad, factors, sizes)
    scaled = grad if scale is None else (grad * scale).to(grad.dtype)
    return scaled.index_select(0, inverse).unflatten(0, (-1, copies)).sum(1)


class _Routed(torch.autograd.Function):
    """Lifted rows (T, width) through the experts they chose: points (S, M), sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight_in: Tensor, weight_out: Tensor, a: Tensor | None, order: Tensor,
        inverse: Tensor, ends: Tensor, copies: int, sizes: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        own = Sizes(*sizes)
        group = factors = None
        if a is not None:
            places = torch.arange(order.shape[0], dtype=ends.dtype, device=ends.device)
            group = torch.bucketize(places, ends, right=True)
            factors = a.index_select(0, group)
        both = grouped_linear(_sent(rows, order, copies, factors, own), weight_in, ends)
        ctx.copies, ctx.sizes, ctx.num_experts = copies, sizes, ends.shape[0]
        ctx.save_for_backward(rows, weight_in, weight_out, order, inverse, ends, group, factors, both)
        return grouped_linear(swiglu_lift(both, own.hidden, own.c, own.bias, factors), weight_out, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_in, weight_out, order, inverse, ends, group, factors, both = ctx.saved_tensors
        own, to_a = Sizes(*ctx.sizes), None
        need_in, need_out = ctx.needs_input_grad[1:3]
        to_lifted = grouped_linear(grad, weight_out.mT, ends)
        to_both, lifted, *to_factors = swiglu_grad(both, to_lifted, own.hidden, own.c, own.bias, factors)
        to_out = _outer(grad, lifted, ends, "auto") if need_out else None
        to_sent = grouped_linear(to_both, weight_in.mT, ends)
        to_in = _outer(to_both, _sent(rows, order, ctx.copies, factors, own), ends, "auto") if need_in else None
        to_rows = _brought(to_sent, inverse, ctx.copies, factors, own)
        if to_factors:
            per_row = to_factors[0]
            if own.bias:
                per_row = per_row - to_sent[:, own.features + 1].float() / (factors * factors)
            is_member = group[:, None] == torch.arange(ctx.num_experts, device=group.device)
            to_a = torch.where(is_member, per_row[:, None], 0.0).sum(0)
        return to_rows, to_in, to_out, to_a, None, None, None, None, None


def _each(x: Tensor, y: Tensor) -> Tensor:
    """``x_i @ y_i``: (s, A, B), (s, B, C) -> (s, A, C)."""
    return (x[0] @ y[0])[None] if x.shape[0] == 1 else x @ y


class _Shared(torch.autograd.Function):
    """Lifted rows (T, width) through all s experts: points (s, T, M)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight_in: Tensor, weight_out: Tensor, a: Tensor | None, sizes: tuple[Any, ...]
    ) -> Tensor:
        own, num = Sizes(*sizes), weight_out.shape[0]
        both = (rows @ weight_in.flatten(0, 1).mT).unflatten(-1, (num, -1))  # (T, s, 2 inner)
        factors = None if a is None else a.expand(both.shape[:2]).contiguous()
        lifted = swiglu_lift(both, own.hidden, own.c, own.bias, factors)
        ctx.sizes = sizes
        ctx.save_for_backward(rows, weight_in, weight_out, factors, both)
        return _each(lifted.transpose(0, 1), weight_out.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_in, weight_out, factors, both = ctx.saved_tensors
        own = Sizes(*ctx.sizes)
        need_in, need_out = ctx.needs_input_grad[1:3]
        to_lifted = _each(grad, weight_out).transpose(0, 1)
        to_both, lifted, *to_factors = swiglu_grad(both, to_lifted, own.hidden, own.c, own.bias, factors)
        to_out = _each(grad.mT, lifted.transpose(0, 1)) if need_out else None
        flat = to_both.flatten(1)
        to_rows = flat @ weight_in.flatten(0, 1)
        to_in = (flat.mT @ rows).view(weight_in.shape) if need_in else None
        to_a = to_factors[0].sum(0) if to_factors else None
        return to_rows, to_in, to_out, to_a, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float
    ) -> Tensor:
        ctx.c = c
        ctx.save_for_backward(shared, routed, weight, inverse)
        return merge_points(shared, routed, weight, inverse, n, c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shared, routed, weight, inverse = ctx.saved_tensors
        return *merge_points_grad(shared, routed, weight, inverse, grad, ctx.c), None, None, None


def routed_points(
    rows: Tensor, matrices: tuple[Tensor, Tensor], a: Tensor | None, plan: Order, copies: int, sizes: Sizes
) -> Tensor:
    """Every row through the experts it chose: lifted (T, width) -> points (T copies, M) sorted by expert.

    Args:
        matrices: (E, 2 inner, width) and (E, M, inner), biases as they are. a: (E,) or None for 1.
    """
    out: Tensor = _Routed.apply(rows, *matrices, a, *plan, copies, tuple(sizes))
    return out


def shared_points(rows: Tensor, matrices: tuple[Tensor, Tensor], a: Tensor | None, sizes: Sizes) -> Tensor:
    """Every row through every expert: lifted (T, width) -> points (s, T, M).

    Args:
        matrices: (s, 2 inner, width), its biases divided by ``a``, and (s, M, inner), its biases as they are.
        a: (s,) or None for 1.
    """
    out: Tensor = _Shared.apply(rows, *matrices, a, tuple(sizes))
    return out


def merged(shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float) -> Tensor:
    """The Lorentz centroids (T, n) of shared (s, T, M) and sorted routed points (T k, M); see ``experts.merge``."""
    out: Tensor = _Merge.apply(shared, routed, weight, inverse, n, c)
    return out
