"""Charts as plain SVG, in colours of the page's style: curves, a confusion matrix, distances and order in text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np

from hyptree.explore.draw.style import hint, level_colours, tag
from hyptree.lab.figures.panels import Panel, Series
from hyptree.tree import Tree

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 102, 14, 34
"""Room around the axes: numbers on the left and below, names of the lines on the right."""

SPLITS = {"training": "train", "validation": "val"}
NO_SHARES = ("step", "epoch", "time", "lr", "split")
NAMES = {"top1": "top-1", "top5": "top-5", "top1_up1": "one level up", "top1_up2": "two levels up"}
"""What numbers are called: top1_up2 counts what is right two levels up the class tree."""
MAX_POINTS = 240
"""A line is thinned to about this many points: more cannot be seen."""


def run_curves(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Charts worth drawing from a run's metrics.

    The loss of training and validation share a chart, and so do all shares of the validation (between 0 and 1).
    """
    of = partial(points_of, rows, x_names=("epoch", "step"))
    losses = {name: of(split, "loss") for name, split in SPLITS.items()}
    numbers = [cell for row in rows if row.get("split") == "val" for cell in row.items() if cell[0] not in NO_SHARES]
    shares = {
        NAMES.get(key, key.replace("_", " ")): points
        for key in dict.fromkeys(key for key, value in numbers if isinstance(value, float) or type(value) is int)
        if not key.startswith("loss")
        and len(kept := (points := of("val", key))[np.isfinite(points[:, 1]), 1])
        and 0 <= kept.min() <= kept.max() <= 1
    }
    charts = [
        ("Loss", losses, ".2f"),
        ("Validation", dict(list(shares.items())[:4]), ".0%"),
        ("Learning rate", {"learning rate": of("train", "lr")}, ".1e"),
    ]
    drawn = [lines_of(title, series, "epoch", number) for title, series, number in charts]
    return [panel for panel in drawn if panel.series]


def lines_of(title: str, points_of: Mapping[str, np.ndarray], x_name: str, number: str, note: str = "") -> Panel:
    """Lines through points (n, 2); those that are not finite are left out, and the title says how many they are."""
    lines, lost = [], 0
    for name, points in points_of.items():
        kept = points[np.isfinite(points).all(1)]
        lost += len(points) - len(kept)
        if len(kept) > MAX_POINTS:  # means of neighbours: keeps the level, loses only noise
            kept = np.array([group.mean(0) for group in np.array_split(kept, MAX_POINTS)])
        if len(kept):
            lines.append(Series(name, kept[:, 0].tolist(), kept[:, 1].tolist(), "line"))
    lost_values = f" ({lost} {'value is' if lost == 1 else 'values are'} not finite and left out)" if lost else ""
    return Panel(f"{title}{lost_values}", x_name, "", lines, number=number, note=note)


def points_of(rows: Sequence[Mapping[str, Any]], split: str, key: str, x_names: Sequence[str]) -> np.ndarray:
    """(n, 2) numbers of a log under a name, beside the first of ``x_names`` that their row has."""
    points = [
        (next((row[name] for name in x_names if name in row), at), row[key])
        for at, row in enumerate(rows)
        if row.get("split", "train") == split and isinstance(row.get(key), (int, float))
    ]
    return np.array(points, np.float64).reshape(-1, 2)


class Axes:
    """Where numbers lie inside a chart, and its frame: x from side to side, y between round numbers that are marked."""

    def __init__(self, x: Sequence[float], y: Sequence[float], right: int = WIDTH - 14):
        self.x0, self.x1, self.right = float(min(x)), float(max(x)), right
        self.y_ticks = ticks(float(min(y)), float(max(y)))

    def px(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1) * (self.right - LEFT)

    def py(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - BOTTOM - TOP)

    def frame(self, label: str, x_name: str, number: str = ".4g") -> list[str]:
        """The beginning of the ``<svg>``: lines across with their numbers, and the name of x."""
        parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
        for tick in self.y_ticks:
            y, text = self.py(tick), _short(tick, number)
            parts.append(tag("line", class_="grid", x1=LEFT, x2=self.right, y1=y, y2=y))
            parts.append(tag("text", text, class_="tick", x=LEFT - 8, y=y + 4, text_anchor="end"))
        return [*parts, tag("text", escape(x_name), class_="tick", x=self.right, y=HEIGHT - 4, text_anchor="end")]

    def under(self, value: float, text: str | None = None) -> str:
        """A number, or what stands for it, below its place."""
        text, y = f"{value:.4g}" if text is None else text, HEIGHT - BOTTOM + 18
        return tag("text", text, class_="tick", x=self.px(value), y=y, text_anchor="middle")

    def line(self, kind: str, x: Iterable[float], y: Iterable[float]) -> str:
        """A line through points."""
        path = " ".join(f"{self.px(a):.1f},{self.py(b):.1f}" for a, b in zip(x, y, strict=True))
        return tag("polyline", class_=kind, points=path)


def line_chart(panel: Panel) -> str:
    """An ``<svg>`` with labelled axes and the name and last value at the end of each line."""
    lines, number = panel.series, panel.number
    every_x, every_y = ([value for line in lines for value in getattr(line, name)] for name in "xy")
    axes = Axes(every_x, [min(0.0, *every_y), max(every_y)], WIDTH - RIGHT)
    text = ", ".join(f"{line.name} ends at {line.y[-1]:{number}}" for line in lines)
    parts = axes.frame(f"{panel.title}: {text}", panel.x_name, number)
    parts += [axes.under(tick) for tick in ticks(axes.x0, axes.x1) if axes.x0 <= tick <= axes.x1]
    # Beside the end of a line: its value, and of several lines the name above. Below the axis are the numbers of x.
    down, side = 14 if len(lines) > 1 else 0, axes.right + 9
    ends = _spread([axes.py(line.y[-1]) + 4 - down / 2 for line in lines], 30.0, HEIGHT - BOTTOM + 4.0 - down)
    for k, (line, end) in enumerate(zip(lines, ends, strict=True)):
        name = escape(line.name if len(lines) > 1 else "")
        last = _short(line.y[-1], number) if number.endswith("e") else f"{line.y[-1]:{number}}"
        value = tag("tspan", last, class_="last", x=side, y=end + down)
        parts += [
            axes.line(f"line series{k}", line.x, line.y),
            tag("circle", class_=f"end series{k}", cx=axes.px(line.x[-1]), cy=axes.py(line.y[-1]), r=3.5),
            tag("text", name, value, class_=f"name series{k}", x=side, y=end),
        ]
    return "".join(parts) + "</svg>"


def _short(tick: float, number: str) -> str:
    """A tick in few characters: 40%, 2.5, 5e-4."""
    if number.endswith("%"):
        return f"{tick:.0%}"
    if number.endswith("e") and tick:
        mantissa, _, exponent = f"{tick:.1e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{tick:.4g}"


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def _spread(places: Sequence[float], gap: float, lowest: float) -> list[float]:
    """The places moved apart until neighbours are ``gap`` away, none below ``lowest`` or above the chart."""
    order = np.argsort(places)
    moved = np.maximum(places, TOP)
    for a, b in itertools.pairwise(order):
        moved[b] = max(moved[b], moved[a] + gap)
    for place in order[::-1]:  # and up again, as far as the lowest ones push
        moved[place] = min(moved[place], lowest)
        lowest = moved[place] - gap
    return list(np.maximum(moved, TOP))  # more than there is room for: rather one over the other than outside


def svg_confusion(counts: np.ndarray, tree: Tree | None, names: Sequence[str]) -> str:
    """The confusion matrix (C, C), true classes down, in the order of the class tree, whose first C nodes they are.

    Squares outline the groups of the tree: mistakes inside a square stay in the family.
    """
    n = len(names)
    order = list(range(n)) if tree is None else [int(node) for node in tree.order("preorder") if node < n]
    cell, margin = 22 if n <= 40 else max(6, 880 // n), 108
    size = margin + n * cell + 36  # names lean over the last column
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    right = float(np.trace(counts) / max(counts.sum(), 1))
    parts = [
        f'<svg class="confusion" viewBox="0 0 {size} {size}" role="img" '
        f'aria-label="Confusion of {n} classes, {right:.0%} on the diagonal">'
    ]
    for row, true in enumerate(order):
        y, name = margin + row * cell, escape(names[true])
        way = f"translate({y + cell * 0.7:.1f} {margin - 6}) rotate(-60)"
        parts += [
            tag("text", name, x=margin - 6, y=y + cell * 0.7, text_anchor="end"),
            tag("text", name, transform=way),
        ]
        for column, text in enumerate(order):
            if count := int(counts[true, text]):
                kind, strength = "right" if true == text else "wrong", 0.12 + 0.88 * math.sqrt(share[true, text])
                place = {"x": margin + column * cell + 1, "y": y + 1, "width": cell - 2, "height": cell - 2, "rx": 2}
                says = hint(f"{names[true]} called {names[text]}: {count} of {int(counts[true].sum())}")
                parts.append(tag("rect", says, class_=kind, **place, opacity=strength))
    if tree is not None:
        place_of = {node: k for k, node in enumerate(order)}
        for depth in range(1, int(tree.depth.max())):
            for group in np.flatnonzero((tree.depth == depth) & ~tree.is_leaf):
                inside = [place_of[int(leaf)] for leaf in tree.leaves(int(group)) if int(leaf) in place_of]
                if len(inside) > 1:
                    at, side = margin + min(inside) * cell, (max(inside) + 1 - min(inside)) * cell
                    parts.append(tag("rect", class_="family", x=at, y=at, width=side, height=side, rx=3))
    parts.append("</svg>")
    return "".join(parts)


MAX_DOTS = 1500
"""Of more dots some are left out, evenly along their order: more cannot be told apart."""


def level_chart(distance: Any, words: Sequence[float]) -> str:
    """Distance (n, L) from the root by level: 5 to 95 % of captions, quartiles, median, and the mean as a dot.

    Below stands the mean number of words (L,).
    """
    distance = np.asarray(distance, np.float64)
    num_levels = distance.shape[1]
    low, high = np.quantile(distance, 0.05, axis=0).min(), np.quantile(distance, 0.95, axis=0).max()
    axes = Axes([0.5, num_levels + 0.5], [low if low > 0.3 * high else 0.0, high])
    means = distance.mean(0)
    text = ", ".join(f"level {k + 1} {mean:.3f}" for k, mean in enumerate(means))
    parts = axes.frame(f"mean distance from the root: {text}", "level (words)")
    half = min(34.0, 0.32 * (axes.right - LEFT) / num_levels)
    for k, colour in enumerate(level_colours(num_levels)):
        low, first, middle, third, high = np.quantile(distance[:, k], (0.05, 0.25, 0.5, 0.75, 0.95))
        x = axes.px(k + 1)
        top, bottom, middle_y = axes.py(third), axes.py(first), axes.py(middle)
        says = f"level {k + 1}: mean {means[k]:.3f}, quartiles {first:.3f} {middle:.3f} {third:.3f}"
        marks = (
            tag("line", class_="whisker", x1=x, x2=x, y1=axes.py(high), y2=axes.py(low)),
            tag("rect", class_="box", x=x - half, y=top, width=2 * half, height=max(bottom - top, 0.5), rx=3),
            tag("line", class_="mid", x1=x - half, x2=x + half, y1=middle_y, y2=middle_y),
            tag("circle", cx=x, cy=axes.py(means[k]), r=4),
        )
        parts.append(tag("g", *marks, hint(says), class_="level", stroke=colour, fill=colour))
        parts.append(axes.under(k + 1, f"{k + 1} ({words[k]:.1f})"))
    return "".join(parts) + "</svg>"


def tau_chart(tau: Any, baseline: Any) -> str:
    """How many chains (n,) have which Kendall's tau: by distance (dark) and by word count (light); NaN is left out."""
    values = [np.asarray(v, np.float64) for v in (tau, baseline)]
    kept = [v[~np.isnan(v)] for v in values]
    steps = np.unique(np.concatenate(kept).round(9))
    edges = np.linspace(-1, 1, 12)
    if len(steps) <= 14:  # four levels have seven values: a bar for each
        centres = steps
        counts = [np.array([(np.abs(v - step) < 1e-8).sum() for step in steps]) for v in kept]
    else:
        centres = (edges[:-1] + edges[1:]) / 2
        counts = [np.histogram(v, edges)[0] for v in kept]
    shares = [count / max(1, len(v)) for count, v in zip(counts, values, strict=True)]
    axes = Axes([-1.15, 1.15], [0.0, max(float(share.max(initial=0.0)) for share in shares) or 1.0])
    parts = axes.frame("share of chains by tau, by distance and by word count", "Kendall's tau of a chain", ".0%")
    width = 10.0 if len(centres) <= 8 else 6.0
    for k, (share, count) in enumerate(zip(shares, counts, strict=True)):
        for centre, part, number in zip(centres, share, count, strict=True):
            x, y = axes.px(float(centre)) + (k - 1) * (width + 1), axes.py(float(part))
            says = hint(f"{'word count' if k else 'distance'}: {int(number)} chains with tau {centre:.2f}")
            parts.append(tag("rect", says, class_=f"bar{k}", x=x, y=y, width=width, height=HEIGHT - BOTTOM - y))
    parts += [axes.under(tick, f"{tick:g}") for tick in (-1, -0.5, 0, 0.5, 1)]
    for k, name in enumerate(("distance from the root", "word count alone")):
        parts.append(tag("rect", class_=f"bar{k}", x=LEFT + 10, y=TOP + 2 + 18 * k, width=10, height=10))
        parts.append(tag("text", name, class_="tick", x=LEFT + 25, y=TOP + 11 + 18 * k))
    return "".join(parts) + "</svg>"


def dot_chart(title: str, x: Any, y: Any, x_name: str, bins: int | None = None) -> str:
    """Dots with a line through medians.

    Args:
        bins: medians of so many groups of equal size along x; without it of every value of x that three dots have or
            more, and dots are spread around it.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if bins is None:
        groups = [group for value in np.unique(x) if len(group := np.flatnonzero(x == value)) >= 3]
    else:
        groups = [group for group in np.array_split(np.argsort(x, kind="stable"), bins) if len(group)]
    step = max(1, math.ceil(len(x) / MAX_DOTS))
    shown_x, x_ticks = x[::step], ticks(float(x.min()), float(x.max()))
    if bins is None:  # spread by the golden ratio, the same every time
        shown_x = shown_x + 0.7 * ((np.arange(len(shown_x)) * 0.618034) % 1 - 0.5)
    axes = Axes([*shown_x, *x_ticks], y)
    parts = axes.frame(f"{title}: {len(x)} dots against {x_name}", x_name)
    parts += [axes.under(tick) for tick in x_ticks]
    dots = zip(shown_x, y[::step], strict=True)
    parts += [tag("circle", class_="dot", cx=axes.px(a), cy=axes.py(b), r=2) for a, b in dots]
    return "".join(parts) + axes.line("middle", *([np.median(v[g]) for g in groups] for v in (x, y))) + "</svg>"
