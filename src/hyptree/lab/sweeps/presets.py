"""Named sweeps: small ones whose outcome is known, and the grids of the paper. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from hyptree.errors import UserError, suggest
from hyptree.lab.sweeps.grid import Grid

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
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; {suggest(name, PRESETS) or 'expected one of ' + ', '.join(PRESETS)}")
    return PRESETS[name]
