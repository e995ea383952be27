"""Detection for an open vocabulary: the task ``detect`` on base classes; objects of novel classes are not shown."""

from __future__ import annotations

import dataclasses
from typing import Any

from hyptree.data.sample import Sample
from hyptree.errors import UserError, require_known
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks.detect import Detect


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
