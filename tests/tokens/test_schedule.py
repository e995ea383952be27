"""Schedules: how many tokens stay after which block."""

from __future__ import annotations

import pytest

from hyptree.errors import UserError
from hyptree.tokens.schedule import (
    Counts,
    KeepRate,
    Remove,
    Threshold,
    check_layers,
    default_layers,
    removed_per_layer,
)

LAYERS = (3, 6, 9)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(0.9, [176, 158, 142]), (0.7, [137, 96, 67]), (0.5, [98, 49, 24]), (0.25, [49, 12, 3]), (1.0, [196, 196, 196])],
)
def test_keep_rates_of_the_paper(rate: float, expected: list[int]) -> None:
    assert KeepRate(LAYERS, rate).counts(196) == expected


def test_keep_rate_is_not_hurt_by_floating_point() -> None:
    assert 100 * 0.7**2 < 49  # what would be cut off to 48
    assert KeepRate(LAYERS, 0.7).counts(100) == [70, 49, 34]


def test_relative_keep_rate_follows_the_tokens_that_are_there() -> None:
    assert KeepRate(LAYERS, 0.7, relative=True).counts(196) == [137, 95, 66]


def test_only_the_layers_of_a_schedule_reduce() -> None:
    schedule = KeepRate(LAYERS, 0.5)
    assert [schedule.count(layer, 196, 196) for layer in range(7)] == [196, 196, 196, 98, 196, 196, 49]


@pytest.mark.parametrize("kept", [(300, 200, 197), (5, 9, 200)])
def test_counts_are_clipped_to_the_tokens_that_are_there(kept: tuple[int, ...]) -> None:
    counts = Counts(LAYERS, kept).counts(196)
    assert counts == [min(196, kept[0]), min(counts[0], kept[1]), min(counts[1], kept[2])]


def test_tiny_rates_keep_one_token() -> None:
    assert KeepRate(LAYERS, 0.01).counts(49) == [1, 1, 1]
    assert Remove((0, 1), (48, 10)).counts(49) == [1, 1]


@pytest.mark.parametrize(
    ("r", "expected"),
    [
        (16, (16,) * 12),
        ((16, 0.0), (16,) * 12),
        ((16, -1.0), (32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0)),
        ((16, 1.0), (0, 2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32)),
        ([4, 0, 7], (4, 0, 7) + (0,) * 9),
        (0, (0,) * 12),
    ],
)
def test_removed_per_layer(r: object, expected: tuple[int, ...]) -> None:
    assert removed_per_layer(r, 12) == expected  # type: ignore[arg-type]


def test_removing_counts_patch_tokens() -> None:
    assert Remove(tuple(range(12)), removed_per_layer(16, 12)).counts(196)[-1] == 196 - 12 * 16


def test_default_layers_are_the_quarters() -> None:
    assert [default_layers(depth) for depth in (12, 24, 4, 2, 1)] == [(3, 6, 9), (6, 12, 18), (1, 2, 3), (0, 1), (0,)]


def test_threshold_bounds() -> None:
    assert Threshold(LAYERS, 0.2).bounds(196) == (1, 196)
    assert Threshold(LAYERS, 0.2, min_keep=0.25, max_keep=0.5).bounds(196) == (49, 98)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepRate(LAYERS, 0.0), "keep is 0.0"),
        (lambda: KeepRate(LAYERS, 1.5), "keep is 1.5"),
        (lambda: KeepRate(LAYERS, float("nan")), "keep is nan"),
        (lambda: Counts(LAYERS, (4, 2)), "2 numbers for the 3 layers"),
        (lambda: Counts(LAYERS, (4, 2, 0)), "keeps no token"),
        (lambda: Threshold(LAYERS, -0.1), "threshold is -0.1"),
        (lambda: Threshold(LAYERS, 0.1, min_keep=0.9, max_keep=0.5), "min_keep is 0.9"),
        (lambda: removed_per_layer((16, 3), 12), "inflect from -1 to 1"),
        (lambda: removed_per_layer([1] * 13, 12), "lists 13 layers"),
        (lambda: removed_per_layer(-1, 12), "at least 0"),
        (lambda: removed_per_layer([1, 2.5], 12), "whole numbers"),
        (lambda: check_layers((3, 12), 12), "layer 12 does not exist"),
        (lambda: check_layers((-1,), 12), "layer -1 does not exist"),
        (lambda: check_layers((3, 3), 12), "twice"),
        (lambda: check_layers((), 12), "empty"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]
