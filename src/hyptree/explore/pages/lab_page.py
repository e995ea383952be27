"""The page of a sweep of toy models: exponents with their regime check and the theory beside them, and the figures.

One HTML file that needs nothing else. :func:`lab_sections` gives its parts, for pages that show more than a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hyptree import __version__
from hyptree.explore.draw.style import read_beside
from hyptree.explore.pages.page import Html, Section, image, page, table
from hyptree.lab.fits import fit_runs
from hyptree.lab.published import compare, with_published
from hyptree.lab.sweeps.folder import read_config
from hyptree.lab.sweeps.run_table import read_runs

Row = Mapping[str, Any]

FIGURES = {
    "loss": (
        "Loss against width",
        "One line per data set. Left, rows decay: mostly the loss of features that were dropped. Right, norms are "
        "pulled to one: all features are kept, and the loss is their overlap.",
    ),
    "represented": (
        "Which features are represented",
        "Share of the features with a norm above one half. Growth (γ below zero) keeps all of them, decay about as "
        "many as there are dimensions.",
    ),
    "exponents": (
        "Power laws",
        "How well they fit, and their exponents over data (across) and decay (upwards). Where the regime is mixed, an "
        "exponent has no theory to be compared with.",
    ),
    "weak": (
        "Weak superposition",
        "The loss is that of the dropped features, and the exponent that of their tail with this many features, not "
        "its limit α - 1.",
    ),
    "strong": (
        "Strong superposition",
        "Norms in two lobes around one; overlaps between those of random directions and the least possible for "
        "min(n, m²/2) rows (models with fewer rows above one may lie below that line); exponents from one to "
        "2(α - 1).",
    ),
    "published": (
        "Beside the published exponents",
        "Settings of the paper's grid: our exponent against the one that the paper shows for the same setting, which "
        "is that of one start. Points on the dashed line are equal.",
    ),
    "density": ("More active features", "The loss grows with the number of active features; the exponent stays."),
    "curvature": (
        "Hyperbolic space",
        "The same models with their features in hyperbolic space of curvature -c; flat ones are at c = 0.",
    ),
}
"""Of every figure of :data:`hyptree.lab.figures.sweep_figures.FIGURES`: its heading and what to see in it."""

_STYLE = read_beside(__file__, "lab.css")

_REGIMES = {
    "strong": "All features are represented (95 % or more, in every model of the fit); theory: max(1, 2(α - 1)).",
    "weak": "At most two features per dimension are represented, in every model of the fit; theory: the tail of what "
    "is dropped, with exactly this n and these widths.",
    "mixed": "Neither holds for all models of the fit, so no theory is put beside the exponent.",
    "none": "No model of the fit is left.",
}


def lab_page(runs: Path | str, figures: Mapping[str, Path], path: Path | str | None = None) -> Path:
    """Writes the page of a sweep (its folder or table of runs), ``index.html`` in its folder; gives the path.

    Args:
        figures: name to PNG, as :func:`hyptree.lab.figures.drawing.plot` gives them.
    """
    runs = Path(runs)
    folder = runs if runs.is_dir() else runs.parent
    unfinished: list[str] = []  # the page says so itself; it may be read without the line on the terminal
    rows = read_runs(runs, unfinished.append)
    out = Path(path) if path is not None else folder / "index.html"
    config = read_config(folder) if (folder / "config.json").is_file() else None  # its table may be here alone
    sections = lab_sections(rows, figures, config)
    footer = f"hyptree {__version__}. The numbers are in runs.csv and fits.csv, those of a figure in the CSV beside it."
    return page(out, "Superposition lab", " ".join([_lead(rows), *unfinished]), sections, style=_STYLE, footer=footer)


def lab_sections(
    rows: Sequence[Row], figures: Mapping[str, Path], config: Mapping[str, Any] | None = None
) -> list[Section]:
    """The parts of the page: exponents, diverged models, figures, what was trained."""
    fits = fit_runs(rows)
    sections = [Section("Exponents", _exponents(fits)), Section("Models that diverged", _diverged(rows))]
    for name, file in figures.items():
        title, caption = FIGURES[name]
        html = f"<figure>{image(file, title)}<figcaption>{escape(caption)}</figcaption></figure>"
        sections.append(Section(title, html))
    if config:
        sections.append(Section("What was trained", _trained(config)))
    return sections


def _lead(rows: Sequence[Row]) -> str:
    widths = sorted({row["m"] for row in rows})
    features = sorted({row["n"] for row in rows})
    return (
        f"{len(rows)} toy models squeeze {' or '.join(map(str, features))} sparse features into {widths[0]} to "
        f"{widths[-1]} dimensions. How their loss falls with the width, what theory says, and whether the models "
        "are in the regime that it speaks of."
    )


def _exponents(fits: Sequence[Row]) -> str:
    parts = [
        "<p>Loss is fitted as a power of the width m, by least squares on logarithms. The regime is what the models "
        "turned out to be, not what the decay γ was meant to make them: <b>kept n/m</b> is the least and the most of "
        "represented features per dimension. <b>theory</b> is that of the regime; <b>in 95 %</b> says whether it lies "
        "in the interval of the fit.</p>"
    ]
    if compared := compare(fits):
        parts.append(
            "<p><b>published</b> is what the paper shows for the same setting, trained the same way; seed sd is in "
            f"fits.csv. {escape(compared[0].upper() + compared[1:])}.</p>"
        )
    for regime, meaning in _REGIMES.items():
        chosen = [fit for fit in fits if fit["regime"] == regime]
        if not chosen:
            continue
        is_open = " open" if regime in ("strong", "weak") else ""
        count = f"{len(chosen)} setting{'s' if len(chosen) > 1 else ''}"
        parts.append(
            f"<details{is_open}><summary>{regime.capitalize()}: {count}</summary><p class='note'>{escape(meaning)}</p>"
            f'<div class="tall">{_fit_table(chosen)}</div></details>'
        )
    return "".join(parts)


def _fit_table(fits: Sequence[Row]) -> str:
    several = {name: len({str(fit[name]) for fit in fits}) > 1 for name in ("part", "density", "curvature")}
    has_seeds = any(math.isfinite(fit["boot_low"]) for fit in fits)
    is_curved = any(fit["curvature"] for fit in fits)
    has_published = bool(with_published(fits))
    head = ["data", "γ"] + [text for name, text in _EXTRA.items() if several[name]]
    head += ["kept n/m", "exponent", *(["published"] if has_published else []), "95 %"]
    head += [*(["95 % over seeds"] if has_seeds else []), "R²", "theory", "in 95 %"]
    head += ["finite-n", "α - 1", *(["from flat", "loss / flat"] if is_curved else []), "models", "diverged"]
    lines = []
    for fit in fits:
        theory = {"strong": fit["theory_strong"], "weak": fit["theory_finite"]}.get(fit["regime"], math.nan)
        theory = math.nan if fit["curvature"] else theory  # it speaks of flat space
        data = f"α = {fit['alpha']:g}" if fit["dist"] == "power" else str(fit["dist"])
        line = [data, f"{fit['gamma']:.3g}"]
        line += [f"{fit[name]:.3g}" if name != "part" else str(fit[name]) for name in _EXTRA if several[name]]
        line += [_between(fit["kept_low"], fit["kept_high"], ".3g"), _number(fit["exponent"], fit["error"])]
        line += [_number(fit["published"], fit["published_error"])] if has_published else []
        line += [_between(fit["low"], fit["high"])]
        line += [_between(fit["boot_low"], fit["boot_high"])] if has_seeds else []
        line += [_number(fit["r2"]), _number(theory), _inside(theory, fit["low"], fit["high"])]
        line += [_number(fit["theory_finite"]), _number(fit["theory_weak"])]
        line += [_number(fit["change"], fit["change_error"]), _number(fit["loss_ratio"])] if is_curved else []
        line += [str(fit["num_models"]), str(fit["num_diverged"])]
        lines.append(line)
    return table(head, lines)


_EXTRA = {"part": "part", "density": "E", "curvature": "c"}
"""Columns that are shown where a table has several values of them, and what they are called."""


def _number(value: float, error: float = math.nan) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.2f} ± {error:.2f}" if math.isfinite(error) else f"{value:.2f}"


def _between(low: float, high: float, form: str = ".2f") -> str:
    return f"{low:{form}} to {high:{form}}" if math.isfinite(low) and math.isfinite(high) else "–"


def _inside(value: float, low: float, high: float) -> str:
    if not all(map(math.isfinite, (value, low, high))):
        return "–"
    return Html('<span class="yes">yes</span>' if low <= value <= high else '<span class="no">no</span>')


def _diverged(rows: Sequence[Row]) -> str:
    lost = [row for row in rows if row["diverged"]]
    if not lost:
        return f"<p>None of {len(rows)}.</p>"
    names = [f"{row['part']}: m = {row['m']}, α = {row['alpha']:g}, γ = {row['gamma']:.3g}" for row in lost]
    items = "".join(f"<li>{escape(name)}, seed {row['seed']}</li>" for name, row in zip(names, lost, strict=True))
    return (
        f"<p>{len(lost)} of {len(rows)}. They are marked in the table of runs and left out of fits and figures.</p>"
        f'<details><summary>Which</summary><ul class="note">{items}</ul></details>'
    )


def _trained(config: Mapping[str, Any]) -> str:
    names = ("n", "m", "dist", "alpha", "gamma", "density", "curvature", "seeds", "batch", "steps", "lr", "bias_init")
    parts: Mapping[str, Mapping[str, Any]] = config.get("parts", {})
    lines = [[name, *(_format(part.get(key, "–")) for key in names)] for name, part in parts.items()]
    return f'<div class="tall">{table(["part", *(name.replace("_", " ") for name in names)], lines)}</div>'


def _format(value: Any) -> str:
    if isinstance(value, list):
        texts = [_format(one) for one in value]
        return " ".join(texts) if len(texts) <= 6 else f"{texts[0]} to {texts[-1]} ({len(texts)})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
