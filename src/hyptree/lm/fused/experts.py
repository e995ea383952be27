"""What MICE does on a GPU: kernels of :mod:`hyptree.ops` and the products of experts, with a gradient of their own.

Rows sorted by expert, and the lifted hidden rows, are read by products alone. They are not kept: the backward kernels
make them again while they read the same bytes anyway. The points of experts stay sorted; the kernel that merges them
goes through the permutation.

Here the biases of routed experts are not divided by their factor ``a``: the one that multiplies them is ``1 / a``, in
the row that is copied anyway, and the gradient of ``a`` comes row by row. First derivatives only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyptree.lm.experts.grouped import grouped_linear, grouped_outer
from hyptree.ops.dispatch_rows import dispatch_rows, dispatch_rows_grad
from hyptree.ops.merge_points import fits as _merge_fits
from hyptree.ops.merge_points import merge_points, merge_points_grad
from hyptree.ops.swiglu import MAX_WIDTH, swiglu_grad, swiglu_lift


class Sizes(NamedTuple):
    """What all experts have in common."""

    features: int
    hidden: int
    c: float
    bias: bool

    @property
    def one(self) -> int:
        """The column of a lifted row that multiplies biases, -1 without them."""
        return self.features + 1 if self.bias else -1


class Stack(NamedTuple):
    """Experts as matrices."""

    first: Tensor
    """(E, 2 inner, width), gate and up."""
    second: Tensor
    """(E, M, inner), with biases as they are."""
    a: Tensor | None
    """(E,), factors, or None where they are 1."""


def fits(rows: Tensor, inner: int) -> bool:
    """Whether the kernels take lifted rows like these, and hidden ones of ``inner`` columns."""
    return max(inner, rows.shape[-1]) <= MAX_WIDTH and _merge_fits(rows)


def _each(x: Tensor, y: Tensor) -> Tensor:
    """``x_i @ y_i``: (s, A, B), (s, B, C) -> (s, A, C)."""
    return (x[0] @ y[0])[None] if x.shape[0] == 1 else x @ y


def _shared_forward(rows: Tensor, stack: Stack, own: Sizes) -> tuple[Tensor, Tensor]:
    """Points (s, T, M) of experts that read all rows, and their first product (T, s, 2 inner)."""
    both = (rows @ stack.first.flatten(0, 1).mT).unflatten(-1, (stack.first.shape[0], -1))
    lifted = swiglu_lift(both, own.hidden, own.c, own.bias, _spread(stack.a, both))
    return _each(lifted.transpose(0, 1), stack.second.mT), both


def _shared_backward(
    grad: Tensor, both: Tensor, rows: Tensor, stack: Stack, own: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of rows, both matrices, and factors."""
    to_lifted = _each(grad, stack.second).transpose(0, 1)
    factors = _spread(stack.a, both)
    to_both, lifted, *to_factors = swiglu_grad(both, to_lifted, own.hidden, own.c, own.bias, factors)
    flat = to_both.flatten(1)
    to_first = (flat.mT @ rows).view(stack.first.shape)
    to_second = _each(grad.mT, lifted.transpose(0, 1))
    return flat @ stack.first.flatten(0, 1), to_first, to_second, to_factors[0].sum(0) if to_factors else None


def _spread(a: Tensor | None, both: Tensor) -> Tensor | None:
    return None if a is None else a.expand(both.shape[:2]).contiguous()


class _Mice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, first: Tensor, second: Tensor, a: Tensor | None,
        shared_first: Tensor | None, shared_second: Tensor | None, shared_a: Tensor | None,
        chosen: Tensor, inverse: Tensor, ends: Tensor, sizes: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        own = Sizes(*sizes)
        others = shared_both = None
        if shared_first is not None and shared_second is not None:
            others, shared_both = _shared_forward(rows, Stack(shared_first, shared_second, shared_a), own)
        dispatched, factors = dispatch_rows(rows, inverse, weight.shape[1], a, chosen, own.one)
        both = grouped_linear(dispatched, first, ends)
        points = grouped_linear(swiglu_lift(both, own.hidden, own.c, own.bias, factors), second, ends)
        ctx.sizes, ctx.num_experts = sizes, ends.shape[0]
        ctx.save_for_backward(
            rows, weight, first, second, shared_first, shared_second, shared_a, chosen, inverse, ends, factors,
            both, shared_both, points, others,
        )  # fmt: skip
        return merge_points(others, points, weight, inverse, own.features, own.c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            rows, weight, first, second, shared_first, shared_second, shared_a, chosen, inverse, ends, factors,
            both, shared_both, points, others,
        ) = ctx.saved_tensors  # fmt: skip
        own = Sizes(*ctx.sizes)
        to_others, to_points, to_weight = merge_points_grad(others, points, weight, inverse, grad, own.c)
        initial = to_shared_first = to_shared_second = to_shared_a = to_a = None
        if to_others is not None:
            stack = Stack(shared_first, shared_second, shared_a)
            initial, to_shared_first, to_shared_second, to_shared_a = _shared_backward(
                to_others, shared_both, rows, stack, own
            )
        to_lifted = grouped_linear(to_points, second.mT, ends)
        to_both, lifted, *to_factors = swiglu_grad(both, to_lifted, own.hidden, own.c, own.bias, factors)
        to_second = grouped_outer(to_points, lifted, ends)
        to_dispatched = grouped_linear(to_both, first.mT, ends)
        to_factor = to_factors[0] if to_factors else None
        to_rows, dispatched, per_choice = dispatch_rows_grad(
            rows, to_dispatched, inverse, weight.shape[1], factors, to_factor, own.one, initial
        )
        to_first = grouped_outer(to_both, dispatched, ends)
        if per_choice is not None:
            is_member = chosen[:, None] == torch.arange(ctx.num_experts, device=chosen.device)
            to_a = torch.where(is_member, per_choice[:, None], 0.0).sum(0)
        grads = (to_rows, to_weight, to_first, to_second, to_a, to_shared_first, to_shared_second, to_shared_a)
        return *grads, None, None, None, None


def mice(
    rows: Tensor, weight: Tensor, chosen: Tensor, inverse: Tensor, ends: Tensor, routed: Stack,
    shared: Stack | None, sizes: Sizes,
) -> Tensor:  # fmt: skip
    """Lifted rows (T, width) through the experts they chose and those they share, merged: points (T, n).

    Args:
        weight: (T, k) float32, what the chosen ones count. chosen: (T, k) which they are.
        inverse: (T k,) the places of choices when sorted by expert. ends: (E,) int32, where those of an expert end.
        routed: the experts to choose from, biases as they are.
        shared: the ones that every row goes through, the biases of their first matrices divided by ``a``.
    """
    others = (None, None, None) if shared is None else shared
    out: Tensor = _Mice.apply(rows, weight, *routed, *others, chosen.flatten(), inverse, ends, tuple(sizes))
    return out
