"""How the tree of a Hi-Mapper came about: what the log of its training says, as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import require
from hyptree.explore.draw.curves import Line, lines_of
from hyptree.explore.draw.style import INK, PALETTE, SOFT
from hyptree.files import read_log
from hyptree.runs import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_tree_stats", "stat_curves"]

STATS = (
    ("contrastive", "Contrastive loss", "both signs of this loss can fall: look at the distances", ".2f"),
    ("kl", "KL of the top level", "mean over nodes and dimensions", ".3g"),
    ("distance_ratio", "Parent / same-level distance", "below 1: nearer to its parent than to its like", ".2f"),
    ("image_dependence", "Image dependence", "variance over images / over nodes; near 0 the picture is ignored", ".2f"),
    ("curvature", "Curvature c", "the space has curvature -c", ".2f"),
    ("parent_retrieval", "Nearest upper node is the parent", "high from the start: parents begin as means", ".2f"),
)


def stat_curves(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[Line], str]]:
    """What the rows of a run's metrics say about its tree: title, note, lines, format of the numbers.

    A name may stand alone or behind a prefix (``himapper/kl``); training and validation are two lines of one chart.
    """
    charts = []
    for name, title, note, number in STATS:
        series = {}
        for split, called in (("train", "training"), ("val", "validation")):
            points = [
                (row.get("step", at), value)
                for at, row in enumerate(rows)
                if row.get("split", "train") == split and (value := _value(row, name)) is not None
            ]
            series[called] = np.array(points, np.float64).reshape(-1, 2)
        title, lines = lines_of(title, series)
        if lines:
            charts.append((title, note, lines, number))
    return charts


def _value(row: Mapping[str, Any], name: str) -> float | None:
    """The number a row has under a name, with or without a prefix."""
    for key, value in row.items():
        if (key == name or key.endswith((f"/{name}", f".{name}"))) and isinstance(value, (int, float)):
            return float(value)
    return None


def plot_tree_stats(log: Sequence[Mapping[str, Any]] | Path | str) -> Figure:
    """Contrastive loss, KL, parent over same-level distance, image dependence and curvature, step by step.

    Args:
        log: rows with ``step`` and these names, a run's ``metrics.jsonl``, or the folder of the run.

    Raises:
        ValueError: no row has any of the names.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    if isinstance(log, (str, Path)):
        path = Path(log)
        log = RunFolder(path).read_metrics() if path.is_dir() else read_log(path, "step")
    charts = stat_curves(log)
    if not charts:
        raise ValueError(
            f"no row of the log has any of {', '.join(name for name, *_ in STATS)}; is it the log of a Hi-Mapper?"
        )
    columns = min(3, len(charts))
    figure = Figure(figsize=(4.1 * columns, 2.9 * -(-len(charts) // columns)), layout="constrained", facecolor="white")
    for at, (title, note, lines, _) in enumerate(charts):
        ax = figure.add_subplot(-(-len(charts) // columns), columns, at + 1)
        for line, colour in zip(lines, PALETTE, strict=False):
            dots = "o-" if len(line.x) < 12 else "-"
            ax.plot(line.x, line.y, dots, markersize=3, color=colour, linewidth=1.5, label=line.name)
        ax.set_title(title, fontsize=10, color=INK, loc="left", fontweight="bold", pad=18)
        ax.text(0, 1.02, note, transform=ax.transAxes, fontsize=7.6, color=SOFT, va="bottom")
        ax.set_xlabel("step", fontsize=8.5, color=SOFT)
        every = np.concatenate([line.y for line in lines])
        low, high = min(0.0, float(every.min())), max(0.0, float(every.max()))
        margin = 0.06 * (high - low or 1.0)
        ax.set_ylim(low - margin * (low < 0), high + margin)
        ax.tick_params(labelsize=8, colors=SOFT)
        ax.grid(color="#eceff5", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            ax.legend(fontsize=8, frameon=False)
    return figure
