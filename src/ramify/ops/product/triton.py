"""Products of many small matrices on tensor cores, with the accuracy of float32.

A float32 number is split into two TF32 numbers and three of the four partial products are added in float32
(Triton's ``tf32x3``); what is left out is smaller than float32's own rounding. Sums run in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(a, b, out, M, N, K, a_g, a_m, a_k, b_g, b_k, b_n,
            RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(N, BN)
    row = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    is_row, is_column = row < M, column < N
    a += group * a_g + row[:, None] * a_m + inner[None, :] * a_k
    b += group * b_g + inner[:, None] * b_k + column[None, :] * b_n
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        is_inner = first + inner < K
        left = tl.load(a, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        right = tl.load(b, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
        a += BK * a_k
        b += BK * b_k
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # NaN stays
    place = group * M * N + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out + place, total, mask=is_row[:, None] & is_column[None, :])


def tiles(N: int, K: int) -> dict[str, int]:
    """Tile sizes: a wide result is written in squares, a narrow one in whole rows."""
    if N > 128:
        return {"BM": 128, "BN": 128, "BK": 16 if K <= 16 else 32, "num_warps": 8, "num_stages": 2}
    width = max(16, triton.next_power_of_2(N))
    return {"BM": 128, "BN": width, "BK": 32, "num_warps": 8 if width == 128 else 4, "num_stages": 3}


def product(a: Tensor, b: Tensor, relu: bool = False, **override: int) -> Tensor:
    """``a @ b`` (G, M, N) for float32 (G, M, K) and (G, K, N) of any strides; see ``ops.product.product``."""
    (G, M, K), N = a.shape, b.shape[2]
    out = torch.empty(G, M, N, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    sizes = tiles(N, K) | override
    grid = (triton.cdiv(M, sizes["BM"]) * triton.cdiv(N, sizes["BN"]), G)
    _kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), RELU=relu, **sizes)
    return out
