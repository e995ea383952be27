"""Rows that lie in groups, each group with a matrix of its own: the product of experts, and moving rows to their group.

torch's ``grouped_mm`` does the product in one kernel without asking the host for the sizes of groups. It demands rows
that start at multiples of 16 bytes, int32 offsets, fewer than 1024 groups, and where the sum goes over rows, rows that
are not contiguous along that axis. Autocast does not know it, and a compiler is free to choose strides that it refuses
in the backward. So it is called inside an operator of ours, which sees to the layout. Odd sizes are padded on a GPU;
there float64, and on a CPU odd sizes too, go to a loop over slices. What waits for the sizes of groups, torch's product
of float32 among it, cannot be recorded: in a CUDA graph such a product goes over all rows for every group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_GROUPS = 1023


class Order(NamedTuple):
    """The S = T k choices of T tokens, sorted by expert."""

    order: Tensor
    """(S,) int64: the choice, ``token * k + rank``, at each place."""
    inverse: Tensor
    """(S,) int64: the place of each choice."""
    ends: Tensor
    """(E,) int32: where the places of an expert end."""


def sort_by_expert(chosen: Tensor, counts: Tensor) -> Order:
    """The places of choices, equal experts together, tokens of one expert in their order; the host waits for nothing.

    Args:
        chosen: (T, k) experts. counts: (E,) how often each occurs.
    """
    # Small keys: a radix sort passes over them once per 8 bits.
    experts = chosen.flatten().to(torch.int16 if counts.shape[0] <= 2**15 else torch.int64)
    order = torch.argsort(experts, stable=True)
    places = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    return Order(order, inverse, counts.cumsum(0).to(torch.int32))


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x_i W_e^T`` for every row i of group e: (S, K), (E, M, K) -> (S, M), differentiable any number of times.

    Nothing is dropped, and sums have a fixed order. Compiled, it is one node.

    Args:
        x: (S, K) rows sorted by group. weight: (E, M, K) of the same dtype.
        ends: (E,) int32, where each group ends; the last is S. A group may be empty.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or ends.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_linear: expected x (S, K), weight (E, M, K) and ends (E,), got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(ends.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"grouped_linear: x is {x.dtype} and weight is {weight.dtype}; cast one of them")
    columns = weight.shape[1]
    short, missing = -x.shape[1] % 8, -columns % 8
    if x.is_cuda and x.dtype != torch.float64 and (short or missing):  # a loop would wait for the GPU
        return _product(F.pad(x, (0, short)), F.pad(weight, (0, short, 0, missing)), ends)[:, :columns]
    return _product(x, weight, ends)


def _way(x: Tensor, columns: int, groups: int) -> str:
    """How rows like ``x`` come to ``columns`` columns: by torch's "kernel", by "slices", or "all" for every group.

    The last where a CUDA graph is being recorded and the product would ask for the sizes of groups.
    """
    is_recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_recorded and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0)):
        return "all"
    is_aligned = x.shape[1] % 8 == 0 and columns % 8 == 0
    fits = is_aligned and x.shape[0] > 0 and groups <= _MAX_GROUPS and x.dtype != torch.float64
    return "kernel" if fits else "slices"


def _members(ends: Tensor, count: int) -> Tensor:
    """(E, S, 1) which rows are in which group."""
    places = torch.arange(count, device=ends.device)
    before_end = places < ends[:, None]
    return (before_end & ~F.pad(before_end[:-1], (0, 0, 1, 0))).unsqueeze(-1)


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
def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    way = _way(x, weight.shape[1], weight.shape[0])
    if way == "all":
        out = x.new_zeros(x.shape[0], weight.shape[1])
        for member, matrix in zip(_members(ends, x.shape[0]), weight, strict=True):
            out = torch.where(member, x @ matrix.t(), out)
        return out
    if way == "kernel":
        # Row-major matrices or their transposes are both read in place.
        matrix = _row_major(weight) if weight.stride(-1) == 1 else _row_major(weight.mT).mT
        return F.grouped_mm(_row_major(x), matrix.mT, offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for rows, matrix in zip(_slices(ends), weight, strict=True):
        torch.mm(x[rows], matrix.t(), out=out[rows])
    return out


@_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("hyptree::grouped_outer", mutates_args=())
def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """``sum y_i x_i^T`` over the rows i of each group: (S, M), (S, K) -> (E, M, K)."""
    way = _way(x, y.shape[1], ends.shape[0])
    if way == "all":
        return torch.stack([torch.where(own, y, 0).t() @ torch.where(own, x, 0) for own in _members(ends, x.shape[0])])
    if way == "kernel":
        out = F.grouped_mm(_row_major(y).t(), _row_major(x), offs=ends)
        if out.is_cuda and torch.cuda.get_device_capability(out.device) >= (10, 0):
            # Its Blackwell kernel was seen to leave what it finds where a group is empty (NVIDIA/cutlass#2674).
            empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
            out.masked_fill_(empty[:, None, None], 0)
        return out
    out = x.new_empty(ends.shape[0], y.shape[1], x.shape[1])
    for rows, matrix in zip(_slices(ends), out, strict=True):
        torch.mm(y[rows].t(), x[rows], out=matrix)
    return out


@grouped_outer.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    need_x, need_weight, _ = ctx.needs_input_grad
    grad_x = _product(grad, weight.mT, ends) if need_x else None
    return grad_x, grouped_outer(grad, x, ends) if need_weight else None, None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    y, x, ends = ctx.saved_tensors
    need_y, need_x, _ = ctx.needs_input_grad
    grad_y = _product(x, grad, ends) if need_y else None
    return grad_y, _product(y, grad.mT, ends) if need_x else None, None


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_product.register_autograd(_product_backward, setup_context=_save)
grouped_outer.register_autograd(_outer_backward, setup_context=_save)


def dispatch(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Rows sorted by expert, ``x[order // copies]``: (T, D) -> (S, D) with S = T copies, every row ``copies`` times.

    The gradient is gathered through ``inverse`` and summed, where indexing would add in any order, by atomics.
    """
    return _Dispatch.apply(x, order, inverse, copies)


def unpermute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows in their first order again, ``x[inverse]``: (S, D) -> (S, D); the gradient is gathered through ``order``."""
    return _Dispatch.apply(x, inverse, order, 1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        back = unpermute(grad, order, inverse)
        return back.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else back, None, None, None
