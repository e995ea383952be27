"""Gradients of distances between all pairs, and of their softmax, without a matrix of slopes in memory.

A program owns rows of one set and walks over the other: it makes the tile again, weighs it with the gradient that came
in and sums radial parts as numbers, transverse parts by a second product. The other set's gradient is the same kernel
with the roles exchanged, in the same launch. Sums have a fixed order.

The second product takes weights in two parts of float16 as the rows are (see ``rows``). Weights have any size, so each
row of a tile is divided by a power of two. Matrix units cut off what they add, which over many tiles became 6e-6 of the
gradient: they sum over one tile, float32 over all.

Close points need differences in float64 (see ``pairs``), whose registers would slow every tile down: rows mark the
tiles in which they have some and a second kernel, which ends at once where nothing is marked, adds those.

Counted at (8, 2048, 2048, 128) for an H200 in float32: the incoming gradient (134 MB) is read twice, 64 microseconds;
four times three float16 products, 103 Gflop, 170; 58 instructions per pair and side, 130. 350 are expected if products
and arithmetic do not overlap, 5 of them for the second kernel. (479 measured, and 385 for bf16, where each tile was
asked for when it was needed: a quarter was waiting. With float64 in the loop 190 instructions, spilt registers: 955.)
(64, 196, 196, 64): 20 MB and 7 Gflop; 512 programs of 7 tiles, all at a time: 35.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted
from hyptree.ops.pairwise_lorentz.pairs import (
    across,
    across_by_differences,
    add_products,
    component,
    has_marks,
    load_rows,
    load_stats,
    log2_growth,
    margins,
    multiply,
    no_nan,
    over_root,
)
from hyptree.ops.pairwise_lorentz.rows import PART_SCALE, Known
from hyptree.ops.pairwise_lorentz.tiles import blur, precision, sets_of, width

WEIGHT_SCALE = tl.constexpr(16384.0)
"""Weights as float16 are at most this: no sum of parts leaves its range."""

LEAST = tl.constexpr(2.0**-100)
"""Weights below this are as good as none."""

SMALLEST = tl.constexpr(1.1754943508222875e-38)
"""The square of a distance below this counts as 0, as in geometry.numerics."""

_CLOSE_ROWS = 16


@triton.jit
def _above(weight, LEAST: tl.constexpr, QUICK: tl.constexpr):
    """For each row a power of two above its weights, from LEAST to 2^127: dividing by it rounds nothing."""
    exponent = tl.max(tl.abs(no_nan(weight, QUICK)), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(exponent, 0x7E800000)  # a weight may be infinite
    return tl.maximum((exponent + 0x00800000).to(tl.float32, bitcast=True), LEAST)


@triton.jit
def _product_of_parts(scaled, b, b_low, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """``scaled @ yh`` for weights within the range of float16, in two parts as the rows."""
    high = scaled.to(tl.float16)
    total = multiply(high, b, tl.zeros((BM, BK), tl.float32), PRECISION)
    total = multiply(high, b_low, total, PRECISION)
    return multiply((scaled - high.to(tl.float32)).to(tl.float16), b, total, PRECISION)


@triton.jit
def _add_product(transverse, scaled, b, PRECISION: tl.constexpr):
    """``transverse + scaled @ y`` for rows in half precision."""
    if b.dtype == tl.bfloat16:  # 16 bits of the weights, whose range bfloat16 has
        high = scaled.to(tl.bfloat16)
        transverse = multiply(high, b, transverse, PRECISION)
        transverse = multiply((scaled - high.to(tl.float32)).to(tl.bfloat16), b, transverse, PRECISION)
    else:
        transverse = multiply(scaled, b.to(tl.float32), transverse, PRECISION)
    return transverse


@triton.jit
def _add_differences(transverse, weight, x, y, row, is_row, col, is_col, n, over_x, over_y, BK: tl.constexpr):
    """``transverse + sum_j weight (yh_j - xh)``: what lies along xh is taken off later anyway, so it may go first."""
    column = tl.arange(0, BK)
    for k in range(n):
        own = component(x, row, is_row, n, k) * over_x
        step = (component(y, col, is_col, n, k) * over_y)[None, :] - own[:, None]
        part = tl.sum(weight * step.to(tl.float32), axis=1)
        transverse += tl.where(column[None, :] == k, part[:, None], 0.0)
    return transverse


@triton.jit
def _load_grad(grad, batch, start, row, first, col, N, M, inside, FLIPPED: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """What came in for a tile. Its place has 64 bits, those inside it 32: addresses of 64 would fill the registers."""
    if FLIPPED:
        at = grad + (batch * M + first) * N + (tl.arange(0, BN)[None, :] * N + row[:, None])
    else:
        at = grad + (batch * N + start) * M + (tl.arange(0, BM)[:, None] * M + col[None, :])
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _slopes(g, q, grown_x, root_x, sinh_x, cosh_x, grown_y, root_y, sinh_y, log_sum, mean, inside, RATE: tl.constexpr,
            OVER_T: tl.constexpr, SOFTMAX: tl.constexpr, QUICK: tl.constexpr):  # fmt: skip
    """Of a tile: ``sinh^2(s d/2)``, the slope of d along it times what came in, and how it grows with the radius.

    With ``rho = sinh((a - b)/2)``, a square grows with a by ``rho cosh((a - b)/2) + cosh a sinh b q``; both factors of
    the first term are products of the same numbers.
    """
    half = (0.5 * root_x)[:, None] * root_y[None, :]
    rho = (grown_x[:, None] - grown_y[None, :]) * half
    away = sinh_y[None, :] * q
    square = rho * rho + sinh_x[:, None] * away
    if SOFTMAX:
        p = tl.exp2(-RATE * log2_growth(square, QUICK) - log_sum)
        g = tl.where(inside, -OVER_T * p * (g - mean), 0.0)
    # d grows with the square by 1 / (s w sqrt(1 + w^2)); where two points coincide there is no slope.
    steep = tl.where(square < SMALLEST, 0.0, over_root(square, QUICK))
    slope = (g * steep) * over_root(1.0 + square, QUICK)
    growth = rho * (((grown_x + 2.0)[:, None] + grown_y[None, :]) * half) + cosh_x[:, None] * away
    return square, slope, growth


@triton.jit
def _turned(x, stats_x, row, is_row, start, n, R, along, transverse, over_x, OVER_S: tl.constexpr, BM: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """The gradient of stored rows from its radial and transverse sums; ``stats_x`` points at ``cosh`` of the rows."""
    unit = load_rows(x, start.to(tl.int64), is_row, 0, n, BM, BK).to(tl.float32) * over_x[:, None]
    transverse -= unit * tl.sum(unit * transverse, axis=1)[:, None]
    stats_x += R
    stats_x += R
    outwards = OVER_S * along * tl.load(stats_x, mask=is_row, other=0.0)
    stats_x += R
    sideways = (0.5 * OVER_S) * tl.load(stats_x, mask=is_row, other=0.0)
    return outwards[:, None] * unit - sideways[:, None] * transverse


@triton.jit
def _grad_rows(program, x, y, stats_x, stats_y, parts_x, parts_y, grad, log_sums, means, close, out, RX, RY, N, M, n, P,
               OVER_S: tl.constexpr, RATE: tl.constexpr, OVER_T: tl.constexpr, SOFTMAX: tl.constexpr,
               FLIPPED: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr, BLUR: tl.constexpr,
               QUICK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Gradient of rows of x; if FLIPPED, x is the second set and ``grad`` is (B, M, N).

    If EXACT, a row leaves out tiles in which it has a close point and marks them in ``close`` (rows, tiles).
    """
    blocks = tl.cdiv(N, BM)
    batch = (program // blocks).to(tl.int64)
    start = (program % blocks) * BM
    row = start + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + start  # the first row among those of all batches
    x += batch * N * n
    stats_x += batch * N
    stats_y += batch * M
    if SOFTMAX:
        at = batch * M if FLIPPED else batch * N
        log_sums += at
        means += at
    grown_x, root_x, sinh_x, over_x = load_stats(stats_x, row, is_row, RX)
    stats_x += row
    stats_x += RX
    stats_x += RX
    stats_x += RX
    cosh_x = tl.load(stats_x, mask=is_row, other=0.0)
    along = tl.zeros((BM,), tl.float32)
    transverse = tl.zeros((BM, BK), tl.float32)
    if PIECE == BK:  # held for all columns
        a = load_rows(parts_x, own, is_row, 0, P, BM, BK)
        a_low = a
        if SPLIT:
            a_low = load_rows(parts_x, own + RX, is_row, 0, P, BM, BK)
    for first in range(0, M, BN):
        col = first + tl.arange(0, BN)
        is_col = col < M
        grown_y, root_y, sinh_y, over_y = load_stats(stats_y, col, is_col, RY)
        inside = is_row[:, None] & is_col[None, :]
        g = _load_grad(grad, batch, start, row, first, col, N, M, inside, FLIPPED, BM, BN)
        b = load_rows(parts_y, batch * M + first, is_col, 0, P, BN, BK)
        b_low = b
        if SPLIT:
            b_low = load_rows(parts_y, batch * M + first + RY, is_col, 0, P, BN, BK)
        product = tl.zeros((BM, BN), tl.float32)
        if PIECE == BK:
            product = add_products(product, a, a_low, b, b_low, SPLIT, PRECISION)
        else:
            for k in tl.static_range(0, BK, PIECE):  # rows whole would not leave room for the rest
                part = load_rows(parts_x, own, is_row, k, P, BM, PIECE)
                other = load_rows(parts_y, batch * M + first, is_col, k, P, BN, PIECE)
                part_low, other_low = part, other
                if SPLIT:
                    part_low = load_rows(parts_x, own + RX, is_row, k, P, BM, PIECE)
                    other_low = load_rows(parts_y, batch * M + first + RY, is_col, k, P, BN, PIECE)
                product = add_products(product, part, part_low, other, other_low, SPLIT, PRECISION)
        q = across(product, over_x, over_y, SPLIT)
        if SAME:
            q = tl.where(row[:, None] == col[None, :], 0.0, q)
        log_sum, mean = g, g
        if SOFTMAX:
            if FLIPPED:
                log_sum = tl.load(log_sums + col, mask=is_col, other=0.0)[None, :]
                mean = tl.load(means + col, mask=is_col, other=0.0)[None, :]
            else:
                log_sum = tl.load(log_sums + row, mask=is_row, other=0.0)[:, None]
                mean = tl.load(means + row, mask=is_row, other=0.0)[:, None]
        square, slope, growth = _slopes(g, q, grown_x, root_x, sinh_x, cosh_x, grown_y, root_y, sinh_y, log_sum, mean,
                                        inside, RATE, OVER_T, SOFTMAX, QUICK)  # fmt: skip
        added = tl.sum(slope * growth, axis=1)
        weight = slope * sinh_y[None, :]
        keep = tl.full((BM,), 1.0, tl.float32)
        if EXACT:
            is_close = tl.min(margins(square, sinh_x, sinh_y, row, col, SAME, BLUR, QUICK), axis=1) < 0.0
            keep = tl.where(is_close, 0.0, 1.0)
            tile = first // BN
            tl.store(close + own * tl.cdiv(M, BN) + (tl.arange(0, BM) * tl.cdiv(M, BN) + tile), is_close.to(tl.int32),
                     mask=is_row)  # fmt: skip
        along += keep * added
        if SPLIT:
            # A matrix unit cuts off what it adds: over many tiles that is a drift, so it only adds within one.
            unit = _above(weight, LEAST, QUICK)
            scaled = weight * (keep * (WEIGHT_SCALE / unit))[:, None]
            tile_sum = _product_of_parts(scaled, b, b_low, BM, BK, PRECISION)
            transverse += tile_sum * (unit * (1.0 / (WEIGHT_SCALE * PART_SCALE)))[:, None]
        else:
            transverse = _add_product(transverse, (keep[:, None] * weight) * over_y[None, :], b, PRECISION)
    grad_rows = _turned(x, stats_x, row, is_row, start, n, RX, along, transverse, over_x, OVER_S, BM, BK)
    column = tl.arange(0, BK)
    at = tl.arange(0, BM)[:, None] * n + column[None, :]
    tl.store(out + own * n + at, grad_rows, mask=is_row[:, None] & (column < n)[None, :])


@triton.jit
def _pairs_grad_kernel(x, y, stats_x, stats_y, parts_x, parts_y, grad, log_sums, means, close_x, close_y, to_x, to_y,
                       RX, RY, N, M, n, P, OWN, OVER_S: tl.constexpr, RATE: tl.constexpr, OVER_T: tl.constexpr,
                       SOFTMAX: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr, BLUR: tl.constexpr,
                       QUICK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr, BM_Y: tl.constexpr, BN_Y: tl.constexpr, BK: tl.constexpr,
                       PIECE: tl.constexpr):  # fmt: skip
    """The first OWN programs have rows of x, the others rows of y: both at a time, as one set may be small."""
    program = tl.program_id(0)
    if program < OWN:
        _grad_rows(program, x, y, stats_x, stats_y, parts_x, parts_y, grad, log_sums, means, close_x, to_x, RX, RY, N,
                   M, n, P, OVER_S, RATE, OVER_T, SOFTMAX, False, SAME, EXACT, BLUR, QUICK, SPLIT, PRECISION, BM, BN,
                   BK, PIECE)  # fmt: skip
    else:
        _grad_rows(program - OWN, y, x, stats_y, stats_x, parts_y, parts_x, grad, log_sums, means, close_y, to_y, RY,
                   RX, M, N, n, P, OVER_S, RATE, OVER_T, SOFTMAX, True, SAME, EXACT, BLUR, QUICK, SPLIT, PRECISION,
                   BM_Y, BN_Y, BK, PIECE)  # fmt: skip


@triton.jit
def _close_rows(program, x, y, stats_x, stats_y, grad, close, out, RX, RY, N, M, n, OVER_S: tl.constexpr,
                FLIPPED: tl.constexpr, SAME: tl.constexpr, QUICK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, MARKS: tl.constexpr):  # fmt: skip
    """Adds to the gradient of rows what :func:`_grad_rows` left out, by differences in float64."""
    blocks = tl.cdiv(N, BM)
    batch = (program // blocks).to(tl.int64)
    start = (program % blocks) * BM
    row = start + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + start
    tiles = tl.cdiv(M, BN)
    x += batch * N * n
    y += batch * M * n
    stats_x += batch * N
    stats_y += batch * M
    close += own * tiles
    at_cosh = stats_x + row
    at_cosh += RX
    at_cosh += RX
    at_cosh += RX
    if has_marks(close, is_row, tiles, BM, MARKS):
        grown_x, root_x, sinh_x, over_x = load_stats(stats_x, row, is_row, RX)
        cosh_x = tl.load(at_cosh, mask=is_row, other=0.0)
        along = tl.zeros((BM,), tl.float32)
        transverse = tl.zeros((BM, BK), tl.float32)
        for tile in range(tiles):
            mark = tl.load(close + tl.arange(0, BM) * tiles + tile, mask=is_row, other=0)
            if tl.max(mark, axis=0) > 0:
                left = tile * BN
                col = left + tl.arange(0, BN)
                is_col = col < M
                grown_y, root_y, sinh_y, _ = load_stats(stats_y, col, is_col, RY)
                inside = (mark > 0)[:, None] & is_col[None, :]
                g = _load_grad(grad, batch, start, row, left, col, N, M, inside, FLIPPED, BM, BN)
                q, over_wide_x, over_wide_y = across_by_differences(x, y, row, is_row, col, is_col, n, BM, BN)
                if SAME:
                    q = tl.where(row[:, None] == col[None, :], 0.0, q)
                _, slope, growth = _slopes(g, q, grown_x, root_x, sinh_x, cosh_x, grown_y, root_y, sinh_y, g, g, inside,
                                           1.0, 1.0, False, QUICK)  # fmt: skip
                along += tl.sum(slope * growth, axis=1)
                transverse = _add_differences(transverse, slope * sinh_y[None, :], x, y, row, is_row, col, is_col, n,
                                              over_wide_x, over_wide_y, BK)  # fmt: skip
        grad_rows = _turned(x, at_cosh, row, is_row, start, n, RX, along, transverse, over_x, OVER_S, BM, BK)
        column = tl.arange(0, BK)
        at = out + own * n + (tl.arange(0, BM)[:, None] * n + column[None, :])
        inside = is_row[:, None] & (column < n)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0).to(tl.float32) + grad_rows, mask=inside)


@triton.jit
def _close_kernel(x, y, stats_x, stats_y, grad, close_x, close_y, to_x, to_y, RX, RY, N, M, n, OWN,
                  OVER_S: tl.constexpr, SAME: tl.constexpr, QUICK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BN_Y: tl.constexpr, BK: tl.constexpr, MARKS: tl.constexpr):  # fmt: skip
    """Tiles with close points, which are few: a kernel of its own, whose registers the others need not hold."""
    program = tl.program_id(0)
    if program < OWN:
        _close_rows(program, x, y, stats_x, stats_y, grad, close_x, to_x, RX, RY, N, M, n, OVER_S, False, SAME, QUICK,
                    BM, BN, BK, MARKS)  # fmt: skip
    else:
        _close_rows(program - OWN, y, x, stats_y, stats_x, grad, close_y, to_y, RY, RX, M, N, n, OVER_S, True, SAME,
                    QUICK, BM, BN_Y, BK, MARKS)  # fmt: skip


@triton.jit
def _means_kernel(p, grad, means, R, M, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``sum_j p grad`` of each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < R
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, M, BLOCK):
        column = first + tl.arange(0, BLOCK)
        at = row[:, None] * M + column[None, :]
        inside = is_row[:, None] & (column < M)[None, :]
        total += tl.load(p + at, mask=inside, other=0.0) * tl.load(grad + at, mask=inside, other=0.0)
    tl.store(means + row, tl.sum(total, axis=1), mask=is_row)


@functools.cache
def _sizes(N: int, M: int, n: int) -> dict[str, int]:
    """As many rows and columns as registers and shared memory hold, for the rows of x and for those of y."""
    is_wide = width(n) > 128
    most_rows, most_columns = (32 if is_wide else 64), (32 if width(n) > 32 else 64)

    def tile(rows: int, columns: int) -> tuple[int, int]:
        bm = max(16, min(most_rows, triton.next_power_of_2(rows)))
        return bm, max(16, min(32 if bm == 16 else most_columns, triton.next_power_of_2(columns)))

    (bm, bn), (bm_y, bn_y) = tile(N, M), tile(M, N)
    piece = min(32, width(n)) if is_wide else width(n)
    return {
        "BM": bm, "BN": bn, "BM_Y": bm_y, "BN_Y": bn_y, "BK": width(n), "PIECE": piece, "num_warps": 4,
        # Three: a tile is asked for while the one before the last is worked on. With two nothing is until it is needed;
        # short rows have four programs on a multiprocessor for that.
        "num_stages": 1 if is_wide else 2 if width(n) <= 64 else 3,
        # Four programs on a multiprocessor hide each other's waiting; longer rows need the registers themselves.
        **({} if width(n) > 64 or interpreted() else {"maxnreg": 128}),
    }  # fmt: skip


def row_means(p: Tensor, grad: Tensor) -> Tensor:
    """``(p * grad).sum(-1)``, reading both once: (B, N, M) -> (B, N)."""
    B, N, M = p.shape
    means = torch.empty(B, N, dtype=torch.float32, device=p.device)
    if has_data(p) and p.numel():
        block = min(1024, triton.next_power_of_2(M))
        settings = {"ROWS": 4, "BLOCK": block, "num_warps": 4}
        launch(_means_kernel, (triton.cdiv(B * N, 4),), (p, grad, means), (B * N, M), settings)
    return means


def pairs_grad(
    x: Tensor, y: Tensor | None, known: Known, grad: Tensor, log_sums: Tensor | None, means: Tensor | None, c: float,
    exact: bool, temperature: float, needs_x: bool, needs_y: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x (B, N, n) and y (B, M, n), or of x in its two roles, from that of distances or their softmax.

    Args:
        known: what the forward pass found of the rows.
        grad: (B, N, M), of the softmax if there are ``log_sums`` and ``means``.
        needs_x, needs_y: a gradient that is not needed comes back with no numbers.
    """
    B, N, n = x.shape
    other = x if y is None else y
    M = other.shape[1]
    to_x = torch.empty_like(x) if needs_x else x.new_empty(0)
    to_y = torch.empty_like(other) if needs_y else x.new_empty(0)
    if not has_data(x) or not (to_x.numel() or to_y.numel()):
        return to_x, to_y
    if not N * M:
        return to_x.zero_(), to_y.zero_()
    sizes, is_same = _sizes(N, M, n), y is None
    tensors, numbers = sets_of(x, y, known)
    marks_x = B * N * triton.cdiv(M, sizes["BN"]) if exact and needs_x else 0
    marks_y = B * M * triton.cdiv(N, sizes["BN_Y"]) if exact and needs_y else 0
    close_x, close_y = (torch.empty(marks, dtype=torch.int32, device=x.device) for marks in (marks_x, marks_y))
    settings = {
        "OVER_S": c**-0.5, "RATE": 1 / (math.sqrt(c) * temperature), "OVER_T": 1 / temperature,
        "SOFTMAX": log_sums is not None, "SAME": is_same, "EXACT": exact, "BLUR": blur(n), "QUICK": not interpreted(),
        "SPLIT": x.dtype == torch.float32, "PRECISION": precision(), **sizes,
    }  # fmt: skip
    extra = grad if log_sums is None else log_sums, grad if means is None else means
    own = B * triton.cdiv(N, sizes["BM"]) if needs_x else 0
    programs = own + (B * triton.cdiv(M, sizes["BM_Y"]) if needs_y else 0)
    out = close_x, close_y, to_x, to_y
    launch(_pairs_grad_kernel, (programs,), (*tensors, grad, *extra, *out), (*numbers, own), settings)
    if exact:
        own = B * triton.cdiv(N, _CLOSE_ROWS) if needs_x else 0
        programs = own + (B * triton.cdiv(M, _CLOSE_ROWS) if needs_y else 0)
        settings = {
            "OVER_S": c**-0.5, "SAME": is_same, "QUICK": not interpreted(), "BM": _CLOSE_ROWS, "BN": sizes["BN"],
            "BN_Y": sizes["BN_Y"], "BK": width(n), "MARKS": 64, "num_warps": 4,
            **({} if interpreted() else {"maxnreg": 128}),  # most programs end at once: as many at a time as can be
        }  # fmt: skip
        launch(_close_kernel, (programs,), (*tensors[:4], grad, *out), (*numbers[:5], own), settings)
    return to_x, to_y
