"""Softmax of the distances of many pairs in one turn: the programs of a strip of rows tell each other their sums.

A program makes its share of a strip, keeps the terms in registers, writes down the largest and the sum of each row,
waits until all programs of the strip have, and writes its terms over the sum of all. Nothing is made or read twice.

Who waits must not keep out who it waits for. A GPU starts programs in the order of their numbers, and those of a strip
follow each other; so of a strip that is not complete nothing behind it has started, and it holds fewer places than it
has shares. A strip has at most a share for every second multiprocessor, and every multiprocessor has a place, three or
four on an H200: there it takes more than six such softmaxes at once, on streams or in processes of their own, until all
places are held by programs that wait. A partition of a GPU says how many multiprocessors it has, except for torch's
green contexts: one of less than a quarter of the GPU wants ``backend="torch"`` for rows of thousands.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import interpreted
from hyptree.ops.pairwise_lorentz.pairs import LOWEST, add_products, excess_of, growth, log2, no_nan, row_factors
from hyptree.ops.pairwise_lorentz.tiles import columns, store_tile, strip_rows, tile_product, tile_stats, width

_TILES = 2
"""Tiles of a program: 64 terms in each thread. More would leave two programs on a multiprocessor, not four."""

_LEAST_SHARES = 4
_WIDEST = 128
"""Components of rows; wider ones would fill shared memory."""


@triton.jit
def _joint_kernel(x, y, stats_x, stats_y, parts_x, parts_y, out, log_sums, tops, sums, arrived, RX, RY, N, M, n,
                  PHASE: tl.constexpr, SHARES: tl.constexpr, MOST: tl.constexpr, RATE: tl.constexpr,
                  SAME: tl.constexpr, EVEN: tl.constexpr, QUICK: tl.constexpr, SPLIT: tl.constexpr,
                  PRECISION: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  TILES: tl.constexpr):  # fmt: skip
    """PHASE 0 does all. An interpreter has one program at a time: 1 writes sums down, 2 begins again and writes terms.

    What is known of a tile's columns comes after its product, four numbers for each of a thread's columns: before it,
    they would take the registers of another program.
    """
    strip = tl.program_id(0) // SHARES
    share = tl.program_id(0) % SHARES
    begin = share * (TILES * BN)
    batch, own, row, is_row, a, a_low, known = strip_rows(parts_x, stats_x, strip, N, RX, P, SPLIT, BM, BK)
    grown_x, root_x, sinh_x, over_x = known
    stats_y += batch * M
    half_x, slope_x = row_factors(root_x, sinh_x, over_x, is_row, SPLIT)
    others = ()  # of half precision, rows of all tiles come at once; two parts of them would fill shared memory
    if not SPLIT:
        for tile in tl.static_range(TILES):
            first = begin + tile * BN
            others += (columns(parts_y, batch * M + first, first, M, P, EVEN, BN, BK),)  # type: ignore[assignment]
    logs = ()
    least = tl.full((BM,), -LOWEST, tl.float32)
    for tile in tl.static_range(TILES):
        first = begin + tile * BN
        if SPLIT:
            product = tile_product(parts_x, parts_y, a, a_low, own, batch, first, is_row, RX, RY, M, P, EVEN, SPLIT,
                                   PRECISION, BM, BN, BK, BK)  # fmt: skip
        else:
            product = add_products(tl.zeros((BM, BN), tl.float32), a, a, others[tile], others[tile], SPLIT, PRECISION)
        grown_y, root_y, sinh_y, over_y = tile_stats(stats_y, first, M, RY, EVEN, BN)
        col = first + tl.arange(0, BN)
        excess = excess_of(product, grown_x, half_x, sinh_x, slope_x, grown_y, root_y, sinh_y, over_y, row, col, M,
                           SAME, EVEN, SPLIT)  # fmt: skip
        tile_value = log2(growth(excess, QUICK), QUICK)
        least = tl.minimum(least, tl.min(no_nan(tile_value, QUICK), axis=1))
        logs += (tile_value,)  # type: ignore[assignment]
    top = tl.maximum(-RATE * least, LOWEST)
    total = tl.zeros((BM,), tl.float32)
    terms = ()
    for tile in tl.static_range(TILES):
        tile_value = tl.exp2(logs[tile] * (-RATE) - top[:, None])
        total += tl.sum(tile_value, axis=1)
        terms += (tile_value,)  # type: ignore[assignment]
    place = strip.to(tl.int64) * (SHARES * BM) + tl.arange(0, BM)
    if PHASE != 2:
        tl.store(tops + place + share * BM, top)
        tl.store(sums + place + share * BM, total)
    if PHASE == 0:
        tl.debug_barrier()  # all threads have written
        tl.atomic_add(arrived + strip, 1, sem="release")
        while tl.atomic_add(arrived + strip, 0, sem="acquire") < SHARES:
            pass
    if PHASE != 1:
        number = tl.arange(0, MOST)
        there = (number < SHARES)[None, :]
        places = place[:, None] + number[None, :] * BM
        # Not by the multiprocessor's own cache, which does not know what others wrote.
        all_tops = tl.load(tops + places, mask=there, other=LOWEST, cache_modifier=".cg")
        all_sums = tl.load(sums + places, mask=there, other=0.0, cache_modifier=".cg")
        highest = tl.max(all_tops, axis=1)
        whole = tl.sum(all_sums * tl.exp2(all_tops - highest[:, None]), axis=1)
        if share == 0:
            tl.store(log_sums + batch * N + row, highest + tl.log2(whole), mask=is_row)
        scale = tl.exp2(top - highest) / whole  # not by the logarithm, of which far points leave few digits
        for tile in tl.static_range(TILES):
            col = begin + tile * BN + tl.arange(0, BN)
            store_tile(out, own, M, col, terms[tile] * scale[:, None], is_row, EVEN, BM)


@functools.cache
def joint_sizes(N: int, M: int, n: int, is_half: bool, processors: int) -> dict[str, int] | None:
    """How large shares are, or None where strips are too short, or too long to wait for each other."""
    sizes = {"BM": 64, "BN": 64, "BK": width(n), "TILES": _TILES, "num_warps": 4, "num_stages": 1}
    if is_half:
        sizes["maxnreg"] = 128  # four programs on a multiprocessor; float32 rows leave no room for a fourth
    shares = triton.cdiv(M, sizes["BN"] * _TILES)
    is_fit = sizes["BM"] <= N and width(n) <= _WIDEST and _LEAST_SHARES <= shares <= processors // 2
    return sizes if is_fit else None


def num_strips(B: int, N: int, sizes: dict[str, int]) -> int:
    return B * triton.cdiv(N, sizes["BM"])


def joint_softmax(
    tensors: tuple[Tensor, ...], numbers: tuple[int, ...], out: Tensor, log_sums: Tensor, arrived: Tensor,
    settings: dict[str, Any], sizes: dict[str, int],
) -> None:  # fmt: skip
    """Fill ``out`` (B, N, M) and ``log_sums`` (B, N).

    Args:
        tensors, numbers: of ``sets_of``. arrived: a zero for each strip. sizes: of :func:`joint_sizes`.
        settings: what the kernel in two turns takes too.
    """
    B, N, M = out.shape
    strips, shares = num_strips(B, N, sizes), triton.cdiv(M, sizes["BN"] * sizes["TILES"])
    tops, sums = (torch.empty(strips * shares * sizes["BM"], dtype=torch.float32, device=out.device) for _ in range(2))
    settings = {
        **settings, "SHARES": shares, "MOST": triton.next_power_of_2(shares),
        "EVEN": N % sizes["BM"] == 0 and M % (sizes["BN"] * sizes["TILES"]) == 0, **sizes,
    }  # fmt: skip
    for phase in (1, 2) if interpreted() else (0,):
        arguments = (*tensors, out, log_sums, tops, sums, arrived)
        launch(_joint_kernel, (strips * shares,), arguments, numbers[:-1], {**settings, "PHASE": phase})
