"""Trees for the eye: a picture on the Poincaré disk, lines of text on the terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from hyptree.errors import require
from hyptree.tree.arrays import as_array
from hyptree.tree.layout import first_leaf, geodesic, largest_tau, radial, sarkar

if TYPE_CHECKING:
    from hyptree.tree.core import Tree

INNER_FONT, LEAF_FONT = 8.0, 6.5
LONGEST_NAME = 0.55
"""A name may take this share of half the picture's width, whatever is longer is cut."""


def draw(
    tree: Tree,
    path: str | Path | None = None,
    *,
    ax: Any = None,
    layout: str | np.ndarray = "radial",
    color: str | np.ndarray = "branch",
    names: bool | int = 24,
    title: str | None = None,
    size: float = 8.0,
    dpi: int = 160,
    flat: bool = False,
) -> Any:
    """Draws the tree on the Poincaré disk, edges as geodesics, and gives the matplotlib axes.

    Args:
        path: file to write (.png, .svg, .pdf).
        ax: axes to draw into; by default a new square figure.
        layout: "radial" (leaves in equal angles), "sarkar", "embedding" (the tree's own, 2-d and in the disk), or
            (n, 2) points.
        color: "branch" (one hue for each branch near the root), "depth", (n,) values or classes of nodes, or (n, 3)
            colours from 0 to 1.
        names: how many labels to write, the nodes with most leaves first; False for none, True for all.
        title: above the disk.
        size: of the new figure, in inches. dpi: of the file, pixels per inch.
        flat: the points to draw are of the ordinary plane: edges are straight and there is no rim.
    """
    require("matplotlib", "plot")
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    points = _layout_points(tree, layout, flat)
    if ax is None:
        if path is None:  # for a notebook or a window, which pyplot looks after
            own_figure = require("matplotlib.pyplot", "plot").figure(figsize=(size, size))
        else:
            own_figure = Figure(figsize=(size, size))
        own_figure.set_facecolor("white")
        ax = own_figure.add_axes((0.02, 0.02, 0.96, 0.92 if title else 0.96))
    ax.set_aspect("equal")
    ax.set_axis_off()
    if not flat:
        ax.add_patch(Circle((0, 0), 1, facecolor="#f7f8fb", edgecolor="#c3c8d4", linewidth=1.2, zorder=0))
    if isinstance(layout, str) and layout == "radial":  # circles of equal depth
        for r in sorted(set(np.round(np.linalg.norm(points, axis=1), 9)))[1:13]:
            ax.add_patch(Circle((0, 0), r, facecolor="none", edgecolor="#e4e7ee", linewidth=0.7, zorder=0.5))

    rgb = _colors(tree, color)
    child = np.flatnonzero(tree.parent >= 0)
    share = np.log1p(tree.num_leaves_below) / np.log1p(max(tree.num_leaves, 2))
    # Thin where many edges share the disk, thick towards the root.
    crowd = np.clip(40 / math.sqrt(tree.num_nodes), 0.25, 1.6)
    if len(child):
        child = child[np.argsort(share[child], kind="stable")]
        ends = points[tree.parent[child]], points[child]
        arcs = np.stack(ends, 1) if flat else geodesic(*ends, 24 if len(child) < 20_000 else 8)
        width = crowd * (0.5 + 2.2 * share[child])
        ax.add_collection(
            LineCollection(list(arcs), colors=rgb[child], linewidths=width, alpha=0.85, capstyle="round", zorder=2)
        )
    order = np.argsort(share, kind="stable")
    dots = crowd**1.5 * (3 + 42 * share**2)
    ax.scatter(*points[order].T, s=dots[order], c=rgb[order], edgecolors="white", linewidths=0.5 * crowd, zorder=3)
    half_width = _write_names(tree, ax, points, names, dots)
    ax.set_xlim(-half_width, half_width)
    ax.set_ylim(-half_width, half_width)
    if title:
        ax.set_title(title, fontsize=13, color="#2b2f3a", pad=8)
    if path is not None:
        ax.figure.savefig(path, dpi=dpi, metadata={"Software": None} if str(path).endswith(".png") else None)
    return ax


def _layout_points(tree: Tree, layout: str | np.ndarray, flat: bool) -> np.ndarray:
    if isinstance(layout, str):
        if layout == "radial":
            return radial(tree)
        if layout == "sarkar":
            return sarkar(tree, min(largest_tau(tree, 6.5), 1.6))  # farther out everything sits on the rim
        if layout != "embedding":
            raise ValueError(f'layout must be "radial", "sarkar", "embedding" or points, got {layout!r}')
        if tree.embedding is None:
            raise ValueError('layout="embedding" needs a tree that has an embedding; layout="radial" does not')
        layout = tree.embedding
    return drawn_points(tree, layout, flat)


def drawn_points(tree: Tree, points: Any, flat: bool) -> np.ndarray:
    """(n, 2) float64 points inside the unit disk; those of the flat plane are scaled into it."""
    checked = as_array(points).astype(np.float64)
    if checked.shape != (tree.num_nodes, 2):
        raise ValueError(f"points have shape {checked.shape}, expected ({tree.num_nodes}, 2), one row per node")
    length = np.linalg.norm(checked, axis=1)
    wrong = np.flatnonzero(~(length < (np.inf if flat else 1)))
    if len(wrong):
        where = checked[wrong[0]].tolist()
        problem = "outside the unit disk; map points into it first" if np.isfinite(where).all() else "not finite"
        raise ValueError(f"node {wrong[0]} lies at {where}, {problem}")
    return checked * (0.94 / max(length.max(), 1e-300)) if flat else checked


def _colors(tree: Tree, color: str | np.ndarray) -> np.ndarray:
    """A colour for each node, (n, 3) or (n, 4)."""
    from matplotlib import colormaps
    from matplotlib.colors import hsv_to_rgb

    if isinstance(color, str):
        if color == "depth":
            return colormaps["viridis"](0.05 + 0.85 * tree.depth / max(tree.depth.max(), 1))
        if color != "branch":
            raise ValueError(f'color must be "branch", "depth" or (n,) values, got {color!r}')
        # Hue follows the place of a node's leaves around the disk, so neighbours match; grey towards the root.
        hue = (first_leaf(tree) + tree.num_leaves_below / 2) / tree.num_leaves
        pure = 1 - tree.num_leaves_below / tree.num_leaves if tree.num_leaves > 1 else np.ones(tree.num_nodes)
        hsv = np.stack([(0.58 + 0.92 * hue) % 1, 0.15 + 0.57 * pure**0.5, 0.45 + 0.33 * pure], 1)
        return hsv_to_rgb(hsv)
    values = as_array(color)
    if values.shape == (tree.num_nodes, 3):
        return values
    if values.shape != (tree.num_nodes,):
        raise ValueError(f"color has shape {values.shape}, expected ({tree.num_nodes},), one value per node")
    if not np.issubdtype(values.dtype, np.floating):
        _, values = np.unique(values, return_inverse=True)
        return colormaps["tab20"](values % 20)
    span = float(np.ptp(values)) or 1.0
    return colormaps["viridis"]((values - values.min()) / span)


def _write_names(tree: Tree, ax: Any, points: np.ndarray, names: bool | int, dots: np.ndarray) -> float:
    """Writes labels, inner nodes by their dot, leaves outward along the radius; gives the half width needed."""
    half_width = 1.06
    if tree.label is None or names is False or names == 0:
        return half_width
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.patheffects import withStroke

    order = np.flatnonzero([bool(name) for name in tree.label])
    order = order[np.argsort(-tree.num_leaves_below[order], kind="stable")]
    if names is not True:
        order = order[:names]
    style = {
        "textcoords": "offset points",
        "color": "#1c2030",
        "path_effects": [withStroke(linewidth=2.2, foreground="white", alpha=0.9)],
        "annotation_clip": False,
    }
    box = ax.get_window_extent()
    half = min(box.width, box.height) / 2  # pixels from the centre to the edge
    pixels = ax.figure.dpi / 72
    width, height = (math.ceil(side) for side in ax.figure.bbox.size)
    renderer = RendererAgg(width, height, ax.figure.dpi)  # of any backend's axes, which have none before they are drawn
    below = children_above(tree, points)
    leaves: list[tuple[Any, float]] = []  # texts, and the pixels between them and their dots
    inner: list[tuple[Any, float]] = []
    for node in order:
        x, y = points[node]
        gap = 3 + math.sqrt(dots[node]) / 2
        distance = math.hypot(x, y)
        is_outward = bool(tree.is_leaf[node]) and distance > 0.25
        font = LEAF_FONT if is_outward else INNER_FONT
        text = shortened(tree.label[node], LONGEST_NAME * half * (1 if is_outward else 2) / (0.55 * font * pixels))
        if is_outward:
            left = x < 0  # turned over there, so that nobody reads upside down
            place = {
                "xytext": (gap * x / distance, gap * y / distance),
                "rotation": math.degrees(math.atan2(y, x)) + (180 if left else 0),
                "rotation_mode": "anchor",
                "ha": "right" if left else "left",
                "va": "center",
            }
        elif below[node]:
            place = {"xytext": (0, 1 - gap), "ha": "center", "va": "top"}
        else:
            place = {"xytext": (0, gap - 1), "ha": "center", "va": "bottom"}
        written = ax.annotate(text, (x, y), fontsize=font, zorder=4 if is_outward else 5, **place, **style)
        (leaves if is_outward else inner).append((written, gap * pixels))
    # A name keeps its size in pixels while its place scales with the disk: each side that sticks out asks for more.
    for written, _ in leaves + inner:
        extent = written.get_window_extent(renderer)
        at = ax.transData.transform(written.xy)
        for place, low, high in zip(written.xy, extent.min - at, extent.max - at, strict=True):
            outward = high if place > 0 else -low
            half_width = max(half_width, abs(place) * half / (half - min(outward, 0.9 * half)))
    if names is not True:
        _drop_covered(inner, leaves, half_width / half, renderer)
    return half_width


def children_above(tree: Tree, points: np.ndarray) -> np.ndarray:
    """Which nodes have children that lie above them, (n,): there a name above would lie across theirs."""
    child = np.flatnonzero(tree.parent >= 0)
    way = np.zeros((tree.num_nodes, 2))
    np.add.at(way, tree.parent[child], points[child] - points[tree.parent[child]])
    return (way[:, 1] > 0.5 * np.abs(way[:, 0])) & (tree.depth > 0)


def shortened(text: str, longest: float) -> str:
    """``text``, or its beginning and three dots in one if it has more letters than ``longest``."""
    longest = max(int(longest), 4)
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _drop_covered(inner: list[tuple[Any, float]], leaves: list[tuple[Any, float]], unit: float, renderer: Any) -> None:
    """Removes names of inner nodes that would cover a name written before; the biggest come first.

    Args:
        inner, leaves: texts, and the pixels between them and their dots. unit: length of a pixel in the disk.
    """
    lines = []  # the names of leaves as points along their middle, in pixels from the centre of the disk
    for written, gap in leaves:
        start = np.array(written.xy) / unit
        way = start / np.linalg.norm(start)
        turn = written.get_rotation()
        written.set_rotation(0)
        extent = written.get_window_extent(renderer)
        written.set_rotation(turn)
        lines.append((start + way * np.arange(gap, gap + extent.width, extent.height / 2)[:, None], extent.height / 2))
    taken: list[np.ndarray] = []
    for written, _ in inner:
        extent = written.get_window_extent(renderer)
        shift = np.array(written.xy) / unit - written.axes.transData.transform(written.xy)
        low, high = extent.min + shift, extent.max + shift
        covers = any((low < t[1]).all() and (high > t[0]).all() for t in taken) or any(
            ((line > low - h) & (line < high + h)).all(1).any() for line, h in lines
        )
        if covers:
            written.remove()
        else:
            taken.append(np.array([low, high]))


# ---------------------------------------------------------------------- text
def text(tree: Tree, *, max_lines: int = 40, max_children: int = 10, max_depth: int | None = None) -> str:
    """The tree as indented lines, cut short where it is large; what is left out is counted."""
    lines: list[str] = []
    below, is_leaf, depth = tree.num_leaves_below, tree.is_leaf, tree.depth
    shown_roots = tree.roots[:max_children].tolist()
    # (node, what to write before it, what its children's lines begin with); None marks a remark instead of a node
    stack: list[tuple[int | None, str, str]] = []
    if len(tree.roots) > len(shown_roots):
        stack.append((None, f"… {len(tree.roots) - len(shown_roots)} more trees", ""))
    stack += [(root, "", "") for root in reversed(shown_roots)]
    nodes_shown = 0
    while stack:
        if len(lines) >= max_lines:
            lines.append(f"… {tree.num_nodes - nodes_shown} more nodes")
            break
        node, lead, indent = stack.pop()
        if node is None:
            lines.append(lead)
            continue
        nodes_shown += 1
        name = tree.label[node] if tree.label is not None and tree.label[node] else str(node)
        lines.append(lead + name + ("" if is_leaf[node] else f" ({below[node]})"))
        family = tree.children(node).tolist()
        if max_depth is not None and depth[node] >= max_depth:
            family = []
        shown, hidden = family[:max_children], family[max_children:]
        if len(hidden) == 1:  # a remark would take the line the child could have
            shown, hidden = family, []
        if hidden:
            rest = int(below[hidden].sum())
            stack.append((None, f"{indent}└─ … {len(hidden)} more children, {rest} leaves", ""))
        for k, child in reversed(list(enumerate(shown))):
            last = k == len(shown) - 1 and not hidden
            stack.append((child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")))
    return "\n".join(lines)


def show(tree: Tree, *, file: TextIO | None = None, **options: Any) -> None:
    """Prints ``text(**options)``; the numbers in brackets are leaves below a node."""
    print(text(tree, **options), file=file)
