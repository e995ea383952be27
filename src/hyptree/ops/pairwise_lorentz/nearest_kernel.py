"""The nearest point of another set on the GPU; :mod:`~hyptree.ops.pairwise_lorentz.triton` has the counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted, shared_memory
from hyptree.ops.pairwise_lorentz.pairs import (
    across,
    across_by_differences,
    distance,
    has_marks,
    load_stats,
    margins,
    radial,
)
from hyptree.ops.pairwise_lorentz.rows import row_stats
from hyptree.ops.pairwise_lorentz.tiles import (
    blur,
    precision,
    sets_of,
    strip_rows,
    strip_sizes,
    tile_product,
    tile_stats,
)


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
    batch, own, row, is_row, a, a_low, known = strip_rows(
        parts_x, stats_x, tl.program_id(0), N, RX, P, SPLIT, BM, PIECE
    )
    grown_x, root_x, sinh_x, over_x = known
    stats_y += batch * M
    tiles = tl.cdiv(M, BN)
    close += own * tiles
    least = tl.full((BM,), float("inf"), tl.float32)
    where = tl.zeros((BM,), tl.int32)
    grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, 0, M, RY, EVEN, BN)
    product = tile_product(parts_x, parts_y, a, a_low, own, batch, 0, is_row, RX, RY, M, P, EVEN, SPLIT, PRECISION,
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
            grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, following, M, RY, EVEN, BN)
            product = tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN,
                                    SPLIT, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
    # Nothing was below infinity: the row is NaN, or every column is, or all are left out.
    is_none = least == float("inf")
    nearest = tl.where(is_none, float("nan"), distance(tl.where(is_none, 0.0, least), UNIT, QUICK))
    tl.store(index + batch * N + row, where.to(tl.int64), mask=is_row)
    tl.store(d + batch * N + row, nearest, mask=is_row)


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
        nearest = distance(tl.where(is_some, least, 0.0), UNIT, QUICK)
        before = tl.load(d + batch * N + row, mask=is_row, other=0.0)
        place = tl.load(index + batch * N + row, mask=is_row, other=0)
        is_first = (nearest == before) & (where < place)  # of equal ones
        is_nearer = is_some & ((nearest < before) | (before != before) | is_first)
        tl.store(d + batch * N + row, tl.where(is_nearer, nearest, before), mask=is_row)
        tl.store(index + batch * N + row, tl.where(is_nearer, where.to(tl.int64), place), mask=is_row)


def nearest(x: Tensor, y: Tensor | None, chart: int, c: float) -> tuple[Tensor, Tensor]:
    """Index (B, N) of the nearest of y (B, M, n) for each of x (B, N, n), and its distance."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    index = torch.empty(B, N, dtype=torch.int64, device=x.device)
    d = torch.empty(B, N, dtype=torch.float32, device=x.device)
    known = row_stats(x, y, chart, c)
    if has_data(x) and index.numel():
        sizes = strip_sizes(N, M, n, x.dtype != torch.float32, shared_memory(x))
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
