"""Both levels of clustering of a map, with the norm and the projection behind them: ``cluster_linear`` is the door.

``reference`` holds the definition of the clustering, ``kernels`` what runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.backend import choose
from hyptree.ops.bare import is_bare, report_unfused
from hyptree.ops.cluster_map import kernels, reference
from hyptree.ops.cluster_map.reference import Clustered, Level
from hyptree.ops.linear import scaled_linear
from hyptree.ops.map_norm import MapNorm
from hyptree.ops.windows import Cut, Windows, add_to_windows, spread

__all__ = ["Clustered", "Level", "cluster_linear", "kernels", "reference"]


def cluster_linear(
    both: Tensor, windows: Windows, num_heads: int, patch: Level, window: Level | None, norm: Any, proj: Any,
    factor: Tensor | None = None, *, seen: list[Clustered] | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``factor * proj(norm([g_window, g_patch]))`` of what the two levels of clustering give.

    Args:
        both: (B, H, W, 2 heads d), points then values.
        windows: how the map is cut. patch, window: what the levels compare with; no window level is None.
        norm: a MapNorm, or any other layer, which is called. proj: a linear layer, whose weight is read if it is bare.
        factor: (n,), inside the projection.
        seen: what each level clustered is appended here; there are no kernels for that.
        backend: "auto" takes a kernel for each level that has one on this device, "torch" none, "triton" fails where a
            kernel cannot run.

    Returns:
        (B, H, W, n). Within autocast it may be float32 with a factor, since what it is added to is.
    """
    dim, cells = both.shape[-1] // (2 * num_heads), (0, 0) if window is None else window.cells
    sizes = (*windows.size, *windows.grid, *windows.window, *windows.offset)
    cut = Cut(*sizes, *patch.cells, num_heads, dim, *cells)
    shared, sums, takes_patches = None, None, False
    if seen is None and patch.alpha is not None and patch.beta is None and patch.c is None:
        takes_patches = choose(backend, both, kernels.patch_unsupported(both, cut)) == "triton"
    if takes_patches and patch.alpha is not None:
        c = _curvature(both, cut, window, backend)
        cut = cut if c else cut._replace(cells_y=0, cells_x=0)
        own, parts, sums = kernels.cluster_patch(both, patch.alpha, patch.bias, cut)
        if window is not None and c:
            mixed, others = kernels.cluster_window(parts, window.alpha, window.bias, cut, c, window.clip)
            shared, sums = mixed.unflatten(1, windows.grid), sums + others
        elif window is not None:
            shared = reference.cluster_windows(both, both, windows, num_heads, window).mixed
            sums = sums + reference.moments(shared, windows)
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
        return y if factor is None else y * factor
    return _normed_linear(own, shared, sums, windows, norm, proj, factor)


def _curvature(both: Tensor, cut: Cut, level: Level | None, backend: str) -> float | None:
    """``c`` of the window level where that runs as a kernel, else None."""
    if level is None or level.beta is not None or not cut.has_simple_cells():
        return None
    c = 1.0 if level.alpha is None else level.c  # of no account where there is one centre
    if not isinstance(c, float):  # learned, or cosines
        return None
    return c if choose(backend, both, kernels.window_unsupported(both, cut, c, level.clip)) == "triton" else None


def _normed_linear(
    own: Tensor, shared: Tensor | None, sums: Tensor | None, windows: Windows, norm: Any, proj: Any,
    factor: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same by weights of bare layers, with what windows share computed once for each of them.

    The norm is a part of the projection, ``proj(norm(x)) = times (x @ weight.T) + shift``: the map is read once.
    """
    weight, left = proj.weight, 0 if shared is None else shared.shape[-1]
    if type(norm) is nn.Identity:
        y = scaled_linear(own, weight[:, left:], proj.bias, factor)
        if shared is not None:
            y = add_to_windows(y, scaled_linear(shared, weight[:, :left], None, factor), windows)
        return y
    if sums is None:
        sums = reference.moments(own)
        sums = sums if shared is None else sums + reference.moments(shared, windows)
    mean, square = (sums / (own.shape[1] * own.shape[2] * norm.dim)).unbind(-1)
    # Means over all channels are small beside their spread, so this difference keeps its digits.
    times = torch.rsqrt((square - mean.square()).clamp_min(0) + norm.eps).unsqueeze(-1)  # (B, 1)
    weight = weight * norm.weight
    shift = (proj.weight * norm.bias).sum(1) - (times * mean.unsqueeze(-1)) * weight.sum(1)  # (B, n)
    shift = shift if proj.bias is None else shift + proj.bias
    if factor is not None:
        times, shift = times * factor, shift * factor
    times, shift = times[:, None, None], shift[:, None, None]
    y = F.linear(own, weight[:, left:])
    dtype = y.dtype if factor is None else torch.promote_types(y.dtype, factor.dtype)
    if shared is None:
        y = torch.addcmul(shift, y, times)
    else:
        of_window = torch.addcmul(shift, F.linear(shared, weight[:, :left]), times)
        if windows.is_padded:
            y = add_to_windows(y * times, of_window, windows)
        else:
            y = y.unflatten(2, (windows.grid[1], -1)).unflatten(1, (windows.grid[0], -1))
            y = torch.addcmul(of_window[:, :, None, :, None], y, times[..., None, None, :]).flatten(3, 4).flatten(1, 2)
    return y.to(dtype)
