"""The figure of features in hyperbolic space as data: panels, before anything is drawn. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from hyptree.lab.figures.panels import Panel, Row, Series, data_name, density_name, group_by, means
from hyptree.lab.fits import best_curvatures
from hyptree.lab.frequencies import frequencies
from hyptree.lab.theory import curved_floor, matched_curvature

_MOST = 3
"""Settings of a part whose losses are drawn."""


def curvature(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Features in hyperbolic space: loss by curvature, what it changes from the same models flat, and why."""
    if len({row["curvature"] for row in rows}) < 2:
        return []
    setting = ("part", "dist", "alpha", "density", "gamma")
    panels = []
    for (part,), of_part in group_by(rows, "part").items():
        groups = list(group_by(of_part, *setting).items())
        chosen = groups if len(groups) <= _MOST else [groups[0], groups[len(groups) // 2], groups[-1]]
        note = f"{len(chosen)} of the {len(groups)} settings of {part} are drawn" if len(chosen) < len(groups) else ""
        for key, some in chosen:
            title = f"{part}: {data_name(some[0], f'γ = {key[-1]:.3g}', density_name(some[0]))}"
            panel = Panel(title, "m", "loss", log="xy", note=note)
            for (c,), models in group_by(some, "curvature").items():
                panel.series.append(Series(f"c = {c:g}", *means(models, "m", "loss_eval"), "line"))
            panel.series += _floors(some[0], panel.series)
            panels.append(panel)
    change = Panel("exponent less that of the same models flat", "c", "change of the exponent")
    ratio = Panel("loss as a multiple of the same models flat", "c", "loss / flat", log="y")
    for _, lines in group_by([fit for fit in fits if math.isfinite(fit["change"])], *setting).items():
        name = _name(lines[0], rows)
        x, y, error = ([fit[column] for fit in lines] for column in ("curvature", "change", "change_error"))
        change.series.append(Series(name, x, y, "points", error))
        ratio.series.append(Series(name, x, [fit["loss_ratio"] for fit in lines], "line"))
    if change.series:
        widest = max(row["curvature"] for row in rows)
        change.series.append(Series("no change", [0, widest], [0, 0], "dashed"))
    return [*panels, change, ratio, _best(rows), _positive(rows)]


def _name(row: Row, rows: Sequence[Row]) -> str:
    """Data and part of a setting, with its decay and density where the part has several of them."""
    of_part = [other for other in rows if other["part"] == row["part"]]
    shown = {"γ": "gamma", "E": "density"}
    several = [sign for sign, column in shown.items() if len({other[column] for other in of_part}) > 1]
    return data_name(row, str(row["part"]), *(f"{sign} = {row[shown[sign]]:.3g}" for sign in several))


def _floors(row: Row, drawn: Sequence[Series]) -> list[Series]:
    """The loss that no width takes away at a curvature, where it lies among the drawn losses."""
    lowest, highest = (f(y for series in drawn for y in series.y) for f in (min, max))
    widths = sorted({x for series in drawn for x in series.x})
    floors = []
    for series in drawn:
        c = float(series.name.removeprefix("c = "))
        floor = _floor(row["n"], row["alpha"], row["density"], row["dist"], c) if c else 0.0
        if lowest < floor < highest:
            floors.append(Series(f"floor, c = {c:g}", [widths[0], widths[-1]], [floor, floor], "dashed"))
    return floors


@cache  # a search of a second
def _floor(n: int, alpha: float, density: float, dist: str, c: float) -> float:
    return curved_floor(frequencies(n, alpha, density, dist), c)[0]


def _best(rows: Sequence[Row]) -> Panel:
    """Which of the curvatures does best at each width, beside the one whose threshold is the usual overlap."""
    panel = Panel("best curvature of those tried", "m", "c", log="x")
    for line in best_curvatures(rows):
        widths = line["curvatures"]
        panel.series.append(Series(_name(line, rows), list(widths), list(widths.values()), "line"))
    m = sorted({row["m"] for row in rows if row["m"] > 1})
    if panel.series:
        panel.series.append(Series("threshold = 1/√m", m, [matched_curvature(k) for k in m], "dashed"))
    return panel


def _positive(rows: Sequence[Row]) -> Panel:
    """Overlaps that the relu lets pass, which curvature takes away; for the strongest growth."""
    strongest = min(row["gamma"] for row in rows)
    growing = [row for row in rows if row["gamma"] == strongest]
    first, *others = group_by(growing, "part", "dist", "alpha", "density").values()
    scaled = [{**row, "positive": row["mso_positive"] * row["m"]} for row in first]
    title = f"overlaps that pass: {_name(first[0], rows)}"
    note = f"1 of the {1 + len(others)} settings with γ = {strongest:.3g} is drawn" if others else ""
    panel = Panel(title, "m", "positive overlap² m", log="x", note=note)
    for (c,), some in group_by(scaled, "curvature").items():
        panel.series.append(Series(f"c = {c:g}", *means(some, "m", "positive"), "line"))
    return panel
