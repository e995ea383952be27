"""Devices by name, and how many threads of a CPU find a core of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hyptree.errors import UserError


def find_device(name: str) -> torch.device:
    """The device with this name, or one line on why it cannot be used."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def free_threads(processes: int = 1) -> int:
    """CPU threads for each of so many processes that start now: no more than cores are free, at least one.

    Threads wait for each other at every operation, so one that finds no core holds up all: on two cores that others
    keep busy two threads train at a tenth of the speed of one. Who sets ``OMP_NUM_THREADS`` is taken at their word.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    cores = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    free = round(min(ours, cores - busy_cores(), quota()))
    return max(1, min(torch.get_num_threads(), free // processes))


@contextmanager
def cpu_threads(wanted: int | None = None) -> Iterator[None]:
    """Within it, torch uses so many CPU threads, by default :func:`free_threads`."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or free_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def busy_cores() -> float:
    """Cores of the machine that others keep busy.

    The mean load of the last minute, unless a quarter of a second in which this process sleeps shows that what made it
    is over.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return 0.0
    if load < 0.5:
        return load
    before = _idle_and_all()
    time.sleep(0.25)
    idle, total = (now - then for now, then in zip(_idle_and_all(), before, strict=True))
    return load if total <= 0 else min(load, (1 - idle / total) * (os.cpu_count() or 1))


def _idle_and_all() -> tuple[int, int]:
    """Time of all cores so far, in the kernel's ticks: idle or waiting for a disk, and altogether; zeros elsewhere."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)


def quota(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that a container may use, by the cgroups of this process; infinity where they do not say."""
    found = float("inf")
    try:
        groups = [line.split(":", 2)[1:] for line in proc.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return found
    for kinds, name in groups:
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / "cpu" if kinds else root  # version 1 has a tree for each kind, version 2 one for all
        place = top / name.lstrip("/")
        for folder in (place, *place.parents):
            try:
                if kinds:
                    words = [(folder / f"cpu.cfs_{word}_us").read_text() for word in ("quota", "period")]
                else:
                    words = (folder / "cpu.max").read_text().split()
                if int(words[0]) > 0:
                    found = min(found, int(words[0]) / int(words[1]))
            except (OSError, ValueError, IndexError):  # not here, or "max": no limit
                pass
            if folder == top:
                break
    return found
