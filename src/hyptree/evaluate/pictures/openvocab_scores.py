"""Numbers of an open vocabulary: mean IoU and average precision, for classes seen in training and for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hyptree.evaluate.pictures.detection import CocoScorer
from hyptree.evaluate.pictures.segmentation import segmentation_scores
from hyptree.vlm.lathadapter.fewshot import harmonic_mean


def split_scores(matrix: Tensor, classes: Sequence[str], unseen: Sequence[str]) -> dict[str, float]:
    """Numbers of a confusion matrix over all classes, the means also for seen and unseen ones apart.

    All classes compete for every pixel; only the mean is taken over a part of them. ``miou_harmonic`` is the harmonic
    mean of the two, or ``miou`` where no class is unseen. A part without a class in truth or prediction has mean 0.
    """
    scores = segmentation_scores(matrix, classes)
    iou = {name: scores[f"iou/{name}"] for name in classes if f"iou/{name}" in scores}
    hidden = set(unseen)
    seen = _mean([value for name, value in iou.items() if name not in hidden])
    rest = _mean([value for name, value in iou.items() if name in hidden])
    unseen_too = {"miou_unseen": rest, "miou_harmonic": harmonic_mean(seen, rest)}
    means = {"miou": scores["miou"], "miou_seen": seen}
    return means | (unseen_too if hidden else {"miou_harmonic": scores["miou"]}) | scores


class BaseNovelScorer:
    """COCO's average precision, for all classes and apart for base and novel ones, which were not trained on.

    AP is a mean over classes, so that of a part is the AP of its boxes alone: nothing else changes.
    """

    def __init__(self, classes: Sequence[str], novel: Sequence[str], *, has_masks: bool = True):
        for name in novel:
            if name not in classes:
                raise ValueError(f"novel class {name!r} is not one of the {len(classes)} classes")
        base, others = ([name for name in classes if (name in novel) == is_novel] for is_novel in (False, True))
        names = {"": list(classes), "_base": base, "_novel": others}
        self.classes = tuple(classes)
        self._scorers = {part: CocoScorer(members, has_masks=has_masks) for part, members in names.items() if members}

    def add(self, id: str, size: tuple[int, int], truth: Mapping[str, Tensor], predicted: Mapping[str, Tensor]) -> None:
        """Take in one picture, as ``CocoScorer.add``."""
        for scorer in self._scorers.values():
            scorer.add(id, size, self._only(truth, scorer.classes), self._only(predicted, scorer.classes))

    def _only(self, things: Mapping[str, Tensor], members: Sequence[str]) -> dict[str, Tensor]:
        labels = things["labels"]
        table = torch.tensor([0, *[members.index(n) + 1 if n in members else 0 for n in self.classes]])
        relabelled = table.to(labels.device)[labels]
        keep = relabelled > 0
        return {name: value[keep] for name, value in things.items() if name != "labels"} | {"labels": relabelled[keep]}

    def scores(self) -> dict[str, float]:
        """``box_ap``, ``box_ap50``, ... and the same with ``_base`` and ``_novel`` at the end; also of masks."""
        return {
            f"{name}{part}": value for part, scorer in self._scorers.items() for name, value in scorer.scores().items()
        }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
