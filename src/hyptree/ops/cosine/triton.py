"""Cosine distances between the tokens of each image on the GPU: two launches from features to a symmetric matrix.

The first scales features to unit length. In the second a program makes one tile of the lower triangle: it multiplies,
turns products into distances and writes the tile and its mirror image, so the matrix is symmetric to the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.ops.backend import has_data

_TOKENS, _TILE = 16, 64
# Float32 as three TF32 products: the tensor cores' way to the same accuracy (the tests hold both to one bound).
_PRECISION = "tf32x3"


@triton.jit
def _unit_kernel(features, unit, num_tokens, C, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    at = token[:, None] * C
    is_token = (token < num_tokens)[:, None]
    square = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, C, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)[None, :]
        x = tl.load(features + at + channel, mask=is_token & (channel < C), other=0.0).to(tl.float32)
        square += tl.sum(x * x, axis=1)
    length = tl.maximum(tl.sqrt_rn(square), 1e-12)[:, None]
    for first in range(0, C, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)[None, :]
        x = tl.load(features + at + channel, mask=is_token & (channel < C), other=0.0).to(tl.float32)
        tl.store(unit + at + channel, x / length, mask=is_token & (channel < C))


@triton.jit
def _distance_kernel(unit, distance, N, C, TILE: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    unit += image * N * C
    distance += image * N * N
    # The t-th tile of the lower triangle, row by row. Only the first axis of a grid goes beyond 65535.
    t = tl.program_id(0)
    i = 0
    while (i + 1) * (i + 2) // 2 <= t:
        i += 1
    j = t - i * (i + 1) // 2
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
    product = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, C, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)
        is_channel = channel < C
        a_mask = (row < N)[:, None] & is_channel[None, :]
        b_mask = is_channel[:, None] & (column < N)[None, :]
        a = tl.load(unit + wide_row[:, None] * C + channel[None, :], mask=a_mask, other=0.0)
        b = tl.load(unit + wide_column[None, :] * C + channel[:, None], mask=b_mask, other=0.0)
        product = tl.dot(a, b, product, input_precision=PRECISION)
    d = tl.minimum(tl.maximum(1.0 - product, 0.0), 2.0)
    if i == j:
        d = tl.where(row[:, None] == column[None, :], 0.0, tl.minimum(d, tl.trans(d)))
    inside = (row < N)[:, None] & (column < N)[None, :]
    tl.store(distance + wide_row[:, None] * N + column[None, :], d, mask=inside)
    if i != j:
        tl.store(distance + wide_column[:, None] * N + row[None, :], tl.trans(d), mask=tl.trans(inside))


def cosine_distance(features: Tensor) -> Tensor:
    """(B, N, C) features of any floating type up to float32 -> (B, N, N) float32 distances."""
    B, N, C = features.shape
    distance = torch.empty(B, N, N, dtype=torch.float32, device=features.device)
    if distance.numel() == 0 or not has_data(features):
        return distance
    unit = torch.empty(B, N, C, dtype=torch.float32, device=features.device)
    block_c = min(64, max(16, triton.next_power_of_2(C)))
    _unit_kernel[(triton.cdiv(B * N, _TOKENS),)](features.contiguous(), unit, B * N, C, _TOKENS, block_c)
    tiles = triton.cdiv(N, _TILE)
    _distance_kernel[(tiles * (tiles + 1) // 2, B)](unit, distance, N, C, _TILE, block_c, _PRECISION)
    return distance
