"""A tree of queries reads tokens, and a global feature reads the tree: one launch each.

What is multiplied is small (60 nodes of 128 channels) and follows one product upon another: as single products they are
some 60 launches that wait for each other. Here a program keeps the nodes of one image in registers from the first
product to the last, and another the global features of 16 images through all levels; weights come out of the L2 cache.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import has_data, interpreted
from ..launch import launch
from .reference import EPS, RATIO

TOKENS = 64
"""Tokens that all nodes of an image read at a time."""
ROWS = tl.constexpr(16)
"""Of the products of the global features: tensor cores multiply no fewer."""
IMAGES, COLUMNS, STAGES = 4, 128, 3
"""Most images whose global features one program holds; nodes of all its images."""


@triton.jit
def _standard(x, W: tl.constexpr, EPS: tl.constexpr):
    """Rows of ``x`` with mean zero and deviation one."""
    x -= (tl.sum(x, axis=1) / W)[:, None]
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / W + EPS)[:, None]


@triton.jit
def _norm(x, vectors, W: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of the rows of ``x``; ``vectors`` points at its gain, the shift follows."""
    column = tl.arange(0, W)
    return _standard(x, W, EPS) * tl.load(vectors + column)[None, :] + tl.load(vectors + W + column)[None, :]


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``; "ieee" is for float32, and for Triton's interpreter, which knows no products of bfloat16."""
    if PRECISION == "ieee":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _turned(matrix, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr):
    """(K, N) the transpose of the first N rows and K columns of a matrix whose rows are ``STRIDE`` apart."""
    return tl.load(matrix + tl.arange(0, N)[None, :] * STRIDE + tl.arange(0, K)[:, None])


@triton.jit
def _linear(x, matrix, vector, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """``x`` (R, K) through the N rows of a matrix, and a bias; float32."""
    return _dot(x, _turned(matrix, N, K, K), None, PRECISION) + tl.load(vector + tl.arange(0, N))[None, :]


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _add_mlp(x, gain, mlp_in, mlp_out, vector_in, vector_out, W: tl.constexpr, HIDDEN: tl.constexpr,
             PIECE: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """``x + MLP(norm(x))``, PIECE hidden channels at a time."""
    dtype = mlp_in.dtype.element_ty
    h = _norm(x, gain, W, EPS).to(dtype)
    x += tl.load(vector_out + tl.arange(0, W))[None, :]
    for first in range(0, HIDDEN, PIECE):
        inner = _gelu(_linear(h, mlp_in + first * W, vector_in + first, PIECE, W, PRECISION)).to(dtype)
        x = _dot(inner, _turned(mlp_out + first, W, PIECE, HIDDEN), x, PRECISION)
    return x


@triton.jit
def _read_tree_kernel(queries, key_value, matrices, vectors, bias, nodes, out, M, NODES: tl.constexpr,
                      BIAS_STRIDE: tl.constexpr, LEAVES: tl.constexpr, DEPTH: tl.constexpr, W: tl.constexpr,
                      HEADS: tl.constexpr, SCALE: tl.constexpr, COSINE: tl.constexpr, ROWS: tl.constexpr,
                      TOKENS: tl.constexpr, HIDDEN: tl.constexpr, EPS: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    D: tl.constexpr = W // HEADS
    dtype = matrices.dtype.element_ty
    image = tl.program_id(0).to(tl.int64)
    row, d, column = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, W)
    is_node = row < NODES
    key_value += image * M * 2 * W

    cross_out, self_in = matrices, matrices + W * W
    self_out, mlp_in = matrices + 4 * W * W, matrices + 5 * W * W
    mlp_out, level_key_value = mlp_in + HIDDEN * W, mlp_in + 2 * HIDDEN * W
    self_norm, self_in_shift, self_out_shift, mlp_norm = vectors + W, vectors + 3 * W, vectors + 6 * W, vectors + 7 * W
    mlp_in_shift, mlp_out_shift = vectors + 9 * W, vectors + 9 * W + HIDDEN
    out_norm, level_shift = mlp_out_shift + W, mlp_out_shift + 3 * W

    # Every head reads the tokens; what it read goes through its columns of the product that follows.
    x = tl.zeros((ROWS, W), tl.float32) + tl.load(vectors + column)[None, :]
    for head in range(HEADS):
        q = tl.load(queries + row[:, None] * W + head * D + d[None, :], mask=is_node[:, None], other=0.0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        read = tl.zeros((ROWS, D), tl.float32)
        for first in range(0, M, TOKENS):
            token = first + tl.arange(0, TOKENS)
            is_token = token < M
            at = key_value + token * (2 * W) + head * D
            k = tl.load(at[None, :] + d[:, None], mask=is_token[None, :], other=0.0)
            if COSINE:
                wide = k.to(tl.float32)
                length = tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=0)), 1e-12)
                k = (wide / length[None, :]).to(k.dtype)
            v = tl.load(at[:, None] + W + d[None, :], mask=is_token[:, None], other=0.0)
            scores = SCALE * _dot(q, k, None, PRECISION)
            scores = tl.where(is_token[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            read = _dot(weights.to(v.dtype), v, read * shrink[:, None], PRECISION)
            top = higher
        read = (read / total[:, None]).to(dtype)
        x = _dot(read, _turned(cross_out + head * D, W, D, W), x, PRECISION)

    # Nodes look at those of their own level. Rows that are no nodes look at all nodes, and nobody reads them.
    h = _norm(x, self_norm, W, EPS).to(dtype)
    x += tl.load(self_out_shift + column)[None, :]
    near = tl.load(
        bias + row[:, None] * BIAS_STRIDE + row[None, :], mask=is_node[:, None] & is_node[None, :], other=0.0
    )
    near = tl.where(is_node[None, :], near.to(tl.float32), float("-inf"))
    for head in range(HEADS):
        own, shift = self_in + head * D * W, self_in_shift + head * D
        q = _linear(h, own, shift, D, W, PRECISION).to(dtype)
        k = _linear(h, own + W * W, shift + W, D, W, PRECISION).to(dtype)
        v = _linear(h, own + 2 * W * W, shift + 2 * W, D, W, PRECISION).to(dtype)
        scores = _dot(q, tl.trans(k), None, PRECISION) * (1.0 / tl.sqrt(D * 1.0)) + near
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        read = _dot(weights.to(dtype), v, None, PRECISION) / tl.sum(weights, axis=1)[:, None]
        x = _dot(read.to(dtype), _turned(self_out + head * D, W, D, W), x, PRECISION)

    x = _add_mlp(x, mlp_norm, mlp_in, mlp_out, mlp_in_shift, mlp_out_shift, W, HIDDEN, W, EPS, PRECISION)
    x = _norm(x, out_norm, W, EPS)
    tl.store(nodes + (image * NODES + row[:, None]) * W + column[None, :], x, mask=is_node[:, None])

    # Keys and values by the weights of each node's own level.
    h = x.to(dtype)
    out += (image * NODES + row[:, None]) * (2 * W) + column[None, :]
    start = 0
    size = LEAVES
    for level in range(DEPTH):
        is_own = ((row >= start) & (row < start + size))[:, None]
        for part in range(2):
            at = (level * 2 + part) * W
            made = _linear(h, level_key_value + at * W, level_shift + at, W, W, PRECISION)
            tl.store(out + part * W, made.to(dtype), mask=is_own)
        start += size
        size = size // 2


@triton.jit
def _encode_tree_kernel(feature, key_value, matrices, vectors, out, B, NODES: tl.constexpr, LEAVES: tl.constexpr,
                        DEPTH: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, IMAGES: tl.constexpr,
                        PLACES: tl.constexpr, HIDDEN: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """A level is one step that attends and HIDDEN / W of its MLP, and every step multiplies by two (W, W) matrices with
    something in between. So weights are one even stream, which is loaded ahead of all else, and the code is short.

    A product has 16 rows: one for each head of each image, which all hold the image's feature. PLACES columns are there
    for the nodes of each image.
    """
    D: tl.constexpr = W // HEADS
    HEADS_HELD: tl.constexpr = ROWS // IMAGES
    STEPS: tl.constexpr = 1 + HIDDEN // W
    dtype = matrices.dtype.element_ty
    row, column, place = tl.arange(0, ROWS), tl.arange(0, W), tl.arange(0, IMAGES * PLACES)
    first = tl.program_id(0).to(tl.int64) * IMAGES
    image = first + row // HEADS_HELD
    is_image = image < B
    is_own = (row % HEADS_HELD)[:, None] == (column // D)[None, :]  # channels of the row's head; nothing past the last
    is_same = tl.where((row // HEADS_HELD)[:, None] == (row // HEADS_HELD)[None, :], 1.0, 0.0).to(dtype)
    is_near = (row // HEADS_HELD)[:, None] == (place // PLACES)[None, :]
    node, at = place % PLACES, (place // PLACES * NODES + place % PLACES) * (2 * W)
    key_value += first * NODES * (2 * W)

    x = tl.load(feature + image[:, None] * W + column[None, :], mask=is_image[:, None], other=0.0).to(tl.float32)
    h = tl.zeros((ROWS, W), dtype)
    start = 0
    size = LEAVES
    for step in tl.range(0, DEPTH * STEPS, num_stages=STAGES):
        level, part = step // STEPS, step % STEPS
        here = matrices + level * (2 * W * W + 2 * HIDDEN * W)
        shifts = vectors + level * (7 * W + HIDDEN)
        inner = _turned(here + (part + (part > 0)) * W * W, W, W, W)
        outer = here + tl.where(part > 0, (2 + HIDDEN // W) * W * W + (part - 1) * W, W * W)
        outer = _turned(outer, W, W, tl.where(part > 0, HIDDEN, W))
        shift = tl.load(shifts + tl.where(part > 0, 5 + part, 2) * W + column)
        of_norm = shifts + tl.where(part > 0, 4 * W, 0) + column
        gain, norm_shift = tl.load(of_norm), tl.load(of_norm + W)
        out_shift = tl.load(shifts + tl.where(part > 0, 6 * W + HIDDEN, 3 * W) + column)
        if part <= 1:
            h = (_standard(x, W, EPS) * gain[None, :] + norm_shift[None, :]).to(dtype)
            x += out_shift[None, :]
        made = _dot(h, inner, None, PRECISION) + shift[None, :]
        if part == 0:
            is_node = node < size
            is_there = is_node & (first + place // PLACES < B)
            keys = key_value + start * (2 * W) + at
            k = tl.load(keys[None, :] + column[:, None], mask=is_there[None, :], other=0.0)
            v = tl.load(keys[:, None] + W + column[None, :], mask=is_there[:, None], other=0.0)
            q = tl.where(is_own, made * (1.0 / tl.sqrt(D * 1.0)), 0.0).to(dtype)
            scores = tl.where(is_near & is_node[None, :], _dot(q, k, None, PRECISION), float("-inf"))
            weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
            read = _dot(weights.to(dtype), v, None, PRECISION) * (1.0 / tl.sum(weights, axis=1))[:, None]
            read = tl.where(is_own, read, 0.0).to(dtype)
            between = _dot(is_same, read, None, PRECISION).to(dtype)  # exact: one row of an image has the channel
            start += size
            size = size // 2
        else:
            between = _gelu(made).to(dtype)
        x = _dot(between, outer, x, PRECISION)
    x = _norm(x, vectors + DEPTH * (7 * W + HIDDEN), W, EPS)
    is_first = is_image & (row % HEADS_HELD == 0)
    tl.store(out + image[:, None] * W + column[None, :], x.to(dtype), mask=is_first[:, None])


@functools.cache
def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 or interpreted() else "tf32"  # of half precision it says nothing


def read_tree(
    queries: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, bias: Tensor, sizes: list[int], heads: int,
    scale: float, cosine: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All contiguous; see :func:`ramify.ops.tree_reader.read_tree`."""
    (B, M, _), (count, W) = key_value.shape, queries.shape
    nodes = torch.empty(B, count, W, dtype=torch.float32, device=key_value.device)
    out = torch.empty(B, count, 2 * W, dtype=matrices.dtype, device=key_value.device)
    if has_data(key_value) and B:
        settings: dict[str, Any] = {
            "NODES": count,
            "BIAS_STRIDE": bias.stride(0),
            "LEAVES": sizes[0],
            "DEPTH": len(sizes),
            "W": W,
        }
        settings |= {"HEADS": heads, "SCALE": scale, "COSINE": cosine, "ROWS": max(16, triton.next_power_of_2(count))}
        settings |= {"TOKENS": TOKENS, "HIDDEN": RATIO * W, "EPS": EPS, "PRECISION": _precision(matrices.dtype)}
        tensors = (queries, key_value, matrices, vectors, bias, nodes, out)
        launch(_read_tree_kernel, (B,), tensors, (M,), settings | {"num_warps": 8, "num_stages": 2})
    return nodes, out


@functools.cache
def _images(leaves: int, heads: int) -> tuple[int, int]:
    """Places for the nodes of one image, and how many images a program has room for."""
    places = triton.next_power_of_2(leaves)
    images = min(IMAGES, int(ROWS) // heads, COLUMNS // places)
    return max(places, int(ROWS) // images), images


def encode_tree(
    x: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, sizes: list[int], heads: int
) -> Tensor:
    """All contiguous; see :func:`ramify.ops.tree_reader.encode_tree`."""
    B, W = x.shape
    out = torch.empty(B, W, dtype=matrices.dtype, device=x.device)
    if has_data(x) and B:
        settings: dict[str, Any] = {
            "NODES": key_value.shape[1],
            "LEAVES": sizes[0],
            "DEPTH": len(sizes),
            "W": W,
            "HEADS": heads,
        }
        places, images = _images(sizes[0], heads)
        settings |= {"IMAGES": images, "PLACES": places, "HIDDEN": RATIO * W, "STAGES": STAGES, "EPS": EPS}
        settings |= {"PRECISION": _precision(matrices.dtype), "num_warps": 4, "num_stages": 2}
        grid = (math.ceil(B / images),)
        launch(_encode_tree_kernel, grid, (x, key_value, matrices, vectors, out), (B,), settings)
    return out
