"""Pictures in folders, one folder per class; folders inside folders make a class tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hyptree.data.npz import name_some
from hyptree.data.pictures.decoding import (
    FilePictures,
    class_tree,
    find_split,
    is_picture,
    list_pictures,
)
from hyptree.errors import UserError


class FolderPictures(FilePictures):
    """Pictures under ``root/train/CLASS/`` and ``root/val/CLASS/`` (also valid, validation, test).

    A class is a folder that holds pictures itself. With folders inside folders (``train/animal/dog/``) the class is
    named by its path and the nesting is the tree. Both splits are numbered by the training folders.
    """

    def __init__(self, root: Path | str, split: str = "train"):
        root = Path(root)
        if not root.is_dir():
            raise UserError(f"there is no folder {root}; expected one with train/CLASS/ and val/CLASS/ in it")
        inside = sorted(path.name for path in root.iterdir() if path.is_dir())
        train, folder = root / find_split(inside, "train", root), root / find_split(inside, split, root)
        classes = sorted(_class_folders(train))
        if not classes:
            raise UserError(f"{train}: no pictures in it; expected {train.name}/CLASS/picture.jpg")
        number = {name: i for i, name in enumerate(classes)}
        names = classes if folder == train else sorted(_class_folders(folder))
        if unknown := [name for name in names if name not in number]:
            raise UserError(
                f"{folder} has the class {name_some(unknown)}, which {train} has not;"
                f" both must hold the same {len(classes)} classes"
            )
        files, labels = [], []
        for name in names:
            inside = [f"{name}/{path.name}" for path in list_pictures(folder / name)]
            files += inside
            labels += [number[name]] * len(inside)
        is_nested = any("/" in name for name in classes)
        tree = class_tree([["all", *name.split("/")] for name in classes]) if is_nested else None
        super().__init__(folder, files, labels, classes=classes, tree=tree)


def _class_folders(folder: Path, prefix: str = "") -> Iterator[str]:
    """Paths, relative to ``folder`` and with slashes, of the folders below that hold pictures themselves."""
    with os.scandir(folder) as entries:
        below = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    for name in below:
        with os.scandir(folder / name) as entries:  # stops at the first picture, folders may hold a million
            if any(is_picture(entry.name) for entry in entries):
                yield prefix + name
        yield from _class_folders(folder / name, f"{prefix}{name}/")
