"""Charts of a hierarchy in text as plain SVG: distance by level, how chains are ordered, graded entailment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyptree.explore.draw.curves import BOTTOM, HEIGHT, LEFT, TOP, Axes, ticks
from hyptree.explore.draw.radial_layout import level_colours
from hyptree.explore.draw.style import hint, read_beside, tag

__all__ = ["STYLE", "dot_chart", "level_chart", "tau_chart"]

MAX_DOTS = 1500
"""Of more dots some are left out, evenly along their order: more cannot be told apart."""
STYLE = read_beside(__file__, "charts.css")


def level_chart(distance: Any, words: Sequence[float]) -> str:
    """Distance from the root by level: 5 to 95 % of captions, quartiles, median, and the mean as a dot.

    Args:
        distance: (n, L) of every chain. words: (L,) mean number of words, written below.
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
