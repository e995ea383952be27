"""Pictures for the explorer of a page: what the model answered and how it clustered, packed small for the browser."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from hyptree.data.pictures.single import data_url
from hyptree.evaluate.pictures.superpixels import enlarge
from hyptree.explore.draw.style import img
from hyptree.explore.explanation import block_tree, choose_block, choose_head, stages_tree
from hyptree.models.clusters import BlockClusters
from hyptree.tree import Tree
from hyptree.tree.layout import main_axes, on_disk


@dataclass(frozen=True)
class Answer:
    """What the model said about a picture."""

    paths: list[tuple[str, ...]]
    """Best answers first, each from general to specific."""
    scores: list[float]
    """Their probabilities."""
    truth: tuple[str, ...] | None = None
    """The right one, where it is known."""

    @property
    def is_right(self) -> bool | None:
        return None if self.truth is None else self.paths[0][-1] == self.truth[-1]


@dataclass(frozen=True)
class Scene:
    """One picture of the explorer."""

    picture: np.ndarray
    """(H, W, 3) uint8, as the model saw it."""
    name: str
    """Said where the picture cannot be seen."""
    clusters: list[BlockClusters]
    answer: Answer | None = None
    regions: np.ndarray | None = None
    """(H, W) integers: which of ``region_names`` each pixel shows; -1 where unknown."""
    shown: np.ndarray | None = field(default=None)
    """The same scene in more pixels, to be looked at."""


def class_path(tree: Tree | None, index: int, names: Sequence[str]) -> tuple[str, ...]:
    """Names from general to specific of a class; the root, which says nothing, is left out."""
    if tree is None or tree.label is None:
        return (names[index],)
    above = [tree.label[node] for node in tree.ancestors(index)[::-1] if tree.parent[node] >= 0]
    return (*above, names[index])


FARTHEST = 2.6
"""Hyperbolic distance from the middle that the farthest node is drawn at, where the points lie closer together."""


def disk_points(tree: Tree) -> tuple[np.ndarray, float]:
    """(n, 2) points of the Poincaré disk for a tree's embedding, and how many times longer distances are drawn.

    Points of two dimensions on the disk stay where they are. Lorentz points of more dimensions are moved by an isometry
    until the mean of the second level lies in the centre, and then flattened: the direction is that of the first two
    principal axes of their tangent vectors there, the distance from the centre is kept. Where all of them are so close
    together that nothing could be seen, distances are drawn longer, all by the same factor.
    """
    assert tree.embedding is not None
    if isinstance(tree.manifold, str):
        return np.asarray(tree.embedding, np.float64), 1.0
    import torch

    from hyptree.geometry import Lorentz, lorentz

    if not isinstance(tree.manifold, Lorentz):
        raise ValueError(f"points of {tree.manifold} cannot be put on the disk; expected those of a Lorentz space")
    c = float(tree.manifold.c)
    points = torch.as_tensor(np.array(tree.embedding), dtype=torch.float64) * c**0.5  # now of curvature -1
    inner = torch.as_tensor(tree.depth == 1)
    middle = lorentz.centroid(points[inner])
    v = lorentz.logmap0(lorentz.boost(-middle, points)).numpy()
    flat = v @ main_axes(v[tree.depth > 0]).T
    flat[tree.depth == 0] = 0
    v[tree.depth == 0] = 0
    length = np.linalg.norm(v, axis=1, keepdims=True)
    zoom = max(1.0, FARTHEST / max(float(length.max()), 1e-6))
    return on_disk(flat, zoom * length), zoom


# ---- packing ---------------------------------------------------------------------------------------------------------


def explorer_html(scenes: Sequence[Scene], region_names: Sequence[str] = ()) -> str:
    """The explorer: controls, picture, disk and tree, with its data inside. Needs ``explorer.js`` once in the page."""
    if not scenes:
        raise ValueError("no pictures to explore, expected at least one")
    layers = _layers(scenes[0].clusters)
    images = []
    for scene in scenes:
        shown = scene.picture if scene.shown is None else scene.shown
        images.append(
            {
                "src": data_url(shown),
                "alt": f"{scene.name}, {scene.picture.shape[1]} by {scene.picture.shape[0]} pixels",
                "answer": answer_html(scene.answer),
                "layers": [
                    [_pack(stages_tree(scene.clusters), scene)],  # over all stages, then those of every block and head
                    *([_pack(block_tree(one, k), scene) for k in range(one.num_heads)] for one in scene.clusters),
                ],
            }
        )
    block = choose_block(scenes[0].clusters, None, None)
    start = 1 + scenes[0].clusters.index(block)
    data = {
        "images": images,
        "layers": layers,
        "regions": list(region_names),
        "start": [start, choose_head(block, None)],
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    marks = {None: "", True: "right", False: "wrong"}
    thumbnails = "".join(
        f'<button type="button" data-image="{k}" aria-pressed="{"true" if k == 0 else "false"}" '
        f'class="{marks[scene.answer.is_right if scene.answer else None]}" title="{escape(scene.name, quote=True)}">'
        f"{img(scene.picture, scene.name, 80)}</button>"
        for k, scene in enumerate(scenes)
    )
    sliders = "".join(
        f'<label class="slider"><span>{title}</span><input type="range" data-part="{name}" min="{low}" max="{high}" '
        f'value="{value}"><output data-part="{name}-said"></output></label>'
        for name, title, low, high, value in (
            ("layer", "Layer", 0, len(layers) - 1, start),
            ("head", "Head", 0, 0, 0),
            ("detail", "Detail", 1, 2, 2),
            ("overlay", "Overlay", 0, 100, 55),
        )
    )
    return (
        '<div id="explorer"><div class="strip" role="group" aria-label="Choose a picture">' + thumbnails + "</div>"
        f'<div class="controls">{sliders}</div><p class="about" data-part="layer-about"></p>'
        '<p class="said" data-part="said" aria-live="polite"></p><div class="views">'
        '<figure class="card"><canvas data-part="picture" tabindex="0" role="img" width="512" height="512"></canvas>'
        '<figcaption data-part="answer"></figcaption></figure>'
        '<figure class="card"><svg data-part="disk" class="plane" viewBox="-486 -486 972 972" tabindex="0" role="img" '
        'aria-label="The clusters as points of the Poincaré disk"></svg>'
        '<figcaption data-part="disk-about"></figcaption></figure></div>'
        '<figure class="card wood"><svg data-part="tree" tabindex="0" role="tree" '
        'aria-label="The tree of clusters; arrow keys walk along it"></svg></figure>'
        "<noscript><p>Switch JavaScript on to explore the clusters. Nothing is loaded from elsewhere.</p></noscript>"
        f'<script type="application/json" id="explorer-data">{text}</script></div>'
    )


def answer_html(answer: Answer | None) -> str:
    """The best answers as bars, the right one marked."""
    if answer is None:
        return ""
    rows = []
    for path, score in zip(answer.paths, answer.scores, strict=True):
        kind = ("right" if path[-1] == answer.truth[-1] else "wrong") if answer.truth else ""
        above = "".join(f"{escape(name)} › " for name in path[:-1])
        rows.append(
            f'<span class="guess {kind}" style="--p:{score:.3f}"><span><span class="above">{above}</span>'
            f"<b>{escape(path[-1])}</b></span><span>{score:.0%}</span></span>"
        )
    note = ""
    if answer.truth and not answer.is_right:
        note = f'<span class="truth">It is: {escape(" › ".join(answer.truth))}</span>'
    return "".join(rows) + note


def _layers(clusters: Sequence[BlockClusters]) -> list[dict[str, Any]]:
    stages = len({one.stage for one in clusters})
    layers = [
        {
            "title": "all stages",
            "heads": 1,
            "names": [f"Stage {stage} cluster" for stage in range(stages, 0, -1)],
            "about": "The clusters of every stage in one tree: the few clusters of the last stage on top, the fine "
            "ones of the first at the leaves. Each hangs under the coarser cluster that covers most of it.",
            "disk": "The tree laid out on the Poincaré disk by Sarkar's construction: every edge is equally long, "
            "although it looks shorter near the rim.",
        }
    ]
    for one in clusters:
        h, w = one.size
        num_windows, m = int(one.window_of.max()) + 1, one.patch.shape[-1]
        if one.has_groups:
            assert one.window is not None
            about = (
                f"{h} × {w} patches in {num_windows} windows. Inside each window the patches gather around {m} "
                f"centres; the windows themselves gather around {one.window.shape[-1]} centres"
            )
            about += " in hyperbolic space." if one.c is not None else "."
            disk = (
                "Groups of windows where the model has them in hyperbolic space, seen from their mean: the distance to "
                "the middle is true, the direction is that of the two main axes. Clusters of patches lie where their "
                "centres do."
                if one.c is not None
                else "The tree laid out on the Poincaré disk by Sarkar's construction."
            )
            names = ["Group", "Cluster"]
        else:
            where = "the whole map at once" if num_windows == 1 else f"{num_windows} windows"
            about = f"{h} × {w} patches gather around {m} centres, in {where}."
            disk = "One level only: the clusters stand around the picture at equal distances (Sarkar's construction)."
            names = ["Cluster"]
        layers.append(
            {
                "title": f"stage {one.stage}, block {one.block}",
                "heads": one.num_heads,
                "names": names,
                "about": f"{about} Centres that are no patch's first choice are not shown.",
                "disk": disk,
            }
        )
    return layers


def _pack(tree: Tree, scene: Scene) -> dict[str, Any]:
    """One tree as the browser reads it. Leaves no patch belongs to most are left out: they could not be pointed at."""
    assert tree.support is not None
    leaves = tree.leaves()
    winner = leaves[tree.support[leaves].argmax(0)]  # (h, w)
    sure = tree.support[leaves].max(0)
    used = np.zeros(tree.num_nodes, bool)
    used[np.unique(winner)] = True
    points, zoom = disk_points(tree)
    for node in np.unique(winner):
        used[tree.ancestors(int(node))] = True
    number = np.cumsum(used) - 1
    small = tree.take(used)
    h, w = winner.shape
    packed = {
        "h": h,
        "w": w,
        "zoom": round(zoom, 1),
        "parent": _base64(np.maximum(small.parent, 0), "<u2"),
        "leaf": _base64(number[winner], "<u2"),
        "sure": _base64(np.round(255 * sure), "u1"),
        "xy": _base64(np.round(32767 * points[used]).clip(-32767, 32767), "<i2"),
    }
    if scene.regions is not None:
        packed["mostly"] = _mostly(small, number[winner], scene.regions)
    return packed


def _mostly(tree: Tree, leaf: np.ndarray, regions: np.ndarray) -> list[list[int]]:
    """For each node the region that fills most of it, and its share in percent; -1 where nothing is known."""
    pixels, known = enlarge(leaf, *regions.shape), regions >= 0
    count = np.zeros((tree.num_nodes, int(regions.max(initial=0)) + 1), np.int64)
    np.add.at(count, (pixels[known], regions[known]), 1)
    for node in tree.order("postorder"):  # children before parents
        if tree.parent[node] >= 0:
            count[tree.parent[node]] += count[node]
    total = count.sum(1)
    best = count.argmax(1)
    share = np.round(100 * count.max(1) / np.maximum(total, 1)).astype(int)
    return [[int(b) if t else -1, int(s)] for b, s, t in zip(best, share, total, strict=True)]


def _base64(values: np.ndarray, dtype: str) -> str:
    packed = np.ascontiguousarray(values).astype(dtype)
    if not np.array_equal(packed, values):
        raise ValueError(f"numbers from {values.min()} to {values.max()} do not fit into {dtype} in the page's data")
    return base64.b64encode(packed.tobytes()).decode("ascii")
