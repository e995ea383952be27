"""A tree of queries reads the tokens of images, and their global features read the tree: evaluation of a Hi-Mapper.

``apply`` is the door; ``read_tree`` and ``encode_tree`` are the two kernels behind it, without gradient.
``reference`` holds the definitions of the kernels, ``triton`` the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.backend import choose, exporting, needs_operator, operator, shared_memory
from hyptree.ops.bare import is_bare, readable, report_unfused
from hyptree.ops.tree_reader import reference

__all__ = ["apply", "encode_tree", "read_tree", "reference"]

WIDTHS = (16, 32, 64, 128)
MOST_NODES = 64
LEAST_CHANNELS = 16
"""Of a head: tensor cores multiply no fewer."""
_SHARED_OF_WEIGHTS = 13
"""Bytes of shared memory for each number of a (width, width) matrix: six of them at a time, and what goes between."""

for _kind in (nn.LayerNorm, nn.GELU, nn.Dropout, nn.Sequential, nn.ModuleList):
    readable(_kind)


def apply(
    decompose: Any, space: Any, encode: Any, queries: Tensor, tokens: Tensor, pooled: Tensor, row: Tensor | None,
    return_maps: bool = False, *, backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """Nodes (B, nodes, w), maps if asked for, points (B, nodes, d) and their curvature (), what is added (B, Cv).

    The layers' work is little, but one by one they are some 150 launches that wait for each other: a cast of every
    weight and bias, and products of a few rows. In evaluation without gradients, in half precision on a GPU, all
    weights are put side by side and cast at once, at every call, and two kernels do what follows the keys and values of
    the tokens.

    Args:
        decompose, space, encode: see :mod:`hyptree.models.himapper.plain`, which is the definition.
        queries: (nodes, w), or samples. tokens: (B, M, C). pooled: (B, Cv) global features.
        row: (B, P + M, C) which ends with the tokens, if they are part of a longer row.
        return_maps: where each node looked, (B, nodes, M).
    """
    kind, dtype = queries.device.type, queries.dtype
    if dtype != torch.float64 and not queries.is_meta and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # in which matrices are multiplied
    if return_maps or not _takes_layers(decompose, space, encode, queries, tokens, dtype, backend):
        nodes, maps = decompose(queries, tokens, return_maps)
        return nodes, maps, *space(nodes), encode(pooled, nodes)
    reading, encoding, products = _layers(decompose, space, encode)
    # The backbone's widths last: all others are multiples of 16, which keeps kernels aligned.
    groups = [_matrices(reading), _matrices(encoding), _vectors(reading), _vectors(encoding)]
    groups.append([p for layer in products for p in (layer.weight, layer.bias) if p is not None])
    # Cast behind, not inside: only what stands side by side as it is becomes one launch in compiled code.
    wide = torch.cat([p.reshape(-1) for group in groups for p in group])
    counts = [sum(p.numel() for p in group) for group in groups]
    read_matrices, encode_matrices, _, _, others = wide.to(dtype).split(counts)
    _, _, read_vectors, encode_vectors, _ = wide.float().split(counts)
    parts = iter(others.split([p.numel() for p in groups[-1]]))
    token_proj, token_key_value, query_proj, cross_query, space_proj, in_proj, out_proj = (
        partial(_linear, next(parts).view(layer.weight.shape), None if layer.bias is None else next(parts))
        for layer in products
    )
    q = cross_query(decompose.cross_norm(query_proj(decompose.query_norm(queries))))
    q = q if decompose.log_scale is None else decompose.unit_queries(q)
    # Class tokens go with the others as far as they cost nothing: a slice before the first norm would keep it from the
    # backbone's kernel, one behind the second norm would be a copy.
    memory = token_proj(decompose.token_norm(tokens if row is None else row))[:, -tokens.shape[1] :]
    sizes, heads = list(decompose.shape.sizes), decompose.heads
    nodes, key_value = read_tree(
        q.to(dtype), token_key_value(decompose.memory_norm(memory)), read_matrices, read_vectors, decompose.other_level,
        sizes, heads, decompose.scale, decompose.log_scale is not None,
    )  # fmt: skip
    nodes = nodes if torch.is_autocast_enabled(kind) else nodes.to(dtype)  # as norms give them
    points = space.place(space_proj(nodes))
    x = encode_tree(in_proj(encode.in_norm(pooled)), key_value, encode_matrices, encode_vectors, sizes, heads)
    return nodes, None, *points, out_proj(x)


def _takes_layers(
    decompose: Any, space: Any, encode: Any, queries: Tensor, tokens: Tensor, dtype: torch.dtype, backend: str
) -> bool:
    """Whether kernels run in place of the layers."""
    if torch.is_grad_enabled() or decompose.query_residual or exporting():
        return False
    sizes = dtype, queries.shape[-1], decompose.heads, decompose.shape.num_nodes
    if _unsupported(*sizes) is not None or not _fits(tokens, *sizes, backend):
        return False
    layers = [layer for part in (decompose, space, encode) for layer in part.modules()]
    if any(layer.training for layer in layers):  # one that drops out by itself, for instance
        return False
    for layer in layers:
        if not is_bare(layer):
            report_unfused("a tree of queries", layer)
            return False
    return True


def _layers(decompose: Any, space: Any, encode: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The layers inside the first kernel and the second in the order of ``reference``, and products that stay."""
    d, e = decompose, encode
    reading = [d.cross_out, d.self_norm, d.self_in, d.self_out, d.mlp_norm, d.mlp[0], d.mlp[2], d.out_norm, e.key_value]
    encoding = [m for x in e.layers for m in (x.norm, x.query, x.out, x.mlp_norm, x.mlp[0], x.mlp[2])]
    products = [d.token_proj, d.cross_key_value, d.query_proj, d.cross_query, space.proj, e.in_proj, e.out_proj]
    return reading, [*encoding, e.out_norm], products


def _matrices(layers: Sequence[Any]) -> list[Tensor]:
    return [layer.weight for layer in layers if not isinstance(layer, nn.LayerNorm)]


def _vectors(layers: Sequence[Any]) -> list[Tensor]:
    return [p for x in layers for p in ((x.weight, x.bias) if isinstance(x, nn.LayerNorm) else (x.bias,))]


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias)


def _unsupported(dtype: torch.dtype, width: int, heads: int, num_nodes: int) -> str | None:
    """Why the kernels cannot take matrices in ``dtype`` and a tree of this size, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}, the kernel takes bfloat16 and float16"
    if width not in WIDTHS or width % heads or width // heads < LEAST_CHANNELS or heads & (heads - 1):
        return f"{heads} heads in a width of {width}, the kernel takes widths {WIDTHS} and heads of 16, 32, 64 or 128"
    return f"{num_nodes} nodes, the kernel takes up to {MOST_NODES}" if num_nodes > MOST_NODES else None


def _fits(x: Tensor, dtype: torch.dtype, width: int, heads: int, num_nodes: int, backend: str = "auto") -> bool:
    """Whether the kernels run on the device of ``x``."""
    reason = _unsupported(dtype, width, heads, num_nodes)
    if reason is None and shared_memory(x) < _SHARED_OF_WEIGHTS * width * width:
        reason = f"{shared_memory(x)} bytes of shared memory, the kernel takes {_SHARED_OF_WEIGHTS * width * width}"
    return choose(backend, x, reason) == "triton"


def read_tree(queries: Tensor, key_value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The first kernel, with the arguments of ``reference.read_tree``."""
    run = _read_operator if needs_operator(key_value) else _read
    nodes, level_key_value = run(queries.contiguous(), key_value.contiguous(), *rest)
    return nodes, level_key_value


def encode_tree(x: Tensor, key_value: Tensor, *rest: Any) -> Tensor:
    """The second kernel, with the arguments of ``reference.encode_tree``."""
    run = _encode_operator if needs_operator(x) else _encode
    out: Tensor = run(x.contiguous(), key_value.contiguous(), *rest)
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
