"""Rows that lie in groups, each group with a matrix of its own: the product of experts, and moving rows to their group.

torch's ``grouped_mm`` does the product in one kernel without asking the host for the sizes of groups. What it demands:
bfloat16 on a GPU of compute capability 9 or more, else it copies the offsets to the host and loops; rows that start at
multiples of 16 bytes; int32 offsets, fewer than 1024 groups; where the sum goes over rows, they must not be contiguous
along that axis unless all groups are multiples of 8. Autocast does not know it, and a compiler is free to choose
strides that it refuses in the backward. So it is called inside an operator of ours, which sees to the layout; what it
does not take goes to a loop over slices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BACKENDS = ("auto", "torch", "loop")
_MAX_GROUPS = 1023


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, backend: str = "auto") -> Tensor:
    """``x_i W_e^T`` for every row i of group e: (S, K), (E, M, K) -> (S, M), differentiable any number of times.

    Nothing is dropped and nothing is waited for on a GPU where ``grouped_mm`` fits; the loop reads the sizes of groups.
    Sums have a fixed order. Compiled, it is one node.

    Args:
        x: (S, K) rows sorted by group. weight: (E, M, K) of the same dtype.
        ends: (E,) int32, where each group ends; the last is S. A group may be empty.
        backend: "auto", "torch" (``grouped_mm``; K and M multiples of 8) or "loop".
    """
    if backend not in _BACKENDS:
        raise ValueError(f"grouped_linear: backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or ends.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_linear: expected x (S, K), weight (E, M, K) and ends (E,), got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(ends.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"grouped_linear: x is {x.dtype} and weight is {weight.dtype}; cast one of them")
    if backend == "torch" and (x.shape[1] % 8 or weight.shape[1] % 8):
        raise ValueError(
            f"grouped_linear: backend 'torch' takes matrices of multiples of 8, got {tuple(weight.shape)}; pad them"
        )
    return _product(x, weight, ends, backend)


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _is_fused(x: Tensor, columns: int, groups: int, backend: str) -> bool:
    """Whether torch's kernel takes rows like ``x`` to ``columns`` columns."""
    if backend != "auto":
        return backend == "torch"
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.version.hip or x.shape[0] == 0:
        return False
    fits = x.shape[1] % 8 == 0 and columns % 8 == 0 and groups <= _MAX_GROUPS
    return fits and _capability(x.device.index or 0) >= (9, 0)


def _row_major(x: Tensor) -> Tensor:
    """``x`` itself if its rows lie one after another, each beginning at a multiple of 16 bytes, else a copy."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] and x.data_ptr() % 16 == 0
    fits = fits and all(stride % step == 0 for stride in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _slices(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


@torch.library.custom_op("hyptree::grouped_linear", mutates_args=())
def _product(x: Tensor, weight: Tensor, ends: Tensor, backend: str) -> Tensor:
    groups, columns, _ = weight.shape
    if _is_fused(x, columns, groups, backend):
        # Row-major matrices or their transposes are both read in place.
        matrix = _row_major(weight) if weight.stride(-1) == 1 else _row_major(weight.mT).mT
        return F.grouped_mm(_row_major(x), matrix.mT, offs=ends)
    out = x.new_empty(x.shape[0], columns)
    for rows, matrix in zip(_slices(ends), weight, strict=True):
        if rows.start < rows.stop:
            torch.mm(x[rows], matrix.t(), out=out[rows])
    return out


@_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("hyptree::grouped_outer", mutates_args=())
def _outer(y: Tensor, x: Tensor, ends: Tensor, backend: str) -> Tensor:
    """``sum y_i x_i^T`` over the rows i of each group: (S, M), (S, K) -> (E, M, K)."""
    groups, columns = ends.shape[0], y.shape[1]
    if _is_fused(x, columns, groups, backend):
        out = F.grouped_mm(_row_major(y).t(), _row_major(x), offs=ends)
        if out.is_cuda and _capability(out.device.index or 0) >= (10, 0):
            # Its Blackwell kernel was seen to leave what it finds where a group is empty (NVIDIA/cutlass#2674).
            empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
            out.masked_fill_(empty[:, None, None], 0)
        return out
    out = x.new_zeros(groups, columns, x.shape[1])
    for rows, matrix in zip(_slices(ends), out, strict=True):
        if rows.start < rows.stop:
            torch.mm(y[rows].t(), x[rows], out=matrix)
    return out


@_outer.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor, backend: str) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, ends, ctx.backend = inputs
    ctx.save_for_backward(first, second, ends)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, ends = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    grad_x = _product(grad, weight.mT, ends, ctx.backend) if need_x else None
    return grad_x, _outer(grad, x, ends, ctx.backend) if need_weight else None, None, None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    y, x, ends = ctx.saved_tensors
    need_y, need_x = ctx.needs_input_grad[:2]
    grad_y = _product(x, grad, ends, ctx.backend) if need_y else None
    return grad_y, _product(y, grad.mT, ends, ctx.backend) if need_x else None, None, None


_product.register_autograd(_product_backward, setup_context=_save)
_outer.register_autograd(_outer_backward, setup_context=_save)


def dispatch(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Rows sorted by expert, ``x[order // copies]``: (T, D) -> (S, D) with S = T copies, every row ``copies`` times.

    The gradient is gathered through ``inverse`` and summed, where indexing would add in any order, by atomics.
    """
    return _Dispatch.apply(x, order, inverse, copies)


def unpermute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows in their first order again, ``x[inverse]``: (S, D) -> (S, D); the gradient is gathered through ``order``."""
    return _Unpermute.apply(x, order, inverse)


def per_row(values: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """The value of its group for every row: (E,) -> (num_rows,); the gradient is summed in a fixed order."""
    return _PerRow.apply(values, ends, num_rows)


class _PerRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ends: Tensor, num_rows: int) -> Tensor:
        rows = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
        group = torch.bucketize(rows, ends, right=True)
        ctx.save_for_backward(group)
        ctx.num_groups = values.shape[0]
        return values.index_select(0, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (group,) = ctx.saved_tensors
        is_member = group[:, None] == torch.arange(ctx.num_groups, device=group.device)
        return torch.where(is_member, grad[:, None], 0.0).sum(0), None, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return unpermute(grad, order, inverse).unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return unpermute(grad, inverse, order), None, None
