"""Large pictures by overlapping windows and one look at the whole, averaged as probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def window_starts(length: int, window: int, overlap: float = 1 / 3) -> list[int]:
    """Where windows begin along an axis: neighbours share at least ``overlap`` of a window, the last ends at the end.

    They are as few as that allows and spread evenly: 640 pixels and windows of 384 with a third shared give 0 and 256.
    """
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap must be from 0 to below 1, got {overlap:g}")
    if window < 1 or length < window:
        raise ValueError(f"window must be from 1 to the {length} pixels of the picture, got {window}")
    if length == window:
        return [0]
    # A hair above one third is one third: 256 of 384 pixels must not become three windows by rounding.
    stride = max(1, round(window * (1 - overlap)))
    steps = -(-(length - window) // stride)
    return [round(i * (length - window) / steps) for i in range(steps + 1)]


def sliding_scores(
    predict: Callable[[Tensor], Tensor],
    pictures: Tensor,
    window: int,
    overlap: float = 1 / 3,
    *,
    global_view: bool = True,
    batch_size: int = 8,
) -> Tensor:
    """Probabilities of classes for pictures of any size: (B, 3, H, W) -> (B, T, H, W), float32.

    Each window is predicted alone; where several cover a pixel their probabilities (sigmoids, not logits) are averaged.
    The whole picture, shrunk to one window, counts as much as all windows together. A picture of exactly one window is
    looked at once.

    Args:
        predict: (n, 3, window, window) -> logits (n, T, window, window).
        batch_size: windows at once.
    """
    height, width = pictures.shape[-2:]
    if (height, width) == (window, window):
        return predict(pictures).float().sigmoid()
    places = [(y, x) for y in window_starts(height, window, overlap) for x in window_starts(width, window, overlap)]
    size = pictures.shape[-2:]
    maps = []
    for picture in pictures:
        views = [picture[:, y : y + window, x : x + window] for y, x in places]
        if global_view:
            whole = F.interpolate(picture[None], (window, window), mode="bilinear", align_corners=False, antialias=True)
            views.append(whole[0])
        batches = (torch.stack(views[i : i + batch_size]) for i in range(0, len(views), batch_size))
        scores = torch.cat([predict(batch).float().sigmoid() for batch in batches])
        total, count = scores.new_zeros(scores.shape[1], *size), scores.new_zeros(size)
        for (y, x), score in zip(places, scores, strict=False):
            total[:, y : y + window, x : x + window] += score
            count[y : y + window, x : x + window] += 1
        mean = total / count
        if global_view:
            seen_whole = F.interpolate(scores[-1:], size=size, mode="bilinear", align_corners=False)[0]
            mean = (mean + seen_whole) / 2
        maps.append(mean)
    return torch.stack(maps)
