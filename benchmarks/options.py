"""What a benchmark can be asked for. Imports no torch, so that ``--help`` answers at once."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from hyptree.errors import UserError


@dataclass
class BenchOptions:
    """What every benchmark can be asked for. A field with a ``Literal`` type takes its values and no others."""

    QUICK: ClassVar[Mapping[str, Any]] = {}
    """Fields that ``quick`` sets, whatever else was asked for."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    repeats: int = 5
    """Rounds; in each round every contender is timed once."""
    threads: int = 0
    """CPU threads; 0 for all cores."""
    json: bool = False
    """Print JSON lines instead of tables: a header, then one line per case."""
    out: Path | None = None
    """File that the JSON lines are appended to, beside what is printed."""
    quick: bool = False
    """The same at tiny sizes, to see that everything works; the times mean little, and no target is judged."""

    def __post_init__(self) -> None:
        if self.quick:
            for name, value in self.QUICK.items():
                setattr(self, name, value)
        for name, kind in get_type_hints(type(self)).items():
            value, is_tuple = getattr(self, name), get_origin(kind) is tuple
            kind = get_args(kind)[0] if is_tuple else kind
            choices = get_args(kind) if get_origin(kind) is Literal else None
            for one in value if is_tuple else (value,):
                if choices is not None and one not in choices:
                    raise UserError(f"{name} must be one of {', '.join(choices)}, got {one!r}")
        if self.repeats < 2:
            raise UserError(f"repeats must be 2 or more, got {self.repeats}; a spread needs two rounds")
        if self.threads < 0:
            raise UserError(f"threads must be 0 (all cores) or more, got {self.threads}")

    def settings(self) -> dict[str, Any]:
        """The options as they go into the header."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "out"}

    def flags(self, without: Collection[str] = ()) -> list[str]:
        """The flags that ask for this again, but for some fields: what is measured first, then how."""
        words: list[str] = []
        shared = {field.name for kind in (ClockOptions, ModeOptions) for field in fields(kind)}
        for field in sorted(fields(self), key=lambda field: field.name in shared):
            value, flag = getattr(self, field.name), field.name.replace("_", "-")
            if value == field.default or field.name in without or (self.quick and field.name in self.QUICK):
                continue
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        return words


@dataclass
class ClockOptions(BenchOptions):
    """Also by which clock."""

    clock: Literal["wall", "cpu"] = "wall"
    """`cpu` counts CPU time instead, for a machine that others use as well; best with one thread. Not for cuda."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clock == "cpu" and self.device == "cuda":
            raise UserError("clock cpu does not see what the GPU does; use --clock wall with --device cuda")


Mode = Literal["eager", "compiled", "graphs"]


@dataclass
class ModeOptions(BenchOptions):
    """Also in which modes; a mode is always that of both sides."""

    modes: tuple[Mode, ...] = ()
    """How models run: as they are, compiled, or compiled and replayed as CUDA graphs; all that the device has by
    default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == "cpu" and "graphs" in self.modes:
            raise UserError("mode graphs needs CUDA; use --modes eager compiled with --device cpu")
        self.modes = self.modes or (get_args(Mode) if self.device == "cuda" else get_args(Mode)[:2])


@dataclass
class GeometryOptions(ClockOptions):
    ops: tuple[str, ...] = ()
    """Operations to run, all of them by default; `lorentz` or `pairwise` chooses those with the word in their name."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Dtype of points and weights. Errors are always measured against float64."""
    repeats: int = 20
    compile: bool = True
    """Also run ours and the Euclidean twin through torch.compile."""
    seed: int | None = None
    """Seed of the random inputs; a fresh one by default, which the header shows."""

    def command(self) -> str:
        """The command line that asks for this again."""
        return shlex.join(["hyptree", "bench", "geometry", *self.flags()])
