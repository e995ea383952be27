"""The centroid of experts' points: kernels and definition against geometry, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.ops.merge_points import merge_points, merge_points_grad

pytest.importorskip("triton")


def draw(s: int, T: int, k: int, n: int, M: int, device: str, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Shared points, routed points in a random order, weights, where each lies, a gradient; garbage in the padding."""
    shared = torch.randn(s, T, M, device=device).to(dtype) if s else None
    routed = (2 * torch.randn(T * k, M, device=device)).to(dtype)
    weight, inverse = torch.rand(T, k, device=device) + 0.1, torch.randperm(T * k, device=device)
    return shared, routed, weight, inverse, torch.randn(T, n, device=device).to(dtype)


def by_geometry(shared: Tensor | None, routed: Tensor, weight: Tensor, inverse: Tensor, n: int, c: float) -> Tensor:
    points, masses = routed[inverse].unflatten(0, weight.shape)[..., :n], weight
    if shared is not None:
        points = torch.cat([points, shared.transpose(0, 1)[..., :n]], 1)
        masses = torch.cat([weight, torch.ones(shared.shape[:2], dtype=weight.dtype, device=weight.device).t()], 1)
    return lorentz.centroid(points, masses, c)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("s", "T", "k", "n", "M"), [(1, 5, 2, 13, 16), (0, 3, 3, 8, 8), (2, 4, 1, 33, 40), (1, 0, 2, 8, 8)]
)
def test_it_is_the_centroid(
    s: int, T: int, k: int, n: int, M: int, dtype: torch.dtype, backend: str, device: str
) -> None:
    shared, routed, weight, inverse, grad = draw(s, T, k, n, M, device, dtype)
    assert routed is not None and weight is not None and inverse is not None and grad is not None
    actual = merge_points(shared, routed, weight, inverse, n, 0.6, backend=backend)
    grads = merge_points_grad(shared, routed, weight, inverse, grad, 0.6, backend=backend)
    leaves = [x.double().requires_grad_() for x in (routed, weight, shared) if x is not None]
    expected = by_geometry(leaves[2] if s else None, leaves[0], leaves[1], inverse, n, 0.6)
    to_routed, to_weight, *to_shared = torch.autograd.grad(expected, leaves, grad.double())
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert actual.dtype == dtype and actual.shape == (T, n) and (grads[0] is None) == (s == 0)
    torch.testing.assert_close(actual.double(), expected.detach(), **close)
    torch.testing.assert_close(grads[1].double(), to_routed, **close)
    torch.testing.assert_close(grads[2].double(), to_weight, rtol=1e-5, atol=1e-5)
    if grads[0] is not None:
        torch.testing.assert_close(grads[0].double(), to_shared[0], **close)
    assert grads[1][:, n:].count_nonzero() == 0  # whatever the padding held


def test_the_bound_holds_where_rounding_breaks_it(device: str) -> None:
    """Far out ``t^2 - |s|^2`` is lost in float32; a point alone is its own centroid, whatever its weight."""
    routed = 1e4 * torch.randn(50, 8, device=device)
    weight, inverse = torch.rand(50, 1, device=device) + 0.1, torch.arange(50, device=device)
    grad = torch.randn(50, 8, device=device)
    actual = merge_points(None, routed, weight, inverse, 8, 2.0, backend="triton")
    assert actual.isfinite().all()
    assert (actual.norm(dim=-1) <= routed.norm(dim=-1) * (1 + 1e-5)).all()
    plain = merge_points(None, routed, weight, inverse, 8, 2.0, backend="torch")
    bound = (weight[:, 0] ** 2 / 2).double()
    q = (weight[:, 0].double() * routed.double().norm(dim=-1) / actual.double().norm(dim=-1)) ** 2 / 2
    at_bound = (q / bound - 1).abs() < 1e-5
    assert at_bound.any() and (q >= bound * (1 - 1e-5)).all() and plain.isfinite().all()
    for one in merge_points_grad(None, routed, weight, inverse, grad, 2.0, backend="triton")[1:]:
        assert one.isfinite().all()
    # Where the bound rules, the centroid is the point divided by nothing: its gradient passes, that of the weight is 0.
    _, to_routed, to_weight = merge_points_grad(None, routed, weight, inverse, grad, 2.0, backend="triton")
    torch.testing.assert_close(to_routed[at_bound], grad[at_bound], rtol=1e-4, atol=1e-4)
    size = (grad * routed).sum(-1).abs() / weight[:, 0]
    assert (to_weight[at_bound, 0].abs() <= 1e-4 * (size[at_bound] + 1e4)).all()


def test_a_bad_row_stays_with_its_token(device: str) -> None:
    shared, routed, weight, inverse, grad = draw(1, 4, 2, 8, 8, device, torch.float32)
    assert shared is not None and routed is not None and weight is not None and inverse is not None
    assert grad is not None
    routed[inverse[2], 3] = torch.nan  # the first choice of token 1
    actual = merge_points(shared, routed, weight, inverse, 8, backend="triton")
    grads = merge_points_grad(shared, routed, weight, inverse, grad, backend="triton")
    assert grads[0] is not None
    for rows in (actual, grads[0][0], grads[1][inverse].view(4, -1), grads[2]):
        assert rows[1].isnan().any()
        assert rows[[0, 2, 3]].isfinite().all()
