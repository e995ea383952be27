"""A tree of queries reads tokens, and a global feature reads the tree: one launch each.

What is multiplied is small (60 nodes of 128 channels) and follows one product upon another: as single products they are
some 60 launches that wait for each other. Here a program keeps the nodes of one image in registers from the first
product to the last, and another the global features of up to four images through all levels; weights come out of the L2
cache.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted
from hyptree.ops.tree_reader.reference import EPS, RATIO

TOKENS = 32
"""Tokens that all nodes of an image read at a time.

For 128 images of 196 tokens, 60 nodes of width 128 in 4 levels and 4 heads an H200 takes 44 us alone and 50 behind
DeiT-S (64 tokens at a time 52, 16 tokens 45), with 49 tokens 38 and 43. By count 33 and 28: a warp issues 17 800
instructions (13 200), is alone on its quarter of a multiprocessor and takes two clocks for one, 36 000 clocks. Products
of 64 rows and what waits for them are another 15 000, first weights and tokens of four loops 5 000, and keys and values
of the levels wait 5 000 for the L2 cache, which gives 690 KB to each program. When each head read the tokens for
itself, GELU was by erf and weights came as they were asked for, it was 27 000 and 20 000 instructions, 76 and 63 us.
"""
IMAGES, COLUMNS, PROGRAMS = 4, 128, 132
"""Most global features that one program holds, most places for the nodes that they read, programs to fill a GPU with.

A program with fewer images has less to wait for in each of its 20 steps, and all programs read all weights, 1.3 MB,
out of the L2 cache. For 128 images of width 128 and 4 levels an H200 takes 37 us with one image a program (30 us by
count at 5.5 TB/s), 46 with two and 51 with four.
"""
LOG2_E = tl.constexpr(math.log2(math.e))
"""Powers of two take fewer instructions than those of e."""
STAGES = 3
"""Two steps' weights have room in shared memory: one is loaded while the other is multiplied."""


@triton.jit
def _standard(x, W: tl.constexpr, EPS: tl.constexpr):
    """Rows of ``x`` with mean zero and deviation one."""
    x -= (tl.sum(x, axis=1) / W)[:, None]
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / W + EPS)[:, None]


@triton.jit
def _norm(x, vectors, W: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of the rows of ``x``; ``vectors`` points at its gain, the shift follows."""
    column = tl.arange(0, W)
    gain, shift = tl.load(vectors + column), tl.load(vectors + W + column)  # before the sums, which need not wait
    return _standard(x, W, EPS) * gain[None, :] + shift[None, :]


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
    """``x Phi(x) = max(x, 0) - |x| Phi(-|x|)``, where log2 of ``Phi(-a)`` is all but a polynomial.

    Ours is fitted for the least error of the product, at most 2.5e-7; by erf in float32 it is 4.5e-7, in three times as
    many instructions.
    """
    a = tl.abs(x)
    log = -1.6904008361962042e-06 * a + 2.5083296350203454e-05
    log = log * a - 0.00011446262215031311
    log = log * a - 0.0003233423049096018
    log = log * a + 0.007333384361118078
    log = log * a - 0.05271419882774353
    log = log * a - 0.4591154456138611
    log = log * a - 1.151123285293579
    log = log * a - 0.9999988675117493
    return tl.maximum(x, 0.0) - a * tl.exp2(log)


@triton.jit
def _add_mlp(x, gain, mlp_in, mlp_out, vector_in, vector_out, W: tl.constexpr, HIDDEN: tl.constexpr,
             PIECE: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """``x + MLP(norm(x))``, PIECE hidden channels at a time."""
    dtype = mlp_in.dtype.element_ty
    h = tl.zeros(x.shape, dtype)
    for first in tl.range(0, HIDDEN, PIECE, num_stages=STAGES):
        if first == 0:  # not before the loop: its first weights come meanwhile
            out_shift = tl.load(vector_out + tl.arange(0, W))
            h = _norm(x, gain, W, EPS).to(dtype)
            x += out_shift[None, :]
        inner = _gelu(_linear(h, mlp_in + first * W, vector_in + first, PIECE, W, PRECISION)).to(dtype)
        x = _dot(inner, _turned(mlp_out + first, W, PIECE, HIDDEN), x, PRECISION)
    return x


@triton.jit
def _read_tokens(queries, key_value, M, is_node, W: tl.constexpr, HEADS: tl.constexpr, SCALE: tl.constexpr,
                 COSINE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """(ROWS, W) what the queries read of M tokens. All heads are one batch of products, each warp has its own."""
    D: tl.constexpr = W // HEADS
    row, head, d = tl.arange(0, ROWS), tl.arange(0, HEADS)[:, None, None] * D, tl.arange(0, D)
    q = tl.load(queries + row[None, :, None] * W + (head + d[None, None, :]), mask=is_node[None, :, None], other=0.0)
    top = tl.full((HEADS, ROWS), float("-inf"), tl.float32)
    total = tl.zeros((HEADS, ROWS), tl.float32)
    read = tl.zeros((HEADS, ROWS, D), tl.float32)
    for first in tl.range(0, M, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        is_token = token < M
        at = key_value + token[None, None, :] * (2 * W) + (head + d[None, :, None])
        k = tl.load(at, mask=is_token[None, None, :], other=0.0)
        if COSINE:
            wide = k.to(tl.float32)
            length = tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=1)), 1e-12)
            k = (wide * (1.0 / length)[:, None, :]).to(k.dtype)
        at = key_value + W + token[None, :, None] * (2 * W) + (head + d[None, None, :])
        v = tl.load(at, mask=is_token[None, :, None], other=0.0)
        scores = (SCALE * LOG2_E) * _dot(q, k, None, PRECISION)
        scores = tl.where(is_token[None, None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=2))
        weights = tl.exp2(scores - higher[:, :, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, axis=2)
        read = _dot(weights.to(v.dtype), v, read * shrink[:, :, None], PRECISION)
        top = higher
    read = tl.permute(read * (1.0 / total)[:, :, None], (1, 0, 2))
    return tl.reshape(read, (ROWS, W))


@triton.jit
def _read_tree_kernel(queries, key_value, matrices, vectors, bias, nodes, out, M, NODES: tl.constexpr,
                      BIAS_STRIDE: tl.constexpr, LEAVES: tl.constexpr, DEPTH: tl.constexpr, W: tl.constexpr,
                      HEADS: tl.constexpr, SCALE: tl.constexpr, COSINE: tl.constexpr, ROWS: tl.constexpr,
                      TOKENS: tl.constexpr, HIDDEN: tl.constexpr, STAGES: tl.constexpr,
                      EPS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    D: tl.constexpr = W // HEADS
    dtype = matrices.dtype.element_ty
    image = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, W)
    is_node = row < NODES
    key_value += image * M * 2 * W

    cross_out, self_in = matrices, matrices + W * W
    self_out, mlp_in = matrices + 4 * W * W, matrices + 5 * W * W
    mlp_out, level_key_value = mlp_in + HIDDEN * W, mlp_in + 2 * HIDDEN * W
    self_norm, self_in_shift, self_out_shift, mlp_norm = vectors + W, vectors + 3 * W, vectors + 6 * W, vectors + 7 * W
    mlp_in_shift, mlp_out_shift = vectors + 9 * W, vectors + 9 * W + HIDDEN
    out_norm, level_shift = mlp_out_shift + W, mlp_out_shift + 3 * W

    cross_out = _turned(cross_out, W, W, W)  # comes while the queries do
    x = _read_tokens(queries, key_value, M, is_node, W, HEADS, SCALE, COSINE, ROWS, TOKENS, STAGES, PRECISION)
    x = _dot(x.to(dtype), cross_out, None, PRECISION) + tl.load(vectors + column)[None, :]

    # Nodes look at those of their own level. Rows that are no nodes look at all nodes, and nobody reads them.
    at = bias + row[:, None] * BIAS_STRIDE + row[None, :]
    near = tl.load(at, mask=is_node[:, None] & is_node[None, :], other=0.0).to(tl.float32)
    near = tl.where(is_node[None, :], near * LOG2_E, float("-inf"))
    h = tl.zeros((ROWS, W), dtype)
    for head in tl.range(0, HEADS, num_stages=2):  # heads of 64 channels have no room for more
        if head == 0:  # as in the MLP: the first weights come meanwhile
            out_shift = tl.load(self_out_shift + column)
            h = _norm(x, self_norm, W, EPS).to(dtype)
            x += out_shift[None, :]
        own, shift = self_in + head * D * W, self_in_shift + head * D
        q = _linear(h, own, shift, D, W, PRECISION).to(dtype)
        k = _linear(h, own + W * W, shift + W, D, W, PRECISION).to(dtype)
        v = _linear(h, own + 2 * W * W, shift + 2 * W, D, W, PRECISION).to(dtype)
        scores = _dot(q, tl.trans(k), None, PRECISION) * (LOG2_E / tl.sqrt(D * 1.0)) + near
        weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
        read = _dot(weights.to(dtype), v, None, PRECISION) * (1.0 / tl.sum(weights, axis=1))[:, None]
        x = _dot(read.to(dtype), _turned(self_out + head * D, W, D, W), x, PRECISION)

    x = _add_mlp(x, mlp_norm, mlp_in, mlp_out, mlp_in_shift, mlp_out_shift, W, HIDDEN, W, STAGES, EPS, PRECISION)

    # Keys and values by the weights of each node's own level.
    h = tl.zeros((ROWS, W), dtype)
    nodes += (image * NODES + row[:, None]) * W + column[None, :]
    out += (image * NODES + row[:, None]) * (2 * W) + column[None, :]
    start = 0
    size = LEAVES
    for step in tl.range(0, 2 * DEPTH, num_stages=STAGES):  # keys of a level, its values, the next level's
        if step == 0:  # the same once more
            x = _norm(x, out_norm, W, EPS)
            tl.store(nodes, x, mask=is_node[:, None])
            h = x.to(dtype)
        value = _linear(h, level_key_value + step * W * W, level_shift + step * W, W, W, PRECISION)
        is_own = (row >= start) & (row < start + size)
        tl.store(out + step % 2 * W, value.to(dtype), mask=is_own[:, None])
        if step % 2 == 1:
            start += size
            size = size // 2


@triton.jit
def _encode_tree_kernel(feature, key_value, matrices, vectors, out, B, NODES: tl.constexpr, LEAVES: tl.constexpr,
                        DEPTH: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, IMAGES: tl.constexpr,
                        PLACES: tl.constexpr, HIDDEN: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """A product has 16 rows, one for each head of each image; all rows of an image hold its whole feature.

    A level is one step of attention and HIDDEN / W steps of the MLP. Each multiplies by an inner (W, W) matrix, does
    something to what comes out, and multiplies by an outer one: one stream of weights of the same shape, which the loop
    loads ahead whatever a step does, and little code, run often.
    """
    D: tl.constexpr = W // HEADS
    OF_IMAGE: tl.constexpr = 16 // IMAGES
    STEPS: tl.constexpr = 1 + HIDDEN // W
    dtype = matrices.dtype.element_ty
    row, column, place = tl.arange(0, 16), tl.arange(0, W), tl.arange(0, IMAGES * PLACES)
    first = tl.program_id(0).to(tl.int64) * IMAGES
    image = row // OF_IMAGE
    is_own = (row % OF_IMAGE)[:, None] == (column // D)[None, :]  # channels of the row's head, none if there is none
    is_same = tl.where(image[:, None] == image[None, :], 1.0, 0.0).to(dtype)
    is_near = image[:, None] == (place // PLACES)[None, :]
    is_read, node = first + place // PLACES < B, place % PLACES
    key_value += first * NODES * (2 * W)
    at = image[:, None] * W + column[None, :]
    is_image = first + image < B

    x = tl.load(feature + first * W + at, mask=is_image[:, None], other=0.0).to(tl.float32)
    h = tl.zeros((16, W), dtype)
    start = 0
    size = LEAVES
    for step in tl.range(0, DEPTH * STEPS, num_stages=STAGES):
        part = step % STEPS
        level_matrices = matrices + step // STEPS * (2 * W * W + 2 * HIDDEN * W)
        level_vectors = vectors + step // STEPS * (7 * W + HIDDEN)
        # Turned, as products need them. First the query's matrix and that behind the attention, then pieces of the MLP.
        inner = level_matrices + tl.where(part > 0, 1 + part, 0) * W * W
        inner = tl.load(inner + (column[None, :] * W + column[:, None]))
        outer = level_matrices + tl.where(part > 0, 2 * W * W + HIDDEN * W + (part - 1) * W, W * W)
        outer = tl.load(outer + (column[None, :] * tl.where(part > 0, HIDDEN, W) + column[:, None]))
        shift = tl.load(level_vectors + tl.where(part > 0, 5 + part, 2) * W + column)
        if part <= 1:
            norm = level_vectors + part * (4 * W) + column
            gain, norm_shift = tl.load(norm), tl.load(norm + W)  # before the sums, which they need not wait for
            out_shift = tl.load(level_vectors + tl.where(part > 0, 6 * W + HIDDEN, 3 * W) + column)
            h = (_standard(x, W, EPS) * gain[None, :] + norm_shift[None, :]).to(dtype)
            x += out_shift[None, :]
        value = _dot(h, inner, None, PRECISION) + shift[None, :]
        if part == 0:
            is_node = node < size
            rows = key_value + (place // PLACES * NODES + start + node) * (2 * W)
            k = tl.load(rows[None, :] + column[:, None], mask=(is_node & is_read)[None, :], other=0.0).to(dtype)
            v = tl.load(rows[:, None] + W + column[None, :], mask=(is_node & is_read)[:, None], other=0.0).to(dtype)
            q = tl.where(is_own, value * (1.0 / tl.sqrt(D * 1.0)), 0.0).to(dtype)
            scores = tl.where(is_near & is_node[None, :], _dot(q, k, None, PRECISION), float("-inf"))
            weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
            read = _dot(weights.to(dtype), v, None, PRECISION) * (1.0 / tl.sum(weights, axis=1))[:, None]
            read = tl.where(is_own, read, 0.0).to(dtype)
            between = _dot(is_same, read, None, PRECISION).to(dtype)  # exact: a channel is zero in all rows but one
            start += size
            size = size // 2
        else:
            between = _gelu(value).to(dtype)
        x = _dot(between, outer, x, PRECISION)
    x = _norm(x, vectors + DEPTH * (7 * W + HIDDEN), W, EPS)
    tl.store(out + first * W + at, x.to(dtype), mask=(is_image & (row % OF_IMAGE == 0))[:, None])


@functools.cache
def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 or interpreted() else "tf32"  # of half precision it says nothing


def read_tree(
    queries: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, bias: Tensor, sizes: list[int], heads: int,
    scale: float, cosine: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All contiguous; see ``reference.read_tree``."""
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
        settings |= {"TOKENS": TOKENS, "HIDDEN": RATIO * W, "STAGES": STAGES, "EPS": EPS}
        settings |= {"PRECISION": _precision(matrices.dtype), "num_warps": 4, "num_stages": 2}
        tensors = (queries, key_value, matrices, vectors, bias, nodes, out)
        launch(_read_tree_kernel, (B,), tensors, (M,), settings)
    return nodes, out


@functools.cache
def _images(batch: int, leaves: int, heads: int) -> tuple[int, int]:
    """Images of one program, more than one where there are many, and places for the nodes of each."""
    places = triton.next_power_of_2(leaves)
    images, most = 1, min(IMAGES, 16 // heads, COLUMNS // places)
    while images < most and batch > images * PROGRAMS:
        images *= 2
    return images, max(places, 16 // images)


def encode_tree(
    x: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, sizes: list[int], heads: int
) -> Tensor:
    """All contiguous; see ``reference.encode_tree``."""
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
        images, places = _images(B, sizes[0], heads)
        settings |= {"IMAGES": images, "PLACES": places, "HIDDEN": RATIO * W, "STAGES": STAGES, "EPS": EPS}
        settings |= {"PRECISION": _precision(matrices.dtype), "num_warps": 4, "num_stages": 2}
        grid = (math.ceil(B / images),)
        launch(_encode_tree_kernel, grid, (x, key_value, matrices, vectors, out), (B,), settings)
    return out
