"""Copies of rows and the sum of their gradients, in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def _scale(width: int, one: int, factors: Tensor) -> Tensor:
    """1 everywhere, ``1 / factors`` in the column ``one``: (S,) -> (S, width)."""
    column = torch.arange(width, device=factors.device)
    return torch.where(column == one, 1 / factors[:, None], 1.0)


def dispatch_rows(
    rows: Tensor, inverse: Tensor, copies: int, a: Tensor | None = None, chosen: Tensor | None = None, one: int = -1
) -> tuple[Tensor, Tensor | None]:
    """See ``ops.dispatch_rows.dispatch_rows``."""
    order = torch.argsort(inverse)
    dispatched = rows.repeat_interleave(copies, 0)[order]
    if a is None or chosen is None:
        return dispatched, None
    factors = a[chosen.flatten()[order]]
    return (dispatched * _scale(rows.shape[1], one, factors)).to(rows.dtype), factors


def dispatch_rows_grad(
    rows: Tensor, grad: Tensor, inverse: Tensor, copies: int, factors: Tensor | None = None,
    to_factors: Tensor | None = None, one: int = -1, initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See ``ops.dispatch_rows.dispatch_rows_grad``."""
    dispatched, _ = dispatch_rows(rows, inverse, copies)
    back = grad if grad.dtype == torch.float64 else grad.float()
    per_choice = None
    if factors is not None:
        scale = _scale(rows.shape[1], one, factors)
        per_choice = torch.zeros_like(factors) if to_factors is None else to_factors
        if one >= 0:
            per_choice = per_choice - back[:, one] * dispatched[:, one] / factors.square()
        per_choice = per_choice[inverse]
        back, dispatched = back * scale, (dispatched * scale).to(dispatched.dtype)
    total = back[inverse].view(rows.shape[0], copies, rows.shape[1]).sum(1)
    return (total if initial is None else total + initial).to(rows.dtype), dispatched, per_choice
