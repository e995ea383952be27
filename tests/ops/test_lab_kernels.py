"""The kernels of the superposition lab against their definitions: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ramify.ops import backend as backends
from ramify.ops.bag import bag_sum
from ramify.ops.product import product

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)


def as_exact_as_float32(found: Tensor, a: Tensor, b: Tensor, relu: bool) -> None:
    """Rounding of K products and sums in float32: at most K eps |a| |b|, here asked for with sqrt(K)."""
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs()
    bound = 2 * a.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps * scale
    assert ((found.double() - (exact.relu() if relu else exact)).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layout", ["hidden", "transposed", "plain"])
def test_products_are_exact(layout: str, relu: bool, device: str) -> None:
    """The three layouts of a step: (R, w)(w, n), (n, R)(R, w), (R, n)(n, w), at sizes that fill no tile."""
    for G, R, n, w in (
        [(2, 33, 140, 11)] if device == "cpu" else [(3, 1400, 1000, 11), (2, 700, 1000, 101), (1, 9, 5, 1)]
    ):
        H, P = torch.randn(G, R, w, device=device), torch.randn(G, n, w, device=device)
        Z = torch.randn(G, R, n, device=device)
        a, b = {"hidden": (H, P.mT), "transposed": (Z.mT, H), "plain": (Z, P)}[layout]
        as_exact_as_float32(product(a, b, relu=relu, backend="triton"), a, b, relu)
        as_exact_as_float32(product(a, b, relu=relu, backend="torch"), a, b, relu)


def test_not_a_number_stays_in_its_row(device: str) -> None:
    a, b = torch.randn(1, 20, 12, device=device), torch.randn(1, 12, 17, device=device)
    a[0, 3, 4] = torch.nan
    found = product(a, b, relu=True, backend="triton").isnan()
    assert found[0, 3].all()
    assert found.sum() == 17


def test_sums_of_bags(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_rows, C in [(7, 3), (30, 12)] if device == "cpu" else [(1000, 11), (1000, 101), (300, 1025)]:
        lengths = torch.randint(0, 4, (40,), generator=generator)
        lengths[5], lengths[-1] = (23 if device == "cpu" else 2500), 0  # one long bag; the last one empty
        starts = (lengths.cumsum(0) - lengths).to(device)
        total = int(lengths.sum())
        rows = torch.randint(0, num_rows, (total,), generator=generator).to(device)
        weights, table = torch.randn(total, device=device), torch.randn(num_rows, C, device=device)
        found = bag_sum(table, rows, weights, starts, backend="triton")
        bags = torch.repeat_interleave(torch.arange(40), lengths).to(device)
        terms = table.double()[rows] * weights.double()[:, None]
        exact = torch.zeros(40, C, dtype=torch.float64, device=device).index_add_(0, bags, terms)
        assert torch.equal(found[-1], torch.zeros(C, device=device))
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(bag_sum(table, rows, weights, starts, backend="torch"), found, rtol=1e-5, atol=2e-5)
        assert torch.equal(found, bag_sum(table, rows, weights, starts, backend="triton"))


def test_what_a_kernel_cannot_take_is_said(device: str) -> None:
    x = torch.randn(1, 4, 4, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="kernel takes float32"):
        product(x, x, backend="triton")
    assert product(x, x).dtype == torch.float64
