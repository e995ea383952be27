"""Encoding: the global feature reads the tree level by level and gives what is to be added to it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.models.himapper.decompose import join_heads, mlp, split_heads
from hyptree.models.himapper.tree import TreeShape


class EncodingLayer(nn.Module):
    """One query per image reads the nodes of one level, then an MLP. Keys and values are made outside."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.norm, self.query, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_value: Tensor) -> Tensor:
        """(B, 1, w) and (B, N_l, 2w) -> (B, 1, w)."""
        q = split_heads(self.query(self.norm(x)), self.heads)
        k, v = (split_heads(part, self.heads) for part in key_value.chunk(2, -1))
        x = x + self.dropout(self.out(join_heads(F.scaled_dot_product_attention(q.to(v.dtype), k, v))))
        return x + self.mlp(self.mlp_norm(x))


class Encoding(nn.Module):
    """What the tree adds to the global feature: nothing before training, since the last layer starts at zero.

    Args:
        shape: the forest. channels: Cv of the global feature. width: w of the nodes. heads: of the attention.
    """

    def __init__(self, shape: TreeShape, channels: int, width: int = 128, heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.shape = shape
        self.in_norm, self.in_proj = nn.LayerNorm(channels), nn.Linear(channels, width)
        # Keys and values of every level have weights of their own, in one product for all nodes.
        self.key_value = nn.Linear(width, shape.depth * 2 * width)
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
