"""Data sets in one .npz file: arrays, and files of any kind one after the other; numpy alone."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.errors import UserError


class Packed:
    """Files one after the other in one array of bytes; file i is ``data[offsets[i]:offsets[i + 1]]``."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray, where: str):
        is_row = offsets.ndim == 1 and offsets.dtype.kind in "iu"
        numbers = offsets.astype(np.int64) if is_row else np.empty(0, np.int64)
        if len(numbers) < 1 or numbers[0] < 0 or (np.diff(numbers) < 0).any() or numbers[-1] > len(data):
            raise UserError(f"{where}: the offsets must rise from 0 to at most {len(data)}, the bytes there are")
        self._data, self._offsets = data, numbers

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> bytes:
        return self._data[self._offsets[i] : self._offsets[i + 1]].tobytes()

    def fingerprint(self, kept: np.ndarray) -> str:
        """A name that stands for the content of these files, in this order."""
        content = hashlib.sha256(self._data.tobytes())
        for numbers in (self._offsets, kept):
            content.update(numbers.astype(np.int64).tobytes())
        return content.hexdigest()[:24]


def check_labels(labels: np.ndarray, num_classes: int, where: str) -> np.ndarray:
    """The labels as int64, or a ``UserError`` when one is not the number of a class."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{where} must be whole numbers, one per picture, got {labels.dtype} {labels.shape}")
    if len(labels) and (labels.min() < 0 or labels.max() >= num_classes):
        raise UserError(
            f"{where} go from {labels.min()} to {labels.max()},"
            f" expected 0 to {num_classes - 1} for the {num_classes} classes"
        )
    return labels.astype(np.int64)


def check_equal(what: str, counts: Mapping[str, int]) -> None:
    """``UserError`` unless all counts are the same."""
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise UserError(f"{what}: expected as many of each, found {each}")


def find_npz(root: Path) -> Path | None:
    """The .npz file that ``root`` is, or the only one in that folder; None when there is none."""
    if not root.exists():
        raise UserError(f"there is no {root}; root must be the folder or file of the pictures")
    if root.is_file():
        if root.suffix != ".npz":
            raise UserError(f"{root} is a file of another kind; expected a folder or an .npz file")
        return root
    files = sorted(root.glob("*.npz"))
    if len(files) > 1:
        raise UserError(f"{root} holds {len(files)} .npz files ({name_some(p.name for p in files)}); name one of them")
    return files[0] if files else None


def open_npz(path: Path) -> Any:
    """The archive, opened; arrays are read when they are asked for by ``take``."""
    # numpy leaves a broken archive open, so look first. The table of contents comes last: a cut file has none.
    if not zipfile.is_zipfile(path):
        raise UserError(f"cannot read {path}: no .npz archive, or cut off")
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def take(archive: Any, key: str, path: Path) -> np.ndarray:
    """One array of an archive, or a ``UserError`` that says which keys there are."""
    if key not in archive:
        raise UserError(f"{path}: no array {key!r} in it, found {name_some(archive.files) or 'nothing'}")
    try:
        return archive[key]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot read {key!r}: {error}") from error


def take_packed(archive: Any, data: str, offsets: str, path: Path) -> Packed:
    """Packed files of an archive."""
    return Packed(take(archive, data, path), take(archive, offsets, path), f"{path}, {offsets}")


def name_some(names: Iterable[str], at_most: int = 8) -> str:
    """A list for a message: ``a, b, c and 12 more``."""
    names = list(names)
    shown = ", ".join(names[:at_most])
    return f"{shown} and {len(names) - at_most} more" if len(names) > at_most else shown
