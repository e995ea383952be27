"""Panoptic maps of an open vocabulary: instances from the detector where there are some, the semantic map elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hyptree.data.sample import IGNORE, BadSample, Sample
from hyptree.evaluate.pictures.panoptic import VOID, PanopticMap


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
        number = len(class_of) + 1
        segments[free] = number
        class_of[number] = list(classes).index(things[int(instances["labels"][i]) - 1])
    best = semantic.argmax(0)
    for k, name in enumerate(classes):
        if name in things:
            continue
        free = (best == k) & (segments == VOID)
        if int(free.sum()) >= min_stuff:
            number = len(class_of) + 1
            segments[free] = number
            class_of[number] = k
    return PanopticMap(segments, class_of)


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
        number = len(class_of) + 1
        segments[free] = number
        class_of[number] = list(classes).index(things[label - 1])
        if sample.crowd is not None and bool(sample.crowd[i]):
            crowd.add(number)
    for k in sample.semantic.unique().tolist():
        if k == IGNORE or classes[k] in things:
            continue
        free = (sample.semantic == k) & (segments == VOID)
        if free.any():
            number = len(class_of) + 1
            segments[free] = number
            class_of[number] = k
    return PanopticMap(segments, class_of, frozenset(crowd))
