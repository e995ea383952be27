"""The space of the nodes and its loss: on the hyperboloid, right distances, and a sign that makes trees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.models.himapper.output import tree_stats
from hyptree.models.himapper.plain import LARGEST_RADIUS, Sign, TreeLoss, TreeSpace, to_space
from hyptree.models.himapper.tree import TreeShape

SHAPE = TreeShape(16, 3)


def far_reference(x: Tensor, y: Tensor, c: float) -> Tensor:
    """``arccosh(-c <x, y>) / sqrt(c)`` in float64, pair by pair."""
    x, y = x.double()[:, :, None], y.double()[:, None]
    product = (x * y).sum(-1) - (1 / c + x.square().sum(-1)).sqrt() * (1 / c + y.square().sum(-1)).sqrt()
    return torch.acosh((-c * product).clamp_min(1)) / math.sqrt(c)


def all_distances(h: Tensor, c: float | None, num_children: int | None = None) -> Tensor:
    """Of the first points of an image, or of all of them, to all."""
    space = TreeSpace(2, 2, "euclidean" if c is None else "lorentz")
    return space.distances(h, torch.tensor(c or 0.0), h.shape[1] if num_children is None else num_children)


def stats_of(loss: TreeLoss, d: Tensor) -> dict[str, Tensor]:
    return tree_stats(loss, torch.zeros(len(d), loss.shape.num_nodes, 1), d, None)


# --------------------------------------------------------------------------------------------------------------- space


@pytest.mark.parametrize("c", [0.1, 1.0, 10.0])
def test_nodes_lie_on_the_hyperboloid(c: float) -> None:
    u = torch.randn(3, 20, 8) * torch.logspace(-3, 1, 20)[:, None]
    h = to_space(u, c)
    radius = math.sqrt(c) * u.norm(dim=-1)
    bounded = LARGEST_RADIUS * torch.tanh(radius / LARGEST_RADIUS)
    ambient = lorentz.to_ambient(h, c).double()
    norm = ambient[..., 1:].square().sum(-1) - ambient[..., 0].square()
    # At the limit both squares are 745 times their difference, and rounding the time to float32 alone costs 1e-4 of it.
    assert (c * norm + 1).abs()[bounded < 3].max() < 1e-4 and (c * norm + 1).abs().max() < 4e-4
    back = lorentz.logmap0(h, c)
    assert torch.allclose(back, u * (bounded / radius)[..., None], atol=1e-5, rtol=1e-5)
    assert torch.allclose(math.sqrt(c) * lorentz.dist0(h, c), bounded, rtol=1e-5) and bounded.max() > 3.5


def test_the_flat_space_keeps_the_limit_and_drops_the_rest() -> None:
    u = torch.randn(2, 5, 3) * 5
    radius = u.norm(dim=-1, keepdim=True)
    assert torch.allclose(to_space(u), u * 4 * torch.tanh(radius / 4) / radius, rtol=1e-5)
    x = torch.randn(2, 5, 3)
    assert torch.allclose(all_distances(x, None, 3), torch.cdist(x[:, :3].double(), x.double()).float(), atol=1e-6)


@pytest.mark.parametrize("c", [0.1, 1.0, 10.0])
def test_distances_are_a_metric_and_those_of_arccosh(c: float) -> None:
    h = to_space(torch.randn(2, 12, 6), c)
    d = all_distances(h, c)
    off = ~torch.eye(12, dtype=torch.bool)
    assert torch.allclose(d[:, off], far_reference(h, h, c)[:, off].float(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(d, d.mT, atol=1e-5)
    longest = max((d[:, i, k] - d[:, i, j] - d[:, j, k]).max() for i, j, k in itertools.permutations(range(6), 3))
    assert longest < 1e-4


def test_curvature_and_scale_are_learned_within_bounds() -> None:
    space = TreeSpace(16, 64)
    nodes = torch.randn(2, 28, 16)
    assert space(nodes)[1] == 1 and space.log_alpha.exp().item() == pytest.approx(1 / 8)
    loss = TreeLoss(SHAPE)
    for raw, c, moves in ((5.0, 10.0, False), (-5.0, 0.1, False), (0.3, math.exp(0.3), True)):
        torch.nn.init.constant_(space.log_c, raw)
        h, curvature = space(nodes)
        assert curvature.item() == pytest.approx(c) and space.log_c.item() == pytest.approx(raw)
        space.zero_grad()
        loss(space.distances(h, curvature, 24)).backward()
        assert (space.log_c.grad.abs().item() > 0) is moves
        assert space.log_alpha.grad.abs().item() > 0


@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_touch_distances(geometry: str, dtype: torch.dtype) -> None:
    space, loss = TreeSpace(16, 8, geometry=geometry), TreeLoss(SHAPE)
    results = []
    for enabled in (False, True):
        h = to_space(torch.randn(2, 28, 8, generator=torch.Generator().manual_seed(4)), None).requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            d = space.distances(h, torch.tensor(1.0), 24)
            value = loss(d)
        value.backward()
        assert d.dtype == value.dtype == torch.float32
        results.append((d, value, h.grad))
    for plain, cast in zip(*results, strict=True):
        assert torch.allclose(plain, cast, atol=1e-6)


def test_flat_space_has_no_curvature() -> None:
    space = TreeSpace(16, 16, geometry="euclidean")
    assert space(torch.randn(2, 28, 16))[1] == 0
    assert {name for name, _ in space.named_parameters()} == {"proj.weight", "log_alpha"}


# ---------------------------------------------------------------------------------------------------------------- loss


def naive_loss(d: Tensor, shape: TreeShape, tau: float) -> float:
    """By the formula, child by child, from distances (B, nodes, nodes)."""
    levels = []
    for level in range(shape.depth - 1):
        start, end = shape.starts[level], shape.starts[level + 1]
        terms = []
        for b in range(len(d)):
            for i in range(start, end):
                parent = end + (i - start) // 2
                own = math.exp(-d[b, i, parent].item() / tau)
                others = sum(math.exp(-d[b, i, j].item() / tau) for j in range(start, end) if j != i)
                terms.append(-math.log(own / (own + others)))
        levels.append(sum(terms) / len(terms))
    return sum(levels) / len(levels)


def test_the_loss_is_the_formula() -> None:
    h = to_space(torch.randn(3, 28, 4), 1.0)
    d = all_distances(h, 1.0)
    for tau in (0.2, 1.0):
        assert TreeLoss(SHAPE, tau)(d[:, :24]).item() == pytest.approx(naive_loss(d, SHAPE, tau), rel=1e-4)


def test_a_learned_tau_starts_at_its_value() -> None:
    d = torch.rand(2, 24, 28)
    loss = TreeLoss(SHAPE, 0.3, learn_tau=True)
    value = loss(d)
    assert torch.allclose(value, TreeLoss(SHAPE, 0.3)(d))
    value.backward()
    assert loss.log_tau is not None and loss.log_tau.grad is not None and loss.log_tau.grad.abs().item() > 0


def test_equal_distances_and_coincident_nodes() -> None:
    expected = (math.log(16) + math.log(8)) / 2
    assert TreeLoss(SHAPE)(torch.full((2, 24, 28), 1.7)).item() == pytest.approx(expected, rel=1e-6)
    for c in (None, 1.0):
        u = torch.randn(2, 1, 6).expand(-1, 28, -1).clone().requires_grad_()
        h = to_space(u, c)
        value = TreeLoss(SHAPE)(all_distances(h, c, 24))
        assert value.item() == pytest.approx(expected, abs=0.02) and value >= 0
        value.backward()
        assert torch.isfinite(u.grad).all()
    origin = torch.zeros(1, 28, 6, requires_grad=True)
    h = to_space(origin, 1.0)
    TreeLoss(SHAPE)(all_distances(h, 1.0, 24)).backward()
    assert torch.isfinite(origin.grad).all()


def test_the_loss_is_not_negative_and_does_not_know_left_from_right() -> None:
    loss = TreeLoss(SHAPE)
    h = to_space(torch.randn(4, 28, 5), 1.0)
    values = loss(all_distances(h, 1.0, 24))
    assert values >= 0
    # Nodes 2 and 3 of level 2 (siblings) with the leaves below them.
    order = list(range(28))
    order[16 + 2], order[16 + 3] = 16 + 3, 16 + 2
    order[4:6], order[6:8] = [6, 7], [4, 5]
    swapped = h[:, order]
    assert torch.allclose(loss(all_distances(swapped, 1.0, 24)), values, rtol=1e-5)
    order[0], order[2] = 2, 0  # no siblings
    mixed = h[:, order]
    assert not torch.allclose(loss(all_distances(mixed, 1.0, 24)), values, rtol=1e-4)


def train_free_tree(sign: Sign, steps: int) -> tuple[list[dict[str, float]], list[float]]:
    """Statistics before and after training 28 free points of a 16-leaf, 3-level tree, and both losses."""
    loss = TreeLoss(SHAPE, sign=sign)
    u = (0.3 * torch.randn(1, 28, 8)).requires_grad_()
    optimiser = torch.optim.Adam([u], lr=0.05)
    stats, values = [], []
    for step in range(steps + 1):
        h = to_space(u, 1.0)
        d = all_distances(h, 1.0, 24)
        value = loss(d)
        if step in (0, steps):
            stats.append({name: number.item() for name, number in stats_of(loss, d).items()})
            values.append(value.item())
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    return stats, values


def test_our_sign_makes_a_tree_and_the_printed_one_does_not() -> None:
    """Both losses fall to nothing: what matters is the geometry."""
    (before, after), losses = train_free_tree("corrected", 400)
    assert before["parent_retrieval"] < 0.5 and after["parent_retrieval"] >= 0.99
    assert after["distance_ratio"] < 0.6 < before["distance_ratio"]
    assert losses[1] < 0.1 < 1 < losses[0]
    (before, after), losses = train_free_tree("paper", 400)
    assert after["parent_retrieval"] < 0.2
    assert after["distance_ratio"] > 2 > before["distance_ratio"]
    assert losses[1] < 0.1 < 1 < losses[0]


def test_one_step_moves_children_towards_their_parents() -> None:
    (before, after), _ = train_free_tree("corrected", 1)
    assert after["distance_ratio"] < before["distance_ratio"]
    (before, after), _ = train_free_tree("paper", 1)
    assert after["distance_ratio"] > before["distance_ratio"]


def test_stats_by_hand() -> None:
    """A tree of two leaves under each of two roots, on a line."""
    shape = TreeShape(4, 2)
    at = torch.tensor([0.0, 2.0, 5.0, 6.0, 1.0, 2.9])
    d = (at[:, None] - at).abs()[None]
    stats = stats_of(TreeLoss(shape), d[:, :4])
    assert stats["parent_retrieval"].item() == pytest.approx(0.75)  # node 1 is nearer to 2.9 than to 1.0
    assert stats["parent_distance"].item() == pytest.approx((1 + 1 + 2.1 + 3.1) / 4)
    assert stats["level_distance"].item() == pytest.approx(2 * (2 + 5 + 6 + 3 + 4 + 1) / 12)
    ratio = (stats["parent_distance"] / stats["level_distance"]).item()
    assert stats["distance_ratio"].item() == pytest.approx(ratio)
