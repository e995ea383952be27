"""What a sweep tells people: the table of fits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from hyptree.lab.published import compare, with_published
from hyptree.tables import show, without_nan

FIT_COLUMNS = {
    "part": "{part}",
    "dist": "{dist}",
    "alpha": "{alpha:g}",
    "density": "{density:g}",
    "gamma": "{gamma:g}",
    "curvature": "{curvature:g}",
    "regime": "{regime}",
    "kept n/m": "{kept_low:.2f}-{kept_high:.2f}",
    "exponent": "{exponent:.3f}",
    "± error": "{error:.3f}",
    "published": "{published_said}",
    "seed sd": "{seed_sd:.3f}",
    "95 %": "{low:.2f}..{high:.2f}",
    "seeds 95 %": "{boot_low:.2f}..{boot_high:.2f}",
    "R2": "{r2:.3f}",
    "from flat": "{change:+.3f}",
    "± its error": "{change_error:.3f}",
    "loss / flat": "{loss_ratio:.3f}",
    "finite-n": "{theory_finite:.3f}",
    "weak": "{theory_weak:.3f}",
    "strong": "{theory_strong:.3f}",
    "models": "{num_models}",
    "diverged": "{num_diverged}",
}

CURVED_COLUMNS = ("curvature", "from flat", "± its error", "loss / flat")
"""Shown where a sweep has curved models: what curvature changes in the exponent and the loss of the same models."""

PUBLISHED_COLUMNS = ("published", "seed sd")
"""Shown where a setting is one of the paper's grid: its exponent, and how much ours scatters from start to start."""

BEST_COLUMNS = {
    "best curvature by width": "{said}",
    **{name: FIT_COLUMNS[name] for name in ("part", "dist", "alpha", "density", "gamma", "exponent", "± error")},
    **{name: FIT_COLUMNS[name] for name in ("95 %", "R2", "from flat", "± its error", "loss / flat")},
}


def print_fits(lines: list[dict[str, Any]], as_json: bool, best: Sequence[dict[str, Any]] = ()) -> None:
    """Fits to the output, for people also those with the best curvature at each width."""
    if as_json:
        print(json.dumps(without_nan(lines)))
        return
    hidden = set(() if any(line["curvature"] for line in lines) else CURVED_COLUMNS)
    if not with_published(lines):
        hidden |= set(PUBLISHED_COLUMNS)
    elif all(math.isnan(line["seed_sd"]) for line in lines):
        hidden.add("seed sd")
    shown = [{**line, "published_said": _with_error(line["published"], line["published_error"])} for line in lines]
    print("\n".join(show(shown, {name: form for name, form in FIT_COLUMNS.items() if name not in hidden})))
    if compared := compare(lines):
        print(compared)
    if best:
        text = [{**line, "said": " ".join(f"{m}:{c:g}" for m, c in line["curvatures"].items())} for line in best]
        print("\n".join(["", *show(text, BEST_COLUMNS)]))
    if dropped := lines[0]["drop_small"] if lines else 0:
        widths = "the smallest width is" if dropped == 1 else f"the {dropped} smallest widths are"
        print(f"{widths} left out of every fit")
    if lost := sum(line["num_diverged"] for line in lines):
        print(f"{lost} diverged models are left out of the fits and marked in the table of runs")


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if math.isnan(error) else f"{value:.2f} ± {error:.2f}"
