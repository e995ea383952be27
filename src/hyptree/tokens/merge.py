"""Merge tokens into their clusters and hand the result back: weighted means, gathers, maps of several layers in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from hyptree.errors import require_known
from hyptree.ops.merge import merge_mean
from hyptree.ops.merge.reference import segment_sum, spread

if TYPE_CHECKING:
    from hyptree.cluster.distance import Metric

MERGING = ("atc", "tome", "kmeans", "kmedoids", "dpcknn")
"""Methods that put every token into a cluster; the others drop tokens, which nothing can bring back."""


class Merge(Protocol):
    """Closure of :func:`matcher`: (B, T, C) tokens -> (B, protected + K, C)."""

    def __call__(self, x: Tensor, mode: Literal["sum", "mean", "amax"] = "mean") -> Tensor: ...


class Unmerge(Protocol):
    """Closure of :func:`matcher`: (B, protected + K, C) -> (B, T, C)."""

    def __call__(self, y: Tensor) -> Tensor: ...


def merge_weighted(x: Tensor, size: Tensor | None, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """One token per cluster, the mean of its members weighted by how many patches each stands for.

    Linear in ``x`` and differentiable in it; summed in float32 in a fixed order (float64 for float64), whatever
    autocast says. A cluster without members, or of padding only (size 0), is 0 with size 0.

    Args:
        x: (B, N, C) tokens. size: (B, N), None for all 1. labels: (B, N) int64 in 0..k-1. k: number of clusters.

    Returns:
        (B, K, C) in the dtype of ``x``, and its sizes (B, K).
    """
    _require_labels(labels, k, x, "merge_weighted")
    if size is None:
        size = torch.ones(labels.shape, device=x.device)
    elif size.shape != labels.shape:
        raise ValueError(f"merge_weighted: size {tuple(size.shape)} does not match labels {tuple(labels.shape)}")
    return merge_mean(x, size, labels, k)


def unmerge(y: Tensor, labels: Tensor) -> Tensor:
    """Every token gets what its cluster holds: (B, K, C), labels (B, N) -> (B, N, C), for any number of channels.

    With labels from :func:`compose` it goes back over several merges at once. The gradient sums in a fixed order.
    """
    if y.dim() != 3:
        raise ValueError(f"unmerge: expected clusters (B, K, C), got shape {tuple(y.shape)}")
    _require_labels(labels, y.shape[1], y, "unmerge", same_length=False)
    return spread(y, labels)


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Where each original token is after two merges: labels (B, N) into K, labels (B, K) into L -> (B, N) into L."""
    if first.dim() != 2 or second.dim() != 2 or first.shape[0] != second.shape[0]:
        raise ValueError(
            f"compose: expected labels (B, N) and (B, K) of the same images, got {tuple(first.shape)} "
            f"and {tuple(second.shape)}"
        )
    return second.gather(1, first)


def matcher(
    features: Tensor,
    k: int,
    method: str = "atc",
    protected: int = 1,
    *,
    linkage: str = "average",
    metric: Metric = "cosine",
    scores: Tensor | None = None,
) -> tuple[Merge, Unmerge]:
    """Two closures that merge tokens by the clusters of ``features``, and hand the result back to every token.

    ``merge(x, mode)`` adds the members of a cluster, takes their plain mean or their maximum, for tokens of any number
    of channels; sizes are ``merge(size.unsqueeze(-1), "sum")``. The protected tokens in front take no part and stay in
    front, bit for bit. Both are differentiable, and sums have a fixed order.

    Args:
        features: (B, T, D) of all tokens, the protected ones in front among them. No gradient goes into them.
        k: number of clusters of the other ``T - protected`` tokens; more is as many as there are.
        method: one of ``MERGING``.
        protected: how many tokens in front are left alone (class, distillation, registers).
        linkage, metric: for "atc"; k-medoids and density peaks use the metric too.
        scores: (B, T - protected) where k-means and k-medoids start, see :func:`hyptree.cluster.kmeans`.
    """
    require_known("matcher needs a method that gives clusters, not {!r}", [method], MERGING)
    if features.dim() != 3 or not 0 <= protected < features.shape[1]:
        raise ValueError(
            f"matcher: expected features (B, T, D) with more than protected = {protected} tokens, "
            f"got {tuple(features.shape)}"
        )
    if k < 1:
        raise ValueError(f"matcher: k must be at least 1, got {k}")
    from hyptree.tokens.methods import (
        METHODS,
        Site,
        check_metric,
    )  # here because methods import half of the clusterings

    check_metric(metric, method)
    num_tokens = features.shape[1]
    k = min(k, num_tokens - protected)
    others = features[:, protected:].detach()
    site = Site(others, k, scores=scores, linkage=linkage, metric=metric, num_before=protected)
    labels = METHODS[method].reduce(site).labels
    assert labels is not None

    def merge(x: Tensor, mode: Literal["sum", "mean", "amax"] = "mean") -> Tensor:
        if x.dim() != 3 or x.shape[1] != num_tokens:
            raise ValueError(f"merge: expected tokens (B, {num_tokens}, C), got {tuple(x.shape)}")
        front, x = x[:, :protected], x[:, protected:]
        return torch.cat([front, _combine(x, labels, k, mode)], 1)

    def unmerge_all(y: Tensor) -> Tensor:
        if y.dim() != 3 or y.shape[1] != protected + k:
            raise ValueError(f"unmerge: expected tokens (B, {protected + k}, C), got {tuple(y.shape)}")
        return torch.cat([y[:, :protected], unmerge(y[:, protected:], labels)], 1)

    return merge, unmerge_all


def _combine(x: Tensor, labels: Tensor, k: int, mode: str) -> Tensor:
    if mode == "mean":
        return merge_weighted(x, None, labels, k)[0]
    if mode == "sum":
        wide = x if x.dtype == torch.float64 else x.float()
        return segment_sum(wide, labels, k).to(x.dtype)
    if mode == "amax":
        index = labels.unsqueeze(-1).expand_as(x)
        lowest = x.new_full((len(x), k, x.shape[-1]), float("-inf"))
        return lowest.scatter_reduce(1, index, x, "amax", include_self=False)  # a maximum has no order of summation
    raise ValueError(f"merge: mode must be 'sum', 'mean' or 'amax', got {mode!r}")


def _require_labels(labels: Tensor, k: int, x: Tensor, where: str, same_length: bool = True) -> None:
    if k < 1:
        raise ValueError(f"{where}: the number of clusters must be at least 1, got {k}")
    fits = labels.dim() == 2 and x.dim() == 3 and labels.shape[0] == x.shape[0]
    if not fits or (same_length and labels.shape[1] != x.shape[1]):
        raise ValueError(
            f"{where}: labels {tuple(labels.shape)} do not match tokens {tuple(x.shape)}; "
            "expected labels (B, N) and tokens (B, N, C), prefix tokens left out of both"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"{where}: labels must be int64, got {str(labels.dtype).removeprefix('torch.')}")
    # On a GPU this look at the values would wait for the device, and a compiler cannot look at all.
    if labels.device.type == "cpu" and labels.numel() and not torch.compiler.is_compiling():
        low, high = labels.aminmax()
        if int(low) < 0 or int(high) >= k:
            raise ValueError(f"{where}: labels must lie in 0..{k - 1}, found {int(low)}..{int(high)}")
