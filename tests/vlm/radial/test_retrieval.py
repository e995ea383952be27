"""Hierarchical retrieval by hand, the released chains, order of levels against scipy."""

import gzip
import json
import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from hyptree.data.hierarchies.hierarcaps import read_hierarcaps
from hyptree.errors import UserError
from hyptree.vlm.radial.order import kendall_tau, length_baselines, order_of_levels, spearman
from hyptree.vlm.radial.retrieval import hierarchical_retrieval, radii, score_chains, thresholds_of


def at(angle, turn=0.0):
    """A unit vector at this angle from the first axis, turned around it."""
    return [math.cos(angle), math.sin(angle) * math.cos(turn), math.sin(angle) * math.sin(turn)]


def test_a_pool_of_eight_captions_by_hand():
    """Two branches leave the root in opposite directions; pictures lie behind their ends."""
    angles = [0.2, 0.4, 0.6, 0.8]
    pool = [f"{kind} {level}" for kind in ("dog", "car") for level in range(1, 5)]
    texts = torch.tensor([at(a) for a in angles] + [at(a + 0.05, math.pi) for a in angles])
    root = torch.tensor(at(0.0))
    images = torch.tensor([at(1.0), at(1.0, math.pi), at(0.62)])
    chains = hierarchical_retrieval(images, texts, pool, root)
    # Radii rise as dog 1 (0.2), car 1 (0.25), dog 2 (0.4), ... For the dog each wider circle brings the next dog; for
    # the car the first circle holds dog 1 alone. The third picture is closest to dog 3, and dog 4 does not beat it.
    assert chains[0] == ["dog 1", "dog 2", "dog 3", "dog 4"]
    assert chains[1] == ["dog 1", "car 1", "car 2", "car 3", "car 4"]
    assert chains[2] == ["dog 1", "dog 2", "dog 3"]
    dog, car = (tuple(f"{kind} {level}" for level in range(1, 5)) for kind in ("dog", "car"))
    scores = score_chains(chains, [[dog], [car], [dog]])
    assert scores.precision == pytest.approx((1 + 4 / 5 + 1) / 3)
    assert scores.recall == scores.ordered_recall == pytest.approx((1 + 1 + 3 / 4) / 3)
    assert scores.length == 4 and scores.num_images == 3
    for radius in ("chord", "one_minus_cos"):
        assert hierarchical_retrieval(images, texts, pool, root, radius=radius, block=1)[1] == chains[1]
        inputs = radii(texts, root, radius)
        assert hierarchical_retrieval(images, texts, pool, root, radius=inputs) == hierarchical_retrieval(
            images, texts, pool, root, radius=radius
        )
    # With two radii there are the nearest caption and the whole pool.
    assert hierarchical_retrieval(images, texts, pool, root, num_thresholds=2)[1] == ["dog 1", "car 4"]


def test_retrieval_is_that_of_the_slow_definition(seed):
    images, texts, root = torch.randn(7, 9), torch.randn(60, 9), torch.randn(9)
    names = [f"text {i // 2}" for i in range(60)]
    for radius in ("chord", "one_minus_cos"):
        actual = hierarchical_retrieval(images, texts, names, root, radius=radius, block=3)
        away = radii(texts, root, radius)
        steps = np.linspace(away.min().item(), away.max().item(), 50)
        steps[-1] = away.max()
        cosine = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
        for i in range(7):
            slow = []
            for step in steps:
                inside = [k for k in range(60) if away[k] <= step]
                best = names[max(inside, key=lambda k: cosine[i, k].item())]
                slow += [best] if not slow or slow[-1] != best else []
            assert actual[i] == slow


def test_radii_and_thresholds(seed):
    texts, root = torch.randn(30, 5), torch.randn(5)
    chord, other = radii(texts, root), radii(texts, root, "one_minus_cos")
    assert torch.allclose(other, 1 - F.cosine_similarity(texts.double(), root.double()[None]), atol=1e-12)
    assert torch.allclose(chord.square(), 2 * other, atol=1e-12)
    steps = thresholds_of(chord)
    assert len(steps) == 50 and steps[0] == chord.min() and steps[-1] == chord.max()
    with pytest.raises(ValueError, match="radius must be one of chord, one_minus_cos"):
        radii(texts, root, "cosine")
    with pytest.raises(ValueError, match="1 or more"):
        thresholds_of(chord, 0)


def test_several_references_and_order():
    first, second = ("a", "b", "c", "d"), ("w", "b", "y", "z")
    scores = score_chains([["w", "c", "x", "b", "a", "d"]], [[first, second]])
    assert scores.precision == pytest.approx(5 / 6)  # all but x
    assert scores.recall == 1.0  # level 1 by w, 2 by b, 3 by c, 4 by d
    assert scores.ordered_recall == pytest.approx(3 / 4)  # w, c, d
    only_first = score_chains([["w", "c", "x", "b", "a", "d"]], [[first]])
    assert only_first.precision == pytest.approx(4 / 6) and only_first.ordered_recall == pytest.approx(2 / 4)
    # A caption that comes back later is one of the set, and two of the length.
    again = score_chains([["a", "x", "a", "b"]], [[first]])
    assert again.precision == pytest.approx(2 / 3) and again.recall == pytest.approx(2 / 4) and again.length == 4
    # One caption that stands on two levels is one hit of an order, but two levels of the recall.
    twice = score_chains([["a"]], [[("a", "a", "b", "c")]])
    assert twice.recall == pytest.approx(2 / 4) and twice.ordered_recall == pytest.approx(1 / 4)


def test_released_chains_of_two_real_models(shared_data):
    folder = shared_data / "hierarcaps"
    if not folder.is_dir():
        pytest.skip("no hierarcaps here")
    references = {chain.image: [chain.captions] for chain in read_hierarcaps(folder, "test")}
    with gzip.open(folder / "hierarcaps_retrieved_chains.json.gz") as file:
        released = json.load(file)
    base, tuned = (
        score_chains([released[name][image] for image in references], list(references.values()))
        for name in ("base", "ft")
    )
    assert [base.precision, base.recall] == pytest.approx([0.0329, 0.0908], abs=1e-4)
    assert [tuned.precision, tuned.recall] == pytest.approx([0.0428, 0.1153], abs=1e-4)
    assert [base.length, tuned.length] == pytest.approx([11.296, 11.146], abs=1e-4)  # 11.30 and 11.15 as published


def test_length_alone_on_the_real_file(shared_data):
    folder = shared_data / "hierarcaps"
    if not folder.is_dir():
        pytest.skip("no hierarcaps here")
    actual = length_baselines([chain.captions for chain in read_hierarcaps(folder, "test")])
    words, characters = actual["words"], actual["characters"]
    assert [words.tau_a, words.tau_b, words.first_two] == pytest.approx([0.890, 0.913, 0.346], abs=1e-3)
    assert [characters.tau_a, characters.tau_b] == pytest.approx([0.869, 0.871], abs=1e-3)
    assert characters.first_two == pytest.approx(0.234, abs=1e-3)


def test_tau_of_all_permutations_is_scipys():
    rows = np.array(list(permutations([0.3, 1.0, 1.5, 7.0])))
    tau_a, tau_b = kendall_tau(rows)
    expected = [stats.kendalltau(row, range(4)).statistic for row in rows]
    assert np.allclose(tau_a, expected) and np.allclose(tau_b, expected)
    assert order_of_levels([[1, 2, 3, 4]]).tau_b == 1 and order_of_levels([[4, 3, 2, 1]]).tau_a == -1


def test_tau_with_ties_is_scipys(seed):
    rows = np.random.default_rng(seed).integers(0, 4, (200, 4)).astype(float)
    rows[0] = 2
    tau_b = kendall_tau(rows)[1]
    expected = [stats.kendalltau(row, range(4)).statistic for row in rows]
    assert np.allclose(tau_b, expected, equal_nan=True)
    order, undefined = order_of_levels(rows), (rows == rows[:, :1]).all(1)
    assert order.num_undefined == undefined.sum() >= 1 and order.num_items == 200
    assert order.tau_b == pytest.approx(np.nanmean(expected))
    assert order.tau_a == pytest.approx(kendall_tau(rows[~undefined])[0].mean())
    assert order.first_two == pytest.approx(np.sign(rows[:, 1] - rows[:, 0]).mean())
    assert math.isnan(order_of_levels(np.ones((3, 4))).tau_b)


def test_spearman_is_scipys(seed):
    x, y = np.random.default_rng(seed).integers(0, 9, (2, 100))
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert math.isnan(spearman(np.ones(4), np.arange(4)))
    with pytest.raises(UserError, match="1 of 3 values are not finite"):
        spearman([1, 2, math.nan], [1, 2, 3])
    with pytest.raises(ValueError, match="equal length"):
        spearman([1, 2], [1, 2, 3])


def test_mistakes_are_one_line(seed):
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="a caption for each of the 3 texts, got 2"):
        hierarchical_retrieval(x, x, ["a", "b"], x[0])
    with pytest.raises(ValueError, match="references for each of the 1 chains, got 0"):
        score_chains([["a"]], [])
    with pytest.raises(ValueError, match="one is empty"):
        score_chains([["a"]], [[]])
    with pytest.raises(ValueError, match="at least two levels"):
        order_of_levels([[1], [2]])
