"""What ``hyptree bench tokens`` can be asked for, and the targets it checks. Imports no torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from benchmarks.options import ClockOptions, ModeOptions
from hyptree.errors import UserError

Linkage = Literal["average", "complete", "single"]
LINKAGES: tuple[Linkage, ...] = ("average", "complete", "single")
Table = Literal["clustering", "models"]
TABLES: tuple[Table, ...] = ("clustering", "models")


@dataclass(frozen=True)
class Target:
    """A number that must not be exceeded, and why it is the one."""

    name: str
    device: str
    table: Table
    linkage: str
    measure: str
    """Key of the measured numbers of a row: ``torch D / sklearn`` is a ratio of times, ``triton D`` milliseconds."""
    at_most: float
    why: str
    batch: int = 0
    """0 for every batch that was measured."""
    tokens: int = 196
    keep: float = 0.5


TARGETS = (
    *(
        Target("T2", "cpu", "clustering", linkage, "torch D / sklearn", limit, why, batch=32)
        for linkage, limit, why in (
            ("complete", 0.5, "a prototype took 0.35 to 0.47 of the scikit-learn loop"),
            ("average", 0.8, "a prototype took 0.57 to 0.78, its sums are float64"),
            ("single", 1.0, "each round reads all distances, so no gain is asked for"),
        )
    ),
    *(
        Target("T3", "cpu", "models", linkage, "atc / plain", 1.0, "else nobody has a reason to merge tokens on a CPU")
        for linkage in LINKAGES
    ),
    Target("T4", "cuda", "clustering", "average", "triton D", 0.3, "ms; a first kernel took 0.45 ms", batch=256),
    Target(
        "T4", "cuda", "clustering", "average", "triton features / tome", 1.5,
        "what takes as long as the fastest rival's matching costs nothing against it", batch=256,
    ),
    *(
        Target(
            "T5", "cuda", "clustering", linkage, "triton features / tome", 2.0,
            "detection and segmentation need thousands of tokens", tokens=tokens,
        )
        for tokens in (576, 1024, 4096)
        for linkage in LINKAGES
    ),
    Target(
        "T4", "cuda", "models", "average", "atc / plain", 1 / 1.5,
        "1.5 times the images per second; by FLOPs 1.9 times would be possible", batch=256,
    ),
    Target("T4", "cuda", "models", "average", "atc / tome", 1.1, "within 10 % at equal token counts", batch=256),
)  # fmt: skip


@dataclass
class TokensOptions(ModeOptions, ClockOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {
        "batches": (1, 2), "tokens": (16,), "keeps": (0.5,), "model": "test_vit", "precision": "autocast",
        "modes": ("eager",), "limit": 0.0, "repeats": 2, "clock": "wall",
    }  # fmt: skip

    tables: tuple[Table, ...] = TABLES
    """clustering: from distances or features to labels. models: images per second of whole models."""
    batches: tuple[int, ...] = (1, 32, 256)
    """Images at once."""
    tokens: tuple[int, ...] = (196, 576, 1024)
    """Patch tokens of an image, squares: 196 is 224 px, 576 is 384 px, 1024 is 512 px."""
    linkages: tuple[Linkage, ...] = LINKAGES
    """Of the agglomerative clustering."""
    keeps: tuple[float, ...] = (0.5, 0.25)
    """Shares of the tokens that are kept; the models take the first one, at three of their blocks."""
    model: str = "deit_small_patch16_224"
    """A timm ViT, with fresh weights; one of its blocks and the whole are timed too."""
    precision: Literal["autocast", "bf16"] = "autocast"
    """Of the models on cuda: float32 weights under autocast to bfloat16, or all in bfloat16. A CPU uses float32."""
    limit: float = 0.0
    """Seconds that one call may take, else it is skipped; 0 for 2 on cpu, 0.5 on cuda, ten times that for models."""
    repeats: int = 7
    seed: int | None = None
    """Seed of features, pictures and weights; a fresh one by default, which the header shows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tables", "batches", "tokens", "linkages", "keeps"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one, or leave it out")
        for count in self.tokens:
            if count < 4 or math.isqrt(count) ** 2 != count:
                raise UserError(f"tokens must be squares of 2 or more, as of a square picture, got {count}")
        if min(self.batches) < 1:
            raise UserError(f"batches must be 1 or more, got {min(self.batches)}")
        for keep in self.keeps:
            if not 0 < keep < 1:
                raise UserError(f"keeps must be between 0 and 1, got {keep:g}")
        if self.limit < 0:
            raise UserError(f"limit must be 0 or more, got {self.limit:g}")

    def longest(self, table: Table) -> float:
        """Seconds that one call may take."""
        return (self.limit or (0.5 if self.device == "cuda" else 2.0)) * (10 if table == "models" else 1)

    def command(self) -> str:
        """The command line that asks for this again."""
        return shlex.join(["hyptree", "bench", "tokens", *self.flags(without=("out",))])
