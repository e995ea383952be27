"""Choosing tokens: the best by score, or random ones."""

from __future__ import annotations

import pytest
import torch

from hyptree.cluster.select import random_tokens, top_k


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


def test_bad_input_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^top_k: k must be at least 1, got 0"):
        top_k(torch.rand(1, 4), 0)
    with pytest.raises(ValueError, match=r"^top_k: expected scores \(B, N\), got shape \(4,\)"):
        top_k(torch.rand(4), 2)
    with pytest.raises(ValueError, match=r"^random_tokens: k must be at least 1, got -1"):
        random_tokens(1, 4, -1, torch.Generator())
