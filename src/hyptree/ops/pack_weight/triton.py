"""The parts of a linear map to one aligned matrix and back, one launch each.

A map of 3072 x 392 in bfloat16 moves 5 MB, about a microsecond: what counts is that it is one launch instead of three.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data
from hyptree.ops.pack_weight.layout import Layout

TILE = 4096
"""Cells of a matrix that a program copies."""
MAX_COLUMNS = 1024
"""Columns of them at most."""


@triton.jit
def _sources(M, ROWS: tl.constexpr, PADDED: tl.constexpr, BLOCK_R: tl.constexpr):
    """Rows of the matrix, the rows of the parts they come from, and whether there is one."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None].to(tl.int64)
    inside = row % PADDED
    return row, row // PADDED * ROWS + inside, (row < M) & (inside < ROWS)


@triton.jit
def _pack_weight_kernel(weight, time, bias, out, M, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
                 POINTS: tl.constexpr, POINT_WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, TAIL: tl.constexpr,
                 BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    row, source, is_row = _sources(M, ROWS, PADDED, BLOCK_R)
    point = tl.program_id(1)
    weight += source * (POINTS * SIZE) + point * SIZE
    out += row * (POINTS * POINT_WIDTH) + point * POINT_WIDTH
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    value = tl.load(weight + column, mask=is_row & (column < SIZE), other=0.0)
    tl.store(out + column, value, mask=(row < M) & (column < SIZE))
    if tl.program_id(2) == 0:  # one of a point's programs writes what stands behind its components
        place = tl.arange(0, TAIL)[None, :]
        rest = tl.load(time + source * POINTS + point + place * 0, mask=is_row & (place == 0), other=0.0)
        if HAS_BIAS:
            rest += tl.load(bias + source + place * 0, mask=is_row & (place == 1), other=0.0)
        tl.store(out + SIZE + place, rest, mask=(row < M) & (place < POINT_WIDTH - SIZE))


@triton.jit
def _unpack_weight_kernel(matrix, weight, time, bias, M, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
                  POINTS: tl.constexpr, POINT_WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, TAIL: tl.constexpr,
                  BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    row, source, is_row = _sources(M, ROWS, PADDED, BLOCK_R)
    point = tl.program_id(1)
    matrix += row * (POINTS * POINT_WIDTH) + point * POINT_WIDTH
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    value = tl.load(matrix + column, mask=is_row & (column < SIZE), other=0.0)
    tl.store(weight + source * (POINTS * SIZE) + point * SIZE + column, value, mask=is_row & (column < SIZE))
    if tl.program_id(2) == 0:
        tl.store(time + source * POINTS + point, tl.load(matrix + SIZE, mask=is_row, other=0.0), mask=is_row)
        if HAS_BIAS:
            tl.store(bias + source, tl.load(matrix + SIZE + 1, mask=is_row, other=0.0), mask=is_row)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], layout: Layout, size: int, has_bias: bool) -> None:
    M = layout.groups * layout.padded_rows
    columns = min(MAX_COLUMNS, triton.next_power_of_2(size))
    rows = TILE // columns
    settings = {
        "SIZE": size, "ROWS": layout.rows, "PADDED": layout.padded_rows, "POINTS": layout.points,
        "POINT_WIDTH": layout.point_width, "HAS_BIAS": has_bias,
        "TAIL": triton.next_power_of_2(layout.point_width - size), "BLOCK_R": rows, "BLOCK_C": columns,
    }  # fmt: skip
    launch(kernel, (triton.cdiv(M, rows), layout.points, triton.cdiv(size, columns)), tensors, (M,), settings)


def pack_weight(weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor:
    """See ``ops.pack_weight.pack_weight``."""
    shape = layout.groups * layout.padded_rows, layout.points * layout.point_width
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    if has_data(weight) and out.numel():
        size = weight.shape[1] // layout.points
        _launch(
            _pack_weight_kernel, (weight, time, weight if bias is None else bias, out), layout, size, bias is not None
        )
    return out


def unpack_weight(
    matrix: Tensor, layout: Layout, size: int, has_bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, time and bias (empty without one) in ``dtype``."""
    m = layout.groups * layout.rows
    weight = torch.empty(m, layout.points * size, dtype=dtype, device=matrix.device)
    time = torch.empty(m, layout.points, dtype=dtype, device=matrix.device)
    bias = torch.empty(m if has_bias else 0, dtype=dtype, device=matrix.device)
    if has_data(matrix) and matrix.numel():
        _launch(_unpack_weight_kernel, (matrix, weight, time, bias), layout, size, has_bias)
    return weight, time, bias
