"""What a benchmark prints: the machine it ran on, a table that can be pasted into a page, JSON lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.geometry.cases import COMPILED, GEOOPT, HYPLL, KERNELS, OURS, TWIN, Case
from benchmarks.harness import Ratio, Result, ratio
from hyptree.machine import machine_lines

_CONTENDERS = (OURS, COMPILED, KERNELS, GEOOPT, HYPLL)
_WIDTHS = {
    "operation": 24,
    "shape": 19,
    "pass": 8,
    "floor": 7,
    "Euclidean twin": 38,
    "ours": 13,
    "compiled": 13,
    "kernels": 13,
    "geoopt": 13,
    "HypLL": 13,
    "error: ours": 13,
    "compiled ": 8,
    "kernels ": 8,
    "geoopt ": 8,
    "HypLL ": 8,
    "target": 6,
    "to the twin as called": 21,
    "to the fastest twin": 19,
}


def header_lines(head: dict[str, Any]) -> list[str]:
    """The header for people."""
    lines = [
        *machine_lines(head),
        f"run       {head['command']}",
        f"          {head['dtype']}, c = {head['c']}, seed {head['seed']}, {head['clock']} clock, "
        f"{head['repeats']} interleaved rounds after {head['warmup']} warm-up calls",
        "times     of the twin and the floor in microseconds; all others as multiples of the fastest twin: ratio of",
        "          medians and, in brackets, half the distance between the quartiles of the ratios within a round",
        "target    most that ours, by kernels (on a GPU, where there are some) or compiled, may cost as a multiple of",
        "          the twin as people call it; last column: beside the fastest of its eager, compiled and fused forms",
        "errors    largest error against float64 by the textbook formula, of the gradient in the backward pass (which",
        "          includes the forward); beyond the tolerance no time is given. -: no such operation",
    ]
    return lines


def table_head() -> list[str]:
    """The first two rows of the table."""
    return [_row(list(_WIDTHS)), "|" + "|".join("-" * (width + 2) for width in _WIDTHS.values()) + "|"]


def table_row(case: Case, results: Sequence[Result], floor: float) -> str:
    """One case as a row of the table."""
    by_name = {result.name: result for result in results}
    best = best_twin(results)
    twins = [r for r in results if r.name.startswith(TWIN)]
    words = [f"{r.name.removeprefix(TWIN)} {_microseconds(r.median) if r.seconds else r.status}" for r in twins]
    twin_cell = case.twin + ",".join(words)
    cells = [case.op, case.shape, case.kind, _microseconds(floor), twin_cell]
    cells += [_ratio_cell(by_name.get(name), best) for name in _CONTENDERS]
    cells += [_error_cell(by_name.get(name)) for name in _CONTENDERS]
    target = "" if case.target is None else f"{case.target:g}"
    judged = [_target_cell(target_ratio(results, twin), case.target) for twin in (called_twin(results), best)]
    return _row([*cells, target, *judged])


def best_twin(results: Sequence[Result]) -> Result | None:
    """The fastest of the Euclidean twins."""
    twins = [r for r in results if r.name.startswith(TWIN) and r.seconds]
    return min(twins, key=lambda r: r.median) if twins else None


def called_twin(results: Sequence[Result]) -> Result | None:
    """The Euclidean twin as people call it: eager, with its default options."""
    return next((result for result in results if result.name == TWIN and result.seconds), None)


def target_ratio(results: Sequence[Result], twin: Result | None) -> Ratio | None:
    """Ours, by kernels if they take part and else compiled, against a twin."""
    by_name = {result.name: result for result in results}
    ours = by_name.get(KERNELS) or by_name.get(COMPILED)
    return ratio(ours, twin) if ours is not None and twin is not None else None


def _met(reached: Ratio | None, target: float | None) -> bool | None:
    return reached.value <= target if reached and target is not None else None


def json_case(case: Case, results: Sequence[Result], floor: float, common: dict[str, Any]) -> dict[str, Any]:
    """One case as a JSON line; times in seconds."""
    best = best_twin(results)
    to_called, to_fastest = (target_ratio(results, twin) for twin in (called_twin(results), best))
    entries = []
    for result in results:
        times = ratio(result, best) if best is not None else None
        entries.append(
            {
                "name": result.name,
                "status": result.status,
                "note": result.note,
                "error": _finite(result.error),
                "median": _finite(result.median),
                "fastest": min(result.seconds, default=None),
                "rounds": len(result.seconds),
                "ratio": times.value if times else None,
                "ratio_quartiles": [times.low, times.high] if times else None,
            }
        )
    return {
        "kind": "case",
        "op": case.op,
        "shape": case.shape,
        "pass": case.kind,
        **common,
        "twin": case.twin,
        "best_twin": best.name if best is not None else None,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "floor": floor,
        "target": case.target,
        "to_twin_as_called": to_called.value if to_called else None,
        "to_fastest_twin": to_fastest.value if to_fastest else None,
        "target_met": _met(to_called, case.target),
        "target_met_beside_fastest": _met(to_fastest, case.target),
        "contenders": entries,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS.values(), strict=True)) + " |"


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _ratio_cell(result: Result | None, best: Result | None) -> str:
    if result is None or (result.status == "absent" and "installed" not in result.note):
        return "-"
    if result.status == "absent":
        return "not there"
    if result.status != "ok":
        return "too large" if result.status == "skipped" else result.status
    times = ratio(result, best) if best is not None else None
    if times is None:
        return "?"
    spread = (times.high - times.low) / 2
    return f"{times.value:.0f} ({spread:.0f})" if times.value >= 100 else f"{times.value:.2f} ({spread:.2f})"


def _error_cell(result: Result | None) -> str:
    return "" if result is None or result.error is None else f"{result.error:.0e}"


def _target_cell(reached: Ratio | None, target: float | None) -> str:
    if target is None:
        return ""
    return "?" if reached is None else f"{reached.value:.2f} {'met' if _met(reached, target) else 'MISSED'}"
