"""Draws figures: PNG, SVG and the CSV of what is in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import UserError, require, require_known
from hyptree.files import full_disk_is_one_line, write_atomic, write_text
from hyptree.lab.figures.panels import Panel, Series, to_rows
from hyptree.lab.figures.sweep_figures import FIGURES
from hyptree.lab.fits import fit_runs
from hyptree.lab.sweeps.folder import read_part
from hyptree.lab.sweeps.run_table import read_runs
from hyptree.tables import to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (5.2, 4.0)
_ENDINGS = (".png", ".svg", ".csv")
_INSIDE = 4
"""More series than this have their names beside the axes, where they hide nothing."""
_MANY = 40
"""More than this get no names at all; the CSV has them."""
_NAME = 32
"""Letters of a name that stand in one line of the legend; longer lines would take the room of the axes."""
_TEXTS = 40
"""More texts beside points than this are not drawn, as they would hide them; the CSV has them."""
_FEW = 40
"""A line through more points than this has no dots at them."""
_DASHES = ("--", ":", "-.")


def plot(
    runs: Path | str,
    which: Sequence[str] = ("all",),
    out: Path | str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, list[Path]]:
    """Draw figures of a sweep; gives the files of each, no files for those the sweep has no data for.

    Args:
        runs: folder of a sweep.
        which: names in :data:`hyptree.lab.figures.sweep_figures.FIGURES`, or ``all``.
        out: folder; by default ``figures`` in that of the sweep.
        say: draws a sweep that is not finished, too; as for :func:`hyptree.lab.sweeps.run_table.read_runs`.
    """
    require_known("unknown figure {!r}", which, ("all", *FIGURES))
    require("matplotlib", "plot")
    runs = Path(runs)
    rows = read_runs(runs, say)
    folder = Path(out) if out is not None else (runs if runs.is_dir() else runs.parent) / "figures"
    names = list(FIGURES) if "all" in which else which
    if runs.is_file():
        require_apart([path for name in names for path in figure_files(folder / name)], {"the table of runs": runs})
    norms = _norms(runs, rows)
    if not len(norms) and "strong" in names and say is not None:
        say(f"norms of features are not drawn: the parts of the sweep are not all beside {runs}")
    # Curved models have a figure of their own, beside the same models flat; the others are about one space.
    flat = [i for i, row in enumerate(rows) if row["curvature"] == 0] or list(range(len(rows)))
    of_flat = [rows[i] for i in flat]
    written = {}
    for name in names:
        if name == "curvature":
            panels_of = FIGURES[name](rows, fit_runs(rows), norms)
        else:
            panels_of = FIGURES[name](of_flat, fit_runs(of_flat), norms[flat] if len(norms) else norms)
        panels = [panel for panel in panels_of if panel.series]
        written[name] = write_figure(folder / name, panels) if panels else []
    return written


def _norms(runs: Path, rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """(models, n) norms of the features, padded with NaN; empty where the sweep's parts are not beside the table."""
    folder = runs if runs.is_dir() else runs.parent
    parts = [read_part(folder, name, count) for name, count in Counter(row["part"] for row in rows).items()]
    every = [part[0]["norms"].double().numpy() for part in parts if part is not None]
    if len(every) != len(parts) or sum(map(len, every)) != len(rows):
        return np.empty((0, 0))
    widest = max(norms.shape[1] for norms in every)
    pad = [np.pad(norms, ((0, 0), (0, widest - norms.shape[1])), constant_values=math.nan) for norms in every]
    return np.concatenate(pad)


def figure_files(stem: Path | str) -> list[Path]:
    """The PNG, SVG and CSV of a figure; ``stem`` may have one of the three endings."""
    stem = Path(stem)
    name = stem.stem if stem.suffix in _ENDINGS else stem.name
    return [stem.with_name(name + ending) for ending in _ENDINGS]


def require_apart(files: Sequence[Path], others: Mapping[str, Path]) -> None:
    """Refuse, before any work, to write ``files`` over ``others``, which are what a file is, in words, to its path."""
    for path in files:
        for what, other in others.items():
            if path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other)):
                raise UserError(f"this would write {path} over {what}; give another name")


def draw_panels(panels: Sequence[Panel], palette: Sequence[str] = ()) -> Figure:
    """The panels side by side, as a matplotlib figure; a palette is for series without an order."""
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    columns = 3 if len(panels) == 3 or len(panels) > 4 else min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        (_draw_map if panel.is_map else partial(_draw_lines, palette=palette))(figure, ax, panel)
        title = [panel.title, *panel.note.split("; ")] if panel.note else [panel.title]
        ax.set_title("\n".join(title), fontsize=9 if panel.note else 10)
        ax.set_xlabel(panel.x_name)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    return figure


def write_figure(stem: Path | str, panels: Sequence[Panel]) -> list[Path]:
    """Draw panels into ``stem.png`` and ``stem.svg``, write their points into ``stem.csv``; gives the three files."""
    from matplotlib import rc_context

    files, figure = figure_files(stem), draw_panels(panels)
    # No date and no random names inside: the same sweep gives the same picture.
    with rc_context({"svg.hashsalt": "hyptree"}), full_disk_is_one_line(files[0].parent, "draw again"):
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for path in files[:2]:
            kind = path.suffix[1:]
            options: dict[str, Any] = {"format": kind, "dpi": 150, "metadata": {"Date": None} if kind == "svg" else {}}
            write_atomic(path, partial(figure.savefig, **options))
        write_text(files[2], to_csv(to_rows(panels)))
    return files


def _draw_lines(figure: Any, ax: Any, panel: Panel, palette: Sequence[str] = ()) -> None:
    from matplotlib import colormaps

    solid = [series for series in panel.series if series.style not in ("dashed", "hollow")]
    shade = colormaps["viridis"]
    count = len(solid)
    colours = [palette[i % len(palette)] if palette else shade(0.9 * i / max(1, count - 1)) for i in range(count)]
    dashes = 0
    for series in panel.series:
        label = fill(series.name, _NAME)
        if series.style == "dashed":
            grey, dash = str(min(0.6, 0.15 + 0.15 * dashes)), _DASHES[dashes % len(_DASHES)]
            dashes += 1
            ax.plot(series.x, series.y, dash, color=grey, label=label, linewidth=1.3)
            continue
        if series.style == "hollow":  # beside the points that they are compared with
            aside = 0.012 * float(np.ptp([x for other in panel.series for x in other.x]))
            _draw_errors(ax, series, label, aside, color="0.5", markerfacecolor="white", markersize=4, zorder=1.5)
            continue
        colour = colours[solid.index(series)]
        if series.style == "bars":
            ax.bar(series.x, series.y, color=colour, label=label)
        elif series.style == "steps":
            ax.step(series.x, series.y, where="mid", color=colour, label=label, linewidth=1.2)
        elif series.error is not None:
            _draw_errors(ax, series, label, color=colour, markersize=4)
        else:
            mark = "o" if series.style == "points" else "o-" if len(series.x) <= _FEW else "-"
            ax.plot(series.x, series.y, mark, color=colour, label=label, markersize=4, linewidth=1.2)
    _scale(ax, panel)
    ax.autoscale_view()  # else places on linear axes are those of before anything was drawn
    num_texts = sum(len(series.labels or ()) for series in panel.series)
    for series in panel.series if num_texts <= _TEXTS else ():
        for x, y, text in zip(series.x, series.y, series.labels or (), strict=False):
            across = ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[0]
            side, shift = ("left", 5) if across < 0.6 else ("right", -5)  # towards the middle
            ax.annotate(text, (x, y), xytext=(shift, 4), textcoords="offset points", ha=side, fontsize=7)
    ax.set_ylabel(panel.y_name)
    bars = [series for series in panel.series if series.style == "bars"]
    if bars:
        ax.set_xticks([series.x[0] for series in bars], [series.name for series in bars], fontsize=7, rotation=60)
    elif len(panel.series) <= _INSIDE:
        ax.legend(fontsize=7)
    elif len(panel.series) <= _MANY:
        columns = math.ceil(len(panel.series) / 20)
        ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3, ncols=columns)
    else:
        line = f"{len(panel.series)} series; their names are in the CSV"
        ax.annotate(line, (0.98, 0.02), xycoords="axes fraction", ha="right", fontsize=7)
    ax.set_axisbelow(True)
    ax.grid(alpha=0.25)


def _draw_errors(ax: Any, series: Series, label: str, aside: float = 0.0, **look: Any) -> None:
    """Points with bars upwards and, where they have such errors, across; none where an error is missing."""
    up, across = (None if error is None else np.asarray(error, float) for error in (series.error, series.x_error))
    ax.errorbar(np.asarray(series.x, float) + aside, series.y, up, across, fmt="o", label=label, capsize=2, **look)


def _scale(ax: Any, panel: Panel) -> None:
    """Logarithmic axes with plain numbers; widths are named themselves, as many as have room."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    for axis, set_scale in (("x", ax.set_xscale), ("y", ax.set_yscale)):
        if axis not in panel.log:
            continue
        set_scale("log")
        low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
        decades = math.log10(high / low)
        many, some = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 5.0)
        subs = many if decades < 0.7 else some if decades < 3 else (1.0,)
        which = ax.xaxis if axis == "x" else ax.yaxis
        which.set_major_locator(LogLocator(subs=subs))
        which.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        which.set_minor_formatter(NullFormatter())
    if panel.x_name in ("m", "1 / m"):
        say = "{:g}".format if panel.x_name == "m" else lambda x: f"1/{1 / x:.0f}"
        widths = _apart(sorted({x for series in panel.series if series.style != "dashed" for x in series.x}), say)
        ax.xaxis.set_major_locator(FixedLocator(widths))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
        ax.tick_params(axis="x", labelsize=8)


def _apart(values: Sequence[float], say: Callable[[float], str]) -> list[float]:
    """Those of sorted positive values whose names have room side by side on a logarithmic axis."""
    span = math.log(values[-1] / values[0]) if len(values) > 1 else 0.0
    kept: list[float] = []
    for value in values:
        if not kept or math.log(value / kept[-1]) >= (0.03 + 0.02 * len(say(value))) * span:
            kept.append(value)
    return kept


def _draw_map(figure: Any, ax: Any, panel: Panel) -> None:
    values = np.array([series.y for series in panel.series], float)
    image = ax.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    ax.set_xticks(range(values.shape[1]), [f"{x:g}" for x in panel.series[0].x], fontsize=7, rotation=45)
    ax.set_yticks(range(values.shape[0]), [series.name for series in panel.series], fontsize=7)
    ax.set_ylabel(panel.rows_name)
    figure.colorbar(image, ax=ax, label=panel.y_name)
