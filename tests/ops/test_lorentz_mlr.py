"""Logits of hyperplanes: the kernels against float64, values and gradients, and the classifier that uses them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.nn import classifier
from hyptree.ops import lorentz_mlr
from hyptree.ops.lorentz_mlr import mlr_logits

pytest.importorskip("triton")


def draw(rows: tuple[int, ...], n: int, K: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    x = lorentz.expmap0(3 * torch.randn(*rows, n) / n**0.5, 0.7)
    product = 3 * torch.randn(*rows, K)
    return [
        product.to(device, dtype), x.to(device, dtype), torch.randn(K, device=device), torch.rand(K, device=device)
    ]  # fmt: skip


def outcome(tensors: list[Tensor], c: Tensor | float, weight: Tensor, backend: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    expected = [*leaves, c] if isinstance(c, Tensor) else leaves
    out = mlr_logits(*leaves, c, backend=backend)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), expected)]


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "n", "K"), [((3, 7), 5, 3), ((17,), 33, 300), ((0,), 4, 3), ((2,), 300, 1)])
def test_kernels_equal_the_definition(
    rows: tuple[int, ...], n: int, K: int, dtype: torch.dtype, is_learned: bool, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tensors, weight = draw(rows, n, K, dtype, device), torch.randn(*rows, K, device=device)
    c = torch.tensor(0.7, device=device).requires_grad_() if is_learned else 0.7
    exact = c.detach().double().requires_grad_() if isinstance(c, Tensor) else c
    expected = outcome([t.double() for t in tensors], exact, weight.double(), "torch")
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(torch.nan))
    actual = outcome(tensors, c, weight, "triton")
    assert actual[0].dtype == torch.float32 and actual[0].shape == (*rows, K)
    assert [t.dtype for t in actual[1:5]] == [t.dtype for t in tensors]
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for i, (one, other) in enumerate(zip(actual[1:], expected[1:], strict=True)):
        loose = 8e-3 if dtype != torch.float32 and i < 2 else 1e-5  # what is stored in half precision
        assert (one.double() - other).norm() <= loose * other.norm()


def test_far_points_and_a_bad_row(device: str) -> None:
    product, x, time_column, scale = draw((6,), 4, 5, torch.float32, device)
    product[1] *= 1e12
    product[4, 2] = torch.nan
    leaf = product.clone().requires_grad_()
    out = mlr_logits(leaf, x, time_column, scale, backend="triton")
    bad = torch.zeros(6, 5, dtype=torch.bool, device=device)
    bad[4, 2] = True
    assert torch.equal(out.isnan(), bad)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(grad.isnan(), bad) and not grad[0].eq(0).any()
    expected = mlr_logits(product.double(), x.double(), time_column.double(), scale.double())
    torch.testing.assert_close(out[:4].double(), expected[:4], rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_those_of_the_definition(device: str) -> None:
    tensors = draw((4,), 3, 5, torch.float32, device)

    def penalty(tensors: list[Tensor], backend: str) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        grads = torch.autograd.grad(mlr_logits(*leaves, 0.7, backend=backend).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))

    expected = penalty([t.double() for t in tensors], "torch")
    for one, other in zip(penalty(tensors, "triton"), expected, strict=True):
        assert other.norm() > 1e-3
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_the_classifier_gives_the_same_with_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = torch.tensor(0.7, device=device).requires_grad_()
    x = lorentz.expmap0(torch.randn(3, 5, 6), 0.7).to(device).requires_grad_()
    weight, offset = torch.randn(7, 6, device=device), torch.randn(7, device=device)
    weight[2] = 0  # no hyperplane: logit 0, no gradient
    leaves = [x, weight.requires_grad_(), offset.requires_grad_(), c]
    cotangent = torch.randn(3, 5, 7, device=device)
    calls: list[int] = []
    launch = lorentz_mlr._forward
    monkeypatch.setattr(lorentz_mlr, "_forward", lambda *args: calls.append(1) or launch(*args))

    def result() -> list[Tensor]:
        out = classifier.lorentz_mlr(x, weight, offset, c)
        return [out, *torch.autograd.grad((out * cotangent).sum(), leaves)]

    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    expected = result()
    assert not calls
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    actual = result()
    assert len(calls) == 1
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert not actual[0][..., 2].any() and not actual[2][2].any()
