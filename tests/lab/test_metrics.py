"""Overlaps against all pairs and known frames; theory against the published numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hyptree.lab.hyperbolic import readout
from hyptree.lab.metrics import mean_square_overlap, measure, overlap, regime, silent_features
from hyptree.lab.theory import (
    finite_exponent,
    frequencies,
    random_overlap,
    strong_exponent,
    unlearned_loss,
    weak_exponent,
    welch_bound,
)

WIDTHS = (10, 15, 25, 39, 63, 100)


def by_pairs(W: Tensor) -> list[float]:
    unit = [row / row.norm() for row in W.double()]
    return [float(a @ b) for a, b in itertools.combinations(unit, 2)]


def simplex(m: int) -> Tensor:
    """m + 1 unit vectors in m dimensions with equal angles."""
    corners = torch.eye(m + 1, dtype=torch.float64) - 1 / (m + 1)
    _, _, Vh = torch.linalg.svd(corners)
    flat = corners @ Vh[:m].T
    return flat / flat.norm(dim=1, keepdim=True)


def test_overlaps_equal_all_pairs(seed: int) -> None:
    W = torch.randn(37, 6) * torch.rand(37, 1) + 0.3
    expected = np.array(by_pairs(W))
    actual = overlap(W, block=10)
    assert actual.num == 37
    assert actual.mean_square == pytest.approx((expected**2).mean(), abs=1e-12)
    assert actual.signed_mean == pytest.approx(expected.mean(), abs=1e-12)
    assert actual.variance == pytest.approx((expected**2).var(), abs=1e-12)
    assert actual.largest == pytest.approx(np.abs(expected).max(), abs=1e-12)
    with_zero = overlap(torch.cat([W[:5], torch.zeros(1, 6), W[5:]]))
    assert with_zero.num == 37 and with_zero.mean_square == pytest.approx(actual.mean_square, abs=1e-12)


def test_random_directions_overlap_by_one_over_m(seed: int) -> None:
    m, num = 20, 400
    mean, variance = random_overlap(m)
    actual = overlap(torch.randn(num, m))
    # Overlaps of random directions are independent in pairs, so pairs add like independent draws.
    assert abs(actual.mean_square - mean) < 3 * (variance / (num * (num - 1) / 2)) ** 0.5
    assert actual.variance == pytest.approx(variance, rel=0.1)
    assert (mean, variance) == pytest.approx((1 / 20, 2 * 19 / (400 * 22)))


@pytest.mark.parametrize("m", [2, 5, 12])
def test_frames_that_reach_the_bound(m: int) -> None:
    actual = overlap(simplex(m))
    assert actual.largest == pytest.approx(1 / m, abs=1e-12)
    assert actual.welch == pytest.approx(1 / m, abs=1e-12)
    assert actual.mean_square == pytest.approx(1 / m**2, abs=1e-12)
    assert actual.variance == pytest.approx(0, abs=1e-12)
    orthogonal = overlap(torch.eye(m))
    assert (orthogonal.mean_square, orthogonal.largest, orthogonal.welch) == (0, 0, 0)


def test_welch_is_below_every_set(seed: int) -> None:
    for m in (3, 8):
        actual = overlap(torch.randn(50, m))
        assert actual.welch == welch_bound(50, m) < actual.largest
        assert actual.welch**2 < actual.mean_square
    assert welch_bound(1000, 100) ** 2 == pytest.approx(900 / (100 * 999))


def test_fewer_than_two_rows_have_no_overlap() -> None:
    assert math.isnan(overlap(torch.zeros(4, 3)).mean_square)
    assert math.isnan(mean_square_overlap(torch.ones(1, 3)))


def test_measure_counts_rows_by_norm(seed: int) -> None:
    W = torch.randn(40, 5)
    W /= W.norm(dim=1, keepdim=True)
    W[:4] *= 1.3
    W[4:10] *= 0.8
    W[10:] *= 0.1
    actual = measure(W)
    assert actual["phi_half"] == pytest.approx(10 / 40) and actual["phi_one"] == pytest.approx(4 / 40)
    assert actual["regime"] == "weak"
    assert actual["mso_strong"] == pytest.approx((np.array(by_pairs(W[:4])) ** 2).mean())
    assert actual["mso_all"] == pytest.approx((np.array(by_pairs(W)) ** 2).mean())
    W[3, 2] = torch.nan
    assert measure(W)["regime"] == "diverged" and math.isnan(measure(W)["phi_half"])  # type: ignore[arg-type]


@pytest.mark.parametrize("curvature", [0.0, 0.5, 4.0])
def test_silent_features_never_answer(curvature: float, seed: int) -> None:
    W, b = torch.randn(200, 6).double() * 0.4, 2 * torch.randn(200).double()
    alone = torch.stack([readout(2 * row[None], W, curvature)[0, i] for i, row in enumerate(W)])  # by their definition
    expected = torch.relu(alone + b) == 0
    assert 10 < expected.sum() < 190
    assert torch.equal(silent_features(W, b, curvature), expected)
    actual = measure(W, curvature, b)
    assert actual["silent"] == expected.sum() and actual["first_silent"] == 1 + expected.int().argmax()
    none = measure(W, curvature, b + 100)
    assert none["silent"] == 0 and math.isnan(none["first_silent"])  # type: ignore[arg-type]
    assert math.isnan(measure(W, curvature)["silent"])  # type: ignore[arg-type]


def test_regimes() -> None:
    assert regime(0.95, 100, 10) == "strong"
    assert regime(0.2, 100, 10) == "weak"
    assert regime(0.21, 100, 10) == "mixed"
    assert regime(0.94, 100, 10) == "mixed"


PUBLISHED = {0: 0.04, 0.5: 0.12, 1: 0.29, 1.25: 0.43, 1.5: 0.61, 1.625: 0.70, 1.75: 0.80, 1.875: 0.91, 2: 1.02}


@pytest.mark.parametrize("alpha", list(PUBLISHED))
def test_finite_exponents_are_the_published_ones(alpha: float) -> None:
    assert finite_exponent(frequencies(1000, alpha), WIDTHS) == pytest.approx(PUBLISHED[alpha], abs=0.005)


def test_loss_without_any_feature_and_by_brute_force() -> None:
    assert unlearned_loss(frequencies(1000, 0.0), 0) == pytest.approx(1.3323, abs=5e-5)
    assert unlearned_loss(frequencies(1000, 2.0), 0) == pytest.approx(0.9328, abs=5e-5)
    p = frequencies(30, 1.2)
    expected = [sum(4 / 3 * q - q * q for q in p[k:]) for k in (0, 7, 30)]
    assert unlearned_loss(p, [0, 7, 30]) == pytest.approx(expected)


def test_strong_theory_bends_at_one_and_a_half() -> None:
    assert [strong_exponent(alpha) for alpha in (0, 1.5, 1.75, 2)] == pytest.approx([1, 1, 1.5, 2])
    assert [weak_exponent(alpha) for alpha in (0.5, 1, 1.75)] == [0, 0, 0.75]
