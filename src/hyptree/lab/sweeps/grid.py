"""What a sweep trains: the grid, its models, their learning rates, the schedule; named sweeps. Imports no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from hyptree.errors import UserError, require_known, require_one_of
from hyptree.files import path_inside
from hyptree.lab.theory import frequencies


@dataclass(frozen=True, order=True)
class Model:
    """One toy model: all that its numbers depend on beside the grid's training settings."""

    n: int
    m: int
    dist: str
    alpha: float
    density: float
    gamma: float
    seed: int
    curvature: float = 0.0

    @property
    def init_seed(self) -> int:
        """64 bits from this model's own settings, so that its start does not depend on its neighbours.

        Curvature plays no part: models that differ in nothing else start alike, so that they can be compared in pairs.
        """
        names = [field.name for field in fields(self) if field.name != "curvature"]
        text = json.dumps([getattr(self, name) for name in names])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Grid:
    """Models that train on the same stream: every width, exponent, decay, density, curvature and seed of the lists."""

    name: str = "grid"
    """Names the part in tables and files."""
    n: int = 256
    """Features."""
    m: tuple[int, ...] = (5, 8, 12, 18, 28, 44)
    """Widths."""
    dist: Literal["power", "exponential", "linear"] = "power"
    """Shape of the feature frequencies; alpha counts for power only."""
    alpha: tuple[float, ...] = (0.0, 1.0, 2.0)
    """Exponents of the feature frequencies."""
    gamma: tuple[float, ...] = (-1.0, 0.2)
    """Decay of rows: positive shrinks them, negative pulls their norm to one."""
    density: tuple[float, ...] = (1.0,)
    """Expected active features per sample."""
    curvature: tuple[float, ...] = (0.0,)
    """Features live in hyperbolic space of curvature minus this; 0 is the flat model of the paper."""
    seeds: int = 1
    """Starts per setting."""
    seed: int = 0
    """First seed."""
    data_seed: int = 0
    """Seed of the stream that all models see."""
    batch: int = 256
    """Samples per step."""
    steps: int = 1600
    """Steps of Adam."""
    lr: float = 0.02
    """Learning rate at its peak."""
    lr_rule: Literal["flat", "width"] = "flat"
    """flat: lr for all. width: lr (8/m)^(1/4) for weights and 2/m for biases."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    bias_init: Literal["normal", "zero"] = "normal"
    """Where biases start."""
    eval_samples: int = 65536
    """Fresh samples for the final loss."""

    def __post_init__(self) -> None:
        path_inside("parts", self.name, "name")
        for name in ("m", "alpha", "gamma", "density", "curvature"):
            values = getattr(self, name)
            if not values:
                raise UserError(f"{name} is empty; give at least one value")
            if len(set(values)) != len(values):
                raise UserError(f"{name} names a value twice: {' '.join(map(str, values))}")
            if not all(math.isfinite(value) for value in values):
                raise UserError(f"{name} must be finite numbers, got {' '.join(map(str, values))}")
        for name in ("n", "seeds", "batch", "steps", "eval_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if min(self.m) < 1 or max(self.m) > self.n:
            raise UserError(f"m must be between 1 and n = {self.n}, got {' '.join(map(str, self.m))}")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise UserError(f"lr must be positive, got {self.lr}")
        if not 0 <= self.warmup < 1:
            raise UserError(f"warmup is a share of the steps, expected 0 up to below 1, got {self.warmup}")
        if min(self.density) <= 0:
            raise UserError(f"density must be positive, got {min(self.density):g}")
        if min(self.curvature) < 0:
            raise UserError(
                f"curvature must be 0 (flat) or more, got {min(self.curvature):g}; 1 means a space of curvature -1"
            )
        require_one_of("lr_rule", self.lr_rule, ("flat", "width"))
        require_one_of("bias_init", self.bias_init, ("normal", "zero"))
        for alpha, density in self.groups():
            frequencies(self.n, alpha, density, self.dist)  # raises where a chance is above 1

    def groups(self) -> list[tuple[float, float]]:
        """The distinct (alpha, density): models of one group see the same samples."""
        alphas = self.alpha if self.dist == "power" else (0.0,)
        return list(itertools.product(alphas, self.density))

    def models(self) -> list[Model]:
        """Every model of the grid: by width, then group, then decay, then curvature, then seed."""
        return [
            Model(self.n, m, self.dist, alpha, density, gamma, seed, curvature)
            for m in self.m
            for alpha, density in self.groups()
            for gamma in self.gamma
            for curvature in self.curvature
            for seed in range(self.seed, self.seed + self.seeds)
        ]

    def learning_rates(self, m: int) -> tuple[float, float]:
        """Peak learning rates of weights and biases for a width."""
        return (self.lr * (8 / m) ** 0.25, 2 / m) if self.lr_rule == "width" else (self.lr, self.lr)

    @property
    def tail(self) -> int:
        """How many last steps the training loss is the mean of: 5 %."""
        return max(1, round(0.05 * self.steps))

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Grid:
        """What :meth:`as_dict` gave."""
        settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**settings)


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate at a step counted from 0: linear rise, then half a cosine down to 5 %."""
    s, warm = step + 1, round(warmup * steps)
    if s < warm:
        return s / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (s - warm) / max(1, steps - warm)))


SMALL_WIDTHS = (5, 8, 12, 18, 28, 44)
PAPER_WIDTHS = (10, 15, 25, 39, 63, 100)
PAPER_GAMMAS = tuple(round(-1 + 2 * k / 9, 12) for k in range(10))
PAPER_ALPHAS = tuple(k / 8 for k in range(17))

_SMALL = Grid(n=256, m=SMALL_WIDTHS, batch=256, lr=0.02, warmup=0.1)
_STRONG = replace(_SMALL, gamma=(-1.0,), bias_init="zero")
_WEAK = replace(_SMALL, gamma=(0.2,), bias_init="normal")
_PAPER = Grid(
    n=1000, m=PAPER_WIDTHS, alpha=PAPER_ALPHAS, gamma=PAPER_GAMMAS, batch=2048, steps=20000, lr=1e-2, warmup=0.1
)  # fmt: skip
_CURVED_STRONG = replace(_STRONG, curvature=(0.0, 0.25, 1.0, 4.0))
_CURVED_PAPER = replace(
    _PAPER, alpha=(0.0, 0.5, 1.0, 1.5, 2.0), curvature=(0.0, 0.1, 0.5, 1.0, 2.0, 4.0), seeds=3, steps=10000
)  # fmt: skip
_WIDE = Grid(
    n=10240,
    m=(8, 16, 32, 64, 128, 256, 512, 1024),
    alpha=(1.2,),
    gamma=(-1.0, 0.1),
    batch=8192,
    steps=40000,
    lr=0.02,
    lr_rule="width",
    warmup=0.05,
)
# Where the most frequent feature is in every sample: 1 / p_1 of i^-1 over a thousand features.
_TOP_DENSITY = math.fsum(1 / i for i in range(1, 1001))

PRESETS: dict[str, tuple[Grid, ...]] = {
    # Flat data needs more features: with 256, widths reach a sixth of them and the exponent comes out too high.
    "smoke": (
        replace(_STRONG, name="strong-flat", n=640, m=(8, 12, 19, 31, 50), alpha=(0.0, 0.5), steps=600),
        replace(_STRONG, name="strong-skewed", alpha=(2.0,), steps=800, seeds=2),
        replace(_WEAK, name="weak", alpha=(1.5, 2.0), steps=2000),
    ),
    # Biases start at zero where rows grow and as in the paper where they decay: in short trainings, normal biases hold
    # strong superposition back, and zero ones keep a gamma of 0.2 from being weak.
    "quick": (
        replace(_STRONG, name="strong", alpha=(0.0, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0), steps=1600, seeds=3),
        replace(_WEAK, name="weak", alpha=(0.0, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0), steps=1600, seeds=3),
    ),
    # Beyond the paper: the same starts and samples in spaces of several curvatures. Where rows grow, biases start at
    # zero: curvature shrinks what a feature says of itself, so more of the normal ones would be dead from the start.
    "curvature": (
        replace(_CURVED_STRONG, name="strong-flat", n=640, m=(8, 12, 19, 31, 50), alpha=(0.0,), steps=600),
        replace(_CURVED_STRONG, name="strong-skewed", alpha=(2.0,), steps=800, seeds=2),
        replace(_WEAK, name="weak", alpha=(1.5,), steps=2000, curvature=_CURVED_STRONG.curvature),
    ),
    "curvature-grid": (
        replace(_CURVED_PAPER, name="strong", gamma=(-1.0,), bias_init="zero"),
        replace(_CURVED_PAPER, name="weak", gamma=(PAPER_GAMMAS[6],)),
    ),
    "paper-grid": (replace(_PAPER, name="grid"),),
    "paper-density": (
        replace(_PAPER, name="density", alpha=(1.0,), density=tuple(1 + k * (_TOP_DENSITY - 1) / 8 for k in range(9))),
    ),
    "paper-wide": (
        replace(_WIDE, name="wide-power"),
        replace(_WIDE, name="wide-exponential", dist="exponential"),
        replace(_WIDE, name="wide-linear", dist="linear"),
    ),
}


def preset(name: str) -> tuple[Grid, ...]:
    """The parts of a named sweep."""
    require_known("unknown preset {!r}", [name], PRESETS)
    return PRESETS[name]
