"""The pictures of a split as arrays, kept in a folder or in memory.

A stored split is a folder of plain ``.npy`` files with a ``manifest.json`` of their checksums. It is written under
another name and renamed when complete, so a reader sees all of it or nothing; of two processes that build the same
one, the first to finish wins and the other uses its work.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hyptree.errors import UserError
from hyptree.files import new_folder

Arrays = dict[str, np.ndarray]
_MANIFEST = "manifest.json"
_BLOCK = 1 << 24


def load_or_build(
    folder: Path, layout: dict[str, tuple[tuple[int, ...], str]], build: Callable[[], Iterator[tuple[int, Arrays]]]
) -> Arrays:
    """The arrays in ``folder``, rendered first if it does not exist or is damaged.

    Args:
        folder: of this split; its parents are made.
        layout: shape and dtype of every array.
        build: gives (position of the first row, rows of every array), in any order, all rows once.

    Raises:
        UserError: the folder cannot be written or the disk is full.
    """
    stored = _open(folder, layout)
    if isinstance(stored, str):
        if stored:
            print(f"{folder}: {stored}; rendering it again", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
        size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
        advice = f"set HYPTREE_CACHE to another folder; {size / 2**20:.0f} MiB are wanted"
        with new_folder(folder, "the pictures to ", advice) as work:
            _write(work, layout, build)
        stored = _open(folder, layout)
    if isinstance(stored, str):
        raise UserError(f"{folder}: {stored or 'gone'} right after it was written; is the disk sound?")
    return stored


def _open(folder: Path, layout: dict[str, tuple[tuple[int, ...], str]]) -> Arrays | str:
    """The arrays, mapped into memory, or what is wrong with them; an empty string where there is nothing."""
    if not folder.exists():
        return ""
    try:
        sums = json.loads((folder / _MANIFEST).read_text())
        arrays: Arrays = {}
        for name, (shape, dtype) in layout.items():
            # Copy on write: nobody can change the file, and torch takes the array without a complaint.
            array = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
            if array.shape != shape or array.dtype != np.dtype(dtype):
                return f"{name}.npy holds {array.dtype} {array.shape} where {dtype} {shape} is expected"
            if _checksum(array) != sums.get(name):
                return f"{name}.npy is damaged (its checksum differs)"
            arrays[name] = array.view(np.ndarray)  # memmap's own indexing is several times slower
    except (OSError, ValueError, EOFError, AttributeError) as error:
        return f"cannot be read ({error.__class__.__name__})"
    return arrays


def _write(
    work: Path, layout: dict[str, tuple[tuple[int, ...], str]], build: Callable[[], Iterator[tuple[int, Arrays]]]
) -> None:
    arrays = {}
    for name, (shape, dtype) in layout.items():
        arrays[name] = np.lib.format.open_memmap(work / f"{name}.npy", mode="w+", dtype=np.dtype(dtype), shape=shape)
        # A memory map over a full disk would end the process with a bus error: ask for the space first.
        with open(work / f"{name}.npy", "r+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(os.fstat(file.fileno()).st_size, 1))
    for start, rows in build():
        for name, values in rows.items():
            arrays[name][start : start + len(values)] = values
    for array in arrays.values():
        array.flush()
    (work / _MANIFEST).write_text(json.dumps({name: _checksum(array) for name, array in arrays.items()}))


def _checksum(array: np.ndarray) -> int:
    data, total = array.reshape(-1).view(np.uint8), 0
    for start in range(0, len(data), _BLOCK):
        total = zlib.crc32(data[start : start + _BLOCK].data, total)
    return total
