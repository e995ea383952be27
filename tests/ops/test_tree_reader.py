"""Kernels of a tree of queries against their definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops import tree_reader
from hyptree.ops.tree_reader import reference

pytest.importorskip("triton")

import triton
from triton import language as tl

from hyptree.ops.tree_reader import triton as kernels

SIZES, WIDTH, HEADS = (8, 4, 2), 32, 2
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
MARGIN = 4096
"""More than a row of anything, and a multiple of what kernels take as aligned."""
DTYPES = pytest.mark.parametrize("dtype", list(LIMITS))


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves out of its results is NaN."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> Tensor:
        built = empty(*shape, **options)
        return built.fill_(torch.nan) if built.is_floating_point() else built

    monkeypatch.setattr(torch, "empty", filled)


def weights(shapes: reference.Shapes, count: int = 1, more: int = 0) -> Tensor:
    return 0.3 * torch.randn(count * reference.size_of(shapes) + more)


def levels(sizes: tuple[int, ...]) -> Tensor:
    level = torch.tensor([level for level, size in enumerate(sizes) for _ in range(size)])
    bias = torch.zeros(len(level), -(-len(level) // 16) * 16)
    bias[:, : len(level)].masked_fill_(level[:, None] != level, float("-inf"))
    return bias


def reading(
    batch: int, tokens: int, dtype: torch.dtype, device: str, width: int = WIDTH, heads: int = HEADS,
    sizes: tuple[int, ...] = SIZES,
) -> list[Tensor]:  # fmt: skip
    unit = 5 * F.normalize(torch.randn(sum(sizes), heads, width // heads), dim=-1).flatten(1)
    matrices = weights(reference.read_matrices(width, len(sizes)))
    built = [unit.to(dtype), torch.randn(batch, tokens, 2 * width).to(dtype), matrices.to(dtype)]
    return [x.to(device) for x in (*built, weights(reference.read_vectors(width, len(sizes))), levels(sizes))]


def encoding(
    batch: int, dtype: torch.dtype, device: str, width: int = WIDTH, sizes: tuple[int, ...] = SIZES
) -> list[Tensor]:
    built = torch.randn(batch, width), torch.randn(batch, sum(sizes), 2 * width)
    matrices = weights(reference.encode_matrices(width), len(sizes))
    vectors = weights(reference.encode_vectors(width), len(sizes), 2 * width)
    return [*(x.to(device, dtype) for x in (*built, matrices)), vectors.to(device)]


def framed(x: Tensor) -> Tensor:
    """``x`` with NaN before and behind it."""
    frame = x.new_full((x.numel() + 2 * MARGIN,), torch.nan)
    inside = frame[MARGIN:-MARGIN].view(x.shape)
    return inside.copy_(x)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape and torch.isfinite(actual).all()
    assert (actual - expected).abs().max() < LIMITS[dtype] * expected.abs().max()


@DTYPES
@pytest.mark.parametrize("tokens", [1, 64, 70])
@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.usefixtures("spoilt")
def test_reading(tokens: int, cosine: bool, dtype: torch.dtype, device: str) -> None:
    inputs = reading(3, tokens, dtype, device)
    nodes, key_value = kernels.read_tree(*inputs, list(SIZES), HEADS, 0.8, cosine)
    assert nodes.dtype == torch.float32 and key_value.dtype == dtype
    expected = reference.read_tree(*(x.double() for x in inputs), SIZES, HEADS, 0.8, cosine)
    close(nodes, expected[0], dtype)
    close(key_value, expected[1], dtype)


@DTYPES
@pytest.mark.parametrize(
    ("width", "heads", "sizes", "tokens"),
    [
        (16, 1, (1,), 33),
        (64, 4, (3,), 5),
        (64, 1, (13, 6, 3, 1), 32),
        (128, 8, (32, 16, 8, 4, 2, 1), 31),
        (128, 4, (32, 16, 8, 4), 49),
        (128, 2, (64,), 65),  # as many nodes as there may be
    ],
)
@pytest.mark.usefixtures("spoilt")
def test_reading_with_trees_of_all_sizes(
    width: int, heads: int, sizes: tuple[int, ...], tokens: int, dtype: torch.dtype, device: str
) -> None:
    if device == "cuda" and dtype == torch.float32 and width == 128:
        pytest.skip("what a step multiplies by has no room in shared memory, and unsupported says no to float32")
    inputs = reading(2, tokens, dtype, device, width, heads, sizes)
    inputs[2] *= 2.5 * width**-0.5  # sums of so many stay near one
    actual = kernels.read_tree(*inputs, list(sizes), heads, 0.8, True)
    expected = reference.read_tree(*(x.double() for x in inputs), sizes, heads, 0.8, True)
    close(actual[0], expected[0], dtype)
    close(actual[1], expected[1], dtype)


@triton.jit
def _gelu_kernel(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, kernels._gelu(tl.load(x + at)))


def test_gelu_is_as_near_as_torch_in_float32(device: str) -> None:
    x = torch.cat([torch.linspace(-8, 8, 12288), torch.linspace(-200, 200, 4096)]).to(device)
    actual = torch.full_like(x, torch.nan)
    _gelu_kernel[(len(x) // 1024,)](x, actual, N=1024)
    error = (actual.double() - F.gelu(x.double())).abs()
    assert error[x.abs() < 8].max() < 3e-7
    assert (error <= 1e-6 * x.abs()).all()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many images a program as it can hold, which else only large batches have."""
    monkeypatch.setattr(kernels, "PROGRAMS", 0)
    kernels._images.cache_clear()
    yield
    kernels._images.cache_clear()


def test_programs_take_more_images_once_all_are_busy() -> None:
    actual = [kernels._images(batch, 32, 4)[0] for batch in (1, 132, 133, 264, 265, 4096)]
    assert actual == [1, 1, 2, 2, 4, 4]
    assert kernels._images(4096, 32, 8)[0] == kernels._images(4096, 64, 1)[0] == 2  # by their heads, by their nodes


@DTYPES
@pytest.mark.parametrize("batch", [1, 19])
@pytest.mark.usefixtures("spoilt")
def test_encoding_one_image_a_program(batch: int, dtype: torch.dtype, device: str) -> None:
    inputs = encoding(batch, dtype, device)
    actual = kernels.encode_tree(*inputs, list(SIZES), HEADS)
    close(actual, reference.encode_tree(*(x.double() for x in inputs), SIZES, HEADS), dtype)


@DTYPES
@pytest.mark.parametrize("batch", [1, 16, 19])
@pytest.mark.usefixtures("spoilt", "crowded")
def test_encoding(batch: int, dtype: torch.dtype, device: str) -> None:
    inputs = encoding(batch, dtype, device)
    actual = kernels.encode_tree(*inputs, list(SIZES), HEADS)
    assert actual.dtype == dtype
    close(actual, reference.encode_tree(*(x.double() for x in inputs), SIZES, HEADS), dtype)


@DTYPES
@pytest.mark.parametrize(
    ("width", "heads", "sizes", "batch"),
    [
        (16, 1, (1,), 1),
        (16, 1, (64,), 3),  # as many nodes as there may be: two images a program
        (64, 4, (3,), 5),
        (64, 2, (13, 6, 3, 1), 4),
        (128, 8, (32, 16, 8, 4, 2, 1), 3),  # two images a program by their heads
        (128, 4, (32, 16, 8, 4), 6),
    ],
)
@pytest.mark.usefixtures("spoilt", "crowded")
def test_encoding_trees_of_all_sizes(
    width: int, heads: int, sizes: tuple[int, ...], batch: int, dtype: torch.dtype, device: str
) -> None:
    if device == "cuda" and dtype == torch.float32 and width == 128:
        pytest.skip("what a step multiplies by has no room in shared memory, and unsupported says no to float32")
    inputs = encoding(batch, dtype, device, width, sizes)
    inputs[2] *= 2.5 * width**-0.5  # sums of so many stay near one
    actual = kernels.encode_tree(*inputs, list(sizes), heads)
    close(actual, reference.encode_tree(*(x.double() for x in inputs), sizes, heads), dtype)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (5, 70)])
def test_nothing_beside_the_tensors_is_read_or_written(
    batch: int, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, encoded = reading(batch, tokens, torch.float16, device), encoding(batch, torch.float16, device)
    expected = (
        *kernels.read_tree(*read, list(SIZES), HEADS, 0.8, True),
        kernels.encode_tree(*encoded, list(SIZES), HEADS),
    )
    empty = torch.empty
    built: list[Tensor] = []

    def framed_empty(*shape: int, **options: Any) -> Tensor:
        built.append(framed(empty(*shape, **options).fill_(torch.nan)))
        return built[-1]

    monkeypatch.setattr(torch, "empty", framed_empty)
    read, encoded = [framed(x) for x in read], [framed(x) for x in encoded]
    actual = *kernels.read_tree(*read, list(SIZES), HEADS, 0.8, True), kernels.encode_tree(*encoded, list(SIZES), HEADS)
    assert len(built) == len(actual) == 3
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for x in (*read, *encoded, *built):
        frame = x.new_empty(0).set_(x.untyped_storage())
        assert frame[:MARGIN].isnan().all() and frame[-MARGIN:].isnan().all()


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


def test_what_the_kernels_cannot_take_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=r"cannot run here: torch.float32, the kernel takes bfloat16 and float16"):
        tree_reader._fits(torch.empty(2, device=device), torch.float32, WIDTH, HEADS, 14, "triton")
    assert "3 heads in a width of 48" in str(tree_reader._unsupported(torch.float16, 48, 3, 14))
    assert "4 heads in a width of 32" in str(tree_reader._unsupported(torch.float16, 32, 4, 14))
    assert "65 nodes" in str(tree_reader._unsupported(torch.float16, 32, 2, 65))
    assert tree_reader._unsupported(torch.bfloat16, 128, 4, 60) is None
