"""Weighted sums of rows of a table on the GPU: one program per bag, members in a fixed order, no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(table, rows, weights, starts, out, num_bags, num_rows, C, BLOCK_C: tl.constexpr, MEMBERS: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    is_channel = channel < C
    begin = tl.load(starts + bag)
    end = num_rows + begin * 0
    if bag + 1 < num_bags:
        end = tl.load(starts + bag + 1)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(begin, end, MEMBERS):
        at = first + tl.arange(0, MEMBERS)
        is_member = at < end
        row = tl.load(rows + at, mask=is_member, other=0)
        weight = tl.load(weights + at, mask=is_member, other=0.0)
        some = tl.load(
            table + row[:, None] * C + channel[None, :], mask=is_member[:, None] & is_channel[None, :], other=0.0
        )
        total += tl.sum(some * weight[:, None], axis=0)
    tl.store(out + bag * C + channel, total, mask=is_channel)


def bag_sum(table: Tensor, rows: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
    """Weighted sums of runs of rows; see ``ops.bag.bag_sum``."""
    num_bags, C = len(starts), table.shape[1]
    out = torch.empty(num_bags, C, dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(C)
    _kernel[(num_bags,)](
        table.contiguous(), rows, weights, starts, out, num_bags, len(rows), C, block, MEMBERS=max(1, 512 // block),
        num_warps=1 if block <= 128 else 4,
    )  # fmt: skip
    return out
