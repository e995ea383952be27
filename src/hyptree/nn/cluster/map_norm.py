"""The norm of channels-last maps: one mean and variance for a whole sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.nn.cluster.windows import Windows, count_patches
from hyptree.nn.precision import gemm_dtype
from hyptree.ops.map_norm import map_norm
from hyptree.ops.rounding import wide


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
        if x.device.type == "cpu":  # the only device whose kernel reads channels-last maps as they lie
            return F.group_norm(x.permute(0, 3, 1, 2), 1, self.weight, self.bias, self.eps).permute(0, 2, 3, 1)
        return self.by_layer_norm(x)

    def by_layer_norm(self, x: Tensor) -> Tensor:
        """The same by kernels that take a sample as one row."""
        is_cast = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which has norms in float32
        dtype = torch.promote_types(x.dtype, torch.float32) if is_cast else x.dtype
        return torch.addcmul(self.bias, map_norm(x, self.eps, dtype), self.weight)

    def before(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """``linear(norm(x))``."""
        return linear(self(x)) if x.device.type == "cpu" else self.inside(x, linear)

    def inside(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """The same with weight and bias of the norm in those of the product: passes over small tensors, not the map."""
        return F.linear(*self.folded(x, linear))

    def folded(self, x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`inside` multiplies: the normed map without weight and bias, and a product's that has them."""
        bias = (linear.weight * self.bias).sum(1)
        bias = bias if linear.bias is None else bias + linear.bias
        return map_norm(x, self.eps, gemm_dtype(x)), linear.weight * self.weight, bias

    def with_shared(self, shared: Tensor, own: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
        """The norm of ``[shared, own]`` without putting them together.

        Args:
            shared: (B, rows, columns, C') one vector per window, standing for all its patches.
            own: (B, H, W, C - C') one vector per patch.

        Returns:
            Both, normalised by their common mean and variance.
        """
        dtype = wide(own[:0]).dtype
        patches = count_patches(windows, own.device)  # (rows, columns, 1), or a number
        num_patches = windows.size[0] * windows.size[1]
        total, several = num_patches * (own.shape[-1] + shared.shape[-1]), wide(shared)
        sum_own = own.sum((1, 2, 3), dtype=dtype)
        squares_own = torch.linalg.vector_norm(own.flatten(1), dim=1, dtype=dtype).square()
        mean = (sum_own + (several * patches).sum((1, 2, 3))) / total
        square = (squares_own + (several.square() * patches).sum((1, 2, 3))) / total
        # Means over all channels are small beside their spread, so this difference keeps its digits.
        inverse = torch.rsqrt((square - mean.square()).clamp_min(0) + self.eps)
        scale = inverse.view(-1, 1, 1, 1) * self.weight
        shift = self.bias - mean.view(-1, 1, 1, 1) * scale
        left = shared.shape[-1]
        return (
            torch.addcmul(shift[..., :left], shared, scale[..., :left]).to(shared.dtype),
            torch.addcmul(shift[..., left:], own, scale[..., left:]).to(own.dtype),
        )

    def into(self, proj: nn.Linear, moments: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The norm as part of the projection behind it: ``proj(norm(x)) = scale (x @ weight.T) + shift``.

        So the map is read once, by the product.

        Args:
            moments: (B, 2) sums of the map and of its squares. count: numbers in the map of one sample.

        Returns:
            weight (dim, C), scale (B, 1) and shift (B, dim), float32 at least.
        """
        mean, square = (moments / count).unbind(-1)
        # Means over all channels are small beside their spread, so this difference keeps its digits.
        scale = torch.rsqrt((square - mean.square()).clamp_min(0) + self.eps).unsqueeze(-1)
        weight = proj.weight * self.weight
        shift = (proj.weight * self.bias).sum(1) - (scale * mean.unsqueeze(-1)) * weight.sum(1)
        return weight, scale, shift if proj.bias is None else shift + proj.bias

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"
