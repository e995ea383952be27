"""A hierarchy report as lines for people: each number with its baselines under it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyptree.tables import aligned, cells

ORDER_COLUMNS = {
    "order along chains": "{name}",
    "tau_b": "{tau_b:.3f} ± {error:.3f}",
    "tau_a": "{tau_a:.3f}",
    "levels 1-2": "{first_two:.3f}",
    "left out": "{num_undefined}",
}
LEVEL_COLUMNS = {
    "level": "{level}",
    "words": "{words:.1f}",
    "distance from root": "{distance:.3f} ± {distance_sd:.3f}",
    "norm": "{norm:.3f} ± {norm_sd:.3f}",
    "radius = 2 norm": "{radius:.3f}",
}
ANGLE_COLUMNS = {
    "next caption against": "{name}",
    "next": "{next:.3f}",
    "wrong": "{wrong:.3f}",
    "told apart": "{accuracy:.3f}",
}
LEXICAL_COLUMNS = {
    "HyperLex, rho": "{name}",
    "pairs": "{num_pairs}",
    "angle": "{angle:.3f}",
    "reversed": "{reversed:.3f}",
    "cosine": "{cosine:.3f}",
    "distance": "{distance:.3f}",
    "characters": "{characters:.3f}",
}
RETRIEVAL_COLUMNS = {
    "hierarchical retrieval": "{name}",
    "precision": "{precision:.4f}",
    "recall": "{recall:.4f}",
    "in order": "{ordered_recall:.4f}",
    "length": "{length:.2f}",
}


def report_head(report: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    curved = f" (c = {report['curvature']:g})" if report["curvature"] is not None else ""
    return (
        f"{report['encoder']}: width {report['width']}, geometry {report['geometry']}{curved}, "
        f"norm of the root {report['root_norm']:.3f}"
    )


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """What ``hierarchy_report`` gave, as aligned lines."""
    lines = [report_head(report)]
    for name, suite in report["suites"].items():
        lines += ["", name]
        for part in report_tables(suite):
            lines += [f"  {line}" for line in aligned(part, right=False)] + [""]
        lines.pop()
    return lines


def report_tables(suite: Mapping[str, Any]) -> Iterator[list[list[str]]]:
    """The tables of one suite: the headings, then a line for each row."""
    if "levels" in suite:
        yield _cells(suite["levels"], LEVEL_COLUMNS)
        orders = {"distance from root (tau_d)": suite["tau_d"], "norm": suite["by_norm"]}
        orders |= {f"baseline: {name}": order for name, order in suite["baselines"].items()}
        yield _cells([{"name": name, **row} for name, row in orders.items()], ORDER_COLUMNS)
    if "angles" in suite:
        rows = []
        for key, wrong in (("negative", "a contradiction"), ("other", "one of another chain")):
            if numbers := suite["angles"].get(key):
                for way, name in (("angle", f"{wrong}, by angle"), ("cosine", f"{wrong}, by cosine (baseline)")):
                    accuracy = numbers["accuracy" if way == "angle" else "cosine_accuracy"]
                    next_one, wrong_one = numbers[f"{way}_next"], numbers[f"{way}_wrong"]
                    rows.append({"name": name, "next": next_one, "wrong": wrong_one, "accuracy": accuracy})
        yield _cells(rows, ANGLE_COLUMNS)
    if "all" in suite or "nouns" in suite:
        yield _cells([{"name": name, **row} for name, row in suite.items()], LEXICAL_COLUMNS)
    if "retrieval" in suite:
        yield _cells([{"name": name, **row} for name, row in suite["retrieval"].items()], RETRIEVAL_COLUMNS)
    for key, heading in (("retention", "plain retrieval"), ("zero_shot", "zero-shot")):
        if key in suite:
            yield _cells([suite[key]], {heading: "", **{name: f"{{{name}:.4f}}" for name in suite[key]}})
    for cut, ways in suite.get("coarse", {}).items():
        names = next(iter(ways.values()))
        columns = {f"coarse classes: {cut}": "{name}", **{k: f"{{{k}:.4f}}" for k in names}}
        yield _cells([{"name": way, **numbers} for way, numbers in ways.items()], columns)


def _cells(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[list[str]]:
    """A dash for what has no value, which is None in a report and NaN to a format."""
    return cells([{k: math.nan if v is None else v for k, v in row.items()} for row in rows], columns)
