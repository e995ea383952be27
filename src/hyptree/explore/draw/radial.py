"""The radial picture of an encoder's text: captions by their distance from the root, lines from general to specific.

    picture = radial_picture(Texts(encoder.encode_text), chains)
    svg_radial(picture)  # a picture for a page or a file

The radius is the true distance. The angle is a projection, and the picture says how good a one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import UserError
from hyptree.explore.draw.charts import ticks
from hyptree.explore.draw.style import (
    FLOOR,
    FONT,
    HALO,
    INK,
    INSIDE,
    RIM,
    SOFT,
    hint,
    level_colours,
    overlap,
    tag,
)
from hyptree.tree.drawing import shortened
from hyptree.tree.layout import main_axes

if TYPE_CHECKING:
    from hyptree.vlm.radial.suites import Texts

MAX_CAPTIONS = 90
WIDTH, HEIGHT, REACH = 1000, 880, 400
"""Of the SVG, and of the disk inside it, on whose rim the farthest caption lies; names on the rim need the rest."""
X, Y = WIDTH / 2, HEIGHT / 2
"""Where the root is."""
HOLE = 70
"""Radius of the disk in the middle that stands for distances nearer to the root than any caption."""
INWARD = "#d1242f"


@dataclass(frozen=True)
class RadialPicture:
    """Captions around the root, each once."""

    captions: tuple[str, ...]
    level: np.ndarray
    """(n,) from 0, the first level at which each stands."""
    radius: np.ndarray
    """(n,) true distance from the root."""
    angle: np.ndarray
    """(n,) drawn direction, in radians."""
    lines: np.ndarray
    """(m, 2) general and specific caption of each step of a chain."""
    num_levels: int
    geometry: str
    tau: float
    """Mean Kendall's tau (ties count as no order) of distance along all chains, and ``tau_words`` of word count."""
    tau_words: float
    num_chains: int
    num_shown: int
    kept: float
    """Share of the variance of directions that the plane of the picture keeps."""
    agreement: float
    """Spearman's correlation of true and drawn angles between captions; NaN for fewer than three."""

    @property
    def title(self) -> str:
        """tau_d, and the baseline without which it says nothing."""
        return f"tau_d {_format(self.tau)} · word count alone {_format(self.tau_words)}"

    @property
    def num_inward(self) -> int:
        """Lines whose specific caption is nearer to the root than its general one."""
        return int((self.radius[self.lines[:, 1]] < self.radius[self.lines[:, 0]]).sum())

    @property
    def caption(self) -> str:
        """What is true in the picture and what is not, in words."""
        which = "all" if self.num_shown == self.num_chains else f"{self.num_shown} of"
        agree = (
            "" if math.isnan(self.agreement) else f", and drawn angles follow true ones with rho {self.agreement:.2f}"
        )
        start = axis_of(self)[0]
        begins = f" The scale begins at {start:.4g}, at the edge of the grey disk." if start else ""
        return (
            f"The middle is the root, the embedding of the empty text. Distance from it is true ({self.geometry}), and "
            f"rings carry its scale.{begins} The angle is a projection: the direction in which a caption leaves the "
            f"root, on the two main axes of all of them, which keep {self.kept:.0%} of their variance{agree}. Lines go "
            f"from general to specific along {which} {self.num_chains} chains; {self.num_inward} of {len(self.lines)} "
            "lead inwards and are red."
        )


def radial_picture(texts: Texts, chains: Sequence[Sequence[str]]) -> RadialPicture:
    """Where the captions of chains, from general to specific and all with as many levels, lie around the root.

    The first chains that differ are drawn, as many as have about 90 captions together; tau is that of all.
    """
    from hyptree.vlm.radial.order import length_baselines, order_of_levels

    num_levels = same_levels(chains)
    every = texts.distance([caption for chain in chains for caption in chain]).double().view(-1, num_levels)
    drawn = list(dict.fromkeys(tuple(chain) for chain in chains))
    seen = [len(set().union(*drawn[: k + 1])) for k in range(min(len(drawn), MAX_CAPTIONS))]
    drawn = drawn[: max(1, sum(count <= MAX_CAPTIONS for count in seen))]
    captions = tuple(dict.fromkeys(caption for level in zip(*drawn, strict=True) for caption in level))  # general first
    place = {caption: i for i, caption in enumerate(captions)}
    first = {caption: k for k in reversed(range(num_levels)) for caption in (chain[k] for chain in drawn)}
    steps = {(place[chain[k]], place[chain[k + 1]]) for chain in drawn for k in range(num_levels - 1)}
    lines = np.array(sorted(step for step in steps if step[0] != step[1]), np.int64).reshape(-1, 2)
    angle, kept, agreement = _projected(_directions(texts, captions))
    return RadialPicture(
        captions=captions,
        level=np.array([first[caption] for caption in captions]),
        radius=texts.distance(captions).double().numpy(),
        angle=angle,
        lines=lines,
        num_levels=num_levels,
        geometry=texts.geometry,
        tau=order_of_levels(every.numpy()).tau_a,
        tau_words=length_baselines(chains)["words"].tau_a,
        num_chains=len(chains),
        num_shown=len(drawn),
        kept=kept,
        agreement=agreement,
    )


def same_levels(chains: Sequence[Sequence[str]]) -> int:
    """The number of levels of all chains, or a ``UserError``: none, fewer than two, or not all alike."""
    lengths = sorted({len(chain) for chain in chains})
    if len(lengths) != 1 or lengths[0] < 2:
        counts = ", ".join(map(str, lengths)) or "no chains"
        raise UserError(f"chains must all have the same number of captions, two or more, got {counts}")
    return lengths[0]


def _directions(texts: Texts, captions: Sequence[str]) -> np.ndarray:
    """(n, d) unit tangent vectors at the root of the ways to the captions; 0 for a caption that lies there."""
    rows = texts.raw(captions).double().numpy()
    if texts.geometry != "lorentz":  # the way on the sphere, which the chord cuts short
        root = texts.root.double().numpy()
        root = root / np.linalg.norm(root)
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows - np.outer(rows @ root, root)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(length > 1e-6, rows / np.maximum(length, 1e-300), 0.0)


def _projected(unit: np.ndarray) -> tuple[np.ndarray, float, float]:
    """(n,) angles of directions on their two main axes, the share of variance kept, and how true the angles are."""
    from hyptree.vlm.radial.order import spearman

    centred = unit - unit.mean(0)
    flat = centred @ main_axes(centred).T
    angle = np.arctan2(flat[:, 1], flat[:, 0])
    kept = float((flat**2).sum() / max((centred**2).sum(), 1e-300))
    i, j = np.triu_indices(len(unit), 1)
    if len(unit) < 3:
        return angle, kept, math.nan
    true = np.arccos(np.clip((unit[i] * unit[j]).sum(1), -1, 1))
    return angle, kept, spearman(true, np.abs(np.angle(np.exp(1j * (angle[i] - angle[j])))))


def axis_of(picture: RadialPicture) -> list[float]:
    """Distances that get a ring; the first is where the scale begins: 0, unless all captions are far from there."""
    low, high = float(picture.radius.min()), float(picture.radius.max())
    first, *rest = ticks(low if low > 0.3 * high else 0.0, high)
    return [first, *(tick for tick in rest if tick <= high)]


def _format(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


# ---- as SVG ---------------------------------------------------------------------------------------------------------


def scale_of(picture: RadialPicture) -> tuple[int, Callable[[Any], Any]]:
    """Radius of the hole in the middle that the scale leaves out, and what turns distances into pixels."""
    start, end = axis_of(picture)[0], float(picture.radius.max())
    hole = HOLE if start > 0 else 0
    return hole, lambda distance: hole + (distance - start) / ((end - start) or 1) * (REACH - hole)


def _widest_gap(angle: np.ndarray) -> float:
    """The direction farthest from any caption."""
    turned = np.sort(angle % (2 * math.pi))
    gaps = np.diff(np.append(turned, turned[0] + 2 * math.pi))
    return float(turned[gaps.argmax()] + gaps.max() / 2)


def _names(picture: RadialPicture, points: np.ndarray, dots: np.ndarray) -> list[str]:
    """Names of general captions first; a name that would cover another, or leave the picture, is left out."""
    reach = dots[:, None]
    own = np.concatenate([points - reach, points + reach], 1)  # (n, 4) boxes of the dots
    taken = [(i, box) for i, box in enumerate(own.tolist()) if picture.level[i] <= 1]
    taken.append((-1, [X - 20, Y - 8, X + 20, Y + 28]))  # the root and its name
    names = []
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
                look = {"font_size": size, "font_weight": None if picture.level[i] else 600}
                place = {"x": float(at), "y": float(line), "dy": ".34em", "text_anchor": anchor}
                names.append(tag("text", escape(text), **place, **look))
                break
    return names


def svg_radial(picture: RadialPicture) -> str:
    """The picture as an ``<svg>``; pointing at a dot tells its caption, level and distance."""
    colours = level_colours(picture.num_levels)
    hole, pixels = scale_of(picture)
    away, free = pixels(picture.radius), _widest_gap(picture.angle)
    points = np.stack([X + away * np.cos(picture.angle), Y - away * np.sin(picture.angle)], 1)
    dots = np.interp(picture.level, [0, max(1, picture.num_levels - 1)], [9.0, 4.0])
    rings = [(float(pixels(tick)), f"{tick:.4g}") for tick in axis_of(picture) if pixels(tick) > 0]
    parts = [
        f'<svg class="radial" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="'
        f'{len(picture.captions)} captions around the root, {escape(picture.title)}" '
        f"{FONT}>"
    ]
    # Colours are for a white page; a page with a scheme of its own gives the classes others.
    disks = [("rim", REACH, INSIDE), ("hole", hole, FLOOR), *(("round", ring, "none") for ring, _ in rings)]
    parts += [tag("circle", class_=kind, cx=X, cy=Y, r=r, fill=fill, stroke=RIM) for kind, r, fill in disks if r]
    parts.append(tag("circle", hint('the root: ""'), class_="root", cx=X, cy=Y, r=5, fill=INK))
    parts.append('<g class="marks">')
    for general, specific in picture.lines.tolist():
        (x1, y1), (x2, y2) = points[general].tolist(), points[specific].tolist()
        inward = picture.radius[specific] < picture.radius[general]
        colour = INWARD if inward else colours[picture.level[specific]]
        parts.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=1.4, opacity=0.55))
    for i in reversed(range(len(picture.captions))):  # general ones on top
        x, y = points[i].tolist()
        says = hint(f"{picture.captions[i]} (level {picture.level[i] + 1}, distance {picture.radius[i]:.3f})")
        look = {"fill": colours[picture.level[i]], "stroke": "white", "stroke_width": 1.3}
        parts.append(tag("circle", says, class_="caption", cx=x, cy=y, r=float(dots[i]), **look))
    parts.append(f'</g><g class="soft halo" fill="{SOFT}" font-size="14" text-anchor="middle" {HALO}>')
    for ring, text in rings:
        parts.append(tag("text", text, x=X + ring * math.cos(free), y=Y - ring * math.sin(free) + 5))
    parts.append(tag("text", "root", x=X, y=Y + 22))
    parts.append(f'</g><g class="names" fill="{INK}" {HALO} pointer-events="none">')
    parts += _names(picture, points, dots)
    parts.append("</g>")
    for k, colour in enumerate(colours):
        y, look = 26 + 24 * k, {"dy": ".34em", "font_size": 15, "fill": SOFT}
        parts.append(tag("g", tag("circle", cx=20, cy=y, r=7, fill=colour), class_="marks"))
        end = ", general" if k == 0 else ", specific" if k == picture.num_levels - 1 else ""
        parts.append(tag("text", f"level {k + 1}{end}", class_="soft", x=36, y=y, **look))
    return "".join(parts) + "</svg>"
