"""The page of a language model's tokens: how far from the origin they lie, against frequency and depth in WordNet.

One HTML file that needs nothing else, and the numbers beside it as JSON. :func:`language_sections` gives its parts, for
pages that show more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hyptree import __version__
from hyptree.explore.draw.charts import dot_chart
from hyptree.explore.draw.style import read_beside
from hyptree.explore.pages.page import Section, cards, chart, line_charts, page, table
from hyptree.files import full_disk_is_one_line, write_text
from hyptree.lab.figures.panels import Panel, Series

Numbers = Mapping[str, Any]

VALIDATION = ("perplexity", "bits_per_byte")
"""Numbers of the last validation that the page shows."""
NUM_WORDS = 18
KINDS = ("card", "card twin")
"""Of figures: of the model, and of its twin."""
_STYLE = read_beside(__file__, "language.css")


def write_token_page(path: Path, models: Sequence[Numbers]) -> Path:
    """Writes the page of a model's tokens, or of a model and its twin, and the numbers as JSON beside it.

    Args:
        path: HTML file.
        models: of each, what :func:`hyptree.evaluate.text.token_radii.measure_tokens` gives, its ``curvatures`` over
            training and its last ``val`` numbers.

    Raises:
        UserError: a disk that is full.
    """
    with full_disk_is_one_line(path.parent, "write the page again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path.with_suffix(".json"), json.dumps(models, allow_nan=False) + "\n")
    footer = f"hyptree {__version__}. Numbers: {path.stem}.json."
    title = f"Where {models[0]['model']} keeps its tokens"
    return page(path, title, _lead(models), language_sections(*models), style=_STYLE, footer=footer)


def language_sections(*models: Numbers) -> list[Section]:
    """The parts of the page from the numbers of one model, or of a model and its twin."""
    sections = [
        Section("", _cards(models[0])),
        Section("Models", _models(models)),
        Section("Radius and frequency", _frequency(models)),
        Section("Radius and depth in WordNet", _depth(models)),
        Section("How tree-like are the embeddings?", _gromov(models)),
    ]
    if models[0].get("curvatures"):
        sections.append(Section("Curvature of experts over training", curvature_section(models[0]["curvatures"])))
    return sections


# --------------------------------------------------------------------------------------------------------------- texts


def _lead(models: Sequence[Numbers]) -> str:
    beside = f" Beside it, {models[1]['model']}." if len(models) > 1 else ""
    return (
        "In a tree that is laid into hyperbolic space, what is general lies near the origin and what is special far "
        "out. Here is whether the tokens of this model do so. The text it was trained on has "
        f"{models[0]['num_tokens']:,} tokens.{beside}"
    )


def _models(models: Sequence[Numbers]) -> str:
    head = ["", "space", "validation perplexity", "bits per byte"]
    lines = [
        [numbers["model"], numbers["space"], *(_format(numbers.get("val", {}).get(name)) for name in VALIDATION)]
        for numbers in models
    ]
    return f'<div class="card">{table(head, lines)}</div>'


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _cards(numbers: Numbers) -> str:
    first, last = numbers["radius"][0], numbers["radius"][-1]
    shown = {
        "radius and frequency, embedding": _signed(first["frequency"]["r"]),
        "radius and frequency, last layer": _signed(last["frequency"]["r"]),
        "radius and depth, embedding": _signed(first["depth"]["r"]),
        "relative delta of embeddings": f"{numbers['gromov']['relative']:.3f}",
    }
    return cards(shown)


def _frequency(models: Sequence[Numbers]) -> str:
    charts = []
    for k, numbers in enumerate(models):
        points = numbers["points"]
        for key, where in (("embedding", "embedding"), ("last_layer", "last layer")):
            drawn = _dots(where, points["log_count"], points[key], "log10 of count", bins=12)
            charts.append(chart(f"{numbers['model']}, {where}", drawn, kind=KINDS[k]))
    return (
        "<p>Radius is the distance from the origin: hyperbolic for a HELM, the norm for a Euclidean model. Every dot "
        f"is a token that the training text has {models[0]['min_count']} times or more; the line joins medians. On the "
        "left the table of embeddings, on the right the mean over validation text of the points after the last layer."
        f'</p><div class="pairs">{"".join(charts)}</div>{_correlations(models)}'
        '<p class="note">Spearman\'s rank correlation with its 95 % interval: -1 where frequent tokens lie nearest to '
        "the origin in order, 0 where frequency says nothing.</p>"
    )


def _correlations(models: Sequence[Numbers], key: str = "frequency") -> str:
    head = ["", "radius: quartiles", "correlation", "95 %", "tokens"]
    lines = [
        [f"{numbers['model']}, {row['where']}", *_cells(row, key)] for numbers in models for row in numbers["radius"]
    ]
    return f'<div class="card">{table(head, lines)}</div>'


def _cells(row: Numbers, key: str) -> list[str]:
    correlation = row[key]
    between = "–" if correlation["low"] is None else f"{_signed(correlation['low'])} to {_signed(correlation['high'])}"
    radii = "–" if row["quartiles"][0] is None else " / ".join(f"{value:.3g}" for value in row["quartiles"])
    return [radii, _signed(correlation["r"]), between, str(correlation["count"])]


def _depth(models: Sequence[Numbers]) -> str:
    if not any(numbers["nouns"] for numbers in models):
        return (
            "<p>Left out: there is no WordNet here, or none of its nouns is a token. Its tables are "
            "noun_synsets.tsv.gz and noun_hypernyms.tsv.gz; say where they are by <code>wordnet=</code>.</p>"
        )
    charts, lists = [], []
    for k, numbers in enumerate(models):
        nouns = numbers["nouns"]
        x, y = [noun["depth"] for noun in nouns], [noun["radius"] for noun in nouns]
        charts.append(chart(f"{numbers['model']}, embedding", _dots("depth", x, y, "depth in WordNet"), kind=KINDS[k]))
        lists += [
            f'<div class="card"><h3>{escape(numbers["model"])}: {title}</h3><ul class="words note">'
            + "".join(f"<li>{escape(noun['word'])} ({noun['depth']})</li>" for noun in chosen)
            + "</ul></div>"
            for title, chosen in (("nearest nouns", nouns[:NUM_WORDS]), ("farthest", nouns[: -NUM_WORDS - 1 : -1]))
        ]
    return (
        "<p>Nouns that are a single token, by their first sense: entity has depth 0, animal 6, dog 8. Rare words are "
        "deeper, so the second table shows what is left of the correlation once frequency is known.</p>"
        f'<div class="pairs">{"".join(charts)}</div><h3>Depth</h3>{_correlations(models, "depth")}'
        f"<h3>Depth, frequency known</h3>{_correlations(models, 'depth_given_frequency')}"
        f'<div class="pairs">{"".join(lists)}</div>'
        '<p class="note">In brackets the depth. The first sense is not always what the text means, and a token may be '
        "the beginning of a longer word; both weaken what there is.</p>"
    )


def _gromov(models: Sequence[Numbers]) -> str:
    head = ["", "space", "tokens", "delta", "diameter", "relative delta", "random directions"]
    lines = [
        [
            numbers["model"],
            numbers["space"],
            str(gromov["num_points"]),
            f"{gromov['delta']:.3f}",
            f"{gromov['diameter']:.3f}",
            f"{gromov['relative']:.3f}",
            f"{gromov['random_relative']:.3f}",
        ]
        for numbers in models
        for gromov in [numbers["gromov"]]
    ]
    return (
        "<p>Gromov's delta of the distances between the most frequent tokens: 0 for the distances of a tree. Relative "
        "to the diameter it is between 0 and 1 and can be compared between spaces. The last column has random "
        "directions at the same distances from the origin: what differs from it is due to learned directions.</p>"
        f'<div class="card">{table(head, lines)}</div>'
    )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 2) + 0:+.2f}"  # no -0.00


def _dots(title: str, x: Sequence[float], y: Sequence[float | None], x_name: str, bins: int | None = None) -> str:
    kept = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    if not kept:
        return '<p class="note">No token is common enough.</p>'
    kept_x, kept_y = np.array(kept).T
    return dot_chart(f"{title}: radius of tokens", kept_x, kept_y, x_name, bins)


Curve = Mapping[str, Sequence[float]]
"""``step`` and ``value``, equally long."""

MAX_LAYERS = 6
"""Layers that are drawn; of more, those whose experts moved most."""
MAX_EXPERTS = 8
"""Lines in a chart; of more, those that moved most."""


def curvature_section(curves: Mapping[str, Curve]) -> str:
    """Charts and a table, as HTML, of what :func:`hyptree.evaluate.text.token_radii.curvatures` gives."""
    layers: dict[int, dict[int, Curve]] = {}
    for name, curve in curves.items():
        first, _, second = name.partition(".")
        layers.setdefault(int(first), {})[int(second)] = curve
    layers = {layer: dict(sorted(experts.items())) for layer, experts in sorted(layers.items())}
    most = sorted(layers, key=lambda layer: -max(map(_moved, layers[layer].values())))[:MAX_LAYERS]
    panels = [Panel("All experts", "step", "K", _range(list(curves.values())), number=".3f")]
    for layer in sorted(most):
        experts = sorted(layers[layer].items(), key=lambda pair: -_moved(pair[1]))[:MAX_EXPERTS]
        lines = [Series(f"expert {name}", curve["step"], _change(curve), "line") for name, curve in sorted(experts)]
        title = f"Layer {layer}: change of K since the first line of the log, %"
        panels.append(Panel(title, "step", "change of K, %", lines, number="+.2f"))
    rows = [
        [f"layer {layer}, expert {name}", f"{start:.4f}", f"{end:.4f}", f"{end / start - 1:+.2%}"]
        for layer, experts in layers.items()
        for name, curve in experts.items()
        for start, end in [(curve["value"][0], curve["value"][-1])]
    ]
    rest = len(layers) - len(most)
    note = f" The {len(most)} layers that moved most are drawn, the other {rest} are in the table." if rest else ""
    return (
        "<p>Every routed expert works on a hyperboloid of its own, of curvature -K. K starts between the ends of the "
        "configured range and is learned at a tenth of the learning rate. It moves by percents: the charts of layers "
        f"show how far each has gone from where the log found it first.{note}</p>"
        f'<div class="pairs">{line_charts(panels)}</div>'
        f'<div class="card">{table(["", "K, first logged", "K, last", "change"], rows)}</div>'
    )


def _change(curve: Curve) -> list[float]:
    """Percent since the first value."""
    return [100 * (value / curve["value"][0] - 1) for value in curve["value"]]


def _moved(curve: Curve) -> float:
    return max(map(abs, _change(curve)))


def _range(curves: Sequence[Curve]) -> list[Series]:
    """Smallest, mean and largest K of all experts at each step that all of them have."""
    steps = sorted(set.intersection(*(set(curve["step"]) for curve in curves)))
    at = [dict(zip(curve["step"], curve["value"], strict=True)) for curve in curves]
    values = np.array([[one[step] for one in at] for step in steps])  # (steps, experts)
    named = {"largest K": values.max(1), "mean": values.mean(1), "smallest": values.min(1)}
    return [Series(name, steps, line.tolist(), "line") for name, line in named.items()]
