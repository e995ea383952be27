"""Maps cut into windows, and the averages over parts of a map that clustering starts from.

Maps are (B, H, W, C), channels last. Everything here is a view, one copy, or a matrix product: nothing depends on
values, so it compiles, exports and batches, and its gradients are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """How a map is cut: patch (y, x) lies in window ``((y + offset[0]) // window[0], (x + offset[1]) // window[1])``.

    Where the windows do not fill the map exactly, those at the border reach beyond it. The cells outside belong to the
    window's shape and to nothing else: they are in no mean, no assignment and no result.
    """

    size: Size
    """Height and width of the map, in patches."""
    grid: Size
    """Number of windows, down and across."""
    window: Size
    """Height and width of a window, in patches."""
    offset: Size = (0, 0)
    """Rows above and columns left of the map that the first windows have; not zero for shifted windows."""

    @property
    def num_windows(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def is_padded(self) -> bool:
        """Whether some windows reach beyond the map."""
        return (self.grid[0] * self.window[0], self.grid[1] * self.window[1]) != self.size

    def margins(self) -> tuple[int, int, int, int]:
        """Columns left and right, rows above and below the map, in the order of ``F.pad``."""
        (height, width), (top, left) = self.size, self.offset
        below, right = self.grid[0] * self.window[0] - height - top, self.grid[1] * self.window[1] - width - left
        return left, right, top, below


class Cut(NamedTuple):
    """How a map (B, height, width, 2 heads dim) is cut into windows, in numbers for kernels; all count patches.

    Attributes:
        height, width: of the map. rows, columns: windows down and across. wy, wx: height and width of a window.
        top, left: rows above and columns left of the map that the first windows have.
        my, mx: centres of a window, down and across. num_heads, dim: of points, and of values.
        cells_y, cells_x: equal parts of the map whose sums are wanted window by window, 0 for none. A window may lie in
            up to two parts down and across.
    """

    height: int
    width: int
    rows: int
    columns: int
    wy: int
    wx: int
    top: int
    left: int
    my: int
    mx: int
    num_heads: int
    dim: int
    cells_y: int = 0
    cells_x: int = 0

    @property
    def num_windows(self) -> int:
        return self.rows * self.columns

    @property
    def window(self) -> int:
        return self.wy * self.wx

    @property
    def centres(self) -> int:
        return self.my * self.mx

    @property
    def inner(self) -> int:
        return self.num_heads * self.dim

    @property
    def windows(self) -> Windows:
        """The same without centres, heads and cells."""
        sizes = (self.height, self.width), (self.rows, self.columns), (self.wy, self.wx), (self.top, self.left)
        return Windows(*sizes)

    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Map, windows, window, margin, centres and cells, down and across."""
        return (
            (self.height, self.rows, self.wy, self.top, self.my, self.cells_y),
            (self.width, self.columns, self.wx, self.left, self.mx, self.cells_x),
        )

    def has_simple_cells(self) -> bool:
        """Whether every patch is in one cell and every window in at most two down and two across."""
        if self.windows.is_padded or not (self.cells_y and self.cells_x):
            return False
        return all(size % cells == 0 and size // cells >= window for size, _, window, _, _, cells in self.axes())


def plan(size: Size, fold: Size | None = None, window: Size | None = None, shifted: bool = False) -> Windows:
    """Windows for a map: as few and as equal as possible, none of them empty.

    Args:
        size: height and width of the map.
        fold: cut into at most this many windows down and across. Their height is ``ceil(height / fold)``; a map that
            this does not divide may need fewer windows than ``fold`` and has padding in the last ones.
        window: instead of ``fold``, the height and width of the windows (cut down to the map).
        shifted: move the cut by half a window, as in every second block of Swin. The map is not rolled around: there is
            one more window in each direction, and those at the border hold less of the map.
    """
    if (fold is None) == (window is None):
        raise ValueError("plan: give either fold or window")
    axes = []
    for axis, n in enumerate(size):
        length = -(-n // fold[axis]) if fold else min(window[axis] if window else n, n)
        margin = length // 2 if shifted and length < n else 0
        axes.append((-(-(n + margin) // length), length, margin))
    (rows, wy, top), (columns, wx, left) = axes
    return Windows(size, (rows, columns), (wy, wx), (top, left))


def cut(x: Tensor, windows: Windows, num_parts: int, num_heads: int) -> Tensor:
    """Windows and heads of a map, in one copy: (B, H, W, P H' d) -> (P, B, windows, H', N, d).

    Padding is one, not zero: the direction of a vector has no derivative at zero.
    """
    (ny, nx), (wy, wx) = windows.grid, windows.window
    if windows.is_padded:
        x = F.pad(x, (0, 0, *windows.margins()), value=1.0)
    batch, dim = x.shape[0], x.shape[-1] // (num_parts * num_heads)
    x = x.reshape(batch, ny, wy, nx, wx, num_parts, num_heads, dim)
    return x.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(num_parts, batch, ny * nx, num_heads, wy * wx, dim)


def join(x: Tensor, windows: Windows) -> Tensor:
    """The map of windows and heads, without padding: (B, windows, H', N, d) -> (B, H, W, H' d)."""
    (ny, nx), (wy, wx) = windows.grid, windows.window
    batch, _, num_heads, _, dim = x.shape
    x = x.reshape(batch, ny, nx, num_heads, wy, wx, dim).permute(0, 1, 4, 2, 5, 3, 6)
    (top, left), (height, width) = windows.offset, windows.size
    return x.reshape(batch, ny * wy, nx * wx, num_heads * dim)[:, top : top + height, left : left + width]


def spread(shared: Tensor, windows: Windows) -> Tensor:
    """One vector per window for all its patches: (B, rows, columns, C) -> (B, H, W, C)."""
    (wy, wx), (top, left), (height, width) = windows.window, windows.offset, windows.size
    full = shared[:, :, None, :, None].expand(-1, -1, wy, -1, wx, -1).flatten(3, 4).flatten(1, 2)
    return full[:, top : top + height, left : left + width]


def add_to_windows(x: Tensor, shared: Tensor, windows: Windows) -> Tensor:
    """One vector per window added to all its patches: (B, H, W, C), (B, rows, columns, C) -> (B, H, W, C)."""
    ny, (wy, wx) = windows.grid[0], windows.window
    if not windows.is_padded:
        # Columns first: the gradient of this is two sums over one axis each, which are quick.
        rows = shared.unsqueeze(3).expand(-1, -1, -1, wx, -1).flatten(2, 3)  # (B, rows, W, C)
        return (x.unflatten(1, (ny, wy)) + rows.unsqueeze(2)).flatten(1, 2)
    return x + spread(shared, windows)


def cover(windows: Windows, device: torch.device) -> Tensor:
    """Which cells of the windows are patches of the map: (windows, N), boolean."""
    (ny, nx), (wy, wx) = windows.grid, windows.window
    inside = []
    for n, w, first, size in zip((ny, nx), (wy, wx), windows.offset, windows.size, strict=True):
        position = torch.arange(n * w, device=device)
        inside.append((position >= first) & (position < first + size))
    both = inside[0].view(ny, 1, wy, 1) & inside[1].view(1, nx, 1, wx)
    return both.reshape(ny * nx, wy * wx)


def membership(length: int, cells: int, device: torch.device) -> Tensor:
    """Which of ``length`` positions are in each of ``cells`` equal parts: (cells, length), boolean.

    Part i covers ``floor(i n / k)`` to ``ceil((i + 1) n / k)``, as in adaptive pooling: parts overlap by one position
    where they do not divide the length.
    """
    part = torch.arange(cells, device=device).unsqueeze(1)
    position = torch.arange(length, device=device)
    first = torch.div(part * length, cells, rounding_mode="floor")
    end = torch.div((part + 1) * length + cells - 1, cells, rounding_mode="floor")
    return (position >= first) & (position < end)


def pool(x: Tensor, cells: Size) -> Tensor:
    """Averages of a map over a grid of parts: (B, H, W, C) -> (B, rows, columns, C); adaptive average pooling."""
    size = (x.shape[1], x.shape[2])
    if cells == size:
        return x
    if size[0] % cells[0] == 0 and size[1] % cells[1] == 0:
        # Not avg_pool2d: the gradient of a mean is a view of a small tensor, that of a pooling a tensor as large as x.
        # One axis after the other: a mean over two axes that are not neighbours is five times as slow on a CPU.
        return x.unflatten(1, (cells[0], -1)).mean(2).unflatten(2, (cells[1], -1)).mean(3)
    down, across = (membership(n, k, x.device).to(x.dtype) for n, k in zip(size, cells, strict=True))
    rows = (down / down.sum(1, keepdim=True)) @ x.flatten(2)  # (B, rows, W C)
    columns = (across / across.sum(1, keepdim=True)) @ rows.unflatten(2, (size[1], -1))
    return columns


def pooling_weights(windows: Windows, cells: Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights of a window's patches in the mean of each of its parts: (windows or 1, parts, N).

    Rows sum to one, or to zero for a part that lies outside the map altogether.
    """
    down, across = (membership(n, k, device) for n, k in zip(windows.window, cells, strict=True))
    member = (down.view(cells[0], 1, -1, 1) & across.view(1, cells[1], 1, -1)).reshape(1, cells[0] * cells[1], -1)
    if windows.is_padded:
        member = member & cover(windows, device).unsqueeze(1)
    weights = member.to(dtype)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1)


def count_patches(windows: Windows, device: torch.device) -> Tensor | int:
    """Patches of the map in every window, (rows, columns, 1), or one number if they are all full."""
    if not windows.is_padded:
        return windows.window[0] * windows.window[1]
    return cover(windows, device).sum(1).reshape(*windows.grid, 1)


def pool_windows(x: Tensor, windows: Windows) -> Tensor:
    """Averages over the patches of every window: (B, H, W, C) -> (B, rows, columns, C).

    ``x`` may be a map of averages over equal parts of the windows instead, as long as no window is padded.
    """
    if not windows.is_padded:
        return pool(x, windows.grid)
    (ny, nx), (wy, wx) = windows.grid, windows.window
    padded = F.pad(x, (0, 0, *windows.margins()))
    total = padded.unflatten(1, (ny, wy)).sum(2).unflatten(2, (nx, wx)).sum(3)
    return total / count_patches(windows, x.device)
