"""The figures of a sweep as data: panels of named series, before anything is drawn. numpy alone.

What a figure shows is a table first (:func:`to_rows`), so that the CSV beside a picture cannot disagree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ramify.lab.theory import welch_bound

Row = Mapping[str, Any]
Style = Literal["points", "line", "dashed", "bars", "steps"]


@dataclass
class Series:
    """Points of one colour; ``error`` is half the length of the bars through them."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "points"
    error: Sequence[float] | None = None
    labels: Sequence[str] | None = None
    """A text beside each point."""


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
            "label": series.labels[i] if series.labels is not None else "",
        }
        for panel in panels
        for series in panel.series
        for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
    ]


def means(rows: Iterable[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    """Sorted values of ``x`` and the mean of ``y`` at each; diverged models and missing numbers are left out."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if not row["diverged"] and math.isfinite(row[y]):
            found.setdefault(row[x], []).append(row[y])
    keys = sorted(found)
    return keys, [float(np.mean(found[key])) for key in keys]


def by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that share the values of some columns, in the order of these values (NaN counts as one value)."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple("" if row[name] != row[name] else row[name] for name in names), []).append(row)
    return dict(sorted(found.items(), key=lambda item: [(isinstance(v, str), v) for v in item[0]]))


def _said(row: Row) -> str:
    """What tells a data set: its exponent, or its shape."""
    return f"α = {row['alpha']:g}" if row["dist"] == "power" else str(row["dist"])


def _sides(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The runs with the strongest decay and those with the strongest growth, part by part, with their title."""
    sides = []
    for title, sign in (("decay", 1), ("growth", -1)):
        chosen: list[Row] = []
        for some in by(rows, "part").values():
            extreme = max(sign * row["gamma"] for row in some)
            if extreme > 0:
                chosen += [row for row in some if sign * row["gamma"] == extreme]
        if chosen:
            gammas = ", ".join(f"{gamma:g}" for gamma in sorted({row["gamma"] for row in chosen}))
            sides.append((f"{title}, γ = {gammas}", chosen))
    return sides


def losses(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Loss against width by data set: decay (weak superposition) and growth (strong) side by side."""
    regimes = {(fit["part"], _said(fit), fit["density"], fit["gamma"]): fit["regime"] for fit in fits}
    panels = []
    for title, chosen in _sides(rows):
        panel = Panel(f"loss against width, {title}", "m", "loss", log="xy")
        for (part, *_), some in by(chosen, "part", "dist", "alpha", "density").items():
            regime = regimes[part, _said(some[0]), some[0]["density"], some[0]["gamma"]]
            extra = "" if some[0]["density"] == 1 else f", E = {some[0]['density']:.3g}"
            panel.series.append(
                Series(f"{_said(some[0])}{extra} ({part}: {regime})", *means(some, "m", "loss_eval"), "line")
            )
        panels.append(panel)
    return panels


def represented(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Which share of the features has a norm above 1/2, by decay."""
    if len({row["gamma"] for row in rows}) < 2:
        return []
    lines = Panel("represented features by decay", "γ", "φ½")
    lines.series = [
        Series(f"n = {n}, m = {m}", *means(some, "gamma", "phi_half"), "line")
        for (n, m), some in by(rows, "n", "m").items()
    ]
    heat = _map("represented features", rows, "phi_half", "φ½")
    return [lines, heat]


def _map(title: str, rows: Sequence[Row], name: str, said: str) -> Panel:
    """A heat map of a column: alpha across, gamma upwards."""
    panel = Panel(title, "α", said, is_map=True, rows_name="γ")
    alphas = sorted({row["alpha"] for row in rows if row["dist"] == "power"})
    for (gamma,), some in by([row for row in rows if row["dist"] == "power"], "gamma").items():
        found = dict(zip(*means(some, "alpha", name), strict=True))
        panel.series.append(Series(f"{gamma:.3g}", alphas, [found.get(alpha, math.nan) for alpha in alphas]))
    return panel


def exponents(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """How well power laws fit, and their exponents over decay and data."""
    sound = [{**fit, "diverged": False} for fit in fits if math.isfinite(fit["exponent"])]
    if not sound:
        return []
    panels = []
    for title, chosen in _sides(sound):
        names = [f"{_said(fit)}, {fit['part']}" for fit in chosen]
        bars = Panel(f"R² of the power law, {title}", "data", "R²")
        bars.series = [
            Series(name, [i], [fit["r2"]], "bars") for i, (name, fit) in enumerate(zip(names, chosen, strict=True))
        ]
        panels.append(bars)
    if len({fit["gamma"] for fit in sound}) > 1 and any(fit["dist"] == "power" for fit in sound):
        panels.append(_map("exponent", sound, "exponent", "exponent"))
    return panels


def weak(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Weak superposition: the loss is that of the dropped features."""
    models = [row for row in rows if row["regime"] == "weak" and not row["diverged"] and row["loss_unlearned"] > 0]
    panels = []
    if models:
        panel = Panel("loss of weak models against that of the dropped features", "theory", "loss", log="xy")
        for _, some in by(models, "part", "dist", "alpha").items():
            panel.series.append(
                Series(_said(some[0]), [row["loss_unlearned"] for row in some], [row["loss_eval"] for row in some])
            )
        ends = [float(f(row["loss_unlearned"] for row in models)) for f in (min, max)]
        panel.series.append(Series("equal", ends, ends, "dashed"))
        panels.append(panel)
    curves = {"finite n": "theory_finite", "α - 1": "theory_weak"}
    return panels + _exponent_panel("exponent of weak models", fits, "weak", curves)


def _exponent_panel(title: str, fits: Sequence[Row], regime: str, curves: Mapping[str, str]) -> list[Panel]:
    chosen = [fit for fit in fits if fit["regime"] == regime and fit["dist"] == "power"]
    chosen = sorted((fit for fit in chosen if math.isfinite(fit["exponent"])), key=lambda fit: fit["alpha"])
    if not chosen:
        return []
    panel = Panel(title, "α", "exponent")
    for (part, gamma), some in by(chosen, "part", "gamma").items():
        x, y, error = ([fit[name] for fit in some] for name in ("alpha", "exponent", "error"))
        panel.series.append(Series(f"{part}, γ = {gamma:.3g}", x, y, "points", error))
    for (n,), some in by(chosen, "n").items():
        for name, column in curves.items():
            values = dict(sorted((fit["alpha"], fit[column]) for fit in some))
            said = name if column != "theory_finite" else f"theory, n = {n}"
            panel.series.append(Series(said, list(values), list(values.values()), "dashed"))
    return [panel]


def strong(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Strong superposition: norms around one, overlaps near the least possible, exponents from one to two."""
    places = [i for i, row in enumerate(rows) if row["regime"] == "strong" and not row["diverged"]]
    if not places:
        return []
    models = [rows[i] for i in places]
    panels = []
    if len(norms):
        panel = Panel("norms of features", "norm", "share")
        for (part, alpha), some in by([{**rows[i], "place": i} for i in places], "part", "alpha").items():
            values = np.concatenate([norms[row["place"]][: row["n"]] for row in some])
            counts, edges = np.histogram(values, bins=np.linspace(0, 2, 81))
            name = f"{_said(some[0])} ({part})" if alpha != "" else f"{some[0]['dist']} ({part})"
            panel.series.append(Series(name, list((edges[1:] + edges[:-1]) / 2), list(counts / len(values)), "steps"))
        panels.append(panel)
    share = Panel("features with a norm above one", "m", "φ1", log="xy")
    overlap = Panel("mean squared overlap of features with a norm above one", "m", "mean squared overlap", log="xy")
    for panel, name in ((share, "phi_one"), (overlap, "mso_strong")):
        for (part, *_), some in by(models, "part", "dist", "alpha").items():
            panel.series.append(Series(f"{_said(some[0])} ({part})", *means(some, "m", name)))
    for (n,), some in by(models, "n").items():
        m = sorted({row["m"] for row in some})
        packed = [max(2, min(n, k * k // 2)) for k in m]
        share.series.append(Series(f"m / n, n = {n}", m, [k / n for k in m], "dashed"))
        share.series.append(Series(f"m² / 2n, n = {n}", m, [min(1.0, k * k / 2 / n) for k in m], "dashed"))
        bound = [welch_bound(num, k) ** 2 for num, k in zip(packed, m, strict=True)]
        overlap.series.append(Series(f"least possible, n = {n}", m, bound, "dashed"))
        overlap.series.append(Series(f"1 / m, n = {n}", m, [1 / k for k in m], "dashed"))
    panels += [share, overlap]
    return panels + _exponent_panel("exponent of strong models", fits, "strong", {"max(1, 2α - 2)": "theory_strong"})


def density(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Loss against the number of active features, and against width for each."""
    if len({row["density"] for row in rows}) < 2:
        return []
    panels = []
    for title, chosen in _sides(rows):
        against = Panel(f"loss by density, {title}", "E", "loss", log="y")
        against.series = [
            Series(f"m = {m}", *means(some, "density", "loss_eval"), "line") for (m,), some in by(chosen, "m").items()
        ]
        width = Panel(f"loss against width, {title}", "m", "loss", log="xy")
        width.series = [
            Series(f"E = {E:.3g}", *means(some, "m", "loss_eval"), "line")
            for (E,), some in by(chosen, "density").items()
        ]
        panels += [against, width]
    return panels


FIGURES: dict[str, Callable[[Sequence[Row], Sequence[Row], np.ndarray], list[Panel]]] = {
    "loss": losses,
    "represented": represented,
    "exponents": exponents,
    "weak": weak,
    "strong": strong,
    "density": density,
}
"""Name to what gives its panels from runs, fits and norms (models, n); no panels where a sweep has no such data."""
