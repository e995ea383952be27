"""Softmax of the distances of all pairs on the GPU; :mod:`~hyptree.ops.pairwise_lorentz.triton` has the counts."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted, multiprocessors, shared_memory
from hyptree.ops.pairwise_lorentz.joint_kernel import joint_sizes, joint_softmax, num_strips
from hyptree.ops.pairwise_lorentz.pairs import LOWEST, excess_of, growth, log2, no_nan, row_factors
from hyptree.ops.pairwise_lorentz.rows import Known, row_stats
from hyptree.ops.pairwise_lorentz.tiles import (
    precision,
    sets_of,
    store_tile,
    strip_rows,
    strip_sizes,
    tile_product,
    tile_stats,
)


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
    batch, own, row, is_row, a, a_low, known = strip_rows(
        parts_x, stats_x, tl.program_id(0), N, RX, P, SPLIT, BM, PIECE
    )
    grown_x, root_x, sinh_x, over_x = known
    stats_y += batch * M
    half_x, slope_x = row_factors(root_x, sinh_x, over_x, is_row, SPLIT)
    grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, 0, M, RY, EVEN, BN)
    product = tile_product(parts_x, parts_y, a, a_low, own, batch, 0, is_row, RX, RY, M, P, EVEN, SPLIT, PRECISION,
                            BM, BN, BK, PIECE)  # fmt: skip
    if ALONE:
        col = tl.arange(0, BN)
        excess = excess_of(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
                           SAME, EVEN, SPLIT)  # fmt: skip
        top = -RATE * log2(growth(tl.min(no_nan(excess, QUICK), axis=1), QUICK), QUICK)
        terms = tl.exp2(-RATE * log2(growth(excess, QUICK), QUICK) - top[:, None])
        total = tl.sum(terms, axis=1)
        tl.store(log_sums + batch * N + row, top + tl.log2(total), mask=is_row)
        store_tile(out, own, M, col, terms * (1.0 / total)[:, None], is_row, EVEN, BM)
    else:
        top = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        for first in range(0, M, BN):
            col = first + tl.arange(0, BN)
            excess = excess_of(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
                               SAME, EVEN, SPLIT)  # fmt: skip
            least = tl.min(no_nan(excess, QUICK), axis=1)
            higher = tl.maximum(top, -RATE * log2(growth(least, QUICK), QUICK))
            terms = tl.exp2(-RATE * log2(growth(excess, QUICK), QUICK) - higher[:, None])
            total = total * tl.exp2(top - higher) + tl.sum(terms, axis=1)
            top = higher
            # Written in every turn: the compiler would else move the arithmetic behind the wait for the next rows.
            tl.store(log_sums + batch * N + row, total, mask=is_row)
            following = tl.where(first + BN < M, first + BN, 0)
            grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, following, M, RY, EVEN, BN)
            product = tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN,
                                    SPLIT, PRECISION, BM, BN, BK, PIECE)  # fmt: skip
        log_sum = top + tl.log2(total)
        tl.store(log_sums + batch * N + row, log_sum, mask=is_row)
        for first in range(0, M, BN):
            col = first + tl.arange(0, BN)
            excess = excess_of(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
                               SAME, EVEN, SPLIT)  # fmt: skip
            p = tl.exp2(-RATE * log2(growth(excess, QUICK), QUICK) - log_sum[:, None])
            store_tile(out, own, M, col, p, is_row, EVEN, BM)
            following = tl.where(first + BN < M, first + BN, 0)
            grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, following, M, RY, EVEN, BN)
            product = tile_product(parts_x, parts_y, a, a_low, own, batch, following, is_row, RX, RY, M, P, EVEN,
                                    SPLIT, PRECISION, BM, BN, BK, PIECE)  # fmt: skip


def distance_softmax(
    x: Tensor, y: Tensor | None, chart: int, c: float, temperature: float
) -> tuple[Tensor, Tensor, Known]:  # fmt: skip
    """Softmax (B, N, M) of distances over -temperature, logarithms (base 2) of sums (B, N), what is known of rows."""
    B, N, n = x.shape
    M = N if y is None else y.shape[1]
    out = torch.empty(B, N, M, dtype=torch.float32, device=x.device)
    log_sums = torch.empty(B, N, dtype=torch.float32, device=x.device)
    is_split = x.dtype == torch.float32
    joint = joint_sizes(N, M, n, not is_split, multiprocessors(x))
    arrived = torch.empty(num_strips(B, N, joint) if joint else 0, dtype=torch.int32, device=x.device)
    known = row_stats(x, y, chart, c, arrived)
    if has_data(x) and out.numel():
        tensors, numbers = sets_of(x, y, known)
        settings = {
            "RATE": 1 / (math.sqrt(c) * temperature), "SAME": y is None, "QUICK": not interpreted(),
            "SPLIT": is_split, "PRECISION": precision(), "P": numbers[-1],
        }  # fmt: skip
        if joint:
            joint_softmax(tensors, numbers, out, log_sums, arrived, settings, joint)
        else:
            sizes = strip_sizes(N, M, n, not is_split, shared_memory(x))
            is_even = N % sizes["BM"] == 0 and M % sizes["BN"] == 0
            settings |= {"EVEN": is_even, "ALONE": sizes["BN"] >= M, **sizes}
            grid = (B * triton.cdiv(N, sizes["BM"]),)
            launch(_softmax_kernel, grid, (*tensors, out, log_sums), numbers[:-1], settings)
    return out, log_sums, known
