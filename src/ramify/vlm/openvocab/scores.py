"""Numbers of an open vocabulary: the loss, and mean IoU of seen and unseen classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.data.sample import IGNORE
from ramify.evaluate.segmentation import segmentation_scores


def harmonic_mean(a: float, b: float) -> float:
    """``2ab / (a + b)``, 0 where both are 0."""
    return 2 * a * b / (a + b) if a + b > 0 else 0.0


def split_scores(matrix: Tensor, classes: Sequence[str], unseen: Sequence[str]) -> dict[str, float]:
    """Numbers of a confusion matrix over all classes, the means also for seen and unseen ones apart.

    All classes compete for every pixel; only the mean is taken over a part of them. ``miou_harmonic`` is the harmonic
    mean of the two, or ``miou`` where no class is unseen. A part without a class in truth or prediction has mean 0.
    """
    found = segmentation_scores(matrix, classes)
    iou = {name: found[f"iou/{name}"] for name in classes if f"iou/{name}" in found}
    hidden = set(unseen)
    seen = _mean([value for name, value in iou.items() if name not in hidden])
    rest = _mean([value for name, value in iou.items() if name in hidden])
    means = {"miou": found["miou"], "miou_seen": seen}
    if hidden:
        means |= {"miou_unseen": rest, "miou_harmonic": harmonic_mean(seen, rest)}
    else:
        means["miou_harmonic"] = found["miou"]
    return means | found


def pixel_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Binary cross entropy of every class at every pixel, mean over those that count.

    Args:
        logits: (B, T, H, W). truth: (B, H, W) classes from 0 to T - 1, or ``IGNORE``.

    Returns:
        A scalar; 0 (with gradient) where no pixel counts.
    """
    logits, truth = logits.float(), truth.long()
    counts = truth != IGNORE
    # One-hot by comparison: no scatter, whose order of sums is free on a GPU.
    target = truth[:, None] == torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1, 1)
    loss = F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none").sum(1)
    return (loss * counts).sum() / (counts.sum().clamp_min(1) * logits.shape[1])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
