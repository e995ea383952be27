"""What the nodes of a Hi-Mapper did with one picture, in plain arrays: maps, points, and how even the maps are."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyptree.explore.draw.style import PALETTE
from hyptree.tree import Tree
from hyptree.tree.arrays import as_array

NEARLY_EVEN = 0.1
"""Maps closer to the even one than this (total variation, 0 to 1) say next to nothing about the picture."""


@dataclass(frozen=True)
class LevelMaps:
    """How the maps of one level look, in numbers; all shares from 0 to 1."""

    level: int
    """From 1, the leaves."""
    num_nodes: int
    entropy: np.ndarray
    """(N_l,) entropy of each map over that of the even map: 1 looks at every patch alike."""
    from_even: float
    """Mean total variation between a map and the even one."""
    apart: float
    """Mean total variation between the maps of two siblings; between neighbours at the top level."""
    num_winners: float
    """Nodes that look at some patch more than every other node of their level does."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of one picture, levels from the leaves upwards."""

    points: list[np.ndarray]
    """(N_l, d): space components of Lorentz points, or points of flat space."""
    c: float | None
    """The space has curvature ``-c``; None where it is flat."""
    maps: list[np.ndarray] | None
    """(N_l, H, W), each map sums to 1; None where the model was not asked for them."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level."""
        return tuple(len(points) for points in self.points)

    def need_maps(self) -> list[np.ndarray]:
        if self.maps is None:
            raise ValueError("the output has no maps; ask for them: model(x, return_maps=True)")
        return self.maps

    def level_maps(self) -> list[LevelMaps]:
        """The numbers of every level, leaves first."""
        levels = []
        for k, maps in enumerate(self.need_maps()):
            p = maps.reshape(len(maps), -1).astype(np.float64)
            p = p / p.sum(1, keepdims=True)
            entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1) / np.log(max(p.shape[1], 2))
            pairs = 0.5 * np.abs(p[0::2][: len(p) // 2] - p[1::2]).sum(1)
            levels.append(
                LevelMaps(
                    level=k + 1,
                    num_nodes=len(p),
                    entropy=entropy,
                    from_even=float(0.5 * np.abs(p - 1 / p.shape[1]).sum(1).mean()),
                    apart=float(pairs.mean()) if len(pairs) else 0.0,
                    num_winners=len(np.unique(p.argmax(0))),
                )
            )
        return levels


def read_nodes(out: Any, b: int = 0) -> Nodes:
    """The nodes of picture ``b`` from a ``HiMapperOutput``.

    Raises:
        ValueError: no such picture, no nodes, or levels that do not halve.
    """
    levels = list(out.hyperbolic or [])
    if not levels:
        raise ValueError("the output has no nodes; the plug-in is switched off (enabled=False)")
    batch = len(levels[0])
    if not 0 <= b < batch:
        raise ValueError(f"b must be from 0 to {batch - 1}, got {b}; the output holds {batch} pictures")
    points = [as_array(level[b]) for level in levels]
    sizes = [len(level) for level in points]
    if any(below != 2 * above for below, above in itertools.pairwise(sizes)):
        raise ValueError(f"levels have {sizes} nodes, expected each to have half as many as the one before")
    c = None if out.curvature is None else float(out.curvature)
    maps = None if out.maps is None else [as_array(level[b]) for level in out.maps]
    return Nodes(points, c or None, maps)


def forest(sizes: Sequence[int]) -> Tree:
    """The forest of levels with these numbers of nodes, leaves first; node i of a level hangs under i // 2 above.

    Nodes are numbered level by level and called as ``HiMapper.to_tree`` calls them: "level 2 node 5".
    """
    start = np.concatenate([[0], np.cumsum(sizes)])
    parent = np.full(start[-1], -1)
    for k in range(len(sizes) - 1):
        parent[start[k] : start[k + 1]] = start[k + 1] + np.arange(sizes[k]) // 2
    names = [f"level {k + 1} node {i}" for k, size in enumerate(sizes) for i in range(size)]
    return Tree(parent, label=names)


def node_colours(sizes: Sequence[int]) -> list[np.ndarray]:
    """(N_l, 3) colours in [0, 1] of every level: a hue for each tree of the forest, shades of it for what is below.

    The leaves of a tree go from dark to light; a node has the mean shade of its leaves, so neighbours look alike.
    """
    num_roots, num_leaves = sizes[-1], sizes[0]
    if num_roots <= len(PALETTE):
        base = np.array([list(bytes.fromhex(name[1:])) for name in PALETTE[:num_roots]]) / 255
    else:
        base = np.array([colorsys.hls_to_rgb(k / num_roots, 0.45, 0.55) for k in range(num_roots)])
    below = num_leaves // num_roots
    shade = np.linspace(-0.5, 0.62, below) if below > 1 else np.zeros(1)
    colours = []
    for size in sizes:
        per_root = size // num_roots
        mean = shade.reshape(per_root, -1).mean(1)[:, None]  # (per_root, 1)
        for_root = [np.where(mean < 0, root * (1 + mean), root + (1 - root) * mean) for root in base]
        colours.append(np.concatenate(for_root))
    return colours


def mean_maps(pictures: Sequence[Sequence[LevelMaps]]) -> list[LevelMaps]:
    """The numbers of several pictures as their means, level by level."""
    return [
        LevelMaps(
            same[0].level,
            same[0].num_nodes,
            np.mean([one.entropy for one in same], axis=0),
            *(float(np.mean([getattr(one, name) for one in same])) for name in ("from_even", "apart", "num_winners")),
        )
        for same in zip(*pictures, strict=True)
    ]


def even_warning(levels: Sequence[LevelMaps]) -> str | None:
    """One sentence where the maps of a level are nearly even, None where all of them tell patches apart."""
    flat = [one for one in levels if one.from_even < NEARLY_EVEN]
    if not flat:
        return None
    which = ", ".join(str(one.level) for one in flat)
    least = min(one.from_even for one in flat)
    return (
        f"the maps of level {which} are close to uniform (distance {least:.2f} of 1): their queries look at all "
        "patches alike, so the pictures of these nodes say next to nothing"
    )
