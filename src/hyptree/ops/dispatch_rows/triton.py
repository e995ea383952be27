"""Rows dispatched to their places and back, one program per row, which reads it once and goes through the permutation.

At 8192 rows of 392 for two experts each in bfloat16 the way there moves 19 MB and the way back 45 MB: 5 and 11
microseconds at 4.2 TB/s. Every place is written by exactly one program, and sums have a fixed order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data


@triton.jit
def _dispatch_rows_kernel(rows, inverse, a, chosen, dispatched, factors, WIDTH, ONE: tl.constexpr, K: tl.constexpr,
                 HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0)
    for j in tl.static_range(K):
        place = tl.load(inverse + row * K + j).to(tl.int64)
        copy = value
        if HAS_FACTOR:
            factor = tl.load(a + tl.load(chosen + row * K + j)).to(tl.float32)
            tl.store(factors + place, factor)
            copy = tl.where(column == ONE, value.to(tl.float32) / factor, value.to(tl.float32))
        tl.store(dispatched + place * WIDTH + column, copy, mask=inside)


@triton.jit
def _dispatch_rows_grad_kernel(rows, grad, inverse, factors, to_factors, initial, grad_rows, dispatched, per_choice,
                 WIDTH, ONE: tl.constexpr, K: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_MORE: tl.constexpr,
                 HAS_INITIAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_INITIAL:
        total += tl.load(initial + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        place = tl.load(inverse + row * K + j).to(tl.int64)
        back = tl.load(grad + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        copy = value
        if HAS_FACTOR:
            factor = tl.load(factors + place)
            to_factor = 0.0
            if HAS_MORE:
                to_factor += tl.load(to_factors + place)
            if ONE >= 0:
                to_factor -= tl.sum(tl.where(column == ONE, back * value, 0.0), axis=0) / (factor * factor)
            tl.store(per_choice + row * K + j, to_factor)
            back = tl.where(column == ONE, back / factor, back)
            copy = tl.where(column == ONE, value / factor, value)
        total += back
        tl.store(dispatched + place * WIDTH + column, copy, mask=inside)
    tl.store(grad_rows + row * WIDTH + column, total, mask=inside)


@functools.cache
def _sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def dispatch(
    rows: Tensor, inverse: Tensor, copies: int, a: Tensor | None, chosen: Tensor | None, one: int
) -> tuple[Tensor, Tensor]:
    """See ``ops.dispatch_rows.dispatch_rows``, empty factors without ``a``."""
    (T, width), S = rows.shape, inverse.shape[0]
    dispatched = torch.empty(S, width, dtype=rows.dtype, device=rows.device)
    factors = torch.empty(0 if a is None else S, dtype=torch.float32, device=rows.device)
    if has_data(rows) and T:
        tensors = (rows, inverse, rows if a is None else a, inverse if chosen is None else chosen, dispatched, factors)
        settings = {"ONE": one, "K": copies, "HAS_FACTOR": a is not None}
        launch(_dispatch_rows_kernel, (T,), tensors, (width,), settings | _sizes(width))
    return dispatched, factors


def grad(
    rows: Tensor, grad: Tensor, inverse: Tensor, copies: int, factors: Tensor | None, to_factors: Tensor | None,
    one: int, initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``ops.dispatch_rows.dispatch_rows_grad``; empty gradients without factors."""
    (T, width), S = rows.shape, inverse.shape[0]
    grad_rows, dispatched = torch.empty_like(rows), torch.empty(S, width, dtype=rows.dtype, device=rows.device)
    per_choice = torch.empty(0 if factors is None else S, dtype=torch.float32, device=rows.device)
    if has_data(rows) and T:
        tensors = (
            rows, grad, inverse, rows if factors is None else factors, rows if to_factors is None else to_factors,
            rows if initial is None else initial.contiguous(), grad_rows, dispatched, per_choice,
        )  # fmt: skip
        has = {
            "HAS_FACTOR": factors is not None,
            "HAS_MORE": to_factors is not None,
            "HAS_INITIAL": initial is not None,
        }
        launch(_dispatch_rows_grad_kernel, (T,), tensors, (width,), {"ONE": one, "K": copies, **has, **_sizes(width)})
    return grad_rows, dispatched, per_choice
