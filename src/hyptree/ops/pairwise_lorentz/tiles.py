"""Tiles of pairs: their products, what is known of their columns, where they go, and how large they are."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.ops.backend import interpreted
from hyptree.ops.pairwise_lorentz.pairs import add_products, load_rows, load_stats
from hyptree.ops.pairwise_lorentz.rows import Known

_SHARED = 120 * 1024
"""Bytes of shared memory of a program that has the rows of two tiles; with those of one it has 65 KB."""


@triton.jit
def whole_product(parts_x, parts_y, own, other, is_row, is_col, RX, RY, P, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
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
def strip_rows(parts_x, stats_x, strip, N, RX, P, SPLIT: tl.constexpr, BM: tl.constexpr, PIECE: tl.constexpr):
    """A strip of BM rows: their batch, their place, their numbers in the batch, their parts, what is known of them."""
    blocks = tl.cdiv(N, BM)
    batch = (strip // blocks).to(tl.int64)
    above = (strip % blocks) * BM
    row = above + tl.arange(0, BM)
    is_row = row < N
    own = batch * N + above
    a = load_rows(parts_x, own, is_row, 0, P, BM, PIECE)
    a_low = a
    if SPLIT:
        a_low = load_rows(parts_x, own + RX, is_row, 0, P, BM, PIECE)
    return batch, own, row, is_row, a, a_low, load_stats(stats_x + batch * N, row, is_row, RX)


@triton.jit
def columns(parts_y, start, first, M, P: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of a tile's columns, which begin with row ``start``; without masks where all of them exist."""
    if EVEN and P == BK:
        at = tl.arange(0, BN)[:, None] * P + tl.arange(0, BK)[None, :]
        tile = tl.load(parts_y + start * P + at)
    else:
        tile = load_rows(parts_y, start, first + tl.arange(0, BN) < M, 0, P, BN, BK)
    return tile


@triton.jit
def tile_product(parts_x, parts_y, a, a_low, own, batch, first, is_row, RX, RY, M, P: tl.constexpr,
                  EVEN: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """Products of the rows ``a``, if they are held whole, with the columns from ``first`` on."""
    other = batch * M + first
    if PIECE == BK:
        b = columns(parts_y, other, first, M, P, EVEN, BN, BK)
        b_low = b
        if SPLIT:
            b_low = columns(parts_y, other + RY, first, M, P, EVEN, BN, BK)
        product = add_products(tl.zeros((BM, BN), tl.float32), a, a_low, b, b_low, SPLIT, PRECISION)
    else:
        is_col = first + tl.arange(0, BN) < M
        product = whole_product(
            parts_x, parts_y, own, other, is_row, is_col, RX, RY, P, SPLIT, PRECISION, BM, BN, PIECE
        )
    return product


@triton.jit
def tile_stats(stats_y, first, M, RY, EVEN: tl.constexpr, BN: tl.constexpr):
    """What is known of the columns from ``first`` on. Asked for before their product: it comes meanwhile."""
    col = first + tl.arange(0, BN)
    is_col = tl.full((BN,), True, tl.int1) if EVEN else col < M
    return load_stats(stats_y, col, is_col, RY)


@triton.jit
def store_tile(out, own, M, col, tile, is_row, EVEN: tl.constexpr, BM: tl.constexpr):
    """Results of the rows from ``own`` on and the columns ``col``."""
    at = out + own * M + (tl.arange(0, BM)[:, None] * M + col[None, :])
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=is_row[:, None] & (col < M)[None, :])


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
def tile_sizes(N: int, M: int, n: int) -> dict[str, int]:
    bm, bn = (max(16, min(64, triton.next_power_of_2(size))) for size in (N, M))
    return {"BM": bm, "BN": bn, "BK": min(32, width(n)), "num_warps": 4, "num_stages": 3}


@functools.cache
def strip_sizes(N: int, M: int, n: int, is_half: bool, shared: int) -> dict[str, int]:
    # Two parts of rows of 256 would fill shared memory: one program on a multiprocessor.
    piece = width(n) if is_half or width(n) <= 128 else 64
    stages = 2 if shared >= _SHARED else 1  # else the rows of a tile come when it is their turn
    return {**tile_sizes(N, M, n), "BK": width(n), "PIECE": piece, "num_stages": stages}


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
