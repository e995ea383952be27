"""The figures of a sweep as data: panels of named series, before anything is drawn. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hyptree.lab.figures.curved_figures import curvature
from hyptree.lab.figures.panels import (
    Panel,
    Row,
    Series,
    data_name,
    density_name,
    group_by,
    joined,
    means,
    part_of,
    pooled,
)
from hyptree.lab.figures.published_figures import published, published_series
from hyptree.lab.theory import strong_exponent, weak_exponent, welch_bound


def _sides(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The runs with the strongest decay and those with the strongest growth, part by part, with their title."""
    sides = []
    for title, sign in (("decay", 1), ("growth", -1)):
        chosen: list[Row] = []
        for some in group_by(rows, "part").values():
            extreme = max(sign * row["gamma"] for row in some)
            if extreme > 0:
                chosen += [row for row in some if sign * row["gamma"] == extreme]
        if chosen:
            gammas = ", ".join(f"{gamma:g}" for gamma in sorted({row["gamma"] for row in chosen}))
            sides.append((f"{title}, γ = {gammas}", chosen))
    return sides


def losses(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Loss against width by data set: decay (weak superposition) and growth (strong) side by side."""
    regimes = {(fit["part"], data_name(fit), fit["density"], fit["gamma"]): fit["regime"] for fit in fits}
    panels = []
    for title, chosen in _sides(rows):
        panel = Panel(f"loss against width, {title}", "m", "loss", log="xy")
        for (part, *_), some in group_by(chosen, "part", "dist", "alpha", "density").items():
            regime = regimes[part, data_name(some[0]), some[0]["density"], some[0]["gamma"]]
            name = data_name(some[0], part_of(some[0], chosen), density_name(some[0]), regime)
            panel.series.append(Series(name, *means(some, "m", "loss_eval"), "line"))
        panels.append(panel)
    return panels


def represented(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Which share of the features has a norm above 1/2, by decay."""
    if len({row["gamma"] for row in rows}) < 2:
        return []
    lines = Panel("represented features by decay", "γ", "φ½", note=pooled(group_by(rows, "n", "m", "gamma").values()))
    lines.series = [
        Series(f"n = {n}, m = {m}", *means(some, "gamma", "phi_half"), "line")
        for (n, m), some in group_by(rows, "n", "m").items()
    ]
    return [lines, *_map("represented features", rows, "phi_half", "φ½")]


def _map(title: str, rows: Sequence[Row], name: str, y_name: str) -> list[Panel]:
    """A heat map of a column, alpha across and gamma upwards, where both have several values."""
    rows = [row for row in rows if row["dist"] == "power"]
    panel = Panel(title, "α", y_name, is_map=True, rows_name="γ")
    panel.note = pooled(group_by(rows, "alpha", "gamma").values())
    alphas = sorted({row["alpha"] for row in rows})
    for (gamma,), some in group_by(rows, "gamma").items():
        mean_of = dict(zip(*means(some, "alpha", name), strict=True))
        panel.series.append(Series(f"{gamma:.3g}", alphas, [mean_of.get(alpha, math.nan) for alpha in alphas]))
    return [panel] if len(alphas) > 1 and len(panel.series) > 1 else []


def exponents(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """How well power laws fit, and their exponents over decay and data."""
    sound = [{**fit, "diverged": False} for fit in fits if math.isfinite(fit["exponent"])]
    if not sound:
        return []
    panels = []
    for title, chosen in _sides(sound):
        densities = len({fit["density"] for fit in chosen}) > 1
        names = [
            data_name(fit, part_of(fit, chosen), f"E = {fit['density']:.3g}" if densities else "") for fit in chosen
        ]
        bars = Panel(f"R² of the power law, {title}", "data", "R²")
        bars.series = [
            Series(name, [i], [fit["r2"]], "bars") for i, (name, fit) in enumerate(zip(names, chosen, strict=True))
        ]
        panels.append(bars)
    return panels + _map("exponent", sound, "exponent", "exponent")


def weak(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Weak superposition: the loss is that of the dropped features."""
    models = [row for row in rows if row["regime"] == "weak" and not row["diverged"] and row["loss_unlearned"] > 0]
    panels = []
    if models:
        panel = Panel("loss of weak models and of what they drop", "loss of dropped features", "loss", log="xy")
        for _, some in group_by(models, "part", "dist", "alpha").items():
            name = data_name(some[0], part_of(some[0], models))
            panel.series.append(
                Series(name, [row["loss_unlearned"] for row in some], [row["loss_eval"] for row in some])
            )
        ends = [float(f(row["loss_unlearned"] for row in models)) for f in (min, max)]
        panel.series.append(Series("equal", ends, ends, "dashed"))
        panels.append(panel)
    return panels + _exponent_panel("exponent of weak models", fits, "weak", "α - 1", weak_exponent)


def _exponent_panel(
    title: str, fits: Sequence[Row], regime: str, limit: str, exponent: Callable[[float], float]
) -> list[Panel]:
    """Exponents against alpha with the limit of theory; for weak models also with theory for as many features.

    On the paper's grid also with the exponents that it published for these settings.
    """
    chosen = [fit for fit in fits if fit["regime"] == regime and fit["dist"] == "power"]
    chosen = sorted((fit for fit in chosen if math.isfinite(fit["exponent"])), key=lambda fit: fit["alpha"])
    if not chosen:
        return []
    panel = Panel(title, "α", "exponent")
    for (_, gamma, _), some in group_by(chosen, "part", "gamma", "density").items():
        x, y, error = ([fit[name] for fit in some] for name in ("alpha", "exponent", "error"))
        name = joined(part_of(some[0], chosen, ("gamma",)), f"γ = {gamma:.3g}", density_name(some[0]))
        panel.series.append(Series(name, x, y, "points", error))
    panel.series += published_series(chosen)
    if regime == "weak":
        for (n,), some in group_by(chosen, "n").items():
            values = dict(sorted((fit["alpha"], fit["theory_finite"]) for fit in some))
            panel.series.append(Series(f"theory, n = {n}", list(values), list(values.values()), "dashed"))
    alphas = sorted({fit["alpha"] for fit in chosen})
    alphas = sorted({*alphas, *np.linspace(alphas[0], alphas[-1], 33).tolist()})  # to see where the theory bends
    panel.series.append(Series(limit, alphas, [exponent(alpha) for alpha in alphas], "dashed"))
    return [panel]


def strong(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Strong superposition: norms around one, overlaps near the least possible, exponents from one to two."""
    places = [i for i, row in enumerate(rows) if row["regime"] == "strong" and not row["diverged"]]
    if not places:
        return []
    models = [rows[i] for i in places]
    panels = []
    if len(norms):
        panels.append(_norms(rows, places, norms))
    share = Panel("features with a norm above one", "m", "φ1", log="xy")
    overlap = Panel("overlap of features with a norm above one", "m", "mean squared overlap", log="xy")
    data = list(group_by(models, "part", "dist", "alpha").values())
    for panel, column, why in ((share, "phi_one", "no norm"), (overlap, "mso_strong", "fewer than two norms")):
        empty = 0
        for some in data:
            widths, values = means(some, "m", column)
            places = [i for i, value in enumerate(values) if value > 0]  # axes are logarithmic
            empty += len({row["m"] for row in some}) - len(places)
            name = data_name(some[0], part_of(some[0], models))
            panel.series.append(Series(name, [widths[i] for i in places], [values[i] for i in places]))
        panel.note = _left_out(empty, why, group_by(models, "part", "dist", "alpha", "m").values())
    for (n,), some in group_by(models, "n").items():
        m = sorted({row["m"] for row in some})
        packed = [max(2, min(n, k * k // 2)) for k in m]
        share.series.append(Series(f"m / n, n = {n}", m, [k / n for k in m], "dashed"))
        share.series.append(Series(f"m² / 2n, n = {n}", m, [min(1.0, k * k / 2 / n) for k in m], "dashed"))
        bound = [welch_bound(num, k) ** 2 for num, k in zip(packed, m, strict=True)]
        overlap.series.append(Series(f"least possible for min(n, m²/2) rows, n = {n}", m, bound, "dashed"))
    m = sorted({row["m"] for row in models})
    overlap.series.append(Series("random, 1 / m", m, [1 / k for k in m], "dashed"))
    panels += [share, overlap]
    return panels + _exponent_panel("exponent of strong models", fits, "strong", "max(1, 2α - 2)", strong_exponent)


def _left_out(empty: int, why: str, groups: Iterable[Sequence[Row]]) -> str:
    """What points of strong models do not show: those that a logarithmic axis has no place for, and pooled settings."""
    missing = f"{empty} point{'s' if empty > 1 else ''} with {why} above one not drawn" if empty else ""
    return joined(pooled(groups), missing, by="; ")


def _norms(rows: Sequence[Row], places: Sequence[int], norms: np.ndarray, most: int = 5) -> Panel:
    """How the norms of features spread, for some data sets, under the strongest growth of each part."""
    panel = Panel("norms of features, strongest growth", "norm", "share")
    groups = group_by([{**rows[i], "place": i} for i in places], "part", "dist", "alpha")
    keys = list(groups)
    if len(keys) > most:  # evenly over all of them
        keys = [keys[round(k * (len(keys) - 1) / (most - 1))] for k in range(most)]
    for key in keys:
        some = [row for row in groups[key] if row["gamma"] == min(other["gamma"] for other in groups[key])]
        values = np.concatenate([norms[row["place"]][: row["n"]] for row in some])
        counts, edges = np.histogram(values, bins=np.linspace(0, 2, 81))
        name = data_name(some[0], part_of(some[0], [rows[i] for i in places]))
        panel.series.append(Series(name, list((edges[1:] + edges[:-1]) / 2), list(counts / len(values)), "steps"))
    return panel


def density(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Loss against the number of active features, and against width for each; exponents against it."""
    if len({row["density"] for row in rows}) < 2:
        return []
    panels = []
    sound = [fit for fit in fits if math.isfinite(fit["exponent"])]
    exponent = Panel("exponent by density", "E", "exponent")
    for _, some in group_by(sound, "part", "dist", "alpha", "gamma", "regime").items():
        name = data_name(some[0], part_of(some[0], sound), f"γ = {some[0]['gamma']:.3g}", some[0]["regime"])
        x, y, error = ([fit[column] for fit in some] for column in ("density", "exponent", "error"))
        exponent.series.append(Series(name, x, y, "points", error))
    for title, chosen in _sides(rows):
        note = pooled(group_by(chosen, "m", "density").values())
        against = Panel(f"loss by density, {title}", "E", "loss", log="y", note=note)
        against.series = [
            Series(f"m = {m}", *means(some, "density", "loss_eval"), "line")
            for (m,), some in group_by(chosen, "m").items()
        ]
        width = Panel(f"loss against width, {title}", "m", "loss", log="xy", note=note)
        width.series = [
            Series(f"E = {E:.3g}", *means(some, "m", "loss_eval"), "line")
            for (E,), some in group_by(chosen, "density").items()
        ]
        panels += [against, width]
    return [*panels, exponent]


FIGURES: dict[str, Callable[[Sequence[Row], Sequence[Row], np.ndarray], list[Panel]]] = {
    "loss": losses,
    "represented": represented,
    "exponents": exponents,
    "weak": weak,
    "strong": strong,
    "published": published,
    "density": density,
    "curvature": curvature,
}
"""Name to what gives its panels from runs, fits and norms (models, n); no panels where a sweep has no such data.

All but the last are about flat space.
"""
