"""Hand-made outputs of a Hi-Mapper: what the plots need, with values that are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hyptree.geometry import lorentz


def fake_output(
    seed: int,
    *,
    num_leaves: int = 8,
    depth: int = 3,
    dims: int = 6,
    grid: tuple[int, int] = (5, 7),
    batch: int = 2,
    c: float | None = 0.7,
    sharp: float = 3.0,
) -> Any:
    """Random points and maps in the shapes of ``HiMapperOutput``; ``sharp=0`` makes every map even."""
    g = torch.Generator().manual_seed(seed)
    sizes = [num_leaves // 2**k for k in range(depth)]
    maps = [(sharp * torch.randn(batch, n, grid[0] * grid[1], generator=g)).softmax(-1) for n in sizes]
    tangent = [1.5 * torch.randn(batch, n, dims, generator=g) for n in sizes]
    return SimpleNamespace(
        maps=[level.unflatten(-1, grid) for level in maps],
        hyperbolic=tangent if c is None else [lorentz.expmap0(v, c) for v in tangent],
        curvature=None if c is None else torch.tensor(c),
    )
