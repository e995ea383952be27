"""Devices by name, and how many threads of a CPU find a core of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hyptree.errors import UserError


def find_device(name: str) -> torch.device:
    """The device with this name, or one line on why it cannot be used; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def free_threads(processes: int | None = None) -> int:
    """CPU threads for each of so many processes that start now: no more than cores are free, at least one.

    Threads wait for each other at every operation, so one that finds no core holds up all: on two cores that others
    keep busy two threads train at a tenth of the speed of one. Busy is the mean load of the last minute, unless a
    quarter of a second in which this process sleeps shows that what made it is over. Who sets ``OMP_NUM_THREADS`` is
    taken at their word.

    Args:
        processes: by default those that torchrun started on this machine.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    import psutil

    cores = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    busy = psutil.getloadavg()[0]
    if busy >= 0.5:
        busy = min(busy, psutil.cpu_percent(0.25) / 100 * cores)
    free = round(min(ours, cores - busy, quota()))
    return max(1, min(torch.get_num_threads(), free // (processes or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


@contextmanager
def cpu_threads(wanted: int | None = None) -> Iterator[None]:
    """Within it, torch uses so many CPU threads, by default :func:`free_threads`."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or free_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that a container may use, as its cgroup says inside it; infinity where it does not."""
    try:
        if (root / "cpu.max").exists():
            most, period = (root / "cpu.max").read_text().split()
        else:  # version 1
            most, period = ((root / f"cpu/cpu.cfs_{word}_us").read_text() for word in ("quota", "period"))
        return int(most) / int(period) if int(most) > 0 else float("inf")
    except (OSError, ValueError):  # not here, or "max": no limit
        return float("inf")
