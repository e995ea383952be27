"""Agglomerative clustering on the GPU: from distances to labels without asking the host.

The rounds of ``reference.build_forest``: every reciprocal nearest pair of clusters merges at once. A round pairs the
clusters (one program per image) and then writes the matrix of those that are left, row by row, close together; who
writes a row has all of it and finds its nearest neighbour on the way. Once as many links are known as are wanted, the
largest of the smallest ones is a limit: by reducibility a cluster whose nearest neighbour is farther away takes part in
no link that counts, so it is left out, and the last rounds are small.

Up to ``WHOLE`` tokens one program does all rounds of an image in one launch (of average and complete linkage in
``whole_kernel``). For more, the first rounds, which are few
and hold nearly all the work, are spread over the device, one launch for the pairs and one for the rows of all images;
one program per image goes on from there until nothing is left to do.

What is kept between two clusters: the sum of the distances in float64 for average linkage, which is exact and divided
once, as in the reference; the largest distance for complete linkage; for single linkage the smallest distance with the
two tokens it stands between, as one integer. So the order of links is that of the reference, ties included.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.agglomerate import whole_kernel
from hyptree.ops.backend import interpreted

WHOLE = 256
"""Tokens up to which one program takes a whole image."""
_BYTES = 2**32
"""Of the matrices of all images together; more images go one part after the other."""
_WIDE = {"average": torch.float64, "complete": torch.float32, "single": torch.int64}


@triton.jit
def _first_smaller(d, at, other_d, other_at):
    """The smaller distance with its index; the smaller index where distances are equal."""
    keep = (d < other_d) | ((d == other_d) & (at < other_at))
    return tl.where(keep, d, other_d), tl.where(keep, at, other_at)


@triton.jit
def _far(LINKAGE: tl.constexpr):
    """Farther than any cluster."""
    if LINKAGE == "single":
        far = tl.full([], 0x7F80000000000000, tl.int64)
    elif LINKAGE == "average":
        far = tl.full([], float("inf"), tl.float64)
    else:
        far = tl.full([], float("inf"), tl.float32)
    return far


@triton.jit
def _between(source, row, column, mask, N, OF_TOKENS: tl.constexpr, LINKAGE: tl.constexpr, BLOCK: tl.constexpr):
    """What is known between two clusters; what changes nothing where masked (distances are not negative)."""
    if not OF_TOKENS:
        far = 0
        if LINKAGE == "single":
            far = 0x7F80000000000000
        known = tl.load(source + row * N + column, mask=mask, other=far)
    else:
        known = tl.load(source + row * N + column, mask=mask, other=0.0) + 0.0  # no -0.0, whose bits sort last
        if LINKAGE == "average":
            known = known.to(tl.float64)
        elif LINKAGE == "single":
            ends = tl.minimum(row, column) * BLOCK + tl.maximum(row, column)
            known = (known.to(tl.int32, bitcast=True).to(tl.int64) << 32) + ends
            known = tl.where(mask, known, _far(LINKAGE))
    return known


@triton.jit
def _joined(x, y, LINKAGE: tl.constexpr):
    """What lies between a third cluster and two that merge."""
    if LINKAGE == "average":
        joined = x + y
    elif LINKAGE == "complete":
        joined = tl.maximum(x, y)
    else:
        joined = tl.minimum(x, y)
    return joined


@triton.jit
def _bits(value, LINKAGE: tl.constexpr):
    """Integers in the order of the distances."""
    if LINKAGE == "average":
        bits = value.to(tl.int64, bitcast=True)
    elif LINKAGE == "complete":
        bits = value.to(tl.int32, bitcast=True)
    else:
        bits = value
    return bits


@triton.jit
def _coarse_bits(value, LINKAGE: tl.constexpr):
    """The same in 31 bits: distances rounded to float32."""
    if LINKAGE == "single":
        bits = (value >> 32).to(tl.int32)
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _nth(x, n, BITS: tl.constexpr):
    """The n-th smallest, counted from 1, of integers of so many bits: the largest with fewer than n below it."""
    lower = tl.full([], 0, x.dtype)
    step = tl.full([], 1, x.dtype) << (BITS - 1)
    for _ in range(BITS):
        num_below = tl.sum((x < lower + step).to(tl.int32), axis=0)
        lower = tl.where(num_below < n, lower + step, lower)
        step = step >> 1
    return lower


@triton.jit
def _start_rows(distance, vectors, values, first_row, N, LINKAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Each token is a cluster; find its nearest neighbour in the distances of tokens."""
    row = first_row + tl.arange(0, ROWS)
    is_row = row < N
    best = tl.zeros((ROWS, COLUMNS), values.dtype.element_ty) + _far(LINKAGE)
    best_at = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        here = is_row[:, None] & (column < N)[None, :] & (row[:, None] != column[None, :])
        d = _between(distance, row[:, None], column[None, :], here, N, True, LINKAGE, BLOCK)
        nearer = here & (d < best)
        best = tl.where(nearer, d, best)
        best_at = tl.where(nearer, column[None, :], best_at)
    low, low_at = tl.reduce((best, best_at), 1, _first_smaller)
    tl.store(vectors + row, low_at, mask=is_row)
    tl.store(vectors + N + row, row, mask=is_row)
    tl.store(vectors + 2 * N + row, row, mask=is_row)
    tl.store(values + row, low, mask=is_row)
    tl.store(values + N + row, tl.zeros((ROWS,), values.dtype.element_ty) + _far(LINKAGE), mask=is_row)
    tl.store(values + 2 * N + row, tl.full((ROWS,), 1, values.dtype.element_ty), mask=is_row)


@triton.jit
def _pair(vectors, values, num, N, wanted, LINKAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Link the reciprocal nearest pairs among ``num`` clusters; list those that are left, and give their number."""
    nearest, up, rep, taker, taken = vectors, vectors + N, vectors + 2 * N, vectors + 3 * N, vectors + 4 * N
    value, height, count = values, values + N, values + 2 * N
    slot = tl.arange(0, BLOCK)
    alive = slot < num
    near = tl.load(nearest + slot, mask=alive, other=0)
    back = tl.load(nearest + near, mask=alive, other=-1)
    low = tl.load(value + slot, mask=alive, other=0)
    token = tl.load(rep + slot, mask=alive, other=0)
    size = tl.load(count + slot, mask=alive, other=0)
    near_token = tl.load(rep + near, mask=alive, other=0)
    near_size = tl.load(count + near, mask=alive, other=0)
    leads = alive & (back == slot) & (slot < near)
    gone = alive & (back == slot) & (slot > near)
    tl.store(up + token, near_token, mask=gone)
    tl.store(height + token, low, mask=gone)
    tl.debug_barrier()
    far = _coarse_bits(_far(LINKAGE), LINKAGE)
    linked = _coarse_bits(tl.load(height + slot, mask=slot < N, other=_far(LINKAGE)), LINKAGE)
    limit = far
    if tl.sum((linked < far).to(tl.int32), axis=0) >= wanted:
        limit = _nth(linked, wanted, 31)
    stays = alive & (gone == 0) & (_coarse_bits(low, LINKAGE) <= limit)
    place = tl.cumsum(stays.to(tl.int32), axis=0) - 1
    tl.store(taker + place, slot, mask=stays)
    tl.store(taken + place, tl.where(leads, near, -1), mask=stays)
    tl.store(rep + place, token, mask=stays)
    tl.store(count + place, tl.where(leads, size + near_size, size), mask=stays)
    num_left = tl.sum(stays.to(tl.int32), axis=0)
    # NaN is nobody's nearest: where no pair is left, nothing will change any more.
    return tl.where(tl.sum(leads.to(tl.int32), axis=0) > 0, num_left, 0)


@triton.jit
def _write_rows(source, target, vectors, values, first_row, num, N, OF_TOKENS: tl.constexpr, LINKAGE: tl.constexpr,
                BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Rows of the matrix between the clusters that are left, and the nearest neighbour (the first) of each."""
    taker, taken, count = vectors + 3 * N, vectors + 4 * N, values + 2 * N
    row = first_row + tl.arange(0, ROWS)
    is_row = row < num
    a = tl.load(taker + row, mask=is_row, other=0)[:, None]
    b = tl.load(taken + row, mask=is_row, other=-1)[:, None]
    size = tl.load(count + row, mask=is_row, other=1)[:, None]
    best = tl.zeros((ROWS, COLUMNS), values.dtype.element_ty) + _far(LINKAGE)
    best_at = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, num, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < num
        c = tl.load(taker + column, mask=is_column, other=0)[None, :]
        d = tl.load(taken + column, mask=is_column, other=-1)[None, :]
        here = is_row[:, None] & is_column[None, :] & (row[:, None] != column[None, :])
        ac = _between(source, a, c, here, N, OF_TOKENS, LINKAGE, BLOCK)
        bc = _between(source, b, c, here & (b >= 0), N, OF_TOKENS, LINKAGE, BLOCK)
        ad = _between(source, a, d, here & (d >= 0), N, OF_TOKENS, LINKAGE, BLOCK)
        bd = _between(source, b, d, here & (b >= 0) & (d >= 0), N, OF_TOKENS, LINKAGE, BLOCK)
        joined = _joined(_joined(ac, bc, LINKAGE), _joined(ad, bd, LINKAGE), LINKAGE)
        tl.store(target + row[:, None] * N + column[None, :], joined, mask=here)
        if LINKAGE == "average":
            joined = joined / (size * tl.load(count + column, mask=is_column, other=1)[None, :])
        nearer = here & (joined < best)
        best = tl.where(nearer, joined, best)
        best_at = tl.where(nearer, column[None, :], best_at)
    low, low_at = tl.reduce((best, best_at), 1, _first_smaller)
    tl.store(values + row, low, mask=is_row)
    tl.store(vectors + row, low_at, mask=is_row)


@triton.jit
def _label(vectors, values, labels, N, wanted, LINKAGE: tl.constexpr, BLOCK: tl.constexpr, JUMPS: tl.constexpr):
    """Keep the ``wanted`` first links by (height, upper end, lower end) and number the clusters by first member."""
    scratch = vectors + 3 * N
    token = tl.arange(0, BLOCK)
    is_token = token < N
    up = tl.load(vectors + N + token, mask=is_token, other=0)
    bits = _bits(tl.load(values + N + token, mask=is_token, other=_far(LINKAGE)), LINKAGE)
    num_bits: tl.constexpr = 31 if LINKAGE == "complete" else 63
    last = _nth(bits, wanted, num_bits)
    is_before = is_token & (bits < last)
    is_last = is_token & (bits == last)
    code = tl.where(is_last, up * BLOCK + token, BLOCK * BLOCK)
    last_code = _nth(code, wanted - tl.sum(is_before.to(tl.int32), axis=0), 2 * JUMPS + 1)
    root = tl.where(is_before | (is_last & (code <= last_code)), up, token)
    for _ in range(JUMPS):  # the end of each chain of links, by doubling the reach
        tl.store(scratch + token, root, mask=is_token)
        tl.debug_barrier()
        root = tl.load(scratch + root, mask=is_token, other=0)
        tl.debug_barrier()
    number = tl.cumsum((is_token & (root == token)).to(tl.int32), axis=0) - 1
    tl.store(scratch + token, number, mask=is_token)
    tl.debug_barrier()
    label = tl.load(scratch + root, mask=is_token, other=0)
    tl.store(labels + token, label.to(tl.int64), mask=is_token)


@triton.jit(do_not_specialize=["N"])
def _start_kernel(distance, vectors, values, left, N, LINKAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    if part == 0:
        tl.store(left + image, N)
    distance, vectors, values = distance + image * N * N, vectors + image * 5 * N, values + image * 3 * N
    _start_rows(distance, vectors, values, part * ROWS, N, LINKAGE, BLOCK, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["N", "wanted"])
def _pair_kernel(vectors, values, left, N, wanted, LINKAGE: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    num = tl.load(left + image)
    if num > 0:
        num = _pair(vectors + image * 5 * N, values + image * 3 * N, num, N, wanted, LINKAGE, BLOCK)
        tl.debug_barrier()
        tl.store(left + image, num)


@triton.jit(do_not_specialize=["N"])
def _rows_kernel(source, target, vectors, values, left, N, OF_TOKENS: tl.constexpr, LINKAGE: tl.constexpr,
                 BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    num = tl.load(left + image)
    first_row = tl.program_id(0) * ROWS
    if first_row < num:
        source, target = source + image * N * N, target + image * N * N
        vectors, values = vectors + image * 5 * N, values + image * 3 * N
        _write_rows(source, target, vectors, values, first_row, num, N, OF_TOKENS, LINKAGE, BLOCK, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["N", "wanted"])
def _finish_kernel(distance, source, target, vectors, values, left, labels, N, wanted, IS_WHOLE: tl.constexpr,
                   LINKAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   JUMPS: tl.constexpr):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    source, target = source + image * N * N, target + image * N * N
    vectors, values = vectors + image * 5 * N, values + image * 3 * N
    num = N
    if IS_WHOLE:
        distance += image * N * N
        for first_row in range(0, N, ROWS):
            _start_rows(distance, vectors, values, first_row, N, LINKAGE, BLOCK, ROWS, COLUMNS)
        tl.debug_barrier()
        num = _pair(vectors, values, N, N, wanted, LINKAGE, BLOCK)
        tl.debug_barrier()
        for first_row in range(0, num, ROWS):
            _write_rows(distance, source, vectors, values, first_row, num, N, True, LINKAGE, BLOCK, ROWS, COLUMNS)
        tl.debug_barrier()
    else:
        num = tl.load(left + image)
    while num > 0:
        num = _pair(vectors, values, num, N, wanted, LINKAGE, BLOCK)
        tl.debug_barrier()
        for first_row in range(0, num, ROWS):
            _write_rows(source, target, vectors, values, first_row, num, N, False, LINKAGE, BLOCK, ROWS, COLUMNS)
        tl.debug_barrier()
        source, target = target, source
    _label(vectors, values, labels + image * N, N, wanted, LINKAGE, BLOCK, JUMPS)


def labels(distance: Tensor, k: int, linkage: str) -> Tensor:
    """Labels of ``k`` clusters per image, numbered by their first member.

    Args:
        distance: (B, N, N) float32, symmetric, not negative, contiguous; N <= 4096.
        k: number of clusters, 1 to N.
        linkage: "average", "complete" or "single".

    Returns:
        (B, N) int64.
    """
    B, N, _ = distance.shape
    if k == N or B == 0:
        return torch.arange(N, device=distance.device).repeat(B, 1)
    if N <= WHOLE and linkage != "single":
        return whole_kernel.labels(distance, k, linkage)
    num_images = max(1, _BYTES // (2 * N * N * _WIDE[linkage].itemsize))
    parts = [_labels(part, N - k, linkage) for part in distance.split(num_images)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _labels(distance: Tensor, wanted: int, linkage: str) -> Tensor:
    B, N, _ = distance.shape
    device = distance.device
    labels = torch.empty(B, N, dtype=torch.int64, device=device)
    vectors = torch.empty(B, 5, N, dtype=torch.int32, device=device)  # nearest, up, rep, who takes, who is taken
    values = torch.empty(B, 3, N, dtype=_WIDE[linkage], device=device)  # distance to the nearest, heights, sizes
    left = torch.empty(B, dtype=torch.int32, device=device)  # clusters that are left
    source, target = torch.empty(2, B, N, N, dtype=_WIDE[linkage], device=device)
    block = triton.next_power_of_2(N)
    common = {"LINKAGE": linkage, "BLOCK": block}
    tiles = {**common, "ROWS": 4, "COLUMNS": 256, "num_warps": 4}
    warps = max(8, block // 128)
    if N > WHOLE:
        parts = triton.cdiv(N, tiles["ROWS"]), B
        launch(_start_kernel, parts, (distance, vectors, values, left), (N,), tiles)
        matrices = distance, source, target
        for r in range(_num_spread(N, N - wanted)):
            launch(_pair_kernel, (B,), (vectors, values, left), (N, wanted), {**common, "num_warps": warps})
            here, there, after = matrices
            launch(_rows_kernel, parts, (here, there, vectors, values, left), (N,), {"OF_TOKENS": r == 0, **tiles})
            matrices = (there, after, there)
        source, target, _ = matrices
    tensors = distance, source, target, vectors, values, left, labels
    settings = {"IS_WHOLE": N <= WHOLE, **common, "ROWS": 8, "COLUMNS": min(128, block), "JUMPS": (N - 1).bit_length()}
    settings |= {"num_warps": min(16, warps)} | ({} if interpreted() else {"maxnreg": 128})  # so that two fit
    launch(_finish_kernel, (B,), tensors, (N, wanted), settings)
    return labels


def _num_spread(num_tokens: int, k: int) -> int:
    """Rounds over the whole device. One leaves about 0.8 of the clusters, and below ``k`` few of them count."""
    return min(12, 2 + math.ceil(2.5 * math.log2(num_tokens / k)))
