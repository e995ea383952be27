"""The radial picture as SVG: what goes where, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from hyptree.explore.draw.radial import RadialPicture, axis_of
from hyptree.explore.draw.style import FLOOR, FONT, HALO, INK, INSIDE, RIM, SOFT, hex_colour, hint, overlap, tag
from hyptree.tree.drawing import shortened

__all__ = ["Label", "Layout", "layout_of", "level_colours", "svg_radial"]

WIDTH, HEIGHT, REACH = 1000, 880, 400
"""Of the SVG, and of the disk inside it, on whose rim the farthest caption lies; names on the rim need the rest."""
X, Y = WIDTH / 2, HEIGHT / 2
"""Where the root is."""
HOLE = 70
"""Radius of the disk in the middle that stands for distances nearer to the root than any caption."""
INWARD = "#d1242f"
_ENDS = ((49, 87, 201), (24, 121, 78), (194, 130, 12), (160, 50, 120))
"""Colours of four levels, general first; other numbers of levels are mixed from them."""


def level_colours(num_levels: int) -> list[str]:
    """A colour for each level, general first."""
    at = np.linspace(0, len(_ENDS) - 1, num_levels) if num_levels > 1 else np.zeros(1)
    mixed = [[np.interp(x, range(len(_ENDS)), [end[k] for end in _ENDS]) for k in range(3)] for x in at]
    return [hex_colour(colour) for colour in mixed]


# ---- what goes where -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Label:
    """A name in the picture, in pixels."""

    caption: int
    text: str
    x: float
    y: float
    anchor: str
    size: float


@dataclass(frozen=True)
class Layout:
    """What goes where, in pixels of a picture of ``WIDTH`` by ``HEIGHT``.

    Attributes:
        points: (n, 2) captions. dots: (n,) radii of their dots.
        rings: pixels from the middle, the distance written there, and where it is written.
        hole: radius of the disk in the middle that the scale leaves out.
    """

    points: np.ndarray
    dots: np.ndarray
    rings: list[tuple[float, str, tuple[float, float]]]
    hole: float
    labels: list[Label]


def layout_of(picture: RadialPicture) -> Layout:
    """Places of everything in the picture."""
    ticks, end = axis_of(picture), float(picture.radius.max())
    start = ticks[0]
    hole = HOLE if start > 0 else 0

    def pixels(distance: Any) -> Any:
        return hole + (distance - start) / ((end - start) or 1) * (REACH - hole)

    away = pixels(picture.radius)
    points = np.stack([X + away * np.cos(picture.angle), Y - away * np.sin(picture.angle)], 1)
    dots = np.interp(picture.level, [0, max(1, picture.num_levels - 1)], [9.0, 4.0])
    free = _widest_gap(picture.angle)
    rings = [
        (away, f"{tick:.4g}", (X + away * math.cos(free), Y - away * math.sin(free)))
        for tick in ticks
        if (away := float(pixels(tick))) > 0
    ]
    return Layout(points, dots, rings, hole, _labels(picture, points, dots))


def _widest_gap(angle: np.ndarray) -> float:
    """The direction farthest from any caption."""
    turned = np.sort(angle % (2 * math.pi))
    gaps = np.diff(np.append(turned, turned[0] + 2 * math.pi))
    return float(turned[gaps.argmax()] + gaps.max() / 2)


def _labels(picture: RadialPicture, points: np.ndarray, dots: np.ndarray) -> list[Label]:
    """Names of general captions first; a name that would cover another, or leave the picture, is left out."""
    reach = dots[:, None]
    own = np.concatenate([points - reach, points + reach], 1)  # (n, 4) boxes of the dots
    taken = [(i, box) for i, box in enumerate(own.tolist()) if picture.level[i] <= 1]
    taken.append((-1, [X - 20, Y - 8, X + 20, Y + 28]))  # the root and its name
    labels = []
    for i in np.lexsort((-picture.radius, picture.level)).tolist():
        size = (19.0, 15.5, 13.0)[min(int(picture.level[i]), 2)]
        text = shortened(picture.captions[i], 34)
        width, (x, y), gap = (0.62 if picture.level[i] == 0 else 0.55) * size * len(text), points[i], dots[i] + 4
        right, left = ("start", x + gap, y), ("end", x - gap, y)
        over, under = ("middle", x, y - gap - 0.55 * size), ("middle", x, y + gap + 0.55 * size)
        places = [right, left, over, under] if x >= X else [left, right, over, under]
        for attempt, (anchor, at, line) in enumerate(places if picture.level[i] else places * 2):
            start = at - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
            box = [start, line - 0.55 * size, start + width, line + 0.55 * size]
            inside = box[0] > 4 and box[2] < WIDTH - 4 and box[1] > 4 and box[3] < HEIGHT - 4
            crowd = taken if attempt < 4 else [one for one in taken if one[0] < 0]  # most general: rather over a dot
            if inside and not any(overlap(box, other) for k, other in crowd if k != i):
                taken.append((-1, box))
                labels.append(Label(i, text, at, line, anchor, size))
                break
    return labels


# ---- as SVG ---------------------------------------------------------------------------------------------------------


def svg_radial(picture: RadialPicture) -> str:
    """The picture as an ``<svg>``; pointing at a dot tells its caption, level and distance."""
    layout, colours = layout_of(picture), level_colours(picture.num_levels)
    parts = [
        f'<svg class="radial" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="'
        f'{len(picture.captions)} captions around the root, {escape(picture.title)}" '
        f"{FONT}>"
    ]
    # Colours are for a white page; a page with a scheme of its own gives the classes others.
    disks = [("rim", REACH, INSIDE), ("hole", layout.hole, FLOOR), *(("round", r, "none") for r, *_ in layout.rings)]
    parts += [
        tag("circle", class_=kind, cx=X, cy=Y, r=away, fill=fill, stroke=RIM) for kind, away, fill in disks if away
    ]
    parts.append(tag("circle", hint('the root: ""'), class_="root", cx=X, cy=Y, r=5, fill=INK))
    parts.append('<g class="marks">')
    for general, specific in picture.lines.tolist():
        (x1, y1), (x2, y2) = layout.points[general].tolist(), layout.points[specific].tolist()
        colour = line_colour(picture, general, specific, colours)
        parts.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=1.4, opacity=0.55))
    for i in reversed(range(len(picture.captions))):  # general ones on top
        x, y = layout.points[i].tolist()
        says = hint(f"{picture.captions[i]} (level {picture.level[i] + 1}, distance {picture.radius[i]:.3f})")
        look = {"fill": colours[picture.level[i]], "stroke": "white", "stroke_width": 1.3}
        parts.append(tag("circle", says, class_="caption", cx=x, cy=y, r=float(layout.dots[i]), **look))
    parts.append(f'</g><g class="soft halo" fill="{SOFT}" font-size="14" text-anchor="middle" {HALO}>')
    parts += [tag("text", text, x=x, y=y + 5) for _, text, (x, y) in layout.rings]
    parts.append(tag("text", "root", x=X, y=Y + 22))
    parts.append(f'</g><g class="names" fill="{INK}" {HALO} pointer-events="none">')
    for label in layout.labels:
        look = {"font_size": label.size, "font_weight": 600 if picture.level[label.caption] == 0 else None}
        place = {"x": float(label.x), "y": float(label.y), "dy": ".34em", "text_anchor": label.anchor}
        parts.append(tag("text", escape(label.text), **place, **look))
    parts.append("</g>")
    for k, colour in enumerate(colours):
        y, look = 26 + 24 * k, {"dy": ".34em", "font_size": 15, "fill": SOFT}
        parts.append(tag("g", tag("circle", cx=20, cy=y, r=7, fill=colour), class_="marks"))
        parts.append(tag("text", level_name(k, picture), class_="soft", x=36, y=y, **look))
    return "".join(parts) + "</svg>"


def line_colour(picture: RadialPicture, general: int, specific: int, colours: Sequence[str]) -> str:
    """That of the specific caption's level, red where the line leads inwards."""
    inward = picture.radius[specific] < picture.radius[general]
    return INWARD if inward else colours[picture.level[specific]]


def level_name(k: int, picture: RadialPicture) -> str:
    """What the legend says of level ``k``."""
    end = ", general" if k == 0 else ", specific" if k == picture.num_levels - 1 else ""
    return f"level {k + 1}{end}"
