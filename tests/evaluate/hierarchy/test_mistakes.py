"""Numbers by the tree above the classes, against trees small enough to count by hand and a walk up node by node."""

from __future__ import annotations

import numpy as np
import pytest

from hyptree.evaluate.hierarchy.mistakes import (
    class_distance,
    hierarchical_accuracy,
    hierarchical_precision,
    hierarchy_scores,
    mistake_distance,
)
from hyptree.tree import Tree

# Two kinds of three classes under one root: 0 1 2 -> 6, 3 4 5 -> 7, 6 7 -> 8.
TREE = Tree([6, 6, 6, 7, 7, 7, 8, 8, -1])
# Classes at different depths: 0 and 1 under 4, 2 under 5 with 4, 3 right below the root 6.
UNEVEN = Tree([4, 4, 5, 6, 5, 6, -1])


def random_forest(rng: np.random.Generator, num_roots: int, num_nodes: int = 40, num_classes: int = 12) -> Tree:
    order = rng.permutation(np.arange(num_classes, num_nodes))  # inner nodes from the roots down
    parent = np.full(num_nodes, -1)
    for i, node in enumerate(order):
        if i >= num_roots:
            parent[node] = order[rng.integers(0, i)]
    parent[:num_classes] = rng.choice(order, num_classes)
    return Tree(parent)


def chain(tree: Tree, node: int) -> list[int]:
    """A class and what lies above it, with a node above all roots at the end."""
    up = [node]
    while up[-1] >= 0:
        up.append(int(tree.parent[up[-1]]))
    return up


def walked(tree: Tree, i: int, j: int) -> int:
    up, down = chain(tree, i), chain(tree, j)
    return next(a + down.index(node) for a, node in enumerate(up) if node in down)


def test_accuracy_by_hand():
    label = np.array([0, 0, 0, 3, 4])
    guess = np.array([0, 1, 5, 3, 2])  # right, sibling, wrong kind, right, wrong kind
    actual = hierarchical_accuracy(TREE, guess, label)
    assert actual == pytest.approx({"top1_up1": 3 / 5, "mistake_height": (1 + 2 + 2) / 3})
    assert hierarchical_accuracy(TREE, label, label) == {"top1_up1": 1.0, "mistake_height": 0.0}


def test_mistake_distance_by_hand():
    label = np.array([0, 0, 0, 3, 4])
    guess = np.array([0, 1, 5, 3, 2])
    assert mistake_distance(TREE, guess, label) == pytest.approx((2 + 4 + 4) / 3)
    assert mistake_distance(TREE, label, label) == 0.0
    # 0 to 2 goes over 4 and 5, 3 edges; 3 to 0 over the root, 4 edges; the height sees only one side of it.
    assert mistake_distance(UNEVEN, np.array([2, 0]), np.array([0, 3])) == pytest.approx((3 + 4) / 2)
    assert hierarchical_accuracy(UNEVEN, np.array([2, 0]), np.array([0, 3]))["mistake_height"] == pytest.approx(1.5)


def test_two_trees_of_a_forest_meet_one_edge_above_their_roots():
    forest = Tree([2, 3, -1, -1])
    assert mistake_distance(forest, np.array([1]), np.array([0])) == 4.0
    assert class_distance(forest, np.array([0, 2]), np.array([0, 3])).tolist() == [0, 2]


def test_precision_by_hand():
    # The three classes nearest to 0 are those of its own kind, and so for every k from 2 to 3.
    ranked = np.array([[0, 1, 2], [3, 0, 4], [4, 5, 3]])
    label = np.array([0, 0, 0])
    assert hierarchical_precision(TREE, ranked, label, 6) == pytest.approx((3 + 1 + 0) / 9)
    assert hierarchical_precision(TREE, ranked[:, :2], label, 6) == pytest.approx((2 + 1 + 0) / 6)
    assert hierarchical_precision(TREE, ranked[:, :1], label, 6) == pytest.approx(1 / 3)  # plain accuracy
    # Four classes around 0: the other kind ties at distance 4, so all six belong to the ball.
    assert hierarchical_precision(TREE, np.array([[5, 4, 3, 0]]), label[:1], 6) == 1.0
    # Around 3, a leaf below the root, 2 comes first (3 edges), then 0 and 1 (4 edges).
    uneven = [hierarchical_precision(UNEVEN, np.array([row]), np.array([3]), 4) for row in ([3, 2], [3, 0], [0, 1])]
    assert uneven == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("num_roots", [1, 3])
def test_all_numbers_equal_walking_up(seed, num_roots):
    rng = np.random.default_rng(seed)
    tree, num_classes = random_forest(rng, num_roots), 12
    label = rng.integers(0, num_classes, 200)
    ranked = np.stack([rng.permutation(num_classes)[:5] for _ in label])
    actual = hierarchy_scores(tree, ranked, label, num_classes)
    pairs = [(g, l) for g, l in zip(ranked[:, 0], label, strict=True) if g != l]
    assert actual["mistake_distance"] == pytest.approx(np.mean([walked(tree, g, l) for g, l in pairs]))
    shares = []
    for row, l in zip(ranked, label, strict=True):
        around = sorted(walked(tree, l, other) for other in range(num_classes))
        shares.append(np.mean([walked(tree, l, g) <= around[4] for g in row]))
    assert actual["hierarchical_precision5"] == pytest.approx(np.mean(shares))
    assert 0 < actual["hierarchical_precision5"] < 1


@pytest.mark.parametrize("num_roots", [1, 3])
def test_accuracy_equals_walking_up(seed, num_roots):
    rng = np.random.default_rng(seed)
    tree = random_forest(rng, num_roots)
    guess, label = rng.integers(0, 12, (2, 300))
    actual = hierarchical_accuracy(tree, guess, label)
    heights = []
    for g, l in zip(guess, label, strict=True):
        if g != l:
            heights.append(next(k for k, node in enumerate(chain(tree, l)) if node in chain(tree, g)))
    assert actual["mistake_height"] == pytest.approx(np.mean(heights))
    names = [name for name in actual if name.startswith("top1_up")]
    assert names
    for name in names:
        k = int(name.removeprefix("top1_up"))
        right = []
        for g, l in zip(guess, label, strict=True):
            up = chain(tree, l)[: -2 if num_roots == 1 else -1]  # everybody is below a single root
            right.append(up[min(k, len(up) - 1)] in chain(tree, g))
        assert actual[name] == pytest.approx(np.mean(right)), name


def test_precision_does_not_depend_on_how_classes_are_cut_into_blocks(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    tree = random_forest(rng, 2)
    label, ranked = rng.integers(0, 12, 50), np.stack([rng.permutation(12)[:4] for _ in range(50)])
    whole = hierarchical_precision(tree, ranked, label, 12)
    monkeypatch.setattr("hyptree.evaluate.hierarchy.mistakes._CHUNK", 20)
    assert hierarchical_precision(tree, ranked, label, 12) == whole


def test_more_guesses_than_classes_say_nothing():
    label, ranked = np.array([0]), np.array([[0, 1, 2, 3, 4, 5]])
    assert "hierarchical_precision6" not in hierarchy_scores(TREE, ranked, label, 6)
    with pytest.raises(ValueError, match="expected 1 to 5 guesses per sample"):
        hierarchical_precision(TREE, ranked, label, 5)
