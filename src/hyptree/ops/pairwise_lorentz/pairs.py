"""What one tile of pairs is made of: the arithmetic that all kernels of this operation share.

With radii a, b and the angle between two points, ``sinh^2(s d / 2) = sinh^2((a - b)/2) + sinh a sinh b q`` where
``q = (1 - cos)/2``: two terms that are not negative, the first of which keeps its digits. The product gives ``q`` to
about 3e-7; a tile in which this could cost more than 4e-6 of the sum takes it from differences in float64 instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyptree.ops.pairwise_lorentz.rows import PART_SCALE

LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: infinity less itself is not a number."""


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``; "ieee" for Triton's interpreter, which knows no products of bfloat16."""
    if PRECISION == "ieee":
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def load_rows(x, start, is_row, first, n, ROWS: tl.constexpr, BK: tl.constexpr):
    """BK components from ``first`` on of the rows from ``start`` on.

    ``start`` has 64 bits, places inside the tile 32: addresses of 64 bits for all of them would fill the registers.
    """
    column = first + tl.arange(0, BK)
    inside = is_row[:, None] & (column < n)[None, :]
    return tl.load(x + start * n + (tl.arange(0, ROWS)[:, None] * n + column[None, :]), mask=inside, other=0.0)


@triton.jit
def load_stats(stats, row, is_row, R):
    """``e^a - 1``, ``e^(-a/2)``, ``sinh a`` and ``1/|x|``; all 0 for rows that do not exist."""
    stats += row  # one pointer after the other: 4 R may be beyond 32 bits
    grown = tl.load(stats, mask=is_row, other=0.0)
    stats += R
    root = tl.load(stats, mask=is_row, other=0.0)
    stats += R
    sinh = tl.load(stats, mask=is_row, other=0.0)
    stats += R
    stats += R
    over = tl.load(stats, mask=is_row, other=0.0)
    return grown, root, sinh, over


@triton.jit
def add_products(total, a, a_low, b, b_low, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """``total + a @ b^T``; of parts, all products but that of the two small ones."""
    total = multiply(a, tl.trans(b), total, PRECISION)
    if SPLIT:
        total = multiply(a, tl.trans(b_low), total, PRECISION)
        total = multiply(a_low, tl.trans(b), total, PRECISION)
    return total


@triton.jit
def across(product, over_x, over_y, SPLIT: tl.constexpr):
    """``q = (1 - cos)/2`` of all pairs from the product of their rows, or parts; without overflow on the way."""
    if SPLIT:
        q = 0.5 - product * (0.5 / (PART_SCALE * PART_SCALE))
    else:
        q = 0.5 - 0.5 * (product * over_x[:, None]) * over_y[None, :]
    return tl.maximum(q, 0.0)


@triton.jit
def radial(grown_x, root_x, grown_y, root_y):
    """``sinh((a - b)/2)`` of all pairs, by products alone."""
    return 0.5 * ((grown_x[:, None] - grown_y[None, :]) * root_x[:, None]) * root_y[None, :]


@triton.jit
def no_nan(x, QUICK: tl.constexpr):
    """``x`` for a maximum or minimum, which passes over NaN; numpy, which the interpreter asks, warns of it."""
    if not QUICK:
        x = tl.where(x == x, x, 0.0)
    return x


@triton.jit
def margins(square, sinh_x, sinh_y, row, col, SAME: tl.constexpr, BLUR: tl.constexpr, QUICK: tl.constexpr):
    """Below zero where the product is too coarse for ``sinh^2(s d/2)`` of a pair."""
    margin = square - (BLUR * sinh_x)[:, None] * sinh_y[None, :]
    if SAME:  # a point and itself are not compared
        margin = tl.where(row[:, None] == col[None, :], 0.0, margin)
    return no_nan(margin, QUICK)


@triton.jit
def has_marks(marks, is_row, tiles, BM: tl.constexpr, MARKS: tl.constexpr):
    """Whether one of BM rows is marked in one of its tiles, MARKS of them at a time."""
    some = tl.zeros((BM, MARKS), tl.int32)
    for first in range(0, tiles, MARKS):
        place = first + tl.arange(0, MARKS)
        inside = is_row[:, None] & (place < tiles)[None, :]
        some |= tl.load(marks + (tl.arange(0, BM)[:, None] * tiles + place[None, :]), mask=inside, other=0)
    return tl.max(tl.max(some, axis=1), axis=0) > 0


@triton.jit
def component(x, row, is_row, n, k):
    """Component k of rows, in float64."""
    return tl.load(x + row.to(tl.int64) * n + k, mask=is_row, other=0.0).to(tl.float32).to(tl.float64)


@triton.jit
def over_lengths(x, row, is_row, n, BLOCK: tl.constexpr):
    """1 / |x| in float64, 0 for zero rows."""
    square = tl.zeros((BLOCK,), tl.float64)
    for k in range(n):
        part = component(x, row, is_row, n, k)
        square += part * part
    is_zero = square <= 1.1754943508222875e-38
    return tl.where(is_zero, 0.0, 1.0 / tl.sqrt(tl.where(is_zero, 1.0, square)))


@triton.jit
def across_by_differences(x, y, row, is_row, col, is_col, n, BM: tl.constexpr, BN: tl.constexpr):
    """``q = |xh - yh|^2 / 4`` with every digit, and 1/|x|, 1/|y| in float64.

    As ``|x - y |x|/|y||^2 / |2x|^2``: of two equal rows the quotient is 1 and the difference 0. Of unit vectors it need
    not be: a compiler contracts the difference of two products, which rounds one and not the other, and the slope of
    the distance that is left is as large as any.
    """
    over_x = over_lengths(x, row, is_row, n, BM)
    over_y = over_lengths(y, col, is_col, n, BN)
    unit = tl.where(over_x == 0.0, 1.0, over_x)
    quotient = over_y[None, :] / unit[:, None]
    square = tl.zeros((BM, BN), tl.float64)
    for k in range(n):
        step = component(x, row, is_row, n, k)[:, None] - component(y, col, is_col, n, k)[None, :] * quotient
        square += step * step
    return (square * (0.25 * unit * unit)[:, None]).to(tl.float32), over_x, over_y


@triton.jit
def distance(square, UNIT: tl.constexpr, QUICK: tl.constexpr):
    """``d = 2 asinh(w) / s`` of ``square = w^2``, where ``UNIT`` is ``1/s``; NaN stays NaN."""
    w = tl.sqrt(square)
    outer = (1.3862944 * UNIT) * log2_apart(w + tl.sqrt(1.0 + square), QUICK)
    small = square
    if not QUICK:  # what is too large is not taken; numpy warns of it
        small = tl.minimum(square, 0.25)
    # asinh(w) / w for w < 1/2, see geometry.numerics
    series = (0.05633824 * UNIT) + small * (-0.02647504 * UNIT)
    series = (0.14997304 * UNIT) + small * ((-0.08876904 * UNIT) + small * series)
    series = (2.0 * UNIT) + small * ((-0.33333286 * UNIT) + small * series)
    return tl.where(w >= 0.5, outer, w * series)


@triton.jit
def log2(x, QUICK: tl.constexpr):
    """Base-2 logarithm; by the special function unit where there is one."""
    if QUICK:
        out = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        out = tl.log2(x)
    return out


@triton.jit
def log2_apart(x, QUICK: tl.constexpr):
    """Base-2 logarithm of normal x to 3e-7 and the rounding of the result; of infinite ones 128, of NaN anything.

    The special function unit promises 2^-22 between 1 and 2 and that share of the result elsewhere, too much far out:
    the exponent goes apart.
    """
    if QUICK:
        bits = x.to(tl.int32, bitcast=True)
        rest = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        out = ((bits >> 23) - 127).to(tl.float32) + log2(rest, QUICK)
    else:
        out = tl.log2(x)
    return out


@triton.jit
def over_root(x, QUICK: tl.constexpr):
    """``1 / sqrt(x)`` for x of a normal size, without the steps that other sizes need; of 0 anything."""
    if QUICK:
        out = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        out = tl.rsqrt(tl.where(x == 0.0, 1.0, x))  # numpy warns of zeros
    return out


@triton.jit
def log2_growth(square, QUICK: tl.constexpr):
    """``log2 e^(s d)`` of ``square = sinh^2(s d/2)``: one root, one logarithm, for a softmax."""
    near = tl.minimum(square, 1e18)
    half = square + (square - near) + tl.sqrt(near * near + near)
    return log2(1.0 + 2.0 * half, QUICK)


@triton.jit
def growth(excess, QUICK: tl.constexpr):
    """``e^(s d)`` of ``excess = cosh(s d) - 1``, up to where float32 ends; its distance to 1 keeps its digits."""
    cosh = 1.0 + excess
    if QUICK:  # a square beyond float32 is infinite, so is its root, which cannot be above cosh
        sinh = tl.minimum(tl.sqrt(excess * cosh + excess), cosh)
    else:  # numpy warns of infinite ones
        near = tl.minimum(excess, 1e18)
        sinh = tl.where(excess > near, cosh, tl.sqrt(near * (near + 2.0)))
    return 1.0 + (excess + sinh)


@triton.jit
def row_factors(root_x, sinh_x, over_x, is_row, SPLIT: tl.constexpr):
    """What :func:`excess_of` multiplies by that belongs to a row alone."""
    half_x = tl.where(is_row, 0.70710678 * root_x, 1.0)  # sqrt(2) / 2; 0 would meet infinity
    slope_x = sinh_x * (1.0 / (PART_SCALE * PART_SCALE)) if SPLIT else sinh_x * over_x
    return half_x, slope_x


@triton.jit
def excess_of(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
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
