"""Triplets, the choice of common ancestors, and the loss over them."""

from __future__ import annotations

import pytest
import torch

from hyptree.geometry import poincare
from hyptree.vlm.lathadapter.hierarchy_loss import choose_ancestors, gumbel_noise, hierarchy_loss, mine_triplets


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_loss_is_zero_for_a_tidy_triplet_and_positive_with_ancestors_swapped() -> None:
    """i and j close to ancestor 0; k far; ancestor 1 as near to all three, beyond the margin for i and j."""
    points = torch.tensor([[0.50, 0.05], [0.50, -0.05], [-0.50, 0.0]])
    ancestors = torch.tensor([[0.50, 0.0], [0.0, 0.0]])
    distances = poincare.pairwise_dist(points, ancestors, 1.0)
    triplet = torch.tensor([[0, 1, 2]])
    tidy = hierarchy_loss(distances, triplet, sampling="argmin")
    assert tidy.loss == 0 and tidy.chosen.tolist() == [[0, 1]]
    # The same geometry with the two ancestors forced the other way round by the noise.
    forced = torch.tensor([[[-1e4, 1e4]], [[1e4, -1e4]]])
    swapped = hierarchy_loss(distances, triplet, noise=forced)
    assert swapped.chosen.tolist() == [[1, 0]]
    gap = distances[:, 1] - distances[:, 0]  # d(., a) - d(., b) with a = 1, b = 0
    expected = (gap[0] + 0.1).relu() + (gap[1] + 0.1).relu() + (-gap[2] + 0.1).relu()
    torch.testing.assert_close(swapped.loss, expected)
    assert swapped.loss > 1


def test_triplets_are_neighbours_and_strangers_and_all_of_them_where_few() -> None:
    x = torch.tensor([0.0, 1.0, 3.0, 7.0, 15.0])
    distances = (x[:, None] - x[None]).abs()
    actual = mine_triplets(distances, 2, 1000, generator())
    assert len(actual) == len({tuple(row) for row in actual.tolist()}) == 5 * 2 * 2
    nearest = {0: {1, 2}, 1: {0, 2}, 2: {1, 0}, 3: {2, 1}, 4: {3, 2}}
    for i, j, k in actual.tolist():
        assert j in nearest[i] and k not in nearest[i] and k != i
    some = mine_triplets(distances, 2, 7, generator(3))
    assert len(some) == 7 and {tuple(row) for row in some.tolist()} <= {tuple(row) for row in actual.tolist()}
    assert torch.equal(some, mine_triplets(distances, 2, 7, generator(3)))


def test_anchors_may_be_fewer_than_candidates(seed: int) -> None:
    distances = torch.rand(2, 9)
    actual = mine_triplets(distances, 3, 1000, generator())
    assert len(actual) == 2 * 3 * 5 and set(actual[:, 0].tolist()) == {0, 1}
    assert (distances[actual[:, 0], actual[:, 1]] < distances[actual[:, 0], actual[:, 2]]).all()


@pytest.mark.parametrize(("count", "triplets"), [(0, 0), (1, 0), (2, 0), (3, 3), (4, 8), (5, 5 * 3)])
def test_few_candidates_shrink_the_neighbourhood(count: int, triplets: int, seed: int) -> None:
    """k_eff = max(1, (n - 1) // 2) below k + 2 = 5 candidates: 1 neighbour of 3 or 4 points, 3 of 5."""
    points = torch.rand(count, 2)
    actual = mine_triplets(torch.cdist(points, points), 3, 1000, generator())
    assert len(actual) == triplets
    # Two neighbours and one stranger of 4 points would be as many triplets.
    neighbours = {len(actual[actual[:, 0] == i, 1].unique()) for i in range(count)} if triplets else set()
    assert neighbours == {0: set(), 3: {1}, 8: {1}, 15: {3}}[triplets]


def test_a_choice_is_one_hot_in_value_and_soft_in_gradient(seed: int) -> None:
    farthest = torch.rand(50, 6, dtype=torch.float64, requires_grad=True)
    noise = gumbel_noise((50, 6), generator(seed)).double()
    for sampling in ("default", "paper", "argmin"):
        weights = choose_ancestors(farthest, sampling, 0.1, noise)  # type: ignore[arg-type]
        torch.testing.assert_close(weights.detach().sort(1).values[:, :5], torch.zeros(50, 5, dtype=torch.float64))
        torch.testing.assert_close(weights.detach().amax(1), torch.ones(50, dtype=torch.float64))
        probe = torch.rand(50, 6, dtype=torch.float64)
        (grad,) = torch.autograd.grad((weights * probe).sum(), farthest)
        logits = {"paper": torch.exp(-farthest) + noise, "default": -farthest / 0.1 + noise, "argmin": -farthest / 0.1}
        (soft,) = torch.autograd.grad((logits[sampling].softmax(-1) * probe).sum(), farthest)
        torch.testing.assert_close(grad, soft)
    assert torch.equal(choose_ancestors(farthest, "argmin", 0.1, None).argmax(1), farthest.argmin(1))


def test_the_printed_sampling_chooses_almost_evenly_and_ours_by_distance() -> None:
    """Sixteen candidates at distance 1.5 to 2.6: the figures that speak against the literal form."""
    farthest = torch.linspace(1.5, 2.6, 16).expand(200_000, 16)
    noise = gumbel_noise((200_000, 16), generator(1))
    share = {
        name: torch.bincount(choose_ancestors(farthest, name, t, noise).argmax(1), minlength=16) / 200_000  # type: ignore[arg-type]
        for name, t in (("paper", 0.1), ("default", 1.0))
    }
    assert share["paper"][0] == pytest.approx(0.068, abs=0.002) and share["paper"][-1] == pytest.approx(
        0.058, abs=0.002
    )
    assert share["default"][0] == pytest.approx(0.102, abs=0.002)
    assert share["default"][-1] == pytest.approx(0.034, abs=0.002)
    sharp = torch.bincount(choose_ancestors(farthest, "default", 0.1, noise).argmax(1), minlength=16) / 200_000
    expected = (-farthest[0] / 0.1).softmax(0)
    torch.testing.assert_close(sharp, expected, rtol=0, atol=0.004)


def test_permuted_ancestors_with_their_noise_give_the_same_loss_and_gradient(seed: int) -> None:
    distances = torch.rand(9, 5, dtype=torch.float64, requires_grad=True)
    triplets = mine_triplets(torch.rand(9, 9), 3, 20, generator(seed))
    noise, order = gumbel_noise((2, 20, 5), generator(seed)), torch.randperm(5)
    one = hierarchy_loss(distances, triplets, noise=noise)
    two = hierarchy_loss(distances[:, order], triplets, noise=noise[..., order])
    torch.testing.assert_close(one.loss, two.loss)
    grads = [torch.autograd.grad(term.loss, distances)[0] for term in (one, two)]
    torch.testing.assert_close(*grads)
    assert torch.equal(order[two.chosen], one.chosen)


def test_nothing_to_compare_is_zero_with_a_gradient() -> None:
    none = torch.zeros(0, 3, dtype=torch.int64)
    for shape, triplets in (((4, 3), none), ((4, 1), torch.tensor([[0, 1, 2]])), ((4, 0), torch.tensor([[0, 1, 2]]))):
        distances = torch.rand(shape, requires_grad=True)
        term = hierarchy_loss(distances, triplets, generator=generator())
        assert term.is_skipped and term.loss == 0
        term.loss.backward()
        assert distances.grad is not None and (distances.grad == 0).all()
