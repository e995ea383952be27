"""What the datasets of real pictures share: decoding that names what it cannot read, splits, class trees."""

from __future__ import annotations

import contextlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.npz import Packed, name_some
from hyptree.data.pictures.single import decode, rgb_pixels
from hyptree.data.sample import BadSample, Sample
from hyptree.errors import UserError

if TYPE_CHECKING:
    from hyptree.tree import Tree

SUFFIXES = frozenset([".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"])
"""Files that count as pictures, whatever the case."""

_ORIENTATION = 0x0112
"""EXIF's tag of how the camera was held; 1 is upright."""

_VERSION = 2
"""Part of the name of pixels that are kept: raised whenever the same file gives other ones."""

MAX_BYTES = 2**31
"""Pictures of a dataset that take more memory than this are not all held decoded."""


class Pictures(ABC):
    """A dataset of pictures; subclasses say how picture ``i`` of the files is read.

    Args:
        count: pictures in the files.
    """

    def __init__(
        self,
        count: int,
        *,
        classes: Sequence[str] = (),
        semantic_classes: Sequence[str] = (),
        box_classes: Sequence[str] = (),
        tree: Tree | None = None,
    ):
        self.classes, self.semantic_classes = tuple(classes), tuple(semantic_classes)
        self.box_classes, self.tree = tuple(box_classes), tree
        self._kept = np.arange(count)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Sample:
        return self._read(int(self._kept[index]))

    def read_picture(self, index: int) -> Sample:
        """The picture and its class; whatever else a subclass reads at extra cost may be left out."""
        return self[index]

    def limit(self, count: int | None, seed: int = 0) -> None:
        """Keeps ``count`` of the pictures, drawn by ``seed``, in their order; None and large counts keep all."""
        if count is not None and count < len(self):
            self._kept = np.sort(np.random.default_rng(seed).permutation(self._kept)[:count])

    @abstractmethod
    def _read(self, i: int) -> Sample:
        """The picture at place ``i`` of all that are there."""


class MemoryPictures(Pictures):
    """Pictures with one label each that are held in memory, as pixels or as packed files.

    Args:
        files: (n, 3, H, W) uint8, or the packed files.
        labels: (n,) class of each.
        prefix: what the ids start with; a running number follows.
    """

    def __init__(
        self,
        files: np.ndarray | Packed,
        labels: np.ndarray,
        classes: Sequence[str],
        *,
        prefix: str,
        tree: Tree | None = None,
    ):
        super().__init__(len(files), classes=classes, tree=tree)
        self._files, self._labels, self._prefix = files, labels.astype(np.int64), prefix
        self._store: Path | None = None

    def _read(self, i: int) -> Sample:
        id = f"{self._prefix}/{i}"
        pixels = self._files[i]
        image = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else decode_image(pixels, id)
        return Sample(image, id, label=int(self._labels[i]))

    def labels(self) -> np.ndarray:
        """(n,) int64 class of every picture."""
        return self._labels[self._kept]

    def images(self) -> np.ndarray | None:
        """(n, 3, H, W) uint8 of all pictures, decoded once; None when they differ in size or would fill the memory.

        Raises:
            BadSample: one of them cannot be decoded.
        """
        return self._decoded

    def store(self, folder: Path) -> None:
        """Keep the pixels of packed files below ``folder``, where other runs find them instead of decoding again.

        Decodes now what is not there yet. Pictures that ``images`` cannot give stay files.
        """
        self._store = folder
        with contextlib.suppress(BadSample):
            self.images()

    @cached_property
    def _decoded(self) -> np.ndarray | None:
        if isinstance(self._files, np.ndarray):
            return self._files if len(self._kept) == len(self._files) else self._files[self._kept]
        if len(self) == 0:
            return None
        shape = (len(self), *self[0].image.shape)
        if math.prod(shape) > MAX_BYTES:
            return None
        try:
            if self._store is None:
                pixels = np.empty(shape, np.uint8)
                for i, image in self._decode_all(shape[1:]):
                    pixels[i] = image
                return pixels
            from hyptree.data.world.store import load_or_build

            rows = ((i, {"image": image[None]}) for i, image in self._decode_all(shape[1:]))
            folder = self._store / f"v{_VERSION}-{self._files.fingerprint(self._kept)}-{len(self)}"
            return load_or_build(folder, {"image": (shape, "uint8")}, lambda: rows)["image"]
        except _Uneven:
            return None

    def _decode_all(self, shape: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        for i in range(len(self)):
            image = self[i].image.numpy()
            if image.shape != shape:
                raise _Uneven
            yield i, image


class FilePictures(Pictures):
    """Pictures with one label each in files of their own.

    Args:
        root: folder of the split.
        files: their paths below it.
        labels: class of each.
    """

    def __init__(self, root: Path, files: Sequence[str], labels: Sequence[int], **options: Any):
        super().__init__(len(files), **options)
        self._root, self._files, self._labels = root, files, np.array(labels, np.int64)

    def _read(self, i: int) -> Sample:
        id = f"{self._root.name}/{self._files[i]}"
        return Sample(decode_image(self._root / self._files[i], id), id, label=int(self._labels[i]))

    def labels(self) -> np.ndarray:
        """(n,) int64 class of every picture, without reading one."""
        return self._labels[self._kept]


class _Uneven(Exception):
    """A picture has another size than the first one."""


# ------------------------------------------------------------------------------------------------------------ decoding


def decode_image(source: Path | bytes, id: str, size: tuple[int, int] | None = None) -> Tensor:
    """(3, H, W) uint8 RGB of a file or its bytes; ``BadSample`` when it is missing, truncated or no picture.

    Args:
        size: (height, width) of its labels, where it has labels of pixels or boxes. A picture that the camera marked
            as turned then has to tell by its shape whether they were drawn on it as it is stored or as it is seen.
    """

    def pixels(picture: Any) -> np.ndarray:
        turned = picture.getexif().get(_ORIENTATION, 1)
        if size is not None and turned in range(2, 9):
            if turned < 5 or size[0] == size[1]:
                raise ValueError(f"labels may be for it turned or not (EXIF {turned}); save it upright")
            stored = picture.size if picture.format == "TIFF" else picture.size[::-1]  # of TIFF PIL gives that seen
            if size == stored:
                del picture.getexif()[_ORIENTATION]
        return rgb_pixels(picture)

    return torch.from_numpy(_decode(source, id, pixels)).permute(2, 0, 1).contiguous()


def decode_labels(source: Path | bytes, id: str) -> Tensor:
    """(H, W) uint8 of a label map: the stored numbers, palettes left alone."""
    values = _decode(source, id, _stored_numbers)
    if values.ndim != 2 or values.dtype not in (np.uint8, np.uint16, np.int32, np.bool_):
        raise BadSample(id, f"a label map has one number from 0 to 255 per pixel, found {values.dtype} {values.shape}")
    if values.max(initial=0) > 255 or values.min(initial=0) < 0:
        raise BadSample(id, f"a label map has numbers from 0 to 255, found {values.min()} to {values.max()}")
    return torch.from_numpy(values.astype(np.uint8))


def _stored_numbers(picture: Any) -> np.ndarray:
    """The numbers of a label map; ``ValueError`` where PIL would give others."""
    if picture.format == "JPEG":
        raise ValueError("JPEG changes the numbers of a label map; draw it again as PNG")
    how = str(picture.tile)  # before the tags are asked for, which may read the picture
    if picture.getexif().get(_ORIENTATION, 1) != 1:
        raise ValueError("a label map that is marked as turned may be meant either way; save it upright")
    if any(scaled in how for scaled in ("'L;", "'1;", "'ppm")):
        raise ValueError("2 or 4 bits of grey, and 0 for white, are read as other numbers; save it with 8 bits")
    return np.array(picture)


def _decode(source: Path | bytes, id: str, take: Callable[[Any], np.ndarray]) -> np.ndarray:
    try:
        return decode(source, take)
    except ValueError as error:
        raise BadSample(id, str(error)) from error


# -------------------------------------------------------------------------------------------------------- names, trees


def find_split(names: Iterable[str], split: str, where: Path | str) -> str:
    """The name under which ``split`` is there: its own, or what others call it."""
    others = {
        "train": ("train", "trainval", "training"),
        "val": ("val", "valid", "validation", "test", "testing"),
        "test": ("test", "testing", "val", "valid", "validation"),
    }
    if split not in others:
        raise ValueError(f"split must be train, val or test, got {split!r}")
    names = list(names)
    for name in others[split]:
        if name in names:
            return name
    raise UserError(f"{where}: expected {' or '.join(others[split])}, found {name_some(names) or 'nothing'}")


def is_picture(name: str) -> bool:
    """Whether a file of this name counts; hidden ones (such as the ._ files of archives from a Mac) do not."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def list_pictures(folder: Path) -> list[Path]:
    """The picture files of a folder, sorted."""
    return sorted(path for path in folder.iterdir() if is_picture(path.name))


def class_tree(paths: Sequence[Sequence[str]]) -> Tree:
    """The tree of classes given by their paths from the root, each ending in the class itself.

    Two nodes are the same when their whole paths are. The classes are the first nodes, in order.
    """
    from hyptree.tree import Tree

    number = {tuple(path): i for i, path in enumerate(paths)}
    if len(number) < len(paths):
        raise ValueError("two classes have the same path")
    for path in paths:
        for length in range(len(path) - 1, 0, -1):
            number.setdefault(tuple(path[:length]), len(number))
    parent = [number[node[:-1]] if len(node) > 1 else -1 for node in number]
    return Tree(parent, label=[node[-1] for node in number])
