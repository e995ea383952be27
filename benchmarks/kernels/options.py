"""What ``hyptree bench kernels`` can be asked for; imports no torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from benchmarks.options import BenchOptions
from hyptree.errors import UserError, suggest

OPS = (
    "map_norm", "gelu_grad", "fold_norm", "project_levels", "cluster_patch", "cluster_window", "pairwise_lorentz",
    "pairwise_poincare", "lorentz_mlr", "residual_norm", "heads", "centroid", "pack_weight", "swiglu",
    "dispatch_rows", "merge_points", "cross_entropy", "cosine", "merge", "agglomerate", "tree_reader",
    "latent_decode",
)  # fmt: skip


@dataclass
class KernelOptions(BenchOptions):
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run. A CPU has the tiny sizes alone, and runs kernels by Triton's interpreter (TRITON_INTERPRET=1)."""
    ops: tuple[str, ...] = ()
    """Operations of hyptree.ops to run, all by default; `pairwise` chooses those with the word in their name."""
    repeats: int = 10
    compiled: bool = True
    """Also time the definition through torch.compile, which costs 5 to 10 seconds for each line."""
    resources: bool = False
    """Instead compile the kernels for a Hopper GPU, which need not be there, and print registers and shared memory."""
    time_limit: float = 0.0
    """Seconds after which no further line is begun; 0 for none. What is missing is named."""
    seed: int | None = None
    """Seed of the random inputs; a fresh one by default, which the header shows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.time_limit >= 0:
            raise UserError(f"time-limit must be 0 (none) or more seconds, got {self.time_limit}")
        if self.device == "cpu" and not self.quick and not self.resources:
            raise UserError("device cpu has the tiny sizes alone: add --quick, or use --device cuda or --resources")
        self.names()

    def names(self) -> list[str]:
        """The operations chosen: a word that is a name means that one, else those that have it in their name.

        Raises:
            UserError: a word that fits none.
        """
        chosen: set[str] = set()
        for word in self.ops:
            fitting = {word} if word in OPS else {name for name in OPS if word in name}
            if not fitting:
                hint = suggest(word, OPS) or f"expected some of {', '.join(OPS)}"
                raise UserError(f"unknown kernel {word!r}; {hint}")
            chosen |= fitting
        return [name for name in OPS if not self.ops or name in chosen]

    def command(self) -> str:
        """The command line that asks for this again."""
        return shlex.join(["hyptree", "bench", "kernels", *self.flags()])
