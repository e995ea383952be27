"""The sum of all rows in plain torch: the definition."""

from __future__ import annotations

from torch import Tensor

from ..rounding import wide


def sum_rows(x: Tensor) -> Tensor:
    """The sum over all axes but the last, float32 at least; see ``ops.sum_rows.sum_rows``."""
    return x.flatten(0, -2).sum(0, dtype=wide(x[:0]).dtype)
