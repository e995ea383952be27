"""Panoptic maps: joined from instances and classes, and in numbers: panoptic, segmentation and recognition quality.

The measures are those of Kirillov et al. (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyptree.data.sample import IGNORE, BadSample, Sample

VOID = 0
"""Segment number of pixels that belong to nothing: in the truth they count nowhere."""


@dataclass(frozen=True)
class PanopticMap:
    """A picture cut into segments that do not overlap, each of one class."""

    segments: Tensor
    """(H, W) integers: the segment of every pixel, ``VOID`` for none."""
    classes: Mapping[int, int]
    """Class (from 0) of each segment."""
    crowd: frozenset[int] = frozenset()
    """Segments of the truth that stand for a crowd: not to be found, and no mistake to find something in."""

    def __post_init__(self) -> None:
        if self.segments.dim() != 2 or self.segments.is_floating_point():
            raise ValueError(f"segments must be a map (H, W) of integers, got {tuple(self.segments.shape)}")
        if VOID in self.classes:
            raise ValueError(f"segment {VOID} is void and has no class")
        unknown = [int(i) for i in self.segments.unique().tolist() if i != VOID and i not in self.classes]
        if unknown:
            raise ValueError(f"the map holds segment {unknown[0]}, which has no class")


class PanopticQuality:
    """Collects predicted and true maps picture by picture.

    A predicted and a true segment of the same class match when their IoU is above a half; then at most one pair can
    match. Of every class: ``PQ = sum of matched IoU / (TP + FP / 2 + FN / 2) = SQ RQ`` with SQ the mean matched IoU
    and RQ the F1 score. As in COCO, predicted pixels on void are left out of the union, and an unmatched prediction of
    which more than half lies on void or on a crowd of its class is no mistake.

    Args:
        things: names of those that come in instances; the others are stuff. By default all are things.
        novel: names of those that were not trained on, for means of their own.
    """

    def __init__(self, classes: Sequence[str], things: Sequence[str] | None = None, novel: Sequence[str] = ()):
        if not classes:
            raise ValueError("classes must not be empty")
        for name in (*(things or ()), *novel):
            if name not in classes:
                raise ValueError(f"{name!r} is not one of the {len(classes)} classes")
        self.classes = tuple(classes)
        self.things = frozenset(classes if things is None else things)
        self.novel = frozenset(novel)
        self.counts = torch.zeros(len(classes), 4, dtype=torch.float64)
        """For every class the sum of matched IoU, matches, false positives and false negatives."""

    def add(self, predicted: PanopticMap, truth: PanopticMap) -> None:
        """Take in one picture."""
        if predicted.segments.shape != truth.segments.shape:
            shapes = f"predicted {tuple(predicted.segments.shape)} and truth {tuple(truth.segments.shape)}"
            raise ValueError(f"{shapes} must have one shape")
        for panoptic in (predicted, truth):
            wrong = [k for k in panoptic.classes.values() if not 0 <= k < len(self.classes)]
            if wrong:
                raise ValueError(f"class {wrong[0]} is none of 0 to {len(self.classes) - 1}")
        shared = _counted(predicted.segments, truth.segments)
        area = _counted(predicted.segments), _counted(truth.segments)
        on_void = {p: n for (p, t), n in shared.items() if t == VOID}
        matched: tuple[set[int], set[int]] = (set(), set())
        for (p, t), both in shared.items():
            if VOID in (p, t) or t in truth.crowd or predicted.classes[p] != truth.classes[t]:
                continue
            iou = both / (area[0][p] + area[1][t] - both - on_void.get(p, 0))
            if iou > 0.5:
                self.counts[truth.classes[t]] += torch.tensor([iou, 1, 0, 0], dtype=torch.float64)
                matched[0].add(p)
                matched[1].add(t)
        for t, k in truth.classes.items():
            if t in area[1] and t not in matched[1] and t not in truth.crowd:
                self.counts[k, 3] += 1
        for p, k in predicted.classes.items():
            if p not in area[0] or p in matched[0]:
                continue
            excused = on_void.get(p, 0) + sum(shared.get((p, t), 0) for t in truth.crowd if truth.classes[t] == k)
            if excused <= 0.5 * area[0][p]:
                self.counts[k, 2] += 1

    def scores(self, gather: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """``pq``, ``sq``, ``rq``, each also for things, stuff and (where some are novel) base and novel classes.

        Means over the classes that occur in truth or prediction; 0 where none does. ``sq`` of a class without a match
        is 0. ``pq/<name>`` is that of one class.

        Args:
            gather: concatenates (n, ...) tensors over processes, where several collected.
        """
        counts = self.counts if gather is None else gather(self.counts[None]).sum(0).cpu()
        iou, right, extra, missed = counts.unbind(1)
        total = right + extra / 2 + missed / 2
        quality = torch.stack([iou / total, iou / right.clamp_min(1), right / total], 1)  # (K, 3)
        parts = {
            "": self.classes,
            "_things": [name for name in self.classes if name in self.things],
            "_stuff": [name for name in self.classes if name not in self.things],
        }
        if self.novel:
            parts |= {
                "_base": [name for name in self.classes if name not in self.novel],
                "_novel": [name for name in self.classes if name in self.novel],
            }
        scores: dict[str, float] = {}
        for suffix, names in parts.items():
            rows = [self.classes.index(name) for name in names if total[self.classes.index(name)] > 0]
            means = quality[rows].mean(0).tolist() if rows else [0.0] * 3
            scores |= {f"{key}{suffix}": value for key, value in zip(("pq", "sq", "rq"), means, strict=True)}
        return scores | {f"pq/{name}": float(quality[k, 0]) for k, name in enumerate(self.classes) if total[k] > 0}


def _counted(*maps: Tensor) -> dict[Any, int]:
    """Pixels of every segment of a map, or those that each pair of segments of two maps has in common."""
    rows = torch.stack([segments.reshape(-1).long().cpu() for segments in maps], 1)
    unique, counts = rows.unique(dim=0, return_counts=True)
    keys = [row[0] if len(row) == 1 else tuple(row) for row in unique.tolist()]
    return dict(zip(keys, counts.tolist(), strict=True))


def join_panoptic(
    semantic: Tensor,
    instances: Mapping[str, Tensor],
    classes: Sequence[str],
    things: Sequence[str],
    *,
    min_score: float = 0.3,
    min_visible: float = 0.5,
    min_stuff: int = 16,
) -> PanopticMap:
    """One map from class scores and instances, as Panoptic FPN joins them.

    Instances are laid down from the surest on; one of which less than ``min_visible`` is still free is left out. What
    no instance covers gets the best class of the semantic map where that is stuff; a thing that nobody found as an
    instance stays void.

    Args:
        semantic: (K, H, W) scores of ``classes``.
        instances: labels (N,) from 1 (places in ``things``), scores (N,), masks (N, 1, H, W) or (N, H, W) in [0, 1].
        classes: names of the semantic map.
        things: those of them that come in instances, in the order of the labels.
        min_stuff: pixels that a stuff segment has at least.
    """
    for name in things:
        if name not in classes:
            raise ValueError(f"the semantic map has no class {name!r}")
    segments = torch.zeros(semantic.shape[-2:], dtype=torch.int64, device=semantic.device)
    class_of: dict[int, int] = {}
    masks = instances["masks"]
    masks = masks.squeeze(1) if masks.dim() == 4 else masks
    for i in instances["scores"].argsort(descending=True, stable=True).tolist():
        if float(instances["scores"][i]) < min_score:
            break
        mask = masks[i] > 0.5 if masks.is_floating_point() else masks[i] != 0
        free = mask & (segments == VOID)
        if not mask.any() or int(free.sum()) < min_visible * int(mask.sum()):
            continue
        _lay(segments, class_of, free, list(classes).index(things[int(instances["labels"][i]) - 1]))
    best = semantic.argmax(0)
    for k, name in enumerate(classes):
        free = (best == k) & (segments == VOID)
        if name not in things and int(free.sum()) >= min_stuff:
            _lay(segments, class_of, free, k)
    return PanopticMap(segments, class_of)


def _lay(segments: Tensor, class_of: dict[int, int], where: Tensor, label: int) -> None:
    """A new segment of a class."""
    class_of[len(class_of) + 1] = label
    segments[where] = len(class_of)


def panoptic_truth(sample: Sample, classes: Sequence[str], things: Sequence[str]) -> PanopticMap:
    """The true map of a sample with label map, boxes' labels and masks; a thing without a mask of its own is void."""
    if sample.semantic is None or sample.masks is None or sample.box_labels is None:
        raise BadSample(sample.id, "a panoptic map needs its label map and the masks of its objects")
    segments = torch.zeros(sample.semantic.shape, dtype=torch.int64)
    class_of: dict[int, int] = {}
    crowd = set()
    for i, (mask, label) in enumerate(zip(sample.masks, sample.box_labels.tolist(), strict=True)):
        free = mask & (segments == VOID)
        if not free.any():
            continue
        _lay(segments, class_of, free, list(classes).index(things[label - 1]))
        if sample.crowd is not None and bool(sample.crowd[i]):
            crowd.add(len(class_of))
    for k in sample.semantic.unique().tolist():
        free = (sample.semantic == k) & (segments == VOID)
        if k != IGNORE and classes[k] not in things and free.any():
            _lay(segments, class_of, free, k)
    return PanopticMap(segments, class_of, frozenset(crowd))
