"""Cross-entropy of rows of logits on the GPU: one program per row, which reads it twice and overwrites it once.

The second reading comes out of the cache: the rows that all programs hold at a time are smaller than it, up to a
vocabulary of some 150,000 in half precision. Maximum and sum are kept per lane: the loop reduces nothing across lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 8192, 16


@triton.jit
def _cross_entropy_kernel(
    logits, labels, losses, V, IGNORED: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    lane = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if WITH_GRADIENT:
            for first in range(0, V, BLOCK):
                column = first + lane
                tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < V)
    else:
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, V, BLOCK):
            column = first + lane
            x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
            new = tl.maximum(largest, x)
            # A lane that saw nothing yet keeps -inf; exp(-inf - -inf) would be NaN.
            shift = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(largest - shift) + tl.exp(x - shift)
            largest = new
        top = tl.max(largest, axis=0)
        log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
        inside = (label >= 0) & (label < V)
        picked = tl.load(logits + label, mask=inside, other=float("nan")).to(tl.float32)
        tl.store(losses + row, log_sum - picked)  # NaN for a label that no column belongs to
        if WITH_GRADIENT:
            tl.debug_barrier()  # everybody has read the label's logit before it is overwritten
            for first in range(0, V, BLOCK):
                column = first + lane
                x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - log_sum) - tl.where(column == label, 1.0, 0.0)
                tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < V)


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, with_gradient: bool) -> Tensor:
    """(R, V) contiguous logits up to float32, (R,) labels -> (R,) float32 losses; logits become the gradient."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if losses.numel():
        block = min(_BLOCK, max(16, triton.next_power_of_2(logits.shape[1])))
        _cross_entropy_kernel[(logits.shape[0],)](
            logits, labels, losses, logits.shape[1], ignore_index, with_gradient, block, num_warps=_WARPS
        )
    return losses
