"""Cross-entropy of rows of logits and its gradient in plain torch: the definition the kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, with_gradient: bool) -> Tensor:
    """``logsumexp(row) - row[label]`` per row; the logits become ``softmax - onehot`` if a gradient is wanted."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ignored = labels == ignore_index
    place = labels.masked_fill(ignored, 0)[:, None]  # (R, 1)
    total = wide.logsumexp(-1, keepdim=True)  # (R, 1)
    losses = (total - wide.gather(-1, place)).squeeze(-1).masked_fill(ignored, 0)
    if with_gradient:
        gradient = (wide - total).exp_()
        gradient.scatter_add_(-1, place, gradient.new_full(place.shape, -1.0))
        logits.copy_(gradient.masked_fill_(ignored[:, None], 0))
    return losses
