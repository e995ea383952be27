"""The links of a hierarchy while they are found, when they are there, and how they are cut into clusters."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_INF = math.inf


class Forest(NamedTuple):
    """The links found so far, one slot per token and image.

    Complete, average, ward: slot i holds the merge that absorbed the cluster represented by token i. ``up[i] < i`` is
    the representative it went to. Each token is absorbed at most once and token 0 never, so N slots hold every merge.
    ``edge`` is None.

    Single: slots 0, 1, ... hold edges of the minimum spanning tree in ascending order of (height, smaller end, larger
    end), at most N - 1 of them. The edge of slot i joins the original tokens ``up[i] < edge[i]``. (Links in such an
    order and with both ends can come from elsewhere too: :func:`cut` takes the first slots, whatever the order is.)

    Empty slots have ``height`` inf and ``up[i] = i`` (and ``edge[i] = i``). A forest that was grown only as far as
    needed contains all links up to the cut and perhaps some later ones.

    Attributes:
        up: (B, N) int64, the smaller end of the link.
        height: (B, N) distance at which the link joins; float64 for average and ward, else the type of the distances.
        edge: (B, N) int64, the larger end of the link; None where that is the slot itself.
    """

    up: Tensor
    height: Tensor
    edge: Tensor | None = None


class Links:
    """The forest while it grows: (B, N + 1), the last column takes what is not to be kept."""

    def __init__(self, D: Tensor, dtype: torch.dtype):
        num_images, num_tokens = D.shape[:2]
        self.num_tokens = num_tokens
        self.up = torch.arange(num_tokens + 1, device=D.device).repeat(num_images, 1)
        self.edge = self.up.clone()
        self.height = torch.full(self.up.shape, _INF, dtype=dtype, device=D.device)

    def limit(self, image: Tensor | slice, wanted: int, threshold: float | None) -> Tensor:
        """The height above which no link of each image counts, as far as is known by now: (A,) for images (A,).

        Links are certain to be there, so the ``wanted``-th smallest of those found can only come down. Merging brings
        nobody closer: a cluster whose nearest neighbour is farther away than this takes part in no link that counts.
        """
        limit = self.height[image, : self.num_tokens].kthvalue(wanted, 1).values
        return limit if threshold is None else limit.clamp_max(threshold)

    def add(self, image: Tensor, slot: Tensor, low: Tensor, height: Tensor, high: Tensor | None = None) -> None:
        at = image[:, None], slot
        self.up[at] = low
        self.height[at] = height.to(self.height.dtype)
        if high is not None:
            self.edge[at] = high

    def in_order(self) -> Forest:
        """The edges that were added, in ascending order."""
        n = self.num_tokens
        up, height, edge = self.up[:, :n], self.height[:, :n], self.edge[:, :n]
        order = _order(up, height, edge)
        up, height, edge = (values.gather(1, order) for values in (up, height, edge))
        slot = torch.arange(n, device=up.device)
        is_empty = height == _INF
        return Forest(torch.where(is_empty, slot, up), height, torch.where(is_empty, slot, edge))


def _order(up: Tensor, height: Tensor, edge: Tensor) -> Tensor:
    """The slots in the order of their links, by (height, smaller end, larger end)."""
    order = (up * up.shape[1] + edge).argsort(1)
    return order.gather(1, height.gather(1, order).argsort(dim=1, stable=True))


# ---------------------------------------------------------------------- cuts
@torch.no_grad()
def cut(forest: Forest, k: int | Tensor) -> Tensor:
    """Labels of exactly k clusters, (B, N) int64: clusters are numbered in ascending order of their smallest token.

    Takes the N - k smallest links by (height, smaller end, larger end). ``k`` is one number or (B,), clipped to 1 to N;
    a forest that was not grown that far gives more clusters.
    """
    num_tokens = forest.up.shape[1]
    slot = torch.arange(num_tokens, device=forest.up.device)
    rank = slot
    if forest.edge is None:  # else in order already
        order = _order(forest.up, forest.height, slot)
        rank = torch.empty_like(order).scatter_(1, order, slot.expand_as(order))
    num_links = num_tokens - (k[:, None] if isinstance(k, Tensor) else k)
    return _labels(forest, (rank < num_links) & (forest.height < _INF))


@torch.no_grad()
def cut_at(forest: Forest, threshold: float) -> tuple[Tensor, Tensor]:
    """Labels (B, N) after all merges of height ``<= threshold``, and how many clusters each image then has, (B,)."""
    is_kept = forest.height <= threshold
    is_kept &= forest.height < _INF
    return _labels(forest, is_kept), forest.up.shape[1] - is_kept.sum(1)


def _labels(forest: Forest, is_kept: Tensor) -> Tensor:
    """Numbers of the clusters that the kept links form, (B, N)."""
    slot = torch.arange(is_kept.shape[1], device=is_kept.device)
    if forest.edge is None:
        root = follow(torch.where(is_kept, forest.up, slot))  # (B, N) smallest token of each cluster
    else:
        root = _components(torch.where(is_kept, forest.up, slot), torch.where(is_kept, forest.edge, slot))
    number = (root == slot).cumsum(1) - 1
    return number.gather(1, root)


def follow(up: Tensor) -> Tensor:
    """Follows pointers (B, N) to their roots, by doubling."""
    for _ in range((up.shape[1] - 1).bit_length()):
        up = up.gather(1, up)
    return up


def _components(low: Tensor, high: Tensor) -> Tensor:
    """Smallest token connected to each token by the edges ``low``-``high`` of (B, N) slots, (B, N).

    Components that touch a smaller one hook onto the smallest they touch, then pointers are followed to the root. One
    that touches only larger ones is joined by its neighbour, at the latest one step after that one has found a smaller
    name. So two steps at least halve the components that are not finished, and a fixed number of steps is enough.
    """
    name = token = torch.arange(low.shape[1], device=low.device).repeat(len(low), 1)
    for _ in range(2 * (low.shape[1] - 1).bit_length()):
        ends = name.gather(1, low), name.gather(1, high)
        if low.device.type == "cpu" and torch.equal(*ends):  # elsewhere looking costs more than going on
            break
        small, large = torch.minimum(*ends), torch.maximum(*ends)
        name = follow(token.scatter_reduce(1, large, small, "amin")).gather(1, name)
    return name
