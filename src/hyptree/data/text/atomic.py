"""Folders that are whole or not there: filled under another name, synced, renamed."""

from __future__ import annotations

import errno
import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyptree.errors import UserError

_HOST = "".join(letter for letter in platform.node() if letter.isalnum()) or "host"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill; afterwards it is ``folder``, with every byte on disk.

    A kill at any moment leaves either no ``folder`` or a whole one. Of two processes that make the same, the first to
    finish wins, and the other's work, which is equal, is removed.

    Raises:
        UserError: it cannot be written, or the disk is full.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{_HOST}.{os.getpid()}.", dir=folder.parent))
        try:
            yield work
            for path in [*work.iterdir(), work]:
                _sync(path)
            _take_place(work, folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        why = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(f"cannot write {folder}: {why}; free some space, or name another cache folder") from error


def _sweep(folder: Path) -> None:
    """Remove what processes of this machine left when they were killed while making this folder."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{_HOST}.*.*"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _take_place(work: Path, folder: Path) -> None:
    os.chmod(work, 0o755)  # mkdtemp makes folders that nobody else may read
    try:
        os.rename(work, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _sync(path: Path) -> None:
    if path.is_file() or os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
