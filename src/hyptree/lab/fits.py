"""Exponents with honest errors: power laws by least squares on logarithms, with Student's intervals and bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hyptree.errors import UserError
from hyptree.lab.published import published_exponent
from hyptree.lab.sweeps.run_table import read_runs
from hyptree.lab.theory import finite_exponent, frequencies, strong_exponent, weak_exponent

SETTING = ("part", "n", "dist", "alpha", "density", "gamma", "curvature", "steps", "batch")
"""Columns that models of one exponent share; they differ in width and seed."""

_TWIN = (*(name for name in SETTING if name != "curvature"), "m", "seed")
"""Columns that tell which flat model started like a curved one."""


@dataclass(frozen=True)
class PowerFit:
    """``loss = scale * m^-exponent``, by ordinary least squares on logarithms."""

    exponent: float
    error: float
    """Standard error of the exponent; NaN with two points, which no scatter can be seen in."""
    low: float
    high: float
    """95 % interval, by Student's t."""
    scale: float
    r2: float
    num_points: int


def fit_power(m: Sequence[float] | np.ndarray, loss: Sequence[float] | np.ndarray) -> PowerFit:
    """Fit ``loss`` against ``m``."""
    x, y = np.asarray(m, float), np.asarray(loss, float)
    if len(np.unique(x)) < 2:
        raise ValueError(f"an exponent needs two different widths, got {len(np.unique(x))}")
    if not (np.isfinite(y).all() and (y > 0).all()):
        raise ValueError("losses must be positive and finite; leave diverged models out")
    x, y = np.log(x), np.log(y)
    spread = ((x - x.mean()) ** 2).sum()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
    intercept = y.mean() - slope * x.mean()
    residual = ((y - intercept - slope * x) ** 2).sum()
    total = ((y - y.mean()) ** 2).sum()
    freedom = len(x) - 2
    error = math.sqrt(residual / freedom / spread) if freedom > 0 else math.nan
    half = student_quantile(0.5 + 0.95 / 2, freedom) * error if freedom > 0 else math.nan
    r2 = 1 - residual / total if total > 0 else math.nan
    exponent = -float(slope)
    return PowerFit(exponent, error, exponent - half, exponent + half, math.exp(intercept), float(r2), len(x))


def bootstrap(
    groups: Sequence[np.ndarray], exponent: Callable[[np.ndarray], float | None], draws: int, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of an exponent when whole groups of points are drawn anew with replacement.

    Args:
        groups: the places of each group's points.
        exponent: of the points at some places; None where they have none, which then do not count.
    """
    rng = np.random.default_rng(seed)
    drawn = (np.concatenate([groups[k] for k in rng.integers(len(groups), size=len(groups))]) for _ in range(draws))
    exponents = [value for places in drawn if (value := exponent(places)) is not None]
    if not exponents:
        return math.nan, math.nan
    low, high = np.quantile(exponents, [0.5 - 0.95 / 2, 0.5 + 0.95 / 2])
    return float(low), float(high)


def bootstrap_exponent(m: np.ndarray, loss: np.ndarray, seeds: np.ndarray, draws: int = 1000) -> tuple[float, float]:
    """Interval of the exponent over whole seeds: how much the start matters."""

    def exponent(places: np.ndarray) -> float | None:
        return fit_power(m[places], loss[places]).exponent if len(np.unique(m[places])) > 1 else None

    return bootstrap([np.flatnonzero(seeds == name) for name in np.unique(seeds)], exponent, draws)


def seed_deviation(m: np.ndarray, loss: np.ndarray, seeds: np.ndarray) -> float:
    """Standard deviation of the exponent over fits of one seed each: how much one start scatters.

    Seeds that miss a width, because a model diverged, are left out: their exponent is one of other widths. NaN where
    fewer than two are left.
    """
    widths = np.unique(m)
    apart = [(m[seeds == name], loss[seeds == name]) for name in np.unique(seeds)]
    exponents = [fit_power(x, y).exponent for x, y in apart if len(np.unique(x)) == len(widths) > 1]
    return float(np.std(exponents, ddof=1)) if len(exponents) > 1 else math.nan


def fit(
    runs: Path | str, drop_small: int = 0, loss: str = "loss_eval", say: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """The exponents of a sweep: :func:`fit_runs` on what ``read_runs`` reads in its folder."""
    return fit_runs(read_runs(runs, say), drop_small, loss)


def fit_runs(rows: Sequence[Mapping[str, Any]], drop_small: int = 0, loss: str = "loss_eval") -> list[dict[str, Any]]:
    """One row per setting of a table of runs: its exponent, the regime check, and what theory says.

    A diverged model is left out of the fit and counted in ``num_diverged``. The label ``weak`` or ``strong`` is given
    only where every model of the fit has it, else ``mixed``; ``kept_low`` and ``kept_high`` are the least and the most
    of ``phi_half n / m``, the represented features per dimension. ``widths``, ``drop_small`` and ``loss`` say what was
    fitted.

    ``error`` is that of one fit through all seeds; ``seed_sd`` is how much the exponent of a single seed scatters (NaN
    for one seed). Where the setting is one of the paper's grid, ``published`` is the exponent of the paper, of one
    start, and ``published_error`` its standard error where it was published too (:mod:`hyptree.lab.published`).

    Where the same models were also trained flat, ``change`` is how much curvature adds to the exponent: the exponent of
    the ratio of their losses. Start and samples are the same, so their noise cancels and ``change_error`` is often less
    than the errors of the two exponents. ``loss_ratio`` is the geometric mean of the ratio.

    Args:
        drop_small: how many of the smallest widths to leave out.
        loss: ``loss_eval`` or ``loss_train``.
    """
    if loss not in ("loss_eval", "loss_train"):
        raise UserError(f"loss must be loss_eval or loss_train, got {loss!r}")
    if drop_small < 0:
        raise UserError(f"drop-small must be 0 or more, got {drop_small}")
    rows = [{"curvature": 0.0, **row} for row in rows]
    settings: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        settings.setdefault(_key(row, SETTING), []).append(row)
    flat = {_key(row, _TWIN): row[loss] for row in rows if row["curvature"] == 0 and not row["diverged"]}
    return [_fit_setting(models, flat, drop_small, loss) for models in settings.values()]


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """NaN (the alpha of other shapes) is not equal to itself, so it cannot be part of a key."""
    return tuple(None if row[name] != row[name] else row[name] for name in names)


def best_curvatures(
    rows: Sequence[Mapping[str, Any]], drop_small: int = 0, loss: str = "loss_eval"
) -> list[dict[str, Any]]:
    """For each setting with several curvatures: the best one of those tried at each width, and the exponent with them.

    ``curvatures`` maps widths to the curvature whose loss, in the geometric mean over seeds, is the least there.
    """
    rows = [row for row in rows if not row["diverged"]]
    flat = {_key(row, _TWIN): row[loss] for row in rows if row["curvature"] == 0}
    names = [name for name in SETTING if name != "curvature"]
    settings: dict[tuple[Any, ...], dict[int, dict[float, list[Mapping[str, Any]]]]] = {}
    for row in rows:
        of_width = settings.setdefault(_key(row, names), {}).setdefault(row["m"], {})
        of_width.setdefault(row["curvature"], []).append(row)
    lines = []
    for by_width in settings.values():
        widths = sorted(by_width)[drop_small:]
        if len(widths) < 2 or max(len(by_width[m]) for m in widths) < 2:
            continue
        chosen = [
            min(by_width[m].values(), key=lambda some: np.log([row[loss] for row in some]).mean()) for m in widths
        ]
        used = [row for some in chosen for row in some]
        fit = fit_power([row["m"] for row in used], [row[loss] for row in used])
        curvatures = {m: some[0]["curvature"] for m, some in zip(widths, chosen, strict=True)}
        line = {name: used[0][name] for name in names} | {"curvatures": curvatures}
        line |= {name: getattr(fit, name) for name in ("exponent", "error", "low", "high", "r2")}
        lines.append(line | _change(used, flat, loss))
    return lines


def _change(curved: Sequence[Mapping[str, Any]], flat: Mapping[tuple[Any, ...], float], loss: str) -> dict[str, float]:
    """How the exponent and the loss of models differ from those of their flat twins; nothing for flat ones."""
    change = dict.fromkeys(("change", "change_error", "loss_ratio"), math.nan)
    pairs = [(row["m"], row[loss] / flat[key]) for row in curved if (key := _key(row, _TWIN)) in flat]
    if any(row["curvature"] for row in curved) and len({m for m, _ in pairs}) > 1:
        m, ratio = np.array(pairs).T
        fit = fit_power(m, ratio)
        change = {"change": fit.exponent, "change_error": fit.error, "loss_ratio": float(np.exp(np.log(ratio).mean()))}
    return change


def _fit_setting(
    models: Sequence[Mapping[str, Any]], flat: Mapping[tuple[Any, ...], float], drop_small: int, loss: str
) -> dict[str, Any]:
    widths = sorted({row["m"] for row in models})[drop_small:]
    asked = [row for row in models if row["m"] in widths]
    used = [row for row in asked if not row["diverged"]]
    first = models[0]
    line: dict[str, Any] = {name: first[name] for name in SETTING}
    regimes = {row["regime"] for row in used}
    kept = [row["phi_half"] * row["n"] / row["m"] for row in used]
    line |= {
        "regime": regimes.pop() if len(regimes) == 1 else "mixed" if regimes else "none",
        "kept_low": min(kept, default=math.nan),
        "kept_high": max(kept, default=math.nan),
        "num_models": len(used),
        "num_diverged": len(asked) - len(used),
        "num_seeds": len({row["seed"] for row in used}),
        "widths": " ".join(map(str, widths)),
        "drop_small": drop_small,
        "loss": loss,
    }
    m, losses, seeds = (np.array([row[name] for row in used]) for name in ("m", loss, "seed"))
    nothing = dict.fromkeys(("exponent", "error", "low", "high", "r2"), math.nan)
    if len(np.unique(m)) > 1:
        fit = fit_power(m, losses)
        nothing = {name: getattr(fit, name) for name in nothing}
    line |= nothing
    enough = line["num_seeds"] >= 3 and len(np.unique(m)) > 1
    line["boot_low"], line["boot_high"] = bootstrap_exponent(m, losses, seeds) if enough else (math.nan, math.nan)
    line["seed_sd"] = seed_deviation(m, losses, seeds)
    published, error = published_exponent(used) or (math.nan, None)
    line["published"], line["published_error"] = published, math.nan if error is None else error
    p = frequencies(first["n"], first["alpha"], first["density"], first["dist"])
    is_power = first["dist"] == "power"
    line["theory_finite"] = finite_exponent(p, widths) if len(widths) > 1 and widths[-1] < first["n"] else math.nan
    line["theory_weak"] = weak_exponent(first["alpha"]) if is_power else math.nan
    line["theory_strong"] = strong_exponent(first["alpha"]) if is_power else 1.0
    return line | _change(used, flat, loss)


@cache  # a bootstrap asks thousands of times
def student_quantile(chance: float, freedom: int) -> float:
    """Quantile of Student's t, above the median, by halving on the closed form for whole degrees of freedom."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < chance:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < chance else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    """Chance that Student's t lies below ``t >= 0``: a finite series in the angle ``atan(t / sqrt(freedom))``."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    middle = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + middle / 2
