"""Bipartite matching: every second token proposes to its most similar neighbour in the other half, the best ones merge.

The method of ToMe (arXiv 2210.09461), written from its description. Tokens of even index (A) propose to tokens of odd
index (B), so one matrix product of half the tokens with the other half and one sort do the work; in exchange two tokens
of the same half never meet, and one matching removes at most half of the tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hyptree.cluster.distance import wide_features
from hyptree.cluster.labels import clip_k, number_by_first_member
from hyptree.geometry.core.numerics import strict_matmul
from hyptree.ops.cosine.reference import unit_features
from hyptree.ops.merge import merge_mean


@torch.no_grad()
def bipartite_match(features: Tensor, k: int) -> Tensor:
    """Clusters by bipartite matching: (B, N, D) -> labels (B, N) in 0..k-1, numbered by their first member.

    One matching cannot go below half of the tokens. [ours] For smaller ``k`` the matching is repeated: clusters become
    tokens with the size-weighted mean of their features, and match again (:func:`bipartite_rounds` says how often).
    Does not wait for the device.

    Args:
        features: compared by cosine similarity, in float32 (float64 stays), with autocast and TF32 off.
        k: number of clusters; more than N is N.
    """
    _require_features(features, "bipartite_match")
    features = wide_features(features)
    batch, num_tokens, _ = features.shape
    rounds = bipartite_rounds(num_tokens, k)
    if not rounds:
        return torch.arange(num_tokens, device=features.device).repeat(batch, 1)
    labels = _match_labels(features, rounds[0])
    step, size = labels, torch.ones(batch, num_tokens, device=features.device)
    for previous, count in pairwise(rounds):
        features, size = merge_mean(features, size, step, previous)
        step = _match_labels(features, count)
        labels = step.gather(1, labels)
    return labels


def bipartite_rounds(num_tokens: int, k: int) -> list[int]:
    """Number of clusters after each matching on the way to ``k``: 196 tokens to 24 are [98, 49, 25, 24]."""
    k = clip_k(k, num_tokens, "bipartite_match")
    counts: list[int] = []
    while num_tokens > k:
        num_tokens = max(k, num_tokens - num_tokens // 2)
        counts.append(num_tokens)
    return counts


@torch.no_grad()
def propose(features: Tensor, num_merges: int) -> tuple[Tensor, Tensor]:
    """The matching itself: the even tokens that merge, best first, and the odd token each of them goes to.

    On ties the smaller index wins, among partners and among proposals.

    Args:
        features: (B, N, D) with N >= 2. num_merges: at most ``N // 2``.

    Returns:
        (B, num_merges) index of even tokens, (B, num_merges) index of odd tokens.
    """
    unit = unit_features(features)
    best, partner = strict_matmul(unit[:, 0::2], unit[:, 1::2].mT).max(-1)  # (B, A), first index on ties
    gone = best.sort(dim=-1, descending=True, stable=True).indices[:, :num_merges]
    return 2 * gone, 2 * partner.gather(1, gone) + 1


def _match_labels(features: Tensor, k: int) -> Tensor:
    batch, num_tokens, _ = features.shape
    gone, into = propose(features, num_tokens - k)
    group = torch.arange(num_tokens, device=features.device).repeat(batch, 1)
    return number_by_first_member(group.scatter_(1, gone, into), num_tokens)


def _require_features(features: Tensor, where: str) -> None:
    if features.dim() != 3 or features.shape[1] < 1:
        raise ValueError(f"{where}: expected features (B, N, D) with at least one token, got {tuple(features.shape)}")
