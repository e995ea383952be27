"""Trees of queries in ``hyptree bench kernels``: Hi-Mapper's defaults on DeiT-S and ResNet-50."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import BATCH, BF16, Draw, Job, Outputs, Work
from hyptree.ops import tree_reader
from hyptree.ops.tree_reader import reference

SIZES, HEADS, SCALE = (32, 16, 8, 4), 4, 1 / 0.07


def tree_readers(draw: Draw) -> Iterator[Job]:
    width, batch = (64, 2) if draw.quick else (128, BATCH)
    for name, tokens in (("tiny", 20),) if draw.quick else (("deit_small", 196), ("resnet50", 49)):
        make = functools.partial(_reading, draw, batch, tokens, width)
        yield Job("tree_reader", f"read {name}", f"({batch},{tokens},{width})", BF16, make)
    yield Job("tree_reader", "encode", f"({batch},{width})", BF16, functools.partial(_encoding, draw, batch, width))


def _levels(draw: Draw) -> Tensor:
    """-inf between nodes of different levels, in rows of a multiple of 16."""
    level = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    bias = torch.zeros(len(level), -(-len(level) // 16) * 16)
    bias[:, : len(level)].masked_fill_(level[:, None] != level, float("-inf"))
    return bias.to(draw.device)


def _weights(draw: Draw, shapes: reference.Shapes, dtype: torch.dtype, count: int = 1, more: int = 0) -> Tensor:
    return draw.normal(count * reference.size_of(shapes) + more, dtype=dtype, scale=0.1)


def _reading(draw: Draw, batch: int, tokens: int, width: int) -> Work:
    nodes, depth, channels = sum(SIZES), len(SIZES), width // HEADS
    inputs = (
        draw.normal(nodes, width, dtype=BF16, scale=SCALE * channels**-0.5),
        draw.normal(batch, tokens, 2 * width, dtype=BF16),
        _weights(draw, reference.read_matrices(width, depth), BF16),
        _weights(draw, reference.read_vectors(width, depth), torch.float32),
        _levels(draw),
    )

    definition = functools.partial(reference.read_tree, sizes=list(SIZES), heads=HEADS, scale=1.0, cosine=True)

    def kernel(*x: Any) -> Outputs:
        return tree_reader.read_tree(*x, list(SIZES), HEADS, 1.0, True)

    among = nodes * (sum(a * b for a, b in reference.read_matrices(width, depth).values()) + 2 * nodes * width)
    return Work(inputs, definition, kernel, flops=2 * batch * (2 * nodes * tokens * width + among))


def _encoding(draw: Draw, batch: int, width: int) -> Work:
    depth = len(SIZES)
    matrices, vectors = reference.encode_matrices(width), reference.encode_vectors(width)
    inputs = (
        draw.normal(batch, width, dtype=BF16),
        draw.normal(batch, sum(SIZES), 2 * width, dtype=BF16),
        _weights(draw, matrices, BF16, depth),
        _weights(draw, vectors, torch.float32, depth, 2 * width),
    )

    run = functools.partial(reference.encode_tree, sizes=list(SIZES), heads=HEADS)

    def definition(*x: Tensor) -> Outputs:
        return (run(*x),)

    def kernel(*x: Any) -> Outputs:
        return (tree_reader.encode_tree(*x, list(SIZES), HEADS),)

    return Work(inputs, definition, kernel, flops=2 * batch * (depth * reference.size_of(matrices)))
