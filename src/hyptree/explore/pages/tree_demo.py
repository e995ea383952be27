"""Pages of embedded trees: of a run of the task ``embed``, and that of ``hyptree tree demo``.

The demo learns a small tree in the hyperbolic plane and in the flat one, and says what that means.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import require
from hyptree.explore.draw.charts import run_curves
from hyptree.explore.draw.disk import draw_disk, move_script, svg_disk
from hyptree.explore.pages.page import Section, cards, line_charts, page, table
from hyptree.files import write_text
from hyptree.progress import progress_bar
from hyptree.tables import aligned
from hyptree.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from hyptree.evaluate.hierarchy.embedding import Embedding
    from hyptree.geometry import Manifold

TAXONOMY = """
things
  animals
    mammals: lion, wolf, horse, dolphin
    birds: robin, eagle, penguin
    reptiles: cobra, gecko, tortoise
    insects: beetle, bee, butterfly
    fish: trout, shark, tuna
  plants
    trees: oak, birch, pine
    flowers: rose, tulip, daisy
    fruit: apple, pear, cherry
    vegetables: carrot, onion, pea
  vehicles
    on land: car, bicycle, train, bus
    on water: ferry, canoe, yacht
    in the air: jet, balloon, helicopter
  instruments
    strings: violin, guitar, harp
    winds: flute, trumpet, clarinet
    drums: snare drum, gong, bongo
  home
    furniture: table, chair, sofa
    kitchen: pan, kettle, spoon
    tools: hammer, saw, drill
"""

EDGE_LENGTH = 1.2
"""Hyperbolic length of one edge: longer edges fit better and leave less room to read."""
STEPS_PER_LEVEL = 100
DIM = 2


@dataclass(frozen=True)
class Scores:
    """How well a set of points keeps a tree's distances."""

    name: str
    distortion: float
    """Mean of |distance / path length - 1| over all pairs, at the best common scale."""
    worst: float
    """Largest stretch over smallest."""
    map: float
    """Mean average precision of the neighbours in the tree among the nearest points.

    Shown to two digits: the symmetry of Sarkar's construction makes many distances equal up to rounding, and the order
    of such ties moves the third.
    """
    radius: float
    """Distance of the farthest point from the root."""


def demo_tree(text: str = TAXONOMY) -> Tree:
    """The tree of an outline: two spaces per level, ``parent: leaf, leaf`` for the last one."""
    label: list[str] = []
    parent: list[int] = []
    above: list[int] = []
    for line in text.strip("\n").splitlines():
        name, _, leaves = line.strip().partition(":")
        del above[(len(line) - len(line.lstrip())) // 2 :]
        parent.append(above[-1] if above else -1)
        above.append(len(label))
        label.append(name)
        for leaf in leaves.split(",") if leaves else []:
            parent.append(above[-1])
            label.append(leaf.strip())
    return Tree(parent, label=label)


def fit(
    tree: Tree,
    manifold: Manifold,
    *,
    edge: float = EDGE_LENGTH,
    dim: int = DIM,
    steps: int = STEPS_PER_LEVEL,
    seed: int = 0,
    report: Callable[[float], None] | None = None,
) -> Tensor:
    """Points (n, dim) whose distances are as close to ``edge`` times the path lengths of the tree as training gets.

    The tree grows level by level: children start beside their parent, then all points so far are trained together, so
    that branches never have to pass through each other. Nothing here asks which space it is.

    Args:
        manifold: the space of the points, ``Lorentz()`` or ``Euclidean()``.
        steps: of Riemannian Adam per level, twice as many for the last.
        report: called after each step with the loss.
    """
    import torch

    from hyptree.geometry import mark_manifold
    from hyptree.optim import RiemannianAdam

    generator = torch.Generator().manual_seed(seed)
    everyone = np.arange(tree.num_nodes)
    wanted = edge * torch.from_numpy(tree.distance(everyone[:, None], everyone[None, :]))  # (n, n)
    parent = torch.from_numpy(tree.parent.copy())
    points = torch.nn.Parameter(manifold.origin(tree.num_nodes, dim, dtype=torch.float64))
    mark_manifold(points, manifold)
    for level in range(1, int(tree.depth.max()) + 1):
        born = torch.from_numpy(np.flatnonzero(tree.depth == level))
        nudge = 0.1 * edge * torch.randn(len(born), dim, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            points[born] = manifold.expmap(points[parent[born]], nudge)
        alive = torch.from_numpy(np.flatnonzero(tree.depth <= level))
        i, j = torch.triu_indices(len(alive), len(alive), 1)
        target = wanted[alive[i], alive[j]]
        num_steps = _steps_of(tree, level, steps)
        optimizer = RiemannianAdam([points], lr=0.1 * edge)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        for _ in range(num_steps):
            optimizer.zero_grad()
            distance = manifold.pairwise_dist(points[alive], points[alive])[i, j]
            loss = (distance / target - 1).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            if report is not None:
                report(loss.item())
    return points.detach()


def _steps_of(tree: Tree, level: int, steps: int) -> int:
    return 2 * steps if level == tree.depth.max() else steps


def score(tree: Tree, points: Tensor, manifold: Manifold, name: str) -> Scores:
    """Distortion and neighbour precision of points for the tree."""
    import torch

    from hyptree.evaluate import reconstruction

    child = np.flatnonzero(tree.parent >= 0)
    both = np.concatenate([np.stack([child, tree.parent[child]], 1), np.stack([tree.parent[child], child], 1)])
    neighbours = torch.from_numpy(both[np.lexsort(both.T[::-1])])
    distortion = tree.distortion(embedding=points, manifold=manifold, scale="best")
    root = points[int(tree.roots[0])]
    radius = float(manifold.dist(points, root.expand_as(points)).max())
    return Scores(name, distortion.average, distortion.worst, reconstruction(points, neighbours, manifold).map, radius)


def run(out: Path, seed: int = 0) -> None:
    """Learns the tree in both planes, prints the numbers, writes ``index.html``, ``disk.png`` and ``numbers.json``."""
    require("matplotlib", "plot")  # now, not when the trees are learned
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    import torch
    from rich.console import Console

    from hyptree.geometry import Euclidean, Lorentz, Poincare, lorentz

    console = Console(highlight=False)
    began = time.perf_counter()
    tree = demo_tree()
    console.print(
        f"A tree of {tree.num_nodes} nodes, {tree.num_leaves} of them leaves, {tree.depth.max()} levels deep."
    )
    curved = _learn("hyperbolic plane", tree, Lorentz(), seed)
    flat = _learn("flat plane", tree, Euclidean(), seed)

    # An isometry changes no distance: put the root where people look first.
    root = int(tree.roots[0])
    curved = lorentz.boost(-curved[root], curved)
    flat = flat - flat[root]
    longest = tree.largest_tau()
    scores = [
        score(tree, flat, Euclidean(), "flat plane, learned"),
        score(tree, curved, Lorentz(), "hyperbolic plane, learned"),
        score(tree, torch.from_numpy(tree.sarkar(EDGE_LENGTH)), Poincare(), f"Sarkar, edges of length {EDGE_LENGTH:g}"),
        score(tree, torch.from_numpy(tree.sarkar(longest)), Poincare(), f"Sarkar, edges of length {longest:g}"),
    ]
    console.print("\n".join(["", *aligned([HEAD, *_rows(scores)]), ""]))

    disk = lorentz.to_poincare(curved).numpy()
    draw_disk(tree, disk, out / "disk.png")
    numbers = {
        "seed": seed,
        "num_nodes": tree.num_nodes,
        "dim": DIM,
        "edge_length": EDGE_LENGTH,
        "scores": [asdict(row) for row in scores],
        "points": dict(zip(tree.label or [], disk.tolist(), strict=True)),
    }
    write_text(out / "numbers.json", json.dumps(numbers, indent=1) + "\n")
    written = _write_page(out / "index.html", tree, disk, flat.numpy(), scores, seed)
    console.print(f"Done in {time.perf_counter() - began:.0f} s. The picture is {out / 'disk.png'}; open this page:")
    console.print(str(written), soft_wrap=True)


def _learn(name: str, tree: Tree, space: Manifold, seed: int) -> Tensor:
    """The fit under a bar."""
    total = sum(_steps_of(tree, level, STEPS_PER_LEVEL) for level in range(1, int(tree.depth.max()) + 1))
    with progress_bar(name, total, stream=sys.stdout) as bar:
        return fit(
            *(tree, space), steps=STEPS_PER_LEVEL, seed=seed, report=lambda loss: bar.advance(note=f"loss {loss:.4f}")
        )


HEAD = ("", "average distortion", "worst", "MAP", "radius")


def _rows(scores: list[Scores]) -> list[tuple[str, ...]]:
    return [(s.name, f"{s.distortion:.1%}", f"{s.worst:.1f}", f"{s.map:.2f}", f"{s.radius:.1f}") for s in scores]


def _write_page(path: Path, tree: Tree, disk: np.ndarray, flat: np.ndarray, scores: list[Scores], seed: int) -> Path:
    plain, learned, sarkar, limit = scores
    picture = (
        f"<figure>{svg_disk(tree, disk, move=True)}"
        "<figcaption>Point at a node to see the way to it. Click one and the disk moves until it is in the centre; "
        "distances do not change. Double-click to return.</figcaption></figure>"
        "<p>The disk is the whole hyperbolic plane. Its rim is infinitely far away, and things look smaller the closer "
        "they are to it: all lines from a node to its children are about equally long, although the outer ones look "
        "short. Each line is the shortest way between its ends, also where it looks bent.</p>"
    )
    numbers = (
        table(HEAD, _rows(scores), {1: "best"}) + "<ul>"
        "<li><b>Average distortion</b>: by how much the distance of two points misses the length of the path between "
        "their nodes, on average over all pairs and after the best common scaling. 0% is a perfect copy.</li>"
        "<li><b>Worst</b>: the most stretched pair against the most shrunk one. 1 is perfect.</li>"
        "<li><b>MAP</b>: whether the points nearest to a node are its parent and its children. 1 is always.</li>"
        "<li><b>Radius</b>: how far the farthest point is from the root.</li></ul>"
        f"<p>Both learned rows had the same {DIM} dimensions, the same training and the same number of steps; only "
        f"the space differs. The flat plane bends path lengths by {plain.distortion:.0%} on average, the hyperbolic "
        f"plane by {learned.distortion:.0%}.</p>"
        "<p>Sarkar's construction needs no training: every edge has the same length and the neighbours of each node "
        f"have equal angles. With edges as short as here it is at {sarkar.distortion:.0%}, because branches are not "
        "yet far enough apart. Its strength is that longer edges make it as good as one likes: "
        f"{limit.distortion:.1%} with the longest edges that float64 can hold safely, in a disk where nearly "
        "everything is too close to the rim to be seen.</p>"
    )
    why = (
        "<p>A tree with three children per node has 3, 9, 27, … nodes at distance 1, 2, 3, … from its root. A circle "
        "in the flat plane grows only in proportion to its radius, so the leaves of a tree are pressed together. In "
        "the hyperbolic plane the circle grows exponentially, as the tree does, and there is room for all of them.</p>"
        '<div class="pair">'
        f"<figure>{svg_disk(tree, disk, names=False)}<figcaption>Hyperbolic plane: branches stay apart."
        f"</figcaption></figure><figure>{svg_disk(tree, flat, flat=True, names=False)}<figcaption>Flat plane, the "
        "same training: leaves of different branches end up side by side.</figcaption></figure></div>"
    )
    return page(
        path,
        "A tree in the hyperbolic plane",
        f"{tree.num_nodes} everyday things, placed so that their distances match the distances in their tree. "
        "The points were learned with hyptree's Lorentz geometry and Riemannian Adam.",
        [Section("", picture), Section("How good is it?", numbers), Section("Why does it work?", why)],
        script=move_script(),
        footer=f"Written by `hyptree tree demo --seed {seed}`. Curvature -1, edge length {EDGE_LENGTH:g}. "
        "All numbers are in numbers.json beside this page.",
    )


# ---- a run of the task embed -----------------------------------------------------------------------------------------

MAX_NODES = 400
"""Nodes that are drawn: more dots and names would lie on each other."""
_SHOWN = {
    "map": ("MAP", ".3f"),
    "mean_rank": ("mean rank", ".2f"),
    "cone_f1": ("F1 of cones", ".3f"),
    "distortion": ("average distortion", ".0%"),
    "radius_depth_correlation": ("radius and depth", ".2f"),
}
_CURVES = ("step", "epoch", "time", "split", "lr", "loss", "map", "cone_map", "cone_f1")


def write_embedding_page(
    path: Path, embedding: Embedding, numbers: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> Path:
    """Writes the page, with the numbers of :func:`hyptree.evaluate.hierarchy.embedding.measure`; gives its path."""
    from hyptree.evaluate.hierarchy.embedding import disk_tree
    from hyptree.geometry import Euclidean

    tree, points = disk_tree(embedding, MAX_NODES)
    count, dim = embedding.points.shape
    drawn = f"the {tree.num_nodes:,} of {count:,} nodes with the most descendants" if tree.num_nodes < count else ""
    projected = "every node at its true distance from the middle, directions projected" if dim > 2 else ""
    note = "; ".join(filter(None, (drawn, projected)))
    is_flat = isinstance(embedding.manifold, Euclidean)
    space = "flat space, drawn as if it were hyperbolic" if is_flat else "hyperbolic space"
    picture = (
        f"<figure>{svg_disk(tree, points, move=dim == 2)}<figcaption>Point at a node to see the way to it."
        f"{' Shown: ' + note + '.' if note else ''}</figcaption></figure>"
    )
    shown = {name: format(numbers[key], form) for key, (name, form) in _SHOWN.items() if key in numbers}
    ranked = f"{numbers['num_ranked_nodes']:,} random nodes" if numbers["is_sampled"] else "all nodes"
    meaning = (
        f"<p>Measured on {ranked}. <b>MAP</b>: whether the points nearest to a node are its ancestors; 1 is always. "
        "<b>Mean rank</b> of an ancestor among all nodes that are none. <b>Average distortion</b>: by how much "
        "distances miss path lengths, after the best common scaling. <b>Radius and depth</b>: whether specific nodes "
        "lie farther out (rank correlation).</p>"
    )
    rows = [{key: row[key] for key in _CURVES if key in row} for row in metrics]
    charts = f'<div class="charts">{line_charts(run_curves(rows))}</div>'
    sections = [
        Section("", cards(shown)),
        Section("", picture),
        Section("How good is it?", meaning),
        Section("How it was learned", charts),
    ]
    lead = f"{count:,} nodes and {len(embedding.pairs):,} pairs in {dim} dimensions, in {space}."
    footer = "Written by hyptree explain."
    return page(path, "A hierarchy, embedded", lead, sections, script=move_script(), footer=footer)
