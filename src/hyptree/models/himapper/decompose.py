"""Decomposition: the queries of all levels read a feature map by one attention call."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.numerics import strict_matmul
from hyptree.models.himapper.tree import TreeShape
from hyptree.ops.tree_reader.reference import join_heads, split_heads

Attention = Literal["cosine", "scaled"]

TEMPERATURE = 0.07
"""What cosine attention starts from, and what ``attention="scaled"`` divides its products by for ever."""
LARGEST_SCALE = 100.0


def mlp(width: int, ratio: int = 4, dropout: float = 0.0) -> nn.Sequential:
    """Two layers with GELU between."""
    return nn.Sequential(
        nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, width), nn.Dropout(dropout)
    )


class Decomposition(nn.Module):
    """One decoder layer that all levels share: queries read the tokens, then the others of their level, then an MLP.

    Rows of all levels stand side by side: one product each for queries, keys and values, one attention call for
    reading, one for looking at each other. Where the rows of a node are identical (means instead of samples), one row
    per node gives the same result, since every node of a level has equally many.

    Args:
        shape: the forest. channels: C of the tokens. width: w inside. heads: of both attentions.
        attention: "cosine" compares directions at a learned temperature (from 0.07; its inverse at most 100);
            "scaled" multiplies plain products by 1 / 0.07 as the published code.
        query_residual: add what was read to the query. Without it a node is made of image content alone.
    """

    pooling: Tensor
    other_level: Tensor

    def __init__(
        self,
        shape: TreeShape,
        channels: int,
        width: int = 128,
        heads: int = 4,
        attention: Attention = "cosine",
        query_residual: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.shape, self.heads, self.query_residual = shape, heads, query_residual
        self.token_norm, self.token_proj = nn.LayerNorm(channels), nn.Linear(channels, width)
        self.memory_norm = nn.LayerNorm(width)
        self.query_norm, self.query_proj = nn.LayerNorm(width), nn.Linear(width, width)
        self.cross_norm, self.cross_query = nn.LayerNorm(width), nn.Linear(width, width)
        self.cross_key_value, self.cross_out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.self_norm, self.self_in = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.self_out = nn.Linear(width, width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width, dropout=dropout)
        self.out_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.log_scale = nn.Parameter(torch.tensor([-math.log(TEMPERATURE)])) if attention == "cosine" else None
        self.register_buffer("pooling", torch.from_numpy(shape.pooling), persistent=False)
        self.register_buffer("other_level", _forbid_other_levels(shape), persistent=False)

    def forward(self, queries: Tensor, tokens: Tensor, return_maps: bool = False) -> tuple[Tensor, Tensor | None]:
        """What each node read.

        Args:
            queries: (nodes, w) one row per node, or samples (L, N, w) or (B, L, N, w).
            tokens: (B, M, C).

        Returns:
            (B, nodes, w), and with ``return_maps`` where it was read, (B, nodes, M) with rows that sum to one.
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
        x = x + self.dropout(self._look_around(self.self_norm(x), None if sampled else self.other_level))
        x = x + self.mlp(self.mlp_norm(x))
        x = self.out_norm(x)
        if sampled:
            x = self.pooling.to(x.dtype) @ x.reshape(batch, rows, -1)
            maps = None if maps is None else strict_matmul(self.pooling.float(), maps)  # sums stay 1 in half precision
        return x, maps

    def _read(self, queries: Tensor, memory: Tensor, return_maps: bool) -> tuple[Tensor, Tensor | None]:
        q = split_heads(self.cross_query(self.cross_norm(queries)), self.heads)
        k, v = (split_heads(part, self.heads) for part in self.cross_key_value(memory).chunk(2, -1))
        scale = 1 / TEMPERATURE
        if self.log_scale is not None:
            q = self.unit_queries(q)
            k, scale = F.normalize(k.float(), dim=-1).to(v.dtype), 1.0
        q = q.to(v.dtype).expand(v.shape[0], -1, -1, -1)  # the same rows for every image, unless noise is per image
        if not return_maps:
            return self.cross_out(join_heads(F.scaled_dot_product_attention(q, k, v, scale=scale))), None
        weights = (scale * (q @ k.mT).float()).softmax(-1)  # (B, heads, rows, M)
        return self.cross_out(join_heads(weights.to(v.dtype) @ v)), weights.mean(1)

    def unit_queries(self, q: Tensor) -> Tensor:
        """Queries (..., d) of cosine attention: of unit length in each head, over the temperature; float32."""
        assert self.log_scale is not None
        return F.normalize(q.float(), dim=-1) * self.log_scale.exp().clamp_max(LARGEST_SCALE)

    def _look_around(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.self_in(x).chunk(3, -1))
        bias = None if mask is None else mask.to(q.dtype)[:, : q.shape[-2]]
        return self.self_out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


def _forbid_other_levels(shape: TreeShape) -> Tensor:
    """(nodes, nodes and a few) added to attention scores: -inf between nodes of different levels.

    The rows are padded to a multiple of 16 numbers, the alignment that attention kernels ask of a bias.
    """
    bias = np.zeros((shape.num_nodes, -(-shape.num_nodes // 16) * 16), np.float32)
    bias[:, : shape.num_nodes][shape.level[:, None] != shape.level] = -np.inf
    return torch.from_numpy(bias)
