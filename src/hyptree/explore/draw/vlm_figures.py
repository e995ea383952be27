"""Pictures of a vision-language model as figures of matplotlib: the radial one, and the tree of a latent hierarchy.

plot_radial(radial_picture(texts, chains)).savefig("radial.png")
plot_latent_tree(LatentTree(head.to_tree(classes, images, names), thumbnails)).savefig("tree.png")
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import require
from hyptree.explore.draw import latent_tree as vlm_tree
from hyptree.explore.draw.disk import INK, INSIDE, RADIUS, RIM, branch_colors
from hyptree.explore.draw.latent_tree import LatentTree
from hyptree.explore.draw.radial import RadialPicture
from hyptree.explore.draw.radial_layout import (
    FLOOR,
    HEIGHT,
    REACH,
    SOFT,
    WIDTH,
    X,
    Y,
    layout_of,
    level_colours,
    level_name,
    line_colour,
)
from hyptree.tree.layout import geodesic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_latent_tree", "plot_radial"]


def plot_radial(picture: RadialPicture) -> Figure:
    """The picture as a matplotlib figure, with its title, and below what is true in it."""
    require("matplotlib", "plot")
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle
    from matplotlib.patheffects import withStroke

    layout, colours, unit = layout_of(picture), level_colours(picture.num_levels), 8.0 * 72 / WIDTH
    said = textwrap.fill(picture.says, 128)
    head, foot, high = 0.35, 0.25 + 0.155 * (said.count("\n") + 1), 8.0 * HEIGHT / WIDTH
    tall = head + high + foot
    figure = Figure(figsize=(8.0, tall), facecolor="white")
    ax = figure.add_axes((0, foot / tall, 1, high / tall))
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0), aspect="equal")
    ax.set_axis_off()
    disks = [(REACH, INSIDE), (layout.hole, FLOOR), *((away, "none") for away, *_ in layout.rings)]
    for away, fill in disks:
        ax.add_patch(Circle((X, Y), away, facecolor=fill, edgecolor=RIM, linewidth=unit))
    ax.add_patch(Circle((X, Y), 5, facecolor=INK))
    ways = [[layout.points[a], layout.points[b]] for a, b in picture.lines.tolist()]
    shades = [line_colour(picture, a, b, colours) for a, b in picture.lines.tolist()]
    ax.add_collection(LineCollection(ways, colors=shades, linewidths=1.3 * unit, alpha=0.55, zorder=2))
    order = np.arange(len(picture.captions))[::-1]
    ax.scatter(
        layout.points[order, 0],
        layout.points[order, 1],
        s=(2 * layout.dots[order] * unit) ** 2,
        c=[colours[level] for level in picture.level[order]],
        edgecolors="white",
        linewidths=1.3 * unit,
        zorder=3,
    )
    halo = [withStroke(linewidth=3.5 * unit, foreground="white")]
    for x, y, text in [*((*at, text) for _, text, at in layout.rings), (X, Y + 18, "root")]:
        ax.text(x, y, text, ha="center", va="center", fontsize=14 * unit, color=SOFT, path_effects=halo)
    for label in layout.labels:
        ax.text(
            *(label.x, label.y, label.text),
            ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
            va="center",
            fontsize=label.size * unit,
            fontweight="bold" if picture.level[label.caption] == 0 else "normal",
            color=INK,
            path_effects=halo,
            zorder=4,
            parse_math=False,
        )
    for k, colour in enumerate(colours):
        ax.add_patch(Circle((20, 26 + 24 * k), 7, facecolor=colour))
        ax.text(36, 26 + 24 * k, level_name(k, picture), va="center", fontsize=15 * unit, color=SOFT)
    figure.text(0.5, 1 - 0.1 / tall, picture.title, ha="center", va="top", fontsize=12, fontweight="bold", color=INK)
    figure.text(0.03, (foot - 0.05) / tall, said, va="top", fontsize=8.2, color=SOFT, linespacing=1.35)
    return figure


def plot_latent_tree(latent: LatentTree) -> Figure:
    """The tree class > attribute > image: the Poincaré disk above, the dendrogram with thumbnails below."""
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    rows = vlm_tree.rows_of(latent)
    high = (max((top + height for _, top, height in rows), default=20.0) + 6) * 8.0 / vlm_tree.WIDTH
    said = textwrap.fill(" ".join(filter(None, (vlm_tree.dendrogram_says(latent), latent.says))), 128)
    foot, disk = 0.2 + 0.155 * (said.count("\n") + 1), 6.4
    tall = disk + high + foot
    figure = Figure(figsize=(8.0, tall), facecolor="white")
    _draw_disk(figure.add_axes((0.8 / 8, (foot + high) / tall, disk / 8, disk / tall)), latent)
    _draw_dendrogram(figure.add_axes((0, foot / tall, 1, high / tall)), latent, rows, high)
    figure.text(0.03, (foot - 0.05) / tall, said, va="top", fontsize=8.2, color=SOFT, linespacing=1.35)
    return figure


def _draw_disk(ax: Axes, latent: LatentTree) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle
    from matplotlib.patheffects import withStroke

    tree, points, _ = vlm_tree.disk_of(latent)
    colours = branch_colors(tree)
    ax.set(xlim=(-1.04, 1.04), ylim=(-1.04, 1.04), aspect="equal")
    ax.set_axis_off()
    ax.add_patch(Circle((0, 0), 1, facecolor=INSIDE, edgecolor=RIM))
    child = np.flatnonzero(tree.parent >= 0)
    arcs = geodesic(points[tree.parent[child]], points[child], 32)
    wide = np.array([0.5, 0.9, 1.6, 1.0])[tree.height.astype(int)]
    ax.add_collection(
        LineCollection(list(arcs), colors=[colours[i] for i in child], linewidths=wide[child], alpha=0.7, zorder=2)
    )
    area = np.array([14.0, 45.0, 110.0, 30.0])[tree.height.astype(int)]
    ax.scatter(points[:, 0], points[:, 1], s=area, c=colours, edgecolors="white", linewidths=0.8, zorder=3)
    unit = 6.4 * 72 / (2.08 * RADIUS)
    for node, x, y, size in vlm_tree.names_on(tree, points):
        ax.text(
            *(x, y, (tree.label or [])[node]),
            ha="center",
            va="bottom",
            fontsize=size * unit,
            fontweight="bold" if tree.height[node] == 2 else "normal",
            color=INK,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            zorder=4,
            parse_math=False,
        )


def _draw_dendrogram(ax: Axes, latent: LatentTree, rows: list[Any], high: float) -> None:
    from matplotlib.patches import Rectangle

    unit, side = 8.0 * 72 / vlm_tree.WIDTH, vlm_tree.THUMB
    names: Any = latent.tree.label
    ax.set(xlim=(0, vlm_tree.WIDTH), ylim=(high * vlm_tree.WIDTH / 8.0, 0))
    ax.set_axis_off()
    for node, colour in vlm_tree.class_colours(latent).items():
        own = [(branch, top + height / 2) for branch, top, height in rows if branch.node == node]
        middle = (own[0][1] + own[-1][1]) / 2
        write: dict[str, Any] = {"va": "center", "fontsize": 14 * unit, "parse_math": False}
        name = vlm_tree.shortened(names[node], 20)
        ax.text(vlm_tree.CLASS_END - 8, middle, name, ha="right", fontweight="bold", color=colour, **write)
        for branch, y in own:
            end = vlm_tree.ATTRIBUTE_END - (105 if branch.attribute is not None else 0)
            turn = vlm_tree.CLASS_END + 20
            ax.plot([vlm_tree.CLASS_END, turn, turn, end], [middle, middle, y, y], color=colour, linewidth=1.8 * unit)
            if branch.attribute is not None:
                ax.text(end + 6, y, vlm_tree.shortened(names[branch.attribute], 15), color=INK, **write)
            if not branch.pictures:
                ax.text(vlm_tree.ATTRIBUTE_END + 10, y, "no picture", color=SOFT, **write)
    for branch, top, _ in rows:
        for k, picture in enumerate(branch.pictures):
            x, y = vlm_tree.place_of(k, top)
            shown = vlm_tree.thumbnail(latent, picture)
            if shown is not None:
                ax.imshow(shown, extent=(x, x + side, y + side, y), interpolation="bilinear", aspect="auto")
            frame = vlm_tree.frame_colour(latent, picture)
            ax.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=frame, linewidth=2.5 * unit, zorder=3))
    ax.set(xlim=(0, vlm_tree.WIDTH), ylim=(high * vlm_tree.WIDTH / 8.0, 0))  # imshow changes them
