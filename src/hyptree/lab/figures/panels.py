"""What figures are made of: panels of named series, and what sorts rows of runs and fits into them. numpy alone.

What a figure shows is a table first (:func:`to_rows`), so that the CSV beside a picture cannot disagree with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Row = Mapping[str, Any]
Style = Literal["points", "hollow", "line", "dashed", "bars", "steps"]


@dataclass
class Series:
    """Points of one colour; ``error`` is half the length of the bars through them. Hollow ones are grey: not ours."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "points"
    error: Sequence[float] | None = None
    labels: Sequence[str] | None = None
    """A text beside each point."""
    x_error: Sequence[float] | None = None
    """Half the length of bars across."""


@dataclass
class Panel:
    """One pair of axes. With ``is_map``, each series is a row of a heat map and its name the value of ``rows_name``."""

    title: str
    x_name: str
    y_name: str
    series: list[Series] = field(default_factory=list)
    log: str = ""
    """Which axes are logarithmic: "", "x", "y" or "xy"."""
    is_map: bool = False
    rows_name: str = ""
    note: str = ""
    """What is not drawn or was put together, below the title."""
    number: str = ".4g"
    """The format of numbers of y, on a page."""


def to_rows(panels: Iterable[Panel]) -> list[dict[str, Any]]:
    """Every point of a figure, one row each."""
    return [
        {
            "panel": panel.title,
            "series": series.name,
            "x_name": panel.x_name,
            "x": x,
            "y_name": panel.y_name,
            "y": y,
            "error": series.error[i] if series.error is not None else math.nan,
            "x_error": series.x_error[i] if series.x_error is not None else math.nan,
            "label": series.labels[i] if series.labels is not None else "",
            "note": panel.note,
        }
        for panel in panels
        for series in panel.series
        for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
    ]


def means(rows: Iterable[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    """Sorted values of ``x`` and the mean of ``y`` at each; diverged models and missing numbers are left out."""
    groups: dict[float, list[float]] = {}
    for row in rows:
        if not row["diverged"] and math.isfinite(row[y]):
            groups.setdefault(row[x], []).append(row[y])
    keys = sorted(groups)
    return keys, [float(np.mean(groups[key])) for key in keys]


def fitted(name: str, fits: Sequence[Row], x: str, y: str, error: str, style: Style = "points") -> Series:
    """A column of fits against another one, with its errors."""
    return Series(name, [fit[x] for fit in fits], [fit[y] for fit in fits], style, [fit[error] for fit in fits])


def lines_by(rows: Iterable[Row], column: str, name: str, x: str, y: str) -> list[Series]:
    """A line of :func:`means` for every value of a column; ``name`` is a format for the value."""
    return [Series(name.format(value), *means(some, x, y), "line") for (value,), some in group_by(rows, column).items()]


def group_by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that share the values of some columns, in the order of these values (NaN counts as one value)."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple("" if row[name] != row[name] else row[name] for name in names), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: [(isinstance(v, str), v) for v in item[0]]))


def data_name(row: Row, *rest: str) -> str:
    """What tells a data set: its exponent, or its shape; what else there is to say in brackets."""
    data = f"α = {row['alpha']:g}" if row["dist"] == "power" else str(row["dist"])
    extra = joined(*rest)
    return f"{data} ({extra})" if extra else data


def density_name(row: Row) -> str:
    """The density, where it is not that of the paper's grid."""
    return "" if row["density"] == 1 else f"E = {row['density']:.3g}"


def joined(*parts: str, by: str = ", ") -> str:
    """The parts that say something."""
    return by.join(filter(None, parts))


def pooled(groups: Iterable[Sequence[Row]]) -> str:
    """What differs among rows that one point is the mean of, apart from the start; nothing where nothing does."""
    columns = {"part": "part", "n": "n", "m": "m", "dist": "data", "alpha": "α", "gamma": "γ", "density": "E"}
    groups = list(groups)

    def differs(name: str) -> bool:
        return any(len({str(row[name]) for row in some if name in row}) > 1 for some in groups)

    over = [sign for name, sign in columns.items() if differs(name)]
    over = [sign for sign in over if sign != "data"] if "α" in over else over  # other shapes have no α
    return f"means over {' and '.join(over)}" if over else ""


def part_of(row: Row, rows: Sequence[Row], same: Sequence[str] = ("dist", "alpha")) -> str:
    """The part of a row, where another part has rows that are the same in all else that is said about it."""

    def is_twin(other: Row) -> bool:
        return other["part"] != row["part"] and all(str(other[name]) == str(row[name]) for name in same)

    return str(row["part"]) if any(map(is_twin, rows)) else ""
