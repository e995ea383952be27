"""Pictures of a tree on the Poincaré disk, made for reading: one colour per branch, every name where it can be read.

Where names go is decided in :func:`_svg_names`, and again by ``move.js`` in the browser, where the disk can be moved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.explore.draw.style import FONT, HALO, INK, INSIDE, NEUTRAL, PALETTE, RIM, hint, overlap, read_beside, tag
from hyptree.tree import Tree
from hyptree.tree.drawing import children_above, drawn_points

SIZE, RADIUS = 1000, 395  # of the SVG: the square, and the disk inside it; names of leaves need the rest
DISK_SCRIPT = read_beside(__file__, "disk.js")
SMALLEST = 5.0  # a name that would be smaller than this, in pixels of the SVG, is left out


def branch_colors(tree: Tree) -> list[str]:
    """A colour for each node: that of its branch, the child of a root it descends from; roots are grey."""
    top = np.arange(tree.num_nodes)
    while (deep := tree.depth[top] > 1).any():
        top = np.where(deep, tree.parent[top], top)
    branches = {int(node): PALETTE[k % len(PALETTE)] for k, node in enumerate(np.flatnonzero(tree.depth == 1))}
    return [branches.get(int(node), NEUTRAL) for node in top]


def _dot(tree: Tree, node: int) -> float:
    """Radius of a node's dot, in pixels of the SVG."""
    inner = 3.2 if tree.is_leaf[node] else max(4.5, 7.5 - 1.3 * (tree.depth[node] - 1))
    return inner if tree.depth[node] else 8.0


def _svg_names(tree: Tree, points: np.ndarray, flat: bool, order: Sequence[int] | None) -> str:
    """Names of inner nodes above their dots, names of leaves outward along the radius, smaller towards the rim.

    Where the children of a node go upwards its name goes below it: above, it would lie across theirs. In an order, a
    name that finds no room beside those before it goes to the other side of its dot, or is left out.
    """
    below = children_above(tree, points)
    rows = []
    taken: list[tuple[float, float, float, float]] = []
    for node in range(len(tree.label or ())) if order is None else order:
        text = (tree.label or [])[node]
        x, y = points[node]
        distance = math.hypot(x, y)
        shrink = 1.0 if flat else min(1.0, (1 - distance * distance) / 0.05)
        size = (14.0 if tree.is_leaf[node] else (19.0, 17.0, 14.5)[min(tree.depth[node], 2)]) * shrink
        gap, turn, anchor = (_dot(tree, node) + 5) / RADIUS, 0.0, "middle"
        if order is not None:
            wide, high = 0.29 * size * len(text) / RADIUS, size / RADIUS
            boxes = {side: (x - wide, at, x + wide, at + high) for side, at in ((0, y + gap), (1, y - gap - high))}
            sides = [side for side in (0, 1) if not any(overlap(boxes[side], box) for box in taken)]
            if not sides:
                continue
            below[node] = sides[0]
            taken.append(boxes[sides[0]])
        if order is None and tree.is_leaf[node] and distance > 0.2:
            turn, anchor = math.degrees(math.atan2(y, x)), "start"
            x, y, down = x * (1 + gap / distance), y * (1 + gap / distance), "0.34em"
            if x < 0:
                turn, anchor = turn + 180, "end"
        else:
            y, down = (y - gap, "0.73em") if below[node] else (y + gap, "0")
        rows.append(
            tag(
                *("text", escape(text)),
                data_node=node,
                transform=f"translate({_px(x)} {_py(y)}) rotate({-turn:.1f})",
                text_anchor=anchor,
                dy=down,
                font_size=size,
                font_weight=600 if tree.depth[node] <= 1 else None,
                display="none" if size < SMALLEST else None,
            )
        )
    return f'<g class="names" fill="{INK}" {HALO} pointer-events="none">{"".join(rows)}</g>'


def _arc(p: np.ndarray, q: np.ndarray, flat: bool) -> str:
    """The SVG path of the geodesic from p to q: part of the circle through both that meets the rim at right angles."""
    (x1, y1), (x2, y2) = p, q
    start, end = f"M{_px(x1)} {_py(y1)}", f"{_px(x2)} {_py(y2)}"
    det = x1 * y2 - x2 * y1
    if flat or abs(det) < 1e-6:  # on a diameter, or as good as
        return f"{start}L{end}"
    a, b = (1 + x1 * x1 + y1 * y1) / 2, (1 + x2 * x2 + y2 * y2) / 2
    cx, cy = (a * y2 - b * y1) / det, (b * x1 - a * x2) / det
    r = math.sqrt(max(cx * cx + cy * cy - 1, 0.0)) * RADIUS
    # In the upside-down coordinates of SVG an arc around a centre on the left of the way turns counter-clockwise.
    sweep = int((x2 - x1) * (cy - y1) - (y2 - y1) * (cx - x1) < 0)
    return f"{start}A{r:.2f} {r:.2f} 0 0 {sweep} {end}"


def _px(x: float) -> str:
    return f"{SIZE / 2 + RADIUS * x:.2f}"


def _py(y: float) -> str:
    return f"{SIZE / 2 - RADIUS * y:.2f}"


def svg_disk(
    tree: Tree,
    points: Any,
    *,
    colors: list[str] | None = None,
    flat: bool = False,
    names: bool | Sequence[int] = True,
    move: bool = False,
) -> str:
    """The picture as one ``<svg>`` element; pointing at a node names it and the way to it from its root.

    Args:
        points: (n, 2) points of the unit disk (curvature -1).
        colors: one per node, as CSS writes them; by branch if None.
        flat: the points are of the ordinary plane instead: edges are straight and there is no rim.
        names: write the labels, or those of some nodes, the most important first, as far as they find room; without any
            the disk fills the picture.
        move: a click on a node brings it to the centre, by an isometry. Needs :func:`move_script` once in the page.
    """
    points = drawn_points(tree, points, flat)
    colors = branch_colors(tree) if colors is None else colors
    share = np.log1p(tree.num_leaves_below) / np.log1p(max(tree.num_leaves, 2))
    spare = 0 if names is True else SIZE // 2 - RADIUS - 10  # room for names
    side = SIZE - 2 * spare
    moving = {
        "parent": tree.parent.tolist(),
        "leaf": tree.is_leaf.astype(int).tolist(),
        "depth": tree.depth.tolist(),
        "points": np.round(points, 8).tolist(),
        "size": SIZE,
        "radius": RADIUS,
        "smallest": SMALLEST,
    }
    parts = [
        f'<svg class="disk" xmlns="http://www.w3.org/2000/svg" viewBox="{spare} {spare} {side} {side}" role="img" '
        f'aria-label="a tree of {tree.num_nodes} nodes on the {"plane" if flat else "Poincaré disk"}" '
        f"{FONT}" + (f" data-tree='{json.dumps(moving, separators=(',', ':'))}'>" if move else ">")
    ]
    if not flat:
        middle = SIZE / 2
        look = {"fill": INSIDE, "stroke": RIM, "stroke_width": 1.5}
        parts.append(tag("circle", class_="rim", cx=middle, cy=middle, r=RADIUS, **look))
    parts.append('<g fill="none" stroke-linecap="round">')
    for node in np.flatnonzero(tree.parent >= 0).tolist():
        way, width = _arc(points[tree.parent[node]], points[node], flat), float(1.4 + 4.2 * share[node])
        parts.append(tag("path", class_="edge", data_node=node, d=way, stroke=colors[node], stroke_width=width))
    parts.append("</g><g>")
    for node in range(tree.num_nodes):
        above = [*tree.ancestors(node)[::-1].tolist(), node]
        says = hint(" › ".join(tree.label[step] if tree.label else str(step) for step in above))
        place = {"cx": _px(points[node, 0]), "cy": _py(points[node, 1]), "r": _dot(tree, node)}
        look = {"fill": colors[node], "stroke": "white", "stroke_width": 1.2}
        parts.append(tag("circle", says, class_="node", data_node=node, **place, **look))
    parts.append("</g>")
    if names is not False:
        parts.append(_svg_names(tree, points, flat, None if names is True else names))
    parts.append("</svg>")
    return "".join(parts)


def move_script() -> str:
    """The JavaScript that lets readers move the disks of a page."""
    return DISK_SCRIPT + read_beside(__file__, "move.js")


def draw_disk(tree: Tree, points: Any, path: Path | str, *, dpi: int = 140) -> None:
    """Writes the picture as a file (.png, .pdf): ``tree.draw`` with every name and the colours of :func:`svg_disk`."""
    rgb = np.array([list(bytes.fromhex(color[1:])) for color in branch_colors(tree)]) / 255
    tree.draw(path, layout=points, color=rgb, names=True, dpi=dpi)
