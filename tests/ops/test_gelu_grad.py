"""The gradient of GELU: the kernel against the definition in float64, sums, memory, operator."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hyptree.ops.gelu_grad import gelu_grad

pytest.importorskip("triton")

UNIT = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""How far a result may be off, of itself: a few roundings in float32, else the one at the end."""


def expected(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaf = x.double().requires_grad_()
    gelu = F.gelu(leaf)
    (to_x,) = torch.autograd.grad(gelu, leaf, grad.double())
    return to_x, gelu.detach(), to_x.flatten(0, -2).sum(0)


def test_the_definition_is_autograd_s() -> None:
    x, grad = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    for one, other in zip(gelu_grad(x, grad), expected(x, grad), strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 40), (1000, 96), (17, 200), (0, 16)])
def test_the_kernel_equals_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, overwrite: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (torch.randn(shape, device=device) * 2).to(dtype)
    grad = torch.randn(shape, device=device).to(dtype)
    reference, inputs = expected(x, grad), grad.clone()
    empty_like, empty = torch.empty_like, torch.empty
    with monkeypatch.context() as patched:  # what the kernel does not write is seen
        patched.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(math.nan))
        patched.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
        to_x, gelu, sums = gelu_grad(x, inputs, overwrite=overwrite, backend="triton")
    unit = UNIT[dtype] * (2 if device == "cpu" and dtype != torch.float32 else 1)  # the interpreter cuts, a GPU rounds
    torch.testing.assert_close(gelu.double(), reference[1], rtol=2 * unit, atol=4e-7)
    torch.testing.assert_close(to_x.double(), reference[0], rtol=2 * unit, atol=2e-6)
    assert sums.dtype == torch.float32 and to_x.dtype == gelu.dtype == dtype
    torch.testing.assert_close(sums.double(), reference[2], rtol=1e-5, atol=3e-6 * math.sqrt(max(1, x[..., 0].numel())))
    assert (to_x.data_ptr() == inputs.data_ptr()) == (overwrite or x.numel() == 0)
    if not overwrite:
        assert torch.equal(inputs, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_of_number(dtype: torch.dtype, device: str) -> None:
    """Tails, zeros of both signs, the far ends: no value is lost in a difference, none becomes NaN."""
    x = torch.linspace(-20, 20, 4001, device=device).to(dtype)
    far = 1e15 if device == "cpu" else 1e30  # whose square is infinite, of which the interpreter warns
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-30, -1e-30, far, -far], device=device).to(dtype)]).unsqueeze(1)
    to_x, gelu, _ = gelu_grad(x, torch.ones_like(x), backend="triton")
    exact = x.double()
    bell = torch.exp(-0.5 * exact.square()) / math.sqrt(2 * math.pi)
    below = 0.5 * torch.erfc(-exact / math.sqrt(2))
    near = (exact.abs() < 12).squeeze()  # beyond are numbers that float32 has not
    cut = 1 if dtype == torch.float32 else 2
    close = {"rtol": 2e-5 if dtype == torch.float32 else 2 * cut * UNIT[dtype], "atol": 1e-6}
    torch.testing.assert_close(to_x.double(), below + exact * bell, **close)
    torch.testing.assert_close(gelu.double(), exact * below, **close)
    torch.testing.assert_close(gelu.double()[near], (exact * below)[near], rtol=close["rtol"], atol=1e-35)


def test_a_bad_row_stays_alone(device: str) -> None:
    x, grad = torch.randn(40, 16, device=device), torch.randn(40, 16, device=device)
    x[3, 5] = grad[7, 2] = math.nan
    to_x, gelu, sums = gelu_grad(x, grad, backend="triton")
    bad = torch.zeros(40, 16, dtype=torch.bool, device=device)
    bad[3, 5] = True
    assert torch.equal(gelu.isnan(), bad)
    bad[7, 2] = True
    assert torch.equal(to_x.isnan(), bad) and torch.equal(sums.isnan(), bad.any(0))


def test_the_same_bits_every_time(device: str) -> None:
    x, grad = torch.randn(700, 48, device=device), torch.randn(700, 48, device=device)
    for one, other in zip(*(gelu_grad(x, grad, backend="triton") for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_maps_in_any_order(device: str) -> None:
    """Rows that do not lie one after another, and their gradient kept as it was."""
    x, grad = torch.randn(2, 12, 3, 5, device=device).transpose(1, 3), torch.randn(1, 1, 3, 12, device=device)
    grad = grad.expand(2, 5, 3, 12)
    for one, other in zip(gelu_grad(x, grad, backend="triton"), expected(x, grad), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_shapes_without_data(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 6, 32, dtype=torch.bfloat16, device=device)
        to_x, gelu, sums = gelu_grad(x, torch.empty_like(x), overwrite=True, backend="triton")
    assert to_x.shape == gelu.shape == x.shape and sums.shape == (32,)
    assert to_x.dtype == gelu.dtype == torch.bfloat16 and sums.dtype == torch.float32
