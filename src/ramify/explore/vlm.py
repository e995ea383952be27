"""The radial picture of an encoder's text: captions by their distance from the root, lines from general to specific.

    picture = radial_picture(Texts(encoder.encode_text), chains)
    svg_radial(picture)                       # for a page; vlm_figures.plot_radial gives a figure of matplotlib

The radius is the true distance. The angle is a projection, and the picture says how good a one. What goes where is
decided once, in :func:`layout_of`; the SVG and the figure show the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.errors import UserError
from ramify.explore.curves import _ticks
from ramify.explore.disk import INK, INSIDE, RIM

if TYPE_CHECKING:
    from ramify.vlm.suites import Texts

__all__ = ["RadialPicture", "layout_of", "level_colours", "radial_picture", "same_levels", "svg_radial"]

WIDTH, HEIGHT, REACH = 1000, 880, 400
"""Of the SVG, and of the disk inside it, on whose rim the farthest caption lies; names on the rim need the rest."""
X, Y = WIDTH / 2, HEIGHT / 2
"""Where the root is."""
HOLE = 70
"""Radius of the disk in the middle that stands for distances nearer to the root than any caption."""
MAX_CAPTIONS = 90
SOFT, INWARD, FLOOR = "#5a6172", "#d1242f", "#e7eaf1"
_ENDS = ((49, 87, 201), (24, 121, 78), (194, 130, 12), (160, 50, 120))
"""Colours of four levels, general first; other numbers of levels are mixed from them."""


@dataclass(frozen=True)
class RadialPicture:
    """Captions around the root, each once.

    Attributes:
        captions: n distinct texts. level: (n,) from 0, the first level at which each stands.
        radius: (n,) true distance from the root. angle: (n,) drawn direction, in radians.
        lines: (m, 2) general and specific caption of each step of a chain.
        num_levels: of the chains. geometry: in which distances are measured.
        tau, tau_words: mean Kendall's tau (ties count as no order) of distance and of word count along all chains.
        num_chains, num_shown: measured, and drawn.
        kept: share of the variance of directions that the plane of the picture keeps.
        agreement: Spearman's correlation of true and drawn angles between captions; NaN for fewer than three.
    """

    captions: tuple[str, ...]
    level: np.ndarray
    radius: np.ndarray
    angle: np.ndarray
    lines: np.ndarray
    num_levels: int
    geometry: str
    tau: float
    tau_words: float
    num_chains: int
    num_shown: int
    kept: float
    agreement: float

    @property
    def title(self) -> str:
        """tau_d, and the baseline without which it says nothing."""
        return f"tau_d {_said(self.tau)} · word count alone {_said(self.tau_words)}"

    @property
    def num_inward(self) -> int:
        """Lines whose specific caption is nearer to the root than its general one."""
        return int((self.radius[self.lines[:, 1]] < self.radius[self.lines[:, 0]]).sum())

    @property
    def says(self) -> str:
        """What is true in the picture and what is not, in words."""
        which = "all" if self.num_shown == self.num_chains else f"{self.num_shown} of"
        agree = (
            "" if math.isnan(self.agreement) else f", and drawn angles follow true ones with rho {self.agreement:.2f}"
        )
        start = _axis(self)[0]
        begins = f" The scale begins at {start:.4g}, at the edge of the grey disk." if start else ""
        return (
            f"The middle is the root, the embedding of the empty text. Distance from it is true ({self.geometry}), and "
            f"rings carry its scale.{begins} The angle is a projection: the direction in which a caption leaves the "
            f"root, on the two main axes of all of them, which keep {self.kept:.0%} of their variance{agree}. Lines go "
            f"from general to specific along {which} {self.num_chains} chains; {self.num_inward} of {len(self.lines)} "
            "lead inwards and are red."
        )


def radial_picture(texts: Texts, chains: Sequence[Sequence[str]], shown: int | None = None) -> RadialPicture:
    """Where the captions of chains lie around the root.

    Args:
        texts: the encoder's texts, see ``ramify.vlm.suites.Texts``.
        chains: captions from general to specific, all with as many levels.
        shown: chains to draw, the first ones that differ; by default as many as have about 90 captions together. tau
            is that of all.
    """
    from ramify.vlm.order import length_baselines, order_of_levels

    num_levels = same_levels(chains)
    if shown is not None and shown < 1:
        raise UserError(f"shown must be 1 or more, got {shown}")
    every = texts.distance([caption for chain in chains for caption in chain]).double().view(-1, num_levels)
    drawn = list(dict.fromkeys(tuple(chain) for chain in chains))[: shown or len(chains)]
    if shown is None:
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
        found = ", ".join(map(str, lengths)) or "no chains"
        raise UserError(f"chains must all have the same number of captions, two or more, got {found}")
    return lengths[0]


def level_colours(num_levels: int) -> list[str]:
    """A colour for each level, general first."""
    at = np.linspace(0, len(_ENDS) - 1, num_levels) if num_levels > 1 else np.zeros(1)
    mixed = [[np.interp(x, range(len(_ENDS)), [end[k] for end in _ENDS]) for k in range(3)] for x in at]
    return ["#{:02x}{:02x}{:02x}".format(*(round(float(value)) for value in colour)) for colour in mixed]


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
    from ramify.vlm.order import spearman

    centred = unit - unit.mean(0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:2]
    for axis in axes:  # the sign of an axis is free: make it the same each time
        axis *= np.sign(axis[np.abs(axis).argmax()]) or 1.0
    flat = np.zeros((len(unit), 2))
    flat[:, : len(axes)] = centred @ axes.T
    angle = np.arctan2(flat[:, 1], flat[:, 0])
    kept = float((flat**2).sum() / max((centred**2).sum(), 1e-300))
    i, j = np.triu_indices(len(unit), 1)
    if len(unit) < 3:
        return angle, kept, math.nan
    true = np.arccos(np.clip((unit[i] * unit[j]).sum(1), -1, 1))
    return angle, kept, spearman(true, np.abs(np.angle(np.exp(1j * (angle[i] - angle[j])))))


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


def _axis(picture: RadialPicture) -> list[float]:
    """Distances that get a ring; the first is where the scale begins: 0, unless all captions are far from there."""
    low, high = float(picture.radius.min()), float(picture.radius.max())
    ticks = _ticks(low if low > 0.3 * high else 0.0, high, 4)
    return [ticks[0], *(tick for tick in ticks[1:] if tick <= high)]


def layout_of(picture: RadialPicture) -> Layout:
    """Places of everything in the picture."""
    ticks, end = _axis(picture), float(picture.radius.max())
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
    found = []
    for i in np.lexsort((-picture.radius, picture.level)).tolist():
        size = (19.0, 15.5, 13.0)[min(int(picture.level[i]), 2)]
        text = _short(picture.captions[i])
        width, (x, y), gap = (0.62 if picture.level[i] == 0 else 0.55) * size * len(text), points[i], dots[i] + 4
        right, left = ("start", x + gap, y), ("end", x - gap, y)
        over, under = ("middle", x, y - gap - 0.55 * size), ("middle", x, y + gap + 0.55 * size)
        places = [right, left, over, under] if x >= X else [left, right, over, under]
        for attempt, (anchor, at, line) in enumerate(places if picture.level[i] else places * 2):
            start = at - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
            box = [start, line - 0.55 * size, start + width, line + 0.55 * size]
            inside = box[0] > 4 and box[2] < WIDTH - 4 and box[1] > 4 and box[3] < HEIGHT - 4
            crowd = taken if attempt < 4 else [one for one in taken if one[0] < 0]  # most general: rather over a dot
            if inside and not any(_overlap(box, other) for k, other in crowd if k != i):
                taken.append((-1, box))
                found.append(Label(i, text, at, line, anchor, size))
                break
    return found


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _short(text: str, longest: int = 34) -> str:
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _said(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


# ---- as SVG ---------------------------------------------------------------------------------------------------------


def svg_radial(picture: RadialPicture) -> str:
    """The picture as an ``<svg>``; pointing at a dot tells its caption, level and distance."""
    layout, colours = layout_of(picture), level_colours(picture.num_levels)
    parts = [
        f'<svg class="radial" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="'
        f'{len(picture.captions)} captions around the root, {escape(picture.title)}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    ]
    disks = [(REACH, INSIDE), (layout.hole, FLOOR), *((away, "none") for away, *_ in layout.rings)]
    parts += [
        f'<circle cx="{X}" cy="{Y}" r="{away:.1f}" fill="{fill}" stroke="{RIM}"/>' for away, fill in disks if away
    ]
    parts.append(f'<circle cx="{X}" cy="{Y}" r="5" fill="{INK}"><title>the root: ""</title></circle>')
    for general, specific in picture.lines.tolist():
        (x1, y1), (x2, y2) = layout.points[general], layout.points[specific]
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{line_colour(picture, general, specific, colours)}" stroke-width="1.4" opacity=".55"/>'
        )
    for i in reversed(range(len(picture.captions))):  # general ones on top
        x, y = layout.points[i]
        said = f"{picture.captions[i]} (level {picture.level[i] + 1}, distance {picture.radius[i]:.3f})"
        parts.append(
            f'<circle class="caption" cx="{x:.1f}" cy="{y:.1f}" r="{layout.dots[i]:.1f}" '
            f'fill="{colours[picture.level[i]]}" stroke="white" stroke-width="1.3">'
            f"<title>{escape(said)}</title></circle>"
        )
    halo = 'stroke="white" stroke-width="3.5" stroke-linejoin="round" paint-order="stroke"'
    parts.append(f'<g fill="{SOFT}" font-size="14" text-anchor="middle" {halo}>')
    parts += [f'<text x="{x:.1f}" y="{y + 5:.1f}">{text}</text>' for _, text, (x, y) in layout.rings]
    parts.append(f'<text x="{X}" y="{Y + 22}">root</text></g><g {halo} pointer-events="none">')
    for label in layout.labels:
        bold = ' font-weight="600"' if picture.level[label.caption] == 0 else ""
        parts.append(
            f'<text x="{label.x:.1f}" y="{label.y:.1f}" dy=".34em" text-anchor="{label.anchor}"{bold} '
            f'font-size="{label.size}" fill="{INK}">{escape(label.text)}</text>'
        )
    parts.append("</g>")
    for k, colour in enumerate(colours):
        y = 26 + 24 * k
        parts.append(f'<circle cx="20" cy="{y}" r="7" fill="{colour}"/>')
        parts.append(f'<text x="36" y="{y}" dy=".34em" font-size="15" fill="{SOFT}">{level_name(k, picture)}</text>')
    return "".join(parts) + "</svg>"


def line_colour(picture: RadialPicture, general: int, specific: int, colours: Sequence[str]) -> str:
    """That of the specific caption's level, red where the line leads inwards."""
    inward = picture.radius[specific] < picture.radius[general]
    return INWARD if inward else colours[picture.level[specific]]


def level_name(k: int, picture: RadialPicture) -> str:
    """What the legend says of level ``k``."""
    end = ", general" if k == 0 else ", specific" if k == picture.num_levels - 1 else ""
    return f"level {k + 1}{end}"
