"""The sum of all rows: the kernel against the definition in float64, bits, operator."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ramify.ops.sum_rows import sum_rows

pytest.importorskip("triton")


def test_the_definition_adds_in_float32_at_least() -> None:
    x = torch.full((3, 1000, 2), 1.0).bfloat16()
    assert torch.equal(sum_rows(x), torch.full((2,), 3000.0))
    exact = torch.randn(4, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(sum_rows(exact), exact.sum((0, 1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 40), (3000, 96), (700, 200), (513, 128), (0, 16), (1, 1)])
def test_the_kernel_equals_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (torch.randn(shape, device=device) + 0.5).to(dtype)
    empty = torch.empty
    with monkeypatch.context() as patched:  # what the kernel does not write is seen
        patched.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
        found = sum_rows(x, backend="triton")
    assert found.dtype == torch.float32 and found.shape == (shape[-1],)
    count = max(1, math.prod(shape[:-1]))
    torch.testing.assert_close(found.double(), x.double().flatten(0, -2).sum(0), rtol=1e-6, atol=1e-6 * count**0.5)


def test_rows_in_any_order(device: str) -> None:
    x = torch.randn(2, 12, 3, 5, device=device).transpose(1, 3)
    torch.testing.assert_close(sum_rows(x, backend="triton"), x.sum((0, 1, 2)), rtol=1e-5, atol=1e-5)
    row = torch.randn(1, 12, device=device).expand(300, 12)
    torch.testing.assert_close(sum_rows(row, backend="triton"), 300 * row[0], rtol=1e-5, atol=1e-5)


def test_the_same_bits_every_time(device: str) -> None:
    x = torch.randn(900, 48, device=device)
    assert torch.equal(sum_rows(x, backend="triton"), sum_rows(x, backend="triton"))


def test_a_bad_column_stays_alone(device: str) -> None:
    x = torch.randn(200, 40, device=device)
    x[77, 33] = math.inf
    assert sum_rows(x, backend="triton").isinf().nonzero().tolist() == [[33]]


def test_shapes_without_data(device: str) -> None:
    with FakeTensorMode():
        found = sum_rows(torch.empty(4, 6, 32, dtype=torch.bfloat16, device=device), backend="triton")
    assert found.shape == (32,) and found.dtype == torch.float32
