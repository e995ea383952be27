"""Curvature of a language model's experts over training: a section of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hyptree.explore.pages import page
from hyptree.lab.figures.panels import Panel, Series

__all__ = ["curvature_section"]

Curve = Mapping[str, Sequence[float]]
"""``step`` and ``value``, equally long."""

MAX_LAYERS = 6
"""Layers that are drawn; of more, those whose experts moved most."""
MAX_EXPERTS = 8
"""Lines in a chart; of more, those that moved most."""


def curvature_section(curves: Mapping[str, Curve]) -> str:
    """Charts and a table, as HTML.

    Args:
        curves: ``{"01.3": {"step": [...], "value": [...]}}``, layer and expert, as
            :func:`hyptree.evaluate.text.token_radii.curvatures` gives it.
    """
    layers: dict[int, dict[int, Curve]] = {}
    for name, curve in curves.items():
        first, _, second = name.partition(".")
        layers.setdefault(int(first), {})[int(second)] = curve
    layers = {layer: dict(sorted(experts.items())) for layer, experts in sorted(layers.items())}
    most = sorted(layers, key=lambda layer: -max(map(_moved, layers[layer].values())))[:MAX_LAYERS]
    panels = [Panel("All experts", "step", "K", _range(list(curves.values())), number=".3f")]
    for layer in sorted(most):
        experts = sorted(layers[layer].items(), key=lambda pair: -_moved(pair[1]))[:MAX_EXPERTS]
        lines = [Series(f"expert {name}", curve["step"], _change(curve), "line") for name, curve in sorted(experts)]
        title = f"Layer {layer}: change of K since the first line of the log, %"
        panels.append(Panel(title, "step", "change of K, %", lines, number="+.2f"))
    rows = [
        [f"layer {layer}, expert {name}", f"{start:.4f}", f"{end:.4f}", f"{end / start - 1:+.2%}"]
        for layer, experts in layers.items()
        for name, curve in experts.items()
        for start, end in [(curve["value"][0], curve["value"][-1])]
    ]
    rest = len(layers) - len(most)
    note = f" The {len(most)} layers that moved most are drawn, the other {rest} are in the table." if rest else ""
    return (
        "<p>Every routed expert works on a hyperboloid of its own, of curvature -K. K starts between the ends of the "
        "configured range and is learned at a tenth of the learning rate. It moves by percents: the charts of layers "
        f"show how far each has gone from where the log found it first.{note}</p>"
        f'<div class="pairs">{page.curves(panels)}</div>'
        f'<div class="card">{page.table(["", "K, first logged", "K, last", "change"], rows)}</div>'
    )


def _change(curve: Curve) -> list[float]:
    """Percent since the first value."""
    return [100 * (value / curve["value"][0] - 1) for value in curve["value"]]


def _moved(curve: Curve) -> float:
    return max(map(abs, _change(curve)))


def _range(curves: Sequence[Curve]) -> list[Series]:
    """Smallest, mean and largest K of all experts at each step that all of them have."""
    steps = sorted(set.intersection(*(set(curve["step"]) for curve in curves)))
    at = [dict(zip(curve["step"], curve["value"], strict=True)) for curve in curves]
    values = np.array([[one[step] for one in at] for step in steps])  # (steps, experts)
    named = {"largest K": values.max(1), "mean": values.mean(1), "smallest": values.min(1)}
    return [Series(name, steps, line.tolist(), "line") for name, line in named.items()]
