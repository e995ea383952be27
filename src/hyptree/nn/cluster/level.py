"""The learned parts of one level of clustering: temperature, position bias, curvature. Its arithmetic is in
:mod:`hyptree.ops.cluster_map`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import suggest
from hyptree.geometry import Lorentz
from hyptree.ops.cluster_map import Level
from hyptree.ops.windows import Size

Layout = tuple[Size, Size, Size]
"""Of a level: rows and columns of the grid of windows, of a window in points, and of its grid of centres."""
Geometry = Literal["euclidean", "hyperbolic"]
GEOMETRIES = ("euclidean", "hyperbolic")
ASSIGNMENTS = ("soft", "hard")


def require_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``; the message suggests the nearest."""
    if value not in choices:
        hint = suggest(str(value), choices) or f"expected one of {', '.join(choices)}"
        raise ValueError(f"{where}: {name} {value!r} is unknown; {hint}")


class PositionBias(nn.Module):
    """A learned number for every window, head, patch of the window and centre; other sizes by linear interpolation.

    The parameter has the layout in which it is added to the similarities, so at the size it was made for it costs
    nothing. For another size the grid of windows, the inside of a window and the grid of centres are resized
    separately: the meaning of a centre's index changes from window to window, so there is nothing to interpolate
    across an edge.

    Shape:
        (windows, heads, M, N)
    """

    def __init__(self, num_heads: int, layout: Layout, **factory: Any):
        super().__init__()
        self.num_heads, self.shape = num_heads, layout
        (ny, nx), (wy, wx), (my, mx) = layout
        self.bias = nn.Parameter(torch.zeros(ny * nx, num_heads, my * mx, wy * wx, **factory))

    def reset_parameters(self) -> None:
        """Set all biases to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, layout: Layout) -> Tensor:
        if layout == self.shape:
            return self.bias
        (ny, nx), (wy, wx), (my, mx) = self.shape
        full = self.bias.reshape(ny, nx, self.num_heads, my, mx, wy, wx)
        for axis, old, new in zip((0, 5, 3), self.shape, layout, strict=True):
            if old != new:
                last = full.movedim((axis, axis + 1), (-2, -1))
                flat = last.reshape(1, -1, *old)
                resized = F.interpolate(flat, new, mode="bilinear", align_corners=False)
                full = resized.reshape(*last.shape[:-2], *new).movedim((-2, -1), (axis, axis + 1))
        return full.flatten(5, 6).flatten(3, 4).flatten(0, 1)

    def extra_repr(self) -> str:
        (grid, window, centres) = self.shape
        return f"heads={self.num_heads}, grid={grid}, window={window}, centres={centres}"


class ClusterLevel(nn.Module):
    """What one level of clustering learns. Calling it gives the numbers that the level compares with."""

    def __init__(
        self,
        num_heads: int,
        layout: Layout,
        geometry: Geometry,
        assignment: Literal["soft", "hard"],
        position_bias: bool,
        curvature: float,
        learnable_curvature: bool,
        alpha: float,
        clip: float,
        is_single: bool,
        **factory: Any,
    ):
        """As in :class:`~hyptree.nn.ClusterMixer`; ``is_single`` says that there is one centre at any size.

        Every soft assignment is then one: there is nothing to learn, and a parameter without gradient would stop
        distributed training.
        """
        super().__init__()
        self.is_hard, self.clip, self.initial_alpha = assignment == "hard", clip, alpha
        self.alpha: nn.Parameter | None = None
        self.beta: nn.Parameter | None = None
        self.position: PositionBias | None = None
        self.c = float(curvature) if geometry == "hyperbolic" else None
        self.manifold: Lorentz | None = None
        is_trivial = is_single and not self.is_hard
        if self.c is not None and learnable_curvature and not is_trivial:
            place = factory.get("device") or torch.get_default_device()
            with torch.device("cpu"):  # the curvature is checked by its value, which a meta device does not have
                self.manifold = Lorentz(self.c, learnable=True)
            self.manifold.to(place)
        if is_trivial:
            return
        self.alpha = nn.Parameter(torch.tensor(float(alpha), **factory))
        if self.is_hard:
            self.beta = nn.Parameter(torch.zeros((), **factory))
        if position_bias:
            self.position = PositionBias(num_heads, layout, **factory)

    def reset_parameters(self) -> None:
        """Set temperature and offset back and the position bias to zero."""
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.initial_alpha)
        if self.beta is not None:
            nn.init.zeros_(self.beta)
        if self.position is not None:
            self.position.reset_parameters()

    def forward(self, layout: Layout) -> Level:
        bias = None if self.position is None else self.position(layout)
        c = self.c if self.manifold is None else self.manifold.c
        return Level(layout[2], self.alpha, bias, self.beta, c, self.clip)
