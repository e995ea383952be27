"""The same run gives the same bits: seeds by step, sums in a fixed order."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hyptree.data.seeding import mix_bits


def seed_all(*words: int) -> None:
    """Set the global generators of Python, numpy and torch (every device)."""
    bits = mix_bits(*words)
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)  # noqa: NPY002  (timm and others draw from the global one)
    # Without a GPU torch would keep the seed for one, with a trace of the stack: up to half a millisecond per step.
    # With one it must, in use or not yet: what is drawn there first has to follow from the seed.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(bits & (2**63 - 1))


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
