"""A tree of queries reads the tokens of images, and their global features read the tree: evaluation of a Hi-Mapper.

``read_tree`` and ``encode_tree`` have no gradient. ``reference`` holds the definitions, ``triton`` the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyptree.ops.backend import choose, needs_operator, operator, shared_memory
from hyptree.ops.tree_reader import reference

__all__ = ["encode_tree", "fits", "read_tree", "reference", "unsupported"]

WIDTHS = (16, 32, 64, 128)
MOST_NODES = 64
LEAST_CHANNELS = 16
"""Of a head: tensor cores multiply no fewer."""
_SHARED_OF_WEIGHTS = 13
"""Bytes of shared memory for each number of a (width, width) matrix: six of them at a time, and what goes between."""


def unsupported(dtype: torch.dtype, width: int, heads: int, num_nodes: int) -> str | None:
    """Why the kernels cannot take matrices in ``dtype`` and a tree of this size, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}, the kernel takes bfloat16 and float16"
    if width not in WIDTHS or width % heads or width // heads < LEAST_CHANNELS or heads & (heads - 1):
        return f"{heads} heads in a width of {width}, the kernel takes widths {WIDTHS} and heads of 16, 32, 64 or 128"
    return f"{num_nodes} nodes, the kernel takes up to {MOST_NODES}" if num_nodes > MOST_NODES else None


def fits(x: Tensor, dtype: torch.dtype, width: int, heads: int, num_nodes: int, backend: str = "auto") -> bool:
    """Whether the kernels run on the device of ``x``."""
    reason = unsupported(dtype, width, heads, num_nodes)
    if reason is None and shared_memory(x) < _SHARED_OF_WEIGHTS * width * width:
        reason = f"{shared_memory(x)} bytes of shared memory, the kernel takes {_SHARED_OF_WEIGHTS * width * width}"
    return choose(backend, x, reason) == "triton"


def read_tree(
    queries: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, bias: Tensor, sizes: Sequence[int],
    heads: int, scale: float = 1.0, cosine: bool = True, *, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every node reads the tokens of each image, then the nodes of its level, then an MLP.

    Args:
        queries: (nodes, w), the same for all images; where ``cosine`` of unit length in each head, times a scale.
        key_value: (B, M, 2 w) keys and values of the tokens. matrices, vectors: flat, ``reference.read_matrices`` and
            ``read_vectors`` in their order; vectors in float32.
        bias: (nodes, nodes or more) added to what nodes look at: -inf for nodes of other levels.
        sizes: nodes per level, each half of the one before. heads: of both attentions.
        scale: of the products of queries and keys. cosine: keys are scaled to unit length in each head.

    Returns:
        (B, nodes, w) float32, and by the weights of each node's level its key and value (B, nodes, 2 w).
    """
    width, count = queries.shape[-1], queries.shape[0]
    if not fits(key_value, matrices.dtype, width, heads, count, backend):
        return reference.read_tree(queries, key_value, matrices, vectors, bias, sizes, heads, scale, cosine)
    run = _read_operator if needs_operator(key_value) else _read
    tensors = (queries.contiguous(), key_value.contiguous(), matrices, vectors, bias)
    nodes, level_key_value = run(*tensors, list(sizes), heads, scale, cosine)
    return nodes, level_key_value


def encode_tree(
    x: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, sizes: Sequence[int], heads: int, *,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Global features (B, w) read the nodes level by level, with an MLP after each, and a norm at the end.

    Args:
        key_value: (B, nodes, 2 w). matrices, vectors: flat, ``reference.encode_matrices`` and ``encode_vectors`` level
            by level, vectors in float32, behind them gain and shift of the last norm. sizes, heads: see
            :func:`read_tree`.
    """
    if not fits(x, matrices.dtype, x.shape[-1], heads, key_value.shape[1], backend):
        return reference.encode_tree(x, key_value, matrices, vectors, sizes, heads)
    run = _encode_operator if needs_operator(x) else _encode
    out: Tensor = run(x.contiguous(), key_value.contiguous(), matrices, vectors, list(sizes), heads)
    return out


def _read(
    queries: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, bias: Tensor, sizes: list[int], heads: int,
    scale: float, cosine: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.tree_reader import triton

    return triton.read_tree(queries, key_value, matrices, vectors, bias, sizes, heads, scale, cosine)


def _encode(
    x: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, sizes: list[int], heads: int
) -> Tensor:  # fmt: skip
    from hyptree.ops.tree_reader import triton

    return triton.encode_tree(x, key_value, matrices, vectors, sizes, heads)


_read_operator = operator("read_tree", _read)
_encode_operator = operator("encode_tree", _encode)
