"""The end of a mixer in one pass over the map, and one and a small one for its gradient.

A map of 56 x 56 x 64 of 128 samples: 51 MB of bfloat16 and 103 MB of float32 are read and 103 MB written, 61
microseconds at 4.2 TB/s; its gradient reads 154 MB and writes 51 MB, 49 microseconds. A program of the gradient takes
some channels of one window, and so adds up what the window's vector gets; the sums of all windows are small.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data
from hyptree.ops.windows import Windows

TILE, CHANNELS = 2048, 128
"""Numbers that a program holds of each map, and most channels of them."""
SUMS = 4096
"""Numbers of a tile of windows and channels there."""


@triton.jit
def _factors(sums, more, sample, OVER: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_MORE: tl.constexpr):
    """``1 / sqrt(variance + eps)``, mean, and whether the variance has a gradient."""
    times, mean, varies = 1.0, 0.0, False
    if HAS_NORM:
        mean = tl.load(sums + 2 * sample)
        square = tl.load(sums + 2 * sample + 1)
        if HAS_MORE:
            mean += tl.load(more + 2 * sample)
            square += tl.load(more + 2 * sample + 1)
        mean *= OVER
        variance = square * OVER - mean * mean
        varies = variance >= 0.0
        times = 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + EPS)
    return times, mean, varies


@triton.jit
def _add_kernel(own, shared, sums, more, row_sums, shift, residual, out, TILES, N: tl.constexpr, HEIGHT: tl.constexpr,
                WIDTH: tl.constexpr, GRID: tl.constexpr, S: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
                TOP: tl.constexpr, LEFT: tl.constexpr, OVER: tl.constexpr, EPS: tl.constexpr, HAS_SHARED: tl.constexpr,
                HAS_NORM: tl.constexpr, HAS_MORE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PATCHES: tl.constexpr,
                CHANNELS: tl.constexpr):  # fmt: skip
    sample = (tl.program_id(0) // TILES).to(tl.int64)
    patch = (tl.program_id(0) % TILES) * PATCHES + tl.arange(0, PATCHES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = channel < N
    mask = (patch < HEIGHT * WIDTH)[:, None] & within[None, :]
    place = (sample * (HEIGHT * WIDTH) + patch)[:, None] * N + channel[None, :]
    value = tl.load(own + place, mask=mask, other=0.0).to(tl.float32)
    times, mean, _ = _factors(sums, more, sample, OVER, EPS, HAS_NORM, HAS_MORE)
    if HAS_SHARED:
        window = (patch // WIDTH + TOP) // WY * GRID + (patch % WIDTH + LEFT) // WX
        at = (sample * S + window)[:, None] * N + channel[None, :]
        value += tl.load(shared + at, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(shift + channel, mask=within, other=0.0).to(tl.float32)
    if HAS_NORM:
        added -= times * mean * tl.load(row_sums + channel, mask=within, other=0.0)
    value = value * times + added[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, value, mask=mask)


@triton.jit
def _add_grad_kernel(own, shared, sums, more, grad, grad_own, of_windows, parts, N: tl.constexpr, HEIGHT: tl.constexpr,
                     WIDTH: tl.constexpr, GRID: tl.constexpr, S: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
                     TOP: tl.constexpr, LEFT: tl.constexpr, OVER: tl.constexpr, EPS: tl.constexpr,
                     HAS_SHARED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_MORE: tl.constexpr, PATCHES: tl.constexpr,
                     CHANNELS: tl.constexpr):  # fmt: skip
    sample = (tl.program_id(0) // S).to(tl.int64)
    window = tl.program_id(0) % S
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    within = channel < N
    times, _, _ = _factors(sums, more, sample, OVER, EPS, HAS_NORM, HAS_MORE)
    total = tl.zeros((CHANNELS,), tl.float32)
    products = tl.zeros((CHANNELS,), tl.float32)
    for first in range(0, WY * WX, PATCHES):
        local = first + tl.arange(0, PATCHES)
        y = (window // GRID) * WY + local // WX - TOP
        x = (window % GRID) * WX + local % WX - LEFT
        inside = (local < WY * WX) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        mask = inside[:, None] & within[None, :]
        place = (sample * (HEIGHT * WIDTH) + tl.where(inside, y * WIDTH + x, 0))[:, None] * N + channel[None, :]
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(g, axis=0)
        if HAS_NORM:
            products += tl.sum(g * tl.load(own + place, mask=mask, other=0.0).to(tl.float32), axis=0)
        tl.store(grad_own + place, g * times, mask=mask)
    at = (sample * S + window) * N + channel
    tl.store(of_windows + at, total, mask=within)
    if HAS_NORM:
        if HAS_SHARED:
            products += total * tl.load(shared + at, mask=within, other=0.0).to(tl.float32)
        tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(products, axis=0))


@triton.jit
def _sums_kernel(of_windows, parts, sums, more, row_sums, grad_shared, of_samples, grad_sums, PARTS, N: tl.constexpr,
                 S: tl.constexpr, OVER: tl.constexpr, EPS: tl.constexpr, HAS_SHARED: tl.constexpr,
                 HAS_NORM: tl.constexpr, HAS_MORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    within = channel < N
    times, mean, varies = _factors(sums, more, sample, OVER, EPS, HAS_NORM, HAS_MORE)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, S, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < S)[:, None] & within[None, :]
        at = (sample * S + row)[:, None] * N + channel[None, :]
        g = tl.load(of_windows + at, mask=mask, other=0.0)
        total += tl.sum(g, axis=0)
        if HAS_SHARED:
            tl.store(grad_shared + at, g * times, mask=mask)
    tl.store(of_samples + sample * 2 * N + channel, total, mask=within)
    tl.store(of_samples + (sample * 2 + 1) * N + channel, -times * mean * total, mask=within)
    if HAS_NORM:
        product = 0.0
        for first in range(0, PARTS, 128):
            part = first + tl.arange(0, 128)
            product += tl.sum(tl.load(parts + sample * PARTS + part, mask=part < PARTS, other=0.0), axis=0)
        along = tl.sum(total * tl.load(row_sums + channel, mask=within, other=0.0), axis=0)
        to_times = tl.where(varies, (product - mean * along) * times * times * times, 0.0)
        tl.store(grad_sums + 2 * sample, (mean * to_times - times * along) * OVER)
        tl.store(grad_sums + 2 * sample + 1, -0.5 * to_times * OVER)


Norm = tuple[Tensor, Tensor | None, Tensor, int, float]
"""Sums and further sums of samples (B, 2), sums of the weight's rows (n,), numbers of a sample, and what keeps its
variance from zero."""


class Plan(NamedTuple):
    """The constants of the three kernels, and the programs side by side of those that go over the map."""

    add: dict[str, Any]
    add_grad: dict[str, Any]
    sums: dict[str, Any]
    across: int


@functools.lru_cache(1024)
def plan(windows: Windows, n: int, norm: tuple[int, float] | None, more: bool, shared: bool, residual: bool) -> Plan:
    """How a map of ``n`` channels is gone through; ``norm``: a sample's numbers, what is added to its variance."""
    (height, width), (rows, columns), (wy, wx), (top, left) = (
        windows.size, windows.grid, windows.window, windows.offset
    )  # fmt: skip
    block = min(CHANNELS, triton.next_power_of_2(n))
    if n % block:  # as few empty ones as can be
        block = min((block, block // 2), key=lambda size: -(-n // size) * size)
    count, over, eps = rows * columns, 1 / norm[0] if norm else 1.0, norm[1] if norm else 0.0
    has = {"HAS_SHARED": shared, "HAS_NORM": norm is not None, "HAS_MORE": more}
    few = {"N": n, "S": count, "OVER": over, "EPS": eps, **has, "num_warps": 4}
    cut = {"HEIGHT": height, "WIDTH": width, "GRID": columns, "WY": wy, "WX": wx, "TOP": top, "LEFT": left}
    patches = TILE // block
    add = few | cut | {"HAS_RESIDUAL": residual, "PATCHES": patches, "CHANNELS": block}
    add_grad = few | cut | {"PATCHES": min(patches, triton.next_power_of_2(wy * wx)), "CHANNELS": block}
    whole = triton.next_power_of_2(n)
    sums = few | {"ROWS": max(1, min(SUMS // whole, triton.next_power_of_2(count))), "BLOCK": whole}
    return Plan(add, add_grad, sums, triton.cdiv(n, block))


def forward(
    own: Tensor, shared: Tensor | None, windows: Windows, norm: Norm | None,
    shift: Tensor, residual: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``residual + times * (own + shared - mean * row_sums) + shift`` in ``dtype``; contiguous products (B, H, W, n) of
    the map and (B, rows, columns, n) of what windows share."""
    out = torch.empty_like(own, dtype=dtype)
    if not has_data(own) or not own.numel():
        return out
    how = _plan(own, shared, windows, norm, residual is not None)
    sums, more, row_sums = _norm_inputs(norm, shift)
    maps = (own, own if shared is None else shared)
    tensors = (*maps, sums, more, row_sums, shift, own if residual is None else residual, out)
    tiles = triton.cdiv(windows.size[0] * windows.size[1], how.add["PATCHES"])
    launch(_add_kernel, (own.shape[0] * tiles, how.across), tensors, (tiles,), how.add)
    return out


def backward(
    own: Tensor, shared: Tensor | None, windows: Windows, norm: Norm | None,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of own, shared and sums, and (2, n) those of shift and of the sums of rows."""
    (B, _, _, n), count = own.shape, windows.grid[0] * windows.grid[1]
    how = _plan(own, shared, windows, norm, False)
    grad_own, of_windows = torch.empty_like(own), own.new_empty(B, count, n, dtype=torch.float32)
    grad_shared = None if shared is None else torch.empty_like(shared)
    grad_sums = None if norm is None else own.new_empty(B, 2, dtype=torch.float32)
    parts = own.new_empty(B, count * how.across, dtype=torch.float32)
    of_samples = own.new_empty(B, 2, n, dtype=torch.float32)
    if has_data(own) and own.numel():
        sums, more, row_sums = _norm_inputs(norm, parts)
        tensors = (own, own if shared is None else shared, sums, more, grad, grad_own, of_windows, parts)
        launch(_add_grad_kernel, (B * count, how.across), tensors, (), how.add_grad)
        inputs = (of_windows, parts, sums, more, row_sums)
        outputs = (x if x is not None else of_samples for x in (grad_shared, of_samples, grad_sums))
        launch(_sums_kernel, (B,), (*inputs, *outputs), (count * how.across,), how.sums)
    return grad_own, grad_shared, grad_sums, of_samples.sum(0)


def _plan(own: Tensor, shared: Tensor | None, windows: Windows, norm: Norm | None, residual: bool) -> Plan:
    has_more = norm is not None and norm[1] is not None
    return plan(windows, own.shape[-1], norm and norm[3:], has_more, shared is not None, residual)


def _norm_inputs(norm: Norm | None, other: Tensor) -> tuple[Tensor, ...]:
    """Sums, further sums and sums of rows, or anything in place of what there is not."""
    if norm is None:
        return other, other, other
    return norm[0], norm[0] if norm[1] is None else norm[1], norm[2]
