"""The part of a page that is about a Hi-Mapper: maps, patches and points picture by picture, numbers, curves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import require
from hyptree.explore.draw.disk import svg_disk
from hyptree.explore.draw.himapper import ALARM, STATS, disk_caption, plot_assignment, plot_tree_maps, stat_curves
from hyptree.explore.draw.nodes import LevelMaps, even_warning, forest, mean_maps, node_colours, read_nodes
from hyptree.explore.draw.scenes import Scene, answer_html
from hyptree.explore.draw.style import INK, SOFT, hex_colour, img, read_beside
from hyptree.explore.pages.page import Section, cards, line_charts, table
from hyptree.tree.layout import flat_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
DARK = {"white": "#181c26", INK: "#e8eaf1", SOFT: "#9aa2b5", ALARM: "#ff9b66"}
"""Colours of the figures' ground and text where the page is dark, as page.css has them."""
STYLE = read_beside(__file__, "himapper.css")
LEAD = (
    "A tree of queries reads the last feature map of the backbone: leaves, their parents, the parents of those. Each "
    "query has a map that says at which patches it looked, and a point in the space in which the tree is trained. The "
    "queries are the same for every picture; what they read is not. Nothing in the method makes a map an object or a "
    "part of one, or a parent's map the union of its children's: read them as where a query looked, no more."
)
NUMBERS_SAY = (
    "Mean over the pictures of this page. Entropy: of a map, over that of an even one; 1 looks at all patches alike. "
    "From even: distance of a map from the even one (total variation, 0 to 1). Siblings apart: the same between "
    "the maps of two siblings. Nodes that win a patch look at it more than any other node of their level."
)
STATS_SAY = (
    "Image dependence is the variance of nodes over pictures over their variance within a picture; near 0 the picture "
    "is ignored. Parents begin as means of their children, so finding the parent is easy from the start: read it "
    "together with the ratio of distances."
)


def find_himapper(model: Any) -> Any:
    """The Hi-Mapper that is switched on: the model itself, or what lies below its dense head; None without one."""
    from hyptree.models.himapper import HiMapper

    inside = model.modules() if hasattr(model, "modules") else ()
    return next((module for module in inside if isinstance(module, HiMapper) and module.enabled), None)


def even_maps(out: Any) -> str | None:
    """The warning that maps are close to uniform, over all pictures of the batch; None where they are not."""
    return even_warning(_mean_levels(out))


def _mean_levels(out: Any) -> list[LevelMaps]:
    return mean_maps([read_nodes(out, b).level_maps() for b in range(len(out.hyperbolic[0]))])


def mapper_sections(scenes: Sequence[Scene], out: Any, metrics: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
    """Sections of a page: every picture of a batch with its maps, patches and disk; the numbers; the curves of the log.

    Args:
        out: ``HiMapperOutput`` of the batch, with maps.
    """
    require("matplotlib", "plot")
    levels = _mean_levels(out)
    alarm = even_warning(levels)
    parts = [f"<p>{LEAD}</p>"]
    if alarm:
        parts.append(f'<p class="warned"><b>Warning:</b> {escape(alarm)}.</p>')
    parts += [_picture_html(scene, out, b, is_open=b == 0) for b, scene in enumerate(scenes)]
    sections = [Section("Where its tree looks", "".join(parts))]
    head = ("level", "nodes", "entropy", "from even", "siblings apart", "nodes that win a patch")
    cells = [
        (
            f"{one.level}{', leaves' if one.level == 1 else ', top' if one.level == len(levels) else ''}",
            str(one.num_nodes),
            f"{one.entropy.mean():.3f}",
            f"{one.from_even:.2f}",
            f"{one.apart:.2f}",
            f"{one.num_winners:.1f}",
        )
        for one in reversed(levels)
    ]
    numbers = f'<div class="card">{table(head, cells)}</div><p class="note">{NUMBERS_SAY}</p>'
    stats = {title: f"{float(out.stats[name]):{form}}" for name, title, _, form in STATS if name in out.stats}
    numbers += f'{cards(stats)}<p class="note">{STATS_SAY}</p>' if stats else ""
    sections.append(Section("The tree in numbers", numbers))
    if charts := stat_curves(metrics):
        sections.append(Section("How its tree came about", f'<div class="charts">{line_charts(charts)}</div>'))
    return sections


def without_tree(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a log without what :func:`mapper_sections` draws of them."""
    drawn = {name for name, *_ in STATS}
    return [{key: value for key, value in row.items() if key not in drawn} for row in metrics]


def _picture_html(scene: Scene, out: Any, b: int, is_open: bool) -> str:
    """One picture, folded but for the first: maps on the forest, patches by node, points on the disk."""
    shown = scene.picture if scene.shown is None else scene.shown
    with warnings.catch_warnings():  # the figure says it, and so does the page
        warnings.filterwarnings("ignore", "the maps of level", UserWarning)
        maps = plot_tree_maps(shown, out, b)
    patches = plot_assignment(shown, out, b=b)
    nodes = read_nodes(out, b)
    points, kept = flat_points(np.concatenate(nodes.points), nodes.c)
    colours = [hex_colour(255 * colour) for colour in np.concatenate(node_colours(nodes.sizes))]
    disk = svg_disk(forest(nodes.sizes), points, colors=colours, flat=nodes.c is None, names=False)
    name = escape(scene.name)
    answer = f"<h3>What the picture is called</h3>{answer_html(scene.answer)}" if scene.answer else ""
    return (
        f'<details class="mapped"{" open" if is_open else ""}><summary>'
        f"{img(scene.picture, scene.name, 80)}<span>{name}</span></summary>"
        f'<div class="sheets">{_sheet(maps, f"maps of the nodes on {scene.name}")}</div>'
        f'<div class="sheets">{_sheet(patches, f"patches of {scene.name} by node")}</div>'
        f'<figure class="card lies">{disk}<figcaption><h3>Where the nodes lie</h3>'
        f"<p>{escape(disk_caption(nodes, kept))} The larger, the higher in its tree; colours are those of the pictures "
        f"above. Point at a node for its name.</p>{answer}</figcaption></figure></details>"
    )


def _sheet(figure: Figure, alt: str) -> str:
    """The figure as a picture inside the page: two of them, of which the page shows the one of its colour scheme."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    parts = []
    for kind in ("sheet", "sheet dark"):
        if kind == "sheet dark":
            figure.set_facecolor(DARK["white"])
            for text in figure.findobj(Text):
                text.set_color(DARK.get(str(text.get_color()), text.get_color()))
        canvas.draw()
        pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
        parts.append(img(pixels, alt, 88, class_=kind))
    return "".join(parts)
