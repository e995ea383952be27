"""k-means and k-medoids against plain loops, and what holds for any input: k clusters, repeatable, no gradient."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hyptree.cluster.centres import kmeans, kmedoids
from hyptree.cluster.distance import cosine_distance
from hyptree.ops.cosine.reference import unit_features
from tests.cluster import loops


def blobs(batch: int, n: int, dim: int) -> Tensor:
    """Tokens around a few directions, so that centres do move."""
    directions = torch.randn(batch, 4, dim)
    return directions[:, torch.randint(4, (n,))] + 0.7 * torch.randn(batch, n, dim)


@pytest.mark.parametrize("with_scores", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "iterations"), [(1, 1, 3), (9, 4, 0), (24, 6, 1), (24, 12, 3), (30, 3, 8), (12, 12, 3)]
)
def test_kmeans_is_the_loop(n: int, k: int, iterations: int, with_scores: bool) -> None:
    features = blobs(3, n, 7)
    scores = torch.rand(3, n) if with_scores else None
    for metric, points in (("cosine", unit_features(features.double())), ("euclidean", features)):
        labels = kmeans(features, k, iterations, scores, metric=metric)  # type: ignore[arg-type]
        chosen = scores if scores is not None else [None] * 3
        assert labels.tolist() == [loops.kmeans(p, k, iterations, s) for p, s in zip(points, chosen, strict=True)]


@pytest.mark.parametrize("with_scores", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "iterations"), [(1, 1, 3), (9, 4, 0), (24, 6, 1), (24, 12, 3), (30, 3, 8), (12, 12, 3)]
)
def test_kmedoids_is_the_loop(n: int, k: int, iterations: int, with_scores: bool) -> None:
    D = cosine_distance(blobs(3, n, 7))
    scores = torch.rand(3, n) if with_scores else None
    chosen = scores if scores is not None else [None] * 3
    expected = [loops.kmedoids(d, k, iterations, s) for d, s in zip(D, chosen, strict=True)]
    assert kmedoids(D, k, iterations, scores).tolist() == expected


def test_each_move_of_the_centres_lowers_the_error() -> None:
    features = unit_features(blobs(8, 60, 10).double())
    errors = []
    for iterations in range(7):
        member = torch.nn.functional.one_hot(kmeans(features, 5, iterations), 5).double()
        centres = (member.mT @ features) / member.sum(1).unsqueeze(-1)
        errors.append((features - member @ centres).square().sum((1, 2)))
    for before, after in pairwise(errors):
        assert bool((after <= before + 1e-12).all())
    assert bool((errors[3] < errors[0]).all())


@pytest.mark.parametrize("tie", ["all equal", "duplicates", "zeros"])
def test_ties_give_exactly_k_clusters_every_time(tie: str) -> None:
    features = torch.randn(3, 20, 4)
    if tie == "all equal":
        features = torch.ones(3, 20, 4)
    elif tie == "duplicates":
        features = features[:, :3].repeat_interleave(7, 1)[:, :20]
    else:
        features[:, 5:15] = 0
    D = cosine_distance(features)
    scores = torch.zeros(3, 20)
    for k in (1, 7, 19, 20, 40):
        for labels in (
            kmeans(features, k),
            kmedoids(D, k),
            kmeans(features, k, start=scores),
            kmedoids(D, k, start=scores),
        ):
            assert all(sorted(set(row)) == list(range(min(k, 20))) for row in labels.tolist())
    assert torch.equal(kmeans(features, 7), kmeans(features, 7)) and torch.equal(kmedoids(D, 7), kmedoids(D, 7))


def test_equal_tokens_go_to_the_first_centre() -> None:
    features = torch.ones(1, 6, 3)
    # Centres start at tokens 0, 2, 4 and keep a token each; all others find the first centre as near as the rest.
    assert kmedoids(cosine_distance(features), 3, iterations=0).tolist() == [[0, 0, 1, 0, 2, 0]]
    assert kmeans(features, 3, iterations=0).tolist() == [[0, 0, 1, 0, 2, 0]]


def test_labels_do_not_depend_on_the_batch_and_carry_no_gradient() -> None:
    features = blobs(6, 40, 8)
    D, scores = cosine_distance(features), torch.rand(6, 40)
    together = kmeans(features.requires_grad_(), 9, start=scores), kmedoids(D, 9, start=scores)
    for i in (0, 3, 5):
        part = slice(i, i + 1)
        assert torch.equal(kmeans(features[part], 9, start=scores[part]), together[0][part])
        assert torch.equal(kmedoids(D[part], 9, start=scores[part]), together[1][part])
    assert together[0].dtype == together[1].dtype == torch.int64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kmeans(features, 9, start=scores), together[0])


def test_a_shift_of_all_features_does_not_change_euclidean_kmeans() -> None:
    features = blobs(2, 40, 8)
    assert torch.equal(kmeans(features + 30, 8, metric="euclidean"), kmeans(features, 8, metric="euclidean"))


def test_bad_input_is_one_line() -> None:
    features, D = torch.randn(2, 5, 3), torch.zeros(2, 5, 5)
    with pytest.raises(ValueError, match=r"^kmeans: k must be at least 1, got 0"):
        kmeans(features, 0)
    with pytest.raises(ValueError, match=r"^kmedoids: k must be at least 1, got -2"):
        kmedoids(D, -2)
    with pytest.raises(ValueError, match=r"kmeans: expected features \(B, N, D\) .* got \(5, 3\)"):
        kmeans(features[0], 2)
    with pytest.raises(ValueError, match=r"kmedoids: expected distances \(B, N, N\), got float32 \(2, 5, 4\)"):
        kmedoids(D[..., :4], 2)
    with pytest.raises(ValueError, match=r"kmeans: start must be scores \(2, 5\), got shape \(2, 4\)"):
        kmeans(features, 2, start=torch.rand(2, 4))
    with pytest.raises(ValueError, match=r"kmedoids: iterations must be at least 0, got -1"):
        kmedoids(D, 2, iterations=-1)
    with pytest.raises(ValueError, match=r"metric must be 'cosine' or 'euclidean', got 'cosin'"):
        kmeans(features, 2, metric="cosin")  # type: ignore[arg-type]
