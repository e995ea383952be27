"""How well an embedding gives back the hierarchy it was made from: mean rank, MAP, and how well cones separate.

Definitions of Nickel and Kiela (2017). For a node ``u`` with ancestors ``A(u)``, all other nodes are ordered by their
distance to ``u``. The rank of an ancestor ``v`` is one more than the number of non-ancestors before it; the
precision at ``v`` is the share of ancestors among all nodes up to ``v``. Mean rank is the mean over all pairs, MAP the
mean over nodes of the mean precision.

Ties count against the embedding: one that puts all nodes in one place scores the share of ancestors, not 1. That is how
scikit-learn's ``average_precision_score``, with which the paper's code computes MAP, treats equal scores; for the mean
rank that code takes them in the order in which its sort leaves them. Two nodes are tied if their distances are equal up
to ``tie_tolerance``: constructions with equal edges put many nodes at the same distance, and there rounding would toss
a coin for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hyptree.geometry.manifold import Manifold, _Hyperbolic

TIE_TOLERANCE = 1e-6
"""Distances closer than this share of their size are tied: float64 points up to radius 20 or so are that exact."""
_CHUNK_BYTES = 1 << 24
"""Memory for the distances of one chunk of nodes."""


class Reconstruction(NamedTuple):
    """Mean rank (1 is perfect) and mean average precision in [0, 1], with what they were measured on."""

    mean_rank: float
    map: float
    num_nodes: int
    num_pairs: int
    is_sampled: bool


class ConeScore(NamedTuple):
    """How well the cone energy separates (ancestor, descendant) pairs from others."""

    f1: float
    precision: float
    recall: float
    threshold: float
    f1_inside: float
    """F1 of the cones as they are: a pair holds if the descendant lies inside the cone of the ancestor."""
    num_positives: int
    num_negatives: int
    is_sampled: bool


def reconstruction(
    points: Tensor,
    pairs: Tensor,
    manifold: Manifold,
    *,
    by: str = "distance",
    tie_tolerance: float = TIE_TOLERANCE,
    num_samples: int | None = None,
    seed: int = 0,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Reconstruction:
    """Mean rank and MAP of an embedding.

    Memory is bounded by ``chunk_bytes`` a few times over, whatever the number of nodes.

    Args:
        points: (N, n) one point per node.
        pairs: (P, 2) node and ancestor, sorted by node, each once.
        manifold: the space of the points.
        by: order nodes by "distance", or by "cones", how far ``u`` is outside the cone of the other node.
        tie_tolerance: a node ties with an ancestor if it is less than this share of their distance farther away (in
            radians by cones); 0 ties nothing but equal numbers.
        num_samples: measure this many random nodes instead of all.
    """
    if not 0 <= tie_tolerance < 1:
        raise ValueError(f"tie_tolerance must be in [0, 1), got {tie_tolerance}; 0 ties equal distances alone")
    if by not in ("distance", "cones"):
        raise ValueError(f'by must be "distance" or "cones", got {by!r}')
    n = len(points)
    pairs = pairs.to(points.device)
    counts = torch.bincount(pairs[:, 0], minlength=n)
    offsets = counts.cumsum(0) - counts
    nodes = counts.nonzero().squeeze(1)
    is_sampled = num_samples is not None and num_samples < len(nodes)
    if is_sampled:
        generator = torch.Generator().manual_seed(seed)
        nodes = nodes[torch.randperm(len(nodes), generator=generator)[:num_samples].to(nodes.device).sort().values]
    score, slope = _score(points, manifold, by)

    rank_sum, precision_sum, num_pairs = 0.0, 0.0, 0
    for chunk in nodes.split(max(1, chunk_bytes // (8 * n))):
        values = score(chunk)  # (C, N)
        values.scatter_(1, chunk[:, None], torch.inf)
        below, above = _closer(values, lambda own: own + tie_tolerance * slope(own), chunk, pairs, offsets, counts)
        rank_sum += float((above + 1).sum())
        precision = below / (below + above)
        row = torch.repeat_interleave(torch.arange(len(chunk), device=chunk.device), counts[chunk])
        per_node = torch.zeros(len(chunk), dtype=torch.float64, device=chunk.device).index_add_(0, row, precision)
        precision_sum += float((per_node / counts[chunk]).sum())
        num_pairs += len(row)
    return Reconstruction(rank_sum / num_pairs, precision_sum / len(nodes), len(nodes), num_pairs, is_sampled)


Function = Callable[[Tensor], Tensor]


def _score(points: Tensor, manifold: Manifold, by: str) -> tuple[Function, Function]:
    """Function from (C,) nodes to (C, N) scores in float64, small where the other node fits as an ancestor.

    And what a score gains when its distance grows by its own size, at that pace; when its angle grows by a radian.
    """
    points = points.detach().double()
    if by == "distance" and isinstance(manifold, _Hyperbolic):
        # q = sinh^2(z), z = s d / 2, so dq/dz z = 2 z sinh(z) cosh(z).
        return _half_sinh(points, manifold), lambda q: 2 * torch.asinh(q.sqrt()) * q.sqrt() * torch.sqrt(1 + q)
    if by == "distance":
        return lambda nodes: manifold.pairwise_dist(points[nodes], points), lambda distance: distance
    assert isinstance(manifold, _Hyperbolic)
    aperture = manifold.half_aperture(points)
    # Not cut off at zero as the energy is: inside the cone the one closer to the axis comes first.
    return lambda nodes: manifold.exterior_angle(points[None], points[nodes][:, None]) - aperture, torch.ones_like


def _half_sinh(points: Tensor, manifold: _Hyperbolic) -> Function:
    """Function from (C,) nodes to (C, N) values of ``sinh^2(s d / 2)``, which grows with the distance ``d``.

    ``sinh^2((a - b)/2) + sinh(a) sinh(b) |x/|x| - y/|y||^2 / 4`` for points at radius ``a`` and ``b``: as exact as the
    distance, and without its roots and logarithms, of which an order has no need.
    """
    a = manifold.dist0(points) * float(manifold.c) ** 0.5
    direction = torch.nn.functional.normalize(points, dim=1)
    grow, shrink, reach = torch.exp(a / 2) / 2, torch.exp(-a / 2), torch.sinh(a) / 4

    def score(nodes: Tensor) -> Tensor:
        radial = grow[nodes, None] * shrink
        radial -= shrink[nodes, None] * grow
        chord = torch.cdist(direction[nodes], direction, compute_mode="donot_use_mm_for_euclid_dist")
        return radial.square_().add_(chord.square_().mul_(4 * reach[nodes, None] * reach))

    return score


def _closer(
    values: Tensor, limit: Function, nodes: Tensor, pairs: Tensor, offsets: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """For each pair of the chunk: ancestors and others with a score up to that of the pair, (P',) float64 each.

    ``limit`` gives the largest score that ties with that of a pair.
    """
    degree = counts[nodes]
    row, place = ragged(degree)
    ancestor = pairs[offsets[nodes][row] + place, 1]
    own = values.new_full((len(nodes), int(degree.max())), torch.inf)  # (C, K) scores of the ancestors, padded
    own[row, place] = values[row, ancestor]
    last = limit(own)
    everyone = torch.searchsorted(values.sort(1).values, last, right=True)
    ancestors = torch.searchsorted(own.sort(1).values, last, right=True)
    below = ancestors[row, place].double()
    return below, everyone[row, place].double() - below


def ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place in the row of every entry of rows with these lengths: (R,) -> (total,), (total,)."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    start = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row), device=lengths.device) - start[row]


def cone_score(
    points: Tensor,
    pairs: Tensor,
    manifold: Manifold,
    *,
    num_negatives: int = 10,
    max_exact: int = 4_000_000,
    seed: int = 0,
) -> ConeScore:
    """F1 of telling ancestor pairs from others by the cone energy, at the best threshold and at zero.

    Negatives are all ordered pairs that are not in ``pairs`` if there are at most ``max_exact``, else ``num_negatives``
    random ones per pair. Every negative that stands for several counts as one, so F1 depends on their number: compare
    runs with the same.
    """
    if not isinstance(manifold, _Hyperbolic):
        raise ValueError(f"cones need hyperbolic space, got {type(manifold).__name__}")
    points, n = points.detach().double(), len(points)
    pairs = pairs.to(points.device)
    known = pairs[:, 0] * n + pairs[:, 1]  # sorted, as the pairs are
    is_sampled = n * n > max_exact
    if is_sampled:
        generator = torch.Generator().manual_seed(seed)
        other = torch.randint(n, (num_negatives * len(pairs), 2), generator=generator).to(points.device)
    else:
        other = torch.cartesian_prod(*[torch.arange(n, device=points.device)] * 2)
    keys = other[:, 0] * n + other[:, 1]
    nearest = torch.searchsorted(known, keys).clamp_max(len(known) - 1)
    other = other[(known[nearest] != keys) & (other[:, 0] != other[:, 1])]

    def energy(index: Tensor) -> Tensor:
        parts = [
            manifold.exterior_angle(points[part[:, 1]], points[part[:, 0]]) - manifold.half_aperture(points[part[:, 1]])
            for part in index.split(1 << 18)
        ]
        return torch.cat(parts)

    positive, negative = energy(pairs), energy(other)
    values = torch.cat([positive, negative])
    order = values.argsort(stable=True)
    hits = (order < len(positive)).cumsum(0).double()
    taken = torch.arange(1, len(values) + 1, device=values.device).double()
    ordered = values[order]
    last_of_tie = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    f1 = torch.where(last_of_tie, 2 * hits / (taken + len(positive)), 0.0)
    best = int(f1.argmax())
    inside = 2 * float((positive <= 0).sum()) / (float((values <= 0).sum()) + len(positive))
    return ConeScore(
        f1=float(f1[best]),
        precision=float(hits[best] / taken[best]),
        recall=float(hits[best] / len(positive)),
        threshold=float(ordered[best]),
        f1_inside=inside,
        num_positives=len(positive),
        num_negatives=len(negative),
        is_sampled=is_sampled,
    )
