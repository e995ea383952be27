"""Where the parts of a linear map lie in its aligned matrix."""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Rows come in groups with zero rows behind each; columns in points, each with its time and zeros behind it."""

    groups: int
    rows: int
    padded_rows: int
    points: int
    point_width: int
