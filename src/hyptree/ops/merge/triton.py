"""Weighted means of clusters on the GPU, in a fixed order of summation: no atomics, so runs repeat bit for bit.

Two launches: one sorts each image's tokens by label, one sums the members of every cluster. The prefix tokens that stay
in front are copied by the second one, so the result needs no concatenation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.ops.backend import has_data


@triton.jit
def _sort_kernel(labels, order, start, N, K, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Tokens by (label, index), and where each label begins (K + 1 entries)."""
    image = tl.program_id(0).to(tl.int64)
    labels += image * N
    order += image * N
    start += image * (K + 1)
    token = tl.arange(0, BLOCK)
    is_token = token < N
    mine = tl.load(labels + token, mask=is_token, other=0).to(tl.int32)
    place = tl.zeros((BLOCK,), tl.int32)
    below = tl.zeros((BLOCK,), tl.int32)  # tokens whose label is smaller than the index in this vector
    for first in range(0, N, UNROLL):
        for u in tl.static_range(UNROLL):
            that = first + u
            label = tl.load(labels + that, mask=that < N, other=BLOCK).to(tl.int32)
            place += ((label < mine) | ((label == mine) & (that < token))).to(tl.int32)
            below += (label < token).to(tl.int32)
    tl.store(order + place, token, mask=is_token)
    tl.store(start + token, below, mask=token < K)
    tl.store(start + K, N)


@triton.jit
def _mean_kernel(x, size, order, start, out, out_size, N, K, C, PREFIX, stride_b, stride_n,
                 BLOCK_C: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    image = (tl.program_id(0) // (PREFIX + K)).to(tl.int64)
    row = tl.program_id(0) % (PREFIX + K)
    x += image * stride_b
    size += image * (PREFIX + N)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < C
    out += (image * (PREFIX + K) + row) * C + channel
    out_size += image * (PREFIX + K) + row
    if row < PREFIX:
        tl.store(out, tl.load(x + row.to(tl.int64) * stride_n + channel, mask=is_channel), mask=is_channel)
        tl.store(out_size, tl.load(size + row))
    else:
        begin = tl.load(start + image * (K + 1) + row - PREFIX)
        end = tl.load(start + image * (K + 1) + row - PREFIX + 1)
        wide = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
        total = tl.zeros((BLOCK_C,), wide)
        weight = tl.zeros((), tl.float32)
        for first in range(begin, end, MEMBERS):
            at = first + tl.arange(0, MEMBERS)
            is_member = at < end
            token = tl.load(order + image * N + at, mask=is_member, other=0) + PREFIX
            s = tl.load(size + token, mask=is_member, other=0.0)
            rows = tl.load(
                x + token[:, None].to(tl.int64) * stride_n + channel[None, :],
                mask=is_member[:, None] & is_channel[None, :],
                other=0.0,
            )
            total += tl.sum(rows.to(wide) * s[:, None].to(wide), axis=0)
            weight += tl.sum(s, axis=0)
        # A cluster without weight (padding) stays zero.
        mean = total / tl.where(weight > 0, weight, 1.0).to(wide)
        tl.store(out, mean.to(out.dtype.element_ty), mask=is_channel)
        tl.store(out_size, weight)


@triton.jit
def _spread_kernel(grad, size, labels, out_size, out, N, K, C, PREFIX, BLOCK_C: tl.constexpr):
    """Gradient of a token: that of its cluster times its share of the weight."""
    image = (tl.program_id(0) // (PREFIX + N)).to(tl.int64)
    row = tl.program_id(0) % (PREFIX + N)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < C
    grad += image * (PREFIX + K) * C
    out += (image * (PREFIX + N) + row) * C + channel
    if row < PREFIX:
        tl.store(out, tl.load(grad + row * C + channel, mask=is_channel), mask=is_channel)
    else:
        cluster = PREFIX + tl.load(labels + image * N + row - PREFIX).to(tl.int32)
        s = tl.load(size + image * (PREFIX + N) + row)
        total = tl.load(out_size + image * (PREFIX + K) + cluster)
        g = tl.load(grad + cluster * C + channel, mask=is_channel)
        wide = tl.float64 if g.dtype == tl.float64 else tl.float32
        share = s.to(wide) / tl.where(total > 0, total, 1.0).to(wide)
        tl.store(out, (g.to(wide) * share).to(out.dtype.element_ty), mask=is_channel)


def _channel_block(C: int) -> int:
    return min(triton.next_power_of_2(C), 1024)


def merge_mean(x: Tensor, size: Tensor, labels: Tensor, k: int, num_prefix: int) -> tuple[Tensor, Tensor]:
    """Merged tokens (B, num_prefix + k, C) and their sizes (B, num_prefix + k); see ``ops.merge.merge_mean``."""
    B, length, C = x.shape
    N = length - num_prefix
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(B, num_prefix + k, C, dtype=x.dtype, device=x.device)
    out_size = torch.empty(B, num_prefix + k, dtype=size.dtype, device=x.device)
    if out.numel() == 0 or not has_data(out):
        return out, out_size
    order = torch.empty(B, N, dtype=torch.int32, device=x.device)
    start = torch.empty(B, k + 1, dtype=torch.int32, device=x.device)
    block = triton.next_power_of_2(max(N, k, 1))  # every cluster has a beginning, also one that nobody is in
    _sort_kernel[(B,)](labels, order, start, N, k, block, UNROLL=8, num_warps=max(1, min(16, block // 32)))
    block_c = _channel_block(C)
    _mean_kernel[(B * (num_prefix + k), triton.cdiv(C, block_c))](
        x, size, order, start, out, out_size, N, k, C, num_prefix, x.stride(0), x.stride(1), block_c, MEMBERS=4,
        num_warps=1 if block_c <= 512 else 4,
    )  # fmt: skip
    return out, out_size


def spread(grad: Tensor, size: Tensor, labels: Tensor, out_size: Tensor, num_prefix: int) -> Tensor:
    """Gradient (B, num_prefix + N, C) of ``merge_mean`` with respect to the tokens."""
    B, merged, C = grad.shape
    N = labels.shape[1]
    out = torch.empty(B, num_prefix + N, C, dtype=grad.dtype, device=grad.device)
    if out.numel() == 0 or not has_data(out):
        return out
    block_c = _channel_block(C)
    _spread_kernel[(B * (num_prefix + N), triton.cdiv(C, block_c))](
        grad.contiguous(), size, labels, out_size, out, N, merged - num_prefix, C, num_prefix, block_c,
        num_warps=1 if block_c <= 512 else 4,
    )  # fmt: skip
    return out
