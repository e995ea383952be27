"""The figures of a sweep as data: panels of named series, before anything is drawn. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from hyptree.lab.figures.panels import (
    Panel,
    Row,
    Series,
    data_name,
    density_name,
    fitted,
    group_by,
    joined,
    lines_by,
    means,
    part_of,
    pooled,
)
from hyptree.lab.fits import best_curvatures
from hyptree.lab.published import by_seeds, with_published
from hyptree.lab.theory import curved_floor, frequencies, matched_curvature, strong_exponent, weak_exponent, welch_bound

_MOST = 3
"""Settings of a part whose losses are drawn."""


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
        name = joined(part_of(some[0], chosen, ("gamma",)), f"γ = {gamma:.3g}", density_name(some[0]))
        panel.series.append(fitted(name, some, "alpha", "exponent", "error"))
    # What the paper has for these settings, once for each, also where several parts have it.
    if theirs := list({(fit["alpha"], fit["gamma"]): fit for fit in with_published(chosen)}.values()):
        panel.series.append(fitted("published", theirs, "alpha", "published", "published_error", "hollow"))
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
        exponent.series.append(fitted(name, some, "density", "exponent", "error"))
    for title, chosen in _sides(rows):
        note = pooled(group_by(chosen, "m", "density").values())
        against = Panel(f"loss by density, {title}", "E", "loss", log="y", note=note)
        against.series = lines_by(chosen, "m", "m = {}", "density", "loss_eval")
        width = Panel(f"loss against width, {title}", "m", "loss", log="xy", note=note)
        width.series = lines_by(chosen, "density", "E = {:.3g}", "m", "loss_eval")
        panels += [against, width]
    return [*panels, exponent]


# ---- beside the published exponents ----------------------------------------------------------------------------------


def published(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Our exponents against those of the paper, setting by setting."""
    chosen = with_published(fits)
    if not chosen:
        return []
    panel = Panel("exponent, ours against published", "published exponent (one start)", "our exponent")
    for (_, gamma), some in group_by(chosen, "part", "gamma").items():
        name = joined(part_of(some[0], chosen, ("gamma",)), f"γ = {gamma:.3g}")
        panel.series.append(
            Series(
                name,
                [fit["published"] for fit in some],
                [fit["exponent"] for fit in some],
                error=[fit["seed_sd"] if by_seeds(fit) else fit["error"] for fit in some],
                labels=[f"α = {fit['alpha']:g}" for fit in some],
                x_error=[fit["published_error"] for fit in some],
            )
        )
    every = [fit[name] for fit in chosen for name in ("published", "exponent")]
    panel.series.append(Series("equal", [min(every), max(every)], [min(every), max(every)], "dashed"))
    kinds = {by_seeds(fit) for fit in chosen}
    ours = [text for is_by, text in ((False, "standard error"), (True, "deviation of one start")) if is_by in kinds]
    panel.note = f"bars across: standard error, where published; bars upwards: {' or '.join(ours)}"
    return [panel]


# ---- features in hyperbolic space ------------------------------------------------------------------------------------


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
            panel.series = lines_by(some, "curvature", "c = {:g}", "m", "loss_eval")
            panel.series += _floors(some[0], panel.series)
            panels.append(panel)
    change = Panel("exponent less that of the same models flat", "c", "change of the exponent")
    ratio = Panel("loss as a multiple of the same models flat", "c", "loss / flat", log="y")
    for _, lines in group_by([fit for fit in fits if math.isfinite(fit["change"])], *setting).items():
        name = _name(lines[0], rows)
        change.series.append(fitted(name, lines, "curvature", "change", "change_error"))
        x, y = ([fit[column] for fit in lines] for column in ("curvature", "loss_ratio"))
        ratio.series.append(Series(name, x, y, "line"))
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
    panel.series = lines_by(scaled, "curvature", "c = {:g}", "m", "positive")
    return panel


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
