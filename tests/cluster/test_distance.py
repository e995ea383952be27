"""Distances between tokens: by definition, exact multiples, safe from half precision, TF32 and zero features."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hyptree.cluster.distance import check_finite, cosine_distance, manifold_distance, pairwise_distance
from hyptree.errors import UserError
from hyptree.geometry import Euclidean, Lorentz, Manifold, Poincare


def cosine_loop(features: Tensor) -> Tensor:
    """The definition, pair by pair, in Python floats."""
    rows = features.double().tolist()
    out = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            out[i, j] = (
                1 - math.fsum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
                if i != j
                else 0
            )
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_cosine_is_its_definition(dtype: torch.dtype, tolerance: float) -> None:
    features = torch.randn(3, 20, 16, dtype=dtype) * 3 + 1
    D = cosine_distance(features)
    assert D.dtype == dtype
    expected = torch.stack([cosine_loop(image) for image in features])
    torch.testing.assert_close(D.double(), expected, rtol=0, atol=tolerance)


def test_cosine_is_symmetric_bounded_and_a_multiple_of_the_grid() -> None:
    near = torch.randn(2, 1, 32).expand(2, 40, 32) + 1e-3 * torch.randn(2, 40, 32)  # products that round above 1
    features = torch.cat([near, -near, torch.randn(2, 40, 32)], 1)
    D = cosine_distance(features)
    assert torch.equal(D, D.mT) and torch.equal(D.diagonal(dim1=1, dim2=2), torch.zeros(2, 120))
    assert D.min() >= 0 and D.max() <= 2
    units = D.double() * 2**24
    assert torch.equal(units, units.round())


def test_sums_of_distances_are_exact_in_any_order() -> None:
    features = torch.randn(1, 200, 24)
    for D in (cosine_distance(features), manifold_distance(features, Lorentz(c=2.0))):
        values = D.double().flatten()
        shuffled = values[torch.randperm(values.numel())]
        assert float(values.cumsum(0)[-1]) == float(shuffled.cumsum(0)[-1]) == math.fsum(values.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_features_under_autocast_give_the_float32_distances(dtype: torch.dtype) -> None:
    features = torch.randn(2, 30, 16, dtype=dtype)
    metrics: list[Manifold | None] = [None, Lorentz()]
    for manifold in metrics:
        metric = manifold or "cosine"
        expected = pairwise_distance(features.float(), metric)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            D = pairwise_distance(features, metric)
        assert D.dtype == torch.float32 and torch.equal(D, expected)


def test_a_faster_matmul_setting_of_the_user_changes_neither_distances_nor_the_setting() -> None:
    features = torch.randn(2, 40, 64)
    expected = cosine_distance(features.double())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        D = cosine_distance(features)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(D.double(), expected, rtol=0, atol=3e-7)


def test_zero_and_tiny_features_are_finite() -> None:
    features = torch.randn(1, 6, 8)
    features[0, 2] = 0
    features[0, 4] = 1e-30
    D = cosine_distance(features)
    assert bool(D.isfinite().all())
    assert torch.equal(D[0, 2, [0, 1, 3, 4, 5]], torch.ones(5)) and D[0, 2, 2] == 0
    assert bool(manifold_distance(torch.zeros(2, 3, 4), Lorentz()).eq(0).all())


def test_distances_carry_no_gradient() -> None:
    features = torch.randn(1, 5, 4, requires_grad=True)
    assert not cosine_distance(features).requires_grad
    assert not manifold_distance(features, Lorentz(c=1.0, learnable=True)).requires_grad


def test_lorentz_distance_is_the_law_of_cosines() -> None:
    """Two points at radii a, b under the angle t: cosh d = cosh a cosh b - sinh a sinh b cos t (c = 1)."""
    features = torch.randn(1, 12, 9, dtype=torch.float64) * 2
    D = manifold_distance(features, Lorentz(c=1.0), scale=0.4)
    for i in range(12):
        for j in range(12):
            f, g = features[0, i], features[0, j]
            a, b = 0.4 * float(f.norm()), 0.4 * float(g.norm())
            cos = float(f @ g / (f.norm() * g.norm()))
            d = math.acosh(max(1.0, math.cosh(a) * math.cosh(b) - math.sinh(a) * math.sinh(b) * cos)) if i != j else 0.0
            assert abs(float(D[0, i, j]) - d) < 1e-9


def test_models_of_hyperbolic_space_agree_and_flat_space_is_the_limit() -> None:
    features = torch.randn(2, 15, 6, dtype=torch.float64)
    sheet = manifold_distance(features, Lorentz(c=0.7), scale=0.5)
    ball = manifold_distance(features, Poincare(c=0.7), scale=0.25)  # tangent vectors of its origin count double
    torch.testing.assert_close(sheet, ball, rtol=1e-9, atol=1e-9)
    flat = torch.cdist(features, features) / math.sqrt(6)  # the default scale
    torch.testing.assert_close(manifold_distance(features, Euclidean()), flat, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(manifold_distance(features, Lorentz(c=1e-8)), flat, rtol=1e-6, atol=1e-6)


def test_default_scale_keeps_keys_from_saturating() -> None:
    """Keys of length sqrt(D) and more: radius about 2, where float32 has six digits of the distance."""
    features = 2 * torch.randn(1, 50, 64)
    D = manifold_distance(features, Lorentz())
    assert torch.equal(D, D.mT) and D.dtype == torch.float32
    torch.testing.assert_close(D.double(), manifold_distance(features.double(), Lorentz()), rtol=2e-6, atol=1e-6)
    assert 1 < float(D.max()) < 8


def test_the_faster_mode_gives_the_distances_of_tokens_that_differ() -> None:
    features = torch.randn(2, 40, 32)
    for manifold in (Lorentz(c=1.5), Euclidean()):
        D = manifold_distance(features, manifold, mode="matmul")
        assert torch.equal(D, D.mT)
        torch.testing.assert_close(D, manifold_distance(features, manifold), rtol=2e-6, atol=2e-6)


def test_bad_input_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"cosine_distance: expected floating-point features .* got int64"):
        cosine_distance(torch.ones(2, 3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got float32 of shape \(3,\)"):
        manifold_distance(torch.ones(3), Lorentz())
    with pytest.raises(ValueError, match=r"scale must be positive and finite, got 0"):
        manifold_distance(torch.ones(1, 3, 4), Lorentz(), scale=0.0)
    with pytest.raises(UserError, match=r"metric must be 'cosine' or a manifold .* got 'cosin'"):
        pairwise_distance(torch.ones(1, 3, 4), "cosin")  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_check_finite_names_the_place_and_the_image(value: float, word: str) -> None:
    features = torch.randn(4, 5, 6)
    check_finite(features, "block 3")
    features[2, 1, 0] = value
    with pytest.raises(
        UserError, match=rf"^block 3: {word} in the features of image 2, shape \(4, 5, 6\).*$"
    ) as caught:
        check_finite(features, "block 3")
    assert "\n" not in str(caught.value)
