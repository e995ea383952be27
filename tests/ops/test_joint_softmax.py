"""The softmax of long rows, whose programs tell each other their sums: against float64 and the kernel in two turns."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from hyptree.ops import pairwise_lorentz

pytest.importorskip("triton")

from hyptree.ops.pairwise_lorentz import joint_kernel, softmax_kernel
from hyptree.ops.pairwise_lorentz.rows import LORENTZ_TANGENT
from tests.ops.test_pairwise import C, assert_softmax, charts, draw, ops


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the rows of each joint softmax were."""
    actual: list[int] = []
    run = joint_kernel.joint_softmax

    def note(*args: object) -> None:
        actual.append(args[2].shape[-1])  # type: ignore[attr-defined]
        run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(softmax_kernel, "joint_softmax", note)
    return actual


@ops
@charts
@pytest.mark.parametrize("shape", [(2, 70, 515, 6), (1, 64, 512, 16)], ids=["odd", "even"])
def test_against_float64(
    shape: tuple[int, ...], op: ModuleType, tangent: bool, device: str, launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shapes = [shape] if device == "cpu" else [shape, (3, 300, 1200, 33), (2, 256, 2048, 128), (1, 100, 8000, 128)]
    for one in shapes:
        assert_softmax(op, one, tangent, device, monkeypatch)
    assert launched == [m for _, _, m, _ in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, device: str, launched: list[int]) -> None:
    """Rows are taken as they are: what differs from float64 on the same numbers is float32's."""
    for n, m in ((64, 512), (70, 700)):
        x, y = (draw(pairwise_lorentz, 1, size, 32, device=device, tangent=True).to(dtype) for size in (n, m))
        expected = pairwise_lorentz.distance_softmax(x.double(), y.double(), C, tangent=True)
        actual = pairwise_lorentz.distance_softmax(x, y, C, tangent=True, backend="triton")
        assert actual.dtype == torch.float32 and (actual - expected).abs().max() <= 2e-6
    assert launched == [512, 700]


@pytest.mark.parametrize("temperature", [0.02, 1.0, 7.0])
@pytest.mark.parametrize("radius", [1e-4, 20.0, 39.0])
def test_any_radius(radius: float, temperature: float, device: str, launched: list[int]) -> None:
    """Shares whose largest terms are far from each other: all of the row may be in one of them."""
    v, w = (torch.nn.functional.normalize(torch.randn(1, size, 16, device=device), dim=-1) for size in (64, 520))
    x = v * radius / C**0.5
    y = w * radius * (1 - 0.1 * torch.rand(1, 520, 1, device=device)) / C**0.5
    y[0, 130:250] *= 0.3  # nearer to all of x than other shares are
    y[0, 5] = -x[0, 3]
    expected = pairwise_lorentz.distance_softmax(x.double(), y.double(), C, temperature=temperature, tangent=True)
    actual = pairwise_lorentz.distance_softmax(x, y, C, temperature=temperature, tangent=True, backend="triton")
    distances = pairwise_lorentz.pairwise_dist(x.double(), y.double(), C, tangent=True)
    # the roundings of float32, 2e-6 of a short distance, and the 22 bits that a logarithm has of a long one
    share = 1e-6 + (2e-6 / C**0.5 + 2.0**-22 * distances) / temperature
    assert ((actual - expected).abs() <= share * expected + 1e-30).all()
    assert launched == [520]


def test_a_set_with_itself(device: str, launched: list[int]) -> None:
    x = draw(pairwise_lorentz, 1, 400, 16, device=device, tangent=True)
    expected = pairwise_lorentz.distance_softmax(x.double(), x.double(), C, tangent=True)
    actual = pairwise_lorentz.distance_softmax(x, x, C, tangent=True, backend="triton")
    assert (actual - expected).abs().max() <= 2e-5 and launched == [400]


def test_a_row_that_is_not_finite_spoils_itself_alone(device: str) -> None:
    x, y = (draw(pairwise_lorentz, 1, size, 8, device=device, tangent=True) for size in (70, 600))
    whole = pairwise_lorentz.distance_softmax(x, y, C, tangent=True, backend="triton")
    x[0, 66, 2] = torch.nan
    actual = pairwise_lorentz.distance_softmax(x, y, C, tangent=True, backend="triton")
    assert actual[0, 66].isnan().all()
    rest = torch.arange(70, device=device) != 66
    assert torch.equal(actual[:, rest], whole[:, rest])


def both(x: Tensor, y: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Softmax and logarithms of sums, made jointly and in two turns."""
    joint = softmax_kernel.distance_softmax(x, y, LORENTZ_TANGENT, C, 0.5)[:2]
    with monkeypatch.context() as patch:
        patch.setattr(softmax_kernel, "joint_sizes", lambda *sizes: None)
        return joint, softmax_kernel.distance_softmax(x, y, LORENTZ_TANGENT, C, 0.5)[:2]


def test_both_kernels_agree(device: str, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (draw(pairwise_lorentz, 1, size, 24, device=device, tangent=True).to(dtype) for size in (70, 400))
        joint, turns = both(x, y, monkeypatch)
        torch.testing.assert_close(joint[0], turns[0], rtol=2e-5, atol=1e-9)
        torch.testing.assert_close(joint[1], turns[1], rtol=0, atol=4e-6)
    assert launched == [400, 400]


def test_where_rows_are_joint() -> None:
    """Short strips, narrow sets and wide rows are left to two turns, as are strips too long to wait for each other."""
    sizes = joint_kernel.joint_sizes
    assert sizes(2048, 2048, 128, True, 132) and sizes(64, 385, 1, False, 132)
    assert sizes(64, 384, 128, True, 132) is None  # three shares
    assert sizes(63, 2048, 128, True, 132) is None
    assert sizes(2048, 2048, 129, True, 132) is None
    assert sizes(64, 128 * 66, 128, False, 132) and sizes(64, 128 * 66 + 1, 128, False, 132) is None


@pytest.mark.gpu
def test_the_same_bits_every_time_and_beside_other_work() -> None:
    """Sums are added in the order of shares, whoever came first; other streams may hold multiprocessors."""
    x, y = (draw(pairwise_lorentz, 4, size, 64, device="cuda", tangent=True) for size in (1000, 5000))
    expected = softmax_kernel.distance_softmax(x, y, LORENTZ_TANGENT, C, 0.5)[:2]
    side, big = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(side):
            big = (big @ big).sigmoid_()
        actual = softmax_kernel.distance_softmax(x, y, LORENTZ_TANGENT, C, 0.5)[:2]
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    torch.cuda.synchronize()
    assert big.isfinite().all()
