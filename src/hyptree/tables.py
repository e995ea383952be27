"""Rows as text: aligned lines for people, Markdown for pages, CSV for programs."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyptree.errors import UserError
from hyptree.files import write_text


def cells(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[list[str]]:
    """A line of headings, then one of texts for each row.

    Args:
        columns: heading to a format such as ``"{exponent:.2f} ± {error:.2f}"``, filled from each row.
    """
    return [list(columns)] + [[_fill(form, row) for form in columns.values()] for row in rows]


def show(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """The :func:`cells` as aligned lines for people."""
    return aligned(cells(rows, columns), right=False)


def aligned(lines: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Rows of cells as lines in columns: the first on the left of its column, the others on the right if wanted."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust, *[str.rjust if right else str.ljust] * (len(widths) - 1)]
    return ["  ".join(map(lambda side, *cell: side(*cell), sides, line, widths)).rstrip() for line in lines]


def numbers(named: Mapping[str, Any]) -> list[str]:
    """A line for each, its name and value in columns."""
    return aligned([[k, f"{v:.4f}" if isinstance(v, float) else str(v)] for k, v in named.items()], right=False)


def _fill(form: str, row: Mapping[str, Any]) -> str:
    """A format filled; a dash where its number is missing."""
    first = form.partition("{")[2].partition(":")[0].partition("}")[0]
    value = row.get(first)
    return "-" if isinstance(value, float) and math.isnan(value) else form.format(**row)


def markdown_head(columns: Sequence[str]) -> list[str]:
    """The two lines that begin a table."""
    return [markdown_row(columns), markdown_row(["---"] * len(columns))]


def markdown_row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean ± standard deviation; the mean alone of one value. ``sign`` "+" writes that of a positive mean too."""
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def write_between_marks(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- /name -->`` in a page, which gets both if it has none."""
    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    if (start in page) != (stop in page):
        raise UserError(f"{path} has only one of the marks {start} and {stop}; add the other or remove it")
    if start in page:
        before, rest = page.split(start, 1)
        page = before + f"{start}\n{text}{stop}" + rest.split(stop, 1)[1]
    else:
        page = page.rstrip("\n") + f"\n\n{start}\n{text}{stop}\n"
    write_text(path, page)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; numbers in full, so that they come back as they were."""
    stream = io.StringIO()
    if rows:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return stream.getvalue()


def without_nan(part: Any) -> Any:
    """The same with None for NaN, which JSON does not know."""
    if isinstance(part, dict):
        return {name: without_nan(value) for name, value in part.items()}
    if isinstance(part, list):
        return [without_nan(value) for value in part]
    return None if isinstance(part, float) and math.isnan(part) else part
