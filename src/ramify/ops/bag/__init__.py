"""Weighted sums of rows of a table, bag by bag: what sparse samples do to dense weights.

``bag_sum`` is the operation, ``reference`` its definition, ``triton`` its kernel. No gradient: the lab writes its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose
from . import reference

__all__ = ["bag_sum", "reference"]

MAX_CHANNELS = 4096  # of the kernel, which holds a row in registers


def bag_sum(table: Tensor, rows: Tensor, weights: Tensor, starts: Tensor, *, backend: str = "auto") -> Tensor:
    """Weighted sums of runs of rows, in a fixed order: a bag adds ``weights[j] table[rows[j]]`` from its start on.

    Args:
        table: (R, C). rows: (T) int64 in 0..R-1. weights: (T).
        starts: (B) int64, ascending; the last bag ends at T.
        backend: "auto", "torch" or "triton" (CUDA, float32, C <= 4096).

    Returns:
        (B, C); an empty bag is zero.
    """
    misfit = None
    if table.dtype != torch.float32:
        misfit = f"{table.dtype}, the kernel takes float32"
    elif table.shape[1] > MAX_CHANNELS:
        misfit = f"rows of {table.shape[1]}, the kernel takes up to {MAX_CHANNELS}"
    if choose(backend, table, misfit) == "triton":
        from . import triton

        return triton.bag_sum(table, rows, weights, starts)
    return reference.bag_sum(table, rows, weights, starts)
