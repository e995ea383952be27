"""Pictures in one .npz file, CIFAR-like: plain arrays of pixels, or the bytes of JPEG files one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.npz import Packed, check_equal, check_labels, find_npz, name_some, open_npz, take, take_packed
from hyptree.data.pictures.decoding import MemoryPictures, class_tree, find_split
from hyptree.errors import UserError

if TYPE_CHECKING:
    from hyptree.tree import Tree

_VEHICLES = ("airplane", "automobile", "ship", "truck")
_ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")


class ArrayPictures(MemoryPictures):
    """Labelled pictures of an .npz file (or of a folder with one such file).

    For each split the file holds either ``{split}_images`` (n, H, W, 3), (n, 3, H, W) or (n, H, W) uint8 and
    ``{split}_labels``, or ``{split}_jpeg`` (bytes of all files), ``{split}_offsets`` (n + 1) and ``{split}_label``.
    ``class_names`` and ``class_paths`` (``animal/dog``, from which the tree is made) may come with them. CIFAR-10 is
    known by its names and gets the tree of animals and vehicles.
    """

    def __init__(self, root: Path | str, split: str = "train"):
        path = find_npz(Path(root))
        if path is None:
            raise UserError(f"{root} holds no .npz file; expected one with train_images and train_labels")
        with open_npz(path) as archive:
            kinds = {"_images": "_labels", "_jpeg": "_label"}
            splits = [key.removesuffix(kind) for kind in kinds for key in archive.files if key.endswith(kind)]
            if not splits:
                raise UserError(
                    f"{path}: expected train_images and train_labels, or train_jpeg, train_offsets and train_label;"
                    f" found {name_some(archive.files) or 'nothing'}"
                )
            name = find_split(splits, split, path)
            kind = next(kind for kind in kinds if f"{name}{kind}" in archive)
            files: np.ndarray | Packed
            if kind == "_jpeg":
                files = take_packed(archive, f"{name}_jpeg", f"{name}_offsets", path)
            else:
                files = _channels_first(take(archive, f"{name}_images", path), f"{path}, {name}_images")
            labels = take(archive, f"{name}{kinds[kind]}", path)
            check_equal(f"{path}, split {name}", {"pictures": len(files), "labels": len(labels)})
            classes = _class_names(archive, kinds, path)
            labels = check_labels(labels, len(classes), f"{path}: {name}{kinds[kind]}")
            tree = _tree(archive, classes, path)
        super().__init__(files, labels, classes, prefix=f"{path.stem}/{name}", tree=tree)


def _channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """(n, 3, H, W) uint8 from any of the usual layouts."""
    if images.dtype != np.uint8:
        raise UserError(f"{where} must be uint8, 0 to 255, got {images.dtype}")
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise UserError(f"{where} must have the shape (n, H, W, 3), (n, 3, H, W) or (n, H, W), got {images.shape}")
    if images.shape[1] == 1:
        images = np.repeat(images, 3, 1)
    return np.ascontiguousarray(images)


def _class_names(archive: Any, kinds: dict[str, str], path: Path) -> list[str]:
    """The names in the file, else the numbers up to the largest training label."""
    if "class_names" in archive:
        return [str(name) for name in take(archive, "class_names", path).tolist()]
    train = [f"train{labels}" for labels in kinds.values() if f"train{labels}" in archive]
    if not train:
        raise UserError(f"{path}: expected class_names, or training labels to count the classes by")
    labels = take(archive, train[0], path)
    return [str(i) for i in range(int(labels.max(initial=-1)) + 1)]


def _tree(archive: Any, classes: list[str], path: Path) -> Tree | None:
    if "class_paths" in archive:
        paths = [str(name).split("/") for name in take(archive, "class_paths", path).tolist()]
        check_equal(str(path), {"class_paths": len(paths), "classes": len(classes)})
        return class_tree([["all", *parts] for parts in paths])
    if set(classes) == {*_ANIMALS, *_VEHICLES}:
        return class_tree([["thing", "vehicle" if name in _VEHICLES else "animal", name] for name in classes])
    return None
