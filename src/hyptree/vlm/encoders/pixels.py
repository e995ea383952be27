"""Pictures as an image tower wants them: resized, cropped, normalised; in plain torch, without torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.data.pictures.single import rgb_pixels
from hyptree.errors import UserError, as_user_error

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PixelFormat:
    """How large the pictures are that a tower takes, and on which scale their colours."""

    size: int = 224
    """Side in pixels."""
    mean: tuple[float, float, float] = CLIP_MEAN
    """Subtracted from red, green, blue in [0, 1]."""
    std: tuple[float, float, float] = CLIP_STD
    """Divided by."""
    whole: bool = False
    """Squeeze the whole picture into the square (SigLIP) instead of cropping its centre (CLIP)."""

    def prepare(self, pictures: Sequence[Any] | Tensor | np.ndarray) -> Tensor:
        """(n, 3, size, size) float32 from pictures of any size, each as :func:`as_bytes` takes them.

        The filter is bicubic with antialiasing, and resized colours are rounded to bytes as picture libraries do it.
        """
        if len(pictures) == 0:
            return torch.empty(0, 3, self.size, self.size)
        return self.normalise(torch.stack([self._fit(as_bytes(picture)) for picture in pictures]))

    def normalise(self, pictures: Tensor) -> Tensor:
        """(n, 3, h, w) float32 from bytes (n, 3, h, w), at the size they have."""
        mean = torch.tensor(self.mean, device=pictures.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=pictures.device).view(3, 1, 1)
        return (pictures.float() / 255 - mean) / std

    def _fit(self, picture: Tensor) -> Tensor:
        height, width = picture.shape[1:]
        if self.whole:
            return _resize(picture, self.size, self.size)
        scale = self.size / min(height, width)
        picture = _resize(picture, max(self.size, round(height * scale)), max(self.size, round(width * scale)))
        top, left = (picture.shape[1] - self.size) // 2, (picture.shape[2] - self.size) // 2
        return picture[:, top : top + self.size, left : left + self.size]


def as_bytes(picture: Any) -> Tensor:
    """(3, H, W) uint8 from a PIL picture, or an array or tensor of bytes (H, W, 3), (3, H, W) or grey (H, W)."""
    if isinstance(picture, Tensor):
        tensor = picture
    else:
        if hasattr(picture, "convert"):  # PIL
            with as_user_error("a picture"):
                picture = rgb_pixels(picture)
        tensor = torch.from_numpy(np.array(picture))
    if tensor.dtype != torch.uint8:
        raise UserError(
            f"a picture must be bytes (uint8, 0 to 255), got {str(tensor.dtype).removeprefix('torch.')}; "
            "pictures that are already prepared go as one float tensor (n, 3, size, size)"
        )
    if tensor.dim() == 2:
        tensor = tensor.expand(3, -1, -1)
    elif tensor.dim() == 3 and tensor.shape[-1] == 3:
        tensor = tensor.permute(2, 0, 1)
    elif tensor.dim() != 3 or tensor.shape[0] != 3:
        raise UserError(f"a picture must be (H, W, 3), (3, H, W) or (H, W), got {tuple(tensor.shape)}")
    if 0 in tensor.shape:
        raise UserError(f"a picture must have at least one pixel, got {tuple(tensor.shape)}")
    return tensor


def _resize(picture: Tensor, height: int, width: int) -> Tensor:
    if tuple(picture.shape[1:]) == (height, width):
        return picture
    resized = F.interpolate(picture[None].float(), (height, width), mode="bicubic", antialias=True)[0]
    return resized.round().clamp(0, 255).to(torch.uint8)
