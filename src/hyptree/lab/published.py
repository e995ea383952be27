"""The exponents that the paper published for its grid, as numbers, to stand beside ours.

"Superposition Yields Robust Neural Scaling" (Liu, Liu & Gore, arXiv 2505.10465) shows them in figures only. They were
read from two of these:

- figure 6e, 60 points with the standard errors of their fits, from the coordinates of its vector drawing: exact to
  about 0.002;
- figure 4b, a heat map of all 17 alphas by 10 gammas, from its colours, calibrated on these points: where both are
  there, they differ by 0.006 (standard deviation) and 0.013 at most. It has no errors.

Every published exponent is that of one start per width. Starts scatter, at steep data (alpha near 2) by more than the
error of a fit, so one start that lies elsewhere than ours is no contradiction: :func:`agrees` asks how far one start
may lie from ours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hyptree.lab.sweeps.grid import PAPER_ALPHAS, PAPER_GAMMAS, PAPER_WIDTHS

Row = Mapping[str, Any]

_STRONG = (  # figure 6e: a row per alpha, columns gamma -7/9, -5/9, -3/9; each the exponent and its standard error
    ((0.827, 0.082), (0.841, 0.099), (0.793, 0.095)),
    ((0.900, 0.114), (0.862, 0.112), (0.799, 0.098)),
    ((0.845, 0.088), (0.827, 0.088), (0.783, 0.093)),
    ((0.835, 0.086), (0.912, 0.119), (0.788, 0.096)),
    ((0.896, 0.093), (0.891, 0.110), (0.842, 0.098)),
    ((0.926, 0.097), (0.925, 0.101), (0.897, 0.104)),
    ((1.051, 0.120), (0.992, 0.115), (0.844, 0.090)),
    ((1.143, 0.102), (1.041, 0.072), (0.970, 0.078)),
    ((1.184, 0.094), (1.068, 0.078), (0.927, 0.086)),
    ((1.174, 0.068), (1.074, 0.054), (0.954, 0.076)),
    ((1.209, 0.086), (1.301, 0.135), (1.090, 0.070)),
    ((1.184, 0.089), (1.285, 0.047), (1.236, 0.108)),
    ((1.249, 0.056), (1.383, 0.054), (1.496, 0.164)),
    ((1.527, 0.145), (1.404, 0.175), (1.418, 0.156)),
    ((1.436, 0.147), (1.791, 0.187), (1.608, 0.145)),
    ((1.932, 0.084), (1.908, 0.133), (1.870, 0.211)),
    ((2.050, 0.070), (2.200, 0.261), (2.265, 0.151)),
)

_WEAK = {  # figure 6e: (alpha, gamma) of the models that it counts as weak
    (1.25, 0.333): (0.400, 0.052),
    (1.5, 0.333): (0.701, 0.045),
    (1.625, 0.333): (0.673, 0.059),
    (1.625, 0.556): (0.563, 0.127),
    (1.75, 0.333): (0.729, 0.100),
    (1.875, 0.111): (1.032, 0.114),
    (1.875, 0.333): (0.907, 0.155),
    (2.0, 0.111): (1.144, 0.081),
    (2.0, 0.333): (0.954, 0.261),
}

_MAP = (  # figure 4b: a row per alpha, a column per gamma
    (0.83, 0.83, 0.84, 0.79, 0.55, 0.25, 0.22, 0.13, 0.07, 0.07),
    (0.81, 0.89, 0.86, 0.80, 0.58, 0.25, 0.21, 0.13, 0.08, 0.05),
    (0.83, 0.85, 0.83, 0.78, 0.55, 0.27, 0.21, 0.13, 0.08, 0.07),
    (0.86, 0.84, 0.92, 0.79, 0.58, 0.25, 0.18, 0.11, 0.07, 0.05),
    (0.93, 0.89, 0.89, 0.84, 0.61, 0.32, 0.23, 0.11, 0.10, 0.05),
    (0.95, 0.93, 0.93, 0.89, 0.66, 0.35, 0.18, 0.13, 0.10, 0.07),
    (1.07, 1.04, 1.00, 0.85, 0.68, 0.39, 0.22, 0.17, 0.14, 0.10),
    (1.14, 1.15, 1.03, 0.98, 0.73, 0.39, 0.30, 0.22, 0.14, 0.15),
    (1.23, 1.18, 1.06, 0.93, 0.76, 0.44, 0.32, 0.25, 0.15, 0.17),
    (1.17, 1.17, 1.07, 0.96, 0.95, 0.51, 0.39, 0.30, 0.31, 0.11),
    (1.16, 1.20, 1.31, 1.10, 1.11, 0.67, 0.41, 0.39, 0.20, 0.24),
    (1.20, 1.18, 1.29, 1.23, 1.28, 0.72, 0.53, 0.37, 0.31, 0.20),
    (1.57, 1.25, 1.37, 1.49, 1.44, 0.82, 0.69, 0.55, 0.42, 0.42),
    (1.57, 1.53, 1.41, 1.42, 1.66, 0.89, 0.68, 0.56, 0.23, 0.23),
    (1.66, 1.44, 1.80, 1.61, 2.04, 0.95, 0.72, 0.69, 0.51, 0.02),
    (1.29, 1.93, 1.91, 1.87, 2.26, 1.02, 0.91, 0.63, 0.67, 0.17),
    (1.47, 2.05, 2.20, 2.27, 2.42, 1.15, 0.96, 0.86, 0.73, 0.23),
)

_DIGITS = 3
"""Of gamma: -7/9 and -0.778 on the command line are the same setting."""

MAP: dict[tuple[float, float], float] = {
    (alpha, round(gamma, _DIGITS)): exponent
    for alpha, row in zip(PAPER_ALPHAS, _MAP, strict=True)
    for gamma, exponent in zip(PAPER_GAMMAS, row, strict=True)
}
"""(alpha, gamma) to the exponent of figure 4b."""

POINTS: dict[tuple[float, float], tuple[float, float]] = {
    (alpha, round(gamma, _DIGITS)): point
    for alpha, row in zip(PAPER_ALPHAS, _STRONG, strict=True)
    for gamma, point in zip(PAPER_GAMMAS[1:4], row, strict=True)
} | _WEAK
"""(alpha, gamma) to the exponent of figure 6e and its standard error."""

_TRAINED = {
    "n": 1000,
    "dist": "power",
    "density": 1.0,
    "curvature": 0.0,
    "batch": 2048,
    "steps": 20000,
    "lr": 0.01,  # of every width, so that the rule is flat
    "warmup": 0.1,
    "bias_init": "normal",
}
"""How the models of both figures were trained, in columns of a table of runs."""


def published_exponent(models: Sequence[Row]) -> tuple[float, float | None] | None:
    """What the paper has for a setting: the exponent and, for points of figure 6e, its standard error.

    Nothing where the rows that our exponent is fitted to are not exactly the paper's six widths, trained as it did, at
    an alpha and a gamma of its grid; starts and samples may be any.
    """
    is_paper = all(row.get(name) == value for row in models for name, value in _TRAINED.items())
    if not is_paper or {row["m"] for row in models} != set(PAPER_WIDTHS):
        return None
    key = models[0]["alpha"], round(models[0]["gamma"], _DIGITS)
    if key in POINTS:
        return POINTS[key]
    return (MAP[key], None) if key in MAP else None


def scatter(fit: Row) -> float:
    """How far one published start may lie from our exponent: a standard deviation.

    From three seeds on, what our own single starts show: a fresh one differs from the mean of ``num_seeds`` by
    ``seed_sd sqrt(1 + 1 / num_seeds)``. Else the errors of both fits, added in squares; where the published one has
    none, ours counts for both.
    """
    if by_seeds(fit):
        return float(fit["seed_sd"] * math.sqrt(1 + 1 / fit["num_seeds"]))
    theirs = fit["published_error"]
    return math.hypot(fit["error"], theirs if math.isfinite(theirs) else fit["error"])


def by_seeds(fit: Row) -> bool:
    """Whether :func:`scatter` is that of our single starts."""
    return fit["num_seeds"] >= 3 and math.isfinite(fit["seed_sd"])


def agrees(fit: Row) -> bool:
    """Whether the published exponent of a fit lies within twice its :func:`scatter` of ours."""
    return bool(abs(fit["published"] - fit["exponent"]) <= 2 * scatter(fit))


def with_published(fits: Sequence[Row]) -> list[Row]:
    """The fits that have a published exponent beside them."""
    return [fit for fit in fits if math.isfinite(fit["published"])]


def compare(fits: Sequence[Row]) -> str:
    """One line on how far ours are from the published ones, and by which rule they agree; empty without any."""
    chosen = with_published(fits)
    if not chosen:
        return ""
    middle = statistics.median(abs(fit["published"] - fit["exponent"]) for fit in chosen)
    count = f"{len(chosen)} setting{'s' if len(chosen) > 1 else ''}"
    text = [f"published (the paper's, one start each): {count}, median difference {middle:.2f}"]
    for is_by_seeds, rule in (
        (False, "within two standard errors of both fits"),
        (True, "no further from ours than one start scatters (2 seed sd sqrt(1 + 1/seeds), for 3 seeds or more)"),
    ):
        judged = [agrees(fit) for fit in chosen if by_seeds(fit) == is_by_seeds]
        if judged:
            text.append(f"{sum(judged)} of {len(judged)} {rule}")
    return "; ".join(text)
