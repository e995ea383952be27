"""One launch each way for a layer's weight, its sums and its bias, where torch would take five and twelve.

Weights are small: 2048 x 512 in float32 are 4 MB, a microsecond of an H200. What counts is the number of launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data

ROWS, GRAD_ROWS, COLUMNS = 4, 16, 128
"""Rows of a program each way, and columns that it holds at once."""


@triton.jit
def _fold_kernel(weight, bias, scale, offset, factor, out, sums, shift, N, K, HAS_BIAS: tl.constexpr,
                 HAS_NORM: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SUMS: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < N
    times = tl.full((ROWS,), 1.0, tl.float32)
    moved = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_FACTOR:
        times = tl.load(factor + row, mask=exists, other=0.0).to(tl.float32)
    if HAS_BIAS:
        moved = tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < K)[None, :]
        place = row[:, None] * K + column[None, :]
        w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            moved += tl.sum(w * tl.load(offset + column, mask=column < K, other=0.0).to(tl.float32)[None, :], axis=1)
            w *= tl.load(scale + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(w, axis=1)
        tl.store(out + place, w * times[:, None], mask=mask)
    if HAS_SUMS:
        tl.store(sums + row, total * times, mask=exists)
    tl.store(shift + row, moved * times, mask=exists)


@triton.jit
def _fold_grad_kernel(weight, bias, scale, offset, factor, to_out, to_sums, to_shift, grad_weight, grad_bias,
                      grad_factor, parts, N, K, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
                      HAS_FACTOR: tl.constexpr, HAS_SUMS: tl.constexpr, ROWS: tl.constexpr,
                      COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < N
    times = tl.full((ROWS,), 1.0, tl.float32)
    of_sums = tl.zeros((ROWS,), tl.float32)
    slope = tl.zeros((ROWS,), tl.float32)
    of_shift = tl.load(to_shift + row, mask=exists, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        times = tl.load(factor + row, mask=exists, other=0.0).to(tl.float32)
    if HAS_SUMS:
        of_sums = tl.load(to_sums + row, mask=exists, other=0.0).to(tl.float32)
    if HAS_BIAS:
        slope = of_shift * tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        within = column < K
        mask = exists[:, None] & within[None, :]
        place = row[:, None] * K + column[None, :]
        w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(to_out + place, mask=mask, other=0.0).to(tl.float32) + of_sums[:, None]
        if HAS_NORM:
            at = parts + tl.program_id(0) * 2 * K + column
            tl.store(at, tl.sum(w * g * times[:, None], axis=0), mask=within)
            tl.store(at + K, tl.sum(w * (of_shift * times)[:, None], axis=0), mask=within)
            g *= tl.load(scale + column, mask=within, other=0.0).to(tl.float32)[None, :]
            g += of_shift[:, None] * tl.load(offset + column, mask=within, other=0.0).to(tl.float32)[None, :]
        slope += tl.sum(tl.where(mask, w * g, 0.0), axis=1)
        tl.store(grad_weight + place, g * times[:, None], mask=mask)
    tl.store(grad_bias + row, of_shift * times, mask=exists)
    if HAS_FACTOR:
        tl.store(grad_factor + row, slope, mask=exists)


def _settings(rows: int, bias: Any, scale: Any, factor: Any, has_sums: bool) -> dict[str, Any]:
    has = {"HAS_BIAS": bias is not None, "HAS_NORM": scale is not None, "HAS_FACTOR": factor is not None}
    return {**has, "HAS_SUMS": has_sums, "ROWS": rows, "COLUMNS": COLUMNS, "num_warps": 4}


def forward(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, factor: Tensor | None,
    dtype: torch.dtype, wants_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What ``ops.fold_norm.fold_norm`` gives."""
    n, k = weight.shape
    out = weight.new_empty(n, k, dtype=dtype)
    shift = weight.new_empty(n, dtype=torch.float32 if wants_sums else dtype)
    sums = torch.empty_like(shift) if wants_sums else shift
    if has_data(weight):
        tensors = (weight, *(weight if x is None else x for x in (bias, scale, offset, factor)), out, sums, shift)
        settings = _settings(ROWS, bias, scale, factor, wants_sums)
        launch(_fold_kernel, (triton.cdiv(n, ROWS),), tensors, (n, k), settings)
    return out, sums, shift


def backward(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, factor: Tensor | None,
    to_out: Tensor, to_sums: Tensor | None, to_shift: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the first five, each in its own dtype; None for what is None."""
    n, k = weight.shape
    programs = triton.cdiv(n, GRAD_ROWS)
    grad_weight, grad_bias = torch.empty_like(weight), weight.new_empty(n) if bias is None else torch.empty_like(bias)
    grad_factor = None if factor is None else torch.empty_like(factor)
    parts = None if scale is None else weight.new_empty(programs, 2, k, dtype=torch.float32)
    if has_data(weight):
        inputs = (weight, *(weight if x is None else x for x in (bias, scale, offset, factor)))
        grads = (to_out, to_shift if to_sums is None else to_sums, to_shift)
        outputs = (grad_weight, grad_bias, *(grad_bias if x is None else x for x in (grad_factor, parts)))
        settings = _settings(GRAD_ROWS, bias, scale, factor, to_sums is not None)
        launch(_fold_grad_kernel, (programs,), (*inputs, *grads, *outputs), (n, k), settings)
    to_scale = to_offset = None
    if parts is not None and scale is not None and offset is not None:
        to_scale, to_offset = parts.sum(0).unbind(0)
        to_scale, to_offset = to_scale.to(scale.dtype), to_offset.to(offset.dtype)
    return grad_weight, None if bias is None else grad_bias, to_scale, to_offset, grad_factor
