"""Pictures of a Hi-Mapper: where its nodes look, which node wins each patch, where nodes lie, how they came there.

Every function gives a matplotlib ``Figure``: ``plot_tree_maps(image, out).savefig("maps.png")``. ``out`` is what the
model returned for a batch (``model(x, return_maps=True)``), ``b`` one picture of it. A map shows where a query looked,
no more: nothing in the method makes it an object or a part, or a parent's map the union of its children's.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.pictures.single import read_picture
from hyptree.errors import require
from hyptree.evaluate.pictures.superpixels import enlarge
from hyptree.explore.draw.charts import SPLITS, lines_of, points_of
from hyptree.explore.draw.nodes import Nodes, even_warning, forest, node_colours, read_nodes
from hyptree.explore.draw.style import INK, PALETTE, RIM, SOFT
from hyptree.files import read_log
from hyptree.lab.figures.panels import Panel
from hyptree.runs import RunFolder
from hyptree.tree.layout import flat_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALARM = "#b3261e"
HEAT = "YlOrRd"
LEAST_SCALE = 2.0
"""A scale goes to at least this many even shares, so that tiny differences do not fill it."""
LEAF = 0.72
"""Inches a leaf has from side to side."""
LINE = 8.4 * 1.35 * 1.2 / 72
"""Inches from line to line of a caption."""
LEAVES_PER_ROW = 16
"""More than this and the trees of the forest go on in a new row."""

MAPS_SAY = (
    "Each small picture is one query of the tree: the redder, the more it attends there, on one scale per level (1 is "
    "the even share of a patch). H is the map's entropy over that of an even map: 1 looks at all patches alike. A map "
    "shows where a query looked; it is no object or part, and a parent's map is not made of its children's."
)


# ---- where nodes look ------------------------------------------------------------------------------------------------


def plot_tree_maps(image: Any, out: Any, b: int = 0) -> Figure:
    """The forest from top to bottom, each node the picture under its map, with the map's entropy.

    Maps are enlarged bilinearly; the nodes of a level share one scale, from 0 to the largest value among them (2 at
    least), in units of a patch's even share. Warns, on the figure and as a ``UserWarning``, where the maps of a level
    are close to uniform.

    Args:
        image: the picture as the model saw it, before it was normalised: path, PIL image, or uint8 array or tensor.
    """
    require("matplotlib", "plot")
    from matplotlib.patches import Rectangle

    picture = read_picture(image)
    nodes = read_nodes(out, b)
    maps, numbers = nodes.need_maps(), nodes.level_maps()
    alarm = even_warning(numbers)
    if alarm:
        warnings.warn(alarm, stacklevel=2)
    sizes, colours = nodes.sizes, node_colours(nodes.sizes)
    aspect = picture.shape[0] / picture.shape[1]

    # Places, in inches from the upper left corner. A row of trees holds as many whole trees as fit.
    per_root = sizes[0] // sizes[-1]
    trees_per_row = max(1, min(sizes[-1], LEAVES_PER_ROW // per_root))
    num_rows = -(-sizes[-1] // trees_per_row)
    edge = [LEAF * 0.93 * min(1.28**k, 0.97 * 2**k) for k in range(len(sizes))]  # of a node's picture, by level
    drop = [side * aspect + 0.36 for side in edge]
    width = max(trees_per_row * per_root * LEAF, 8.0) + 0.3
    left = (width - trees_per_row * per_root * LEAF) / 2
    foot, between = 0.6, 0.16
    row_height = sum(drop) + between
    figure, ax = _empty_page()
    head = _heading(ax, picture, width, "Where the nodes of the tree look", MAPS_SAY, alarm)
    height = head + num_rows * row_height + foot
    _fit_page(ax, width, height)

    tops = [0.0] * len(sizes)  # of every level inside a row of trees
    for k in range(len(sizes) - 2, -1, -1):
        tops[k] = tops[k + 1] + drop[k + 1]

    def middle(level: int, i: int) -> tuple[float, float]:
        """Where the upper edge of a node's picture has its middle."""
        leaves = 2**level
        tree = i * leaves // per_root
        x = left + ((i + 0.5) * leaves - (tree // trees_per_row) * trees_per_row * per_root) * LEAF
        return x, head + (tree // trees_per_row) * row_height + tops[level]

    even = 1 / (maps[0].shape[1] * maps[0].shape[2])
    tallest = [max(float(level.max()), LEAST_SCALE * even) for level in maps]
    for k, size in enumerate(sizes):
        for i in range(size):
            x, y = middle(k, i)
            side = edge[k]
            if k + 1 < len(sizes):
                px, py = middle(k + 1, i // 2)
                bottom = py + edge[k + 1] * aspect + 0.2
                bend = (bottom + y) / 2 + 0.02
                ax.plot([px, px, x, x], [bottom, bend, bend, y], color=colours[-1][i * 2**k // per_root], linewidth=1.1)
            seen = _under_map(picture, maps[k][i] / tallest[k], side)
            ax.imshow(seen, extent=(x - side / 2, x + side / 2, y + side * aspect, y), interpolation="bilinear")
            frame = Rectangle(
                (x - side / 2, y), side, side * aspect, fill=False, edgecolor=colours[k][i], linewidth=1.8
            )
            ax.add_patch(frame)
            text = f"H {numbers[k].entropy[i]:.2f}"
            ax.text(x, y + side * aspect + 0.045, text, ha="center", va="top", fontsize=7.2, color=INK)
    _scales(ax, 0.25, height - foot + 0.14, width - 0.4, [top / even for top in tallest], numbers)
    return figure


def _under_map(picture: np.ndarray, weight: np.ndarray, inches: float) -> np.ndarray:
    """(h, w, 3) uint8: the picture in grey, coloured by its map (H, W) in [0, 1]."""
    from matplotlib import colormaps
    from PIL import Image

    wide = round(inches * 160)
    size = wide, max(1, round(wide * picture.shape[0] / picture.shape[1]))
    grey = np.asarray(Image.fromarray(picture).convert("L").resize(size, Image.Resampling.BICUBIC), np.float32) / 255
    grown = Image.fromarray(weight.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    strength = np.clip(np.asarray(grown), 0, 1)[..., None]
    pale = 0.3 + 0.7 * grey[..., None]  # what nobody looks at stays to be seen, without colour
    cover = 0.85 * np.sqrt(strength)
    painted = (1 - cover) * pale + cover * colormaps[HEAT](strength[..., 0])[..., :3] * (0.55 + 0.45 * pale)
    return np.round(255 * np.clip(painted, 0, 1)).astype(np.uint8)


def _scales(ax: Axes, left: float, top: float, width: float, tallest: Sequence[float], numbers: Sequence[Any]) -> None:
    """A bar for every level that says what its colours mean, top level first."""
    step = width / len(tallest)
    for at, k in enumerate(reversed(range(len(tallest)))):
        x, one = left + at * step, numbers[k]
        ax.imshow(np.linspace(0, 1, 128)[None], cmap=HEAT, extent=(x, x + 0.62 * step, top + 0.12, top), aspect="auto")
        ax.text(x, top - 0.05, f"level {one.level}: {one.num_nodes} nodes", fontsize=8, color=INK, fontweight="bold")
        ax.text(x + 0.62 * step + 0.05, top + 0.06, f"{tallest[k]:.3g}×", fontsize=7.5, color=SOFT, va="center")
        ax.text(x - 0.03, top + 0.06, "0", fontsize=7.5, color=SOFT, va="center", ha="right")
        text = f"mean H {one.entropy.mean():.3f}, {one.from_even:.2f} from even"
        ax.text(x, top + 0.17, text, fontsize=7.5, color=SOFT, va="top")


def _empty_page() -> tuple[Figure, Axes]:
    """A new figure, and axes for places in inches from its upper left corner."""
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    figure = Figure(facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    return figure, ax


def _fit_page(ax: Axes, width: float, height: float) -> None:
    """Gives the figure its size in inches, once it is known what is on it."""
    ax.get_figure(root=True).set_size_inches(width, height)  # type: ignore[union-attr]
    ax.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)


def _wrapped(text: str, inches: float) -> str:
    """The text in lines that fit into this width at the size of captions."""
    return textwrap.fill(text, max(20, int(inches * 15.8)))


def _heading(ax: Axes, picture: np.ndarray, width: float, title: str, text: str, alarm: str | None) -> float:
    """The picture itself, and beside it what the figure shows; gives the height that this takes."""
    side = 1.05
    wide = side * picture.shape[1] / picture.shape[0]
    ax.imshow(picture, extent=(0.15, 0.15 + wide, 0.15 + side, 0.15), interpolation="bilinear")
    x = 0.35 + wide
    ax.text(x, 0.12, title, fontsize=12, color=INK, fontweight="bold", va="top")
    rest = width - x - 0.15
    lines = _wrapped(text, rest)
    ax.text(x, 0.40, lines, fontsize=8.4, color=SOFT, va="top", linespacing=1.35)
    end = 0.40 + LINE * (lines.count("\n") + 1)
    if alarm:
        line = _wrapped(f"Warning: {alarm}.", 0.9 * rest)
        ax.text(x, end + 0.05, line, fontsize=8.4, color=ALARM, fontweight="bold", va="top", linespacing=1.35)
        end += 0.05 + LINE * (line.count("\n") + 1)
    return max(0.15 + side, end) + 0.25


# ---- which node wins a patch -----------------------------------------------------------------------------------------


def plot_assignment(image: Any, out: Any, b: int = 0) -> Figure:
    """The picture with every patch in the colour of the node that looks at it most, level by level.

    A tree of the forest has a hue, its nodes have shades of it: siblings look alike, and the levels can be compared.
    """
    picture = read_picture(image)
    nodes = read_nodes(out, b)
    maps, numbers, colours = nodes.need_maps(), nodes.level_maps(), node_colours(nodes.sizes)
    aspect = picture.shape[0] / picture.shape[1]
    side = 2.5
    width = (side + 0.15) * (len(maps) + 1) + 0.15
    figure, ax = _empty_page()
    panels = [("the picture", picture)]
    for k in reversed(range(len(maps))):
        winner = maps[k].argmax(0)
        title = f"level {k + 1}: {numbers[k].num_winners} of {numbers[k].num_nodes} nodes win a patch"
        panels.append((title, _painted(picture, winner, colours[k])))
    for at, (title, panel) in enumerate(panels):
        x = 0.15 + at * (side + 0.15)
        ax.imshow(panel, extent=(x, x + side, 0.38 + side * aspect, 0.38), interpolation="bilinear")
        ax.text(x, 0.31, title, fontsize=8.6, color=INK, va="bottom")
    text = (
        "Each patch in the colour of the node that looks at it most; the trees of the forest have one hue each, their "
        "nodes shades of it. Borders are those of patches. Which node looks most says nothing on how much, nor that "
        "the region is a thing."
    )
    lines = _wrapped(text, width - 0.3)
    ax.text(0.15, 0.46 + side * aspect, lines, fontsize=8.4, color=SOFT, va="top", linespacing=1.35)
    _fit_page(ax, width, 0.46 + side * aspect + LINE * (lines.count("\n") + 1) + 0.12)
    return figure


def _painted(picture: np.ndarray, winner: np.ndarray, colours: np.ndarray, pixels: int = 480) -> np.ndarray:
    """(h, w, 3) uint8: the picture in grey under the colour of each patch's node, with lines where nodes change."""
    from PIL import Image

    height = max(1, round(pixels * picture.shape[0] / picture.shape[1]))
    grey = Image.fromarray(picture).convert("L").resize((pixels, height), Image.Resampling.BICUBIC)
    node = enlarge(winner, height, pixels)
    light = np.asarray(grey, np.float32)[..., None] / 255
    painted = 0.72 * colours[node] + 0.28 * light
    border = np.zeros(node.shape, bool)
    for ahead in (1, 2):  # two pixels wide
        border[ahead:] |= node[ahead:] != node[:-ahead]
        border[:, ahead:] |= node[:, ahead:] != node[:, :-ahead]
    painted[border] = 1.0
    return np.round(255 * np.clip(painted, 0, 1)).astype(np.uint8)


# ---- where nodes lie -------------------------------------------------------------------------------------------------


def plot_poincare(out: Any, b: int = 0) -> Figure:
    """The nodes on the Poincaré disk, parents larger than children, edges as geodesics.

    Tangent vectors at the origin are flattened on their first two principal axes and brought back to their own
    length, so the distance of a node from the centre is its true hyperbolic radius and its angle is a projection.
    Exact where the space has two dimensions. A model with ``geometry="euclidean"`` is drawn on the plane.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    nodes = read_nodes(out, b)
    colours = np.concatenate(node_colours(nodes.sizes))
    places, kept = flat_points(np.concatenate(nodes.points), nodes.c)
    figure = Figure(figsize=(6.4, 7.1), facecolor="white")
    ax = figure.add_axes((0.02, 0.12, 0.96, 0.865))
    forest(nodes.sizes).draw(ax=ax, layout=places, color=colours, names=False, flat=nodes.c is None)
    ax.plot(0, 0, "+", color="#9aa2b5", markersize=9, zorder=1)
    text = textwrap.fill(f"{disk_caption(nodes, kept)} The larger, the higher in its tree.", 98)
    figure.text(0.03, 0.1, text, fontsize=8.4, color=SOFT, va="top", linespacing=1.35)
    return figure


def disk_caption(nodes: Nodes, kept: float) -> str:
    """The caption of the disk: what of it is true, and what is a projection.

    Args:
        kept: share of the squared lengths that two axes hold, from ``flat_points``.
    """
    dims = nodes.points[0].shape[1]
    held = "" if dims <= 2 else f": the two main axes of {dims} hold {kept:.0%} of the squared lengths"
    if nodes.c is None:
        return f"Flat space{', seen along its main axes' if held else ', drawn as it is'}{held}. Edges are straight."
    if not held:
        text = "The space has two dimensions: the picture is exact."
    else:
        text = f"Distances from the centre are true, angles are a projection{held}."
    return f"{text} Edges are geodesics of the disk. Curvature {-nodes.c:.2f}."


# ---- how its tree came about -----------------------------------------------------------------------------------------

STATS = (
    ("contrastive", "Contrastive loss", "both signs of this loss can fall: look at the distances", ".2f"),
    ("kl", "KL of the top level", "mean over nodes and dimensions", ".3g"),
    ("distance_ratio", "Parent / same-level distance", "below 1: nearer to its parent than to its like", ".2f"),
    ("image_dependence", "Image dependence", "variance over images / over nodes; near 0 the picture is ignored", ".2f"),
    ("curvature", "Curvature c", "the space has curvature -c", ".2f"),
    ("parent_retrieval", "Nearest upper node is the parent", "high from the start: parents begin as means", ".0%"),
)


def stat_curves(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """What the rows of a run's metrics say about its tree, as charts.

    A name may stand alone or behind a prefix (``himapper/kl``); training and validation are two lines of one chart.
    """
    plain = [{re.sub(".*[/.]", "", key): value for key, value in row.items()} for row in rows]
    charts = []
    for name, title, note, number in STATS:
        of = {called: points_of(plain, split, name, ["step"]) for called, split in SPLITS.items()}
        charts.append(lines_of(title, of, "step", number, note))
    return [panel for panel in charts if panel.series]


def plot_tree_stats(log: Sequence[Mapping[str, Any]] | Path | str) -> Figure:
    """Contrastive loss, KL, parent over same-level distance, image dependence and curvature, step by step.

    Args:
        log: rows with ``step`` and these names, a run's ``metrics.jsonl``, or the folder of the run.

    Raises:
        ValueError: no row has any of the names.
    """
    from hyptree.lab.figures.drawing import draw_panels

    if isinstance(log, (str, Path)):
        path = Path(log)
        log = RunFolder(path).read_metrics() if path.is_dir() else read_log(path, "step")
    charts = stat_curves(log)
    if not charts:
        raise ValueError(
            f"no row of the log has any of {', '.join(name for name, *_ in STATS)}; is it the log of a Hi-Mapper?"
        )
    figure = draw_panels(charts, PALETTE)
    for ax in figure.axes:
        ax.axhline(0, color=RIM, linewidth=0.8, zorder=0)
    return figure
