"""The page of a run: explorer of its clusters, its numbers and curves, its rivals, its right and wrong answers.

One HTML file that needs nothing else. Built from plain records, so that it can be made from any run, or without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.explore.draw.charts import run_curves, svg_confusion
from hyptree.explore.draw.disk import DISK_SCRIPT
from hyptree.explore.draw.scenes import Answer, Scene, explorer_html
from hyptree.explore.draw.style import img, read_beside
from hyptree.explore.pages.page import Html, Section, cards, line_charts, page, table
from hyptree.tree import Tree


@dataclass(frozen=True)
class Answers:
    """What a classifier said about a whole set of pictures."""

    confusion: np.ndarray
    """(C, C) counts, true classes down, answers across."""
    classes: Sequence[str]
    tree: Tree | None
    """Its first C nodes are the classes."""
    shots: list[tuple[np.ndarray, Answer]] = field(default_factory=list)
    """Some pictures (H, W, 3) with their answers; wrong ones are shown first."""

    def accuracy(self, depth: int | None = None) -> float:
        """Share of right answers; at a depth of the tree, share of answers under the right node of that depth."""
        at = np.arange(len(self.classes))
        while depth is not None and self.tree is not None and (deep := self.tree.depth[at] > depth).any():
            at = np.where(deep, self.tree.parent[at], at)
        return float(self.confusion[at[:, None] == at].sum() / max(self.confusion.sum(), 1))


@dataclass(frozen=True)
class PageRecord:
    """All that a page of a run shows; what is empty is left out."""

    title: str
    lead: str
    scenes: Sequence[Scene]
    region_names: Sequence[str] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Shown large at the top."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """Rows of metrics.jsonl."""
    clusters: Sequence[Mapping[str, Any]] = ()
    """Rows of ``hyptree.evaluate.pictures.interpretability.interpretability_table``."""
    answers: Answers | None = None
    footer: str = ""
    sections: Sequence[Section] = ()
    """What a model of another kind shows of itself, where it has no clusters to explore."""
    style: str = ""
    """CSS that these sections need."""


def run_page(path: Path | str, record: PageRecord) -> Path:
    """Writes the page and gives its path."""
    sections = [Section("", cards(record.numbers))] if record.numbers else []
    if record.scenes or not record.sections:
        sections.append(
            Section(
                "What it clustered",
                "<p>The model mixes the patches of a picture by gathering them around centres and handing back what "
                "was gathered. What belongs together in its eyes can be read off, layer by layer and head by head.</p>"
                + explorer_html(record.scenes, record.region_names),
            )
        )
    sections += record.sections
    if record.clusters:
        sections.append(Section("Do clusters follow things?", _cluster_section(record.clusters)))
    if record.metrics:
        charts = f'<div class="charts">{line_charts(run_curves(record.metrics))}</div>'
        sections.append(Section("How it learned", charts))
    if record.answers is not None:
        sections.append(Section("Where it is right and wrong", _answers_section(record.answers)))
    return page(
        *(path, record.title, record.lead, sections),
        script=DISK_SCRIPT + read_beside(__file__, "explorer.js"),
        style=record.style,
        footer=record.footer,
    )


def _cluster_section(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        "asa": "achievable accuracy",
        "boundary_recall": "boundary recall",
        "undersegmentation": "under-segmentation",
        "purity": "purity",
    }
    lines = []
    for row in rows:
        cells = [str(row["method"]), f"{row['num_clusters']:.1f}"]
        for key in columns:
            bar = f'<span class="bar" style="width:{4.5 * max(0.0, min(1.0, row[key])):.2f}em"></span>'
            shown = f"{row[key]:.1%}" if key == "undersegmentation" else Html(f"{bar}{row[key]:.1%}")
            cells.append(shown if row[key] == row[key] else "–")
        lines.append(cells)
    rivals = {k: "rival" for k, row in enumerate(rows) if row.get("rival")}
    return (
        "<p>The pictures come with masks of what they show. A cluster is good when it keeps to one region and when its "
        "border lies where a region ends. A grid of equal squares and SLIC superpixels, at the same number of "
        "clusters, show what can be had without learning.</p>"
        f'<div class="card">{table(["", "clusters", *columns.values()], lines, rivals)}</div>'
        '<ul class="note"><li><b>Achievable accuracy</b>: pixels that are right if each cluster takes its commonest '
        "region.</li><li><b>Boundary recall</b>: borders of regions with a cluster border within two pixels.</li>"
        "<li><b>Under-segmentation</b>: how much clusters leak over borders (Neubert and Protzel); less is better.</li>"
        "<li><b>Purity</b>: share of the commonest region in a cluster, every cluster counting the same.</li></ul>"
    )


def _answers_section(answers: Answers) -> str:
    wrong = [shot for shot in answers.shots if shot[1].is_right is False]
    right = [shot for shot in answers.shots if shot[1].is_right]
    parts = []
    total, mistakes = int(answers.confusion.sum()), int(answers.confusion.sum() - np.trace(answers.confusion))
    if answers.tree is not None and mistakes:
        levels = []
        for depth in range(1, int(answers.tree.depth.max())):
            inside = round(total * answers.accuracy(depth)) - (total - mistakes)
            nodes = np.flatnonzero((answers.tree.depth == depth) & ~answers.tree.is_leaf)
            names = ", ".join(answers.tree.label[node] for node in nodes[:3]) if answers.tree.label else ""
            levels.append(f"{inside / mistakes:.0%} stay within the right one of {len(nodes)} ({escape(names)}, …)")
        parts.append(f"<p>Of {mistakes} mistakes in {total} pictures, {', '.join(levels)}.</p>")
    for title, shots in (("Wrong", wrong), ("Right", right)):
        if shots:
            parts.append(f'<h3>{title}</h3><div class="shots">{"".join(map(_shot, shots))}</div>')
    parts.append(
        "<h3>Which class is taken for which</h3><p class='note'>True classes down, answers across, in the order of the "
        "class tree; squares outline its families and groups. Point at a cell for its number.</p>"
        f'<figure class="card">{svg_confusion(answers.confusion, answers.tree, answers.classes)}</figure>'
    )
    return "".join(parts)


def _shot(shot: tuple[np.ndarray, Answer]) -> str:
    picture, answer = shot
    line, truth = answer.paths[0], answer.truth or answer.paths[0]
    # Names common to both paths are said once: what differs is what matters.
    text = f"<b>{escape(line[-1])} {answer.scores[0]:.0%}</b>"
    if answer.is_right is False:
        text += f"<span>is: {escape(truth[-1])}</span>"
        shared = [a for a, b in zip(line, truth, strict=False) if a == b]
        text += (
            f"<span>{'both ' + escape(shared[-1]) if shared else escape(truth[0]) + ', not ' + escape(line[0])}</span>"
        )
    else:
        text += f"<span>{escape(' › '.join(line[:-1]))}</span>"
    kind = "wrong" if answer.is_right is False else "right"
    return f'<div class="shot {kind}">{img(picture, f"{truth[-1]}, called {line[-1]}", 85)}{text}</div>'
