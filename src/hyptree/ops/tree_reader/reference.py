"""A tree of queries reads tokens, and a global feature reads the tree: the definitions, and how weights are laid out.

All weights of a part stand in two flat tensors, matrices and vectors (biases, gains and shifts of norms), so that two
casts and no more prepare them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
"""Of all norms, torch's default."""
RATIO = 4
"""Hidden width of the MLPs over the width."""

Shapes = Mapping[str, tuple[int, ...]]


def read_matrices(width: int, depth: int) -> Shapes:
    """Matrices of :func:`read_tree` in their order: out of reading, looking around, MLP, keys and values of levels."""
    w, hidden = width, RATIO * width
    return {
        "cross_out": (w, w),
        "self_in": (3 * w, w),
        "self_out": (w, w),
        "mlp_in": (hidden, w),
        "mlp_out": (w, hidden),
        "key_value": (depth * 2 * w, w),
    }


def read_vectors(width: int, depth: int) -> Shapes:
    """Vectors of :func:`read_tree` in their order; two rows are the gain and the shift of a norm."""
    w, hidden = width, RATIO * width
    return {
        "cross_out": (w,),
        "self_norm": (2, w),
        "self_in": (3 * w,),
        "self_out": (w,),
        "mlp_norm": (2, w),
        "mlp_in": (hidden,),
        "mlp_out": (w,),
        "out_norm": (2, w),
        "key_value": (depth * 2 * w,),
    }


def encode_matrices(width: int) -> Shapes:
    """Matrices of one level of :func:`encode_tree`; the levels follow each other."""
    w, hidden = width, RATIO * width
    return {"query": (w, w), "out": (w, w), "mlp_in": (hidden, w), "mlp_out": (w, hidden)}


def encode_vectors(width: int) -> Shapes:
    """Vectors of one level of :func:`encode_tree`; behind the last level stands the norm of what comes out."""
    w, hidden = width, RATIO * width
    return {
        "norm": (2, w),
        "query": (w,),
        "out": (w,),
        "mlp_norm": (2, w),
        "mlp_in": (hidden,),
        "mlp_out": (w,),
    }


def size_of(shapes: Shapes) -> int:
    """Numbers in all of them."""
    return sum(math.prod(shape) for shape in shapes.values())


def unpack(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors that stand in ``flat`` one behind the other."""
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., N, w) -> (..., heads, N, w / heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def join_heads(x: Tensor) -> Tensor:
    """(..., heads, N, d) -> (..., N, heads d)."""
    return x.transpose(-2, -3).flatten(-2)


def _norm(x: Tensor, gain_shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], gain_shift[0], gain_shift[1], EPS)


def _mlp(x: Tensor, m: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, m["mlp_in"], v["mlp_in"])), m["mlp_out"], v["mlp_out"])


def read_tree(
    queries: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, bias: Tensor, sizes: Sequence[int],
    heads: int, scale: float, cosine: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every node reads the tokens of each image, then the nodes of its level, then an MLP; in the dtype of ``vectors``.

    Args:
        queries: (nodes, w), the same for all images; where ``cosine`` of unit length in each head, times a scale.
        key_value: (B, M, 2 w) keys and values of the tokens.
        matrices, vectors: flat, :func:`read_matrices` and :func:`read_vectors` in their order; vectors in float32.
        bias: (nodes, nodes or more) added to what nodes look at: -inf for nodes of other levels.
        sizes: nodes per level, each half of the one before. heads: of both attentions.
        scale: of the products of queries and keys. cosine: keys are scaled to unit length in each head.

    Returns:
        (B, nodes, w) float32, and by the weights of each node's level its key and value (B, nodes, 2 w).
    """
    wide, width = vectors.dtype, queries.shape[-1]
    m = unpack(matrices.to(wide), read_matrices(width, len(sizes)))
    v = unpack(vectors, read_vectors(width, len(sizes)))
    q = split_heads(queries.to(wide), heads)
    k, values = (split_heads(part, heads) for part in key_value.to(wide).chunk(2, -1))
    k = F.normalize(k, dim=-1) if cosine else k
    read = (scale * (q @ k.mT)).softmax(-1) @ values
    x = F.linear(join_heads(read), m["cross_out"], v["cross_out"])
    q, k, values = (
        split_heads(part, heads) for part in F.linear(_norm(x, v["self_norm"]), m["self_in"], v["self_in"]).chunk(3, -1)
    )
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias[:, : q.shape[-2]].to(wide)
    x = x + F.linear(join_heads(scores.softmax(-1) @ values), m["self_out"], v["self_out"])
    nodes = _norm(x + _mlp(_norm(x, v["mlp_norm"]), m, v), v["out_norm"])
    weight, shift = m["key_value"].chunk(len(sizes)), v["key_value"].chunk(len(sizes))
    levels = zip(nodes.split(list(sizes), 1), weight, shift, strict=True)
    return nodes, torch.cat([F.linear(*level) for level in levels], 1).to(matrices.dtype)


def encode_tree(
    x: Tensor, key_value: Tensor, matrices: Tensor, vectors: Tensor, sizes: Sequence[int], heads: int
) -> Tensor:
    """Global features (B, w) read the nodes level by level, an MLP after each, a norm at the end; as ``vectors``.

    Args:
        key_value: (B, nodes, 2 w). sizes, heads: see :func:`read_tree`.
        matrices, vectors: flat, :func:`encode_matrices` and :func:`encode_vectors` level by level, vectors in float32,
            behind them gain and shift of the last norm.
    """
    wide, width, depth = vectors.dtype, x.shape[-1], len(sizes)
    all_matrices = matrices.to(wide).unflatten(0, (depth, -1))
    last = vectors[-2 * width :].view(2, width)
    all_vectors = vectors[: -2 * width].unflatten(0, (depth, -1))
    y = x.to(wide).unsqueeze(1)
    for level, of_level in enumerate(key_value.to(wide).split(list(sizes), 1)):
        m = unpack(all_matrices[level], encode_matrices(width))
        v = unpack(all_vectors[level], encode_vectors(width))
        q = split_heads(F.linear(_norm(y, v["norm"]), m["query"], v["query"]), heads)
        k, values = (split_heads(part, heads) for part in of_level.chunk(2, -1))
        read = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ values
        y = y + F.linear(join_heads(read), m["out"], v["out"])
        y = y + _mlp(_norm(y, v["mlp_norm"]), m, v)
    return _norm(y, last).squeeze(1).to(matrices.dtype)
