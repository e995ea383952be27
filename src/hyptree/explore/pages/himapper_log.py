"""How the tree of a Hi-Mapper came about: what the log of its training says, as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.explore.draw.curves import lines_of
from hyptree.explore.draw.style import PALETTE, RIM
from hyptree.files import read_log
from hyptree.lab.figures.panels import Panel
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


def stat_curves(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """What the rows of a run's metrics say about its tree, as charts.

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
        charts.append(lines_of(title, series, "step", number, note))
    return [panel for panel in charts if panel.series]


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
    from hyptree.lab.figures.drawing import draw_panels

    if isinstance(log, (str, Path)):
        path = Path(log)
        log = RunFolder(path).read_metrics() if path.is_dir() else read_log(path, "step")
    charts = stat_curves(log)
    if not charts:
        raise ValueError(
            f"no row of the log has any of {', '.join(name for name, *_ in STATS)}; is it the log of a Hi-Mapper?"
        )
    figure = draw_panels(charts, PALETTE)
    for ax in figure.axes:
        ax.axhline(0, color=RIM, linewidth=0.8, zorder=0)
    return figure
