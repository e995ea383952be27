"""The whole hierarchy of each image: as a scipy linkage matrix, as a Tree, and cut anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hyptree.cluster.labels import clip_k
from hyptree.errors import UserError
from hyptree.ops.agglomerate import as_threshold, grow_forest
from hyptree.ops.agglomerate.reference import Forest, cut, cut_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyptree.tree import Tree


def dendrogram(
    D: Tensor,
    linkage: str = "average",
    *,
    backend: str = "auto",
    deterministic: bool = False,
    check: bool | None = None,
) -> Dendrogram:
    """All merges of each image; the arguments are those of :func:`hyptree.cluster.agglomerate`.

    Backend "triton" has no kernel for this; "auto" then is torch. Ties on scipy and fastcluster are theirs.
    """
    return Dendrogram(grow_forest(D, linkage, backend, deterministic, check), D.dtype, has_batch=D.ndim == 3)


class Dendrogram:
    """The N - 1 merges of every image of a batch, on the device of the distances.

    Args:
        forest: all links, as ``hyptree.ops.agglomerate.reference`` keeps them.
        dtype: type of the distances, which thresholds are rounded to; by default that of the heights.
        has_batch: False for the answer to one (N, N) matrix: cuts then have no batch axis.

    Attributes:
        up: (B, N) int64, the smaller end of each slot's link, see ``Forest``.
        height: (B, N) distance at which each slot's link joins, inf in the one empty slot.
    """

    def __init__(self, forest: Forest, dtype: torch.dtype | None = None, has_batch: bool = True):
        self.forest, self.up, self.height = forest, forest.up, forest.height
        self.dtype = dtype or forest.height.dtype
        self.has_batch = has_batch

    def __len__(self) -> int:
        return len(self.forest.up)

    def __repr__(self) -> str:
        return f"Dendrogram({len(self)} images, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """N, the tokens of each image."""
        return self.forest.up.shape[1]

    def cut(self, k: int) -> Tensor:
        """Labels of k clusters, (B, N) int64: those of ``agglomerate(D, k)``."""
        labels = cut(self.forest, clip_k(k, self.num_tokens, "Dendrogram.cut"))
        return labels if self.has_batch else labels[0]

    def cut_at(self, threshold: float) -> tuple[Tensor, Tensor]:
        """Labels (B, N) and number of clusters (B,): those of ``agglomerate(D, threshold=threshold)``."""
        labels, num_clusters = cut_at(self.forest, as_threshold(threshold, self.dtype))
        return (labels, num_clusters) if self.has_batch else (labels[0], num_clusters[0])

    def merges(self, i: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The merges of image i in order: a token of each cluster, smaller first, and the distance, (N - 1,) each."""
        if not -len(self) <= i < len(self):
            raise UserError(f"there is no image {i} in a dendrogram of {len(self)} images")
        low, height = self.up[i].cpu().numpy(), self.height[i].double().cpu().numpy()
        if self.forest.edge is not None:  # in order already
            return low[:-1], self.forest.edge[i].cpu().numpy()[:-1], height[:-1]
        high = np.arange(self.num_tokens)
        order = np.lexsort((high, low, height))[:-1]
        return low[order], high[order], height[order]

    def linkage(self, i: int = 0) -> np.ndarray:
        """The merges of image i as a scipy linkage matrix, (N - 1, 4): cluster, cluster, distance, size."""
        low, high, height = self.merges(i)
        n = self.num_tokens
        parent = list(range(n))  # chains of tokens that end at one token of each cluster
        cluster, size = list(range(n)), [1] * n  # number and size of its cluster, valid at that token

        def end(token: int) -> int:
            while parent[token] != token:
                parent[token] = token = parent[parent[token]]
            return token

        Z = np.empty((n - 1, 4))
        for row, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
            a, b = end(a), end(b)
            parent[b] = a
            size[a] += size[b]
            Z[row] = min(cluster[a], cluster[b]), max(cluster[a], cluster[b]), height[row], size[a]
            cluster[a] = n + row
        return Z

    def tree(self, i: int = 0, label: Sequence[str] | None = None) -> Tree:
        """The hierarchy of image i: nodes 0 to N - 1 are its tokens at height 0, then come the merges, the root last.

        Args:
            i: which image.
            label: N names of the tokens.
        """
        from hyptree.tree import Tree

        return Tree.from_linkage(self.linkage(i), label)
