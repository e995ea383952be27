"""Mean rank, MAP and cone scores against their definitions, one node at a time."""

import numpy as np
import pytest
import torch

from hyptree.evaluate.hierarchy.reconstruction import cone_score, ragged, reconstruction
from hyptree.geometry import Euclidean, Lorentz, Poincare
from hyptree.tree import Tree

MANIFOLDS = [Lorentz(), Lorentz(0.4), Poincare(), Poincare(2.5), Euclidean()]


def random_case(n=40, p=0.1, dim=3, seed=0, manifold=None):
    generator = torch.Generator().manual_seed(seed)
    manifold = manifold or Lorentz()
    points = manifold.random(n, dim, generator=generator, dtype=torch.float64, std=1.5)
    pairs = (torch.triu(torch.rand(n, n, generator=generator), 1) > 1 - p).nonzero()
    return points, pairs, manifold


def naive(points, pairs, manifold, limit=lambda d: d * (1 + 1e-6)):
    """The definition, word for word, with ties counted against the ancestor; ``limit(d)`` still ties with ``d``."""
    ranks, precisions = [], []
    n = len(points)
    for u in sorted(set(pairs[:, 0].tolist())):
        ancestors = set(pairs[pairs[:, 0] == u, 1].tolist())
        d = manifold.dist(points[u], points).tolist()
        each = []
        for v in ancestors:
            others = sum(d[w] <= limit(d[v]) for w in range(n) if w != u and w not in ancestors)
            own = sum(d[w] <= limit(d[v]) for w in ancestors)
            ranks.append(others + 1)
            each.append(own / (own + others))
        precisions.append(np.mean(each))
    return np.mean(ranks), np.mean(precisions)


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_reconstruction_is_its_definition(manifold, seed):
    points, pairs, _ = random_case(manifold=manifold, seed=seed)
    actual = reconstruction(points, pairs, manifold, chunk_bytes=8 * 40 * 7)  # chunks of 7 nodes, the last one smaller
    mean_rank, mean_precision = naive(points, pairs, manifold)
    assert actual.mean_rank == pytest.approx(mean_rank, rel=1e-12)
    assert actual.map == pytest.approx(mean_precision, rel=1e-12)
    assert actual.num_pairs == len(pairs) and not actual.is_sampled


def test_average_precision_is_that_of_sklearn():
    sklearn = pytest.importorskip("sklearn.metrics")
    points, pairs, manifold = random_case(n=80, seed=4)
    scores = []
    for u in pairs[:, 0].unique().tolist():
        d = manifold.dist(points[u], points).numpy()
        truth = np.zeros(80)
        truth[pairs[pairs[:, 0] == u, 1].numpy()] = 1
        others = np.arange(80) != u
        scores.append(sklearn.average_precision_score(truth[others], -d[others]))
    assert reconstruction(points, pairs, manifold).map == pytest.approx(np.mean(scores), rel=1e-12)


def test_nearby_points_far_from_the_origin_keep_their_order():
    manifold = Lorentz()
    base = torch.tensor([13.0, 0.0], dtype=torch.float64)
    steps = torch.tensor([0.0, 1e-6, 3e-6, 2e-6], dtype=torch.float64)  # angles; 2 of 3 are ancestors of node 0
    points = manifold.expmap0(torch.stack([base[0] * steps.cos(), base[0] * steps.sin()], 1))
    assert reconstruction(points, torch.tensor([[0, 1], [0, 3]]), manifold).map == 1
    assert reconstruction(points, torch.tensor([[0, 2]]), manifold) == (3.0, pytest.approx(1 / 3), 1, 1, False)


def test_points_in_one_place_score_the_share_of_ancestors_not_one():
    _, pairs, manifold = random_case()
    actual = reconstruction(manifold.origin(40, 3, dtype=torch.float64), pairs, manifold)
    degree = torch.bincount(pairs[:, 0])
    assert actual.map == pytest.approx((degree[degree > 0] / 39).mean().item())
    assert actual.mean_rank == pytest.approx(float((40 - degree[pairs[:, 0]]).double().mean()))


def turned(points, seed):
    """The same points up to an isometry and its rounding."""
    angle = 2 * np.pi * torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    return points @ turn


@pytest.mark.parametrize("edge", [0.5, 2.0])
def test_equal_distances_are_tied_whatever_their_rounding(edge, seed):
    """In a tree with equal edges parent and children are at one distance: rounding must not choose between them."""
    parent = np.array([-1] + [(i - 1) // 3 for i in range(1, 121)])
    tree = Tree(parent)
    pairs = torch.tensor([(v, a) for v in range(1, 121) for a in sorted(tree.ancestors(v).tolist())])
    points = torch.from_numpy(tree.sarkar(edge))
    actual = [reconstruction(turned(points, seed + k), pairs, Poincare()) for k in range(4)]
    assert len({f.map for f in actual}) == 1 and len({f.mean_rank for f in actual}) == 1
    lorentz = reconstruction(Lorentz().expmap0(2 * Poincare().logmap0(points)), pairs, Lorentz())
    assert lorentz == actual[0]
    # Without the rule rounding decides, mostly for half of those that tie.
    by_chance = [reconstruction(turned(points, seed + k), pairs, Poincare(), tie_tolerance=0).map for k in range(4)]
    assert len(set(by_chance)) > 1 and min(by_chance) > actual[0].map + 0.001


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_the_tolerance_is_a_share_of_the_distance(manifold):
    """On a ray: the ancestor at 1, another node a little farther, inside the tolerance or outside it."""
    for radius in (1e-3, 1.0, 8.0):
        for gap, share in ((0.5e-3, 0.5), (2e-3, 1.0)):
            length = torch.tensor([[0.0, 0.0], [radius, 0.0], [0.0, radius * (1 + gap)]], dtype=torch.float64)
            points = manifold.expmap0(length / (2 if isinstance(manifold, Poincare) else 1))
            actual = reconstruction(points, torch.tensor([[0, 1]]), manifold, tie_tolerance=1e-3)
            assert (actual.map, actual.mean_rank) == (share, 1 / share)


def test_a_sample_of_nodes_says_so_and_depends_on_its_seed():
    points, pairs, manifold = random_case(n=60)
    some = reconstruction(points, pairs, manifold, num_samples=10)
    assert some.is_sampled and some.num_nodes == 10
    assert some == reconstruction(points, pairs, manifold, num_samples=10)
    assert some != reconstruction(points, pairs, manifold, num_samples=10, seed=1)
    assert reconstruction(points, pairs, manifold, num_samples=1000) == reconstruction(points, pairs, manifold)


def test_order_by_cones_is_its_definition():
    points, pairs, manifold = random_case(seed=7)

    class ByCone:
        @staticmethod
        def dist(x, y):  # the smaller, the better y is as an ancestor of x
            return manifold.exterior_angle(y, x) - manifold.half_aperture(y)

    mean_rank, mean_precision = naive(points, pairs, ByCone, limit=lambda angle: angle + 1e-6)
    actual = reconstruction(points, pairs, manifold, by="cones")
    assert (actual.mean_rank, actual.map) == pytest.approx((mean_rank, mean_precision), rel=1e-12)


@pytest.mark.parametrize("manifold", [Lorentz(), Poincare(1.7)], ids=str)
def test_cone_score_is_its_definition(manifold):
    points, pairs, _ = random_case(n=15, p=0.3, seed=3, manifold=manifold)
    positive = set(map(tuple, pairs.tolist()))
    energy, truth = [], []
    for u in range(15):
        for v in range(15):
            if u != v:
                energy.append(float(manifold.exterior_angle(points[v], points[u]) - manifold.half_aperture(points[v])))
                truth.append((u, v) in positive)
    energy, truth = np.array(energy), np.array(truth)

    def f1(threshold):
        hit = ((energy <= threshold) & truth).sum()
        return 2 * hit / ((energy <= threshold).sum() + truth.sum())

    actual = cone_score(points, pairs, manifold)
    assert actual.f1 == pytest.approx(max(map(f1, energy)), rel=1e-12)
    assert actual.f1 == pytest.approx(f1(actual.threshold + 1e-12), rel=1e-12)
    assert actual.f1_inside == pytest.approx(f1(0), rel=1e-12)
    assert actual.f1 == pytest.approx(
        2 * actual.precision * actual.recall / (actual.precision + actual.recall), rel=1e-12
    )
    assert actual.num_positives + actual.num_negatives == 15 * 14 and not actual.is_sampled


def test_sampled_negatives_of_cones_are_negatives():
    points, pairs, manifold = random_case(n=30, p=0.5, seed=5)
    actual = cone_score(points, pairs, manifold, max_exact=0, num_negatives=20)
    assert actual.is_sampled
    assert actual.num_negatives < 20 * len(pairs) * 0.9  # a quarter are pairs or loops and were thrown away


def test_wrong_uses_are_refused():
    points, pairs, _ = random_case()
    with pytest.raises(ValueError, match="distance"):
        reconstruction(points, pairs, Lorentz(), by="depth")
    with pytest.raises(ValueError, match=r"tie_tolerance must be in \[0, 1\), got -1"):
        reconstruction(points, pairs, Lorentz(), tie_tolerance=-1)
    with pytest.raises(ValueError, match="hyperbolic"):
        cone_score(points, pairs, Euclidean())


def test_ragged_rows():
    row, place = ragged(torch.tensor([2, 0, 3]))
    assert row.tolist() == [0, 0, 2, 2, 2] and place.tolist() == [0, 1, 0, 1, 2]
