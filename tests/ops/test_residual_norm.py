"""Residual, norm and lift: the kernels against the definition, and the definition against geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.ops.residual_norm import residual_norm, residual_norm_grad

pytest.importorskip("triton")

SETTINGS: dict[str, Any] = {"gain": 3.0, "eps": 1e-6, "c": 0.7}


def test_the_definition_is_the_centroid_and_a_normed_point() -> None:
    x, y = 3 * torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    raw, gain = torch.randn(1, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    joined, lifted = residual_norm(x, y, raw, gain, dtype=torch.float64, width=8, **SETTINGS)
    expected = 3.0 * lorentz.residual(x, y, F.softplus(raw), 0.7)
    torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-12)
    s = F.rms_norm(expected, (5,), gain, 1e-6)
    time = torch.sqrt((s * s).sum(-1, keepdim=True) + 1 / 0.7)
    whole = torch.cat([s, time, torch.ones(4, 1), torch.zeros(4, 1)], -1)
    torch.testing.assert_close(lifted, whole, rtol=1e-12, atol=1e-12)


def made(rows: int, n: int, parts: str, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """x, y, raw weight, norm gain, gradient of the residual, gradient of the lifted rows."""
    has_y, has_norm = "y" in parts, "n" in parts
    x, y = 4 * torch.randn(rows, n), torch.randn(rows, n)
    tensors = [
        x.to(device, dtype),
        y.to(device, dtype) if has_y else None,
        torch.randn(1, device=device) if has_y else None,
        (0.5 + torch.rand(n, device=device)) if has_norm else None,
        torch.randn(rows, n, device=device).to(dtype) if "g" in parts else None,
        torch.randn(rows, -(-(n + 2) // 8) * 8, device=device).to(dtype) if has_norm else None,
    ]
    return tensors


def definition_grads(inputs: list[Tensor | None], settings: dict[str, Any]) -> list[Tensor | None]:
    """Gradients of x, y, raw weight and norm gain in float64 by autograd, and the lifted rows."""
    *leaves, to_joined, to_lifted = (None if part is None else part.double() for part in inputs)
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in leaves]
    joined, lifted = residual_norm(*leaves, dtype=torch.float64, **settings, backend="torch")  # type: ignore[arg-type]
    pairs = [(leaves[0] if joined is None else joined, to_joined), (lifted, to_lifted)]
    pairs = [(out, grad) for out, grad in pairs if out is not None and grad is not None]
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True))  # type: ignore[arg-type,misc]
    return [*(None if leaf is None else next(grads) for leaf in leaves), None if lifted is None else lifted.detach()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", ["yng", "yn", "yg", "ng", "n"])
@pytest.mark.parametrize(("rows", "n"), [(5, 6), (3, 33), (0, 8)])
def test_kernels_equal_the_definition(rows: int, n: int, parts: str, dtype: torch.dtype, device: str) -> None:
    inputs = made(rows, n, parts, dtype, device)
    width = -(-(n + 2) // 8) * 8
    settings = {**SETTINGS, "width": width}
    joined, lifted = residual_norm(*inputs[:4], dtype=dtype, **settings, backend="triton")  # type: ignore[arg-type]
    actual = residual_norm_grad(*inputs, dtype=dtype, **settings)  # type: ignore[arg-type]
    exact = [None if part is None else part.double() for part in inputs]
    want_joined, want_lifted = residual_norm(*exact[:4], dtype=torch.float64, **settings)  # type: ignore[arg-type]
    expected = definition_grads(inputs, settings)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
    for one, other in ((joined, want_joined), (lifted, want_lifted), *zip(actual, expected, strict=True)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
            torch.testing.assert_close(one.double() / scale, other / scale, **close)
    if lifted is not None and actual[4] is not None:
        unit = torch.finfo(dtype).eps  # the backward may contract products that the forward does not
        torch.testing.assert_close(lifted, actual[4], rtol=2 * unit, atol=2 * unit)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("parts", ["yng", "n"])
@pytest.mark.parametrize(("rows", "n"), [(30, 16), (20, 384)])  # one piece, three pieces
def test_programs_sum_gradients_over_their_rows(
    rows: int, n: int, eps: float, parts: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large eps leaves much of a gradient along the point, which the kernel has in closed form."""
    from hyptree.ops.residual_norm import triton

    monkeypatch.setattr(triton, "PROCESSORS", 1)  # and a few programs
    inputs = made(rows, n, parts, torch.float32, device)
    assert inputs[0] is not None
    inputs[0] *= 0.1
    settings = {**SETTINGS, "eps": eps, "width": n + 8}
    expected = definition_grads(inputs, settings)
    torch.use_deterministic_algorithms(True)  # what is allocated holds NaN until it is written
    try:
        actual = residual_norm_grad(*inputs, dtype=torch.float32, **settings)  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("norm", [1.0, 40.0, 1200.0])
def test_the_centroid_of_a_point_with_itself_is_the_point(norm: float, device: str) -> None:
    """There t_x t_y - x.y cancels: its rounding, eps t^2, is what is left; the bound keeps the root real."""
    x = torch.full((2, 16), norm / 4, device=device)
    raw = torch.zeros(1, device=device)
    joined, _ = residual_norm(x, x, raw, None, dtype=x.dtype, width=24, backend="triton")
    torch.testing.assert_close(joined, x, rtol=2 * torch.finfo(x.dtype).eps * (1 + norm**2), atol=0.0)
    ones = torch.ones_like(x)
    grads = residual_norm_grad(x, x, raw, None, ones, None, dtype=x.dtype, width=24)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)


def test_a_bad_row_stays_alone(device: str) -> None:
    x, y, raw, gain, g, gl = made(4, 12, "yng", torch.float32, device)
    assert x is not None
    x[2, 5] = torch.nan
    joined, lifted = residual_norm(x, y, raw, gain, dtype=torch.float32, width=16, backend="triton")
    grads = residual_norm_grad(x, y, raw, gain, g, gl, dtype=torch.float32, width=16)
    for actual in (joined, lifted, grads[0], grads[1]):
        assert actual is not None
        assert actual[[0, 1, 3]].isfinite().all()
        assert actual[2].isnan().any()
