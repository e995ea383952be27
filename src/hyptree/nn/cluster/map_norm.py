"""The norm of channels-last maps: one mean and variance for a whole sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.backend import on_host
from hyptree.ops.bare import readable
from hyptree.ops.map_norm import map_norm


@readable
class MapNorm(nn.Module):
    """Group normalisation with one group for channels-last maps: one mean and variance per sample.

    Shape:
        (B, H, W, C) -> (B, H, W, C)
    """

    def __init__(self, dim: int, eps: float = 1e-5, **factory: Any):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, **factory))
        self.bias = nn.Parameter(torch.zeros(dim, **factory))

    def reset_parameters(self) -> None:
        """Set weight to one and bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if on_host(x):  # the only device whose group norm reads channels-last maps as they lie
            return F.group_norm(x.permute(0, 3, 1, 2), 1, self.weight, self.bias, self.eps).permute(0, 2, 3, 1)
        is_cast = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which has norms in float32
        dtype = torch.promote_types(x.dtype, torch.float32) if is_cast else x.dtype
        return torch.addcmul(self.bias, map_norm(x, self.eps, dtype), self.weight)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"
