"""All pairs on the GPU: distances, their softmax, the nearest point; one launch for radii, one for pairs.

Float32 rows are multiplied in two parts of float16 (see ``rows``), as exact as three TF32 products and twice as fast;
half precision as it lies in memory: no digit of it is lost.

Counted at (8, 2048, 2048, 128), 134 MB of results, in microseconds on an H200: 34 for bytes at 4.2 TB/s, 28 for float32
or 10 for bf16 products at the peak of float16, 10 for rows, and per pair and turn

    distances  38 instructions, 43; three special functions, 27; 270 MB of rows out of L2, 50 at 5.5 TB/s
    softmax    26 instructions, 29; three special functions, 27; 270 MB of rows; two turns of all but the bytes

Many distances, softmax and the nearest walk over tiles, rows of the next and what is known of them on their way while a
tile is worked on; two programs on a multiprocessor, so that one may multiply while the other takes roots. How well they
overlap decides, and with eight warps they do so badly. Measured: distances 117 (88 for bf16), some 14 more where exact;
softmax 181 (143), the nearest 93 (73). Parts left out of softmax say that they add up: two of three products 40, the
functions 47, what is known of columns 30 (of which 15 are saved since it comes ahead), the results 14, the second turn
92. Before, with the rows of a tile fetched right before its product, distances took 146 (126) and softmax 210.
(64, 196, 196, 64): 9.8 MB, 10. (512, 49, 16, 32): 1.6 MB, 5.

The nearest points and many exact distances leave close points (see ``pairs``) to a third launch, which ends at once
where there are none. In the same kernel they cost all tiles registers, 1 KB of them in local memory: 255 microseconds
measured for distances (322 with float32 rows in three TF32 products, taken apart again for every tile).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import has_data, interpreted, shared_memory
from ..launch import launch
from .pairs import (
    across,
    across_by_differences,
    add_products,
    distance,
    growth,
    has_marks,
    load_rows,
    load_stats,
    log2,
    margins,
    no_nan,
    radial,
)
from .rows import PART_SCALE, Known, row_stats

LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: infinity less itself is not a number."""

_FEW = 2**20
"""Distances up to which one kernel does all: a launch more would take longer than what it spares."""

_PROGRAMS = 512
"""As many programs walk over tiles of distances: what an H200 holds at a time, twice; with half the bytes half more."""

_SHARED = 120 * 1024
"""Bytes of shared memory of a program that has the rows of two tiles; with those of one it has 65 KB."""

_LEAST_WALK = 4
"""Tiles of a program that walks: it multiplies one more than it has."""


@triton.jit
def _product(parts_x, parts_y, own, other, is_row, is_col, RX, RY, P, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Products of a tile, rows from ``own`` and from ``other`` on, BK components after BK."""
    product = tl.zeros((BM, BN), tl.float32)
    for first in range(0, P, BK):
        a = load_rows(parts_x, own, is_row, first, P, BM, BK)
        b = load_rows(parts_y, other, is_col, first, P, BN, BK)
        a_low, b_low = a, b
        if SPLIT:
            a_low = load_rows(parts_x, own + RX, is_row, first, P, BM, BK)
            b_low = load_rows(parts_y, other + RY, is_col, first, P, BN, BK)
        product = add_products(product, a, a_low, b, b_low, SPLIT, PRECISION)
    return product


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
    product = _product(parts_x, parts_y, own, other, is_row, is_col, RX, RY, P, SPLIT, PRECISION, BM, BN, BK)
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
        for found in range(begin, tl.minimum(begin + MARKS, TILES)):
            if tl.load(close + found) > 0:
                batch = (found // tiles).to(tl.int64)
                tile = found % tiles
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
def _columns(parts_y, start, first, M, P: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of a tile's columns, which begin with row ``start``; without masks where all of them exist."""
    if EVEN and P == BK:
        at = tl.arange(0, BN)[:, None] * P + tl.arange(0, BK)[None, :]
        found = tl.load(parts_y + start * P + at)
    else:
        found = load_rows(parts_y, start, first + tl.arange(0, BN) < M, 0, P, BN, BK)
    return found


@triton.jit
def _tile_product(parts_x, parts_y, a, a_low, own, batch, first, is_row, RX, RY, M, P: tl.constexpr,
                  EVEN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Products of the rows ``a``, if they are held whole, with the columns from ``first`` on."""
    other = batch * M + first
    if PIECE == BK:
        b = _columns(parts_y, other, first, M, P, EVEN, BN, BK)
        b_low = b
        if SPLIT:
            b_low = _columns(parts_y, other + RY, first, M, P, EVEN, BN, BK)
        product = add_products(tl.zeros((BM, BN), tl.float32), a, a_low, b, b_low, SPLIT, PRECISION)
    else:
        is_col = first + tl.arange(0, BN) < M
        product = _product(parts_x, parts_y, own, other, is_row, is_col, RX, RY, P, SPLIT, PRECISION, BM, BN, PIECE)
    return product


@triton.jit
def _tile_stats(stats_y, first, M, RY, EVEN: tl.constexpr, BN: tl.constexpr):
    """What is known of the columns from ``first`` on. Asked for before their product: it comes meanwhile."""
    col = first + tl.arange(0, BN)
    is_col = tl.full((BN,), True, tl.int1) if EVEN else col < M
    return load_stats(stats_y, col, is_col, RY)


@triton.jit
def _store_tile(out, own, M, col, found, is_row, EVEN: tl.constexpr, BM: tl.constexpr):
    """Results of the rows from ``own`` on and the columns ``col``."""
    at = out + own * M + (tl.arange(0, BM)[:, None] * M + col[None, :])
    if EVEN:
        tl.store(at, found)
    else:
        tl.store(at, found, mask=is_row[:, None] & (col < M)[None, :])


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
    blocks = tl.cdiv(N, BM)
    batch = (strip // blocks).to(tl.int64)
    above = (strip % blocks) * BM
    begin = (tl.program_id(0) % chunks) * TILES * BN
    end = tl.minimum(begin + TILES * BN, M)
    row = above + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + above
    stats_y += batch * M
    close += strip.to(tl.int64) * across_m
    a = load_rows(parts_x, own, is_row, 0, P, BM, PIECE)
    a_low = a
    if SPLIT:
        a_low = load_rows(parts_x, own + RX, is_row, 0, P, BM, PIECE)
    grown_x, root_x, sinh_x, over_x = load_stats(stats_x + batch * N, row, is_row, RX)
    grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, begin, M, RY, EVEN, BN)
    product = _tile_product(parts_x, parts_y, a, a_low, own, batch, begin, is_row, RX, RY, M, P, EVEN, SPLIT,
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
        _store_tile(out, own, M, col, d, is_row, EVEN, BM)
        following = tl.where(first + BN < end, first + BN, begin)  # the last is not used
        grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, following, M, RY, EVEN, BN)
        product = _tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN, SPLIT,
                                PRECISION, BM, BN, BK, PIECE)  # fmt: skip


@triton.jit
def _excess(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
            SAME: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """``cosh(s d) - 1`` of a tile, infinite for columns beyond M.

    As ``2 sinh^2((a - b)/2) + sinh a sinh b (1 - cos)``, twice the square of the other kernels, where factors
    that belong to a row alone come multiplied: six instructions a pair.
    """
    shift_y = grown_y * root_y
    if not EVEN:
        shift_y = tl.where(col < M, shift_y, float("inf"))
    if not SPLIT:
        product = product * over_y[None, :]
    aside = tl.maximum(tl.fma(product, -slope_x[:, None], sinh_x[:, None]), 0.0)  # rounded once: 1 - cos may be small
    if SAME:
        aside = tl.where(row[:, None] == col[None, :], 0.0, aside)
    along = (grown_x[:, None] * root_y[None, :] - shift_y[None, :]) * half_x[:, None]
    return along * along + aside * sinh_y[None, :]


@triton.jit
def _softmax_kernel(x, y, stats_x, stats_y, parts_x, parts_y, out, log_sums, RX, RY, N, M, n, RATE: tl.constexpr,
                    SAME: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr, QUICK: tl.constexpr,
                    SPLIT: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Two turns over the columns: one for the sum of each row, one that writes. Making a tile again is cheaper than
    reading it: its bytes would go through memory twice more.

    A tile is multiplied at the end of the turn before its own, so that the rows of the tile after it are on their way
    while its pairs are worked on. The first turn ends with the first tile, where the second begins. A tile ALONE needs
    one turn.
    """
    blocks = tl.cdiv(N, BM)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    above = (tl.program_id(0) % blocks) * BM
    row = above + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + above
    stats_y += batch * M
    a = load_rows(parts_x, own, is_row, 0, P, BM, PIECE)
    a_low = a
    if SPLIT:
        a_low = load_rows(parts_x, own + RX, is_row, 0, P, BM, PIECE)
    grown_x, root_x, sinh_x, over_x = load_stats(stats_x + batch * N, row, is_row, RX)
    half_x = tl.where(is_row, 0.70710678 * root_x, 1.0)  # sqrt(2) / 2; 0 would meet infinity
    slope_x = sinh_x * (1.0 / (PART_SCALE * PART_SCALE)) if SPLIT else sinh_x * over_x
    grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, 0, M, RY, EVEN, BN)
    product = _tile_product(parts_x, parts_y, a, a_low, own, batch, 0, is_row, RX, RY, M, P, EVEN, SPLIT, PRECISION,
                            BM, BN, BK, PIECE)  # fmt: skip
    if ALONE:
        col = tl.arange(0, BN)
        excess = _excess(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M, SAME,
                         EVEN, SPLIT)  # fmt: skip
        top = -RATE * log2(growth(tl.min(no_nan(excess, QUICK), axis=1), QUICK), QUICK)
        terms = tl.exp2(-RATE * log2(growth(excess, QUICK), QUICK) - top[:, None])
        total = tl.sum(terms, axis=1)
        tl.store(log_sums + batch * N + row, top + tl.log2(total), mask=is_row)
        _store_tile(out, own, M, col, terms * (1.0 / total)[:, None], is_row, EVEN, BM)
    else:
        top = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        for first in range(0, M, BN):
            col = first + tl.arange(0, BN)
            excess = _excess(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
                             SAME, EVEN, SPLIT)  # fmt: skip
            least = tl.min(no_nan(excess, QUICK), axis=1)
            higher = tl.maximum(top, -RATE * log2(growth(least, QUICK), QUICK))
            terms = tl.exp2(-RATE * log2(growth(excess, QUICK), QUICK) - higher[:, None])
            total = total * tl.exp2(top - higher) + tl.sum(terms, axis=1)
            top = higher
            # Written in every turn: the compiler would else move the arithmetic behind the wait for the next rows.
            tl.store(log_sums + batch * N + row, total, mask=is_row)
            following = tl.where(first + BN < M, first + BN, 0)
            grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, following, M, RY, EVEN, BN)
            product = _tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN,
                                    SPLIT, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
        log_sum = top + tl.log2(total)
        tl.store(log_sums + batch * N + row, log_sum, mask=is_row)
        for first in range(0, M, BN):
            col = first + tl.arange(0, BN)
            excess = _excess(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
                             SAME, EVEN, SPLIT)  # fmt: skip
            p = tl.exp2(-RATE * log2(growth(excess, QUICK), QUICK) - log_sum[:, None])
            _store_tile(out, own, M, col, p, is_row, EVEN, BM)
            following = tl.where(first + BN < M, first + BN, 0)
            grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, following, M, RY, EVEN, BN)
            product = _tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN,
                                    SPLIT, PRECISION, BM, BN, BK, PIECE)  # fmt: skip


@triton.jit
def _lesser(least, where, square, col):
    """The least of each row so far and its column, with one tile more; of equal ones the first stays."""
    best = tl.min(square, axis=1)
    place = tl.min(tl.where(square == best[:, None], col[None, :], 2147483647), axis=1)
    is_less = best < least
    return tl.where(is_less, best, least), tl.where(is_less, place, where)


@triton.jit
def _nearest_kernel(x, y, stats_x, stats_y, parts_x, parts_y, close, index, d, RX, RY, N, M, n, UNIT: tl.constexpr,
                    SAME: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr, BLUR: tl.constexpr,
                    QUICK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, P: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """A row leaves out tiles in which it has close points and marks them in ``close`` (rows, tiles).

    Tiles are multiplied a turn ahead, as in :func:`_walking_distance_kernel`, unless one is ALONE.
    """
    blocks = tl.cdiv(N, BM)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    above = (tl.program_id(0) % blocks) * BM
    row = above + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + above
    stats_y += batch * M
    tiles = tl.cdiv(M, BN)
    close += own * tiles
    a = load_rows(parts_x, own, is_row, 0, P, BM, PIECE)
    a_low = a
    if SPLIT:
        a_low = load_rows(parts_x, own + RX, is_row, 0, P, BM, PIECE)
    grown_x, root_x, sinh_x, over_x = load_stats(stats_x + batch * N, row, is_row, RX)
    least = tl.full((BM,), float("inf"), tl.float32)
    where = tl.zeros((BM,), tl.int32)
    grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, 0, M, RY, EVEN, BN)
    product = _tile_product(parts_x, parts_y, a, a_low, own, batch, 0, is_row, RX, RY, M, P, EVEN, SPLIT, PRECISION,
                            BM, BN, BK, PIECE)  # fmt: skip
    for first in range(0, M, BN):
        col = first + tl.arange(0, BN)
        is_col = tl.full((BN,), True, tl.int1) if EVEN else col < M
        q = across(product, over_x, over_y, SPLIT)
        if SAME:
            q = tl.where(row[:, None] == col[None, :], 0.0, q)
        rho = radial(grown_x, root_x, grown_y, root_y)
        square = rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]
        is_close = tl.min(margins(square, sinh_x, sinh_y, row, col, SAME, BLUR, QUICK), axis=1) < 0.0
        is_known = is_col[None, :] & ~is_close[:, None] & (square == square)
        square = tl.where(is_known, square, float("inf"))
        least, where = _lesser(least, where, square, col)
        tl.store(close + (tl.arange(0, BM) * tiles + first // BN), is_close.to(tl.int32), mask=is_row)
        if not ALONE:
            following = tl.where(first + BN < M, first + BN, 0)  # the last is not used
            grown_y, root_y, sinh_y, over_y = _tile_stats(stats_y, following, M, RY, EVEN, BN)
            product = _tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN,
                                    SPLIT, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
    # Nothing was below infinity: the row is NaN, or every column is, or all are left out.
    is_none = least == float("inf")
    found = tl.where(is_none, float("nan"), distance(tl.where(is_none, 0.0, least), UNIT, QUICK))
    tl.store(index + batch * N + row, where.to(tl.int64), mask=is_row)
    tl.store(d + batch * N + row, found, mask=is_row)


@triton.jit
def _close_nearest_kernel(x, y, stats_x, stats_y, close, index, d, RX, RY, N, M, n, UNIT: tl.constexpr,
                          SAME: tl.constexpr, QUICK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                          MARKS: tl.constexpr):  # fmt: skip
    """Rows with marked tiles: the nearest point of those by differences, if it is nearer than what was found."""
    blocks = tl.cdiv(N, BM)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    above = (tl.program_id(0) % blocks) * BM
    row = above + tl.arange(0, BM)
    is_row = row < N
    tiles = tl.cdiv(M, BN)
    close += (batch * N + above) * tiles
    if has_marks(close, is_row, tiles, BM, MARKS):
        grown_x, root_x, sinh_x, _over_x = load_stats(stats_x + batch * N, row, is_row, RX)
        least = tl.full((BM,), float("inf"), tl.float32)
        where = tl.zeros((BM,), tl.int32)
        for tile in range(tiles):
            mark = tl.load(close + tl.arange(0, BM) * tiles + tile, mask=is_row, other=0)
            if tl.max(mark, axis=0) > 0:
                col = tile * BN + tl.arange(0, BN)
                is_col = col < M
                grown_y, root_y, sinh_y, _over_y = load_stats(stats_y + batch * M, col, is_col, RY)
                q, _wide_x, _wide_y = across_by_differences(x + batch * N * n, y + batch * M * n, row, is_row, col,
                                                            is_col, n, BM, BN)  # fmt: skip
                if SAME:
                    q = tl.where(row[:, None] == col[None, :], 0.0, q)
                rho = radial(grown_x, root_x, grown_y, root_y)
                square = rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]
                is_known = (mark > 0)[:, None] & is_col[None, :] & (square == square)
                least, where = _lesser(least, where, tl.where(is_known, square, float("inf")), col)
        is_some = least < float("inf")
        found = distance(tl.where(is_some, least, 0.0), UNIT, QUICK)
        before = tl.load(d + batch * N + row, mask=is_row, other=0.0)
        place = tl.load(index + batch * N + row, mask=is_row, other=0)
        is_first = (found == before) & (where < place)  # of equal ones
        is_nearer = is_some & ((found < before) | (before != before) | is_first)
        tl.store(d + batch * N + row, tl.where(is_nearer, found, before), mask=is_row)
        tl.store(index + batch * N + row, tl.where(is_nearer, where.to(tl.int64), place), mask=is_row)


def blur(n: int) -> float:
    """Share of ``sinh a sinh b`` below which a sum is too small for the product's rounding, which grows with n."""
    return min(0.25, max(0.0625, n / 2048))


def precision() -> str:
    """How a matrix unit takes what is left of float32, the weights of float16 rows; an interpreter has none."""
    return "ieee" if interpreted() else "tf32"


def width(n: int) -> int:
    """Columns of a row that is held whole, for a matrix unit."""
    return max(16, triton.next_power_of_2(n))


@functools.cache
def _tile(N: int, M: int, n: int) -> dict[str, int]:
    bm, bn = (max(16, min(64, triton.next_power_of_2(size))) for size in (N, M))
    return {"BM": bm, "BN": bn, "BK": min(32, width(n)), "num_warps": 4, "num_stages": 3}


@functools.cache
def _strip(N: int, M: int, n: int, is_half: bool, shared: int) -> dict[str, int]:
    # Two parts of rows of 256 would fill shared memory: one program on a multiprocessor.
    piece = width(n) if is_half or width(n) <= 128 else 64
    stages = 2 if shared >= _SHARED else 1  # else the rows of a tile come when it is their turn
    return {**_tile(N, M, n), "BK": width(n), "PIECE": piece, "num_stages": stages}


def sets_of(x: Tensor, y: Tensor | None, known: Known) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What every kernel over pairs begins with: points, numbers and parts of both sets, then all sizes."""
    B, N, n = x.shape
    other, is_split = x if y is None else y, x.dtype == torch.float32
    stats_x, stats_y, parts_x, parts_y = known
    if y is None:
        stats_y, parts_y = stats_x, parts_x
    M = other.shape[1]
    multiplied = (parts_x, parts_y) if is_split else (x, other)
    return (x, other, stats_x, stats_y, *multiplied), (B * N, B * M, N, M, n, parts_x.shape[-1] if is_split else n)


def pairwise_dist(x: Tensor, y: Tensor | None, chart: int, c: float, exact: bool) -> tuple[Tensor, Known]:
    """Distances (B, N, M) of x (B, N, n) and y (B, M, n), contiguous, or x itself; then what is known of their rows."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    out = torch.empty(B, N, M, dtype=torch.float32, device=x.device)
    known = row_stats(x, y, chart, c)
    if not has_data(x) or not out.numel():
        return out, known
    is_split = x.dtype == torch.float32
    sizes = _tile(N, M, n)
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
        settings |= {"P": numbers[-1], "EVEN": even, **_strip(N, M, n, not is_split, shared_memory(x))}
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


def distance_softmax(
    x: Tensor, y: Tensor | None, chart: int, c: float, temperature: float
) -> tuple[Tensor, Tensor, Known]:  # fmt: skip
    """Softmax (B, N, M) of distances over -temperature, logarithms (base 2) of sums (B, N), what is known of rows."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    out = torch.empty(B, N, M, dtype=torch.float32, device=x.device)
    log_sums = torch.empty(B, N, dtype=torch.float32, device=x.device)
    known = row_stats(x, y, chart, c)
    if has_data(x) and out.numel():
        sizes = _strip(N, M, n, x.dtype != torch.float32, shared_memory(x))
        tensors, numbers = sets_of(x, y, known)
        settings = {
            "RATE": 1 / (math.sqrt(c) * temperature), "SAME": y is None, "QUICK": not interpreted(),
            "SPLIT": x.dtype == torch.float32, "PRECISION": precision(), "P": numbers[-1],
            "EVEN": N % sizes["BM"] == 0 and M % sizes["BN"] == 0, "ALONE": sizes["BN"] >= M, **sizes,
        }  # fmt: skip
        grid = (B * triton.cdiv(N, sizes["BM"]),)
        launch(_softmax_kernel, grid, (*tensors, out, log_sums), numbers[:-1], settings)
    return out, log_sums, known


def nearest(x: Tensor, y: Tensor | None, chart: int, c: float) -> tuple[Tensor, Tensor]:
    """Index (B, N) of the nearest of y (B, M, n) for each of x (B, N, n), and its distance."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    index = torch.empty(B, N, dtype=torch.int64, device=x.device)
    d = torch.empty(B, N, dtype=torch.float32, device=x.device)
    known = row_stats(x, y, chart, c)
    if has_data(x) and index.numel():
        sizes = _strip(N, M, n, x.dtype != torch.float32, shared_memory(x))
        tensors, numbers = sets_of(x, y, known)
        settings = {
            "UNIT": c**-0.5, "SAME": y is None, "BLUR": blur(n), "QUICK": not interpreted(),
            "SPLIT": x.dtype == torch.float32, "PRECISION": precision(), "P": numbers[-1],
            "EVEN": N % sizes["BM"] == 0 and M % sizes["BN"] == 0, "ALONE": sizes["BN"] >= M, **sizes,
        }  # fmt: skip
        close = torch.empty(B * N * triton.cdiv(M, sizes["BN"]), dtype=torch.int32, device=x.device)
        launch(_nearest_kernel, (B * triton.cdiv(N, sizes["BM"]),), (*tensors, close, index, d), numbers[:-1], settings)
        settings = {
            "UNIT": c**-0.5, "SAME": y is None, "QUICK": not interpreted(), "BM": 16, "BN": sizes["BN"], "MARKS": 64,
            "num_warps": 4,
        }  # fmt: skip
        grid = (B * triton.cdiv(N, 16),)
        launch(_close_nearest_kernel, grid, (*tensors[:4], close, index, d), numbers[:5], settings)
    return index, d
