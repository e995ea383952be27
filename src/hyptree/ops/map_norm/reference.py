"""One mean and one variance for a whole map, in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import wide


def map_norm(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over all but the first axis; see ``ops.map_norm.map_norm``."""
    x = x if x.dtype == dtype else wide(x)
    return F.layer_norm(x, x.shape[1:], eps=eps).to(dtype)


def map_norm_grad(
    normed: Tensor, rstd: Tensor, grad: Tensor, dtype: torch.dtype, grad_rstd: Tensor | None = None
) -> Tensor:
    """Gradient of the map, itself differentiable; see ``ops.map_norm.map_norm_grad``."""
    rows, g = wide(normed).flatten(1), wide(grad).flatten(1)
    along = (g * rows).mean(1, keepdim=True)
    if grad_rstd is not None:
        along = along + (rstd * grad_rstd).unsqueeze(1) / rows.shape[1]
    return (rstd.unsqueeze(1) * (g - g.mean(1, keepdim=True) - rows * along)).to(dtype).view(normed.shape)
