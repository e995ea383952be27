"""The sum of all rows in one pass.

401408 rows of 64 in bfloat16 are 51 MB, 12 microseconds at 4.2 TB/s. One program takes a tile of columns through many
rows and adds up in its registers; the sums of all programs are added at the end, in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import has_data
from ..launch import launch

TILE, WARPS = 4096, 8
"""Numbers that a program holds at once, and its warps: 16 numbers a thread, two loads in half precision."""
PROGRAMS = 1056
"""Programs at most, eight per multiprocessor of a Hopper GPU, which all run at a time."""
TILE_COLUMNS = (128, 64, 32)
LEAST_TURNS = 4
"""Tiles of a program at least, so that its sums are few beside what it reads."""


class Tiles(NamedTuple):
    """How a matrix is cut: rows and columns of a tile, tiles side by side, tiles of a program, programs per column."""

    rows: int
    columns: int
    across: int
    turns: int
    programs: int


def cut(num_rows: int, width: int, tile: int, programs: int) -> Tiles:
    """Tiles of ``tile`` numbers for at most ``programs`` programs; as few empty columns as can be, then long rows."""
    columns = min(TILE_COLUMNS, key=lambda columns: -(-width // columns) * columns)
    rows, across = tile // columns, triton.cdiv(width, columns)
    turns = max(LEAST_TURNS, triton.cdiv(num_rows, rows * max(1, programs // across)))
    return Tiles(rows, columns, across, turns, triton.cdiv(num_rows, rows * turns))


@triton.jit
def _sum_rows_kernel(x, parts, R, TURNS, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    part = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = part * TURNS * BLOCK_R + tl.arange(0, BLOCK_R)
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for _ in range(TURNS):
        inside = (row < R)[:, None] & (column < WIDTH)[None, :]
        sums += tl.load(x + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
        row += BLOCK_R
    tl.store(parts + part.to(tl.int64) * WIDTH + column, tl.sum(sums, axis=0), mask=column < WIDTH)


def sum_rows(x: Tensor) -> Tensor:
    """(R, n) contiguous -> (n,) float32."""
    R, width = x.shape
    tiles = cut(R, width, TILE, PROGRAMS)
    parts = torch.empty(tiles.programs, width, dtype=torch.float32, device=x.device)
    if has_data(x) and x.numel():
        settings = {"WIDTH": width, "BLOCK_R": tiles.rows, "BLOCK_C": tiles.columns, "num_warps": WARPS}
        launch(_sum_rows_kernel, (tiles.across, tiles.programs), (x, parts), (R, tiles.turns), settings)
    return parts.sum(0)
