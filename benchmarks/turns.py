"""Benchmarks that get ready at the same time on one machine and are timed one after the other.

Compiling a model takes minutes of the host and nothing of the GPU. ``HYPTREE_TURNS=FOLDER:COUNT`` lets COUNT benchmarks
go together: each builds and checks its contenders, waits until all are ready (or have ended), and holds the machine
alone while it is timed. What one builds after its first turn runs beside the others' times, so give each one table.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyptree.errors import UserError

VARIABLE = "HYPTREE_TURNS"
PATIENCE = 900.0
"""Seconds that a benchmark waits for the others at most: one of them may have been killed."""


@contextmanager
def turn() -> Iterator[None]:
    """Inside, no other of the benchmarks that take turns is being timed; without the variable, nothing happens."""
    setting = os.environ.get(VARIABLE)
    if not setting:
        yield
        return
    import fcntl  # not on Windows

    folder, count = _read(setting)
    _say_ready(folder)
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob("*.ready"))) < count and time.monotonic() < end:
        time.sleep(0.05)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(setting: str) -> tuple[Path, int]:
    folder, _, count = setting.rpartition(":")
    if not folder or not count.isdigit() or int(count) < 1:
        raise UserError(f"{VARIABLE} is {setting!r}; expected FOLDER:COUNT, for example /tmp/turns:3")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder), int(count)


def _say_ready(folder: Path) -> None:
    (folder / f"{os.getpid()}.ready").touch()


def take_part() -> None:
    """Count as ready when this process ends, so that one which fails on the way keeps nobody waiting."""
    if setting := os.environ.get(VARIABLE):
        atexit.register(_say_ready, _read(setting)[0])
