"""Token mixing by clustering: patches around centres inside windows, windows around centres of the whole map.

The arithmetic is in :mod:`hyptree.ops.cluster_map`, the cut into windows in :mod:`hyptree.ops.windows`.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import require_one_of
from hyptree.geometry import lorentz
from hyptree.geometry.core.numerics import cap_norm
from hyptree.nn.cluster.level import GEOMETRIES, ClusterLevel, Geometry, Layout
from hyptree.ops.backend import BACKENDS
from hyptree.ops.cluster_map import Clustered, Level, cluster_linear
from hyptree.ops.linear import linear
from hyptree.ops.map_norm import MapNorm
from hyptree.ops.rounding import wide
from hyptree.ops.windows import Size, Windows, join, plan


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
        norm: normalise the two results before the projection.
        backend: "auto" takes a kernel for each level that has one on this device (soft assignment, patches Euclidean,
            windows hyperbolic with a fixed curvature), "torch" none, "triton" fails where a kernel cannot run.
        level: assignment, position_bias, curvature, learnable_curvature, alpha and clip of both levels, as in
            :class:`~hyptree.nn.cluster.level.ClusterLevel`.

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
        norm: bool = True,
        backend: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **level: Any,
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
        require_one_of(f"{name}: scaling", scaling, ("window", "fold"))
        require_one_of(f"{name}: patch_geometry", patch_geometry, GEOMETRIES)
        require_one_of(f"{name}: window_geometry", window_geometry, GEOMETRIES)
        require_one_of(f"{name}: backend", backend, BACKENDS)
        self.backend = backend
        factory = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.fold, self.scaling, self.shifted = fold, scaling, shifted
        self.max_patch_centres, self.max_window_centres = patch_centres, window_centres
        self.window_size = plan(size, fold=(fold, fold)).window
        _, of_patches, of_windows = self.layouts(size)
        inner = num_heads * head_dim
        level |= factory
        self.points_and_values = nn.Linear(dim, 2 * inner, **factory)
        self.patch = ClusterLevel(num_heads, of_patches, patch_geometry, patch_centres == 1, **level)
        self.window: ClusterLevel | None = None
        if window_centres:
            self.window = ClusterLevel(num_heads, of_windows, window_geometry, window_centres == 1, **level)
        width = inner * (2 if window_centres else 1)
        self.norm = MapNorm(width, **factory) if norm else nn.Identity()
        self.proj = nn.Linear(width, dim, **factory)

    def reset_parameters(self) -> None:
        """Draw the projections and set everything else back."""
        for module in (self.points_and_values, self.patch, self.window, self.norm, self.proj):
            if isinstance(module, (nn.Linear, ClusterLevel, MapNorm)):
                module.reset_parameters()

    def layouts(self, size: Size) -> tuple[Windows, Layout, Layout]:
        """How a map of this size is cut, and the layouts of the patch level and of the window level."""
        by = {"window": self.window_size} if self.scaling == "fold" else {"fold": (self.fold, self.fold)}
        windows = plan(size, **by, shifted=self.shifted)
        (wy, wx), (ny, nx) = windows.window, windows.grid
        most, above = self.max_patch_centres, self.max_window_centres
        of_patches = windows.grid, windows.window, (min(most, wy), min(most, wx))
        return windows, of_patches, ((1, 1), windows.grid, (min(above, ny), min(above, nx)))

    def forward(
        self, x: Tensor, record: MutableSequence[ClusterAssignment] | None = None, factor: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:  # fmt: skip
        """The mixed map.

        Args:
            record: what was clustered is appended to this list.
            factor: (dim,) of the result, inside the projection. Within autocast the result may then be float32, since
                what it is added to is.
            add: to ``x``, in the same pass.
        """
        if x.dim() == 3:
            return self.forward(x.unsqueeze(0), record, factor, add).squeeze(0)
        if x.dim() != 4 or x.shape[-1] != self.dim:
            raise ValueError(
                f"{type(self).__name__}: expected x of shape (B, H, W, {self.dim}), channels last, got {tuple(x.shape)}"
            )
        windows, of_patches, of_windows = self.layouts((x.shape[1], x.shape[2]))
        both = linear(x, self.points_and_values)  # (B, H, W, 2 H' d), points then values
        patch = self.patch(of_patches)
        window = None if self.window is None else self.window(of_windows)
        seen: list[Clustered] | None = None if record is None else []
        out = cluster_linear(
            both, windows, self.num_heads, patch, window, self.norm, self.proj, factor, x if add else None, seen=seen,
            backend=self.backend,
        )  # fmt: skip
        if record is not None and seen is not None:
            record.append(_recorded(windows, patch, window, *seen))
        return out

    def extra_repr(self) -> str:
        return f"fold={self.fold}, window={self.window_size}, scaling={self.scaling}, shifted={self.shifted}"


def _recorded(
    windows: Windows, patch: Level, window: Level | None, of_patches: Clustered, of_windows: Clustered | None = None
) -> ClusterAssignment:
    seen: dict[str, Any] = {"window": None, "window_grid": None, "window_points": None, "window_centres": None}
    if window is not None and of_windows is not None:
        seen["window"] = _shown(of_windows, window)[:, 0].unflatten(2, windows.grid)
        seen["window_grid"] = window.cells
        seen["window_points"] = _embedding(of_windows.points[:, 0], window).unflatten(2, windows.grid)
        seen["window_centres"] = _embedding(of_windows.centres[:, 0], window)
    c = None if window is None else window.c
    flat, num_heads = join(_shown(of_patches, patch), windows), of_patches.assign.shape[2]  # (B, H, W, H' M)
    return ClusterAssignment(
        windows=windows,
        patch=flat.unflatten(-1, (num_heads, -1)).permute(0, 3, 1, 2, 4),
        patch_grid=patch.cells,
        patch_centres=_embedding(of_patches.centres, patch).transpose(1, 2).unflatten(2, windows.grid),
        curvature=float(c.detach()) if isinstance(c, Tensor) else c,
        **seen,
    )


def _shown(clustered: Clustered, level: Level) -> Tensor:
    """The assignment as shown, (..., M, N) -> (..., N, M): a hard one without its weights."""
    rows = clustered.assign.mT
    return rows if level.beta is None else F.one_hot(rows.argmax(-1), rows.shape[-1]).to(rows.dtype)


def _embedding(vectors: Tensor, level: Level) -> Tensor:
    """Points or centres as the level compares them: clipped if they are tangent vectors."""
    return wide(vectors) if level.c is None else cap_norm(wide(vectors), level.clip)
