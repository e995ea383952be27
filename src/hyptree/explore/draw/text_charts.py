"""Charts of a hierarchy in text as plain SVG: distance by level, how chains are ordered, graded entailment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from hyptree.explore.draw.curves import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, _ticks
from hyptree.explore.draw.radial_layout import level_colours

__all__ = ["STYLE", "dot_chart", "level_chart", "tau_chart"]

MAX_DOTS = 1200
END = WIDTH - 14
STYLE = """
.box { fill-opacity: .22; stroke-width: 1.6; } .whisker { stroke-width: 1.6; } .mid { stroke-width: 3; }
.bar0 { fill: var(--series0); } .bar1 { fill: var(--soft); opacity: .5; }
.level { filter: var(--lift); }
.spot { fill: var(--series0); opacity: .3; } .middle { fill: none; stroke: var(--ink); stroke-width: 2; }
"""


class _Axes:
    """Places of numbers inside a chart, and its frame."""

    def __init__(self, y: Sequence[float], x: Sequence[float]):
        self.y_ticks, self.x_ticks = _ticks(min(y), max(y)), _ticks(min(x), max(x))
        self.low, self.high = self.y_ticks[0], self.y_ticks[-1]
        self.left, self.right = min(x), max(x)

    def px(self, value: float) -> float:
        return LEFT + (value - self.left) / ((self.right - self.left) or 1) * (END - LEFT)

    def py(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / ((self.high - self.low) or 1) * (HEIGHT - BOTTOM - TOP)

    def frame(self, title: str, x_name: str, form: str = ".3g") -> list[str]:
        parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
        for tick in self.y_ticks:
            y = self.py(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{END}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:{form}}</text>')
        parts.append(
            f'<text class="tick" x="{END}" y="{HEIGHT - 2}" text-anchor="end">{escape(x_name)}</text>',
        )
        return parts

    def under(self, value: float, text: str) -> str:
        return (
            f'<text class="tick" x="{self.px(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>'
        )


def level_chart(distance: Any, words: Sequence[float]) -> str:
    """Distance from the root by level: 5 to 95 % of captions, quartiles, median, and the mean as a dot.

    Args:
        distance: (n, L) of every chain. words: (L,) mean number of words, written below.
    """
    distance = np.asarray(distance, np.float64)
    num_levels = distance.shape[1]
    low, high = np.quantile(distance, 0.05, axis=0).min(), np.quantile(distance, 0.95, axis=0).max()
    axes = _Axes([float(low if low > 0.3 * high else 0.0), float(high)], [0.5, num_levels + 0.5])
    means = distance.mean(0)
    text = ", ".join(f"level {k + 1} {mean:.3f}" for k, mean in enumerate(means))
    parts = axes.frame(f"mean distance from the root: {text}", "level (words)")
    half = min(34.0, 0.32 * (END - LEFT) / num_levels)
    for k, colour in enumerate(level_colours(num_levels)):
        low, first, middle, third, high = np.quantile(distance[:, k], (0.05, 0.25, 0.5, 0.75, 0.95))
        x = axes.px(k + 1)
        top, bottom = axes.py(third), axes.py(first)
        parts.append(
            f'<g class="level" stroke="{colour}" fill="{colour}"><line class="whisker" x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{axes.py(high):.1f}" y2="{axes.py(low):.1f}"/><rect class="box" x="{x - half:.1f}" y="{top:.1f}" '
            f'width="{2 * half:.1f}" height="{max(bottom - top, 0.5):.1f}" rx="3"/><line class="mid" '
            f'x1="{x - half:.1f}" x2="{x + half:.1f}" y1="{axes.py(middle):.1f}" y2="{axes.py(middle):.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{axes.py(means[k]):.1f}" r="4"/><title>level {k + 1}: mean {means[k]:.3f}, '
            f"quartiles {first:.3f} {middle:.3f} {third:.3f}</title></g>"
        )
        parts.append(axes.under(k + 1, f"{k + 1} ({words[k]:.1f})"))
    return "".join(parts) + "</svg>"


def tau_chart(tau: Any, baseline: Any) -> str:
    """How many chains have which Kendall's tau: by distance (dark) and by word count (light); NaN is left out.

    Args:
        tau, baseline: (n,) per chain.
    """
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
    axes = _Axes([0.0, max(float(share.max(initial=0.0)) for share in shares) or 1.0], [-1.15, 1.15])
    parts = axes.frame("share of chains by tau, by distance and by word count", "Kendall's tau of a chain", ".0%")
    width = 10.0 if len(centres) <= 8 else 6.0
    for k, (share, count) in enumerate(zip(shares, counts, strict=True)):
        for centre, part, number in zip(centres, share, count, strict=True):
            x, y = axes.px(float(centre)) + (k - 1) * (width + 1), axes.py(float(part))
            name = "word count" if k else "distance"
            parts.append(
                f'<rect class="bar{k}" x="{x:.1f}" y="{y:.1f}" width="{width}" height="{HEIGHT - BOTTOM - y:.1f}">'
                f"<title>{name}: {int(number)} chains with tau {centre:.2f}</title></rect>"
            )
    parts += [axes.under(tick, f"{tick:g}") for tick in (-1, -0.5, 0, 0.5, 1)]
    parts.append(
        f'<rect class="bar0" x="{LEFT + 10}" y="{TOP + 2}" width="10" height="10"/><text class="tick" x="{LEFT + 25}" '
        f'y="{TOP + 11}">distance from the root</text><rect class="bar1" x="{LEFT + 10}" y="{TOP + 20}" width="10" '
        f'height="10"/><text class="tick" x="{LEFT + 25}" y="{TOP + 29}">word count alone</text>'
    )
    return "".join(parts) + "</svg>"


def dot_chart(title: str, x: Any, y: Any, x_name: str, bins: int = 12) -> str:
    """Dots with a line through medians of groups of equal size along x."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    axes = _Axes(y.tolist(), x.tolist())
    parts = axes.frame(title, x_name)
    step = max(1, math.ceil(len(x) / MAX_DOTS))
    for a, b in zip(x[::step], y[::step], strict=True):
        parts.append(f'<circle class="spot" cx="{axes.px(a):.1f}" cy="{axes.py(b):.1f}" r="2.2"/>')
    groups = np.array_split(np.argsort(x, kind="stable"), min(bins, len(x)))
    line = " ".join(f"{axes.px(np.median(x[g])):.1f},{axes.py(np.median(y[g])):.1f}" for g in groups)
    parts.append(f'<polyline class="middle" points="{line}"/>')
    parts += [axes.under(tick, f"{tick:.3g}") for tick in axes.x_ticks if axes.left <= tick <= axes.right]
    return "".join(parts) + "</svg>"
