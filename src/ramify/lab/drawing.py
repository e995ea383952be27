"""Draws figures: PNG, SVG and the CSV of what is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ramify.errors import UserError, require, suggest
from ramify.files import full_disk_is_one_line, load_tensors, write_atomic, write_text
from ramify.lab.figures import FIGURES, Panel, to_rows
from ramify.lab.fits import fit_runs
from ramify.lab.table import read_runs, to_csv

_SIZE = (5.2, 4.0)
_ENDINGS = (".png", ".svg", ".csv")
_MANY = 9
"""More series than this get no legend of their own; the CSV names them."""


def plot(runs: Path | str, which: Sequence[str] = ("all",), out: Path | str | None = None) -> dict[str, list[Path]]:
    """Draw figures of a sweep; gives the files of each, no files for those the sweep has no data for.

    Args:
        runs: folder of a sweep.
        which: names in :data:`ramify.lab.figures.FIGURES`, or ``all``.
        out: folder; by default ``figures`` in that of the sweep.
    """
    for name in which:
        if name != "all" and name not in FIGURES:
            choices = ("all", *FIGURES)
            raise UserError(f"unknown figure {name!r}; {suggest(name, choices) or 'expected ' + ', '.join(choices)}")
    require("matplotlib", "plot")
    runs = Path(runs)
    rows = read_runs(runs)
    folder = Path(out) if out is not None else (runs if runs.is_dir() else runs.parent) / "figures"
    fits, norms = fit_runs(rows), _norms(runs, rows)
    written = {}
    for name in FIGURES if "all" in which else which:
        panels = [panel for panel in FIGURES[name](rows, fits, norms) if panel.series]
        written[name] = write_figure(folder / name, panels) if panels else []
    return written


def _norms(runs: Path, rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """(models, n) norms of the features, padded with NaN; empty where the sweep's parts are not beside the table."""
    folder = (runs if runs.is_dir() else runs.parent) / "parts"
    names = list(dict.fromkeys(row["part"] for row in rows))
    files = [folder / f"{name}.safetensors" for name in names]
    if not all(path.is_file() for path in files):
        return np.empty((0, 0))
    found = [load_tensors(path)[0]["norms"].double().numpy() for path in files]
    if sum(map(len, found)) != len(rows):
        return np.empty((0, 0))
    widest = max(norms.shape[1] for norms in found)
    pad = [np.pad(norms, ((0, 0), (0, widest - norms.shape[1])), constant_values=math.nan) for norms in found]
    return np.concatenate(pad)


def write_figure(stem: Path | str, panels: Sequence[Panel]) -> list[Path]:
    """Draw panels into ``stem.png`` and ``stem.svg``, write their points into ``stem.csv``; gives the three files.

    Args:
        stem: path without its ending; one of the three endings may be there.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    stem = Path(stem)
    name = stem.stem if stem.suffix in _ENDINGS else stem.name
    files = [stem.with_name(name + ending) for ending in _ENDINGS]
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        (_draw_map if panel.is_map else _draw_lines)(figure, ax, panel)
        ax.set_title(panel.title, fontsize=10)
        ax.set_xlabel(panel.x_name)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    with full_disk_is_one_line(stem.parent, "draw again"):
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path in files[:2]:
            kind = path.suffix[1:]
            # No date inside: the same sweep gives the same picture.
            options: dict[str, Any] = {"format": kind, "dpi": 150, "metadata": {"Date": None} if kind == "svg" else {}}
            write_atomic(path, partial(figure.savefig, **options))
        write_text(files[2], to_csv(to_rows(panels)))
    return files


def _draw_lines(figure: Any, ax: Any, panel: Panel) -> None:
    from matplotlib import colormaps

    solid = [series for series in panel.series if series.style != "dashed"]
    colours = [colormaps["viridis"](0.9 * i / max(1, len(solid) - 1)) for i in range(len(solid))]
    dashes = 0
    for series in panel.series:
        if series.style == "dashed":
            grey = str(min(0.75, 0.2 + 0.25 * dashes))
            dashes += 1
            ax.plot(series.x, series.y, "--", color=grey, label=series.name, linewidth=1.2)
            continue
        colour = colours[solid.index(series)]
        if series.style == "bars":
            ax.bar(series.x, series.y, color=colour, label=series.name)
        elif series.style == "steps":
            ax.step(series.x, series.y, where="mid", color=colour, label=series.name, linewidth=1.2)
        elif series.error is not None:
            error = np.nan_to_num(np.asarray(series.error, float))
            ax.errorbar(series.x, series.y, error, fmt="o", color=colour, label=series.name, markersize=4, capsize=2)
        else:
            mark = "o-" if series.style == "line" else "o"
            ax.plot(series.x, series.y, mark, color=colour, label=series.name, markersize=4, linewidth=1.2)
    if "x" in panel.log:
        ax.set_xscale("log")
    if "y" in panel.log:
        ax.set_yscale("log")
    ax.set_ylabel(panel.y_name)
    if panel.x_name == "m":  # the widths themselves, not powers of ten
        widths = sorted({x for series in panel.series for x in series.x})
        ax.set_xticks(widths, [f"{x:g}" for x in widths], fontsize=8)
        ax.minorticks_off()
    bars = [series for series in panel.series if series.style == "bars"]
    if bars:
        ax.set_xticks([series.x[0] for series in bars], [series.name for series in bars], fontsize=7, rotation=60)
    elif len(panel.series) <= _MANY:
        ax.legend(fontsize=7)
    ax.grid(alpha=0.25)


def _draw_map(figure: Any, ax: Any, panel: Panel) -> None:
    values = np.array([series.y for series in panel.series], float)
    image = ax.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    ax.set_xticks(range(values.shape[1]), [f"{x:g}" for x in panel.series[0].x], fontsize=7, rotation=45)
    ax.set_yticks(range(values.shape[0]), [series.name for series in panel.series], fontsize=7)
    ax.set_ylabel(panel.rows_name)
    figure.colorbar(image, ax=ax, label=panel.y_name)
