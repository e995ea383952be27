"""``hyptree bench geometry``: every operation of the geometry beside geoopt, HypLL and its Euclidean twin."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import TextIO

import torch

from benchmarks import harness
from benchmarks.geometry import tables as report
from benchmarks.geometry.cases import COMPILED, KERNELS, OPERATIONS, OURS, C, Maker
from benchmarks.options import GeometryOptions
from benchmarks.session import Emit, session
from hyptree import machine
from hyptree.errors import UserError, suggest

TOLERANCE = {"float32": 2e-2, "float64": 1e-6, "bfloat16": 0.2}
"""An error beyond this is a wrong answer, not a rounding error; how large rounding errors are, the table shows."""


def choose(words: Sequence[str]) -> list[str]:
    """Operations in the order of the table: all of them without words, else those that are named.

    A word that is a name means that one, any other word those that have it in their name.

    Raises:
        UserError: a word that fits none.
    """
    parts = [word for word in words if word not in OPERATIONS]
    for word in parts:
        if not any(word in name for name in OPERATIONS):
            hint = suggest(word, OPERATIONS) or f"expected some of {', '.join(OPERATIONS)}"
            raise UserError(f"unknown operation {word!r}; {hint}")
    return [name for name in OPERATIONS if not words or name in words or any(word in name for word in parts)]


def run(options: GeometryOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if one of ours is wrong or fails, else 0.

    Args:
        stream: where the table or the JSON lines go, standard output by default.
    """
    stream = stream or sys.stdout
    names = choose(options.ops)
    with session(options, stream) as emit:
        return _run(options, names, emit, stream)


def _run(options: GeometryOptions, names: Sequence[str], emit: Emit, stream: TextIO) -> int:
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    common = {"device": options.device, "dtype": options.dtype, "clock": options.clock}
    head = machine.header(options.device) | common
    head |= {"c": C, "seed": seed, "repeats": options.repeats, "warmup": harness.WARMUP, "command": options.command()}
    tolerance = TOLERANCE[options.dtype]
    sample = {"wall": harness.wall_sample, "cpu": harness.cpu_sample}[options.clock]
    if options.device == "cuda":
        sample = harness.cuda_sample

    emit({"kind": "header", **head}, [*report.header_lines(head), "", *report.table_head()])
    make = Maker(options.device, getattr(torch, options.dtype), seed, options.quick, options.compile)
    floor = harness.Floor(options.device, make.dtype, sample)
    notes: dict[str, None] = {}
    code = 0
    for name in names:
        for case in OPERATIONS[name](make):
            torch.compiler.reset()  # no limit on recompilations is reached, no memory of earlier cases kept
            results = harness.compare(case.contenders, sample, options.repeats, tolerance)
            least = floor.seconds(case.num_bytes, case.flops)
            emit(
                report.json_case(case, results, least, common),
                [report.table_row(case, results, least)],
            )
            for result in results:
                if result.status in ("wrong", "failed", "skipped"):
                    notes[f"{case.op} {case.shape} {case.kind}, {result.name}: {result.status}, {result.note}"] = None
                if result.status in ("wrong", "failed") and result.name in (OURS, COMPILED, KERNELS):
                    code = 1
    if notes and not options.json:
        print(*["", *notes], sep="\n", file=stream, flush=True)
    return code
