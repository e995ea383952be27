"""SwiGLU on space components and the lift of its result, in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import rounded, wide


def swiglu_lift(both: Tensor, hidden: int, c: float = 1.0, bias: bool = True, a: Tensor | None = None) -> Tensor:
    """``[h, t, 1, 0, ...]`` with ``h = silu(gate) * up``; see ``ops.swiglu.swiglu_lift``."""
    gate, up = both.chunk(2, -1)  # before widening: so the two gradients meet in the dtype of the product
    gate = wide(gate) if a is None else a[..., None] * wide(gate)
    point = rounded(F.silu(gate) * wide(up), both.dtype)
    column = torch.arange(point.shape[-1], device=point.device)
    point = torch.where(column < hidden, point, 0.0)
    time = torch.sqrt(point.square().sum(-1, keepdim=True) + 1 / c)
    filled = torch.where(column == hidden, time, point)
    if bias:
        one = torch.ones_like(time) if a is None else 1 / a[..., None]
        filled = torch.where(column == hidden + 1, one, filled)
    return filled.to(both.dtype)
