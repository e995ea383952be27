"""The same run gives the same bits: sums in a fixed order (and seeds by step, ``hyptree.data.seeding``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Sums in a fixed order wherever torch offers one: the same run gives the same bits on a GPU too.

    The gradient of fused attention is an exception, of which torch warns: it has a fixed order only where an operation
    without one is an error, which would end the runs of other models.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, benchmark = options.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    options.fill_uninitialized_memory = False  # costs a pass over every new tensor
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        options.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
