"""Nodes as points of hyperbolic space, and the loss that draws children to their parents there."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hyptree.geometry import euclidean, lorentz
from hyptree.geometry.core.numerics import root, safe_norm, tanhc
from hyptree.models.himapper.tree import TreeShape

Geometry = Literal["lorentz", "euclidean"]
Sign = Literal["corrected", "paper"]

CURVATURES = (0.1, 10.0)
"""A learned curvature stays between these."""
LARGEST_RADIUS = 4.0
"""No node lies farther from the origin than this over ``sqrt(c)``: farther out float32 has few digits for distances."""


class TreeSpace(nn.Module):
    """Maps nodes to the hyperboloid: a linear map, a learned scale, a soft limit of the radius, the exponential map.

    Points are given by their space components, float32 whatever the precision of the nodes.

    Args:
        width: w of the nodes. dim: axes of the space.
        geometry: "euclidean" leaves out the exponential map (and the curvature); all else stays.
    """

    def __init__(self, width: int, dim: int, geometry: Geometry = "lorentz"):
        super().__init__()
        self.geometry = geometry
        self.proj = nn.Linear(width, dim, bias=False)
        # One axis rather than none: fully_shard takes no parameter without an axis.
        self.log_alpha = nn.Parameter(torch.tensor([-0.5 * math.log(dim)]))
        self.log_c = nn.Parameter(torch.zeros(1)) if geometry == "lorentz" else None

    def curvature(self) -> Tensor:
        """() ``c``, meaning curvature ``-c``; 0 for the flat space."""
        if self.log_c is None:
            return self.log_alpha.new_zeros((), dtype=torch.float32)
        low, high = (math.log(bound) for bound in CURVATURES)
        return self.log_c.float().clamp(low, high).exp().squeeze(0)

    def forward(self, nodes: Tensor) -> Tensor:
        """(B, nodes, w) -> (B, nodes, dim)."""
        return self.place(self.proj(nodes))

    def place(self, projected: Tensor) -> Tensor:
        """The points of projected nodes (B, nodes, dim)."""
        u = projected.float() * self.log_alpha.float().exp()
        return to_space(u, None if self.log_c is None else self.curvature())

    def distances(self, children: Tensor, points: Tensor) -> Tensor:
        """(B, children, dim), (B, nodes, dim) -> (B, children, nodes), float32."""
        return tree_distances(children, points, None if self.log_c is None else self.curvature())


def to_space(u: Tensor, c: Tensor | float | None = None, largest: float = LARGEST_RADIUS) -> Tensor:
    """Points of tangent vectors ``u`` (..., n) at the origin whose radius ``r = s|u|`` is made ``m tanh(r / m)`` first.

    Args:
        c: curvature ``-c``; None for the flat space, which is limited as for ``c = 1``.
        largest: ``m``.
    """
    s = 1.0 if c is None else root(c)
    bounded = u * tanhc(s * safe_norm(u) / largest)
    return bounded if c is None else lorentz.expmap0(bounded, c)


def tree_distances(children: Tensor, points: Tensor, c: Tensor | float | None = None) -> Tensor:
    """Distances of children to all nodes of their image by one product: (B, M, n), (B, N, n) -> (B, M, N).

    The product is taken in float32 under autocast too.
    Neither value nor gradient is infinite where nodes coincide, as ``arccosh`` would be.
    """
    if c is None:
        return euclidean.pairwise_dist(children, points)
    return lorentz.pairwise_dist(children, points, c.reshape(1, 1) if isinstance(c, Tensor) else c, mode="matmul")


class TreeLoss(nn.Module):
    """Contrastive loss over a tree: the nearest node to a child, among its level and its parent, should be its parent.

    For child ``i`` with parent ``p``: ``-log(exp(-D(i,p)/tau) / (exp(-D(i,p)/tau) + sum_j exp(-D(i,j)/tau)))`` over the
    other nodes ``j`` of its level; mean over the nodes of a level and the batch, then over levels. At least 0, and
    ``log N_l`` where all distances are equal.

    Args:
        shape: the forest. tau: temperature. learn_tau: make it a parameter.
        sign: "paper" has ``+D`` as printed (and as in the published code), which drives children away from their
            parents and gathers each level in a point; for reproduction only.
    """

    parent: Tensor
    is_candidate: Tensor
    is_same_level: Tensor
    is_above: Tensor
    one_in: Tensor

    def __init__(self, shape: TreeShape, tau: float = 0.2, sign: Sign = "corrected", learn_tau: bool = False):
        super().__init__()
        self.sign: Sign = sign
        self.num_children = shape.starts[-2]  # all nodes below the top level
        self.tau: Tensor | float = tau
        self.log_tau = nn.Parameter(torch.tensor([math.log(tau)])) if learn_tau else None
        level, index = shape.level, np.arange(shape.num_nodes)
        children = slice(self.num_children)
        parent = shape.parent[children]
        same = (level[children, None] == level) & (index[children, None] != index)
        for name, value in {
            "parent": parent,
            "is_same_level": same,
            "is_above": level[children, None] + 1 == level,
            "is_candidate": same | (index == parent[:, None]),
            "one_in": np.array(shape.sizes)[level[children]] * (shape.depth - 1),
        }.items():
            self.register_buffer(name, torch.from_numpy(value), persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """The loss of the distances (B, children, nodes) of all nodes below the top level to all, a single number."""
        tau = self.tau if self.log_tau is None else self.log_tau.float().exp()
        scores = distances / (tau if self.sign == "paper" else -tau)
        own = self._of_parent(scores)
        total = scores.masked_fill(~self.is_candidate, float("-inf")).logsumexp(-1)
        return self._mean(total - own)

    def _mean(self, of_children: Tensor) -> Tensor:
        """The mean of (B, children) over the batch and each level, then over levels."""
        # Divided by integers: a share as buffer would be rounded where a model is cast to bfloat16.
        return (of_children / self.one_in).sum(-1).mean()

    def _of_parent(self, of_pairs: Tensor) -> Tensor:
        """(B, children) the entry of each child's parent."""
        index = self.parent.expand(of_pairs.shape[0], -1).unsqueeze(-1)
        return of_pairs.gather(-1, index).squeeze(-1)

    @torch.no_grad()
    def stats(self, distances: Tensor) -> dict[str, Tensor]:
        """How much of a tree the nodes are; each level counts the same.

        Parents start as averages of their children, so ``parent_retrieval`` is high before any training: read it
        together with ``distance_ratio``.
        """
        to_parent = self._of_parent(distances)
        nearest = distances.masked_fill(~self.is_above, float("inf")).argmin(-1)
        neighbours = self.is_same_level.sum(-1).clamp_min(1)
        to_level = (distances * self.is_same_level).sum(-1) / neighbours
        average = {
            "parent_retrieval": (nearest == self.parent).float(),
            "parent_distance": to_parent,
            "level_distance": to_level,
        }
        means = {name: self._mean(value) for name, value in average.items()}
        return {**means, "distance_ratio": means["parent_distance"] / means["level_distance"].clamp_min(1e-12)}
