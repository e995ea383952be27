"""Clusters around k centres that are moved a few times: k-means on features, k-medoids on distances.

Batched, deterministic and without a gradient. No cluster is ever empty: a medoid belongs to itself, and where all
members of a mean would leave it for others, the one that gains least by it stays.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hyptree.cluster.labels import best_member, clip_k, number_by_first_member
from hyptree.cluster.select import top_k
from hyptree.geometry.core.numerics import strict_matmul
from hyptree.ops.cosine.reference import unit_features, wide_features
from hyptree.ops.merge import merge_mean


@torch.no_grad()
def kmeans(
    features: Tensor,
    k: int,
    iterations: int = 3,
    start: Tensor | None = None,
    metric: Literal["cosine", "euclidean"] = "cosine",
) -> Tensor:
    """Clusters by k-means: (B, N, D) -> labels (B, N) in 0..k-1, numbered by their first member.

    Args:
        features: in float32 (float64 stays), whatever autocast and TF32 say.
        k: number of clusters; more than N is N.
        iterations: how often the centres move to the mean of their members; 0 leaves them where they start.
        start: (B, N) scores, e.g. the attention each token receives; the k highest are the first centres. None spreads
            them evenly over the token order.
        metric: "cosine" divides features by their length first; then squared distance is twice the cosine distance.
    """
    if features.dim() != 3 or features.shape[1] < 1:
        raise ValueError(f"kmeans: expected features (B, N, D) with at least one token, got {tuple(features.shape)}")
    if metric not in ("cosine", "euclidean"):
        raise ValueError(f"kmeans: metric must be 'cosine' or 'euclidean', got {metric!r}")
    batch, num_tokens, _ = features.shape
    k = clip_k(k, num_tokens, "kmeans")
    own = _start_index(batch, num_tokens, k, start, features.device, "kmeans")  # (B, K) a token that stays
    points = unit_features(features) if metric == "cosine" else wide_features(features)
    points = points - points.mean(1, keepdim=True)  # a shift changes no distance, and products keep their digits
    one = torch.ones(batch, num_tokens, device=features.device)
    cost = _cost_of(points, points.gather(1, own.unsqueeze(-1).expand(-1, -1, points.shape[-1])))
    labels = _assign(cost, own)
    for _ in range(_require_iterations(iterations, "kmeans")):
        centres, _ = merge_mean(points, one, labels, k)
        cost = _cost_of(points, centres)  # (B, N, K)
        gain = cost.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - cost.amin(-1)  # 0 for who would stay anyway
        own = best_member(gain, labels, k)
        labels = _assign(cost, own)
    return number_by_first_member(labels, k)


@torch.no_grad()
def kmedoids(D: Tensor, k: int, iterations: int = 3, start: Tensor | None = None) -> Tensor:
    """Clusters by k-medoids: distances (B, N, N) -> labels (B, N) in 0..k-1, numbered by their first member.

    A medoid is the member with the least sum of distances to all members, the first one on ties. Sums are taken in
    float64, where those of float32 cosine distances are exact: the same distances give the same labels everywhere.

    Args:
        D: symmetric distances with zero diagonal.
        k: number of clusters; more than N is N.
        iterations: how often the medoids move; 0 leaves them where they start.
        start: as in :func:`kmeans`.
    """
    require_distances(D, "kmedoids")
    batch, num_tokens, _ = D.shape
    k = clip_k(k, num_tokens, "kmedoids")
    medoids = _start_index(batch, num_tokens, k, start, D.device, "kmedoids")
    labels = nearest_centre(D, medoids)
    for _ in range(_require_iterations(iterations, "kmedoids")):
        is_together = labels.unsqueeze(-1) == labels.unsqueeze(-2)  # (B, N, N)
        medoids = best_member(torch.where(is_together, D, 0.0).sum(-1, dtype=torch.float64), labels, k)
        labels = nearest_centre(D, medoids)
    return number_by_first_member(labels, k)


def nearest_centre(D: Tensor, centres: Tensor) -> Tensor:
    """Which centre is nearest to each token, on ties the first: D (B, N, N), index (B, K) -> (B, N) in 0..K-1.

    A centre belongs to itself, also where another one lies at distance 0.
    """
    rows = D.gather(1, centres.unsqueeze(-1).expand(-1, -1, D.shape[-1]))  # (B, K, N): D is symmetric
    return _assign(rows.mT, centres)


def require_distances(D: Tensor, where: str) -> None:
    """Raise unless ``D`` is a batch of square matrices of floating-point numbers."""
    if D.dim() != 3 or D.shape[1] != D.shape[2] or D.shape[1] < 1 or not D.is_floating_point():
        raise ValueError(
            f"{where}: expected distances (B, N, N), got {str(D.dtype).removeprefix('torch.')} {tuple(D.shape)}"
        )


def _assign(cost: Tensor, own: Tensor) -> Tensor:
    """Cheapest centre of each token (B, N, K) -> (B, N); the tokens ``own`` (B, K) stay with their centres."""
    labels = cost.min(-1).indices
    return labels.scatter_(1, own, torch.arange(own.shape[1], device=own.device).expand_as(own))


def _cost_of(points: Tensor, centres: Tensor) -> Tensor:
    """Half the squared distance to each centre, but for half the squared length of the point: (B, N, K)."""
    return centres.square().sum(-1).unsqueeze(1) / 2 - strict_matmul(points, centres.mT)


def _start_index(batch: int, num_tokens: int, k: int, start: Tensor | None, device: torch.device, where: str) -> Tensor:
    if start is None:
        return (torch.arange(k, device=device) * num_tokens // k).repeat(batch, 1)
    if start.shape != (batch, num_tokens):
        raise ValueError(f"{where}: start must be scores ({batch}, {num_tokens}), got shape {tuple(start.shape)}")
    return top_k(start, k)


def _require_iterations(iterations: int, where: str) -> int:
    if iterations < 0:
        raise ValueError(f"{where}: iterations must be at least 0, got {iterations}")
    return iterations
