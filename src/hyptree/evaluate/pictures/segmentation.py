"""Semantic segmentation in numbers: confusion matrix, intersection over union, pixel accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyptree.data.sample import IGNORE


class Confusion:
    """How many pixels of each true class were given each predicted class, counted on ``device``.

    ``matrix`` is (K, K) int64, rows true, columns predicted. Pixels whose truth is ``IGNORE`` count nowhere.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu"):
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        self.num_classes = num_classes
        self.matrix = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """Count one picture or a batch.

        Args:
            predicted: classes from 0 to K - 1, any shape. truth: the same shape, classes or ``IGNORE``.
        """
        if predicted.shape != truth.shape:
            raise ValueError(f"predicted {tuple(predicted.shape)} and truth {tuple(truth.shape)} must have one shape")
        counts = truth != IGNORE
        # int64 first: the product of class numbers does not fit the uint8 of a label map.
        pairs = torch.stack([truth[counts].long(), predicted[counts].long()])  # (2, pixels that count)
        if pairs.shape[1] == 0:
            return
        lowest, highest = torch.stack([pairs.min(), pairs.max()]).tolist()
        if lowest < 0 or highest >= self.num_classes:
            raise ValueError(
                f"found class {lowest if lowest < 0 else highest} where there are {self.num_classes} "
                f"(0 to {self.num_classes - 1}); mark pixels that do not count with {IGNORE}"
            )
        confusion = torch.bincount(pairs[0] * self.num_classes + pairs[1], minlength=self.num_classes**2)
        self.matrix += confusion.view(self.num_classes, self.num_classes)

    def scores(self, classes: Sequence[str] = (), gather: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """``segmentation_scores`` of what was counted, by all processes where ``gather`` concatenates over them."""
        matrix = self.matrix if gather is None else gather(self.matrix[None]).sum(0)
        return segmentation_scores(matrix, classes)


def segmentation_scores(matrix: Tensor, classes: Sequence[str] = ()) -> dict[str, float]:
    """Numbers from a (K, K) confusion matrix, rows true, columns predicted.

    A class that is neither in the truth nor predicted anywhere has no IoU: it is left out of the mean, and its own
    number is left out of the answer. A class that is predicted but never true has IoU 0 and counts.

    Returns:
        ``miou``; ``pixel_accuracy``; ``mean_accuracy``, the mean share of found pixels over classes in the truth; and
        ``iou/<name>`` for each class when names are given. All are 0 when nothing was counted.
    """
    count = matrix.double().cpu()
    right, true, predicted = count.diagonal(), count.sum(1), count.sum(0)
    union = true + predicted - right
    iou = right / union  # NaN where the class is nowhere
    scores = {
        "miou": _mean(iou[union > 0]),
        "pixel_accuracy": float(right.sum() / true.sum()) if true.sum() > 0 else 0.0,
        "mean_accuracy": _mean((right / true)[true > 0]),
    }
    if classes:
        if len(classes) != len(count):
            raise ValueError(f"expected {len(count)} class names, got {len(classes)}")
        scores |= {f"iou/{name}": float(iou[k]) for k, name in enumerate(classes) if union[k] > 0}
    return scores


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
