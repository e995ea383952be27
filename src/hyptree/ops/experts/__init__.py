"""A mixture of curvature experts: rows go through the experts they chose and those they share, and meet in a centroid.

``mix_experts`` is the door. Rows sorted by expert, and the lifted hidden rows, are read by products alone. They are not
kept: the backward kernels make them again while they read the same bytes anyway. The points of experts stay sorted; the
kernel that merges them goes through the permutation.

On kernels the biases of routed experts are not divided by their factor ``a``: the one that multiplies them is
``1 / a``, in the row that is copied anyway, and the gradient of ``a`` comes row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyptree.ops.backend import rows_fit
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.derivatives import first_derivative
from hyptree.ops.dispatch_rows import dispatch_rows, dispatch_rows_grad
from hyptree.ops.experts.grouped import Order, dispatch, grouped_linear, grouped_outer
from hyptree.ops.merge_points import merge_points, merge_points_grad
from hyptree.ops.merge_points.reference import merge
from hyptree.ops.residual_norm.reference import lift, padded_width
from hyptree.ops.rounding import gemm_dtype
from hyptree.ops.swiglu import MAX_WIDTH, swiglu_grad, swiglu_lift

__all__ = ["Sizes", "Stack", "mix_experts"]


class Sizes(NamedTuple):
    """What all experts have in common: space components outside and inside, the model's curvature -c, biases."""

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


def mix_experts(
    rows: Tensor, weight: Tensor, chosen: Tensor, plan: Order, routed: Any, shared: Any, sizes: Sizes, norm: bool
) -> Tensor:
    """The centroid of what k chosen experts make of a point, with weights, and what all shared ones do, with weight 1.

    Kernels run for bare experts without a norm inside; they give first derivatives only.

    Args:
        rows: (T, n) points, or these lifted.
        weight: (T, k) float32, what the chosen ones count. chosen: (T, k) which they are. plan: their places.
        routed, shared: layers of experts; ``routed(s, ends)`` takes points sorted by expert, ``shared(s)`` all points
            through all experts, and bare ones may be read by their ``stacked``. ``shared`` may be None.
        norm: the experts have a norm inside.

    Returns:
        (T, n)
    """
    n = sizes.features
    if not norm and rows_fit("auto", rows, max(n, sizes.hidden), MAX_WIDTH - 16):  # time, one and padding come behind
        if is_bare(routed) and (shared is None or is_bare(shared)):
            if rows.shape[-1] == n:
                rows = lift(rows, gemm_dtype(rows), padded_width(n), sizes.c)
            own = routed.stacked(rows.dtype, rows.shape[-1])
            others = (None, None, None) if shared is None else shared.stacked(rows.dtype, rows.shape[-1], divide=True)
            out: Tensor = _Mice.apply(
                rows, weight, *own, *others, chosen.flatten(), plan.inverse, plan.ends, tuple(sizes)
            )
            return out
        report_unfused("mix_experts", shared if is_bare(routed) else routed)
    s = rows[..., :n].to(gemm_dtype(rows))
    points = routed(dispatch(s, plan.order, plan.inverse, weight.shape[1]), plan.ends)
    points = dispatch(points, plan.inverse, plan.order, 1).unflatten(0, weight.shape)  # in their first order again
    return merge([] if shared is None else shared(s).unbind(0), points, weight, sizes.c).to(s.dtype)


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
    @first_derivative
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
