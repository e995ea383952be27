"""The ways to reduce tokens under one roof: each takes a ``Site`` and says what becomes of its tokens.

Clusterings give labels, and tokens of one label become their mean weighted by size. Selections give the index of the
tokens that stay. All of them see patch tokens only and run without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from hyptree.cluster import (
    agglomerate,
    bipartite_match,
    density_peaks,
    kmeans,
    kmedoids,
    pairwise_distance,
    random_tokens,
    top_k,
)
from hyptree.cluster.distance import Metric
from hyptree.errors import UserError, require_one_of
from hyptree.geometry import Euclidean, Manifold
from hyptree.ops.agglomerate import as_threshold
from hyptree.ops.agglomerate.reference import build_forest, cut
from hyptree.tokens.schedule import Threshold


@dataclass(frozen=True, eq=False)
class Site:
    """One place where tokens are reduced, as a method sees it.

    Attributes:
        features: (B, N, D) float32 (or float64), the keys averaged over heads, or the tokens themselves.
        k: tokens that shall stay.
        scores: (B, N) attention that each token receives from the class token (from all tokens without one), averaged
            over heads; None for methods that do not ask for it.
        linkage, metric, backend: as in ``patch``.
        seed: differs from layer to layer and from forward pass to forward pass.
        num_before: tokens in front that take no part (class, distillation, registers).
    """

    features: Tensor
    k: int
    scores: Tensor | None = None
    linkage: str = "average"
    metric: Metric = "cosine"
    backend: str = "auto"
    seed: int = 0
    num_before: int = 0

    def required_scores(self) -> Tensor:
        """The scores, for methods that declare that they need them."""
        assert self.scores is not None
        return self.scores


@dataclass(frozen=True, eq=False)
class Reduction:
    """What a method decides for one site: ``labels``, or ``keep``.

    Attributes:
        labels: (B, N) int64 cluster of every token, 0 to K-1.
        num: (B,) clusters of each image where they differ; None where all have K.
        weight: (B, N) weights of the means; None for the sizes. Tokens merged by such weights count as one.
        keep: (B, K) int64 ascending index of the tokens that stay; the others are dropped.
    """

    labels: Tensor | None = None
    num: Tensor | None = None
    weight: Tensor | None = None
    keep: Tensor | None = None


def _atc(site: Site) -> Reduction:
    # Our own distances are symmetric, and the features were looked at already.
    labels = agglomerate(
        pairwise_distance(site.features, site.metric), site.k, linkage=site.linkage, backend=site.backend, check=False
    )
    # NaN that nobody looked for may leave more clusters than wanted; no label may point outside.
    return Reduction(cast(Tensor, labels).clamp_max(site.k - 1))


def _tome(site: Site) -> Reduction:
    return Reduction(bipartite_match(site.features, site.k, site.num_before))


def _kmeans(site: Site) -> Reduction:
    metric: Literal["cosine", "euclidean"] = "euclidean" if isinstance(site.metric, Euclidean) else "cosine"
    return Reduction(kmeans(site.features, site.k, start=site.scores, metric=metric))


def _kmedoids(site: Site) -> Reduction:
    return Reduction(kmedoids(pairwise_distance(site.features, site.metric), site.k, start=site.scores))


def _dpcknn(site: Site) -> Reduction:
    return Reduction(density_peaks(pairwise_distance(site.features, site.metric), site.k))


def _topk(site: Site) -> Reduction:
    return Reduction(keep=top_k(site.required_scores(), site.k))


def _evit(site: Site) -> Reduction:
    """The ``k - 1`` most attended tokens, and the others as one mean weighted by their scores."""
    scores = site.required_scores()
    num_kept = site.k - 1
    labels = torch.full(scores.shape, num_kept, dtype=torch.int64, device=scores.device)
    weight = scores.clamp_min(torch.finfo(scores.dtype).tiny)  # a plain mean where nothing is attended
    if num_kept:
        kept = top_k(scores, num_kept)
        labels.scatter_(1, kept, torch.arange(num_kept, device=scores.device).expand_as(kept))
        weight = weight.scatter(1, kept, 1.0)
    return Reduction(labels, weight=weight)


def _random(site: Site) -> Reduction:
    num_images, num_tokens = site.features.shape[:2]
    generator = torch.Generator().manual_seed(site.seed)
    return Reduction(keep=random_tokens(num_images, num_tokens, site.k, generator, device=site.features.device))


@dataclass(frozen=True)
class Method:
    """A way to reduce tokens and what it asks for."""

    reduce: Callable[[Site], Reduction]
    needs_scores: bool = False
    has_threshold: bool = False
    manifolds: tuple[type[Manifold], ...] = ()
    """Metrics besides cosine; a method that compares no features takes any."""


METHODS: dict[str, Method] = {
    "atc": Method(_atc, has_threshold=True, manifolds=(Manifold,)),
    "tome": Method(_tome),
    "kmeans": Method(_kmeans, needs_scores=True, manifolds=(Euclidean,)),
    "kmedoids": Method(_kmedoids, needs_scores=True, manifolds=(Manifold,)),
    "dpcknn": Method(_dpcknn, manifolds=(Manifold,)),
    "topk": Method(_topk, needs_scores=True, manifolds=(Manifold,)),
    "evit": Method(_evit, needs_scores=True, manifolds=(Manifold,)),
    "random": Method(_random, manifolds=(Manifold,)),
}


def find_method(name: str) -> Method:
    """The method of this name, or an error that suggests one."""
    require_one_of("method", name, METHODS)
    return METHODS[name]


def check_metric(metric: object, method: str) -> None:
    """Raises unless the method exists and compares features by this metric."""
    manifolds = find_method(method).manifolds
    if metric == "cosine" or isinstance(metric, manifolds):
        return
    if isinstance(metric, Manifold):
        raise UserError(
            f"metric is {metric!r}, but {method!r} cannot compare on it; use method='atc', or metric='cosine'"
        )
    raise UserError(f"metric is {metric!r}; use 'cosine' or a manifold such as hyptree.geometry.Lorentz()")


def merge_below(site: Site, schedule: Threshold, num_patches: int, is_token: Tensor | None) -> tuple[Reduction, int]:
    """Merges everything closer than the threshold, image by image, within the bounds of the schedule.

    Args:
        site: its ``k`` is not used.
        schedule: the threshold and the bounds.
        num_patches: patch tokens at the input, which the bounds refer to.
        is_token: (B, N) False in padding; None without padding. Padding is behind the tokens of an image.

    Returns:
        The reduction, and the number of tokens to pad to. Padding keeps a label below that number and has no size.
    """
    distance = pairwise_distance(site.features, site.metric)
    threshold = as_threshold(schedule.distance, distance.dtype)
    num_tokens = distance.shape[-1]
    num_real = torch.full((len(distance),), num_tokens, device=distance.device)
    if is_token is not None:
        # Finite, so that sums stay numbers, and farther than any threshold: padding is the last to be merged.
        distance = distance.masked_fill(~(is_token[:, None] & is_token[:, :, None]), _FAR)
        num_real = is_token.sum(1)
    fewest, most = schedule.bounds(num_patches)
    is_bounded = fewest > 1 or most < num_tokens
    forest = build_forest(distance, site.linkage, threshold=None if is_bounded else threshold)
    num = num_real - (forest.height <= threshold).sum(1)
    num = num.clamp(fewest, most).minimum(num_real)
    labels = cut(forest, num_tokens - num_real + num)  # padding stands alone
    num_padded = int(num.max())
    return Reduction(labels.clamp_max(num_padded - 1), num), num_padded


_FAR = 1e30
