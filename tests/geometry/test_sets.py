"""Distance matrices from differences: their gradients at sizes that torch's own kernel cannot count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz, sets

SHAPES = [(8, 2048, 2048, 128), (1, 3, 2**24, 64), (4097, 300, 7, 1000), (2, 3, 50, 4, 2**22)]
"""More than 2^31 terms each: in many sets, in long ones, in many dimensions, with two batch axes."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_call_has_more_terms_than_32_bits_count(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """On shapes alone: the same calls on a GPU write out of bounds from 2^31 terms on."""
    *batch, N, M, n = shape
    terms = []

    def count(grad: Tensor, x: Tensor, y: Tensor, p: float, d: Tensor) -> Tensor:
        assert grad.shape == d.shape == (*x.shape[:-1], y.shape[-2])
        assert x.shape[:-2] == y.shape[:-2] and p == 2.0
        terms.append(d.numel() * x.shape[-1])
        return torch.empty_like(x)

    monkeypatch.setattr(torch.ops.aten, "_cdist_backward", count)
    x, y = (torch.empty(*batch, size, n, device="meta") for size in (N, M))
    grad, d = (torch.empty(*batch, N, M, device="meta") for _ in range(2))
    actual = sets._Steps.apply(grad, x, y, d)
    assert actual.shape == x.shape
    assert sum(terms) == d.numel() * n > 2**31
    assert max(terms) < 2**31


@pytest.mark.parametrize("most", [1, 6, 40, 300])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_parts_give_the_same_gradient(batch: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "MOST_TERMS", most, raising=False)
    x = torch.randn(*batch, 5, 6, dtype=torch.float64).requires_grad_()
    y = torch.randn(*batch, 3, 6, dtype=torch.float64).requires_grad_()
    weight = torch.randn(*batch, 5, 3, dtype=torch.float64)
    actual = torch.autograd.grad((sets.accurate_cdist(x, y) * weight).sum(), (x, y))
    steps = x.unsqueeze(-2) - y.unsqueeze(-3)
    expected = torch.autograd.grad((steps.norm(dim=-1) * weight).sum(), (x, y))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_parts_keep_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "MOST_TERMS", 10, raising=False)
    x, y = (torch.randn(2, size, 3, dtype=torch.float64).requires_grad_() for size in (4, 3))
    assert torch.autograd.gradgradcheck(lambda x, y: lorentz.pairwise_dist(x, y, 0.7, mode="exact"), (x, y))


@pytest.mark.gpu
def test_gradient_of_more_terms_than_32_bits_count() -> None:
    """The same rows in one large set and in a small one."""
    x, y = (torch.randn(5, 2048, 256, device="cuda", dtype=torch.float64) for _ in range(2))
    weight = torch.randn(5, 2048, 2048, device="cuda", dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad((sets.accurate_cdist(leaf, y) * weight).sum(), leaf)
    last = x[-1:, -3:].clone().requires_grad_()
    (expected,) = torch.autograd.grad((sets.accurate_cdist(last, y[-1:]) * weight[-1:, -3:]).sum(), last)
    torch.testing.assert_close(actual[-1:, -3:], expected, rtol=1e-10, atol=1e-10)
