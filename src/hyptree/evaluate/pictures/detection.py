"""Detection and instances in numbers: COCO's average precision of boxes and masks, computed by pycocotools."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import require
from hyptree.files import write_text

# Places in COCOeval.stats. An AR of fewer than 100 detections per picture is left out: nobody reads it.
NUMBERS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar100": 8}
KINDS = {"box": "bbox", "mask": "segm"}


@dataclass
class _Picture:
    """What is true of one picture and what was found in it, both as plain data in COCO's own terms."""

    height: int
    width: int
    truth: list[dict[str, Any]] = field(default_factory=list)
    predicted: list[dict[str, Any]] = field(default_factory=list)


class CocoScorer:
    """Collects truth and detections picture by picture and scores them as COCO does.

    Both are kept as plain data (masks run-length encoded), so that processes can hand each other theirs.

    Args:
        category_ids: the dataset's own number of each class, used in the written results; by default 1, 2, ...
        image_ids: the dataset's own number of each picture by its id, used there too; by default the id itself.
    """

    def __init__(
        self,
        classes: Sequence[str],
        category_ids: Sequence[int] | None = None,
        *,
        image_ids: Mapping[str, int] | None = None,
        has_masks: bool = True,
    ):
        if category_ids is not None and len(category_ids) != len(classes):
            raise ValueError(f"expected {len(classes)} category_ids, one per class, got {len(category_ids)}")
        self.classes = tuple(classes)
        self.category_ids = tuple(category_ids) if category_ids is not None else tuple(range(1, len(classes) + 1))
        self.image_ids = dict(image_ids or {})
        self.has_masks = has_masks
        self._pictures: dict[str, _Picture] = {}
        require("pycocotools", "eval")  # now, not after an hour of predictions

    def add(self, id: str, size: tuple[int, int], truth: Mapping[str, Tensor], predicted: Mapping[str, Tensor]) -> None:
        """Take in one picture, by its id in the dataset; a second time with the same one replaces the first.

        Args:
            size: height and width that boxes and masks refer to.
            truth: boxes (N, 4) as x1 y1 x2 y2, labels (N,) from 1, and where there are some masks (N, H, W) and
                crowd (N,).
            predicted: boxes (M, 4), labels (M,), scores (M,), and masks (M, H, W) or (M, 1, H, W) in [0, 1].
        """
        picture = _Picture(*size)
        crowd = truth.get("crowd")
        for i, entry in enumerate(self._entries(size, truth)):
            area = float(_mask_area(entry)) if "segmentation" in entry else entry["bbox"][2] * entry["bbox"][3]
            is_crowd = int(crowd[i]) if crowd is not None else 0
            picture.truth.append(entry | {"area": area, "iscrowd": is_crowd})
        for entry, score in zip(self._entries(size, predicted), predicted["scores"].tolist(), strict=True):
            picture.predicted.append(entry | {"score": score})
        self._pictures[id] = picture

    def _entries(self, size: tuple[int, int], things: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        boxes, labels = things["boxes"].float().cpu(), things["labels"].cpu()
        if len(labels) and not (int(labels.min()) >= 1 and int(labels.max()) <= len(self.classes)):
            raise ValueError(f"labels must be from 1 to {len(self.classes)}, got {labels.unique().tolist()}")
        corners = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()  # x, y, width, height
        entries: list[dict[str, Any]] = [
            {"bbox": corner, "category_id": self.category_ids[label - 1]}
            for corner, label in zip(corners, labels.tolist(), strict=True)
        ]
        if self.has_masks and entries:
            masks = things["masks"]
            masks = masks.squeeze(1) if masks.dim() == 4 else masks
            if tuple(masks.shape[-2:]) != tuple(size):
                raise ValueError(f"masks are {tuple(masks.shape[-2:])}, the picture is {tuple(size)}")
            for entry, runs in zip(entries, encode_masks(masks), strict=True):
                entry["segmentation"] = runs
        return entries

    def gather(self) -> None:
        """Give every process what all of them took in. Every process must call it; nothing happens on one alone."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._pictures)
        self._pictures = {id: picture for part in parts for id, picture in part.items()}

    def results(self) -> list[dict[str, Any]]:
        """Detections in COCO's results format, as the evaluation servers take them."""
        return [
            {"image_id": self.image_ids.get(id, id), **entry}
            for id, picture in self._pictures.items()
            for entry in picture.predicted
        ]

    def write(self, path: Path | str) -> None:
        """Write ``results`` as JSON, atomically."""
        write_text(path, json.dumps(self.results()))

    def scores(self) -> dict[str, float]:
        """COCO's numbers for boxes (``box_ap``, ``box_ap50``, ...) and masks (``mask_ap``, ...), from 0 to 1.

        AP is the mean over classes and IoU thresholds 0.5, 0.55, ..., 0.95. A number that is not defined, because the
        truth has no such object (of that size, say), is left out; ``box_ap`` and ``mask_ap`` are 0 then.
        """
        scores: dict[str, float] = {}
        for kind in ("box", "mask") if self.has_masks else ("box",):
            numbers = self._evaluate(KINDS[kind])
            scores |= {f"{kind}_{name}": value for name, value in numbers.items() if value >= 0 or name == "ap"}
            scores[f"{kind}_ap"] = max(scores[f"{kind}_ap"], 0.0)
        return scores

    def _evaluate(self, iou_type: str) -> dict[str, float]:
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints a table and its timings
            truth = _coco([(picture, picture.truth) for picture in self._pictures.values()], self.category_ids)
            results = [(p, [_as_result(entry, iou_type) for entry in p.predicted]) for p in self._pictures.values()]
            predictions = _coco(results, self.category_ids)
            evaluation = COCOeval(truth, predictions, iou_type)
            if not self._pictures:
                return dict.fromkeys(NUMBERS, -1.0)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return {name: float(evaluation.stats[place]) for name, place in NUMBERS.items()}


def encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """(N, H, W) bool, or probabilities of which those above a half count -> COCO's compressed run lengths."""
    from pycocotools import mask as coco_mask

    on = masks > 0.5 if masks.is_floating_point() else masks != 0
    columns = np.asfortranarray(on.cpu().numpy().astype(np.uint8).transpose(1, 2, 0))  # (H, W, N)
    return [{"size": runs["size"], "counts": runs["counts"].decode("ascii")} for runs in coco_mask.encode(columns)]


def _mask_area(entry: Mapping[str, Any]) -> int:
    from pycocotools import mask as coco_mask

    return int(coco_mask.area(entry["segmentation"]))


def _as_result(entry: Mapping[str, Any], iou_type: str) -> dict[str, Any]:
    """A detection with the area that decides whether it is small, medium or large: that of the thing scored."""
    box = entry["bbox"]
    area = box[2] * box[3] if iou_type == "bbox" else _mask_area(entry)
    return {**entry, "area": area, "iscrowd": 0}


def _coco(pictures: Sequence[tuple[_Picture, Sequence[Mapping[str, Any]]]], category_ids: Sequence[int]) -> Any:
    """An index in memory as pycocotools wants it."""
    from pycocotools.coco import COCO

    coco = COCO()
    annotations: list[dict[str, Any]] = []
    for number, (_, entries) in enumerate(pictures):
        for entry in entries:
            # From 1: pycocotools takes an annotation numbered 0 for "not matched".
            annotations.append({**entry, "image_id": number, "id": len(annotations) + 1})
    coco.dataset = {
        "images": [{"id": i, "height": p.height, "width": p.width} for i, (p, _) in enumerate(pictures)],
        "categories": [{"id": id} for id in category_ids],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco
