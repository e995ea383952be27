"""Distances of all pairs on the GPU, and what they, their softmax and the nearest point cost; one launch for radii, one
for pairs.

Float32 rows are multiplied in two parts of float16 (see ``rows``), as exact as three TF32 products and twice as fast;
half precision as it lies in memory: no digit of it is lost.

Counted at (8, 2048, 2048, 128), 134 MB of results, in microseconds on an H200: 34 for bytes at 4.2 TB/s, 28 for float32
or 10 for bf16 products at the peak of float16, 10 for rows, and per pair and turn

    distances  38 instructions, 43; three special functions, 27; 270 MB of rows out of L2, 50 at 5.5 TB/s
    softmax    35 instructions, 41; three special functions, 27; 390 MB of rows (200 for bf16), 71 (36)

Many distances and the nearest walk over tiles, rows of the next and what is known of them on their way while a tile is
worked on; two programs on a multiprocessor, so that one may multiply while the other takes roots. How well they overlap
decides, and with eight warps they do so badly. Measured: distances 119 (89 for bf16), some 6 more where exact (10), the
nearest 95 (74). Before, with the rows of a tile fetched right before its product, distances took 146 (126).

The softmax of long rows has one turn (see ``joint_kernel``): 156 (107). In two turns, walking as above, it takes 181
(143); parts left out of it said that they add up: two of three products 40, the functions 47, what is known of columns
30, the results 14, the second turn 92. By count (64, 196, 196, 64), 9.8 MB, takes 10, and (512, 49, 16, 32), 1.6 MB, 5.

The nearest points and many exact distances leave close points (see ``pairs``) to a third launch, which ends at once
where there are none. In the same kernel they cost all tiles registers, 1 KB of them in local memory: 255 microseconds
measured for distances (322 with float32 rows in three TF32 products, taken apart again for every tile).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted, shared_memory
from hyptree.ops.pairwise_lorentz.pairs import across, across_by_differences, distance, load_stats, margins, radial
from hyptree.ops.pairwise_lorentz.rows import Known, row_stats
from hyptree.ops.pairwise_lorentz.tiles import (
    blur,
    precision,
    sets_of,
    store_tile,
    strip_rows,
    strip_sizes,
    tile_product,
    tile_sizes,
    tile_stats,
    whole_product,
)

_FEW = 2**20
"""Distances up to which one kernel does all: a launch more would take longer than what it spares."""

_PROGRAMS = 512
"""As many programs walk over tiles of distances: what an H200 holds at a time, twice; with half the bytes half more."""

_LEAST_WALK = 4
"""Tiles of a program that walks: it multiplies one more than it has."""


@triton.jit
def _distance_kernel(x, y, stats_x, stats_y, parts_x, parts_y, close, out, RX, RY, N, M, n, P, UNIT: tl.constexpr,
                     SAME: tl.constexpr, EXACT: tl.constexpr, APART: tl.constexpr, BLUR: tl.constexpr,
                     QUICK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """If EXACT, a tile with close points takes differences, or if APART is marked in ``close`` for another kernel."""
    across_m = tl.cdiv(M, BN)
    tiles = tl.cdiv(N, BM) * across_m
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    above, left = (tile // across_m) * BM, (tile % across_m) * BN
    row, col = above + tl.arange(0, BM), left + tl.arange(0, BN)
    is_row, is_col = row < N, col < M
    own, other = batch * N + above, batch * M + left  # the first rows among those of all batches
    x += batch * N * n
    y += batch * M * n
    product = whole_product(parts_x, parts_y, own, other, is_row, is_col, RX, RY, P, SPLIT, PRECISION, BM, BN, BK)
    grown_x, root_x, sinh_x, over_x = load_stats(stats_x + batch * N, row, is_row, RX)
    grown_y, root_y, sinh_y, over_y = load_stats(stats_y + batch * M, col, is_col, RY)
    q = across(product, over_x, over_y, SPLIT)
    rho = radial(grown_x, root_x, grown_y, root_y)
    square = rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]
    if EXACT:
        margin = tl.min(tl.min(margins(square, sinh_x, sinh_y, row, col, SAME, BLUR, QUICK), axis=1), axis=0)
        if APART:
            tl.store(close + tl.program_id(0), (margin < 0.0).to(tl.int32))
        elif margin < 0.0:
            q, _, _ = across_by_differences(x, y, row, is_row, col, is_col, n, BM, BN)
            square = rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]
    d = distance(square, UNIT, QUICK)
    if SAME:  # NaN stays
        d = tl.where(row[:, None] == col[None, :], 0.0 * (grown_x[:, None] - grown_y[None, :]), d)
    tl.store(out + own * M + (tl.arange(0, BM)[:, None] * M + col[None, :]), d, mask=is_row[:, None] & is_col[None, :])


@triton.jit
def _close_distance_kernel(x, y, stats_x, stats_y, close, out, RX, RY, N, M, n, TILES, UNIT: tl.constexpr,
                           SAME: tl.constexpr, QUICK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                           ROWS: tl.constexpr, MARKS: tl.constexpr):  # fmt: skip
    """Marked tiles of BM rows and BN columns once more, by differences: the registers that takes are not those of all.

    A program has MARKS tiles, and takes ROWS rows at a time.
    """
    begin = tl.program_id(0) * MARKS
    place = begin + tl.arange(0, MARKS)
    if tl.max(tl.load(close + place, mask=place < TILES, other=0), axis=0) > 0:
        across_m = tl.cdiv(M, BN)
        tiles = tl.cdiv(N, BM) * across_m
        for number in range(begin, tl.minimum(begin + MARKS, TILES)):
            if tl.load(close + number) > 0:
                batch = (number // tiles).to(tl.int64)
                tile = number % tiles
                above, left = (tile // across_m) * BM, (tile % across_m) * BN
                col = left + tl.arange(0, BN)
                is_col = col < M
                grown_y, root_y, sinh_y, _over_y = load_stats(stats_y + batch * M, col, is_col, RY)
                for first in range(above, tl.minimum(above + BM, N), ROWS):
                    row = first + tl.arange(0, ROWS)
                    is_row = row < N
                    grown_x, root_x, sinh_x, _over_x = load_stats(stats_x + batch * N, row, is_row, RX)
                    q, _wide_x, _wide_y = across_by_differences(x + batch * N * n, y + batch * M * n, row, is_row, col,
                                                                is_col, n, ROWS, BN)  # fmt: skip
                    rho = radial(grown_x, root_x, grown_y, root_y)
                    d = distance(rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :], UNIT, QUICK)
                    if SAME:
                        d = tl.where(row[:, None] == col[None, :], 0.0 * (grown_x[:, None] - grown_y[None, :]), d)
                    at = out + (batch * N + first) * M + (tl.arange(0, ROWS)[:, None] * M + col[None, :])
                    tl.store(at, d, mask=is_row[:, None] & is_col[None, :])


@triton.jit
def _walking_distance_kernel(x, y, stats_x, stats_y, parts_x, parts_y, close, out, RX, RY, N, M, n, TILES,
                             UNIT: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
                             BLUR: tl.constexpr, QUICK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
                             P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                             PIECE: tl.constexpr):  # fmt: skip
    """A program has BM rows and TILES tiles of columns; if EXACT, it marks those with close points for another kernel.

    A tile is multiplied at the end of the turn before its own, so that the rows of the tile after it are on their way
    while its pairs are worked on.
    """
    across_m = tl.cdiv(M, BN)
    chunks = tl.cdiv(across_m, TILES)
    strip = tl.program_id(0) // chunks
    begin = (tl.program_id(0) % chunks) * TILES * BN
    end = tl.minimum(begin + TILES * BN, M)
    batch, own, row, is_row, a, a_low, known = strip_rows(parts_x, stats_x, strip, N, RX, P, SPLIT, BM, PIECE)
    grown_x, root_x, sinh_x, over_x = known
    stats_y += batch * M
    close += strip.to(tl.int64) * across_m
    grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, begin, M, RY, EVEN, BN)
    product = tile_product(parts_x, parts_y, a, a_low, own, batch, begin, is_row, RX, RY, M, P, EVEN, SPLIT,
                            PRECISION, BM, BN, BK, PIECE)  # fmt: skip
    for first in range(begin, end, BN):
        col = first + tl.arange(0, BN)
        q = across(product, over_x, over_y, SPLIT)
        rho = radial(grown_x, root_x, grown_y, root_y)
        square = rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]
        if EXACT:
            margin = tl.min(tl.min(margins(square, sinh_x, sinh_y, row, col, SAME, BLUR, QUICK), axis=1), axis=0)
            tl.store(close + first // BN, (margin < 0.0).to(tl.int32))
        d = distance(square, UNIT, QUICK)
        if SAME:  # NaN stays
            d = tl.where(row[:, None] == col[None, :], 0.0 * (grown_x[:, None] - grown_y[None, :]), d)
        store_tile(out, own, M, col, d, is_row, EVEN, BM)
        following = tl.where(first + BN < end, first + BN, begin)  # the last is not used
        grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, following, M, RY, EVEN, BN)
        product = tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN, SPLIT,
                                PRECISION, BM, BN, BK, PIECE)  # fmt: skip


def pairwise_dist(x: Tensor, y: Tensor | None, chart: int, c: float, exact: bool) -> tuple[Tensor, Known]:
    """Distances (B, N, M) of x (B, N, n) and y (B, M, n), contiguous, or x itself; then what is known of their rows."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    out = torch.empty(B, N, M, dtype=torch.float32, device=x.device)
    known = row_stats(x, y, chart, c)
    if not has_data(x) or not out.numel():
        return out, known
    is_split = x.dtype == torch.float32
    sizes = tile_sizes(N, M, n)
    strips, across_m = B * triton.cdiv(N, sizes["BM"]), triton.cdiv(M, sizes["BN"])
    tiles = strips * across_m
    programs = _PROGRAMS if is_split else _PROGRAMS * 3 // 2
    walk = triton.cdiv(across_m, max(1, programs // strips))
    walks = walk >= _LEAST_WALK
    apart = exact and (walks or out.numel() > _FEW)
    close = torch.empty(tiles, dtype=torch.int32, device=x.device) if apart else known[0]
    tensors, numbers = sets_of(x, y, known)
    common = {"UNIT": c**-0.5, "SAME": y is None, "QUICK": not interpreted()}
    settings = {**common, "EXACT": exact, "BLUR": blur(n), "SPLIT": is_split, "PRECISION": precision()}
    if walks:
        even = N % sizes["BM"] == 0 and M % sizes["BN"] == 0
        settings |= {"P": numbers[-1], "EVEN": even, **strip_sizes(N, M, n, not is_split, shared_memory(x))}
        grid = (strips * triton.cdiv(across_m, walk),)
        launch(_walking_distance_kernel, grid, (*tensors, close, out), (*numbers[:-1], walk), settings)
    else:
        settings |= {"APART": apart, **sizes}
        launch(_distance_kernel, (tiles,), (*tensors, close, out), numbers, settings)
    if apart:
        settings = {**common, "BM": sizes["BM"], "BN": sizes["BN"], "ROWS": 16, "MARKS": 8, "num_warps": 4}
        grid = (triton.cdiv(tiles, 8),)
        launch(_close_distance_kernel, grid, (*tensors[:4], close, out), (*numbers[:5], tiles), settings)
    return out, known
