"""Pictures beside what became of their patches: as one PNG, and on the page of ``hyptree reduce`` with dendrograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.pictures.single import fit
from hyptree.explore.draw.style import hex_colour, hint, img, read_beside, tag
from hyptree.tokens.draw import cluster_colours, draw
from hyptree.tree import Tree
from hyptree.tree.layout import first_leaf

if TYPE_CHECKING:
    from PIL.Image import Image


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
    h, w = shown.picture.shape[:2]
    zoom = max(1.0, SIDE / max(h, w))  # as large as the drawings beside it
    enlarged = Image.fromarray(fit(shown.picture, (round(h * zoom), round(w * zoom))))
    rows = [[("picture", enlarged), *_drawn(shown, drawing)] for drawing in shown.drawings]
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


def _cell(picture: np.ndarray, caption: str, alt: str) -> str:
    return f"<figure>{img(picture, alt)}<figcaption>{escape(caption)}</figcaption></figure>"


WIDTH, HEIGHT = 760, 240
LEFT, TOP, BOTTOM = 44, 8, 14
"""Room for the heights on the left, and for the patches' own colours below."""

# Each link knows which stretch of leaves lies below it, each patch at which leaf it is: that is all the pointer needs.
SCRIPT = read_beside(__file__, "dendrogram.js")


@dataclass(frozen=True)
class LayerTree:
    """All merges that one layer could make on one picture, and how many of them it made."""

    layer: int
    links: np.ndarray
    """(n - 1, 4) as scipy writes them: two nodes, height, leaves below; the leaves are the tokens that came in."""
    leaf: np.ndarray
    """(P,) the token that holds each patch of the picture, 0 to n - 1; -1 for a patch dropped before."""
    num_clusters: int
    """Tokens that the layer gave on."""


def svg_dendrogram(tree: LayerTree, colours: np.ndarray) -> str:
    """The links as brackets at their heights, those that were made in the colour (n, 3) of their cluster."""
    links, num = tree.links, len(tree.links) + 1
    merges = Tree.from_linkage(links)
    first = first_leaf(merges)
    last, place = first + merges.num_leaves_below, first[:num]
    leaf_at = np.argsort(place)
    num_merges = num - tree.num_clusters
    top = float(links[:, 2].max(initial=0.0)) or 1.0
    step = (WIDTH - LEFT - 6) / num

    def y_of(height: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - height / top)

    x = np.concatenate([LEFT + (place + 0.5) * step, np.zeros(len(links))])
    y = np.concatenate([np.full(num, y_of(0.0)), np.zeros(len(links))])
    alt = f"dendrogram of layer {tree.layer}"
    parts = [f'<svg class="dendrogram" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">']
    for height in (0.0, 0.5 * top, top):
        parts.append(tag("text", f"{height:.2f}", x=LEFT - 6, y=y_of(height) + 3, text_anchor="end"))
    for k, (a, b, height, _) in enumerate(links):
        left, right, node = int(a), int(b), num + k
        x[node], y[node] = (x[left] + x[right]) / 2, y_of(float(height))
        stroke = hex_colour(colours[leaf_at[first[node]]]) if k < num_merges else "#b9bfcc"
        way = f"M{x[left]:.1f} {y[left]:.1f}V{y[node]:.1f}H{x[right]:.1f}V{y[right]:.1f}"
        says = hint(f"{last[node] - first[node]} tokens, distance {height:.3f}")
        paths = tag("path", d=way, stroke=stroke) + tag("path", class_="hit", d=way)
        parts.append(tag("g", paths, says, data_from=first[node], data_to=last[node]))
    if 0 < num_merges < len(links):
        at = y_of(float(links[num_merges - 1, 2] + links[num_merges, 2]) / 2)
        parts.append(tag("line", class_="cut", x1=LEFT, x2=WIDTH, y1=at, y2=at))
    for leaf in range(num):
        place_of = {"x": LEFT + place[leaf] * step, "y": HEIGHT - BOTTOM + 4, "width": step, "height": 8}
        parts.append(tag("rect", **place_of, fill=hex_colour(colours[leaf])))
    return "".join(parts) + "</svg>"


def merge_figure(picture: np.ndarray, grid: tuple[int, int], tree: LayerTree, source: np.ndarray) -> str:
    """The picture and the dendrogram of one layer, side by side; pointing at a link shows the patches below it.

    Colours are those of ``source`` (P,), the cluster of every patch after the layer.
    """
    num = len(tree.links) + 1
    colours = np.full((num, 3), 160, np.uint8)
    there = tree.leaf >= 0
    colours[tree.leaf[there]] = cluster_colours(source)[there]
    place = (
        np.append(first_leaf(Tree.from_linkage(tree.links))[:num], -1)[tree.leaf] if num > 1 else np.where(there, 0, -1)
    )
    caption = (
        f"Layer {tree.layer}: {num} tokens become {tree.num_clusters}. Links below the dashed line were made; the row "
        "of colours shows the clusters. Point at a link to see its patches."
    )
    return (
        f'<figure class="merge"><div class="seen" data-columns="{grid[1]}" data-leaf="{",".join(map(str, place))}">'
        f'{img(picture, "the picture")}<svg viewBox="0 0 {grid[1]} {grid[0]}" '
        f'preserveAspectRatio="none"></svg></div>{svg_dendrogram(tree, colours) if num > 1 else ""}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
