"""Reports of ``hyptree vlm`` as one table for a page: mean and spread over folders, one folder per seed.

``python -m results.vlm_reports --row plain runs/a0 runs/a1 runs/a2 --row tuned runs/b0 runs/b1 runs/b2`` reads what
``eval-hierarchy`` wrote (report.json).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyptree.cli import call
from hyptree.errors import UserError, as_user_error
from hyptree.machine import describe
from hyptree.tables import markdown_head, markdown_row, spread, write_between_marks

HIERARCHY = "report.json"
ABSENT = "–"

CHAINS = {
    "tau_d": ("tau_d", "tau_b"),
    "levels 1-2": ("tau_d", "first_two"),
    "contradiction, by angle": ("angles", "negative", "accuracy"),
    "by cosine": ("angles", "negative", "cosine_accuracy"),
    "other chain, by angle": ("angles", "other", "accuracy"),
    "by cosine ": ("angles", "other", "cosine_accuracy"),  # headings of a table must differ: a blank more
}
PICTURES = {
    "P": ("retrieval", "RADIUS", "precision"),
    "R": ("retrieval", "RADIUS", "recall"),
    "captions": ("retrieval", "RADIUS", "length"),
    "text R@1": ("retention", "text R@1"),
    "image R@1": ("retention", "image R@1"),
    "zero-shot": ("zero_shot", "top-1"),
}
WORDS = {
    f"{kind}, {way}": (kind, key)
    for kind in ("all", "nouns", "verbs")
    for way, key in (("angle", "angle"), ("reversed", "reversed"), ("cosine", "cosine"), ("distance", "distance"))
}
COLUMNS: dict[str, Mapping[str, tuple[str, ...]]] = {
    "world-text": CHAINS,
    "hierarcaps-text": CHAINS,
    "world-images": PICTURES,
    "hierarcaps-images": PICTURES,
    "hyperlex": WORDS,
}
"""Suites of a hierarchy report that a table shows: headings, and where their numbers are in the report."""


def vlm_table(rows: Mapping[str, Sequence[Path]], about: Sequence[str] = ()) -> str:
    """Markdown of the reports in folders.

    Args:
        rows: name of a row to folders, one for each seed.
        about: lines below the table: machine, versions.

    Raises:
        UserError: a folder without a report.
    """
    missing = [folder for group in rows.values() for folder in group if not (folder / HIERARCHY).is_file()]
    if missing:
        raise UserError(f"{missing[0]} holds no {HIERARCHY} of eval-hierarchy")
    reports = {name: [_read(folder / HIERARCHY) for folder in group] for name, group in rows.items()}
    lines = hierarchy_lines(reports)
    return "\n".join([*lines, *(["", *(f"    {line}" for line in about)] if about else [])]) + "\n"


def hierarchy_lines(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A table for each suite; under those of chains, what the length of the captions gives."""
    lines: list[str] = []
    for suite, columns in COLUMNS.items():
        if not any(suite in report["suites"] for group in reports.values() for report in group):
            continue
        lines += [*([""] if lines else []), *markdown_head([suite, *columns])]
        baselines: Mapping[str, Any] = {}
        for name, group in reports.items():
            cells = []
            for path in columns.values():
                values = [value for report in group if (value := _find(report, suite, path)) is not None]
                cells.append(spread(values, 3) if values else ABSENT)
            lines.append(markdown_row([name, *cells]))
            baselines = baselines or group[0]["suites"].get(suite, {}).get("baselines", {})
        for name, order in baselines.items():
            cells = [f"{order['tau_b']:.3f}", f"{order['first_two']:.3f}", *[ABSENT] * (len(columns) - 2)]
            lines.append(markdown_row([f"{name} alone", *cells]))
    if not lines:
        raise UserError(f"the reports hold none of {', '.join(COLUMNS)}")
    return lines


def _find(report: Mapping[str, Any], suite: str, path: Sequence[str]) -> float | None:
    """A number of a report; None where it is not there. ``RADIUS`` stands for the geometry of the report."""
    part: Any = report["suites"].get(suite)
    for key in path:
        if not isinstance(part, Mapping):
            return None
        if key == "RADIUS":
            key = report["geometry"] if report["geometry"] in part else "chord"
        part = part.get(key)
    return part


def _read(path: Path) -> dict[str, Any]:
    with as_user_error(str(path)):
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


@dataclass
class TableConfig:
    """The flags."""

    row: tuple[tuple[str, ...], ...]
    """A name and one folder for each seed; once for each row."""
    results: Path | None = None
    """Page to write the table into."""
    name: str = "vlm"
    """Of the marks in that page."""


def table(config: TableConfig) -> None:
    """Reports of hyptree vlm as one table, over seeds."""
    rows = {name: [Path(folder) for folder in folders] for name, *folders in config.row}
    if len(rows) < len(config.row) or not rows or not all(rows.values()):
        raise UserError("--row takes a name of its own and at least one folder, e.g. --row plain runs/a0 runs/a1")
    text = vlm_table(rows, describe())
    print(text, end="")
    if config.results is not None:
        write_between_marks(config.results, config.name, text)


if __name__ == "__main__":
    raise SystemExit(call(table, "python -m results.vlm_reports"))
