"""Cosine distances between the tokens of each image on the GPU, from features to a symmetric matrix in one launch.

A program makes one tile of the lower triangle: it scales its rows and columns to unit length, multiplies them, turns
products into distances and writes the tile and its mirror image, so the matrix is symmetric to the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
# Float32 as three TF32 products: the tensor cores' way to the same accuracy (the tests hold both to one bound).
_PRECISION = "tf32x3"


@triton.jit
def _unit(features, token, channel, N, C, length):
    """Features of some tokens (tokens, channels) divided by ``length``."""
    inside = (token < N)[:, None] & (channel < C)[None, :]
    x = tl.load(features + token[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    return x / length[:, None]


@triton.jit
def _length(features, token, N, C, BLOCK_C: tl.constexpr):
    """Length of the features of some tokens, at least 1e-12."""
    square = tl.zeros(token.shape, tl.float32)
    for first in range(0, C, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)
        inside = (token < N)[:, None] & (channel < C)[None, :]
        x = tl.load(features + token[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(x * x, axis=1)
    return tl.maximum(tl.sqrt_rn(square), 1e-12)


@triton.jit
def _distance_kernel(features, distance, N, C, TILE: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    features += image * N * C
    distance += image * N * N
    # The t-th tile of the lower triangle, row by row.
    t = tl.program_id(1)
    i = 0
    while (i + 1) * (i + 2) // 2 <= t:
        i += 1
    j = t - i * (i + 1) // 2
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    row_length = _length(features, row, N, C, BLOCK_C)
    column_length = _length(features, column, N, C, BLOCK_C)
    product = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, C, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)
        a = _unit(features, row, channel, N, C, row_length)
        b = _unit(features, column, channel, N, C, column_length)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    d = tl.minimum(tl.maximum(1.0 - product, 0.0), 2.0)
    if i == j:
        d = tl.where(row[:, None] == column[None, :], 0.0, tl.minimum(d, tl.trans(d)))
    inside = (row < N)[:, None] & (column < N)[None, :]
    tl.store(distance + row[:, None] * N + column[None, :], d, mask=inside)
    if i != j:
        tl.store(distance + column[:, None] * N + row[None, :], tl.trans(d), mask=tl.trans(inside))


def cosine_distance(features: Tensor) -> Tensor:
    """(B, N, C) features of any floating type up to float32 -> (B, N, N) float32 distances."""
    B, N, C = features.shape
    distance = torch.empty(B, N, N, dtype=torch.float32, device=features.device)
    if distance.numel() == 0:
        return distance
    tiles = triton.cdiv(N, _TILE)
    block_c = min(64, max(16, triton.next_power_of_2(C)))
    _distance_kernel[(B, tiles * (tiles + 1) // 2)](features.contiguous(), distance, N, C, _TILE, block_c, _PRECISION)
    return distance
