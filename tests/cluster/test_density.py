"""Density peaks against a plain loop, its centres on made-up blobs, ties, and bad input."""

from __future__ import annotations

import pytest
import torch

from hyptree.cluster.density import density_peaks
from hyptree.cluster.distance import cosine_distance, manifold_distance
from hyptree.geometry import Euclidean
from tests.cluster import loops


@pytest.mark.parametrize(
    ("n", "k", "neighbours"), [(1, 1, 5), (2, 1, 5), (3, 2, 5), (20, 5, 5), (25, 12, 3), (30, 29, 1)]
)
def test_labels_are_those_of_the_loop(n: int, k: int, neighbours: int) -> None:
    features = torch.randn(4, n, 6)
    for D in (cosine_distance(features), torch.cdist(features, features)):
        D = torch.minimum(D, D.mT).masked_fill(torch.eye(n, dtype=torch.bool), 0.0)
        labels = density_peaks(D, k, neighbours)
        expected = [loops.density_peaks(d, k, neighbours) if k < n else list(range(n)) for d in D]
        assert labels.tolist() == expected


def test_separated_blobs_are_found() -> None:
    where = torch.randint(4, (50,))
    where[:4] = torch.arange(4)
    points = 10 * torch.eye(4, 6)[where] + 0.1 * torch.randn(3, 50, 6)
    labels = density_peaks(manifold_distance(points, Euclidean()), 4)
    assert labels.tolist() == [loops.numbered(where.tolist())] * 3


def test_equal_distances_give_exactly_k_clusters_in_index_order() -> None:
    D = (1 - torch.eye(8)).expand(2, 8, 8)
    # All equally dense: the first token is the densest, and every separation is 1; the first k are centres.
    assert density_peaks(D, 3).tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]] * 2
    assert density_peaks(torch.zeros(1, 8, 8), 3).tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]


def test_more_clusters_than_tokens_is_the_identity_and_the_batch_does_not_matter() -> None:
    D = cosine_distance(torch.randn(5, 12, 4))
    assert torch.equal(density_peaks(D, 30), torch.arange(12).expand(5, 12))
    together = density_peaks(D, 4)
    assert all(torch.equal(density_peaks(D[i : i + 1], 4)[0], together[i]) for i in range(5))


def test_bad_input_is_one_line() -> None:
    D = torch.zeros(2, 5, 5)
    with pytest.raises(ValueError, match=r"^density_peaks: k must be at least 1, got 0"):
        density_peaks(D, 0)
    with pytest.raises(ValueError, match=r"neighbours must be at least 1, got 0"):
        density_peaks(D, 2, neighbours=0)
    with pytest.raises(ValueError, match=r"density_peaks: expected distances \(B, N, N\), got float32 \(5, 5\)"):
        density_peaks(D[0], 2)
