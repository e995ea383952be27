"""The norm of a map by many programs per sample: sums of parts first, then one pass that merges them and writes.

A map of 56 x 56 x 64 has 200704 numbers and a batch 128 of them: a program per sample, as layer norms have it, leaves
most of a GPU waiting. Float32 in and bfloat16 out, the forward reads 4 bytes of a number twice and writes 2, the
backward reads 4 twice (the normed map and its gradient in bfloat16) and writes 4: 61 and 73 microseconds at 4.2 TB/s
for such a batch. The second pass goes through the samples from the last to the first, so what the first pass read last
is still in the cache; maps of 14 x 14 x 320 are there altogether. Small maps are left to one program in one launch.

Partial sums are written by one program each and merged by all in one order: results are the same every time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data

TILE, TILE_WARPS = 4096, 4
"""Numbers that a program holds of a large sample: eight loads of 16 bytes for each thread in float32."""
WHOLE, PIECE = 32768, 16384
"""Numbers of the largest sample that is left to one program: 32 registers of each of 1024 threads; and what of a normed
map and its gradient such a program holds at a time."""
MAX_PARTS = 256
"""Partial sums of a sample at most, which every program of the second pass reads again."""


@triton.jit
def _moments_kernel(x, parts, N, PARTS, TURNS, BLOCK: tl.constexpr):
    """Mean and sum of squares around it of TURNS tiles, one after the other."""
    program = tl.program_id(0)
    sample = (program // PARTS).to(tl.int64)
    part = program % PARTS
    mean, spread, seen = 0.0, 0.0, 0.0
    for turn in range(TURNS):
        first = (part * TURNS + turn) * BLOCK
        column = first + tl.arange(0, BLOCK)
        inside = column < N
        value = tl.load(x + sample * N + column, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(tl.maximum(N - first, 0), BLOCK).to(tl.float32)
        here = tl.sum(value, axis=0) / tl.maximum(count, 1.0)
        apart = tl.where(inside, value - here, 0.0)
        step = here - mean
        share = count / tl.maximum(seen + count, 1.0)
        spread += tl.sum(apart * apart, axis=0) + step * step * seen * share
        mean += step * share
        seen += count
    tl.store(parts + sample * 2 * PARTS + part, mean)
    tl.store(parts + (sample * 2 + 1) * PARTS + part, spread)


@triton.jit
def _normalise_kernel(x, parts, out, rstd, N, TILES, PARTS, TURNS, EPS: tl.constexpr, PADDED: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what the first pass read last is still in the cache
    sample = (program // TILES).to(tl.int64)
    tile = program % TILES
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(x + sample * N + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    part = tl.arange(0, PADDED)
    is_part = part < PARTS
    means = tl.load(parts + sample * 2 * PARTS + part, mask=is_part, other=0.0)
    spreads = tl.load(parts + (sample * 2 + 1) * PARTS + part, mask=is_part, other=0.0)
    counts = tl.where(is_part, tl.minimum(N - part * (TURNS * BLOCK), TURNS * BLOCK), 0).to(tl.float32)
    mean = tl.sum(means * counts, axis=0) / N
    apart = means - mean
    variance = tl.sum(spreads + counts * apart * apart, axis=0) / N
    scale = 1.0 / tl.sqrt(variance + EPS)
    tl.store(out + sample * N + column, (value - mean) * scale, mask=inside)
    if tile == 0:
        tl.store(rstd + sample, scale)


@triton.jit
def _whole_kernel(x, out, rstd, N, EPS: tl.constexpr, BLOCK: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(x + sample * N + column, mask=inside, other=0.0).to(tl.float32)
    apart = tl.where(inside, value - tl.sum(value, axis=0) / N, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, axis=0) / N + EPS)
    tl.store(out + sample * N + column, apart * scale, mask=inside)
    tl.store(rstd + sample, scale)


@triton.jit
def _pair(normed, grad, place, inside):
    """Normed numbers and their gradients in float32."""
    row = tl.load(normed + place, mask=inside, other=0.0).to(tl.float32)
    return row, tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _along(total, scale, grad_rstd, sample, N, HAS_RSTD: tl.constexpr):
    """Factor of the normed map in the gradient, from the sum of their products."""
    if HAS_RSTD:
        total += scale * tl.load(grad_rstd + sample).to(tl.float32)
    return total / N


@triton.jit
def _sums_kernel(normed, grad, parts, N, PARTS, TURNS, BLOCK: tl.constexpr):
    """Sums of the gradient and of its products with the normed map over TURNS tiles."""
    program = tl.program_id(0)
    sample = (program // PARTS).to(tl.int64)
    part = program % PARTS
    sum_grad, sum_product = 0.0, 0.0
    for turn in range(TURNS):
        column = (part * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        row, g = _pair(normed, grad, sample * N + column, column < N)
        sum_grad += tl.sum(g, axis=0)
        sum_product += tl.sum(g * row, axis=0)
    tl.store(parts + sample * 2 * PARTS + part, sum_grad)
    tl.store(parts + (sample * 2 + 1) * PARTS + part, sum_product)


@triton.jit
def _grad_kernel(normed, rstd, grad, grad_rstd, parts, grad_x, N, TILES, PARTS, HAS_RSTD: tl.constexpr,
                 PADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sample = (program // TILES).to(tl.int64)
    column = (program % TILES) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    row, g = _pair(normed, grad, sample * N + column, inside)
    scale = tl.load(rstd + sample)
    part = tl.arange(0, PADDED)
    is_part = part < PARTS
    mean = tl.sum(tl.load(parts + sample * 2 * PARTS + part, mask=is_part, other=0.0), axis=0) / N
    total = tl.sum(tl.load(parts + (sample * 2 + 1) * PARTS + part, mask=is_part, other=0.0), axis=0)
    along = _along(total, scale, grad_rstd, sample, N, HAS_RSTD)
    tl.store(grad_x + sample * N + column, scale * (g - mean - row * along), mask=inside)


@triton.jit
def _whole_grad_kernel(normed, rstd, grad, grad_rstd, grad_x, N, HAS_RSTD: tl.constexpr, BLOCK: tl.constexpr):
    """In pieces, read once more from the cache: two maps in registers would be too many."""
    sample = tl.program_id(0).to(tl.int64)
    scale = tl.load(rstd + sample)
    sums = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        row, g = _pair(normed, grad, sample * N + column, column < N)
        sums += g
        products += g * row
    along = _along(tl.sum(products, axis=0), scale, grad_rstd, sample, N, HAS_RSTD)
    mean = tl.sum(sums, axis=0) / N
    for first in range(0, N, BLOCK):
        column = first + tl.arange(0, BLOCK)
        row, g = _pair(normed, grad, sample * N + column, column < N)
        tl.store(grad_x + sample * N + column, scale * (g - mean - row * along), mask=column < N)


@functools.cache
def _whole(N: int, most: int) -> dict[str, int]:
    block = min(most, triton.next_power_of_2(N))
    return {"BLOCK": block, "num_warps": max(1, min(32, block // 512))}


def _cut(N: int) -> tuple[int, int, int]:
    """Tiles of a sample, tiles of a part, parts."""
    tiles = -(-N // TILE)
    turns = -(-tiles // MAX_PARTS)
    return tiles, turns, -(-tiles // turns)


def forward(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, N) contiguous -> the normed rows (B, N) in ``dtype`` and ``1 / sqrt(variance + eps)`` (B,)."""
    B, N = x.shape
    out = torch.empty(B, N, dtype=dtype, device=x.device)
    rstd = torch.empty(B, dtype=torch.float32, device=x.device)
    if not has_data(x) or not x.numel():
        return out, rstd
    if N <= WHOLE:
        launch(_whole_kernel, (B,), (x, out, rstd), (N,), {"EPS": eps, **_whole(N, WHOLE)})
        return out, rstd
    tiles, turns, count = _cut(N)
    parts = torch.empty(B, 2, count, dtype=torch.float32, device=x.device)
    sizes: dict[str, Any] = {"BLOCK": TILE, "num_warps": TILE_WARPS}
    launch(_moments_kernel, (B * count,), (x, parts), (N, count, turns), sizes)
    settings = {"EPS": eps, "PADDED": triton.next_power_of_2(count), **sizes}
    launch(_normalise_kernel, (B * tiles,), (x, parts, out, rstd), (N, tiles, count, turns), settings)
    return out, rstd


def backward(normed: Tensor, rstd: Tensor, grad: Tensor, dtype: torch.dtype, grad_rstd: Tensor | None) -> Tensor:
    """Gradient (B, N) of the map, in ``dtype``, from that of the normed rows (B, N) and of ``rstd`` (B,)."""
    B, N = normed.shape
    grad_x = torch.empty(B, N, dtype=dtype, device=normed.device)
    if not has_data(normed) or not normed.numel():
        return grad_x
    to_rstd, has_rstd = rstd if grad_rstd is None else grad_rstd.contiguous(), grad_rstd is not None
    if N <= WHOLE:
        settings = {"HAS_RSTD": has_rstd, **_whole(N, PIECE)}
        launch(_whole_grad_kernel, (B,), (normed, rstd, grad, to_rstd, grad_x), (N,), settings)
        return grad_x
    tiles, turns, count = _cut(N)
    parts = torch.empty(B, 2, count, dtype=torch.float32, device=normed.device)
    sizes: dict[str, Any] = {"BLOCK": TILE, "num_warps": TILE_WARPS}
    launch(_sums_kernel, (B * count,), (normed, grad, parts), (N, count, turns), sizes)
    settings = {"HAS_RSTD": has_rstd, "PADDED": triton.next_power_of_2(count), **sizes}
    launch(_grad_kernel, (B * tiles,), (normed, rstd, grad, to_rstd, parts, grad_x), (N, tiles, count), settings)
    return grad_x
