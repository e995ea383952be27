"""Patches of windows around centres pooled inside them, in plain torch: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import wide


class Cut(NamedTuple):
    """How a map (B, height, width, 2 heads dim) is cut into windows, patch by patch; all numbers are counts of patches.

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
    def is_padded(self) -> bool:
        """Whether some windows reach beyond the map."""
        return (self.rows * self.wy, self.columns * self.wx) != (self.height, self.width)

    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Map, windows, window, margin, centres and cells, down and across."""
        return (
            (self.height, self.rows, self.wy, self.top, self.my, self.cells_y),
            (self.width, self.columns, self.wx, self.left, self.mx, self.cells_x),
        )

    def has_simple_cells(self) -> bool:
        """Whether every patch is in one cell and every window in at most two down and two across."""
        if self.is_padded or not (self.cells_y and self.cells_x):
            return False
        return all(size % cells == 0 and size // cells >= window for size, _, window, _, _, cells in self.axes())


def cluster_patch(both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """What ``ops.cluster_patch.cluster_patch`` gives."""
    B, dtype, device = both.shape[0], both.dtype, both.device
    S, H = cut.num_windows, cut.num_heads
    margins = (cut.columns * cut.wx - cut.width - cut.left, cut.rows * cut.wy - cut.height - cut.top)
    padding = (0, 0, cut.left, margins[0], cut.top, margins[1])

    def windows(x: Tensor) -> Tensor:  # (B, S, C, N)
        width = x.shape[-1]
        x = F.pad(x, padding).reshape(B, cut.rows, cut.wy, cut.columns, cut.wx, width)
        return x.permute(0, 1, 3, 5, 2, 4).reshape(B, S, width, cut.window)

    def joined(x: Tensor) -> Tensor:  # (B, S, C, N) -> (B, height, width, C)
        width = x.shape[2]
        x = x.reshape(B, cut.rows, cut.columns, width, cut.wy, cut.wx).permute(0, 1, 4, 2, 5, 3)
        x = x.reshape(B, cut.rows * cut.wy, cut.columns * cut.wx, width)
        return x[:, cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]

    full = wide(both)
    points, values = (part.unflatten(2, (H, cut.dim)).mT for part in windows(full).chunk(2, 2))  # (B, S, H, N, d)
    one = F.pad(torch.ones(1, cut.height, cut.width, 1, device=device, dtype=full.dtype), padding)
    inside = one.reshape(cut.rows, cut.wy, cut.columns, cut.wx).transpose(1, 2).reshape(S, 1, 1, cut.window)
    member = [_overlap(window, count, device) for _, _, window, _, count, _ in cut.axes()]
    weights = torch.kron(member[0], member[1]).to(full.dtype) * inside  # (S, 1, M, N)
    count = weights.sum(-1, keepdim=True)
    weights = weights / count.clamp_min(1)
    centres, value_centres = weights @ points, weights @ values

    unit, towards = points / _length(points), centres / _length(centres)
    logits = alpha.to(full.dtype) * (towards @ unit.mT)  # (B, S, H, M, N)
    if bias is not None:
        logits = logits + bias
    assign = logits.masked_fill(count == 0, float("-inf")).softmax(-2)
    counted = assign * inside
    gathered = (value_centres + counted @ values) / (1 + counted.sum(-1, keepdim=True))
    own = joined((assign.mT @ gathered).mT.flatten(2, 3)).to(dtype)
    moments = torch.stack([wide(own).sum((1, 2, 3)), wide(own).square().sum((1, 2, 3))], -1)
    if not cut.cells_y:
        return own, both.new_empty(B, S, 0, both.shape[-1]), moments
    parts = _parts(cut, device).to(full.dtype) @ windows(full).mT / cut.window  # (B, S, 4, 2 H d)
    return own, parts.to(dtype), moments


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)


def _overlap(length: int, cells: int, device: torch.device) -> Tensor:
    """Which positions are in each of the parts of adaptive pooling: (cells, length)."""
    part, position = torch.arange(cells, device=device).unsqueeze(1), torch.arange(length, device=device)
    return (position >= part * length // cells) & (position < ((part + 1) * length + cells - 1) // cells)


def _parts(cut: Cut, device: torch.device) -> Tensor:
    """Which patches of every window are in its first and second cell, down and across: (S, 4, N)."""
    sides = []
    for size, count, window, _, _, cells in cut.axes():
        cell = torch.arange(size, device=device).reshape(count, window) // (size // cells)
        sides.append((cell - cell[:, :1]).unsqueeze(1) == torch.arange(2, device=device).unsqueeze(1))
    down, across = sides  # (rows, 2, wy), (columns, 2, wx)
    both = down[:, None, :, None, :, None] & across[None, :, None, :, None, :]
    return both.reshape(cut.num_windows, 4, cut.window)
