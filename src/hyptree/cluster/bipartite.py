"""Bipartite matching: every second token proposes to its most similar neighbour in the other half, the best ones merge.

The method of ToMe (arXiv 2210.09461), written from its description. Tokens at even places of the sequence (A) propose
to tokens at odd places (B), so one matrix product of half the tokens with the other half and one sort do the work; in
exchange two tokens of the same half never meet, and one matching removes at most half of the tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hyptree.cluster.labels import clip_k
from hyptree.geometry.core.numerics import strict_matmul
from hyptree.ops.cosine.reference import unit_features, wide_features
from hyptree.ops.merge import merge_mean


@torch.no_grad()
def bipartite_match(features: Tensor, k: int, num_before: int = 0) -> Tensor:
    """Clusters by bipartite matching: (B, N, D) -> labels (B, N) in 0..k-1, in the order of ToMe's next sequence.

    That is what is left of A and then B, both in their order. One matching cannot go below half of the tokens. [ours]
    For smaller ``k`` the matching is repeated: clusters become tokens with the size-weighted mean of their features,
    and match again (:func:`bipartite_rounds` says how often). Does not wait for the device.

    Args:
        features: compared by cosine similarity, in float32 (float64 stays), with autocast and TF32 off.
        k: number of clusters; more than N is N.
        num_before: tokens in front of these (class, distillation, registers), which take places but never merge.
    """
    if features.dim() != 3 or features.shape[1] < 1:
        raise ValueError(
            f"bipartite_match: expected features (B, N, D) with at least one token, got {tuple(features.shape)}"
        )
    features = wide_features(features)
    batch, num_tokens, _ = features.shape
    labels = step = torch.arange(num_tokens, device=features.device).repeat(batch, 1)
    size = torch.ones(batch, num_tokens, device=features.device)
    for previous, count in pairwise([num_tokens, *bipartite_rounds(num_tokens, k)]):
        if previous < num_tokens:
            features, size = merge_mean(features, size, step, previous)
        step = _match_labels(features, count, num_before)
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
def propose(features: Tensor, num_merges: int, num_before: int = 0) -> tuple[Tensor, Tensor]:
    """The matching itself: the tokens of A that merge, best first, and the token of B each of them goes to.

    On ties the smaller index wins, among partners and among proposals.

    Args:
        features: (B, N, D) with N >= 2. num_merges: at most ``N // 2``. num_before: as for :func:`bipartite_match`.

    Returns:
        (B, num_merges) index of tokens of A, (B, num_merges) index of tokens of B.
    """
    unit = unit_features(features)
    first = num_before % 2  # of A
    best, partner = strict_matmul(unit[:, first::2], unit[:, 1 - first :: 2].mT).max(-1)  # (B, A), first index on ties
    gone = best.sort(dim=-1, descending=True, stable=True).indices[:, :num_merges]
    return first + 2 * gone, 1 - first + 2 * partner.gather(1, gone)


def _match_labels(features: Tensor, k: int, num_before: int) -> Tensor:
    batch, num_tokens, _ = features.shape
    gone, into = propose(features, num_tokens - k, num_before)
    is_target = (torch.arange(num_tokens, device=features.device) + num_before) % 2 == 1  # (N,) in B
    num_left = k - (num_tokens + num_before % 2) // 2  # of A
    left = (~is_target).repeat(batch, 1).scatter(1, gone, False)  # (B, N)
    labels = torch.where(is_target, num_left + is_target.cumsum(0), left.cumsum(1)) - 1
    return labels.scatter(1, gone, labels.gather(1, into))
