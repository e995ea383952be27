"""What the kernels over pairs know of each point: its radius becomes seven numbers, its direction two float16 ones.

Every model of hyperbolic space, and its tangent space at the origin, is a direction and a radius ``a`` (times ``s``).
So one family of kernels serves all of them; a *chart* says how ``a`` follows from the length of a stored row.

Rows of float32 are stored once more as unit vectors in two *parts* of float16, 22 bits together as of two TF32 numbers.
Matrix units take float16 at twice the rate of TF32 and straight from memory: no number is taken apart for every pair.
Rows in half precision are multiplied as they are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.geometry.core.numerics import ball_limit
from hyptree.ops.backend import has_data

LORENTZ, LORENTZ_TANGENT, POINCARE, POINCARE_TANGENT = range(4)

STATS = 7
"""``e^a - 1``, ``e^(-a/2)``, ``sinh a``, ``cosh a``, ``1/|x|``, ``da/d|x|`` and ``sinh(a)/|x|``, in this order."""

_TINY = tl.constexpr(1.1754943508222875e-38)  # a square below this counts as 0, as in geometry.numerics
_ROWS = 16

PART_SCALE = tl.constexpr(256.0)
"""Unit vectors are stored times this, so that the small part of a component above 1/1000 has all its digits."""


@triton.jit
def _store_rows(x, stats, parts, first, R, n, P, S: tl.constexpr, CHART: tl.constexpr, LIMIT: tl.constexpr,
                SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """In float64: near the boundary of the ball the last digit of ``|x|`` is the first of the distance to it."""
    row = first.to(tl.int64) + tl.arange(0, ROWS)
    is_row = row < R
    square = tl.zeros((ROWS,), tl.float64)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = is_row[:, None] & (column < n)[None, :]
        part = tl.load(x + row[:, None] * n + column[None, :], mask=inside, other=0.0).to(tl.float32).to(tl.float64)
        square += tl.sum(part * part, axis=1)
    is_zero = square <= _TINY
    length = tl.where(is_zero, 0.0, tl.sqrt(tl.where(is_zero, 1.0, square)))
    over = tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, length))
    r = S * length
    if CHART == 0:  # points of the hyperboloid: sinh a = r
        cosh = tl.sqrt(1.0 + r * r)
        sinh = r
        grown = r + r * (r / (1.0 + cosh))
        decay = 1.0 / (cosh + r)
        slope = S / cosh
        ratio = S + 0.0 * r
    elif CHART == 2:  # points of the ball: tanh(a/2) = r, which may not leave it
        is_capped = r > LIMIT
        slope = tl.where(is_capped, 0.0, S + 0.0 * r)
        r = tl.where(is_capped, LIMIT, r)
        gap = 1.0 - r * r
        sinh = 2.0 * r / gap
        cosh = (1.0 + r * r) / gap
        grown = sinh * (1.0 + r)
        decay = gap / ((1.0 + r) * (1.0 + r))
        slope = 2.0 * slope / gap
        ratio = tl.where(is_capped, sinh * over, 2.0 * S / gap)
    else:  # tangent vectors: a is their length, twice that in the ball
        scale: tl.constexpr = S if CHART == 1 else 2.0 * S
        a = scale * length
        is_capped = a > LIMIT
        slope = tl.where(is_capped, 0.0, scale + 0.0 * a)
        a = tl.where(is_capped, LIMIT, a)
        growth = tl.exp(a)
        decay = 1.0 / growth
        is_small = a < 1e-4
        sinh = tl.where(is_small, a, 0.5 * (growth - decay))
        cosh = 0.5 * (growth + decay)
        grown = tl.where(is_small, a + 0.5 * a * a, growth - 1.0)
        ratio = tl.where(is_zero, scale, sinh * over)
    # One pointer after the other: 6 R may be beyond 32 bits.
    stats += row
    tl.store(stats, grown.to(tl.float32), mask=is_row)
    stats += R
    tl.store(stats, tl.sqrt(decay).to(tl.float32), mask=is_row)
    stats += R
    tl.store(stats, sinh.to(tl.float32), mask=is_row)
    stats += R
    tl.store(stats, cosh.to(tl.float32), mask=is_row)
    stats += R
    tl.store(stats, over.to(tl.float32), mask=is_row)
    stats += R
    tl.store(stats, slope.to(tl.float32), mask=is_row)
    stats += R
    tl.store(stats, ratio.to(tl.float32), mask=is_row)
    if SPLIT:
        for start in range(0, P, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = is_row[:, None] & (column < n)[None, :]
            part = tl.load(x + row[:, None] * n + column[None, :], mask=inside, other=0.0).to(tl.float64)
            unit = (part * (over * PART_SCALE)[:, None]).to(tl.float32)
            high = unit.to(tl.float16)
            low = (unit - high.to(tl.float32)).to(tl.float16)
            inside = is_row[:, None] & (column < P)[None, :]
            tl.store(parts + row[:, None] * P + column[None, :], high, mask=inside)
            tl.store(parts + (row + R)[:, None] * P + column[None, :], low, mask=inside)


@triton.jit
def _rows_kernel(x, y, stats_x, stats_y, parts_x, parts_y, counters, RX, RY, n, P, C, S: tl.constexpr,
                 CHART: tl.constexpr, LIMIT: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    counter = program * ROWS + tl.arange(0, ROWS)
    tl.store(counters + counter, 0, mask=counter < C)
    own = tl.cdiv(RX, ROWS)
    if program < own:
        _store_rows(x, stats_x, parts_x, program * ROWS, RX, n, P, S, CHART, LIMIT, SPLIT, ROWS, BLOCK)
    else:
        _store_rows(y, stats_y, parts_y, (program - own) * ROWS, RY, n, P, S, CHART, LIMIT, SPLIT, ROWS, BLOCK)


Known = tuple[Tensor, Tensor, Tensor, Tensor]
"""What is known of the rows of x and of y: their numbers (7, rows) each, their parts (2, rows, P) each."""


def row_stats(x: Tensor, y: Tensor | None, chart: int, c: float, counters: Tensor | None = None) -> Known:
    """Numbers and parts of the rows of x (B, N, n) and y (B, M, n), contiguous; of no rows if y is None.

    ``counters``, integers of 32 bits and no more of them than rows, are set to zero on the way, which spares a launch.

    In parts, rows are filled up with zeros to a multiple of 16, which keeps them aligned. Half precision has none.
    """
    n = x.shape[-1]
    rows_x, rows_y = x.shape[0] * x.shape[1], 0 if y is None else y.shape[0] * y.shape[1]
    is_split = x.dtype == torch.float32
    P = 16 * triton.cdiv(n, 16) if is_split else 0
    stats = [torch.empty(STATS, rows, dtype=torch.float32, device=x.device) for rows in (rows_x, rows_y)]
    parts = [torch.empty(2, rows, P, dtype=torch.float16, device=x.device) for rows in (rows_x, rows_y)]
    if has_data(x) and rows_x + rows_y:
        settings = {
            "S": math.sqrt(c), "CHART": chart, "LIMIT": _limit(chart, c), "SPLIT": is_split, "ROWS": _ROWS,
            "BLOCK": min(128, triton.next_power_of_2(max(P, n, 1))), "num_warps": 4,
        }  # fmt: skip
        if counters is None:
            counters = torch.empty(0, dtype=torch.int32, device=x.device)
        tensors = (x, x if y is None else y, *stats, *(parts if is_split else stats), counters)
        grid = (triton.cdiv(rows_x, _ROWS) + triton.cdiv(rows_y, _ROWS),)
        launch(_rows_kernel, grid, tensors, (rows_x, rows_y, n, P, counters.numel()), settings)
    return stats[0], stats[1], parts[0], parts[1]


def _limit(chart: int, c: float) -> float:
    """Largest radius (``s|x|`` for points of the ball): what float32 holds, as in ``hyptree.geometry``."""
    edge = ball_limit(torch.float32)
    if chart == POINCARE:
        return edge
    if chart == POINCARE_TANGENT:
        return math.log((1 + edge) / (1 - edge))
    return min(40.0, math.log(math.sqrt(c)) + 43.6)
