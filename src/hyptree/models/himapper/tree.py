"""The probabilistic tree of Hi-Mapper: Gaussian leaves, parents by moment matching, samples that become queries."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

Mixture = Literal["moment", "stratified"]
Noise = Literal["shared", "per_image"]


class TreeShape:
    """Who is whose parent in a forest of binary trees whose levels halve: 32, 16, 8, 4 nodes by default.

    Level 1 holds the leaves. The parent of node ``i`` is ``i // 2`` of the level above; the top level has
    ``num_leaves / 2^(depth - 1)`` nodes and no parent. Where all nodes stand in one row, leaves come first.

    Args:
        num_leaves: nodes of level 1. depth: number of levels.
    """

    def __init__(self, num_leaves: int = 32, depth: int = 4):
        if depth < 1 or num_leaves < 1 or num_leaves % 2 ** (depth - 1):
            raise ValueError(
                "num_leaves must be a positive multiple of 2^(depth - 1), as each level is half the one below, got "
                f"num_leaves={num_leaves}, depth={depth}; take e.g. num_leaves={_next_multiple(num_leaves, depth)}"
            )
        self.num_leaves, self.depth = num_leaves, depth
        self.sizes = tuple(num_leaves >> level for level in range(depth))
        self.num_nodes = sum(self.sizes)
        self.starts = tuple(itertools.accumulate((0, *self.sizes)))
        """Where each level starts in the row of all nodes; one number more than levels."""

    # Arrays of numpy: tensors made here would follow torch.device("meta") and never come back.

    @cached_property
    def level(self) -> np.ndarray:
        """(nodes,) the level of each node, from 0."""
        return np.repeat(np.arange(self.depth), self.sizes)

    @cached_property
    def parent(self) -> np.ndarray:
        """(nodes,) the parent of each node in the row of all nodes, -1 at the top."""
        rank = np.concatenate([np.arange(size) for size in self.sizes])
        above = np.array(self.starts)[self.level + 1] + rank // 2
        return np.where(self.level < self.depth - 1, above, -1)

    @cached_property
    def pooling(self) -> np.ndarray:
        """(nodes, depth * num_leaves) the product with it averages each node's query rows.

        Level ``l`` has ``2^(l - 1)`` rows for each of its nodes, next to each other: ``num_leaves`` rows in all.
        """
        matrix = np.zeros((self.num_nodes, self.depth, self.num_leaves), np.float32)
        for level, size in enumerate(self.sizes):
            rows = np.repeat(np.eye(size, dtype=np.float32), 2**level, 1) / 2**level
            matrix[self.starts[level] : self.starts[level + 1], level] = rows
        return matrix.reshape(self.num_nodes, -1)

    def split(self, nodes: Tensor, dim: int = 1) -> list[Tensor]:
        """The nodes in one row as one tensor per level, leaves first."""
        return list(nodes.split(self.sizes, dim))


def _next_multiple(num_leaves: int, depth: int) -> int:
    step = 2 ** max(depth - 1, 0)
    return max(step, -(-num_leaves // step) * step)


class ProbabilisticTree(nn.Module):
    """Gaussians at the leaves, and at every node above the Gaussian with the moments of its children's mixture.

    Args:
        shape: the forest. width: axes of a query.
        probabilistic: False leaves the variances out: no noise, no KL.
        sibling_std: how far the means of two sibling leaves start from each other; with 0.01, the value of the
            published code, siblings stay one point.
        mixture: "moment" samples a parent from its own Gaussian, "stratified" half of its rows from each child's.
        noise: "shared" draws one set of rows for the batch, "per_image" one for each image.
    """

    def __init__(
        self,
        shape: TreeShape,
        width: int,
        probabilistic: bool = True,
        sibling_std: float = 0.75,
        mixture: Mixture = "moment",
        noise: Noise = "shared",
    ):
        super().__init__()
        self.shape, self.sibling_std, self.mixture, self.noise = shape, sibling_std, mixture, noise
        self.mu = nn.Parameter(torch.empty(shape.num_leaves, width))
        self.logvar = nn.Parameter(torch.empty(shape.num_leaves, width)) if probabilistic else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Siblings around a common centre, variances about 1."""
        num_leaves, width = self.mu.shape
        centres = 1.5 * torch.randn(-(-num_leaves // 2), width, device=self.mu.device)
        siblings = centres.repeat_interleave(2, 0)[:num_leaves]
        with torch.no_grad():
            self.mu.copy_(siblings + self.sibling_std * torch.randn_like(siblings))
            if self.logvar is not None:
                nn.init.xavier_uniform_(self.logvar)

    def moments(self, with_variances: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """[L x (N_l, w)] mean and variance of each node; no variances if they are not asked for or there are none.

        A mean is the average of its two children's, a variance that of their mixture: the mean of theirs and half their
        distance squared, a sum of positive terms, as ``E[x^2] - E[x]^2`` may come out negative.
        """
        means: list[Tensor] = [self.mu]
        variances = [self.logvar.exp()] if with_variances and self.logvar is not None else []
        for _ in range(self.shape.depth - 1):
            left, right = means[-1][0::2], means[-1][1::2]
            means.append((left + right) / 2)
            if variances:
                within = variances[-1]
                variances.append((within[0::2] + within[1::2]) / 2 + ((left - right) / 2).square())
        return means, variances

    def forward(self, batch_size: int, needs_kl: bool = True) -> tuple[Tensor, Tensor]:
        """Queries, and the KL of the top level to the standard Gaussian, 0 where nothing is random or it is not needed.

        While training a tree with variances, queries are samples by torch's default generator (as dropout), (L, N, w),
        or (B, L, N, w) with noise per image: level ``l`` holds ``2^(l - 1)`` rows of each of its nodes. Else they are
        the means, (nodes, w). The KL is the mean over nodes and axes of ``KL(node || N(0, 1))``, a single number.
        """
        means, variances = self.moments(self.training or needs_kl)
        if variances:
            kl = 0.5 * (means[-1].square() + variances[-1] - 1 - variances[-1].log()).mean()
        else:
            kl = self.mu.new_zeros((), dtype=torch.float32)
        if not (variances and self.training):
            return torch.cat(means), kl
        # Half of the rows from each child: the rows of the level below, which stand in the right order already.
        lower = 1 if self.mixture == "stratified" else 0
        source = [max(level - lower, 0) for level in range(self.shape.depth)]
        mean = torch.stack([means[level].repeat_interleave(2**level, 0) for level in source])
        std = torch.stack([variances[level].sqrt().repeat_interleave(2**level, 0) for level in source])
        images = (batch_size,) if self.noise == "per_image" else ()
        noise = torch.randn(*images, *mean.shape, dtype=mean.dtype, device=mean.device)
        return mean + std * noise, kl
