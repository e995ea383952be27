"""What ``hyptree reduce`` found, for people: the table, the plot of speed against accuracy, the page with pictures."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hyptree import tables
from hyptree.explore.draw.reduced_pictures import SCRIPT, STYLE, Shown, picture_html, strip
from hyptree.explore.draw.style import PALETTE
from hyptree.explore.pages.page import Section, image, page, table
from hyptree.files import write_text
from hyptree.lab.figures.panels import Panel, Series
from hyptree.tables import aligned

if TYPE_CHECKING:
    from hyptree.evaluate.tokens.reduction_rows import Results, Row

NOTE = (
    "Tokens: patches that are left after each of the layers. GFLOPs: of one picture, two per multiply-add (papers "
    "often give half of this), without the choice of clusters, whose cost shows in images/s. Images/s: median, the "
    "plain model timed in the same rounds. Below keep 0.5 tome repeats its matching: one can only halve the tokens."
)

# --------------------------------------------------------------------------------------------------------------- table


def table_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Heading and cells of the table; columns without numbers are left out."""
    head = ["method", "keep", "tokens", "GFLOPs", "images/s", "speed-up"]
    has_accuracy = any(row.top1 is not None for row in results.rows)
    if has_accuracy:
        head += ["top-1", "top-5"]
    cells = []
    for row in results.rows:
        line = [row.name, f"{row.keep:g}", " ".join(map(str, row.tokens)), row.cost]
        line += [f"{row.images_per_second:,.1f}", f"{row.speedup:.2f}x"]
        if has_accuracy:
            line += ["" if value is None else f"{value:.2%}" for value in (row.top1, row.top5)]
        cells.append(line)
    return head, cells


def text_table(results: Results) -> str:
    """The table as aligned lines, names on the left and numbers on the right."""
    head, cells = table_rows(results)
    rule = ["-" * max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return "\n".join(aligned([head, rule, *cells]))


def to_csv(results: Results) -> str:
    """The rows for other programs; the tokens of the layers with spaces between them."""
    return tables.to_csv([asdict(row) | {"tokens": " ".join(map(str, row.tokens))} for row in results.rows])


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other row beats in both speed and accuracy, fastest first; empty without accuracy."""
    best: list[Row] = []
    measured = [row for row in rows if row.top1 is not None]
    for row in sorted(measured, key=lambda row: (-row.images_per_second, -(row.top1 or 0.0))):
        if not best or (row.top1 or 0.0) > (best[-1].top1 or 0.0):
            best.append(row)
    return best


# ---------------------------------------------------------------------------------------------------------------- plot


def write_plot(results: Results, path: Path) -> Path:
    """A PNG: accuracy against speed and against FLOPs, one line per method, and the Pareto front.

    Without accuracy: the speed-up against FLOPs.
    """
    from hyptree.lab.figures.drawing import draw_panels

    groups: dict[str, list[Row]] = {}
    for row in sorted(results.rows, key=lambda row: (row.method == "none", row.keep)):
        groups.setdefault("all tokens" if row.method == "none" else row.name, []).append(row)
    best = pareto_front(results.rows)
    axes = [("GFLOPs per picture", "times as fast")]
    if best:
        axes = [("images/s", "top-1, %"), ("GFLOPs per picture", "top-1, %")]
    panels = []
    for x_name, y_name in axes:
        panel = Panel(f"{y_name.partition(',')[0]} against {x_name}", x_name, y_name)
        for k, (name, rows) in enumerate(groups.items()):
            x, y = ([AXES[axis](row) for row in rows] for axis in (x_name, y_name))
            panel.series.append(Series(name, x, y, "line", labels=[] if k else [f"{row.keep:g}" for row in rows]))
        panels.append(panel)
    if len(best) > 1:
        x, y = ([AXES[axis](row) for row in best] for axis in axes[0])
        panels[0].series.append(Series("Pareto front", x, y, "dashed"))
    figure = draw_panels(panels, PALETTE)
    figure.suptitle(f"{results.about['model']}, {results.about['device']}", fontsize=11)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


AXES: dict[str, Callable[[Row], float]] = {
    "images/s": lambda row: row.images_per_second,
    "times as fast": lambda row: row.speedup,
    "GFLOPs per picture": lambda row: row.gflops,
    "top-1, %": lambda row: math.nan if row.top1 is None else 100 * row.top1,
}


# ---------------------------------------------------------------------------------------------------------------- page


def write_report(results: Results, shown: Sequence[Shown], out: Path) -> Path:
    """Writes results.csv, pareto.png, a PNG for each picture, and index.html; gives the page."""
    write_text(out / "results.csv", to_csv(results))
    for k, one in enumerate(shown, 1):
        strip(one).save(out / f"picture{k}.png")
    plot = None
    if find_spec("matplotlib") is None:
        print("no pareto.png: this needs matplotlib: pip install hyptree[plot]", file=sys.stderr)
    else:
        plot = write_plot(results, out / "pareto.png")
    return write_page(out / "index.html", results, shown, plot)


def write_page(path: Path, results: Results, shown: Sequence[Shown] = (), plot: Path | None = None) -> Path:
    """One HTML file with the table, the plot, the merged patches of every layer and the dendrograms."""
    head, cells = table_rows(results)
    about = results.about
    lines, kinds = [*about["notes"], NOTE], {}
    if fast := [row for row in results.rows if row.top1 is not None and row.speedup >= 1.5]:
        lines.append("In bold: the most accurate row that is at least 1.5 times as fast as the plain model.")
        kinds = {results.rows.index(max(fast, key=lambda row: row.top1 or 0.0)): "best"}
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in lines)
    sections = [Section("Numbers", table(head, cells, kinds) + notes)]
    if plot is not None:
        alt = "accuracy against speed" if any(row.top1 is not None for row in results.rows) else "speed against FLOPs"
        sections.append(Section("Trade-off", f"<figure>{image(plot, alt)}</figure>"))
    sections += [Section(one.name, picture_html(one)) for one in shown]
    lead = (
        f"{about['model']} with fewer tokens: reduced in blocks {', '.join(map(str, about['layers']))}, "
        f"{about['size']} px, {'no data' if about['data'] is None else about['data']}, on {about['device']}."
    )
    return page(
        path,
        "Fewer tokens",
        lead,
        sections,
        script=SCRIPT if any(one.trees for one in shown) else "",
        style=STYLE,
        footer=" ".join(results.machine) + " Written by hyptree reduce.",
    )
