"""Rows as text: aligned lines for people, CSV for programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any


def show(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Rows as aligned lines for people.

    Args:
        columns: heading to a format such as ``"{exponent:.2f} ± {error:.2f}"``, filled from each row.
    """
    cells = [list(columns)] + [[_fill(form, row) for form in columns.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _fill(form: str, row: Mapping[str, Any]) -> str:
    """A format filled; a dash where its number is missing."""
    first = form.partition("{")[2].partition(":")[0].partition("}")[0]
    value = row.get(first)
    return "-" if isinstance(value, float) and math.isnan(value) else form.format(**row)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; numbers in full, so that they come back as they were."""
    stream = io.StringIO()
    if rows:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return stream.getvalue()
