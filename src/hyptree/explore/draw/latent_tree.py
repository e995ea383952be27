"""The tree class > attribute > image of a ``LatentHierarchyHead``: on the Poincaré disk, and as a dendrogram."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from hyptree.data.pictures.single import data_url, fit
from hyptree.explore.draw.disk import svg_disk
from hyptree.explore.draw.scenes import disk_points
from hyptree.explore.draw.style import FLOOR, FONT, INK, PALETTE, RIM, SOFT, hint, tag
from hyptree.tree import Tree
from hyptree.tree.drawing import shortened

WIDTH, THUMB, GAP = 1000, 46, 4
CLASS_END, ATTRIBUTE_END = 170, 320
"""Where names of classes and of attributes end, in pixels of the SVG; pictures follow."""
GOOD = "#18794e"
ROOT = "all classes"


@dataclass(frozen=True)
class LatentTree:
    """What ``LatentHierarchyHead.to_tree`` gave, and the pictures in it."""

    tree: Tree
    """Classes have height 2, attributes 1, pictures 0."""
    thumbnails: Sequence[np.ndarray] = ()
    """(H, W, 3) uint8, one per picture, or none at all."""
    labels: Sequence[int | None] = ()
    """Class of each picture as a node of the tree, where it is known, or none at all."""
    caption: str = ""
    """Where the head comes from, one sentence."""

    def __post_init__(self) -> None:
        count = len(self.pictures)
        for name in ("thumbnails", "labels"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(f"the tree has {count} pictures, got {len(getattr(self, name))} {name}")

    # Nodes of each kind.
    classes = property(lambda self: np.flatnonzero(self.tree.height == 2))
    attributes = property(lambda self: np.flatnonzero(self.tree.height == 1))
    pictures = property(lambda self: np.flatnonzero(self.tree.height == 0))

    def is_right(self, picture: int) -> bool | None:
        """Whether picture number ``picture`` hangs under its own class; None where that is not known."""
        if not len(self.labels) or self.labels[picture] is None:
            return None
        return int(self.tree.ancestors(int(self.pictures[picture]))[-1]) == self.labels[picture]


@dataclass(frozen=True)
class Branch:
    """One row of the dendrogram: an attribute (None where pictures hang under the class itself) and its pictures."""

    node: int
    attribute: int | None
    pictures: list[int]  # numbers of pictures, not nodes


def branches(latent: LatentTree) -> list[Branch]:
    """Rows of the dendrogram, class by class; classes with nothing below have none."""
    number = {int(node): i for i, node in enumerate(latent.pictures)}
    branches = []
    for node in latent.classes.tolist():
        children = latent.tree.children(node).tolist()
        own = [number[child] for child in children if child in number]
        if own:
            branches.append(Branch(node, None, own))
        for child in children:
            if child not in number:
                below = [number[leaf] for leaf in latent.tree.children(child).tolist()]
                branches.append(Branch(node, child, below))
    return branches


# ---- on the disk -----------------------------------------------------------------------------------------------------


def disk_of(latent: LatentTree) -> tuple[Tree, np.ndarray, float]:
    """The tree under one root in the middle of its classes, (n, 2) points of the disk, and how much longer they lie.

    Classes with nothing below are left out. The root is put in by the picture: the head knows none.
    """
    import torch

    from hyptree.geometry import Lorentz, lorentz, poincare

    keep = (latent.tree.depth > 0) | (latent.tree.num_children > 0)
    tree = latent.tree.take(keep if keep.any() else ~keep)
    manifold: Any = tree.manifold
    c = float(manifold.c)
    points = poincare.to_lorentz(torch.as_tensor(np.array(tree.embedding), dtype=torch.float64), c)
    middle = lorentz.centroid(points[torch.as_tensor(tree.height == 2)], c=c)
    whole = Tree(
        np.concatenate([[-1], tree.parent + 1]),
        np.concatenate([[3], tree.height]),
        embedding=torch.cat([middle[None], points]).numpy(),
        manifold=Lorentz(c),
        label=[ROOT, *(tree.label or map(str, range(tree.num_nodes)))],
    )
    return whole, *disk_points(whole)


def svg_tree_disk(latent: LatentTree) -> tuple[str, str]:
    """The disk as an ``<svg>``, and what is true in it in words."""
    tree, points, zoom = disk_of(latent)
    named = [node for kind in (2, 1) for node in np.flatnonzero(tree.height == kind).tolist()]
    longer = f", {zoom:.1f} times as long as they are" if zoom > 1.05 else ""
    caption = (
        "The larger, the higher: classes, attributes, pictures; one colour per class. Points are moved by an isometry "
        f"until the mean of the classes is in the middle. Distances from there are true{longer}; the angle is that of "
        "the two main axes of all directions. Point at a node for its name."
    )
    return svg_disk(tree, points, names=named), caption


# ---- as a dendrogram -------------------------------------------------------------------------------------------------


def svg_dendrogram(latent: LatentTree) -> str:
    """Classes on the left, their attributes, their pictures; frames are green where the class is the picture's own."""
    per_line = (WIDTH - ATTRIBUTE_END - 30) // (THUMB + GAP)  # thumbnails side by side
    rows: dict[int, list[tuple[Branch, float, float]]] = {}  # of every class: branch, upper edge, height in pixels
    bottom = 6.0
    for branch in branches(latent):
        bottom += 10 if branch.node not in rows and rows else 0
        height = -(-len(branch.pictures) // per_line) * (THUMB + GAP) if branch.pictures else 24.0
        rows.setdefault(branch.node, []).append((branch, bottom, height))
        bottom += height
    names: Any = latent.tree.label or [str(i) for i in range(latent.tree.num_nodes)]
    parts = [
        f'<svg class="dendrogram" viewBox="0 0 {WIDTH} {(bottom if rows else 20) + 6:.0f}" role="img" aria-label="'
        f'{len(latent.classes)} classes, {len(latent.attributes)} attributes, {len(latent.pictures)} pictures" '
        f'font-size="14" {FONT}>'
    ]
    for (node, own), colour in zip(rows.items(), itertools.cycle(PALETTE), strict=False):
        places = [top + height / 2 for _, top, height in own]
        middle = (places[0] + places[-1]) / 2
        name, look = escape(shortened(names[node], 20)), {"text_anchor": "end", "font_weight": 600, "fill": colour}
        parts.append(tag("text", name, class_="tone", x=CLASS_END - 8, y=middle, dy=".34em", **look))
        for (branch, _, _), y in zip(own, places, strict=True):
            end = ATTRIBUTE_END - 105 if branch.attribute is not None else ATTRIBUTE_END
            way = f"M{CLASS_END} {middle:.1f}H{CLASS_END + 20}V{y:.1f}H{end}"
            parts.append(tag("path", class_="tone", d=way, fill="none", stroke=colour, stroke_width=1.8))
            if branch.attribute is not None:
                name = escape(shortened(names[branch.attribute], 15))
                parts.append(tag("text", name, class_="ink", x=end + 6, y=y, dy=".34em", fill=INK))
    for branch, top, height in itertools.chain(*rows.values()):
        if not branch.pictures:
            x, y = ATTRIBUTE_END + 10, top + height / 2
            parts.append(tag("text", "no picture", class_="soft", x=x, y=y, dy=".34em", fill=SOFT))
        for k, picture in enumerate(branch.pictures):
            line, column = divmod(k, per_line)
            x, y = ATTRIBUTE_END + 10 + column * (THUMB + GAP), top + GAP / 2 + line * (THUMB + GAP)
            place = {"x": x, "y": y, "width": THUMB, "height": THUMB}
            inside = tag("rect", class_="blank", **place, fill=FLOOR)
            if len(latent.thumbnails):
                inside = tag("image", **place, href=data_url(fit(latent.thumbnails[picture], 2 * THUMB), 82))
            stroke = GOOD if latent.is_right(picture) else RIM
            frame = tag("rect", **place, fill="none", stroke=stroke, stroke_width=2.5, rx=3)
            parts.append(tag("g", inside, frame, hint(names[latent.pictures[picture]])))
    return "".join(parts) + "</svg>"


def dendrogram_caption(latent: LatentTree) -> str:
    """What there is to see, with its numbers."""
    empty = [node for node in latent.classes.tolist() if not latent.tree.num_children[node]]
    unused = sum(not branch.pictures for branch in branches(latent))
    is_right = [latent.is_right(i) for i in range(len(latent.pictures))]
    right, known = is_right.count(True), len(is_right) - is_right.count(None)
    parts = [
        f"{len(latent.classes)} classes, {len(latent.attributes)} learned attributes, {len(latent.pictures)} pictures; "
        "an attribute hangs under its nearest class, a picture under its nearest attribute, by hyperbolic distance."
    ]
    if known:
        could = sum(label is not None and label not in empty for label in latent.labels)
        parts.append(
            f"{right} of {known} pictures hang under their own class (green frame); {could} could, the classes of the "
            "others have no attribute."
            if could < known
            else f"{right} of {known} pictures hang under their own class (green frame)."
        )
    if unused:
        parts.append(f"{unused} attributes have no picture.")
    if empty:
        names = [latent.tree.label[node] if latent.tree.label else str(node) for node in empty]
        rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
        parts.append(f"Nothing hangs under {', '.join(names[:8])}{rest}.")
    return " ".join(parts)
