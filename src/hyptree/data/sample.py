"""The one sample type that every dataset of pictures gives, and the error for a sample that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from hyptree.tree import Tree

IGNORE = 255
"""Pixels of ``Sample.semantic`` and ``Sample.parts`` that count nowhere."""


@dataclass
class Sample:
    """One picture with whatever is known about it; what a dataset does not have is None (or empty)."""

    image: Tensor
    """(3, H, W) uint8, RGB."""
    id: str
    """Stable and unique in its dataset; messages name it."""
    label: int | None = None
    """Class of the picture."""
    semantic: Tensor | None = None
    """(H, W) uint8 class of every pixel, ``IGNORE`` where it does not count."""
    parts: Tensor | None = None
    """(H, W) uint8 part of an object every pixel belongs to, 0 for none."""
    boxes: Tensor | None = None
    """(N, 4) float32, x1 y1 x2 y2 in pixels."""
    box_labels: Tensor | None = None
    """(N,) int64 from 1; 0 is kept for the background, as torchvision's detectors want it."""
    masks: Tensor | None = None
    """(N, H, W) bool, one per box."""
    crowd: Tensor | None = None
    """(N,) bool, COCO's iscrowd; None means none is."""
    captions: tuple[str, ...] = ()
    """From general to specific."""
    contradictions: tuple[str, ...] = ()
    """One for each caption: as specific, but wrong."""


def by(shape: Sequence[int]) -> str:
    """``240x180``, width first as people say it, of a shape that ends with height and width."""
    return f"{shape[-1]}x{shape[-2]}"


class PictureDataset(Protocol):
    """What the training loop may ask of a dataset. Names are empty for what the dataset does not have."""

    classes: tuple[str, ...]
    """Names of ``Sample.label``."""
    semantic_classes: tuple[str, ...]
    """Names of ``Sample.semantic``."""
    box_classes: tuple[str, ...]
    """Names of ``Sample.box_labels``, the background left out: label k is ``box_classes[k - 1]``."""
    tree: Tree | None
    """Hierarchy above ``classes``: its first ``len(classes)`` nodes are the classes, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Raises ``BadSample`` when this one cannot be read; the loader counts it and goes on."""
        ...


class BadSample(Exception):
    """A sample that cannot be read. One among thousands must not end a run; the loader decides."""

    def __init__(self, id: str, why: str):
        super().__init__(id, why)
        self.id = id
        self.why = why

    def __str__(self) -> str:
        return f"{self.id}: {self.why}"
