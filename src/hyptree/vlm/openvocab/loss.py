"""The loss of an open vocabulary: is it this class, asked of every pixel and every class for itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.data.sample import IGNORE


def pixel_loss(logits: Tensor, truth: Tensor, count: Tensor | None = None) -> Tensor:
    """Binary cross entropy of every class at every pixel, mean over those that count.

    Args:
        logits: (B, T, H, W). truth: (B, H, W) classes from 0 to T - 1, or ``IGNORE``.
        count: how many pixels the mean is over, by default those that count here.

    Returns:
        A scalar; 0 (with gradient) where no pixel counts.
    """
    logits, truth = logits.float(), truth.long()
    counts = truth != IGNORE
    # One-hot by comparison: no scatter, whose order of sums is free on a GPU.
    target = truth[:, None] == torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1, 1)
    loss = F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none").sum(1)
    count = counts.sum() if count is None else count
    return (loss * counts).sum() / ((count + (count == 0)) * logits.shape[1])
