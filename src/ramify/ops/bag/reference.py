"""Weighted sums of rows of a table in plain torch: the definition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bag_sum(table: Tensor, rows: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
    """Weighted sums of runs of rows; see ``ops.bag.bag_sum``."""
    return F.embedding_bag(rows, table, starts, mode="sum", per_sample_weights=weights)
