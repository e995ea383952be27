"""One exponent for many families: ``loss = A m^-alpha + B_group``, A and alpha shared, one offset per group.

For losses of language models against their width, a group is a (family, dataset). With alpha fixed the rest is linear,
so the fit is a search along one line; errors come from the full Jacobian, offsets included, and from a bootstrap over
checkpoints (a checkpoint's losses on several datasets are not independent).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.errors import UserError
from hyptree.files import open_packed
from hyptree.lab.fits import bootstrap

GRID = np.linspace(0.02, 4, 200)
"""Exponents that are tried."""


@dataclass(frozen=True)
class SharedFit:
    exponent: float
    error: float
    """Standard error from the Jacobian with ``N - (groups + 2)`` degrees of freedom."""
    scale: float
    offsets: dict[Hashable, float]
    mean_square: float
    """Mean squared residual."""
    low: float
    high: float
    """95 % interval by bootstrap over checkpoints; NaN where none was asked for."""
    num_points: int


def fit_shared(
    m: Sequence[float],
    loss: Sequence[float],
    group: Sequence[Hashable],
    checkpoint: Sequence[Hashable] | None = None,
    draws: int = 0,
    seed: int = 0,
) -> SharedFit:
    """Fit losses against widths.

    Args:
        group: which offset a point has.
        checkpoint: which model a point belongs to, for the bootstrap; by default every point is its own.
        draws: rounds of the bootstrap.
    """
    width, y = np.asarray(m, float), np.asarray(loss, float)
    names = list(dict.fromkeys(group))
    place = np.array([names.index(name) for name in group])
    if len(y) <= len(names) + 2:
        raise ValueError(f"{len(names)} offsets and an exponent need more than {len(names) + 2} points, got {len(y)}")
    if all(len(np.unique(width[place == k])) < 2 for k in range(len(names))):
        raise ValueError("no group has two widths, so nothing tells the exponent from the offsets")
    if draws < 0:
        raise ValueError(f"draws must be 0 or more, got {draws}")
    alpha, scale, offsets, rest = _solve(width, y, place, len(names))
    if not (scale > 0 and GRID[0] + 1e-6 < alpha < GRID[-1] - 1e-6):
        raise ValueError(
            f"no power of the width describes these losses: best is {scale:.3g} m^-{alpha:.3g}, expected a loss that "
            f"falls, with an exponent between {GRID[0]:g} and {GRID[-1]:g}"
        )
    power = width**-alpha
    J = np.column_stack([power, -scale * np.log(width) * power, np.eye(len(names))[place]])
    variance = rest / (len(y) - J.shape[1]) * np.linalg.pinv(J.T @ J)[1, 1]
    low = high = math.nan
    if draws:
        low, high = _bootstrap(width, y, place, list(checkpoint or range(len(y))), draws, seed)
    offset_of = dict(zip(names, offsets.tolist(), strict=True))
    return SharedFit(alpha, math.sqrt(max(0.0, variance)), scale, offset_of, rest / len(y), low, high, len(y))


def read_losses(path: Path | str) -> list[dict[str, Any]]:
    """Rows of a CSV with the columns model, family, dataset, m and loss."""
    columns = ("model", "family", "dataset", "m", "loss")
    with open_packed(path, hint="expected a table of losses") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise UserError(f"{path} has no column {missing[0]!r}; expected {', '.join(columns)}")
        points = []
        for number, row in enumerate(reader, 2):
            try:
                values = {name: float(row[name]) for name in ("m", "loss")}
            except (TypeError, ValueError):
                values = {}
            if not values or not all(0 < value < math.inf for value in values.values()):
                raise UserError(
                    f"{path}: line {number}: m and loss must be positive numbers, got {row['m']!r}, {row['loss']!r}"
                )
            points.append({**row, **values})
    return points


def _bootstrap(
    width: np.ndarray, y: np.ndarray, place: np.ndarray, checkpoint: list[Hashable], draws: int, seed: int
) -> tuple[float, float]:
    members: dict[Hashable, list[int]] = {}
    for i, name in enumerate(checkpoint):
        members.setdefault(name, []).append(i)

    def exponent(points: np.ndarray) -> float | None:
        present, again = np.unique(place[points], return_inverse=True)
        if any(len(np.unique(width[points][again == k])) > 1 for k in range(len(present))):
            return _solve(width[points], y[points], again, len(present))[0]
        return None

    return bootstrap([np.array(places) for places in members.values()], exponent, draws, seed)


def _solve(width: np.ndarray, y: np.ndarray, place: np.ndarray, groups: int) -> tuple[float, float, np.ndarray, float]:
    """Exponent, scale, offsets and the sum of squared residuals."""
    counts = np.bincount(place, minlength=groups)

    def means(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, values, groups) / counts

    y_mean = means(y)
    y_centred = y - y_mean[place]

    def at(alpha: float) -> tuple[float, float, np.ndarray]:
        power = (width / width.min()) ** -alpha  # scaled, so that it does not vanish
        power_mean = means(power)
        centred = power - power_mean[place]
        scale = float(centred @ y_centred / max(centred @ centred, 1e-300))
        rest = y_centred - scale * centred
        return float(rest @ rest), scale, y_mean - scale * power_mean

    # A coarse look finds the valley, halving by the golden ratio its bottom.
    best = int(np.argmin([at(alpha)[0] for alpha in GRID]))
    low, high = GRID[max(0, best - 1)], GRID[min(len(GRID) - 1, best + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if at(left)[0] < at(right)[0] else (left, high)
    alpha = float((low + high) / 2)
    rest, scale, offsets = at(alpha)
    return alpha, scale * float(width.min()) ** alpha, offsets, rest


def width_exponent(
    size_exponent: float = 0.35, size_error: float = 0.02, power: float = 2.52, power_error: float = 0.03
) -> tuple[float, float]:
    """An exponent in the number of parameters as one in the width, where ``parameters ~ width^power``.

    The defaults are Chinchilla's. The errors are independent, so they add in squares.
    """
    error = math.hypot(power * size_error, size_exponent * power_error)
    return power * size_exponent, error
