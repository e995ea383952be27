"""The processes of a sweep: one, or several under torchrun that share the models and meet only at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hyptree.errors import UserError
from hyptree.lab.sweeps.grid import Grid, Model


@dataclass(frozen=True)
class Ranks:
    """Who we are among the processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process shows progress and writes the tables."""
        return self.rank == 0

    @property
    def suffix(self) -> str:
        """What tells this process's files from the others'; empty for one process."""
        return f".{self.rank}-of-{self.size}" if self.size > 1 else ""

    def share(self, grid: Grid) -> list[Model]:
        """The models of this process: an even share of every width, since a model's cost is that of its width."""
        models_of_rank = []
        for m in grid.m:
            models = [model for model in grid.models() if model.m == m]
            if len(models) < self.size:
                raise UserError(
                    f"{self.size} processes need {self.size} models or more of every width, part {grid.name} has "
                    f"{len(models)}; start fewer processes"
                )
            models_of_rank += models[len(models) * self.rank // self.size : len(models) * (self.rank + 1) // self.size]
        return models_of_rank

    def device(self, device: torch.device | str) -> torch.device:
        """This process's device of the kind that was asked for."""
        device = torch.device(device)
        if self.size > 1 and device.type != "cpu" and str(device) == device.type:
            return torch.device(device.type, self.local_rank)
        return device

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def processes() -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Ranks()
        return
    is_ours = not dist.is_initialized()
    if is_ours:  # on the CPU, whatever trains: they only wait for each other, and the slowest may take hours
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Ranks(rank, size, int(os.environ.get("LOCAL_RANK", 0)))
    finally:
        if is_ours:
            dist.destroy_process_group()
