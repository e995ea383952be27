"""Detection and instances: Mask R-CNN on any backbone, scored as COCO does in the pixels of the dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.data.sample import BadSample, Sample
from hyptree.errors import UserError, require, require_known
from hyptree.evaluate.pictures.detection import CocoScorer
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task
from hyptree.train.tasks.segment import ScoredSample, build_dense

_NUM_LOOKED_AT = 32
"""Samples that may be unreadable before it is given up to find out whether there are masks."""


class Detect(Task):
    """Mask R-CNN where the data has masks (unless ``model.head.has_masks`` is false), else Faster R-CNN; COCO's AP."""

    metric = "box_ap"
    sees = "detect"
    takes_plugin = True

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.scorer: CocoScorer | None = None
        """Truth and detections of the last evaluation, from all processes; ``scorer.write(path)`` keeps them."""
        self._image_ids: dict[str, int] = {}

    def build_dataset(self, split: str) -> Any:
        if split == "train":
            require("pycocotools", "eval")  # now, not when the first epoch is over and is to be scored
        dataset = super().build_dataset(split)
        self._image_ids |= getattr(dataset, "image_ids", {})
        return dataset

    def describe(self, dataset: Any) -> dict[str, Any]:
        """Class names, whether there are masks, and the dataset's own class numbers where it has some."""
        if not dataset.box_classes:
            raise UserError(f"data {self.recipe.data.name} has no boxes to detect; choose another task")
        description = super().describe(dataset) | {"has_masks": _has_masks(dataset)}
        if hasattr(dataset, "category_ids"):
            description["category_ids"] = list(dataset.category_ids)
        return description

    def build_model(self, data: dict[str, Any]) -> nn.Module:
        from hyptree.models.detection import mask_rcnn

        self._classes = tuple(data["box_classes"])
        self._category_ids: list[int] | None = data.get("category_ids")
        wants_masks = self.recipe.model.head.get("has_masks", data["has_masks"])
        if wants_masks and not data["has_masks"]:
            raise UserError(
                f"model.head.has_masks is true, but data {self.recipe.data.name} has no masks to learn from"
            )
        self._has_masks = bool(wants_masks)
        return build_dense(mask_rcnn, self.recipe, len(self._classes), has_masks=self._has_masks)

    def transform(self, train: bool) -> Any:
        transform = super().transform(train)
        return transform if train else KeepBoxes(transform)

    def collate(self, samples: Sequence[Sample], train: bool) -> dict[str, Any]:
        """Lists, because pictures differ in shape: ``image`` (3, h, w), and ``target`` or what scoring needs."""
        batch: dict[str, Any] = {"image": [sample.image for sample in samples]}
        if train:
            return batch | {"target": [make_target(sample) for sample in samples]}
        scored = [sample for sample in samples if isinstance(sample, ScoredSample)]
        return batch | {
            "id": [sample.id for sample in scored],
            "truth": [sample.truth for sample in scored],
            "full_size": [sample.full_size for sample in scored],
        }

    def training_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch["target"]
        if not self._has_masks:
            targets = [{name: value for name, value in t.items() if name != "masks"} for t in targets]
        losses: dict[str, Tensor] = model(batch["image"], targets)
        total = torch.stack([loss.float() for loss in losses.values()]).sum()
        return self.with_plugin(model, None, total, {name: loss.detach() for name, loss in losses.items()})

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Any]], gather: Gather) -> dict[str, float]:
        from hyptree.data.pictures.single import resize_detections

        scorer = CocoScorer(self._classes, self._category_ids, image_ids=self._image_ids, has_masks=self._has_masks)
        for batch in batches:
            detections = model(batch["image"])
            for i, (id, size) in enumerate(zip(batch["id"], batch["full_size"], strict=True)):
                scorer.add(
                    id, size, batch["truth"][i], resize_detections(detections[i], batch["image"][i].shape[-2:], size)
                )
        scorer.gather()  # detections are no tensor of one shape, so not by the gather that was given
        self.scorer = scorer
        return scorer.scores()

    def write_results(self, path: Path | str) -> None:
        """Write the detections of the last evaluation in COCO's results format."""
        if self.scorer is None:
            raise UserError("nothing was detected yet: evaluate first")
        self.scorer.write(path)


class KeepBoxes:
    """An evaluation transform that leaves boxes and masks as they are."""

    def __init__(self, transform: Callable[[Sample], Sample]):
        self.transform = transform

    def __call__(self, sample: Sample) -> ScoredSample:
        nothing = {"boxes": None, "box_labels": None, "masks": None, "crowd": None}
        seen = self.transform(dataclasses.replace(sample, **nothing))  # type: ignore[arg-type]
        height, width = sample.image.shape[-2:]
        extent = (seen.image.shape[-2], seen.image.shape[-1])
        return ScoredSample(seen.image, seen.id, truth=instances(sample), full_size=(height, width), extent=extent)


def make_target(sample: Sample) -> dict[str, Tensor]:
    """What torchvision's detectors learn from: boxes with area, labels, masks. Crowds are no objects to learn."""
    target = instances(sample)
    boxes, crowd = target["boxes"], target.pop("crowd", None)
    keep = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    if crowd is not None:
        keep &= ~crowd
    if "masks" in target:
        target["masks"] = target["masks"].to(torch.uint8)
    return {name: value[keep] for name, value in target.items()}


def instances(sample: Sample) -> dict[str, Tensor]:
    """Boxes and labels of a sample, and its masks and which are crowds where it says so."""
    if sample.boxes is None or sample.box_labels is None:
        raise BadSample(sample.id, "it has no boxes (none at all would be an empty list)")
    parts = {"boxes": sample.boxes, "labels": sample.box_labels, "masks": sample.masks, "crowd": sample.crowd}
    return {name: value for name, value in parts.items() if value is not None}


def _has_masks(dataset: Any) -> bool:
    """Whether the samples have masks, told by the first that can be read."""
    for i in range(min(len(dataset), _NUM_LOOKED_AT)):
        try:
            return dataset[i].masks is not None
        except BadSample:
            continue
    raise UserError(f"the first {_NUM_LOOKED_AT} pictures cannot be read; check the data")


class WithoutBoxes:
    """A dataset in which the boxes and masks of some classes are left out; their pixels are part of the background."""

    def __init__(self, dataset: Any, names: tuple[str, ...]):
        self.dataset = dataset
        self.labels = {dataset.box_classes.index(name) + 1 for name in names}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not while it is copied into a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        sample: Sample = self.dataset[index]
        if sample.boxes is None or sample.box_labels is None:
            return sample
        keep = [i for i, label in enumerate(sample.box_labels.tolist()) if label not in self.labels]
        parts = {
            name: value[keep]
            for name in ("boxes", "box_labels", "masks", "crowd")
            if (value := getattr(sample, name)) is not None
        }
        return dataclasses.replace(sample, **parts)


class OpenVocabDetect(Detect):
    """As ``detect``; ``model.args.novel`` names classes whose objects training does not show.

    The detector alone is scored here, by its own labels, of which it never gives a novel one a high score.
    ``hyptree.train.openvocab`` names its boxes by text.
    """

    def __init__(self, recipe: Recipe):
        args = dict(recipe.model.args)
        novel = args.pop("novel", ())
        if not isinstance(novel, (list, tuple)) or not all(isinstance(name, str) for name in novel):
            raise UserError(f"model.args.novel must be a list of class names, got {novel!r}")
        self.novel = tuple(novel)
        # The rest of model.args is for the backbone. A copy: the run keeps the recipe as it was given.
        super().__init__(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, args=args)))

    def build_dataset(self, split: str) -> Any:
        dataset = super().build_dataset(split)
        where = f"model.args.novel: data {self.recipe.data.name}"
        require_known(f"{where} has no class {{!r}}", self.novel, dataset.box_classes, "see the names of its objects")
        return WithoutBoxes(dataset, self.novel) if split == "train" and self.novel else dataset
