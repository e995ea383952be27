"""A Hi-Mapper in evaluation without gradients, in half precision on a GPU: the same tree with few launches.

The plug-in's work is small, about one percent of its backbone's, but written down layer by layer it is some 150
launches that wait for each other: a cast of every weight and bias, and products of a few rows. Here all weights are put
side by side and cast at once, and two kernels (:mod:`hyptree.ops.tree_reader`) do what follows the keys and values of
the tokens: everything among nodes, and everything of the global feature. :class:`Decomposition`, :class:`TreeSpace` and
:class:`Encoding` are the definition, to which the tests hold this.

Nothing is kept from call to call: compiled code and CUDA graphs cannot look whether a weight has changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.models.himapper.decompose import TEMPERATURE
from hyptree.nn.precision import gemm_dtype
from hyptree.ops import tree_reader
from hyptree.ops.backend import exporting

if TYPE_CHECKING:
    from hyptree.models.himapper.wrap import HiMapper

Layer = Any
"""A Linear or a LayerNorm; in sequences and lists of modules types are lost."""


def can_evaluate(model: HiMapper, tokens: Tensor) -> bool:
    """Whether :func:`evaluate` may stand for the layers, one by one: they do nothing but what they are called."""
    if model.training or torch.is_grad_enabled() or model.decompose.query_residual or exporting():
        return False
    mu = model.tree.mu
    sizes = gemm_dtype(mu), mu.shape[1], model.decompose.heads, model.shape.num_nodes
    if tree_reader.unsupported(*sizes) is not None or not tree_reader.fits(tokens, *sizes):
        return False
    # A layer that was wrapped or replaced (adapters, quantisation, a hook, a part of a sharded weight) is called.
    return all(
        type(layer) in (nn.Linear, nn.LayerNorm)
        and type(layer.weight) is nn.Parameter
        and (torch.compiler.is_compiling() or not (layer._forward_hooks or layer._forward_pre_hooks))
        for layer in _layers(model)
    )


def evaluate(model: HiMapper, row: Tensor, num_tokens: int, pooled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes (B, nodes, w), their points (B, nodes, d), and what is added to the global feature (B, Cv).

    Args:
        row: (B, P + M, C) whose last ``num_tokens = M`` are read. pooled: (B, Cv).
    """
    decompose, encode, space, sizes = model.decompose, model.encode, model.space, model.shape.sizes
    dtype = gemm_dtype(model.tree.mu)
    weights = _Weights(model, dtype)

    # tree.nodes() by one sum: each mean over the leaves below, from the matrix that averages the rows of a node
    shares = decompose.pooling.unflatten(1, (model.shape.depth, -1)).to(model.tree.mu.dtype)
    means = (shares.unsqueeze(-1) * model.tree.mu).sum((1, 2))
    q = weights.linear("query_proj", decompose.query_norm(means))
    q = weights.linear("cross_query", decompose.cross_norm(q))
    scale = 1 / TEMPERATURE
    if decompose.log_scale is not None:
        q = decompose.unit_queries(q.unflatten(-1, (decompose.heads, -1))).flatten(-2)
        scale = 1.0
    # Class tokens go with the others as far as they cost nothing: a slice before the first norm would keep it from the
    # backbone's kernel, one behind the second norm would be a copy.
    projected = weights.linear("token_proj", decompose.token_norm(row))
    memory = decompose.memory_norm(projected[:, row.shape[1] - num_tokens :])
    nodes, key_value = tree_reader.read_tree(
        q.to(dtype),
        weights.linear("cross_key_value", memory),
        *weights.of_reading,
        decompose.other_level,
        sizes,
        decompose.heads,
        scale,
        decompose.log_scale is not None,
    )
    nodes = nodes if torch.is_autocast_enabled(nodes.device.type) else nodes.to(dtype)  # as norms give them
    points = space.place(weights.linear("space", nodes))
    x = weights.linear("in_proj", encode.in_norm(pooled))
    x = tree_reader.encode_tree(x, key_value, *weights.of_encoding, sizes, decompose.heads)
    return nodes, points, weights.linear("out_proj", x)


class _Weights:
    """All weights of the plug-in in one tensor, and that cast to half precision.

    Args:
        dtype: of what is multiplied.
    """

    def __init__(self, model: HiMapper, dtype: torch.dtype):
        own = _own_products(model)
        groups = [
            [matrix.weight for matrix in _read_matrices(model)],
            [matrix.weight for matrix in _encode_matrices(model)],
            [p for layer in _read_vectors(model) for p in _vectors(layer)],
            [p for layer in _encode_vectors(model) for p in _vectors(layer)],
            # Last, as the backbone's widths are in it: all others are multiples of 16, which keeps kernels aligned.
            [p for layer in own.values() for p in (layer.weight, layer.bias) if p is not None],
        ]
        # Cast behind, not inside: only what stands side by side as it is becomes one launch in compiled code.
        wide = torch.cat([p.reshape(-1) for group in groups for p in group])
        counts = [sum(p.numel() for p in group) for group in groups]
        read_matrices, encode_matrices, _, _, of_own = wide.to(dtype).split(counts)
        _, _, read_vectors, encode_vectors, _ = wide.float().split(counts)
        self.of_reading = read_matrices, read_vectors
        self.of_encoding = encode_matrices, encode_vectors
        parts = iter(of_own.split([p.numel() for p in groups[-1]]))
        self._own: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, layer in own.items():
            weight = next(parts).view(layer.weight.shape)
            self._own[name] = weight, None if layer.bias is None else next(parts)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """The layer ``name`` on ``x``, in half precision."""
        weight, bias = self._own[name]
        return F.linear(x.to(weight.dtype), weight, bias)


def _own_products(model: HiMapper) -> dict[str, nn.Linear]:
    """Products that stay as they are."""
    d, e = model.decompose, model.encode
    return {
        "token_proj": d.token_proj,
        "cross_key_value": d.cross_key_value,
        "query_proj": d.query_proj,
        "cross_query": d.cross_query,
        "space": model.space.proj,
        "in_proj": e.in_proj,
        "out_proj": e.out_proj,
    }


def _read_matrices(model: HiMapper) -> list[Layer]:
    """In the order of ``tree_reader.reference.read_matrices``."""
    d = model.decompose
    return [d.cross_out, d.self_in, d.self_out, d.mlp[0], d.mlp[2], model.encode.key_value]


def _read_vectors(model: HiMapper) -> list[Layer]:
    """In the order of ``tree_reader.reference.read_vectors``."""
    d = model.decompose
    looking = [d.cross_out, d.self_norm, d.self_in, d.self_out]
    return [*looking, d.mlp_norm, d.mlp[0], d.mlp[2], d.out_norm, model.encode.key_value]


def _encode_matrices(model: HiMapper) -> list[Layer]:
    """In the order of ``tree_reader.reference.encode_matrices``, level by level."""
    layers: Layer = model.encode.layers
    return [matrix for layer in layers for matrix in (layer.query, layer.out, layer.mlp[0], layer.mlp[2])]


def _encode_vectors(model: HiMapper) -> list[Layer]:
    """In the order of ``tree_reader.reference.encode_vectors``, level by level, and the last norm."""
    layers: list[Layer] = []
    layer: Layer
    for layer in model.encode.layers:
        layers += [layer.norm, layer.query, layer.out, layer.mlp_norm, layer.mlp[0], layer.mlp[2]]
    return [*layers, model.encode.out_norm]


def _vectors(layer: Layer) -> tuple[Tensor, ...]:
    return (layer.weight, layer.bias) if isinstance(layer, nn.LayerNorm) else (layer.bias,)


def _layers(model: HiMapper) -> Iterator[Layer]:
    """All that :func:`evaluate` does not call."""
    yield from _own_products(model).values()
    yield from _read_vectors(model)
    yield from _encode_vectors(model)
