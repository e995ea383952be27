"""The plug-in of a Hi-Mapper layer by layer, its definition: what nodes read, where they lie, what they add, the loss.

The queries come from :mod:`hyptree.models.himapper.tree`. For evaluation in half precision on a GPU,
:mod:`hyptree.ops.tree_reader` does the same in two kernels.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry import euclidean
from hyptree.geometry.core.curvature import bounded_curvature
from hyptree.geometry.core.numerics import root, safe_norm, strict_matmul
from hyptree.geometry.lorentz_pairs import matmul_distances
from hyptree.models.himapper.tree import TreeShape
from hyptree.ops.bare import readable

Attention = Literal["cosine", "scaled"]
Geometry = Literal["lorentz", "euclidean"]
Sign = Literal["corrected", "paper"]

TEMPERATURE, LARGEST_SCALE = 0.07, 100.0  # what cosine attention starts from and "scaled" keeps; largest inverse
CURVATURES = (0.1, 10.0)  # a learned curvature stays between these
LARGEST_RADIUS = 4.0  # of a node, over sqrt(c): farther out float32 has few digits for distances


def mlp(width: int, dropout: float = 0.0) -> nn.Sequential:
    """Two layers with GELU between."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention in heads: (..., N, w), (..., M, w), (..., M, w) -> (..., N, w)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(-2, -3) for x in (q, k, v))
    read = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return read.transpose(-2, -3).flatten(-2)


@readable
class Decomposition(nn.Module):
    """One decoder layer that all levels share: queries read the tokens, then the others of their level, then an MLP.

    Rows of all levels stand side by side. Where the rows of a node are identical (means instead of samples), one row
    per node gives the same result, since every node of a level has equally many. "cosine" attention compares directions
    at a learned temperature, "scaled" multiplies plain products by 1 / 0.07 as the published code. Without
    ``query_residual`` a node is made of image content alone.
    """

    pooling: Tensor
    other_level: Tensor

    def __init__(
        self, shape: TreeShape, channels: int, width: int = 128, heads: int = 4, attention: Attention = "cosine",
        query_residual: bool = False, dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.shape, self.heads, self.query_residual = shape, heads, query_residual
        self.token_norm, self.token_proj = nn.LayerNorm(channels), nn.Linear(channels, width)
        self.memory_norm = nn.LayerNorm(width)
        self.query_norm, self.query_proj = nn.LayerNorm(width), nn.Linear(width, width)
        self.cross_norm, self.cross_query = nn.LayerNorm(width), nn.Linear(width, width)
        self.cross_key_value, self.cross_out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.self_norm, self.self_in = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.self_out = nn.Linear(width, width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width, dropout)
        self.out_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.scale = 1.0 if attention == "cosine" else 1 / TEMPERATURE
        self.log_scale = nn.Parameter(torch.tensor([-math.log(TEMPERATURE)])) if attention == "cosine" else None
        # -inf between nodes of different levels, in rows of a multiple of 16 numbers: what attention kernels ask for.
        other_level = np.zeros((shape.num_nodes, -(-shape.num_nodes // 16) * 16), np.float32)
        other_level[:, : shape.num_nodes][shape.level[:, None] != shape.level] = -np.inf
        self.register_buffer("pooling", torch.from_numpy(shape.pooling), persistent=False)
        self.register_buffer("other_level", torch.from_numpy(other_level), persistent=False)

    def forward(self, queries: Tensor, tokens: Tensor, return_maps: bool = False) -> tuple[Tensor, Tensor | None]:
        """(B, nodes, w) what nodes read of (B, M, C), and if asked for where, (B, nodes, M) with rows that sum to one.

        Queries are (nodes, w), one row per node, or samples (L, N, w) or (B, L, N, w).
        """
        batch, sampled = tokens.shape[0], queries.dim() > 2  # len() would fix the batch of an exported program
        if sampled:
            queries = queries.flatten(-3, -2)  # (L N, w) or (B, L N, w)
        q = self.query_proj(self.query_norm(queries))
        memory = self.memory_norm(self.token_proj(self.token_norm(tokens)))  # (B, M, w)
        read, maps = self._read(q, memory, return_maps)
        x = q + self.dropout(read) if self.query_residual else self.dropout(read)  # (B, rows, w)
        rows = x.shape[1]
        if sampled:  # each level by itself: (B L, N, w)
            x = x.reshape(batch * self.shape.depth, self.shape.num_leaves, -1)
        q, k, v = self.self_in(self.self_norm(x)).chunk(3, -1)
        bias = None if sampled else self.other_level.to(q.dtype)[:, : q.shape[-2]]
        x = x + self.dropout(self.self_out(attend(q, k, v, self.heads, bias)))
        x = self.out_norm(x + self.mlp(self.mlp_norm(x)))
        if sampled:
            x = self.pooling.to(x.dtype) @ x.reshape(batch, rows, -1)
            maps = None if maps is None else strict_matmul(self.pooling.float(), maps)  # sums stay 1 in half precision
        return x, maps

    def _read(self, queries: Tensor, memory: Tensor, return_maps: bool) -> tuple[Tensor, Tensor | None]:
        q, (k, v) = self.cross_query(self.cross_norm(queries)), self.cross_key_value(memory).chunk(2, -1)
        if self.log_scale is not None:
            q, k = self.unit_queries(q), self._unit(k).to(v.dtype)
        q = q.to(v.dtype).expand(v.shape[0], -1, -1)  # the same rows for every image, unless noise is per image
        if not return_maps:
            return self.cross_out(attend(q, k, v, self.heads, None, self.scale)), None
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for x in (q, k, v))
        weights = (self.scale * (q @ k.mT).float()).softmax(-1)  # (B, heads, rows, M)
        return self.cross_out((weights.to(v.dtype) @ v).transpose(-2, -3).flatten(-2)), weights.mean(1)

    def unit_queries(self, q: Tensor) -> Tensor:
        """Queries (..., w) of cosine attention: of unit length in each head, over the temperature; float32."""
        assert self.log_scale is not None
        return self._unit(q) * self.log_scale.exp().clamp_max(LARGEST_SCALE)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x.float().unflatten(-1, (self.heads, -1)), dim=-1).flatten(-2)


@readable
class TreeSpace(nn.Module):
    """Nodes on the hyperboloid: a linear map, a learned scale, a soft limit of the radius, the exponential map.

    Points are space components in float32, whatever the nodes are. "euclidean" leaves out the map and the curvature.
    """

    CURVATURE_PARAMETERS: ClassVar = ("log_c",)

    def __init__(self, width: int, dim: int, geometry: Geometry = "lorentz"):
        super().__init__()
        self.geometry = geometry
        self.proj = nn.Linear(width, dim, bias=False)
        # One axis rather than none: fully_shard takes no parameter without an axis.
        self.log_alpha = nn.Parameter(torch.tensor([-0.5 * math.log(dim)]))
        self.log_c = nn.Parameter(torch.zeros(1)) if geometry == "lorentz" else None

    def forward(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """(B, nodes, w) -> (B, nodes, dim) and the curvature."""
        return self.place(self.proj(nodes))

    def place(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The points of projected nodes (B, nodes, dim), and () ``c``, meaning curvature ``-c``; 0 in flat space."""
        u = projected.float() * self.log_alpha.float().exp()
        if self.log_c is None:
            return to_space(u), u.new_zeros(())
        c = bounded_curvature(self.log_c.float(), *CURVATURES).squeeze(0)
        return to_space(u, c), c

    def distances(self, points: Tensor, c: Tensor, num_children: int) -> Tensor:
        """Distances of the first nodes of an image to all: (B, nodes, dim) -> (B, children, nodes), always float32.

        Neither value nor gradient is infinite where nodes coincide, as ``arccosh`` would be.
        """
        children = points[:, :num_children]
        if self.log_c is None:
            return euclidean.pairwise_dist(children, points)
        return matmul_distances(children, points, c.reshape(1, 1), allow_low_precision=False)


def to_space(u: Tensor, c: Tensor | float | None = None) -> Tensor:
    """``expmap0`` of ``u`` (..., n) with its radius ``r`` made ``m tanh(r / m)``; None is flat, limited as c = 1."""
    r = safe_norm(u) if c is None else root(c) * safe_norm(u)
    bounded = LARGEST_RADIUS * torch.tanh(r / LARGEST_RADIUS)
    reached = bounded if c is None else torch.sinh(bounded)
    return u * torch.where(r > 0, reached / torch.where(r > 0, r, 1.0), 1.0)


class TreeLoss(nn.Module):
    """The nearest node to a child, among its level and its parent, should be its parent.

    For child ``i`` with parent ``p``: ``-log(exp(-D(i,p)/tau) / (exp(-D(i,p)/tau) + sum_j exp(-D(i,j)/tau)))`` over the
    other nodes ``j`` of its level; mean over the nodes of a level and the batch, then over levels. The sign "paper" has
    ``+D`` as printed (and in the published code), which drives children away from their parents: for reproduction only.
    """

    parent: Tensor
    one_in: Tensor
    is_candidate: Tensor
    is_above: Tensor

    def __init__(self, shape: TreeShape, tau: float = 0.2, sign: Sign = "corrected", learn_tau: bool = False):
        super().__init__()
        self.shape, self.sign = shape, sign
        self.tau: Tensor | float = tau
        self.log_tau = nn.Parameter(torch.tensor([math.log(tau)])) if learn_tau else None
        self.num_children = n = shape.starts[-2]  # all nodes below the top level
        level, parent = shape.level, shape.parent[:n]
        same = (level[:n, None] == level) & ~np.eye(n, shape.num_nodes, dtype=bool)
        is_parent = parent[:, None] == np.arange(shape.num_nodes)
        one_in = np.array(shape.sizes)[level[:n]] * (shape.depth - 1)
        self.register_buffer("parent", torch.from_numpy(parent), persistent=False)
        self.register_buffer("one_in", torch.from_numpy(one_in), persistent=False)
        self.register_buffer("is_candidate", torch.from_numpy(same | is_parent), persistent=False)
        self.register_buffer("is_above", torch.from_numpy(level[:n, None] + 1 == level), persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """The loss of the distances (B, children, nodes) of all nodes below the top level to all, a single number."""
        tau = self.tau if self.log_tau is None else self.log_tau.float().exp()
        scores = distances / (tau if self.sign == "paper" else -tau)
        total = scores.masked_fill(~self.is_candidate, float("-inf")).logsumexp(-1)
        return self.mean(total - self.of_parent(scores))

    def mean(self, of_children: Tensor) -> Tensor:
        """The mean of (B, children) over the batch and each level, then over levels."""
        # Divided by integers: a share as buffer would be rounded where a model is cast to bfloat16.
        return (of_children / self.one_in).sum(-1).mean()

    def of_parent(self, of_pairs: Tensor) -> Tensor:
        """(B, children) the entry of each child's parent."""
        index = self.parent.expand(of_pairs.shape[0], -1).unsqueeze(-1)
        return of_pairs.gather(-1, index).squeeze(-1)


@readable
class EncodingLayer(nn.Module):
    """One query per image reads the nodes of one level, then an MLP. Keys and values are made outside."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.norm, self.query, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_value: Tensor) -> Tensor:
        """(B, 1, w) and (B, N_l, 2w) -> (B, 1, w)."""
        q, (k, v) = self.query(self.norm(x)), key_value.chunk(2, -1)
        x = x + self.dropout(self.out(attend(q.to(v.dtype), k, v, self.heads, None)))
        return x + self.mlp(self.mlp_norm(x))


@readable
class Encoding(nn.Module):
    """The global feature reads the tree level by level: what is to be added to it, nothing before training."""

    def __init__(self, shape: TreeShape, channels: int, width: int = 128, heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.shape = shape
        self.in_norm, self.in_proj = nn.LayerNorm(channels), nn.Linear(channels, width)
        self.key_value = nn.Linear(width, shape.depth * 2 * width)  # every level has keys and values of its own
        self.layers = nn.ModuleList(EncodingLayer(width, heads, dropout) for _ in range(shape.depth))
        self.out_norm, self.out_proj = nn.LayerNorm(width), nn.Linear(width, channels)
        nn.init.zeros_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, pooled: Tensor, nodes: Tensor) -> Tensor:
        """(B, Cv) and (B, nodes, w) -> (B, Cv)."""
        x = self.in_proj(self.in_norm(pooled)).unsqueeze(1)  # (B, 1, w)
        key_value = self.key_value(nodes).chunk(self.shape.depth, -1)
        for level, layer in enumerate(self.layers):
            x = layer(x, self.shape.split(key_value[level])[level])
        return self.out_proj(self.out_norm(x.squeeze(1)))
