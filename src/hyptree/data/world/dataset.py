"""``World``: the built-in dataset of pictures."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyptree.data.sample import PictureDataset, Sample
from hyptree.data.world.captions import NUM_DICE, captions, facts_of
from hyptree.data.world.classes import CLASSES, class_tree
from hyptree.data.world.render import render
from hyptree.data.world.scene import MAX_OBJECTS, picture_keys, sample_scenes
from hyptree.data.world.shape_builder import PARTS
from hyptree.data.world.store import Arrays, load_or_build
from hyptree.errors import UserError, suggest
from hyptree.files import cache_folder
from hyptree.tree import Tree

VERSION = 4
"""Part of a stored split's name: raised whenever the same seed gives other pictures."""

SPLITS = {"train": 12_000, "val": 2_000, "test": 2_000}
"""Splits with the number of pictures they have unless told otherwise."""

_MEMORY = 256 * 2**20  # bytes of rendered pictures that a World without a cache keeps
_NO_OBJECT = 255


class World:
    """A split of the built-in world; a ``PictureDataset`` whose samples have everything a ``Sample`` can have.

    ``label`` is the leaf class of the main object. ``semantic`` holds 0 for the background and ``label + 1`` for the
    pixels of any object; boxes, masks and ``box_labels`` (also ``label + 1``) cover all objects with at least
    ``size * size / 400`` visible pixels, the main one first. ``parts`` holds places in ``part_classes``.
    Captions go from the group over the family and the coloured class to everything.

    Picture i follows from (seed, split, i) alone; ``size`` sets how finely it is sampled.

    Args:
        split: "train", "val" or "test".
        num_images: how many pictures; by default ``SPLITS[split]``.
        size: side in pixels, 32 to 512.
        seed: of the whole world.
        cache: a folder that keeps rendered pictures, or True for ``files.cache_folder("world")``. Without one
            they are rendered when they are asked for, in runs of neighbours, and up to 256 MiB of them are kept.

    Raises:
        UserError: an argument out of range, or a cache that cannot be written.
    """

    classes: tuple[str, ...] = CLASSES
    semantic_classes: tuple[str, ...] = ("background", *CLASSES)
    box_classes: tuple[str, ...] = CLASSES
    part_classes: tuple[str, ...] = ("none", *PARTS)

    def __init__(
        self,
        split: str = "train",
        num_images: int | None = None,
        size: int = 64,
        seed: int = 0,
        cache: Path | str | bool | None = None,
    ):
        if split not in SPLITS:
            raise UserError(
                f"split must be one of {', '.join(SPLITS)}, got {split!r}; {suggest(str(split), SPLITS)}".rstrip("; ")
            )
        num_images = SPLITS[split] if num_images is None else num_images
        self.num_images = _whole("num_images", num_images, 1, 10**9)
        self.size = _whole("size", size, 32, 512)
        self.seed = _whole("seed", seed, 0, 2**63 - 1)
        self.split = split
        self.tree: Tree | None = class_tree()
        self.cache = cache_folder("world") if cache is True else Path(cache) if cache else None
        self._run = max(1, min(128, 2**19 // self.size**2))  # pictures rendered together on the fly
        self._kept: OrderedDict[int, Arrays] = OrderedDict()
        self._stored: Arrays | None = None
        if self.cache is not None:
            name = f"v{VERSION}-seed{self.seed}-{self.size}px-{split}-{self.num_images}"
            self._stored = load_or_build(self.cache / name, self._layout(), self._render_all)

    def __reduce__(self) -> tuple[type[World], tuple[str, int, int, int, Path | None]]:
        """Pickles as its settings: a worker process opens the stored pictures itself instead of getting a copy."""
        return World, (self.split, self.num_images, self.size, self.seed, self.cache)

    def __len__(self) -> int:
        return self.num_images

    def __repr__(self) -> str:
        return f"World({self.split!r}, num_images={self.num_images}, size={self.size}, seed={self.seed})"

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, counted from the end where negative."""
        position = operator.index(index)
        if not -self.num_images <= position < self.num_images:
            raise IndexError(f"picture {position} of {self.num_images}")
        position %= self.num_images
        row = self._row(position)
        objects, leaf = row["object"], row["leaf"]
        slots = [k for k in range(MAX_OBJECTS) if row["box"][k, 2] > row["box"][k, 0]]
        leaves = leaf[leaf != _NO_OBJECT].tolist()
        words, wrong = captions(leaves, row["facts"].tolist())
        to_class = np.zeros(MAX_OBJECTS + 1, np.uint8)
        to_class[1:] = leaf + np.uint8(1)  # the mark of an empty slot wraps to 0 and no pixel has it
        return Sample(
            image=torch.from_numpy(np.array(row["image"])),
            id=f"world-{self.split}-{position}",
            label=int(leaf[0]),
            semantic=torch.from_numpy(to_class[objects]),
            parts=torch.from_numpy(np.array(row["part"])),
            boxes=torch.from_numpy(row["box"][slots].astype(np.float32)),
            box_labels=torch.tensor([int(leaf[k]) + 1 for k in slots], dtype=torch.int64),
            masks=torch.from_numpy(objects[None] == np.array(slots, np.uint8)[:, None, None] + 1),
            captions=words,
            contradictions=wrong,
        )

    def images(self) -> Tensor:
        """(n, 3, S, S) uint8: all pictures at once, in order; from the cache, or rendered anew at every call."""
        if self._stored is not None:
            return torch.from_numpy(self._stored["image"])
        shape, dtype = self._layout()["image"]
        out = np.empty(shape, dtype)
        for start, rows in self._render_all():
            out[start : start + len(rows["image"])] = rows["image"]
        return torch.from_numpy(out)

    def labels(self) -> Tensor:
        """(n,) int64: the label of every picture."""
        if self._stored is not None:
            return torch.from_numpy(self._stored["leaf"][:, 0].astype(np.int64))
        keys = picture_keys(self.seed, self.split, np.arange(self.num_images))
        return torch.from_numpy(sample_scenes(keys).leaf[:, 0].astype(np.int64))

    def _row(self, position: int) -> Arrays:
        if self._stored is not None:
            return {name: array[position] for name, array in self._stored.items()}
        start = position - position % self._run
        if start not in self._kept:
            stop = min(start + self._run, self.num_images)
            self._kept[start] = self._render(np.arange(start, stop))
            while len(self._kept) > 1 and len(self._kept) * self._run * self.size**2 * 5 > _MEMORY:
                self._kept.popitem(last=False)
        self._kept.move_to_end(start)
        return {name: array[position - start] for name, array in self._kept[start].items()}

    def _layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        n, s = self.num_images, self.size
        return {
            "image": ((n, 3, s, s), "uint8"),
            "object": ((n, s, s), "uint8"),
            "part": ((n, s, s), "uint8"),
            "leaf": ((n, MAX_OBJECTS), "uint8"),
            "box": ((n, MAX_OBJECTS, 4), "int16"),
            "facts": ((n, 4 + NUM_DICE), "uint8"),
        }

    def _render_all(self) -> Iterator[tuple[int, Arrays]]:
        run = max(1, min(512, 2**21 // self.size**2))
        for start in range(0, self.num_images, run):
            yield start, self._render(np.arange(start, min(start + run, self.num_images)))

    def _render(self, index: np.ndarray) -> Arrays:
        scenes = sample_scenes(picture_keys(self.seed, self.split, index))
        pictures = render(scenes, self.size)
        boxes, visible = _boxes(pictures.object)
        # Slivers of covered objects are nothing to be detected; they go from the maps too, so that all agree.
        seen = visible * 400 >= self.size**2
        seen[:, 0] = visible[:, 0] > 0
        gone = np.concatenate([np.zeros((len(index), 1), bool), ~seen], 1)
        hidden = np.take_along_axis(gone, pictures.object.reshape(len(index), -1).astype(np.intp), 1)
        hidden = hidden.reshape(pictures.object.shape)
        return {
            "image": pictures.image,
            "object": np.where(hidden, np.uint8(0), pictures.object),
            "part": np.where(hidden, np.uint8(0), pictures.part),
            "leaf": np.where(scenes.leaf < 0, _NO_OBJECT, scenes.leaf).astype(np.uint8),
            "box": np.where(seen[..., None], boxes, 0).astype(np.int16),
            "facts": facts_of(scenes),
        }


def _boxes(objects: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, MAX_OBJECTS, 4) x1 y1 x2 y2 around the pixels of every object, the last ones excluded, and their number."""
    size = objects.shape[-1]
    boxes, visible = [], []
    for slot in range(MAX_OBJECTS):
        mask = objects == slot + 1
        columns, rows = mask.any(1), mask.any(2)
        boxes.append(
            np.stack(
                [columns.argmax(1), rows.argmax(1), size - columns[:, ::-1].argmax(1), size - rows[:, ::-1].argmax(1)],
                -1,
            )
        )
        visible.append(mask.sum((1, 2)))
    return np.stack(boxes, 1), np.stack(visible, 1)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UserError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise UserError(f"{name} must be between {low} and {high}, got {value}")
    return int(value)


def contact_sheet(dataset: PictureDataset, num_images: int = 60, columns: int = 10, gap: int = 2) -> np.ndarray:
    """(H, W, 3) uint8: the first pictures of a dataset side by side; they must all have one size."""
    pictures = [np.asarray(dataset[i].image).transpose(1, 2, 0) for i in range(min(num_images, len(dataset)))]
    high, wide = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * (high + gap) - gap, columns * (wide + gap) - gap, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (high + gap), i % columns * (wide + gap)
        sheet[top : top + high, left : left + wide] = picture
    return sheet
