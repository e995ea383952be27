"""All pairs on the GPU: distances, their softmax, the nearest point; one launch for radii, one for pairs.

Float32 rows are multiplied as three TF32 products, half precision as it lies in memory: no digit of it is lost.

Bytes and arithmetic at (8, 2048, 2048, 128), 134 MB of results, at 4.2 TB/s and an effective 250 (TF32) or 450 (bf16)
Tflop/s; expected microseconds on an H200: distances 32 of bytes, 103 of float32 or 19 of bf16 products, 25 of other
arithmetic: about 130 and 60 (torch.cdist: a float32 product of 175 and two passes of 64 over its result, 320). Softmax:
products twice, roots, logarithms and exponentials of 60, bytes of 34: about 290 and 95. Nearest: 130 and 50.
(64, 196, 196, 64): 9.8 MB, 5. (512, 49, 16, 32): 1.6 MB, 4. Both are two launches, where torch.cdist has ten.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import has_data, interpreted
from ..launch import launch
from .pairs import across, across_by_differences, distance, is_blurred, log2_growth, multiply, radial
from .rows import row_stats

LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: infinity less itself is not a number."""


@triton.jit
def _load_rows(x, row, is_row, first, n, BK: tl.constexpr):
    column = first + tl.arange(0, BK)
    inside = is_row[:, None] & (column < n)[None, :]
    return tl.load(x + row[:, None].to(tl.int64) * n + column[None, :], mask=inside, other=0.0)


@triton.jit
def _load_stats(stats, row, is_row, R):
    """``e^a - 1``, ``e^(-a/2)``, ``sinh a`` and ``1/|x|``; all 0 for rows that do not exist."""
    grown = tl.load(stats + row, mask=is_row, other=0.0)
    root = tl.load(stats + R + row, mask=is_row, other=0.0)
    sinh = tl.load(stats + 2 * R + row, mask=is_row, other=0.0)
    over = tl.load(stats + 4 * R + row, mask=is_row, other=0.0)
    return grown, root, sinh, over


@triton.jit
def _distance_kernel(x, y, stats_x, stats_y, out, RX, RY, N, M, n, UNIT: tl.constexpr, SAME: tl.constexpr,
                     EXACT: tl.constexpr, BLUR: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    across_m = tl.cdiv(M, BN)
    tiles = tl.cdiv(N, BM) * across_m
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = (tile // across_m) * BM + tl.arange(0, BM)
    col = (tile % across_m) * BN + tl.arange(0, BN)
    is_row, is_col = row < N, col < M
    x += batch * N * n
    y += batch * M * n
    product = tl.zeros((BM, BN), tl.float32)
    for first in range(0, n, BK):
        a = _load_rows(x, row, is_row, first, n, BK)
        b = _load_rows(y, col, is_col, first, n, BK)
        product = multiply(a, tl.trans(b), product, PRECISION)
    grown_x, root_x, sinh_x, over_x = _load_stats(stats_x + batch * N, row, is_row, RX)
    grown_y, root_y, sinh_y, over_y = _load_stats(stats_y + batch * M, col, is_col, RY)
    q = across(product, over_x, over_y)
    rho = radial(grown_x, root_x, grown_y, root_y)
    if EXACT:
        blurred = q
        if SAME:  # a point and itself are not compared
            blurred = tl.where(row[:, None] == col[None, :], 1.0, q)
        if is_blurred(rho, blurred, sinh_x, sinh_y, BLUR) > 0:
            q, _, _ = across_by_differences(x, y, row, is_row, col, is_col, n, BM, BN)
    d = UNIT * distance(rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :])
    if SAME:  # NaN stays
        d = tl.where(row[:, None] == col[None, :], 0.0 * (grown_x[:, None] - grown_y[None, :]), d)
    at = batch * N * M + row[:, None].to(tl.int64) * M + col[None, :]
    tl.store(out + at, d, mask=is_row[:, None] & is_col[None, :])


@triton.jit
def _squares(x, y, a, grown_x, root_x, sinh_x, over_x, stats_y, row, is_row, col, is_col, RY, n, SAME: tl.constexpr,
             EXACT: tl.constexpr, BLUR: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """``sinh^2(s d/2)`` of the rows ``a``, if they are held whole, and a tile of columns."""
    product = tl.zeros((BM, BN), tl.float32)
    if PIECE == BK:
        product = multiply(a, tl.trans(_load_rows(y, col, is_col, 0, n, BK)), product, PRECISION)
    else:
        for start in range(0, n, PIECE):
            part = _load_rows(x, row, is_row, start, n, PIECE)
            product = multiply(part, tl.trans(_load_rows(y, col, is_col, start, n, PIECE)), product, PRECISION)
    grown_y, root_y, sinh_y, over_y = _load_stats(stats_y, col, is_col, RY)
    q = across(product, over_x, over_y)
    if SAME:
        q = tl.where(row[:, None] == col[None, :], 0.0, q)
    rho = radial(grown_x, root_x, grown_y, root_y)
    if EXACT:
        blurred = q
        if SAME:
            blurred = tl.where(row[:, None] == col[None, :], 1.0, q)
        if is_blurred(rho, blurred, sinh_x, sinh_y, BLUR) > 0:
            q, _, _ = across_by_differences(x, y, row, is_row, col, is_col, n, BM, BN)
    return rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]


@triton.jit
def _softmax_kernel(x, y, stats_x, stats_y, out, log_sums, RX, RY, N, M, n, RATE: tl.constexpr, SAME: tl.constexpr,
                    QUICK: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Two turns over the columns: one for the sum of each row, one that writes. Making a tile again is cheaper than
    reading it: its bytes would go through memory twice more."""
    blocks = tl.cdiv(N, BM)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    is_row = row < N
    x += batch * N * n
    y += batch * M * n
    stats_y += batch * M
    a = _load_rows(x, row, is_row, 0, n, PIECE)
    grown_x, root_x, sinh_x, over_x = _load_stats(stats_x + batch * N, row, is_row, RX)
    top = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for first in range(0, M, BN):
        col = first + tl.arange(0, BN)
        square = _squares(x, y, a, grown_x, root_x, sinh_x, over_x, stats_y, row, is_row, col, col < M, RY, n, SAME,
                          False, 0.0, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
        score = tl.where((col < M)[None, :], -RATE * log2_growth(square, QUICK), LOWEST)
        higher = tl.maximum(top, tl.max(score, axis=1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(score - higher[:, None]), axis=1)
        top = higher
    log_sum = top + tl.log2(total)
    tl.store(log_sums + batch * N + row, log_sum, mask=is_row)
    for first in range(0, M, BN):
        col = first + tl.arange(0, BN)
        square = _squares(x, y, a, grown_x, root_x, sinh_x, over_x, stats_y, row, is_row, col, col < M, RY, n, SAME,
                          False, 0.0, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
        p = tl.exp2(-RATE * log2_growth(square, QUICK) - log_sum[:, None])
        at = batch * N * M + row[:, None].to(tl.int64) * M + col[None, :]
        tl.store(out + at, p, mask=is_row[:, None] & (col < M)[None, :])


@triton.jit
def _nearest_kernel(x, y, stats_x, stats_y, index, d, RX, RY, N, M, n, UNIT: tl.constexpr, SAME: tl.constexpr,
                    BLUR: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    blocks = tl.cdiv(N, BM)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    is_row = row < N
    x += batch * N * n
    y += batch * M * n
    stats_y += batch * M
    a = _load_rows(x, row, is_row, 0, n, PIECE)
    grown_x, root_x, sinh_x, over_x = _load_stats(stats_x + batch * N, row, is_row, RX)
    least = tl.full((BM,), float("inf"), tl.float32)
    where = tl.zeros((BM,), tl.int32)
    for first in range(0, M, BN):
        col = first + tl.arange(0, BN)
        square = _squares(x, y, a, grown_x, root_x, sinh_x, over_x, stats_y, row, is_row, col, col < M, RY, n, SAME,
                          True, BLUR, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
        square = tl.where((col < M)[None, :] & (square == square), square, float("inf"))
        best = tl.min(square, axis=1)
        place = tl.min(tl.where(square == best[:, None], col[None, :], 2147483647), axis=1)
        is_less = best < least  # of equal ones the first stays
        where = tl.where(is_less, place, where)
        least = tl.where(is_less, best, least)
    # Nothing was below infinity: the row is NaN, or every column is.
    is_none = least == float("inf")
    found = tl.where(is_none, float("nan"), UNIT * distance(tl.where(is_none, 0.0, least)))
    tl.store(index + batch * N + row, where.to(tl.int64), mask=is_row)
    tl.store(d + batch * N + row, found, mask=is_row)


def blur(n: int) -> float:
    """Share of ``sinh a sinh b`` below which a sum is too small for the product's rounding, which grows with n."""
    return min(0.25, max(0.0625, n / 2048))


def precision(x: Tensor) -> str:
    """How rows are multiplied: float32 as three TF32 products, which are as exact; half precision as it is."""
    if interpreted():
        return "ieee"
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def width(n: int) -> int:
    """Columns of a row that is held whole, for a matrix unit."""
    return max(16, triton.next_power_of_2(n))


@functools.cache
def _tile(N: int, M: int, n: int) -> dict[str, int]:
    bm = max(16, min(128 if min(N, M) > 512 else 64, triton.next_power_of_2(N)))
    bn = max(16, min(64, triton.next_power_of_2(M)))
    settings = {"BM": bm, "BN": bn, "BK": min(32, width(n)), "num_warps": 4, "num_stages": 3}
    if bm * bn > 64 * 64:
        # Two programs on a multiprocessor, so that one multiplies while the other takes logarithms.
        settings |= {"num_warps": 8} | ({} if interpreted() else {"maxnreg": 128})
    return settings


@functools.cache
def _strip(N: int, M: int, n: int, is_half: bool) -> dict[str, int]:
    bm, bn = (max(16, min(64, triton.next_power_of_2(size))) for size in (N, M))
    # Whole rows of float32 and their small parts would fill shared memory: one program on a multiprocessor.
    piece = width(n) if is_half else min(32, width(n))
    return {"BM": bm, "BN": bn, "BK": width(n), "PIECE": piece, "num_warps": 4, "num_stages": 2 if is_half else 3}


def pairwise_dist(x: Tensor, y: Tensor | None, chart: int, c: float, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Distances (B, N, M) of x (B, N, n) and y (B, M, n), contiguous, or x itself; then what is known of their rows."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    out = torch.empty(B, N, M, dtype=torch.float32, device=x.device)
    stats_x, stats_y = row_stats(x, y, chart, c)
    if has_data(x) and out.numel():
        sizes = _tile(N, M, n)
        settings = {
            "UNIT": c**-0.5, "SAME": y is None, "EXACT": exact, "BLUR": blur(n), "PRECISION": precision(x), **sizes
        }  # fmt: skip
        tensors = (x, x if y is None else y, stats_x, stats_x if y is None else stats_y, out)
        grid = (B * triton.cdiv(N, sizes["BM"]) * triton.cdiv(M, sizes["BN"]),)
        launch(_distance_kernel, grid, tensors, (B * N, B * M, N, M, n), settings)
    return out, stats_x, stats_y


def distance_softmax(
    x: Tensor, y: Tensor | None, chart: int, c: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax (B, N, M) of distances over -temperature, what is known of rows, logarithms (base 2) of sums (B, N)."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    out = torch.empty(B, N, M, dtype=torch.float32, device=x.device)
    log_sums = torch.empty(B, N, dtype=torch.float32, device=x.device)
    stats_x, stats_y = row_stats(x, y, chart, c)
    if has_data(x) and out.numel():
        sizes = _strip(N, M, n, x.dtype != torch.float32)
        settings = {
            "RATE": 1 / (math.sqrt(c) * temperature), "SAME": y is None, "QUICK": not interpreted(),
            "PRECISION": precision(x), **sizes,
        }  # fmt: skip
        tensors = (x, x if y is None else y, stats_x, stats_x if y is None else stats_y, out, log_sums)
        launch(_softmax_kernel, (B * triton.cdiv(N, sizes["BM"]),), tensors, (B * N, B * M, N, M, n), settings)
    return out, stats_x, stats_y, log_sums


def nearest(x: Tensor, y: Tensor | None, chart: int, c: float) -> tuple[Tensor, Tensor]:
    """Index (B, N) of the nearest of y (B, M, n) for each of x (B, N, n), and its distance."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    index = torch.empty(B, N, dtype=torch.int64, device=x.device)
    d = torch.empty(B, N, dtype=torch.float32, device=x.device)
    stats_x, stats_y = row_stats(x, y, chart, c)
    if has_data(x) and index.numel():
        sizes = _strip(N, M, n, x.dtype != torch.float32)
        settings = {"UNIT": c**-0.5, "SAME": y is None, "BLUR": blur(n), "PRECISION": precision(x), **sizes}
        tensors = (x, x if y is None else y, stats_x, stats_x if y is None else stats_y, index, d)
        launch(_nearest_kernel, (B * triton.cdiv(N, sizes["BM"]),), tensors, (B * N, B * M, N, M, n), settings)
    return index, d
