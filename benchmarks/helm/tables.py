"""The tables of ``hyptree bench helm``: cells, rows, verdicts, and the kernels of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Result
from benchmarks.helm import cases
from benchmarks.helm.options import HelmOptions
from benchmarks.helm.work import Work
from benchmarks.launches import Launches
from benchmarks.session import Emit
from benchmarks.turns import turn
from hyptree.tables import markdown_head, markdown_row


def profiles(options: HelmOptions, title: str, steps: dict[str, Any], emit: Emit) -> None:
    """The longest kernels of each contender, then all of them by kind, side by side."""
    groups: dict[str, dict[str, float]] = {}
    for who, step in steps.items():
        with turn():  # alone, as times are, and beside nobody's
            kernels = cases.profile(step, options.device)
        for kernel in kernels:
            groups.setdefault(kernel.group, dict.fromkeys(steps, 0.0))[who] += kernel.seconds
        lines = [markdown_row([f"{k.seconds * 1e3:.3f}", f"{k.calls:g}", k.name[:100]]) for k in kernels[: options.top]]
        entry = {"kind": "profile", "title": title, "who": who, "kernels": [vars(kernel) for kernel in kernels]}
        emit(entry, ["", f"kernels of {who}: {title}", *markdown_head(["ms", "calls", "name"]), *lines])
    sums = {who: sum(by[who] for by in groups.values()) for who in steps}
    order = sorted(groups, key=lambda group: -max(groups[group].values()))
    lines = [markdown_row([group, *(f"{groups[group][who] * 1e3:.3f}" for who in steps)]) for group in order]
    lines.append(markdown_row(["all", *(f"{sums[who] * 1e3:.3f}" for who in steps)]))
    names = markdown_head([f"ms in kernels: {title}", *steps])
    emit({"kind": "profile_groups", "title": title, "groups": groups}, ["", *names, *lines, ""])


def expectation(work: Sequence[Work], emit: Emit) -> None:
    """The least time of each part of a step, and what sets it."""
    items = sorted(work, key=lambda item: -item.seconds)
    lines = [
        markdown_row([f"{i.seconds * 1e3:.3f}", f"{i.flops / 1e9:.0f}", f"{i.bytes / 2**20:.0f}", i.name])
        for i in items
    ]
    emit({"kind": "expectation"}, ["", *markdown_head(["ms at least", "GFLOP", "MiB", "part"]), *lines])


class Later:
    """Keeps lines until the table above them is complete."""

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, Any], Sequence[str]]] = []

    def __call__(self, line: dict[str, Any], text: Sequence[str]) -> None:
        self.lines.append((line, text))

    def emit(self, emit: Emit) -> None:
        """Write them all."""
        for line, text in self.lines:
            emit(line, text)


def head(emit: Emit, name: str, title: str, columns: str) -> None:
    """Begin a table."""
    emit({"kind": "table", "name": name}, ["", title, *markdown_head(columns.split("|"))])


def number(value: float | None, digits: int = 2) -> str:
    """A cell."""
    return "-" if value is None else f"{value:.{digits}f}"


def asked_cells(asked: dict[str, Launches]) -> list[str]:
    """Kernels and host time of ours and of the twin."""
    columns = zip(*(counted.cells()[:2] for counted in asked.values()), strict=True)
    return [", ".join(filter(None, cells)) for cells in columns] or ["", ""]


def time_cell(result: Result) -> str:
    """Milliseconds, or why there are none."""
    return f"{result.median * 1e3:.3f}" if result.seconds else f"{result.status}: {result.note}"


def entries(results: dict[str, Result]) -> dict[str, Any]:
    """Results for a JSON line."""
    return {
        who: {"status": r.status, "note": r.note, "error": r.error, "seconds": r.seconds} for who, r in results.items()
    }


def ratio(a: Result, b: Result) -> float | None:
    """How many times as long ``a`` takes as ``b``."""
    interval = harness.ratio(a, b)
    return interval.value if interval else None


def quotient(a: float | None, b: float | None) -> float | None:
    """``a / b`` where both are known."""
    return a / b if a and b else None


def within(value: float | None, target: float | None) -> bool:
    """Whether a ratio is known and, as it is printed, not above its target."""
    return value is not None and target is not None and round(value, 2) <= target


def verdict(value: float | None, target: float) -> str:
    """Whether a ratio is within its target, for people."""
    if value is None:
        return f"? <= {target:g}"
    return f"{value:.2f} <= {target:g} {'met' if within(value, target) else 'MISSED'}"
