"""What ``hyptree bench kernels`` prints: a row per operation, shape and pass, then which kernels are a gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Result
from benchmarks.kernels.cases import Job, Work
from benchmarks.kernels.check import COMPILED, EAGER, KERNEL, RIVAL, Error, Pass
from benchmarks.kernels.resources import Resources
from hyptree.machine import machine_lines

NO_GAIN = "no gain"

_WIDTHS = {
    "kernel": 17,
    "form": 24,
    "shape": 19,
    "dtype": 8,
    "pass": 8,
    "floor": 7,
    "ours": 7,
    "x floor": 7,
    "eager": 7,
    "compiled": 8,
    "rival": 24,
    "error": 7,
    "worst": 7,
    "verdict": 40,
}
_RESOURCES = {
    "kernel": 17, "form": 24, "shape": 19, "dtype": 8, "function": 30, "programs": 8, "warps": 5, "registers": 9,
    "spilt": 6, "shared": 7, "resident": 8, "verdict": 20,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """What was measured of one pass of a job."""

    job: Job
    kind: Pass
    results: Mapping[str, Result]
    error: Error | None
    is_wrong: bool
    floor: float
    byte_floor: float
    num_bytes: int
    flops: int
    work: Work
    is_timed: bool

    def seconds(self, name: str) -> float | None:
        result = self.results.get(name)
        is_there = result is not None and result.seconds and (self.is_timed or name != KERNEL)
        return result.median if result is not None and is_there else None

    @property
    def plain(self) -> tuple[str, float] | None:
        """The definition that the kernel is measured by: compiled, or as it is where nobody compiled it."""
        for name in (COMPILED, EAGER):
            if (seconds := self.seconds(name)) is not None:
                return name, seconds
        return None

    @property
    def has_failed(self) -> bool:
        kernel = self.results.get(KERNEL)
        return kernel is None or kernel.status == "failed"

    def verdict(self) -> str:
        """What the line says of the kernel."""
        kernel = self.results.get(KERNEL)
        if kernel is None or kernel.status != "ok":
            return "not run" if kernel is None else kernel.status
        words = []
        if self.is_wrong and self.error is not None:
            words.append(f"WRONG in {self.error.of}")
        ours, plain = self.seconds(KERNEL), self.plain
        if not self.is_timed:
            words.append("right" if not words else "")
        elif ours is not None and plain is not None:
            beside = "" if plain[0] == COMPILED else " (eager)"
            words.append(f"{plain[1] / ours:.2f}x{beside}" if ours < plain[1] else NO_GAIN + beside)
            words += self._promises(ours)
        return ", ".join(word for word in words if word)

    def _promises(self, ours: float) -> list[str]:
        if self.kind != "forward":
            return []
        words = []
        rival = self.seconds(RIVAL)
        if self.work.most_of_rival is not None and rival is not None:
            met = ours <= self.work.most_of_rival * rival
            words.append(f"{ours / rival:.2f} of rival {'met' if met else 'MISSED'}")
        if self.work.most_of_bytes is not None:
            met = ours <= self.work.most_of_bytes * self.byte_floor
            words.append(f"{ours / self.byte_floor:.1f} of its bytes' time, {self.work.most_of_bytes:g} wanted: "
                         f"{'met' if met else 'MISSED'}")  # fmt: skip
        return words

    def row(self) -> str:
        rival = ""
        if self.work.rival is not None:
            rival = f"{self.work.rival[0]} {_time(self, RIVAL)}"
        ours = self.seconds(KERNEL)
        error = self.error
        cells = [
            *_names(self.job), self.kind, _microseconds(self.floor), _time(self, KERNEL),
            "" if ours is None else f"{ours / self.floor:.1f}", _time(self, EAGER),
            _time(self, COMPILED), rival, "" if error is None else f"{error.norm:.0e}",
            "" if error is None else f"{error.worst:.0e}", self.verdict(),
        ]  # fmt: skip
        return _row(cells, _WIDTHS)

    def as_json(self) -> dict[str, Any]:
        entries = [
            {"name": r.name, "status": r.status, "note": r.note, "median": _finite(r.median), "error": _finite(r.error),
             "fastest": min(r.seconds, default=None), "rounds": len(r.seconds)}
            for r in self.results.values()
        ]  # fmt: skip
        ours = self.seconds(KERNEL)
        return {
            "kind": "case", "op": self.job.op, "form": self.job.form, "shape": self.job.shape,
            "dtype": str(self.job.dtype).removeprefix("torch."), "pass": self.kind, "bytes": self.num_bytes,
            "flops": self.flops, "floor": self.floor, "byte_floor": self.byte_floor,
            "of_floor": None if ours is None else ours / self.floor,
            "rival": None if self.work.rival is None else self.work.rival[0], "contenders": entries,
            "error": None if self.error is None else _finite(self.error.norm),
            "worst": None if self.error is None else _finite(self.error.worst), "wrong": self.is_wrong,
            "verdict": self.verdict(),
        }  # fmt: skip


def header_lines(head: dict[str, Any]) -> list[str]:
    """The header for people."""
    return [
        *machine_lines(head),
        f"run       {head['command']}",
        f"          c = {head['c']}, seed {head['seed']}, {head['repeats']} interleaved rounds after {head['warmup']} "
        f"warm-up calls, {head['clock']}",
        "times     in microseconds, medians; backward alone, after a forward pass that kept what it needs",
        "floor     bytes over the bandwidth of a copy of that size, or products over the measured peak, the larger",
        "error     against reference.py in float64: in norm; in the worst place, beside it and the mean size",
        f"verdict   how many times as fast as reference.py compiled (or as it is); {NO_GAIN!r}: not faster",
    ]


def table_head() -> list[str]:
    return _head(_WIDTHS)


def resources_head() -> list[str]:
    return _head(_RESOURCES)


def resources_row(job: Job, use: Resources) -> str:
    verdict = ""
    if use.resident == 0:
        verdict = "CANNOT START"
    elif use.spilled:
        verdict = "spills"
    cells = [
        *_names(job), use.kernel, str(use.programs), str(use.warps), str(use.registers), str(use.spilled),
        str(use.shared), str(use.resident), verdict,
    ]  # fmt: skip
    return _row(cells, _RESOURCES)


@dataclass(frozen=True)
class Summary:
    """All lines of one operation together, where both the kernel and the compiled definition were timed."""

    op: str
    ours: float
    plain: float
    faster: int
    lines: int
    wrong: int

    def text(self) -> str:
        if not self.lines:
            return f"{self.op:17} not compared"
        verdict = f"{self.plain / self.ours:.2f}x" if self.faster and self.ours < self.plain else NO_GAIN
        wrong = f", {self.wrong} WRONG" if self.wrong else ""
        return (
            f"{self.op:17} {verdict}: {self.ours * 1e6:.0f} us beside {self.plain * 1e6:.0f}, faster in {self.faster} "
            f"of {self.lines} lines{wrong}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "summary", "op": self.op, "kernel": self.ours, "plain": self.plain, "faster": self.faster,
            "lines": self.lines, "wrong": self.wrong,
            "no_gain": bool(self.lines) and not (self.faster and self.ours < self.plain),
        }  # fmt: skip


def summaries(lines: Iterable[Line]) -> list[Summary]:
    """One summary per operation, in the order of the table."""
    by_op: dict[str, list[Line]] = {}
    for line in lines:
        by_op.setdefault(line.job.op, []).append(line)
    rows = []
    for op, members in by_op.items():
        pairs = [
            (line.seconds(KERNEL) or 0.0, line.plain[1])
            for line in members
            if line.seconds(KERNEL) is not None and line.plain is not None
        ]
        ours, plain = (sum(times) for times in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        faster, wrong = sum(a < b for a, b in pairs), sum(line.is_wrong for line in members)
        rows.append(Summary(op, ours, plain, faster, len(pairs), wrong))
    return rows


def _names(job: Job) -> list[str]:
    return [job.op, job.form, job.shape, {"bfloat16": "bf16", "float32": "fp32"}[str(job.dtype).removeprefix("torch.")]]


def _time(line: Line, name: str) -> str:
    if (seconds := line.seconds(name)) is not None:
        return _microseconds(seconds)
    result = line.results.get(name)
    if result is not None and result.status == "ok":
        return "checked"
    return "-" if result is None else result.status


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _head(widths: Mapping[str, int]) -> list[str]:
    return [_row(list(widths), widths), "|" + "|".join("-" * (width + 2) for width in widths.values()) + "|"]


def _row(cells: Sequence[str], widths: Mapping[str, int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths.values(), strict=True)) + " |"
