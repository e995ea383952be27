"""Gradients of distances between all pairs, and of their softmax, without a matrix of slopes in memory.

A program owns rows of one set and walks over the other: it makes the tile again, weighs it with the gradient that came
in and sums radial parts as numbers, transverse parts by a second product. The other set's gradient is the same kernel
with the roles exchanged, in the same launch. Sums have a fixed order.

The second product takes weights in two parts of float16 as the rows are (see ``rows``). Weights have any size, so each
row of a tile is divided by a power of two, and what was summed before is brought to the same unit.

Counted at (8, 2048, 2048, 128) for an H200 in float32: the incoming gradient (134 MB) is read twice, 64 microseconds;
four times three float16 products, 103 Gflop, 170; about 45 operations per pair and side, 130, beside them. 250 are
expected.
(64, 196, 196, 64): 20 MB and 7 Gflop; 512 programs of 7 tiles, two at a time on a multiprocessor: 35.
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
from .pairs import (
    across,
    across_by_differences,
    add_products,
    direction,
    is_blurred,
    load_rows,
    load_stats,
    log2_growth,
    multiply,
    radial,
)
from .rows import PART_SCALE, Known
from .triton import blur, precision, sets_of, width

WEIGHT_SCALE = tl.constexpr(16384.0)
"""Weights as float16 are at most this: no sum of parts leaves its range."""

LEAST = tl.constexpr(2.0**-100)
"""Weights below this are as good as none."""


@triton.jit
def _above(weight, LEAST: tl.constexpr):
    """For each row a power of two above its weights, from LEAST to 2^127.

    By exponents, so that units change by powers of two and nothing is rounded.
    """
    exponent = tl.max(weight.to(tl.int32, bitcast=True) & 0x7F800000, axis=1)
    exponent = tl.minimum(exponent, 0x7E800000)  # a weight may be infinite, or not a number
    return tl.maximum((exponent + 0x00800000).to(tl.float32, bitcast=True), LEAST)


@triton.jit
def _add_parts(transverse, scaled, b, b_low, PRECISION: tl.constexpr):
    """``transverse + scaled @ yh`` for weights within the range of float16, in two parts as the rows."""
    high = scaled.to(tl.float16)
    transverse = multiply(high, b, transverse, PRECISION)
    transverse = multiply(high, b_low, transverse, PRECISION)
    return multiply((scaled - high.to(tl.float32)).to(tl.float16), b, transverse, PRECISION)


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
        step = direction(y, col, is_col, n, k, over_y)[None, :] - direction(x, row, is_row, n, k, over_x)[:, None]
        part = tl.sum(weight * step.to(tl.float32), axis=1)
        transverse += tl.where(column[None, :] == k, part[:, None], 0.0)
    return transverse


@triton.jit
def _grad_rows(program, x, y, stats_x, stats_y, parts_x, parts_y, grad, log_sums, means, out, RX, RY, N, M, n, P,
               OVER_S: tl.constexpr, RATE: tl.constexpr, OVER_T: tl.constexpr, SOFTMAX: tl.constexpr,
               FLIPPED: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr, BLUR: tl.constexpr,
               QUICK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Gradient of rows of x; if FLIPPED, x is the second set and ``grad`` is (B, M, N)."""
    blocks = tl.cdiv(N, BM)
    batch = (program // blocks).to(tl.int64)
    start = (program % blocks) * BM
    row = start + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + start  # the first row among those of all batches
    x += batch * N * n
    y += batch * M * n
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
    UNIT: tl.constexpr = PART_SCALE if SPLIT else 1.0  # length of a direction in the products
    along = tl.zeros((BM,), tl.float32)
    transverse = tl.zeros((BM, BK), tl.float32)
    size = tl.full((BM,), LEAST, tl.float32)  # transverse is kept in units of it
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
        # A place in 64 bits for the tile, in 32 inside it: addresses of 64 bits would fill the registers.
        if FLIPPED:
            tile = grad + (batch * M + first) * N
            g = tl.load(tile + (tl.arange(0, BN)[None, :] * N + row[:, None]), mask=inside, other=0.0)
        else:
            tile = grad + own * M
            g = tl.load(tile + (tl.arange(0, BM)[:, None] * M + col[None, :]), mask=inside, other=0.0)
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
        rho = radial(grown_x, root_x, grown_y, root_y)
        if EXACT:
            blurred = q
            if SAME:
                blurred = tl.where(row[:, None] == col[None, :], 1.0, q)
            near = is_blurred(rho, blurred, sinh_x, sinh_y, BLUR)
            over_wide_x = tl.zeros((BM,), tl.float64)
            over_wide_y = tl.zeros((BN,), tl.float64)
            if near > 0:
                q, over_wide_x, over_wide_y = across_by_differences(x, y, row, is_row, col, is_col, n, BM, BN)
        square = rho * rho + (sinh_x[:, None] * q) * sinh_y[None, :]
        if SOFTMAX:
            if FLIPPED:
                log_sum = tl.load(log_sums + col, mask=is_col, other=0.0)[None, :]
                mean = tl.load(means + col, mask=is_col, other=0.0)[None, :]
            else:
                log_sum = tl.load(log_sums + row, mask=is_row, other=0.0)[:, None]
                mean = tl.load(means + row, mask=is_row, other=0.0)[:, None]
            p = tl.exp2(-RATE * log2_growth(square, QUICK) - log_sum)
            g = tl.where(inside, -OVER_T * p * (g - mean), 0.0)
        # d grows with the square by 1 / (s w sqrt(1 + w^2)); where two points coincide there is no slope.
        is_zero = square == 0.0
        safe = tl.where(is_zero, 1.0, square)
        slope = tl.where(is_zero, 0.0, (g * OVER_S) * tl.rsqrt(safe) * tl.rsqrt(1.0 + safe))
        along += tl.sum(slope * (rho * tl.sqrt(1.0 + rho * rho) + (cosh_x[:, None] * q) * sinh_y[None, :]), axis=1)
        weight = slope * sinh_y[None, :]
        if SPLIT:  # in units that the largest weight so far allows
            larger = tl.maximum(size, _above(weight, LEAST))
            transverse *= (size / larger)[:, None]
            size = larger
            weight = weight * (1.0 / size * WEIGHT_SCALE)[:, None]
        # Such a tile by differences; the product that all tiles have then gets nothing.
        if EXACT:  # noqa: SIM102
            if near > 0:
                transverse = _add_differences(transverse, weight * UNIT, x, y, row, is_row, col, is_col, n,
                                              over_wide_x, over_wide_y, BK)  # fmt: skip
                weight = tl.zeros((BM, BN), tl.float32)
        if SPLIT:
            transverse = _add_parts(transverse, weight, b, b_low, PRECISION)
        else:
            transverse = _add_product(transverse, weight * over_y[None, :], b, PRECISION)
    if SPLIT:
        transverse *= (size * (1.0 / (WEIGHT_SCALE * PART_SCALE)))[:, None]
    unit = load_rows(x, start.to(tl.int64), is_row, 0, n, BM, BK).to(tl.float32) * over_x[:, None]
    transverse -= unit * tl.sum(unit * transverse, axis=1)[:, None]
    stats_x += RX
    stats_x += RX
    outwards = along * tl.load(stats_x, mask=is_row, other=0.0)
    stats_x += RX
    sideways = 0.5 * tl.load(stats_x, mask=is_row, other=0.0)
    found = outwards[:, None] * unit - sideways[:, None] * transverse
    column = tl.arange(0, BK)
    at = tl.arange(0, BM)[:, None] * n + column[None, :]
    tl.store(out + own * n + at, found, mask=is_row[:, None] & (column < n)[None, :])


@triton.jit
def _pairs_grad_kernel(x, y, stats_x, stats_y, parts_x, parts_y, grad, log_sums, means, to_x, to_y, RX, RY, N, M, n, P,
                       OWN, OVER_S: tl.constexpr, RATE: tl.constexpr, OVER_T: tl.constexpr, SOFTMAX: tl.constexpr,
                       SAME: tl.constexpr, EXACT: tl.constexpr, BLUR: tl.constexpr, QUICK: tl.constexpr,
                       SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                       BM_Y: tl.constexpr, BN_Y: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """The first OWN programs have rows of x, the others rows of y: both at a time, as one set may be small."""
    program = tl.program_id(0)
    if program < OWN:
        _grad_rows(program, x, y, stats_x, stats_y, parts_x, parts_y, grad, log_sums, means, to_x, RX, RY, N, M, n, P,
                   OVER_S, RATE, OVER_T, SOFTMAX, False, SAME, EXACT, BLUR, QUICK, SPLIT, PRECISION, BM, BN, BK,
                   PIECE)  # fmt: skip
    else:
        _grad_rows(program - OWN, y, x, stats_y, stats_x, parts_y, parts_x, grad, log_sums, means, to_y, RY, RX, M, N,
                   n, P, OVER_S, RATE, OVER_T, SOFTMAX, True, SAME, EXACT, BLUR, QUICK, SPLIT, PRECISION, BM_Y, BN_Y,
                   BK, PIECE)  # fmt: skip


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
        "num_stages": 1 if is_wide else 2,
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
    sizes = _sizes(N, M, n)
    settings = {
        "OVER_S": c**-0.5, "RATE": 1 / (math.sqrt(c) * temperature), "OVER_T": 1 / temperature,
        "SOFTMAX": log_sums is not None, "SAME": y is None, "EXACT": exact, "BLUR": blur(n),
        "QUICK": not interpreted(), "SPLIT": x.dtype == torch.float32, "PRECISION": precision(), **sizes,
    }  # fmt: skip
    tensors, numbers = sets_of(x, y, known)
    extra = grad if log_sums is None else log_sums, grad if means is None else means
    own = B * triton.cdiv(N, sizes["BM"]) if needs_x else 0
    programs = own + (B * triton.cdiv(M, sizes["BM_Y"]) if needs_y else 0)
    launch(_pairs_grad_kernel, (programs,), (*tensors, grad, *extra, to_x, to_y), (*numbers, own), settings)
    return to_x, to_y
