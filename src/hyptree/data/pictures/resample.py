"""Crops and resizes of whole batches by two products per batch, on any device; what torchvision does one by one.

Resizing is linear along each axis, so a batch of pictures is cropped, resized, flipped and shifted by one matrix per
picture and axis: row i holds the shares of the source pixels in new pixel i. The shares are those of bicubic resizing
with antialiasing (PIL's and torch's: Keys' kernel with a = -0.5, widened when the picture shrinks, cut off at the edge
of the crop, sum one), for enlarging and shrinking alike. A loop in float64 gives another level of 255 for 3 values of
10,000; torch's own resizing of uint8, which rounds the shares to 16 bits, differs from both in 6 of 1,000, by one level
or, a few times in a million, two.
"""

from __future__ import annotations

import torch
from torch import Tensor


def resize_shares(source: int, place: Tensor, start: Tensor, length: Tensor, resized: Tensor) -> Tensor:
    """(B, S, source) shares of the source pixels in each wanted pixel, along one axis.

    The part of ``length`` pixels from ``start`` on is resized to ``resized`` pixels, of which those at ``place`` are
    wanted. Pixels outside the part have no share, as if it had been cut out first.

    Args:
        place: (B, S), or (1, S) for all alike; in a flipped picture it falls from left to right.
        start: (B,), like the following.
    """
    scale = (length / resized)[:, None]  # (B, 1)
    centre = torch.addcmul(start[:, None].float(), place + 0.5, scale)  # (B, S), where a new pixel lies in the source
    pixel = torch.arange(source, device=place.device)
    distance = (pixel + 0.5 - centre[..., None]).abs_().div_(scale.clamp_min(1)[..., None]).clamp_max_(2)
    near = ((1.5 * distance - 2.5) * distance).mul_(distance).add_(1)
    far = ((-0.5 * distance + 2.5) * distance).sub_(4).mul_(distance).add_(2)  # 0 at distance 2
    shares = torch.where(distance < 1, near, far)
    inside = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])  # (B, source)
    shares = shares.mul_(inside[:, None])
    return shares.div_(shares.sum(-1, keepdim=True))


class ShareTable:
    """The shares of every part of an axis resized to ``size``, plain and flipped: a batch takes its own by one gather.

    The same numbers as ``resize_shares``, up to rounding, in a third of the launches and a tenth of the memory traffic.
    """

    def __init__(self, source: int, size: int, device: torch.device):
        length = torch.arange(1, source + 1, device=device)
        place = torch.arange(size, device=device)[None]
        shares = resize_shares(source, place, torch.zeros_like(length), length, torch.full_like(length, size))
        table = torch.zeros(source, 2, source + 1, size, device=device)  # by length, flip, pixel of the part, new pixel
        table[:, 0, :source] = shares.mT
        table[:, 1, :source] = shares.mT.flip(-1)
        self.source, self._rows, self._pixel = source, table.view(-1, size), torch.arange(source, device=device)

    @staticmethod
    def bytes(source: int, size: int) -> int:
        """Memory of a table."""
        return 8 * source * (source + 1) * size

    def __call__(self, start: Tensor, length: Tensor, flipped: Tensor | int = 0) -> Tensor:
        """(B, S, source) shares for (B,) parts."""
        pixel = self._pixel - start[:, None]  # (B, source), behind the part all shares are 0
        pixel = torch.where(pixel < 0, self.source, pixel)  # before it too: the last row
        return self._rows[((length - 1) * 2 + flipped)[:, None] * (self.source + 1) + pixel].mT


def resample(pictures: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """(B, S, 3, S) whole numbers 0 to 255, as float32: pictures with both axes replaced by shares of their pixels.

    Rounds after each axis, the horizontal one first, as resizing uint8 pictures does. Always float32: under autocast
    the shares would have three digits.

    Args:
        pictures: (B, H, 3, W) uint8. Colours between the axes make both steps one product for each picture, without
            a copy between them.
        down: (B, S, H) shares, or (1, S, H) for all alike.
        across: (B, S, W).
    """
    count, height, colours, width = pictures.shape
    size = across.shape[1]
    with torch.autocast(pictures.device.type, enabled=False):
        out = torch.bmm(pictures.reshape(count, height * colours, width).float(), across.mT.expand(count, -1, -1))
        out = _whole(out).view(count, height, colours * size)
        out = torch.bmm(down.expand(count, -1, -1), out)  # (B, S, 3 S)
    return _whole(out).view(count, down.shape[1], colours, size)


def _whole(values: Tensor) -> Tensor:
    """Whole numbers 0 to 255, halves rounded up, in place."""
    return values.add_(0.5).floor_().clamp_(0, 255)
