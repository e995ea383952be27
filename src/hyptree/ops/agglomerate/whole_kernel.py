"""Average and complete linkage of small images: one program per image, from distances to labels in one launch.

For up to ``triton.WHOLE`` tokens, where this is a quarter faster than rows that are written close together. The rounds
of ``reference.build_forest``: every reciprocal nearest pair merges at once, so a few rounds replace one step per merge.
A cluster is known by its smallest token and nothing moves. A round writes one row for each new cluster, and looks again
for the nearest neighbour of only those clusters whose neighbour was merged: by reducibility everybody else keeps
theirs. Between two clusters the row of whichever merged last is right; a stamp per cluster tells, so no column has to
be written, and tokens that never merged are read from the distances as given.

Average linkage compares sums ``S(i, j) / count_j`` of one cluster i by multiplying crosswise, which is exact: with
distances that are multiples of 2^-24 up to 2, ``S(i, j) count_k`` has at most 25 + 3 log2(N / 3) bits, 51 for N = 1024.
Two unequal quotients differ by 2^-24 / (count_i count_j count_k) or more, which is more than float64 can lose here, so
this order is that of the rounded quotients which the reference compares, ties included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Measured on an H200 with smooth features.
_STEP, _LANES, _WARPS, _UNROLL = 16, 32, 8, 8


@triton.jit
def _first_smaller(d, at, other_d, other_at):
    """The smaller distance with its index; the smaller index where distances are equal."""
    keep = (d < other_d) | ((d == other_d) & (at < other_at))
    return tl.where(keep, d, other_d), tl.where(keep, at, other_at)


@triton.jit
def _first_smaller_mean(total, count, at, other_total, other_count, other_at):
    """The same for means ``total / count``, which are compared without dividing."""
    here, there = total * other_count, other_total * count
    keep = (here < there) | ((here == there) & (at < other_at))
    return tl.where(keep, total, other_total), tl.where(keep, count, other_count), tl.where(keep, at, other_at)


@triton.jit
def _between(distance, sums, i, j, stamp_i, stamp_j, mask, N, wide: tl.constexpr):
    """What is known between clusters i and j: the distance of two tokens, or the sum (maximum) kept for larger ones.

    The row of whichever merged last holds it. Masked elements are 0: neutral for sums and, as distances are never
    negative, for maxima.
    """
    stamp = tl.maximum(stamp_i, stamp_j)
    place = tl.where(stamp_i >= stamp_j, i * N + j, j * N + i) + (stamp & 1) * N * N
    first = tl.load(distance + i * N + j, mask=mask & (stamp == 0), other=0.0).to(wide)
    kept = tl.load(sums + place, mask=mask & (stamp > 0), other=0.0)
    return tl.where(stamp > 0, kept, first)


@triton.jit
def _nearest_given(distance, value, nearest, N, slot, STEP: tl.constexpr):
    """Each token's nearest other token (the first, where several are) in the distances as given.

    The matrix is symmetric: a thread owns a token and walks down its column, so loads are coalesced and no thread has
    to ask another.
    """
    is_token = slot < N
    best = tl.full(slot.shape, float("inf"), tl.float32)
    best_at = tl.zeros(slot.shape, tl.int32)
    for first in range(0, N, STEP):
        other = first + tl.arange(0, STEP)
        eligible = (other < N)[:, None] & is_token[None, :] & (other[:, None] != slot[None, :])
        d = tl.load(distance + other[:, None] * N + slot[None, :], mask=eligible, other=float("inf"))
        low, at = tl.reduce((d, other[:, None] + tl.zeros_like(slot)[None, :]), 0, _first_smaller)
        best, best_at = _first_smaller(best, best_at, low, at)
    tl.store(value + slot, best.to(value.dtype.element_ty), mask=is_token)
    tl.store(nearest + slot, best_at, mask=is_token)


@triton.jit
def _join_pairs(distance, sums, stamp, partner, leaders, num_pairs, left, num_left, N,
                AVERAGE: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Write a row for each new cluster: what lies between it and all that are left.

    A cluster has two places for its row and the new one goes to the place that is free, so nobody reads what another
    pair is writing.
    """
    wide = tl.float64 if AVERAGE else tl.float32
    for first in range(0, num_pairs, PAIRS):
        which = first + tl.arange(0, PAIRS)
        is_pair = which < num_pairs
        a = tl.load(leaders + which, mask=is_pair, other=0)
        b = tl.load(partner + a, mask=is_pair, other=0)
        stamp_a = tl.load(stamp + a, mask=is_pair, other=0)[:, None]
        stamp_b = tl.load(stamp + b, mask=is_pair, other=0)[:, None]
        a, b = a[:, None], b[:, None]
        row = sums + (1 - (stamp_a & 1)) * N * N + a * N
        for start in range(0, num_left, LANES):
            lane = start + tl.arange(0, LANES)
            is_left = lane < num_left
            c = tl.load(left + lane, mask=is_left, other=0)
            d = tl.load(partner + c, mask=is_left, other=-1)
            stamp_c = tl.load(stamp + c, mask=is_left, other=0)[None, :]
            stamp_d = tl.load(stamp + d, mask=is_left & (d >= 0), other=0)[None, :]
            c, d = c[None, :], d[None, :]
            mask = is_pair[:, None] & is_left[None, :] & (a != c)
            leads = mask & (d >= 0)
            ac = _between(distance, sums, a, c, stamp_a, stamp_c, mask, N, wide)
            bc = _between(distance, sums, b, c, stamp_b, stamp_c, mask, N, wide)
            ad = _between(distance, sums, a, d, stamp_a, stamp_d, leads, N, wide)
            bd = _between(distance, sums, b, d, stamp_b, stamp_d, leads, N, wide)
            if AVERAGE:
                joined = (ac + bc) + (ad + bd)
            else:
                joined = tl.maximum(tl.maximum(ac, bc), tl.maximum(ad, bd))
            tl.store(row + c, joined, mask=mask)


@triton.jit
def _find_nearest(distance, sums, stamp, count, rows, num_rows, left, num_left, value, nearest, N,
                  AVERAGE: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Nearest cluster (the first, where several are) of each of the clusters ``rows`` among those that are left."""
    wide = tl.float64 if AVERAGE else tl.float32
    for start in range(0, num_rows, LANES):
        lane = start + tl.arange(0, LANES)
        is_row = lane < num_rows
        i = tl.load(rows + lane, mask=is_row, other=0)
        stamp_i = tl.load(stamp + i, mask=is_row, other=0)[None, :]
        best = tl.full((COLUMNS, LANES), float("inf"), wide)
        best_count = tl.full((COLUMNS, LANES), 1.0, wide)
        best_at = tl.zeros((COLUMNS, LANES), tl.int32)
        for first in range(0, num_left, COLUMNS):
            which = first + tl.arange(0, COLUMNS)
            is_left = which < num_left
            j = tl.load(left + which, mask=is_left, other=0)
            stamp_j = tl.load(stamp + j, mask=is_left, other=0)[:, None]
            count_j = tl.load(count + j, mask=is_left, other=1.0)[:, None]
            j = j[:, None]
            mask = is_left[:, None] & is_row[None, :] & (j != i[None, :])
            d = _between(distance, sums, j, i[None, :], stamp_j, stamp_i, mask, N, wide)
            if AVERAGE:
                closer = mask & (d * best_count < best * count_j)
                best_count = tl.where(closer, count_j, best_count)
            else:
                closer = mask & (d < best)
            best = tl.where(closer, d, best)
            best_at = tl.where(closer, j, best_at)
        if AVERAGE:
            low, low_count, low_at = tl.reduce((best, best_count, best_at), 0, _first_smaller_mean)
            low = low / (low_count * tl.load(count + i, mask=is_row, other=1.0))
        else:
            low, low_at = tl.reduce((best, best_at), 0, _first_smaller)
        tl.store(value + i, low, mask=is_row)
        tl.store(nearest + i, low_at, mask=is_row)


@triton.jit
def _roots(link, scratch, token, is_token, JUMPS: tl.constexpr):
    """End of each token's chain of links, by doubling the reach ``JUMPS`` times."""
    root = link
    for _ in range(JUMPS):
        tl.store(scratch + token, root, mask=is_token)
        tl.debug_barrier()
        root = tl.load(scratch + root, mask=is_token, other=0)
        tl.debug_barrier()
    return root


@triton.jit
def _write_labels(first, labels, scratch, token, is_token):
    """Number the clusters by their first member, which every token knows as ``first``."""
    number = tl.cumsum((is_token & (first == token)).to(tl.int32), axis=0) - 1
    tl.store(scratch + token, number, mask=is_token)
    tl.debug_barrier()
    label = tl.load(scratch + first, mask=is_token, other=0)
    tl.store(labels + token, label.to(tl.int64), mask=is_token)


@triton.jit(do_not_specialize=["N", "K"])
def _rounds_kernel(distance, sums, vectors, values, labels, N, K, AVERAGE: tl.constexpr, BLOCK: tl.constexpr,
                   STEP: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, JUMPS: tl.constexpr):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    distance += image * N * N
    sums += image * 2 * N * N
    labels += image * N
    nearest = vectors + image * 7 * N
    up = nearest + N
    partner = nearest + 2 * N  # whom a cluster takes in this round, or -1
    left = nearest + 3 * N  # list of the clusters that are left
    leaders = nearest + 4 * N  # list of those that take in another
    rows = nearest + 5 * N  # list of those whose nearest neighbour has to be looked for
    stamp = nearest + 6 * N  # twice the round in which a cluster last merged, plus the place of its row; 0 for a token
    value = values + image * 3 * N  # distance to the nearest
    height = value + N
    count = value + 2 * N

    token = tl.arange(0, BLOCK)
    is_token = token < N
    wanted = N - K
    tl.store(count + token, tl.full((BLOCK,), 1.0, count.dtype.element_ty), mask=is_token)
    tl.store(up + token, token, mask=is_token)
    tl.store(stamp + token, tl.zeros((BLOCK,), tl.int32), mask=is_token)
    tl.store(height + token, tl.full((BLOCK,), float("inf"), height.dtype.element_ty), mask=is_token)
    _nearest_given(distance, value, nearest, N, token, STEP)
    tl.debug_barrier()

    # A cluster is known by its smallest token, so nothing moves: rows and columns of clusters that are gone lie idle.
    alive = is_token
    turn = 1
    going = wanted > 0
    while going:
        near = tl.load(nearest + token, mask=alive, other=0)
        back = tl.load(nearest + near, mask=alive, other=0)
        again = tl.load(nearest + back, mask=alive, other=-1)
        low = tl.load(value + token, mask=alive, other=float("inf"))
        size = tl.load(count + token, mask=alive, other=1.0) + tl.load(count + near, mask=alive, other=1.0)
        place = tl.load(stamp + token, mask=alive, other=0) & 1
        pair = alive & (back == token)
        leads = pair & (token < near)
        gone = pair & (token > near)
        stays = alive & (gone == 0)
        # Merging brings nobody closer, so a nearest neighbour that is in no pair stays the nearest.
        looks = stays & (again == near)
        left_place = tl.cumsum(stays.to(tl.int32), axis=0) - 1
        lead_place = tl.cumsum(leads.to(tl.int32), axis=0) - 1
        look_place = tl.cumsum(looks.to(tl.int32), axis=0) - 1
        num_left = tl.sum(stays.to(tl.int32), axis=0)
        num_pairs = tl.sum(leads.to(tl.int32), axis=0)
        num_rows = tl.sum(looks.to(tl.int32), axis=0)
        tl.store(up + token, near, mask=gone)
        tl.store(height + token, low, mask=gone)
        tl.store(partner + token, tl.where(leads, near, -1), mask=stays)
        tl.store(left + left_place, token, mask=stays)
        tl.store(leaders + lead_place, token, mask=leads)
        tl.store(rows + look_place, token, mask=looks)
        tl.debug_barrier()
        _join_pairs(distance, sums, stamp, partner, leaders, num_pairs, left, num_left, N, AVERAGE, STEP, LANES)
        tl.debug_barrier()
        tl.store(count + token, size, mask=leads)
        tl.store(stamp + token, 2 * turn + 1 - place, mask=leads)
        tl.debug_barrier()
        _find_nearest(
            distance, sums, stamp, count, rows, num_rows, left, num_left, value, nearest, N, AVERAGE, 2 * STEP, LANES
        )
        tl.debug_barrier()
        alive = stays
        turn += 1
        # No later merge can be lower than the smallest distance now, so links below it are final. One of equal height
        # may still come in before them.
        smallest = tl.min(tl.load(value + token, mask=alive, other=float("inf")), axis=0)
        heights = tl.load(height + token, mask=is_token, other=float("inf"))
        final = tl.sum((is_token & (heights < smallest)).to(tl.int32), axis=0)
        going = (final < wanted) & (num_pairs > 0)  # NaN is nobody's nearest: then no pair may be left

    # Keep the N - K first links by (height, upper end, lower end): the rank of each is the number of links before it.
    my_height = tl.load(height + token, mask=is_token, other=float("inf"))
    my_up = tl.load(up + token, mask=is_token, other=0)
    rank = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, N, UNROLL):
        for u in tl.static_range(UNROLL):
            that = first + u
            there = that < N
            that_height = tl.load(height + that, mask=there, other=float("inf"))
            that_up = tl.load(up + that, mask=there, other=BLOCK)
            tied = (that_up < my_up) | ((that_up == my_up) & (that < token))
            earlier = (that_height < my_height) | ((that_height == my_height) & tied)
            rank += (there & earlier).to(tl.int32)
    link = tl.where(rank < wanted, my_up, token)
    _write_labels(_roots(link, left, token, is_token, JUMPS), labels, left, token, is_token)


def labels(distance: Tensor, k: int, linkage: str) -> Tensor:
    """What ``triton.labels`` gives, for "average" and "complete"."""
    B, N, _ = distance.shape
    device, wide = distance.device, torch.float64 if linkage == "average" else torch.float32
    out = torch.empty(B, N, dtype=torch.int64, device=device)
    sums = torch.empty(B, 2, N, N, dtype=wide, device=device)
    vectors = torch.empty(B, 7, N, dtype=torch.int32, device=device)
    values = torch.empty(B, 3, N, dtype=wide, device=device)
    settings = {"AVERAGE": linkage == "average", "BLOCK": triton.next_power_of_2(N), "STEP": _STEP, "LANES": _LANES}
    settings |= {"UNROLL": _UNROLL, "JUMPS": max(1, (N - 1).bit_length()), "num_warps": _WARPS}
    _rounds_kernel[(B,)](distance, sums, vectors, values, out, N, k, **settings)
    return out
