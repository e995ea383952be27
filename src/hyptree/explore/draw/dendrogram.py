"""The merges of one layer as a dendrogram beside its picture: plain SVG; the patches below a link can be lit up."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from hyptree.explore.draw.style import hex_colour, hint, img, read_beside, tag
from hyptree.tokens.draw import cluster_colours
from hyptree.tree import Tree
from hyptree.tree.drawing import first_leaf

__all__ = ["SCRIPT", "LayerTree", "merge_figure", "svg_dendrogram"]

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
    """The links as brackets at their heights, those that were made in the colour of their cluster.

    Args:
        colours: (n, 3) uint8 of the leaves, alike within a cluster.
    """
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

    Args:
        picture: (H, W, 3) uint8. source: (P,) the cluster of every patch after the layer, for the colours.
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
