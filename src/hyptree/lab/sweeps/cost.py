"""What a sweep will cost, before it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hyptree.lab.engine import Engine
from hyptree.lab.sweeps.grid import Grid
from hyptree.lab.theory import frequencies


@dataclass(frozen=True)
class Cost:
    """Of one part."""

    part: str
    num_models: int
    model_steps: int
    flops: float
    """Of the matrix products."""
    num_bytes: int
    """Parameters and moments, and the outputs of a chunk."""
    seconds: float
    """From a few steps of a few models, timed now."""


def cost(grid: Grid, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Cost:
    """The cost of a part of a sweep; trains one model per width for two steps to see how fast this machine is."""
    models = grid.models()
    rows = {}  # samples with an active feature; the others need no product
    for alpha, density in grid.groups():
        p = frequencies(grid.n, alpha, density, grid.dist)
        rows[alpha, density] = grid.batch * (1 - np.prod(1 - p))
    flops = grid.steps * sum(
        6 * rows[model.alpha, model.density] * grid.n * (model.m + 1 + (model.curvature > 0)) for model in models
    )
    few = replace(
        grid,
        alpha=grid.alpha[:1],
        density=grid.density[:1],
        gamma=grid.gamma[:1],
        curvature=grid.curvature[-1:],
        seeds=1,
    )
    engine = Engine(few, device, dtype)
    engine.advance()
    start = time.perf_counter()
    engine.advance()
    if engine.device.type != "cpu":
        torch.accelerator.synchronize()
    once = time.perf_counter() - start
    size = torch.empty(0, dtype=dtype).element_size()
    num_bytes = size * (sum(3 * grid.n * (model.m + 1) for model in models) + engine.chunk * grid.batch * grid.n)
    seconds = once * len(models) / len(few.models()) * grid.steps
    return Cost(grid.name, len(models), len(models) * grid.steps, float(flops), num_bytes, seconds)


def describe(costs: Sequence[Cost]) -> list[str]:
    """One line per part and their sum, for people."""
    lines = [
        f"{cost.part}: {cost.num_models:,} models, {cost.model_steps:,} model-steps, {cost.flops:.2g} flops, "
        f"{cost.num_bytes / 2**20:,.0f} MiB, about {cost.seconds:,.0f} s"
        for cost in costs
    ]
    return [*lines, f"together about {sum(cost.seconds for cost in costs):,.0f} s on this machine as it is now"]
