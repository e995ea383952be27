"""What brings pictures to maps and maps to smaller maps: stems and downsampling on channels-last memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


class _MapConv(_ConvNd):
    """Weights of a convolution whose maps are channels-last: no ``nn.Conv2d``, and so nothing that an adapter made for
    maps of channels first is put on, to add numbers of other places wherever the sizes agree.
    """

    def __init__(self, inputs: int, outputs: int, side: int, stride: int, padding: int, bias: bool, **factory: Any):
        kernel, strides, border = (side, side), (stride, stride), (padding, padding)
        dilation, beyond = (1, 1), (0, 0)
        super().__init__(inputs, outputs, kernel, strides, border, dilation, False, beyond, 1, bias, "zeros", **factory)


class Stem(_MapConv):
    """The 4 x 4 convolution with stride 4 as a matrix product: (B, C, H, W) -> (B, H / 4, W / 4, dim), rounded up."""

    def __init__(self, in_chans: int, dim: int, **factory: Any):
        super().__init__(in_chans, dim, 4, 4, 0, True, **factory)

    def forward(self, x: Tensor) -> Tensor:
        below, right = -x.shape[2] % 4, -x.shape[3] % 4
        if below or right:
            x = F.pad(x, (0, right, 0, below))
        x = x.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, 4, 4)
        return F.linear(x.flatten(3), self.weight.flatten(1), self.bias)


class Downsample(_MapConv):
    """The 3 x 3 convolution with stride 2 on channels-last maps: (B, H, W, C) -> (B, H / 2, W / 2, dim), rounded up."""

    def __init__(self, dim: int, out_dim: int, bias: bool = True, **factory: Any):
        super().__init__(dim, out_dim, 3, 2, 1, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.permute(0, 3, 1, 2), self.weight, self.bias, 2, 1).permute(0, 2, 3, 1)


class MapBatchNorm(nn.BatchNorm2d):
    """Batch normalisation of channels-last maps: (B, H, W, C) -> (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ConvStem(nn.Module):
    """Three 3 x 3 convolutions, each normalised: (B, C, H, W) -> (B, H / 4, W / 4, dim), rounded up.

    They see edges across the borders of patches, which a short training from nothing cannot do without.
    """

    def __init__(self, in_chans: int, dim: int, norm: type[nn.Module], **factory: Any):
        super().__init__()
        hidden = max(16, dim // 2)
        self.conv1 = nn.Conv2d(in_chans, hidden, 3, 2, 1, bias=False, **factory)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, 1, 1, bias=False, **factory)
        self.conv3 = nn.Conv2d(hidden, dim, 3, 2, 1, bias=False, **factory)
        self.norm1, self.norm2 = norm(hidden, **factory), norm(hidden, **factory)
        self.norm3 = norm(dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # and so is every map between the convolutions
        x = F.gelu(self.norm1(self.conv1(x).permute(0, 2, 3, 1)))
        x = F.gelu(self.norm2(self.conv2(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        return self.norm3(self.conv3(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class NormedDownsample(nn.Module):
    """:class:`Downsample`, then a norm and an activation."""

    def __init__(self, dim: int, out_dim: int, norm: type[nn.Module], **factory: Any):
        super().__init__()
        self.conv = Downsample(dim, out_dim, bias=False, **factory)
        self.norm = norm(out_dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))
