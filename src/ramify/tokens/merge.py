"""Merge tokens into their clusters and hand the result back: weighted means, gathers, maps of several layers in one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.merge.reference import merge_mean, spread


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
