"""Small data for the tests of this folder: files on disk and datasets in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hyptree.data.sample import BadSample, Sample


def pixels(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8, smooth enough that JPEG keeps it within a few levels."""
    coarse = rng.integers(0, 256, (3, 3, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR))


def write_picture(path: Path, values: np.ndarray) -> np.ndarray:
    """Writes (H, W, 3) or (H, W) uint8 and gives it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"quality": 95} if path.suffix.lower() in (".jpg", ".jpeg") else {}
    Image.fromarray(values).save(path, **options)
    return values


def truncate(path: Path) -> None:
    """Cuts the end of a file off, as a full disk or a broken download does."""
    data = path.read_bytes()
    path.write_bytes(data[:-40])


class InMemory:
    """Random labelled pictures; the ones in ``bad`` cannot be read. Counts what it was asked for."""

    semantic_classes: tuple[str, ...] = ()
    box_classes: tuple[str, ...] = ()
    tree = None
    classes = ("a", "b", "c")

    def __init__(self, count: int, size: int = 8, bad: frozenset[int] = frozenset(), seed: int = 0):
        rng = np.random.default_rng(seed)
        self.pixels = rng.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
        self.numbers = rng.integers(0, 3, count)
        self.bad = bad
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Sample:
        self.asked.append(index)
        if index in self.bad:
            raise BadSample(f"picture-{index}", "truncated")
        return Sample(torch.from_numpy(self.pixels[index]), f"picture-{index}", label=int(self.numbers[index]))


class InArrays(InMemory):
    """The same, offering all pictures at once."""

    def images(self) -> np.ndarray:
        if self.bad:
            raise BadSample(f"picture-{min(self.bad)}", "truncated")
        return self.pixels

    def labels(self) -> np.ndarray:
        return self.numbers


def stack(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Pictures, labels and names of a batch."""
    labels = torch.tensor([-1 if sample.label is None else sample.label for sample in samples])
    return torch.stack([sample.image for sample in samples]), labels, [sample.id for sample in samples]


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Fails when what happens inside moves a global generator."""

    def states() -> tuple:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    yield
    assert states() == before
