"""Choosing tokens: the best by score, random ones, and the token that stands for those left out."""

from __future__ import annotations

import pytest
import torch

from ramify.cluster.select import fuse_dropped, random_tokens, top_k


def test_top_k_keeps_the_best_in_their_order() -> None:
    scores = torch.randn(5, 40)
    for k in (1, 13, 40, 60):
        for row, kept in zip(scores.tolist(), top_k(scores, k).tolist(), strict=True):
            best = sorted(range(40), key=lambda i: -row[i])[:k]
            assert kept == sorted(best)


def test_top_k_takes_the_first_of_equal_scores() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    assert top_k(scores, 3).tolist() == [[0, 1, 3]]
    assert torch.equal(top_k(torch.zeros(2, 3000), 1000), torch.arange(1000).expand(2, 1000))


def test_random_tokens_are_distinct_repeatable_and_even() -> None:
    draw = random_tokens(4000, 10, 3, torch.Generator().manual_seed(7))
    assert torch.equal(draw, random_tokens(4000, 10, 3, torch.Generator().manual_seed(7)))
    assert bool((draw.diff(dim=1) > 0).all()) and int(draw.min()) == 0 and int(draw.max()) == 9
    counts = torch.bincount(draw.flatten(), minlength=10)
    assert float((counts - 1200).abs().max()) < 5 * (4000 * 0.3 * 0.7) ** 0.5
    generator = torch.Generator().manual_seed(7)
    first, second = random_tokens(50, 10, 3, generator), random_tokens(50, 10, 3, generator)
    assert not torch.equal(first, second)
    assert torch.equal(random_tokens(2, 5, 9, generator), torch.arange(5).expand(2, 5))


def test_random_tokens_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    random_tokens(3, 10, 2, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2**-8)]
)
def test_fused_token_is_the_weighted_mean_of_what_was_dropped(dtype: torch.dtype, tolerance: float) -> None:
    x, scores = torch.randn(3, 12, 5).to(dtype), torch.rand(3, 12)
    keep = top_k(scores, 7)
    fused = fuse_dropped(x, scores, keep)
    assert fused.shape == (3, 1, 5) and fused.dtype == dtype
    for b in range(3):
        left = [i for i in range(12) if i not in keep[b].tolist()]
        weight = scores[b, left].double()
        expected = (weight.unsqueeze(-1) * x[b, left].double()).sum(0) / weight.sum()
        torch.testing.assert_close(fused[b, 0].double(), expected, rtol=tolerance, atol=tolerance)


def test_fused_token_where_nothing_was_dropped_or_scores_are_zero() -> None:
    x = torch.randn(2, 6, 3)
    assert torch.equal(fuse_dropped(x, torch.rand(2, 6), torch.arange(6).expand(2, 6)), torch.zeros(2, 1, 3))
    keep = torch.tensor([[0, 1], [2, 5]])
    fused = fuse_dropped(x, torch.zeros(2, 6), keep)
    torch.testing.assert_close(fused[0, 0], x[0, 2:].mean(0))
    torch.testing.assert_close(fused[1, 0], x[1, [0, 1, 3, 4]].mean(0))


def test_fused_token_hands_gradients_to_dropped_tokens_only() -> None:
    x = torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)
    scores, keep = torch.rand(1, 5, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 4]])
    assert torch.autograd.gradcheck(lambda x: fuse_dropped(x, scores.detach(), keep), x)
    fused = fuse_dropped(x, scores, keep).sum()
    (gradient,) = torch.autograd.grad(fused, x)
    assert torch.equal(gradient[0, [1, 4]], torch.zeros(2, 2, dtype=torch.float64))
    assert bool((gradient[0, [0, 2, 3]] > 0).all()) and scores.grad is None


def test_bad_input_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^top_k: k must be at least 1, got 0"):
        top_k(torch.rand(1, 4), 0)
    with pytest.raises(ValueError, match=r"^top_k: expected scores \(B, N\), got shape \(4,\)"):
        top_k(torch.rand(4), 2)
    with pytest.raises(ValueError, match=r"^random_tokens: k must be at least 1, got -1"):
        random_tokens(1, 4, -1, torch.Generator())
    with pytest.raises(ValueError, match=r"^fuse_dropped: expected tokens .* got \(1, 4, 2\), \(1, 3\), \(1, 2\)"):
        fuse_dropped(torch.rand(1, 4, 2), torch.rand(1, 3), torch.tensor([[0, 1]]))
