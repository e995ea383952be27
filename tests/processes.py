"""Processes that are copies of one that has imported torch and what a training needs: seconds less for each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

PRELOAD = ["accelerate", "hypothesis", "hyptree.data.loader", "hyptree.lm", "hyptree.train.loop", "pytest"]
PRELOAD += ["tests.train.tiny", "timm.optim", "torch._inductor.config", "torch.distributed.fsdp"]


def forkserver() -> ForkServerContext:
    """Where to start such processes; of all calls the first decides what is imported, so there is one list."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_in_two(worker: Callable[..., None], *args: Any) -> None:
    """Call ``worker(rank, *args)`` in two processes; what one of them raises is raised here."""
    forkserver()
    torch.multiprocessing.start_processes(worker, args, nprocs=2, start_method="forkserver")
