"""Token mixing by clustering: patches around centres inside windows, windows around centres of the whole map.

The arithmetic of one level is in ``cluster_level``, the cut into windows in ``windows``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry import lorentz
from hyptree.geometry.core.numerics import cap_norm
from hyptree.geometry.core.registry import check_curvature
from hyptree.nn.cluster.level import ASSIGNMENTS, GEOMETRIES, ClusterLevel, Geometry, require_choice
from hyptree.nn.cluster.map_norm import MapNorm
from hyptree.nn.cluster.windows import (
    Size,
    Windows,
    add_to_windows,
    count_patches,
    cover,
    cut,
    divides,
    join,
    plan,
    pool,
    pool_windows,
    pooling_weights,
)
from hyptree.nn.products import linear, scaled_linear
from hyptree.ops.backend import BACKENDS
from hyptree.ops.cluster_patch import Cut, cluster_patch
from hyptree.ops.cluster_patch import fits as patch_fits
from hyptree.ops.cluster_window import cluster_window
from hyptree.ops.cluster_window import fits as window_fits
from hyptree.ops.rounding import wide


@dataclass(frozen=True)
class ClusterAssignment:
    """What one mixer clustered: B images, ``H'`` heads, a map of H x W patches cut into windows.

    With soft assignment the rows (last axis) of ``patch`` and ``window`` sum to one; with hard assignment they hold a
    single one. ``M`` and ``m`` count centres row by row of their grids.
    """

    windows: Windows
    """The cut: map size, grid of windows, window size, offset."""
    patch: Tensor
    """(B, H', H, W, M) of each patch to the M centres of its own window."""
    patch_grid: Size
    """Rows and columns of the centres inside a window; their product is M."""
    patch_centres: Tensor
    """(B, H', rows, columns, M, d) embeddings of the patch-level centres of every window."""
    window: Tensor | None
    """(B, H', rows, columns, m) of each window to the m centres of the map, None without a window level."""
    window_grid: Size | None
    """Rows and columns of the centres of the map; their product is m."""
    window_points: Tensor | None
    """(B, H', rows, columns, d) the windows as vectors, clipped tangent vectors at the origin if hyperbolic."""
    window_centres: Tensor | None
    """(B, H', m, d) likewise the centres of the map."""
    curvature: float | None
    """``c`` of the window level (its sectional curvature is ``-c``), None if it is Euclidean or absent."""
    stage: int = 0
    block: int = 0
    """Index of the stage, and of the block within it."""

    def lorentz_centres(self) -> Tensor | None:
        """Window-level centres as Lorentz points by their space components, (B, H', m, d); None unless hyperbolic."""
        return self._lorentz(self.window_centres)

    def lorentz_points(self) -> Tensor | None:
        """Windows as Lorentz points by their space components, (B, H', rows, columns, d); None unless hyperbolic."""
        return self._lorentz(self.window_points)

    def _lorentz(self, tangent: Tensor | None) -> Tensor | None:
        if tangent is None or self.curvature is None:
            return None
        return lorentz.expmap0(tangent, self.curvature)

    def labels(self) -> Tensor:
        """Number of each patch's most likely centre among all centres of the map, (B, H', H, W)."""
        (height, width), (wy, wx), (top, left) = self.windows.size, self.windows.window, self.windows.offset
        rows = (torch.arange(height, device=self.patch.device) + top) // wy
        columns = (torch.arange(width, device=self.patch.device) + left) // wx
        window = rows.unsqueeze(1) * self.windows.grid[1] + columns
        return window * self.patch.shape[-1] + self.patch.argmax(-1)


class ClusterMixer(nn.Module):
    """Mix the patches of a map through two levels of clusters, then project back to the width of the map.

    Patch level: the map is cut into ``fold x fold`` windows, each clusters its patches around centres pooled inside it.
    Window level: every window is one point, the mean of its patches, and is clustered around centres pooled over the
    whole map; the result is handed to all patches of the window. Linear in the number of patches.

    Args:
        dim: channels of the map. num_heads, head_dim: width of both levels is their product.
        size: height and width of the map that the position bias is made for; other sizes are interpolated.
        fold: windows per side of that map.
        patch_centres: patch-level centres per side of a window, at most one per patch.
        window_centres: window-level centres per side of the map, at most one per window; 0 for no window level.
        scaling: what grows with the map, the "window" (``fold`` is kept) or the "fold" (window size is kept).
        shifted: cut half a window further up and left.
        patch_geometry, window_geometry: "euclidean" (cosine) or "hyperbolic" (minus the Lorentz distance).
        assignment: "soft", or "hard" as in Context Cluster (see :func:`hard_assignment`).
        position_bias: add a learned bias to the similarities.
        curvature: ``c > 0`` of the hyperbolic levels. learnable_curvature: learn it.
        norm: normalise the two results before the projection. alpha: initial factor of the similarities.
        clip: longest tangent vector of the hyperbolic levels.
        backend: "auto" takes a kernel for each level that has one on this device (soft assignment, patches Euclidean,
            windows hyperbolic with a fixed curvature), "torch" none, "triton" fails where a kernel cannot run.

    Shape:
        (B, H, W, dim) or (H, W, dim) -> the same
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        size: Size,
        fold: int = 1,
        patch_centres: int = 2,
        window_centres: int = 0,
        *,
        scaling: Literal["window", "fold"] = "window",
        shifted: bool = False,
        patch_geometry: Geometry = "euclidean",
        window_geometry: Geometry = "hyperbolic",
        assignment: Literal["soft", "hard"] = "soft",
        position_bias: bool = True,
        curvature: float = 1.0,
        learnable_curvature: bool = False,
        norm: bool = True,
        alpha: float = 1.0,
        clip: float = 1.0,
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        for key, value in {"dim": dim, "num_heads": num_heads, "head_dim": head_dim, "fold": fold}.items():
            if value < 1:
                raise ValueError(f"{name}: {key} must be 1 or more, got {value}")
        if patch_centres < 1 or window_centres < 0:
            raise ValueError(
                f"{name}: expected patch_centres of 1 or more and window_centres of 0 (no window level) or more, "
                f"got {patch_centres} and {window_centres}"
            )
        if shifted and window_centres:
            raise ValueError(f"{name}: shifted windows replace the window level; set window_centres=0")
        if clip <= 0:
            raise ValueError(f"{name}: clip must be positive, got {clip}")
        check_curvature(curvature, f"{name}: curvature")
        require_choice(name, "scaling", scaling, ("window", "fold"))
        require_choice(name, "patch_geometry", patch_geometry, GEOMETRIES)
        require_choice(name, "window_geometry", window_geometry, GEOMETRIES)
        require_choice(name, "assignment", assignment, ASSIGNMENTS)
        require_choice(name, "backend", backend, BACKENDS)
        self.backend = backend
        factory = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.fold, self.scaling, self.shifted = fold, scaling, shifted
        self.max_patch_centres, self.max_window_centres = patch_centres, window_centres
        self.window_size = plan(size, fold=(fold, fold)).window
        windows = self.windows(size)
        inner = num_heads * head_dim
        level: dict[str, Any] = {
            "assignment": assignment,
            "position_bias": position_bias,
            "curvature": curvature,
            "learnable_curvature": learnable_curvature,
            "alpha": alpha,
            "clip": clip,
            **factory,
        }
        self.points_and_values = nn.Linear(dim, 2 * inner, **factory)
        self.patch = ClusterLevel(
            num_heads, *self._patch_layout(windows), geometry=patch_geometry, is_single=patch_centres == 1, **level
        )
        self.window: ClusterLevel | None = None
        if window_centres:
            self.window = ClusterLevel(
                num_heads,
                *self._window_layout(windows),
                geometry=window_geometry,
                is_single=window_centres == 1,
                **level,
            )
        width = inner * (2 if window_centres else 1)
        self.norm = MapNorm(width, **factory) if norm else nn.Identity()
        self.proj = nn.Linear(width, dim, **factory)

    def reset_parameters(self) -> None:
        """Draw the projections and set everything else back."""
        for module in (self.points_and_values, self.patch, self.window, self.norm, self.proj):
            if isinstance(module, (nn.Linear, ClusterLevel, MapNorm)):
                module.reset_parameters()

    def windows(self, size: Size) -> Windows:
        """How a map of this size is cut."""
        if self.scaling == "fold":
            return plan(size, window=self.window_size, shifted=self.shifted)
        return plan(size, fold=(self.fold, self.fold), shifted=self.shifted)

    def _patch_layout(self, windows: Windows) -> tuple[Size, Size, Size]:
        most = self.max_patch_centres
        return windows.grid, windows.window, (min(most, windows.window[0]), min(most, windows.window[1]))

    def _window_layout(self, windows: Windows) -> tuple[Size, Size, Size]:
        most = self.max_window_centres
        return (1, 1), windows.grid, (min(most, windows.grid[0]), min(most, windows.grid[1]))

    def forward(self, x: Tensor, record: list[ClusterAssignment] | None = None, factor: Tensor | None = None) -> Tensor:
        """The mixed map.

        Args:
            record: what was clustered is appended to this list.
            factor: (dim,) of the result, inside the projection. Within autocast the result may then be float32, since
                what it is added to is.
        """
        if x.dim() == 3:
            return self.forward(x.unsqueeze(0), record, factor).squeeze(0)
        if x.dim() != 4 or x.shape[-1] != self.dim:
            raise ValueError(
                f"{type(self).__name__}: expected x of shape (B, H, W, {self.dim}), channels last, got {tuple(x.shape)}"
            )
        windows = self.windows((x.shape[1], x.shape[2]))
        both = linear(x, self.points_and_values)  # (B, H, W, 2 H' d), points then values
        layout = self._patch_layout(windows)
        if record is None and self._has_kernel(both, windows, layout):
            return self._by_kernels(both, windows, layout, factor)
        points, values = cut(both, windows, 2, self.num_heads).unbind(0)  # (B, S, H', N, d)
        inside = reached = None
        if not windows.is_padded and divides(layout[2], windows.window):
            cells = (windows.grid[0] * layout[2][0], windows.grid[1] * layout[2][1])
            coarse = pool(both, cells)  # every window's centres side by side: a coarser map
            centres, value_centres = cut(coarse, Windows(cells, windows.grid, layout[2]), 2, self.num_heads).unbind(0)
        else:
            weights = pooling_weights(windows, layout[2], both.dtype, both.device).unsqueeze(1)  # (S or 1, 1, M, N)
            coarse, centres, value_centres = both, weights @ points, weights @ values
            if windows.is_padded:
                inside = cover(windows, both.device)[:, None, None, :]
                reached = weights.sum(-1, keepdim=True) > 0
                centres = torch.where(reached, centres, 1.0)  # whatever has a direction
        mixed, assign = self.patch(points, values, centres, value_centres, layout, inside, reached)
        mixed = join(mixed, windows)
        seen: dict[str, Any] = {}
        if self.window is None:
            out = scaled_linear(self.norm(mixed), self.proj.weight, self.proj.bias, factor)
        else:
            shared = self._mix_windows(both, coarse, windows, None if record is None else seen)
            out = self._project(shared, mixed, windows, factor)
        if record is not None:
            record.append(self._recorded(windows, layout, assign, centres, seen))
        return out

    def _cut(self, windows: Windows, layout: tuple[Size, Size, Size], cells: Size = (0, 0)) -> Cut:
        """The numbers of the cut for the kernels."""
        sizes = (*windows.size, *windows.grid, *windows.window, *windows.offset, *layout[2])
        return Cut(*sizes, self.num_heads, self.head_dim, *cells)

    def _has_kernel(self, both: Tensor, windows: Windows, layout: tuple[Size, Size, Size]) -> bool:
        """Whether the patch level runs as a kernel."""
        level = self.patch
        if level.alpha is None or level.is_hard or level.manifold is not None:
            return False
        return patch_fits(both, self._cut(windows, layout), self.backend)

    def _window_curvature(self, both: Tensor, cut: Cut) -> float | None:
        """``c`` of the window level where that runs as a kernel, else None."""
        level = self.window
        if level is None or level.is_hard or (level.manifold is None and level.alpha is not None):
            return None
        c = 1.0 if level.manifold is None else level.manifold.c  # of no account where there is one centre
        if level.alpha is None:
            c = 1.0
        if not isinstance(c, float) or not cut.has_simple_cells():
            return None
        return c if window_fits(both, cut, c, level.clip, self.backend) else None

    def _by_kernels(
        self, both: Tensor, windows: Windows, layout: tuple[Size, Size, Size], factor: Tensor | None
    ) -> Tensor:
        """The mixed map of :meth:`forward` with ``both`` read once, and the norm inside the projection."""
        patch, window = self.patch, self.window
        assert patch.alpha is not None
        bias = None if patch.position is None else patch.position(*layout)
        above = self._window_layout(windows)
        cut = self._cut(windows, layout, above[2] if window is not None else (0, 0))
        c = self._window_curvature(both, cut)
        cut = cut if c is not None else self._cut(windows, layout)
        own, parts, moments = cluster_patch(both, patch.alpha, bias, cut, backend=self.backend)
        if window is None:
            return self._project_by_moments(None, own, moments, windows, factor)
        if c is None:
            shared = self._mix_windows(both, both, windows, None)
            several, patches = wide(shared), count_patches(windows, both.device)
            sums = [(x * patches).sum((1, 2, 3)) for x in (several, several.square())]
            return self._project_by_moments(shared, own, moments + torch.stack(sums, -1), windows, factor)
        bias = None if window.position is None else window.position(*above)
        shared, others = cluster_window(parts, window.alpha, bias, cut, c, window.clip, backend=self.backend)
        shared = shared.unflatten(1, windows.grid)
        return self._project_by_moments(shared, own, moments + others, windows, factor)

    def _project_by_moments(
        self, shared: Tensor | None, own: Tensor, moments: Tensor, windows: Windows, factor: Tensor | None
    ) -> Tensor:
        """:meth:`_project` where the sums that the norm needs are known.

        Args:
            shared: (B, rows, columns, C') one vector per window. moments: (B, 2), see :meth:`MapNorm.into`.
        """
        if not isinstance(self.norm, MapNorm):
            if shared is not None:
                return self._project(shared, own, windows, factor)
            return scaled_linear(own, self.proj.weight, self.proj.bias, factor)
        weight, scale, shift = self.norm.into(self.proj, moments, own.shape[1] * own.shape[2] * self.norm.dim)
        if factor is not None:
            scale, shift = scale * factor, shift * factor  # (B, dim)
        scale, shift = scale[:, None, None], shift[:, None, None]
        right = weight if shared is None else weight[:, shared.shape[-1] :]
        y = F.linear(own, right)
        dtype = y.dtype if factor is None else shift.dtype
        if shared is None:
            return torch.addcmul(shift, y, scale).to(dtype)
        of_window = torch.addcmul(shift, F.linear(shared, weight[:, : shared.shape[-1]]), scale)
        if windows.is_padded:
            return add_to_windows(y * scale, of_window, windows).to(dtype)
        cut = y.unflatten(2, (windows.grid[1], -1)).unflatten(1, (windows.grid[0], -1))
        mixed = torch.addcmul(of_window[:, :, None, :, None], cut, scale[..., None, None, :])
        return mixed.to(dtype).flatten(3, 4).flatten(1, 2)

    def _project(self, shared: Tensor, own: Tensor, windows: Windows, factor: Tensor | None) -> Tensor:
        """``factor * proj(norm([shared, own]))`` with the shared half computed once per window."""
        if isinstance(self.norm, MapNorm):
            shared, own = self.norm.with_shared(shared, own, windows)
        left, right = self.proj.weight.chunk(2, 1)
        y = scaled_linear(own, right, self.proj.bias, factor)
        return add_to_windows(y, scaled_linear(shared, left, None, factor), windows)

    def _mix_windows(self, both: Tensor, coarse: Tensor, windows: Windows, seen: dict[str, Any] | None) -> Tensor:
        """The window level: one vector per window, (B, rows, columns, H' d).

        Args:
            both: (B, H, W, 2 H' d) points and values of the patches.
            coarse: their averages over equal parts that divide the windows, or ``both`` itself.
        """
        assert self.window is not None
        layout = self._window_layout(windows)
        grid, cells = layout[1], layout[2]
        means = pool_windows(coarse, windows)
        source = coarse if divides(cells, (coarse.shape[1], coarse.shape[2])) else both
        points, values = cut(means, Windows(grid, (1, 1), grid), 2, self.num_heads).unbind(0)  # (B, 1, H', S, d)
        centres, value_centres = cut(pool(source, cells), Windows(cells, (1, 1), cells), 2, self.num_heads).unbind(0)
        mixed, assign = self.window(points, values, centres, value_centres, layout)
        if seen is not None:
            level = self.window
            seen["window"] = _rows_of_one(assign[:, 0], level).unflatten(2, grid)
            seen["window_grid"] = cells
            seen["window_points"] = _embedding(points[:, 0], level).unflatten(2, grid)
            seen["window_centres"] = _embedding(centres[:, 0], level)
            seen["curvature"] = _curvature(level)
        return join(mixed, Windows(grid, (1, 1), grid))

    def _recorded(
        self, windows: Windows, layout: tuple[Size, Size, Size], assign: Tensor, centres: Tensor, seen: dict[str, Any]
    ) -> ClusterAssignment:
        num_centres = assign.shape[-2]
        flat = join(_rows_of_one(assign, self.patch), windows)  # (B, H, W, H' M)
        absent = {"window": None, "window_grid": None, "window_points": None, "window_centres": None, "curvature": None}
        return ClusterAssignment(
            windows=windows,
            patch=flat.unflatten(-1, (self.num_heads, num_centres)).permute(0, 3, 1, 2, 4),
            patch_grid=layout[2],
            patch_centres=_embedding(centres, self.patch).transpose(1, 2).unflatten(2, windows.grid),
            **(absent | seen),
        )

    def extra_repr(self) -> str:
        return f"fold={self.fold}, window={self.window_size}, scaling={self.scaling}, shifted={self.shifted}"


def _rows_of_one(assign: Tensor, level: ClusterLevel) -> Tensor:
    """The assignment as shown, (..., M, N) -> (..., N, M): a hard one without its weights."""
    rows = assign.mT
    return F.one_hot(rows.argmax(-1), rows.shape[-1]).to(rows.dtype) if level.is_hard else rows


def _curvature(level: ClusterLevel) -> float | None:
    if level.manifold is None:
        return None
    c = level.manifold.c
    return float(c.detach()) if isinstance(c, Tensor) else c


def _embedding(vectors: Tensor, level: ClusterLevel) -> Tensor:
    """Points or centres as the level compares them: clipped if they are tangent vectors."""
    return wide(vectors) if level.manifold is None else cap_norm(wide(vectors), level.clip)
