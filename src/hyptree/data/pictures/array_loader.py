"""Batches from pictures that lie in memory: whole arrays are augmented at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.pictures.decoding import MAX_BYTES
from hyptree.data.pictures.steps import random_erasing
from hyptree.data.pictures.transforms import Transform
from hyptree.data.plan import Loader, Plan
from hyptree.data.sample import BadSample
from hyptree.data.seeding import preserve_rng, reseed, uniforms
from hyptree.data.settings import AugmentSettings


class ArrayLoader(Loader):
    """Batches cut from arrays in memory: shifts, flips and erasing, seeded by (seed, epoch, index) as everywhere."""

    def __init__(
        self,
        plan: Plan,
        images: np.ndarray,
        labels: np.ndarray,
        transform: Transform,
        pack: Callable[[Tensor, Tensor], Any],
        pin_memory: bool = False,
    ):
        super().__init__(plan)
        self.pin_memory = pin_memory
        self.images, self.labels = images, torch.as_tensor(labels).long()
        self.transform, self.pack = transform, pack

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        for indices in self.plan.batches(epoch, self.start_batch):
            images = self.transform.normalise(torch.from_numpy(self._moved(indices, epoch)))
            if self.transform.augment is not None and self.transform.augment.erasing:
                self._erase(images, indices, epoch, self.transform.augment.erasing)
            if self.pin_memory:  # else the copy to the GPU waits until the step before it is done
                images = images.pin_memory()
            yield self.pack(images, self.labels[torch.from_numpy(indices)])

    def _erase(self, images: Tensor, indices: np.ndarray, epoch: int, probability: float) -> None:
        """Erases a rectangle of some of the pictures, in place."""
        chosen = np.flatnonzero(uniforms(self.plan.seed, epoch, indices, 4)[:, 3] < probability)
        erase = random_erasing(1.0)
        with preserve_rng():
            for i in chosen.tolist():
                reseed(self.plan.seed, epoch, int(indices[i]))
                erase(images[i])

    def _moved(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """(B, 3, S, S) uint8: the pictures, each shifted and flipped in its own way."""
        augment = self.transform.augment
        if augment is None or not (augment.flip or augment.translate):
            return self.images[indices]
        size = self.images.shape[-1]
        flip, shift = (drawn.tolist() for drawn in draw_moves(augment, uniforms(self.plan.seed, epoch, indices, 3)))
        moved = np.empty((len(indices), *self.images.shape[1:]), np.uint8)
        if augment.translate:
            moved[:] = np.array(self.transform.fill, np.uint8)[:, None, None]
        # A loop of slices: indexing all pixels at once would be several times slower.
        for out, index, flipped, (dy, dx) in zip(moved, indices.tolist(), flip, shift, strict=True):
            image = self.images[index]
            if flipped:
                image = image[:, :, ::-1]
            out[:, max(dy, 0) : size + min(dy, 0), max(dx, 0) : size + min(dx, 0)] = image[
                :, max(-dy, 0) : size + min(-dy, 0), max(-dx, 0) : size + min(-dx, 0)
            ]
        return moved


def draw_moves(augment: AugmentSettings, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B,) whether each picture is flipped, then (B, 2) pixels down and right."""
    reach = augment.translate
    flip = (chance[:, 0] < augment.flip).astype(np.int64)
    return flip, np.floor(chance[:, 1:3] * (2 * reach + 1)).astype(np.int64) - reach


def whole_arrays(dataset: Any, transform: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """All pictures and labels of a dataset that keeps them in memory at the size they enter the model, else None.

    None too where more happens to them than flips, shifts and erasing, which can be done to whole arrays.
    """
    if not isinstance(transform, Transform) or transform.task != "classify":
        return None
    augment, size = transform.augment, transform.size
    if (
        transform.crop_pct != 1
        if augment is None
        else augment.crop_scale or augment.rand_augment or augment.colour_jitter
    ):
        return None
    if len(dataset) * 3 * size * size > MAX_BYTES:
        return None
    arrays = kept_arrays(dataset)
    return arrays if arrays is not None and arrays[0].shape[1:] == (3, size, size) else None


def kept_arrays(dataset: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """All pictures and labels of a dataset that keeps them decoded; None for others, and where one cannot be read."""
    if not (hasattr(dataset, "images") and hasattr(dataset, "labels")):
        return None
    try:
        images = dataset.images()
    except BadSample:
        return None  # other loaders skip and count it
    return None if images is None else (np.asarray(images), np.asarray(dataset.labels()).astype(np.int64))
