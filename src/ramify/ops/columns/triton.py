"""The parts of a linear map to one aligned matrix and back, one launch each.

A map of 3072 x 392 in bfloat16 moves 5 MB, about a microsecond: what counts is that it is one launch instead of three.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import has_data
from ..launch import launch
from .layout import Layout

BLOCK_ROWS, BLOCK_COLUMNS = 8, 256


@triton.jit
def _places(WIDTH, SIZE, ROWS, PADDED, POINT_WIDTH, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row of the matrix, row of the parts, column, point and place in the point of every cell of a block."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None].to(tl.int64)
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    inside = row % PADDED
    source = row // PADDED * ROWS + inside
    return row, source, inside < ROWS, column, column // POINT_WIDTH, column % POINT_WIDTH


@triton.jit
def _join_kernel(weight, time, bias, out, M, WIDTH, SIZE, ROWS, PADDED, POINTS, POINT_WIDTH,
                 HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    row, source, is_row, column, point, place = _places(WIDTH, SIZE, ROWS, PADDED, POINT_WIDTH, BLOCK_R, BLOCK_C)
    here = (row < M) & (column < WIDTH)
    is_row = here & is_row
    value = tl.load(weight + source * (POINTS * SIZE) + point * SIZE + place, mask=is_row & (place < SIZE), other=0.0)
    value += tl.load(time + source * POINTS + point, mask=is_row & (place == SIZE), other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + source + point * 0, mask=is_row & (place == SIZE + 1), other=0.0)
    tl.store(out + row * WIDTH + column, value, mask=here)


@triton.jit
def _split_kernel(matrix, weight, time, bias, M, WIDTH, SIZE, ROWS, PADDED, POINTS, POINT_WIDTH,
                  HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    row, source, is_row, column, point, place = _places(WIDTH, SIZE, ROWS, PADDED, POINT_WIDTH, BLOCK_R, BLOCK_C)
    here = (row < M) & (column < WIDTH) & is_row
    value = tl.load(matrix + row * WIDTH + column, mask=here, other=0.0)
    tl.store(weight + source * (POINTS * SIZE) + point * SIZE + place, value, mask=here & (place < SIZE))
    tl.store(time + source * POINTS + point, value, mask=here & (place == SIZE))
    if HAS_BIAS:
        tl.store(bias + source + point * 0, value, mask=here & (place == SIZE + 1))


def _launch(kernel: Any, tensors: tuple[Tensor, ...], layout: Layout, size: int, has_bias: bool) -> None:
    M, width = layout.groups * layout.padded_rows, layout.points * layout.point_width
    grid = triton.cdiv(M, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLUMNS)
    numbers = (M, width, size, layout.rows, layout.padded_rows, layout.points, layout.point_width)
    launch(kernel, grid, tensors, numbers, {"HAS_BIAS": has_bias, "BLOCK_R": BLOCK_ROWS, "BLOCK_C": BLOCK_COLUMNS})


def join(weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor:
    """See ``ops.columns.join``."""
    shape = layout.groups * layout.padded_rows, layout.points * layout.point_width
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    if has_data(weight) and out.numel():
        size = weight.shape[1] // layout.points
        _launch(_join_kernel, (weight, time, weight if bias is None else bias, out), layout, size, bias is not None)
    return out


def split(
    matrix: Tensor, layout: Layout, size: int, has_bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, time and bias (empty without one) in ``dtype``."""
    m = layout.groups * layout.rows
    weight = torch.empty(m, layout.points * size, dtype=dtype, device=matrix.device)
    time = torch.empty(m, layout.points, dtype=dtype, device=matrix.device)
    bias = torch.empty(m if has_bias else 0, dtype=dtype, device=matrix.device)
    if has_data(matrix) and matrix.numel():
        _launch(_split_kernel, (matrix, weight, time, bias), layout, size, has_bias)
    return weight, time, bias
