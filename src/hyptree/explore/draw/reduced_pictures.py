"""Pictures beside what became of their patches: drawn as one PNG, and as a part of the page of ``hyptree reduce``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.pictures.single import fit
from hyptree.explore.draw.dendrogram import LayerTree, merge_figure
from hyptree.explore.draw.style import img, read_beside
from hyptree.tokens.draw import draw

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["STYLE", "Drawing", "Shown", "picture_html", "strip"]

SIDE = 336
"""Pixels of a drawing, at least: the picture's own size may be too small for borders."""
CAPTION_HEIGHT = 22
"""Pixels above a drawing for its caption."""

STYLE = read_beside(__file__, "reduced_pictures.css")


@dataclass(frozen=True)
class Drawing:
    """What one reduction made of one picture."""

    name: str
    keep: float
    sources: list[np.ndarray]
    """(P,) of every layer: the token of each patch, -1 if it was dropped."""


@dataclass(frozen=True)
class Shown:
    """One picture and what became of its patches."""

    name: str
    picture: np.ndarray
    """(S, S, 3) uint8, as the model saw it."""
    grid: tuple[int, int]
    layers: Sequence[int]
    drawings: list[Drawing]
    trees: list[LayerTree] = field(default_factory=list)
    """Of the layers that merged anything."""
    trees_of: Drawing | None = None
    """The drawing that the trees belong to."""


def strip(shown: Shown) -> Image:
    """The picture and its merged patches after every layer, a row for each reduction."""
    from PIL import Image, ImageDraw, ImageFont

    font: Any = ImageFont.load_default(13)
    rows = [[("picture", _enlarged(shown.picture)), *_drawn(shown, drawing)] for drawing in shown.drawings]
    width, height = rows[0][0][1].size
    gap = 8
    canvas = Image.new(
        "RGB", (len(rows[0]) * (width + gap) - gap, len(rows) * (height + CAPTION_HEIGHT + gap) - gap), (255, 255, 255)
    )
    pen = ImageDraw.Draw(canvas)
    for i, (drawing, row) in enumerate(zip(shown.drawings, rows, strict=True)):
        for j, (caption, cell) in enumerate(row):
            x, y = j * (width + gap), i * (height + CAPTION_HEIGHT + gap)
            text = f"{drawing.name}, keep {drawing.keep:g}" if j == 0 else caption
            pen.text((x + 1, y + 3), text, (28, 32, 48), font)
            canvas.paste(cell, (x, y + CAPTION_HEIGHT))
    return canvas


def picture_html(shown: Shown) -> str:
    """The same for a page, one part for each keep rate, and the dendrograms."""
    parts = []
    keeps = sorted({drawing.keep for drawing in shown.drawings}, reverse=True)
    opened = min(keeps, key=lambda keep: abs(keep - 0.5), default=None)
    columns = f"7rem repeat({len(shown.layers) + 1}, minmax(8rem, 14rem))"
    picture = _cell(shown.picture, "the picture", shown.name)
    for keep in keeps:
        cells = []
        for drawing in (drawing for drawing in shown.drawings if drawing.keep == keep):
            cells += [f"<b>{escape(drawing.name)}</b>", picture]
            cells += [_cell(np.asarray(cell), text, f"{drawing.name}, {text}") for text, cell in _drawn(shown, drawing)]
        parts.append(
            f"<details{' open' if keep == opened else ''}><summary>keep {keep:g}</summary>"
            f'<div class="rows" style="grid-template-columns: {columns}">{"".join(cells)}</div></details>'
        )
    if shown.trees_of is not None:
        parts.append(f"<h3>How {escape(shown.trees_of.name)} merged, keep {shown.trees_of.keep:g}</h3>")
        sources = dict(zip(shown.layers, shown.trees_of.sources, strict=True))
        parts += [merge_figure(shown.picture, shown.grid, tree, sources[tree.layer]) for tree in shown.trees]
    return "".join(parts)


def _drawn(shown: Shown, drawing: Drawing) -> list[tuple[str, Image]]:
    """Caption and drawing of every layer."""
    drawn = []
    for layer, source in zip(shown.layers, drawing.sources, strict=True):
        count = len(np.unique(source[source >= 0]))
        text = f"layer {layer}: {count} token{'s' if count > 1 else ''}"
        drawn.append((text, draw(shown.picture, source, shown.grid, side=SIDE)))
    return drawn


def _enlarged(picture: np.ndarray) -> Image:
    """As large as the drawings beside it."""
    from PIL import Image

    height, width = picture.shape[:2]
    zoom = max(1.0, SIDE / max(height, width))
    return Image.fromarray(fit(picture, (round(height * zoom), round(width * zoom))))


def _cell(picture: np.ndarray, caption: str, alt: str) -> str:
    return f"<figure>{img(picture, alt)}<figcaption>{escape(caption)}</figcaption></figure>"
