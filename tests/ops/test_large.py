"""Places beyond 2^31: kernels run in memory that is reserved but, where nobody writes, not there."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

from hyptree.ops import backend

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not backend.interpreted(), reason="reads and writes as the interpreter does, on the CPU"
)


def reserved(count: int) -> Tensor:
    """Float32 zeros with 2^31 more in front of them: a place that wrapped around is then wrong, and no crash."""
    if not sys.platform.startswith("linux"):
        pytest.skip("no memory is reserved without being there")
    no_reserve = 0x4000  # Python 3.11 has no name for it
    memory = mmap.mmap(-1, 4 * (2**31 + count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.float32)[2**31 :]


def test_numbers_of_many_rows() -> None:
    """The seventh number of the first row, at six times the number of rows."""
    from hyptree.ops.pairwise_lorentz import rows

    R = 400_000_000
    stats = reserved(6 * R + 16)
    x = torch.randn(16, 5)
    settings = {"S": 1.0, "CHART": rows.LORENTZ, "LIMIT": 40.0, "SPLIT": False, "ROWS": 16, "BLOCK": 8}
    counters = torch.full((5,), 7, dtype=torch.int32)
    rows._rows_kernel[(1,)](x, x, stats, stats, stats, stats, counters, R, 0, 5, 0, 3, **settings)
    assert counters.tolist() == [0, 0, 0, 7, 7]
    over = 1 / x.double().norm(dim=-1)
    for place, expected in ((2, 1 / over), (3, torch.sqrt(1 + over**-2)), (4, over), (6, torch.ones(16))):
        actual = stats[place * R : place * R + 16]
        torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=0)


def test_cosine_distances_of_many_tokens() -> None:
    from hyptree.ops.cosine.triton import _distance_kernel

    N, C = 35_000_000, 16
    distance = reserved(64 * N)
    unit = torch.nn.functional.normalize(torch.randn(64, C), dim=-1)
    _distance_kernel[(1, 1)](unit, distance, N, C, 64, 16, "ieee")
    expected = (1 - unit.double() @ unit.double().T).fill_diagonal_(0).float()
    actual = torch.stack([distance[i * N : i * N + 64] for i in range(64)])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_merged_tokens_that_lie_far_apart() -> None:
    """Tokens first, then images: from one token to the next it is a step over all images."""
    from hyptree.ops.merge.triton import merge_mean

    step = 800_000_000
    x = reserved(3 * step + 8).as_strided((1, 4, 8), (8, step, 1))
    x.copy_(torch.randn(1, 4, 8))
    actual, size = merge_mean(x, torch.ones(1, 4), torch.zeros(1, 3, dtype=torch.int64), 1, 1)
    torch.testing.assert_close(actual[0, 0], x[0, 0])
    torch.testing.assert_close(actual[0, 1], x[0, 1:].mean(0))
    assert size.tolist() == [[1.0, 3.0]]
    actual, _ = merge_mean(x, torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64), 1, 3)
    torch.testing.assert_close(actual, x)
