"""Where a tree goes: Sarkar's embedding in the Poincaré disk, a picture on the disk, a text on the terminal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from ramify.errors import require
from ramify.tree.arrays import as_array

if TYPE_CHECKING:
    from ramify.tree.core import Tree

# Rounding a disk coordinate at hyperbolic radius r moves the point by about exp(r) * 1e-16 / 2: 5e-4 at 30, 0.1 at 35.
AUTO_RADIUS, MAX_RADIUS = 30.0, 35.0


# ---------------------------------------------------------------------- Sarkar
def largest_tau(tree: Tree, radius: float = AUTO_RADIUS) -> float:
    """The longest edge for which ``sarkar`` keeps every node within this hyperbolic radius of the origin."""
    reach = int(tree.depth.max()) + (len(tree.roots) > 1)
    return radius / max(reach, 1)


def sarkar(tree: Tree, tau: float | None = None) -> np.ndarray:
    """Points in the Poincaré disk (curvature -1) with every edge exactly ``tau`` long, (n, 2) float64.

    Sarkar's construction: the root at the origin, and around each node its neighbours in equal angles. As tau grows,
    distances over tau approach tree distances. The roots of a forest sit around the origin, tau away from it.

    Each node is placed in polar coordinates by solving the triangle origin, parent, child, so nothing is lost near the
    boundary until the final (x, y), where float64 ends at radius 35 or so: ``depth * tau`` must stay below that.

    Args:
        tau: edge length. By default ``largest_tau()``, which puts the deepest node at radius 30, where rounding still
            moves points by less than 1e-3. A tau that does not fit in float64 is an error, never a silent clamp.
    """
    best = largest_tau(tree)
    if tau is None:
        tau = best
    limit = largest_tau(tree, MAX_RADIUS)
    if not 0 < tau <= limit:
        raise ValueError(
            f"tau must be positive and at most {limit:.6g} for a tree of depth {tree.depth.max()} in float64, "
            f"got {tau:g}; tau=None takes {best:.6g}"
        )
    n = tree.num_nodes
    radius, angle, back = [0.0] * n, [0.0] * n, [0.0] * n  # back: from the way to the origin to the way to the parent
    sinh_t, cosh_t = math.sinh(tau), math.cosh(tau)
    num_children = tree.num_children.tolist()
    by_parent, start = (part.tolist() for part in tree._by_parent)
    if len(tree.roots) > 1:
        for k, root in enumerate(tree.roots.tolist()):
            radius[root], angle[root] = tau, 2 * math.pi * k / len(tree.roots)
    # One node at a time with plain floats: linear whatever the shape, where levels of numpy would crawl on a path.
    for node in tree.order("preorder").tolist():
        count, r, phi = num_children[node], radius[node], angle[node]
        if not count:
            continue
        family = by_parent[start[node] : start[node] + count]
        if r == 0.0:
            for k, child in enumerate(family):
                radius[child], angle[child] = tau, phi + 2 * math.pi * k / count
            continue
        sinh_r, cosh_r = math.sinh(r), math.cosh(r)
        # A root of a forest has nobody above it, but leaves the way to the origin free as if it had.
        for k, child in enumerate(family, 1):
            turn = back[node] + 2 * math.pi * k / (count + 1)
            sin_turn, cos_turn = math.sin(turn), math.cos(turn)
            half = math.sinh((r - tau) / 2) ** 2 + sinh_r * sinh_t * math.sin(turn / 2) ** 2
            radius[child] = 2 * math.asinh(math.sqrt(half))
            angle[child] = phi + math.atan2(sinh_t * sin_turn, sinh_r * cosh_t - cosh_r * sinh_t * cos_turn)
            # Seen from the child the triangle has the other handedness, hence the sign.
            back[child] = -math.atan2(sinh_r * sin_turn, cosh_r * sinh_t - sinh_r * cosh_t * cos_turn)
    size = np.tanh(np.array(radius) / 2)
    direction = np.array(angle)
    return np.stack([size * np.cos(direction), size * np.sin(direction)], 1)


# ---------------------------------------------------------------------- pictures
def radial(tree: Tree, rim: float = 0.95) -> np.ndarray:
    """Points in the disk for a picture: equal angles for the leaves, hyperbolic radius by depth, (n, 2).

    Args:
        rim: Euclidean radius of the deepest nodes.
    """
    turn = 2 * np.pi / tree.num_leaves
    leaf_place = np.cumsum(tree.is_leaf[tree.order("preorder")])  # leaves up to each place of the preorder
    first = leaf_place[tree._position] - tree.is_leaf
    middle = first + (tree.num_leaves_below - 1) / 2
    level = tree.depth + (len(tree.roots) > 1)
    radius = np.tanh(np.arctanh(rim) * level / max(level.max(), 1))
    return np.stack([radius * np.cos(turn * middle), radius * np.sin(turn * middle)], 1)


def geodesic(p: np.ndarray, q: np.ndarray, num_points: int) -> np.ndarray:
    """Points along the disk's geodesics from p to q, (E, 2), (E, 2) -> (E, num_points, 2)."""
    a, b = (v[:, 0] + 1j * v[:, 1] for v in (p, q))
    step = (b - a) / (1 - a.conj() * b)  # q seen from p
    size = np.minimum(np.abs(step), 1 - 1e-15)
    part = np.tanh(np.linspace(0, 1, num_points) * np.arctanh(size)[:, None])  # (E, num_points)
    z = np.where(size > 0, step / np.where(size > 0, size, 1), 0)[:, None] * part
    z = (z + a[:, None]) / (1 + a.conj()[:, None] * z)
    return np.stack([z.real, z.imag], -1)


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
) -> Any:
    """Draws the tree on the Poincaré disk, edges as geodesics, and gives the matplotlib axes.

    Args:
        path: file to write (.png, .svg, .pdf).
        ax: axes to draw into; by default a new square figure.
        layout: "radial" (leaves in equal angles), "sarkar", "embedding" (the tree's own, 2-d and in the disk), or
            (n, 2) points.
        color: "branch" (one hue for each branch near the root), "depth", or (n,) values or classes of nodes.
        names: how many labels to write, the nodes with most leaves first; False for none, True for all.
        title: above the disk.
        size: of the new figure, in inches.
    """
    require("matplotlib", "plot")
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    points = _layout_points(tree, layout)
    own_figure = None
    if ax is None:
        if path is None:  # for a notebook or a window, which pyplot looks after
            own_figure = require("matplotlib.pyplot", "plot").figure(figsize=(size, size))
        else:
            own_figure = Figure(figsize=(size, size))
        own_figure.set_facecolor("white")
        ax = own_figure.add_axes((0.02, 0.02, 0.96, 0.92 if title else 0.96))
    ax.set_aspect("equal")
    ax.set_axis_off()
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
        arcs = geodesic(points[tree.parent[child]], points[child], 24 if len(child) < 20_000 else 8)
        width = crowd * (0.5 + 2.2 * share[child])
        ax.add_collection(
            LineCollection(list(arcs), colors=rgb[child], linewidths=width, alpha=0.85, capstyle="round", zorder=2)
        )
    order = np.argsort(share, kind="stable")
    dots = crowd**1.5 * (3 + 42 * share**2)
    ax.scatter(*points[order].T, s=dots[order], c=rgb[order], edgecolors="white", linewidths=0.5 * crowd, zorder=3)
    room = _write_names(tree, ax, points, names, dots)
    ax.set_xlim(-room, room)
    ax.set_ylim(-room, room)
    if title:
        ax.set_title(title, fontsize=13, color="#2b2f3a", pad=8)
    if path is not None:
        ax.figure.savefig(path, dpi=160)
    return ax


def _layout_points(tree: Tree, layout: str | np.ndarray) -> np.ndarray:
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
    points = as_array(layout).astype(np.float64)
    if points.shape != (tree.num_nodes, 2):
        raise ValueError(f"the points to draw have shape {points.shape}, expected ({tree.num_nodes}, 2)")
    outside = np.flatnonzero(~(np.linalg.norm(points, axis=1) < 1))
    if len(outside):
        raise ValueError(f"node {outside[0]} is drawn at {points[outside[0]].tolist()}, outside the unit disk")
    return points


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
        first = np.cumsum(tree.is_leaf[tree.order("preorder")])[tree._position] - tree.is_leaf
        hue = (first + tree.num_leaves_below / 2) / tree.num_leaves
        pure = 1 - tree.num_leaves_below / tree.num_leaves if tree.num_leaves > 1 else np.ones(tree.num_nodes)
        hsv = np.stack([(0.58 + 0.92 * hue) % 1, 0.15 + 0.57 * pure**0.5, 0.45 + 0.33 * pure], 1)
        return hsv_to_rgb(hsv)
    values = as_array(color)
    if values.shape != (tree.num_nodes,):
        raise ValueError(f"color has shape {values.shape}, expected ({tree.num_nodes},), one value per node")
    if not np.issubdtype(values.dtype, np.floating):
        _, values = np.unique(values, return_inverse=True)
        return colormaps["tab20"](values % 20)
    span = float(np.ptp(values)) or 1.0
    return colormaps["viridis"]((values - values.min()) / span)


def _write_names(tree: Tree, ax: Any, points: np.ndarray, names: bool | int, dots: np.ndarray) -> float:
    """Writes labels, inner nodes above their dot and leaves outward along the radius; gives the room they need."""
    room = 1.06
    if tree.label is None or names is False or names == 0:
        return room
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
    taken: list[tuple[float, float, float]] = []
    for node in order:
        x, y = points[node]
        text = tree.label[node]
        gap = 3 + math.sqrt(dots[node]) / 2
        distance = math.hypot(x, y)
        if tree.is_leaf[node] and distance > 0.25:
            turn = math.degrees(math.atan2(y, x))
            left = x < 0  # turned over there, so that nobody reads upside down
            ax.annotate(
                text,
                (x, y),
                xytext=(gap * x / distance, gap * y / distance),
                rotation=turn + 180 if left else turn,
                rotation_mode="anchor",
                ha="right" if left else "left",
                va="center",
                fontsize=6.5,
                zorder=4,
                **style,
            )
            room = max(room, distance + 0.04 + 0.0145 * len(text))
            continue
        wide = 0.011 * len(text)  # half the width of the text, roughly, in the disk's units
        # The biggest come first; a later one that would cover them is left out.
        if names is not True and any(abs(x - a) < wide + w and abs(y - b) < 0.035 for a, b, w in taken):
            continue
        taken.append((x, y, wide))
        ax.annotate(text, (x, y), xytext=(0, gap - 1), ha="center", va="bottom", fontsize=8, zorder=5, **style)
    return room


# ---------------------------------------------------------------------- text
def text(tree: Tree, *, max_lines: int = 40, max_children: int = 10, max_depth: int | None = None) -> str:
    """The tree as indented lines, cut short where it is large; what is left out is counted.

    Args:
        max_lines: of the whole text.
        max_children: shown per node.
        max_depth: levels shown below the roots.
    """
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


def show(
    tree: Tree,
    *,
    max_lines: int = 40,
    max_children: int = 10,
    max_depth: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Prints ``text()``; the numbers in brackets are leaves below a node."""
    print(text(tree, max_lines=max_lines, max_children=max_children, max_depth=max_depth), file=file)
