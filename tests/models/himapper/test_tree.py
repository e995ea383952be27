"""The forest and its Gaussians: shapes, moments, samples, KL."""

from __future__ import annotations

import pytest
import torch

from hyptree.models.himapper.tree import ProbabilisticTree, TreeShape


def tree(num_leaves: int = 8, depth: int = 3, width: int = 5, **options) -> ProbabilisticTree:
    """With variances that differ from 1 and from each other."""
    built = ProbabilisticTree(TreeShape(num_leaves, depth), width, **options)
    if built.logvar is not None:
        torch.nn.init.normal_(built.logvar)
    return built


def test_levels_halve_and_a_parent_is_half_the_index() -> None:
    shape = TreeShape(32, 4)
    assert shape.sizes == (32, 16, 8, 4) and shape.num_nodes == 60
    parent = shape.parent.tolist()
    assert parent[:32] == [32 + i // 2 for i in range(32)] and parent[54:] == [59, 59, -1, -1, -1, -1]
    for node, above in enumerate(parent[:56]):
        assert shape.level[above] == shape.level[node] + 1


@pytest.mark.parametrize(("num_leaves", "depth", "advice"), [(20, 4, 24), (0, 2, 2), (33, 4, 40), (4, 4, 8)])
def test_leaves_that_do_not_halve(num_leaves: int, depth: int, advice: int) -> None:
    with pytest.raises(ValueError, match=rf"num_leaves={num_leaves}, depth={depth}; take e.g. num_leaves={advice}$"):
        TreeShape(num_leaves, depth)


def test_moments_are_those_of_the_mixture() -> None:
    """Against draws from the mixture itself: the leaves below a node, each as likely."""
    built = tree(8, 3, 4)
    assert built.logvar is not None
    means, variances = built.moments()
    draws = 200_000
    for level, size in enumerate(built.shape.sizes):
        below = 8 // size
        for node in range(size):
            leaf = node * below + torch.randint(below, (draws,))
            x = built.mu[leaf] + (0.5 * built.logvar[leaf]).exp() * torch.randn(draws, 4)
            scale = variances[level][node].sqrt()
            assert ((x.mean(0) - means[level][node]).abs() / scale).max() < 0.02
            assert (x.var(0) / variances[level][node] - 1).abs().max() < 0.02


@pytest.mark.parametrize("mixture", ["moment", "stratified"])
def test_samples_have_the_moments_of_their_node(mixture: str) -> None:
    built = tree(4, 3, 3, mixture=mixture, noise="per_image")
    with torch.no_grad():
        rows, _ = built(100_000)
        means, variances = built.moments()
    assert rows.shape == (100_000, 3, 4, 3)
    for level, size in enumerate(built.shape.sizes):
        of_nodes = rows[:, level].unflatten(1, (size, 2**level)).transpose(1, 2).flatten(0, 1)
        scale = variances[level].sqrt()
        assert ((of_nodes.mean(0) - means[level]).abs() / scale).max() < 0.02
        # Stratified draws come from Gaussians with the children's moments: together they have the same variance.
        assert (of_nodes.var(0) / variances[level] - 1).abs().max() < 0.03


def test_stratified_rows_come_half_from_each_child() -> None:
    built = tree(4, 3, 3, mixture="stratified", sibling_std=5.0)
    torch.nn.init.constant_(built.logvar, -40.0)
    rows, _ = built(2)
    assert torch.allclose(rows[1], built.mu, atol=1e-4)  # each parent's two rows: one at each child
    moment = tree(4, 3, 3, sibling_std=5.0)
    assert not torch.allclose(moment(2)[0][1], moment.mu, atol=0.1)


def test_noise_is_shared_or_drawn_for_each_image() -> None:
    assert tree()(7)[0].shape == (3, 8, 5)
    rows, _ = tree(noise="per_image")(7)
    assert rows.shape == (7, 3, 8, 5) and not torch.equal(rows[0], rows[1])


def test_siblings_start_apart_by_their_spread() -> None:
    for spread in (0.75, 0.01):
        mu = ProbabilisticTree(TreeShape(512, 4), 64, sibling_std=spread).mu
        apart = (mu[0::2] - mu[1::2]).std().item() / 2**0.5
        assert abs(apart / spread - 1) < 0.05
        assert abs((mu[0::2] + mu[1::2]).div(2).var().item() / (1.5**2 + spread**2 / 2) - 1) < 0.1


def test_variances_start_near_one() -> None:
    """Xavier's uniform distribution for their logarithm."""
    logvar = ProbabilisticTree(TreeShape(64, 4), 128).logvar
    assert logvar is not None
    bound = (6 / (64 + 128)) ** 0.5
    assert 0.99 * bound < logvar.abs().max() <= bound
    assert abs(logvar.mean()) < 0.01 and abs(logvar.std() / (bound / 3**0.5) - 1) < 0.05


def test_kl_of_the_top_level() -> None:
    standard = tree()
    torch.nn.init.zeros_(standard.mu)
    torch.nn.init.zeros_(standard.logvar)
    assert standard(1)[1] == 0
    built = tree()
    mean, variance = (levels[-1] for levels in built.moments())
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, variance.sqrt()), torch.distributions.Normal(0.0, 1.0)
    )
    assert (exact >= 0).all()
    for kl in (built(1)[1], built.eval()(1)[1]):
        assert kl > 0 and torch.allclose(kl, exact.mean(), rtol=1e-5)


def test_without_variances_nothing_is_random() -> None:
    built = tree(probabilistic=False)
    assert [name for name, _ in built.named_parameters()] == ["mu"]
    nodes, kl = built(3)
    assert torch.equal(nodes[:8], built.mu) and nodes.shape == (14, 5) and kl == 0
