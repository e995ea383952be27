"""Centroids of attention: the kernels against the definition, values and gradients; the definition against geometry."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.ops.centroid import centroid, centroid_grad

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def drawn(shape: tuple[int, ...], d: int, far: float = 1.0) -> tuple[Tensor, Tensor]:
    """Five points for each mean, and weights with sum 1, in float64."""
    weights = torch.rand(*shape, 5, dtype=torch.float64)
    return far * torch.randn(*shape, 5, d, dtype=torch.float64), weights / weights.sum(-1, keepdim=True)


def mean_of(points: Tensor, weights: Tensor, c: float) -> Tensor:
    """The mean (..., d + 1) as attention gives it, ``[m, e]``."""
    time, *space = (weights[..., None, :] @ lorentz.to_ambient(points, c)).squeeze(-2).unbind(-1)
    return torch.stack([*space, time - 1 / math.sqrt(c)], -1)


def means(shape: tuple[int, ...], d: int, c: float, far: float = 1.0) -> Tensor:
    return mean_of(*drawn(shape, d, far), c)


def test_the_definition_is_the_centroid() -> None:
    points, weights = drawn((4, 3), 5)
    mean = F.pad(mean_of(points, weights, 0.7), (0, 3), value=9.0)
    out = centroid(mean, 5, 8, 0.7)
    expected = lorentz.centroid(points, weights, 0.7)
    torch.testing.assert_close(out[..., :5], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[..., 5], lorentz.time(expected, 0.7), rtol=1e-12, atol=1e-12)
    assert torch.equal(out[..., 6:], torch.zeros(4, 3, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "d", "wide", "width"), [
    ((2, 3, 5), 7, 8, 8), ((1, 4), 62, 64, 64), ((3,), 9, 24, 16), ((2, 2), 9, 12, 16), ((0, 3), 7, 8, 8),
])  # fmt: skip
def test_kernels_equal_the_definition(
    shape: tuple[int, ...], d: int, wide: int, width: int, dtype: torch.dtype, device: str
) -> None:
    mean = F.pad(means(shape, d, 0.7), (0, wide - d - 1)).to(device, dtype)
    grad = torch.randn(*shape, width, device=device).to(dtype)
    out = centroid(mean, d, width, 0.7, backend="triton")
    actual, again = centroid_grad(mean, grad, d, 0.7)
    assert torch.equal(out, again)
    assert actual.shape == mean.shape
    leaf = mean.double().requires_grad_()
    exact = centroid(leaf, d, width, 0.7)
    (expected,) = torch.autograd.grad(exact, leaf, grad.double())
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), exact.detach(), **close)
    torch.testing.assert_close(actual.double(), expected, **close)


def test_a_transposed_view_is_read_as_it_is_meant(device: str) -> None:
    mean = means((2, 3, 5), 7, 1.0).float().to(device)  # (B, H, N, 8)
    grad = torch.randn(2, 5, 3, 8, device=device)
    out = centroid(mean.transpose(1, 2), 7, 8, backend="triton")
    torch.testing.assert_close(out, centroid(mean, 7, 8, backend="triton").transpose(1, 2), rtol=0.0, atol=0.0)
    actual, _ = centroid_grad(mean.transpose(1, 2), grad, 7)
    other, _ = centroid_grad(mean, grad.transpose(1, 2), 7)
    assert torch.equal(actual, other.transpose(1, 2))


def test_the_bound_holds_where_rounding_breaks_it(device: str) -> None:
    """The mean of equal far points is a point, and stays one; the bound has no gradient on its far side."""
    far = 40 * torch.randn(6, 13)
    square = far.double().square().sum(-1, keepdim=True)
    exact = torch.cat([far.double(), torch.sqrt(square + 1) - 1], -1)
    mean = F.pad(exact, (0, 2)).float().to(device)
    mean[:, 13] *= 1 - 1e-6  # never less than a rounding
    out = centroid(mean, 13, 16, backend="triton")
    torch.testing.assert_close(out[:, :13].cpu(), far, rtol=1e-6, atol=0.0)
    grad = torch.randn(6, 16, device=device)
    actual, _ = centroid_grad(mean, grad, 13)
    leaf = mean.detach().requires_grad_()
    (expected,) = torch.autograd.grad(centroid(leaf, 13, 16, backend="torch"), leaf, grad)
    assert torch.equal(actual[:, 13], torch.zeros(6, device=device))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_time_belongs_to_the_rounded_point(device: str) -> None:
    mean = F.pad(means((6,), 60, 1.0, far=3.0), (0, 3)).bfloat16().to(device)
    out = centroid(mean, 60, 64, backend="triton").double()
    time = torch.sqrt(out[:, :60].square().sum(-1) + 1)
    unit = 2.0**-7 if device == "cpu" else 2.0**-8  # Triton's interpreter cuts where a GPU rounds
    assert ((out[:, 60] - time).abs() <= unit * time).all()


def test_a_bad_row_stays_alone(device: str) -> None:
    mean, grad = means((4,), 7, 1.0).float().to(device), torch.randn(4, 8, device=device)
    mean[1, 3] = torch.nan
    for actual in (centroid(mean, 7, 8, backend="triton"), *centroid_grad(mean, grad, 7)):
        assert actual[1].isnan().any()
        assert actual[[0, 2, 3]].isfinite().all()
