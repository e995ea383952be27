"""What ``ramify bench kernels`` can be asked for; imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from ramify.errors import UserError, one_line_parser, suggest

DEVICES = ("cpu", "cuda")
OPS = (
    "cluster_patch", "cluster_window", "pairwise_lorentz", "pairwise_poincare", "lorentz_mlr", "residual_norm", "heads",
    "centroid", "columns", "swiglu", "send_rows", "merge_points", "cross_entropy", "cosine", "merge", "agglomerate",
)  # fmt: skip


@dataclass
class KernelOptions:
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run. A CPU has the tiny sizes alone, and runs kernels by Triton's interpreter (TRITON_INTERPRET=1)."""
    ops: tuple[str, ...] = ()
    """Rooms of ramify.ops to run, all of them by default; `pairwise` chooses those with the word in their name."""
    repeats: int = 10
    """Rounds; in each round every contender is timed once."""
    quick: bool = False
    """Tiny sizes, to see that everything works; the times mean little."""
    compiled: bool = True
    """Also time the definition through torch.compile, which costs 5 to 10 seconds for each line."""
    resources: bool = False
    """Instead compile the kernels for a Hopper GPU, which need not be there, and print registers and shared memory."""
    time_limit: float = 0.0
    """Seconds after which no further line is begun; 0 for none. What is missing is named."""
    threads: int = 0
    """CPU threads; 0 for all cores."""
    json: bool = False
    """Print JSON lines instead of a table."""
    out: Path | None = None
    """File that the JSON lines are appended to, beside what is printed."""
    seed: int | None = None
    """Seed of the random inputs; a fresh one by default, which the header shows."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UserError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.repeats < 2:
            raise UserError(f"repeats must be 2 or more, got {self.repeats}; a spread needs two rounds")
        if self.threads < 0:
            raise UserError(f"threads must be 0 (all cores) or more, got {self.threads}")
        if not self.time_limit >= 0:
            raise UserError(f"time-limit must be 0 (none) or more seconds, got {self.time_limit}")
        if self.device == "cpu" and not self.quick and not self.resources:
            raise UserError("device cpu has the tiny sizes alone: add --quick, or use --device cuda or --resources")
        self.names()

    def names(self) -> list[str]:
        """The rooms chosen: a word that is a name means that one, else those that have it in their name.

        Raises:
            UserError: a word that fits none.
        """
        chosen: set[str] = set()
        for word in self.ops:
            found = {word} if word in OPS else {name for name in OPS if word in name}
            if not found:
                hint = suggest(word, OPS) or f"expected some of {', '.join(OPS)}"
                raise UserError(f"unknown kernel {word!r}; {hint}")
            chosen |= found
        return [name for name in OPS if not self.ops or name in chosen]

    def flags(self) -> list[str]:
        """The flags that ask for this again."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            flag = field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        return words

    def command(self) -> str:
        """The command line that asks for this again."""
        return shlex.join(["ramify", "bench", "kernels", *self.flags()])


def parse(argv: Sequence[str]) -> KernelOptions:
    """Options from the flags that ``ramify bench kernels`` has too, by the standard library alone.

    Raises:
        UserError: an unknown flag or a value out of range.
    """
    import argparse

    parser = one_line_parser("python -m ramify.bench.kernels", "Check and time the kernels one by one.")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--ops", nargs="+", default=(), metavar="NAME", help="kernels, or words in their names")
    parser.add_argument("--repeats", type=int, default=10, help="rounds in which every contender is timed once")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="reference compiled")
    parser.add_argument("--resources", action="store_true", help="registers and shared memory; needs no GPU")
    parser.add_argument("--time-limit", type=float, default=0.0, help="seconds after which no line is begun")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for all cores")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--out", type=Path, help="file the JSON lines are appended to")
    parser.add_argument("--seed", type=int, help="seed of the inputs; fresh by default")
    values = vars(parser.parse_args(list(argv)))
    return KernelOptions(**{**values, "ops": tuple(values["ops"])})
