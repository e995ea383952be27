"""Kernels of a tree of queries against their definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.ops import tree_reader
from ramify.ops.tree_reader import reference

pytest.importorskip("triton")

from ramify.ops.tree_reader import triton as kernels

SIZES, WIDTH, HEADS = (8, 4, 2), 32, 2
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(LIMITS))


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves out of its results is NaN."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


def weights(shapes: reference.Shapes, count: int = 1, more: int = 0) -> Tensor:
    return 0.3 * torch.randn(count * reference.size_of(shapes) + more)


def levels() -> Tensor:
    level = torch.tensor([level for level, size in enumerate(SIZES) for _ in range(size)])
    bias = torch.zeros(len(level), 16)
    bias[:, : len(level)].masked_fill_(level[:, None] != level, float("-inf"))
    return bias


def reading(batch: int, tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    unit = 5 * F.normalize(torch.randn(sum(SIZES), HEADS, WIDTH // HEADS), dim=-1).flatten(1)
    matrices = weights(reference.read_matrices(WIDTH, len(SIZES)))
    made = [unit.to(dtype), torch.randn(batch, tokens, 2 * WIDTH).to(dtype), matrices.to(dtype)]
    return [x.to(device) for x in (*made, weights(reference.read_vectors(WIDTH, len(SIZES))), levels())]


def encoding(batch: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    made = torch.randn(batch, WIDTH), torch.randn(batch, sum(SIZES), 2 * WIDTH)
    matrices = weights(reference.encode_matrices(WIDTH), len(SIZES))
    vectors = weights(reference.encode_vectors(WIDTH), len(SIZES), 2 * WIDTH)
    return [*(x.to(device, dtype) for x in (*made, matrices)), vectors.to(device)]


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape and torch.isfinite(found).all()
    assert (found - wanted).abs().max() < LIMITS[dtype] * wanted.abs().max()


@DTYPES
@pytest.mark.parametrize("tokens", [1, 64, 70])
@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.usefixtures("spoilt")
def test_reading(tokens: int, cosine: bool, dtype: torch.dtype, device: str) -> None:
    inputs = reading(3, tokens, dtype, device)
    nodes, key_value = kernels.read_tree(*inputs, list(SIZES), HEADS, 0.8, cosine)
    assert nodes.dtype == torch.float32 and key_value.dtype == dtype
    wanted = reference.read_tree(*(x.double() for x in inputs), SIZES, HEADS, 0.8, cosine)
    close(nodes, wanted[0], dtype)
    close(key_value, wanted[1], dtype)


@DTYPES
@pytest.mark.parametrize("batch", [1, 16, 19])
@pytest.mark.usefixtures("spoilt")
def test_encoding(batch: int, dtype: torch.dtype, device: str) -> None:
    inputs = encoding(batch, dtype, device)
    found = kernels.encode_tree(*inputs, list(SIZES), HEADS)
    assert found.dtype == dtype
    close(found, reference.encode_tree(*(x.double() for x in inputs), SIZES, HEADS), dtype)


def test_an_empty_batch_is_empty(device: str) -> None:
    nodes, key_value = kernels.read_tree(*reading(0, 5, torch.float16, device), list(SIZES), HEADS, 1.0, True)
    assert nodes.shape == (0, 14, WIDTH) and key_value.shape == (0, 14, 2 * WIDTH)
    assert kernels.encode_tree(*encoding(0, torch.float16, device), list(SIZES), HEADS).shape == (0, WIDTH)


def test_keys_of_any_length_are_read_the_same(device: str) -> None:
    """Cosine attention: a token's key counts by its direction; a key of zeros is no NaN."""
    inputs = reading(2, 9, torch.float16, device)
    nodes, _ = kernels.read_tree(*inputs, list(SIZES), HEADS, 1.0, True)
    inputs[1][:, :, :WIDTH] *= 4
    torch.testing.assert_close(
        kernels.read_tree(*inputs, list(SIZES), HEADS, 1.0, True)[0], nodes, rtol=1e-2, atol=1e-2
    )
    inputs[1][:, 3, :WIDTH] = 0
    assert kernels.read_tree(*inputs, list(SIZES), HEADS, 1.0, True)[0].isfinite().all()


def test_what_the_kernels_cannot_take_goes_the_plain_way(device: str) -> None:
    inputs = reading(2, 9, torch.float32, device)
    found = tree_reader.read_tree(*inputs, SIZES, HEADS)
    assert all(
        torch.equal(a, b) for a, b in zip(found, reference.read_tree(*inputs, SIZES, HEADS, 1.0, True), strict=True)
    )
    with pytest.raises(ValueError, match=r"cannot run here: torch.float32, the kernel takes bfloat16 and float16"):
        tree_reader.read_tree(*inputs, SIZES, HEADS, backend="triton")
    assert "3 heads in a width of 48" in str(tree_reader.misfit(torch.float16, 48, 3, 14))
    assert "4 heads in a width of 32" in str(tree_reader.misfit(torch.float16, 32, 4, 14))
    assert "65 nodes" in str(tree_reader.misfit(torch.float16, 32, 2, 65))
    assert tree_reader.misfit(torch.bfloat16, 128, 4, 60) is None
