"""Both levels of clustering of a map, with the norm and the projection behind them: ``cluster_linear`` is the door.

``reference`` holds the definition of the clustering, ``kernels`` what runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hyptree.ops.backend import choose
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.cluster_map import kernels, reference
from hyptree.ops.cluster_map.reference import Clustered, Level
from hyptree.ops.map_norm import MapNorm
from hyptree.ops.project_levels import project_levels
from hyptree.ops.windows import Cut, Windows, spread

__all__ = ["Clustered", "Level", "cluster_linear", "kernels", "reference"]


def cluster_linear(
    both: Tensor, windows: Windows, num_heads: int, patch: Level, window: Level | None, norm: Any, proj: Any,
    factor: Tensor | None = None, residual: Tensor | None = None, *, seen: list[Clustered] | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``residual + factor * proj(norm([g_window, g_patch]))`` of what the two levels of clustering give.

    Args:
        both: (B, H, W, 2 heads d), points then values.
        windows: how the map is cut. patch, window: what the levels compare with; no window level is None.
        norm: a MapNorm, or any other layer, which is called. proj: a linear layer, whose weight is read if it is bare.
        factor: (n,), inside the projection. residual: (B, H, W, n), a map that the result is added to.
        seen: what each level clustered is appended here; there are no kernels for that.
        backend: "auto" takes a kernel for each level that has one on this device, "torch" none, "triton" fails where a
            kernel cannot run.

    Returns:
        (B, H, W, n). Within autocast it may be float32 with a factor, since what it is added to is.
    """
    sums: list[Tensor] = []
    dim, cells = both.shape[-1] // (2 * num_heads), (0, 0) if window is None else window.cells
    sizes = (*windows.size, *windows.grid, *windows.window, *windows.offset)
    cut = Cut(*sizes, *patch.cells, num_heads, dim, *cells)
    shared, takes_patches = None, False
    if seen is None and patch.alpha is not None and patch.beta is None and patch.c is None:
        takes_patches = choose(backend, both, kernels.patch_unsupported(both, cut)) == "triton"
    if takes_patches and patch.alpha is not None:
        c = _curvature(both, cut, window, backend)
        cut = cut if c else cut._replace(cells_y=0, cells_x=0)
        own, parts, *sums = kernels.cluster_patch(both, patch.alpha, patch.bias, cut)
        if window is not None and c:
            mixed, others = kernels.cluster_window(parts, window.alpha, window.bias, cut, c, window.clip)
            shared, sums = mixed.unflatten(1, windows.grid), [*sums, others]
        elif window is not None:
            shared = reference.cluster_windows(both, both, windows, num_heads, window).mixed
            sums = [*sums, reference.moments(shared, windows)]
    else:
        of_patches, coarse = reference.cluster_patches(both, windows, num_heads, patch)
        levels, own = [of_patches], of_patches.mixed
        if window is not None:
            levels.append(reference.cluster_windows(both, coarse, windows, num_heads, window))
            shared = levels[1].mixed
        if seen is not None:
            seen.extend(levels)
    called = [layer for layer, kind in ((proj, nn.Linear), (norm, MapNorm)) if not is_bare(layer, kind)]
    if called and not (called == [norm] and is_bare(norm, nn.Identity)):
        report_unfused("cluster_linear", called[0])
        y: Tensor = proj(norm(own if shared is None else torch.cat([spread(shared, windows), own], -1)))
        y = y if factor is None else y * factor
        return y if residual is None else residual + y
    if not sums and type(norm) is MapNorm:
        sums = [reference.moments(own), *([] if shared is None else [reference.moments(shared, windows)])]
    return project_levels(own, shared, sums, windows, norm, proj, factor, residual, backend=backend)


def _curvature(both: Tensor, cut: Cut, level: Level | None, backend: str) -> float | None:
    """``c`` of the window level where that runs as a kernel, else None."""
    if level is None or level.beta is not None or not cut.has_simple_cells():
        return None
    c = 1.0 if level.alpha is None else level.c  # of no account where there is one centre
    if not isinstance(c, float):  # learned, or cosines
        return None
    return c if choose(backend, both, kernels.window_unsupported(both, cut, c, level.clip)) == "triton" else None
