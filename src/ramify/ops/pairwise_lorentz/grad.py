"""Gradients of distances between all pairs, and of their softmax, without a matrix of slopes in memory.

A program owns rows of one set and walks over the other: it makes the tile again, weighs it with the gradient that came
in and sums radial parts as numbers, transverse parts by a second product. The other set's gradient is the same kernel
with the roles exchanged. Sums have a fixed order.

At (8, 2048, 2048, 128) the incoming gradient (134 MB) is read twice, four products are made: expected on an H200 480
microseconds in float32 and 190 in bf16 (torch.cdist backward: about 900). A softmax reads its result and the gradient
once more for the sums of rows: 550 and 250.
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
from .pairs import across, across_by_differences, direction, is_blurred, log2_growth, multiply, radial
from .triton import _load_rows, _load_stats, blur, precision, width


@triton.jit
def _add_product(transverse, weight, b, over_y, PRECISION: tl.constexpr):
    """``transverse + weight @ yh``."""
    scaled = weight * over_y[None, :]
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
def _pairs_grad_kernel(x, y, stats_x, stats_y, grad, log_sums, means, out, RX, RY, N, M, n, OVER_S: tl.constexpr,
                       RATE: tl.constexpr, OVER_T: tl.constexpr, SOFTMAX: tl.constexpr, FLIPPED: tl.constexpr,
                       SAME: tl.constexpr, EXACT: tl.constexpr, BLUR: tl.constexpr, QUICK: tl.constexpr,
                       PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                       PIECE: tl.constexpr):  # fmt: skip
    """Gradient of x; if FLIPPED, x is the second set and ``grad`` is (B, M, N)."""
    blocks = tl.cdiv(N, BM)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    is_row = row < N
    x += batch * N * n
    y += batch * M * n
    grad += batch * N * M
    stats_x += batch * N
    stats_y += batch * M
    if SOFTMAX:
        at = batch * M if FLIPPED else batch * N
        log_sums += at
        means += at
    grown_x, root_x, sinh_x, over_x = _load_stats(stats_x, row, is_row, RX)
    cosh_x = tl.load(stats_x + 3 * RX + row, mask=is_row, other=0.0)
    along = tl.zeros((BM,), tl.float32)
    transverse = tl.zeros((BM, BK), tl.float32)
    for first in range(0, M, BN):
        col = first + tl.arange(0, BN)
        is_col = col < M
        grown_y, root_y, sinh_y, over_y = _load_stats(stats_y, col, is_col, RY)
        inside = is_row[:, None] & is_col[None, :]
        if FLIPPED:
            g = tl.load(grad + col[None, :].to(tl.int64) * N + row[:, None], mask=inside, other=0.0)
        else:
            g = tl.load(grad + row[:, None].to(tl.int64) * M + col[None, :], mask=inside, other=0.0)
        product = tl.zeros((BM, BN), tl.float32)
        for start in tl.static_range(0, BK, PIECE):  # rows whole, in float32, would not leave room for the rest
            a = _load_rows(x, row, is_row, start, n, PIECE)
            product = multiply(a, tl.trans(_load_rows(y, col, is_col, start, n, PIECE)), product, PRECISION)
        q = across(product, over_x, over_y)
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
        b = _load_rows(y, col, is_col, 0, n, BK)
        if EXACT:
            if near > 0:
                transverse = _add_differences(transverse, weight, x, y, row, is_row, col, is_col, n, over_wide_x,
                                              over_wide_y, BK)  # fmt: skip
            else:
                transverse = _add_product(transverse, weight, b, over_y, PRECISION)
        else:
            transverse = _add_product(transverse, weight, b, over_y, PRECISION)
    unit = _load_rows(x, row, is_row, 0, n, BK).to(tl.float32) * over_x[:, None]
    transverse -= unit * tl.sum(unit * transverse, axis=1)[:, None]
    outwards = along * tl.load(stats_x + 5 * RX + row, mask=is_row, other=0.0)
    sideways = 0.5 * tl.load(stats_x + 6 * RX + row, mask=is_row, other=0.0)
    found = outwards[:, None] * unit - sideways[:, None] * transverse
    column = tl.arange(0, BK)
    at = batch * N * n + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(out + at, found, mask=is_row[:, None] & (column < n)[None, :])


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
def _sizes(N: int, M: int, n: int, is_plain: bool) -> dict[str, int]:
    """As many rows and columns as registers hold, and shared memory in float32.

    Args:
        is_plain: float32 without differences, which takes the most shared memory: in two stages, of 128 components, one
            program of four warps would have a multiprocessor for itself.
    """
    is_wide = width(n) > 128
    bm = max(16, min(32 if is_wide else 64, triton.next_power_of_2(N)))
    bn = max(16, min(32 if width(n) > 32 or bm == 16 else 64, triton.next_power_of_2(M)))
    stages = 1 if is_wide or (is_plain and width(n) == 128) else 2
    return {"BM": bm, "BN": bn, "BK": width(n), "PIECE": min(32, width(n)), "num_warps": 4, "num_stages": stages}


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
    x: Tensor, y: Tensor, stats_x: Tensor, stats_y: Tensor, grad: Tensor, log_sums: Tensor | None,
    means: Tensor | None, flipped: bool, same: bool, c: float, exact: bool, temperature: float,
) -> Tensor:  # fmt: skip
    """Gradient of x (B, N, n) from that of the distances to y (B, M, n), or of their softmax if there are ``log_sums``.

    Args:
        grad: (B, N, M), or (B, M, N) if ``flipped``: then x is the second of the two sets.
        same: x and y are one set.
    """
    B, N, n = x.shape
    M = y.shape[1]
    out = torch.empty_like(x)
    if not has_data(x) or not out.numel():
        return out
    if not M:
        return out.zero_()
    sizes = _sizes(N, M, n, x.dtype == torch.float32 and not exact)
    settings = {
        "OVER_S": c**-0.5, "RATE": 1 / (math.sqrt(c) * temperature), "OVER_T": 1 / temperature,
        "SOFTMAX": log_sums is not None, "FLIPPED": flipped, "SAME": same, "EXACT": exact, "BLUR": blur(n),
        "QUICK": not interpreted(), "PRECISION": precision(x), **sizes,
    }  # fmt: skip
    tensors = (
        x, y, stats_x, stats_y, grad, grad if log_sums is None else log_sums, grad if means is None else means, out
    )  # fmt: skip
    launch(_pairs_grad_kernel, (B * triton.cdiv(N, sizes["BM"]),), tensors, (B * N, B * M, N, M, n), settings)
    return out
