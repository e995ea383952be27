"""Products of batches of matrices in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, relu: bool = False) -> Tensor:
    """``a @ b``, negative entries set to zero where wanted: (G, M, K), (G, K, N) -> (G, M, N)."""
    out = torch.bmm(a, b)
    return out.relu_() if relu else out
