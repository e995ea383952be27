"""Measures, Sarkar's embedding and pictures of the Tree, against their definitions."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from hyptree.tree import Tree, gromov_delta
from hyptree.tree.layout import geodesic
from hyptree.tree.measure import poincare_distance


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def random_tree(rng, n, num_roots=1):
    above = np.full(n, -1)
    above[num_roots:] = rng.integers(np.arange(num_roots, n))
    name = rng.permutation(n)
    parent = np.empty(n, np.int64)
    parent[name] = np.where(above < 0, -1, name[above])
    return Tree(parent)


def all_distances(tree, metric="edges"):
    i = np.arange(tree.num_nodes)
    return tree.distance(i[:, None], i[None, :], metric)


# ---------------------------------------------------------------------- distortion
def test_a_tree_does_not_distort_itself(rng):
    tree = random_tree(rng, 30)
    result = tree.distortion(all_distances(tree))
    assert result.average == 0 and result.worst == 1 and result.exact and result.num_pairs == 435
    scaled = tree.distortion(3 * all_distances(tree), scale="best")
    assert scaled.average == pytest.approx(0, abs=1e-15) and scaled.scale == 3
    assert tree.distortion(3 * all_distances(tree)).average == 2


def test_distortion_agrees_with_a_loop_and_best_scale_is_best(rng):
    tree = random_tree(rng, 25, num_roots=2)
    points = rng.normal(size=(25, 3))
    ratios = [
        np.linalg.norm(points[i] - points[j]) / tree.distance(i, j)
        for i, j in combinations(range(25), 2)
        if tree.lca(i, j) >= 0
    ]
    result = tree.distortion(embedding=points, manifold="euclidean")
    assert result.average == pytest.approx(np.mean([abs(r - 1) for r in ratios]), rel=1e-12)
    assert result.worst == pytest.approx(max(ratios) / min(ratios), rel=1e-12)
    best = tree.distortion(embedding=points, manifold="euclidean", scale="best")
    for factor in np.geomspace(0.5, 2, 41):
        other = tree.distortion(embedding=points, manifold="euclidean", scale=best.scale * factor)
        assert best.average <= other.average + 1e-12
    D = np.linalg.norm(points[:, None] - points[None], axis=-1)
    leaves = tree.leaves()
    over_leaves = tree.distortion(D[np.ix_(leaves, leaves)])
    pairs = np.array([(a, b) for a, b in combinations(leaves, 2)])
    assert over_leaves.average == pytest.approx(tree.distortion(D, pairs=pairs).average, rel=1e-12)


def test_sampled_distortion_is_close_and_seeded(rng):
    tree = random_tree(rng, 200)
    D = all_distances(tree) * rng.uniform(0.5, 1.5, size=(200, 200))
    exact = tree.distortion(D)
    sampled = tree.distortion(D, num_samples=50_000, seed=3)
    assert not sampled.exact and sampled.num_pairs == 50_000
    assert sampled == tree.distortion(D, num_samples=50_000, seed=3) != tree.distortion(D, num_samples=50_000, seed=4)
    assert sampled.average == pytest.approx(exact.average, abs=0.02)


def test_distortion_takes_manifold_objects_and_names(rng):
    torch = pytest.importorskip("torch")

    class Flat:
        def dist(self, x, y):
            assert x.dtype == torch.float64
            return (x - y).norm(dim=-1)

    tree = random_tree(rng, 20).replace(embedding=rng.random((20, 2)) * 0.4, manifold=Flat())
    ours, named = tree.distortion(), tree.distortion(manifold="euclidean")
    assert (ours.average, ours.worst) == pytest.approx((named.average, named.worst), rel=1e-12)
    from hyptree import geometry

    named = tree.distortion(manifold="Poincare(c=0.5)")
    assert tree.distortion(manifold=geometry.Poincare(0.5)).average == pytest.approx(named.average, rel=1e-9)


# ---------------------------------------------------------------------- Gromov delta
def naive_delta(D):
    worst = 0.0
    for x, y, z, w in product(range(len(D)), repeat=4):
        sums = sorted([D[x, y] + D[z, w], D[x, z] + D[y, w], D[x, w] + D[y, z]])
        worst = max(worst, (sums[2] - sums[1]) / 2)
    return worst


def test_gromov_delta_agrees_with_the_definition(rng):
    points = rng.normal(size=(8, 3))
    D = np.linalg.norm(points[:, None] - points[None], axis=-1)
    result = gromov_delta(D)
    assert result.method == "exact"
    assert result.delta == pytest.approx(naive_delta(D), rel=1e-12)
    assert result.relative == pytest.approx(2 * result.delta / D.max(), rel=1e-12)
    for base in range(8):
        one = gromov_delta(D, method="base", base=base).delta
        assert result.delta / 2 - 1e-12 <= one <= result.delta + 1e-12
    assert gromov_delta(D, method="sampled", num_samples=100_000).delta == pytest.approx(result.delta, rel=1e-12)


def test_trees_have_delta_zero_and_a_square_has_one(rng):
    D = all_distances(random_tree(rng, 40).replace(height=rng.random(40)), "height")
    assert gromov_delta(D).delta < 1e-12
    big = all_distances(random_tree(rng, 300))
    assert gromov_delta(big).delta == 0 and gromov_delta(big).method == "base"
    square = np.array([[0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]])
    assert gromov_delta(square)[:3] == (1.0, 1.0, 2.0)


# ---------------------------------------------------------------------- Dasgupta
def test_dasgupta_agrees_with_a_loop_in_every_form(rng):
    sparse = pytest.importorskip("scipy.sparse")
    for num_roots in (1, 3):
        tree = random_tree(rng, 40, num_roots)
        leaves = tree.leaves()
        n = len(leaves)
        W = rng.random((n, n)) * (rng.random((n, n)) < 0.4)
        W = W + W.T
        expected = 0.0
        for a, b in combinations(range(n), 2):
            top = tree.lca(leaves[a], leaves[b])
            expected += W[a, b] * (n if top < 0 else len(tree.leaves(top)))
        i, j = np.nonzero(np.triu(W, 1))
        assert tree.dasgupta_cost(W) == pytest.approx(expected, rel=1e-12)
        assert tree.dasgupta_cost(sparse.csr_matrix(W)) == pytest.approx(expected, rel=1e-12)
        assert tree.dasgupta_cost((i, j, W[i, j])) == pytest.approx(expected, rel=1e-12)
        assert tree.dasgupta_cost((i, j)) == tree.dasgupta_cost((i, j, np.ones(len(i))))


# ---------------------------------------------------------------------- purity
@pytest.mark.parametrize("num_roots", [1, 3])
def test_purity_agrees_with_loops(rng, num_roots):
    tree = random_tree(rng, 60, num_roots)
    leaves = tree.leaves()
    labels = rng.integers(4, size=len(leaves))
    shares = []
    for a, b in combinations(range(len(leaves)), 2):
        if labels[a] == labels[b]:
            top = tree.lca(leaves[a], leaves[b])
            under = labels if top < 0 else labels[np.isin(leaves, tree.leaves(top))]
            shares.append((under == labels[a]).mean())
    assert tree.purity(labels) == pytest.approx(np.mean(shares), rel=1e-12)
    names = np.array(["ant", "bee", "cat", "dog"])[labels]
    assert tree.purity(names) == tree.purity(labels)
    per_node = [np.bincount(labels[np.isin(leaves, tree.leaves(v))]).max() for v in range(60)]
    assert tree.purity(labels, per_node=True) == pytest.approx(np.array(per_node) / tree.num_leaves_below, rel=1e-12)
    for k in range(num_roots, len(leaves) + 1):
        cluster = tree.cut(k)
        right = sum(np.bincount(labels[cluster == c]).max() for c in range(k))
        assert tree.purity(labels, k) == pytest.approx(right / len(leaves), rel=1e-12)


def test_purity_of_a_perfect_tree_is_one():
    tree = Tree.from_assignments([[0, 0, 1, 1, 1]], root=True)
    assert tree.purity([7, 7, 3, 3, 3]) == 1 and tree.purity(list("aabbb"), k=2) == 1


# ---------------------------------------------------------------------- masks
def test_mask_agreement_on_leaves_agrees_with_a_loop(rng):
    tree = random_tree(rng, 50, 2)
    leaves = tree.leaves()
    masks = rng.random((6, len(leaves))) < 0.4
    masks[:, 0] = True
    masks[2] = np.isin(leaves, tree.leaves(int(tree.parent[leaves[0]])))
    result = tree.mask_agreement(masks)
    for m, mask in enumerate(masks):
        iou = []
        for v in range(50):
            under = np.isin(leaves, tree.leaves(v))
            iou.append((mask & under).sum() / (mask | under).sum())
        assert result.iou[m] == pytest.approx(max(iou), rel=1e-12) == iou[result.node[m]]
    assert result.iou[2] == 1 and result.mean == pytest.approx(result.iou.mean())
    with_empty = tree.mask_agreement(np.concatenate([masks, np.zeros_like(masks[:1])]))
    assert with_empty.mean == result.mean and with_empty.node[-1] == -1 and np.isnan(with_empty.iou[-1])


def test_mask_agreement_on_supports(rng):
    tree = random_tree(rng, 12).replace(support=rng.random((12, 4, 5)))
    hard = rng.random((3, 4, 5)) < 0.5
    soft = rng.random((3, 4, 5))
    for masks in (hard, soft):
        result = tree.mask_agreement(masks)
        for m, mask in enumerate(masks.astype(float)):
            iou = [np.minimum(s, mask).sum() / np.maximum(s, mask).sum() for s in tree.support]
            assert result.iou[m] == pytest.approx(max(iou), rel=1e-12) and result.node[m] == np.argmax(iou)
    actual = tree.mask_agreement((tree.support[4:5] >= 0.5), threshold=0.5)
    assert actual.mean == 1 and actual.node.tolist() == [4]


# ---------------------------------------------------------------------- Sarkar
@pytest.mark.parametrize("num_roots", [1, 3])
def test_sarkar_edges_have_length_tau(rng, num_roots):
    tree = random_tree(rng, 300, num_roots)
    child = np.flatnonzero(tree.parent >= 0)
    for tau in (0.3, 10 / (tree.depth.max() + 1)):
        points = tree.sarkar(tau)
        assert points.shape == (300, 2) and (np.linalg.norm(points, axis=1) < 1).all()
        length = poincare_distance(points[child], points[tree.parent[child]])
        assert length == pytest.approx(np.full(len(child), tau), rel=1e-9)
    if num_roots == 1:
        assert points[tree.roots[0]].tolist() == [0, 0]


def test_sarkar_spreads_neighbours_in_equal_angles():
    tree = Tree([-1, 0, 1, 1, 1, 2, 2])
    points = tree.sarkar(1.1) @ [1, 1j]
    for node, neighbours in [(1, [0, 2, 3, 4]), (2, [1, 5, 6])]:
        seen = [(points[v] - points[node]) / (1 - points[node].conj() * points[v]) for v in neighbours]
        angle = np.sort(np.angle(seen))
        gaps = np.diff(np.append(angle, angle[0] + 2 * np.pi))
        assert gaps == pytest.approx(np.full(len(neighbours), 2 * np.pi / len(neighbours)), rel=1e-9)


def test_sarkar_distortion_falls_as_tau_grows():
    tree = Tree([-1] + [(i - 1) // 3 for i in range(1, 121)])  # depth 4, three children each
    average, worst = zip(
        *(tree.distortion(embedding=tree.sarkar(t), manifold="poincare", scale=t)[:2] for t in (1, 2, 4, 7)),
        strict=True,
    )
    assert list(average) == sorted(average, reverse=True) and list(worst) == sorted(worst, reverse=True)
    assert average[-1] < 0.06 and worst[-1] < 1.2


def test_sarkar_says_what_fits():
    tree = Tree(np.arange(-1, 99))
    assert tree.largest_tau() == pytest.approx(30 / 99)
    points = tree.sarkar()
    assert poincare_distance(points[0], points[-1]) == pytest.approx(30, abs=1e-2)
    with pytest.raises(ValueError, match=r"at most 0\.353535 .* got 1; tau=None takes 0\.30303"):
        tree.sarkar(1.0)
    with pytest.raises(ValueError, match="tau must be positive"):
        tree.sarkar(0)
    assert Tree([-1]).sarkar().tolist() == [[0, 0]]


# ---------------------------------------------------------------------- pictures and text
def test_geodesics_are_geodesics(rng):
    p, q = (v / np.linalg.norm(v, axis=1, keepdims=True) * rng.random((20, 1)) for v in rng.normal(size=(2, 20, 2)))
    arc = geodesic(p, q, 9)
    assert arc[:, 0] == pytest.approx(p, abs=1e-12) and arc[:, -1] == pytest.approx(q, abs=1e-9)
    total = sum(poincare_distance(arc[:, k], arc[:, k + 1]) for k in range(8))
    assert total == pytest.approx(poincare_distance(p, q), rel=1e-6)
    assert geodesic(p[:1], p[:1], 5) == pytest.approx(np.repeat(p[:1, None], 5, 1), abs=1e-15)


@pytest.mark.parametrize("options", [{}, {"layout": "sarkar", "color": "depth"}, {"names": True, "title": "tree"}])
def test_draw_writes_a_picture(tmp_path, rng, options):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    tree = random_tree(rng, 40, 2).relabel(lambda i: f"n{i}")
    path = tmp_path / "tree.png"
    ax = tree.draw(path, size=3, **options)
    assert len(ax.collections) == 2 and len(ax.collections[0].get_segments()) == 38
    pixels = np.asarray(image.open(path).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 100  # not a blank page


def test_draw_takes_points_colours_and_axes(rng):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    tree = random_tree(rng, 12)
    own = tree.replace(embedding=rng.random((12, 2)) * 0.5, manifold="poincare")
    ax = Figure().add_subplot()
    assert own.draw(ax=ax, layout="embedding", color=np.arange(12) % 3) is ax
    assert np.array_equal(np.sort(ax.collections[1].get_offsets(), 0), np.sort(own.embedding, 0))
    tree.draw(ax=ax, layout=own.embedding, color=rng.random(12))
    for options, problem in [
        ({"layout": "embedding"}, "needs a tree that has an embedding"),
        ({"layout": "square"}, "layout must be"),
        ({"layout": np.ones((12, 2))}, "outside the unit disk"),
        ({"layout": np.ones((12, 3))}, r"\(12, 3\)"),
        ({"color": "red"}, "color must be"),
        ({"color": np.ones(3)}, r"\(3,\)"),
    ]:
        with pytest.raises(ValueError, match=problem):
            tree.draw(ax=ax, **options)


def test_text_shows_the_tree_and_counts_what_it_leaves_out(capsys):
    tree = Tree([-1, 0, 0, 1, 1], label=["animal", "dog", "cat", "corgi", "pug"])
    tree.show()
    assert capsys.readouterr().out == "animal (3)\n├─ dog (2)\n│  ├─ corgi\n│  └─ pug\n└─ cat\n"
    assert tree.text(max_lines=2) == "animal (3)\n├─ dog (2)\n… 3 more nodes"
    assert tree.text(max_depth=1) == "animal (3)\n├─ dog (2)\n└─ cat"
    star = Tree([-1] + [0] * 20)
    assert star.text(max_children=2) == "0 (20)\n├─ 1\n├─ 2\n└─ … 18 more children, 18 leaves"
    assert Tree([-1] * 30).text(max_children=3).splitlines()[-1] == "… 27 more trees"


# ---------------------------------------------------------------------- bad input
TREE = Tree([-1, 0, 0, 1, 1])  # leaves 2 3 4


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: TREE.distortion(), "nothing to compare"),
        (lambda: TREE.distortion(np.ones((4, 4))), r"shape \(4, 4\)"),
        (lambda: TREE.distortion(embedding=np.ones((5, 2))), "needs its manifold"),
        (lambda: TREE.distortion(embedding=np.ones((4, 2)), manifold="euclidean"), "4 rows"),
        (lambda: TREE.distortion(embedding=np.ones((5, 2)), manifold="poincare"), "outside the Poincaré ball"),
        (lambda: TREE.distortion(embedding=np.ones((5, 2)), manifold="Poincare(c=-1)"), "must be positive"),
        (lambda: TREE.distortion(embedding=np.ones((5, 2)), manifold="a b"), "cannot read the manifold"),
        (lambda: TREE.distortion(embedding=np.ones((5, 2)), manifold=3), r"dist\(x, y\), got int"),
        (lambda: TREE.distortion(np.full((5, 5), np.nan)), "NaN"),
        (lambda: TREE.distortion(np.ones((5, 5)), scale=0), "scale must be"),
        (lambda: TREE.distortion(np.ones((5, 5)), pairs=[[0, 9]]), "0 to 9, expected 0 to 4"),
        (lambda: Tree([-1]).distortion(np.ones((1, 1))), "no pair"),
        (lambda: gromov_delta(np.ones((2, 3))), r"expected \(n, n\)"),
        (lambda: gromov_delta([[0, 1], [2, 0]]), "symmetric"),
        (lambda: gromov_delta(np.zeros((2, 2)), method="fast"), "method must be"),
        (lambda: TREE.dasgupta_cost(np.ones((5, 5))), r"expected \(3, 3\)"),
        (lambda: TREE.dasgupta_cost(([0], [3])), "expected 0 to 2"),
        (lambda: TREE.purity([0, 1]), r"expected \(3,\)"),
        (lambda: TREE.purity([0, 1, 2]), "two leaves of one class"),
        (lambda: TREE.purity([0, 1, 1], 2, per_node=True), "not both"),
        (lambda: TREE.mask_agreement(np.ones((2, 4))), "3 places each, the leaves"),
        (lambda: TREE.mask_agreement(np.full((2, 3), 2.0)), r"\[0, 1\]"),
        (lambda: TREE.mask_agreement(np.zeros((2, 3))), "all masks are empty"),
    ],
)
def test_bad_input_gets_one_clear_line(make, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        make()
    assert "\n" not in str(caught.value)
