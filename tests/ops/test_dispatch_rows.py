"""Rows dispatched to experts and back: kernels and definition against autograd, values and gradients."""

from __future__ import annotations

import pytest
import torch

from hyptree.ops.dispatch_rows import dispatch_rows, dispatch_rows_grad

pytest.importorskip("triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("T", "k", "width", "one", "has_a", "has_more"),
    [(5, 2, 16, 14, True, True), (3, 3, 40, -1, True, True), (4, 1, 8, -1, False, False), (0, 2, 8, 6, True, True)],
)
def test_there_and_back(
    T: int, k: int, width: int, one: int, has_a: bool, has_more: bool, dtype: torch.dtype, backend: str, device: str
) -> None:
    rows = torch.randn(T, width, device=device).to(dtype)
    inverse, chosen = torch.randperm(T * k, device=device), torch.randint(0, 3, (T * k,), device=device)
    a = (0.3 + torch.rand(3, device=device)) if has_a else None
    grad = torch.randn(T * k, width, device=device).to(dtype)
    initial = torch.randn(T, width, device=device).to(dtype) if has_more else None
    to_factors = torch.randn(T * k, device=device) if has_a and has_more else None

    dispatched, factors = dispatch_rows(rows, inverse, k, a, chosen if has_a else None, one, backend=backend)
    grad_rows, again, per_choice = dispatch_rows_grad(
        rows, grad, inverse, k, factors, to_factors, one, initial, backend=backend
    )  # fmt: skip
    assert dispatched.shape == (T * k, width) and dispatched.dtype == grad_rows.dtype == dtype
    assert torch.equal(dispatched, again)

    leaf = rows.double().requires_grad_()
    by_choice = (a[chosen] if a is not None else torch.ones(T * k, device=device)).double().requires_grad_()
    is_one = torch.arange(width, device=device) == one
    expected = leaf.repeat_interleave(k, 0) * torch.where(is_one, 1 / by_choice[:, None], 1.0)
    to_rows, to_choice = torch.autograd.grad(expected, (leaf, by_choice), grad[inverse].double())
    if initial is not None:
        to_rows = to_rows + initial.double()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(dispatched[inverse].double(), expected.detach(), **close)
    torch.testing.assert_close(grad_rows.double(), to_rows, **close)
    assert (factors is None) == (per_choice is None) == (a is None)
    if a is not None and factors is not None and per_choice is not None:
        assert torch.equal(factors[inverse], a[chosen])
        more = 0.0 if to_factors is None else to_factors[inverse].double()
        torch.testing.assert_close(per_choice.double(), to_choice + more, rtol=1e-5, atol=1e-5)


def test_a_bad_row_stays_alone(device: str) -> None:
    rows, inverse = torch.randn(4, 8, device=device), torch.randperm(8, device=device)
    grad = torch.randn(8, 8, device=device)
    grad[inverse[3], 2] = torch.nan  # the second copy of row 1
    grad_rows, dispatched, _ = dispatch_rows_grad(rows, grad, inverse, 2, backend="triton")
    assert grad_rows[1].isnan().any() and grad_rows[[0, 2, 3]].isfinite().all() and dispatched.isfinite().all()
